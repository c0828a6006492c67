package main_test

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	spv1 "github.com/numinance/numinance/gen/numinance/ports/sandboxprovider/v1"
	"github.com/numinance/numinance/internal/host/bridge"
	"github.com/numinance/numinance/internal/host/image"
	"github.com/numinance/numinance/plugins/sandboxprovider/gvisor"
	"github.com/numinance/numinance/sdk/plugintest"
)

// built is what every test of this file shares: the two programs and one image.
var built struct {
	runtime, init, images string
	image                 image.Image
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "numi-sandbox-test-")
	if err == nil {
		err = prepare(dir)
	}
	code := 1
	if err != nil {
		fmt.Fprintln(os.Stderr, "prepare:", err)
	} else {
		code = m.Run()
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

// prepare builds the programs, or takes them from NUMI_TEST_BIN, so that the
// tests can be run by a user who cannot build.
func prepare(dir string) error {
	if bin := os.Getenv("NUMI_TEST_BIN"); bin != "" {
		built.runtime, built.init, built.images = bin+"/numi-sandbox", bin+"/numi-init", dir+"/images"
		var err error
		built.image, err = image.Build(context.Background(), image.Spec{Store: built.images, Programs: []string{"mount"}})
		return err
	}
	for _, name := range []string{"numi-sandbox", "numi-init"} {
		cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", dir+"/", "github.com/numinance/numinance/cmd/"+name)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w: %s", name, err, out)
		}
	}
	built.runtime, built.init, built.images = dir+"/numi-sandbox", dir+"/numi-init", dir+"/images"
	var err error
	built.image, err = image.Build(context.Background(), image.Spec{Store: built.images, Programs: []string{"mount"}})
	return err
}

// bench is one provider with its state.
type bench struct {
	conn   *plugintest.Conn
	client spv1.SandboxProviderServiceClient
	state  string
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{state: t.TempDir()}
	cfg, err := json.Marshal(gvisor.Config{Runtime: built.runtime, Init: built.init, Images: built.images, State: b.state})
	if err != nil {
		t.Fatal(err)
	}
	b.conn = plugintest.Serve(t, gvisor.Plugin(), plugintest.Options{Config: cfg})
	b.client = spv1.NewSandboxProviderServiceClient(b.conn)
	return b
}

type file struct {
	name string // "./..."; a directory ends in a slash
	mode int64
	uid  int
	body string
}

func treeTar(t *testing.T, files ...file) []byte {
	t.Helper()
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: f.mode, Uid: f.uid, Gid: f.uid, Typeflag: tar.TypeReg, Size: int64(len(f.body))}
		if f.mode&0o1000 != 0 {
			h.Gid = 1000 // a directory where the agent may add, not replace
		}
		if strings.HasSuffix(f.name, "/") {
			h.Typeflag = tar.TypeDir
		}
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(tw, f.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func standardTree(t *testing.T) []byte {
	return treeTar(t,
		file{"./", 0o755, 0, ""},
		file{"./protected.txt", 0o644, 0, "keep\n"},
		file{"./src/", 0o755, 1000, ""},
		file{"./src/a.txt", 0o644, 1000, "hello\n"},
		file{"./mixed/", 0o1775, 0, ""},
		file{"./mixed/CODEOWNERS", 0o644, 0, "root\n"},
	)
}

func (b *bench) request(t *testing.T, run string) *spv1.CreateRequest {
	return &spv1.CreateRequest{RunId: run, Spec: &spv1.SandboxSpec{
		Profile:     spv1.SandboxProfile_SANDBOX_PROFILE_ISOLATED_KERNEL,
		ImageDigest: string(built.image.Digest),
		WorkTree:    b.conn.Host.Put(standardTree(t), "application/x-tar"),
		Marker:      "/workspace/src/a.txt",
		Limits: &spv1.Limits{
			MemoryBytes: 512 << 20, Processes: 128, FileBytes: 8 << 20, DiskBytes: 64 << 20, OpenFiles: 1024,
			WallTime: durationpb.New(5 * time.Minute), OutputBytes: 1 << 20,
		},
	}}
}

func (b *bench) create(t *testing.T, r *spv1.CreateRequest) string {
	t.Helper()
	start := time.Now()
	res, err := b.client.Create(t.Context(), r)
	if err != nil {
		refused(t, err)
	}
	t.Logf("create took %v", time.Since(start))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if _, err := b.client.Destroy(ctx, &spv1.DestroyRequest{Sandbox: res.GetSandbox()}); err != nil {
			t.Errorf("destroy: %v", err)
		}
	})
	return res.GetSandbox()
}

