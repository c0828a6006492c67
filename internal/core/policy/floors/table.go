package floors

import (
	"fmt"
	"slices"
	"strings"

	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/core/ports"
)

const pass = ""

// Table returns the floors. Rows over verbs pass tool intents and the other
// way round; rows never read Approvals but to refuse.
func Table() []Row {
	return []Row{
		{
			ID:       "actor-known",
			Sentence: "Every action has an actor of a known kind, with a principal and a run.",
			Clauses:  []string{"P-040"},
			Denies:   actorKnown,
			Ask:      "send the action under one of the five actor kinds",
		},
		{
			ID:       "caller-table",
			Sentence: "Only named contexts of the runtime call ports.",
			Clauses:  []string{"P-039", "P-063", "P-110", "P-125", "P-148", "P-162", "P-185", "P-201"},
			Denies:   callerTable,
			Ask:      "nothing lifts this: the verb belongs to another context",
		},
		{
			ID:       "merge-identity",
			Sentence: "MergePullRequest runs under the release-pipeline identity only, for a Change at Releasing.",
			Clauses:  []string{"P-067", "P-040", "H-047"},
			Denies:   mergeIdentity,
			Ask:      "the release pipeline merges once the Change is verified and approved",
		},
		{
			ID:       "merge-not-author",
			Sentence: "A merge by the author of the Change is refused by the policy floors before Invoke.",
			Clauses:  []string{"P-068", "H-046"},
			Denies:   mergeNotAuthor,
			Ask:      "another principal than the author has to merge",
		},
		{
			ID:       "pull-request-identity",
			Sentence: "OpenPullRequest, UpdatePullRequest, CommentOnPullRequest and CreateBranch run under the author-agent identity of the Change.",
			Clauses:  []string{"P-066"},
			Denies:   pullRequestIdentity,
			Ask:      "the author-agent of this Change opens and updates its pull request",
		},
		{
			ID:       "pipeline-identity",
			Sentence: "ciexecutor is called only under the release-pipeline identity, for a Change at Releasing.",
			Clauses:  []string{"P-111", "P-112", "H-047"},
			Denies:   pipelineIdentity,
			Ask:      "the release pipeline starts the pipeline once the Change is at Releasing",
		},
		{
			ID:       "pipeline-not-author",
			Sentence: "The author of a Change is refused on ciexecutor whatever identity kind it presents.",
			Clauses:  []string{"P-113", "H-046"},
			Denies:   pipelineNotAuthor,
			Ask:      "another principal than the author has to start the pipeline",
		},
		{
			ID:       "executor-kind",
			Sentence: "authorexecutor is called only for a run whose actor kind is author-agent or reviewer-agent.",
			Clauses:  []string{"P-126"},
			Denies:   executorKind,
			Ask:      "start a run of an author-agent or reviewer-agent",
		},
		{
			ID:       "reviewer-read-only",
			Sentence: "A reviewer-agent run is read-only: no allowed paths, no credentials, no filesystem-write, shell or network capability.",
			Clauses:  []string{"P-127", "P-128", "P-129", "H-027"},
			Denies:   reviewerReadOnly,
			Ask:      "a reviewer reports findings; an author run makes changes",
		},
		{
			ID:       "reviewer-not-author",
			Sentence: "A reviewer's principal and run id each differ from those of every author run of the Change.",
			Clauses:  []string{"P-163", "P-164", "H-046"},
			Denies:   reviewerNotAuthor,
			Ask:      "choose a reviewer with a principal and a run of its own",
		},
		{
			ID:       "verifier-kind",
			Sentence: "Only the verification context calls verifier, for a run whose actor kind is reviewer-agent, of a Change whose authors are known.",
			Clauses:  []string{"P-162"},
			Denies:   verifierKind,
			Ask:      "verify under a reviewer-agent identity, after an author run",
		},
		{
			ID:       "verifier-isolated",
			Sentence: "The host refuses to dispatch Run to a verifier whose manifest or grant names any egress destination or credential intent.",
			Clauses:  []string{"P-167", "P-168"},
			Denies:   verifierIsolated,
			Ask:      "use a verifier that needs neither network nor credential",
		},
		{
			ID:       "sandbox-identity",
			Sentence: "Only the sandbox context in the runner, under the runner identity, calls sandboxprovider.",
			Clauses:  []string{"P-148"},
			Denies:   onlyRunner("sandboxprovider"),
			Ask:      "nothing lifts this: sandboxes are made by the runner",
		},
		{
			ID:       "sandbox-origin",
			Sentence: "A provider bound to the runtime deployment serves sandboxprovider; the host refuses one installed from the registry.",
			Clauses:  []string{"P-149"},
			Denies:   sandboxOrigin,
			Ask:      "bind the provider in the deployment",
		},
		{
			ID:       "evidence-identity",
			Sentence: "Only the evidence context under the runner identity calls evidencestore and transparencylog, with the scope of the verb.",
			Clauses:  []string{"P-201", "P-202", "P-203", "P-209"},
			Denies:   evidenceIdentity,
			Ask:      "nothing lifts this: the runner keeps the evidence",
		},
		{
			ID:       "reserved-scopes",
			Sentence: "Only a runner grant carries evidence.write, evidence.read and transparencylog.append; a kernel floors rule denies them to every other actor kind.",
			Clauses:  []string{"P-208", "P-209"},
			Denies:   reservedScopes,
			Ask:      "nothing lifts this: drop the scope from the grant",
		},
		{
			ID:       "knowledge-read-only",
			Sentence: "Every knowledge verb is READ; the host refuses any non-READ capability on a knowledge connection.",
			Clauses:  []string{"P-182"},
			Denies:   knowledgeReadOnly,
			Ask:      "nothing lifts this: write to the source by its own means",
		},
		{
			ID:       "ports-no-tools",
			Sentence: "Ports are never model tools.",
			Clauses:  []string{"P-038"},
			Denies:   portsNoTools,
			Ask:      "nothing lifts this: the runtime's own contexts call ports, after verification and approval",
		},
		{
			ID:       "tool-caller",
			Sentence: "Tool intents come from the execution context, for a run whose actor kind is author-agent or reviewer-agent.",
			Clauses:  []string{"P-125", "P-126"},
			Denies:   toolCaller,
			Ask:      "propose the intent from a run of an author-agent or reviewer-agent",
		},
		{
			ID:       "reviewer-tools",
			Sentence: "For the reviewer any write is refused, because its run has no write capability and no allowed paths.",
			Clauses:  []string{"H-027", "P-129"},
			Denies:   reviewerTools,
			Ask:      "a reviewer reports findings; an author run makes changes",
		},
		{
			ID:       "protected-paths",
			Sentence: "Protected paths include policy, CI definitions, IAM and workflow files.",
			Clauses:  []string{"H-045", "H-026", "P-116"},
			Denies:   protectedPaths,
			Ask:      "a person changes this path in a pull request of their own",
		},
		{
			ID:       "no-self-approval",
			Sentence: "Review and release identity: no self-approval.",
			Clauses:  []string{"H-046"},
			Denies:   noSelfApproval,
			Ask:      "someone who is neither author nor actor has to approve",
		},
	}
}

