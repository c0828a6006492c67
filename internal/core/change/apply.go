package change

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
)

// ErrInvalid is wrapped by every error of Apply: the event is malformed, as
// opposed to late or pointless, which is no error.
var ErrInvalid = errors.New("invalid event")

// Apply returns the state after e. It changes nothing that s refers to. An
// event that comes too late, such as the outcome of a command that a cancel
// took back, is counted and changes nothing else; a malformed one is an error
// and is not counted.
func Apply(s State, e Event) (State, error) {
	if e.At.IsZero() {
		return s, fmt.Errorf("%w: no time", ErrInvalid)
	}
	next := s.clone()
	next.Seq++
	next.Updated = e.At
	if next.Status.Terminal() {
		return next, nil
	}
	next, err := next.apply(e)
	if err != nil {
		return s, err
	}
	return next, nil
}

func (s State) apply(e Event) (State, error) {
	switch e.Kind {
	case Outcome:
		return s.outcome(e)
	case Approved:
		return s.approved(e)
	case CancelRequested:
		return s.cancelled(e), nil
	case ResumeRequested:
		return s.resumed(e)
	case Timer:
		return s.timer(e), nil
	case PolicyWithdrawn:
		if s.Target == "" && s.Merge.Revision == "" {
			s.windDown(Refused, Failure{Class: Denied, Reason: reason(e.Reason, "the policy was withdrawn")}, e.At)
		}
		return s, nil
	default:
		return s, fmt.Errorf("%w: unknown kind %q", ErrInvalid, e.Kind)
	}
}

func (s State) outcome(e Event) (State, error) {
	i := slices.IndexFunc(s.Open, func(c Command) bool { return c.ID == e.Command })
	if i < 0 {
		return s, nil // taken back by a cancel, a revision or an earlier outcome
	}
	c := s.Open[i]
	if e.Class == OK {
		if err := s.check(c, e.Result); err != nil {
			return s, err
		}
	}
	s.Open = slices.Delete(s.Open, i, i+1)
	if c.Kind == MergeChange && s.CancelAsked != "" && (e.Class != OK || e.Result.Merge.Moved) {
		s.windDown(Cancelled, Failure{Class: CancelledClass, Reason: s.CancelAsked}, e.At)
		return s, nil
	}
	if cp := e.Result.Checkpoint; cp != "" {
		s.setCheckpoint(c.Unit, cp)
	}
	if pr := e.Result.PullRequest; e.Class != OK && pr != nil && s.PullRequest.ID == "" {
		s.PullRequest = *pr // it exists although the command failed: it is closed
	}
	switch e.Class {
	case OK:
		s.succeeded(c, e)
	case Interrupted:
		s.again(c, c.Faults)
	case Infrastructure:
		switch {
		case c.Faults < s.Limits.Retries:
			s.again(c, c.Faults+1)
		case s.windingDown(c):
			// What must be undone is never skipped: somebody has to look.
			s.escalate(Escalation{Reason: reason(e.Reason, "cleaning up failed"), Retry: []Command{c}}, e.At)
		default:
			s.windDown(Failed, Failure{Infrastructure, reason(e.Reason, "infrastructure failed"), c.ID}, e.At)
		}
	case Broken:
		if s.windingDown(c) {
			s.escalate(Escalation{Reason: reason(e.Reason, "cleaning up failed"), Retry: []Command{c}}, e.At)
			break
		}
		s.windDown(Failed, Failure{Broken, reason(e.Reason, "failed for good"), c.ID}, e.At)
	case Lost:
		if s.Lost++; s.Lost > s.Limits.Lost {
			s.windDown(Failed, Failure{Infrastructure, reason(e.Reason, "run lost too often"), c.ID}, e.At)
			break
		}
		s.again(c, c.Faults)
	case Denied:
		if s.windingDown(c) {
			s.escalate(Escalation{Reason: reason(e.Reason, "cleaning up was denied"), Retry: []Command{c}}, e.At)
			break
		}
		s.windDown(Refused, Failure{Denied, reason(e.Reason, "denied by policy"), c.ID}, e.At)
	case Escalate, Exhausted:
		s.escalate(Escalation{
			Reason: reason(e.Reason, string(e.Class)), Ask: e.Result.Ask, Action: e.Result.Action,
			Retry: []Command{c},
		}, e.At)
	case Unverified:
		if s.windingDown(c) {
			s.escalate(Escalation{Reason: reason(e.Reason, "cleaning up failed"), Retry: []Command{c}}, e.At)
			break
		}
		if c.Kind == Verify && c.Faults < s.Limits.Retries {
			s.again(c, c.Faults+1) // inconclusive, never passed
			break
		}
		s.windDown(Failed, Failure{Unverified, reason(e.Reason, "verification did not pass"), c.ID}, e.At)
	default:
		return s, fmt.Errorf("%w: outcome class %q", ErrInvalid, e.Class)
	}
	return s, nil
}