// refused skips only where the kernel itself refuses sandboxes to this user.
func refused(t *testing.T, err error) {
	t.Helper()
	if os.Geteuid() != 0 && status.Code(err) == codes.FailedPrecondition && strings.Contains(err.Error(), "permitted") {
		t.Skipf("this kernel gives no user namespace to this user: %v", err)
	}
	t.Fatal(err)
}

type result struct {
	*spv1.WaitResponse
	out, err string
}

func (b *bench) exec(t *testing.T, box string, user spv1.SandboxUser, timeout time.Duration, argv ...string) result {
	t.Helper()
	started, err := b.client.Exec(t.Context(), &spv1.ExecRequest{
		Sandbox: box, Argv: argv, WorkingDirectory: "/workspace", User: user, Timeout: durationpb.New(timeout),
	})
	if err != nil {
		t.Fatalf("exec %q: %v", argv, err)
	}
	w, err := b.client.Wait(t.Context(), &spv1.WaitRequest{Sandbox: box, Process: started.GetProcess(), Timeout: durationpb.New(time.Minute)})
	if err != nil {
		t.Fatalf("wait %q: %v", argv, err)
	}
	if !w.GetDone() {
		t.Fatalf("wait %q: not done", argv)
	}
	out, _ := b.conn.Host.Blob(w.GetStdout())
	errs, _ := b.conn.Host.Blob(w.GetStderr())
	return result{w, string(out), string(errs)}
}

func (b *bench) agent(t *testing.T, box string, script string) result {
	t.Helper()
	return b.exec(t, box, spv1.SandboxUser_SANDBOX_USER_AGENT, 30*time.Second, "sh", "-c", script)
}

