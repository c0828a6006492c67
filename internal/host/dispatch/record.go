package dispatch

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/host/journal"
)

// Kinds of the entries that dispatch writes.
const (
	// KindDecision is one decision of the host on a verb or a tool intent.
	KindDecision = "POLICY_DECISION"
	// KindToolDenied follows the decision that denied a tool intent (H-025).
	KindToolDenied = "TOOL_DENIED"
	// KindResult is how an action ended.
	KindResult = "ACTION_RESULT"
	// KindDoubt is an action whose outcome is open.
	KindDoubt = "ACTION_IN_DOUBT"
	// KindRevocation ends the authority of a run or a Change.
	KindRevocation = "REVOCATION"
)

// maxContext bounds the policy context inside a decision's entry; a larger one
// is kept as a blob and named by its digest.
const maxContext = 40 << 10

// DecisionBody is the body of a KindDecision entry: who, what, which rule,
// which grant, how to ask, and the full typed context, so that it can be
// replayed. Source is always "host".
type DecisionBody struct {
	Action        identity.ActionID   `json:"action"`
	Actor         ActorBody           `json:"actor"`
	Ask           string              `json:"ask"`
	Caller        string              `json:"caller"`
	Context       json.RawMessage     `json:"context,omitempty"`
	ContextDigest digest.Digest       `json:"context_digest,omitempty"`
	Decision      identity.DecisionID `json:"decision"`
	DryRun        bool                `json:"dry_run"`
	Effect        string              `json:"effect"`
	Grant         identity.GrantID    `json:"grant"`
	GrantDigest   digest.Digest       `json:"grant_digest"`
	Key           string              `json:"key"`
	Policy        digest.Digest       `json:"policy"`
	Provider      ProviderBody        `json:"provider"`
	Reasons       []policy.Reason     `json:"reasons"`
	Request       digest.Digest       `json:"request"`
	Resources     []string            `json:"resources"`
	Revision      int                 `json:"revision"`
	Risk          string              `json:"risk"`
	Source        string              `json:"source"`
	Step          string              `json:"step"`
	Tool          *ToolBody           `json:"tool,omitempty"`
	Verb          string              `json:"verb"`
	WorkUnit      identity.WorkUnitID `json:"work_unit"`
}

// ActorBody is the identity of an action in a record.
type ActorBody struct {
	Kind      string `json:"kind"`
	Principal string `json:"principal"`
	Run       string `json:"run"`
}

// ProviderBody is the provider of an action in a record.
type ProviderBody struct {
	Extension string        `json:"extension"`
	Manifest  digest.Digest `json:"manifest"`
	Origin    string        `json:"origin"`
}

// ToolBody is a tool intent in a record. Its texts come from a harness and are
// untrusted.
type ToolBody struct {
	Argv   []string      `json:"argv"`
	Host   string        `json:"host"`
	Input  digest.Digest `json:"input"`
	Intent string        `json:"intent"`
	Name   string        `json:"name"`
	Path   string        `json:"path"`
}

// ResultBody is the body of a KindResult entry. Message and Evidence are the
// provider's claims.
type ResultBody struct {
	Action        identity.ActionID   `json:"action"`
	Bytes         string              `json:"bytes"`
	Code          string              `json:"code"`
	Compensating  string              `json:"compensating"`
	Decision      identity.DecisionID `json:"decision"`
	EffectUnknown bool                `json:"effect_unknown"`
	Evidence      []EvidenceBody      `json:"evidence"`
	Key           string              `json:"key"`
	Message       string              `json:"message"`
	MessageByHost bool                `json:"message_by_host"`
	Missing       []string            `json:"missing_evidence"`
	Result        digest.Digest       `json:"result"`
	Resumed       bool                `json:"resumed"`
	Run           identity.RunID      `json:"run"`
	Status        string              `json:"status"`
	Tokens        string              `json:"tokens"`
	Untrusted     bool                `json:"untrusted"`
	Verb          string              `json:"verb"`
	WallMS        string              `json:"wall_ms"`
}

// EvidenceBody is a provider's receipt in a record; its payload is kept under
// PayloadDigest.
type EvidenceBody struct {
	Digest        string        `json:"digest"`
	PayloadDigest digest.Digest `json:"payload_digest"`
	Reference     string        `json:"reference"`
	Type          string        `json:"type"`
}

