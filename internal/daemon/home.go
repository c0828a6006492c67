package daemon

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Home is the state directory: everything numi keeps lies below it, and one
// process at a time owns it.
type Home string

// FindHome returns the state directory: NUMI_HOME, else numinance in the XDG
// data directory, else in ~/.local/share.
func FindHome() (Home, error) {
	if h := os.Getenv("NUMI_HOME"); h != "" {
		abs, err := filepath.Abs(h)
		if err != nil {
			return "", fmt.Errorf("NUMI_HOME: %w", err)
		}
		return resolved(abs), nil
	}
	if d := os.Getenv("XDG_DATA_HOME"); filepath.IsAbs(d) {
		return resolved(filepath.Join(d, "numinance")), nil
	}
	h, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("no state directory: set NUMI_HOME: %w", err)
	}
	return resolved(filepath.Join(h, ".local", "share", "numinance")), nil
}

// resolved is dir with the links on its way followed, as far as it exists: what
// is mounted into sandboxes lies below it, and mounts do not follow links. Two
// names of one directory are one state directory.
func resolved(dir string) Home {
	rest := ""
	for at := dir; ; at = filepath.Dir(at) {
		if real, err := filepath.EvalSymlinks(at); err == nil {
			return Home(filepath.Join(real, rest))
		}
		if at == filepath.Dir(at) {
			return Home(dir)
		}
		rest = filepath.Join(filepath.Base(at), rest)
	}
}

func (h Home) at(parts ...string) string {
	return filepath.Join(append([]string{string(h)}, parts...)...)
}

// tilde writes a path below the user's home as people write it.
func tilde(path string) string {
	h, err := os.UserHomeDir()
	if rest, ok := strings.CutPrefix(path, h+"/"); err == nil && h != "/" && ok {
		return "~/" + rest
	}
	return path
}

// Database, Blobs, Images, Keys and Control are where the parts of the state lie.
func (h Home) Database() string { return h.at("state", "numi.db") }
func (h Home) Blobs() string    { return h.at("blobs") }
func (h Home) Images() string   { return string(resolved(h.at("images"))) }
func (h Home) Keys() string     { return h.at("keys") }

// Control is the generated control directory of one repository.
func (h Home) Control(repository string) string { return h.at("control", repository) }

// Provider is the one directory that a deployment-wide plugin may write to.
func (h Home) Provider(port, name string) string { return h.at("providers", port+"-"+name) }

// maxSocketBase bounds the directory that the socket directories lie in.
const maxSocketBase = 40

// Run is a short directory for sockets: unix socket paths end at 107 bytes, and
// a state directory may lie deep. It is private to the user.
func (h Home) Run() string {
	sum := sha256.Sum256([]byte(h))
	base := os.Getenv("XDG_RUNTIME_DIR")
	if base == "" || len(base) > maxSocketBase {
		temp := os.TempDir()
		if len(temp) > maxSocketBase {
			temp = "/tmp"
		}
		base = filepath.Join(temp, fmt.Sprintf("numi-%d", os.Getuid()))
	}
	return filepath.Join(base, "numi-"+hex.EncodeToString(sum[:4]))
}

// Socket is where this process serves the others once it owns the state
// directory.
func (h Home) Socket() string { return filepath.Join(h.Run(), "api.sock") }

// OwnerSocket is where the process that owns the state directory serves, by its
// own word: its environment may place socket directories elsewhere than ours.
func (h Home) OwnerSocket() string {
	b, err := os.ReadFile(h.at("lock"))
	if said := strings.TrimSpace(string(b)); err == nil && filepath.IsAbs(said) {
		return said
	}
	return h.Socket()
}

// Links is where the link directories of sandboxes lie; short, for their sockets.
func (h Home) Links() string { return filepath.Join(h.Run(), "l") }

// Make creates the directories that are private to the runtime.
func (h Home) Make() error {
	for _, d := range []string{string(h), h.at("state"), h.Blobs(), h.Images(), h.Keys(), h.at("control"), h.at("providers"), h.Provider("scm", "git"), h.Provider("ticketing", "files")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return fmt.Errorf("make the state directory: %w", err)
		}
	}
	// Jailed plugins run as other users and have to pass through.
	for _, d := range []string{string(h), h.at("providers")} {
		if err := os.Chmod(d, 0o711); err != nil {
			return fmt.Errorf("make the state directory: %w", err)
		}
	}
	return makePrivate(h.Run())
}

// makePrivate makes dir and wants it to be a real directory of ours: it may lie
// under a shared temporary directory.
func makePrivate(dir string) error {
	for _, d := range []string{filepath.Dir(dir), dir} {
		if err := os.Mkdir(d, 0o711); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("make the socket directory: %w", err)
		}
	}
	for _, d := range []string{filepath.Dir(dir), dir} {
		fi, err := os.Lstat(d)
		if err != nil {
			return fmt.Errorf("look at the socket directory: %w", err)
		}
		st, ok := fi.Sys().(*syscall.Stat_t)
		if !fi.IsDir() || !ok || int(st.Uid) != os.Getuid() || fi.Mode().Perm()&0o022 != 0 {
			return fmt.Errorf("the socket directory %s is not a private directory of this user: remove it or set XDG_RUNTIME_DIR", d)
		}
	}
	return nil
}

// errHeld: another process owns the state directory.
var errHeld = errors.New("another numi owns the state directory")

// Lock takes the state directory for this process until the file is closed or
// the process ends. It does not wait.
func (h Home) Lock() (*os.File, error) {
	f, err := os.OpenFile(h.at("lock"), os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the state directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errHeld
		}
		return nil, fmt.Errorf("lock the state directory: %w", err)
	}
	said := []byte(h.Socket() + "\n")
	if err := f.Truncate(0); err != nil {
		return nil, errors.Join(fmt.Errorf("lock the state directory: %w", err), f.Close())
	}
	if _, err := f.WriteAt(said, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("lock the state directory: %w", err), f.Close())
	}
	return f, nil
}

// full reports whether the disk of the state directory takes less than 1 MiB.
func (h Home) full() bool {
	var fs unix.Statfs_t
	return unix.Statfs(string(h), &fs) == nil && int64(fs.Bavail)*fs.Bsize < 1<<20
}
