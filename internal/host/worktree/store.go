package worktree

import (
	"context"
	"crypto/sha1"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
)

var revisionPattern = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})$`)

// maxPack bounds one pack, in bytes.
const maxPack = "8589934592"

// Store holds the Git objects of one Change in a bare repository of the
// host's own. It is safe for concurrent use.
type Store struct {
	dir string
	git command

	mu sync.Mutex // guards creation and the shallow file
}

// Open returns the object store at dir, an absolute path. It is created by the
// first AddBase, whose revision decides the object format.
func Open(ctx context.Context, dir string) (*Store, error) {
	if !filepath.IsAbs(dir) {
		return nil, fmt.Errorf("open object store %q: not an absolute path", dir)
	}
	s := &Store{dir: dir, git: command{gitDir: dir}}
	switch _, err := os.Stat(filepath.Join(dir, "HEAD")); {
	case errors.Is(err, fs.ErrNotExist):
		return s, nil
	case err != nil:
		return nil, fmt.Errorf("open object store: %w", err)
	}
	if _, err := s.git.line(ctx, "rev-parse", "--show-object-format"); err != nil {
		return nil, fmt.Errorf("open object store %q: %w", dir, err)
	}
	return s, nil
}

// AddBase adds the pack of a base revision (its commit, trees and blobs,
// without history) and checks that nothing of the tree is missing.
func (s *Store) AddBase(ctx context.Context, pack io.Reader, revision string) error {
	if !revisionPattern.MatchString(revision) {
		return fmt.Errorf("add base %q: not a full commit id", revision)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.create(ctx, revision); err != nil {
		return err
	}
	if err := s.markShallow(revision); err != nil {
		return err
	}
	if err := s.index(ctx, pack); err != nil {
		return fmt.Errorf("add base %s: %w", revision, err)
	}
	return s.complete(ctx, revision)
}

// AddPack adds a pack of objects whose base is already in the store.
func (s *Store) AddPack(ctx context.Context, pack io.Reader) error {
	if err := s.index(ctx, pack); err != nil {
		return fmt.Errorf("add pack: %w", err)
	}
	return nil
}

// Has reports whether the store holds the commit with its whole tree.
func (s *Store) Has(ctx context.Context, revision string) bool {
	return revisionPattern.MatchString(revision) && s.complete(ctx, revision) == nil
}

// TreeOf returns the tree id of a commit of the store.
func (s *Store) TreeOf(ctx context.Context, revision string) (string, error) {
	if err := s.commit(ctx, revision); err != nil {
		return "", err
	}
	return s.git.line(ctx, "rev-parse", "--verify", "--quiet", "--end-of-options", revision+"^{tree}")
}

// Pack writes the objects that commit needs and base does not have.
func (s *Store) Pack(ctx context.Context, w io.Writer, commit, base string) error {
	for _, r := range []string{commit, base} {
		if err := s.commit(ctx, r); err != nil {
			return err
		}
	}
	if err := s.git.run(ctx, strings.NewReader(commit+"\n^"+base+"\n"), w, "pack-objects", "--revs", "--stdout", "-q"); err != nil {
		return fmt.Errorf("pack %s: %w", commit, err)
	}
	return nil
}

func (s *Store) create(ctx context.Context, revision string) error {
	if _, err := os.Stat(filepath.Join(s.dir, "HEAD")); err == nil {
		return nil
	}
	if err := initBare(ctx, s.dir, formatOf(revision), "main"); err != nil {
		return fmt.Errorf("create object store: %w", err)
	}
	return nil
}

// bases returns the revisions whose history is not here.
func (s *Store) bases() (map[string]bool, error) {
	marks, err := os.ReadFile(filepath.Join(s.dir, "shallow"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read shallow marks: %w", err)
	}
	all := map[string]bool{}
	for line := range strings.SplitSeq(string(marks), "\n") {
		if line != "" {
			all[line] = true
		}
	}
	return all, nil
}

// markShallow tells git that the history before revision is not here.
func (s *Store) markShallow(revision string) error {
	all, err := s.bases()
	if err != nil || all[revision] {
		return err
	}
	all[revision] = true
	text := strings.Join(slices.Sorted(maps.Keys(all)), "\n") + "\n"
	if err := writeDurable(filepath.Join(s.dir, "shallow"), []byte(text)); err != nil {
		return fmt.Errorf("mark %s as shallow: %w", revision, err)
	}
	return nil
}

func (s *Store) index(ctx context.Context, pack io.Reader) error {
	return s.git.run(ctx, pack, io.Discard, indexPack()...)
}

// indexPack refuses malformed and dangerous objects (a tree that holds .git, a
// .gitmodules that runs a command), and tolerates what old, harmless history
// is known to hold.
func indexPack() []string {
	return []string{"index-pack", "--stdin", "--fsck-objects", "--max-input-size=" + maxPack,
		"--strict=zeroPaddedFilemode=ignore,missingSpaceBeforeDate=ignore,badTimezone=ignore,badDate=ignore,badDateOverflow=ignore,missingEmail=ignore,missingNameBeforeEmail=ignore,badEmail=ignore,badName=ignore,nullSha1=error"}
}

func (s *Store) commit(ctx context.Context, revision string) error {
	return isCommit(ctx, s.git, revision)
}

func isCommit(ctx context.Context, git command, revision string) error {
	if !revisionPattern.MatchString(revision) {
		return fmt.Errorf("revision %q: not a full commit id of 40 or 64 lowercase hex characters", revision)
	}
	kind, err := git.line(ctx, "cat-file", "-t", revision)
	if err != nil {
		return fmt.Errorf("revision %s is not in the store: %w", revision, err)
	}
	if kind != "commit" {
		return fmt.Errorf("revision %s is a %s, not a commit", revision, kind)
	}
	return nil
}

func (s *Store) complete(ctx context.Context, revision string) error {
	if err := s.commit(ctx, revision); err != nil {
		return err
	}
	if err := s.git.run(ctx, nil, io.Discard, "rev-list", "--objects", "--no-walk", "--quiet", revision); err != nil {
		return fmt.Errorf("objects of %s are missing: %w", revision, err)
	}
	return nil
}

func formatOf(id string) string {
	if len(id) == 64 {
		return "sha256"
	}
	return "sha1"
}

func newHash(format string) hash.Hash {
	if format == "sha256" {
		return sha256.New()
	}
	return sha1.New()
}

// initBare makes a bare repository with nothing from any template.
func initBare(ctx context.Context, dir, format, branch string) error {
	return command{}.run(ctx, nil, io.Discard, "init", "-q", "--bare", "--template=", "--object-format="+format, "--initial-branch="+branch, "--", dir)
}

// writeDurable replaces path so that after a crash it holds the old or the new
// content, never a part.
func writeDurable(path string, content []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	if _, err := f.Write(content); err != nil {
		f.Close()
		return err
	}
	if err := f.Sync(); err != nil {
		f.Close()
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
