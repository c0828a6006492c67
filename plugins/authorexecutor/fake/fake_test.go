package fake_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	authorexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
	"github.com/numinance/numinance/plugins/authorexecutor/fake"
	"github.com/numinance/numinance/sdk/plugintest"
)

// bench is a fake with a work root. The host allows what the test's rule allows
// and, like the real one, starts processes under an allowed decision only.
type bench struct {
	*testing.T
	root string
	host *plugintest.Host
	conn *plugintest.Conn
}

func newBench(t *testing.T, c fake.Config, denied func(*pluginv1.DecideRequest) string) *bench {
	t.Helper()
	b := &bench{T: t, root: t.TempDir(), host: &plugintest.Host{}}
	b.host.OnDecide = func(r *pluginv1.DecideRequest) *pluginv1.DecideResponse {
		if why := denied(r); why != "" {
			return &pluginv1.DecideResponse{Effect: pluginv1.DecisionEffect_DECISION_EFFECT_DENY, Reasons: []string{why}}
		}
		return &pluginv1.DecideResponse{Effect: pluginv1.DecisionEffect_DECISION_EFFECT_ALLOW}
	}
	if c.WorkRoot == "" {
		c.WorkRoot = b.root
	}
	b.root = c.WorkRoot
	raw, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	b.conn = plugintest.Serve(t, fake.Plugin(), plugintest.Options{Config: raw, Host: b.host})
	return b
}

func all(*pluginv1.DecideRequest) string { return "" }

func request() *authorexecutorv1.ChangeExecutionRequest {
	d := "sha256:" + strings.Repeat("0", 64)
	return &authorexecutorv1.ChangeExecutionRequest{
		ChangeId: "chg-test", WorkUnitId: "unit-1", RunId: "run-test", GrantId: "grt-test",
		RepositoryDigest: d, EnvironmentDigest: d, PolicyDigest: d, ProfileDigest: d, TaskRef: d,
		AllowedPaths: []string{"**"}, ExecutorId: "fake", ModelId: "none",
		Budget:   &authorexecutorv1.ExecutionBudget{MaxToolCalls: 20, MaxWallTime: durationpb.New(time.Minute)},
		Deadline: timestamppb.New(time.Now().Add(time.Minute)),
	}
}

func (b *bench) execute(ctx context.Context) ([]*authorexecutorv1.ExecutionEvent, error) {
	b.Helper()
	s, err := authorexecutorv1.NewAuthorExecutorServiceClient(b.conn).Execute(ctx, &authorexecutorv1.ExecuteRequest{Request: request()})
	if err != nil {
		b.Fatal(err)
	}
	var out []*authorexecutorv1.ExecutionEvent
	for {
		m, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		if proto.Size(m) > 32<<10 {
			b.Errorf("event of %d bytes (P-135)", proto.Size(m))
		}
		out = append(out, m.GetEvent())
	}
}

