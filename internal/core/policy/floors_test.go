package policy_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/policy/floors"
	"github.com/numinance/numinance/internal/core/ports"
	"pgregory.net/rapid"
)

// permissive is a policy set that allows everything a policy can allow.
const permissive = `@id("everything") permit (principal, action, resource);`

// floorCases gives, for each floor, requests that it denies.
func floorCases(t testing.TB) map[string][]policy.Request {
	with := func(r policy.Request, change func(*policy.Request)) policy.Request {
		change(&r)
		return r
	}
	as := func(a identity.Actor, p identity.Principal, run identity.RunID) identity.Actor {
		a.Principal = p
		if run != "" {
			a.Run = run
		}
		return a
	}
	merge := func(a identity.Actor) policy.Request {
		return verb(t, ports.CallerRelease, a, "scm.MergePullRequest", "Releasing")
	}
	pipeline := func(a identity.Actor) policy.Request {
		return verb(t, ports.CallerRelease, a, "ciexecutor.StartOperation", "Releasing")
	}
	verify := func(a identity.Actor) policy.Request {
		return verb(t, ports.CallerVerification, a, "verifier.Run", "Verifying")
	}
	review := verb(t, ports.CallerExecution, reviewer, "authorexecutor.Execute", "Verifying")
	stranger := as(author, "agent:other", "run-x")
	cases := map[string][]policy.Request{
		"actor-known": {
			with(merge(release), func(r *policy.Request) { r.Actor = identity.Actor{} }),
			with(merge(release), func(r *policy.Request) { r.Actor.Kind = 99 }),
			with(merge(release), func(r *policy.Request) { r.Actor.Principal = "" }),
		},
		"caller-table": {
			with(merge(release), func(r *policy.Request) { r.Caller = ports.CallerUnknown }),
			with(merge(release), func(r *policy.Request) { r.Caller = ports.CallerExecution }),
			with(merge(release), func(r *policy.Request) { r.Verb = ports.Verb{} }),
			verb(t, ports.CallerProfile, runner, "scm.GetFile", "Resolving"),
			verb(t, ports.CallerKnowledge, runner, "scm.CreateBranch", "Resolving"),
		},
		"merge-identity":   {merge(author), merge(reviewer), merge(runner), merge(human), with(merge(release), func(r *policy.Request) { r.Change.State = "AwaitingApproval" })},
		"merge-not-author": {merge(as(release, author.Principal, "")), merge(as(release, "service:release", author.Run)), with(merge(release), func(r *policy.Request) { r.Change.Authors = nil })},
		"pull-request-identity": {
			verb(t, ports.CallerRelease, release, "scm.OpenPullRequest", "Verifying"),
			verb(t, ports.CallerRelease, runner, "scm.UpdatePullRequest", "Verifying"),
			verb(t, ports.CallerRelease, stranger, "scm.CommentOnPullRequest", "Verifying"),
			verb(t, ports.CallerRelease, human, "scm.CreateBranch", "Verifying"),
			with(verb(t, ports.CallerRelease, author, "scm.OpenPullRequest", "Verifying"), func(r *policy.Request) { r.Change.ID = "chg-2" }),
		},
		"pipeline-identity": {pipeline(author), pipeline(runner), pipeline(human), with(pipeline(release), func(r *policy.Request) { r.Change.State = "Verifying" })},
		"pipeline-not-author": {
			pipeline(as(release, author.Principal, "")), pipeline(as(human, author.Principal, "")), pipeline(as(runner, "service:x", author.Run)),
		},
		"executor-kind": {
			verb(t, ports.CallerExecution, runner, "authorexecutor.Execute", "Executing"),
			verb(t, ports.CallerExecution, human, "authorexecutor.Plan", "Planning"),
			verb(t, ports.CallerExecution, release, "authorexecutor.Capabilities", "Planning"),
		},
		"reviewer-read-only": {
			with(review, func(r *policy.Request) { r.Grant.Paths = pathscope.Scope{Allowed: []string{"a"}} }),
			with(review, func(r *policy.Request) { r.Grant.Credentials = []string{"x"} }),
			with(review, func(r *policy.Request) { r.Grant.Egress = []grant.Destination{{Host: "a.example", Port: 443}} }),
			with(review, func(r *policy.Request) { r.Grant.Capabilities = []string{grant.CapabilityWrite} }),
			with(review, func(r *policy.Request) { r.Grant.Capabilities = []string{grant.CapabilityShell} }),
			with(review, func(r *policy.Request) { r.Grant.Capabilities = []string{grant.CapabilityNetwork} }),
		},
		"reviewer-not-author": {
			verify(as(reviewer, author.Principal, "")),
			verify(as(reviewer, "agent:reviewer", author.Run)),
			with(verify(reviewer), func(r *policy.Request) {
				r.Change.Authors = append(slices.Clone(r.Change.Authors), as(author, "agent:reviewer", "run-z"))
			}),
			with(review, func(r *policy.Request) { r.Change.Authors = []identity.Actor{as(author, "agent:reviewer", "run-z")} }),
		},
		"verifier-kind": {verify(author), verify(runner), verify(release), with(verify(reviewer), func(r *policy.Request) { r.Change.Authors = nil })},
		"verifier-isolated": {
			with(verify(reviewer), func(r *policy.Request) { r.Provider.Egress = []string{"a.example"} }),
			with(verify(reviewer), func(r *policy.Request) { r.Provider.Credentials = []string{"x"} }),
			with(verify(reviewer), func(r *policy.Request) { r.Grant.Egress = []grant.Destination{{Host: "a.example", Port: 443}} }),
			with(verify(reviewer), func(r *policy.Request) { r.Grant.Credentials = []string{"x"} }),
		},
		"sandbox-identity": {
			verb(t, ports.CallerSandbox, author, "sandboxprovider.Create", "Executing"),
			verb(t, ports.CallerSandbox, release, "sandboxprovider.Exec", "Executing"),
			verb(t, ports.CallerSandbox, human, "sandboxprovider.Destroy", "Executing"),
		},
		"sandbox-origin": {
			with(verb(t, ports.CallerSandbox, runner, "sandboxprovider.Create", "Executing"), func(r *policy.Request) { r.Provider.Origin = policy.OriginRegistry }),
			with(verb(t, ports.CallerSandbox, runner, "sandboxprovider.Create", "Executing"), func(r *policy.Request) { r.Provider.Origin = "" }),
		},
		"knowledge-read-only": {
			with(verb(t, ports.CallerKnowledge, runner, "knowledge.Fetch", "Resolving"), func(r *policy.Request) { r.Verb.Risk = ports.RiskLow }),
			with(verb(t, ports.CallerKnowledge, runner, "knowledge.Fetch", "Resolving"), func(r *policy.Request) { r.Verb.Risk = ports.RiskUnknown }),
		},
		"tool-caller": {
			tool(t, runner, "Executing", policy.Tool{Name: "say"}), tool(t, human, "Executing", policy.Tool{Name: "run", Argv: []string{"x"}}),
			with(tool(t, author, "Executing", policy.Tool{Name: "say"}), func(r *policy.Request) { r.Caller = ports.CallerRelease }),
		},
	}
	for _, a := range []identity.Actor{author, reviewer, release, human} {
		for _, name := range []string{"evidencestore.AppendLocked", "evidencestore.GetRecord", "evidencestore.ListRange", "evidencestore.Head", "transparencylog.Append", "transparencylog.Checkpoint", "transparencylog.Prove", "transparencylog.Lookup"} {
			r := verb(t, ports.CallerEvidence, a, name, "Executing")
			r.Grant.Scopes = slices.Clone(r.Verb.Scopes) // forced in: New would refuse it
			cases["evidence-identity"] = append(cases["evidence-identity"], r)
			cases["reserved-scopes"] = append(cases["reserved-scopes"], r)
		}
	}
	lacking := verb(t, ports.CallerEvidence, runner, "evidencestore.AppendLocked", "Executing")
	lacking.Grant.Scopes = []string{grant.ScopeEvidenceRead}
	cases["evidence-identity"] = append(cases["evidence-identity"], lacking)
	for _, name := range []string{"merge", "Merge", "merge_pr", "MergePullRequest", "scm.MergePullRequest", "mcp__scm__merge_pull_request", "open_pull_request", "StartOperation", "approve", "deploy", "evidencestore.AppendLocked", "Lookup", "git_push"} {
		cases["ports-no-tools"] = append(cases["ports-no-tools"], tool(t, author, "Executing", policy.Tool{Name: name}))
	}
	for _, v := range ports.All() {
		cases["ports-no-tools"] = append(cases["ports-no-tools"],
			tool(t, author, "Executing", policy.Tool{Name: v.Name()}), tool(t, author, "Executing", policy.Tool{Name: v.Full}), tool(t, author, "Executing", policy.Tool{Name: v.Method}))
	}
	for _, name := range []string{"write", "delete", "patch", "run", "fetch", "credential", "whatever"} {
		cases["reviewer-tools"] = append(cases["reviewer-tools"], tool(t, reviewer, "Verifying", policy.Tool{Name: name, Path: "a", Host: "proxy.example.com", Intent: "scm-write", Argv: []string{"x"}}))
	}
	for _, path := range []string{".github/workflows/release.yml", ".GITHUB/Workflows/x", ".gitlab-ci.yml", "Jenkinsfile", "a/.git/config", ".numinance/x", "rules/a.cedar", "CODEOWNERS", "iam/role.json", ".github", "../x", ""} {
		for _, name := range []string{"write", "patch", "delete"} {
			cases["protected-paths"] = append(cases["protected-paths"], tool(t, author, "Executing", policy.Tool{Name: name, Path: path}))
		}
	}
	own := with(tool(t, author, "Executing", policy.Tool{Name: "write", Path: "ops/x"}), func(r *policy.Request) { r.Grant.Paths.Protected = []string{"ops/"} })
	cases["protected-paths"] = append(cases["protected-paths"], own)
	for _, p := range []identity.Principal{author.Principal, "agent:reviewer", "service:release", "", "human:author"} {
		r := with(merge(release), func(r *policy.Request) {
			r.Change.Authors = append(slices.Clone(r.Change.Authors), as(author, "human:author", "run-z"))
			r.Approvals = []policy.Approval{{ID: "apr-1", Approver: p, Action: input, Head: head}}
		})
		cases["no-self-approval"] = append(cases["no-self-approval"], r)
	}
	return cases
}

