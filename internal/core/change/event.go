package change

import (
	"time"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
)

// EventKind is what happened.
type EventKind string

// The events. All of them arrive in one durable order.
const (
	Outcome         EventKind = "outcome"
	Approved        EventKind = "approved"
	CancelRequested EventKind = "cancel"
	ResumeRequested EventKind = "resume"
	Timer           EventKind = "timer"
	PolicyWithdrawn EventKind = "policy-withdrawn"
)

// Class says how a command ended. The zero value is no outcome and is refused.
type Class string

// The classes of outcomes.
const (
	OK Class = "ok"
	// Denied: the policy, a floor, the grant or a bound said no.
	Denied Class = "denied"
	// Escalate: a person has to decide first.
	Escalate Class = "escalate"
	// Exhausted: the run's budget is spent (H-058).
	Exhausted Class = "exhausted"
	// Unverified: the work did not pass, or could not be judged.
	Unverified Class = "unverified"
	// Infrastructure: something below us broke.
	Infrastructure Class = "infrastructure"
	// Broken: it failed in a way that trying again does not mend, such as an
	// effect without its evidence.
	Broken Class = "broken"
	// Lost: the run is in doubt and starts anew from its last checkpoint.
	Lost Class = "lost"
	// Interrupted: the command was cut off by an event that comes next.
	Interrupted Class = "interrupted"
	// CancelledClass is the failure class of a cancelled Change, no outcome.
	CancelledClass Class = "cancelled"
)

// Event is one thing that happened to a Change.
type Event struct {
	Kind EventKind `json:"kind"`
	At   time.Time `json:"at"`
	// By is who caused it: empty for outcomes and timers.
	By     identity.Principal `json:"by,omitempty"`
	Reason string             `json:"reason,omitempty"`
	// Command, Class and Result belong to an Outcome.
	Command CommandID `json:"command,omitempty"`
	Class   Class     `json:"class,omitempty"`
	Result  Result    `json:"result,omitzero"`
	// Approval belongs to Approved.
	Approval *Approval `json:"approval,omitempty"`
}

// Result is what a command brought; the field of the command's kind is set,
// the others are nil.
type Result struct {
	Admission   *Admission   `json:"admission,omitempty"`
	Task        *Task        `json:"task,omitempty"`
	Bundle      *Bundle      `json:"bundle,omitempty"`
	Plan        *Plan        `json:"plan,omitempty"`
	Candidate   *Candidate   `json:"candidate,omitempty"`
	Verdict     *Verdict     `json:"verdict,omitempty"`
	PullRequest *PullRequest `json:"pull_request,omitempty"`
	Review      *Reviewed    `json:"review,omitempty"`
	Anchor      *Anchor      `json:"anchor,omitempty"`
	Merge       *Merge       `json:"merge,omitempty"`
	Pipeline    *PipelineRun `json:"pipeline,omitempty"`
	Closing     *Closing     `json:"closing,omitempty"`
	// Checkpoint is the last snapshot of a run that was lost, exhausted or
	// failed; empty if it took none.
	Checkpoint digest.Digest `json:"checkpoint,omitempty"`
	// Action and Ask say which action was escalated and to whom.
	Action digest.Digest `json:"action,omitempty"`
	Ask    string        `json:"ask,omitempty"`
}

// Admission is the outcome of Admit: the base the Change stands on and the
// documents that govern it.
type Admission struct {
	BaseBranch   string `json:"base_branch"`
	BaseRevision string `json:"base_revision"` // full commit id
	BaseTree     string `json:"base_tree,omitempty"`
	// Objects is a Git pack of the base revision without history.
	Objects     Blob          `json:"objects,omitzero"`
	Profile     digest.Digest `json:"profile,omitempty"`
	Policy      digest.Digest `json:"policy,omitempty"`
	Repository  digest.Digest `json:"repository,omitempty"`
	Environment digest.Digest `json:"environment,omitempty"`
	Needs       Needs         `json:"needs"`
	Limits      *Limits       `json:"limits,omitempty"`
}

// Task is the outcome of Intake: the ticket, by reference.
type Task struct {
	Ref   digest.Digest `json:"ref"`
	Key   string        `json:"key"`
	Title digest.Digest `json:"title,omitempty"`
}

// Bundle is the outcome of Resolve: the context bundle, by reference. An
// empty reference means that no knowledge connection was configured.
type Bundle struct {
	Ref   digest.Digest `json:"ref,omitempty"`
	Items int           `json:"items,omitempty"`
}

