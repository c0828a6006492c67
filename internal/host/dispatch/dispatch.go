package dispatch

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/policy/floors"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/core/strict"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/journal"
)

// Bounds of one action.
const (
	// MaxRequest and MaxAnswer bound the payload of a unary verb in bytes.
	MaxRequest = 4 << 20
	MaxAnswer  = 4 << 20
	// MaxEvent and MaxEvents bound a streaming verb (P-132, P-135).
	MaxEvent  = 32 << 10
	MaxEvents = 1023
	// MaxLag is how far the evidence store may be behind the journal before
	// everything but evidence verbs is denied.
	MaxLag = 5 * time.Second

	attempts = 3 // of an idempotent verb whose outcome the transport hid
)

// Config joins the parts. All fields but the last three are needed.
type Config struct {
	Journal   *journal.Journal
	Blobs     *blob.Store
	Policy    Decider
	Providers Providers
	Now       func() time.Time
	// Lag tells how far the evidence store is behind the journal.
	Lag func() time.Duration
	// SyncTimeout and OperationTimeout bound one call; zero is two minutes and
	// two hours.
	SyncTimeout, OperationTimeout time.Duration
	// RetryDelay is the pause before an idempotent verb is tried again; zero is
	// 200 ms.
	RetryDelay time.Duration
}

// Dispatcher is the policy enforcement point. It is safe for concurrent use.
type Dispatcher struct {
	c       Config
	check   *strict.Checker
	budgets *budgets
	runs    *runs

	mu     sync.Mutex
	flight map[string]*flight // calls between step 3 and 12, by key
}

// flight is one call that can be ended when its authority is revoked.
type flight struct {
	run    identity.RunID
	change identity.ChangeID
	cancel context.CancelCauseFunc
}

// New returns a dispatcher over the given parts.
func New(c Config) (*Dispatcher, error) {
	if c.Journal == nil || c.Blobs == nil || c.Policy == nil || c.Providers == nil || c.Now == nil || c.Lag == nil {
		return nil, errors.New("new dispatcher: journal, blobs, policy, providers, clock and lag must be given")
	}
	if c.SyncTimeout == 0 {
		c.SyncTimeout = 2 * time.Minute
	}
	if c.OperationTimeout == 0 {
		c.OperationTimeout = 2 * time.Hour
	}
	if c.RetryDelay == 0 {
		c.RetryDelay = 200 * time.Millisecond
	}
	check, err := strict.New()
	if err != nil {
		return nil, fmt.Errorf("new dispatcher: %w", err)
	}
	return &Dispatcher{
		c: c, check: check, budgets: newBudgets(c.Journal), runs: newRuns(c.Journal), flight: map[string]*flight{},
	}, nil
}

// call is one action on its way through the twelve steps.
type call struct {
	authority Authority
	method    string // as gRPC names it
	ordinal   int64
	dryRun    bool
	via       Provider // set if not the deployment's provider
	request   proto.Message
	reply     proto.Message             // of a unary verb, filled at the end
	emit      func(proto.Message) error // of a streaming verb, per event

	key       string
	action    identity.ActionID
	verb      ports.Verb
	provider  Provider
	facts     policy.ProviderFacts
	rules     strict.Rules
	payload   []byte // the request as the provider gets it
	digest    digest.Digest
	resources []string
	run       policy.RunFacts
	decision  policy.Decision
	held      journal.Amount // reserved
	left      journal.Amount // of the budget, with this action still in it
	lazy      bool
	resumed   bool // started before a crash
	began     time.Time
	answer    *answer
}

func (c *call) policyRequest() policy.Request {
	return policy.Request{
		Caller: c.authority.Caller, Actor: c.authority.Actor, Verb: c.verb, Resources: c.resources, Grant: c.authority.Grant,
		Change: c.authority.Change, Run: c.run, Provider: c.facts, DryRun: c.dryRun, Now: c.began, Input: c.digest,
		Approvals: c.authority.Approvals,
	}
}

