// Package worktree carries source between Git repositories and sandboxes: it
// mirrors a repository for the embedded forge, keeps the objects of one
// Change, lays a revision out for a work tree and turns the snapshot that
// comes back into a checked commit. The sandbox, execution and release
// contexts use it through the daemon; nothing in it trusts a repository's
// configuration, hooks, filters or names.
package worktree

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Bounds of one git process.
const (
	gitTimeout = 30 * time.Minute
	maxOutput  = 64 << 20
	maxStderr  = 4 << 10
)

// command runs git with a fixed environment and fixed settings. What a
// repository, a user or the machine configures (hooks, filters, fsmonitor,
// pagers, credential helpers, transports) has no effect.
type command struct {
	gitDir string
	env    []string
	// magic leaves pathspec magic on, for the one command that refuses to run
	// without; its paths must begin with "./".
	magic bool
}

// settings are given on the command line, which overrides every file.
var settings = []string{
	"core.hooksPath=/dev/null",
	"core.fsmonitor=false",
	"core.attributesFile=/dev/null",
	"core.excludesFile=/dev/null",
	"core.bigFileThreshold=32m",
	"core.fsync=all",
	"core.pager=cat",
	"core.quotePath=false",
	"protocol.allow=never",
	"safe.directory=*",
	"gc.auto=0",
	"maintenance.auto=false",
	"pack.threads=1",
	"pack.windowMemory=64m",
	"submodule.recurse=false",
	"advice.detachedHead=false",
}

func (c command) in(env ...string) command {
	c.env = append(append([]string(nil), c.env...), env...)
	return c
}

func (c command) prepare(ctx context.Context, args []string) (*exec.Cmd, *capped, error) {
	path, err := exec.LookPath("git")
	if err != nil {
		return nil, nil, fmt.Errorf("git is not installed: install git 2.38 or newer: %w", err)
	}
	all := []string{"--no-pager", "--no-replace-objects"}
	if !c.magic {
		all = append(all, "--literal-pathspecs")
	}
	for _, s := range settings {
		all = append(all, "-c", s)
	}
	cmd := exec.CommandContext(ctx, path, append(all, args...)...)
	cmd.Dir = "/"
	cmd.Env = append([]string{
		"PATH=" + filepath.Dir(path) + ":/usr/local/bin:/usr/bin:/bin",
		"HOME=/nonexistent",
		"LC_ALL=C",
		"GIT_CONFIG_NOSYSTEM=1",
		"GIT_CONFIG_SYSTEM=/dev/null",
		"GIT_CONFIG_GLOBAL=/dev/null",
		"GIT_ATTR_NOSYSTEM=1",
		"GIT_TERMINAL_PROMPT=0",
		"GIT_OPTIONAL_LOCKS=0",
		"GIT_NO_LAZY_FETCH=1",
		"GIT_ALLOW_PROTOCOL=",
		"GIT_EDITOR=false",
		"GIT_ASKPASS=false",
		"GIT_SSH_COMMAND=false",
	}, c.env...)
	if c.gitDir != "" {
		cmd.Env = append(cmd.Env, "GIT_DIR="+c.gitDir)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	stderr := &capped{left: maxStderr}
	cmd.Stderr = stderr
	return cmd, stderr, nil
}

// run streams in and out of one git process.
func (c command) run(ctx context.Context, stdin io.Reader, stdout io.Writer, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, gitTimeout)
	defer cancel()
	cmd, stderr, err := c.prepare(ctx, args)
	if err != nil {
		return err
	}
	cmd.Stdin, cmd.Stdout = stdin, stdout
	if err := cmd.Run(); err != nil {
		return &gitError{verb: args[0], text: stderr.String(), err: firstError(ctx.Err(), err)}
	}
	return nil
}

// output returns at most maxOutput bytes; more is an error, never a cut.
func (c command) output(ctx context.Context, stdin io.Reader, args ...string) ([]byte, error) {
	out := &bounded{left: maxOutput}
	if err := c.run(ctx, stdin, out, args...); err != nil {
		if out.over {
			return nil, fmt.Errorf("git %s: output exceeds %d bytes", args[0], maxOutput)
		}
		return nil, err
	}
	return out.Bytes(), nil
}

func (c command) line(ctx context.Context, args ...string) (string, error) {
	out, err := c.output(ctx, nil, args...)
	return strings.TrimSuffix(string(out), "\n"), err
}

// gitError is a failed git process with what it printed, made printable.
type gitError struct {
	verb string
	text string
	err  error
}

func (e *gitError) Error() string {
	text := strings.Join(strings.FieldsFunc(e.text, func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
	text = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '\uFFFD'
		}
		return r
	}, strings.ToValidUTF8(text, "\uFFFD"))
	if text == "" {
		return fmt.Sprintf("git %s: %v", e.verb, e.err)
	}
	return fmt.Sprintf("git %s: %v: %s", e.verb, e.err, text)
}

func (e *gitError) Unwrap() error { return e.err }

// exitCode returns the exit status of a git process that ended by itself.
func exitCode(err error) (int, bool) {
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode(), true
	}
	return 0, false
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// capped keeps the first bytes and forgets the rest.
type capped struct {
	bytes.Buffer
	left int
}

func (c *capped) Write(p []byte) (int, error) {
	n := min(len(p), c.left)
	c.left -= n
	c.Buffer.Write(p[:n])
	return len(p), nil
}

// bounded refuses more than its bound.
type bounded struct {
	bytes.Buffer
	left int
	over bool
}

func (b *bounded) Write(p []byte) (int, error) {
	if len(p) > b.left {
		b.over = true
		return 0, errors.New("too much output")
	}
	b.left -= len(p)
	return b.Buffer.Write(p)
}
