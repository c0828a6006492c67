// Package change is the life of one Change as a pure state machine: Apply takes
// a state and one event and returns the next state, Next says which commands
// that state waits for. The orchestration package drives it; everything here
// is references and digests, never content, and time comes in with the events.
package change

import (
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
)

// Status is where a Change stands. The names are those of records, policies
// and the command line.
type Status string

// The states of a Change. Released, Refused, Cancelled and Failed are terminal.
// Compensating is the way to the last three: grants revoked, sandboxes
// destroyed, the pull request closed, the evidence chain ended. Escalated
// waits for a person.
const (
	Proposed         Status = "Proposed"
	Admitted         Status = "Admitted"
	Resolving        Status = "Resolving"
	Planning         Status = "Planning"
	Executing        Status = "Executing"
	Verifying        Status = "Verifying"
	Revising         Status = "Revising"
	AwaitingApproval Status = "AwaitingApproval"
	Releasing        Status = "Releasing"
	Released         Status = "Released"
	Refused          Status = "Refused"
	Escalated        Status = "Escalated"
	Cancelled        Status = "Cancelled"
	Failed           Status = "Failed"
	Compensating     Status = "Compensating"
)

// Terminal reports whether nothing follows s.
func (s Status) Terminal() bool {
	return s == Released || s == Refused || s == Cancelled || s == Failed
}

// Request is what somebody asked for. It never changes during the life of the
// Change.
type Request struct {
	// Repository is the resource name of the repository at the scm provider.
	Repository string `json:"repository"`
	// Branch is the base branch; empty means the repository's default branch.
	Branch string `json:"branch,omitempty"`
	// Project and Ticket name the issue at the ticketing provider.
	Project string `json:"project"`
	Ticket  string `json:"ticket"`
	// Executor is the id of the executor, such as "fake".
	Executor string `json:"executor"`
	// Requester asked; Author and Reviewer are the principals of the runs.
	Requester identity.Principal `json:"requester"`
	Author    identity.Principal `json:"author"`
	Reviewer  identity.Principal `json:"reviewer"`
	// Script is the input of a scripted executor, by reference.
	Script digest.Digest `json:"script,omitempty"`
	// Control is the digest of the control documents that govern this Change.
	Control digest.Digest `json:"control,omitempty"`
	// Pipeline asks for the customer's pipeline after the merge; empty is none.
	Pipeline string `json:"pipeline,omitempty"`
	// Report comments on the ticket once the Change is merged.
	Report bool `json:"report,omitempty"`
	// PushBack names that the merged revision goes back to the source.
	PushBack bool `json:"push_back,omitempty"`
}

// Limits bound the life of a Change. Zero means none of that thing, except
// ApprovalWait, where zero waits without end.
type Limits struct {
	Revisions int `json:"revisions"` // times the author may be sent back
	Rebases   int `json:"rebases"`   // times the base may move under a release
	Lost      int `json:"lost"`      // runs restarted from a checkpoint
	Retries   int `json:"retries"`   // infrastructure failures of one command
	// ApprovalWait is how long a Change waits for people before it escalates.
	ApprovalWait time.Duration `json:"approval_wait"`
}

// MaxApprovalWait is the longest ApprovalWait; in nanoseconds it is an integer
// that canonical JSON holds exactly.
const MaxApprovalWait = 90 * 24 * time.Hour

// DefaultLimits are used for what an Admission leaves at nil.
func DefaultLimits() Limits { return Limits{Revisions: 2, Rebases: 5, Lost: 5, Retries: 2} }

// Needs are the approvals of one head that a release takes. If both are zero,
// one reviewer is needed: nothing is released unreviewed.
type Needs struct {
	Reviewers int `json:"reviewers"`
	Humans    int `json:"humans"`
}

// Unit is one work unit of the plan with what became of it.
type Unit struct {
	ID identity.WorkUnitID `json:"id"`
	// Plan is the digest of the unit's own description (scope, tests).
	Plan digest.Digest `json:"plan,omitempty"`
	// After names units whose result this one builds on. Units that wait for
	// nothing run at the same time.
	After []identity.WorkUnitID `json:"after,omitempty"`
	// Checkpoint is the last snapshot of a lost run, where the next one starts.
	Checkpoint digest.Digest `json:"checkpoint,omitempty"`
	// Done and Result are set by the run of the current revision.
	Done   bool      `json:"done,omitempty"`
	Result Candidate `json:"result,omitzero"`
}

