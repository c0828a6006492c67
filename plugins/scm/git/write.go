package git

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	scmv1 "github.com/numinance/numinance/gen/numinance/ports/scm/v1"
	"github.com/numinance/numinance/sdk"
)

func key(ctx context.Context) string    { return sdk.Action(ctx).GetIdempotencyKey() }
func author(ctx context.Context) string { return sdk.Action(ctx).GetActorPrincipal() }

func (s *server) CreateBranch(ctx context.Context, q *scmv1.CreateBranchRequest) (*scmv1.CreateBranchResponse, error) {
	if err := checkRevision("revision", q.GetRevision()); err != nil {
		return nil, err
	}
	if err := valid(q); err != nil {
		return nil, err
	}
	if err := checkBranch("branch", q.GetBranch()); err != nil {
		return nil, err
	}
	return sdk.Once(ctx, s.effects, q, func(ctx context.Context, _ bool) (*scmv1.CreateBranchResponse, error) {
		r, unlock, err := s.forge.write(q.GetRepository())
		if err != nil {
			return nil, err
		}
		defer unlock()
		if err := r.ensureGuard(ctx); err != nil {
			return nil, failed("create branch", err)
		}
		_, protected, err := r.protection(ctx, q.GetBranch())
		if err != nil {
			return nil, err
		}
		switch now, ok, err := r.tip(ctx, q.GetBranch()); {
		case err != nil:
			return nil, err
		case ok && now != q.GetRevision():
			return nil, status.Errorf(codes.AlreadyExists, "branch %q stands at %s", q.GetBranch(), now)
		case !ok:
			if err := s.receive(ctx, r, q.GetObjects(), q.GetRevision()); err != nil {
				return nil, err
			}
			if err := r.move(ctx, q.GetBranch(), q.GetRevision(), ""); err != nil {
				return nil, err
			}
		}
		return &scmv1.CreateBranchResponse{Branch: &scmv1.Branch{Name: q.GetBranch(), Revision: q.GetRevision(), Protected: protected}}, nil
	})
}

func (s *server) OpenPullRequest(ctx context.Context, q *scmv1.OpenPullRequestRequest) (*scmv1.OpenPullRequestResponse, error) {
	if err := checkRevision("head_revision", q.GetHeadRevision()); err != nil {
		return nil, err
	}
	if err := valid(q); err != nil {
		return nil, err
	}
	for field, name := range map[string]string{"head_branch": q.GetHeadBranch(), "base_branch": q.GetBaseBranch()} {
		if err := checkBranch(field, name); err != nil {
			return nil, err
		}
	}
	if q.GetHeadBranch() == q.GetBaseBranch() {
		return nil, invalid("head_branch and base_branch are both %q", q.GetHeadBranch())
	}
	if err := checkTitle(q.GetTitle()); err != nil {
		return nil, err
	}
	effect := func(ctx context.Context, again bool) (*scmv1.OpenPullRequestResponse, error) {
		r, unlock, err := s.forge.write(q.GetRepository())
		if err != nil {
			return nil, err
		}
		defer unlock()
		if err := r.ensureGuard(ctx); err != nil {
			return nil, failed("open pull request", err)
		}
		p, err := r.openPull(ctx, q, again)
		if err != nil {
			return nil, err
		}
		view, err := r.view(ctx, p)
		if err != nil {
			return nil, err
		}
		if !sdk.DryRun(ctx) {
			attachPullRequest(ctx, q.GetRepository(), view)
		}
		return &scmv1.OpenPullRequestResponse{PullRequest: view}, nil
	}
	if sdk.DryRun(ctx) {
		return effect(ctx, false)
	}
	return sdk.Once(ctx, s.effects, q, effect)
}

