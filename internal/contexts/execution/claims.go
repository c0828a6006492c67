package execution

import (
	"errors"
	"fmt"

	authorexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
)

// ErrClaim is wrapped by every claim that the host's receipts do not bear out.
var ErrClaim = errors.New("claim contradicts the host's receipts")

// Kinds of references that claims are held against.
const (
	RefDecision = "decision"
	RefPath     = "path"
	RefSnapshot = "snapshot"
	RefPlan     = "plan"
	RefReview   = "review"
	RefReason   = "reason"
)

// Reference returns the value of an event's only reference of a kind, or "".
func Reference(e *authorexecutorv1.ExecutionEvent, kind string) string {
	value := ""
	for _, r := range e.GetReferences() {
		if r.GetKind() != kind {
			continue
		}
		if value != "" {
			return ""
		}
		value = r.GetValue()
	}
	return value
}

// Settle holds one event against the receipts. For TOOL_ALLOWED and TOOL_DENIED
// it returns the decision that the event echoes, each at most once; a claimed
// effect has to rest on an allowed decision of its own.
func (r *Receipts) Settle(e *authorexecutorv1.ExecutionEvent) (*policy.Decision, error) {
	const p = "EXECUTION_EVENT_TYPE_"
	switch name := e.GetType().String(); name {
	case p + "TOOL_ALLOWED":
		return r.echo(e, true)
	case p + "TOOL_DENIED":
		return r.echo(e, false)
	case p + "FILE_CHANGED":
		path := Reference(e, RefPath)
		return nil, r.effect(e, func(t policy.Tool) bool {
			// A command may change any number of files.
			return t.Name == "run" || (path != "" && t.Path == path && (t.Name == "write" || t.Name == "patch" || t.Name == "delete"))
		}, true)
	case p + "COMMAND_EXECUTED":
		return nil, r.effect(e, func(t policy.Tool) bool { return t.Name == "run" }, false)
	case p + "NETWORK_REQUEST":
		return nil, r.effect(e, func(t policy.Tool) bool { return t.Name == "fetch" || t.Name == "run" }, true)
	case p + "CREDENTIAL_REQUEST":
		return nil, r.effect(e, func(t policy.Tool) bool { return t.Name == "credential" }, false)
	case p + "CHECKPOINT":
		return nil, r.checkpoint(e)
	}
	return nil, nil
}

func (r *Receipts) echo(e *authorexecutorv1.ExecutionEvent, allowed bool) (*policy.Decision, error) {
	id := identity.DecisionID(Reference(e, RefDecision))
	r.mu.Lock()
	defer r.mu.Unlock()
	d := r.decisions[id]
	switch {
	case id == "":
		return nil, claim(e, "names no decision")
	case d == nil:
		return nil, claim(e, "names decision %q, which the host did not take in this run", id)
	case d.claimed:
		return nil, claim(e, "names decision %s a second time", id)
	case allowed != (d.decision.Effect == policy.Allow):
		return nil, claim(e, "is the opposite of decision %s, which is %s", id, d.decision.Effect)
	}
	d.claimed = true
	decision := d.decision
	return &decision, nil
}

// effect looks for an allowed decision that bears the event out. Unless again
// is true, a decision bears out one event only.
func (r *Receipts) effect(e *authorexecutorv1.ExecutionEvent, match func(policy.Tool) bool, again bool) error {
	named := identity.DecisionID(Reference(e, RefDecision))
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range r.order {
		d := r.decisions[id]
		if (named != "" && named != id) || !d.claimed || d.decision.Effect != policy.Allow || !match(d.tool) {
			continue
		}
		if d.effect && !again {
			continue
		}
		d.effect = true
		return nil
	}
	return claim(e, "claims an effect that no allowed decision of this run bears out")
}

func (r *Receipts) checkpoint(e *authorexecutorv1.ExecutionEvent) error {
	want := Reference(e, RefSnapshot)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.checkpoints {
		if want != "" && string(c.Work.Digest) == want {
			return nil
		}
	}
	return claim(e, "names a snapshot that the host did not take in this run")
}

func claim(e *authorexecutorv1.ExecutionEvent, format string, args ...any) error {
	return fmt.Errorf("%w: event %d %s %s", ErrClaim, e.GetSequence(), typeName(e.GetType()), fmt.Sprintf(format, args...))
}
