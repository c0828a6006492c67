package worktree

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// The faults of a source repository that a person can mend.
var (
	ErrNotRepository = errors.New("not a Git repository")
	ErrNoCommits     = errors.New("repository has no commit")
	ErrNoBranch      = errors.New("no such branch")
	ErrMissing       = errors.New("objects are missing in the source repository")
)

// source is a repository of the user's. Only refs and objects are read from
// it: its objects through a repository of the host's own, so that nothing its
// configuration names is ever run.
type source struct {
	path    string // as given, made absolute
	gitDir  string
	objects string
	format  string
	git     command // on the source; used for refs only
}

func openSource(ctx context.Context, path string) (*source, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("open source repository: %w", err)
	}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	switch info, err := os.Stat(path); {
	case err != nil:
		return nil, fmt.Errorf("open source repository: %w", err)
	case !info.IsDir():
		return nil, fmt.Errorf("open source repository %q: %w: it is a file", path, ErrNotRepository)
	}
	probe := command{env: []string{"GIT_CEILING_DIRECTORIES=" + filepath.Dir(path)}}
	out, err := probe.line(ctx, "-C", path, "rev-parse", "--absolute-git-dir", "--show-object-format")
	gitDir, format, ok := strings.Cut(out, "\n")
	if err != nil || !ok {
		return nil, fmt.Errorf("open source repository %q: %w: name the top directory of a repository, or run `git init` and commit first", path, ErrNotRepository)
	}
	src := &source{path: path, gitDir: gitDir, format: format, git: command{gitDir: gitDir}}
	if src.objects, err = src.git.line(ctx, "rev-parse", "--path-format=absolute", "--git-path", "objects"); err != nil {
		return nil, fmt.Errorf("open source repository %q: %w", path, err)
	}
	return src, nil
}

// resolve returns the branch and the commit at its tip; an empty name stands
// for the branch that is checked out.
func (s *source) resolve(ctx context.Context, branch string) (name, revision string, err error) {
	refs, err := s.git.output(ctx, nil, "for-each-ref", "--format=%(refname)", "refs/heads/")
	if err != nil {
		return "", "", fmt.Errorf("read branches of %q: %w", s.path, err)
	}
	if len(bytes.TrimSpace(refs)) == 0 {
		return "", "", fmt.Errorf("source repository %q: %w: commit something first", s.path, ErrNoCommits)
	}
	names := strings.Split(strings.TrimSpace(strings.ReplaceAll(string(refs), "refs/heads/", "")), "\n")
	if branch == "" {
		head, err := s.git.line(ctx, "symbolic-ref", "--quiet", "HEAD")
		if err != nil {
			return "", "", fmt.Errorf("source repository %q: no branch is checked out: name one of %s", s.path, some(names))
		}
		branch = strings.TrimPrefix(head, "refs/heads/")
	}
	if err := checkBranch(branch); err != nil {
		return "", "", err
	}
	revision, err = s.git.line(ctx, "rev-parse", "--verify", "--quiet", "--end-of-options", "refs/heads/"+branch)
	if err != nil || !revisionPattern.MatchString(revision) {
		return "", "", fmt.Errorf("source repository %q: %w %q: it has %s", s.path, ErrNoBranch, branch, some(names))
	}
	return branch, revision, nil
}

func some(names []string) string {
	const most = 10
	if len(names) > most {
		return fmt.Sprintf("%q and %d more", names[:most], len(names)-most)
	}
	return fmt.Sprintf("%q", names)
}

var branchPattern = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.+=@#-]*(/[A-Za-z0-9_][A-Za-z0-9_.+=@#-]*)*$`)

// checkBranch accepts the branch names that Git, every code host and every
// file system take alike.
func checkBranch(name string) error {
	if len(name) > 200 || !branchPattern.MatchString(name) || strings.Contains(name, "..") || strings.Contains(name, "@{") {
		return fmt.Errorf("branch %q: at most 200 letters, digits and _ . + = @ # - in segments that begin with a letter, digit or _", name)
	}
	for segment := range strings.SplitSeq(name, "/") {
		if strings.HasSuffix(segment, ".lock") || strings.HasSuffix(segment, ".") {
			return fmt.Errorf("branch %q: a segment ends in .lock or a dot", name)
		}
	}
	return nil
}

