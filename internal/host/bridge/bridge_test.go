package bridge_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/numinance/numinance/internal/host/bridge"
)

func listen(t *testing.T) *bridge.Bridge {
	t.Helper()
	b, err := bridge.Make(t.TempDir(), "run-1")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

// inside dials as the sandbox's PID 1 would.
func inside(t *testing.T, b *bridge.Bridge, first string) net.Conn {
	t.Helper()
	d, err := os.Open(b.Dir())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	c, err := net.Dial("unix", filepath.Join(b.Dir(), "host.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := io.WriteString(c, first); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestFirstLineDecides(t *testing.T) {
	b := listen(t)
	for _, bad := range []string{"NUMI/1 Q\n", "NUMI/2 P\n", "numi/1 P\n", "PRI * HTTP/2.0\r\n", "NUMI/1 P\r\n"} {
		c := inside(t, b, bad)
		c.SetReadDeadline(time.Now().Add(5 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%q: the connection was not closed: %v", bad, err)
		}
	}
	c := inside(t, b, "NUMI/1 P\nrest")
	got, err := b.DialPlugin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4)
	if _, err := io.ReadFull(got, buf); err != nil || string(buf) != "rest" {
		t.Errorf("after the first line: %q, %v", buf, err)
	}
	if _, err := got.Write([]byte("x")); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(c, buf[:1]); err != nil || buf[0] != 'x' {
		t.Errorf("back: %q, %v", buf[0], err)
	}

	h := inside(t, b, "NUMI/1 H\n")
	accepted, err := b.HostListener().Accept()
	if err != nil {
		t.Fatal(err)
	}
	h.Write([]byte("h"))
	if _, err := io.ReadFull(accepted, buf[:1]); err != nil || buf[0] != 'h' {
		t.Errorf("H: %q, %v", buf[0], err)
	}
}

func TestSilentConnectionIsClosed(t *testing.T) {
	b := listen(t)
	c := inside(t, b, "NUMI")
	start := time.Now()
	c.SetReadDeadline(start.Add(10 * time.Second))
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("not closed: %v", err)
	}
	if d := time.Since(start); d > 4*time.Second {
		t.Errorf("closed after %v", d)
	}
}

func TestCloseEndsEverythingAtOnce(t *testing.T) {
	b := listen(t)
	inside(t, b, "NUMI/1 P\n")
	conn, err := b.DialPlugin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dial := make(chan error, 1)
	go func() { _, err := b.DialPlugin(context.Background()); dial <- err }()
	read := make(chan error, 1)
	go func() { _, err := conn.Read(make([]byte, 1)); read <- err }()
	accept := make(chan error, 1)
	go func() { _, err := b.HostListener().Accept(); accept <- err }()
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-dial; !errors.Is(err, bridge.ErrOver) {
		t.Errorf("waiting dial: %v", err)
	}
	if err := <-read; err == nil {
		t.Error("an open connection was not cut")
	}
	if err := <-accept; !errors.Is(err, net.ErrClosed) {
		t.Errorf("waiting accept: %v", err)
	}
	if _, err := b.DialPlugin(t.Context()); !errors.Is(err, bridge.ErrOver) {
		t.Errorf("later dial: %v", err)
	}
	if _, err := os.Stat(b.Dir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the link directory is left: %v", err)
	}
	if err := b.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func TestListenRefusesOpenDirectories(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := bridge.Listen(dir); err == nil {
		t.Error("a directory open to others was taken")
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "host.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := bridge.Listen(dir); err == nil {
		t.Error("a file in the socket's place was replaced")
	}
}

func TestLongDirectory(t *testing.T) {
	b, err := bridge.Make(filepath.Join(t.TempDir(), strings.Repeat("long-name/", 20)), "run")
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(filepath.Join(b.Dir(), "host.sock"))
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}

// answer plays PID 1 for one order.
func answer(t *testing.T, c net.Conn, frames func(in *bufio.Reader, o bridge.Order)) {
	t.Helper()
	go func() {
		in := bufio.NewReader(c)
		o, err := bridge.ReadOrder(in)
		if err != nil {
			return
		}
		frames(in, o)
	}()
}

func TestSpawnHoldsToTheWire(t *testing.T) {
	b := listen(t)
	exit := func(code int) []byte { raw, _ := json.Marshal(bridge.Exit{Code: code}); return raw }
	cmd := bridge.Command{Argv: []string{"x"}, UID: bridge.UIDAgent}
	cases := []struct {
		name   string
		frames func(c net.Conn)
		start  string // error of Spawn, or empty
		wait   string // error of Wait, or empty
	}{
		{"ends well", func(c net.Conn) {
			bridge.WriteFrame(c, bridge.FrameStarted, []byte{0, 0, 0, 9})
			bridge.WriteFrame(c, bridge.FrameStdout, []byte("out"))
			bridge.WriteFrame(c, bridge.FrameExit, exit(4))
		}, "", ""},
		{"is refused", func(c net.Conn) { bridge.WriteFrame(c, bridge.FrameFailed, []byte("no such program")) }, "no such program", ""},
		{"goes away before it starts", func(c net.Conn) { c.Close() }, "closed the connection", ""},
		{"goes away before it ends", func(c net.Conn) { bridge.WriteFrame(c, bridge.FrameStarted, []byte{0, 0, 0, 9}); c.Close() }, "", "closed the connection"},
		{"exits without starting", func(c net.Conn) { bridge.WriteFrame(c, bridge.FrameExit, exit(0)) }, "instead of a pid", ""},
		{"overruns the window", func(c net.Conn) {
			bridge.WriteFrame(c, bridge.FrameStarted, []byte{0, 0, 0, 9})
			for range bridge.Window/bridge.MaxFrame + 1 {
				bridge.WriteFrame(c, bridge.FrameStderr, make([]byte, bridge.MaxFrame))
			}
		}, "", "window"},
		{"sends an unknown frame", func(c net.Conn) {
			bridge.WriteFrame(c, bridge.FrameStarted, []byte{0, 0, 0, 9})
			bridge.WriteFrame(c, 'z', nil)
		}, "", "unknown frame"},
		{"sends a frame that is too large", func(c net.Conn) {
			bridge.WriteFrame(c, bridge.FrameStarted, []byte{0, 0, 0, 9})
			c.Write([]byte{'o', 255, 255, 255, 255})
		}, "", "larger than"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			c := inside(t, b, "NUMI/1 I\n")
			answer(t, c, func(_ *bufio.Reader, o bridge.Order) {
				if o.Op == bridge.OpSpawn && o.Command.UID == bridge.UIDAgent {
					tc.frames(c)
				}
			})
			p, err := b.Spawn(t.Context(), cmd)
			if !says(err, tc.start) {
				t.Fatalf("spawn: %v, want %q", err, tc.start)
			}
			if err != nil {
				return
			}
			if _, err := p.Wait(); !says(err, tc.wait) {
				t.Fatalf("wait: %v, want %q", err, tc.wait)
			}
			if tc.wait == "" {
				out, err := io.ReadAll(p.Stdout)
				if e, _ := p.Wait(); string(out) != "out" || err != nil || e.Code != 4 || p.PID != 9 {
					t.Errorf("got %q, %v, %v, pid %d", out, err, e, p.PID)
				}
			}
		})
	}
	for _, uid := range []int{0, 1, 65534} {
		if _, err := b.Spawn(t.Context(), bridge.Command{Argv: []string{"x"}, UID: uid}); err == nil {
			t.Errorf("uid %d was taken", uid)
		}
	}
}

func says(err error, want string) bool {
	return want == "" && err == nil || want != "" && err != nil && strings.Contains(err.Error(), want)
}

func TestSignalsPassAStreamNobodyReads(t *testing.T) {
	b := listen(t)
	c := inside(t, b, "NUMI/1 I\n")
	signalled := make(chan byte, 1)
	answer(t, c, func(in *bufio.Reader, _ bridge.Order) {
		bridge.WriteFrame(c, bridge.FrameStarted, []byte{0, 0, 0, 9})
		// Acknowledges nothing of its input.
		for {
			t, payload, err := bridge.ReadFrame(in)
			if err != nil {
				return
			}
			if t == bridge.FrameSignal {
				signalled <- payload[0]
				return
			}
		}
	})
	p, err := b.Spawn(t.Context(), bridge.Command{Argv: []string{"x"}, UID: bridge.UIDAgent})
	if err != nil {
		t.Fatal(err)
	}
	go p.Stdin.Write(make([]byte, 2*bridge.Window))
	if err := p.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if got := <-signalled; got != byte(syscall.SIGTERM) {
		t.Errorf("signal %d", got)
	}
}

func FuzzReadOrder(f *testing.F) {
	f.Add([]byte("{\"op\":\"spawn\",\"command\":{\"argv\":[\"x\"],\"uid\":1000}}\n"))
	f.Add([]byte("\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		o, err := bridge.ReadOrder(bufio.NewReader(strings.NewReader(string(raw))))
		if err != nil {
			return
		}
		if _, err := o.Line(); err != nil {
			t.Errorf("an order that was read cannot be written: %v", err)
		}
	})
}

// A plugin's server stops by closing its listener, while the sandbox lives on.
func TestHostListenerEndsWhenClosed(t *testing.T) {
	b, err := bridge.Make(t.TempDir(), "run")
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	l := b.HostListener()
	ended := make(chan error, 1)
	go func() {
		_, err := l.Accept()
		ended <- err
	}()
	l.Close()
	select {
	case err := <-ended:
		if !errors.Is(err, net.ErrClosed) {
			t.Errorf("Accept after Close: %v, want net.ErrClosed", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Accept did not end with its listener")
	}
}

// A process that ends before its input is closed has ended well; closing the
// input of what is gone, or signalling it, is no error.
func TestInputOfAnEndedProcessCloses(t *testing.T) {
	b := listen(t)
	c := inside(t, b, "NUMI/1 I\n")
	closed := make(chan struct{})
	answer(t, c, func(*bufio.Reader, bridge.Order) {
		bridge.WriteFrame(c, bridge.FrameStarted, []byte{0, 0, 0, 9})
		bridge.WriteFrame(c, bridge.FrameStdout, []byte("out"))
		raw, _ := json.Marshal(bridge.Exit{Code: 3})
		bridge.WriteFrame(c, bridge.FrameExit, raw)
		c.Close()
		close(closed)
	})
	p, err := b.Spawn(t.Context(), bridge.Command{Argv: []string{"x"}, UID: bridge.UIDAgent})
	if err != nil {
		t.Fatal(err)
	}
	<-closed
	for range 3 { // the first write may still go into the socket
		if err := p.Stdin.Close(); err != nil {
			t.Fatalf("close the input: %v", err)
		}
		if err := p.Signal(syscall.SIGTERM); err != nil {
			t.Fatalf("signal: %v", err)
		}
	}
	go io.Copy(io.Discard, p.Stderr)
	if out, err := io.ReadAll(p.Stdout); err != nil || string(out) != "out" {
		t.Errorf("output %q, %v", out, err)
	}
	if exit, err := p.Wait(); err != nil || exit.Code != 3 {
		t.Errorf("Wait = %+v, %v; want code 3", exit, err)
	}
}
