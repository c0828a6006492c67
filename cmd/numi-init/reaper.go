package main

import (
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"

	"github.com/numinance/numinance/internal/host/bridge"
)

// reaper collects every process that ends, its own children and orphans alike,
// and tells whoever waits for it.
type reaper struct {
	mu      sync.Mutex // held over start, so that no end is reaped before it is known
	waiting map[int]chan bridge.Exit
}

func newReaper() *reaper {
	r := &reaper{waiting: map[int]chan bridge.Exit{}}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	go func() {
		for range ended {
			r.collect()
		}
	}()
	return r
}

func (r *reaper) collect() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if ch, ok := r.waiting[pid]; ok {
			ch <- exitOf(ws)
			delete(r.waiting, pid)
		}
	}
}

func exitOf(ws syscall.WaitStatus) bridge.Exit {
	if ws.Signaled() {
		return bridge.Exit{Code: 128 + int(ws.Signal()), Signal: int(ws.Signal())}
	}
	return bridge.Exit{Code: ws.ExitStatus()}
}

// start starts a process and returns its pid and where its end will be told.
func (r *reaper) start(path string, argv []string, attr *syscall.ProcAttr) (int, <-chan bridge.Exit, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := syscall.ForkExec(path, argv, attr)
	if err != nil {
		return 0, nil, err
	}
	ch := make(chan bridge.Exit, 1)
	r.waiting[pid] = ch
	return pid, ch, nil
}

// ofUser lists the processes of uid that are not dead yet.
func ofUser(uid int) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid <= 1 {
			continue
		}
		st, err := os.Stat("/proc/" + e.Name())
		if err != nil {
			continue
		}
		if sys, ok := st.Sys().(*syscall.Stat_t); ok && int(sys.Uid) == uid && !isZombie(e.Name()) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

func isZombie(pid string) bool {
	b, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return true
	}
	for i := len(b) - 1; i > 0; i-- {
		if b[i] == ')' {
			return i+2 < len(b) && b[i+2] == 'Z'
		}
	}
	return false
}
