package dispatch_test

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	scmv1 "github.com/numinance/numinance/gen/numinance/ports/scm/v1"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/host/journal"
	"github.com/numinance/numinance/internal/host/pluginhost"
	"github.com/numinance/numinance/sdk"
)

// forge is a stock implementation of scm, as a plugin author writes it.
type forge struct {
	scmv1.UnimplementedScmServiceServer
}

func (forge) GetFile(_ context.Context, r *scmv1.GetFileRequest) (*scmv1.GetFileResponse, error) {
	if r.GetPath() == "absent" {
		return nil, status.Error(codes.NotFound, "no such path")
	}
	return &scmv1.GetFileResponse{Type: 1, Content: []byte("hello\n"), TotalBytes: 6, ObjectId: commit}, nil
}

func (forge) OpenPullRequest(ctx context.Context, _ *scmv1.OpenPullRequestRequest) (*scmv1.OpenPullRequestResponse, error) {
	sdk.Attach(ctx, prRef)
	return opened, nil
}

func manifest() *pluginv1.Manifest {
	m := &pluginv1.Manifest{ExtensionId: "dev.numinance.test/forge", Version: "1", Port: "scm", SpecVersion: "1.0.0"}
	for _, v := range ports.Of("scm") {
		m.Verbs = append(m.Verbs, v.Method)
	}
	return m
}

func plugin() sdk.Plugin {
	return sdk.Plugin{Manifest: manifest(), Open: func(context.Context, *sdk.Session) (sdk.Register, error) {
		return func(r grpc.ServiceRegistrar) { scmv1.RegisterScmServiceServer(r, forge{}) }, nil
	}}
}

// socket launches the plugin behind a unix socket of this process.
type socket struct{ dir string }

func (s socket) Launch(ctx context.Context) (*pluginhost.Link, error) {
	l, err := net.Listen("unix", filepath.Join(s.dir, "p"))
	if err != nil {
		return nil, err
	}
	host, err := net.Listen("unix", filepath.Join(s.dir, "h"))
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = sdk.ServeListener(ctx, plugin(), l, nil)
	}()
	return &pluginhost.Link{
		Dial: func(ctx context.Context) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", l.Addr().String())
		},
		Host:  host,
		Ended: ended,
		Close: sync.OnceValue(func() error { stop(); <-ended; return host.Close() }),
	}, nil
}

type only struct{ p dispatch.Provider }

func (o only) Provider(string) (dispatch.Provider, error) { return o.p, nil }

func wired(t testing.TB) *dispatch.Dispatcher {
	t.Helper()
	d, _ := launched(t, socket{t.TempDir()})
	return d
}

func launched(t testing.TB, l pluginhost.Launcher) (*dispatch.Dispatcher, *pluginhost.Plugin) {
	t.Helper()
	dir := t.TempDir()
	pin, err := pluginhost.ManifestDigest(manifest())
	if err != nil {
		t.Fatal(err)
	}
	p, err := pluginhost.Start(t.Context(), pluginhost.Config{
		Launcher: l, Expect: pluginhost.Expectation{Port: "scm", Extension: "dev.numinance.test/forge", Origin: policy.OriginBundled, Manifest: pin},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	j, err := journal.Open(t.Context(), journal.Config{Path: filepath.Join(dir, "state.db"), Spill: filepath.Join(dir, "spill"), Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	blobs, err := blob.Open(blob.Config{Dir: filepath.Join(dir, "blobs"), Quota: 1 << 30, Inline: j})
	if err != nil {
		t.Fatal(err)
	}
	engine, err := policy.LoadDefault()
	if err != nil {
		t.Fatal(err)
	}
	d, err := dispatch.New(dispatch.Config{
		Journal: j, Blobs: blobs, Policy: engine, Providers: only{p}, Now: time.Now, Lag: func() time.Duration { return 0 },
	})
	if err != nil {
		t.Fatal(err)
	}
	return d, p
}

// TestOverTheWire: a stock client here, a stock server there, and dispatch
// between (P-016, P-023, P-031).
func TestOverTheWire(t *testing.T) {
	d := wired(t)
	out, err := scmv1.NewScmServiceClient(d.Conn(authority(t, ports.CallerRelease, author, "Releasing", "open"))).OpenPullRequest(t.Context(), openRequest())
	if err != nil || !proto.Equal(out, opened) {
		t.Fatalf("%v, %v", out, err)
	}
	client := scmv1.NewScmServiceClient(d.Conn(authority(t, ports.CallerKnowledge, runner, "Resolving", "read")))
	absent := fileRequest()
	absent.Path = "absent"
	if _, err := client.GetFile(t.Context(), absent); status.Code(err) != codes.NotFound {
		t.Errorf("got %v, want NOT_FOUND", err)
	}
	if out, err := client.GetFile(t.Context(), fileRequest()); err != nil || string(out.GetContent()) != "hello\n" {
		t.Errorf("%v, %v", out, err)
	}
}

// TestFullDisk: on a file system that is really full, nothing with an effect
// runs and the denial survives in the spill file.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=6m,mode=0700"); err != nil {
		t.Skipf("needs the right to mount a small file system: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	h := newHouse(t)
	h.dir = dir
	h.start()
	pad := `{"pad":"` + string(slices.Repeat([]byte("x"), 3000)) + `"}`
	for _, body := range []string{pad, `{}`} {
		for {
			if _, err := h.journal.Append(t.Context(), journal.Entry{Change: chg, Kind: "PAD", Body: []byte(body)}); err != nil {
				if !errors.Is(err, journal.ErrUnavailable) {
					t.Fatal(err)
				}
				break
			}
		}
	}
	_, err := h.open("release/open")
	denied := wantDenied(t, err, "journal", "unavailable")
	if !denied.Spilled {
		t.Errorf("the denial is not in the spill file: %v", denied.Unrecorded)
	}
	_, err = scmv1.NewScmServiceClient(h.d.Conn(authority(t, ports.CallerKnowledge, runner, "Resolving", "read"))).GetFile(t.Context(), fileRequest())
	wantDenied(t, err, "journal", "unavailable")
	_, err = h.d.Tool(t.Context(), authority(t, ports.CallerExecution, author, "Executing", "execute"), policy.Tool{Name: "write", Path: "src/a"})
	wantDenied(t, err, "journal", "unavailable")
	if h.p.total() != 0 {
		t.Errorf("the provider was called %d times on a full disk", h.p.total())
	}
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT, "size=64m"); err != nil {
		t.Fatal(err)
	}
	if _, err := h.open("release/open"); err != nil {
		t.Fatalf("with room again: %v", err)
	}
	denials := 0
	for _, e := range h.entries() {
		if e.Kind == dispatch.KindDecision && decisionOf(t, e).Effect == "deny" {
			denials++
		}
	}
	if denials != 3 {
		t.Errorf("%d of 3 denials got into the journal", denials)
	}
}