// openPull finds the pull request that this key opened, or opens it; in a dry
// run it returns what would be opened.
func (r *repository) openPull(ctx context.Context, q *scmv1.OpenPullRequestRequest, again bool) (*pull, error) {
	all, err := r.pulls()
	if err != nil {
		return nil, err
	}
	id := 1
	for _, p := range all {
		if again && p.Key == key(ctx) {
			return p, r.settle(ctx, p)
		}
		if p.State == "open" && p.HeadName == q.GetHeadBranch() && p.BaseName == q.GetBaseBranch() {
			return nil, status.Errorf(codes.AlreadyExists, "pull request %d from %q into %q is open", p.ID, p.HeadName, p.BaseName)
		}
		id = p.ID + 1
	}
	head, err := r.mustTip(ctx, q.GetHeadBranch())
	if err != nil {
		return nil, err
	}
	base, err := r.mustTip(ctx, q.GetBaseBranch())
	if err != nil {
		return nil, err
	}
	if head != q.GetHeadRevision() {
		return nil, status.Errorf(codes.FailedPrecondition, "branch %q stands at %s, not at %s", q.GetHeadBranch(), head, q.GetHeadRevision())
	}
	merged, err := r.isAncestor(ctx, head, base)
	if err != nil {
		return nil, err
	}
	if merged {
		return nil, status.Errorf(codes.FailedPrecondition, "branch %q has nothing that %q lacks", q.GetHeadBranch(), q.GetBaseBranch())
	}
	p := &pull{
		ID: id, Key: key(ctx), Author: author(ctx), State: "open", Title: q.GetTitle(), Body: q.GetBody(), Draft: q.GetDraft(),
		HeadName: q.GetHeadBranch(), BaseName: q.GetBaseBranch(), Head: head,
	}
	if sdk.DryRun(ctx) {
		return p, nil
	}
	return p, r.save(p)
}

// attachPullRequest attaches evidence pr-ref (P-074).
func attachPullRequest(ctx context.Context, repository string, p *scmv1.PullRequest) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	// A map's keys are written in order, as canonical JSON wants it.
	if err := enc.Encode(map[string]string{
		"base_branch": p.GetBaseBranch(), "base_revision": p.GetBaseRevision(), "head_branch": p.GetHeadBranch(),
		"head_revision": p.GetHeadRevision(), "id": p.GetId(), "repository": repository,
	}); err != nil {
		return // a map of strings always encodes; without the receipt the host says PARTIAL
	}
	sdk.Attach(ctx, &pluginv1.Evidence{Type: "pr-ref", Reference: repository + "#" + p.GetId(), Payload: bytes.TrimSuffix(b.Bytes(), []byte("\n"))})
}

func checkTitle(title string) error {
	if strings.ContainsFunc(title, func(r rune) bool { return r < ' ' || r == 0x7f }) || strings.TrimSpace(title) == "" {
		return invalid("title: one line that is not blank")
	}
	return nil
}

func (s *server) UpdatePullRequest(ctx context.Context, q *scmv1.UpdatePullRequestRequest) (*scmv1.UpdatePullRequestResponse, error) {
	if err := valid(q); err != nil {
		return nil, err
	}
	if q.GetTitle() != "" {
		if err := checkTitle(q.GetTitle()); err != nil {
			return nil, err
		}
	}
	switch {
	case q.GetState() == scmv1.PullRequestState_PULL_REQUEST_STATE_MERGED:
		return nil, invalid("state: a pull request is merged by MergePullRequest")
	case (q.GetHeadRevision() == "") != (q.GetExpectedHeadRevision() == ""):
		return nil, invalid("head_revision and expected_head_revision come together")
	case q.GetHeadRevision() == "" && q.GetObjects() != nil:
		return nil, invalid("objects without head_revision")
	}
	return sdk.Once(ctx, s.effects, q, func(ctx context.Context, _ bool) (*scmv1.UpdatePullRequestResponse, error) {
		r, unlock, err := s.forge.write(q.GetRepository())
		if err != nil {
			return nil, err
		}
		defer unlock()
		p, err := r.pull(q.GetPullRequest())
		if err != nil {
			return nil, err
		}
		if err := r.settle(ctx, p); err != nil {
			return nil, err
		}
		// Everything is checked before anything moves.
		if err := r.changeState(p, q.GetState()); err != nil {
			return nil, err
		}
		if q.GetHeadRevision() != "" {
			if err := s.moveHead(ctx, r, p, q); err != nil {
				return nil, err
			}
		}
		if q.GetTitle() != "" {
			p.Title = q.GetTitle()
		}
		if q.GetBody() != "" {
			p.Body = q.GetBody()
		}
		if err := r.save(p); err != nil {
			return nil, err
		}
		view, err := r.view(ctx, p)
		if err != nil {
			return nil, err
		}
		return &scmv1.UpdatePullRequestResponse{PullRequest: view}, nil
	})
}

