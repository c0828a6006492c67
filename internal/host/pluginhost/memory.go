package pluginhost

import (
	"context"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
)

// Memory launches a plugin inside this process, over the same wire. It is for
// tests and for providers that belong to the trusted base: nothing confines it.
type Memory struct {
	// New makes the plugin's side; host is its connection to the host.
	New func(host grpc.ClientConnInterface) (pluginv1.PluginServiceServer, error)
	// DataDir is what the plugin may write to; empty if nothing.
	DataDir string
}

const memoryBuffer = 1 << 20

// Launch implements Launcher.
func (m Memory) Launch(context.Context) (*Link, error) {
	hostSide := bufconn.Listen(memoryBuffer)
	conn, err := grpc.NewClient("passthrough:///host",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return hostSide.DialContext(ctx) }),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage+envelope), grpc.MaxCallSendMsgSize(MaxMessage+envelope)),
	)
	if err != nil {
		return nil, err
	}
	svc, err := m.New(conn)
	if err != nil {
		conn.Close()
		return nil, err
	}
	srv := grpc.NewServer(grpc.MaxRecvMsgSize(MaxMessage+envelope), grpc.MaxSendMsgSize(MaxMessage+envelope))
	pluginv1.RegisterPluginServiceServer(srv, svc)
	l := bufconn.Listen(memoryBuffer)
	ended := make(chan struct{})
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	stop := sync.OnceFunc(func() {
		close(ended)
		conn.Close()
		srv.Stop()
		<-served
		hostSide.Close()
	})
	return &Link{
		Dial:    func(ctx context.Context) (net.Conn, error) { return l.DialContext(ctx) },
		Host:    hostSide,
		Ended:   ended,
		Why:     func() string { return "" },
		DataDir: m.DataDir,
		Jail:    "none: it runs inside the runtime",
		Close:   func() error { stop(); return nil },
	}, nil
}
