package sdk

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
)

type callKey struct{}

// call is one Invoke: the context it came with and the receipts it gathers.
type call struct {
	action *pluginv1.ActionContext
	target string

	mu       sync.Mutex
	evidence []*pluginv1.Evidence
	usage    *pluginv1.Usage
}

func callOf(ctx context.Context) *call {
	c, _ := ctx.Value(callKey{}).(*call)
	return c
}

// Action says on whose authority the call runs. It returns an empty context, and
// never nil, outside of an Invoke; a plugin must not change it.
func Action(ctx context.Context) *pluginv1.ActionContext {
	if c := callOf(ctx); c != nil {
		return c.action
	}
	return &pluginv1.ActionContext{}
}

// DryRun reports whether no effect at all may happen. The SDK refuses a dry run
// of a verb that has none before the handler sees it.
func DryRun(ctx context.Context) bool { return Action(ctx).GetDryRun() }

// Attach adds a receipt to the call's result. The host records the call as
// PARTIAL if a declared type of evidence is missing (P-031). At most 32 receipts
// of 32 KiB are taken; the host refuses more.
func Attach(ctx context.Context, e *pluginv1.Evidence) {
	if c := callOf(ctx); c != nil && e != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.evidence = append(c.evidence, proto.CloneOf(e))
	}
}

// AddUsage adds to what the call cost, as the provider claims it.
func AddUsage(ctx context.Context, u *pluginv1.Usage) {
	if c := callOf(ctx); c != nil && u != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.usage == nil {
			c.usage = &pluginv1.Usage{}
		}
		c.usage.InputTokens += u.GetInputTokens()
		c.usage.OutputTokens += u.GetOutputTokens()
		c.usage.CostMicros += u.GetCostMicros()
	}
}

// attached returns the receipts from the given index on.
func (c *call) attached(from int) []*pluginv1.Evidence {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]*pluginv1.Evidence(nil), c.evidence[from:]...)
}

func (c *call) result(err error) *pluginv1.ActionResult {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &pluginv1.ActionResult{
		Status:   pluginv1.ActionStatus_ACTION_STATUS_SUCCEEDED,
		Evidence: c.evidence,
		Usage:    c.usage,
	}
	if err == nil {
		return r
	}
	st, ok := status.FromError(err)
	if !ok && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) {
		st = status.FromContextError(err)
	}
	r.Status = pluginv1.ActionStatus_ACTION_STATUS_FAILED
	r.Code = int32(st.Code())
	// A code outside the protocol's range is a fault of the plugin.
	if st.Code() == codes.OK || r.Code < 0 || r.Code > 16 {
		r.Code = int32(codes.Unknown)
	}
	r.Message = clip(st.Message(), maxReason)
	return r
}
