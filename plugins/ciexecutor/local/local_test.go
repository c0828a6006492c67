package local_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	ciexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/ciexecutor/v1"
	"github.com/numinance/numinance/plugins/ciexecutor/local"
	"github.com/numinance/numinance/sdk/plugintest"
)

const repo = "acme/widget"

// bench is a CI over one bare repository.
type bench struct {
	testing.TB
	ci       ciexecutorv1.CiExecutorServiceClient
	host     *plugintest.Host
	data     string
	bare     string
	revision string
}

func (b *bench) git(dir string, args ...string) string {
	b.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@x", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@x")
	out, err := cmd.CombinedOutput()
	if err != nil {
		b.Fatalf("git %v: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func newBench(t *testing.T, pipelines map[string]local.Pipeline) *bench {
	t.Helper()
	b := &bench{TB: t, host: &plugintest.Host{}, data: t.TempDir(), bare: filepath.Join(t.TempDir(), "w.git")}
	work := t.TempDir()
	b.git(work, "init", "-q", "-b", "main")
	write(t, filepath.Join(work, "hello.txt"), "hello\n")
	// Attributes of the tree must not leave anything out or run a filter.
	write(t, filepath.Join(work, ".gitattributes"), "hello.txt export-ignore filter=evil\n")
	write(t, filepath.Join(work, "ci.yaml"), "steps: rm -rf /\n")
	b.git(work, "add", ".")
	b.git(work, "commit", "-q", "-m", "one")
	b.revision = b.git(work, "rev-parse", "HEAD")
	b.git(work, "clone", "-q", "--bare", work, b.bare)
	b.ci = b.open(t, pipelines)
	return b
}

func (b *bench) open(t testing.TB, pipelines map[string]local.Pipeline) ciexecutorv1.CiExecutorServiceClient {
	raw, err := json.Marshal(local.Config{Pipelines: pipelines, Repositories: map[string]string{repo: b.bare}})
	if err != nil {
		t.Fatal(err)
	}
	return ciexecutorv1.NewCiExecutorServiceClient(plugintest.Serve(t, local.Plugin(), plugintest.Options{Config: raw, DataDir: b.data, Host: b.host}))
}

func write(t testing.TB, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func (b *bench) start(ctx context.Context, pipeline string) string {
	b.Helper()
	r, err := b.ci.StartOperation(ctx, &ciexecutorv1.StartOperationRequest{Pipeline: pipeline, Repository: repo, Revision: b.revision})
	if err != nil {
		b.Fatal(err)
	}
	return r.GetOperation().GetName()
}

func (b *bench) get(pipeline, name string) *ciexecutorv1.Operation {
	b.Helper()
	r, err := b.ci.GetOperation(context.Background(), &ciexecutorv1.GetOperationRequest{Pipeline: pipeline, Operation: name})
	if err != nil {
		b.Fatal(err)
	}
	return r.GetOperation()
}

// wait polls until the operation is neither queued nor running.
func (b *bench) wait(pipeline, name string) *ciexecutorv1.Operation {
	b.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		o := b.get(pipeline, name)
		if o.GetState() > ciexecutorv1.OperationState_OPERATION_STATE_RUNNING {
			return o
		}
	}
	b.Fatalf("operation %s does not end", name)
	return nil
}

func (b *bench) log(pipeline, name string) string {
	b.Helper()
	r, err := b.ci.GetLogReference(context.Background(), &ciexecutorv1.GetLogReferenceRequest{Pipeline: pipeline, Operation: name})
	if err != nil {
		b.Fatal(err)
	}
	text, ok := b.host.Blob(r.GetLog())
	if !ok {
		b.Fatal("the log is not with the host")
	}
	return string(text)
}

func sh(script string) []string { return []string{"/bin/sh", "-c", script} }

func one(name, script, timeout string) local.Pipeline {
	return local.Pipeline{Steps: []local.Step{{Name: name, Argv: sh(script), Timeout: timeout}}}
}

func TestRunOfAPipeline(t *testing.T) {
	b := newBench(t, map[string]local.Pipeline{"release": {
		Steps: []local.Step{
			{Name: "build", Argv: sh(`test "$(cat hello.txt)" = hello && mkdir -p dist && echo "$CI_REVISION" > dist/v.txt && ln -s /etc/passwd dist/link`)},
			{Name: "say", Argv: []string{"echo", "built"}},
		},
		Artifacts: []string{"dist/", "*.none"},
	}})
	ctx, result := plugintest.Capture(context.Background())
	name := b.start(ctx, "release")
	if ev := result.GetEvidence(); len(ev) != 1 || ev[0].GetType() != "ci-run-ref" || !strings.Contains(string(ev[0].GetPayload()), name) {
		t.Errorf("evidence %v (P-109)", ev)
	}
	o := b.wait("release", name)
	if o.GetState() != ciexecutorv1.OperationState_OPERATION_STATE_SUCCEEDED {
		t.Fatalf("%v: %s", o, b.log("release", name))
	}
	if log := b.log("release", name); !strings.Contains(log, "== build\n== say\nbuilt\n") {
		t.Errorf("log %q", log)
	}
	r, err := b.ci.ListArtifacts(context.Background(), &ciexecutorv1.ListArtifactsRequest{Pipeline: "release", Operation: name, PageSize: 10})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.GetArtifacts()) != 1 || r.GetArtifacts()[0].GetName() != "dist/v.txt" {
		t.Fatalf("artifacts %v: links are none", r.GetArtifacts())
	}
	if got, _ := b.host.Blob(r.GetArtifacts()[0].GetContent()); string(got) != b.revision+"\n" {
		t.Errorf("artifact %q", got)
	}
	if left, _ := os.ReadDir(filepath.Join(b.data, "work")); len(left) != 0 {
		t.Errorf("the checkout is left behind: %v", left)
	}
}