func actorKnown(r Request) (bool, string) {
	if !r.Actor.Valid() {
		return true, "the actor has no known kind, principal or run"
	}
	return false, pass
}

func callerTable(r Request) (bool, string) {
	if r.Tool != nil {
		return false, pass
	}
	if !ports.Allowed(r.Caller, r.Verb) {
		return true, fmt.Sprintf("the %s context does not call %s", r.Caller, verbName(r))
	}
	return false, pass
}

func mergeIdentity(r Request) (bool, string) {
	switch {
	case !isVerb(r, "scm", "MergePullRequest"):
		return false, pass
	case r.Actor.Kind != identity.KindReleasePipeline:
		return true, fmt.Sprintf("%s cannot merge", r.Actor.Kind)
	case r.Change.State != "Releasing":
		return true, fmt.Sprintf("the Change is at %q, not at Releasing", r.Change.State)
	}
	return false, pass
}

func mergeNotAuthor(r Request) (bool, string) {
	if isVerb(r, "scm", "MergePullRequest") {
		return actsAsAuthor(r)
	}
	return false, pass
}

func actsAsAuthor(r Request) (bool, string) {
	switch {
	case len(r.Change.Authors) == 0:
		return true, "the authors of the Change are not known"
	case r.Change.IsAuthor(r.Actor.Principal, r.Actor.Run):
		return true, fmt.Sprintf("%s is an author of the Change and presents itself as %s", r.Actor.Principal, r.Actor.Kind)
	}
	return false, pass
}

