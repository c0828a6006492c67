package git

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Forge is the code host. Beside the plugin, which serves it, the owner of the
// data directory may use it for what no verb does: protect a branch, enter a
// review, report a check. It is safe for concurrent use, also by several
// processes.
type Forge struct {
	dir      string
	imported bool

	mu    sync.Mutex // guards repos
	repos map[string]*repository
}

// repository is one repository of the forge. Reads need no lock: refs and
// state files are replaced as a whole.
type repository struct {
	config RepositoryConfig
	git    command
	state  string // directory of pull requests, reviews, checks and protection

	mu sync.Mutex // held by writers, with the file lock
}

// Open returns the forge that keeps its repositories in dataDir, which must
// exist. A repository whose mirror is not there yet answers UNAVAILABLE.
func Open(ctx context.Context, dataDir string, c Config) (*Forge, error) {
	if !filepath.IsAbs(dataDir) {
		return nil, fmt.Errorf("open forge: data directory %q is not an absolute path", dataDir)
	}
	if info, err := os.Stat(dataDir); err != nil || !info.IsDir() {
		return nil, fmt.Errorf("open forge: data directory %q is not there", dataDir)
	}
	if err := checkGit(ctx); err != nil {
		return nil, fmt.Errorf("open forge: %w", err)
	}
	f := &Forge{dir: dataDir, imported: c.Imported, repos: map[string]*repository{}}
	for _, rc := range c.Repositories {
		if rc.Name == "" || len(rc.Name) > 256 {
			return nil, fmt.Errorf("open forge: repository name %q: 1 to 256 bytes", rc.Name)
		}
		if f.repos[rc.Name] != nil {
			return nil, fmt.Errorf("open forge: repository %q is configured twice", rc.Name)
		}
		for branch, p := range rc.Protection {
			if err := p.check(branch); err != nil {
				return nil, fmt.Errorf("open forge: repository %q: %w", rc.Name, err)
			}
		}
		f.add(rc)
	}
	return f, nil
}

// add takes a repository in; f.mu is held, or f is not shared yet.
func (f *Forge) add(c RepositoryConfig) *repository {
	r := &repository{
		config: c,
		git:    command{dir: Directory(f.dir, c.Name)},
		state:  filepath.Join(f.dir, escape(c.Name)+".forge"),
	}
	f.repos[c.Name] = r
	return r
}

// known returns a repository that is configured, or that was imported where
// that is enough; nil if it is neither.
func (f *Forge) known(name string) *repository {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r := f.repos[name]; r != nil {
		return r
	}
	if !f.imported || name == "" || len(name) > 256 {
		return nil
	}
	if _, err := os.Stat(filepath.Join(Directory(f.dir, name), "HEAD")); err != nil {
		return nil
	}
	return f.add(RepositoryConfig{Name: name})
}

// checkGit wants a git that can merge without a work tree.
func checkGit(ctx context.Context) error {
	version, err := command{}.line(ctx, "version")
	if err != nil {
		return err
	}
	var major, minor int
	if _, err := fmt.Sscanf(version, "git version %d.%d", &major, &minor); err != nil || major < 2 || major == 2 && minor < 38 {
		return fmt.Errorf("%s is too old: install git 2.38 or newer", version)
	}
	return nil
}

// repository returns one that can be read.
func (f *Forge) repository(name string) (*repository, error) {
	r := f.known(name)
	if r == nil {
		return nil, status.Errorf(codes.NotFound, "no repository %q", name)
	}
	switch _, err := os.Stat(filepath.Join(r.git.dir, "HEAD")); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, status.Errorf(codes.Unavailable, "repository %q has not been imported yet", name)
	case err != nil:
		return nil, status.Errorf(codes.Unavailable, "repository %q cannot be read: %v", name, err)
	}
	return r, nil
}

