// Package api lets several numi processes share one runtime. The process that
// holds the state directory serves a unix socket; any other sends its command
// line there and copies what comes back. There is one runtime, one journal and
// one place where a Change is driven, however many terminals look on.
package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
)

// Request is one command line to run inside the serving process.
type Request struct {
	// Args are the arguments without the program name.
	Args []string `json:"args"`
	// Dir is the directory that relative paths in Args start from.
	Dir string `json:"dir"`
}

// Handler runs one command and returns its exit code. The context ends when
// the client goes away or interrupts.
type Handler func(ctx context.Context, r Request, stdout, stderr io.Writer) int

// frame is one line of the answer: some output, or the end.
type frame struct {
	Out  []byte `json:"out,omitempty"`
	Err  []byte `json:"err,omitempty"`
	Exit *int   `json:"exit,omitempty"`
}

const (
	maxRequest = 1 << 20
	maxFrame   = 1 << 20
)

// ErrNoServer is returned by Forward when nobody serves the socket.
var ErrNoServer = errors.New("no runtime serves this state directory")

// Server serves commands on a unix socket until it is closed.
type Server struct {
	listener net.Listener
	handler  Handler
	ctx      context.Context
	cancel   context.CancelFunc
	running  sync.WaitGroup
	done     chan struct{}
}

// Listen serves h on a 0600 socket at path, replacing a socket that a dead
// process left. The caller must hold the lock on the state directory.
func Listen(path string, h Handler) (*Server, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove the old socket: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("protect the socket: %w", err)
	}
	s := &Server{listener: l, handler: h, done: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	go s.accept()
	return s, nil
}

func (s *Server) accept() {
	defer close(s.done)
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			return
		}
		s.running.Add(1)
		go func() {
			defer s.running.Done()
			s.serve(conn)
		}()
	}
}

func (s *Server) serve(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReaderSize(conn, 64<<10)
	line, err := readLine(in, maxRequest)
	if err != nil {
		return
	}
	var req Request
	if err := json.Unmarshal(line, &req); err != nil {
		return
	}
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	go func() {
		// The client sends nothing more; the end of its side means that it left.
		_, _ = io.Copy(io.Discard, in)
		cancel()
	}()
	w := &frameWriter{enc: json.NewEncoder(conn)}
	code := s.handler(ctx, req, w.stream(func(b []byte) frame { return frame{Out: b} }), w.stream(func(b []byte) frame { return frame{Err: b} }))
	_ = w.send(frame{Exit: &code})
}

// Drain stops accepting and waits until the commands in flight are over.
func (s *Server) Drain() {
	s.listener.Close()
	<-s.done
	s.running.Wait()
	s.cancel()
}

// Close stops accepting, interrupts the commands in flight and waits for them.
func (s *Server) Close() {
	s.cancel()
	s.Drain()
}

// Forward sends r to the runtime at path and copies its output. It returns the
// command's exit code. Ending ctx interrupts the command and waits for its end.
func Forward(ctx context.Context, path string, r Request, stdout, stderr io.Writer) (int, error) {
	conn, err := net.Dial("unix", path)
	if err != nil {
		return 0, fmt.Errorf("%w (%v)", ErrNoServer, err)
	}
	defer conn.Close()
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return 0, fmt.Errorf("send the command: %w", err)
	}
	stop := context.AfterFunc(ctx, func() {
		if u, ok := conn.(*net.UnixConn); ok {
			_ = u.CloseWrite()
		}
	})
	defer stop()
	in := bufio.NewReaderSize(conn, 64<<10)
	for {
		line, err := readLine(in, 2*maxFrame)
		if err != nil {
			return 0, fmt.Errorf("the runtime went away before the command ended: %w", err)
		}
		var f frame
		if err := json.Unmarshal(line, &f); err != nil {
			return 0, fmt.Errorf("read the runtime's answer: %w", err)
		}
		if f.Exit != nil {
			return *f.Exit, nil
		}
		if _, err := stdout.Write(f.Out); err != nil {
			return 0, err
		}
		if _, err := stderr.Write(f.Err); err != nil {
			return 0, err
		}
	}
}

func readLine(r *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(part) > limit {
			return nil, fmt.Errorf("a line of more than %d bytes", limit)
		}
		line = append(line, part...)
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		return line, err
	}
}

type frameWriter struct {
	mu  sync.Mutex // guards enc
	enc *json.Encoder
}

func (w *frameWriter) send(f frame) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.enc.Encode(f)
}

type streamWriter struct {
	w    *frameWriter
	wrap func([]byte) frame
}

func (w *frameWriter) stream(wrap func([]byte) frame) io.Writer { return streamWriter{w, wrap} }

func (s streamWriter) Write(p []byte) (int, error) {
	for n := 0; n < len(p); n += maxFrame / 2 {
		if err := s.w.send(s.wrap(p[n:min(n+maxFrame/2, len(p))])); err != nil {
			return n, err
		}
	}
	return len(p), nil
}
