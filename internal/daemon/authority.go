package daemon

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/orchestration"
)

// The principals of the runtime's own identities.
const (
	principalRunner  identity.Principal = "service:runner"
	principalRelease identity.Principal = "service:release"
)

// grantLife is how long the grants of a Change are in force, from its start.
const grantLife = 7 * 24 * time.Hour

// role is one way in which a step acts: which context, under which identity,
// with which verbs. The whole authority of a step follows from its role, the
// state of the Change and the command.
type role struct {
	caller ports.Caller
	kind   identity.ActorKind
	verbs  []string
	// What follows, down to the work unit, is that of a harness run.
	capabilities []string
	egress       []grant.Destination
	credentials  []string
	paths        pathscope.Scope
	budget       grant.Budget
	unit         identity.WorkUnitID
	// resources are the names that requests of the role may carry.
	resources []string
}

// service is the budget of a step that calls ports itself.
var service = grant.Budget{Actions: 10_000, OutputBytes: 1 << 40, Wall: grantLife}

func reads(repository string) role {
	return role{caller: ports.CallerProfile, kind: identity.KindRunner, verbs: []string{"scm.GetRepository"}, resources: []string{repository}, budget: service}
}

func intake(project string) role {
	return role{caller: ports.CallerChange, kind: identity.KindRunner, verbs: []string{"ticketing.GetIssue"}, resources: []string{project}, budget: service}
}

func reports(project string) role {
	r := intake(project)
	r.verbs = append(r.verbs, "ticketing.CommentOnIssue")
	return r
}

func looksUp(connections []string) role {
	return role{caller: ports.CallerKnowledge, kind: identity.KindRunner, verbs: []string{"knowledge.Search", "knowledge.Fetch", "knowledge.Resolve"}, resources: connections, budget: service}
}

func keepsSandboxes() role {
	r := role{caller: ports.CallerSandbox, kind: identity.KindRunner, budget: service}
	for _, v := range ports.Of("sandboxprovider") {
		r.verbs = append(r.verbs, v.Name())
	}
	return r
}

// authors is an author run: what its Profile grants, on the paths of its unit.
func authors(unit identity.WorkUnitID, paths pathscope.Scope, profile bound) role {
	return role{
		caller: ports.CallerExecution, kind: identity.KindAuthorAgent, unit: unit, paths: paths,
		verbs: []string{"authorexecutor.Execute", "authorexecutor.Capabilities"}, capabilities: profile.capabilities(), budget: profile.budget(),
		egress: profile.egress(), credentials: profile.Profile.GetCredentials(),
	}
}

func plans(budget grant.Budget) role {
	return role{
		caller: ports.CallerExecution, kind: identity.KindAuthorAgent, unit: "plan",
		verbs:        []string{"authorexecutor.Plan", "authorexecutor.Capabilities"},
		capabilities: []string{grant.CapabilityRead, "EXECUTOR_CAPABILITY_STRUCTURED_PLAN"}, budget: budget,
	}
}

func reviews(budget grant.Budget) role {
	return role{
		caller: ports.CallerExecution, kind: identity.KindReviewerAgent, unit: "review",
		verbs:        []string{"authorexecutor.Execute", "authorexecutor.Capabilities"},
		capabilities: []string{grant.CapabilityRead}, budget: budget,
	}
}

func verifies(budget grant.Budget) role {
	return role{caller: ports.CallerVerification, kind: identity.KindReviewerAgent, verbs: []string{"verifier.Run"}, unit: "verify", budget: budget}
}

func proposes(repository string) role {
	return role{
		caller: ports.CallerRelease, kind: identity.KindAuthorAgent, resources: []string{repository}, budget: service,
		verbs: []string{"scm.CreateBranch", "scm.OpenPullRequest", "scm.UpdatePullRequest", "scm.CommentOnPullRequest", "scm.GetPullRequestStatus", "scm.GetRepository", "scm.ListBranches"},
	}
}

func merges(repository string) role {
	return role{
		caller: ports.CallerRelease, kind: identity.KindReleasePipeline, resources: []string{repository}, budget: service,
		verbs: []string{"scm.MergePullRequest", "scm.GetPullRequestStatus", "scm.GetRepository", "scm.GetBranchProtection", "scm.ListBranches"},
	}
}