// Every floor denies its cases, names its sentence's clauses, and neither a
// policy that permits everything nor a full grant nor an approval lifts it
// (P-038, P-039, P-040, P-067, P-068, P-111..P-113, P-126..P-129, P-148, P-149,
// P-162..P-168, P-182, P-201, P-209, H-026, H-027, H-045..H-047).
func TestFloorsDenyAndNothingLiftsThem(t *testing.T) {
	cases := floorCases(t)
	engines := map[string]*policy.Engine{"shipped": shipped(t), "permissive": load(t, permissive)}
	for _, row := range floors.Table() {
		if len(cases[row.ID]) == 0 {
			t.Errorf("floor %s has no case", row.ID)
		}
		if row.Sentence == "" || len(row.Clauses) == 0 || row.Ask == "" {
			t.Errorf("floor %s lacks its sentence, clauses or advice", row.ID)
		}
		for i, r := range cases[row.ID] {
			for name, e := range engines {
				if row.ID != "no-self-approval" {
					r.Approvals = []policy.Approval{{ID: "apr-1", Approver: "human:bob", Groups: []string{"approvers"}, Action: r.Input, Head: head, Policy: e.Revision(), Expires: now.AddDate(1, 0, 0)}}
				}
				d := e.Decide(r)
				if d.Effect != policy.Deny || !has(d, policy.LayerFloor, row.ID) {
					t.Errorf("%s, case %d, %s policy: %s", row.ID, i, name, d.Summary())
				}
			}
		}
	}
}