func pullRequestIdentity(r Request) (bool, string) {
	if !isVerb(r, "scm", "OpenPullRequest", "UpdatePullRequest", "CommentOnPullRequest", "CreateBranch") {
		return false, pass
	}
	if r.Actor.Kind != identity.KindAuthorAgent {
		return true, fmt.Sprintf("%s does not write pull requests", r.Actor.Kind)
	}
	own := slices.ContainsFunc(r.Change.Authors, func(a identity.Actor) bool {
		return a.Kind == identity.KindAuthorAgent && a.Principal == r.Actor.Principal
	})
	if !own || r.Grant.Change != r.Change.ID {
		return true, fmt.Sprintf("%s is not the author-agent of Change %s", r.Actor.Principal, r.Change.ID)
	}
	return false, pass
}

func pipelineIdentity(r Request) (bool, string) {
	switch {
	case !isPort(r, "ciexecutor"):
		return false, pass
	case r.Actor.Kind != identity.KindReleasePipeline:
		return true, fmt.Sprintf("%s does not run pipelines", r.Actor.Kind)
	case r.Change.State != "Releasing":
		return true, fmt.Sprintf("the Change is at %q, not at Releasing", r.Change.State)
	}
	return false, pass
}

func pipelineNotAuthor(r Request) (bool, string) {
	if isPort(r, "ciexecutor") {
		return actsAsAuthor(r)
	}
	return false, pass
}

func executorKind(r Request) (bool, string) {
	if isPort(r, "authorexecutor") && !isAgent(r.Actor.Kind) {
		return true, fmt.Sprintf("%s does not run a coding harness", r.Actor.Kind)
	}
	return false, pass
}

func reviewerReadOnly(r Request) (bool, string) {
	if r.Actor.Kind != identity.KindReviewerAgent {
		return false, pass
	}
	held := r.Grant
	held.Actor = r.Actor
	held.Scopes = nil
	if err := held.CheckKind(); err != nil {
		return true, err.Error()
	}
	return false, pass
}

func reviewerNotAuthor(r Request) (bool, string) {
	if r.Actor.Kind == identity.KindReviewerAgent && r.Change.IsAuthor(r.Actor.Principal, r.Actor.Run) {
		return true, fmt.Sprintf("%s in run %s shares its principal or run with an author of the Change", r.Actor.Principal, r.Actor.Run)
	}
	return false, pass
}

func verifierKind(r Request) (bool, string) {
	switch {
	case !isPort(r, "verifier"):
		return false, pass
	case r.Actor.Kind != identity.KindReviewerAgent:
		return true, fmt.Sprintf("%s does not verify", r.Actor.Kind)
	case len(r.Change.Authors) == 0:
		return true, "the authors of the Change are not known"
	}
	return false, pass
}

func verifierIsolated(r Request) (bool, string) {
	if !isPort(r, "verifier") {
		return false, pass
	}
	switch {
	case len(r.Provider.Egress) > 0:
		return true, fmt.Sprintf("the manifest of %s names the destination %q", r.Provider.Extension, r.Provider.Egress[0])
	case len(r.Provider.Credentials) > 0:
		return true, fmt.Sprintf("the manifest of %s names the credential intent %q", r.Provider.Extension, r.Provider.Credentials[0])
	case len(r.Grant.Egress) > 0:
		return true, fmt.Sprintf("the grant names the destination %q", r.Grant.Egress[0])
	case len(r.Grant.Credentials) > 0:
		return true, fmt.Sprintf("the grant names the credential intent %q", r.Grant.Credentials[0])
	}
	return false, pass
}

func onlyRunner(port string) func(Request) (bool, string) {
	return func(r Request) (bool, string) {
		if isPort(r, port) && r.Actor.Kind != identity.KindRunner {
			return true, fmt.Sprintf("%s does not call %s", r.Actor.Kind, port)
		}
		return false, pass
	}
}

func sandboxOrigin(r Request) (bool, string) {
	if isPort(r, "sandboxprovider") && r.Provider.Origin != OriginBundled && r.Provider.Origin != OriginDeployment {
		return true, fmt.Sprintf("sandbox provider %q has the origin %q", r.Provider.Extension, r.Provider.Origin)
	}
	return false, pass
}

func evidenceIdentity(r Request) (bool, string) {
	if !isPort(r, "evidencestore") && !isPort(r, "transparencylog") {
		return false, pass
	}
	if r.Actor.Kind != identity.KindRunner {
		return true, fmt.Sprintf("%s does not call %s", r.Actor.Kind, r.Verb.Port)
	}
	for _, scope := range r.Verb.Scopes {
		if !r.Grant.HasScope(scope) {
			return true, fmt.Sprintf("the grant does not carry the scope %s", scope)
		}
	}
	return false, pass
}

