package bridge

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
)

// Process is a process inside the sandbox, started by Spawn. Its streams carry
// bytes of an untrusted program. A stream that is not read stops the process
// at its next write there, and nothing else.
type Process struct {
	PID    int            // inside the sandbox
	Stdin  io.WriteCloser // closing it is the process's end of file
	Stdout io.Reader      // io.EOF when the process and all it left behind closed it
	Stderr io.Reader

	conn   net.Conn
	mu     sync.Mutex // serialises frames written to conn
	credit *Credit
	out    *stream
	errs   *stream
	done   chan struct{} // closed once exit or failure is set
	exit   Exit
	fail   error
	stop   func() bool
}

// Spawn starts c inside the sandbox through its PID 1. The process lives until
// it exits, ctx is done (then it and its process group are killed), or the
// bridge is closed.
func (b *Bridge) Spawn(ctx context.Context, c Command) (*Process, error) {
	if len(c.Argv) == 0 {
		return nil, errors.New("spawn in the sandbox: no program named")
	}
	if !MaySpawn(c.UID) {
		return nil, fmt.Errorf("spawn %q in the sandbox: uid %d may not be used", c.Argv[0], c.UID)
	}
	conn, err := b.order(ctx, Order{Op: OpSpawn, Command: c})
	if err != nil {
		return nil, fmt.Errorf("spawn %q in the sandbox: %w", c.Argv[0], err)
	}
	p := &Process{conn: conn, credit: NewCredit(), done: make(chan struct{})}
	p.Stdin = (*stdin)(p)
	p.out, p.errs = newStream(p, FrameStdout), newStream(p, FrameStderr)
	p.Stdout, p.Stderr = p.out, p.errs
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	t, payload, err := ReadFrame(conn)
	switch {
	case err != nil:
		stop()
		conn.Close()
		return nil, fmt.Errorf("spawn %q in the sandbox: %w", c.Argv[0], b.why(ctx, err))
	case t == FrameFailed:
		stop()
		conn.Close()
		return nil, fmt.Errorf("spawn %q in the sandbox: %s", c.Argv[0], payload)
	case t != FrameStarted || len(payload) != 4:
		stop()
		conn.Close()
		return nil, fmt.Errorf("spawn %q in the sandbox: answer %q instead of a pid", c.Argv[0], t)
	}
	p.PID = int(binary.BigEndian.Uint32(payload))
	p.stop = stop
	b.wg.Go(func() { p.read(ctx, b) })
	return p, nil
}