func TestFloorTableIsWellFormed(t *testing.T) {
	seen := map[string]bool{}
	for _, row := range floors.Table() {
		if seen[row.ID] {
			t.Errorf("floor %s is listed twice", row.ID)
		}
		seen[row.ID] = true
	}
}

// anyRequest draws requests over all callers, kinds, verbs, tools, states and
// grants, most of them plausible.
func anyRequest(t *rapid.T, full map[identity.Actor]grant.Grant) policy.Request {
	pick := func(name string, from []string) string { return rapid.SampledFrom(from).Draw(t, name) }
	actors := []identity.Actor{author, reviewer, runner, release, human}
	a := rapid.SampledFrom(actors).Draw(t, "actor")
	g := full[a]
	if rapid.Bool().Draw(t, "alias") {
		a.Principal = rapid.SampledFrom([]identity.Principal{author.Principal, "agent:other", "human:alice"}).Draw(t, "principal")
		g.Actor = a
	}
	if rapid.Bool().Draw(t, "scopes") {
		g.Scopes = []string{grant.ScopeEvidenceWrite, grant.ScopeEvidenceRead, grant.ScopeLogAppend}
	}
	if rapid.Bool().Draw(t, "extra") {
		g.Credentials = []string{"scm-write"}
		g.Paths = pathscope.Scope{Allowed: []string{"**"}}
	}
	r := policy.Request{
		Caller: ports.Caller(rapid.IntRange(0, 8).Draw(t, "caller")), Actor: a, Grant: g, Resources: []string{"widget"},
		Change: facts(pick("state", []string{"Planning", "Executing", "Verifying", "AwaitingApproval", "Releasing", "Released", ""})),
		Now:    now, Input: input, DryRun: rapid.Bool().Draw(t, "dry"),
		Provider: policy.ProviderFacts{Extension: "x/y", Origin: pick("origin", []string{"bundled", "deployment", "registry", ""})},
	}
	if rapid.Bool().Draw(t, "networked provider") {
		r.Provider.Egress = []string{"a.example"}
	}
	if rapid.Bool().Draw(t, "tool?") {
		r.Tool = &policy.Tool{
			Name: pick("tool", append(floors.ToolNames(), "patch", "merge", "scm.GetFile", "x")),
			Path: pick("path", []string{"a.go", ".git/x", ".github/workflows/x.yml", "CODEOWNERS", ".github", ""}),
			Host: "proxy.example.com", Intent: "scm-write", Argv: []string{"go"},
		}
	} else {
		r.Verb = rapid.SampledFrom(ports.All()).Draw(t, "verb")
	}
	if rapid.Bool().Draw(t, "approval") {
		r.Approvals = []policy.Approval{{ID: "apr-1", Approver: rapid.SampledFrom([]identity.Principal{"human:bob", author.Principal}).Draw(t, "approver"), Groups: []string{"approvers"}, Action: input, Head: head, Expires: now.AddDate(1, 0, 0)}}
	}
	return r
}

