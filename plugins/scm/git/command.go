package git

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

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	gitTimeout = 15 * time.Minute
	maxOutput  = 128 << 20
	maxStderr  = 2 << 10
)

// settings override what any file configures.
var settings = []string{
	"core.hooksPath=/dev/null", "core.fsmonitor=false", "core.attributesFile=/dev/null", "core.excludesFile=/dev/null",
	"core.bigFileThreshold=32m", "core.fsync=all", "core.pager=cat", "core.quotePath=false", "protocol.allow=never",
	"safe.directory=*", "gc.auto=0", "maintenance.auto=false", "pack.threads=1", "pack.windowMemory=64m", "grep.threads=1",
	"merge.renames=true", "i18n.commitEncoding=UTF-8", "commit.gpgSign=false",
}

// command runs git on one bare repository with a fixed environment, without a
// shell.
type command struct {
	dir string
	env []string
}

func (c command) in(env ...string) command {
	c.env = append(append([]string(nil), c.env...), env...)
	return c
}

func (c command) run(ctx context.Context, stdin io.Reader, stdout io.Writer, args ...string) error {
	path, err := exec.LookPath("git")
	if err != nil {
		return errors.New("git is not installed: install git 2.38 or newer")
	}
	ctx, cancel := context.WithTimeout(ctx, gitTimeout)
	defer cancel()
	all := []string{"--no-pager", "--no-replace-objects", "--literal-pathspecs"}
	for _, s := range settings {
		all = append(all, "-c", s)
	}
	cmd := exec.CommandContext(ctx, path, append(all, args...)...)
	cmd.Dir = "/"
	cmd.Env = append([]string{
		"PATH=" + filepath.Dir(path) + ":/usr/local/bin:/usr/bin:/bin", "HOME=/nonexistent", "LC_ALL=C", "TZ=UTC",
		"GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_SYSTEM=/dev/null", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_ATTR_NOSYSTEM=1",
		"GIT_TERMINAL_PROMPT=0", "GIT_OPTIONAL_LOCKS=0", "GIT_NO_LAZY_FETCH=1", "GIT_ALLOW_PROTOCOL=",
		"GIT_EDITOR=false", "GIT_ASKPASS=false", "GIT_SSH_COMMAND=false",
	}, c.env...)
	if c.dir != "" {
		cmd.Env = append(cmd.Env, "GIT_DIR="+c.dir)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	stderr := &capped{left: maxStderr}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, stderr
	if err := cmd.Run(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return &gitError{verb: args[0], text: printable(stderr.String()), err: err}
	}
	return nil
}

// output returns all that git prints; more than maxOutput is an error.
func (c command) output(ctx context.Context, stdin io.Reader, args ...string) (string, error) {
	out := &bounded{left: maxOutput}
	err := c.run(ctx, stdin, out, args...)
	if out.over {
		return "", fmt.Errorf("git %s: output exceeds %d bytes", args[0], maxOutput)
	}
	return out.String(), err
}

func (c command) line(ctx context.Context, args ...string) (string, error) {
	out, err := c.output(ctx, nil, args...)
	return strings.TrimSuffix(out, "\n"), err
}

type gitError struct {
	verb, text string
	err        error
}

func (e *gitError) Error() string { return fmt.Sprintf("git %s: %v: %s", e.verb, e.err, e.text) }
func (e *gitError) Unwrap() error { return e.err }

// exited reports whether git ended by itself with this code.
func exited(err error, code int) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && exit.ExitCode() == code
}

// failed turns an unexpected failure into a status that names what was done.
func failed(doing string, err error) error {
	if _, ok := status.FromError(err); ok {
		return err
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return status.Errorf(codes.DeadlineExceeded, "%s: %v", doing, err)
	case errors.Is(err, context.Canceled):
		return status.Errorf(codes.Canceled, "%s: %v", doing, err)
	}
	return status.Errorf(codes.Internal, "%s: %v", doing, err)
}

func printable(s string) string {
	s = strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '\uFFFD'
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
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
