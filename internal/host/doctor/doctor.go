// Package doctor finds out what this host enforces, by trying it, and says in
// plain words what is missing and how to allow it. The command line prints it
// and the first start of the runtime asks it; it changes nothing on the host.
package doctor

import (
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
)

// State is how one check came out. The zero value is Unknown, which is no
// success.
type State uint8

// The states.
const (
	Unknown State = iota
	OK            // works
	Weaker        // works, with less enforced than could be
	Missing       // does not work; sandboxes or changes cannot be made
)

func (s State) String() string {
	switch s {
	case OK:
		return "ok"
	case Weaker:
		return "weaker"
	case Missing:
		return "missing"
	}
	return "unknown"
}

// MarshalText writes the state as its word.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Check is one thing looked at.
type Check struct {
	Name   string        `json:"name"`
	State  State         `json:"state"`
	Detail string        `json:"detail"`        // what was seen
	Fix    string        `json:"fix,omitempty"` // what a person can do
	Took   time.Duration `json:"took_ns"`
}

// Report is all checks in the order of importance.
type Report struct {
	Checks []Check `json:"checks"`
}

// Ready reports whether changes can be run here: nothing is missing or unknown.
func (r Report) Ready() bool {
	for _, c := range r.Checks {
		if c.State != OK && c.State != Weaker {
			return false
		}
	}
	return len(r.Checks) > 0
}

// Config says where the programs are.
type Config struct {
	Runtime string                                // numi-sandbox
	Init    string                                // numi-init
	Image   func(context.Context) (string, error) // the image to use, or why there is none; may be nil
}

// probeTimeout bounds each check; a kernel that hangs is a kernel that fails.
const probeTimeout = 20 * time.Second

// Run makes all checks. It never fails: what cannot be found out is Unknown.
func Run(ctx context.Context, c Config) Report {
	var r Report
	for _, p := range []struct {
		name string
		do   func(context.Context) Check
	}{
		{"sandbox", c.sandbox},
		{"user namespaces", Namespaces},
		{"control groups", controlGroups},
		{"git", git},
		{"go", golang},
		{"image", c.image},
	} {
		if p.name == "image" && c.Image == nil {
			continue
		}
		start := time.Now()
		pctx, cancel := context.WithTimeout(ctx, probeTimeout)
		check := p.do(pctx)
		cancel()
		check.Name, check.Took = p.name, time.Since(start)
		r.Checks = append(r.Checks, check)
	}
	return r
}

// sandbox starts a real one with nothing in it but PID 1's program.
func (c Config) sandbox(ctx context.Context) Check {
	for _, p := range []string{c.Runtime, c.Init} {
		if st, err := os.Stat(p); err != nil || st.Mode()&0o111 == 0 {
			return Check{State: Missing, Detail: fmt.Sprintf("the program %s is not there", p), Fix: "put numi-sandbox and numi-init into the directory of numi"}
		}
	}
	dir, err := os.MkdirTemp("", "numi-doctor-")
	if err != nil {
		return Check{State: Unknown, Detail: err.Error()}
	}
	defer os.RemoveAll(dir)
	said, err := c.probe(ctx, dir)
	mode := "as root"
	if os.Geteuid() != 0 {
		mode = "as an unprivileged user"
	}
	if err == nil {
		return Check{State: OK, Detail: "gVisor (systrap) started a sandbox with a kernel of its own, " + mode}
	}
	out := Check{State: Missing, Detail: fmt.Sprintf("gVisor cannot start a sandbox %s: %s", mode, said)}
	if ctx.Err() != nil {
		out.Detail = fmt.Sprintf("gVisor did not start a sandbox %s within %v", mode, probeTimeout)
	}
	if os.Geteuid() != 0 {
		out.Fix = namespaceFix() + "; or run numi as root"
	} else {
		out.Fix = "if this is a container, start it with the right to make namespaces; else report the message above"
	}
	return out
}

func (c Config) probe(ctx context.Context, dir string) (said string, err error) {
	root := filepath.Join(dir, "rootfs")
	if err := os.Mkdir(root, 0o755); err != nil {
		return err.Error(), err
	}
	b, err := os.ReadFile(c.Init)
	if err != nil {
		return err.Error(), err
	}
	if err := os.WriteFile(filepath.Join(root, "init"), b, 0o755); err != nil {
		return err.Error(), err
	}
	spec, err := json.Marshal(map[string]any{
		"ociVersion": "1.1.0", "hostname": "probe", "root": map[string]any{"path": root, "readonly": true},
		"process": map[string]any{"user": map[string]any{"uid": 0, "gid": 0}, "cwd": "/", "env": []string{}, "args": []string{"/init", "seen", "/init", "/proc"}, "noNewPrivileges": true},
		"mounts":  []map[string]any{{"destination": "/proc", "type": "proc", "source": "proc"}},
		"linux":   map[string]any{"namespaces": []map[string]any{{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}, {"type": "network"}}},
	})
	if err != nil {
		return err.Error(), err
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), spec, 0o600); err != nil {
		return err.Error(), err
	}
	args := []string{"--root=" + filepath.Join(dir, "state"), "--platform=systrap", "--network=none", "--ignore-cgroups", "--overlay2=root:memory", "--gofer-network-namespace=new"}
	if os.Geteuid() != 0 {
		args = append(args, "--rootless")
	}
	cmd := exec.CommandContext(ctx, c.Runtime, append(args, "run", "-bundle", dir, "numi-doctor")...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	last := lines[len(lines)-1]
	if last == "" && err != nil {
		last = err.Error()
	}
	return last[:min(len(last), 400)], err
}

