// Package orchestration drives the life of one Change: it carries out the
// commands of core/change through the Steps it is given, keeps every event in
// the journal, and projects the state of all Changes. The daemon opens one
// Runner; the edge asks it.
package orchestration

import (
	"context"

	"github.com/numinance/numinance/internal/core/change"
)

// Job is what a step works on: the whole state as it was when the command was
// issued, and the command, whose Run, Revision, Attempt and Step() go into the
// authority of every call the step makes. A step may be run again with the same
// Job after a crash, so it derives every id from it and finds what it did in
// the ledger.
type Job struct {
	State   change.State
	Command change.Command
}

// Unit is the work unit of an Execute; the zero Unit for other commands.
func (j Job) Unit() change.Unit {
	for _, u := range j.State.Units {
		if u.ID == j.Command.Unit {
			return u
		}
	}
	return change.Unit{}
}

// Steps carry out the commands. The daemon joins them from the contexts. An
// error ends the command with the class that Classify finds in it: return an
// *Error to choose the class.
type Steps interface {
	Preparing
	Working
	Releasing
	Ending
}

// Preparing reads what the Change stands on.
type Preparing interface {
	// Admit reads the base revision and the documents that govern the Change
	// (profile context).
	Admit(context.Context, Job) (change.Admission, error)
	// Intake reads the ticket (change context).
	Intake(context.Context, Job) (change.Task, error)
	// Resolve gathers the context bundle (knowledge context).
	Resolve(context.Context, Job) (change.Bundle, error)
	// Plan divides the work; a capability that the executor lacks is an error
	// (H-057).
	Plan(context.Context, Job) (change.Plan, error)
}

// Working makes and judges candidates.
type Working interface {
	// Execute is one run of Job.Unit() from its Checkpoint, or else from the
	// results of the units it comes After, or else from the base; in a
	// revision the author reads State.Verdict.Findings.
	Execute(context.Context, Job) (change.Candidate, error)
	// Combine joins the results of several units. It is called with two or more.
	Combine(context.Context, Job) (change.Candidate, error)
	// Rebase puts the candidate on State.Merge.Base. A conflict is Unverified.
	Rebase(context.Context, Job) (change.Candidate, error)
	// Verify runs the checks on exactly State.Candidate.
	Verify(context.Context, Job) (change.Verdict, error)
	// Review is one read-only run of a reviewer-agent.
	Review(context.Context, Job) (change.Reviewed, error)
}

// Releasing brings the candidate into the repository.
type Releasing interface {
	OpenPullRequest(context.Context, Job) (change.PullRequest, error)
	UpdatePullRequest(context.Context, Job) (change.PullRequest, error)
	// RequestApproval tells people that their approval is needed.
	RequestApproval(context.Context, Job) error
	Pipeline(context.Context, Job) (change.PipelineRun, error)
	// Anchor signs and anchors the head of the evidence chain as it stands.
	Anchor(context.Context, Job) (change.Anchor, error)
	// Merge merges if head and tree are the verified ones; Moved if the base
	// is another by now.
	Merge(context.Context, Job) (change.Merge, error)
	ReportTicket(context.Context, Job) error
}

// Ending undoes and closes. None of it is ever skipped.
type Ending interface {
	RevokeGrants(context.Context, Job) error
	DestroySandboxes(context.Context, Job) error
	// Compensate closes the pull request, or comments on it if it turns out to
	// be merged.
	Compensate(context.Context, Job) (Compensation, error)
	// Close drains the journal into the evidence store, writes the terminal
	// record with State.Target (or Released) and anchors the last head.
	Close(context.Context, Job) (change.Closing, error)
}

// Compensation is what Compensate found and did.
type Compensation struct {
	PullRequest change.PullRequest
	Merge       change.Merge
}

// carryOut calls the step of j's command and wraps its outcome.
func carryOut(ctx context.Context, steps Steps, j Job) (r change.Result, err error) {
	switch j.Command.Kind {
	case change.Admit:
		r.Admission, err = call(ctx, j, steps.Admit)
	case change.Intake:
		r.Task, err = call(ctx, j, steps.Intake)
	case change.Resolve:
		r.Bundle, err = call(ctx, j, steps.Resolve)
	case change.MakePlan:
		r.Plan, err = call(ctx, j, steps.Plan)
	case change.Execute:
		r.Candidate, err = call(ctx, j, steps.Execute)
	case change.Combine:
		r.Candidate, err = call(ctx, j, steps.Combine)
	case change.Rebase:
		r.Candidate, err = call(ctx, j, steps.Rebase)
	case change.Verify:
		r.Verdict, err = call(ctx, j, steps.Verify)
	case change.Review:
		r.Review, err = call(ctx, j, steps.Review)
	case change.OpenPullRequest:
		r.PullRequest, err = call(ctx, j, steps.OpenPullRequest)
	case change.UpdatePullRequest:
		r.PullRequest, err = call(ctx, j, steps.UpdatePullRequest)
	case change.RequestApproval:
		err = steps.RequestApproval(ctx, j)
	case change.RunPipeline:
		r.Pipeline, err = call(ctx, j, steps.Pipeline)
	case change.AnchorHead:
		r.Anchor, err = call(ctx, j, steps.Anchor)
	case change.MergeChange:
		r.Merge, err = call(ctx, j, steps.Merge)
	case change.ReportTicket:
		err = steps.ReportTicket(ctx, j)
	case change.RevokeGrants:
		err = steps.RevokeGrants(ctx, j)
	case change.DestroySandboxes:
		err = steps.DestroySandboxes(ctx, j)
	case change.Compensate:
		var c Compensation
		if c, err = steps.Compensate(ctx, j); err == nil {
			r.PullRequest, r.Merge = &c.PullRequest, &c.Merge
		}
	case change.Close:
		r.Closing, err = call(ctx, j, steps.Close)
	default:
		err = &Error{Class: change.Denied, Reason: "unknown command " + string(j.Command.Kind)}
	}
	return r, err
}

func call[T any](ctx context.Context, j Job, step func(context.Context, Job) (T, error)) (*T, error) {
	out, err := step(ctx, j)
	if err != nil {
		return nil, err
	}
	return &out, nil
}
