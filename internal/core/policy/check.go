package policy

import (
	"fmt"
	"slices"
	"strings"

	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy/floors"
)

// refusal is one reason with what a person can do about it.
type refusal struct {
	reason Reason
	ask    string
}

func refuse(layer, id, clause, ask, format string, args ...any) refusal {
	return refusal{Reason{Layer: layer, ID: id, Text: fmt.Sprintf(format, args...), Clause: clause}, ask}
}

// checkFloors is the first layer: nothing below it can allow what it denies.
func checkFloors(r Request) (out []refusal) {
	for _, f := range floors.Check(r) {
		out = append(out, refuse(LayerFloor, f.ID, strings.Join(f.Clauses, ", "), f.Ask, "%s", f.Detail))
	}
	return out
}

// checkStrict refuses requests that are unknown or do not hang together.
func checkStrict(r Request) (out []refusal) {
	const bug = "this is a fault of the caller: report it with the decision"
	action := r.Action()
	switch {
	case r.Tool != nil && r.Verb.Full != "":
		out = append(out, refuse(LayerStrict, "one-action", "", bug, "the request names a verb and a tool intent"))
	case action == "":
		out = append(out, refuse(LayerStrict, "known-action", "P-024", bug, "the request names no action"))
	case r.Tool != nil && !slices.Contains(floors.ToolNames(), r.Tool.Canonical()):
		out = append(out, refuse(LayerStrict, "known-action", "P-038", "use one of "+strings.Join(floors.ToolNames(), ", "), "%q is no tool intent", r.Tool.Name))
	}
	if r.Now.IsZero() {
		out = append(out, refuse(LayerStrict, "clock", "", bug, "the request has no time"))
	}
	if !r.Input.Valid() {
		out = append(out, refuse(LayerStrict, "input", "", bug, "the request has no digest of its input"))
	}
	if r.Run.Denials < 0 || r.Run.Denials > 1<<53 {
		out = append(out, refuse(LayerStrict, "run-facts", "", bug, "the count of denials is out of range"))
	}
	if r.DryRun && (r.Tool != nil || !r.Verb.DryRun) {
		out = append(out, refuse(LayerStrict, "dry-run", "P-005", "ask for the action itself", "%s supports no dry run", action))
	}
	return out
}

// checkGrant is the second layer: what the run was given (P-029, H-044, H-048).
// invalid is what Validate says of the grant.
func checkGrant(r Request, invalid error) (out []refusal) {
	g := r.Grant
	deny := func(id, clause, ask, format string, args ...any) {
		out = append(out, refuse(LayerGrant, id, clause, ask, format, args...))
	}
	if invalid != nil {
		deny("valid", "H-044", "the run needs a grant", "%s", invalid)
		return out
	}
	switch {
	case g.Actor != r.Actor:
		deny("actor", "P-040", "use the grant of this run", "grant %s is for %s in run %s, not for %s in run %s", g.ID, g.Actor.Principal, g.Run, r.Actor.Principal, r.Actor.Run)
	case g.Change != r.Change.ID:
		deny("change", "P-066", "use the grant of this Change", "grant %s belongs to Change %s, not to %s", g.ID, g.Change, r.Change.ID)
	case !g.ActiveAt(r.Now):
		deny("time", "", "start a new run", "grant %s is in force from %s to %s", g.ID, g.NotBefore.Format("15:04:05Z"), g.Expires.Format("15:04:05Z"))
	}
	if r.Tool != nil {
		return append(out, checkTool(g, *r.Tool)...)
	}
	if !g.HasVerb(r.Verb.Name()) {
		deny("verb", "H-044", "ask for a grant with the verb", "grant %s does not hold the verb %s", g.ID, r.Verb.Name())
	}
	for _, resource := range r.Resources {
		if !g.HasResource(resource) {
			deny("resource", "P-029", "ask for a grant with the resource", "grant %s does not hold the resource %q", g.ID, resource)
		}
	}
	for _, scope := range r.Verb.Scopes {
		if !g.HasScope(scope) {
			deny("scope", "P-202", "ask for a grant with the scope", "grant %s does not hold the scope %q", g.ID, scope)
		}
	}
	return out
}

func checkTool(g grant.Grant, t Tool) (out []refusal) {
	deny := func(id, clause, ask, format string, args ...any) {
		out = append(out, refuse(LayerGrant, id, clause, ask, format, args...))
	}
	needs := func(capability string) {
		if !g.HasCapability(capability) {
			deny("capability", "H-044", "require the capability in the plan", "grant %s does not hold %s", g.ID, capability)
		}
	}
	switch name := t.Canonical(); name {
	case "write", "delete":
		needs(grant.CapabilityWrite)
		if ok, reason := g.Paths.Check(t.Path); !ok {
			deny("path", "H-044", "name the path in the plan's allowed paths", "%s", reason)
		}
	case "read":
		needs(grant.CapabilityRead)
	case "run":
		needs(grant.CapabilityShell)
		if len(t.Argv) == 0 || t.Argv[0] == "" {
			deny("argv", "", "name the program", "the intent names no program")
		}
	case "fetch":
		host, port, err := splitHost(t.Host)
		if err != nil {
			deny("egress", "H-063", "name one host", "%s", err)
			break
		}
		if !g.HasDestination(host, port) {
			deny("egress", "H-063", fmt.Sprintf("add %s:%d to the egress of the Profile", host, port), "grant %s does not hold the destination %s:%d", g.ID, host, port)
		}
		needs(grant.CapabilityNetwork)
	case "credential":
		if t.Intent == "" || !g.HasCredential(t.Intent) {
			deny("credential", "H-048", fmt.Sprintf("add the intent %q to the credentials of the Profile", t.Intent), "grant %s does not hold the credential intent %q", g.ID, t.Intent)
		}
	}
	return out
}

// validApprovals returns the approvals that are in force for this very action
// under the policy revision: right digest, head and revision, not expired.
// The floor no-self-approval has already looked at who gave them.
func (e *Engine) validApprovals(r Request) (out []Approval) {
	for _, a := range r.Approvals {
		if a.ID != "" && identity.Principal.Valid(a.Approver) && a.Action.Valid() && a.Action == r.Input &&
			a.Policy == e.revision && a.Head != "" && a.Head == r.Change.Head && r.Now.Before(a.Expires) {
			out = append(out, a)
		}
	}
	return out
}
