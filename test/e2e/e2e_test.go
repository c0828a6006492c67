// Package e2e runs the built binaries as a person would. Each file under
// testdata is a session at the command line that reads like a manual page.
package e2e_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

var binaries = []string{"numi", "numi-sandbox", "numi-init", "numi-verify"}

// world is what all scripts share: the binaries, and one state directory with
// the sandbox image, because making it is slow.
type world struct {
	bin  string
	home string
}

func build(t *testing.T) world {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	// A unix socket path is short, and so is a directory for them.
	dir, err := os.MkdirTemp("", "numi-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	w := world{bin: filepath.Join(dir, "bin"), home: filepath.Join(dir, "home")}
	for _, b := range binaries {
		cmd := exec.Command("go", "build", "-trimpath", "-o", filepath.Join(w.bin, b), "./cmd/"+b)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v\n%s", b, err, out)
		}
	}
	if os.Getuid() == 0 {
		// Jailed plugins run as other users and have to pass through.
		if err := os.Chmod(dir, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

// numi is one command line on a state directory.
func (w world) numi(home string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(w.bin, "numi"), args...)
	cmd.Env = append(os.Environ(), "NUMI_HOME="+home)
	return cmd
}

// makeHome makes a state directory that has the image of another.
func makeHome(shared string) (string, error) {
	dir, err := os.MkdirTemp("", "numi-home-")
	if err != nil {
		return "", err
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return "", err
	}
	return dir, os.Symlink(filepath.Join(shared, "images"), filepath.Join(dir, "images"))
}

func TestScripts(t *testing.T) {
	if testing.Short() {
		t.Skip("builds binaries and runs sandboxes")
	}
	w := build(t)
	// One process makes the image; all scripts use it.
	if out, err := w.numi(w.home, "change", "list").CombinedOutput(); err != nil {
		t.Fatalf("open the state directory: %v\n%s", err, out)
	}
	testscript.Run(t, testscript.Params{
		Dir:             "testdata",
		ContinueOnError: false,
		Condition: func(cond string) (bool, error) {
			if cond == "root" {
				return os.Getuid() == 0, nil
			}
			return false, fmt.Errorf("unknown condition %q", cond)
		},
		Setup: func(env *testscript.Env) error {
			gocache, err := exec.Command("go", "env", "GOMODCACHE").Output()
			if err != nil {
				return err
			}
			env.Setenv("PATH", w.bin+":"+os.Getenv("PATH"))
			env.Setenv("NUMI_HOME", w.home)
			env.Setenv("SHARED_HOME", w.home)
			env.Setenv("GOMODCACHE", strings.TrimSpace(string(gocache)))
			env.Setenv("HOME", env.WorkDir)
			for _, who := range []string{"AUTHOR", "COMMITTER"} {
				env.Setenv("GIT_"+who+"_NAME", "Ann")
				env.Setenv("GIT_"+who+"_EMAIL", "ann@example.com")
			}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"json":     checkJSON,
			"own-home": ownHome,
			"id":       rememberID,
			"waitfor":  waitFor,
			"kill9":    kill9,
			"leftover": leftover,

			"repository": repository,
			"listing":    listing,
			"big":        big,
			"members":    members,
			"forge":      forge,
			"tmpfs":      tmpfs,
		},
	})
}

// checkJSON wants members of the JSON object in a file: json FILE key=value …
func checkJSON(ts *testscript.TestScript, neg bool, args []string) {
	var object map[string]any
	if err := json.Unmarshal([]byte(ts.ReadFile(args[0])), &object); err != nil {
		ts.Fatalf("%s is not one JSON object: %v", args[0], err)
	}
	for _, want := range args[1:] {
		key, value, _ := strings.Cut(want, "=")
		got, ok := object[key]
		if !ok {
			ts.Fatalf("%s has no member %q", args[0], key)
		}
		text := fmt.Sprint(got)
		if f, isNumber := got.(float64); isNumber {
			text = fmt.Sprint(int64(f))
		}
		if re := regexp.MustCompile("^(?:" + value + ")$"); re.MatchString(text) == neg {
			ts.Fatalf("%s: %s is %q, want %q (negated: %v)", args[0], key, text, value, neg)
		}
	}
}

// ownHome gives the script a state directory of its own with the shared image.
func ownHome(ts *testscript.TestScript, neg bool, args []string) {
	dir, err := makeHome(ts.Getenv("SHARED_HOME"))
	ts.Check(err)
	ts.Defer(func() { os.RemoveAll(dir) })
	ts.Setenv("NUMI_HOME", dir)
}

var idPattern = regexp.MustCompile(`chg-[0-9a-z]+`)

// rememberID sets $ID to the first Change id in a file, waiting for one.
func rememberID(ts *testscript.TestScript, neg bool, args []string) {
	for end := time.Now().Add(60 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		b, err := os.ReadFile(ts.MkAbs(args[0]))
		if err != nil {
			continue
		}
		if id := idPattern.Find(b); id != nil {
			ts.Setenv("ID", string(id))
			return
		}
	}
	ts.Fatalf("no Change id in %s", args[0])
}

// waitFor waits until a file matches: waitfor FILE REGEXP.
func waitFor(ts *testscript.TestScript, neg bool, args []string) {
	re := regexp.MustCompile(args[1])
	for end := time.Now().Add(60 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if b, err := os.ReadFile(ts.MkAbs(args[0])); err == nil && re.Match(b) {
			return
		}
	}
	ts.Fatalf("%s does not match %s", args[0], args[1])
}

// kill9 kills every process that runs on this state directory.
func kill9(ts *testscript.TestScript, neg bool, args []string) {
	for _, pid := range owners(ts.Getenv("NUMI_HOME")) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// leftover fails if processes, mounts, cgroups or sandboxes of the state
// directory remain.
func leftover(ts *testscript.TestScript, neg bool, args []string) {
	ts.Check(nothingLeft(ts.Getenv("NUMI_HOME")))
}

func nothingLeft(home string) error {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		pids := owners(home)
		mounts, err := os.ReadFile("/proc/self/mounts")
		if err != nil {
			return err
		}
		boxes, err := filepath.Glob(filepath.Join(home, "providers", "sandboxprovider-gvisor", "boxes", "*"))
		if err != nil {
			return err
		}
		mounted := strings.Contains(strings.ReplaceAll(string(mounts), home+" ", ""), home+"/")
		if len(pids) == 0 && !mounted && len(boxes) == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("left behind: processes %v, sandboxes %v, mounts: %v", pids, boxes, mounted)
		}
	}
}

// tmpfs gives the script a state directory of so many MiB, or says that the
// disk is larger now: tmpfs MIB. It needs root.
func tmpfs(ts *testscript.TestScript, neg bool, args []string) {
	dir := ts.MkAbs("small")
	if _, err := os.Stat(dir); err == nil {
		ts.Check(syscall.Mount("", dir, "", syscall.MS_REMOUNT, "mode=711,size="+args[0]+"m"))
		return
	}
	ts.Check(os.Mkdir(dir, 0o711))
	ts.Check(syscall.Mount("tmpfs", dir, "tmpfs", 0, "mode=711,size="+args[0]+"m"))
	ts.Defer(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	ts.Check(os.Symlink(filepath.Join(ts.Getenv("SHARED_HOME"), "images"), filepath.Join(dir, "images")))
	ts.Setenv("NUMI_HOME", dir)
}

// owners are the processes whose environment, arguments or program name the
// state directory.
func owners(home string) (pids []int) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		var pid int
		if _, err := fmt.Sscanf(filepath.Base(d), "%d", &pid); err != nil || pid == os.Getpid() {
			continue
		}
		env, _ := os.ReadFile(filepath.Join(d, "environ"))
		cmd, _ := os.ReadFile(filepath.Join(d, "cmdline"))
		name, _, _ := strings.Cut(string(cmd), "\x00")
		if !strings.Contains(filepath.Base(name), "numi") && !strings.Contains(name, "runsc") {
			continue
		}
		if strings.Contains(string(env), "NUMI_HOME="+home+"\x00") || strings.Contains(string(cmd), home) {
			pids = append(pids, pid)
		}
	}
	return pids
}
