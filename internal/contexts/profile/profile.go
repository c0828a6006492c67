package profile

import (
	"context"
	"fmt"

	"google.golang.org/grpc"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"

	scmv1 "github.com/numinance/numinance/gen/numinance/ports/scm/v1"
)

// Governing are the documents that govern one repository, by digest, and what
// they ask of a Change.
type Governing struct {
	Profile, Policy, Repository, Environment digest.Digest
	Needs                                    change.Needs
	// Limits is nil for the defaults.
	Limits *change.Limits
}

// Documents finds what governs a repository at a base revision.
type Documents interface {
	// Governing returns an error if the repository has no valid documents: a
	// Change without rules is refused.
	Governing(ctx context.Context, repository, revision string) (Governing, error)
}

// Context reads the base of a Change. conn carries the authority of the
// profile context under the runner identity.
type Context struct {
	scm  scmv1.ScmServiceClient
	docs Documents
}

// New returns the context for one Change.
func New(conn grpc.ClientConnInterface, docs Documents) *Context {
	return &Context{scm: scmv1.NewScmServiceClient(conn), docs: docs}
}

// In says which base is wanted; an empty branch is the default branch.
type In struct {
	Repository, Branch string
}

// Admit reads the tip of the base branch with its objects, and then the
// documents as they stand at exactly that revision.
func (c *Context) Admit(ctx context.Context, in In) (change.Admission, error) {
	resp, err := c.scm.GetRepository(ctx, &scmv1.GetRepositoryRequest{
		Repository: in.Repository, Branch: in.Branch, Objects: scmv1.ObjectsMode_OBJECTS_MODE_REVISION,
	})
	if err != nil {
		return change.Admission{}, fmt.Errorf("read repository %s: %w", in.Repository, err)
	}
	switch {
	case resp.GetRepository().GetArchived():
		return change.Admission{}, &change.Fault{Class: change.Denied, Reason: fmt.Sprintf("repository %s is archived: it takes no changes", in.Repository)}
	case resp.GetBaseRevision() == "":
		return change.Admission{}, fmt.Errorf("read repository %s: the code host named no base revision", in.Repository)
	case in.Branch != "" && resp.GetBaseBranch() != in.Branch:
		return change.Admission{}, fmt.Errorf("read repository %s: asked for branch %q, the code host answered for another", in.Repository, in.Branch)
	case resp.GetObjects().GetDigest() == "":
		return change.Admission{}, fmt.Errorf("read repository %s: the code host sent no objects", in.Repository)
	}
	pack, err := digest.Parse(resp.GetObjects().GetDigest())
	if err != nil {
		return change.Admission{}, fmt.Errorf("read repository %s: %w", in.Repository, err)
	}
	g, err := c.docs.Governing(ctx, in.Repository, resp.GetBaseRevision())
	if err != nil {
		return change.Admission{}, fmt.Errorf("load the documents that govern %s: %w", in.Repository, err)
	}
	return change.Admission{
		BaseBranch: resp.GetBaseBranch(), BaseRevision: resp.GetBaseRevision(),
		Objects: change.Blob{Digest: pack, Size: resp.GetObjects().GetSizeBytes()},
		Profile: g.Profile, Policy: g.Policy, Repository: g.Repository, Environment: g.Environment,
		Needs: g.Needs, Limits: g.Limits,
	}, nil
}
