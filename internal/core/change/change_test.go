package change_test

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
)

var start = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

func request() change.Request {
	return change.Request{
		Repository: "acme/widget", Project: "acme", Ticket: "W-1", Executor: "fake",
		Requester: "human:alice", Author: "agent:fake", Reviewer: "agent:reviewer",
	}
}

func tree(n int) string { return fmt.Sprintf("%040x", 1<<20+n) }

func ref(n int) digest.Digest { return digest.Of([]byte(fmt.Sprintf("ref %d", n))) }

// good is a successful outcome of c in s, with units work units in the plan.
func good(s change.State, c change.Command, units int) change.Event {
	e := change.Event{Kind: change.Outcome, At: s.Updated.Add(time.Second), Command: c.ID, Class: change.OK}
	head := fmt.Sprintf("%040d", s.Revision+1)
	switch c.Kind {
	case change.Admit:
		e.Result.Admission = &change.Admission{BaseRevision: fmt.Sprintf("%040d", 0), Needs: s.Needs}
	case change.Intake:
		e.Result.Task = &change.Task{Ref: digest.Of([]byte("task"))}
	case change.Resolve:
		e.Result.Bundle = &change.Bundle{}
	case change.MakePlan:
		p := change.Plan{}
		for i := range units {
			p.Units = append(p.Units, change.Unit{ID: identity.WorkUnitID(fmt.Sprintf("unit-%d", i+1))})
		}
		e.Result.Plan = &p
	case change.Execute, change.Combine, change.Rebase:
		e.Result.Candidate = &change.Candidate{Snapshot: ref(s.Revision), Tree: tree(s.Revision), Head: head}
	case change.Verify:
		e.Result.Verdict = &change.Verdict{Passed: true, Tree: s.Candidate.Tree}
	case change.OpenPullRequest, change.UpdatePullRequest:
		e.Result.PullRequest = &change.PullRequest{ID: "1", Head: s.Candidate.Head}
	case change.Review:
		e.Result.Review = &change.Reviewed{Approve: true, By: s.Request.Reviewer, Head: s.PullRequest.Head}
	case change.AnchorHead:
		e.Result.Anchor = &change.Anchor{Origin: "log", Size: 1}
	case change.MergeChange:
		e.Result.Merge = &change.Merge{Revision: fmt.Sprintf("%040d", 99), Tree: s.Verdict.Tree}
	case change.RunPipeline:
		e.Result.Pipeline = &change.PipelineRun{ID: "p1", Succeeded: true}
	case change.Close:
		e.Result.Closing = &change.Closing{Records: 10, Evidence: "verified"}
	}
	return e
}

func bad(s change.State, c change.Command, class change.Class, why string) change.Event {
	return change.Event{Kind: change.Outcome, At: s.Updated.Add(time.Second), Command: c.ID, Class: class, Reason: why}
}

func must(t testing.TB, s change.State, e change.Event) change.State {
	t.Helper()
	next, err := change.Apply(s, e)
	if err != nil {
		t.Fatalf("apply %s %s: %v", e.Kind, e.Class, err)
	}
	return next
}

// until answers every command well until stop says so or nothing is open.
func until(t testing.TB, s change.State, stop func(change.State) bool) change.State {
	t.Helper()
	for i := 0; len(change.Next(s)) > 0 && !stop(s); i++ {
		if i > 200 {
			t.Fatalf("no end in sight at %s", s.Status)
		}
		s = must(t, s, good(s, change.Next(s)[0], 1))
	}
	return s
}

func open(kind change.CommandKind) func(change.State) bool {
	return func(s change.State) bool { return len(s.Open) > 0 && s.Open[0].Kind == kind }
}

func never(change.State) bool { return false }

func statuses(s change.State) []change.Status {
	var out []change.Status
	for _, st := range s.Stages {
		out = append(out, st.Name)
	}
	return out
}

func TestStraightPath(t *testing.T) {
	s := until(t, change.Propose("chg-a", request(), start), never)
	want := []change.Status{
		change.Proposed, change.Admitted, change.Resolving, change.Planning, change.Executing,
		change.Verifying, change.AwaitingApproval, change.Releasing, change.Released,
	}
	if d := cmp.Diff(want, statuses(s)); d != "" {
		t.Fatalf("stages (-want +got):\n%s", d)
	}
	if len(s.Approvals) != 1 || s.Approvals[0].By != "agent:reviewer" || s.Merge.Tree != s.Verdict.Tree {
		t.Fatalf("approvals %v, merge %v", s.Approvals, s.Merge)
	}
}