// P-141, P-142, P-143, P-154, P-156, H-064.
func TestProcessesOfARun(t *testing.T) {
	b := newBench(t)
	box := b.create(t, b.request(t, "run-processes"))

	t.Run("output and exit code", func(t *testing.T) {
		r := b.agent(t, box, "echo out; echo err >&2; exit 7")
		if r.GetExitCode() != 7 || r.out != "out\n" || r.err != "err\n" {
			t.Errorf("got exit %d, %q, %q", r.GetExitCode(), r.out, r.err)
		}
	})
	t.Run("an exit code that the runtime uses too", func(t *testing.T) {
		start := time.Now()
		if r := b.agent(t, box, "exit 128"); r.GetExitCode() != 128 || r.GetLimit() != "" {
			t.Errorf("got %v", r.WaitResponse)
		}
		t.Logf("took %v", time.Since(start))
	})
	t.Run("unprivileged, P-154", func(t *testing.T) {
		r := b.agent(t, box, "id -u; grep -E '^(CapPrm|CapEff|CapInh|NoNewPrivs)' /proc/self/status | tr -d '\\t'")
		want := "1000\nCapInh:0000000000000000\nCapPrm:0000000000000000\nCapEff:0000000000000000\nNoNewPrivs:1\n"
		if r.out != want {
			t.Errorf("got %q, want %q", r.out, want)
		}
	})
	t.Run("allowed write", func(t *testing.T) {
		if r := b.agent(t, box, "echo more >> src/a.txt && cat src/a.txt && echo new > mixed/new.txt"); r.GetExitCode() != 0 || r.out != "hello\nmore\n" {
			t.Errorf("got exit %d, %q, %q", r.GetExitCode(), r.out, r.err)
		}
	})
	for name, script := range map[string]string{
		"write": "echo x > protected.txt", "rename over": "mv src/a.txt protected.txt", "remove": "rm -f protected.txt",
		"rename away": "mv protected.txt src/p", "sticky": "rm -f mixed/CODEOWNERS", "chmod": "chmod 777 protected.txt",
		"new in root": "echo x > new.txt", "image file": "echo x >> /etc/passwd", "core pattern": "echo x > /proc/sys/kernel/core_pattern",
		"raw mount": "mount -t tmpfs x /mnt", "read PID 1's environment": "cat /proc/1/environ",
	} {
		t.Run("H-064 denied "+name, func(t *testing.T) {
			if r := b.agent(t, box, script); r.GetExitCode() == 0 {
				t.Errorf("%q succeeded: %q", script, r.out)
			}
		})
	}
	t.Run("protected unchanged", func(t *testing.T) {
		if r := b.agent(t, box, "cat protected.txt mixed/CODEOWNERS"); r.out != "keep\nroot\n" {
			t.Errorf("got %q", r.out)
		}
	})
	t.Run("same key runs once, P-142", func(t *testing.T) {
		ctx := plugintest.Key(t.Context(), "once")
		req := &spv1.ExecRequest{Sandbox: box, Argv: []string{"sh", "-c", "echo x >> src/once"}, WorkingDirectory: "/workspace",
			User: spv1.SandboxUser_SANDBOX_USER_AGENT, Timeout: durationpb.New(10 * time.Second)}
		var names []string
		for range 2 {
			r, err := b.client.Exec(ctx, req)
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, r.GetProcess())
			for range 2 {
				w, err := b.client.Wait(t.Context(), &spv1.WaitRequest{Sandbox: box, Process: r.GetProcess(), Timeout: durationpb.New(time.Minute)})
				if err != nil || !w.GetDone() || w.GetExitCode() != 0 {
					t.Fatalf("wait: %v, %v", w, err)
				}
			}
		}
		if r := b.agent(t, box, "wc -l < src/once"); names[0] != names[1] || strings.TrimSpace(r.out) != "1" {
			t.Errorf("processes %q, %q lines", names, r.out)
		}
	})
	t.Run("deadline", func(t *testing.T) {
		r := b.exec(t, box, spv1.SandboxUser_SANDBOX_USER_AGENT, time.Second, "sh", "-c", "trap '' TERM; sleep 600")
		if r.GetLimit() != "wall-clock" || r.GetSignal() != uint32(syscall.SIGKILL) || r.GetExitCode() != -1 {
			t.Errorf("got %v", r.WaitResponse)
		}
		if r := b.agent(t, box, "ps ax | grep -c '[s]leep 600'"); strings.TrimSpace(r.out) != "0" {
			t.Errorf("%q processes are left", r.out)
		}
	})
	t.Run("output cut", func(t *testing.T) {
		r := b.agent(t, box, "head -c 3000000 /dev/zero")
		if !r.GetTruncated() || len(r.out) != 1<<20 {
			t.Errorf("truncated %v, %d bytes", r.GetTruncated(), len(r.out))
		}
	})
	t.Run("file size limit", func(t *testing.T) {
		if r := b.agent(t, box, "head -c 9000000 /dev/zero > src/big"); r.GetExitCode() == 0 {
			t.Error("9 MB were written under a limit of 8 MiB")
		}
	})
	t.Run("disk limit", func(t *testing.T) {
		r := b.agent(t, box, "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do head -c 7000000 /dev/zero > src/f$i || exit 1; done")
		if r.GetExitCode() == 0 || !strings.Contains(r.err, "space") {
			t.Errorf("exit %d, %q", r.GetExitCode(), r.err)
		}
		b.agent(t, box, "rm -f src/f* src/big")
	})
	t.Run("process limit", func(t *testing.T) {
		if r := b.agent(t, box, "i=0; while [ $i -lt 300 ]; do sleep 5 & i=$((i+1)); done"); !strings.Contains(r.err, "fork") {
			t.Errorf("300 processes under a limit of 128: %q", r.err)
		}
	})
	t.Run("no network", func(t *testing.T) {
		if _, err := exec.LookPath("curl"); err != nil {
			t.Skip("this host has no curl to pack into the image")
		}
		if r := b.agent(t, box, "curl -sS -m 5 http://1.1.1.1/"); r.GetExitCode() == 0 {
			t.Errorf("direct dial answered: %q", r.out)
		}
	})
	t.Run("root may not be asked for", func(t *testing.T) {
		_, err := b.client.Exec(t.Context(), &spv1.ExecRequest{Sandbox: box, Argv: []string{"id"}, WorkingDirectory: "/", Timeout: durationpb.New(time.Second)})
		if status.Code(err) != codes.InvalidArgument {
			t.Errorf("got %v", err)
		}
	})
}