func (d *Dispatcher) decisionBody(ctx context.Context, a Authority, e policy.Decision) (DecisionBody, error) {
	b := DecisionBody{
		Actor: ActorBody{Kind: a.Actor.Kind.String(), Principal: clip(string(a.Actor.Principal), 256), Run: clip(string(a.Actor.Run), 64)},
		Ask:   clip(e.Ask, 2048), Caller: a.Caller.String(), Decision: e.ID, Effect: e.Effect.String(), Grant: a.Grant.ID,
		GrantDigest: e.Grant, Policy: e.Policy, Reasons: []policy.Reason{}, Resources: []string{}, Revision: a.Revision,
		Source: "host", Step: clip(a.Step, 256), WorkUnit: a.WorkUnit,
	}
	for i, r := range e.Reasons {
		if i == 32 {
			break
		}
		r.Text = clip(r.Text, 1024)
		b.Reasons = append(b.Reasons, r)
	}
	switch {
	case len(e.Context) > maxContext:
		b.ContextDigest = digest.Of(e.Context)
		if _, err := d.c.Blobs.PutBytes(ctx, e.Context); err != nil {
			return b, err
		}
	default:
		b.Context = e.Context
	}
	return b, nil
}

// changeOf is the Change that an entry belongs to; what names none that is well
// formed belongs to the system.
func changeOf(a Authority) identity.ChangeID {
	if identity.ValidID(a.Change.ID) {
		return a.Change.ID
	}
	return identity.SystemChange
}

func (d *Dispatcher) decisionEntry(ctx context.Context, c *call) (journal.Entry, error) {
	b, err := d.decisionBody(context.WithoutCancel(ctx), c.authority, c.decision)
	if err != nil {
		return journal.Entry{}, err
	}
	b.Action, b.DryRun, b.Key, b.Request, b.Risk = c.action, c.dryRun, c.key, c.digest, c.verb.Risk.String()
	b.Verb = c.verb.Name()
	if c.verb.Full == "" {
		b.Verb = clip(c.method, 256)
	}
	b.Provider = ProviderBody{Extension: c.facts.Extension, Manifest: c.facts.Manifest, Origin: c.facts.Origin}
	for i, r := range c.resources {
		if i == 16 {
			break
		}
		b.Resources = append(b.Resources, clip(r, 512))
	}
	return d.decision(c.authority, c.action, c.key, c.digest, b)
}

func (d *Dispatcher) resultEntry(c *call, result digest.Digest, used journal.Amount) (journal.Entry, error) {
	a := c.answer
	b := ResultBody{
		Action: c.action, Bytes: strconv.Itoa(len(a.body)), Code: a.code.String(), Decision: c.decision.ID, EffectUnknown: a.effectUnknown,
		Evidence: []EvidenceBody{}, Key: c.key, Message: clip(a.message, 4096), MessageByHost: a.host, Missing: []string{}, Result: result,
		Resumed: c.resumed, Run: c.authority.Actor.Run, Status: a.status, Tokens: strconv.FormatInt(used.Tokens, 10), Untrusted: true,
		Verb: c.verb.Name(), WallMS: strconv.FormatInt(used.Wall.Milliseconds(), 10),
	}
	if a.status != StatusSucceeded {
		b.Compensating = c.verb.Compensating
	}
	b.Missing = append(b.Missing, a.missing...)
	for _, e := range a.evidence {
		r := EvidenceBody{Digest: e.GetDigest(), Reference: e.GetReference(), Type: e.GetType()}
		if len(e.GetPayload()) > 0 {
			r.PayloadDigest = digest.Of(e.GetPayload())
		}
		b.Evidence = append(b.Evidence, r)
	}
	return d.entry(c.authority, KindResult, c.action, c.key, c.digest, b.canonical)
}

func (d *Dispatcher) doubtEntry(c *call, cause error) (journal.Entry, error) {
	return d.entry(c.authority, KindDoubt, c.action, c.key, c.digest, func() ([]byte, error) {
		return digest.Canonical(map[string]any{
			"action": string(c.action), "decision": string(c.decision.ID), "key": c.key, "verb": c.verb.Name(),
			"cause": clip(cause.Error(), 1024), "compensating": c.verb.Compensating,
		})
	})
}

func (d *Dispatcher) decision(a Authority, action identity.ActionID, key string, request digest.Digest, b DecisionBody) (journal.Entry, error) {
	return d.entry(a, KindDecision, action, key, request, b.canonical)
}

// entry is one whose body is made by the given function, in its canonical form.
func (d *Dispatcher) entry(a Authority, kind string, action identity.ActionID, key string, request digest.Digest, body func() ([]byte, error)) (journal.Entry, error) {
	b, err := body()
	if err != nil {
		return journal.Entry{}, fmt.Errorf("journal entry %s: %w", kind, err)
	}
	return journal.Entry{At: d.c.Now(), Change: changeOf(a), Kind: kind, Action: action, Key: key, Request: request}.WithCanonical(b), nil
}
