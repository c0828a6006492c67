package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/numinance/numinance/internal/contexts/execution"
	"github.com/numinance/numinance/internal/contexts/sandbox"
	"github.com/numinance/numinance/internal/contexts/verification"
	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/host/egress"
	"github.com/numinance/numinance/internal/host/worktree"
	"github.com/numinance/numinance/internal/orchestration"
)

const executorFake = "fake"

// liveRuns are the sandboxes that this process has open, by Change.
type liveRuns struct {
	mu sync.Mutex // guards of
	m  map[identity.ChangeID]map[identity.RunID]*box
}

func (l *liveRuns) add(b *box) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.m[b.change] == nil {
		l.m[b.change] = map[identity.RunID]*box{}
	}
	l.m[b.change][b.run] = b
}

func (l *liveRuns) remove(b *box) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.m[b.change], b.run)
	if len(l.m[b.change]) == 0 {
		delete(l.m, b.change)
	}
}

func (l *liveRuns) of(id identity.ChangeID) (out []*box) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range l.m[id] {
		out = append(out, b)
	}
	return out
}

// box is one sandbox with its way out, as the contexts that run in it see it.
type box struct {
	*sandbox.Sandbox
	d      *Daemon
	change identity.ChangeID
	run    identity.RunID
	proxy  *egress.Proxy
}

// Snapshot keeps a part of the sandbox.
func (b *box) Snapshot(ctx context.Context, s execution.Scope) (blob.Ref, error) {
	scopes := map[execution.Scope]sandbox.Scope{execution.ScopeWork: sandbox.ScopeWork, execution.ScopeHome: sandbox.ScopeHome}
	return b.Sandbox.Snapshot(ctx, scopes[s])
}

// Destroy closes the way out and then removes the sandbox.
func (b *box) Destroy(ctx context.Context) error {
	err := errors.Join(b.proxy.Close(), b.Sandbox.Destroy(ctx))
	if err == nil {
		b.d.live.remove(b)
	}
	return err
}

// boxes makes sandboxes for one job of a Change.
type boxes struct {
	d    *Daemon
	j    orchestration.Job
	docs bound
}

// plan is what a sandbox is for, besides the run's authority.
type plan struct {
	authority  dispatch.Authority
	revision   string
	work, home blob.Ref
	readOnly   bool
	noGit      bool
	user       sandbox.User
	wall       time.Duration
	with       *preparation // instead of the whole preparation
}

func (b boxes) open(ctx context.Context, p plan) (*box, error) {
	if err := b.d.fresh(ctx, b.j.State.ID, p.authority.Actor.Run); err != nil {
		return nil, err
	}
	store, err := b.d.objects(ctx, b.j.State.ID)
	if err != nil {
		return nil, err
	}
	runner := b.j
	runner.Command.Run = p.authority.Actor.Run
	keeper, err := b.d.authority(runner, keepsSandboxes())
	if err != nil {
		return nil, err
	}
	prepared, err := b.preparation(ctx, p)
	if err != nil {
		return nil, err
	}
	c, err := sandbox.New(sandbox.Config{
		Dispatcher: sandbox.Enforcer{Dispatcher: b.d.dispatcher}, Blobs: b.d.blobs, Tree: store, Image: b.d.images,
		Links: b.d.home.Links(), Digest: b.d.image, Limits: limits(b.docs), Scratch: b.docs.scratch(),
		Mounts: append([]sandbox.Mount{b.d.adapterProgram()}, prepared.mounts...),
	})
	if err != nil {
		return nil, err
	}
	made, err := c.Create(ctx, sandbox.Spec{
		Authority: keeper, Grant: p.authority.Grant, Revision: p.revision, Work: p.work, Home: p.home,
		ReadOnly: p.readOnly, NoGit: p.noGit, Throwaway: p.user == sandbox.Candidate, WallTime: p.wall, Scratch: prepared.scratch,
	})
	if err != nil {
		return nil, err
	}
	out := &box{Sandbox: made, d: b.d, change: b.j.State.ID, run: p.authority.Actor.Run}
	if err := b.way(out, p); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		return nil, errors.Join(err, made.Destroy(ctx))
	}
	b.d.live.add(out)
	body, err := digest.Canonical(map[string]any{"run": string(out.run), "report": made.Report, "prepared": string(prepared.name)})
	if err == nil {
		err = b.d.record(ctx, b.j.State.ID, "SANDBOX", body)
	}
	if err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		return nil, errors.Join(fmt.Errorf("record the sandbox: %w", err), out.Destroy(ctx))
	}
	return out, nil
}

