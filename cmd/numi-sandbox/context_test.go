package main_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	"github.com/numinance/numinance/internal/contexts/sandbox"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/bridge"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/host/doctor"
	"github.com/numinance/numinance/internal/host/image"
	"github.com/numinance/numinance/internal/host/worktree"
	"github.com/numinance/numinance/sdk/plugintest"
)

// direct hands calls to the provider without the policy enforcement point, which
// has tests of its own.
type direct struct{ conn *plugintest.Conn }

func (d direct) Connect(dispatch.Authority) grpc.ClientConnInterface { return d.conn }

// hostBlobs is the plugin host's blobs as the context sees them.
type hostBlobs struct{ host *plugintest.Host }

func (h hostBlobs) Put(_ context.Context, r io.Reader, limit int64) (blob.Ref, error) {
	b, err := io.ReadAll(io.LimitReader(r, limit))
	if err != nil {
		return blob.Ref{}, err
	}
	ref := h.host.Put(b, "")
	return blob.Ref{Digest: digest.Digest(ref.GetDigest()), Size: ref.GetSizeBytes()}, nil
}

func (h hostBlobs) Bytes(d digest.Digest, _ int64) ([]byte, error) {
	b, ok := h.host.Blob(&pluginv1.BlobRef{Digest: string(d)})
	if !ok {
		return nil, blob.ErrNotFound
	}
	return b, nil
}

func (h hostBlobs) Open(d digest.Digest) (io.ReadCloser, error) {
	b, err := h.Bytes(d, 0)
	return io.NopCloser(bytes.NewReader(b)), err
}

