package sdk

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
)

// The two variables a plugin is started with. Both are absolute paths of unix
// sockets; the plugin listens on the first and finds the host at the second.
const (
	EnvPluginSocket = "NUMI_PLUGIN_SOCKET"
	EnvHostSocket   = "NUMI_HOST_SOCKET"
)

// MaxMessage bounds one message in either direction, in bytes, besides the
// envelope around it. The host refuses more (P-032).
const MaxMessage = 4 << 20

// envelope is what Invoke adds around a message of MaxMessage bytes: context,
// evidence payloads and type names.
const envelope = 2 << 20

// Plugin is one implementation of one port.
type Plugin struct {
	// Manifest is what the plugin claims about itself. The host pins its
	// digest, so it must be the same in every process of this version.
	Manifest *pluginv1.Manifest
	// Open is called once, after the host and the plugin have agreed on a
	// version and capabilities, and returns how to register the port's service.
	// An error refuses the handshake.
	Open func(ctx context.Context, s *Session) (Register, error)
}

// Register registers stock service implementations, as with any gRPC server.
type Register func(grpc.ServiceRegistrar)

// Session is what the host gave this process of the plugin.
type Session struct {
	// Config is the provider's configuration as one JSON object; it may be empty.
	Config []byte
	// DataDir is the one directory the plugin may keep state in; empty if none.
	DataDir string
	// SpecVersion is the agreed spec version, such as 1.0.0.
	SpecVersion string
	// Capabilities are the agreed capabilities, sorted.
	Capabilities []string
	// Host asks the host; its calls fail with UNAVAILABLE where there is none.
	Host *Host

	effects *Effects
}

// Effects is the session's durable memory of effects, kept in DataDir; see Once.
// Without a DataDir every use of it fails with FAILED_PRECONDITION.
func (s *Session) Effects() *Effects { return s.effects }

// Serve serves p on the socket named by NUMI_PLUGIN_SOCKET until ctx is done or
// the process is told to stop, and removes the socket. Standard output is never
// part of the protocol; a plugin may print to it.
func Serve(ctx context.Context, p Plugin) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	path := os.Getenv(EnvPluginSocket)
	if path == "" {
		return fmt.Errorf("%s is not set: a plugin is started by the host, or by hand with the two variables that `numi plugin attach` prints", EnvPluginSocket)
	}
	host, closeHost, err := dialHost(os.Getenv(EnvHostSocket))
	if err != nil {
		return err
	}
	defer closeHost()
	l, err := listen(path)
	if err != nil {
		return err
	}
	// Removes the socket, which the listener owns, on every way out.
	defer l.Close()
	return ServeListener(ctx, p, l, host)
}

// ServeListener is Serve on a given listener with a given connection to the
// host, which may be nil. It closes l.
func ServeListener(ctx context.Context, p Plugin, l net.Listener, host grpc.ClientConnInterface) error {
	svc, err := NewService(p, host)
	if err != nil {
		l.Close()
		return err
	}
	srv := grpc.NewServer(
		grpc.MaxRecvMsgSize(MaxMessage+envelope),
		grpc.MaxSendMsgSize(MaxMessage+envelope),
	)
	pluginv1.RegisterPluginServiceServer(srv, svc)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve plugin %s: %w", p.Manifest.GetExtensionId(), err)
	case <-ctx.Done():
	}
	// Calls in flight get a moment; the host gives up on them in any case.
	drained := make(chan struct{})
	go func() { srv.GracefulStop(); close(drained) }()
	timer := time.NewTimer(2 * time.Second)
	defer timer.Stop()
	select {
	case <-drained:
	case <-timer.C:
		srv.Stop()
		<-drained
	}
	<-served
	return nil
}

// listen makes the socket with mode 0600. A socket that a killed plugin left
// behind is replaced; one that still answers, or anything that is no socket, is
// an error.
func listen(path string) (*net.UnixListener, error) {
	if st, err := os.Lstat(path); err == nil {
		if st.Mode()&os.ModeSocket == 0 {
			return nil, fmt.Errorf("listen on %s: there is something that is no socket", path)
		}
		c, err := net.DialTimeout("unix", path, time.Second)
		if err == nil {
			c.Close()
			return nil, fmt.Errorf("listen on %s: another process serves it", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove the socket a former process left: %w", err)
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	// The mode must hold from the first moment; a chmod afterwards leaves a gap.
	old := syscall.Umask(0o177)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	syscall.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("listen for the host: %w", err)
	}
	return l, nil
}

// dialHost returns a connection that dials on first use, or nil if path is empty.
func dialHost(path string) (grpc.ClientConnInterface, func(), error) {
	if path == "" {
		return nil, func() {}, nil
	}
	c, err := grpc.NewClient("passthrough:///numinance-host",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage+envelope), grpc.MaxCallSendMsgSize(MaxMessage+envelope)),
	)
	if err != nil {
		return nil, nil, fmt.Errorf("reach the host at %s: %w", path, err)
	}
	return c, func() { c.Close() }, nil
}
