// Package bridge is the host's end of the one link between a sandbox and the
// host: a unix socket that only PID 1 inside can reach, over which it dials
// out. The plugin host takes its gRPC connections from here, contexts/sandbox
// makes and closes it; cmd/numi-init is the other end and shares the wire
// definitions of this package, which therefore needs only the standard library.
package bridge

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// ErrOver is returned by everything once the bridge is closed: the run is over
// and no connection of it will come any more.
var ErrOver = errors.New("the sandbox's link is closed: its run is over")

// preambleTimeout bounds how long a new connection may take to say its kind.
const preambleTimeout = 2 * time.Second

// maxWaiting bounds the accepted connections of one kind nobody has taken yet;
// more are closed at once, so a broken PID 1 cannot pile them up.
const maxWaiting = 16

// Bridge is one sandbox's link. It lives from Listen, before the sandbox
// starts, to Close, when the run is over; then every connection is cut and
// every later call fails at once with ErrOver.
type Bridge struct {
	dir      string
	remove   bool // dir was made by Make and goes with the bridge
	listener *net.UnixListener
	over     chan struct{}
	waiting  map[Kind]chan net.Conn
	wg       sync.WaitGroup

	mu     sync.Mutex // guards conns and closed
	conns  map[net.Conn]struct{}
	closed bool
}

// Listen makes the link's socket in dir, which must exist, belong to this
// process and be closed to others (0700): whoever can reach the socket can
// speak as the sandbox's PID 1. A socket left there is replaced.
func Listen(dir string) (*Bridge, error) {
	if err := checkDir(dir); err != nil {
		return nil, fmt.Errorf("link directory: %w", err)
	}
	path := filepath.Join(dir, filepath.Base(HostLink))
	if st, err := os.Lstat(path); err == nil {
		if st.Mode().Type() != os.ModeSocket {
			return nil, fmt.Errorf("link socket %s: something else is in its place", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove old link socket: %w", err)
		}
	}
	l, err := ListenIn(dir, filepath.Base(HostLink))
	if err != nil {
		return nil, err
	}
	b := &Bridge{
		dir: dir, listener: l, over: make(chan struct{}),
		conns: map[net.Conn]struct{}{},
		waiting: map[Kind]chan net.Conn{
			KindPlugin:  make(chan net.Conn, maxWaiting),
			KindHost:    make(chan net.Conn, maxWaiting),
			KindControl: make(chan net.Conn, maxWaiting),
		},
	}
	b.wg.Go(b.accept)
	return b, nil
}

// Make makes the link directory name in parent, empty and closed to others, and
// listens there. Close removes it. What a killed process left under that name
// is removed first.
func Make(parent, name string) (*Bridge, error) {
	if name == "" || name != filepath.Base(name) || name[0] == '.' {
		return nil, fmt.Errorf("link directory name %q", name)
	}
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return nil, fmt.Errorf("make the link directory: %w", err)
	}
	dir := filepath.Join(parent, name)
	if err := os.RemoveAll(dir); err != nil {
		return nil, fmt.Errorf("remove an old link directory: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the link directory: %w", err)
	}
	b, err := Listen(dir)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	b.remove = true
	return b, nil
}

// EgressListener makes the socket to which PID 1 forwards what the processes
// inside send to ProxyAddress. Until it is made they are told that there is no
// way out. The egress proxy closes it.
func (b *Bridge) EgressListener() (net.Listener, error) {
	return ListenIn(b.dir, filepath.Base(EgressLink))
}

// ListenIn listens on the unix socket name in dir with mode 0600. It goes
// through the directory's descriptor, so that dir may be longer than the 107
// bytes a socket address holds.
func ListenIn(dir, name string) (*net.UnixListener, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open link directory: %w", err)
	}
	defer d.Close()
	short := "/proc/self/fd/" + strconv.Itoa(int(d.Fd())) + "/" + name
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: short, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", filepath.Join(dir, name), err)
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(filepath.Join(dir, name), 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("close the socket to others: %w", err), l.Close())
	}
	return l, nil
}

func checkDir(dir string) error {
	st, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	switch {
	case !st.IsDir():
		return fmt.Errorf("%s is not a directory", dir)
	case !ok || int(sys.Uid) != os.Geteuid():
		return fmt.Errorf("%s does not belong to this process's user", dir)
	case st.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("%s is open to others (mode %v), want 0700", dir, st.Mode().Perm())
	}
	return nil
}

