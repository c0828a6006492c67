// Package policy decides: one pure function over floors, the run's grant and
// the Cedar policies of the organisation. The policy enforcement point calls
// it before every action; nothing in it does I/O, and deny is the zero value
// of everything it returns.
package policy

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy/floors"
)

// The parts of a request; they are defined beside the floors, which read them
// too.
type (
	Request       = floors.Request
	Tool          = floors.Tool
	ChangeFacts   = floors.ChangeFacts
	RunFacts      = floors.RunFacts
	ProviderFacts = floors.ProviderFacts
	Approval      = floors.Approval
)

// Origins of a provider.
const (
	OriginBundled    = floors.OriginBundled
	OriginDeployment = floors.OriginDeployment
	OriginRegistry   = floors.OriginRegistry
)

// Effect is what a decision says. The zero value denies.
type Effect uint8

// The three effects. Escalate denies for now: someone named in Ask may approve.
const (
	Deny Effect = iota
	Allow
	Escalate
)

// String returns "deny", "allow" or "escalate".
func (e Effect) String() string {
	switch e {
	case Allow:
		return "allow"
	case Escalate:
		return "escalate"
	}
	return "deny"
}

// MarshalText writes the effect as String does.
func (e Effect) MarshalText() ([]byte, error) { return []byte(e.String()), nil }

// UnmarshalText reads "deny", "allow" or "escalate"; anything else is an error
// and leaves a denial.
func (e *Effect) UnmarshalText(text []byte) error {
	*e = Deny
	switch string(text) {
	case "deny":
	case "allow":
		*e = Allow
	case "escalate":
		*e = Escalate
	default:
		return fmt.Errorf("effect %q: want deny, allow or escalate", text)
	}
	return nil
}

// Layers that give reasons. Dispatch adds its own ("ledger", "budget").
const (
	LayerStrict   = "strict"   // the request itself is malformed or unknown
	LayerFloor    = "floor"    // compiled in, nothing lifts it
	LayerGrant    = "grant"    // outside what the run was given
	LayerPolicy   = "policy"   // a Cedar policy, or none
	LayerApproval = "approval" // an approval lifted an escalation
)

// Reason is one ground of a decision: which rule of which layer, in words, and
// the clauses of the specification it stands on where there are any. Its fields
// are sorted by name, so that encoding it gives the canonical form.
type Reason struct {
	Clause string `json:"clause,omitempty"`
	ID     string `json:"id"`
	Layer  string `json:"layer"`
	Text   string `json:"text"`
}

// String returns the reason in one line.
func (r Reason) String() string {
	s := fmt.Sprintf("%s %s: %s", r.Layer, r.ID, r.Text)
	if r.Clause != "" {
		s += " (" + r.Clause + ")"
	}
	return s
}

// Decision is the answer to one request, with all that is needed to explain
// and to replay it. The caller fills in ID. Ask tells a person what to do
// about a denial, or whom an escalation waits for. Context is the canonical
// JSON of every attribute the policies saw; it is empty only if the request
// was too malformed to have one.
type Decision struct {
	ID      identity.DecisionID `json:"id"`
	Effect  Effect              `json:"effect"`
	Reasons []Reason            `json:"reasons"`
	Policy  digest.Digest       `json:"policy"`
	Grant   digest.Digest       `json:"grant"`
	Ask     string              `json:"ask,omitempty"`
	Context json.RawMessage     `json:"context,omitempty"`
}

// Summary returns effect and reasons in one line.
func (d Decision) Summary() string {
	lines := make([]string, len(d.Reasons))
	for i, r := range d.Reasons {
		lines[i] = r.String()
	}
	return d.Effect.String() + ": " + strings.Join(lines, "; ")
}