func (b *bench) must() []*authorexecutorv1.ExecutionEvent {
	b.Helper()
	events, err := b.execute(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	return events
}

// types lists the types of a stream and checks its sequence (P-133).
func types(t testing.TB, events []*authorexecutorv1.ExecutionEvent) []string {
	t.Helper()
	var out []string
	for i, e := range events {
		if int(e.GetSequence()) != i+1 {
			t.Errorf("event %d has sequence %d", i+1, e.GetSequence())
		}
		out = append(out, strings.TrimPrefix(e.GetType().String(), "EXECUTION_EVENT_TYPE_"))
	}
	return out
}

func reference(e *authorexecutorv1.ExecutionEvent, kind string) string {
	for _, r := range e.GetReferences() {
		if r.GetKind() == kind {
			return r.GetValue()
		}
	}
	return ""
}

func last(events []*authorexecutorv1.ExecutionEvent) *authorexecutorv1.ExecutionEvent {
	return events[len(events)-1]
}

func (b *bench) read(name string) string {
	b.Helper()
	c, err := os.ReadFile(filepath.Join(b.root, name))
	if err != nil {
		return err.Error()
	}
	return string(c)
}

const work = `
steps:
- write: {path: a/b.txt, content: "one\ntwo\n"}
- patch:
    diff: |
      --- a/a/b.txt
      +++ b/a/b.txt
      @@ -1,2 +1,2 @@
       one
      -two
      +three
- write: {path: run.sh, content: "#!/bin/sh\nexit 7\n", executable: true}
- run: {argv: [./run.sh], exit: 7}
- delete: {path: run.sh}
- say: {text: done with it}
`

// The stream of an allowed step is intent, allowed, effect, result (H-019..H-024).
func TestStepsAndTheirEvents(t *testing.T) {
	b := newBench(t, fake.Config{Script: work}, all)
	events := b.must()
	effect := func(kind string) []string { return []string{"TOOL_INTENT", "TOOL_ALLOWED", kind, "TOOL_RESULT"} }
	want := []string{"EXECUTION_STARTED"}
	for _, kind := range []string{"FILE_CHANGED", "FILE_CHANGED", "FILE_CHANGED", "COMMAND_EXECUTED", "FILE_CHANGED"} {
		want = append(want, effect(kind)...)
	}
	want = append(want, "TOOL_INTENT", "TOOL_ALLOWED", "TOOL_RESULT", "EXECUTION_COMPLETED")
	if diff := cmp.Diff(want, types(t, events)); diff != "" {
		t.Fatalf("types (-want +got):\n%s\n%v", diff, last(events))
	}
	if got := b.read("a/b.txt"); got != "one\nthree\n" {
		t.Errorf("a/b.txt is %q", got)
	}
	if _, err := os.Stat(filepath.Join(b.root, "run.sh")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("run.sh: %v", err)
	}
	for _, s := range b.host.Spawned() {
		if s.GetDecisionId() == "" || s.GetUser() != pluginv1.ProcessUser_PROCESS_USER_AGENT {
			t.Errorf("spawned %v without a decision or as %v", s.GetArgv(), s.GetUser())
		}
	}
	// Events carry references, never content (H-018).
	for _, e := range events {
		if text := e.String(); strings.Contains(text, "three") || strings.Contains(text, "done with it") {
			t.Errorf("event with content: %s", text)
		}
	}
}

// H-029: the same script gives the same stream but for clock and ids.
func TestDeterministic(t *testing.T) {
	run := func() string {
		b := newBench(t, fake.Config{Script: work}, all)
		var out strings.Builder
		for _, e := range b.must() {
			e.OccurredAt = nil
			fmt.Fprintln(&out, e.GetType(), e.GetSequence(), e.GetSubject(), e.GetReferences())
		}
		return out.String()
	}
	if a, b := run(), run(); a != b {
		t.Errorf("two streams:\n%s\n%s", a, b)
	}
}

func protected(r *pluginv1.DecideRequest) string {
	switch {
	case strings.HasPrefix(r.GetPath(), ".github/"):
		return "floor protected-paths: " + r.GetPath() + " is always protected"
	case r.GetTool() == "fetch", r.GetTool() == "credential", r.GetTool() == "merge":
		return "grant: " + r.GetTool() + " is not granted"
	}
	return ""
}

// H-025: intent, (decision,) denied, result; and nothing happens.
func TestDeniedWrite(t *testing.T) {
	b := newBench(t, fake.Config{Script: `steps: [{write: {path: .github/workflows/release.yml, content: x, expect: denied}}]`}, protected)
	events := b.must()
	want := []string{"EXECUTION_STARTED", "TOOL_INTENT", "TOOL_DENIED", "TOOL_RESULT", "EXECUTION_COMPLETED"}
	if diff := cmp.Diff(want, types(t, events)); diff != "" {
		t.Fatal(diff)
	}
	if reference(events[2], "decision") != "dec-tool-1" || len(b.host.Spawned()) != 0 {
		t.Errorf("%v; spawned %v", events[2], b.host.Spawned())
	}
}

func TestUnmetExpectation(t *testing.T) {
	for name, script := range map[string]string{
		"denied, not foreseen":  `steps: [{write: {path: .github/x, content: x}}]`,
		"allowed, not foreseen": `steps: [{write: {path: x, content: x, expect: denied}}]`,
		"exit status":           `steps: [{run: {argv: ["false"]}}]`,
		"exit status wanted":    `steps: [{run: {argv: ["true"], exit: nonzero}}]`,
		"patch does not apply":  "steps: [{patch: {diff: \"--- a/x\\n+++ b/x\\n@@ -1 +1 @@\\n-a\\n+b\\n\"}}]",
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, fake.Config{Script: script}, protected)
			events := b.must()
			got := types(t, events)
			if got[len(got)-1] != "EXECUTION_FAILED" || got[len(got)-2] != "TOOL_RESULT" {
				t.Errorf("types %v", got)
			}
			if _, err := os.Stat(filepath.Join(b.root, "x")); err == nil {
				t.Error("the unexpected effect happened")
			}
		})
	}
}