func reservedScopes(r Request) (bool, string) {
	if r.Actor.Kind == identity.KindRunner && r.Grant.Actor.Kind == identity.KindRunner {
		return false, pass
	}
	for _, scopes := range [][]string{r.Grant.Scopes, r.Verb.Scopes} {
		if i := slices.IndexFunc(scopes, grant.Reserved); i >= 0 {
			return true, fmt.Sprintf("scope %q is reserved for the runner", scopes[i])
		}
	}
	return false, pass
}

func knowledgeReadOnly(r Request) (bool, string) {
	if isPort(r, "knowledge") && r.Verb.Risk != ports.RiskRead {
		return true, fmt.Sprintf("%s is not READ", verbName(r))
	}
	return false, pass
}

// portsNoTools names the port verb behind a tool intent, for whichever way a
// model spells it: "merge", "MergePullRequest", "merge_pull_request",
// "scm.MergePullRequest", "mcp__scm__merge". Intents unknown in any other way
// are refused by the engine, which knows no action for them.
func portsNoTools(r Request) (bool, string) {
	if r.Tool == nil {
		return false, pass
	}
	name := r.Tool.Canonical()
	if slices.Contains(ToolNames(), name) {
		return false, pass
	}
	flat := squash(name)
	for _, v := range ports.All() {
		method := squash(v.Method)
		if flat == method || strings.HasSuffix(flat, squash(v.Port)+method) || strings.HasSuffix(flat, "service"+method) {
			return true, fmt.Sprintf("%q is the port verb %s, which no model calls", name, v.Name())
		}
	}
	for _, word := range []string{"merge", "approve", "release", "deploy", "openpullrequest", "push"} {
		if strings.Contains(flat, word) {
			return true, fmt.Sprintf("%q is an act of the runtime, which no model calls", name)
		}
	}
	return false, pass
}

func squash(s string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' {
			return r
		}
		if r >= 'A' && r <= 'Z' {
			return r - 'A' + 'a'
		}
		return -1
	}, s)
}

func toolCaller(r Request) (bool, string) {
	switch {
	case r.Tool == nil:
		return false, pass
	case r.Caller != ports.CallerExecution:
		return true, fmt.Sprintf("the %s context has no tool intents", r.Caller)
	case !isAgent(r.Actor.Kind):
		return true, fmt.Sprintf("%s has no tool intents", r.Actor.Kind)
	}
	return false, pass
}

func reviewerTools(r Request) (bool, string) {
	if r.Tool == nil || r.Actor.Kind != identity.KindReviewerAgent {
		return false, pass
	}
	switch name := r.Tool.Canonical(); name {
	case "read", "say", "checkpoint":
		return false, pass
	default:
		return true, fmt.Sprintf("a reviewer-agent run has no %s capability", name)
	}
}

func protectedPaths(r Request) (bool, string) {
	if r.Tool == nil {
		return false, pass
	}
	if name := r.Tool.Canonical(); name != "write" && name != "delete" {
		return false, pass
	}
	scope := pathscope.Scope{Protected: r.Grant.Paths.Protected}
	switch {
	case scope.IsProtected(r.Tool.Path):
		return true, fmt.Sprintf("%q is a protected path", r.Tool.Path)
	case scope.HoldsProtected(r.Tool.Path):
		return true, fmt.Sprintf("%q holds a protected path", r.Tool.Path)
	}
	return false, pass
}

func noSelfApproval(r Request) (bool, string) {
	for _, a := range r.Approvals {
		switch {
		case !a.Approver.Valid() || !strings.HasPrefix(string(a.Approver), "human:"):
			return true, fmt.Sprintf("approval %s is by %q, who is no person", a.ID, a.Approver)
		case r.Change.IsAuthor(a.Approver, ""):
			return true, fmt.Sprintf("approval %s is by %s, an author of the Change", a.ID, a.Approver)
		case a.Approver == r.Actor.Principal:
			return true, fmt.Sprintf("approval %s is by %s, who acts", a.ID, a.Approver)
		}
	}
	return false, pass
}

func isAgent(k identity.ActorKind) bool {
	return k == identity.KindAuthorAgent || k == identity.KindReviewerAgent
}

func isPort(r Request, port string) bool { return r.Tool == nil && r.Verb.Port == port }

func isVerb(r Request, port string, methods ...string) bool {
	return isPort(r, port) && slices.Contains(methods, r.Verb.Method)
}

func verbName(r Request) string {
	if r.Verb.Full == "" {
		return "an unknown verb"
	}
	return r.Verb.Name()
}
