package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	sandboxproviderv1 "github.com/numinance/numinance/gen/numinance/ports/sandboxprovider/v1"
	"github.com/numinance/numinance/sdk"
)

// box is one sandbox. Its exported fields are kept on disk, so that a later
// process can call the runtime with the same flags to remove it.
type box struct {
	ID      string `json:"id"`
	Key     string `json:"key"`
	Request string `json:"request"`
	Disk    int64  `json:"disk"`
	Link    bool   `json:"link"`

	dir       string
	snapshots sync.Mutex // one pause at a time

	mu      sync.Mutex // guards the rest; held while the sandbox is made or removed
	ready   bool
	ended   bool
	pid     int
	limit   string // what it was killed for
	output  int64
	scratch []string
	env     map[string]string
	over    chan struct{} // closed by Destroy
	execs   map[string]*process
}

// usable says why the sandbox cannot be used, if so.
func (b *box) usable() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.ended || !b.ready:
		return status.Errorf(codes.FailedPrecondition, "sandbox %s was destroyed", b.ID)
	case b.limit != "":
		return status.Errorf(codes.FailedPrecondition, "sandbox %s was ended: it reached its %s limit", b.ID, b.limit)
	}
	return nil
}

// remove ends everything of the box on this host. It succeeds if nothing was
// there.
func (p *provider) remove(ctx context.Context, b *box) error {
	if _, err := os.Lstat(b.dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	pid, _ := p.rt.state(ctx, b)
	if pid == 0 {
		pid = b.pid
	}
	err := p.rt.run(ctx, b, "delete", "-force", b.ID)
	if err != nil {
		// Unknown to the runtime is what is wanted; a living process is not.
		if still, _ := p.rt.state(ctx, b); still != 0 {
			return err
		}
	}
	if pid > 0 && isSandbox(pid, b.ID) {
		if kerr := syscall.Kill(pid, syscall.SIGKILL); kerr != nil && !errors.Is(kerr, syscall.ESRCH) {
			return errors.Join(err, kerr)
		}
	}
	if err := os.RemoveAll(b.dir); err != nil {
		return fmt.Errorf("remove the sandbox's directory: %w", err)
	}
	return nil
}

// isSandbox reports whether a host process is still this sandbox's kernel; pids
// are used again.
func isSandbox(pid int, id string) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
	args := strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")
	return err == nil && strings.HasPrefix(filepath.Base(args[0]), "runsc") && slices.Contains(args, id)
}

// process is one Exec. It is done once its exit and output are known.
type process struct {
	name     string
	out, err *capture
	done     chan struct{}

	// Written before done is closed.
	exit   int32
	signal uint32
	limit  string

	mu             sync.Mutex // guards the references
	stdout, stderr *pluginv1.BlobRef
}

func userOf(u sandboxproviderv1.SandboxUser) (uid int, home string, err error) {
	switch u {
	case sandboxproviderv1.SandboxUser_SANDBOX_USER_AGENT:
		return uidAgent, "/home/agent", nil
	case sandboxproviderv1.SandboxUser_SANDBOX_USER_CANDIDATE:
		return uidCandidate, "/home/candidate", nil
	case sandboxproviderv1.SandboxUser_SANDBOX_USER_ADAPTER:
		return uidAdapter, "/home/adapter", nil
	default:
		return 0, "", status.Errorf(codes.InvalidArgument, "user %v may not run anything", u)
	}
}