// One key, one run, whatever is tried again (P-102).
func TestKeyHasOneEffect(t *testing.T) {
	counter := filepath.Join(t.TempDir(), "runs")
	b := newBench(t, map[string]local.Pipeline{"p": one("count", "echo x >> "+counter, "")})
	ctx := plugintest.Key(context.Background(), "key-7")
	first := b.start(ctx, "p")
	for range 3 {
		if again := b.start(ctx, "p"); again != first {
			t.Errorf("second operation %s for one key", again)
		}
	}
	b.wait("p", first)
	if again := b.start(ctx, "p"); again != first {
		t.Errorf("second operation %s after the end", again)
	}
	if got, _ := os.ReadFile(counter); string(got) != "x\n" {
		t.Errorf("the effect happened as %q", got)
	}
	_, err := b.ci.StartOperation(ctx, &ciexecutorv1.StartOperationRequest{Pipeline: "p", Repository: repo, Revision: b.revision, Parameters: map[string]string{}})
	if err != nil {
		t.Errorf("the same request: %v", err)
	}
}

func TestHowOperationsEnd(t *testing.T) {
	b := newBench(t, map[string]local.Pipeline{
		"bad":     one("test", "echo no; exit 3", ""),
		"slow":    one("hang", "sleep 60", "300ms"),
		"missing": {Steps: []local.Step{{Name: "x", Argv: []string{"no-such-program-here"}}}},
	})
	for pipeline, want := range map[string]ciexecutorv1.OperationState{
		"bad":     ciexecutorv1.OperationState_OPERATION_STATE_FAILED,
		"slow":    ciexecutorv1.OperationState_OPERATION_STATE_TIMED_OUT,
		"missing": ciexecutorv1.OperationState_OPERATION_STATE_FAILED,
	} {
		if o := b.wait(pipeline, b.start(context.Background(), pipeline)); o.GetState() != want || o.GetDetail() == "" {
			t.Errorf("%s: %v, want %v", pipeline, o, want)
		}
	}
}

func TestCancel(t *testing.T) {
	pid := filepath.Join(t.TempDir(), "pid")
	b := newBench(t, map[string]local.Pipeline{"p": one("hang", "sleep 600 & echo $! > "+pid+".new; mv "+pid+".new "+pid+"; wait", "")})
	name := b.start(context.Background(), "p")
	child := waitForPid(t, pid)
	for range 2 {
		r, err := b.ci.CancelOperation(context.Background(), &ciexecutorv1.CancelOperationRequest{Pipeline: "p", Operation: name})
		if err != nil || r.GetOperation().GetState() != ciexecutorv1.OperationState_OPERATION_STATE_CANCELLED {
			t.Fatalf("%v, %v", r, err)
		}
	}
	if alive(child) {
		t.Errorf("process %d of the cancelled operation lives on", child)
	}
}

func waitForPid(t testing.TB, path string) int {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if b, err := os.ReadFile(path); err == nil {
			pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	t.Fatal("the step does not begin")
	return 0
}

// alive reports whether a process runs; a zombie does not.
func alive(pid int) bool {
	for range 100 {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(b), ") Z ") {
			return false
		}
		time.Sleep(10 * time.Millisecond)
	}
	return true
}