// KillAll ends every process of uid inside the sandbox with SIGKILL and
// returns when none is left.
func (b *Bridge) KillAll(ctx context.Context, uid int) error {
	conn, err := b.order(ctx, Order{Op: OpKillAll, Command: Command{UID: uid}})
	if err != nil {
		return fmt.Errorf("end the processes of uid %d: %w", uid, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	t, payload, err := ReadFrame(conn)
	if err != nil {
		return fmt.Errorf("end the processes of uid %d: %w", uid, b.why(ctx, err))
	}
	if t != FrameExit {
		return fmt.Errorf("end the processes of uid %d: %s", uid, payload)
	}
	return nil
}

// order takes a control connection and sends the order. A connection that was
// cut while it waited is replaced by the next one.
func (b *Bridge) order(ctx context.Context, o Order) (net.Conn, error) {
	line, err := o.Line()
	if err != nil {
		return nil, err
	}
	for {
		conn, err := b.take(ctx, KindControl)
		if err != nil {
			return nil, err
		}
		if _, err := conn.Write(line); err == nil {
			return conn, nil
		}
		conn.Close()
	}
}

// why prefers the reason that made a connection fail over its symptom.
func (b *Bridge) why(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	select {
	case <-b.over:
		return ErrOver
	default:
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("the sandbox's PID 1 closed the connection")
	}
	return err
}

// gone reports whether a write failed because PID 1 has closed the process's
// connection, as it does when the process has ended; Wait says how.
func gone(err error) bool {
	return errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, net.ErrClosed)
}

// Signal sends sig to the process and its process group. A process that has
// ended takes no signal, and that is no error.
func (p *Process) Signal(sig syscall.Signal) error {
	if sig <= 0 || sig > 64 {
		return fmt.Errorf("signal %d does not exist", sig)
	}
	if err := p.write(FrameSignal, []byte{byte(sig)}); err != nil && !gone(err) {
		return fmt.Errorf("signal the process in the sandbox: %w", err)
	}
	return nil
}

// Wait returns how the process ended; an error means its end was not seen
// (the run is over, or the link broke) and says nothing about success. The end
// is only reported after the output before it: read Stdout and Stderr to their
// end, or Wait may never return.
func (p *Process) Wait() (Exit, error) {
	<-p.done
	return p.exit, p.fail
}

// Done is closed when the process ended or its end cannot be seen any more.
func (p *Process) Done() <-chan struct{} { return p.done }

func (p *Process) write(t FrameType, payload []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return WriteFrame(p.conn, t, payload)
}

func (p *Process) read(ctx context.Context, b *Bridge) {
	err := p.frames()
	p.stop()
	p.conn.Close()
	if err != nil {
		p.fail = fmt.Errorf("process in the sandbox: %w", b.why(ctx, err))
	}
	p.credit.End()
	p.out.end(p.fail)
	p.errs.end(p.fail)
	close(p.done)
}

func (p *Process) frames() error {
	for {
		t, payload, err := ReadFrame(p.conn)
		if err != nil {
			return noEOF(err)
		}
		switch t {
		case FrameStdout:
			err = p.out.put(payload)
		case FrameStderr:
			err = p.errs.put(payload)
		case FrameStdoutEOF:
			p.out.end(nil)
		case FrameStderrEOF:
			p.errs.end(nil)
		case FrameAck:
			var of FrameType
			var n int
			if of, n, err = ParseAck(payload); err == nil && of == FrameStdin {
				p.credit.Give(n)
			}
		case FrameExit:
			if err := json.Unmarshal(payload, &p.exit); err != nil {
				return fmt.Errorf("exit status: %w", err)
			}
			return nil
		default:
			err = fmt.Errorf("unknown frame %q", t)
		}
		if err != nil {
			return err
		}
	}
}

// stdin is the writing side of a Process's standard input.
type stdin Process

func (s *stdin) Write(b []byte) (int, error) {
	p := (*Process)(s)
	written := 0
	for len(b) > 0 {
		n := p.credit.Take(min(len(b), MaxFrame))
		if n == 0 {
			return written, io.ErrClosedPipe
		}
		if err := p.write(FrameStdin, b[:n]); err != nil {
			return written, fmt.Errorf("write to the process in the sandbox: %w", err)
		}
		written, b = written+n, b[n:]
	}
	return written, nil
}

func (s *stdin) Close() error {
	p := (*Process)(s)
	select {
	case <-p.done:
		return nil
	default:
	}
	if err := p.write(FrameStdinEOF, nil); err != nil && !gone(err) {
		return fmt.Errorf("close the input of the process in the sandbox: %w", err)
	}
	return nil
}

// stream holds what came in and was not read yet, at most one Window.
type stream struct {
	p    *Process
	kind FrameType

	mu    sync.Mutex // guards the rest
	cond  sync.Cond
	buf   []byte
	ended bool
	err   error
}

func newStream(p *Process, kind FrameType) *stream {
	s := &stream{p: p, kind: kind}
	s.cond.L = &s.mu
	return s
}

func (s *stream) put(b []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.buf)+len(b) > Window {
		return fmt.Errorf("stream %q: more bytes than its window", s.kind)
	}
	if !s.ended {
		s.buf = append(s.buf, b...)
	}
	s.cond.Broadcast()
	return nil
}

func (s *stream) end(err error) {
	s.mu.Lock()
	if !s.ended {
		s.ended, s.err = true, err
	}
	s.mu.Unlock()
	s.cond.Broadcast()
}

func (s *stream) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	s.mu.Lock()
	for len(s.buf) == 0 && !s.ended {
		s.cond.Wait()
	}
	n := copy(b, s.buf)
	s.buf = s.buf[n:]
	if n == 0 {
		err := s.err
		s.mu.Unlock()
		if err == nil {
			err = io.EOF
		}
		return 0, err
	}
	ended := s.ended
	s.mu.Unlock()
	if !ended {
		// A failure here shows in the reader of frames as well.
		_ = s.p.write(FrameAck, AckPayload(s.kind, n))
	}
	return n, nil
}