// Exec implements P-142: the same key starts the process once.
func (p *provider) Exec(ctx context.Context, r *sandboxproviderv1.ExecRequest) (*sandboxproviderv1.ExecResponse, error) {
	b, err := p.find(r.GetSandbox())
	if err != nil {
		return nil, err
	}
	if err := b.usable(); err != nil {
		return nil, err
	}
	uid, home, err := userOf(r.GetUser())
	if err != nil {
		return nil, err
	}
	name := "exec-" + hashOf([]byte(sdk.Action(ctx).GetIdempotencyKey()))[:24]
	var input string
	if r.GetStdin().GetDigest() != "" {
		input = filepath.Join(b.dir, name+"-"+randomHex()+".in")
		if err := p.fetch(ctx, r.GetStdin(), input); err != nil {
			return nil, err
		}
		defer os.Remove(input)
	}

	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended {
		return nil, status.Errorf(codes.FailedPrecondition, "sandbox %s was destroyed", b.ID)
	}
	if _, ok := b.execs[name]; ok {
		return &sandboxproviderv1.ExecResponse{Process: name}, nil
	}
	args := []string{"exec", "-internal-pid-file", filepath.Join(b.dir, name+".pid"),
		"-user", fmt.Sprintf("%d:%d", uid, uid), "-cwd", r.GetWorkingDirectory()}
	env := map[string]string{"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": home}
	maps.Copy(env, b.env)
	maps.Copy(env, r.GetEnvironment())
	for _, k := range slices.Sorted(maps.Keys(env)) {
		args = append(args, "-env", k+"="+env[k])
	}
	args = append(append(args, b.ID), r.GetArgv()...)
	proc, err := p.startExec(b, name, args, input, r.GetTimeout().AsDuration())
	if err != nil {
		return nil, status.Errorf(codes.Internal, "exec: %v", err)
	}
	b.execs[name] = proc
	return &sandboxproviderv1.ExecResponse{Process: name}, nil
}

func (p *provider) startExec(b *box, name string, args []string, input string, timeout time.Duration) (*process, error) {
	proc := &process{name: name, done: make(chan struct{})}
	cmd := p.rt.command(context.Background(), b, args...)
	if input != "" {
		f, err := os.Open(input)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		cmd.Stdin = f
	}
	outW, err := newCapture(filepath.Join(b.dir, name+".out"), b.output, &proc.out)
	if err != nil {
		return nil, err
	}
	defer outW.Close()
	errW, err := newCapture(filepath.Join(b.dir, name+".err"), b.output, &proc.err)
	if err != nil {
		return nil, errors.Join(err, proc.out.abandon())
	}
	defer errW.Close()
	cmd.Stdout, cmd.Stderr = outW, errW
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, proc.out.abandon(), proc.err.abandon())
	}
	go p.finishExec(b, proc, cmd, timeout)
	return proc, nil
}

// finishExec waits for the process, ends it at its deadline, and keeps what it
// said.
func (p *provider) finishExec(b *box, proc *process, cmd *exec.Cmd, timeout time.Duration) {
	defer close(proc.done)
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
		proc.limit = "wall-clock"
		p.killExec(b, proc)
		select {
		case <-ended:
		case <-time.After(5 * time.Second):
			_ = cmd.Process.Kill()
			<-ended
		}
	}
	proc.out.finish()
	proc.err.finish()
	proc.exit = int32(cmd.ProcessState.ExitCode())
	cause := ""
	if proc.exit == runtimeFailed {
		cause = p.causeOfDeath(b)
	}
	b.mu.Lock()
	if b.limit == "" && !b.ended {
		b.limit = cause
	}
	if proc.limit == "" {
		proc.limit = b.limit
	}
	if proc.limit == "" && b.ended {
		proc.limit = "destroyed"
	}
	b.mu.Unlock()
	if proc.limit != "" {
		proc.exit, proc.signal = -1, uint32(syscall.SIGKILL)
	}
}

// runtimeFailed is how the runtime's client ends when the sandbox is gone.
const runtimeFailed = 128

// causeOfDeath says why a sandbox that was not destroyed runs no more; it is
// empty if it runs. The kernel ends the whole sandbox at its memory limit.
func (p *provider) causeOfDeath(b *box) string {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if _, err := p.rt.memory(ctx, b); err == nil {
		return "" // it answers: the exit code was the program's own
	}
	// A killed kernel takes a moment to give its memory back.
	for wait := time.Now().Add(2 * time.Second); isSandbox(b.pid, b.ID); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(wait) {
			return ""
		}
	}
	for file, reached := range map[string]func(string) bool{
		"/sys/fs/cgroup/memory/numinance/" + b.ID + "/memory.failcnt": func(s string) bool { return s != "0" },
		"/sys/fs/cgroup/numinance/" + b.ID + "/memory.events":         func(s string) bool { return !strings.Contains(s, "oom_kill 0") },
	} {
		if raw, err := os.ReadFile(file); err == nil && reached(strings.TrimSpace(string(raw))) {
			return "memory"
		}
	}
	return "sandbox"
}