// lock admits one writer at a time, in this process and in others.
func (r *repository) lock() (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Join(r.state, "pulls"), 0o700); err != nil {
		return nil, fmt.Errorf("lock repository: %w", err)
	}
	r.mu.Lock()
	file, err := os.OpenFile(filepath.Join(r.state, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil {
		if err = unix.Flock(int(file.Fd()), unix.LOCK_EX); err != nil {
			file.Close()
		}
	}
	if err != nil {
		r.mu.Unlock()
		return nil, fmt.Errorf("lock repository: %w", err)
	}
	r.sweep()
	return func() {
		file.Close() // gives the file lock back
		r.mu.Unlock()
	}, nil
}

// sweep removes what killed processes left: the quarantines of writers, since
// the lock says that none is at work, and the scratch space of readers once it
// is older than any of them.
func (r *repository) sweep() {
	entries, err := os.ReadDir(r.state)
	if err != nil {
		return // the next writer sweeps
	}
	for _, e := range entries {
		info, err := e.Info()
		abandoned := strings.HasPrefix(e.Name(), "quarantine-") ||
			strings.HasPrefix(e.Name(), "scratch-") && err == nil && time.Since(info.ModTime()) > 2*gitTimeout
		if abandoned {
			os.RemoveAll(filepath.Join(r.state, e.Name()))
		}
	}
}

// staleLock is the age at which the lock that a killed git left on a ref is
// taken for abandoned. A ref is written in milliseconds.
const staleLock = 30 * time.Second

// unlockRef removes an abandoned lock of a branch and reports whether it did.
func (r *repository) unlockRef(branch string) bool {
	lock := filepath.Join(r.git.dir, "refs", "heads", filepath.FromSlash(branch)+".lock")
	info, err := os.Lstat(lock)
	if err != nil || !info.Mode().IsRegular() || time.Since(info.ModTime()) < staleLock {
		return false
	}
	return os.Remove(lock) == nil
}

// write is lock for a repository that takes writes.
func (f *Forge) write(name string) (*repository, func(), error) {
	r, err := f.repository(name)
	if err != nil {
		return nil, nil, err
	}
	if r.config.Archived {
		return nil, nil, status.Errorf(codes.FailedPrecondition, "repository %q is archived", name)
	}
	unlock, err := r.lock()
	if err != nil {
		return nil, nil, failed("write", err)
	}
	return r, unlock, nil
}

// tip returns the commit at a branch's tip; ok is false if there is no such
// branch.
func (r *repository) tip(ctx context.Context, branch string) (revision string, ok bool, err error) {
	revision, err = r.git.line(ctx, "rev-parse", "--verify", "--quiet", "--end-of-options", "refs/heads/"+branch)
	switch {
	case exited(err, 1):
		return "", false, nil
	case err != nil:
		return "", false, failed("read branch", err)
	case !revisionPattern.MatchString(revision):
		return "", false, status.Errorf(codes.Internal, "read branch: git answers %q", revision)
	}
	return revision, true, nil
}

func (r *repository) mustTip(ctx context.Context, branch string) (string, error) {
	revision, ok, err := r.tip(ctx, branch)
	if err == nil && !ok {
		err = status.Errorf(codes.NotFound, "no branch %q", branch)
	}
	return revision, err
}

// mustCommit refuses what is no commit of the repository.
func (r *repository) mustCommit(ctx context.Context, revision string) error {
	kind, err := r.git.line(ctx, "cat-file", "-t", revision)
	if err != nil || kind != "commit" {
		if ctx.Err() != nil {
			return failed("read revision", ctx.Err())
		}
		return status.Errorf(codes.NotFound, "no revision %s", revision)
	}
	return nil
}

func (r *repository) defaultBranch(ctx context.Context) (string, error) {
	ref, err := r.git.line(ctx, "symbolic-ref", "--quiet", "HEAD")
	if err != nil {
		return "", failed("read default branch", err)
	}
	return strings.TrimPrefix(ref, "refs/heads/"), nil
}

// move makes a branch stand at revision if it stands at old; an empty old means
// that it must not exist.
func (r *repository) move(ctx context.Context, branch, revision, old string) error {
	if old == "" {
		old = strings.Repeat("0", len(revision))
	}
	update := func() error {
		return r.git.run(ctx, nil, &capped{}, "update-ref", "--no-deref", "--end-of-options", "refs/heads/"+branch, revision, old)
	}
	err := update()
	if err != nil && r.unlockRef(branch) {
		err = update()
	}
	if err == nil {
		return nil
	}
	now, ok, tipErr := r.tip(ctx, branch)
	switch {
	case tipErr != nil:
		return tipErr
	case ok && now == revision:
		return nil
	case ok && now != old:
		return status.Errorf(codes.FailedPrecondition, "branch %q moved to %s", branch, now)
	case !ok && old == strings.Repeat("0", len(old)):
		// A branch "a" and a branch "a/b" cannot both be.
		return status.Errorf(codes.FailedPrecondition, "branch %q cannot be made: %v", branch, err)
	}
	if _, lockErr := os.Lstat(filepath.Join(r.git.dir, "refs", "heads", filepath.FromSlash(branch)+".lock")); lockErr == nil {
		return status.Errorf(codes.Unavailable, "branch %q is locked by another git process: try again", branch)
	}
	return failed("move branch", err)
}

// saveJSON replaces a file; after a crash it holds the old or the new state.
func saveJSON(path string, v any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", " ")
	if err := enc.Encode(v); err != nil {
		return err
	}
	return writeDurable(path, b.Bytes(), 0o600)
}

// loadJSON reports false if there is no file.
func loadJSON(path string, v any) (bool, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return false, fmt.Errorf("%s is damaged: %w", filepath.Base(path), err)
	}
	return true, nil
}

func writeDurable(path string, content []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(content)
	if err := errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
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
