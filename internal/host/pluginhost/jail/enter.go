//go:build linux

package jail

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// exitNoJail is the exit code when the jail could not be built.
const exitNoJail = 125

// Enter takes over if this process was started as the first of a jail, and then
// never returns; otherwise it does nothing. It comes first in main.
func Enter() {
	if len(os.Args) != 1 {
		return
	}
	switch os.Args[0] {
	case arg0Idle:
		idle()
	case arg0:
	default:
		return
	}
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "numi-jail is started by the plugin host alone")
		os.Exit(exitNoJail)
	}
	report := os.NewFile(reportFD, "report")
	unix.CloseOnExec(reportFD)
	fail := func(err error) {
		_ = json.NewEncoder(report).Encode(Report{Error: err.Error()})
		os.Exit(exitNoJail)
	}
	var s Spec
	spec := os.NewFile(specFD, "spec")
	err := json.NewDecoder(io.LimitReader(spec, 1<<20)).Decode(&s)
	spec.Close()
	if err == nil {
		err = s.check()
	}
	for _, fd := range s.Owners {
		unix.CloseOnExec(fd)
	}
	if err != nil {
		fail(fmt.Errorf("read the spec: %w", err))
	}
	// Landlock, no_new_privs and seccomp hold for a thread; the program is forked
	// from this one and inherits them.
	runtime.LockOSThread()
	pid, r, err := s.enter()
	if err != nil {
		fail(err)
	}
	_ = json.NewEncoder(report).Encode(r)
	report.Close()
	os.Exit(reap(pid))
}

// enter builds the jail around this thread and starts the program in it.
func (s Spec) enter() (pid int, r Report, err error) {
	// Keeps the program, which in a mapped jail has the same uid, out of the
	// memory of this process and of its capabilities.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return 0, r, fmt.Errorf("set dumpable: %w", err)
	}
	if r.Proc, err = s.buildRoot(); err != nil {
		return 0, r, err
	}
	if err := unix.Sethostname([]byte("numi-plugin")); err != nil {
		return 0, r, fmt.Errorf("set the host name: %w", err)
	}
	if err := loopbackUp(); err != nil {
		return 0, r, err
	}
	if err := s.limit(); err != nil {
		return 0, r, err
	}
	if s.Mapped {
		if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
			return 0, r, fmt.Errorf("clear ambient capabilities: %w", err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return 0, r, fmt.Errorf("set no_new_privs: %w", err)
	}
	if r.Landlock, err = s.landlock(); err != nil {
		return 0, r, err
	}
	attr := &syscall.ProcAttr{
		Dir:   "/",
		Env:   s.Env,
		Files: []uintptr{0, 1, 2},
		Sys:   &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL},
	}
	if !s.Mapped {
		attr.Sys.Credential = &syscall.Credential{Uid: uint32(s.UID), Gid: uint32(s.GID)}
	}
	if r.Seccomp, err = filterSyscalls(); err != nil {
		return 0, r, err
	}
	pid, err = syscall.ForkExec(s.Argv[0], s.Argv, attr)
	if err != nil {
		return 0, r, fmt.Errorf("start %s: %w", s.Argv[0], err)
	}
	return pid, r, nil
}

// reap waits for every process of the namespace until the program ends, and
// returns its exit code as a shell would.
func reap(program int) int {
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		for range asked {
			_ = syscall.Kill(program, syscall.SIGTERM)
		}
	}()
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, 0, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return exitNoJail
		case pid == program && ws.Signaled():
			return 128 + int(ws.Signal())
		case pid == program && ws.Exited():
			return ws.ExitStatus()
		}
	}
}