func (r *repository) changeState(p *pull, to scmv1.PullRequestState) error {
	want := map[scmv1.PullRequestState]string{
		scmv1.PullRequestState_PULL_REQUEST_STATE_OPEN:   "open",
		scmv1.PullRequestState_PULL_REQUEST_STATE_CLOSED: "closed",
	}[to]
	switch {
	case want == "" || want == p.State:
		return nil
	case p.State == "merged":
		return status.Errorf(codes.FailedPrecondition, "pull request %d is merged", p.ID)
	case want == "open":
		all, err := r.pulls()
		if err != nil {
			return err
		}
		for _, o := range all {
			if o.ID != p.ID && o.State == "open" && o.HeadName == p.HeadName && o.BaseName == p.BaseName {
				return status.Errorf(codes.AlreadyExists, "pull request %d from %q into %q is open", o.ID, o.HeadName, o.BaseName)
			}
		}
	}
	p.State = want
	return nil
}

func (s *server) moveHead(ctx context.Context, r *repository, p *pull, q *scmv1.UpdatePullRequestRequest) error {
	if p.State != "open" {
		return status.Errorf(codes.FailedPrecondition, "pull request %d is %s: its head stays", p.ID, p.State)
	}
	if protection, protected, err := r.protection(ctx, p.HeadName); err != nil {
		return err
	} else if protected && !(protection.DirectPush && protection.ForcePush) {
		return status.Errorf(codes.FailedPrecondition, "branch %q is protected and moves by merges only", p.HeadName)
	}
	now, err := r.mustTip(ctx, p.HeadName)
	if err != nil {
		return err
	}
	if now != q.GetHeadRevision() {
		if now != q.GetExpectedHeadRevision() {
			return status.Errorf(codes.FailedPrecondition, "branch %q stands at %s, not at %s", p.HeadName, now, q.GetExpectedHeadRevision())
		}
		if err := s.receive(ctx, r, q.GetObjects(), q.GetHeadRevision()); err != nil {
			return err
		}
		if err := r.move(ctx, p.HeadName, q.GetHeadRevision(), now); err != nil {
			return err
		}
	}
	p.Head = q.GetHeadRevision()
	return nil
}

func (s *server) CommentOnPullRequest(ctx context.Context, q *scmv1.CommentOnPullRequestRequest) (*scmv1.CommentOnPullRequestResponse, error) {
	if err := valid(q); err != nil {
		return nil, err
	}
	return sdk.Once(ctx, s.effects, q, func(ctx context.Context, again bool) (*scmv1.CommentOnPullRequestResponse, error) {
		r, unlock, err := s.forge.write(q.GetRepository())
		if err != nil {
			return nil, err
		}
		defer unlock()
		p, err := r.pull(q.GetPullRequest())
		if err != nil {
			return nil, err
		}
		if err := r.settle(ctx, p); err != nil {
			return nil, err
		}
		for _, c := range p.Comments {
			if again && c.Key == key(ctx) {
				return &scmv1.CommentOnPullRequestResponse{Comment: strconv.Itoa(c.ID)}, nil
			}
		}
		if len(p.Comments) >= maxComments {
			return nil, status.Errorf(codes.ResourceExhausted, "pull request %d has %d comments", p.ID, maxComments)
		}
		c := comment{ID: len(p.Comments) + 1, Key: key(ctx), Author: author(ctx), Body: q.GetBody()}
		p.Comments = append(p.Comments, c)
		if err := r.save(p); err != nil {
			return nil, err
		}
		return &scmv1.CommentOnPullRequestResponse{Comment: strconv.Itoa(c.ID)}, nil
	})
}