// check refuses a successful outcome that lacks what its command is for, so
// that a hole in a step can never count as a pass.
func (s State) check(c Command, r Result) error {
	missing := func(ok bool) error {
		if ok {
			return nil
		}
		return fmt.Errorf("%w: outcome of %s without its result", ErrInvalid, c.Kind)
	}
	switch c.Kind {
	case Admit:
		if err := missing(r.Admission != nil && r.Admission.BaseRevision != ""); err != nil {
			return err
		}
		if l := r.Admission.Limits; l != nil && (min(l.Revisions, l.Rebases, l.Lost, l.Retries) < 0 ||
			l.ApprovalWait < 0 || l.ApprovalWait > MaxApprovalWait) {
			return fmt.Errorf("%w: limits %+v: none may be negative, and approval_wait is at most %s", ErrInvalid, *l, MaxApprovalWait)
		}
		return nil
	case Intake:
		return missing(r.Task != nil && r.Task.Ref != "")
	case Resolve:
		return missing(r.Bundle != nil)
	case MakePlan:
		if err := missing(r.Plan != nil && len(r.Plan.Units) > 0); err != nil {
			return err
		}
		return checkUnits(r.Plan.Units)
	case Execute, Combine, Rebase:
		return missing(r.Candidate != nil && r.Candidate.Tree != "" && r.Candidate.Head != "" && r.Candidate.Snapshot != "")
	case Verify:
		return missing(r.Verdict != nil && r.Verdict.Tree != "")
	case OpenPullRequest, UpdatePullRequest:
		return missing(r.PullRequest != nil && r.PullRequest.ID != "" && r.PullRequest.Head != "")
	case Review:
		return missing(r.Review != nil && r.Review.By != "" && r.Review.Head != "")
	case AnchorHead:
		return missing(r.Anchor != nil)
	case MergeChange:
		return missing(r.Merge != nil && (r.Merge.Moved || r.Merge.Revision != "" && r.Merge.Tree != ""))
	case RunPipeline:
		return missing(r.Pipeline != nil && r.Pipeline.ID != "")
	case Close:
		return missing(r.Closing != nil)
	default:
		return nil
	}
}

// checkUnits wants ids that are ids, once each, and an order without a loop:
// a unit builds only on units before it.
func checkUnits(units []Unit) error {
	seen := map[identity.WorkUnitID]bool{}
	for _, u := range units {
		if !identity.ValidID(u.ID) || seen[u.ID] {
			return fmt.Errorf("%w: work unit id %q is malformed or not unique", ErrInvalid, u.ID)
		}
		for _, before := range u.After {
			if !seen[before] {
				return fmt.Errorf("%w: work unit %s builds on %q, which does not come before it", ErrInvalid, u.ID, before)
			}
		}
		seen[u.ID] = true
	}
	return nil
}