func TestWorkUnitsThatWaitForNothingRunTogetherAndAreCombined(t *testing.T) {
	s := until(t, change.Propose("chg-a", request(), start), open(change.MakePlan))
	s = must(t, s, good(s, s.Open[0], 3))
	if n := len(change.Next(s)); n != 3 {
		t.Fatalf("%d commands open, want 3", n)
	}
	for range 3 {
		s = must(t, s, good(s, s.Open[0], 0))
	}
	if s.Open[0].Kind != change.Combine {
		t.Fatalf("open %v, want combine", s.Open)
	}
	if s = until(t, s, never); s.Status != change.Released {
		t.Fatalf("ended %s: %s", s.Status, s.Failure.Reason)
	}
}

func TestRevisionVoidsVerdictAndApprovalsAndIsBounded(t *testing.T) {
	s := until(t, change.Propose("chg-a", request(), start), open(change.Review))
	for i := range s.Limits.Revisions {
		e := good(s, s.Open[0], 1)
		e.Result.Review.Approve = false
		s = must(t, s, e)
		if s.Status != change.Revising || s.Verdict.Passed || len(s.Approvals) != 0 || s.Revision != i+1 {
			t.Fatalf("after a refusal: %s, verdict %v, approvals %v, revision %d", s.Status, s.Verdict, s.Approvals, s.Revision)
		}
		s = until(t, s, open(change.Review))
	}
	e := good(s, s.Open[0], 1)
	e.Result.Review.Approve = false
	s = until(t, must(t, s, e), never)
	if s.Status != change.Failed || s.Failure.Class != change.Unverified {
		t.Fatalf("ended %s %v, want Failed", s.Status, s.Failure)
	}
	if !s.PullRequest.Closed {
		t.Fatal("the pull request of a failed Change is still open")
	}
}

// A merge of another tree than the verified one is impossible to pass over.
func TestBaseMovedRebasesVerifiesAgainAndVoidsApprovals(t *testing.T) {
	s := until(t, change.Propose("chg-a", request(), start), open(change.MergeChange))
	e := good(s, s.Open[0], 1)
	e.Result.Merge = &change.Merge{Moved: true, Base: fmt.Sprintf("%040d", 5)}
	s = must(t, s, e)
	if s.Open[0].Kind != change.Rebase || s.Verdict.Passed || len(s.Approvals) != 0 || s.Status != change.Verifying {
		t.Fatalf("after a move: %s %v verdict %v approvals %v", s.Status, s.Open, s.Verdict, s.Approvals)
	}
	s = must(t, s, good(s, s.Open[0], 1))
	if s.Open[0].Kind != change.Verify {
		t.Fatalf("open %v, want verify", s.Open)
	}
	s = must(t, s, good(s, s.Open[0], 1))
	if s.Open[0].Kind != change.UpdatePullRequest {
		t.Fatalf("open %v, want update-pull-request", s.Open)
	}
	if s = until(t, s, never); s.Status != change.Released || s.Rebased != 1 {
		t.Fatalf("ended %s", s.Status)
	}
}

func TestMergedTreeDiffersFromVerified(t *testing.T) {
	s := until(t, change.Propose("chg-a", request(), start), open(change.MergeChange))
	e := good(s, s.Open[0], 1)
	e.Result.Merge.Tree = tree(77)
	s = until(t, must(t, s, e), never)
	if s.Status != change.Failed {
		t.Fatalf("ended %s, want Failed", s.Status)
	}
}

func TestP173InconclusiveIsNeverPassed(t *testing.T) {
	s := until(t, change.Propose("chg-a", request(), start), open(change.Verify))
	for s.Status == change.Verifying {
		e := good(s, s.Open[0], 1)
		e.Result.Verdict.Inconclusive = true // and claims to have passed
		s = must(t, s, e)
		if s.Verdict.Passed {
			t.Fatal("an inconclusive verdict passed")
		}
	}
	if s = until(t, s, never); s.Status != change.Failed || s.Failure.Class != change.Unverified {
		t.Fatalf("ended %s %v", s.Status, s.Failure)
	}
}

