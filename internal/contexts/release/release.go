package release

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/untrusted"
	"github.com/numinance/numinance/internal/host/dispatch"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	scmv1 "github.com/numinance/numinance/gen/numinance/ports/scm/v1"
)

// CheckpointTrailer begins the line of the merge commit that names where the
// Change's evidence is anchored, outside our own disk.
const CheckpointTrailer = "Numinance-Checkpoint: "

// ChangeTrailer begins the line that names the Change.
const ChangeTrailer = "Numinance-Change: "

const packMediaType = "application/x-git-pack"

// Connect returns a connection that carries the authority of the release
// context under one kind of identity, for one step. The context chooses the
// kind; dispatch and the floors check it. part, if not empty, is appended to
// the step's name: calls whose order a crash can change have keys of their own.
type Connect func(kind identity.ActorKind, part string) grpc.ClientConnInterface

// Context releases one Change.
type Context struct {
	connect Connect
	// Poll paces the questions after a pipeline.
	Poll Poll
}

// New returns the context for one step of one Change.
func New(connect Connect) *Context { return &Context{connect: connect, Poll: DefaultPoll()} }

func (c *Context) author() scmv1.ScmServiceClient {
	return scmv1.NewScmServiceClient(c.connect(identity.KindAuthorAgent, ""))
}

// Subject is what a pull request is about.
type Subject struct {
	Change     identity.ChangeID
	Repository string
	BaseBranch string
	Candidate  change.Candidate
	// Key and Title are the ticket's.
	Key   string
	Title untrusted.Text
	// Notes are lines of our own for the body: policy, verdict, executor.
	Notes []string
}

// Branch is the head branch of a Change's pull request.
func Branch(id identity.ChangeID) string { return "numi/" + string(id) }

// title is one line, cut so that no bound of a code host is near.
func (s Subject) title() string {
	const most = 200
	line := strings.TrimSpace(s.Key + ": " + s.Title.Line(most))
	return strings.TrimSuffix(line, ":")
}

func (s Subject) body() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Change %s for ticket %s, made by an agent under policy.\n\n", s.Change, s.Key)
	for _, n := range s.Notes {
		fmt.Fprintf(&b, "- %s\n", n)
	}
	fmt.Fprintf(&b, "\nThe ticket's title, as its tracker gave it:\n\n```\n%s```\n", strings.ReplaceAll(s.Title.Quoted(), "```", "'''"))
	return b.String()
}

func objects(b change.Blob) *pluginv1.BlobRef {
	if b.Digest == "" {
		return nil
	}
	return &pluginv1.BlobRef{Digest: string(b.Digest), SizeBytes: b.Size, MediaType: packMediaType}
}

// Open creates the head branch at the candidate's commit and opens the pull
// request, both as the author-agent.
func (c *Context) Open(ctx context.Context, s Subject) (change.PullRequest, error) {
	scm := c.author()
	branch := Branch(s.Change)
	if _, err := scm.CreateBranch(ctx, &scmv1.CreateBranchRequest{
		Repository: s.Repository, Branch: branch, Revision: s.Candidate.Head, Objects: objects(s.Candidate.Objects),
	}); err != nil {
		return change.PullRequest{}, fmt.Errorf("create branch %s: %w", branch, err)
	}
	resp, err := scm.OpenPullRequest(ctx, &scmv1.OpenPullRequestRequest{
		Repository: s.Repository, HeadBranch: branch, HeadRevision: s.Candidate.Head,
		BaseBranch: s.BaseBranch, Title: s.title(), Body: s.body(),
	})
	if err != nil {
		return change.PullRequest{}, halfOpened(err)
	}
	return opened(resp.GetPullRequest(), s.Candidate)
}

// halfOpened keeps hold of a pull request that was opened without its evidence,
// so that the Change can close it.
func halfOpened(err error) error {
	err = fmt.Errorf("open pull request: %w", err)
	var partial *dispatch.PartialError
	if !errors.As(err, &partial) {
		return err
	}
	f := &change.Fault{Class: change.Broken, Err: err}
	if out, ok := partial.Output.(*scmv1.OpenPullRequestResponse); ok && out.GetPullRequest().GetId() != "" {
		pr := out.GetPullRequest()
		f.PullRequest = &change.PullRequest{ID: pr.GetId(), URL: pr.GetWebUrl(), Head: pr.GetHeadRevision(), Branch: pr.GetHeadBranch()}
	}
	return f
}