// Escalation is what a Change at Escalated waits for.
type Escalation struct {
	Reason string `json:"reason"`
	// Ask says who may lift it.
	Ask string `json:"ask,omitempty"`
	// Action is the digest an approval has to name; empty if a Resume is enough.
	Action digest.Digest `json:"action,omitempty"`
	// Return is the status that the Change goes back to, Retry the commands
	// that are started anew.
	Return Status    `json:"return"`
	Retry  []Command `json:"retry,omitempty"`
}

// Failure says why a Change ended other than Released.
type Failure struct {
	Class   Class     `json:"class"`
	Reason  string    `json:"reason"`
	Command CommandID `json:"command,omitempty"`
}

// Stage is the time a Change spent in one status.
type Stage struct {
	Name    Status    `json:"name"`
	Started time.Time `json:"started"`
	Ended   time.Time `json:"ended,omitzero"`
}

// State is everything known of one Change. It is JSON, and two runs of Apply
// over the same events give the same bytes.
type State struct {
	ID      identity.ChangeID `json:"id"`
	Request Request           `json:"request"`
	Status  Status            `json:"status"`
	// Seq counts the events applied.
	Seq int `json:"seq"`
	// Open are the commands started and not answered.
	Open []Command `json:"open,omitempty"`
	// Attempts counts the commands issued by kind, unit and revision.
	Attempts map[string]int `json:"attempts"`
	// Revision counts candidates: the first is 0, each revision or rebase is
	// one more. Revised, Rebased and Lost count towards Limits.
	Revision int `json:"revision"`
	Revised  int `json:"revised,omitempty"`
	Rebased  int `json:"rebased,omitempty"`
	Lost     int `json:"lost,omitempty"`

	Limits    Limits    `json:"limits"`
	Needs     Needs     `json:"needs"`
	Admission Admission `json:"admission,omitzero"`
	Task      Task      `json:"task,omitzero"`
	Bundle    Bundle    `json:"bundle,omitzero"`
	Plan      Plan      `json:"plan,omitzero"`
	Units     []Unit    `json:"units,omitempty"`

	Candidate Candidate  `json:"candidate,omitzero"`
	Verdict   Verdict    `json:"verdict,omitzero"`
	Approvals []Approval `json:"approvals,omitempty"`
	// Waivers are approvals of escalated actions; they lift no verdict.
	Waivers     []Approval  `json:"waivers,omitempty"`
	PullRequest PullRequest `json:"pull_request,omitzero"`
	Anchor      Anchor      `json:"anchor,omitzero"`
	Merge       Merge       `json:"merge,omitzero"`
	Pipeline    PipelineRun `json:"pipeline,omitzero"`
	Closing     Closing     `json:"closing,omitzero"`

	// Target is the terminal status a Change at Compensating goes to.
	Target     Status     `json:"target,omitempty"`
	Escalation Escalation `json:"escalation,omitzero"`
	Failure    Failure    `json:"failure,omitzero"`
	// CancelAsked is set while a merge in flight decides about a cancel.
	CancelAsked string `json:"cancel_asked,omitempty"`
	// Deadline is when a waiting Change escalates; zero is never.
	Deadline time.Time `json:"deadline,omitzero"`
	Stages   []Stage   `json:"stages,omitempty"`
	Started  time.Time `json:"started"`
	Updated  time.Time `json:"updated"`
}

// Propose returns the first state of a Change: Proposed, waiting for Admit.
func Propose(id identity.ChangeID, r Request, at time.Time) State {
	s := State{ID: id, Request: r, Limits: DefaultLimits(), Attempts: map[string]int{}, Started: at, Updated: at}
	s.enter(Proposed, at)
	s.issue(Admit, "")
	return s
}

// Next returns the commands the state waits for, in a stable order. A terminal
// or waiting state has none. Starting a command twice is harmless: its id, and
// with it every idempotency key below it, is the same.
func Next(s State) []Command { return slices.Clone(s.Open) }

