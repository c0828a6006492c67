package orchestration

import (
	"errors"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/policy"
)

// decided is an error that carries the policy decision behind it; dispatch's
// denial is one.
type decided interface {
	error
	Decided() policy.Decision
}

// classify finds the class of an error that a context let through. Anything it
// does not know is left to be infrastructure.
func classify(err error, r *change.Result) (change.Class, bool) {
	var d decided
	if !errors.As(err, &d) {
		return "", false
	}
	dec := d.Decided()
	r.Ask = dec.Ask
	if dec.Effect == policy.Escalate {
		return change.Escalate, true
	}
	return change.Denied, true
}
