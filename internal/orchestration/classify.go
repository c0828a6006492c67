package orchestration

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/host/dispatch"
)

// classify finds the class of an error that a context let through. What it
// does not know is infrastructure, which is tried again.
func classify(err error, r *change.Result) change.Class {
	var (
		denied  *dispatch.DeniedError
		partial *dispatch.PartialError
		failed  *dispatch.FailedError
	)
	switch {
	case errors.As(err, &denied):
		r.Ask = denied.Decision.Ask
		return refused(denied.Decision)
	case errors.As(err, &partial):
		return change.Broken // the effect is there; never tried again
	case errors.Is(err, dispatch.ErrLost):
		return change.Lost
	case errors.As(err, &failed):
		switch failed.Code {
		case codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition,
			codes.OutOfRange, codes.Unimplemented, codes.DataLoss:
			return change.Broken // the same call would fail again
		}
	}
	return change.Infrastructure
}

// infrastructure are the layers that deny because something below us does not
// work: a provider that does not start, a journal that cannot be written.
// Nothing runs then, but nobody's policy refused it.
var infrastructure = map[string]bool{"provider": true, "journal": true}

// refused tells a spent budget, which pauses the Change (H-058), and what does
// not work from a denial.
func refused(d policy.Decision) change.Class {
	if d.Effect == policy.Escalate {
		return change.Escalate
	}
	below := len(d.Reasons) > 0
	for _, reason := range d.Reasons {
		if reason.Layer == "budget" {
			return change.Exhausted
		}
		below = below && (infrastructure[reason.Layer] || reason.Layer == "ledger" && reason.ID != "other-request")
	}
	if below {
		return change.Infrastructure
	}
	return change.Denied
}

// settle carries a command out. A call whose outcome is in doubt is settled by
// the same step under the same keys, so the step runs again, a few times.
func settle(ctx context.Context, steps Steps, j Job) (change.Result, error) {
	const tries = 3
	for try := 1; ; try++ {
		r, err := carryOut(ctx, steps, j)
		if err == nil || try == tries || !errors.Is(err, dispatch.ErrInDoubt) || errors.Is(err, dispatch.ErrLost) {
			return r, err
		}
		select {
		case <-ctx.Done():
			return r, err
		case <-time.After(time.Duration(try) * 500 * time.Millisecond):
		}
	}
}
