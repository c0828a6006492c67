package catalog_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	knowledgev1 "github.com/numinance/numinance/gen/numinance/ports/knowledge/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/lockfile"
	"github.com/numinance/numinance/internal/host/catalog"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/host/pluginhost"
	"github.com/numinance/numinance/internal/host/pluginhost/jail"
	"github.com/numinance/numinance/sdk"
)

func TestMain(m *testing.M) {
	jail.Enter()
	if len(os.Args) == 2 && os.Args[1] == "serve-test-plugin" {
		if err := sdk.Serve(context.Background(), plugin()); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

type server struct {
	knowledgev1.UnimplementedKnowledgeServiceServer
}

func (server) Search(context.Context, *knowledgev1.SearchRequest) (*knowledgev1.SearchResponse, error) {
	os.Exit(3)
	return nil, nil
}

func plugin() sdk.Plugin {
	return sdk.Plugin{
		Manifest: &pluginv1.Manifest{ExtensionId: "dev.numinance.test/k", Version: "1", Port: "knowledge", SpecVersion: "1.0.0", Verbs: []string{"Search", "Fetch", "Resolve"}},
		Open: func(context.Context, *sdk.Session) (sdk.Register, error) {
			return func(r grpc.ServiceRegistrar) { knowledgev1.RegisterKnowledgeServiceServer(r, server{}) }, nil
		},
	}
}

func binding(t *testing.T) catalog.Binding {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	d, err := pluginhost.ManifestDigest(plugin().Manifest)
	if err != nil {
		t.Fatal(err)
	}
	return catalog.Binding{
		Plugin: pluginhost.Config{
			Launcher: pluginhost.Process{Argv: []string{exe, "serve-test-plugin"}, RunDir: t.TempDir(), UID: pluginhost.UIDBase + 992, Profile: pluginhost.Profile{Tools: true}},
			Expect:   pluginhost.Expectation{Port: "knowledge", Extension: "dev.numinance.test/k", Origin: "bundled", Manifest: d},
		},
		Locked: lockfile.Entry{Kind: lockfile.Plugin, Name: "dev.numinance.test/k", Origin: "bundled", Digest: digest.Of([]byte("program")), Manifest: d},
	}
}

func locked(t *testing.T, b catalog.Binding) lockfile.File {
	t.Helper()
	f, err := lockfile.New([]lockfile.Entry{b.Locked})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// die makes the provider's process end.
func die(t *testing.T, p dispatch.Provider) error {
	t.Helper()
	a, err := anypb.New(&knowledgev1.SearchRequest{})
	if err != nil {
		t.Fatal(err)
	}
	err = p.Invoke(t.Context(), &pluginv1.InvokeRequest{
		Target: "numinance.ports.knowledge.v1.KnowledgeService/Search", Request: a,
		Context: &pluginv1.ActionContext{SpecVersion: "1.0.0", Deadline: timestamppb.New(time.Now().Add(20 * time.Second))},
	}, func(*pluginv1.InvokeResponse) error { return nil })
	<-p.(*pluginhost.Plugin).Ended()
	return err
}

// A provider is started when it is needed, once, and anew after it died, but not
// for ever.
func TestProviderIsRestarted(t *testing.T) {
	b := binding(t)
	now := time.Now()
	c, err := catalog.New(catalog.Config{Lock: locked(t, b), Bindings: []catalog.Binding{b}, Now: func() time.Time { return now }})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if n := len(c.Running()); n != 0 {
		t.Fatalf("%d providers run before one was asked for", n)
	}
	var last dispatch.Provider
	for i := range 5 {
		p, err := c.Provider("knowledge")
		if err != nil {
			t.Fatal(err)
		}
		if again, err := c.Provider("knowledge"); err != nil || again != p || p == last {
			t.Fatalf("start %d: got %v, %v, want one new provider", i, again, err)
		}
		last = p
		if err := die(t, p); status.Code(err) != codes.Unavailable {
			t.Fatalf("the deadly call: %v, want UNAVAILABLE", err)
		}
	}
	if _, err := c.Provider("knowledge"); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "left alone") {
		t.Fatalf("a sixth start within a minute: %v, want a refusal", err)
	}
	now = now.Add(time.Minute)
	if _, err := c.Provider("knowledge"); err != nil {
		t.Fatalf("after a minute: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Provider("knowledge"); status.Code(err) != codes.Unavailable {
		t.Fatalf("after closing: %v, want UNAVAILABLE", err)
	}
}

// What is not locked exactly as it is does not start.
func TestUnlockedIsRefused(t *testing.T) {
	b := binding(t)
	f := locked(t, b)
	b.Locked.Digest = digest.Of([]byte("another program"))
	c, err := catalog.New(catalog.Config{Lock: f, Bindings: []catalog.Binding{b}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Provider("knowledge"); status.Code(err) != codes.FailedPrecondition || len(c.Running()) != 0 {
		t.Errorf("another program: %v, want FAILED_PRECONDITION", err)
	}
	if _, err := c.Provider("scm"); status.Code(err) != codes.Unavailable {
		t.Errorf("a port without a provider: %v, want UNAVAILABLE", err)
	}
	_, e1 := catalog.New(catalog.Config{})
	_, e2 := catalog.New(catalog.Config{Lock: f, Bindings: []catalog.Binding{b, b}})
	b.Plugin.Expect.Port = "mail"
	_, e3 := catalog.New(catalog.Config{Lock: f, Bindings: []catalog.Binding{b}})
	for i, err := range []error{e1, e2, e3} {
		if err == nil {
			t.Errorf("configuration %d was accepted", i)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(t.TempDir(), "numi-plugin-*")); len(left) > 0 {
		t.Error(errors.New("something was started"))
	}
}
