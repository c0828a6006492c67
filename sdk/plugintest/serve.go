package plugintest

import (
	"context"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	"github.com/numinance/numinance/sdk"
)

// SpecVersion is the newest spec version this package speaks as a host.
const SpecVersion = "1.2.0"

// Options say what the plugin is opened with. The zero value is a host that
// offers every capability of the manifest and an empty configuration.
type Options struct {
	// Config is the provider's configuration, one JSON object.
	Config []byte
	// DataDir is the plugin's directory; empty means a new one under t.TempDir.
	DataDir string
	// SpecVersion is what the host speaks; empty means SpecVersion.
	SpecVersion string
	// Capabilities is what the host offers; nil means all of the manifest.
	Capabilities []string
	// Host answers the plugin; nil means a new Host.
	Host *Host
}

// Serve opens p and returns a connection for stock clients. It fails the test if
// the plugin refuses the handshake, and stops the plugin at the end of the test.
func Serve(t testing.TB, p sdk.Plugin, o Options) *Conn {
	t.Helper()
	c, err := Open(t, p, o)
	if err != nil {
		t.Fatalf("open plugin %s: %v", p.Manifest.GetExtensionId(), err)
	}
	return c
}

// Open is Serve for tests that expect the handshake to be refused.
func Open(t testing.TB, p sdk.Plugin, o Options) (*Conn, error) {
	t.Helper()
	if o.DataDir == "" {
		o.DataDir = t.TempDir()
	}
	if o.SpecVersion == "" {
		o.SpecVersion = SpecVersion
	}
	if o.Capabilities == nil {
		o.Capabilities = p.Manifest.GetCapabilities()
	}
	if o.Host == nil {
		o.Host = &Host{}
	}
	o.Host.manifest = p.Manifest

	hostSrv := grpc.NewServer(grpc.MaxRecvMsgSize(8 << 20))
	pluginv1.RegisterHostServiceServer(hostSrv, o.Host)
	hostConn := serve(t, hostSrv)

	svc, err := sdk.NewService(p, hostConn)
	if err != nil {
		return nil, err
	}
	pluginSrv := grpc.NewServer(grpc.MaxRecvMsgSize(8 << 20))
	pluginv1.RegisterPluginServiceServer(pluginSrv, svc)
	client := pluginv1.NewPluginServiceClient(serve(t, pluginSrv))

	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	hs, err := client.Handshake(ctx, &pluginv1.HandshakeRequest{
		SpecVersion:   o.SpecVersion,
		Capabilities:  o.Capabilities,
		Config:        o.Config,
		DataDirectory: o.DataDir,
	})
	if err != nil {
		return nil, err
	}
	return &Conn{Host: o.Host, DataDir: o.DataDir, Handshake: hs, client: client}, nil
}

// serve serves srv in memory until the test ends and returns a connection to it.
func serve(t testing.TB, srv *grpc.Server) *grpc.ClientConn {
	t.Helper()
	l := bufconn.Listen(1 << 20)
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	conn, err := grpc.NewClient("passthrough:///in-memory",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(8<<20), grpc.MaxCallSendMsgSize(8<<20)))
	if err != nil {
		t.Fatalf("connect in memory: %v", err)
	}
	t.Cleanup(func() {
		conn.Close()
		srv.Stop()
		<-served
	})
	return conn
}