// preparation returns what the sandbox of p starts from.
func (b boxes) preparation(ctx context.Context, p plan) (preparation, error) {
	if p.with != nil {
		return *p.with, nil
	}
	out, err := b.d.prepared(ctx, b.j, b.docs, p.user)
	if err != nil {
		return preparation{}, fmt.Errorf("prepare the environment: %w", err)
	}
	return out, nil
}

// way opens the sandbox's one way out: a proxy that knows the run's grant.
func (b boxes) way(out *box, p plan) error {
	var private []egress.Private
	for _, h := range b.docs.set.Organization().GetPrivateHosts() {
		for _, text := range h.GetRanges() {
			r, err := netip.ParsePrefix(text)
			if err != nil {
				return fmt.Errorf("private host %s: %w", h.GetHost(), err)
			}
			private = append(private, egress.Private{Destination: grant.Destination{Host: h.GetHost(), Port: int(h.GetPort())}, Range: r})
		}
	}
	proxy, err := egress.New(egress.Config{
		Change: out.change, Run: out.run, Allow: p.authority.Grant.Egress, Private: private,
		Expires: p.authority.Grant.Expires, Recorder: egress.Journal{Journal: b.d.journal},
	})
	if err != nil {
		return err
	}
	l, err := out.Bridge().EgressListener()
	if err != nil {
		return errors.Join(err, proxy.Close())
	}
	out.proxy = proxy
	b.d.background.Go(func() {
		// It ends with the sandbox; each attempt has its own record.
		_ = proxy.Serve(l)
	})
	return nil
}

func limits(b bound) sandbox.Limits {
	l := sandbox.DefaultLimits()
	e := b.Environment.GetLimits()
	if v := e.GetMemoryBytes(); v > 0 {
		l.Memory = int64(v)
	}
	if v := e.GetPids(); v > 0 {
		l.Processes = v
	}
	if v := e.GetDiskBytes(); v > 0 {
		l.Disk = int64(v)
	}
	l.CPU = e.GetCpuMillis()
	return l
}

// executionBoxes and verificationBoxes give the two contexts their sandboxes.
type executionBoxes struct{ boxes }

func (b executionBoxes) Create(ctx context.Context, s execution.SandboxSpec) (execution.Sandbox, error) {
	made, err := b.open(ctx, plan{
		authority: s.Authority, revision: s.Revision, work: s.Restore.Work, home: s.Restore.Home,
		readOnly: s.ReadOnly, wall: s.WallTime, user: sandbox.Agent,
	})
	if err != nil {
		return nil, err
	}
	return made, nil
}

type verificationBoxes struct{ boxes }

func (b verificationBoxes) Create(ctx context.Context, s verification.SandboxSpec) (verification.Sandbox, error) {
	made, err := b.open(ctx, plan{authority: s.Authority, revision: s.Revision, noGit: true, wall: s.WallTime, user: sandbox.Candidate})
	if err != nil {
		return nil, err
	}
	return made, nil
}

// trees reads what a run changed, by the host's own diff.
type trees struct {
	d    *Daemon
	j    orchestration.Job
	docs bound
}

// authorIdentity is the name on the commits that the host makes of agents' work.
var authorIdentity = worktree.Identity{Name: "Numinance author-agent", Email: "author-agent@numinance.invalid"}