// killExec ends the process inside; ending the client outside would leave it
// running.
func (p *provider) killExec(b *box, proc *process) {
	raw, err := os.ReadFile(filepath.Join(b.dir, proc.name+".pid"))
	if err != nil {
		return
	}
	pid := strings.TrimSpace(string(raw))
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = p.rt.run(ctx, b, "kill", "-pgid", pid, b.ID, "KILL")
	_ = p.rt.run(ctx, b, "kill", "-pid", pid, b.ID, "KILL")
}

// Wait implements P-143.
func (p *provider) Wait(ctx context.Context, r *sandboxproviderv1.WaitRequest) (*sandboxproviderv1.WaitResponse, error) {
	b, err := p.find(r.GetSandbox())
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	proc, ok := b.execs[r.GetProcess()]
	b.mu.Unlock()
	if !ok {
		return nil, status.Errorf(codes.NotFound, "there is no process %s", r.GetProcess())
	}
	timer := time.NewTimer(r.GetTimeout().AsDuration())
	defer timer.Stop()
	select {
	case <-proc.done:
	case <-timer.C:
		return &sandboxproviderv1.WaitResponse{}, nil
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	proc.mu.Lock()
	defer proc.mu.Unlock()
	if proc.stdout == nil {
		if proc.stdout, err = proc.out.store(ctx, p.blobs); err != nil {
			return nil, fmt.Errorf("keep standard output: %w", err)
		}
	}
	if proc.stderr == nil {
		if proc.stderr, err = proc.err.store(ctx, p.blobs); err != nil {
			return nil, fmt.Errorf("keep standard error: %w", err)
		}
	}
	return &sandboxproviderv1.WaitResponse{
		Done: true, ExitCode: proc.exit, Signal: proc.signal, Limit: proc.limit,
		Stdout: proc.stdout, Stderr: proc.stderr, Truncated: proc.out.cut || proc.err.cut,
	}, nil
}

// capture keeps the first bytes of a stream in a file outside the sandbox and
// reads the rest away. The sandbox only ever holds a pipe: it writes to a
// regular file at offsets of its own.
type capture struct {
	r    *os.File
	file *os.File
	left int64
	cut  bool
	over chan struct{}
}

// newCapture returns the end the sandbox writes to.
func newCapture(path string, limit int64, into **capture) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	c := &capture{r: r, file: f, left: limit, over: make(chan struct{})}
	*into = c
	go func() {
		defer close(c.over)
		_, _ = io.Copy(c, r)
	}()
	return w, nil
}

func (c *capture) Write(b []byte) (int, error) {
	keep := b[:min(int64(len(b)), c.left)]
	if len(keep) < len(b) {
		c.cut = true
	}
	n, err := c.file.Write(keep)
	c.left -= int64(n)
	if err != nil {
		c.left, c.cut = 0, true
	}
	return len(b), nil
}

// finish takes what is left in the pipe after the process ended; a descendant
// that still holds it is not waited for.
func (c *capture) finish() {
	select {
	case <-c.over:
	case <-time.After(300 * time.Millisecond):
		_ = c.r.SetReadDeadline(time.Now())
		<-c.over
	}
	c.r.Close()
}

func (c *capture) abandon() error {
	_ = c.r.SetReadDeadline(time.Now())
	return errors.Join(c.r.Close(), c.file.Close())
}

func (c *capture) store(ctx context.Context, blobs *sdk.Host) (*pluginv1.BlobRef, error) {
	if _, err := c.file.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	ref, err := blobs.PutBlob(ctx, c.file, "application/octet-stream")
	if err != nil {
		return nil, err
	}
	return ref, c.file.Close()
}
