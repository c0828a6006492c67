package pluginhost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/strict"
	"github.com/numinance/numinance/internal/host/dispatch"
)

// Limits of what a plugin may send.
const (
	// MaxMessage bounds a request, an event and an answer, in bytes (P-032).
	MaxMessage = 4 << 20
	// MaxEvents bounds the events of one streaming verb.
	MaxEvents = 1024

	// envelope is what is around a message: context, 32 receipts of 32 KiB.
	envelope = 2 << 20

	defaultStart = 10 * time.Second
)

// Config says what to start and what to expect of it.
type Config struct {
	Launcher Launcher
	Expect   Expectation
	// Settings is the provider's configuration as one JSON object, or empty.
	Settings []byte
	// Host makes what answers the plugin's calls to the host; nil answers
	// UNIMPLEMENTED to everything.
	Host func(*Plugin) pluginv1.HostServiceServer
	// StartTimeout bounds launch and handshake together; 0 is 10 s.
	StartTimeout time.Duration
	// Checker holds the bounds of the contract; nil makes one.
	Checker *strict.Checker
}

// Plugin is a running plugin, from Start, which shakes hands with it, to Close or
// its own end. After either every Invoke fails with UNAVAILABLE at once. It is
// safe for concurrent use and implements dispatch.Provider.
type Plugin struct {
	link       *Link
	conn       *grpc.ClientConn
	client     pluginv1.PluginServiceClient
	host       *grpc.Server
	hostServed chan struct{}
	checker    *strict.Checker

	manifest   *pluginv1.Manifest
	facts      policy.ProviderFacts
	negotiated dispatch.Negotiated
	allowed    map[string]bool // by method
	refs       references

	closeOnce sync.Once
	closeErr  error
	closed    chan struct{}
}

// Start launches a plugin and shakes hands with it. After an error nothing of it
// is left.
func Start(ctx context.Context, c Config) (p *Plugin, err error) {
	name := c.Expect.Extension
	if name == "" {
		name = c.Expect.Port
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("start plugin %s: %w", name, err)
		}
	}()
	if c.Launcher == nil {
		return nil, errors.New("no launcher")
	}
	if c.StartTimeout <= 0 {
		c.StartTimeout = defaultStart
	}
	if c.Checker == nil {
		if c.Checker, err = strict.New(); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, c.StartTimeout)
	defer cancel()
	link, err := c.Launcher.Launch(ctx)
	if err != nil {
		return nil, err
	}
	p = &Plugin{link: link, checker: c.Checker, closed: make(chan struct{}), hostServed: make(chan struct{})}
	p.serveHost(c.Host)
	p.conn, err = grpc.NewClient("passthrough:///plugin",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return link.Dial(ctx) }),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage+envelope), grpc.MaxCallSendMsgSize(MaxMessage+envelope)),
	)
	if err == nil {
		p.client = pluginv1.NewPluginServiceClient(p.conn)
		err = p.handshake(ctx, c)
	}
	if err != nil {
		why := ""
		if link.Why != nil {
			why = link.Why()
		}
		cerr := p.Close()
		if why != "" {
			err = fmt.Errorf("%w; %s", err, why)
		}
		return nil, errors.Join(err, cerr)
	}
	return p, nil
}

// serveHost answers the plugin on its own socket.
func (p *Plugin) serveHost(make func(*Plugin) pluginv1.HostServiceServer) {
	var svc pluginv1.HostServiceServer = pluginv1.UnimplementedHostServiceServer{}
	if make != nil {
		svc = make(p)
	}
	p.host = grpc.NewServer(grpc.MaxRecvMsgSize(MaxMessage), grpc.MaxConcurrentStreams(256))
	pluginv1.RegisterHostServiceServer(p.host, svc)
	go func() {
		defer close(p.hostServed)
		// Ends with Close, or with the listener's run; neither is news.
		_ = p.host.Serve(p.link.Host)
	}()
}

func (p *Plugin) handshake(ctx context.Context, c Config) error {
	ctx, stop := p.untilEnd(ctx)
	defer stop()
	r, err := p.client.Handshake(ctx, &pluginv1.HandshakeRequest{
		SpecVersion:   SpecVersion,
		Capabilities:  Capabilities(c.Expect.Port),
		Config:        c.Settings,
		DataDirectory: p.link.DataDir,
	}, grpc.WaitForReady(true))
	if err != nil {
		switch {
		case p.gone():
			return errors.New("it ended before it answered the handshake")
		case status.Code(err) == codes.DeadlineExceeded:
			return fmt.Errorf("it did not answer the handshake within %s", c.StartTimeout)
		}
		return fmt.Errorf("handshake: %w", err)
	}
	if err := known(r.ProtoReflect()); err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	if err := p.checker.Bounds(r); err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	if p.negotiated, err = agree(c.Expect, r); err != nil {
		return err
	}
	p.manifest = r.GetManifest()
	p.allowed = map[string]bool{}
	for _, v := range p.negotiated.Verbs {
		p.allowed[v] = true
	}
	d, err := ManifestDigest(p.manifest)
	if err != nil {
		return err
	}
	p.facts = policy.ProviderFacts{
		Extension:   p.manifest.GetExtensionId(),
		Origin:      c.Expect.Origin,
		Manifest:    d,
		Egress:      p.manifest.GetEgressHosts(),
		Credentials: p.manifest.GetCredentialIntents(),
	}
	return nil
}

// Facts implements dispatch.Provider.
func (p *Plugin) Facts() policy.ProviderFacts { return p.facts }

// Negotiated implements dispatch.Provider.
func (p *Plugin) Negotiated() dispatch.Negotiated { return p.negotiated }

// Manifest returns a copy of the plugin's manifest.
func (p *Plugin) Manifest() *pluginv1.Manifest { return proto.CloneOf(p.manifest) }

// Jail says in plain words what confines the plugin.
func (p *Plugin) Jail() string { return p.link.Jail }

// Ended is closed when the plugin is gone.
func (p *Plugin) Ended() <-chan struct{} { return p.link.Ended }

// Resolvable reports whether the plugin may read the blob now: a call that is
// under way carries a reference to it that this port may resolve (P-130).
func (p *Plugin) Resolvable(d digest.Digest) bool { return p.refs.holds(d) }

func (p *Plugin) gone() bool {
	select {
	case <-p.link.Ended:
		return true
	case <-p.closed:
		return true
	default:
		return false
	}
}

// untilEnd returns a context that ends with the plugin.
func (p *Plugin) untilEnd(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		select {
		case <-p.link.Ended:
		case <-p.closed:
		case <-done:
		}
		cancel()
	}()
	return ctx, sync.OnceFunc(func() { close(done) })
}

// Close ends the plugin with everything it started. Calls in flight end
// UNAVAILABLE.
func (p *Plugin) Close() error {
	p.closeOnce.Do(func() {
		close(p.closed)
		if p.conn != nil {
			p.conn.Close()
		}
		p.closeErr = p.link.Close()
		p.host.Stop()
		<-p.hostServed
	})
	return p.closeErr
}

var _ io.Closer = (*Plugin)(nil)
var _ dispatch.Provider = (*Plugin)(nil)
