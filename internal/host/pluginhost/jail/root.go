//go:build linux

package jail

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// system are the host's directories with programs and libraries; one that is a
// symbolic link on the host is one inside.
var system = []string{"/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32"}

// etc is what programs need of the host's configuration; nothing in it is
// private to the machine.
var etc = []string{"/etc/ssl", "/etc/ca-certificates", "/etc/pki", "/etc/alternatives", "/etc/ld.so.cache", "/etc/mime.types", "/etc/localtime"}

var devices = []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}

const tmpfsFlags = unix.MS_NOSUID | unix.MS_NODEV

// buildRoot makes a root that holds only what the Spec names, moves into it and
// drops the old one. proc tells whether /proc could be mounted; containers often
// forbid that, and plugins live without it.
func (s Spec) buildRoot() (proc bool, err error) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return false, fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("numi-root", s.Root, "tmpfs", tmpfsFlags, "size=1m,mode=0755"); err != nil {
		return false, fmt.Errorf("mount the new root: %w", err)
	}
	at := func(p string) string { return filepath.Join(s.Root, p) }

	// First, because what follows may lie below it.
	if err := mountTmp(at("/tmp"), s.TmpBytes); err != nil {
		return false, err
	}
	readOnly := append([]string{}, etc...)
	if s.Tools {
		readOnly = append(readOnly, system...)
	}
	for _, p := range readOnly {
		if err := s.bindIfThere(p); err != nil {
			return false, err
		}
	}
	for _, p := range s.Readable {
		err := bind(p, at(p), true, s.owner(p))
		if errors.Is(err, unix.EINVAL) {
			// A file system without maps: the program sees what others may see.
			err = bind(p, at(p), true, noMap)
		}
		if err != nil {
			return false, err
		}
	}
	if !same(s.Argv[0], at(s.Argv[0])) { // else it is one of the host's tools
		if err := bind(s.Argv[0], at(s.Argv[0]), true, noMap); err != nil {
			return false, err
		}
	}
	for _, p := range devices {
		if err := bindDevice(p, at(p)); err != nil {
			return false, err
		}
	}
	if err := os.MkdirAll(at("/proc"), 0o755); err != nil {
		return false, fmt.Errorf("make /proc: %w", err)
	}
	if err := bind(s.Sockets, at(SocketDir), false, noMap); err != nil {
		return false, err
	}
	for _, p := range s.Writable {
		if err := bind(p, at(p), false, s.owner(p)); err != nil {
			return false, err
		}
	}
	names := map[string]string{
		"/etc/passwd": fmt.Sprintf("plugin:x:%d:%d:plugin:/tmp:/bin/false\n", s.UID, s.GID),
		"/etc/group":  fmt.Sprintf("plugin:x:%d:\n", s.GID),
		// Names are resolved by the egress proxy, never here.
		"/etc/hosts":         "127.0.0.1 localhost\n",
		"/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
	}
	for p, content := range names {
		if err := os.MkdirAll(filepath.Dir(at(p)), 0o755); err != nil {
			return false, fmt.Errorf("make %s: %w", p, err)
		}
		if err := os.WriteFile(at(p), []byte(content), 0o444); err != nil {
			return false, fmt.Errorf("write %s: %w", p, err)
		}
	}
	proc = unix.Mount("proc", at("/proc"), "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "") == nil

	if err := os.Chdir(s.Root); err != nil {
		return false, fmt.Errorf("enter the new root: %w", err)
	}
	// The old root is stacked on the new one and then taken off.
	if err := unix.PivotRoot(".", "."); err != nil {
		return false, fmt.Errorf("pivot to the new root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return false, fmt.Errorf("drop the old root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return false, fmt.Errorf("enter the new root: %w", err)
	}
	if err := unix.MountSetattr(unix.AT_FDCWD, "/", 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return false, fmt.Errorf("make the new root read-only: %w", err)
	}
	return proc, nil
}

// noMap is the descriptor of no user namespace.
const noMap = -1

// owner returns the descriptor of the user namespace that a directory is mounted
// with, or noMap.
func (s Spec) owner(path string) int {
	if fd, ok := s.Owners[path]; ok {
		return fd
	}
	return noMap
}

// bindIfThere binds a host path read-only, repeats it if it is a link, and skips
// what this host does not have.
func (s Spec) bindIfThere(p string) error {
	st, err := os.Lstat(p)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at %s: %w", p, err)
	}
	to := filepath.Join(s.Root, p)
	if st.Mode()&os.ModeSymlink != 0 {
		target, err := os.Readlink(p)
		if err != nil {
			return fmt.Errorf("read the link %s: %w", p, err)
		}
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return fmt.Errorf("make the parent of %s: %w", p, err)
		}
		if err := os.Symlink(target, to); err != nil {
			return fmt.Errorf("repeat the link %s: %w", p, err)
		}
		return nil
	}
	return bind(p, to, true, noMap)
}

// bind makes from appear at to, without set-uid programs and devices. idmap is
// the user namespace whose map the new mount has, or noMap.
func bind(from, to string, readOnly bool, idmap int) error {
	if err := mountpoint(from, to); err != nil {
		return err
	}
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	recursive := uint(unix.AT_RECURSIVE)
	if idmap != noMap {
		recursive = 0 // other file systems below may not know maps
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, from, flags|recursive)
	if err != nil {
		return fmt.Errorf("open %s: %w", from, err)
	}
	defer unix.Close(fd)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
	if readOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if idmap != noMap {
		attr.Attr_set |= unix.MOUNT_ATTR_IDMAP
		attr.Userns_fd = uint64(idmap)
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|recursive, &attr); err != nil {
		if idmap != noMap {
			return fmt.Errorf("map the owner of %s to the plugin: %w: its file system does not support that; give the directory to the plugin's uid or keep it elsewhere", from, err)
		}
		return fmt.Errorf("restrict %s: %w", from, err)
	}
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, to, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount %s: %w", from, err)
	}
	return nil
}

func same(a, b string) bool {
	x, errX := os.Stat(a)
	y, errY := os.Stat(b)
	return errX == nil && errY == nil && os.SameFile(x, y)
}

func mountpoint(from, to string) error {
	st, err := os.Stat(from)
	if err != nil {
		return fmt.Errorf("look at %s: %w", from, err)
	}
	if st.IsDir() {
		if err := os.MkdirAll(to, 0o755); err != nil {
			return fmt.Errorf("make the place of %s: %w", from, err)
		}
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return fmt.Errorf("make the place of %s: %w", from, err)
	}
	f, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o444)
	if err != nil {
		return fmt.Errorf("make the place of %s: %w", from, err)
	}
	return f.Close()
}

// bindDevice keeps the device usable, which bind does not.
func bindDevice(from, to string) error {
	if err := mountpoint(from, to); err != nil {
		return err
	}
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s: %w", from, err)
	}
	return nil
}

func mountTmp(to string, size int64) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return fmt.Errorf("make /tmp: %w", err)
	}
	if err := unix.Mount("numi-tmp", to, "tmpfs", tmpfsFlags, fmt.Sprintf("size=%d,mode=1777", size)); err != nil {
		return fmt.Errorf("mount /tmp: %w", err)
	}
	return nil
}
