package local

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Bounds of what one operation may leave.
const (
	maxLog       = 16 << 20
	maxArtifact  = 64 << 20
	maxAll       = 256 << 20
	maxArtifacts = 1000
	maxDetail    = 1024
)

// errCancelled is the cause with which a cancelled operation's context ends.
var errCancelled = errors.New("cancelled")

// runOperation carries one operation from queued to its end. It owns the
// operation's directory and checkout until then.
func (s *server) runOperation(ctx context.Context, o operation) {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		s.finish(o, stateCancelled, "cancelled before it began")
		return
	}
	o.State, o.Started = stateRunning, time.Now().UTC()
	if err := s.save(o); err != nil {
		s.finish(o, stateFailed, err.Error())
		return
	}
	work := filepath.Join(s.data, "work", o.Name)
	defer os.RemoveAll(work)
	log, err := openLog(filepath.Join(s.dir(o.Name), "log"))
	if err != nil {
		s.finish(o, stateFailed, err.Error())
		return
	}
	state, detail := s.steps(ctx, o, work, log)
	if state == stateSucceeded {
		if o.Artifacts, err = s.collect(o, filepath.Join(work, "src")); err != nil {
			state, detail = stateFailed, "keep the artifacts: "+err.Error()
		}
	}
	if err := log.close(); err != nil && state == stateSucceeded {
		state, detail = stateFailed, "keep the log: "+err.Error()
	}
	s.finish(o, state, detail)
}

func (s *server) finish(o operation, state, detail string) {
	detail = strings.ToValidUTF8(detail, "\uFFFD")
	o.State, o.Detail, o.Finished = state, strings.ToValidUTF8(detail[:min(len(detail), maxDetail)], ""), time.Now().UTC()
	if err := s.save(o); err != nil {
		// Nothing better is left than to say so; on the next start it is found
		// running without a runner and fails.
		fmt.Fprintln(os.Stderr, "ciexecutor/local:", err)
	}
}

// steps makes the checkout and runs the pipeline's steps in it.
func (s *server) steps(ctx context.Context, o operation, work string, log *logFile) (state, detail string) {
	src, home := filepath.Join(work, "src"), filepath.Join(work, "home")
	for _, d := range []string{src, home} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return stateFailed, err.Error()
		}
	}
	if err := s.checkout(ctx, o, work, src); err != nil {
		if ctx.Err() != nil {
			return stateCancelled, "cancelled during checkout"
		}
		return stateFailed, "checkout: " + err.Error()
	}
	for _, step := range s.config.Pipelines[o.Pipeline].Steps {
		fmt.Fprintf(log, "== %s\n", step.Name)
		err := runStep(ctx, step, src, s.environment(o, home), log)
		switch {
		case errors.Is(context.Cause(ctx), errCancelled):
			return stateCancelled, "cancelled at step " + step.Name
		case ctx.Err() != nil:
			return stateFailed, "the CI was stopped at step " + step.Name
		case errors.Is(err, context.DeadlineExceeded):
			return stateTimedOut, fmt.Sprintf("step %s was not done after %v", step.Name, step.timeout)
		case err != nil:
			return stateFailed, fmt.Sprintf("step %s: %v", step.Name, err)
		}
	}
	return stateSucceeded, ""
}

// runStep runs one command with everything it starts and ends all of it.
func runStep(ctx context.Context, step Step, dir string, env []string, log io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, step.timeout)
	defer cancel()
	// The kernel ends the command with the thread that started it, so that
	// nothing of a step outlives this process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, step.Argv[0], step.Argv[1:]...)
	if !strings.Contains(step.Argv[0], "/") {
		// The search path is that of the step, not of this process.
		for _, v := range env {
			if list, ok := strings.CutPrefix(v, "PATH="); ok {
				cmd.Path, cmd.Err = lookUp(step.Argv[0], list)
			}
		}
	}
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = dir, env, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second
	if err := cmd.Start(); err != nil {
		return err
	}
	err := cmd.Wait()
	// What the command left in the background ends with it.
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		return nil // it ended well; a child of it held its output open
	}
	return err
}

func lookUp(name, list string) (string, error) {
	for _, dir := range filepath.SplitList(list) {
		full := filepath.Join(dir, name)
		if st, err := os.Stat(full); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return full, nil
		}
	}
	return name, fmt.Errorf("%q: %w", name, exec.ErrNotFound)
}