// do takes one action through the twelve steps. Deny is what happens unless
// every step says otherwise; each refusal is recorded.
func (d *Dispatcher) do(ctx context.Context, c *call) error {
	if err := ctx.Err(); err != nil {
		return status.FromContextError(err).Err() // not asked, so not denied
	}
	c.began = d.c.Now()
	// 1. The target is known, negotiated, and this context may call it.
	if err := d.target(c); err != nil {
		return d.deny(ctx, c, err)
	}
	// 2. The request is what the contract says, and within the grant.
	if err := d.decode(c); err != nil {
		return d.deny(ctx, c, err)
	}
	ctx, leave, err := d.enter(ctx, c)
	if err != nil {
		return d.deny(ctx, c, err)
	}
	defer leave()
	if isEvidence(c.verb) {
		return d.doEvidence(ctx, c)
	}
	// 3. The ledger knows what was done under this key before.
	row, known, err := d.c.Journal.LookupOf(context.WithoutCancel(ctx), c.authority.Actor.Run, c.key)
	if err != nil {
		return d.deny(ctx, c, refused("ledger", "unreadable", "", "free or repair the state database", "%v", err))
	}
	switch {
	case known && row.Request != c.digest:
		return d.deny(ctx, c, refused("ledger", "other-request", "", "this is a fault of the caller: one key stands for one request",
			"key %s was used for another request", c.key))
	case known && row.State == journal.Finished:
		return d.replay(ctx, c, row)
	case known && !c.verb.Idempotent:
		return d.lose(ctx, c, row)
	case known:
		// In doubt after a crash: again with the same key, under the decision that
		// was recorded; only floors and revocation are asked again.
		if err := d.recheck(c, row); err != nil {
			return d.deny(ctx, c, err)
		}
	default:
		// 4.–7. Floors, grant, budget, policy.
		if err := d.decide(ctx, c); err != nil {
			return d.deny(ctx, c, err)
		}
		// 8. Decision and started in one durable write, before the effect.
		if err := d.start(ctx, c); err != nil {
			d.budgets.settle(c.authority.Grant.ID, c.held, journal.Amount{})
			return d.deny(ctx, c, err)
		}
	}
	if r, revoked := d.revoked(c); revoked {
		// Between decision and here; nothing has happened yet.
		c.answer = failure(codes.PermissionDenied, fmt.Sprintf("the %s %s was revoked", r.Scope, r.ID))
		return d.finish(ctx, c)
	}
	// 9. and 10. The provider carries it out and answers.
	if err := d.invoke(ctx, c); err != nil {
		return d.unsettled(ctx, c, err)
	}
	// 11. Declared evidence is there, or the action is PARTIAL.
	c.demandEvidence()
	// 12. Result, finished and settlement in one durable write.
	return d.finish(ctx, c)
}

// doEvidence is the short way for the verbs that drain the journal itself:
// decided by floors and grant alone, without ledger, budget or entries. A
// denial is recorded like any other.
func (d *Dispatcher) doEvidence(ctx context.Context, c *call) error {
	if err := d.decideEvidence(c); err != nil {
		return d.deny(ctx, c, err)
	}
	if err := d.invoke(ctx, c); err != nil {
		return &UnsettledError{Verb: c.verb.Name(), Key: c.key, Cause: err, kind: ErrInDoubt}
	}
	c.demandEvidence()
	return c.outcome()
}