// Update moves the head of the pull request from the one it has to the
// candidate's. The code host refuses if somebody else moved it.
func (c *Context) Update(ctx context.Context, s Subject, pr change.PullRequest) (change.PullRequest, error) {
	resp, err := c.author().UpdatePullRequest(ctx, &scmv1.UpdatePullRequestRequest{
		Repository: s.Repository, PullRequest: pr.ID, Title: s.title(), Body: s.body(),
		HeadRevision: s.Candidate.Head, ExpectedHeadRevision: pr.Head, Objects: objects(s.Candidate.Objects),
	})
	if err != nil {
		return change.PullRequest{}, fmt.Errorf("update pull request %s: %w", pr.ID, err)
	}
	return opened(resp.GetPullRequest(), s.Candidate)
}

func opened(pr *scmv1.PullRequest, want change.Candidate) (change.PullRequest, error) {
	if pr.GetState() != scmv1.PullRequestState_PULL_REQUEST_STATE_OPEN || pr.GetHeadRevision() != want.Head {
		return change.PullRequest{}, &change.Fault{Class: change.Unverified, Reason: fmt.Sprintf(
			"pull request is %s at %s, want it open at the verified %s", pr.GetState(), pr.GetHeadRevision(), want.Head)}
	}
	return change.PullRequest{ID: pr.GetId(), URL: pr.GetWebUrl(), Head: pr.GetHeadRevision(), Tree: want.Tree, Branch: pr.GetHeadBranch()}, nil
}

// Comment leaves a comment of our own on the pull request, as the author-agent.
func (c *Context) Comment(ctx context.Context, repository, pullRequest, body string) error {
	_, err := c.author().CommentOnPullRequest(ctx, &scmv1.CommentOnPullRequestRequest{
		Repository: repository, PullRequest: pullRequest, Body: body,
	})
	if err != nil {
		return fmt.Errorf("comment on pull request %s: %w", pullRequest, err)
	}
	return nil
}

// Close undoes a pull request whose Change did not end well: an open one is
// closed; on a merged one, the only thing left is to say so.
func (c *Context) Close(ctx context.Context, repository string, pr change.PullRequest, why string) (change.PullRequest, change.Merge, error) {
	scm := c.author()
	resp, err := scm.GetPullRequestStatus(ctx, &scmv1.GetPullRequestStatusRequest{Repository: repository, PullRequest: pr.ID})
	if err != nil {
		return pr, change.Merge{}, fmt.Errorf("read pull request %s: %w", pr.ID, err)
	}
	now := resp.GetPullRequest()
	switch now.GetState() {
	case scmv1.PullRequestState_PULL_REQUEST_STATE_MERGED:
		pr.Closed = true
		body := "This pull request was merged, but its Change did not end well: " + why
		return pr, change.Merge{Revision: now.GetMergedRevision()}, c.Comment(ctx, repository, pr.ID, body)
	case scmv1.PullRequestState_PULL_REQUEST_STATE_CLOSED:
		pr.Closed = true
		return pr, change.Merge{}, nil
	}
	closed, err := scm.UpdatePullRequest(ctx, &scmv1.UpdatePullRequestRequest{
		Repository: repository, PullRequest: pr.ID, State: scmv1.PullRequestState_PULL_REQUEST_STATE_CLOSED,
	})
	if err != nil {
		return pr, change.Merge{}, fmt.Errorf("close pull request %s: %w", pr.ID, err)
	}
	if closed.GetPullRequest().GetState() != scmv1.PullRequestState_PULL_REQUEST_STATE_CLOSED {
		return pr, change.Merge{}, fmt.Errorf("close pull request %s: the code host left it %s", pr.ID, closed.GetPullRequest().GetState())
	}
	pr.Closed = true
	return pr, change.Merge{}, nil
}

// MergeIn is what is merged, exactly.
type MergeIn struct {
	Subject     Subject
	PullRequest change.PullRequest
	Verdict     change.Verdict
	Anchor      change.Anchor
}