// Dir is the directory to bind read-only at LinkDir inside the sandbox.
func (b *Bridge) Dir() string { return b.dir }

// Done is closed when the bridge is.
func (b *Bridge) Done() <-chan struct{} { return b.over }

// DialPlugin returns a connection to the plugin inside, on which the caller is
// the gRPC client. It waits for ctx until PID 1 has one ready, and fails at
// once with ErrOver when the run is over.
func (b *Bridge) DialPlugin(ctx context.Context) (net.Conn, error) {
	return b.take(ctx, KindPlugin)
}

// HostListener yields the connections the plugin inside opens to the host, until
// it is closed or the bridge ends. Another one may follow it.
func (b *Bridge) HostListener() net.Listener {
	l := &hostListener{b: b}
	l.open, l.shut = context.WithCancel(context.Background())
	return l
}

// Ready waits until PID 1 inside has shown itself by its control connection.
func (b *Bridge) Ready(ctx context.Context) error {
	c, err := b.take(ctx, KindControl)
	if err != nil {
		return err
	}
	select {
	case b.waiting[KindControl] <- c:
	default:
		c.Close()
	}
	return nil
}

// Close ends every connection and makes every later call fail with ErrOver.
// It is safe to call more than once.
func (b *Bridge) Close() error {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		b.wg.Wait()
		return nil
	}
	b.closed = true
	close(b.over)
	err := b.listener.Close()
	for c := range b.conns {
		c.(*tracked).Conn.Close()
	}
	clear(b.conns)
	b.mu.Unlock()
	b.wg.Wait()
	if rmErr := os.Remove(filepath.Join(b.dir, filepath.Base(HostLink))); rmErr != nil && !errors.Is(rmErr, os.ErrNotExist) {
		err = errors.Join(err, rmErr)
	}
	if b.remove {
		err = errors.Join(err, os.RemoveAll(b.dir))
	}
	if err != nil {
		return fmt.Errorf("close the sandbox's link: %w", err)
	}
	return nil
}

func (b *Bridge) accept() {
	for {
		c, err := b.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of descriptors: those in use will come free.
			select {
			case <-b.over:
				return
			case <-time.After(20 * time.Millisecond):
			}
			continue
		}
		t := b.track(c)
		if t == nil {
			c.Close()
			return
		}
		b.wg.Go(func() { b.classify(t) })
	}
}

// classify reads exactly the first line and hands the connection on; what does
// not say a known kind in time is closed without an answer.
func (b *Bridge) classify(c *tracked) {
	line := make([]byte, PreambleLen)
	c.SetReadDeadline(time.Now().Add(preambleTimeout))
	if _, err := io.ReadFull(c, line); err != nil {
		c.Close()
		return
	}
	c.SetReadDeadline(time.Time{})
	kind, err := ParsePreamble(line)
	if err != nil {
		c.Close()
		return
	}
	select {
	case b.waiting[kind] <- c:
	default:
		c.Close()
	}
}

func (b *Bridge) take(ctx context.Context, k Kind) (net.Conn, error) {
	select {
	case <-b.over:
		return nil, ErrOver
	default:
	}
	select {
	case c := <-b.waiting[k]:
		return c, nil
	case <-b.over:
		return nil, ErrOver
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the sandbox's PID 1 to dial (%c): %w", k, ctx.Err())
	}
}

// track registers c to be cut by Close; nil means the bridge is closed already.
func (b *Bridge) track(c net.Conn) *tracked {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	t := &tracked{Conn: c, bridge: b}
	b.conns[t] = struct{}{}
	return t
}

// tracked is a connection that leaves the bridge's books when it is closed.
type tracked struct {
	net.Conn
	bridge *Bridge
}

func (t *tracked) Close() error {
	t.bridge.mu.Lock()
	delete(t.bridge.conns, net.Conn(t))
	t.bridge.mu.Unlock()
	return t.Conn.Close()
}

type hostListener struct {
	b    *Bridge
	open context.Context
	shut context.CancelFunc
}

func (l *hostListener) Accept() (net.Conn, error) {
	c, err := l.b.take(l.open, KindHost)
	if errors.Is(err, ErrOver) || l.open.Err() != nil {
		if c != nil {
			c.Close()
		}
		return nil, net.ErrClosed
	}
	return c, err
}

func (l *hostListener) Close() error {
	l.shut()
	return nil
}

func (l *hostListener) Addr() net.Addr { return l.b.listener.Addr() }