// enter notes that the call is under way, so that the same key does not run
// twice at once and a revocation can end it. It returns the context of the call
// and what ends the note.
func (d *Dispatcher) enter(ctx context.Context, c *call) (context.Context, func(), error) {
	timeout := d.c.SyncTimeout
	if c.verb.Exec == ports.ExecOperation {
		timeout = d.c.OperationTimeout
	}
	name := c.key
	if g := c.authority.Grant; isEvidence(c.verb) {
		// These have no ledger that two at once could confuse.
		name = id("flight")
	} else {
		// A call ends with the grant; what begins after it is denied below.
		for _, left := range []time.Duration{g.Expires.Sub(c.began), g.NotBefore.Add(g.Budget.Wall).Sub(c.began)} {
			if left > 0 {
				timeout = min(timeout, left)
			}
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.flight[name] != nil {
		return ctx, nil, refused("ledger", "in-flight", "", "wait for the call that is under way", "key %s is under way", c.key)
	}
	within, cancelCause := context.WithCancelCause(ctx)
	within, cancel := context.WithTimeout(within, timeout)
	d.flight[name] = &flight{run: c.authority.Actor.Run, change: c.authority.Change.ID, cancel: cancelCause}
	return within, func() {
		cancel()
		cancelCause(nil)
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.flight, name)
	}, nil
}

// RevokeRun ends the authority of one run for good: calls under way are
// cancelled, later ones denied. It returns when that is recorded.
func (d *Dispatcher) RevokeRun(ctx context.Context, change identity.ChangeID, run identity.RunID, reason string) error {
	return d.revoke(ctx, change, journal.Revocation{Scope: journal.ScopeRun, ID: string(run)}, reason)
}

// RevokeChange is RevokeRun for every run of a Change.
func (d *Dispatcher) RevokeChange(ctx context.Context, change identity.ChangeID, reason string) error {
	return d.revoke(ctx, change, journal.Revocation{Scope: journal.ScopeChange, ID: string(change)}, reason)
}

// Taint notes that a run is given untrusted content otherwise than by an answer
// to its own calls, such as a ticket in the context bundle of a harness.
func (d *Dispatcher) Taint(ctx context.Context, run identity.RunID) error {
	if err := d.c.Journal.Taint(ctx, run); err != nil {
		return fmt.Errorf("taint run %s: %w", run, err)
	}
	d.runs.tainted(run)
	return nil
}

func (d *Dispatcher) revoke(ctx context.Context, change identity.ChangeID, r journal.Revocation, reason string) error {
	body, err := digest.Canonical(map[string]any{"scope": r.Scope, "id": r.ID, "reason": reason})
	if err != nil {
		return fmt.Errorf("revoke %s %s: %w", r.Scope, r.ID, err)
	}
	// The journal says "revoked" from here on, even before it is on disk.
	err = d.c.Journal.Revoke(ctx, r, journal.Entry{At: d.c.Now(), Change: change, Kind: KindRevocation, Body: body})
	d.mu.Lock()
	for _, f := range d.flight {
		if r.Scope == journal.ScopeRun && string(f.run) == r.ID || r.Scope == journal.ScopeChange && string(f.change) == r.ID {
			f.cancel(errRevoked)
		}
	}
	d.mu.Unlock()
	if err != nil {
		return fmt.Errorf("revoke %s %s: %w", r.Scope, r.ID, err)
	}
	return nil
}

func (d *Dispatcher) revoked(c *call) (journal.Revocation, bool) {
	return d.c.Journal.Revoked(c.authority.Actor.Run, c.authority.Change.ID, c.authority.Grant.ID)
}

// recheck is the short decision on an action in doubt.
func (d *Dispatcher) recheck(c *call, row journal.Row) error {
	c.resumed, c.held, c.decision.ID, c.action = true, row.Reserve, row.Decision, row.Action
	c.left = d.budgets.leftAfter(c.authority.Grant, row.Reserve)
	if found := floors.Check(c.policyRequest()); len(found) > 0 {
		return refusedBy(found)
	}
	if r, revoked := d.revoked(c); revoked {
		return refused("grant", "revoked", "", "start a new run", "the %s %s was revoked", r.Scope, r.ID)
	}
	return d.gate()
}

// gate refuses while evidence lags or the journal is not ours.
func (d *Dispatcher) gate() error {
	if lag := d.c.Lag(); lag > MaxLag {
		return refused("journal", "lag", "", "repair the evidence store, then go on",
			"the evidence store is %s behind, at most %s is allowed", lag.Round(time.Millisecond), MaxLag)
	}
	return nil
}

// id returns a new id such as dec-6d1e….
func id(prefix string) string {
	var b [10]byte
	_, _ = rand.Read(b[:]) // never fails
	return prefix + "-" + hex.EncodeToString(b[:])
}
