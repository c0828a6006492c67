package policy_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/ports"
)

var now = time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC) // a Friday

var (
	author   = identity.Actor{Kind: identity.KindAuthorAgent, Principal: "agent:fake", Run: "run-a", Vendor: "none"}
	reviewer = identity.Actor{Kind: identity.KindReviewerAgent, Principal: "agent:reviewer", Run: "run-r"}
	runner   = identity.Actor{Kind: identity.KindRunner, Principal: "service:runner", Run: "run-s"}
	release  = identity.Actor{Kind: identity.KindReleasePipeline, Principal: "service:release", Run: "run-m"}
	human    = identity.Actor{Kind: identity.KindHuman, Principal: "human:alice", Run: "run-h"}
)

const (
	head  = "1111111111111111111111111111111111111111"
	input = digest.Digest("sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa")
)

// granted is a grant with everything that a's kind can hold.
func granted(t testing.TB, a identity.Actor) grant.Grant {
	t.Helper()
	g := grant.Grant{
		ID: "grt-1", Change: "chg-1", Run: a.Run, Actor: a, Resources: []string{"widget"},
		Capabilities: []string{grant.CapabilityRead},
		Budget:       grant.Budget{Actions: 1000, OutputBytes: 1 << 30, Tokens: 1 << 20, Wall: time.Hour},
		NotBefore:    now.Add(-time.Hour), Expires: now.Add(time.Hour),
	}
	for _, v := range ports.All() {
		g.Verbs = append(g.Verbs, v.Name())
	}
	switch a.Kind {
	case identity.KindRunner:
		g.Scopes = []string{grant.ScopeEvidenceWrite, grant.ScopeEvidenceRead, grant.ScopeLogAppend}
	case identity.KindAuthorAgent:
		g.Paths = pathscope.Scope{Allowed: []string{"**"}, Denied: []string{"vendor/"}}
		g.Capabilities = append(g.Capabilities, grant.CapabilityWrite, grant.CapabilityShell, grant.CapabilityNetwork)
		g.Egress = []grant.Destination{{Host: "proxy.example.com", Port: 443}}
		g.Credentials = []string{"scm-write"}
	}
	g, err := grant.New(g)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func facts(state string) policy.ChangeFacts {
	return policy.ChangeFacts{
		ID: "chg-1", State: state, Authors: []identity.Actor{author}, Requester: "human:alice", Head: head,
		Verified: true, Approved: true, HeadMatches: true,
	}
}

func verb(t testing.TB, c ports.Caller, a identity.Actor, name, state string) policy.Request {
	t.Helper()
	v, ok := ports.Lookup(name)
	if !ok {
		t.Fatalf("no verb %s", name)
	}
	return policy.Request{
		Caller: c, Actor: a, Verb: v, Resources: []string{"widget"}, Grant: granted(t, a), Change: facts(state),
		Provider: policy.ProviderFacts{Extension: "dev.numinance.embedded/x", Origin: policy.OriginBundled}, Now: now, Input: input,
	}
}

func tool(t testing.TB, a identity.Actor, state string, what policy.Tool) policy.Request {
	t.Helper()
	return policy.Request{Caller: ports.CallerExecution, Actor: a, Tool: &what, Grant: granted(t, a), Change: facts(state), Now: now, Input: input}
}

func shipped(t testing.TB) *policy.Engine {
	t.Helper()
	e, err := policy.LoadDefault()
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func load(t testing.TB, text string) *policy.Engine {
	t.Helper()
	e, err := policy.Load(map[string][]byte{"test.cedar": []byte(text)})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// The chain of one Change goes through on the shipped policy alone.
func TestDefaultPermitsTheLifeOfAChange(t *testing.T) {
	e := shipped(t)
	steps := []policy.Request{
		verb(t, ports.CallerProfile, runner, "scm.GetRepository", "Admitted"),
		verb(t, ports.CallerChange, runner, "ticketing.GetIssue", "Proposed"),
		verb(t, ports.CallerChange, runner, "ticketing.CommentOnIssue", "Releasing"),
		verb(t, ports.CallerKnowledge, runner, "knowledge.Search", "Resolving"),
		verb(t, ports.CallerKnowledge, runner, "knowledge.Fetch", "Resolving"),
		verb(t, ports.CallerKnowledge, runner, "scm.GetFile", "Resolving"),
		verb(t, ports.CallerKnowledge, runner, "scm.GetTree", "Resolving"),
		verb(t, ports.CallerSandbox, runner, "sandboxprovider.Create", "Planning"),
		verb(t, ports.CallerExecution, author, "authorexecutor.Capabilities", "Planning"),
		verb(t, ports.CallerExecution, author, "authorexecutor.Plan", "Planning"),
		verb(t, ports.CallerSandbox, runner, "sandboxprovider.Exec", "Executing"),
		verb(t, ports.CallerSandbox, runner, "sandboxprovider.Wait", "Executing"),
		verb(t, ports.CallerExecution, author, "authorexecutor.Execute", "Executing"),
		tool(t, author, "Executing", policy.Tool{Name: "write", Path: "src/a.go"}),
		tool(t, author, "Executing", policy.Tool{Name: "patch", Path: "src/a.go"}),
		tool(t, author, "Revising", policy.Tool{Name: "delete", Path: "src/a.go"}),
		tool(t, author, "Executing", policy.Tool{Name: "read", Path: "src/a.go"}),
		tool(t, author, "Executing", policy.Tool{Name: "run", Argv: []string{"go", "test", "./..."}}),
		tool(t, author, "Executing", policy.Tool{Name: "fetch", Host: "proxy.example.com"}),
		tool(t, author, "Executing", policy.Tool{Name: "fetch", Host: "proxy.example.com:443"}),
		tool(t, author, "Executing", policy.Tool{Name: "credential", Intent: "scm-write"}),
		tool(t, author, "Executing", policy.Tool{Name: "say"}),
		tool(t, author, "Executing", policy.Tool{Name: "checkpoint"}),
		verb(t, ports.CallerSandbox, runner, "sandboxprovider.Snapshot", "Executing"),
		verb(t, ports.CallerSandbox, runner, "sandboxprovider.Destroy", "Cancelled"),
		verb(t, ports.CallerVerification, reviewer, "verifier.Run", "Verifying"),
		verb(t, ports.CallerExecution, reviewer, "authorexecutor.Execute", "Verifying"),
		tool(t, reviewer, "Verifying", policy.Tool{Name: "say"}),
		tool(t, reviewer, "Verifying", policy.Tool{Name: "read", Path: "a"}),
		verb(t, ports.CallerRelease, author, "scm.CreateBranch", "Verifying"),
		verb(t, ports.CallerRelease, author, "scm.OpenPullRequest", "Verifying"),
		verb(t, ports.CallerRelease, author, "scm.UpdatePullRequest", "Failed"),
		verb(t, ports.CallerRelease, author, "scm.CommentOnPullRequest", "Releasing"),
		verb(t, ports.CallerRelease, runner, "scm.GetPullRequestStatus", "Releasing"),
		verb(t, ports.CallerRelease, release, "scm.MergePullRequest", "Releasing"),
		verb(t, ports.CallerRelease, release, "ciexecutor.StartOperation", "Releasing"),
		verb(t, ports.CallerRelease, release, "ciexecutor.GetOperation", "Releasing"),
		verb(t, ports.CallerRelease, release, "ciexecutor.CancelOperation", "Releasing"),
		verb(t, ports.CallerRelease, release, "ciexecutor.GetLogReference", "Releasing"),
		verb(t, ports.CallerEvidence, runner, "evidencestore.AppendLocked", "Executing"),
		verb(t, ports.CallerEvidence, runner, "evidencestore.Head", "Released"),
		verb(t, ports.CallerEvidence, runner, "transparencylog.Append", "Released"),
		verb(t, ports.CallerEvidence, runner, "transparencylog.Prove", "Cancelled"),
	}
	for _, r := range steps {
		d := e.Decide(r)
		if d.Effect != policy.Allow {
			t.Errorf("%s at %s: %s (%s)", r.Action(), r.Change.State, d.Summary(), d.Ask)
		}
		if len(d.Reasons) == 0 || !d.Policy.Valid() || !d.Grant.Valid() || digest.CheckCanonical(d.Context) != nil {
			t.Errorf("%s: decision is incomplete: %+v", r.Action(), d)
		}
	}
}

func TestDefaultDenies(t *testing.T) {
	e := shipped(t)
	unverified, unapproved, moved := verb(t, ports.CallerRelease, release, "scm.MergePullRequest", "Releasing"),
		verb(t, ports.CallerRelease, release, "scm.MergePullRequest", "Releasing"), verb(t, ports.CallerRelease, release, "scm.MergePullRequest", "Releasing")
	unverified.Change.Verified, unapproved.Change.Approved, moved.Change.HeadMatches = false, false, false
	cases := []struct {
		name, layer, id string
		r               policy.Request
	}{
		{"unverified merge", "policy", "merge-needs-verification-and-approval", unverified},
		{"unapproved merge", "policy", "merge-needs-verification-and-approval", unapproved},
		{"merge of a moved head", "policy", "merge-needs-verification-and-approval", moved},
		{"P-092 ticket write", "policy", "default-deny", verb(t, ports.CallerChange, runner, "ticketing.CommentOnIssue", "Executing")},
		{"author after the end", "policy", "no-work-after-the-end", verb(t, ports.CallerExecution, author, "authorexecutor.Execute", "Cancelled")},
		{"pull request too early", "policy", "no-pull-request-before-a-candidate", verb(t, ports.CallerRelease, author, "scm.OpenPullRequest", "Planning")},
		{"human calls a verb", "policy", "default-deny", verb(t, ports.CallerRelease, human, "scm.GetFile", "Executing")},
		{"author verifies", "floor", "verifier-kind", verb(t, ports.CallerVerification, author, "verifier.Run", "Verifying")},
		{"H-004 write while planning", "policy", "default-deny", tool(t, author, "Planning", policy.Tool{Name: "write", Path: "a"})},
		{"H-027 reviewer writes", "floor", "reviewer-tools", tool(t, reviewer, "Verifying", policy.Tool{Name: "write", Path: "a"})},
		{"denied path", "grant", "path", tool(t, author, "Executing", policy.Tool{Name: "write", Path: "vendor/a.go"})},
		{"H-045 protected path", "floor", "protected-paths", tool(t, author, "Executing", policy.Tool{Name: "write", Path: ".github/workflows/release.yml"})},
		{"H-045 directory over protected", "floor", "protected-paths", tool(t, author, "Executing", policy.Tool{Name: "delete", Path: ".github"})},
		{"no path", "floor", "protected-paths", tool(t, author, "Executing", policy.Tool{Name: "write"})},
		{"H-063 other host", "grant", "egress", tool(t, author, "Executing", policy.Tool{Name: "fetch", Host: "evil.example"})},
		{"H-063 other port", "grant", "egress", tool(t, author, "Executing", policy.Tool{Name: "fetch", Host: "proxy.example.com:80"})},
		{"no host", "grant", "egress", tool(t, author, "Executing", policy.Tool{Name: "fetch"})},
		{"H-048 other credential", "grant", "credential", tool(t, author, "Executing", policy.Tool{Name: "credential", Intent: "cloud-admin"})},
		{"no program", "grant", "argv", tool(t, author, "Executing", policy.Tool{Name: "run"})},
		{"P-038 merge as a tool", "floor", "ports-no-tools", tool(t, author, "Executing", policy.Tool{Name: "merge"})},
		{"unknown tool", "strict", "known-action", tool(t, author, "Executing", policy.Tool{Name: "teleport"})},
		{"P-029 other resource", "grant", "resource", func() policy.Request {
			r := verb(t, ports.CallerRelease, author, "scm.OpenPullRequest", "Verifying")
			r.Resources = []string{"widget", "other"}
			return r
		}()},
		{"expired grant", "grant", "time", func() policy.Request {
			r := verb(t, ports.CallerRelease, author, "scm.OpenPullRequest", "Verifying")
			r.Now = now.Add(2 * time.Hour)
			return r
		}()},
		{"clock gone back", "grant", "time", func() policy.Request {
			r := verb(t, ports.CallerRelease, author, "scm.OpenPullRequest", "Verifying")
			r.Now = now.Add(-2 * time.Hour)
			return r
		}()},
		{"dry run where none is", "strict", "dry-run", func() policy.Request {
			r := verb(t, ports.CallerRelease, author, "scm.CreateBranch", "Verifying")
			r.DryRun = true
			return r
		}()},
	}
	for _, c := range cases {
		d := e.Decide(c.r)
		if d.Effect != policy.Deny || !has(d, c.layer, c.id) {
			t.Errorf("%s: want %s %s, got %s", c.name, c.layer, c.id, d.Summary())
		}
		if d.Ask == "" {
			t.Errorf("%s: the denial does not say how to ask", c.name)
		}
	}
}

func has(d policy.Decision, layer, id string) bool {
	for _, r := range d.Reasons {
		if r.Layer == layer && r.ID == id {
			return true
		}
	}
	return false
}

const escalating = `
@id("ok") permit (principal, action, resource);
@id("friday") @escalate("approvers") @text("no deletions on a Friday")
forbid (principal, action == Action::"tool.delete", resource) when { context.time.weekday == "Friday" };
@id("never") forbid (principal, action == Action::"tool.run", resource);
@id("ask-run") @escalate("approvers") forbid (principal, action == Action::"tool.run", resource);
`

func TestEscalation(t *testing.T) {
	e := load(t, escalating)
	del := tool(t, author, "Executing", policy.Tool{Name: "delete", Path: "a"})
	d := e.Decide(del)
	if d.Effect != policy.Escalate || !strings.Contains(d.Ask, "approvers") || !has(d, "policy", "friday") {
		t.Fatalf("want an escalation, got %s (%s)", d.Summary(), d.Ask)
	}
	if d := e.Decide(tool(t, author, "Executing", policy.Tool{Name: "run", Argv: []string{"x"}})); d.Effect != policy.Deny || !has(d, "policy", "never") {
		t.Errorf("a plain forbid beside an escalating one: %s", d.Summary())
	}
	only := load(t, `@id("ask") @escalate("approvers") forbid (principal, action, resource);`)
	if d := only.Decide(del); d.Effect != policy.Deny {
		t.Errorf("escalation without any permit: %s", d.Summary())
	}

	good := policy.Approval{ID: "apr-1", Approver: "human:bob", Groups: []string{"approvers"}, Action: input, Head: head, Policy: e.Revision(), Expires: now.Add(time.Minute)}
	del.Approvals = []policy.Approval{good}
	if d := e.Decide(del); d.Effect != policy.Allow || !has(d, "approval", "friday") {
		t.Errorf("with an approval: %s", d.Summary())
	}
	for name, spoil := range map[string]func(*policy.Approval){
		"other action":   func(a *policy.Approval) { a.Action = digest.Of([]byte("x")) },
		"other head":     func(a *policy.Approval) { a.Head = strings.Repeat("2", 40) },
		"other revision": func(a *policy.Approval) { a.Policy = digest.Of([]byte("x")) },
		"expired":        func(a *policy.Approval) { a.Expires = now },
		"other group":    func(a *policy.Approval) { a.Groups = []string{"cooks"} },
		"no record":      func(a *policy.Approval) { a.ID = "" },
	} {
		a := good
		spoil(&a)
		del.Approvals = []policy.Approval{a}
		if d := e.Decide(del); d.Effect != policy.Escalate {
			t.Errorf("approval with %s: %s", name, d.Summary())
		}
	}
}

func TestLoadRefuses(t *testing.T) {
	cases := map[string]string{
		"malformed":               `permit (principal, action`,
		"no id":                   `permit (principal, action, resource);`,
		"bad id":                  `@id("A b") permit (principal, action, resource);`,
		"two with one id":         `@id("a") permit (principal, action, resource); @id("a") forbid (principal, action, resource);`,
		"unknown attribute":       `@id("a") forbid (principal, action, resource) when { context.spent > 3 };`,
		"attribute of a tool":     `@id("a") forbid (principal, action == Action::"scm.GetFile", resource) when { context.tool.path == "x" };`,
		"wrong type":              `@id("a") forbid (principal, action, resource) when { context.run.denials == "many" };`,
		"unknown action":          `@id("a") permit (principal, action == Action::"scm.Delete", resource);`,
		"unknown principal":       `@id("a") permit (principal is Robot, action, resource);`,
		"unknown annotation":      `@id("a") @escalte("approvers") forbid (principal, action, resource);`,
		"escalating permit":       `@id("a") @escalate("approvers") permit (principal, action, resource);`,
		"escalation to nobody":    `@id("a") @escalate("") forbid (principal, action, resource);`,
		"P-210 reserved scope":    `@id("a") permit (principal, action, resource) when { context.grant.scopes.contains("evidence.write") };`,
		"P-210 log append":        `@id("a") permit (principal, action, resource) when { context.grant.scopes.contains("transparencylog.append") };`,
		"P-210 reserved, escaped": `@id("a") permit (principal, action, resource) when { context.grant.scopes.contains("evidence\u{2e}read") };`,
	}
	for name, text := range cases {
		if e, err := policy.Load(map[string][]byte{"x.cedar": []byte(text)}); err == nil {
			t.Errorf("%s: loaded %v", name, e.Rules())
		} else if !strings.Contains(err.Error(), "x.cedar") {
			t.Errorf("%s: the error does not name the file: %v", name, err)
		}
	}
}

func TestRevisionNamesContent(t *testing.T) {
	a, b := load(t, `@id("a") permit (principal, action, resource);`), load(t, `@id("b") permit (principal, action, resource);`)
	if a.Revision() == b.Revision() || a.Revision() != load(t, `@id("a") permit (principal, action, resource);`).Revision() || !a.Revision().Valid() {
		t.Fatal("the revision does not follow the content")
	}
}

// P-037: what a provider says is no part of a request but its input digest, so
// two answers give one decision.
func TestDecideIsPureAndReplays(t *testing.T) {
	e := shipped(t)
	for _, r := range []policy.Request{
		verb(t, ports.CallerRelease, release, "scm.MergePullRequest", "Releasing"),
		tool(t, author, "Executing", policy.Tool{Name: "run", Argv: []string{"sh", "-c", "echo \u2028 <&> \x00"}}),
	} {
		first, second := e.Decide(r), e.Decide(r)
		if diff := cmp.Diff(first, second); diff != "" {
			t.Errorf("%s: two decisions differ: %s", r.Action(), diff)
		}
		effect, reasons, err := e.Replay(first.Context)
		if err != nil || effect != first.Effect || !cmp.Equal(reasons, first.Reasons) {
			t.Errorf("%s: replay gave %s %v, %v", r.Action(), effect, reasons, err)
		}
		if effect, _, err := load(t, escalating[:0]).Replay(first.Context); effect != policy.Deny || err != nil {
			t.Errorf("%s: replay against no policies gave %s, %v", r.Action(), effect, err)
		}
		cut := strings.Replace(string(first.Context), `"dry_run":false,`, "", 1)
		if effect, _, err := e.Replay([]byte(cut)); err == nil || effect != policy.Deny {
			t.Errorf("%s: a context without an attribute was replayed: %s", r.Action(), effect)
		}
	}
}

func TestDecisionRoundTripsAsJSON(t *testing.T) {
	for _, want := range []policy.Decision{
		shipped(t).Decide(verb(t, ports.CallerRelease, release, "scm.MergePullRequest", "Releasing")),
		shipped(t).Decide(tool(t, author, "Executing", policy.Tool{Name: "merge"})),
	} {
		b, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		var got policy.Decision
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	}
	var e policy.Effect = policy.Allow
	if err := json.Unmarshal([]byte(`"yes"`), &e); err == nil || e != policy.Deny {
		t.Errorf("an unknown effect reads as %s, %v", e, err)
	}
}

// P-041: the handling of a verb follows from its declared risk.
func TestP041RiskGoverns(t *testing.T) {
	e := load(t, `
		@id("reads") permit (principal, action in Action::"risk.READ", resource);
		@id("writes") permit (principal, action in Action::"risk.LOW", resource);
		@id("asks") @escalate("approvers") forbid (principal, action in Action::"risk.LOW", resource);`)
	if d := e.Decide(verb(t, ports.CallerRelease, author, "scm.GetFile", "Verifying")); d.Effect != policy.Allow {
		t.Errorf("READ: %s", d.Summary())
	}
	if d := e.Decide(verb(t, ports.CallerRelease, author, "scm.CreateBranch", "Verifying")); d.Effect != policy.Escalate {
		t.Errorf("LOW: %s", d.Summary())
	}
	if d := e.Decide(verb(t, ports.CallerRelease, author, "scm.OpenPullRequest", "Verifying")); d.Effect != policy.Deny {
		t.Errorf("MEDIUM: %s", d.Summary())
	}
}
