package orchestration

import (
	"context"
	"errors"
	"fmt"

	"github.com/numinance/numinance/internal/core/change"
)

// Error is how a step chooses the class of its outcome.
type Error = change.Fault

// ErrUnknownChange: no Change has this id.
var ErrUnknownChange = errors.New("no such change")

// errInterrupted is the cause of a step's context that a cancel cut off.
var errInterrupted = errors.New("interrupted by an event")

// outcome turns what a step returned into an event without a time.
func outcome(ctx context.Context, c change.Command, r change.Result, err error) change.Event {
	e := change.Event{Kind: change.Outcome, Command: c.ID, Class: change.OK, Result: r}
	if err == nil {
		return e
	}
	e.Result = change.Result{}
	e.Reason = cut(fmt.Sprintf("%s: %v", c.Kind, err))
	var typed *Error
	switch {
	case errors.As(err, &typed):
		e.Class = typed.Class
		e.Result.Checkpoint, e.Result.Action, e.Result.Ask = typed.Checkpoint, typed.Action, typed.Ask
		e.Result.PullRequest = typed.PullRequest
	default:
		e.Class = classify(err, &e.Result)
	}
	// Whatever a call made of it, the cause was the cancel that comes next. A
	// lost run stays lost: its effects are in doubt.
	if errors.Is(context.Cause(ctx), errInterrupted) && e.Class != change.Lost {
		e.Class = change.Interrupted
	}
	return e
}

// maxReason bounds what a step says of its failure; the whole text is in the
// records of its calls.
const maxReason = 2000

func cut(s string) string {
	if len(s) <= maxReason {
		return s
	}
	return s[:maxReason] + "…"
}