// P-147, P-150, P-154, P-158, H-064 by the context: a sandbox derived from a
// grant and a revision, used, snapshotted, judged by the host's diff, restored.
func TestSandboxFromGrant(t *testing.T) {
	b := newBench(t)
	dir := filepath.Join(t.TempDir(), "tree")
	base, err := worktree.Seed(t.Context(), dir, "main", map[string][]byte{
		"README.md": []byte("read me\n"), "src/a.go": []byte("package a\n"), "src/CODEOWNERS": []byte("* @root\n"),
		".github/workflows/ci.yml": []byte("on: push\n"), ".gitignore": []byte("node_modules/\n"),
	}, time.Unix(1_700_000_000, 0))
	if err != nil {
		t.Fatal(err)
	}
	store, err := worktree.Open(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	blobs := hostBlobs{b.conn.Host}
	limits := sandbox.DefaultLimits()
	limits.Disk, limits.Memory = 64<<20, 512<<20
	c, err := sandbox.New(sandbox.Config{
		Dispatcher: direct{b.conn}, Blobs: blobs, Tree: store, Image: &image.Keeper{Store: built.images},
		Links: filepath.Join(t.TempDir(), "links"), Digest: built.image.Digest, Limits: limits, Scratch: []string{"node_modules"},
	})
	if err != nil {
		t.Fatal(err)
	}
	scope := pathscope.Scope{Allowed: []string{"src/"}}
	spec := func(run identity.RunID) sandbox.Spec {
		return sandbox.Spec{
			Authority: dispatch.Authority{Actor: identity.Actor{Kind: identity.KindRunner, Principal: "service:runner", Run: run}},
			Grant:     grant.Grant{Run: run, Paths: scope}, Revision: base, WallTime: 5 * time.Minute,
		}
	}
	create := func(s sandbox.Spec) *sandbox.Sandbox {
		t.Helper()
		start := time.Now()
		box, err := c.Create(t.Context(), s)
		if err != nil {
			refused(t, err)
		}
		t.Logf("created in %v", time.Since(start))
		t.Cleanup(func() {
			if err := box.Destroy(context.Background()); err != nil {
				t.Error(err)
			}
		})
		return box
	}
	box := create(spec("run-one"))
	t.Logf("report: %+v", box.Report)
	if len(box.Report.Checks) < 3 || len(box.Report.Claims) == 0 {
		t.Errorf("report %+v", box.Report)
	}

	sh := func(box *sandbox.Sandbox, script string) (bridge.Exit, string) {
		t.Helper()
		p, err := box.Bridge().Spawn(t.Context(), bridge.Command{Argv: []string{"sh", "-c", script}, Env: sandbox.EnvironmentList("/home/agent", nil), UID: bridge.UIDAgent})
		if err != nil {
			t.Fatal(err)
		}
		p.Stdin.Close()
		go io.Copy(io.Discard, p.Stderr)
		out, _ := io.ReadAll(p.Stdout)
		exit, err := p.Wait()
		if err != nil {
			t.Fatal(err)
		}
		return exit, string(out)
	}
	if exit, out := sh(box, "git status --porcelain; git log --oneline | wc -l; echo 'package a // changed' > src/a.go; echo new > src/b.go; sed -i s/changed/edited/ src/a.go; mkdir -p node_modules; echo junk > node_modules/x; echo kept > $HOME/notes; git status --porcelain"); exit.Code != 0 || out != "1\n M src/a.go\n?? src/b.go\n" {
		t.Errorf("ordinary work: exit %d, %q", exit.Code, out)
	}
	for _, script := range []string{
		"echo x >> README.md", "mv src/a.go README.md", "rm src/CODEOWNERS", "mv src away", "echo x > new.txt", "echo x >> .github/workflows/ci.yml",
		"rm -rf .github", "mkdir .vscode", "chmod 777 .", "echo x > .gitmodules",
	} {
		if exit, out := sh(box, script); exit.Code == 0 {
			t.Errorf("H-064: %q succeeded: %s", script, out)
		}
	}
	work, err := box.Snapshot(t.Context(), sandbox.ScopeWork)
	if err != nil {
		t.Fatal(err)
	}
	home, err := box.Snapshot(t.Context(), sandbox.ScopeHome)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := blobs.Bytes(work.Digest, 0)
	if err != nil {
		t.Fatal(err)
	}
	when := time.Unix(1_700_000_100, 0)
	who := worktree.Identity{Name: "Agent", Email: "agent@example.com"}
	candidate, err := store.Diff(t.Context(), base, bytes.NewReader(raw), worktree.Rules{Scope: scope, Author: who, When: when, Message: "change"})
	if err != nil {
		t.Fatal(err)
	}
	var changed []string
	for _, ch := range candidate.Changes {
		changed = append(changed, fmt.Sprint(ch.Kind, " ", ch.Path))
	}
	if got := strings.Join(changed, ", "); !candidate.Clean() || got != "modified src/a.go, added src/b.go" {
		t.Errorf("the host's diff: clean %v, %s, %+v", candidate.Clean(), got, candidate.Violations)
	}
	r, err := box.Exec(t.Context(), sandbox.Command{Argv: []string{"cat", "src/a.go"}, User: sandbox.Candidate, Timeout: 10 * time.Second})
	if err != nil || r.Code != 0 {
		t.Errorf("exec: %+v, %v", r, err)
	}
	if out, _ := blobs.Bytes(r.Stdout.Digest, 0); string(out) != "package a // edited\n" {
		t.Errorf("exec output %q", out)
	}
	if err := box.Destroy(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := box.Exec(t.Context(), sandbox.Command{Argv: []string{"true"}, User: sandbox.Agent, Timeout: time.Second}); err == nil {
		t.Error("exec after destroy succeeded")
	}
	nothingLeft(t, b.state, box.ID)

	again := spec("run-two")
	again.Work, again.Home = work, home
	second := create(again)
	if exit, out := sh(second, "cat src/a.go src/b.go $HOME/notes; stat -c %U src/CODEOWNERS; ls node_modules"); exit.Code != 0 || out != "package a // edited\nnew\nkept\nroot\n" {
		t.Errorf("restored: exit %d, %q", exit.Code, out)
	}
	if exit, _ := sh(second, "echo x >> README.md"); exit.Code == 0 {
		t.Error("restored with wider owners")
	}
}

// P-148: nobody but the runner, and only for the run of the grant.
func TestOnlyTheRunnerMakesSandboxes_P148(t *testing.T) {
	b := newBench(t)
	c, err := sandbox.New(sandbox.Config{
		Dispatcher: direct{b.conn}, Blobs: hostBlobs{b.conn.Host}, Tree: &worktree.Store{}, Image: &image.Keeper{Store: built.images},
		Links: t.TempDir(), Digest: built.image.Digest, Limits: sandbox.DefaultLimits(),
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []identity.Actor{
		{Kind: identity.KindAuthorAgent, Principal: "agent:fake", Run: "run-x"},
		{Kind: identity.KindRunner, Principal: "service:runner", Run: "run-y"},
		{},
	} {
		if _, err := c.Create(t.Context(), sandbox.Spec{Authority: dispatch.Authority{Actor: a}, Grant: grant.Grant{Run: "run-x"}, WallTime: time.Minute}); err == nil {
			t.Errorf("%+v made a sandbox", a)
		}
	}
	if n := boxes(t, b.state); n != 0 {
		t.Errorf("%d sandboxes were made", n)
	}
}

// The doctor's probe is a real sandbox.
func TestDoctorTriesItOut(t *testing.T) {
	r := doctor.Run(t.Context(), doctor.Config{Runtime: built.runtime, Init: built.init})
	for _, c := range r.Checks {
		t.Logf("%s: %v: %s (%v)", c.Name, c.State, c.Detail, c.Took)
	}
	if r.Checks[0].Name != "sandbox" || r.Checks[0].State != doctor.OK {
		t.Errorf("got %+v", r.Checks[0])
	}
}

// A memory hog ends alone and the run says so; the host and its own limit stay.
func TestMemoryHogIsEnded(t *testing.T) {
	b := newBench(t)
	req := b.request(t, "run-hog")
	req.Spec.Limits.MemoryBytes = 128 << 20
	req.Spec.Limits.FileBytes = 4 << 30
	req.Spec.Limits.DiskBytes = 4 << 30
	box := b.create(t, req)
	start := time.Now()
	r := b.agent(t, box, "head -c 1500000000 /dev/zero > src/hog; sleep 5; echo survived")
	t.Logf("after %v: %v %q", time.Since(start), r.WaitResponse, r.err)
	if strings.Contains(r.out, "survived") {
		t.Error("1.5 GB were held under a limit of 128 MiB")
	}
	if r.GetLimit() != "memory" || r.GetExitCode() != -1 {
		t.Errorf("got limit %q and exit %d, want memory and -1", r.GetLimit(), r.GetExitCode())
	}
}