// Diff holds a snapshot against its base and keeps the objects of the commit it
// makes of it. Every violation is on record before the caller hears of it.
func (t trees) Diff(ctx context.Context, s execution.DiffSpec) (execution.Candidate, error) {
	store, err := t.d.objects(ctx, t.j.State.ID)
	if err != nil {
		return execution.Candidate{}, err
	}
	snapshot, err := t.d.blobs.Open(s.Snapshot.Digest)
	if err != nil {
		return execution.Candidate{}, fmt.Errorf("read the snapshot: %w", err)
	}
	defer snapshot.Close()
	c, err := store.Diff(ctx, s.Base, snapshot, worktree.Rules{
		Scope: s.Paths, Scratch: t.docs.scratch(), Author: authorIdentity, When: t.j.State.Started,
		Message: fmt.Sprintf("%s\n\nNuminance-Change: %s\n", t.j.State.Task.Key, t.j.State.ID),
	})
	if err != nil {
		return execution.Candidate{}, err
	}
	out := execution.Candidate{Base: c.Base, Tree: c.Tree, Dropped: c.Dropped.Ignored + c.Dropped.Scratch}
	for _, one := range c.Changes {
		out.Changed = append(out.Changed, one.Path)
	}
	for _, v := range c.Violations {
		out.Violations = append(out.Violations, execution.Violation{Path: v.Path, Reason: v.Reason})
		body, err := digest.Canonical(map[string]any{"subject": printable(v.Path), "detail": v.Reason, "layer": "host diff", "run": string(s.Authority.Actor.Run)})
		if err != nil {
			return execution.Candidate{}, err
		}
		if err := t.d.record(ctx, t.j.State.ID, kindViolation, body); err != nil {
			return execution.Candidate{}, fmt.Errorf("record a violation: %w", err)
		}
	}
	if c.Empty() || !c.Clean() {
		return out, nil
	}
	out.Commit = c.Commit
	out.Pack, err = t.d.pack(ctx, store, c.Commit, c.Base)
	return out, err
}

// execution returns the execution context for one job.
func (s steps) execution(j orchestration.Job, docs bound) (*execution.Context, error) {
	return execution.New(execution.Config{
		Dispatcher: execution.Enforcer{Dispatcher: s.d.dispatcher}, Sandboxes: executionBoxes{boxes{s.d, j, docs}}, Adapters: adapters(s),
		Trees: trees{s.d, j, docs}, Blobs: s.d.blobs, Now: s.d.now,
	})
}

// run is what every harness run of a Change has in common.
func (s steps) run(ctx context.Context, j orchestration.Job, docs bound, a dispatch.Authority, revision string) (execution.Run, error) {
	st := j.State
	script, err := s.d.blobs.Bytes(st.Request.Script, maxScript)
	if err != nil {
		return execution.Run{}, fmt.Errorf("read the script: %w", err)
	}
	prepared, err := s.d.prepared(ctx, j, docs, sandbox.Agent)
	if err != nil {
		return execution.Run{}, fmt.Errorf("prepare the environment: %w", err)
	}
	config := map[string]any{"script_ref": map[string]any{"digest": string(st.Request.Script), "size": len(script)}, "environment": prepared.environment}
	raw, err := json.Marshal(config)
	if err != nil {
		return execution.Run{}, err
	}
	wall := docs.budget().Wall
	if wall <= 0 {
		wall = time.Hour
	}
	return execution.Run{
		Authority: a, Executor: st.Request.Executor, Config: raw, Revision: revision,
		Digests: execution.Digests{
			Repository: st.Admission.Repository, Environment: st.Admission.Environment, Policy: st.Admission.Policy, Profile: st.Admission.Profile,
		},
		Refs:     execution.References{Task: st.Task.Ref, Plan: st.Plan.Ref, ContextBundle: st.Bundle.Ref, Blobs: []digest.Digest{st.Request.Script}},
		Deadline: st.Updated.Add(wall), Attempt: j.Command.Attempt,
		Observer: storyteller{s.d, st.ID, a.Actor.Run},
	}, nil
}

// maxScript bounds a script of the fake executor.
const maxScript = 4 << 20