// Namespaces says whether this process may make the user namespaces that jails
// and sandboxes stand in. It tries; root needs none.
func Namespaces(ctx context.Context) Check {
	if os.Geteuid() == 0 {
		return Check{Name: "user namespaces", State: OK, Detail: "not needed by root"}
	}
	out := Check{Name: "user namespaces", State: OK, Detail: "an unprivileged user may make them"}
	err := makeNamespace(ctx)
	if err == nil {
		return out
	}
	out.State, out.Detail, out.Fix = Missing, fmt.Sprintf("an unprivileged user may not make them: %v", err), namespaceFix()
	if why := blockedNamespaces(); len(why) > 0 {
		out.Detail = why[0].why
	}
	return out
}

// makeNamespace starts a process in a user namespace of its own and mounts in
// it: AppArmor allows the one and takes away the other.
func makeNamespace(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", ":")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		// Unshareflags makes the child remount its root privately, which is a mount.
		Unshareflags: syscall.CLONE_NEWNS,
	}
	return cmd.Run()
}

type blockade struct{ file, key, bad, good, why string }

func blockedNamespaces() (out []blockade) {
	for _, k := range []blockade{
		{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "", "1", "", "AppArmor keeps user namespaces from programs without a profile"},
		{"/proc/sys/kernel/unprivileged_userns_clone", "kernel.unprivileged_userns_clone", "0", "1", "the kernel keeps user namespaces from unprivileged users"},
		{"/proc/sys/user/max_user_namespaces", "user.max_user_namespaces", "0", "10000", "the kernel allows no user namespace"},
	} {
		if b, err := os.ReadFile(k.file); err == nil && strings.TrimSpace(string(b)) == k.bad {
			out = append(out, k)
		}
	}
	return out
}

func namespaceFix() string {
	var set []string
	for _, k := range blockedNamespaces() {
		if k.key == "" {
			return "allow it for numi and numi-sandbox alone: write for each a file like /etc/apparmor.d/numi-sandbox with `abi <abi/4.0>, profile numi-sandbox /path/to/numi-sandbox flags=(unconfined) { userns, }` and load both with apparmor_parser -r"
		}
		set = append(set, k.key+"="+k.good)
	}
	if len(set) == 0 {
		return "if this is a container, start it with the right to make user namespaces"
	}
	return "as root: sysctl -w " + strings.Join(set, " ")
}

// controlGroups tries to make one with a memory limit.
func controlGroups(context.Context) Check {
	weaker := Check{State: Weaker, Detail: "this process may make no control group: memory is looked at every second instead of enforced, and no CPU limit can be held", Fix: "run numi as root on a host whose control groups are writable"}
	if os.Geteuid() != 0 {
		return weaker
	}
	for _, c := range []struct{ dir, file, kind string }{
		{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "version 1"},
		{"/sys/fs/cgroup", "memory.max", "version 2"},
	} {
		probe := filepath.Join(c.dir, fmt.Sprintf("numinance-doctor-%d", os.Getpid()))
		if os.Mkdir(probe, 0o755) != nil {
			continue
		}
		err := os.WriteFile(filepath.Join(probe, c.file), []byte("1073741824"), 0o644)
		if errors.Join(err, os.Remove(probe)) == nil {
			return Check{State: OK, Detail: "memory limits are enforced by control groups " + c.kind}
		}
	}
	return weaker
}

func git(ctx context.Context) Check {
	out, err := version(ctx, "git", "--version")
	if err != nil {
		return Check{State: Missing, Detail: err.Error(), Fix: "install git"}
	}
	return Check{State: OK, Detail: out}
}

func golang(ctx context.Context) Check {
	out, err := version(ctx, "go", "version")
	if err != nil {
		return Check{State: Weaker, Detail: err.Error(), Fix: "install Go if your project or a verifier needs it in the image"}
	}
	return Check{State: OK, Detail: out}
}

func version(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = "/"
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("run %s: %w", name, err)
	}
	return strings.TrimSpace(string(out)), nil
}

func (c Config) image(ctx context.Context) Check {
	name, err := c.Image(ctx)
	if err != nil {
		return Check{State: Missing, Detail: err.Error(), Fix: "numi image build --from-host"}
	}
	return Check{State: OK, Detail: name}
}