func (s *server) MergePullRequest(ctx context.Context, q *scmv1.MergePullRequestRequest) (*scmv1.MergePullRequestResponse, error) {
	for field, revision := range map[string]string{"expected_head_revision": q.GetExpectedHeadRevision(), "expected_tree": q.GetExpectedTree()} {
		if err := checkRevision(field, revision); err != nil {
			return nil, err
		}
	}
	if err := valid(q); err != nil {
		return nil, err
	}
	if err := checkTitle(q.GetTitle()); err != nil {
		return nil, err
	}
	if strings.ContainsRune(q.GetBody(), 0) {
		return nil, invalid("body holds a NUL")
	}
	effect := func(ctx context.Context, again bool) (*scmv1.MergePullRequestResponse, error) {
		r, unlock, err := s.forge.write(q.GetRepository())
		if err != nil {
			return nil, err
		}
		defer unlock()
		p, err := r.pull(q.GetPullRequest())
		if err != nil {
			return nil, err
		}
		if err := r.settle(ctx, p); err != nil {
			return nil, err
		}
		if p.State == "merged" {
			return mergedBefore(ctx, p, q, again)
		}
		return r.merge(ctx, p, q)
	}
	if sdk.DryRun(ctx) {
		return effect(ctx, false)
	}
	return sdk.Once(ctx, s.effects, q, effect)
}

// mergedBefore answers a merge of what is merged: well only if it is the merge
// that was asked for.
func mergedBefore(ctx context.Context, p *pull, q *scmv1.MergePullRequestRequest, again bool) (*scmv1.MergePullRequestResponse, error) {
	m := p.Merged
	if m.Head != q.GetExpectedHeadRevision() || m.Tree != q.GetExpectedTree() {
		return nil, status.Errorf(codes.FailedPrecondition, "pull request %d is merged as %s, from head %s with tree %s", p.ID, m.Revision, m.Head, m.Tree)
	}
	return &scmv1.MergePullRequestResponse{MergedRevision: m.Revision, Tree: m.Tree, AlreadyMerged: !(again && m.Key == key(ctx))}, nil
}

func (r *repository) merge(ctx context.Context, p *pull, q *scmv1.MergePullRequestRequest) (*scmv1.MergePullRequestResponse, error) {
	refuse := func(format string, args ...any) (*scmv1.MergePullRequestResponse, error) {
		return nil, status.Errorf(codes.FailedPrecondition, "pull request %d: %s", p.ID, fmt.Sprintf(format, args...))
	}
	if p.State != "open" {
		return refuse("it is %s", p.State)
	}
	head, err := r.mustTip(ctx, p.HeadName)
	if err != nil {
		return nil, err
	}
	base, err := r.mustTip(ctx, p.BaseName)
	if err != nil {
		return nil, err
	}
	if head != q.GetExpectedHeadRevision() {
		return refuse("its head is %s, not %s", head, q.GetExpectedHeadRevision())
	}
	if why, err := r.blocked(ctx, p, head, base); err != nil {
		return nil, err
	} else if why != "" {
		return refuse("it may not be merged: %s", why)
	}
	tree, err := r.mergeTree(ctx, base, head, !sdk.DryRun(ctx))
	switch {
	case err == errConflict, err == errNothing:
		return refuse("%v (base %s)", err, base)
	case err != nil:
		return nil, failed("merge", err)
	case tree != q.GetExpectedTree():
		return refuse("merging into base %s gives tree %s, not %s: rebase and verify again", base, tree, q.GetExpectedTree())
	}
	if sdk.DryRun(ctx) {
		return &scmv1.MergePullRequestResponse{MergedRevision: base, Tree: tree}, nil
	}
	parents := []string{base, head}
	if q.GetMethod() == scmv1.MergeMethod_MERGE_METHOD_SQUASH {
		parents = parents[:1]
	}
	commit, err := r.commitMerge(ctx, tree, parents, head, q.GetTitle(), q.GetBody())
	if err != nil {
		return nil, failed("merge", err)
	}
	// From here on a crash is settled by what the base holds.
	p.Merging = &merge{Key: key(ctx), Revision: commit, Tree: tree, Head: head, Base: base}
	if err := r.save(p); err != nil {
		return nil, err
	}
	if err := r.move(ctx, p.BaseName, commit, base); err != nil {
		return nil, err
	}
	p.State, p.Merged, p.Merging, p.Head = "merged", p.Merging, nil, head
	if err := r.save(p); err != nil {
		return nil, err
	}
	return &scmv1.MergePullRequestResponse{MergedRevision: commit, Tree: tree}, nil
}