// Plan divides the work. The scripted executor needs no run for it: its script
// is the plan, and one work unit carries it out.
func (s steps) Plan(ctx context.Context, j orchestration.Job) (change.Plan, error) {
	docs, err := s.d.documents(j.State)
	if err != nil {
		return change.Plan{}, err
	}
	a, err := s.d.authority(j, plans(docs.budget()))
	if err != nil {
		return change.Plan{}, err
	}
	c, err := s.execution(j, docs)
	if err != nil {
		return change.Plan{}, err
	}
	r, err := s.run(ctx, j, docs, a, j.State.Admission.BaseRevision)
	if err != nil {
		return change.Plan{}, err
	}
	res, err := c.Plan(ctx, r)
	if err != nil {
		return change.Plan{}, err
	}
	if err := s.receipt(ctx, j, res); err != nil {
		return change.Plan{}, err
	}
	if err := ended(res); err != nil {
		return change.Plan{}, err
	}
	out := change.Plan{Ref: res.Plan.Digest}
	for _, u := range res.Plan.WorkUnits {
		scope, err := json.Marshal(u.AllowedPaths)
		if err != nil {
			return change.Plan{}, err
		}
		kept, err := s.d.blobs.PutBytes(ctx, scope)
		if err != nil {
			return change.Plan{}, fmt.Errorf("keep work unit %s: %w", u.ID, err)
		}
		out.Units = append(out.Units, change.Unit{ID: u.ID, Plan: kept.Digest, After: u.DependsOn})
	}
	return out, nil
}

// Execute is one run of one work unit.
func (s steps) Execute(ctx context.Context, j orchestration.Job) (change.Candidate, error) {
	docs, err := s.d.documents(j.State)
	if err != nil {
		return change.Candidate{}, err
	}
	unit := j.Unit()
	paths, err := s.scope(unit, docs.paths())
	if err != nil {
		return change.Candidate{}, err
	}
	a, err := s.d.authority(j, authors(unit.ID, paths, docs))
	if err != nil {
		return change.Candidate{}, err
	}
	c, err := s.execution(j, docs)
	if err != nil {
		return change.Candidate{}, err
	}
	base := j.State.Admission.BaseRevision
	if j.State.Merge.Base != "" {
		base = j.State.Merge.Base
	}
	r, err := s.run(ctx, j, docs, a, base)
	if err != nil {
		return change.Candidate{}, err
	}
	if unit.Checkpoint != "" {
		if r.Restore, err = s.d.checkpoint(unit.Checkpoint); err != nil {
			return change.Candidate{}, err
		}
	}
	res, err := c.Author(ctx, r)
	if err != nil {
		return change.Candidate{}, err
	}
	if err := s.receipt(ctx, j, res); err != nil {
		return change.Candidate{}, err
	}
	if err := s.endedAt(ctx, res); err != nil {
		return change.Candidate{}, err
	}
	got := res.Candidate
	switch {
	case len(got.Violations) > 0:
		v := got.Violations[0]
		return change.Candidate{}, &change.Fault{Class: change.Denied, Reason: fmt.Sprintf("the run changed %q, which it may not: %s (%d such changes)", printable(v.Path), v.Reason, len(got.Violations))}
	case got.Commit == "":
		return change.Candidate{}, &change.Fault{Class: change.Unverified, Reason: "the run changed nothing, so there is nothing to verify or merge"}
	}
	return change.Candidate{
		Snapshot: got.Pack.Digest, Tree: got.Tree, Base: got.Base, Head: got.Commit, Run: a.Actor.Run, Files: len(got.Changed),
		Objects: change.Blob{Digest: got.Pack.Digest, Size: got.Pack.Size},
	}, nil
}

// scope is what a work unit may change: what the profile allows, narrowed by the
// plan. A unit whose scope cannot be read may change nothing.
func (s steps) scope(unit change.Unit, profile pathscope.Scope) (pathscope.Scope, error) {
	b, err := s.d.blobs.Bytes(unit.Plan, maxScript)
	if err != nil {
		return pathscope.Scope{}, fmt.Errorf("read the scope of work unit %s: %w", unit.ID, err)
	}
	var allowed []string
	if err := json.Unmarshal(b, &allowed); err != nil {
		return pathscope.Scope{}, fmt.Errorf("read the scope of work unit %s: %w", unit.ID, err)
	}
	if len(allowed) == 0 {
		return profile, nil
	}
	narrower := profile
	narrower.Allowed = allowed
	paths, err := profile.Narrow(narrower)
	if err != nil {
		return pathscope.Scope{}, &change.Fault{Class: change.Denied, Reason: fmt.Sprintf("work unit %s asks for more than the profile allows: %v", unit.ID, err)}
	}
	return paths, nil
}