// P-146, P-147, P-144, P-145: one sandbox a run, restored by snapshot, gone
// when destroyed.
func TestLifeOfASandbox(t *testing.T) {
	b := newBench(t)
	req := b.request(t, "run-life")
	dry, err := b.client.Create(plugintest.DryRun(t.Context()), req)
	if err != nil {
		refused(t, err)
	}
	if n := boxes(t, b.state); n != 0 {
		t.Errorf("a dry run made %d sandboxes", n)
	}
	ctx := plugintest.Key(t.Context(), "create-1")
	first, err := b.client.Create(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	again, err := b.client.Create(ctx, req)
	if err != nil || again.GetSandbox() != first.GetSandbox() || dry.GetSandbox() != first.GetSandbox() {
		t.Errorf("same key: %v, %v", again, err)
	}
	if _, err := b.client.Create(t.Context(), req); status.Code(err) != codes.AlreadyExists {
		t.Errorf("another key for the same run: got %v, want ALREADY_EXISTS", err)
	}
	box := first.GetSandbox()
	b.agent(t, box, "echo changed > src/a.txt; mkdir src/deep; ln -s /etc/shadow src/link; echo secret > $HOME/h; mkdir -p node; sleep 300 >/dev/null 2>&1 &")
	var refs []*pluginv1.BlobRef
	for range 2 {
		s, err := b.client.Snapshot(t.Context(), &spv1.SnapshotRequest{Sandbox: box, Scope: spv1.SnapshotScope_SNAPSHOT_SCOPE_WORK, MaxBytes: 64 << 20})
		if err != nil {
			t.Fatal(err)
		}
		refs = append(refs, s.GetSnapshot())
	}
	raw, _ := b.conn.Host.Blob(refs[0])
	names := tarNames(t, raw)
	for _, want := range []string{"./", "./protected.txt", "./src/a.txt", "./src/deep/", "./src/link"} {
		if !slices.Contains(names, want) {
			t.Errorf("snapshot has %q, not %s", names, want)
		}
	}
	if _, err := b.client.Snapshot(t.Context(), &spv1.SnapshotRequest{Sandbox: box, Scope: spv1.SnapshotScope_SNAPSHOT_SCOPE_WORK, MaxBytes: 100}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("snapshot over its limit: got %v, want RESOURCE_EXHAUSTED", err)
	}
	if r := b.agent(t, box, "echo alive"); r.out != "alive\n" {
		t.Errorf("after a snapshot: %q", r.out)
	}

	for i, want := range []bool{true, false} {
		d, err := b.client.Destroy(t.Context(), &spv1.DestroyRequest{Sandbox: box})
		if err != nil || d.GetExisted() != want {
			t.Errorf("destroy %d: %v, %v", i+1, d, err)
		}
	}
	if _, err := b.client.Exec(t.Context(), &spv1.ExecRequest{Sandbox: box, Argv: []string{"true"}, WorkingDirectory: "/", User: spv1.SandboxUser_SANDBOX_USER_AGENT, Timeout: durationpb.New(time.Second)}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("exec after destroy: got %v", err)
	}
	nothingLeft(t, b.state, box)

	second := b.request(t, "run-life-2")
	second.Spec.WorkTree = refs[1]
	box2 := b.create(t, second)
	if r := b.agent(t, box2, "cat src/a.txt; readlink src/link; ps ax | grep -c '[s]leep 300'; ls $HOME"); box2 == box || r.out != "changed\n/etc/shadow\n0\n" {
		t.Errorf("restored: %q", r.out)
	}
}

func TestCreateRefuses(t *testing.T) {
	b := newBench(t)
	cases := []struct {
		name   string
		change func(*spv1.SandboxSpec)
		want   codes.Code
	}{
		{"a weaker profile", func(s *spv1.SandboxSpec) { s.Profile = spv1.SandboxProfile_SANDBOX_PROFILE_SHARED_KERNEL }, codes.FailedPrecondition},
		{"an unknown image, P-153", func(s *spv1.SandboxSpec) { s.ImageDigest = "sha256:" + strings.Repeat("0", 64) }, codes.NotFound},
		{"a missing marker", func(s *spv1.SandboxSpec) { s.Marker = "/workspace/nowhere" }, codes.FailedPrecondition},
		{"a tree that climbs out", func(s *spv1.SandboxSpec) {
			s.WorkTree = b.conn.Host.Put(treeTar(t, file{"./../x", 0o644, 0, ""}), "")
		}, codes.FailedPrecondition},
		{"a mount over the system", func(s *spv1.SandboxSpec) {
			s.Mounts = []*spv1.ReadOnlyMount{{Source: "/usr", Target: "/etc"}}
		}, codes.FailedPrecondition},
		{"a mounted file of another digest", func(s *spv1.SandboxSpec) {
			s.Mounts = []*spv1.ReadOnlyMount{{Source: "/etc/hostname", Target: "/opt/x", Digest: "sha256:" + strings.Repeat("0", 64)}}
		}, codes.FailedPrecondition},
	}
	for i, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			r := b.request(t, fmt.Sprintf("run-refused-%d", i))
			tc.change(r.GetSpec())
			if _, err := b.client.Create(t.Context(), r); status.Code(err) != tc.want {
				t.Errorf("got %v, want %v", err, tc.want)
			} else {
				t.Log(err)
			}
			if n := boxes(t, b.state); n != 0 {
				t.Errorf("%d sandboxes are left", n)
			}
		})
	}
	t.Run("a flipped byte in the image, P-152", func(t *testing.T) {
		p := filepath.Join(built.image.Dir, "rootfs/etc/gitconfig")
		raw, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		bad := slices.Clone(raw)
		bad[0] ^= 1
		if err := os.WriteFile(p, bad, 0o644); err != nil {
			t.Fatal(err)
		}
		defer os.WriteFile(p, raw, 0o644)
		if _, err := b.client.Create(t.Context(), b.request(t, "run-flipped")); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("got %v", err)
		}
	})
}

