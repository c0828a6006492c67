package dispatch

import (
	"context"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	"github.com/numinance/numinance/internal/core/policy"
)

// Provider is a running plugin after its handshake.
type Provider interface {
	// Facts are what lockfile and manifest say of it.
	Facts() policy.ProviderFacts
	// Negotiated is what handshake agreed on.
	Negotiated() Negotiated
	// Invoke runs one verb and hands each message of the answer on, in order. It
	// returns nil after the last; an error is a gRPC status and means that no
	// result came. It ends soon after ctx does.
	Invoke(ctx context.Context, req *pluginv1.InvokeRequest, each func(*pluginv1.InvokeResponse) error) error
}

// Negotiated is what host and plugin agreed on in the handshake.
type Negotiated struct {
	SpecVersion  string
	Capabilities []string
	// Verbs are the methods of its port that the manifest names, such as
	// GetFile. Nil means that the manifest was not asked.
	Verbs []string
}

// Providers finds the deployment's provider of a port.
type Providers interface {
	// Provider returns the provider bound to a port, such as "scm". After a
	// crash of a plugin it returns the newly started one.
	Provider(port string) (Provider, error)
}

// Decider decides a request by floors, grant and policies. It is pure; see
// policy.Engine.
type Decider interface {
	Decide(policy.Request) policy.Decision
}