func (s *State) succeeded(c Command, e Event) {
	r, at := e.Result, e.At
	switch c.Kind {
	case Admit:
		s.Admission = *r.Admission
		if r.Admission.Limits != nil {
			s.Limits = *r.Admission.Limits
		}
		if s.Needs = r.Admission.Needs; s.Needs.Reviewers <= 0 && s.Needs.Humans <= 0 {
			s.Needs.Reviewers = 1
		}
		s.enter(Admitted, at)
		s.issue(Intake, "")
	case Intake:
		s.Task = *r.Task
		s.enter(Resolving, at)
		s.issue(Resolve, "")
	case Resolve:
		s.Bundle = *r.Bundle
		s.enter(Planning, at)
		s.issue(MakePlan, "")
	case MakePlan:
		s.Plan = *r.Plan
		s.Units = slices.Clone(r.Plan.Units)
		s.enter(Executing, at)
		s.startUnits()
	case Execute:
		for i := range s.Units {
			if s.Units[i].ID == c.Unit {
				s.Units[i].Done, s.Units[i].Result, s.Units[i].Checkpoint = true, *r.Candidate, ""
			}
		}
		s.startUnits()
		if len(s.Open) > 0 {
			return
		}
		if len(s.Units) > 1 {
			s.issue(Combine, "")
			return
		}
		s.verify(*r.Candidate, at)
	case Combine, Rebase:
		s.verify(*r.Candidate, at)
	case Verify:
		s.judged(*r.Verdict, c, at)
	case OpenPullRequest, UpdatePullRequest:
		pr := *r.PullRequest
		if pr.Head != s.Candidate.Head {
			s.PullRequest = pr
			s.windDown(Failed, Failure{Unverified, "the pull request's head is not the verified one", c.ID}, at)
			return
		}
		pr.Tree = s.Verdict.Tree
		s.PullRequest = pr
		s.enter(AwaitingApproval, at)
		s.Deadline = time.Time{}
		if s.Limits.ApprovalWait > 0 {
			s.Deadline = at.Add(s.Limits.ApprovalWait)
		}
		if s.Needs.Reviewers > 0 {
			s.issue(Review, "")
			return
		}
		s.issue(RequestApproval, "")
	case Review:
		s.reviewed(*r.Review, c, at)
	case RequestApproval:
		s.release(at)
	case RunPipeline:
		s.Pipeline = *r.Pipeline
		if !r.Pipeline.Succeeded {
			s.windDown(Failed, Failure{Unverified, reason(e.Reason, "the pipeline did not succeed"), c.ID}, at)
			return
		}
		s.issue(AnchorHead, "")
	case AnchorHead:
		s.Anchor = *r.Anchor
		if !s.Approvable(at) { // an approval expired while the pipeline ran
			s.escalate(Escalation{Reason: "an approval expired before the merge", Return: AwaitingApproval}, at)
			return
		}
		s.issue(MergeChange, "")
	case MergeChange:
		s.merged(*r.Merge, c, at)
	case ReportTicket:
		s.issue(RevokeGrants, "")
	case RevokeGrants:
		s.issue(DestroySandboxes, "")
	case DestroySandboxes:
		if s.Status == Compensating && s.PullRequest.ID != "" && !s.PullRequest.Closed {
			s.issue(Compensate, "")
			return
		}
		s.issue(Close, "")
	case Compensate:
		if r.PullRequest != nil {
			s.PullRequest = *r.PullRequest
		} else {
			s.PullRequest.Closed = true
		}
		if r.Merge != nil && r.Merge.Revision != "" {
			s.Merge = *r.Merge // it had been merged before the failure: say so
		}
		s.issue(Close, "")
	case Close:
		s.Closing = *r.Closing
		if s.Status == Compensating {
			s.enter(s.Target, at)
			return
		}
		s.enter(Released, at)
	}
}

// startUnits issues Execute for every unit whose predecessors are done, once.
func (s *State) startUnits() {
	done := map[identity.WorkUnitID]bool{}
	for _, u := range s.Units {
		done[u.ID] = u.Done
	}
	for _, u := range s.Units {
		ready := !u.Done
		for _, before := range u.After {
			ready = ready && done[before]
		}
		open := slices.ContainsFunc(s.Open, func(c Command) bool { return c.Kind == Execute && c.Unit == u.ID })
		if ready && !open {
			s.issue(Execute, u.ID)
		}
	}
}

