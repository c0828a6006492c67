package gvisor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// stepTimeout bounds every single call of the runtime: it answers in well under
// a second, and one that hangs must not hang the run.
const stepTimeout = 30 * time.Second

// runtime calls the sandbox program. Its commands are processes of their own;
// none outlives its call except the sandbox itself.
type runtime struct {
	path     string
	root     string // its state
	rootless bool
	cgroups  bool
}

func newRuntime(path, root string) *runtime {
	rootless := os.Geteuid() != 0
	return &runtime{path: path, root: root, rootless: rootless, cgroups: !rootless && cgroupsUsable()}
}

// flags are the same for every command of one sandbox, because the runtime
// compares some of them between calls.
func (r *runtime) flags(b *box) []string {
	f := []string{
		"--root=" + r.root, "--platform=systrap", "--network=none",
		"--log=" + filepath.Join(b.dir, "runtime.log"), "--log-format=text",
		"--allow-rootfs-tar-annotation",
		// All: whatever may be written to inside is written to memory. No host
		// directory is ever open for writing.
		fmt.Sprintf("--overlay2=all:memory,size=%d", b.Disk),
		"--sidecar-usage-policy=DEFAULT",
		// The default shares one namespace by a mount in the state directory,
		// which a killed process would leave behind.
		"--gofer-network-namespace=new",
	}
	if b.Link {
		f = append(f, "--host-uds=open")
	} else {
		f = append(f, "--host-uds=none")
	}
	if r.rootless {
		f = append(f, "--rootless")
	}
	if !r.cgroups {
		f = append(f, "--ignore-cgroups")
	}
	return f
}

// command prepares a call with nothing inherited but the three standard files,
// which stay /dev/null unless the caller sets them.
func (r *runtime) command(ctx context.Context, b *box, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, r.path, append(r.flags(b), args...)...)
	cmd.Dir = b.dir
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.WaitDelay = 2 * time.Second
	return cmd
}

// run calls a command that says nothing on success.
func (r *runtime) run(ctx context.Context, b *box, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	log := filepath.Join(b.dir, "runtime.log")
	before := size(log)
	if err := r.command(ctx, b, args...).Run(); err != nil {
		return r.failure(ctx, args[0], err, tailFrom(log, before))
	}
	return nil
}

// output calls a command and returns what it wrote to standard output.
func (r *runtime) output(ctx context.Context, b *box, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	var out, errs bytes.Buffer
	cmd := r.command(ctx, b, args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return nil, r.failure(ctx, args[0], err, errs.String())
	}
	return out.Bytes(), nil
}

func (r *runtime) failure(ctx context.Context, what string, err error, said string) error {
	if ctx.Err() != nil {
		return fmt.Errorf("sandbox runtime %s: %w", what, ctx.Err())
	}
	if said = lastLine(said); said != "" {
		return fmt.Errorf("sandbox runtime %s: %w: %s", what, err, said)
	}
	return fmt.Errorf("sandbox runtime %s: %w", what, err)
}

// state returns the sandbox's host process, or 0 if the runtime knows none.
func (r *runtime) state(ctx context.Context, b *box) (pid int, status string) {
	out, err := r.output(ctx, b, "state", b.ID)
	if err != nil {
		return 0, ""
	}
	var s struct {
		PID    int    `json:"pid"`
		Status string `json:"status"`
	}
	if json.Unmarshal(out, &s) != nil {
		return 0, ""
	}
	return s.PID, s.Status
}

// memory returns what the sandbox's programs use, in bytes.
func (r *runtime) memory(ctx context.Context, b *box) (int64, error) {
	out, err := r.output(ctx, b, "events", "-stats", b.ID)
	if err != nil {
		return 0, err
	}
	var s struct {
		Data struct {
			Memory struct {
				Usage struct {
					Usage int64 `json:"usage"`
				} `json:"usage"`
			} `json:"memory"`
		} `json:"data"`
	}
	if err := json.Unmarshal(out, &s); err != nil {
		return 0, fmt.Errorf("read the sandbox's memory: %w", err)
	}
	return s.Data.Memory.Usage.Usage, nil
}

// cgroupsUsable reports whether this process may make control groups with a
// memory limit. It tries; a mounted hierarchy alone proves nothing.
func cgroupsUsable() bool {
	for _, dir := range []string{"/sys/fs/cgroup/memory", "/sys/fs/cgroup"} {
		name := "memory.limit_in_bytes"
		if dir == "/sys/fs/cgroup" {
			if _, err := os.Stat(filepath.Join(dir, "cgroup.controllers")); err != nil {
				continue
			}
			_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+memory +pids +cpu"), 0o644)
			name = "memory.max"
		}
		probe := filepath.Join(dir, fmt.Sprintf("numinance-probe-%d", os.Getpid()))
		if os.Mkdir(probe, 0o755) != nil {
			continue
		}
		err := os.WriteFile(filepath.Join(probe, name), []byte("1073741824"), 0o644)
		if errors.Join(err, os.Remove(probe)) == nil {
			return true
		}
	}
	return false
}

func size(p string) int64 {
	st, err := os.Stat(p)
	if err != nil {
		return 0
	}
	return st.Size()
}

func tailFrom(p string, from int64) string {
	b, err := os.ReadFile(p)
	if err != nil || from > int64(len(b)) {
		return ""
	}
	return string(b[max(from, int64(len(b))-4096):])
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	last := lines[len(lines)-1]
	return last[:min(len(last), 400)]
}

// lockDir holds dir for this process; two providers in one directory would
// sweep each other's sandboxes away.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the state directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("state directory %s is in use by another provider: %w", dir, err), f.Close())
	}
	return f, nil
}