// receipt records what the host itself observed of a run: what it decided and
// started, and what the run came to (P-138). It holds digests and counts only.
func (s steps) receipt(ctx context.Context, j orchestration.Job, res execution.Result) error {
	body := map[string]any{
		"run": string(j.Command.Run), "outcome": res.Outcome.String(), "reason": printable(res.Reason), "source": "host",
		"events": res.Stats.Events, "decisions": res.Stats.Decisions, "denials": res.Stats.Denials, "processes": res.Stats.Spawns,
	}
	if c := res.Checkpoint; c != nil {
		body["checkpoint"] = map[string]any{"work": string(c.Work.Digest), "home": string(c.Home.Digest)}
	}
	if c := res.Candidate; c != nil {
		body["candidate"] = map[string]any{
			"base": c.Base, "tree": c.Tree, "commit": c.Commit, "objects": string(c.Pack.Digest),
			"changed": len(c.Changed), "violations": len(c.Violations), "dropped": c.Dropped,
		}
	}
	if r := res.Review; r != nil {
		body["review"] = map[string]any{"approve": r.Approve, "document": string(r.Digest), "findings": len(r.Findings)}
	}
	if p := res.Plan; p != nil {
		body["plan"] = map[string]any{"document": string(p.Digest), "work_units": len(p.WorkUnits)}
	}
	return s.note(ctx, j, "RUN_RESULT", body)
}

// ended turns the end of a run into the class of its command.
func ended(res execution.Result) error {
	switch res.Outcome {
	case execution.Completed:
		return nil
	case execution.HarnessFailed, execution.Contradicted:
		return &orchestration.Error{Class: change.Unverified, Reason: fmt.Sprintf("the run %s: %s", res.Outcome, res.Reason)}
	case execution.BudgetExhausted:
		return &orchestration.Error{Class: change.Exhausted, Reason: "the run's budget is exhausted: " + res.Reason}
	case execution.Cancelled:
		return &orchestration.Error{Class: change.Interrupted, Reason: res.Reason}
	default:
		return &orchestration.Error{Class: change.Lost, Reason: fmt.Sprintf("the run was %s: %s", res.Outcome, res.Reason)}
	}
}

// kept is a checkpoint as it is kept between two runs.
type kept struct {
	Label string   `json:"label"`
	Work  blob.Ref `json:"work"`
	Home  blob.Ref `json:"home"`
}

// endedAt is ended with the run's last checkpoint kept for the next one.
func (s steps) endedAt(ctx context.Context, res execution.Result) error {
	err := ended(res)
	var typed *orchestration.Error
	if !errors.As(err, &typed) || res.Checkpoint == nil {
		return err
	}
	ref, perr := s.d.putCheckpoint(ctx, *res.Checkpoint)
	if perr != nil {
		return errors.Join(err, perr)
	}
	typed.Checkpoint = ref
	return typed
}

func (d *Daemon) checkpoint(of digest.Digest) (*execution.Checkpoint, error) {
	raw, err := d.blobs.Bytes(of, maxScript)
	if err != nil {
		return nil, fmt.Errorf("read the checkpoint: %w", err)
	}
	var k kept
	if err := json.Unmarshal(raw, &k); err != nil {
		return nil, fmt.Errorf("read the checkpoint: %w", err)
	}
	c := execution.Checkpoint(k)
	return &c, nil
}