func (s *State) verify(c Candidate, at time.Time) {
	s.Candidate = c
	s.void()
	s.enter(Verifying, at)
	s.issue(Verify, "")
}

// void drops what was said about an earlier candidate.
func (s *State) void() {
	s.Verdict, s.Approvals, s.Anchor, s.Pipeline = Verdict{}, nil, Anchor{}, PipelineRun{}
	s.Deadline = time.Time{}
}

func (s *State) judged(v Verdict, c Command, at time.Time) {
	s.Verdict = v
	switch {
	case v.Inconclusive:
		s.Verdict.Passed = false
		if c.Faults < s.Limits.Retries {
			s.again(c, c.Faults+1)
			return
		}
		s.windDown(Failed, Failure{Unverified, reason(v.Summary, "verification was inconclusive"), c.ID}, at)
	case v.Tree != s.Candidate.Tree:
		s.Verdict.Passed = false
		s.windDown(Failed, Failure{Unverified, "the verdict is about another tree", c.ID}, at)
	case !v.Passed:
		s.revise(Failure{Unverified, reason(v.Summary, "verification failed"), c.ID}, at)
	case s.PullRequest.ID != "":
		s.issue(UpdatePullRequest, "")
	default:
		s.issue(OpenPullRequest, "")
	}
}

// revise sends the author back, or ends the Change when the bound is reached.
func (s *State) revise(f Failure, at time.Time) {
	if s.Revised >= s.Limits.Revisions {
		s.windDown(Failed, f, at)
		return
	}
	findings := s.Verdict.Findings
	s.Revised++
	s.Revision++
	s.Open = nil
	s.void()
	s.Verdict.Findings = findings // the author reads it; nothing of it passes
	for i := range s.Units {
		s.Units[i].Done, s.Units[i].Checkpoint = false, ""
	}
	s.enter(Revising, at)
	s.startUnits()
}

func (s *State) reviewed(r Reviewed, c Command, at time.Time) {
	switch {
	case r.By == s.Request.Author:
		s.windDown(Refused, Failure{Denied, "the author of a Change cannot review it", c.ID}, at)
		return
	case r.Head != s.PullRequest.Head:
		s.windDown(Failed, Failure{Unverified, "the review is about another head", c.ID}, at)
		return
	case !r.Approve:
		if r.Findings != "" {
			s.Verdict.Findings = r.Findings
		}
		s.revise(Failure{Unverified, "the reviewer did not approve", c.ID}, at)
		return
	}
	s.addApproval(Approval{By: r.By, Kind: identity.KindReviewerAgent, Head: r.Head, Tree: s.PullRequest.Tree})
	if s.count(identity.KindReviewerAgent, at) < s.Needs.Reviewers {
		s.windDown(Failed, Failure{Unverified, "more reviewers are needed than this Change has", c.ID}, at)
		return
	}
	if s.Needs.Humans > s.count(identity.KindHuman, at) {
		s.issue(RequestApproval, "")
		return
	}
	s.release(at)
}

func (s *State) addApproval(a Approval) {
	s.Approvals = slices.DeleteFunc(s.Approvals, func(b Approval) bool { return b.By == a.By })
	s.Approvals = append(s.Approvals, a)
}

// count is the number of distinct parties of a kind whose approval of exactly
// this head and tree still stands.
func (s State) count(kind identity.ActorKind, at time.Time) int {
	n := 0
	for _, a := range s.Approvals {
		fresh := a.Expires.IsZero() || !at.After(a.Expires)
		if a.Kind == kind && a.Head == s.PullRequest.Head && a.Tree == s.PullRequest.Tree && fresh {
			n++
		}
	}
	return n
}

