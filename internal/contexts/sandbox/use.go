package sandbox

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	sandboxproviderv1 "github.com/numinance/numinance/gen/numinance/ports/sandboxprovider/v1"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/bridge"
)

// Bridge is the link to the inside: plugin connections, processes, egress. It
// ends with Destroy.
func (b *Sandbox) Bridge() *bridge.Bridge { return b.link }

// look checks by the link what can be seen from inside, and prepares git there.
func (b *Sandbox) look(ctx context.Context, s Spec) error {
	b.saw("PID 1 inside answers on the run's link")
	exit, out, err := b.shell(ctx, `id -u; grep -E '^Cap(Eff|Prm)' /proc/self/status | tr -d '\t\n'; test -w / && echo writable; cat /run/numi/host.sock 2>/dev/null && echo readable; true`)
	if err != nil {
		return err
	}
	const zero = "0000000000000000"
	if want := fmt.Sprintf("%d\nCapPrm:%sCapEff:%s", bridge.UIDAgent, zero, zero); exit.Code != 0 || strings.TrimSpace(out) != want {
		return fmt.Errorf("an agent's process inside is not as unprivileged as it must be (P-154): %q", out)
	}
	b.saw("a process of the agent's has its uid, no capability and no way to the host's socket")
	if s.NoGit {
		return nil
	}
	// A repository to work with. It begins and ends here: what counts is the
	// host's diff.
	exit, out, err = b.shell(ctx, "cd "+bridge.WorkRoot+" && git init -q . && git add -A -f && git commit -q --allow-empty -m base 2>&1")
	if err != nil {
		return err
	}
	if exit.Code != 0 {
		return fmt.Errorf("git inside: exit %d: %.300q", exit.Code, out)
	}
	return nil
}

// shell runs a fixed script as the agent and returns its output, at most 64 KiB.
func (b *Sandbox) shell(ctx context.Context, script string) (bridge.Exit, string, error) {
	p, err := b.link.Spawn(ctx, bridge.Command{
		Argv: []string{"/bin/sh", "-c", script}, Dir: "/", UID: bridge.UIDAgent,
		Env: EnvironmentList("/home/agent", nil),
	})
	if err != nil {
		return bridge.Exit{}, "", err
	}
	if err := p.Stdin.Close(); err != nil {
		return bridge.Exit{}, "", err
	}
	go io.Copy(io.Discard, p.Stderr)
	out, err := io.ReadAll(io.LimitReader(p.Stdout, 64<<10))
	if err == nil {
		_, err = io.Copy(io.Discard, p.Stdout)
	}
	exit, werr := p.Wait()
	return exit, string(out), errors.Join(err, werr)
}

// Command is a process to run to its end by the provider, outside of the link.
type Command struct {
	Argv    []string
	Env     map[string]string // added to Environment
	Dir     string            // absolute inside; "" is the work root
	User    User
	Timeout time.Duration
}

// User is who runs a Command. The zero value is nobody and refused.
type User uint8

// The users of a sandbox.
const (
	Nobody User = iota
	Agent
	Candidate
	Adapter
)

var users = map[User]sandboxproviderv1.SandboxUser{
	Agent:     sandboxproviderv1.SandboxUser_SANDBOX_USER_AGENT,
	Candidate: sandboxproviderv1.SandboxUser_SANDBOX_USER_CANDIDATE,
	Adapter:   sandboxproviderv1.SandboxUser_SANDBOX_USER_ADAPTER,
}

// Result is how a Command ended. The output lies outside the sandbox and is
// untrusted (P-156).
type Result struct {
	Code           int32  // -1 if a signal ended it
	Signal         uint32 // 0 if none
	Limit          string // the limit that ended it, or empty
	Stdout, Stderr blob.Ref
	Truncated      bool
}

// pollWait is how long one Wait call may last.
const pollWait = 20 * time.Second