// shallow returns the marks of a source whose history is cut.
func (s *source) shallow(ctx context.Context) ([]byte, error) {
	path, err := s.git.line(ctx, "rev-parse", "--path-format=absolute", "--git-path", "shallow")
	if err != nil {
		return nil, err
	}
	marks, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return marks, err
}

// Imported is what Import found.
type Imported struct {
	Branch   string
	Revision string
	Format   string // "sha1" or "sha256"
	// Uncommitted counts changed, staged and untracked paths of the source's
	// work tree, none of which are imported; -1 if they could not be counted.
	Uncommitted int
}

// Import makes dest, which must not exist, a bare repository that holds one
// branch of the repository at path with its history; an empty branch is the
// one checked out. Nothing is written to the source, and its hooks, filters,
// helpers and transports are never run. A crash leaves no dest.
func Import(ctx context.Context, path, dest, branch string) (Imported, error) {
	if !filepath.IsAbs(dest) {
		return Imported{}, fmt.Errorf("import to %q: not an absolute path", dest)
	}
	if _, err := os.Lstat(dest); !errors.Is(err, fs.ErrNotExist) {
		return Imported{}, fmt.Errorf("import to %q: it exists already", dest)
	}
	src, err := openSource(ctx, path)
	if err != nil {
		return Imported{}, err
	}
	branch, revision, err := src.resolve(ctx, branch)
	if err != nil {
		return Imported{}, err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dest), ".import-*")
	if err != nil {
		return Imported{}, fmt.Errorf("import: %w", err)
	}
	defer os.RemoveAll(tmp)
	if err := src.copyTo(ctx, tmp, branch, revision); err != nil {
		return Imported{}, fmt.Errorf("import branch %q of %q: %w", branch, src.path, err)
	}
	if err := os.Chmod(tmp, 0o700); err != nil {
		return Imported{}, fmt.Errorf("import: %w", err)
	}
	if err := os.Rename(tmp, dest); err != nil {
		return Imported{}, fmt.Errorf("import: %w", err)
	}
	if err := syncDir(filepath.Dir(dest)); err != nil {
		return Imported{}, fmt.Errorf("import: %w", err)
	}
	return Imported{Branch: branch, Revision: revision, Format: src.format, Uncommitted: src.uncommitted(ctx)}, nil
}

func (s *source) copyTo(ctx context.Context, dir, branch, revision string) error {
	if err := initBare(ctx, dir, s.format, branch); err != nil {
		return err
	}
	marks, err := s.shallow(ctx)
	if err != nil {
		return fmt.Errorf("read shallow marks: %w", err)
	}
	if len(marks) > 0 {
		if err := writeDurable(filepath.Join(dir, "shallow"), marks); err != nil {
			return err
		}
	}
	dest := command{gitDir: dir}
	if err := transfer(ctx, dest.in(alternates(s.objects)...), dest, revision+"\n"); err != nil {
		return err
	}
	return dest.run(ctx, nil, io.Discard, "update-ref", "--end-of-options", "refs/heads/"+branch, revision)
}

// alternates lets a command read the objects of another repository.
func alternates(objects string) []string {
	quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(objects) + `"`
	return []string{"GIT_ALTERNATE_OBJECT_DIRECTORIES=" + quoted}
}

// transfer streams a pack of the revisions wanted from one command's objects
// to another's, where it is checked.
func transfer(ctx context.Context, from, to command, revisions string) error {
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := from.run(ctx, strings.NewReader(revisions), w, "pack-objects", "--revs", "--stdout", "-q", "--delta-base-offset")
		w.CloseWithError(err)
		packed <- err
	}()
	indexed := to.run(ctx, r, io.Discard, indexPack()...)
	r.CloseWithError(errors.New("the receiving side ended"))
	if err := <-packed; err != nil {
		if code, ok := exitCode(err); ok && code == 128 && indexed != nil {
			return fmt.Errorf("%w (a partial clone or a damaged repository; run `git fsck` there): %w", ErrMissing, err)
		}
		return firstError(err, indexed)
	}
	return indexed
}