func builds(repository, pipeline string) role {
	r := role{caller: ports.CallerRelease, kind: identity.KindReleasePipeline, resources: []string{repository, pipeline}, budget: service}
	for _, v := range ports.Of("ciexecutor") {
		r.verbs = append(r.verbs, v.Name())
	}
	return r
}

// authority puts a Change under its own policies, which a process that took it
// over does not know yet, and derives what a step of it may do.
func (d *Daemon) authority(j orchestration.Job, r role) (dispatch.Authority, error) {
	if err := d.controls.govern(j.State.ID, j.State.Request.Control); err != nil {
		return dispatch.Authority{}, fmt.Errorf("put %s under its policies: %w", j.State.ID, err)
	}
	return authority(j, r, d.now())
}

// authority derives what a step may do. The same job gives the same keys and the
// same grant to the byte, so that a step that runs again after a crash finds its
// ledger entries.
func authority(j orchestration.Job, r role, now time.Time) (dispatch.Authority, error) {
	s := j.State
	actor := identity.Actor{Kind: r.kind, Run: j.Command.Run}
	switch r.kind {
	case identity.KindRunner:
		actor.Principal = principalRunner
	case identity.KindReleasePipeline:
		actor.Principal = principalRelease
	case identity.KindAuthorAgent:
		actor.Principal = s.Request.Author
	case identity.KindReviewerAgent:
		actor.Principal = s.Request.Reviewer
	default:
		return dispatch.Authority{}, fmt.Errorf("no step acts as %s", r.kind)
	}
	g, err := grant.New(grant.Grant{
		ID: grantID(s.ID, j.Command.Run, r), Change: s.ID, WorkUnit: r.unit, Run: j.Command.Run, Actor: actor,
		Verbs: r.verbs, Resources: r.resources, Paths: r.paths, Capabilities: r.capabilities, Budget: r.budget,
		Egress: r.egress, Credentials: r.credentials,
		// A budget's wall time counts from the grant's start, so that is the run's:
		// the state as it was when the command was issued, the same after a crash.
		NotBefore: s.Updated, Expires: s.Updated.Add(grantLife),
	})
	if err != nil {
		return dispatch.Authority{}, fmt.Errorf("build the grant of %s: %w", j.Command.Step(), err)
	}
	return dispatch.Authority{
		Caller: r.caller, Actor: actor, Grant: g, Change: facts(s, now), WorkUnit: r.unit,
		Step: j.Command.Step(), Revision: j.Command.Revision,
	}, nil
}

func grantID(id identity.ChangeID, run identity.RunID, r role) identity.GrantID {
	h := sha256.New()
	for _, part := range []string{string(id), string(run), r.caller.String(), r.kind.String()} {
		h.Write([]byte(part))
		h.Write([]byte{0})
	}
	return identity.GrantID("grt-" + hex.EncodeToString(h.Sum(nil))[:16])
}

// facts is what the host knows of the Change, for floors and policies. An
// approval counts while it is in force, however long ago the command was issued.
func facts(s change.State, now time.Time) policy.ChangeFacts {
	return policy.ChangeFacts{
		ID: s.ID, State: string(s.Status), Authors: authorsOf(s), Requester: s.Request.Requester, Head: s.Candidate.Head,
		Verified:    s.Verdict.Passed && !s.Verdict.Inconclusive && s.Verdict.Tree != "" && s.Verdict.Tree == s.Candidate.Tree,
		Approved:    s.Approvable(now),
		HeadMatches: s.PullRequest.Head != "" && s.PullRequest.Head == s.Candidate.Head,
	}
}

// authorsOf lists the author runs of a Change: those that are open and those
// whose result stands. The principal alone already excludes every other run of
// the same author.
func authorsOf(s change.State) []identity.Actor {
	author := func(run identity.RunID) identity.Actor {
		return identity.Actor{Kind: identity.KindAuthorAgent, Principal: s.Request.Author, Run: run}
	}
	var out []identity.Actor
	seen := map[identity.RunID]bool{"": true}
	add := func(run identity.RunID) {
		if !seen[run] {
			seen[run] = true
			out = append(out, author(run))
		}
	}
	for _, c := range s.Open {
		if c.Kind == change.Execute || c.Kind == change.MakePlan {
			add(c.Run)
		}
	}
	for _, u := range s.Units {
		add(u.Result.Run)
	}
	add(s.Candidate.Run)
	return out
}
