//go:build linux

package jail_test

import (
	"bytes"
	"debug/elf"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/numinance/numinance/internal/host/pluginhost/jail"
)

func TestMain(m *testing.M) {
	jail.Enter()
	if len(os.Args) == 2 && os.Args[1] == "probe" {
		probe()
	}
	os.Exit(m.Run())
}

// probe prints what the jailed program can do, one word a line.
func probe() {
	can := func(what string, err error) {
		if err == nil {
			fmt.Println("can", what)
		} else {
			fmt.Println("cannot", what)
		}
	}
	fmt.Println("uid", os.Getuid())
	try := func(dir string) error { return os.WriteFile(filepath.Join(dir, "probe"), []byte("x"), 0o600) }
	can("write-data", try(os.Getenv("DATA")))
	can("write-shared", try(os.Getenv("SHARED")))
	can("write-readable", try(os.Getenv("READABLE")))
	_, err := os.ReadFile(filepath.Join(os.Getenv("READABLE"), "f"))
	can("read-readable", err)
	can("write-tmp", try("/tmp"))
	can("write-root", try("/"))
	can("write-usr", try("/usr"))
	_, err = os.ReadFile(os.Getenv("SECRET"))
	can("read-secret", err)
	_, err = os.ReadFile("/etc/shadow")
	can("read-shadow", err)
	_, err = net.DialTimeout("tcp", "1.1.1.1:443", time.Second)
	can("dial-out", err)
	_, err = net.Dial("unix", os.Getenv("VICTIM"))
	can("reach-foreign-socket", err)
	_, err = net.Dial("unix", "\x00numi-jail-test")
	can("reach-abstract-socket", err)
	can("run-tools", exec.Command("/bin/sh", "-c", "true").Run())
	can("unshare", syscall.Unshare(syscall.CLONE_NEWNS))
	u := exec.Command("/proc/self/exe", "none")
	u.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER}
	err = u.Start()
	can("nest-user-namespace", err)
	can("mount", syscall.Mount("none", "/tmp", "tmpfs", 0, ""))
	can("kill-init", syscall.Kill(1, syscall.SIGKILL))
	can("trace-init", syscall.PtraceAttach(1))
	_, err = os.Open("/proc/1/mem")
	can("open-init-memory", err)
	can("become-root", syscall.Setuid(0))
	for _, e := range os.Environ() {
		fmt.Println("env", strings.SplitN(e, "=", 2)[0])
	}
	fmt.Println("end")
	os.Exit(7)
}

// static returns this test as a binary without a loader, which a jail without
// tools does not have; the race detector needs one.
func static(t *testing.T) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	f, err := elf.Open(exe)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	dynamic := slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP })
	if !dynamic {
		return exe
	}
	out := filepath.Join(t.TempDir(), "jail.test")
	cmd := exec.Command("go", "test", "-c", "-o", out, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build without cgo: %v\n%s", err, b)
	}
	return out
}

