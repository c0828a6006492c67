package execution_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	"github.com/numinance/numinance/internal/contexts/execution"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/host/journal"
	"github.com/numinance/numinance/internal/host/pluginhost"
	"github.com/numinance/numinance/plugins/authorexecutor/fake"
	"github.com/numinance/numinance/sdk"
	"github.com/numinance/numinance/sdk/plugintest"
)

const base = "0123456789012345678901234567890123456789"

// house is the runtime as this context sees it: a real dispatcher with journal
// and shipped policy, and the fake executor as a plugin over its real wire. A
// sandbox is a directory here, without walls: those have tests of their own.
type house struct {
	*testing.T
	context *execution.Context
	blobs   *blob.Store
	root    string
	lines   []execution.Line

	mu        sync.Mutex // guards snapshots and destroyed
	snapshots int
	destroyed int
}

func newHouse(t *testing.T, idle time.Duration) *house {
	t.Helper()
	engine, err := policy.LoadDefault()
	if err != nil {
		t.Fatal(err)
	}
	return newHouseUnder(t, idle, engine)
}

func newHouseUnder(t *testing.T, idle time.Duration, engine *policy.Engine) *house {
	t.Helper()
	h := &house{T: t, root: t.TempDir()}
	dir := t.TempDir()
	j, err := journal.Open(t.Context(), journal.Config{Path: filepath.Join(dir, "state.db"), Spill: filepath.Join(dir, "spill"), Holder: "test", Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	if h.blobs, err = blob.Open(blob.Config{Dir: filepath.Join(dir, "blobs"), Quota: 1 << 30, Inline: j}); err != nil {
		t.Fatal(err)
	}
	d, err := dispatch.New(dispatch.Config{Journal: j, Blobs: h.blobs, Policy: engine, Providers: none{}, Now: time.Now, Lag: func() time.Duration { return 0 }})
	if err != nil {
		t.Fatal(err)
	}
	h.context, err = execution.New(execution.Config{
		Dispatcher: execution.Enforcer{Dispatcher: d}, Sandboxes: h, Adapters: h, Trees: h, Blobs: h.blobs, Idle: idle,
	})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

type none struct{}

func (none) Provider(port string) (dispatch.Provider, error) {
	return nil, fmt.Errorf("no provider of %s", port)
}

// Create implements execution.Sandboxes.
func (h *house) Create(_ context.Context, s execution.SandboxSpec) (execution.Sandbox, error) {
	if s.Authority.Actor.Kind == identity.KindReviewerAgent && !s.ReadOnly {
		h.Error("a reviewer's sandbox can be written to")
	}
	return h, nil
}

// Snapshot implements execution.Sandbox.
func (h *house) Snapshot(ctx context.Context, s execution.Scope) (blob.Ref, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snapshots++
	return h.blobs.PutBytes(ctx, fmt.Appendf(nil, "snapshot %d of scope %d: %v", h.snapshots, s, h.files()))
}

func (h *house) files() (out []string) {
	_ = filepath.WalkDir(h.root, func(p string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			out = append(out, strings.TrimPrefix(p, h.root+"/"))
		}
		return nil
	})
	return out
}

// Destroy implements execution.Sandbox.
func (h *house) Destroy(context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.destroyed++
	return nil
}

// Diff implements execution.Trees.
func (h *house) Diff(_ context.Context, d execution.DiffSpec) (execution.Candidate, error) {
	c := execution.Candidate{Base: d.Base}
	for _, f := range h.files() {
		if ok, why := d.Paths.Check(f); !ok {
			c.Violations = append(c.Violations, execution.Violation{Path: f, Reason: why})
			continue
		}
		c.Changed = append(c.Changed, f)
	}
	return c, nil
}

// Observe implements execution.Observer.
func (h *house) Observe(l execution.Line) { h.lines = append(h.lines, l) }

// Launch implements execution.Adapters: the fake in memory, its host calls
// answered by the run's desk.
func (h *house) Launch(ctx context.Context, _ execution.Sandbox, l execution.Launch) (execution.Adapter, error) {
	var config map[string]any
	if err := json.Unmarshal(l.Config, &config); err != nil {
		return nil, err
	}
	config["work_root"] = h.root
	settings, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	p, err := pluginhost.Start(ctx, pluginhost.Config{
		Launcher: pluginhost.Memory{New: func(host grpc.ClientConnInterface) (pluginv1.PluginServiceServer, error) {
			return sdk.NewService(fake.Plugin(), host)
		}},
		Expect:   pluginhost.Expectation{Port: "authorexecutor", Unpinned: true, Origin: policy.OriginBundled},
		Settings: settings,
		Host: func(*pluginhost.Plugin) pluginv1.HostServiceServer {
			return &desk{Host: &plugintest.Host{}, desk: l.Desk, blobs: h.blobs}
		},
	})
	if err != nil {
		return nil, err
	}
	return adapter{p}, nil
}

type adapter struct{ *pluginhost.Plugin }

func (a adapter) Provider() dispatch.Provider { return a.Plugin }

// desk joins a HostService to a run's desk; processes are real.
type desk struct {
	*plugintest.Host
	desk  *execution.Desk
	blobs *blob.Store
}

func (d *desk) Decide(ctx context.Context, r *pluginv1.DecideRequest) (*pluginv1.DecideResponse, error) {
	e, err := d.desk.Decide(ctx, policy.Tool{Name: r.GetTool(), Path: r.GetPath(), Host: r.GetHost(), Intent: r.GetIntent(), Argv: r.GetArgv(), Input: digest.Digest(r.GetInputDigest())})
	if err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	out := &pluginv1.DecideResponse{DecisionId: string(e.ID), Effect: pluginv1.DecisionEffect_DECISION_EFFECT_DENY}
	if e.Effect == policy.Allow {
		out.Effect = pluginv1.DecisionEffect_DECISION_EFFECT_ALLOW
	}
	for _, r := range e.Reasons {
		out.Reasons = append(out.Reasons, r.String())
	}
	return out, nil
}

func (d *desk) Spawn(s grpc.BidiStreamingServer[pluginv1.SpawnRequest, pluginv1.SpawnResponse]) error {
	return d.Host.Spawn(&gated{s, d})
}

// gated asks the desk before the first message reaches the process.
type gated struct {
	grpc.BidiStreamingServer[pluginv1.SpawnRequest, pluginv1.SpawnResponse]
	d *desk
}

func (g *gated) Recv() (*pluginv1.SpawnRequest, error) {
	m, err := g.BidiStreamingServer.Recv()
	if start := m.GetStart(); err == nil && start != nil {
		if derr := g.d.desk.MaySpawn(identity.DecisionID(start.GetDecisionId()), start.GetArgv()); derr != nil {
			return nil, status.Error(codes.PermissionDenied, derr.Error())
		}
	}
	return m, err
}

func (d *desk) Checkpoint(ctx context.Context, r *pluginv1.CheckpointRequest) (*pluginv1.CheckpointResponse, error) {
	ref, err := d.desk.Checkpoint(ctx, r.GetLabel())
	if err != nil {
		return nil, status.Error(codes.PermissionDenied, err.Error())
	}
	return &pluginv1.CheckpointResponse{Snapshot: &pluginv1.BlobRef{Digest: string(ref.Digest), SizeBytes: ref.Size}}, nil
}

func (d *desk) PutBlob(s grpc.ClientStreamingServer[pluginv1.PutBlobRequest, pluginv1.PutBlobResponse]) error {
	var all []byte
	for {
		m, err := s.Recv()
		if err != nil {
			break
		}
		all = append(all, m.GetChunk()...)
	}
	ref, err := d.blobs.PutBytes(s.Context(), all)
	if err != nil {
		return status.Error(codes.ResourceExhausted, err.Error())
	}
	return s.SendAndClose(&pluginv1.PutBlobResponse{Blob: &pluginv1.BlobRef{Digest: string(ref.Digest), SizeBytes: ref.Size}})
}

func run(t testing.TB, h *house, kind identity.ActorKind, state, script string, budget int64) execution.Run {
	t.Helper()
	actor := identity.Actor{Kind: kind, Principal: "agent:fake", Run: "run-1"}
	g := grant.Grant{
		ID: "grt-1", Change: "chg-0123456789", WorkUnit: "unit-1", Run: actor.Run, Actor: actor,
		Verbs: []string{"authorexecutor.Execute", "authorexecutor.Plan"}, Capabilities: []string{grant.CapabilityRead},
		Budget: grant.Budget{Actions: budget, OutputBytes: 1 << 30, Wall: time.Minute}, NotBefore: time.Now().Add(-time.Second), Expires: time.Now().Add(time.Hour),
	}
	authors := []identity.Actor{actor}
	if kind == identity.KindReviewerAgent {
		actor.Principal, g.Actor.Principal = "agent:reviewer", "agent:reviewer"
		authors[0].Run, authors[0].Kind = "run-0", identity.KindAuthorAgent
	} else if state == "Executing" {
		g.Paths = pathscope.Scope{Allowed: []string{"**"}}
		g.Capabilities = append(g.Capabilities, grant.CapabilityWrite, grant.CapabilityShell)
	}
	g, err := grant.New(g)
	if err != nil {
		t.Fatal(err)
	}
	config, err := json.Marshal(map[string]string{"script": script})
	if err != nil {
		t.Fatal(err)
	}
	zero := digest.Of(nil)
	return execution.Run{
		Authority: dispatch.Authority{Actor: actor, Grant: g, WorkUnit: "unit-1", Step: "execute/" + state, Change: policy.ChangeFacts{
			ID: "chg-0123456789", State: state, Authors: authors, Requester: "human:alice",
		}},
		Executor: "fake", Config: config, Revision: base, Deadline: time.Now().Add(time.Minute), Observer: h,
		Digests: execution.Digests{Repository: zero, Environment: zero, Policy: zero, Profile: zero}, Refs: execution.References{Task: zero},
	}
}

func author(t testing.TB, h *house, script string) execution.Run {
	return run(t, h, identity.KindAuthorAgent, "Executing", script, 100)
}

// H-025: intent (claim), decision (host), denied (host), result (claim).
func TestAuthorRunAndItsStory(t *testing.T) {
	h := newHouse(t, 0)
	res, err := h.context.Author(t.Context(), author(t, h, `
steps:
- write: {path: src/a.go, content: "package a\n"}
- write: {path: .github/workflows/release.yml, content: x, expect: denied}
- run: {argv: [sh, -c, "mkdir -p .github/workflows && echo x > .github/workflows/evil.yml"]}
`))
	if err != nil || res.Outcome != execution.Completed {
		t.Fatalf("%v, %v: %s", err, res.Outcome, res.Reason)
	}
	var story []string
	for _, l := range h.lines {
		story = append(story, l.Type+" "+l.Origin.String())
	}
	want := []string{
		"EXECUTION_STARTED harness claim",
		"TOOL_INTENT harness claim", "POLICY_DECISION host-recorded", "TOOL_ALLOWED host-recorded", "FILE_CHANGED harness claim", "TOOL_RESULT harness claim",
		"TOOL_INTENT harness claim", "POLICY_DECISION host-recorded", "TOOL_DENIED host-recorded", "TOOL_RESULT harness claim",
		"TOOL_INTENT harness claim", "POLICY_DECISION host-recorded", "TOOL_ALLOWED host-recorded", "COMMAND_EXECUTED harness claim", "TOOL_RESULT harness claim",
		"EXECUTION_COMPLETED harness claim",
	}
	if diff := cmp.Diff(want, story); diff != "" {
		t.Error(diff)
	}
	if d := h.lines[7].Decision; d == nil || d.Effect != policy.Deny || !slices.ContainsFunc(d.Reasons, func(r policy.Reason) bool { return r.ID == "protected-paths" }) {
		t.Errorf("the decision on the workflow file: %+v", d)
	}
	// What the shell did around the decision is found by the host's diff.
	if diff := cmp.Diff([]string{"src/a.go"}, res.Candidate.Changed); diff != "" || len(res.Candidate.Violations) != 1 {
		t.Errorf("%s, violations %v", diff, res.Candidate.Violations)
	}
	if want := (execution.Stats{Events: 13, Decisions: 3, Denials: 1, Spawns: 2}); res.Stats != want {
		t.Errorf("stats %+v, want %+v", res.Stats, want)
	}
	if h.destroyed != 1 {
		t.Errorf("sandbox destroyed %d times", h.destroyed)
	}
}

// A denied write that is tried anyway gets no process: the desk refuses it.
func TestDeskRefusesAProcessWithoutAllowance(t *testing.T) {
	h := newHouse(t, 0)
	res, err := h.context.Author(t.Context(), author(t, h, `steps: [{delete: {path: .github/workflows/x, expect: denied, anyway: true}}]`))
	if err != nil || res.Outcome != execution.Completed || res.Stats.Spawns != 0 {
		t.Fatalf("%v, %+v", err, res)
	}
	if got := h.lines[4].Subject.Line(300); !strings.Contains(got, "host spawn: PermissionDenied; file system: ENOENT") {
		t.Errorf("result %q", got)
	}
}

func TestHowRunsEnd(t *testing.T) {
	for _, c := range []struct {
		name, script string
		budget       int64
		idle         time.Duration
		want         execution.Outcome
		checkpoint   bool
	}{
		{"harness fails", `steps: [{run: {argv: ["false"]}}]`, 100, 0, execution.HarnessFailed, false},
		{"crash after a checkpoint", `steps: [{checkpoint: {}}, {crash: {}}]`, 100, 0, execution.Lost, true},
		{"crash before any", `steps: [{crash: {}}]`, 100, 0, execution.Lost, false},
		{"stall", `steps: [{stall: {}}]`, 100, 300 * time.Millisecond, execution.Stalled, false},
		{"budget", `steps: [{exhaust: {}}]`, 5, 0, execution.BudgetExhausted, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHouse(t, c.idle)
			res, err := h.context.Author(t.Context(), run(t, h, identity.KindAuthorAgent, "Executing", c.script, c.budget))
			if err != nil || res.Outcome != c.want || res.Reason == "" {
				t.Fatalf("%v; %v (%s), want %v", err, res.Outcome, res.Reason, c.want)
			}
			if (res.Checkpoint != nil) != c.checkpoint || res.Candidate != nil {
				t.Errorf("checkpoint %+v, candidate %+v", res.Checkpoint, res.Candidate)
			}
			if h.destroyed != 1 {
				t.Errorf("sandbox destroyed %d times", h.destroyed)
			}
		})
	}
}

// H-060: a lost run goes on from its last checkpoint.
func TestResume(t *testing.T) {
	h := newHouse(t, 0)
	script := `steps: [{write: {path: a, content: a}}, {checkpoint: {}}, {crash: {}}, {write: {path: b, content: b}}]`
	first, err := h.context.Author(t.Context(), author(t, h, script))
	if err != nil || first.Outcome != execution.Lost {
		t.Fatalf("%v, %+v", err, first)
	}
	second := author(t, h, script)
	second.Attempt, second.Restore = 2, first.Checkpoint
	second.Authority.Step, second.Authority.Actor.Run, second.Authority.Grant.Run, second.Authority.Grant.Actor.Run = "execute/2", "run-2", "run-2", "run-2"
	second.Authority.Grant.ID = "grt-2"
	res, err := h.context.Author(t.Context(), second)
	if err != nil || res.Outcome != execution.Completed || res.Stats.Spawns != 1 {
		t.Fatalf("%v, %+v", err, res)
	}
}

// A run reads its ticket before its first step: a rule about runs that have
// read untrusted content holds from there on.
func TestRunIsTaintedByItsTask(t *testing.T) {
	engine, err := policy.Load(map[string][]byte{"default.cedar": []byte(policy.Default()), "more.cedar": []byte(
		`@id("tainted-runs-run-nothing") forbid (principal, action == Action::"tool.run", resource) when { context.run.tainted };`)})
	if err != nil {
		t.Fatal(err)
	}
	h := newHouseUnder(t, 0, engine)
	res, err := h.context.Author(t.Context(), author(t, h, `steps: [{run: {argv: ["true"], expect: denied}}]`))
	if err != nil || res.Outcome != execution.Completed || res.Stats.Denials != 1 || res.Stats.Spawns != 0 {
		t.Fatalf("%v, %v (%s), %+v", err, res.Outcome, res.Reason, res.Stats)
	}
}

func TestCancelledRun(t *testing.T) {
	h := newHouse(t, 0)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(200*time.Millisecond, cancel)
	res, err := h.context.Author(ctx, author(t, h, `steps: [{stall: {}}]`))
	if err != nil || res.Outcome != execution.Cancelled || h.destroyed != 1 {
		t.Errorf("%v, %+v, destroyed %d", err, res, h.destroyed)
	}
}

func TestReviewRun(t *testing.T) {
	h := newHouse(t, 0)
	script := `
reviewer:
  verdict: request_changes
  steps: [{write: {path: a, content: b, expect: denied}}, {run: {argv: ["true"], expect: denied}}]
  findings: [{path: a.go, line: 3, message: wrong}]
`
	res, err := h.context.Review(t.Context(), run(t, h, identity.KindReviewerAgent, "Verifying", script, 100))
	if err != nil || res.Outcome != execution.Completed {
		t.Fatalf("%v, %v %s", err, res.Outcome, res.Reason)
	}
	if res.Review == nil || res.Review.Approve || len(res.Review.Findings) != 1 || res.Stats.Denials != 2 || res.Candidate != nil {
		t.Errorf("%+v", res)
	}
}

func TestPlanRun(t *testing.T) {
	h := newHouse(t, 0)
	res, err := h.context.Plan(t.Context(), run(t, h, identity.KindAuthorAgent, "Planning", `work_units: [{id: a, allowed_paths: [src/]}, {id: b, depends_on: [a]}]`, 100))
	if err != nil || res.Outcome != execution.Completed || len(res.Plan.WorkUnits) != 2 || res.Plan.WorkUnits[1].DependsOn[0] != "a" {
		t.Fatalf("%v, %+v", err, res)
	}
}

// P-127..P-129: refused before anything is made for it.
func TestRefusedRuns(t *testing.T) {
	h := newHouse(t, 0)
	review := run(t, h, identity.KindReviewerAgent, "Verifying", "reviewer: {}", 100)
	paths, shell := review, review
	paths.Authority.Grant.Paths = pathscope.Scope{Allowed: []string{"a"}}
	shell.Authority.Grant.Capabilities = []string{grant.CapabilityShell}
	wrong := author(t, h, "steps: []")
	for name, call := range map[string]func() (execution.Result, error){
		"paths":                   func() (execution.Result, error) { return h.context.Review(t.Context(), paths) },
		"shell":                   func() (execution.Result, error) { return h.context.Review(t.Context(), shell) },
		"an author reviews":       func() (execution.Result, error) { return h.context.Review(t.Context(), wrong) },
		"a reviewer authors":      func() (execution.Result, error) { return h.context.Author(t.Context(), review) },
		"a plan with write paths": func() (execution.Result, error) { return h.context.Plan(t.Context(), wrong) },
	} {
		if res, err := call(); err == nil || res.Outcome != execution.OutcomeUnknown {
			t.Errorf("%s: %v, %+v", name, err, res)
		}
	}
	over := author(t, h, "steps: []")
	over.Authority.Change.State = "Released"
	var denied *dispatch.DeniedError
	if _, err := h.context.Author(t.Context(), over); !errors.As(err, &denied) {
		t.Errorf("a run of a Change that is over: %v", err)
	}
	if h.destroyed != 1 {
		t.Errorf("%d sandboxes, want the one of the denied call", h.destroyed)
	}
}