// Merge merges the verified head, as the release-pipeline, with the anchor in a
// trailer of the commit. It reports Moved, and merges nothing, if the base is
// not the one that the candidate stands on: the merge would make a tree that
// nobody verified.
func (c *Context) Merge(ctx context.Context, in MergeIn) (change.Merge, error) {
	if !in.Verdict.Passed || in.Verdict.Inconclusive || in.Verdict.Tree == "" || in.Verdict.Tree != in.Subject.Candidate.Tree ||
		in.PullRequest.Head != in.Subject.Candidate.Head {
		return change.Merge{}, &change.Fault{Class: change.Unverified, Reason: "the head to be merged has no passed verdict"}
	}
	if in.Anchor.Trailer == "" || strings.ContainsAny(in.Anchor.Trailer, "\r\n") {
		return change.Merge{}, fmt.Errorf("merge pull request %s: the anchor names no checkpoint", in.PullRequest.ID)
	}
	scm := scmv1.NewScmServiceClient(c.connect(identity.KindReleasePipeline, ""))
	if moved, err := c.moved(ctx, scm, in); err != nil || moved.Moved {
		return moved, err
	}
	resp, err := scm.MergePullRequest(ctx, &scmv1.MergePullRequestRequest{
		Repository: in.Subject.Repository, PullRequest: in.PullRequest.ID,
		ExpectedHeadRevision: in.PullRequest.Head, ExpectedTree: in.Verdict.Tree,
		Method: scmv1.MergeMethod_MERGE_METHOD_MERGE,
		Title:  in.Subject.title(), Body: message(in),
	})
	if err != nil {
		// It may have failed because the base moved in between.
		if moved, second := c.moved(ctx, scm, in); second == nil && moved.Moved {
			return moved, nil
		}
		return change.Merge{}, fmt.Errorf("merge pull request %s: %w", in.PullRequest.ID, err)
	}
	// A tree that is not the verified one ends the Change in the machine.
	return change.Merge{Revision: resp.GetMergedRevision(), Tree: resp.GetTree()}, nil
}

// moved reports where the base stands, if it moved away under an open pull
// request. A head that is not the verified one is an error.
func (c *Context) moved(ctx context.Context, scm scmv1.ScmServiceClient, in MergeIn) (change.Merge, error) {
	resp, err := scm.GetPullRequestStatus(ctx, &scmv1.GetPullRequestStatusRequest{
		Repository: in.Subject.Repository, PullRequest: in.PullRequest.ID,
	})
	if err != nil {
		return change.Merge{}, fmt.Errorf("read pull request %s: %w", in.PullRequest.ID, err)
	}
	pr := resp.GetPullRequest()
	switch {
	case pr.GetHeadRevision() != in.PullRequest.Head:
		return change.Merge{}, &change.Fault{Class: change.Unverified, Reason: fmt.Sprintf(
			"the head of pull request %s was moved to %s; %s was verified", in.PullRequest.ID, pr.GetHeadRevision(), in.PullRequest.Head)}
	case pr.GetState() == scmv1.PullRequestState_PULL_REQUEST_STATE_CLOSED:
		return change.Merge{}, &change.Fault{Class: change.Denied, Reason: fmt.Sprintf("pull request %s was closed by somebody else", in.PullRequest.ID)}
	case pr.GetState() == scmv1.PullRequestState_PULL_REQUEST_STATE_OPEN && pr.GetBaseRevision() != in.Subject.Candidate.Base:
		return change.Merge{Moved: true, Base: pr.GetBaseRevision()}, nil
	}
	return change.Merge{}, nil
}

// message is the body of the merge commit; its last lines are the trailers.
func message(in MergeIn) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Merge pull request %s of %s.\n", in.PullRequest.ID, Branch(in.Subject.Change))
	for _, n := range in.Subject.Notes {
		fmt.Fprintf(&b, "%s\n", n)
	}
	fmt.Fprintf(&b, "\n%s%s\n%s%s\n", ChangeTrailer, in.Subject.Change, CheckpointTrailer, in.Anchor.Trailer)
	return b.String()
}