// A killed runner's sandbox is found and destroyed by the next one.
func TestLeftoversAreSweptAway(t *testing.T) {
	state := t.TempDir()
	b := newBench(t)
	box, err := b.client.Create(t.Context(), b.request(t, "run-left"))
	if err != nil {
		refused(t, err)
	}
	// The predecessor's state without its lock and its process, as a kill
	// leaves it.
	if out, err := exec.Command("cp", "-a", filepath.Join(b.state, "boxes"), filepath.Join(b.state, "runtime"), state).CombinedOutput(); err != nil {
		t.Logf("copy: %v: %s", err, out)
	}
	cfg, err := json.Marshal(gvisor.Config{Runtime: built.runtime, Init: built.init, Images: built.images, State: state})
	if err != nil {
		t.Fatal(err)
	}
	plugintest.Serve(t, gvisor.Plugin(), plugintest.Options{Config: cfg})
	nothingLeft(t, state, box.GetSandbox())
	if _, err := b.client.Destroy(t.Context(), &spv1.DestroyRequest{Sandbox: box.GetSandbox()}); err != nil {
		t.Errorf("destroy what another already ended: %v", err)
	}
	if _, err := plugintest.Open(t, gvisor.Plugin(), plugintest.Options{Config: cfg}); err == nil {
		t.Error("a second provider opened the same state")
	}
}

