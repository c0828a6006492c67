package dispatch

import (
	"context"
	"errors"

	"google.golang.org/grpc/status"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/host/journal"
)

// Tool decides one tool intent of a harness and returns when the decision is on
// disk (H-021). The error is nil only if the intent is allowed; it is a
// *DeniedError if not, and then a TOOL_DENIED entry follows the decision; a
// ctx that has ended already is its own error and asks nothing. An
// allowed intent uses one action of the grant's budget. Intents are not
// repeated after a crash: their run is lost with its sandbox.
func (d *Dispatcher) Tool(ctx context.Context, a Authority, t policy.Tool) (policy.Decision, error) {
	if err := ctx.Err(); err != nil {
		return policy.Decision{}, status.FromContextError(err).Err()
	}
	ctx = context.WithoutCancel(ctx) // an intent that is asked gets a decision
	now := d.c.Now()
	action := identity.ActionID(id("act"))
	request := policy.Request{
		Caller: a.Caller, Actor: a.Actor, Tool: &t, Grant: a.Grant, Change: a.Change, Now: now, Approvals: a.Approvals, Input: t.Input,
	}
	if !t.Input.Valid() {
		// An intent without bytes of its own is named by what it says.
		named, err := digest.OfCanonical(toolBody(t))
		if err != nil {
			return d.denyTool(ctx, a, t, action, policy.Decision{}, refused("strict", "tool", "", faultOfCaller, "%v", err))
		}
		request.Input = named
	}
	var e policy.Decision
	if err := d.gate(); err != nil {
		return d.denyTool(ctx, a, t, action, e, err)
	}
	if r, revoked := d.c.Journal.Revoked(a.Actor.Run, a.Change.ID, a.Grant.ID); revoked {
		return d.denyTool(ctx, a, t, action, e, refused("grant", "revoked", "", "start a new run", "the %s %s was revoked", r.Scope, r.ID))
	}
	var err error
	if request.Run, err = d.runs.facts(ctx, a.Actor.Run); err != nil {
		return d.denyTool(ctx, a, t, action, e, refused("ledger", "unreadable", "", "free or repair the state database", "%v", err))
	}
	held, _, short := d.budgets.reserve(ctx, a.Grant, journal.Amount{Actions: 1}, now)
	e = d.c.Policy.Decide(request)
	if e.Effect == policy.Allow && short != nil {
		return d.denyTool(ctx, a, t, action, e, short)
	}
	if e.Effect != policy.Allow {
		if short == nil {
			d.budgets.settle(a.Grant.ID, held, journal.Amount{})
		}
		return d.denyTool(ctx, a, t, action, e, &refusal{reasons: e.Reasons, ask: e.Ask})
	}
	e.ID = identity.DecisionID(id("dec"))
	entry, err := d.toolEntry(ctx, a, t, action, e)
	if err == nil {
		_, err = d.c.Journal.Spend(ctx, a.Grant.ID, held, entry)
	}
	if err != nil {
		d.budgets.settle(a.Grant.ID, held, journal.Amount{})
		return d.denyTool(ctx, a, t, action, e, refused("journal", "unavailable", "", "free disk space or repair the state database, then go on",
			"the decision could not be recorded: %v", err))
	}
	return e, nil
}

func (d *Dispatcher) denyTool(ctx context.Context, a Authority, t policy.Tool, action identity.ActionID, e policy.Decision, why error) (policy.Decision, error) {
	var r *refusal
	if !errors.As(why, &r) {
		r = &refusal{reasons: []policy.Reason{{Layer: policy.LayerStrict, ID: "internal", Text: why.Error()}}, ask: "report this"}
	}
	if e.Effect == policy.Allow {
		e.Effect = policy.Deny
	}
	e.ID, e.Reasons, e.Ask = identity.DecisionID(id("dec")), r.reasons, r.ask
	if e.Grant == "" {
		e.Grant = a.Grant.Digest()
	}
	denied := &DeniedError{Verb: "tool." + clip(t.Name, 64), Decision: e}
	decision, err := d.toolEntry(ctx, a, t, action, e)
	if err != nil {
		denied.Unrecorded = err
		return e, denied
	}
	first := policy.Reason{}
	if len(e.Reasons) > 0 {
		first = e.Reasons[0]
	}
	told, err := d.entry(a, KindToolDenied, action, "", "", func() ([]byte, error) {
		return digest.Canonical(map[string]any{
			"action": string(action), "decision": string(e.ID), "effect": e.Effect.String(), "layer": first.Layer, "reason": clip(first.Text, 1024),
			"rule": first.ID, "run": clip(string(a.Actor.Run), 64), "source": "host", "tool": toolBody(t),
		})
	})
	if err != nil {
		denied.Unrecorded = err
		return e, denied
	}
	denied.Spilled, denied.Unrecorded = d.c.Journal.Deny(ctx, validRun(a.Actor.Run), decision, told)
	d.runs.denied(a.Actor.Run)
	return e, denied
}

func (d *Dispatcher) toolEntry(ctx context.Context, a Authority, t policy.Tool, action identity.ActionID, e policy.Decision) (journal.Entry, error) {
	b, err := d.decisionBody(context.WithoutCancel(ctx), a, e)
	if err != nil {
		return journal.Entry{}, err
	}
	tool := toolBody(t)
	b.Action, b.Tool, b.Verb = action, &tool, "tool."+tool.Name
	return d.decision(a, action, "", t.Input, b)
}

// toolBody bounds what a harness says of its intent: a long command is cut in
// the record, while its input digest names all of it.
func toolBody(t policy.Tool) ToolBody {
	b := ToolBody{
		Argv: []string{}, Host: clip(t.Host, 512), Input: t.Input, Intent: clip(t.Intent, 256), Name: clip(t.Name, 64), Path: clip(t.Path, 4096),
	}
	left := 8 << 10
	for _, arg := range t.Argv {
		if left <= 0 || len(b.Argv) == 64 {
			b.Argv = append(b.Argv, "…")
			break
		}
		arg = clip(arg, left)
		left -= len(arg)
		b.Argv = append(b.Argv, arg)
	}
	return b
}