// H-058, H-059.
func TestBudgetExhaustedEscalatesAndIsNotWidened(t *testing.T) {
	s := until(t, change.Propose("chg-a", request(), start), open(change.Execute))
	first := s.Open[0]
	e := bad(s, first, change.Exhausted, "actions: 40 of 40 used")
	e.Result.Checkpoint = ref(3)
	s = must(t, s, e)
	if s.Status != change.Escalated || !s.Waiting() {
		t.Fatalf("%s, open %v; want Escalated and waiting", s.Status, s.Open)
	}
	s = must(t, s, change.Event{Kind: change.ResumeRequested, At: s.Updated, By: "human:alice"})
	if s.Status != change.Executing || s.Open[0].Run == first.Run || s.Units[0].Checkpoint != ref(3) {
		t.Fatalf("%s %v, want a new run from the checkpoint", s.Status, s.Open)
	}
}

// H-060.
func TestLostRunStartsAnewFromItsCheckpoint(t *testing.T) {
	s := until(t, change.Propose("chg-a", request(), start), open(change.Execute))
	runs := map[identity.RunID]bool{}
	for s.Status == change.Executing {
		if runs[s.Open[0].Run] {
			t.Fatal("a lost run was used again")
		}
		runs[s.Open[0].Run] = true
		e := bad(s, s.Open[0], change.Lost, "runtime was killed")
		e.Result.Checkpoint = ref(4)
		s = must(t, s, e)
	}
	if len(runs) != s.Limits.Lost+1 {
		t.Fatalf("%d runs, want %d", len(runs), s.Limits.Lost+1)
	}
	if s = until(t, s, never); s.Status != change.Failed {
		t.Fatalf("ended %s", s.Status)
	}
}

func TestCancelRevokesGrantsFirst(t *testing.T) {
	for _, at := range []change.CommandKind{change.Admit, change.Execute, change.Verify, change.Review, change.AnchorHead} {
		t.Run(string(at), func(t *testing.T) {
			s := until(t, change.Propose("chg-a", request(), start), open(at))
			was := s.Open[0]
			s = must(t, s, change.Event{Kind: change.CancelRequested, At: s.Updated, By: "human:alice"})
			if len(s.Open) != 1 || s.Open[0].Kind != change.RevokeGrants {
				t.Fatalf("open %v, want revoke-grants alone", s.Open)
			}
			// What was in flight answers late and changes nothing.
			late := must(t, s, good(s, was, 1))
			if d := cmp.Diff(s.Open, late.Open); d != "" || late.Status != change.Compensating {
				t.Fatalf("a late outcome moved the Change: %s", d)
			}
			end := until(t, late, never)
			if end.Status != change.Cancelled || end.PullRequest.ID != "" && !end.PullRequest.Closed {
				t.Fatalf("ended %s, pull request %v", end.Status, end.PullRequest)
			}
		})
	}
}

func TestCancelDuringMergeLetsTheMergeDecide(t *testing.T) {
	s := until(t, change.Propose("chg-a", request(), start), open(change.MergeChange))
	s = must(t, s, change.Event{Kind: change.CancelRequested, At: s.Updated, By: "human:alice"})
	if s.Open[0].Kind != change.MergeChange {
		t.Fatalf("open %v, want the merge still", s.Open)
	}
	if end := until(t, s, never); end.Status != change.Released {
		t.Fatalf("merged but ended %s", end.Status)
	}
	if end := until(t, must(t, s, bad(s, s.Open[0], change.Infrastructure, "forge is away")), never); end.Status != change.Cancelled {
		t.Fatalf("not merged but ended %s", end.Status)
	}
}

