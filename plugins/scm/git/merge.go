package git

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

var (
	errConflict = errors.New("head conflicts with its base")
	errNothing  = errors.New("head holds nothing that its base lacks")
)

// The identity of every merge commit.
const (
	releaseName  = "Numinance Release"
	releaseEmail = "release@numinance.invalid"
)

// mergeTree returns the tree of merging head into base. Unless keep is set, the
// objects that it makes are thrown away.
func (r *repository) mergeTree(ctx context.Context, base, head string, keep bool) (string, error) {
	if err := r.git.run(ctx, nil, &capped{}, "merge-base", base, head); exited(err, 1) {
		return "", errConflict // no common history
	} else if err != nil {
		return "", err
	}
	contained, err := r.isAncestor(ctx, head, base)
	if err != nil {
		return "", err
	}
	if contained {
		return "", errNothing
	}
	git := r.git
	if !keep {
		if err := os.MkdirAll(r.state, 0o700); err != nil {
			return "", err
		}
		scratch, err := os.MkdirTemp(r.state, "scratch-*")
		if err != nil {
			return "", err
		}
		defer os.RemoveAll(scratch)
		git = git.in("GIT_OBJECT_DIRECTORY="+scratch, alternates(filepath.Join(r.git.dir, "objects")))
	}
	out, err := git.output(ctx, nil, "merge-tree", "--write-tree", "--no-messages", "--end-of-options", base, head)
	if exited(err, 1) {
		return "", errConflict
	}
	if err != nil {
		return "", err
	}
	tree := strings.TrimSpace(out)
	if !revisionPattern.MatchString(tree) {
		return "", fmt.Errorf("git merge-tree answers %q", tree)
	}
	return tree, nil
}

// commitMerge writes the merge commit. Its date is that of head, so that the
// same merge gives the same commit again.
func (r *repository) commitMerge(ctx context.Context, tree string, parents []string, head, title, body string) (string, error) {
	when, err := r.git.line(ctx, "show", "-s", "--format=%ct", "--end-of-options", head)
	if err != nil {
		return "", err
	}
	date := "@" + when + " +0000"
	git := r.git.in(
		"GIT_AUTHOR_NAME="+releaseName, "GIT_AUTHOR_EMAIL="+releaseEmail, "GIT_AUTHOR_DATE="+date,
		"GIT_COMMITTER_NAME="+releaseName, "GIT_COMMITTER_EMAIL="+releaseEmail, "GIT_COMMITTER_DATE="+date)
	args := []string{"commit-tree", "-F", "-"}
	for _, p := range parents {
		args = append(args, "-p", p)
	}
	message := title + "\n"
	if body = strings.TrimRight(body, "\n"); body != "" {
		message += "\n" + body + "\n"
	}
	commit, err := git.output(ctx, strings.NewReader(message), append(args, tree)...)
	if err != nil {
		return "", err
	}
	commit = strings.TrimSpace(commit)
	if !revisionPattern.MatchString(commit) {
		return "", fmt.Errorf("git commit-tree answers %q", commit)
	}
	return commit, nil
}