// Issued returns every command that was ever opened, in order of their names.
// It follows from the state alone, so that after a crash nothing of a Change is
// forgotten.
func (s State) Issued() []Command {
	var all []Command
	for _, key := range slices.Sorted(maps.Keys(s.Attempts)) {
		kind, rest, _ := strings.Cut(key, "/")
		unit, rev, _ := strings.Cut(rest, "@")
		revision, err := strconv.Atoi(rev)
		if err != nil {
			continue // no key is written that way
		}
		for n := range s.Attempts[key] {
			all = append(all, newCommand(s.ID, CommandKind(kind), revision, identity.WorkUnitID(unit), n+1))
		}
	}
	return all
}

// Runs returns the run of every command that was ever opened but those that are
// open now: what RevokeGrants has to take the authority from.
func (s State) Runs() []identity.RunID {
	var runs []identity.RunID
	for _, c := range s.Issued() {
		if !slices.ContainsFunc(s.Open, func(o Command) bool { return o.ID == c.ID }) {
			runs = append(runs, c.Run)
		}
	}
	return runs
}

// Waiting reports whether only an event from outside moves the Change on.
func (s State) Waiting() bool { return len(s.Open) == 0 && !s.Status.Terminal() }

// CommandKind is what has to be done next.
type CommandKind string

// The commands. Steps of the orchestration carry them out.
const (
	Admit             CommandKind = "admit"
	Intake            CommandKind = "intake"
	Resolve           CommandKind = "resolve"
	MakePlan          CommandKind = "plan"
	Execute           CommandKind = "execute"
	Combine           CommandKind = "combine"
	Verify            CommandKind = "verify"
	Rebase            CommandKind = "rebase"
	OpenPullRequest   CommandKind = "open-pull-request"
	UpdatePullRequest CommandKind = "update-pull-request"
	Review            CommandKind = "review"
	RequestApproval   CommandKind = "request-approval"
	AnchorHead        CommandKind = "anchor"
	MergeChange       CommandKind = "merge"
	RunPipeline       CommandKind = "pipeline"
	ReportTicket      CommandKind = "report-ticket"
	RevokeGrants      CommandKind = "revoke-grants"
	DestroySandboxes  CommandKind = "destroy-sandboxes"
	Compensate        CommandKind = "compensate"
	Close             CommandKind = "close"
)

// CommandID names one command of one Change; it has the form of an id.
type CommandID string

// Command is one thing to be done. Its id and run are derived from the change,
// the kind, the revision, the work unit and the attempt, never random, so that
// a replay after a crash finds the same ledger entries.
type Command struct {
	ID       CommandID           `json:"id"`
	Kind     CommandKind         `json:"kind"`
	Revision int                 `json:"revision"`
	Attempt  int                 `json:"attempt"`
	Unit     identity.WorkUnitID `json:"unit,omitempty"`
	Run      identity.RunID      `json:"run"`
	// Faults counts the infrastructure failures before this attempt.
	Faults int `json:"faults,omitempty"`
}

// Step is the step's name in idempotency keys and records, such as
// "execute/unit-1#2".
func (c Command) Step() string {
	name := string(c.Kind)
	if c.Unit != "" {
		name += "/" + string(c.Unit)
	}
	return name + "#" + strconv.Itoa(c.Attempt)
}

// Interruptible reports whether a cancel may cut the command off. A merge in
// flight may already have happened, and nothing may stop the cleaning up.
func (c Command) Interruptible() bool {
	switch c.Kind {
	case MergeChange, AnchorHead, RevokeGrants, DestroySandboxes, Compensate, Close:
		return false
	default:
		return true
	}
}

func newCommand(id identity.ChangeID, kind CommandKind, revision int, unit identity.WorkUnitID, attempt int) Command {
	h := sha256.New()
	for _, part := range []string{string(id), string(kind), strconv.Itoa(revision), string(unit), strconv.Itoa(attempt)} {
		h.Write([]byte(part))
		h.Write([]byte{0}) // no part contains it, so no two lists collide
	}
	name := hex.EncodeToString(h.Sum(nil))[:16]
	return Command{
		ID: CommandID("cmd-" + name), Kind: kind, Revision: revision, Attempt: attempt,
		Unit: unit, Run: identity.RunID("run-" + name),
	}
}
