//go:build linux

package jail

import (
	"errors"
	"fmt"
	"path/filepath"
)

// SocketDir is where the directory with the plugin's sockets is found inside.
const SocketDir = "/run/numi-plugin"

// Spec says what to start and what it may reach. The zero Spec is refused.
type Spec struct {
	// Argv is the program, by absolute path, with its arguments.
	Argv []string `json:"argv"`
	// Env is the whole environment.
	Env []string `json:"env"`
	// UID and GID are what the program runs as; never 0.
	UID int `json:"uid"`
	GID int `json:"gid"`
	// Mapped says that the runtime is not root: the jail has a user namespace in
	// which UID, the runtime's own, is the only one.
	Mapped bool `json:"mapped"`
	// Root is an empty directory to build the new root on.
	Root string `json:"root"`
	// Sockets is the host's directory that appears at SocketDir, writable.
	Sockets string `json:"sockets"`
	// Writable and Readable are directories that appear under their own path.
	Writable []string `json:"writable"`
	Readable []string `json:"readable"`
	// Owners names the descriptor of a user namespace for each of them that is
	// mounted with its owner mapped to UID; Start fills it.
	Owners map[string]int `json:"owners,omitempty"`
	// Tools lets the program run the host's programs under /usr, and anything it
	// writes itself; without it only Argv[0] can be executed.
	Tools bool `json:"tools"`
	// TmpBytes bounds /tmp, which is memory.
	TmpBytes int64 `json:"tmp_bytes"`
	// OpenFiles and Processes are resource limits; 0 is a default. Processes is
	// counted per uid, so it holds only where UID is the plugin's alone.
	OpenFiles uint64 `json:"open_files"`
	Processes uint64 `json:"processes"`
}

// Report is what the jail says it enforces.
type Report struct {
	// Landlock is the kernel's ABI version, 0 if there is none.
	Landlock int `json:"landlock"`
	// Seccomp tells that the filter is in force.
	Seccomp bool `json:"seccomp"`
	// Proc tells that /proc of the jail's own PID namespace is mounted.
	Proc bool `json:"proc"`
	// Error is why there is no jail; empty if there is one.
	Error string `json:"error,omitempty"`
}

func (s Spec) check() error {
	switch {
	case len(s.Argv) == 0:
		return errors.New("no program")
	case s.UID <= 0 || s.GID <= 0:
		return fmt.Errorf("uid %d and gid %d: a plugin never runs as root", s.UID, s.GID)
	case s.TmpBytes <= 0:
		return errors.New("no bound for /tmp")
	}
	for _, p := range append([]string{s.Argv[0], s.Root, s.Sockets}, append(s.Writable, s.Readable...)...) {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p || p == "/" {
			return fmt.Errorf("path %q is not absolute and clean, or is the whole tree", p)
		}
	}
	return nil
}