// Exec runs a command to its end.
func (b *Sandbox) Exec(ctx context.Context, c Command) (Result, error) {
	user, ok := users[c.User]
	if !ok {
		return Result{}, errors.New("exec in the sandbox: no user named")
	}
	dir := c.Dir
	if dir == "" {
		dir = bridge.WorkRoot
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gone {
		return Result{}, fmt.Errorf("exec in the sandbox: %w", bridge.ErrOver)
	}
	started, err := b.client.Exec(ctx, &sandboxproviderv1.ExecRequest{
		Sandbox: b.ID, Argv: c.Argv, Environment: c.Env, WorkingDirectory: dir, User: user, Timeout: durationpb.New(c.Timeout),
	})
	if err != nil {
		return Result{}, fmt.Errorf("exec in the sandbox: %w", err)
	}
	for end := time.Now().Add(c.Timeout + endTimeout); ; {
		w, err := b.client.Wait(ctx, &sandboxproviderv1.WaitRequest{Sandbox: b.ID, Process: started.GetProcess(), Timeout: durationpb.New(pollWait)})
		if err != nil {
			return Result{}, fmt.Errorf("wait in the sandbox: %w", err)
		}
		if w.GetDone() {
			return Result{
				Code: w.GetExitCode(), Signal: w.GetSignal(), Limit: w.GetLimit(), Truncated: w.GetTruncated(),
				Stdout: blob.Ref{Digest: digestOf(w.GetStdout().GetDigest()), Size: w.GetStdout().GetSizeBytes()},
				Stderr: blob.Ref{Digest: digestOf(w.GetStderr().GetDigest()), Size: w.GetStderr().GetSizeBytes()},
			}, nil
		}
		if time.Now().After(end) {
			return Result{}, errors.New("wait in the sandbox: the process does not end at its deadline")
		}
	}
}

// Scope is which part of a sandbox a snapshot keeps.
type Scope uint8

// The scopes. The zero value is none.
const (
	ScopeNone Scope = iota
	ScopeWork
	ScopeHome
	// ScopePrepared is what preparation made: ScratchLayer and Unpack read it.
	ScopePrepared
)

// Snapshot keeps a part as an untrusted tar, while the sandbox goes on. What it
// changed is for the host's diff to say.
func (b *Sandbox) Snapshot(ctx context.Context, s Scope) (blob.Ref, error) {
	scopes := map[Scope]sandboxproviderv1.SnapshotScope{
		ScopeWork: sandboxproviderv1.SnapshotScope_SNAPSHOT_SCOPE_WORK,
		ScopeHome: sandboxproviderv1.SnapshotScope_SNAPSHOT_SCOPE_HOME,

		ScopePrepared: sandboxproviderv1.SnapshotScope_SNAPSHOT_SCOPE_PREPARED,
	}
	scope, ok := scopes[s]
	if !ok {
		return blob.Ref{}, errors.New("snapshot of the sandbox: no scope named")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gone {
		return blob.Ref{}, fmt.Errorf("snapshot of the sandbox: %w", bridge.ErrOver)
	}
	r, err := b.client.Snapshot(ctx, &sandboxproviderv1.SnapshotRequest{Sandbox: b.ID, Scope: scope, MaxBytes: maxTree})
	if err != nil {
		return blob.Ref{}, fmt.Errorf("snapshot of the sandbox: %w", err)
	}
	return blob.Ref{Digest: digestOf(r.GetSnapshot().GetDigest()), Size: r.GetSnapshot().GetSizeBytes()}, nil
}

// Destroy ends the link and every call on it, then removes the sandbox. A second
// call succeeds; after an error it can be called again.
func (b *Sandbox) Destroy(ctx context.Context) error {
	linkErr := b.link.Close()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gone {
		return nil
	}
	if _, err := b.client.Destroy(ctx, &sandboxproviderv1.DestroyRequest{Sandbox: b.ID}); err != nil {
		return fmt.Errorf("destroy the sandbox of run %s: %w", b.run, errors.Join(err, linkErr))
	}
	b.gone = true
	return linkErr
}

// writeHome writes a former run's home as a layer, everything the agent's.
func writeHome(w io.Writer, all nodes) error {
	tw := tar.NewWriter(w)
	const home = "./home/agent/"
	if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: home, Mode: 0o700, Uid: bridge.UIDAgent, Gid: bridge.UIDAgent}); err != nil {
		return err
	}
	for n, err := range iter.Seq2[node, error](all) {
		if err != nil {
			return err
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: home + n.path, Size: n.size, Mode: 0o600, Uid: bridge.UIDAgent, Gid: bridge.UIDAgent}
		switch {
		case n.dir:
			h.Typeflag, h.Name, h.Mode = tar.TypeDir, h.Name+"/", 0o700
		case n.link != "":
			h.Typeflag, h.Linkname, h.Size, h.Mode = tar.TypeSymlink, n.link, 0, 0o777
		case n.exec:
			h.Mode = 0o700
		}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		r, err := n.open()
		if err != nil {
			return err
		}
		if _, err := io.Copy(tw, r); err != nil {
			return err
		}
	}
	return tw.Close()
}