// Combine joins the results of units whose scopes are disjoint, one on top of
// the other.
func (s steps) Combine(ctx context.Context, j orchestration.Job) (change.Candidate, error) {
	store, err := s.d.objects(ctx, j.State.ID)
	if err != nil {
		return change.Candidate{}, err
	}
	base := j.State.Admission.BaseRevision
	head := j.State.Units[0].Result.Head
	for _, u := range j.State.Units[1:] {
		if head, err = store.Rebase(ctx, u.Result.Head, head); err != nil {
			return change.Candidate{}, &orchestration.Error{Class: change.Unverified, Reason: fmt.Sprintf("the result of work unit %s does not fit the others", u.ID), Err: err}
		}
	}
	return s.candidate(ctx, j, store, base, head)
}

// Rebase puts the candidate on the base that moved.
func (s steps) Rebase(ctx context.Context, j orchestration.Job) (change.Candidate, error) {
	store, err := s.d.objects(ctx, j.State.ID)
	if err != nil {
		return change.Candidate{}, err
	}
	head, err := store.Rebase(ctx, j.State.Candidate.Head, j.State.Merge.Base)
	if errors.Is(err, worktree.ErrConflict) {
		return change.Candidate{}, &orchestration.Error{Class: change.Unverified, Reason: "the base branch moved and the change conflicts with it", Err: err}
	}
	if err != nil {
		return change.Candidate{}, err
	}
	return s.candidate(ctx, j, store, j.State.Merge.Base, head)
}

// candidate is a commit that the host made itself, judged by the same scope.
func (s steps) candidate(ctx context.Context, j orchestration.Job, store *worktree.Store, base, head string) (change.Candidate, error) {
	docs, err := s.d.documents(j.State)
	if err != nil {
		return change.Candidate{}, err
	}
	c, err := store.Compare(ctx, base, head, docs.paths())
	if err != nil {
		return change.Candidate{}, err
	}
	if !c.Clean() {
		return change.Candidate{}, &change.Fault{Class: change.Denied, Reason: fmt.Sprintf("%q may not change: %s", printable(c.Violations[0].Path), c.Violations[0].Reason)}
	}
	tree, err := store.TreeOf(ctx, head)
	if err != nil {
		return change.Candidate{}, err
	}
	pack, err := s.d.pack(ctx, store, head, base)
	if err != nil {
		return change.Candidate{}, err
	}
	return change.Candidate{
		Snapshot: pack.Digest, Tree: tree, Base: base, Head: head, Run: j.State.Candidate.Run, Files: len(c.Changes),
		Objects: change.Blob{Digest: pack.Digest, Size: pack.Size},
	}, nil
}

// Review is one read-only run of a reviewer-agent on the candidate.
func (s steps) Review(ctx context.Context, j orchestration.Job) (change.Reviewed, error) {
	docs, err := s.d.documents(j.State)
	if err != nil {
		return change.Reviewed{}, err
	}
	a, err := s.d.authority(j, reviews(docs.budget()))
	if err != nil {
		return change.Reviewed{}, err
	}
	c, err := s.execution(j, docs)
	if err != nil {
		return change.Reviewed{}, err
	}
	r, err := s.run(ctx, j, docs, a, j.State.Candidate.Head)
	if err != nil {
		return change.Reviewed{}, err
	}
	res, err := c.Review(ctx, r)
	if err != nil {
		return change.Reviewed{}, err
	}
	if err := s.receipt(ctx, j, res); err != nil {
		return change.Reviewed{}, err
	}
	if err := ended(res); err != nil {
		return change.Reviewed{}, err
	}
	return change.Reviewed{
		Approve: res.Review.Approve, By: a.Actor.Principal, Run: a.Actor.Run, Head: j.State.PullRequest.Head, Findings: res.Review.Digest,
	}, nil
}

// DestroySandboxes removes what is still open of the Change.
func (s steps) DestroySandboxes(ctx context.Context, j orchestration.Job) error {
	var errs []error
	for _, b := range s.d.live.of(j.State.ID) {
		errs = append(errs, b.Destroy(ctx))
	}
	return errors.Join(errs...)
}

// verifyBudget bounds a verification run where the profile names no wall time.
var verifyBudget = grant.Budget{Actions: 100, OutputBytes: 1 << 30, Wall: 2 * time.Hour}
