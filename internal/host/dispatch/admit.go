package dispatch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"

	authorexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/policy/floors"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/core/strict"
	"github.com/numinance/numinance/internal/host/journal"
)

// refusal is why a step did not let an action through.
type refusal struct {
	reasons []policy.Reason
	ask     string
}

func (r *refusal) Error() string {
	lines := make([]string, len(r.reasons))
	for i, reason := range r.reasons {
		lines[i] = reason.String()
	}
	return strings.Join(lines, "; ")
}

func refused(layer, id, clause, ask, format string, args ...any) error {
	return &refusal{reasons: []policy.Reason{{Layer: layer, ID: id, Text: fmt.Sprintf(format, args...), Clause: clause}}, ask: ask}
}

func refusedBy(found []floors.Finding) error {
	r := &refusal{}
	for _, f := range found {
		r.reasons = append(r.reasons, policy.Reason{Layer: policy.LayerFloor, ID: f.ID, Text: f.Detail, Clause: strings.Join(f.Clauses, ", ")})
		r.ask = f.Ask
	}
	return r
}

const faultOfCaller = "this is a fault of the caller: report it with the decision"

// target is step 1.
func (d *Dispatcher) target(c *call) error {
	v, ok := ports.Lookup(c.method)
	if !ok || "/"+v.Full != c.method {
		return refused("strict", "known-action", "P-024", faultOfCaller, "%q is no method of a port", c.method)
	}
	c.verb = v
	if v.ServerStreaming != (c.emit != nil) {
		return refused("strict", "streaming", "", faultOfCaller, "%s is called in the wrong form", v.Name())
	}
	if v.Risk == ports.RiskUnknown || v.Exec == ports.ExecUnknown {
		return refused("strict", "annotations", "P-005", "report this", "%s has no risk or mode", v.Name())
	}
	c.key = c.authority.key(c.ordinal)
	c.action = actionID(c.key)
	if c.authority.Step == "" {
		return refused("strict", "step", "", faultOfCaller, "the authority names no step")
	}
	if !ports.Allowed(c.authority.Caller, v) {
		return refused("caller", "caller-table", "P-039", "nothing lifts this: the verb belongs to another context",
			"the %s context may not call %s", c.authority.Caller, v.Name())
	}
	c.provider = c.via
	if c.provider == nil {
		var err error
		if c.provider, err = d.c.Providers.Provider(v.Port); err != nil {
			return refused("provider", "none", "", "bind a provider of the port "+v.Port, "no provider of %s: %v", v.Port, err)
		}
	}
	c.facts = c.provider.Facts()
	agreed := c.provider.Negotiated()
	c.rules = strict.Rules{Version: agreed.SpecVersion, Capabilities: agreed.Capabilities}
	switch {
	case v.Capability != "" && !slices.Contains(agreed.Capabilities, v.Capability):
		return refused("strict", "capability", "P-026", "use a provider that serves it",
			"%s needs capability %s, which was not negotiated with %s", v.Name(), v.Capability, c.facts.Extension)
	case v.Capability == "" && strict.Newer(v.Since, agreed.SpecVersion):
		return refused("strict", "version", "P-020", "use a newer provider",
			"%s is since %s, but %q was negotiated with %s", v.Name(), v.Since, agreed.SpecVersion, c.facts.Extension)
	case agreed.Verbs != nil && !slices.Contains(agreed.Verbs, v.Method):
		return refused("strict", "served", "P-003", "use a provider that serves it", "%s does not serve %s", c.facts.Extension, v.Name())
	}
	return nil
}

// decode is step 2. It works on the bytes that the provider would get.
func (d *Dispatcher) decode(c *call) error {
	if got, want := c.request.ProtoReflect().Descriptor().FullName(), c.verb.Input.FullName(); got != want {
		return refused("strict", "type", "P-014", faultOfCaller, "the request is a %s, %s takes a %s", got, c.verb.Name(), want)
	}
	whole, err := marshal(c.request)
	if err != nil {
		return refused("strict", "encode", "", faultOfCaller, "%v", err)
	}
	if len(whole) > MaxRequest {
		return refused("strict", "size", "", "send a reference instead", "the request has %d bytes, at most %d", len(whole), MaxRequest)
	}
	if err := d.check.Walk(whole, c.verb.Input, c.rules); err != nil {
		return refused("strict", "decode", "P-030", faultOfCaller, "%v", err)
	}
	if err := d.check.Bounds(c.request); err != nil {
		return refused("strict", "bounds", "", "correct the request", "%v", err)
	}
	c.digest = requestDigest(c.verb, whole, c.dryRun)
	if isEvidence(c.verb) {
		// The evidence context runs its steps over and over without a ledger, so
		// the key says what is written and not when.
		c.key = "key-" + digest.Of([]byte(c.key + string(c.digest))).Hex()[:40]
		c.action = actionID(c.key)
	}
	c.resources = ports.Resources(c.verb, c.request.ProtoReflect())
	c.payload = whole
	if d.check.Hides(c.request.ProtoReflect().Descriptor()) {
		outside := proto.Clone(c.request)
		if strict.Outside(outside.ProtoReflect()) {
			if c.payload, err = marshal(outside); err != nil {
				return refused("strict", "encode", "", faultOfCaller, "%v", err)
			}
		}
	}
	return withinGrant(c)
}