// Approvable reports whether the state, at the given time, may be released: a
// passed verdict for the current tree, and every approval for the current head.
func (s State) Approvable(at time.Time) bool {
	return s.Verdict.Passed && !s.Verdict.Inconclusive && s.Verdict.Tree != "" &&
		s.Verdict.Tree == s.Candidate.Tree && s.PullRequest.ID != "" && s.PullRequest.Head != "" &&
		s.PullRequest.Head == s.Candidate.Head &&
		s.PullRequest.Tree == s.Verdict.Tree && s.Needs.Reviewers+s.Needs.Humans > 0 &&
		s.count(identity.KindReviewerAgent, at) >= s.Needs.Reviewers &&
		s.count(identity.KindHuman, at) >= s.Needs.Humans
}

func (s *State) release(at time.Time) {
	if !s.Approvable(at) || s.Status != AwaitingApproval || len(s.Open) > 0 {
		return // waits for people
	}
	s.Deadline = time.Time{}
	s.enter(Releasing, at)
	if s.Request.Pipeline != "" {
		s.issue(RunPipeline, "")
		return
	}
	s.issue(AnchorHead, "")
}

func (s *State) merged(m Merge, c Command, at time.Time) {
	if m.Moved {
		if s.Rebased >= s.Limits.Rebases {
			s.windDown(Failed, Failure{Infrastructure, "the base branch moved too often", c.ID}, at)
			return
		}
		s.Rebased++
		s.Revision++
		s.void()
		s.Merge = m // the step reads where the base stands now
		s.enter(Verifying, at)
		s.issue(Rebase, "")
		return
	}
	s.Merge = m
	if m.Tree != s.Verdict.Tree {
		s.windDown(Failed, Failure{Unverified, "the merged tree is not the verified one", c.ID}, at)
		return
	}
	if s.Request.Report {
		s.issue(ReportTicket, "")
		return
	}
	s.issue(RevokeGrants, "")
}

func (s State) approved(e Event) (State, error) {
	a := e.Approval
	if a == nil || !a.By.Valid() || a.Kind != identity.KindHuman {
		return s, fmt.Errorf("%w: an approval comes from a human", ErrInvalid)
	}
	if a.By == s.Request.Author || a.By == s.Request.Reviewer {
		return s, fmt.Errorf("%w: %s cannot approve: it is the author or the reviewer of this Change", ErrInvalid, a.By)
	}
	if a.Action != "" {
		if s.Status == Escalated && a.Action == s.Escalation.Action {
			s.Waivers = append(s.Waivers, *a)
			s.goOn(e.At)
		}
		return s, nil
	}
	if a.Head == "" || a.Head != s.PullRequest.Head || a.Tree != s.PullRequest.Tree {
		return s, nil // for a head that is gone, or not there yet
	}
	if s.Status == Escalated && s.Escalation.Return == AwaitingApproval && len(s.Escalation.Retry) == 0 {
		s.goOn(e.At) // it escalated for want of this
	}
	if s.Status != AwaitingApproval {
		return s, nil
	}
	s.addApproval(*a)
	s.release(e.At)
	return s, nil
}

func (s State) cancelled(e Event) State {
	why := reason(e.Reason, "cancelled")
	switch {
	case s.Merge.Revision != "", s.Target != "":
		return s // too late: it is merged, or already being undone
	case slices.ContainsFunc(s.Open, func(c Command) bool { return c.Kind == MergeChange }):
		s.CancelAsked = why // the outcome says whether it came in time
		return s
	}
	s.windDown(Cancelled, Failure{Class: CancelledClass, Reason: why}, e.At)
	return s
}

func (s State) resumed(e Event) (State, error) {
	if !e.By.Valid() {
		return s, fmt.Errorf("%w: a resume names who asked", ErrInvalid)
	}
	if s.Status == Escalated && s.Escalation.Action == "" {
		s.goOn(e.At)
	}
	return s, nil
}

