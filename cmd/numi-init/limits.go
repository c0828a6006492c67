package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/numinance/numinance/internal/host/bridge"
)

// rlimitNproc is missing from package syscall.
const rlimitNproc = 6

// limitArgs writes limits as the one argument execLimited reads.
func limitArgs(l bridge.Limits) string {
	var parts []string
	for _, p := range []struct {
		resource int
		value    uint64
	}{
		{rlimitNproc, l.Processes},
		{syscall.RLIMIT_FSIZE, l.FileBytes},
		{syscall.RLIMIT_NOFILE, l.OpenFiles},
		{syscall.RLIMIT_CPU, l.CPU},
	} {
		if p.value > 0 {
			parts = append(parts, fmt.Sprintf("%d=%d", p.resource, p.value))
		}
	}
	return strings.Join(parts, ",")
}

// execLimited is the trampoline between PID 1 and a program: already under the
// program's uid, it lowers the limits and becomes the program. args are the
// limits, the program's path and its argument vector.
func execLimited(args []string) error {
	if len(args) < 3 {
		return errors.New("limited: want limits, path and arguments")
	}
	syscall.Umask(0o022)
	for part := range strings.SplitSeq(args[0], ",") {
		if part == "" {
			continue
		}
		res, val, ok := strings.Cut(part, "=")
		resource, err1 := strconv.Atoi(res)
		value, err2 := strconv.ParseUint(val, 10, 64)
		if !ok || err1 != nil || err2 != nil {
			return fmt.Errorf("limited: limit %q", part)
		}
		if err := lower(resource, value); err != nil {
			return fmt.Errorf("limit %s to %d: %w", res, value, err)
		}
	}
	if err := syscall.Exec(args[1], args[2:], os.Environ()); err != nil {
		fmt.Fprintf(os.Stderr, "numi-init: run %s: %v\n", args[1], err)
		if errors.Is(err, syscall.ENOENT) {
			os.Exit(127)
		}
		os.Exit(126)
	}
	return nil
}

// lower never raises a limit above what the sandbox has.
func lower(resource int, value uint64) error {
	var now syscall.Rlimit
	if err := syscall.Getrlimit(resource, &now); err != nil {
		return err
	}
	value = min(value, now.Max)
	return syscall.Setrlimit(resource, &syscall.Rlimit{Cur: value, Max: value})
}