// uncommitted counts what differs from the commit that is checked out. It
// works on a copy of the index, in a repository of its own whose objects come
// from the source, so that no filter of the source runs and no index is
// refreshed.
func (s *source) uncommitted(ctx context.Context) int {
	const unknown = -1
	bare, err := s.git.line(ctx, "rev-parse", "--is-bare-repository")
	if err != nil {
		return unknown
	}
	if bare == "true" {
		return 0
	}
	head, err := s.git.line(ctx, "rev-parse", "--verify", "--quiet", "HEAD")
	if err != nil {
		return unknown
	}
	tmp, err := os.MkdirTemp("", "numinance-status-*")
	if err != nil {
		return unknown
	}
	defer os.RemoveAll(tmp)
	if err := initBare(ctx, tmp, s.format, "main"); err != nil {
		return unknown
	}
	index, err := s.git.line(ctx, "rev-parse", "--path-format=absolute", "--git-path", "index")
	if err != nil {
		return unknown
	}
	content, err := os.ReadFile(index)
	if err != nil {
		return unknown
	}
	exclude, err := s.git.line(ctx, "rev-parse", "--path-format=absolute", "--git-path", "info/exclude")
	if err != nil {
		return unknown
	}
	for name, text := range map[string][]byte{"HEAD": []byte(head + "\n"), "index": content} {
		if err := os.WriteFile(filepath.Join(tmp, name), text, 0o600); err != nil {
			return unknown
		}
	}
	status := command{gitDir: tmp}.in(append(alternates(s.objects), "GIT_WORK_TREE="+s.path)...)
	out, err := status.output(ctx, nil, "-C", s.path, "-c", "core.bare=false", "-c", "core.excludesFile="+exclude,
		"status", "--porcelain", "-z", "--untracked-files=normal", "--ignore-submodules=all", "--no-renames")
	if err != nil {
		return unknown
	}
	return bytes.Count(out, []byte{0})
}

// PushBack makes branch, which must begin with "numi/", stand at revision in
// the repository at path, with the objects it needs from the bare repository.
// No other ref, no index and no work tree of the source is touched, and no
// hook runs. A branch that already stands elsewhere is refused, never moved.
func PushBack(ctx context.Context, bare, path, revision, branch string) error {
	if err := checkBranch(branch); err != nil {
		return err
	}
	if !strings.HasPrefix(branch, "numi/") {
		return fmt.Errorf("push back to %q: the branch must begin with numi/", branch)
	}
	if !filepath.IsAbs(bare) {
		return fmt.Errorf("push back from %q: not an absolute path", bare)
	}
	src, err := openSource(ctx, path)
	if err != nil {
		return err
	}
	from := command{gitDir: bare}
	if err := isCommit(ctx, from, revision); err != nil {
		return fmt.Errorf("push back: %w", err)
	}
	if len(revision) != idLength(src.format) {
		return fmt.Errorf("push back: the source repository uses %s objects, the revision does not", src.format)
	}
	ref := "refs/heads/" + branch
	switch now, err := src.git.line(ctx, "rev-parse", "--verify", "--quiet", "--end-of-options", ref); {
	case err == nil && now == revision:
		return nil
	case err == nil:
		return fmt.Errorf("push back: branch %q of %q stands at %s: delete it or use another name", branch, src.path, now)
	}
	have, err := src.known(ctx, from)
	if err != nil {
		return fmt.Errorf("push back: %w", err)
	}
	if err := transfer(ctx, from, src.git, revision+"\n"+have); err != nil {
		return fmt.Errorf("push back to %q: %w", src.path, err)
	}
	zero := strings.Repeat("0", len(revision))
	if err := src.git.run(ctx, nil, io.Discard, "update-ref", "--end-of-options", ref, revision, zero); err != nil {
		return fmt.Errorf("push back to %q: %w", src.path, err)
	}
	return nil
}

func idLength(format string) int {
	if format == "sha256" {
		return 64
	}
	return 40
}

// known returns the tips of the source that the other repository has too, as
// exclusions for pack-objects.
func (s *source) known(ctx context.Context, other command) (string, error) {
	tips, err := s.git.output(ctx, nil, "for-each-ref", "--format=%(objectname)", "refs/heads/", "HEAD")
	if err != nil {
		return "", err
	}
	kinds, err := other.output(ctx, bytes.NewReader(tips), "cat-file", "--batch-check=%(objectname) %(objecttype)")
	if err != nil {
		return "", err
	}
	var have strings.Builder
	for line := range strings.SplitSeq(string(kinds), "\n") {
		if id, kind, _ := strings.Cut(line, " "); kind == "commit" {
			have.WriteString("^" + id + "\n")
		}
	}
	return have.String(), nil
}
