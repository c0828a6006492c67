package gvisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	sandboxproviderv1 "github.com/numinance/numinance/gen/numinance/ports/sandboxprovider/v1"
)

// sentryMemory is added to the requested memory for the sandbox's own kernel,
// which lives in the same control group and cannot start in less.
const sentryMemory = 192 << 20

// writeBundle writes the OCI configuration of a sandbox.
func (p *provider) writeBundle(b *box, rootfs string, spec *sandboxproviderv1.SandboxSpec) error {
	lim := spec.GetLimits()
	caps := []string{"CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN", "CAP_DAC_OVERRIDE"}
	mounts := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc"},
		{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=1777", fmt.Sprintf("size=%d", lim.GetDiskBytes())}},
		{Destination: initDir, Type: "bind", Source: p.tools, Options: []string{"rbind", "ro", "nosuid", "nodev"}},
	}
	if spec.GetLinkDirectory() != "" {
		mounts = append(mounts, specs.Mount{Destination: linkDir, Type: "bind", Source: spec.GetLinkDirectory(), Options: []string{"rbind", "ro", "nosuid", "nodev", "noexec"}})
	}
	for _, m := range spec.GetMounts() {
		if err := checkMountPoint(rootfs, m.GetTarget()); err != nil {
			return err
		}
		access := "ro"
		if m.GetCopyOnWrite() {
			access = "rw" // into the overlay that the runtime lays over it, in memory
		}
		mounts = append(mounts, specs.Mount{Destination: m.GetTarget(), Type: "bind", Source: m.GetSource(), Options: []string{"rbind", access, "nosuid", "nodev"}})
	}
	rlimit := func(kind string, n uint64) specs.POSIXRlimit { return specs.POSIXRlimit{Type: kind, Hard: n, Soft: n} }
	memory := lim.GetMemoryBytes() + sentryMemory
	cfg := specs.Spec{
		Version:  "1.1.0",
		Hostname: "sandbox",
		Root:     &specs.Root{Path: rootfs},
		Mounts:   mounts,
		Process: &specs.Process{
			Args: []string{initPath}, Cwd: "/", Env: []string{},
			Capabilities:    &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps},
			NoNewPrivileges: true,
			Rlimits: []specs.POSIXRlimit{
				rlimit("RLIMIT_NPROC", uint64(lim.GetProcesses())),
				rlimit("RLIMIT_FSIZE", uint64(lim.GetFileBytes())),
				rlimit("RLIMIT_NOFILE", uint64(lim.GetOpenFiles())),
				rlimit("RLIMIT_CORE", 0),
			},
		},
		Annotations: map[string]string{"dev.gvisor.tar.rootfs.upper": filepath.Join(b.dir, "upper.tar")},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace}, {Type: specs.NetworkNamespace},
			},
		},
	}
	if p.rt.cgroups {
		cfg.Linux.CgroupsPath = "/numinance/" + b.ID
		// The sandbox's kernel runs on host threads of its own; the limit on
		// processes inside is the rlimit.
		cfg.Linux.Resources = &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &memory}}
		if m := lim.GetCpuMillis(); m > 0 {
			period, quota := uint64(100_000), int64(m)*100
			cfg.Linux.Resources.CPU = &specs.LinuxCPU{Period: &period, Quota: &quota}
		}
	}
	raw, err := json.Marshal(cfg)
	if err != nil {
		return fmt.Errorf("encode the bundle: %w", err)
	}
	if err := os.WriteFile(filepath.Join(b.dir, "config.json"), raw, 0o600); err != nil {
		return fmt.Errorf("write the bundle: %w", err)
	}
	return nil
}

// checkSpec refuses what the provider cannot hold to the letter.
func (p *provider) checkSpec(spec *sandboxproviderv1.SandboxSpec) error {
	if m := spec.GetLimits().GetCpuMillis(); m > 0 && !p.rt.cgroups {
		return errors.New("a CPU limit needs control groups, which this process may not use here: run the runtime as root, or ask for no CPU limit")
	}
	for _, s := range spec.GetScratch() {
		if _, err := plainName("./" + s); err != nil || s == "." {
			return fmt.Errorf("scratch directory %q: not a plain path below the work tree", s)
		}
	}
	for _, m := range spec.GetMounts() {
		if err := checkMount(m); err != nil {
			return err
		}
	}
	if dir := spec.GetLinkDirectory(); dir != "" {
		st, err := os.Lstat(dir)
		if err != nil {
			return fmt.Errorf("link directory: %w", err)
		}
		sys, ok := st.Sys().(*syscall.Stat_t)
		if !ok || !st.IsDir() || int(sys.Uid) != os.Geteuid() || st.Mode().Perm()&0o077 != 0 || !filepath.IsAbs(dir) {
			return fmt.Errorf("link directory %s: want a directory of this user with mode 0700", dir)
		}
	}
	return nil
}

// checkMountPoint wants the target in the image already: the runtime would
// otherwise make it there, and the image would not be what its digest says.
func checkMountPoint(rootfs, target string) error {
	if _, err := os.Lstat(filepath.Join(rootfs, target)); err != nil {
		return fmt.Errorf("mount target %q is not part of the image: mount at a path that it holds", target)
	}
	return nil
}

func checkMount(m *sandboxproviderv1.ReadOnlyMount) error {
	target, source := m.GetTarget(), m.GetSource()
	if !path.IsAbs(target) || path.Clean(target) != target || target == "/" {
		return fmt.Errorf("mount target %q: not a plain absolute path", target)
	}
	for _, taken := range []string{"/proc", "/sys", "/dev", "/tmp", "/run", "/etc", initDir} {
		if target == taken || strings.HasPrefix(target, taken+"/") || strings.HasPrefix(taken, target+"/") {
			return fmt.Errorf("mount target %q: %s belongs to the sandbox", target, taken)
		}
	}
	st, err := os.Lstat(source)
	if err != nil {
		return fmt.Errorf("mount source: %w", err)
	}
	switch {
	case !filepath.IsAbs(source) || filepath.Clean(source) != source:
		return fmt.Errorf("mount source %q: not a plain absolute path", source)
	case st.IsDir() && m.GetDigest() != "":
		return fmt.Errorf("mount source %s is a directory; only a file has a digest", source)
	case st.IsDir():
		return nil
	case m.GetCopyOnWrite():
		return fmt.Errorf("mount source %s is a file; only a directory is copied on write", source)
	case !st.Mode().IsRegular():
		return fmt.Errorf("mount source %s is neither a file nor a directory", source)
	case m.GetDigest() == "":
		return fmt.Errorf("mount source %s is a file and needs its digest", source)
	}
	b, err := os.ReadFile(source)
	if err != nil {
		return fmt.Errorf("mount source: %w", err)
	}
	if "sha256:"+hashOf(b) != m.GetDigest() {
		return fmt.Errorf("mount source %s does not have its digest", source)
	}
	return nil
}