// A denied step done anyway says which wall stopped it; a wall that does not
// hold fails the run.
func TestAnyway(t *testing.T) {
	// The proxy refuses everything, as the egress proxy of a run without grants.
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }))
	defer proxy.Close()
	script := `
steps:
- fetch: {url: "http://127.0.0.1:1/x", expect: denied, anyway: true}
- credential: {intent: deploy, expect: denied, anyway: true}
- merge: {pull_request: "1", expect: denied, anyway: true}
`
	b := newBench(t, fake.Config{Script: script, Proxy: proxy.URL}, protected)
	events := b.must()
	if got := types(t, events); got[len(got)-1] != "EXECUTION_COMPLETED" {
		t.Fatalf("%v", events)
	}
	var tries []string
	for _, e := range events {
		for _, r := range e.GetReferences() {
			if r.GetKind() == "attempt" {
				tries = append(tries, r.GetValue())
			}
		}
	}
	joined := strings.Join(tries, "\n")
	for _, want := range []string{"egress proxy: HTTP 403", "direct connection: ECONNREFUSED", "host credential: PermissionDenied", "scm.MergePullRequest on the host's socket: no socket"} {
		if !strings.Contains(joined, want) {
			t.Errorf("attempts\n%s\nlack %q", joined, want)
		}
	}

	t.Run("file system", func(t *testing.T) {
		// Nobody can make a file in /proc, root included.
		b := newBench(t, fake.Config{WorkRoot: "/proc", Script: `steps: [{write: {path: numi-test, content: x, expect: denied, anyway: true}}]`},
			func(*pluginv1.DecideRequest) string { return "grant: no path is allowed" })
		events := b.must()
		if !strings.HasSuffix(last(events).GetType().String(), "COMPLETED") || !strings.Contains(events[3].GetSubject(), "stopped; host spawn: exit ") {
			t.Errorf("%v", events)
		}
	})
	t.Run("a wall that does not hold fails the run", func(t *testing.T) {
		// The test's host starts processes whatever was decided.
		b := newBench(t, fake.Config{Script: `steps: [{write: {path: .github/x, content: x, expect: denied, anyway: true}}]`}, protected)
		if end := last(b.must()); reference(end, "reason") != "wall" {
			t.Errorf("%v", end)
		}
	})
}

func TestCheckpointCrashAndResume(t *testing.T) {
	script := `
steps:
- write: {path: a, content: a}
- checkpoint: {}
- crash: {}
- write: {path: b, content: b}
`
	var labels []string
	first := newBench(t, fake.Config{Script: script}, all)
	snapshot := &pluginv1.BlobRef{Digest: "sha256:" + strings.Repeat("a", 64), SizeBytes: 1}
	keep := func(label string) (*pluginv1.BlobRef, error) { labels = append(labels, label); return snapshot, nil }
	first.host.OnCheckpoint = keep
	events, err := first.execute(context.Background())
	if status.Code(err) != codes.Aborted {
		t.Fatalf("a crash ends the call with %v", err)
	}
	if got := types(t, events); got[len(got)-1] != "TOOL_RESULT" || !strings.Contains(strings.Join(got, " "), "CHECKPOINT") {
		t.Errorf("types %v", got)
	}
	second := newBench(t, fake.Config{Script: script, Attempt: 2, Resume: labels[0]}, all)
	second.host.OnCheckpoint = keep
	if end := last(second.must()); !strings.HasSuffix(end.GetType().String(), "COMPLETED") {
		t.Errorf("%v", end)
	}
	if len(labels) != 1 || second.read("b") != "b" || strings.Contains(second.read("a"), "aa") {
		t.Errorf("labels %v, b %q", labels, second.read("b"))
	}
	if n := len(second.host.Spawned()); n != 1 {
		t.Errorf("%d processes after the checkpoint, want 1", n)
	}
}

func TestStallEndsWithTheCall(t *testing.T) {
	b := newBench(t, fake.Config{Script: `steps: [{stall: {}}]`}, all)
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if _, err := b.execute(ctx); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("got %v", err)
	}
}