func (s *server) environment(o operation, home string) []string {
	env := map[string]string{
		"PATH": "/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "CI": "true",
	}
	maps.Copy(env, s.config.Environment)
	maps.Copy(env, map[string]string{
		"CI_PIPELINE": o.Pipeline, "CI_REPOSITORY": o.Repository, "CI_REVISION": o.Revision, "CI_OPERATION": o.Name,
	})
	for name, value := range o.Parameters {
		env["CI_PARAM_"+name] = value
	}
	var out []string
	for _, name := range slices.Sorted(maps.Keys(env)) {
		out = append(out, name+"="+env[name])
	}
	return out
}

// checkout writes the revision's tree to src. It reads the repository only: the
// index lies beside the checkout, and nothing that the repository or the tree
// could configure runs. It is not git archive, which leaves out what the tree's
// own attributes tell it to.
func (s *server) checkout(ctx context.Context, o operation, work, src string) error {
	run := func(args ...string) error {
		_, err := s.git(ctx, o.Repository, []string{"GIT_INDEX_FILE=" + filepath.Join(work, "index"), "GIT_WORK_TREE=" + src}, args...)
		return err
	}
	if err := run("read-tree", o.Revision+"^{tree}"); err != nil {
		return err
	}
	return run("checkout-index", "--all", "--force")
}

// git runs the git program on a configured repository.
func (s *server) git(ctx context.Context, repository string, env []string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	dir := s.config.Repositories[repository]
	cmd := exec.CommandContext(ctx, "git", append([]string{
		"-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "core.attributesFile=/dev/null",
		"-c", "protocol.allow=never", "-c", "safe.directory=*", "-c", "gc.auto=0", "-c", "core.autocrlf=false",
	}, args...)...)
	cmd.Dir = "/"
	cmd.Env = append([]string{
		"PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C", "HOME=/nonexistent", "GIT_DIR=" + dir, "GIT_CONFIG_NOSYSTEM=1",
		"GIT_CONFIG_GLOBAL=/dev/null", "GIT_NO_REPLACE_OBJECTS=1", "GIT_OPTIONAL_LOCKS=0", "GIT_TERMINAL_PROMPT=0", "GIT_ATTR_NOSYSTEM=1",
		"GIT_LFS_SKIP_SMUDGE=1",
	}, env...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		text := strings.TrimSpace(errs.String())
		return "", fmt.Errorf("git %s: %w: %s", args[0], err, text[:min(len(text), 512)])
	}
	return strings.TrimSpace(out.String()), nil
}

// collect keeps the files that the pipeline names, under their digests.
func (s *server) collect(o operation, src string) ([]artifact, error) {
	pipeline := s.config.Pipelines[o.Pipeline]
	if len(pipeline.Artifacts) == 0 {
		return nil, nil
	}
	root, err := os.OpenRoot(src)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	var names []string
	err = fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.Type().IsRegular() && pipeline.matches(name) {
			names = append(names, name)
		}
		if len(names) > maxArtifacts {
			return fmt.Errorf("more than %d files match", maxArtifacts)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	dir := filepath.Join(s.dir(o.Name), "artifacts")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	var out []artifact
	var total int64
	for _, name := range names {
		if len(name) > 512 {
			return nil, fmt.Errorf("the name %.60q... is longer than 512 bytes", name)
		}
		f, err := root.Open(name)
		if err != nil {
			return nil, err
		}
		b, err := io.ReadAll(io.LimitReader(f, maxArtifact+1))
		f.Close()
		if err != nil {
			return nil, err
		}
		if total += int64(len(b)); len(b) > maxArtifact || total > maxAll {
			return nil, fmt.Errorf("%s: an artifact may have %d bytes, all together %d", name, maxArtifact, maxAll)
		}
		sum := sha256.Sum256(b)
		a := artifact{Name: strings.ToValidUTF8(name, "\uFFFD"), Digest: "sha256:" + hex.EncodeToString(sum[:]), Size: int64(len(b))}
		if err := writeSynced(filepath.Join(dir, hex.EncodeToString(sum[:])), b); err != nil {
			return nil, err
		}
		out = append(out, a)
	}
	return out, syncDir(dir)
}

// logFile takes what steps print, up to a bound, and never holds them up.
type logFile struct {
	mu   sync.Mutex // guards f and left
	f    *os.File
	left int
}

func openLog(path string) (*logFile, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the log: %w", err)
	}
	return &logFile{f: f, left: maxLog}, nil
}

func (l *logFile) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.left <= 0 {
		return len(p), nil
	}
	part := p[:min(len(p), l.left)]
	l.left -= len(part)
	_, err := l.f.Write(part)
	if l.left <= 0 && err == nil {
		_, err = l.f.WriteString("\n== the log is longer and was cut here\n")
	}
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

func (l *logFile) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return errors.Join(l.f.Sync(), l.f.Close())
}
