package worktree

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// ErrConflict is a candidate that cannot be put on a new base by itself.
var ErrConflict = errors.New("candidate conflicts with the new base")

// ConflictError names the paths that both sides changed.
type ConflictError struct {
	Base  string
	Paths []string
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("%v %s in %s", ErrConflict, e.Base, some(e.Paths))
}

// Is makes errors.Is(err, ErrConflict) true.
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }

// maxChain bounds the commits between a candidate and its base.
const maxChain = 1000

// Rebase puts a candidate, with all of its commits since the base that the
// store was given, on a new base that the store holds, and returns the new
// commit: same authors, dates and messages, so the same call gives the same
// commit. A conflict is a *ConflictError and changes nothing. What comes back
// is unverified: nothing that was said of the candidate's tree holds for it.
func (s *Store) Rebase(ctx context.Context, candidate, newBase string) (string, error) {
	if err := s.commit(ctx, newBase); err != nil {
		return "", fmt.Errorf("rebase: %w", err)
	}
	chain, base, err := s.chain(ctx, candidate, newBase)
	if err != nil {
		return "", fmt.Errorf("rebase: %w", err)
	}
	if base == newBase {
		return candidate, nil
	}
	onto := newBase
	for _, commit := range chain {
		if onto, err = s.pick(ctx, commit, base, onto); err != nil {
			return "", fmt.Errorf("rebase %s: %w", candidate, err)
		}
		base = commit
	}
	return onto, nil
}

// chain returns the commits from the base that the candidate was made on,
// which is newBase or one whose history the store does not hold, up to the
// candidate.
func (s *Store) chain(ctx context.Context, candidate, newBase string) (commits []string, base string, err error) {
	bases, err := s.bases()
	if err != nil {
		return nil, "", err
	}
	at := candidate
	for len(commits) < maxChain {
		if at == newBase || bases[at] {
			slices.Reverse(commits)
			return commits, at, nil
		}
		commits = append(commits, at)
		if at, err = s.parentOf(ctx, at); err != nil {
			return nil, "", err
		}
	}
	return nil, "", fmt.Errorf("commit %s is more than %d commits from any base", candidate, maxChain)
}

// pick puts what commit changed since base on another commit.
func (s *Store) pick(ctx context.Context, commit, base, onto string) (string, error) {
	var trees [3]string
	var err error
	for i, revision := range []string{base, commit, onto} {
		if trees[i], err = s.TreeOf(ctx, revision); err != nil {
			return "", err
		}
	}
	merged, err := s.mergeTrees(ctx, trees, onto)
	if err != nil {
		return "", err
	}
	raw, err := s.git.output(ctx, nil, "cat-file", "commit", commit)
	if err != nil {
		return "", err
	}
	head, rest, ok := strings.Cut(string(raw), "\nauthor ")
	if !ok || strings.Contains(head, "\n\n") {
		return "", fmt.Errorf("commit %s is malformed", commit)
	}
	writer := s.newObjectWriter(onto, nil)
	made, err := writer.object("commit", []byte("tree "+merged+"\nparent "+onto+"\nauthor "+rest))
	if err != nil {
		return "", fmt.Errorf("write the commit: %w", err)
	}
	if err := writer.sync(); err != nil {
		return "", err
	}
	return made, s.complete(ctx, made)
}

func (s *Store) parentOf(ctx context.Context, commit string) (string, error) {
	if err := s.commit(ctx, commit); err != nil {
		return "", err
	}
	raw, err := s.git.output(ctx, nil, "cat-file", "commit", commit)
	if err != nil {
		return "", err
	}
	head, _, _ := strings.Cut(string(raw), "\n\n")
	var parents []string
	for line := range strings.SplitSeq(head, "\n") {
		if id, ok := strings.CutPrefix(line, "parent "); ok {
			parents = append(parents, id)
		}
	}
	if len(parents) != 1 {
		return "", fmt.Errorf("commit %s has %d parents, a candidate has one", commit, len(parents))
	}
	return parents[0], nil
}

// mergeTrees merges base, ours and theirs by their trees alone: the store has
// no history to find a common ancestor in, so three commits without history
// stand for them.
func (s *Store) mergeTrees(ctx context.Context, trees [3]string, newBase string) (string, error) {
	writer := s.newObjectWriter(newBase, nil)
	const who = "Numinance <merge@numinance.invalid> 0 +0000"
	var commits [3]string
	for i, tree := range trees {
		parent := ""
		if i > 0 {
			parent = "parent " + commits[0] + "\n"
		}
		var err error
		// The number keeps the two sides apart when their trees are equal.
		if commits[i], err = writer.object("commit", fmt.Appendf(nil, "tree %s\n%sauthor %s\ncommitter %s\n\nside %d\n", tree, parent, who, who, i)); err != nil {
			return "", err
		}
	}
	out, err := s.git.output(ctx, nil, "-c", "merge.renames=false", "merge-tree", "--write-tree", "--name-only", "--no-messages", "-z", commits[2], commits[1])
	if code, ok := exitCode(err); ok && code == 1 {
		return "", s.conflict(ctx, commits, newBase)
	}
	if err != nil {
		return "", err
	}
	tree := strings.TrimRight(string(out), "\x00\n")
	if !revisionPattern.MatchString(tree) {
		return "", fmt.Errorf("git merge-tree answers %q", tree)
	}
	return tree, nil
}

// conflict reads the conflicted names; git prints them with exit status 1.
func (s *Store) conflict(ctx context.Context, commits [3]string, newBase string) error {
	out := &bounded{left: maxOutput}
	err := s.git.run(ctx, nil, out, "-c", "merge.renames=false", "merge-tree", "--write-tree", "--name-only", "--no-messages", "-z", commits[2], commits[1])
	if code, ok := exitCode(err); !ok || code != 1 {
		return fmt.Errorf("git merge-tree changed its mind: %w", err)
	}
	names := strings.Split(strings.TrimRight(out.String(), "\x00\n"), "\x00")
	return &ConflictError{Base: newBase, Paths: names[1:]}
}
