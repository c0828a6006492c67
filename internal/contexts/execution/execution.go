package execution

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"google.golang.org/grpc"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/dispatch"
)

// Dispatcher is the policy enforcement point as this context needs it.
type Dispatcher interface {
	// Via returns a connection for stock clients whose calls are dispatched
	// under a and carried out by p.
	Via(a dispatch.Authority, p dispatch.Provider) grpc.ClientConnInterface
	// Tool decides on a tool intent and records the decision durably before it
	// returns. An error is a denial.
	Tool(ctx context.Context, a dispatch.Authority, t policy.Tool) (policy.Decision, error)
	// Taint records that a run is given untrusted content, for the rules that
	// ask for it.
	Taint(ctx context.Context, run identity.RunID) error
}

// Sandboxes makes the one sandbox of a run; contexts/sandbox implements it.
type Sandboxes interface {
	// Create makes the sandbox that s describes and returns once PID 1 inside
	// is ready.
	Create(ctx context.Context, s SandboxSpec) (Sandbox, error)
}

// SandboxSpec is what the sandbox context builds a sandbox from. Everything
// that limits the run comes from the grant in Authority (P-150).
type SandboxSpec struct {
	Authority dispatch.Authority
	Revision  string     // commit whose tree is the work tree
	Restore   Checkpoint // if its Work is set, that tree instead, owned as for Revision
	ReadOnly  bool       // nothing in the work tree can be changed
	WallTime  time.Duration
}

// Scope is which part of a sandbox a snapshot keeps.
type Scope uint8

// The two scopes. The zero value is none.
const (
	ScopeNone Scope = iota
	ScopeWork
	ScopeHome
)

// Sandbox is one sandbox, from Create to Destroy.
type Sandbox interface {
	// Snapshot keeps a part as a tar, while the sandbox goes on.
	Snapshot(ctx context.Context, s Scope) (blob.Ref, error)
	// Destroy ends and removes everything; a second call succeeds. It works
	// after the run's context is done.
	Destroy(ctx context.Context) error
}

// Adapters starts the adapter of a run inside its sandbox; the plugin host
// implements it.
type Adapters interface {
	Launch(ctx context.Context, box Sandbox, l Launch) (Adapter, error)
}

// Launch is what an adapter is started with.
type Launch struct {
	Executor  string // name of the provider, such as fake
	Authority dispatch.Authority
	Config    json.RawMessage // the provider's configuration
	Desk      *Desk           // answers what the adapter asks of the host
}

// Adapter is a started adapter.
type Adapter interface {
	Provider() dispatch.Provider
	// Close ends it and every call of it.
	Close() error
}

// Trees reads what a run changed. It is the authority for that, and refuses by
// its own rules what the sandbox's walls could not.
type Trees interface {
	// Diff holds a snapshot of a work tree against its base revision.
	Diff(ctx context.Context, d DiffSpec) (Candidate, error)
}

// DiffSpec says which snapshot is held against what.
type DiffSpec struct {
	Authority dispatch.Authority
	Base      string // commit
	Snapshot  blob.Ref
	Paths     pathscope.Scope // what the run may change
}

// Candidate is what a run made of its base revision.
type Candidate struct {
	Base       string // commit
	Tree       string
	Commit     string   // on top of Base; empty if nothing changed
	Pack       blob.Ref // the new objects
	Changed    []string
	Violations []Violation // changes that the run was not allowed to make; none is in Tree
	Dropped    int         // ignored files that were left out
}

// Violation is a change outside of what the run was allowed.
type Violation struct {
	Path   string
	Reason string
}

// Blobs reads what an adapter left with the host.
type Blobs interface {
	Bytes(d digest.Digest, limit int64) ([]byte, error)
}