func TestHumanApproval(t *testing.T) {
	s := until(t, change.Propose("chg-a", request(), start), open(change.Admit))
	e := good(s, s.Open[0], 1)
	e.Result.Admission.Needs = change.Needs{Reviewers: 1, Humans: 1}
	e.Result.Admission.Limits = &change.Limits{Retries: 1, ApprovalWait: time.Hour}
	s = until(t, must(t, s, e), never)
	if s.Status != change.AwaitingApproval || !s.Waiting() {
		t.Fatalf("%s, want to wait for approval", s.Status)
	}
	ok := change.Approval{By: "human:bob", Kind: identity.KindHuman, Head: s.PullRequest.Head, Tree: s.PullRequest.Tree}
	approve := func(change_ func(*change.Approval)) change.Event {
		a := ok
		change_(&a)
		return change.Event{Kind: change.Approved, At: s.Updated.Add(time.Minute), By: a.By, Approval: &a}
	}
	for name, a := range map[string]change.Event{
		"another head": approve(func(a *change.Approval) { a.Head = fmt.Sprintf("%040d", 8) }),
		"another tree": approve(func(a *change.Approval) { a.Tree = tree(9) }),
		"expired":      approve(func(a *change.Approval) { a.Expires = s.Updated }),
		"no head":      approve(func(a *change.Approval) { a.Head = "" }),
	} {
		if next := must(t, s, a); next.Status != change.AwaitingApproval {
			t.Errorf("%s: went to %s", name, next.Status)
		}
	}
	for name, a := range map[string]change.Event{
		"author":   approve(func(a *change.Approval) { a.By = s.Request.Author }),
		"reviewer": approve(func(a *change.Approval) { a.By = s.Request.Reviewer }),
		"agent":    approve(func(a *change.Approval) { a.Kind = identity.KindReviewerAgent }),
		"nobody":   {Kind: change.Approved, At: s.Updated},
	} {
		if _, err := change.Apply(s, a); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	late := must(t, s, change.Event{Kind: change.Timer, At: s.Deadline})
	if late.Status != change.Escalated {
		t.Fatalf("deadline passed: %s", late.Status)
	}
	for name, from := range map[string]change.State{"in time": s, "after the deadline": late} {
		if end := until(t, must(t, from, approve(func(*change.Approval) {})), never); end.Status != change.Released {
			t.Errorf("%s: ended %s", name, end.Status)
		}
	}
}

// P-118: a failed pipeline stops the release; a green one is no approval.
func TestP118PipelineIsAFact(t *testing.T) {
	r := request()
	r.Pipeline = "release"
	s := until(t, change.Propose("chg-a", r, start), open(change.RunPipeline))
	if s.Status != change.Releasing {
		t.Fatalf("pipeline at %s, want Releasing (P-112)", s.Status)
	}
	e := good(s, s.Open[0], 1)
	e.Result.Pipeline.Succeeded = false
	if end := until(t, must(t, s, e), never); end.Status != change.Failed || end.Merge.Revision != "" {
		t.Fatalf("ended %s, merge %v", end.Status, end.Merge)
	}
	if end := until(t, s, never); end.Status != change.Released {
		t.Fatalf("ended %s", end.Status)
	}
}

func TestDeniedCommandRefusesTheChange(t *testing.T) {
	s := until(t, change.Propose("chg-a", request(), start), open(change.OpenPullRequest))
	s = until(t, must(t, s, bad(s, s.Open[0], change.Denied, "no rule permits it")), never)
	if s.Status != change.Refused || s.Failure.Reason != "no rule permits it" {
		t.Fatalf("ended %s %v", s.Status, s.Failure)
	}
}

func TestPullRequestOfAFailedCommandIsClosed(t *testing.T) {
	s := until(t, change.Propose("chg-a", request(), start), open(change.OpenPullRequest))
	e := bad(s, s.Open[0], change.Broken, "done without evidence pr-ref")
	e.Result.PullRequest = &change.PullRequest{ID: "7", Head: s.Candidate.Head}
	s = until(t, must(t, s, e), open(change.Compensate))
	if s.PullRequest.ID != "7" || !open(change.Compensate)(s) {
		t.Fatalf("%s, open %v: want pull request 7 to be closed", s.Status, s.Open)
	}
	if s = until(t, s, never); s.Status != change.Failed {
		t.Fatalf("ended %s", s.Status)
	}
}

func TestCleaningUpIsNeverSkipped(t *testing.T) {
	s := until(t, change.Propose("chg-a", request(), start), open(change.Execute))
	s = must(t, s, change.Event{Kind: change.CancelRequested, At: s.Updated, By: "human:alice"})
	for s.Status == change.Compensating {
		s = must(t, s, bad(s, s.Open[0], change.Infrastructure, "disk is full"))
	}
	if s.Status != change.Escalated {
		t.Fatalf("%s, want Escalated", s.Status)
	}
	s = must(t, s, change.Event{Kind: change.ResumeRequested, At: s.Updated, By: "human:alice"})
	if s = until(t, s, never); s.Status != change.Cancelled {
		t.Fatalf("ended %s", s.Status)
	}
}

func TestOutcomeWithoutItsResultIsRefused(t *testing.T) {
	s := change.Propose("chg-a", request(), start)
	for i := 0; len(s.Open) > 0 && i < 50; i++ {
		c := s.Open[0]
		switch c.Kind {
		case change.RequestApproval, change.ReportTicket, change.RevokeGrants, change.DestroySandboxes:
		default:
			e := good(s, c, 1)
			e.Result = change.Result{}
			next, err := change.Apply(s, e)
			if err == nil {
				t.Errorf("%s: an empty result counted as success", c.Kind)
			}
			if d := cmp.Diff(s, next); d != "" {
				t.Errorf("%s: a refused event changed the state", c.Kind)
			}
		}
		s = must(t, s, good(s, c, 1))
	}
}

// draw makes any event that could arrive in s, likely or not.
func draw(t *rapid.T, s change.State) change.Event {
	at := s.Updated.Add(time.Duration(rapid.IntRange(0, 7200).Draw(t, "seconds")) * time.Second)
	switch rapid.IntRange(0, 19).Draw(t, "what") {
	case 0:
		return change.Event{Kind: change.CancelRequested, At: at, By: "human:alice"}
	case 1:
		return change.Event{Kind: change.ResumeRequested, At: at, By: "human:alice"}
	case 2:
		return change.Event{Kind: change.Timer, At: at}
	case 3, 4, 5:
		a := change.Approval{
			By:   rapid.SampledFrom([]identity.Principal{"human:bob", "human:carol", "agent:fake"}).Draw(t, "by"),
			Kind: identity.KindHuman, Head: s.PullRequest.Head, Tree: s.PullRequest.Tree, Action: s.Escalation.Action,
		}
		if rapid.IntRange(0, 3).Draw(t, "old head") == 0 {
			a.Head = fmt.Sprintf("%040d", s.Revision)
		}
		if rapid.Bool().Draw(t, "expires") {
			a.Expires = at.Add(time.Minute)
		}
		return change.Event{Kind: change.Approved, At: at, By: a.By, Approval: &a}
	case 6:
		if rapid.IntRange(0, 5).Draw(t, "withdrawn") == 0 {
			return change.Event{Kind: change.PolicyWithdrawn, At: at}
		}
	case 7:
		return change.Event{Kind: change.Outcome, At: at, Command: "cmd-nobody", Class: change.OK}
	}
	if len(s.Open) == 0 {
		return change.Event{Kind: change.Timer, At: at}
	}
	c := s.Open[rapid.IntRange(0, len(s.Open)-1).Draw(t, "which")]
	if rapid.IntRange(0, 4).Draw(t, "well") > 0 {
		e := good(s, c, rapid.IntRange(1, 3).Draw(t, "units"))
		e.At = at
		switch {
		case e.Result.Admission != nil:
			e.Result.Admission.Needs = change.Needs{Reviewers: rapid.IntRange(0, 1).Draw(t, "reviewers"), Humans: rapid.IntRange(0, 2).Draw(t, "humans")}
			e.Result.Admission.Limits = &change.Limits{Revisions: 2, Rebases: 2, Lost: 2, Retries: 1, ApprovalWait: time.Hour}
		case e.Result.Verdict != nil:
			e.Result.Verdict.Passed = rapid.Bool().Draw(t, "passed")
			e.Result.Verdict.Inconclusive = rapid.IntRange(0, 4).Draw(t, "inconclusive") == 0
		case e.Result.Review != nil:
			e.Result.Review.Approve = rapid.Bool().Draw(t, "approve")
		case e.Result.Merge != nil && rapid.Bool().Draw(t, "moved"):
			e.Result.Merge = &change.Merge{Moved: true}
		}
		return e
	}
	e := bad(s, c, rapid.SampledFrom([]change.Class{
		change.Denied, change.Escalate, change.Exhausted, change.Unverified,
		change.Infrastructure, change.Broken, change.Lost, change.Interrupted, "nonsense",
	}).Draw(t, "class"), "")
	e.At = at
	if e.Class == change.Escalate && rapid.Bool().Draw(t, "by action") {
		e.Result.Action = ref(1000)
	}
	return e
}

func TestPropertiesOfEveryPath(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := request()
		if rapid.Bool().Draw(t, "pipeline") {
			r.Pipeline = "release"
		}
		r.Report = rapid.Bool().Draw(t, "report")
		first := change.Propose("chg-a", r, start)
		s := first
		issued := map[change.CommandID]change.Command{}
		seen := func(s change.State, before []change.Command) {
			for _, c := range change.Next(s) {
				stays := false
				for _, b := range before {
					stays = stays || b.ID == c.ID
				}
				if old, known := issued[c.ID]; known && !stays {
					t.Fatalf("command %s issued twice: %v and %v", c.ID, old, c)
				}
				if !identity.ValidID(c.ID) || !identity.ValidID(c.Run) {
					t.Fatalf("ids of %v", c)
				}
				issued[c.ID] = c
			}
		}
		seen(s, nil)
		var events []change.Event
		for range rapid.IntRange(5, 120).Draw(t, "length") {
			e := draw(t, s)
			before, _ := json.Marshal(s)
			next, err := change.Apply(s, e)
			if after, _ := json.Marshal(s); string(before) != string(after) {
				t.Fatal("apply changed the state it was given")
			}
			if err != nil {
				continue
			}
			events = append(events, e)
			seen(next, s.Open)
			all := next.Issued()
			if len(all) != len(issued) || len(next.Runs())+len(next.Open) != len(issued) {
				t.Fatalf("%d commands were issued, the state knows %d", len(issued), len(all))
			}
			for _, c := range all {
				if issued[c.ID].Run != c.Run || issued[c.ID].Step() != c.Step() {
					t.Fatalf("the state makes %v of %v", c, issued[c.ID])
				}
			}
			if next.Status.Terminal() && len(change.Next(next)) > 0 {
				t.Fatalf("terminal %s has commands %v", next.Status, next.Open)
			}
			if s.Status.Terminal() && next.Status != s.Status {
				t.Fatalf("%s was left for %s", s.Status, next.Status)
			}
			if next.Status == change.Releasing && s.Status == change.AwaitingApproval && !next.Approvable(e.At) {
				t.Fatalf("released without verdict or approvals: %v %v", next.Verdict, next.Approvals)
			}
			for _, c := range next.Open {
				fresh := true
				for _, b := range s.Open {
					fresh = fresh && b.ID != c.ID
				}
				if c.Kind == change.MergeChange && fresh && !next.Approvable(e.At) {
					t.Fatalf("merge without verdict or approvals: %v %v", next.Verdict, next.Approvals)
				}
			}
			if next.Revised > next.Limits.Revisions || next.Rebased > next.Limits.Rebases {
				t.Fatalf("bounds passed: %d revisions, %d rebases", next.Revised, next.Rebased)
			}
			if next.Status == change.Released && (next.Merge.Revision == "" || next.Merge.Tree != next.Verdict.Tree) {
				t.Fatalf("released without a merge of the verified tree")
			}
			if (next.Status == change.Cancelled || next.Status == change.Failed || next.Status == change.Refused) &&
				next.PullRequest.ID != "" && !next.PullRequest.Closed {
				t.Fatalf("%s with an open pull request", next.Status)
			}
			s = next
		}
		// The same events give the same bytes, also through JSON.
		again := first
		for _, e := range events {
			raw, err := json.Marshal(again)
			if err != nil {
				t.Fatal(err)
			}
			var read change.State
			if err := json.Unmarshal(raw, &read); err != nil {
				t.Fatal(err)
			}
			if again, err = change.Apply(read, e); err != nil {
				t.Fatal(err)
			}
		}
		a, _ := json.Marshal(s)
		b, _ := json.Marshal(again)
		if string(a) != string(b) {
			t.Fatalf("replay differs:\n%s\n%s", a, b)
		}
	})
}
