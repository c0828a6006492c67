//go:build linux

package jail

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// arg0 is what Enter knows its process by; the descriptors are passed to it.
const (
	arg0     = "numi-jail"
	arg0Idle = "numi-jail-idle"
	specFD   = 3
	reportFD = 4
)

const namespaces = syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS

// Jailed is a started jail.
type Jailed struct {
	Cmd *exec.Cmd

	report *os.File
}

// Start starts the jail of s from exe, a binary whose main calls Enter. Output
// of the program goes to out; its standard input is empty. The calling goroutine
// must be locked to its thread until the process has ended: the kernel kills the
// jail when that thread ends, so that no plugin outlives the runtime.
func Start(exe string, s Spec, out io.Writer) (*Jailed, error) {
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("jail: %w", err)
	}
	owners, err := s.owners()
	defer func() {
		for _, f := range owners {
			f.Close()
		}
	}()
	if err != nil {
		return nil, fmt.Errorf("jail: %w", err)
	}
	extra := []*os.File{nil, nil}
	s.Owners = map[string]int{}
	for path, f := range owners {
		s.Owners[path] = specFD + len(extra)
		extra = append(extra, f)
	}
	spec, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("jail: %w", err)
	}
	specR, specW, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("jail: %w", err)
	}
	defer specR.Close()
	reportR, reportW, err := os.Pipe()
	if err != nil {
		specW.Close()
		return nil, fmt.Errorf("jail: %w", err)
	}
	defer reportW.Close()

	cmd := exec.Command(exe)
	cmd.Args = []string{arg0}
	cmd.Env = []string{}
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = out, out
	extra[0], extra[1] = specR, reportW
	cmd.ExtraFiles = extra
	// What the program leaves in its output pipe after its death is not waited for.
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: namespaces,
		Pdeathsig:  syscall.SIGKILL,
		Setsid:     true,
	}
	if s.Mapped {
		// One uid, its own; the capabilities over the new namespaces that building
		// the root needs end with it.
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: s.UID, HostID: s.UID, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: s.GID, HostID: s.GID, Size: 1}}
		cmd.SysProcAttr.AmbientCaps = []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_NET_ADMIN, unix.CAP_SYS_CHROOT, unix.CAP_SYS_RESOURCE}
	}
	if err := cmd.Start(); err != nil {
		specW.Close()
		reportR.Close()
		if s.Mapped && errors.Is(err, syscall.EPERM) {
			return nil, fmt.Errorf("start a jail: %w: this kernel does not let an ordinary user make namespaces (see kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)", err)
		}
		return nil, fmt.Errorf("start a jail: %w", err)
	}
	// A pipe holds 64 KiB; a longer spec waits for its reader.
	go func() {
		defer specW.Close()
		_, _ = specW.Write(spec)
	}()
	return &Jailed{Cmd: cmd, report: reportR}, nil
}

// Report waits for the jail's report until the deadline; an error means that the
// program does not run in it.
func (j *Jailed) Report(deadline time.Time) (Report, error) {
	defer j.report.Close()
	var r Report
	if err := j.report.SetReadDeadline(deadline); err != nil {
		return r, fmt.Errorf("jail: %w", err)
	}
	b, err := io.ReadAll(io.LimitReader(j.report, 64<<10))
	if err != nil {
		return r, fmt.Errorf("the jail did not report in time: %w", err)
	}
	if len(bytes.TrimSpace(b)) == 0 {
		return r, errors.New("the jail ended before it reported; does this binary call jail.Enter first?")
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, fmt.Errorf("read the jail's report: %w", err)
	}
	if r.Error != "" {
		return r, fmt.Errorf("build the jail: %s", r.Error)
	}
	return r, nil
}

// Kill ends everything in the jail at once.
func (j *Jailed) Kill() {
	// PID 1's death takes its namespace with it; the process may be gone already.
	_ = j.Cmd.Process.Kill()
}
