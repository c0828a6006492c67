package dispatch_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	scmv1 "github.com/numinance/numinance/gen/numinance/ports/scm/v1"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/host/pluginhost"
	"github.com/numinance/numinance/internal/host/pluginhost/jail"
	"github.com/numinance/numinance/sdk"
)

const childArgument = "serve-measured-plugin"

// TestMain lets this binary be the jail and the plugin that BenchmarkRead starts.
func TestMain(m *testing.M) {
	jail.Enter()
	if len(os.Args) == 2 && os.Args[1] == childArgument {
		if err := serveBoth(); err != nil {
			os.Stderr.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// serveBoth serves the plugin, and beside it on the same socket the port's own
// service, which no plugin does: it is what the plugin is measured against.
func serveBoth() error {
	l, err := net.Listen("unix", os.Getenv(sdk.EnvPluginSocket))
	if err != nil {
		return err
	}
	svc, err := sdk.NewService(plugin(), nil)
	if err != nil {
		return err
	}
	srv := grpc.NewServer()
	pluginv1.RegisterPluginServiceServer(srv, svc)
	scmv1.RegisterScmServiceServer(srv, forge{})
	return srv.Serve(l)
}

// BenchmarkRead: a dispatched SYNC READ may cost at most twice a bare unary call
// to the same process on the same socket. Both are called in turn, so that what
// else the machine does hits both.
func BenchmarkRead(b *testing.B) {
	exe, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	run := b.TempDir()
	if err := os.Chmod(run, 0o711); err != nil {
		b.Fatal(err)
	}
	d, p := launched(b, pluginhost.Process{
		Argv: []string{exe, childArgument}, RunDir: run, UID: pluginhost.UIDBase + 991, Profile: pluginhost.Profile{Tools: true},
	})
	b.Logf("the plugin's jail: %s", p.Jail())
	paths, err := filepath.Glob(filepath.Join(run, "*", "s", "plugin.sock"))
	if err != nil || len(paths) != 1 {
		b.Fatalf("the plugin's socket: %v, %v", paths, err)
	}
	conn, err := grpc.NewClient("passthrough:///bare", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", paths[0])
		}))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = conn.Close() })
	a := dispatch.Authority{Caller: ports.CallerKnowledge, Actor: runner, Step: "read", Change: policy.ChangeFacts{ID: chg, State: "Resolving"}}
	a.Grant = benchGrant(b)
	clients := []scmv1.ScmServiceClient{scmv1.NewScmServiceClient(conn), scmv1.NewScmServiceClient(d.Conn(a))}
	took := make([][]time.Duration, len(clients))
	req := fileRequest()
	for b.Loop() {
		for i, client := range clients {
			begin := time.Now()
			if _, err := client.GetFile(b.Context(), req); err != nil {
				b.Fatal(err)
			}
			took[i] = append(took[i], time.Since(begin))
		}
	}
	at := func(i, percent int) float64 {
		slices.Sort(took[i])
		return float64(took[i][len(took[i])*percent/100].Nanoseconds()) / 1000
	}
	b.ReportMetric(at(0, 50), "bare-p50-us")
	b.ReportMetric(at(1, 50), "dispatched-p50-us")
	b.ReportMetric(at(0, 99), "bare-p99-us")
	b.ReportMetric(at(1, 99), "dispatched-p99-us")
	b.ReportMetric(at(1, 50)/at(0, 50), "ratio")
}
