package policy_test

import (
	"testing"
	"time"

	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/ports"
)

// The fail-closed matrix of the policy core: whatever is missing, unknown,
// broken or out of range, the answer is deny with a reason.
func TestFailClosedMatrix(t *testing.T) {
	all, none := load(t, permissive), load(t, "")
	overflow := `context.run.denials + 9223372036854775807 > 0`
	failing := load(t, permissive+`@id("broken") forbid (principal, action, resource) when { `+overflow+` };`)
	failingPermit := load(t, permissive+`@id("broken") permit (principal, action, resource) when { `+overflow+` };`)
	failingEscalation := load(t, permissive+`@id("asks") @escalate("approvers") forbid (principal, action, resource);
		@id("broken") forbid (principal, action, resource) when { `+overflow+` };`)
	elsewhere := load(t, `@id("other") permit (principal, action == Action::"scm.GetTree", resource);`)

	good := verb(t, ports.CallerRelease, author, "scm.OpenPullRequest", "Verifying")
	if d := all.Decide(good); d.Effect != policy.Allow {
		t.Fatalf("the request that the cases spoil is not allowed: %s", d.Summary())
	}
	denials := good
	denials.Run.Denials = 1
	cases := []struct {
		name  string
		e     *policy.Engine
		r     policy.Request
		spoil func(*policy.Request)
	}{
		{"no engine", nil, good, nil},
		{"zero engine", &policy.Engine{}, good, nil},
		{"no policies", none, good, nil},
		{"no rule matches", elsewhere, good, nil},
		{"a forbid cannot be evaluated", failing, denials, nil},
		{"a permit cannot be evaluated", failingPermit, denials, nil},
		{"a forbid behind an escalation cannot be evaluated", failingEscalation, denials, nil},
		{"zero request", all, policy.Request{}, nil},
		{"unknown verb", all, good, func(r *policy.Request) { r.Verb = ports.Verb{} }},
		{"invented verb", all, good, func(r *policy.Request) { r.Verb.Method, r.Verb.Full = "Delete", "x/Delete" }},
		{"verb and tool", all, good, func(r *policy.Request) { r.Tool = &policy.Tool{Name: "say"}; r.Caller = ports.CallerExecution }},
		{"unknown caller", all, good, func(r *policy.Request) { r.Caller = 0 }},
		{"caller out of range", all, good, func(r *policy.Request) { r.Caller = 200 }},
		{"unknown actor kind", all, good, func(r *policy.Request) { r.Actor.Kind = 0 }},
		{"actor kind out of range", all, good, func(r *policy.Request) { r.Actor.Kind = 77 }},
		{"no principal", all, good, func(r *policy.Request) { r.Actor.Principal = "" }},
		{"no run", all, good, func(r *policy.Request) { r.Actor.Run = "" }},
		{"zero grant", all, good, func(r *policy.Request) { r.Grant = grant.Grant{} }},
		{"malformed grant", all, good, func(r *policy.Request) { r.Grant.Paths.Allowed = []string{"*"} }},
		{"grant of another run", all, good, func(r *policy.Request) { r.Actor.Run = "run-q" }},
		{"grant of another Change", all, good, func(r *policy.Request) { r.Grant.Change = "chg-2" }},
		{"grant without the verb", all, good, func(r *policy.Request) { r.Grant.Verbs = nil }},
		{"resource outside", all, good, func(r *policy.Request) { r.Resources = []string{"widgets"} }},
		{"empty resource", all, good, func(r *policy.Request) { r.Resources = []string{""} }},
		{"climbing resource", all, good, func(r *policy.Request) { r.Grant.Resources = []string{"a/"}; r.Resources = []string{"a/../b"} }},
		{"no time", all, good, func(r *policy.Request) { r.Now = time.Time{} }},
		{"clock gone back", all, good, func(r *policy.Request) { r.Now = now.AddDate(-1, 0, 0) }},
		{"grant expired", all, good, func(r *policy.Request) { r.Now = r.Grant.Expires }},
		{"no input", all, good, func(r *policy.Request) { r.Input = "" }},
		{"malformed input", all, good, func(r *policy.Request) { r.Input = "sha256:00" }},
		{"count below zero", all, good, func(r *policy.Request) { r.Run.Denials = -1 }},
		{"count out of range", all, good, func(r *policy.Request) { r.Run.Denials = 1 << 60 }},
		{"unknown Change state", shipped(t), good, func(r *policy.Request) { r.Change.State = "Dreaming" }},
		{"no Change", all, good, func(r *policy.Request) { r.Change = policy.ChangeFacts{} }},
		{"unknown origin of a sandbox provider", all, verb(t, ports.CallerSandbox, runner, "sandboxprovider.Create", "Executing"), func(r *policy.Request) { r.Provider.Origin = "moon" }},
		{"tool without a name", all, tool(t, author, "Executing", policy.Tool{}), nil},
		{"tool in capitals", all, tool(t, author, "Executing", policy.Tool{Name: "WRITE", Path: "a"}), nil},
		{"tool without its capability", all, tool(t, author, "Executing", policy.Tool{Name: "write", Path: "a"}), func(r *policy.Request) { r.Grant.Capabilities = nil }},
		{"path with a control character", all, tool(t, author, "Executing", policy.Tool{Name: "write", Path: "a\x00b"}), nil},
		{"path that is not text", all, tool(t, author, "Executing", policy.Tool{Name: "write", Path: "a\xff"}), nil},
		{"host with a user", all, tool(t, author, "Executing", policy.Tool{Name: "fetch", Host: "x@proxy.example.com"}), nil},
		{"port out of range", all, tool(t, author, "Executing", policy.Tool{Name: "fetch", Host: "proxy.example.com:99999"}), nil},
		{"a verifier without authors", all, verb(t, ports.CallerVerification, reviewer, "verifier.Run", "Verifying"), func(r *policy.Request) { r.Change.Authors = nil }},
		{"an approval by nobody", all, good, func(r *policy.Request) { r.Approvals = []policy.Approval{{}} }},
		{"an actor that is the author by another kind", all, verb(t, ports.CallerRelease, release, "scm.MergePullRequest", "Releasing"), func(r *policy.Request) {
			r.Change.Authors = []identity.Actor{{Kind: identity.KindHuman, Principal: "service:release", Run: "run-z"}}
		}},
	}
	allowed := 0
	for _, c := range cases {
		r := c.r
		if c.spoil != nil {
			c.spoil(&r)
		}
		d := c.e.Decide(r)
		if d.Effect != policy.Deny {
			allowed++
			t.Errorf("%s: %s", c.name, d.Summary())
		}
		if len(d.Reasons) == 0 || d.Reasons[0].Text == "" {
			t.Errorf("%s: no reason", c.name)
		}
	}
	t.Logf("matrix: %d cases, %d allowed", len(cases), allowed)

	for name, text := range map[string]string{
		"half written":     policy.Default()[:len(policy.Default())/2],
		"not text":         "\xff\xfe\x00",
		"schema mismatch":  `@id("a") permit (principal, action, resource) when { context.nothing };`,
		"no id":            `permit (principal, action, resource);`,
		"skipped by typos": `@id("a") forbid (principal, action, resource) when { context.run.taintd };`,
	} {
		if _, err := policy.Load(map[string][]byte{"x.cedar": []byte(text)}); err == nil {
			t.Errorf("policy file %s: loaded", name)
		}
	}
}
