package orchestration_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/host/journal"
	"github.com/numinance/numinance/internal/host/store"
	"github.com/numinance/numinance/internal/orchestration"
)

func ref(s string) digest.Digest { return digest.Of([]byte(s)) }

func commit(n int) string { return fmt.Sprintf("%040x", n) }

// script is Steps that do well and leave a note of each call; before is called
// first and may make a step fail.
type script struct {
	before func(ctx context.Context, j orchestration.Job) error
	needs  change.Needs

	mu    sync.Mutex
	notes []string
}

func (s *script) do(ctx context.Context, j orchestration.Job) error {
	s.mu.Lock()
	s.notes = append(s.notes, j.Command.Step())
	s.mu.Unlock()
	if s.before != nil {
		return s.before(ctx, j)
	}
	return nil
}

func (s *script) did() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.notes, " ")
}

func (s *script) Admit(ctx context.Context, j orchestration.Job) (change.Admission, error) {
	return change.Admission{BaseBranch: "main", BaseRevision: commit(1), Needs: s.needs}, s.do(ctx, j)
}
func (s *script) Intake(ctx context.Context, j orchestration.Job) (change.Task, error) {
	return change.Task{Ref: ref("task"), Key: "W-1"}, s.do(ctx, j)
}
func (s *script) Resolve(ctx context.Context, j orchestration.Job) (change.Bundle, error) {
	return change.Bundle{}, s.do(ctx, j)
}
func (s *script) Plan(ctx context.Context, j orchestration.Job) (change.Plan, error) {
	return change.Plan{Units: []change.Unit{{ID: "unit-1"}}}, s.do(ctx, j)
}
func (s *script) candidate(ctx context.Context, j orchestration.Job) (change.Candidate, error) {
	n := j.State.Revision + 100
	return change.Candidate{Snapshot: ref("snapshot"), Tree: commit(n), Head: commit(n + 1000)}, s.do(ctx, j)
}
func (s *script) Execute(ctx context.Context, j orchestration.Job) (change.Candidate, error) {
	return s.candidate(ctx, j)
}
func (s *script) Combine(ctx context.Context, j orchestration.Job) (change.Candidate, error) {
	return s.candidate(ctx, j)
}
func (s *script) Rebase(ctx context.Context, j orchestration.Job) (change.Candidate, error) {
	return s.candidate(ctx, j)
}
func (s *script) Verify(ctx context.Context, j orchestration.Job) (change.Verdict, error) {
	return change.Verdict{Passed: true, Tree: j.State.Candidate.Tree}, s.do(ctx, j)
}
func (s *script) Review(ctx context.Context, j orchestration.Job) (change.Reviewed, error) {
	return change.Reviewed{Approve: true, By: j.State.Request.Reviewer, Head: j.State.PullRequest.Head}, s.do(ctx, j)
}
func (s *script) pull(ctx context.Context, j orchestration.Job) (change.PullRequest, error) {
	return change.PullRequest{ID: "1", Head: j.State.Candidate.Head}, s.do(ctx, j)
}
func (s *script) OpenPullRequest(ctx context.Context, j orchestration.Job) (change.PullRequest, error) {
	return s.pull(ctx, j)
}
func (s *script) UpdatePullRequest(ctx context.Context, j orchestration.Job) (change.PullRequest, error) {
	return s.pull(ctx, j)
}
func (s *script) RequestApproval(ctx context.Context, j orchestration.Job) error { return s.do(ctx, j) }
func (s *script) Pipeline(ctx context.Context, j orchestration.Job) (change.PipelineRun, error) {
	return change.PipelineRun{ID: "p", Succeeded: true}, s.do(ctx, j)
}
func (s *script) Anchor(ctx context.Context, j orchestration.Job) (change.Anchor, error) {
	return change.Anchor{Origin: "log", Size: 1}, s.do(ctx, j)
}
func (s *script) Merge(ctx context.Context, j orchestration.Job) (change.Merge, error) {
	return change.Merge{Revision: commit(9), Tree: j.State.Verdict.Tree}, s.do(ctx, j)
}
func (s *script) ReportTicket(ctx context.Context, j orchestration.Job) error { return s.do(ctx, j) }
func (s *script) RevokeGrants(ctx context.Context, j orchestration.Job) error { return s.do(ctx, j) }
func (s *script) DestroySandboxes(ctx context.Context, j orchestration.Job) error {
	return s.do(ctx, j)
}
func (s *script) Compensate(ctx context.Context, j orchestration.Job) (orchestration.Compensation, error) {
	pr := j.State.PullRequest
	pr.Closed = true
	return orchestration.Compensation{PullRequest: pr}, s.do(ctx, j)
}
func (s *script) Close(ctx context.Context, j orchestration.Job) (change.Closing, error) {
	return change.Closing{Records: 12, Head: ref("head"), Origin: "log", Size: 2, Evidence: "verified"}, s.do(ctx, j)
}