// Over random requests: whatever a floor denies, no policy set allows, and
// what is allowed obeys the sentences of the specification, said here a second
// time and in other words than the table.
func TestFloorsHoldOverRandomRequests(t *testing.T) {
	full := map[identity.Actor]grant.Grant{}
	for _, a := range []identity.Actor{author, reviewer, runner, release, human} {
		full[a] = granted(t, a)
	}
	e := load(t, permissive)
	allowed := 0
	rapid.Check(t, func(t *rapid.T) {
		r := anyRequest(t, full)
		d := e.Decide(r)
		found := floors.Check(r)
		if d.Effect != policy.Allow {
			return
		}
		allowed++
		if len(found) > 0 {
			t.Fatalf("allowed against floor %s: %+v", found[0].ID, r)
		}
		kind, port, isAuthor := r.Actor.Kind, r.Verb.Port, r.Change.IsAuthor(r.Actor.Principal, r.Actor.Run)
		bad := ""
		switch {
		case r.Tool != nil && kind != identity.KindAuthorAgent && kind != identity.KindReviewerAgent:
			bad = "a tool intent of no agent"
		case r.Tool != nil && kind == identity.KindReviewerAgent && slices.Contains([]string{"write", "patch", "delete", "run", "fetch", "credential"}, r.Tool.Name):
			bad = "a reviewer acts"
		case r.Tool != nil && slices.Contains([]string{"write", "patch", "delete"}, r.Tool.Name) && r.Tool.Path != "a.go":
			bad = "a protected path"
		case r.Tool != nil:
		case !ports.Allowed(r.Caller, r.Verb):
			bad = "the wrong context"
		case (r.Verb.Method == "MergePullRequest" || port == "ciexecutor") && (kind != identity.KindReleasePipeline || isAuthor || r.Change.State != "Releasing"):
			bad = "a release by another, or too early"
		case strings.HasSuffix(r.Verb.Method, "PullRequest") && r.Verb.Method != "MergePullRequest" && (kind != identity.KindAuthorAgent || !isAuthor):
			bad = "a pull request by another"
		case port == "verifier" && (kind != identity.KindReviewerAgent || isAuthor || len(r.Provider.Egress)+len(r.Grant.Credentials) > 0):
			bad = "a verifier that is not apart"
		case port == "sandboxprovider" && (kind != identity.KindRunner || r.Provider.Origin == "registry" || r.Provider.Origin == ""):
			bad = "a sandbox of another"
		case (port == "evidencestore" || port == "transparencylog") && (kind != identity.KindRunner || len(r.Grant.Scopes) == 0):
			bad = "evidence by another"
		}
		if bad != "" {
			t.Fatalf("allowed %s: %+v", bad, r)
		}
	})
	if allowed == 0 {
		t.Log("no random request was allowed in this round")
	}
}