// H-058: a budget event, then the end.
func TestExhaust(t *testing.T) {
	n := 0
	b := newBench(t, fake.Config{Script: `steps: [{exhaust: {}}]`}, func(*pluginv1.DecideRequest) string {
		if n++; n > 5 {
			return "budget actions: grant grt-test has used its 5 actions"
		}
		return ""
	})
	events := b.must()
	want := []string{"EXECUTION_STARTED", "BUDGET_EVENT", "EXECUTION_FAILED"}
	if diff := cmp.Diff(want, types(t, events)); diff != "" || n != 6 || reference(last(events), "reason") != "budget" {
		t.Errorf("%s, %d decisions, %v", diff, n, last(events))
	}
	t.Run("not enforced", func(t *testing.T) {
		b := newBench(t, fake.Config{Script: `steps: [{exhaust: {}}]`}, all)
		if end := last(b.must()); !strings.Contains(end.GetSubject(), "not enforced") {
			t.Errorf("%v", end)
		}
	})
}

func TestFetchThroughTheProxy(t *testing.T) {
	var asked string
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { asked = r.URL.String(); fmt.Fprint(w, "hi") }))
	defer proxy.Close()
	b := newBench(t, fake.Config{Script: `steps: [{fetch: {url: "http://example.test/x"}}]`, Proxy: proxy.URL}, all)
	events := b.must()
	want := []string{"EXECUTION_STARTED", "TOOL_INTENT", "TOOL_ALLOWED", "NETWORK_REQUEST", "TOOL_RESULT", "EXECUTION_COMPLETED"}
	if diff := cmp.Diff(want, types(t, events)); diff != "" || asked != "http://example.test/x" {
		t.Errorf("%s, proxy saw %q", diff, asked)
	}
}

func TestReviewer(t *testing.T) {
	script := `
steps: [{write: {path: a, content: a}}]
reviewer:
  verdict: request_changes
  steps: [{write: {path: a, content: b, expect: denied}}]
  findings: [{path: a.go, line: 3, severity: error, message: wrong rounding}]
`
	b := newBench(t, fake.Config{Script: script}, func(*pluginv1.DecideRequest) string { return "floor reviewer-tools: a reviewer writes nothing" })
	ctx := plugintest.With(context.Background(), func(a *pluginv1.ActionContext) { a.ActorKind = pluginv1.ActorKind_ACTOR_KIND_REVIEWER_AGENT })
	events, err := b.execute(ctx)
	if err != nil {
		t.Fatal(err)
	}
	blob, ok := b.host.Blob(&pluginv1.BlobRef{Digest: reference(last(events), "review")})
	if want := `{"schema":"numinance.review/v1","verdict":"request_changes","findings":[{"path":"a.go","line":3,"severity":"error","message":"wrong rounding"}]}`; !ok || string(blob) != want {
		t.Errorf("review %s", blob)
	}
}

func TestPlan(t *testing.T) {
	script := `
work_units:
- {id: core, title: The core, allowed_paths: [src/], steps: []}
- {id: docs, depends_on: [core], steps: [{say: {text: hi}}]}
`
	b := newBench(t, fake.Config{Script: script}, all)
	s, err := authorexecutorv1.NewAuthorExecutorServiceClient(b.conn).Plan(context.Background(), &authorexecutorv1.PlanRequest{Request: request()})
	if err != nil {
		t.Fatal(err)
	}
	var end *authorexecutorv1.ExecutionEvent
	for {
		m, err := s.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		end = m.GetEvent()
	}
	blob, _ := b.host.Blob(&pluginv1.BlobRef{Digest: reference(end, "plan")})
	if want := `{"schema":"numinance.plan/v1","work_units":[{"id":"core","title":"The core","allowed_paths":["src/"]},{"id":"docs","title":"docs","depends_on":["core"]}]}`; string(blob) != want {
		t.Errorf("plan %s", blob)
	}
	if _, err := b.execute(context.Background()); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a work unit that the script does not name: %v", err)
	}
}

func TestScriptByReference(t *testing.T) {
	host := &plugintest.Host{OnDecide: func(*pluginv1.DecideRequest) *pluginv1.DecideResponse {
		return &pluginv1.DecideResponse{Effect: pluginv1.DecisionEffect_DECISION_EFFECT_ALLOW}
	}}
	root := t.TempDir()
	ref := host.Put([]byte("steps: [{write: {path: big, content: "+strings.Repeat("x", 100_000)+"}}]"), "")
	raw, _ := json.Marshal(fake.Config{ScriptRef: &fake.BlobRef{Digest: ref.GetDigest(), Size: ref.GetSizeBytes()}, WorkRoot: root})
	b := &bench{T: t, root: root, host: host, conn: plugintest.Serve(t, fake.Plugin(), plugintest.Options{Config: raw, Host: host})}
	b.must()
	if got := len(b.read("big")); got != 100_000 {
		t.Errorf("%d bytes written", got)
	}
}