var _ orchestration.Steps = (*script)(nil)

func request() change.Request {
	return change.Request{
		Repository: "acme/widget", Project: "acme", Ticket: "W-1", Executor: "fake",
		Requester: "human:alice", Author: "agent:fake", Reviewer: "agent:reviewer",
	}
}

type house struct {
	dir      string
	steps    orchestration.Steps
	recorder *orchestration.Journal
	runner   *orchestration.Runner
	close    func()
}

func open(t testing.TB, dir string, steps orchestration.Steps) *house {
	t.Helper()
	path := filepath.Join(dir, "state.db")
	j, err := journal.Open(t.Context(), journal.Config{Path: path, Holder: "test", Spill: filepath.Join(dir, "spill"), Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	db, err := store.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	h := &house{dir: dir, steps: steps, recorder: orchestration.NewJournal(j)}
	h.runner, err = orchestration.Open(t.Context(), orchestration.Config{
		DB: db, Recorder: h.recorder, Steps: steps, Executor: "test", Now: time.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	h.close = func() {
		once.Do(func() {
			if err := h.runner.Close(10 * time.Second); err != nil {
				t.Error(err)
			}
			if err := errors.Join(j.Close(), db.Close()); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(h.close)
	return h
}

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestRunToReleased(t *testing.T) {
	steps := &script{}
	h := open(t, t.TempDir(), steps)
	s, err := h.runner.Run(within(t), "chg-a", request())
	if err != nil {
		t.Fatal(err)
	}
	if s.Status != change.Released || orchestration.ExitCode(s) != 0 {
		t.Fatalf("ended %s %v", s.Status, s.Failure)
	}
	want := "admit#1 intake#1 resolve#1 plan#1 execute/unit-1#1 verify#1 open-pull-request#1 review#1 " +
		"anchor#1 merge#1 revoke-grants#1 destroy-sandboxes#1 close#1"
	if d := cmp.Diff(want, steps.did()); d != "" {
		t.Fatalf("steps (-want +got):\n%s", d)
	}
	r := orchestration.ResultOf(s)
	if r.MergedRevision != commit(9) || r.PullRequest != "1" || r.Records != 12 || r.Evidence != "verified" || len(r.Stages) != 8 {
		t.Fatalf("result %+v", r)
	}
}

func TestExitCodes(t *testing.T) {
	fail := func(kind change.CommandKind, err error) *script {
		return &script{before: func(_ context.Context, j orchestration.Job) error {
			if j.Command.Kind == kind {
				return err
			}
			return nil
		}}
	}
	for name, tc := range map[string]struct {
		steps  *script
		status change.Status
		exit   int
	}{
		"denied":         {fail(change.OpenPullRequest, &orchestration.Error{Class: change.Denied, Reason: "no rule permits it"}), change.Refused, 3},
		"escalated":      {fail(change.Execute, &orchestration.Error{Class: change.Escalate, Reason: "ask security"}), change.Escalated, 3},
		"exhausted":      {fail(change.Execute, &orchestration.Error{Class: change.Exhausted, Reason: "budget"}), change.Escalated, 3},
		"unverified":     {fail(change.Verify, &orchestration.Error{Class: change.Unverified, Reason: "check missing"}), change.Failed, 4},
		"infrastructure": {fail(change.Execute, errors.New("sandbox is gone")), change.Failed, 5},
		"no class":       {fail(change.Execute, &orchestration.Error{Class: "fine"}), change.Failed, 5},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := open(t, t.TempDir(), tc.steps)
			s, err := h.runner.Run(within(t), "chg-a", request())
			if err != nil {
				t.Fatal(err)
			}
			if s.Status != tc.status || orchestration.ExitCode(s) != tc.exit {
				t.Fatalf("ended %s, exit %d (%s); want %s, %d", s.Status, orchestration.ExitCode(s), s.Failure.Reason, tc.status, tc.exit)
			}
		})
	}
}

func TestCancelInTheMiddleOfARun(t *testing.T) {
	begun := make(chan bool, 1)
	steps := &script{before: func(ctx context.Context, j orchestration.Job) error {
		if j.Command.Kind == change.Execute {
			begun <- true
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	}}
	h := open(t, t.TempDir(), steps)
	if err := h.runner.Propose(within(t), "chg-a", request()); err != nil {
		t.Fatal(err)
	}
	<-begun
	s, err := h.runner.Cancel(within(t), "chg-a", "human:alice", "changed my mind")
	if err != nil {
		t.Fatal(err)
	}
	if s.Status != change.Cancelled || s.Failure.Reason != "changed my mind" {
		t.Fatalf("ended %s %v", s.Status, s.Failure)
	}
	if got := steps.did(); !strings.HasSuffix(got, "plan#1 execute/unit-1#1 revoke-grants#1 destroy-sandboxes#1 close#1") {
		t.Fatalf("steps %s: want the grants revoked first and no second run", got)
	}
}

// A cancel that was sent before the process ended is applied before anything of
// the Change runs again.
func TestCancelIsReadBeforeAnythingRunsAgain(t *testing.T) {
	dir := t.TempDir()
	begun, let := make(chan bool, 1), make(chan bool)
	h := open(t, dir, &script{before: func(_ context.Context, j orchestration.Job) error {
		if j.Command.Kind == change.Execute {
			begun <- true
			<-let // deaf to the interruption, until the process is ending
		}
		return nil
	}})
	if err := h.runner.Propose(within(t), "chg-a", request()); err != nil {
		t.Fatal(err)
	}
	<-begun
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := h.runner.Cancel(ctx, "chg-a", "human:alice", "stop"); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("cancel: %v", err)
	}
	time.AfterFunc(200*time.Millisecond, func() { close(let) })
	h.close()
	steps := &script{}
	h = open(t, dir, steps)
	s, err := h.runner.Resume(within(t), "chg-a", "human:alice")
	if err != nil || s.Status != change.Cancelled {
		t.Fatalf("%s %v", s.Status, err)
	}
	if got := steps.did(); got != "revoke-grants#1 destroy-sandboxes#1 close#1" {
		t.Fatalf("steps %s: the run went on before the cancel was read", got)
	}
}

func TestStopAndGoOn(t *testing.T) {
	dir := t.TempDir()
	begun := make(chan bool, 1)
	first := &script{before: func(ctx context.Context, j orchestration.Job) error {
		if j.Command.Kind == change.Verify {
			begun <- true
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	}}
	h := open(t, dir, first)
	if err := h.runner.Propose(within(t), "chg-a", request()); err != nil {
		t.Fatal(err)
	}
	<-begun
	h.close()
	second := &script{}
	h = open(t, dir, second)
	s, err := h.runner.Resume(within(t), "chg-a", "human:alice")
	if err != nil {
		t.Fatal(err)
	}
	if s.Status != change.Released || !strings.HasPrefix(second.did(), "verify#1 open-pull-request#1") {
		t.Fatalf("ended %s after %s; want to go on at the command that was cut off, under the same id", s.Status, second.did())
	}
}

func TestEscalatedWaitsOverARestart(t *testing.T) {
	dir := t.TempDir()
	h := open(t, dir, &script{before: func(_ context.Context, j orchestration.Job) error {
		if j.Command.Kind == change.Execute {
			return &orchestration.Error{Class: change.Exhausted, Reason: "budget", Checkpoint: ref("checkpoint")}
		}
		return nil
	}})
	if s, err := h.runner.Run(within(t), "chg-a", request()); err != nil || s.Status != change.Escalated {
		t.Fatalf("%s %v", s.Status, err)
	}
	h.close()
	steps := &script{before: func(_ context.Context, j orchestration.Job) error {
		if j.Command.Kind == change.Execute && j.Unit().Checkpoint != ref("checkpoint") {
			return errors.New("not from the checkpoint")
		}
		return nil
	}}
	h = open(t, dir, steps)
	if s, err := h.runner.Wait(within(t), "chg-a"); err != nil || s.Status != change.Escalated {
		t.Fatalf("after a restart: %s %v", s.Status, err)
	}
	s, err := h.runner.Resume(within(t), "chg-a", "human:alice")
	if err != nil || s.Status != change.Released {
		t.Fatalf("%s %v", s.Status, err)
	}
	if !strings.HasPrefix(steps.did(), "execute/unit-1#2") {
		t.Fatalf("steps %s: want a new attempt", steps.did())
	}
}

func TestHumanApprovesAfterARestart(t *testing.T) {
	dir := t.TempDir()
	steps := &script{needs: change.Needs{Reviewers: 1, Humans: 1}}
	h := open(t, dir, steps)
	s, err := h.runner.Run(within(t), "chg-a", request())
	if err != nil || s.Status != change.AwaitingApproval || orchestration.ExitCode(s) != 3 {
		t.Fatalf("%s %v", s.Status, err)
	}
	h.close()
	h = open(t, dir, steps)
	s, err = h.runner.Approve(within(t), "chg-a", change.Approval{
		By: "human:bob", Kind: identity.KindHuman, Head: s.PullRequest.Head, Tree: s.PullRequest.Tree,
	})
	if err != nil || s.Status != change.Released {
		t.Fatalf("%s %v", s.Status, err)
	}
}

// flaky is a Recorder whose disk is full for a while.
type flaky struct {
	orchestration.Recorder
	mu   sync.Mutex
	full bool
}

func (f *flaky) set(full bool) { f.mu.Lock(); f.full = full; f.mu.Unlock() }

func (f *flaky) Record(ctx context.Context, e orchestration.Entry) error {
	f.mu.Lock()
	full := f.full
	f.mu.Unlock()
	if full {
		return errors.New("disk is full")
	}
	return f.Recorder.Record(ctx, e)
}

func TestNothingFollowsAnEventThatIsNotRecorded(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state.db")
	j, err := journal.Open(t.Context(), journal.Config{Path: path, Holder: "test", Spill: filepath.Join(dir, "spill"), Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	db, err := store.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	rec := &flaky{Recorder: orchestration.NewJournal(j)}
	steps := &script{before: func(_ context.Context, j orchestration.Job) error {
		if j.Command.Kind == change.Execute {
			rec.set(true)
		}
		return nil
	}}
	r, err := orchestration.Open(t.Context(), orchestration.Config{
		DB: db, Recorder: rec, Steps: steps, Executor: "test", Now: time.Now, Patience: 200 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close(5 * time.Second) //nolint:errcheck // the test is over
	s, err := r.Run(within(t), "chg-a", request())
	if err == nil || !strings.Contains(err.Error(), "disk is full") || s.Status != change.Executing {
		t.Fatalf("%s %v, want to be told of the disk", s.Status, err)
	}
	if got := steps.did(); !strings.HasSuffix(got, "execute/unit-1#1") {
		t.Fatalf("steps %s: something followed", got)
	}
	rec.set(false)
	for { // the fault is over once something is recorded again
		if s, err = r.Wait(within(t), "chg-a"); err == nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if s.Status != change.Released {
		t.Fatalf("ended %s %v", s.Status, s.Failure)
	}
}

func TestReadModelRebuildsToTheSameBytes(t *testing.T) {
	h := open(t, t.TempDir(), &script{before: func(_ context.Context, j orchestration.Job) error {
		if j.State.ID == "chg-b" && j.Command.Kind == change.MergeChange {
			return errors.New("forge is away")
		}
		return nil
	}})
	for _, id := range []identity.ChangeID{"chg-a", "chg-b"} {
		if _, err := h.runner.Run(within(t), id, request()); err != nil {
			t.Fatal(err)
		}
	}
	before, err := h.runner.List(t.Context(), 10)
	if err != nil {
		t.Fatal(err)
	}
	db, err := store.Open(t.Context(), filepath.Join(h.dir, "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.ExecContext(t.Context(), `DROP TABLE change_view; DELETE FROM schema_step WHERE component = 'change-view'`); err != nil {
		t.Fatal(err)
	}
	view, err := orchestration.OpenReadModel(t.Context(), db)
	if err != nil {
		t.Fatal(err)
	}
	if err := view.Rebuild(t.Context(), h.recorder); err != nil {
		t.Fatal(err)
	}
	after, err := h.runner.List(t.Context(), 10)
	if err != nil {
		t.Fatal(err)
	}
	a, _ := json.Marshal(before)
	b, _ := json.Marshal(after)
	if len(before) != 2 || string(a) != string(b) {
		t.Fatalf("rebuilt rows differ:\n%s\n%s", a, b)
	}
}

func TestTwoChangesAtOnce(t *testing.T) {
	h := open(t, t.TempDir(), &script{})
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			s, err := h.runner.Run(within(t), identity.ChangeID(fmt.Sprintf("chg-%d", i)), request())
			if err != nil || s.Status != change.Released {
				t.Errorf("%s %v", s.Status, err)
			}
		})
	}
	wg.Wait()
}

func TestProposeRefuses(t *testing.T) {
	h := open(t, t.TempDir(), &script{})
	for name, edit := range map[string]func(*change.Request){
		"no repository":    func(r *change.Request) { r.Repository = "" },
		"no ticket":        func(r *change.Request) { r.Ticket = "" },
		"one party":        func(r *change.Request) { r.Reviewer = r.Author },
		"nobody requested": func(r *change.Request) { r.Requester = "" },
	} {
		req := request()
		edit(&req)
		if err := h.runner.Propose(t.Context(), "chg-a", req); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if err := h.runner.Propose(t.Context(), identity.SystemChange, request()); err == nil {
		t.Error("the system chain's id was accepted")
	}
	if _, err := h.runner.Cancel(t.Context(), "chg-none", "human:alice", ""); !errors.Is(err, orchestration.ErrUnknownChange) {
		t.Errorf("cancel of no Change: %v", err)
	}
}

// TestKill runs itself as a child that is killed at a step, after the step's
// effect and before its outcome is recorded, until the Change is released.
func TestKill(t *testing.T) {
	kinds := []change.CommandKind{change.Admit, change.Execute, change.Verify, change.OpenPullRequest, change.MergeChange, change.Close}
	dir := os.Getenv("NUMI_RUNNER_KILL")
	if dir != "" {
		h := open(t, dir, &script{before: func(_ context.Context, j orchestration.Job) error {
			f, err := os.OpenFile(filepath.Join(dir, "effect-"+string(j.Command.ID)), os.O_CREATE|os.O_EXCL, 0o600)
			if errors.Is(err, os.ErrExist) {
				return nil // done before: the same id, so the same ledger entry
			}
			if err != nil {
				return err
			}
			_ = f.Close()
			for _, k := range kinds {
				if k == j.Command.Kind {
					_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				}
			}
			return nil
		}})
		s, err := h.runner.Run(within(t), "chg-a", request())
		if err != nil || s.Status != change.Released {
			t.Fatalf("%s %v", s.Status, err)
		}
		return
	}
	dir = t.TempDir()
	kills := 0
	for range len(kinds) + 1 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKill$")
		cmd.Env = append(os.Environ(), "NUMI_RUNNER_KILL="+dir)
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if errors.As(err, &exit) && strings.Contains(exit.String(), "killed") {
			kills++
			continue
		}
		if err != nil {
			t.Fatalf("child: %v\n%s", err, out)
		}
		break
	}
	effects, err := filepath.Glob(filepath.Join(dir, "effect-*"))
	if err != nil || len(effects) != 13 || kills != len(kinds) {
		t.Fatalf("%d kills, %d effects, want %d and 13 (%v)", kills, len(effects), len(kinds), err)
	}
	h := open(t, dir, &script{})
	var seqs []int
	if err := h.recorder.Replay(t.Context(), func(e orchestration.Entry) error { seqs = append(seqs, e.Seq); return nil }); err != nil {
		t.Fatal(err)
	}
	for i, seq := range seqs {
		if seq != i {
			t.Fatalf("events recorded %v: one is missing or twice", seqs)
		}
	}
}