// The link: both gRPC directions as byte streams, processes by PID 1, the
// egress forwarder, and an end that ends everything.
func TestLink(t *testing.T) {
	b := newBench(t)
	dir := filepath.Join(t.TempDir(), "link")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	link, err := bridge.Listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()
	req := b.request(t, "run-link")
	req.Spec.LinkDirectory = dir
	start := time.Now()
	box := b.create(t, req)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	if err := link.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	t.Logf("ready after %v", time.Since(start))
	env := []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/home/agent"}
	run := func(uid int, argv ...string) (bridge.Exit, string, string) {
		t.Helper()
		p, err := link.Spawn(ctx, bridge.Command{Argv: argv, Env: env, UID: uid})
		if err != nil {
			t.Fatalf("spawn %q: %v", argv, err)
		}
		p.Stdin.Close()
		errs := make(chan string, 1)
		go func() { b, _ := io.ReadAll(p.Stderr); errs <- string(b) }()
		out, _ := io.ReadAll(p.Stdout)
		exit, err := p.Wait()
		if err != nil {
			t.Fatalf("wait %q: %v", argv, err)
		}
		return exit, string(out), <-errs
	}

	t.Run("spawn as the agent", func(t *testing.T) {
		start := time.Now()
		exit, out, errs := run(bridge.UIDAgent, "sh", "-c", "id -u; pwd; umask; echo oops >&2; exit 3")
		if exit.Code != 3 || out != "1000\n/workspace\n0022\n" || errs != "oops\n" {
			t.Errorf("got %v, %q, %q", exit, out, errs)
		}
		t.Logf("spawn took %v", time.Since(start))
	})
	t.Run("signal and missing program", func(t *testing.T) {
		p, err := link.Spawn(ctx, bridge.Command{Argv: []string{"sleep", "60"}, Env: env, UID: bridge.UIDAgent})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if exit, err := p.Wait(); err != nil || exit.Signal != int(syscall.SIGTERM) || exit.Code != 143 {
			t.Errorf("got %v, %v", exit, err)
		}
		if _, err := link.Spawn(ctx, bridge.Command{Argv: []string{"nowhere"}, Env: env, UID: bridge.UIDAgent}); err == nil {
			t.Error("a missing program started")
		}
		if _, err := link.Spawn(ctx, bridge.Command{Argv: []string{"id"}, Env: env}); err == nil {
			t.Error("a process of uid 0 started")
		}
	})
	t.Run("large streams both ways", func(t *testing.T) {
		p, err := link.Spawn(ctx, bridge.Command{Argv: []string{"cat"}, Env: env, UID: bridge.UIDAgent})
		if err != nil {
			t.Fatal(err)
		}
		want := bytes.Repeat([]byte("0123456789abcdef"), 200_000)
		go func() { p.Stdin.Write(want); p.Stdin.Close() }()
		got, err := io.ReadAll(p.Stdout)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d of %d bytes came back, %v", len(got), len(want), err)
		}
		if exit, err := p.Wait(); err != nil || exit.Code != 0 {
			t.Errorf("got %v, %v", exit, err)
		}
	})
	t.Run("limits of one process", func(t *testing.T) {
		p, err := link.Spawn(ctx, bridge.Command{Argv: []string{"sh", "-c", "ulimit -n; ulimit -f"}, Env: env, UID: bridge.UIDCandidate, Limits: bridge.Limits{OpenFiles: 33, FileBytes: 512 * 10}})
		if err != nil {
			t.Fatal(err)
		}
		out, _ := io.ReadAll(p.Stdout)
		if string(out) != "33\n10\n" {
			t.Errorf("got %q", out)
		}
	})
	t.Run("cancel and kill all", func(t *testing.T) {
		cctx, stop := context.WithCancel(ctx)
		p, err := link.Spawn(cctx, bridge.Command{Argv: []string{"sh", "-c", "setsid sleep 777 & sleep 778"}, Env: env, UID: bridge.UIDAgent})
		if err != nil {
			t.Fatal(err)
		}
		stop()
		if _, err := p.Wait(); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		if err := link.KillAll(ctx, bridge.UIDAgent); err != nil {
			t.Fatal(err)
		}
		if _, out, _ := run(bridge.UIDCandidate, "sh", "-c", "ps ax | grep -c '[s]leep 77'"); out != "0\n" {
			t.Errorf("%q processes are left", out)
		}
	})
	t.Run("egress only by the forwarder", func(t *testing.T) {
		if _, err := exec.LookPath("curl"); err != nil {
			t.Skip("this host has no curl to pack into the image")
		}
		get := []string{"curl", "-s", "-m", "5", "-x", bridge.ProxyURL, "http://example.invalid/"}
		if _, out, _ := run(bridge.UIDAgent, get...); !strings.Contains(out, "no way out") {
			t.Errorf("without an egress socket: %q", out)
		}
		l, err := bridge.ListenIn(dir, "egress.sock")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			line, _ := bufio.NewReader(c).ReadString('\n')
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nproxy saw %s", line)
		}()
		if _, out, _ := run(bridge.UIDAgent, get...); !strings.Contains(out, "proxy saw GET http://example.invalid/") {
			t.Errorf("by the egress socket: %q", out)
		}
	})
	t.Run("the agent reaches no socket", func(t *testing.T) {
		exit, out, _ := run(bridge.UIDAgent, "sh", "-c", "ls /run/numi || ls /run/numi-plugin")
		if exit.Code == 0 {
			t.Errorf("listed %q", out)
		}
	})
	t.Run("plugin connections", func(t *testing.T) { pluginStreams(ctx, t, link) })

	waiting := make(chan error, 1)
	p, err := link.Spawn(ctx, bridge.Command{Argv: []string{"sleep", "60"}, Env: env, UID: bridge.UIDAgent})
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, err := p.Wait(); waiting <- err }()
	start = time.Now()
	link.Close()
	if err := <-waiting; !errors.Is(err, bridge.ErrOver) {
		t.Errorf("a process's wait over the end: %v", err)
	}
	if _, err := link.DialPlugin(ctx); !errors.Is(err, bridge.ErrOver) {
		t.Errorf("dial after the end: %v", err)
	}
	if d := time.Since(start); d > time.Second {
		t.Errorf("the end took %v", d)
	}
	if _, err := b.client.Destroy(t.Context(), &spv1.DestroyRequest{Sandbox: box}); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t, b.state, box)
}

