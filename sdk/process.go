package sdk

import (
	"context"
	"errors"
	"io"
	"sync"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
)

// Process is one process that the host runs inside the run's sandbox. Both
// Stdout and Stderr must be read to their end: like a pipe, an unread one holds
// the process up. It lives until it exits, its timeout passes, or the context
// given to Spawn is done.
type Process struct {
	// PID is the process id inside the sandbox.
	PID uint32
	// Stdin is the process's standard input; Close ends it. It may be used by
	// one goroutine at a time.
	Stdin io.WriteCloser
	// Stdout and Stderr end with io.EOF when the process does, and with the
	// call's status if it is cut off.
	Stdout, Stderr io.Reader

	stream grpc.BidiStreamingClient[pluginv1.SpawnRequest, pluginv1.SpawnResponse]
	sendMu sync.Mutex // guards stream.Send, which takes one caller at a time
	done   chan struct{}
	exit   *pluginv1.SpawnExit // set before done is closed
	err    error               // set before done is closed
}

// Spawn starts a process at the agent's or the candidate's uid inside the run's
// sandbox. Adapters and verifiers alone may; an adapter names the decision that
// allowed it.
func (h *Host) Spawn(ctx context.Context, start *pluginv1.SpawnStart) (*Process, error) {
	stream, err := h.client.Spawn(ctx)
	if err != nil {
		return nil, err
	}
	if err := stream.Send(&pluginv1.SpawnRequest{Step: &pluginv1.SpawnRequest_Start{Start: start}}); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	first, err := stream.Recv()
	if err != nil {
		if err == io.EOF {
			err = status.Error(codes.Internal, "spawn: the host ended the call without a word")
		}
		return nil, err
	}
	pid, ok := first.GetStep().(*pluginv1.SpawnResponse_Started)
	if !ok {
		return nil, status.Errorf(codes.Internal, "spawn: the host began with %T", first.GetStep())
	}
	outR, outW := io.Pipe()
	errR, errW := io.Pipe()
	p := &Process{PID: pid.Started, Stdout: outR, Stderr: errR, stream: stream, done: make(chan struct{})}
	p.Stdin = &processInput{p: p}
	go p.pump(outW, errW)
	// Once the caller has given up, output that nobody reads must not hold the
	// pump. Not the stream's own context: it is done after a normal end too.
	stop := context.AfterFunc(ctx, func() {
		outW.CloseWithError(status.FromContextError(ctx.Err()).Err())
		errW.CloseWithError(status.FromContextError(ctx.Err()).Err())
	})
	go func() { <-p.done; stop() }()
	return p, nil
}

// pump distributes what the host sends until the end of the process.
func (p *Process) pump(stdout, stderr *io.PipeWriter) {
	defer close(p.done)
	for {
		m, err := p.stream.Recv()
		if err == io.EOF {
			err = nil
			if p.exit == nil {
				err = status.Error(codes.Internal, "spawn: the host ended the call without the exit of the process")
			}
		} else if err == nil {
			switch step := m.GetStep().(type) {
			case *pluginv1.SpawnResponse_Stdout:
				// An error means that the reader is gone; the rest is dropped.
				_, _ = stdout.Write(step.Stdout)
			case *pluginv1.SpawnResponse_Stderr:
				_, _ = stderr.Write(step.Stderr)
			case *pluginv1.SpawnResponse_Exit:
				p.exit = step.Exit
			}
			continue
		}
		p.err = err
		stdout.CloseWithError(err) // nil is io.EOF
		stderr.CloseWithError(err)
		return
	}
}

// Wait returns how the process ended. Call it after Stdout and Stderr were read.
func (p *Process) Wait() (*pluginv1.SpawnExit, error) {
	<-p.done
	return p.exit, p.err
}

// Done is closed when the process has ended or was cut off.
func (p *Process) Done() <-chan struct{} { return p.done }

// Signal sends the process a signal.
func (p *Process) Signal(sig syscall.Signal) error {
	return p.send(&pluginv1.SpawnRequest{Step: &pluginv1.SpawnRequest_Signal{Signal: uint32(sig)}})
}

func (p *Process) send(r *pluginv1.SpawnRequest) error {
	p.sendMu.Lock()
	defer p.sendMu.Unlock()
	return p.stream.Send(r)
}

// processInput is the writing end of a process's standard input.
type processInput struct {
	p      *Process
	closed bool
}

func (w *processInput) Write(b []byte) (int, error) {
	if w.closed {
		return 0, io.ErrClosedPipe
	}
	for n := 0; n < len(b); n += chunk {
		part := b[n:min(n+chunk, len(b))]
		if err := w.p.send(&pluginv1.SpawnRequest{Step: &pluginv1.SpawnRequest_Stdin{Stdin: part}}); err != nil {
			return n, io.ErrClosedPipe // the process is gone; Wait says why
		}
	}
	return len(b), nil
}

func (w *processInput) Close() error {
	if w.closed {
		return nil
	}
	w.closed = true
	if err := w.p.send(&pluginv1.SpawnRequest{Step: &pluginv1.SpawnRequest_CloseStdin{CloseStdin: true}}); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}
