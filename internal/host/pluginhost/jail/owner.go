//go:build linux

package jail

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"syscall"
)

// owners opens, for each directory that belongs to another uid than the plugin's,
// a user namespace that maps that owner to the plugin. Mounted with
// it, the directory is the plugin's inside while files keep their owner on disk,
// and no mode is widened. Only root can do that, and only root needs it.
func (s Spec) owners() (byPath map[string]*os.File, err error) {
	byPath = map[string]*os.File{}
	if s.Mapped {
		return byPath, nil
	}
	for _, p := range slices.Concat(s.Writable, s.Readable) {
		st, err := os.Stat(p)
		if err != nil {
			return byPath, fmt.Errorf("look at %s: %w", p, err)
		}
		owner, ok := st.Sys().(*syscall.Stat_t)
		if !ok || int(owner.Uid) == s.UID {
			continue
		}
		if byPath[p], err = userNamespace(int(owner.Uid), int(owner.Gid), s.UID, s.GID); err != nil {
			return byPath, fmt.Errorf("map the owner of %s: %w", p, err)
		}
	}
	return byPath, nil
}

// userNamespace returns a user namespace in which uid and gid are the host's
// hostUID and hostGID.
func userNamespace(uid, gid, hostUID, hostGID int) (*os.File, error) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{arg0Idle}
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		Pdeathsig:   syscall.SIGKILL,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: uid, HostID: hostUID, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: gid, HostID: hostGID, Size: 1}},
	}
	hold, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		hold.Close()
		return nil, err
	}
	defer func() {
		// The namespace lives on in the descriptor.
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	return os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
}

// idle holds a user namespace until it is killed or its starter ends.
func idle() {
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}
