package verification_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	"github.com/numinance/numinance/internal/contexts/verification"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/host/journal"
	"github.com/numinance/numinance/internal/host/pluginhost"
	"github.com/numinance/numinance/plugins/verifier/command"
	"github.com/numinance/numinance/sdk"
	"github.com/numinance/numinance/sdk/plugintest"
)

// house is the runtime as this context sees it: real dispatcher, journal and
// policy, and the command verifier over its real wire. A sandbox is a directory
// that holds the files of a revision.
type house struct {
	*testing.T
	context   *verification.Context
	blobs     *blob.Store
	revisions map[string]map[string]string
	created   []string
	destroyed int
}

func newHouse(t *testing.T) *house {
	t.Helper()
	h := &house{T: t, revisions: map[string]map[string]string{}}
	dir := t.TempDir()
	j, err := journal.Open(t.Context(), journal.Config{Path: filepath.Join(dir, "state.db"), Spill: filepath.Join(dir, "spill"), Holder: "test", Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	if h.blobs, err = blob.Open(blob.Config{Dir: filepath.Join(dir, "blobs"), Quota: 1 << 30, Inline: j}); err != nil {
		t.Fatal(err)
	}
	engine, err := policy.LoadDefault()
	if err != nil {
		t.Fatal(err)
	}
	d, err := dispatch.New(dispatch.Config{Journal: j, Blobs: h.blobs, Policy: engine, Providers: none{}, Now: time.Now, Lag: func() time.Duration { return 0 }})
	if err != nil {
		t.Fatal(err)
	}
	h.context, err = verification.New(verification.Config{Dispatcher: verification.Enforcer{Dispatcher: d}, Sandboxes: h, Verifiers: h, Blobs: h.blobs})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

type none struct{}

func (none) Provider(port string) (dispatch.Provider, error) {
	return nil, fmt.Errorf("no provider of %s", port)
}

type box struct {
	h    *house
	root string
}

// Destroy implements verification.Sandbox.
func (b *box) Destroy(context.Context) error { b.h.destroyed++; return nil }

// Create implements verification.Sandboxes.
func (h *house) Create(_ context.Context, s verification.SandboxSpec) (verification.Sandbox, error) {
	files, ok := h.revisions[s.Revision]
	if !ok {
		return nil, fmt.Errorf("no revision %s", s.Revision)
	}
	h.created = append(h.created, s.Revision)
	b := &box{h: h, root: h.TempDir()}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(b.root, name), []byte(content), 0o755); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// Launch implements verification.Verifiers.
func (h *house) Launch(ctx context.Context, s verification.Sandbox, l verification.Launch) (verification.Verifier, error) {
	settings, err := json.Marshal(command.Settings{WorkRoot: s.(*box).root})
	if err != nil {
		return nil, err
	}
	p, err := pluginhost.Start(ctx, pluginhost.Config{
		Launcher: pluginhost.Memory{New: func(host grpc.ClientConnInterface) (pluginv1.PluginServiceServer, error) {
			return sdk.NewService(command.Plugin(), host)
		}},
		Expect:   pluginhost.Expectation{Port: "verifier", Unpinned: true, Origin: policy.OriginBundled},
		Settings: settings,
		Host: func(p *pluginhost.Plugin) pluginv1.HostServiceServer {
			return &services{Host: &plugintest.Host{}, plugin: p, blobs: h.blobs}
		},
	})
	if err != nil {
		return nil, err
	}
	return verifier{p}, nil
}

type verifier struct{ *pluginhost.Plugin }

func (v verifier) Provider() dispatch.Provider { return v.Plugin }

// services reads only what the call under way refers to; processes are real.
type services struct {
	*plugintest.Host
	plugin *pluginhost.Plugin
	blobs  *blob.Store
}

func (s *services) GetBlob(r *pluginv1.GetBlobRequest, out grpc.ServerStreamingServer[pluginv1.GetBlobResponse]) error {
	if !s.plugin.Resolvable(digest.Digest(r.GetDigest())) {
		return status.Error(codes.NotFound, "no such blob")
	}
	b, err := s.blobs.Bytes(digest.Digest(r.GetDigest()), 1<<20)
	if err != nil {
		return status.Error(codes.NotFound, err.Error())
	}
	return out.Send(&pluginv1.GetBlobResponse{Chunk: b})
}

func revision(c string) verification.Revision {
	return verification.Revision{Commit: strings.Repeat(c, 40), Tree: strings.Repeat(c, 40)}
}

// in verifies candidate b against base a by an executable check.sh.
func (h *house) in(base, candidate string) verification.In {
	h.Helper()
	h.revisions[revision("a").Commit] = map[string]string{"check.sh": base}
	h.revisions[revision("b").Commit] = map[string]string{"check.sh": candidate}
	authority := func(run identity.RunID) dispatch.Authority {
		actor := identity.Actor{Kind: identity.KindReviewerAgent, Principal: "agent:reviewer", Run: run}
		g, err := grant.New(grant.Grant{
			ID: identity.GrantID("grt-" + string(run)), Change: "chg-0123456789", WorkUnit: "verify", Run: run, Actor: actor, Verbs: []string{"verifier.Run"},
			Budget: grant.Budget{Actions: 10, OutputBytes: 1 << 30, Wall: time.Minute}, NotBefore: time.Now().Add(-time.Second), Expires: time.Now().Add(time.Hour),
		})
		if err != nil {
			h.Fatal(err)
		}
		return dispatch.Authority{Actor: actor, Grant: g, WorkUnit: "verify", Step: "verify/" + string(run), Change: policy.ChangeFacts{
			ID: "chg-0123456789", State: "Verifying", Requester: "human:alice",
			Authors: []identity.Actor{{Kind: identity.KindAuthorAgent, Principal: "agent:fake", Run: "run-author"}},
		}}
	}
	return verification.In{
		Layer: verification.Layer{
			Name: "checks", Provider: "command", Required: []string{"check"},
			Checks: []byte(`{"checks":[{"name":"check","argv":["./check.sh"],"format":"junit"}]}`),
		},
		Authority: authority("run-v"), BaseAuthority: authority("run-b"), Candidate: revision("b"), Base: revision("a"), Deadline: time.Now().Add(time.Minute),
	}
}

const (
	shell = "#!/bin/sh\n"
	two   = shell + `echo '<testsuite><testcase name="a"/><testcase name="b"/></testsuite>'` + "\n"
	three = shell + `echo '<testsuite><testcase name="a"/><testcase name="b"/><testcase name="c"/></testsuite>'` + "\n"
	one   = shell + `echo '<testsuite><testcase name="a"/></testsuite>'` + "\n"
	bad   = shell + `echo '<testsuite><testcase name="a"><failure message="five is not six"/></testcase><testcase name="b"/></testsuite>'` + "\nexit 1\n"
	crash = shell + "kill -9 $$\n"
)

func TestVerdicts(t *testing.T) {
	for name, c := range map[string]struct {
		base, candidate string
		want            verification.Outcome
		reason          string
	}{
		"passes":              {two, three, verification.Passed, "1 of 1"},
		"fails":               {two, bad, verification.Failed, "check"},
		"fixes":               {bad, two, verification.Passed, "1 of 1"},
		"fewer tests":         {two, one, verification.Failed, "check"},
		"candidate crashes":   {two, crash, verification.Inconclusive, "signal 9"},
		"base crashes":        {crash, two, verification.Inconclusive, "base revision"},
		"candidate no report": {two, shell + "echo PASS\n", verification.Inconclusive, "did not complete"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHouse(t)
			v, err := h.context.Verify(t.Context(), h.in(c.base, c.candidate))
			if err != nil || v.Outcome != c.want || !strings.Contains(v.Reason, c.reason) {
				t.Fatalf("%v; %v: %s, want %v with %q", err, v.Outcome, v.Reason, c.want, c.reason)
			}
			if (v.Report != nil) != (c.want != verification.Inconclusive) || (v.Report != nil && (v.Receipt.Digest == "" || v.Baseline.Digest == "")) {
				t.Errorf("report %v, receipt %v, baseline %v", v.Report, v.Receipt, v.Baseline)
			}
			if h.destroyed != len(h.created) {
				t.Errorf("%d sandboxes made, %d destroyed", len(h.created), h.destroyed)
			}
		})
	}
}

// The base revision is checked once for a configuration, in a sandbox of its own.
func TestBaselineIsKept(t *testing.T) {
	h := newHouse(t)
	if _, err := h.context.Verify(t.Context(), h.in(two, two)); err != nil {
		t.Fatal(err)
	}
	again := h.in(two, three)
	again.Authority.Step, again.BaseAuthority.Step = "verify/2", "verify/2/base"
	v, err := h.context.Verify(t.Context(), again)
	if err != nil || v.Outcome != verification.Passed {
		t.Fatalf("%v, %+v", err, v)
	}
	a, b := revision("a").Commit, revision("b").Commit
	if got := strings.Join(h.created, " "); got != a+" "+b+" "+b {
		t.Errorf("sandboxes for %s", got)
	}
}

// P-162..P-168: refused before anything is made.
func TestRefusedVerifications(t *testing.T) {
	for name, change := range map[string]func(*verification.In){
		"author's principal": func(in *verification.In) {
			in.Authority.Change.Authors[0].Principal = "agent:reviewer"
		},
		"author's run": func(in *verification.In) { in.Authority.Change.Authors[0].Run = "run-v" },
		"no authors":   func(in *verification.In) { in.Authority.Change.Authors = nil },
		"runner":       func(in *verification.In) { in.Authority.Actor.Kind = identity.KindRunner },
		"egress": func(in *verification.In) {
			in.Authority.Grant.Egress = []grant.Destination{{Host: "x.example", Port: 443}}
		},
		"one run":       func(in *verification.In) { in.BaseAuthority = in.Authority },
		"none required": func(in *verification.In) { in.Layer.Required = nil },
		"no deadline":   func(in *verification.In) { in.Deadline = time.Time{} },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHouse(t)
			in := h.in(two, two)
			change(&in)
			if v, err := h.context.Verify(t.Context(), in); err == nil || v.Outcome != verification.Inconclusive || len(h.created) != 0 {
				t.Errorf("%v, %+v, %d sandboxes", err, v, len(h.created))
			}
		})
	}
}