// H-049: a hostile model's attempts are each decided outside it, each denied,
// each with a record that says why.
func TestH049HostileAttempts(t *testing.T) {
	e := shipped(t)
	attempts := []policy.Tool{
		{Name: "write", Path: ".github/workflows/release.yml"}, {Name: "write", Path: ".GitHub/workflows/a.yml"}, {Name: "patch", Path: ".gitlab-ci.yml"},
		{Name: "delete", Path: ".github"}, {Name: "write", Path: "../outside"}, {Name: "write", Path: "/etc/passwd"}, {Name: "write", Path: "vendor/x"},
		{Name: "write", Path: ".g\u200cit/hooks/pre-commit"}, {Name: "write", Path: "sub/.git/config"}, {Name: "write", Path: "CODEOWNERS"},
		{Name: "fetch", Host: "169.254.169.254:80"}, {Name: "fetch", Host: "evil.example"}, {Name: "fetch", Host: "proxy.example.com:22"}, {Name: "fetch", Host: "PROXY.EXAMPLE.COM"},
		{Name: "credential", Intent: "cloud-admin"}, {Name: "credential"}, {Name: "merge"}, {Name: "scm.MergePullRequest"}, {Name: "approve"}, {Name: "grant"},
	}
	seen := map[digest.Digest]bool{}
	for i, what := range attempts {
		d := e.Decide(tool(t, author, "Executing", what))
		if d.Effect != policy.Deny || len(d.Reasons) == 0 || d.Ask == "" || len(d.Context) == 0 {
			t.Errorf("attempt %d (%s): %s", i, what.Name, d.Summary())
		}
		seen[digest.Of([]byte(fmt.Sprint(string(d.Context), d.Reasons)))] = true
	}
	if len(attempts) != 20 || len(seen) != 20 {
		t.Errorf("%d attempts left %d different records", len(attempts), len(seen))
	}
}