// Config is what a Context works with. All but Idle and Now are required.
type Config struct {
	Dispatcher Dispatcher
	Sandboxes  Sandboxes
	Adapters   Adapters
	Trees      Trees
	Blobs      Blobs
	// Idle is how long an adapter may say and ask nothing before the run is
	// stalled; 0 is half an hour, which a long silent build fits in.
	Idle time.Duration
	// Now is the clock; nil is the system's.
	Now func() time.Time
}

// Context is the execution context. It is safe for concurrent use and keeps
// nothing between runs.
type Context struct{ Config }

// New returns the execution context.
func New(c Config) (*Context, error) {
	if c.Dispatcher == nil || c.Sandboxes == nil || c.Adapters == nil || c.Trees == nil || c.Blobs == nil {
		return nil, errors.New("execution context needs a dispatcher, sandboxes, adapters, trees and blobs")
	}
	if c.Idle <= 0 {
		c.Idle = 30 * time.Minute
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	return &Context{Config: c}, nil
}

// Run is one run of a harness. Authority carries the grant, and everything that
// the request to the adapter says follows from it; the caller kind is set by
// the context.
type Run struct {
	Authority dispatch.Authority
	Executor  string          // pinned provider, such as fake
	Model     string          // pinned model; empty for none
	Config    json.RawMessage // the provider's configuration; one JSON object or empty
	Revision  string          // commit: base of an author run, candidate of a review
	Digests   Digests
	Refs      References
	Deadline  time.Time
	Attempt   int         // 1 for the first run of the work unit
	Restore   *Checkpoint // where a lost run left off; nil to start anew
	Observer  Observer    // may be nil
}

// Digests name the documents that a run stands on.
type Digests struct {
	Repository, Environment, Policy, Profile digest.Digest
}

// References are what the provider may resolve (P-130). All but Task may be
// empty. Blobs are further blobs that the provider's configuration names.
type References struct {
	Task, Plan, ContextBundle, TestRequirements digest.Digest
	Blobs                                       []digest.Digest
}

// Outcome is how a run ended. The zero value is no outcome and never returned
// without an error.
type Outcome uint8

// The outcomes of a run. Only Completed has a candidate, a review or a plan.
const (
	OutcomeUnknown  Outcome = iota
	Completed               // the adapter said so and nothing contradicts it
	HarnessFailed           // the adapter said EXECUTION_FAILED
	Contradicted            // the stream broke the rules or a claim contradicts a receipt
	Lost                    // the adapter died or its link broke; start anew from Checkpoint
	Stalled                 // deadline passed, or nothing came for too long
	BudgetExhausted         // a decision was refused for want of budget (H-058)
	Cancelled               // the caller gave up
)

var outcomeNames = [...]string{"unknown", "completed", "harness failed", "contradicted", "lost", "stalled", "budget exhausted", "cancelled"}

// String returns the outcome in words.
func (o Outcome) String() string {
	if int(o) < len(outcomeNames) {
		return outcomeNames[o]
	}
	return outcomeNames[0]
}

// Result is what came of a run.
type Result struct {
	Outcome    Outcome
	Reason     string // for a person; says what to do next where that is known
	Checkpoint *Checkpoint
	Candidate  *Candidate // of an author run
	Review     *Review    // of a review
	Plan       *Plan      // of a plan
	Stats      Stats
}

// Author runs a harness on a work unit and returns what it made of the base
// revision. An error says that the run could not be carried out or was refused;
// every end of a run that began is an Outcome.
func (c *Context) Author(ctx context.Context, r Run) (Result, error) {
	return c.carryOut(ctx, r, authoring)
}

// Review runs a harness read-only on a candidate and returns its verdict
// (P-127..P-129).
func (c *Context) Review(ctx context.Context, r Run) (Result, error) {
	return c.carryOut(ctx, r, reviewing)
}

// Plan runs a harness read-only on the base revision and returns its plan.
func (c *Context) Plan(ctx context.Context, r Run) (Result, error) {
	return c.carryOut(ctx, r, planning)
}