func marshal(m proto.Message) ([]byte, error) {
	return proto.MarshalOptions{Deterministic: true}.Marshal(m)
}

// RequestDigest names an action: its verb, its request and whether it is a dry
// run. An approval is given to this digest, and a key in the ledger stands for
// it.
func RequestDigest(v ports.Verb, request proto.Message, dryRun bool) (digest.Digest, error) {
	b, err := marshal(request)
	if err != nil {
		return "", fmt.Errorf("name a request of %s: %w", v.Name(), err)
	}
	return requestDigest(v, b, dryRun), nil
}

func requestDigest(v ports.Verb, request []byte, dryRun bool) digest.Digest {
	return name("request", v.Full, string(request), strconv.FormatBool(dryRun))
}

// withinGrant holds what an executor is told against what its run was given:
// a request cannot promise an adapter more than the grant (P-127, P-128, P-129).
func withinGrant(c *call) error {
	var r *authorexecutorv1.ChangeExecutionRequest
	switch m := c.request.(type) {
	case *authorexecutorv1.ExecuteRequest:
		r = m.GetRequest()
	case *authorexecutorv1.PlanRequest:
		r = m.GetRequest()
	default:
		return nil
	}
	g := c.authority.Grant
	ask := "build the request from the grant"
	if c.authority.Actor.Kind == identity.KindReviewerAgent {
		switch {
		case len(r.GetAllowedPaths()) > 0:
			return refused("grant", "reviewer-paths", "P-127", ask, "a reviewer-agent's request names the allowed path %q", r.GetAllowedPaths()[0])
		case len(r.GetCredentialCapabilities()) > 0:
			return refused("grant", "reviewer-credentials", "P-128", ask, "a reviewer-agent's request names the credential %q", r.GetCredentialCapabilities()[0])
		}
		for _, e := range r.GetAllowedCapabilities() {
			if s := e.String(); s == grant.CapabilityWrite || s == grant.CapabilityShell || s == grant.CapabilityNetwork {
				return refused("grant", "reviewer-capabilities", "P-129", ask, "a reviewer-agent's request names %s", s)
			}
		}
	}
	if r.GetGrantId() != string(g.ID) || r.GetRunId() != string(g.Run) || r.GetChangeId() != string(g.Change) {
		return refused("grant", "request", "P-124", ask, "the request is for run %s under grant %s, the authority is run %s under grant %s",
			r.GetRunId(), r.GetGrantId(), g.Run, g.ID)
	}
	for _, p := range r.GetAllowedPaths() {
		if !slices.Contains(g.Paths.Allowed, p) {
			return refused("grant", "request-paths", "H-048", ask, "the request allows the path %q, which grant %s does not hold", p, g.ID)
		}
	}
	for _, e := range r.GetAllowedCapabilities() {
		if !g.HasCapability(e.String()) {
			return refused("grant", "request-capabilities", "H-048", ask, "the request allows %s, which grant %s does not hold", e, g.ID)
		}
	}
	for _, intent := range r.GetCredentialCapabilities() {
		if !g.HasCredential(intent) {
			return refused("grant", "request-credentials", "H-048", ask, "the request allows the credential %q, which grant %s does not hold", intent, g.ID)
		}
	}
	return nil
}

// decide is steps 4 to 7. The budget is reserved first, so that two calls at
// once cannot both have the last of it, but its refusal speaks only where
// floors, grant and policy would have allowed.
func (d *Dispatcher) decide(ctx context.Context, c *call) error {
	ctx = context.WithoutCancel(ctx) // a caller that gives up is no denial
	if err := d.gate(); err != nil {
		return err
	}
	if r, revoked := d.revoked(c); revoked {
		return refused("grant", "revoked", "", "start a new run", "the %s %s was revoked", r.Scope, r.ID)
	}
	var err error
	if c.run, err = d.runs.facts(ctx, c.authority.Actor.Run); err != nil {
		return refused("ledger", "unreadable", "", "free or repair the state database", "%v", err)
	}
	want := journal.Amount{Actions: 1, Output: MaxAnswer}
	if c.verb.ServerStreaming {
		want.Output = MaxEvents * MaxEvent
	}
	var short error
	c.held, c.left, short = d.budgets.reserve(ctx, c.authority.Grant, want, c.began)
	c.decision = d.c.Policy.Decide(c.policyRequest())
	c.decision.ID = identity.DecisionID(id("dec"))
	if c.decision.Effect == policy.Allow && short != nil {
		c.decision.Effect = policy.Deny
		var r *refusal
		if errors.As(short, &r) {
			c.decision.Reasons, c.decision.Ask = r.reasons, r.ask
		}
	}
	if c.decision.Effect != policy.Allow {
		if short == nil {
			d.budgets.settle(c.authority.Grant.ID, c.held, journal.Amount{})
		}
		return &refusal{reasons: c.decision.Reasons, ask: c.decision.Ask}
	}
	return nil
}

