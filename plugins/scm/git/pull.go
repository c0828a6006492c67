package git

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	scmv1 "github.com/numinance/numinance/gen/numinance/ports/scm/v1"
)

// pull is one pull request with all that belongs to it: one file, replaced as a
// whole, so that an effect and the key that caused it are there together.
type pull struct {
	ID       int    `json:"id"`
	Key      string `json:"key"` // that opened it
	Author   string `json:"author"`
	State    string `json:"state"` // open, closed, merged
	Title    string `json:"title"`
	Body     string `json:"body,omitempty"`
	Draft    bool   `json:"draft,omitempty"`
	HeadName string `json:"head_branch"`
	BaseName string `json:"base_branch"`
	Head     string `json:"head_revision"` // as last seen

	Comments []comment `json:"comments,omitempty"`
	Reviews  []review  `json:"reviews,omitempty"`

	// Merging is a merge whose commit exists and whose base may have moved.
	Merging *merge `json:"merging,omitempty"`
	Merged  *merge `json:"merged,omitempty"`
}

type comment struct {
	ID     int    `json:"id"`
	Key    string `json:"key"`
	Author string `json:"author"`
	Body   string `json:"body"`
}

type review struct {
	Reviewer string `json:"reviewer"`
	State    string `json:"state"`
	Revision string `json:"revision"`
}

type merge struct {
	Key      string `json:"key"`
	Revision string `json:"revision"`
	Tree     string `json:"tree"`
	Head     string `json:"head"`
	Base     string `json:"base"` // tip before
}

const maxComments = 10_000

func (r *repository) pullPath(id int) string {
	return filepath.Join(r.state, "pulls", strconv.Itoa(id)+".json")
}

func (r *repository) save(p *pull) error {
	if err := saveJSON(r.pullPath(p.ID), p); err != nil {
		return failed(fmt.Sprintf("save pull request %d", p.ID), err)
	}
	return nil
}

// pull returns the pull request of this name.
func (r *repository) pull(name string) (*pull, error) {
	id, err := strconv.Atoi(name)
	if err != nil || id <= 0 || strconv.Itoa(id) != name {
		return nil, status.Errorf(codes.NotFound, "no pull request %q", name)
	}
	var p pull
	found, err := loadJSON(r.pullPath(id), &p)
	switch {
	case err != nil:
		return nil, status.Errorf(codes.DataLoss, "read pull request: %v", err)
	case !found:
		return nil, status.Errorf(codes.NotFound, "no pull request %q", name)
	}
	return &p, nil
}

// pulls returns all of them, oldest first.
func (r *repository) pulls() ([]*pull, error) {
	entries, err := os.ReadDir(filepath.Join(r.state, "pulls"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, failed("list pull requests", err)
	}
	var all []*pull
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok {
			continue
		}
		p, err := r.pull(name)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b *pull) int { return a.ID - b.ID })
	return all, nil
}

// settle ends a merge that a crash interrupted: it happened if the base holds
// its commit. The repository must be locked.
func (r *repository) settle(ctx context.Context, p *pull) error {
	if p.Merging == nil {
		return nil
	}
	base, err := r.mustTip(ctx, p.BaseName)
	if err != nil {
		return err
	}
	holds, err := r.isAncestor(ctx, p.Merging.Revision, base)
	if err != nil {
		return err
	}
	if holds {
		p.State, p.Merged, p.Head = "merged", p.Merging, p.Merging.Head
	}
	p.Merging = nil
	return r.save(p)
}

func (r *repository) isAncestor(ctx context.Context, ancestor, of string) (bool, error) {
	err := r.git.run(ctx, nil, &capped{}, "merge-base", "--is-ancestor", ancestor, of)
	switch {
	case err == nil:
		return true, nil
	case exited(err, 1):
		return false, nil
	}
	return false, failed("compare revisions", err)
}

// view is the pull request as the port has it.
func (r *repository) view(ctx context.Context, p *pull) (*scmv1.PullRequest, error) {
	base, err := r.mustTip(ctx, p.BaseName)
	if err != nil {
		return nil, err
	}
	v := &scmv1.PullRequest{
		Id: strconv.Itoa(p.ID), Title: p.Title, HeadBranch: p.HeadName, HeadRevision: p.Head,
		BaseBranch: p.BaseName, BaseRevision: base,
	}
	if r.config.WebURL != "" {
		v.WebUrl = text(r.config.WebURL+"/pulls/"+v.Id, 2048)
	}
	switch p.State {
	case "open":
		v.State = scmv1.PullRequestState_PULL_REQUEST_STATE_OPEN
		if head, ok, err := r.tip(ctx, p.HeadName); err != nil {
			return nil, err
		} else if ok {
			v.HeadRevision = head
		}
	case "closed":
		v.State = scmv1.PullRequestState_PULL_REQUEST_STATE_CLOSED
	case "merged":
		v.State = scmv1.PullRequestState_PULL_REQUEST_STATE_MERGED
		v.MergedRevision = p.Merged.Revision
	default:
		return nil, status.Errorf(codes.DataLoss, "pull request %d is in state %q", p.ID, p.State)
	}
	return v, nil
}

