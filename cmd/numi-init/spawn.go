package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/numinance/numinance/internal/host/bridge"
)

// drainIdle is how long an ended process's output may stay silent before it is
// taken as complete although a descendant still holds it open; drainMost bounds
// what is read after the end, which is more than a pipe holds.
const (
	drainIdle = 200 * time.Millisecond
	drainMost = 1 << 20
)

// keepControl always keeps one idle control connection towards the host.
func keepControl(procs *reaper) {
	failures := 0
	for {
		c, err := dial(bridge.HostLink, bridge.KindControl)
		if err != nil {
			pause(failures)
			failures++
			continue
		}
		in := bufio.NewReader(c)
		order, err := bridge.ReadOrder(in)
		if err != nil {
			c.Close()
			pause(failures)
			failures++
			continue
		}
		failures = 0
		go func() {
			defer c.Close()
			carryOut(procs, c, in, order)
		}()
	}
}

func carryOut(procs *reaper, c net.Conn, in *bufio.Reader, o bridge.Order) {
	s := &session{conn: c}
	var err error
	switch {
	case !bridge.MaySpawn(o.Command.UID):
		err = fmt.Errorf("uid %d may not be used", o.Command.UID)
	case o.Op == bridge.OpSpawn:
		err = s.spawn(procs, in, o.Command)
	case o.Op == bridge.OpKillAll:
		if err = killAll(o.Command.UID); err == nil {
			s.exit(bridge.Exit{})
		}
	default:
		err = fmt.Errorf("unknown order %q", o.Op)
	}
	if err != nil {
		msg := err.Error()
		_ = s.write(bridge.FrameFailed, []byte(msg[:min(len(msg), bridge.MaxFrame)]))
	}
}

// killAll ends the processes of uid until none is left; a fork bomb can need
// several rounds.
func killAll(uid int) error {
	for range 500 {
		pids, err := ofUser(uid)
		if err != nil {
			return err
		}
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("processes of uid %d do not end", uid)
}

// session is one control exchange.
type session struct {
	conn net.Conn
	mu   sync.Mutex // serialises frames written to conn
}

func (s *session) write(t bridge.FrameType, payload []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return bridge.WriteFrame(s.conn, t, payload)
}

func (s *session) exit(e bridge.Exit) {
	b, err := json.Marshal(e)
	if err != nil {
		return
	}
	_ = s.write(bridge.FrameExit, b)
}

// spawn starts the command and serves its streams until it ended. The process
// leads a session of its own without a terminal; when it ends, or the host
// goes away, its group is killed.
func (s *session) spawn(procs *reaper, in *bufio.Reader, c bridge.Command) error {
	if len(c.Argv) == 0 {
		return errors.New("no program named")
	}
	path, err := lookPath(c)
	if err != nil {
		return err
	}
	dir := c.Dir
	if dir == "" {
		dir = bridge.WorkRoot
	}
	var pipes [3][2]*os.File
	defer func() {
		for _, p := range pipes {
			for _, f := range p {
				if f != nil {
					f.Close()
				}
			}
		}
	}()
	for i := range pipes {
		r, w, err := os.Pipe()
		if err != nil {
			return fmt.Errorf("make a pipe: %w", err)
		}
		pipes[i] = [2]*os.File{r, w}
	}
	// Every process goes through the trampoline, which sets mask and limits
	// under the process's own uid before it becomes the program.
	argv := append([]string{"numi-init", "limited", limitArgs(c.Limits), path}, c.Argv...)
	pid, ended, err := procs.start(bridge.InitPath, argv, &syscall.ProcAttr{
		Dir:   dir,
		Env:   c.Env,
		Files: []uintptr{pipes[0][0].Fd(), pipes[1][1].Fd(), pipes[2][1].Fd()},
		Sys: &syscall.SysProcAttr{
			Setsid:     true,
			Credential: &syscall.Credential{Uid: uint32(c.UID), Gid: uint32(c.UID)},
		},
	})
	if err != nil {
		return fmt.Errorf("start in %s: %w", dir, err)
	}
	for _, f := range []*os.File{pipes[0][0], pipes[1][1], pipes[2][1]} {
		f.Close()
	}
	if err := s.write(bridge.FrameStarted, binary.BigEndian.AppendUint32(nil, uint32(pid))); err != nil {
		_ = syscall.Kill(-pid, syscall.SIGKILL)
		return err
	}

	out := newOutput(s, pipes[1][0], bridge.FrameStdout, bridge.FrameStdoutEOF)
	errs := newOutput(s, pipes[2][0], bridge.FrameStderr, bridge.FrameStderrEOF)
	input := newInput(s, pipes[0][1])
	var outputs sync.WaitGroup
	outputs.Go(out.copy)
	outputs.Go(errs.copy)
	go input.copy()
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		s.serve(in, pid, input, out, errs)
	}()

	var exit bridge.Exit
	select {
	case exit = <-ended:
	case <-gone:
		_ = syscall.Kill(-pid, syscall.SIGKILL)
		_ = syscall.Kill(pid, syscall.SIGKILL)
		<-ended
		out.abandon()
		errs.abandon()
		input.end()
		outputs.Wait()
		return nil
	}
	_ = syscall.Kill(-pid, syscall.SIGKILL)
	input.end()
	out.ended()
	errs.ended()
	drained := make(chan struct{})
	go func() { outputs.Wait(); close(drained) }()
	select {
	case <-drained:
		s.exit(exit)
	case <-gone:
		out.abandon()
		errs.abandon()
		<-drained
	}
	s.conn.Close()
	<-gone
	return nil
}

