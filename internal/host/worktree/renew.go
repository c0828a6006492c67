package worktree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// ErrDiverged: source and mirror each have commits that the other lacks.
var ErrDiverged = errors.New("source and mirror have diverged")

// Renew brings a mirror that Import made up to date with its source: where the
// source is ahead, the branch moves there; where the mirror is ahead, because
// Changes were merged in it, it stays. Both ahead is ErrDiverged. Nothing in
// the source is written.
func Renew(ctx context.Context, path, dest, branch string) (Imported, error) {
	src, err := openSource(ctx, path)
	if err != nil {
		return Imported{}, err
	}
	branch, revision, err := src.resolve(ctx, branch)
	if err != nil {
		return Imported{}, err
	}
	mirror := command{gitDir: dest}
	ref := "refs/heads/" + branch
	old, err := mirror.line(ctx, "rev-parse", "--verify", "--quiet", "--end-of-options", ref)
	if code, ok := exitCode(err); ok && code == 1 {
		old = "" // the source has a branch that the mirror has not seen
	} else if err != nil {
		return Imported{}, fmt.Errorf("renew the mirror of %q: %w", src.path, err)
	}
	done := Imported{Branch: branch, Revision: revision, Format: src.format, Uncommitted: src.uncommitted(ctx)}
	if old == revision {
		return done, nil
	}
	if err := transfer(ctx, mirror.in(alternates(src.objects)...), mirror, revision+"\n"); err != nil {
		return Imported{}, fmt.Errorf("renew the mirror of %q: %w", src.path, err)
	}
	if old != "" {
		ahead, err := mirror.ancestor(ctx, revision, old)
		if err != nil {
			return Imported{}, fmt.Errorf("renew the mirror of %q: %w", src.path, err)
		}
		if ahead {
			done.Revision = old
			return done, nil
		}
		behind, err := mirror.ancestor(ctx, old, revision)
		if err != nil {
			return Imported{}, fmt.Errorf("renew the mirror of %q: %w", src.path, err)
		}
		if !behind {
			return Imported{}, fmt.Errorf("branch %s of %q: %w: merge %s, which was merged here, into your branch first (run with --push-back to get it as a branch)", branch, src.path, ErrDiverged, old)
		}
	}
	if err := mirror.run(ctx, nil, io.Discard, "update-ref", "--end-of-options", ref, revision, old); err != nil {
		return Imported{}, fmt.Errorf("renew the mirror of %q: %w", src.path, err)
	}
	return done, nil
}

// ancestor reports whether a is an ancestor of b or b itself.
func (c command) ancestor(ctx context.Context, a, b string) (bool, error) {
	err := c.run(ctx, nil, io.Discard, "merge-base", "--is-ancestor", a, b)
	if code, ok := exitCode(err); ok && code == 1 {
		return false, nil
	}
	return err == nil, err
}

// Seed makes dest, which must not exist, a bare repository whose one branch
// holds one commit of the given files. The same input gives the same commit.
func Seed(ctx context.Context, dest, branch string, files map[string][]byte, when time.Time) (string, error) {
	if err := checkBranch(branch); err != nil {
		return "", err
	}
	if _, err := os.Lstat(dest); err == nil {
		return "", fmt.Errorf("seed %q: it exists already", dest)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dest), ".seed-*")
	if err != nil {
		return "", fmt.Errorf("seed: %w", err)
	}
	defer os.RemoveAll(tmp)
	if err := initBare(ctx, tmp, "sha1", branch); err != nil {
		return "", fmt.Errorf("seed: %w", err)
	}
	var in strings.Builder
	fmt.Fprintf(&in, "commit refs/heads/%s\ncommitter Numinance <demo@numinance.invalid> %d +0000\ndata 15\nInitial import\n\n", branch, when.Unix())
	for _, path := range slices.Sorted(maps.Keys(files)) {
		if strings.ContainsAny(path, "\n\"") || !filepath.IsLocal(path) {
			return "", fmt.Errorf("seed: path %q cannot be committed", path)
		}
		fmt.Fprintf(&in, "M 100644 inline %s\ndata %d\n%s\n", path, len(files[path]), files[path])
	}
	git := command{gitDir: tmp}
	if err := git.run(ctx, strings.NewReader(in.String()), io.Discard, "fast-import", "--quiet", "--date-format=raw"); err != nil {
		return "", fmt.Errorf("seed: %w", err)
	}
	revision, err := git.line(ctx, "rev-parse", "--verify", "refs/heads/"+branch)
	if err != nil {
		return "", fmt.Errorf("seed: %w", err)
	}
	if err := os.Rename(tmp, dest); err != nil {
		return "", fmt.Errorf("seed: %w", err)
	}
	return revision, syncDir(filepath.Dir(dest))
}

// Message returns the message of a commit, at most 1 MiB of it.
func Message(ctx context.Context, dir, revision string) ([]byte, error) {
	if !revisionPattern.MatchString(revision) {
		return nil, fmt.Errorf("read commit %q: not a full commit id", revision)
	}
	raw, err := command{gitDir: dir}.output(ctx, nil, "cat-file", "commit", revision)
	if err != nil {
		return nil, fmt.Errorf("read commit %s: %w", revision, err)
	}
	_, message, _ := strings.Cut(string(raw), "\n\n")
	return []byte(message[:min(len(message), 1<<20)]), nil
}