// latestReviews returns the last word of every reviewer, oldest first.
func latestReviews(p *pull) []review {
	var last []review
	for _, rv := range p.Reviews {
		if rv.State == "commented" {
			continue
		}
		last = slices.DeleteFunc(last, func(o review) bool { return o.Reviewer == rv.Reviewer })
		last = append(last, rv)
	}
	return last
}

// Review enters a review of an open pull request by an account that did not
// open it. State is approved, changes_requested, commented or dismissed.
func (f *Forge) Review(ctx context.Context, repository, pullRequest, reviewer, state string) error {
	r, unlock, err := f.write(repository)
	if err != nil {
		return err
	}
	defer unlock()
	p, err := r.pull(pullRequest)
	if err != nil {
		return err
	}
	if reviewStates[state] == 0 {
		return invalid("review state %q: approved, changes_requested, commented or dismissed", state)
	}
	switch {
	case p.State != "open":
		return status.Errorf(codes.FailedPrecondition, "pull request %s is %s", pullRequest, p.State)
	case reviewer == "" || len(reviewer) > 256:
		return invalid("reviewer %q: 1 to 256 bytes", reviewer)
	case reviewer == p.Author && state == "approved":
		return status.Errorf(codes.PermissionDenied, "%s opened pull request %s and cannot approve it", reviewer, pullRequest)
	case len(p.Reviews) >= 200:
		return status.Errorf(codes.ResourceExhausted, "pull request %s has 200 reviews", pullRequest)
	}
	head, err := r.mustTip(ctx, p.HeadName)
	if err != nil {
		return err
	}
	p.Reviews = append(p.Reviews, review{Reviewer: reviewer, State: state, Revision: head})
	return r.save(p)
}

var reviewStates = map[string]scmv1.ReviewState{
	"approved":          scmv1.ReviewState_REVIEW_STATE_APPROVED,
	"changes_requested": scmv1.ReviewState_REVIEW_STATE_CHANGES_REQUESTED,
	"commented":         scmv1.ReviewState_REVIEW_STATE_COMMENTED,
	"dismissed":         scmv1.ReviewState_REVIEW_STATE_DISMISSED,
}

// check is one status check of a commit.
type check struct {
	State  string `json:"state"`
	WebURL string `json:"web_url,omitempty"`
}

var checkStates = map[string]scmv1.CheckState{
	"pending":   scmv1.CheckState_CHECK_STATE_PENDING,
	"succeeded": scmv1.CheckState_CHECK_STATE_SUCCEEDED,
	"failed":    scmv1.CheckState_CHECK_STATE_FAILED,
	"neutral":   scmv1.CheckState_CHECK_STATE_NEUTRAL,
}

// Report sets a status check of a commit. State is pending, succeeded, failed
// or neutral.
func (f *Forge) Report(ctx context.Context, repository, revision, name, state, webURL string) error {
	r, unlock, err := f.write(repository)
	if err != nil {
		return err
	}
	defer unlock()
	if err := checkRevision("revision", revision); err != nil {
		return err
	}
	if err := r.mustCommit(ctx, revision); err != nil {
		return err
	}
	if checkStates[state] == 0 || name == "" || len(name) > 256 || len(webURL) > 2048 {
		return invalid("check %q in state %q: pending, succeeded, failed or neutral, and a name of 1 to 256 bytes", name, state)
	}
	all, err := r.checks(revision)
	if err != nil {
		return err
	}
	if _, ok := all[name]; !ok && len(all) >= 200 {
		return status.Errorf(codes.ResourceExhausted, "revision %s has 200 checks", revision)
	}
	all[name] = check{State: state, WebURL: webURL}
	if err := os.MkdirAll(filepath.Join(r.state, "checks"), 0o700); err != nil {
		return failed("report check", err)
	}
	if err := saveJSON(r.checksPath(revision), all); err != nil {
		return failed("report check", err)
	}
	return nil
}

func (r *repository) checksPath(revision string) string {
	return filepath.Join(r.state, "checks", revision+".json")
}

func (r *repository) checks(revision string) (map[string]check, error) {
	all := map[string]check{}
	if _, err := loadJSON(r.checksPath(revision), &all); err != nil {
		return nil, status.Errorf(codes.DataLoss, "read checks: %v", err)
	}
	return all, nil
}