// serve handles what the host sends until the connection ends.
func (s *session) serve(in *bufio.Reader, pid int, input *input, out, errs *output) {
	for {
		t, payload, err := bridge.ReadFrame(in)
		if err != nil {
			return
		}
		switch t {
		case bridge.FrameStdin:
			if !input.put(payload) {
				return
			}
		case bridge.FrameStdinEOF:
			input.finish()
		case bridge.FrameSignal:
			if len(payload) != 1 || payload[0] == 0 {
				return
			}
			if syscall.Kill(-pid, syscall.Signal(payload[0])) != nil {
				_ = syscall.Kill(pid, syscall.Signal(payload[0]))
			}
		case bridge.FrameAck:
			of, n, err := bridge.ParseAck(payload)
			switch {
			case err != nil:
				return
			case of == bridge.FrameStdout:
				out.credit.Give(n)
			case of == bridge.FrameStderr:
				errs.credit.Give(n)
			}
		default:
			return
		}
	}
}

// output carries one output stream of a process to the host.
type output struct {
	s         *session
	pipe      *os.File
	data, eof bridge.FrameType
	credit    *bridge.Credit
	over      atomic.Bool // the process ended
}

func newOutput(s *session, pipe *os.File, data, eof bridge.FrameType) *output {
	return &output{s: s, pipe: pipe, data: data, eof: eof, credit: bridge.NewCredit()}
}

func (o *output) copy() {
	buf := make([]byte, bridge.MaxFrame)
	late, silent := 0, 0
	for {
		room := o.credit.Take(len(buf))
		if room == 0 {
			return
		}
		if o.over.Load() {
			_ = o.pipe.SetReadDeadline(time.Now().Add(drainIdle))
			silent++
		}
		n, err := o.pipe.Read(buf[:room])
		o.credit.Give(room - n)
		if n > 0 {
			if o.over.Load() {
				late, silent = late+n, 0
			}
			if o.s.write(o.data, buf[:n]) != nil {
				return
			}
		}
		if errors.Is(err, os.ErrDeadlineExceeded) && silent == 0 {
			continue // woken by the process's end: look once more
		}
		if err != nil || late > drainMost {
			_ = o.s.write(o.eof, nil)
			return
		}
	}
}

// ended tells that the process is gone and the rest of the pipe is to be read.
func (o *output) ended() {
	o.over.Store(true)
	_ = o.pipe.SetReadDeadline(time.Now().Add(drainIdle))
}

// abandon ends the copying at once.
func (o *output) abandon() {
	o.credit.End()
	o.pipe.Close()
}

// input carries the host's bytes to a process's standard input.
type input struct {
	s    *session
	pipe *os.File

	mu    sync.Mutex // guards the rest
	cond  sync.Cond
	buf   []byte
	eof   bool // no more will come
	ended bool // nobody reads
}

func newInput(s *session, pipe *os.File) *input {
	i := &input{s: s, pipe: pipe}
	i.cond.L = &i.mu
	return i
}

// put queues bytes; false means the host ignored the window.
func (i *input) put(b []byte) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(i.buf)+len(b) > bridge.Window {
		return false
	}
	i.buf = append(i.buf, b...)
	i.cond.Signal()
	return true
}

func (i *input) finish() {
	i.mu.Lock()
	i.eof = true
	i.mu.Unlock()
	i.cond.Signal()
}

func (i *input) end() {
	i.mu.Lock()
	i.ended = true
	i.mu.Unlock()
	i.cond.Signal()
	i.pipe.Close()
}

func (i *input) copy() {
	defer i.pipe.Close()
	broken := false
	for {
		i.mu.Lock()
		for len(i.buf) == 0 && !i.eof && !i.ended {
			i.cond.Wait()
		}
		if i.ended || len(i.buf) == 0 {
			i.mu.Unlock()
			return
		}
		chunk := i.buf[:min(len(i.buf), bridge.MaxFrame)]
		i.mu.Unlock()
		// A process that closed its input loses the rest, as with a pipe.
		if !broken {
			_, err := i.pipe.Write(chunk)
			broken = err != nil
		}
		i.mu.Lock()
		i.buf = i.buf[len(chunk):]
		i.mu.Unlock()
		if i.s.write(bridge.FrameAck, bridge.AckPayload(bridge.FrameStdin, len(chunk))) != nil {
			return
		}
	}
}

// lookPath finds the program in the PATH the command brings, never in PID 1's.
func lookPath(c bridge.Command) (string, error) {
	name := c.Argv[0]
	if strings.Contains(name, "/") {
		return name, nil
	}
	for _, kv := range c.Env {
		list, ok := strings.CutPrefix(kv, "PATH=")
		if !ok {
			continue
		}
		for _, dir := range filepath.SplitList(list) {
			p := filepath.Join(dir, name)
			if st, err := os.Stat(p); filepath.IsAbs(p) && err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
				return p, nil
			}
		}
	}
	return "", fmt.Errorf("program %q: not in the PATH of its environment", name)
}