// pluginStreams runs a small Go program as the adapter: it listens where a
// plugin listens, echoes, and calls its host.
func pluginStreams(ctx context.Context, t *testing.T, link *bridge.Bridge) {
	prog := filepath.Join(t.TempDir(), "echo")
	src := prog + ".go"
	code := `package main

import (
	"fmt"
	"io"
	"net"
	"os"
)

func main() {
	l, err := net.Listen("unix", os.Args[1])
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	h, err := net.Dial("unix", os.Args[2])
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Fprint(h, "hello host")
	for {
		c, err := l.Accept()
		if err != nil {
			os.Exit(1)
		}
		go func() { io.Copy(c, c); c.(*net.UnixConn).CloseWrite() }()
	}
}
`
	if err := os.WriteFile(src, []byte(code), 0o600); err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-o", prog, src)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the echo: %v: %s", err, out)
	}
	raw, err := os.ReadFile(prog)
	if err != nil {
		t.Fatal(err)
	}
	p, err := link.Spawn(ctx, bridge.Command{
		Argv: []string{"sh", "-c", "cat > /home/adapter/echo && chmod 700 /home/adapter/echo && exec /home/adapter/echo " + bridge.PluginSocket + " " + bridge.HostSocket},
		Env:  []string{"PATH=/usr/bin:/bin"}, Dir: "/home/adapter", UID: bridge.UIDAdapter,
	})
	if err != nil {
		t.Fatal(err)
	}
	go io.Copy(os.Stderr, p.Stderr)
	go func() { p.Stdin.Write(raw); p.Stdin.Close() }()

	host, err := link.HostListener().Accept()
	if err != nil {
		t.Fatal(err)
	}
	hello := make([]byte, 10)
	if _, err := io.ReadFull(host, hello); err != nil || string(hello) != "hello host" {
		t.Fatalf("host side got %q, %v", hello, err)
	}
	host.Close()
	want := bytes.Repeat([]byte("x1y2"), 300_000)
	for range 3 {
		c, err := link.DialPlugin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		go c.Write(want)
		got := make([]byte, len(want))
		if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, want) {
			t.Errorf("echo: %v", err)
		}
		c.Close()
	}
	p.Signal(syscall.SIGKILL)
	if exit, err := p.Wait(); err != nil || exit.Signal != int(syscall.SIGKILL) {
		t.Errorf("the plugin's end: %v, %v", exit, err)
	}
	var _ net.Conn = host
}

func boxes(t *testing.T, state string) int {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(state, "boxes"))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// nothingLeft looks for processes, mounts and files of a sandbox on the host.
func nothingLeft(t *testing.T, state, box string) {
	t.Helper()
	deadline := time.Now().Add(5 * time.Second)
	for {
		left := leftovers(t, state, box)
		if left == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("left of %s: %s", box, left)
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func leftovers(t *testing.T, state, box string) string {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), state) {
		return "a mount"
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		if raw, err := os.ReadFile(p); err == nil && strings.Contains(string(raw), box) {
			return "process " + filepath.Dir(p) + ": " + strings.ReplaceAll(string(raw), "\x00", " ")
		}
	}
	if boxes(t, state) != 0 {
		return "a directory"
	}
	cg, _ := filepath.Glob("/sys/fs/cgroup/*/numinance/" + box)
	if len(cg) > 0 {
		return "control group " + cg[0]
	}
	return ""
}

func tarNames(t *testing.T, raw []byte) []string {
	t.Helper()
	var out []string
	tr := tar.NewReader(bytes.NewReader(raw))
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, h.Name)
	}
}
