//go:build linux

package jail

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// limit sets resource limits that the program inherits.
func (s Spec) limit() error {
	set := func(name string, resource int, n uint64) error {
		if err := unix.Setrlimit(resource, &unix.Rlimit{Cur: n, Max: n}); err != nil {
			return fmt.Errorf("limit %s to %d: %w", name, n, err)
		}
		return nil
	}
	files, processes := s.OpenFiles, s.Processes
	if files == 0 {
		files = 1024
	}
	if processes == 0 {
		processes = 512
	}
	if err := set("open files", unix.RLIMIT_NOFILE, files); err != nil {
		return err
	}
	if err := set("core files", unix.RLIMIT_CORE, 0); err != nil {
		return err
	}
	if s.Mapped {
		return nil // the count is the user's, who has other processes
	}
	return set("processes", unix.RLIMIT_NPROC, processes)
}

// Rights of landlock by what they are for.
const (
	llExec  = unix.LANDLOCK_ACCESS_FS_EXECUTE
	llRead  = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	llFile  = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	llWrite = unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE |
		unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_MAKE_SOCK |
		unix.LANDLOCK_ACCESS_FS_MAKE_FIFO | unix.LANDLOCK_ACCESS_FS_MAKE_SYM | unix.LANDLOCK_ACCESS_FS_REFER | unix.LANDLOCK_ACCESS_FS_TRUNCATE
	llDevices = unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
)

// LandlockABI returns the version of landlock that this kernel has, 0 for none.
func LandlockABI() int {
	v, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0
	}
	return int(v)
}

// landlock restricts this thread and what it starts, inside the new root, and
// returns the ABI version in force. A kernel without it is reported, not hidden.
func (s Spec) landlock() (int, error) {
	abi := LandlockABI()
	if abi == 0 {
		return 0, nil
	}
	handled := uint64(llExec | llRead | llWrite | llDevices)
	switch {
	case abi < 2:
		handled &^= unix.LANDLOCK_ACCESS_FS_REFER | unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	case abi < 3:
		handled &^= unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	case abi < 5:
		handled &^= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	attr := unix.LandlockRulesetAttr{Handled_access_fs: handled}
	if abi >= 6 {
		attr.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
	}
	// The first three words are all that these rules use; a longer structure is
	// refused by older kernels unless the rest is zero, which it is.
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), 24, 0)
	if errno != 0 {
		return 0, fmt.Errorf("landlock: make rules: %w", errno)
	}
	defer unix.Close(int(fd))
	execute := uint64(0)
	if s.Tools {
		execute = llExec
	}
	type rule struct {
		path   string
		rights uint64
	}
	rules := []rule{
		{"/", llRead | execute},
		{s.Argv[0], llRead | llExec},
		{SocketDir, llRead | llWrite},
		{"/tmp", llRead | llWrite | execute},
		{"/dev", llRead | unix.LANDLOCK_ACCESS_FS_WRITE_FILE},
	}
	for _, p := range s.Writable {
		rules = append(rules, rule{p, llRead | llWrite | execute})
	}
	for _, r := range rules {
		if err := allow(int(fd), r.path, r.rights&handled); err != nil {
			return 0, err
		}
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return 0, fmt.Errorf("landlock: restrict: %w", errno)
	}
	return abi, nil
}

func allow(ruleset int, path string, rights uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("landlock: open %s: %w", path, err)
	}
	defer unix.Close(fd)
	st, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("landlock: look at %s: %w", path, err)
	}
	if !st.IsDir() {
		rights &= llFile
	}
	attr := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	if _, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(ruleset), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&attr)), 0, 0, 0); errno != 0 {
		return fmt.Errorf("landlock: allow %s: %w", path, errno)
	}
	return nil
}

// arches are the machines whose system call numbers this binary was built for.
var arches = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// refusedCalls widen what a process can do to the kernel and no plugin needs
// them: new namespaces, mounts, tracing, keys, kernel programs.
var refusedCalls = []uint32{
	unix.SYS_UNSHARE, unix.SYS_SETNS, unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_CHROOT,
	unix.SYS_OPEN_TREE, unix.SYS_MOVE_MOUNT, unix.SYS_FSOPEN, unix.SYS_FSMOUNT, unix.SYS_FSCONFIG, unix.SYS_FSPICK, unix.SYS_MOUNT_SETATTR,
	unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PIDFD_GETFD,
	unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL, unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD,
	unix.SYS_IO_URING_SETUP, unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_KEXEC_LOAD, unix.SYS_OPEN_BY_HANDLE_AT,
	unix.SYS_SETHOSTNAME, unix.SYS_SETDOMAINNAME, unix.SYS_ACCT, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_REBOOT,
}

// filterSyscalls installs the filter for this thread and what it starts.
func filterSyscalls() (bool, error) {
	arch, ok := arches[runtime.GOARCH]
	if !ok {
		return false, fmt.Errorf("no system call filter for %s", runtime.GOARCH)
	}
	const (
		offNr, offArch, offArg0 = 0, 4, 16 // of struct seccomp_data; both machines are little-endian
		refuse                  = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
		noSuch                  = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
		newNamespaces           = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP
	)
	load := func(off uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: off}
	}
	ret := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }
	// when runs the next instruction only if the loaded word is k.
	when := func(k uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 0, Jf: 1, K: k}
	}
	prog := []unix.SockFilter{
		load(offArch),
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 1, Jf: 0, K: arch},
		ret(unix.SECCOMP_RET_KILL_PROCESS), // the other numbering of the same machine
		load(offNr),
	}
	if runtime.GOARCH == "amd64" {
		// x32 calls have the same arch and a bit of their own in the number.
		prog = append(prog,
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, Jt: 0, Jf: 1, K: 0x40000000},
			ret(unix.SECCOMP_RET_KILL_PROCESS))
	}
	for _, nr := range refusedCalls {
		prog = append(prog, when(nr), ret(refuse))
	}
	prog = append(prog,
		// clone3 passes its flags in memory that a filter cannot read; without it
		// callers fall back to clone.
		when(unix.SYS_CLONE3), ret(noSuch),
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 0, Jf: 3, K: unix.SYS_CLONE},
		load(offArg0),
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, Jt: 0, Jf: 1, K: newNamespaces},
		ret(refuse),
		ret(unix.SECCOMP_RET_ALLOW),
	)
	fprog := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&fprog))); errno != 0 {
		if errors.Is(errno, unix.ENOSYS) {
			return false, nil
		}
		return false, fmt.Errorf("install the system call filter: %w", errno)
	}
	return true, nil
}
