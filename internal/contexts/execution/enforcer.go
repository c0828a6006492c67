package execution

import (
	"context"
	"errors"

	"google.golang.org/grpc"

	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/host/dispatch"
)

// Enforcer is the Dispatcher of the runtime.
type Enforcer struct{ Dispatcher *dispatch.Dispatcher }

// Via implements Dispatcher.
func (e Enforcer) Via(a dispatch.Authority, p dispatch.Provider) grpc.ClientConnInterface {
	return e.Dispatcher.Conn(a).Via(p)
}

// Tool implements Dispatcher.
func (e Enforcer) Tool(ctx context.Context, a dispatch.Authority, t policy.Tool) (policy.Decision, error) {
	return e.Dispatcher.Tool(ctx, a, t)
}

// Taint implements Dispatcher.
func (e Enforcer) Taint(ctx context.Context, run identity.RunID) error {
	return e.Dispatcher.Taint(ctx, run)
}

// refusal returns the denial of the adapter's own call, if that is what err is:
// then there was no run.
func refusal(err error) error {
	var denied *dispatch.DeniedError
	if errors.As(err, &denied) {
		return denied
	}
	return nil
}