// goOn leaves Escalated: the commands start anew as new attempts, so every
// action of theirs is decided again and nothing is widened (H-059).
func (s *State) goOn(at time.Time) {
	esc := s.Escalation
	s.Escalation = Escalation{}
	s.enter(esc.Return, at)
	for _, c := range esc.Retry {
		s.again(c, 0)
	}
	if len(esc.Retry) == 0 && s.Status == AwaitingApproval && s.Limits.ApprovalWait > 0 {
		s.Deadline = at.Add(s.Limits.ApprovalWait)
	}
}

func (s State) timer(e Event) State {
	if s.Status == AwaitingApproval && len(s.Open) == 0 && !s.Deadline.IsZero() && !e.At.Before(s.Deadline) {
		s.Deadline = time.Time{}
		s.escalate(Escalation{Reason: "no approval in time"}, e.At)
	}
	return s
}

// escalate stops the Change until a person acts. Commands still open are
// started anew together with the one that escalated.
func (s *State) escalate(x Escalation, at time.Time) {
	if x.Return == "" {
		x.Return = s.Status
	}
	x.Retry = append(x.Retry, s.Open...)
	s.Open = nil
	s.Escalation = x
	s.enter(Escalated, at)
}

// windDown begins the way to a terminal status. The first command revokes the
// grants, so whatever still runs loses its authority before anything else.
func (s *State) windDown(target Status, f Failure, at time.Time) {
	s.Open = nil
	s.Target, s.Failure = target, f
	s.Escalation = Escalation{}
	s.CancelAsked = ""
	s.Deadline = time.Time{}
	s.enter(Compensating, at)
	s.issue(RevokeGrants, "")
}

// windingDown reports whether c belongs to the end of the Change, where
// nothing may be skipped.
func (s State) windingDown(c Command) bool {
	if s.Status == Compensating {
		return true
	}
	switch c.Kind {
	case RevokeGrants, DestroySandboxes, Compensate, Close:
		return true
	case ReportTicket:
		return s.Merge.Revision != ""
	default:
		return false
	}
}

func (s *State) enter(to Status, at time.Time) {
	if s.Status == to && len(s.Stages) > 0 {
		return
	}
	if n := len(s.Stages); n > 0 && s.Stages[n-1].Ended.IsZero() {
		s.Stages[n-1].Ended = at
	}
	s.Status = to
	stage := Stage{Name: to, Started: at}
	if to.Terminal() {
		stage.Ended = at
		s.Open = nil
	}
	s.Stages = append(s.Stages, stage)
}

// issue opens a command as the next attempt of its kind, revision and unit:
// no two commands of a Change ever have the same id.
func (s *State) issue(kind CommandKind, unit identity.WorkUnitID) {
	key := fmt.Sprintf("%s/%s@%d", kind, unit, s.Revision)
	s.Attempts[key]++
	s.Open = append(s.Open, newCommand(s.ID, kind, s.Revision, unit, s.Attempts[key]))
}

// again issues c anew: another id, another run, other idempotency keys.
// A merge is only tried again while its approvals stand.
func (s *State) again(c Command, faults int) {
	if c.Kind == MergeChange && !s.Approvable(s.Updated) {
		s.escalate(Escalation{Reason: "an approval expired before the merge", Return: AwaitingApproval}, s.Updated)
		return
	}
	s.issue(c.Kind, c.Unit)
	s.Open[len(s.Open)-1].Faults = faults
}

func (s *State) setCheckpoint(unit identity.WorkUnitID, cp digest.Digest) {
	for i := range s.Units {
		if s.Units[i].ID == unit {
			s.Units[i].Checkpoint = cp
		}
	}
}

func (s State) clone() State {
	s.Open = slices.Clone(s.Open)
	s.Units = slices.Clone(s.Units)
	s.Approvals = slices.Clone(s.Approvals)
	s.Waivers = slices.Clone(s.Waivers)
	s.Stages = slices.Clone(s.Stages)
	s.Attempts = maps.Clone(s.Attempts)
	s.Escalation.Retry = slices.Clone(s.Escalation.Retry)
	return s
}

func reason(said, otherwise string) string {
	if said != "" {
		return said
	}
	return otherwise
}