func TestRefusals(t *testing.T) {
	b := newBench(t, map[string]local.Pipeline{"p": one("x", "true", "")})
	for name, c := range map[string]struct {
		r    *ciexecutorv1.StartOperationRequest
		code codes.Code
	}{
		"pipeline":   {&ciexecutorv1.StartOperationRequest{Pipeline: "ci.yaml", Repository: repo, Revision: b.revision}, codes.NotFound},
		"repository": {&ciexecutorv1.StartOperationRequest{Pipeline: "p", Repository: "../x", Revision: b.revision}, codes.NotFound},
		"revision":   {&ciexecutorv1.StartOperationRequest{Pipeline: "p", Repository: repo, Revision: strings.Repeat("0", 40)}, codes.FailedPrecondition},
		"branch":     {&ciexecutorv1.StartOperationRequest{Pipeline: "p", Repository: repo, Revision: "main"}, codes.InvalidArgument},
		"parameter":  {&ciexecutorv1.StartOperationRequest{Pipeline: "p", Repository: repo, Revision: b.revision, Parameters: map[string]string{"X": "1"}}, codes.InvalidArgument},
	} {
		if _, err := b.ci.StartOperation(context.Background(), c.r); status.Code(err) != c.code {
			t.Errorf("%s: %v, want %v", name, err, c.code)
		}
	}
	for _, operation := range []string{"op-000000000000000000000000", "../../etc", "dry-run"} {
		if _, err := b.ci.GetOperation(context.Background(), &ciexecutorv1.GetOperationRequest{Pipeline: "p", Operation: operation}); status.Code(err) != codes.NotFound {
			t.Errorf("%s: %v", operation, err)
		}
	}
}

func TestDryRunHasNoEffect(t *testing.T) {
	b := newBench(t, map[string]local.Pipeline{"p": one("x", "true", "")})
	r, err := b.ci.StartOperation(plugintest.DryRun(context.Background()), &ciexecutorv1.StartOperationRequest{Pipeline: "p", Repository: repo, Revision: b.revision})
	if err != nil || r.GetOperation().GetState() != ciexecutorv1.OperationState_OPERATION_STATE_QUEUED || r.GetOperation().GetName() != "dry-run" {
		t.Errorf("%v, %v", r, err)
	}
	if left, _ := os.ReadDir(filepath.Join(b.data, "operations")); len(left) != 0 {
		t.Errorf("operations on disk: %v", left)
	}
}

// A CI that is killed while a step runs takes the step with it; the one after it
// says that the operation failed, and the key still has its one operation.
func TestKilledWhileRunning(t *testing.T) {
	if dir := os.Getenv("CI_TEST_KILLED"); dir != "" {
		b := &bench{TB: t, host: &plugintest.Host{}, data: filepath.Join(dir, "data"), bare: filepath.Join(dir, "w.git"), revision: os.Getenv("CI_TEST_REVISION")}
		b.ci = b.open(t, map[string]local.Pipeline{"p": one("hang", os.Getenv("CI_TEST_SCRIPT"), "")})
		b.start(plugintest.Key(context.Background(), "key-1"), "p")
		time.Sleep(time.Minute)
		return
	}
	b := newBench(t, map[string]local.Pipeline{"p": one("x", "true", "")})
	dir, pid := t.TempDir(), filepath.Join(t.TempDir(), "pid")
	script := "echo $$ > " + pid + ".new; mv " + pid + ".new " + pid + "; exec sleep 600"
	if err := os.Rename(b.bare, filepath.Join(dir, "w.git")); err != nil {
		t.Fatal(err)
	}
	b.bare, b.data = filepath.Join(dir, "w.git"), filepath.Join(dir, "data")
	cmd := exec.Command(os.Args[0], "-test.run=^TestKilledWhileRunning$")
	cmd.Env = append(os.Environ(), "CI_TEST_KILLED="+dir, "CI_TEST_REVISION="+b.revision, "CI_TEST_SCRIPT="+script)
	if err := os.Mkdir(b.data, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	child := waitForPid(t, pid)
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if alive(child) {
		t.Errorf("the step's process %d outlives its CI", child)
	}
	b.ci = b.open(t, map[string]local.Pipeline{"p": one("hang", script, "")})
	name := b.start(plugintest.Key(context.Background(), "key-1"), "p")
	if o := b.get("p", name); o.GetState() != ciexecutorv1.OperationState_OPERATION_STATE_FAILED || o.GetDetail() == "" {
		t.Errorf("after the restart: %v", o)
	}
}