// inJail runs the probe and returns what it printed and its exit code.
func inJail(t *testing.T, mapped, tools bool, uid int) (string, int, jail.Report) {
	t.Helper()
	base := t.TempDir()
	dir := func(name string) string {
		d := filepath.Join(base, name)
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
		return d
	}
	root, sockets, data, shared, readable := dir("root"), dir("sockets"), dir("data"), dir("shared"), dir("readable")
	if err := os.WriteFile(filepath.Join(readable, "f"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if !mapped {
		for _, d := range []string{sockets, data} { // shared stays root's: its owner is mapped
			if err := os.Chown(d, uid, uid); err != nil {
				t.Fatal(err)
			}
		}
	}
	secret := filepath.Join(base, "secret")
	if err := os.WriteFile(secret, []byte("s"), 0o644); err != nil {
		t.Fatal(err)
	}
	victim := filepath.Join(dir("v"), "s")
	l, err := net.Listen("unix", victim)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	abstract, err := net.Listen("unix", "\x00numi-jail-test")
	if err != nil {
		t.Fatal(err)
	}
	defer abstract.Close()
	exe := static(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var out bytes.Buffer
	j, err := jail.Start(exe, jail.Spec{
		Argv: []string{exe, "probe"}, UID: uid, GID: uid, Mapped: mapped, Root: root, Sockets: sockets, Tools: tools,
		Env:      []string{"DATA=" + data, "SHARED=" + shared, "SECRET=" + secret, "VICTIM=" + victim, "READABLE=" + readable},
		Writable: []string{data, shared}, Readable: []string{readable}, TmpBytes: 8 << 20,
	}, &out)
	if err != nil {
		t.Fatal(err)
	}
	report, err := j.Report(time.Now().Add(10 * time.Second))
	if err != nil {
		j.Kill()
		t.Fatalf("%v\n%s", err, out.String())
	}
	_ = j.Cmd.Wait()
	for _, d := range []string{data, shared} {
		st, err := os.Stat(filepath.Join(d, "probe"))
		if err != nil {
			t.Fatalf("what the program wrote is not there: %v\n%s", err, out.String())
		}
		want := uint32(uid)
		if d == shared {
			want = uint32(os.Getuid())
		}
		if got := st.Sys().(*syscall.Stat_t).Uid; got != want {
			t.Errorf("%s: owner on disk is %d, want %d", d, got, want)
		}
	}
	return out.String(), j.Cmd.ProcessState.ExitCode(), report
}

func check(t *testing.T, out string, code, uid int, tools bool) {
	t.Helper()
	want := []string{
		fmt.Sprintf("uid %d", uid), "can write-data", "can write-shared", "can write-tmp", "can read-readable", "cannot write-readable", "cannot write-root", "cannot write-usr",
		"cannot read-secret", "cannot read-shadow", "cannot dial-out", "cannot reach-foreign-socket", "cannot reach-abstract-socket",
		"cannot unshare", "cannot nest-user-namespace", "cannot mount", "cannot trace-init", "cannot open-init-memory", "cannot become-root",
		"env DATA", "end",
	}
	if tools {
		want = append(want, "can run-tools")
	} else {
		want = append(want, "cannot run-tools")
	}
	lines := strings.Split(out, "\n")
	for _, w := range want {
		found := false
		for _, l := range lines {
			found = found || l == w
		}
		if !found {
			t.Errorf("missing %q", w)
		}
	}
	if n := strings.Count(out, "env "); n != 5 {
		t.Errorf("%d variables in the environment, want the 5 given", n)
	}
	if code != 7 {
		t.Errorf("exit code %d, want the program's 7", code)
	}
	if t.Failed() {
		t.Log(out)
	}
}

func TestJailOfRoot(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root; TestJailOfUser covers an ordinary user")
	}
	for _, tools := range []bool{false, true} {
		t.Run(fmt.Sprintf("tools=%v", tools), func(t *testing.T) {
			out, code, report := inJail(t, false, tools, 48999)
			if !report.Seccomp {
				t.Errorf("report %+v, want seccomp", report)
			}
			check(t, out, code, 48999, tools)
		})
	}
}

// TestJailOfUser runs as the user it is started by; root starts it again as a
// spare uid.
func TestJailOfUser(t *testing.T) {
	if os.Getuid() == 0 {
		exe := static(t)
		// The build directory may be closed to others.
		b, err := os.ReadFile(exe)
		if err != nil {
			t.Fatal(err)
		}
		dir, err := os.MkdirTemp("", "numi-user-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		exe = filepath.Join(dir, "jail.test")
		if err := os.WriteFile(exe, b, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(dir, 0o777); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(exe, "-test.run=TestJailOfUser", "-test.v")
		cmd.Dir = dir
		cmd.Env = []string{"TMPDIR=" + dir, "HOME=" + dir}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 48998, Gid: 48998}}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil {
			t.Fatalf("as an ordinary user: %v", err)
		}
		return
	}
	for _, tools := range []bool{false, true} {
		t.Run(fmt.Sprintf("tools=%v", tools), func(t *testing.T) {
			out, code, _ := inJail(t, true, tools, os.Getuid())
			check(t, out, code, os.Getuid(), tools)
		})
	}
}

// A provider with tools can use the host's git and its own compiler's output.
func TestToolsWork(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("this machine has no git")
	}
	base := t.TempDir()
	for _, d := range []string{"root", "sockets", "data"} {
		if err := os.Mkdir(filepath.Join(base, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	data := filepath.Join(base, "data")
	s := jail.Spec{
		Argv: []string{"/bin/sh", "-ec", `cd "$HOME"; git init -q r; cd r; echo x >f; git add f
git -c user.name=a -c user.email=a@b commit -qm one; git gc -q; git fsck --strict; git log --format=%s
printf '#!/bin/sh\necho ran\n' >run; chmod +x run; ./run; sleep 0.01 & wait`},
		Env:  []string{"HOME=" + data, "PATH=/usr/bin:/bin", "TMPDIR=/tmp"},
		Root: filepath.Join(base, "root"), Sockets: filepath.Join(base, "sockets"), Writable: []string{data},
		Tools: true, TmpBytes: 8 << 20, UID: os.Getuid(), GID: os.Getgid(), Mapped: true,
	}
	if os.Getuid() == 0 {
		s.UID, s.GID, s.Mapped = 48999, 48999, false
	}
	s.Argv[0], _ = filepath.EvalSymlinks(s.Argv[0])
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var out bytes.Buffer
	j, err := jail.Start(static(t), s, &out)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := j.Report(time.Now().Add(10 * time.Second)); err != nil {
		j.Kill()
		t.Fatalf("%v\n%s", err, out.String())
	}
	if err := j.Cmd.Wait(); err != nil || out.String() != "one\nran\n" {
		t.Fatalf("got %v\n%s", err, out.String())
	}
}