// Plan is the outcome of MakePlan.
type Plan struct {
	Ref   digest.Digest `json:"ref,omitempty"`
	Units []Unit        `json:"units"`
}

// Candidate is the outcome of Execute, Combine and Rebase: a tree that could
// be merged.
type Candidate struct {
	// Snapshot is the work tree as the host keeps it.
	Snapshot digest.Digest `json:"snapshot,omitempty"`
	// Tree is the Git tree that the verdict and the merge are held to.
	Tree string `json:"tree,omitempty"`
	// Base is the commit that the candidate stands on, Head the one commit that
	// the host made of it.
	Base string `json:"base,omitempty"`
	Head string `json:"head,omitempty"`
	// Objects is a Git pack with what Head needs and the repository lacks.
	Objects Blob           `json:"objects,omitzero"`
	Run     identity.RunID `json:"run,omitempty"`
	Files   int            `json:"files,omitempty"`
}

// Blob is content that the host keeps under its digest.
type Blob struct {
	Digest digest.Digest `json:"digest,omitempty"`
	Size   int64         `json:"size,omitempty"`
}

// Verdict is the outcome of Verify. The gate reads it and nothing else (P-176).
type Verdict struct {
	Passed bool `json:"passed"`
	// Inconclusive: a check could not complete. Never passed (P-173).
	Inconclusive bool   `json:"inconclusive,omitempty"`
	Tree         string `json:"tree,omitempty"`
	// Findings is where the author of a revision reads what was found.
	Findings digest.Digest `json:"findings,omitempty"`
	Report   digest.Digest `json:"report,omitempty"`
	Summary  string        `json:"summary,omitempty"`
}

// PullRequest is the outcome of OpenPullRequest and UpdatePullRequest.
type PullRequest struct {
	ID   string `json:"id,omitempty"`
	URL  string `json:"url,omitempty"`
	Head string `json:"head,omitempty"` // full commit id
	Tree string `json:"tree,omitempty"`
	// Branch is the head branch at the forge.
	Branch string `json:"branch,omitempty"`
	Closed bool   `json:"closed,omitempty"`
}

// Reviewed is the outcome of Review.
type Reviewed struct {
	Approve  bool               `json:"approve"`
	By       identity.Principal `json:"by"`
	Run      identity.RunID     `json:"run,omitempty"`
	Head     string             `json:"head"`
	Findings digest.Digest      `json:"findings,omitempty"`
}

// Approval is one party's yes to one head, or to one escalated action.
type Approval struct {
	By   identity.Principal `json:"by"`
	Kind identity.ActorKind `json:"kind"`
	// Head and Tree are what was approved; void once either differs.
	Head string `json:"head,omitempty"`
	Tree string `json:"tree,omitempty"`
	// Action is set instead for the approval of an escalated action.
	Action digest.Digest `json:"action,omitempty"`
	// Record is the digest of the signed statement; empty for a reviewer run.
	Record  digest.Digest `json:"record,omitempty"`
	Expires time.Time     `json:"expires,omitzero"`
}

// Anchor is the outcome of AnchorHead: what the merge commit's trailer names.
type Anchor struct {
	Head   digest.Digest `json:"head,omitempty"`
	Origin string        `json:"origin,omitempty"`
	Size   int64         `json:"size,omitempty"`
	// Trailer is the value after "Numinance-Checkpoint: ".
	Trailer string `json:"trailer,omitempty"`
}

// Merge is the outcome of MergeChange.
type Merge struct {
	// Moved: the base moved, nothing was merged.
	Moved    bool   `json:"moved,omitempty"`
	Base     string `json:"base,omitempty"` // where the base stands now, if moved
	Revision string `json:"revision,omitempty"`
	Tree     string `json:"tree,omitempty"`
}

// PipelineRun is the outcome of RunPipeline: a fact about the customer's
// pipeline, never an approval (P-118).
type PipelineRun struct {
	ID        string        `json:"id,omitempty"`
	Succeeded bool          `json:"succeeded"`
	Log       digest.Digest `json:"log,omitempty"`
}

// Closing is the outcome of Close: the finished chain.
type Closing struct {
	Records int64         `json:"records"`
	Head    digest.Digest `json:"head,omitempty"`
	Origin  string        `json:"origin,omitempty"`
	Size    int64         `json:"size,omitempty"`
	// Evidence is "verified" or the label of what failed.
	Evidence string `json:"evidence,omitempty"`
}