// decideEvidence decides a verb of the evidence ports: the floors name who and
// under which scope, the grant must be valid and hold the verb. No policy can
// lift or forbid it, else a policy could stop the record of itself.
func (d *Dispatcher) decideEvidence(c *call) error {
	c.decision = policy.Decision{ID: identity.DecisionID(id("dec")), Grant: c.authority.Grant.Digest()}
	if found := floors.Check(c.policyRequest()); len(found) > 0 {
		return refusedBy(found)
	}
	g := c.authority.Grant
	ask := "use the fixed grant of the evidence context"
	if err := g.Validate(); err != nil {
		return refused("grant", "valid", "P-208", ask, "%v", err)
	}
	switch {
	case g.Actor != c.authority.Actor || g.Change != c.authority.Change.ID:
		return refused("grant", "actor", "P-201", ask, "grant %s is of another actor or Change", g.ID)
	case !g.ActiveAt(c.began):
		return refused("grant", "time", "", ask, "grant %s is not in force", g.ID)
	case !g.HasVerb(c.verb.Name()):
		return refused("grant", "verb", "", ask, "grant %s does not hold the verb %s", g.ID, c.verb.Name())
	}
	for _, scope := range c.verb.Scopes {
		if !g.HasScope(scope) {
			return refused("grant", "scope", "P-202", ask, "grant %s does not hold the scope %q", g.ID, scope)
		}
	}
	c.decision.Effect = policy.Allow
	c.left = journal.Amount{Actions: 1, Output: MaxAnswer}
	return nil
}

// start is step 8.
func (d *Dispatcher) start(ctx context.Context, c *call) error {
	ctx = context.WithoutCancel(ctx) // what is queued gets an answer
	entry, err := d.decisionEntry(ctx, c)
	if err != nil {
		return refused("journal", "entry", "", "report this", "%v", err)
	}
	s := journal.Start{
		Key: c.key, Change: c.authority.Change.ID, Run: c.authority.Actor.Run, Grant: c.authority.Grant.ID, Verb: c.verb.Name(),
		Action: c.action, Decision: c.decision.ID, Request: c.digest, Reserve: c.held,
	}
	// A READ without a credential may run before its entry is on disk, but only
	// while the disk is known to take entries.
	c.lazy = c.verb.Risk == ports.RiskRead && c.verb.Exec == ports.ExecSync && len(c.facts.Credentials) == 0 && d.c.Journal.Healthy()
	if c.lazy {
		err = d.c.Journal.StartLazy(ctx, s, entry)
	} else {
		_, err = d.c.Journal.Start(ctx, s, entry)
	}
	switch {
	case errors.Is(err, journal.ErrFenced):
		return refused("journal", "fenced", "", "this process must stop", "%v", err)
	case err != nil:
		return refused("journal", "unavailable", "", "free disk space or repair the state database, then go on", "the decision could not be recorded: %v", err)
	}
	d.runs.used(c.authority.Actor.Run, c.verb.Name())
	return nil
}

// deny records that an action was not allowed and returns the error for its
// caller.
func (d *Dispatcher) deny(ctx context.Context, c *call, why error) error {
	verb := c.verb.Name()
	if c.verb.Full == "" {
		verb = strings.TrimPrefix(c.method, "/")
	}
	e := &DeniedError{Verb: verb, Decision: c.decision}
	var r *refusal
	if !errors.As(why, &r) {
		r = &refusal{reasons: []policy.Reason{{Layer: policy.LayerStrict, ID: "internal", Text: why.Error()}}, ask: "report this"}
	}
	if e.Decision.Effect == policy.Allow {
		// Allowed by policy and yet not started.
		e.Decision.Effect = policy.Deny
	}
	if e.Decision.ID == "" || c.resumed {
		e.Decision.ID = identity.DecisionID(id("dec"))
	}
	e.Decision.Reasons, e.Decision.Ask = r.reasons, r.ask
	if e.Decision.Grant == "" {
		e.Decision.Grant = c.authority.Grant.Digest()
	}
	c.decision = e.Decision
	entry, err := d.decisionEntry(ctx, c)
	if err != nil {
		e.Unrecorded = err
		return e
	}
	e.Spilled, e.Unrecorded = d.c.Journal.Deny(ctx, validRun(c.authority.Actor.Run), entry)
	d.runs.denied(c.authority.Actor.Run)
	return e
}

// validRun keeps a malformed run out of the tables: its denial is still
// recorded.
func validRun(run identity.RunID) identity.RunID {
	if identity.ValidID(run) {
		return run
	}
	return ""
}
