package pluginhost

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// socketDir is the directory that a plugin owns and puts its socket in. The
// plugin may do what it likes there, so the host goes by the descriptor it
// opened before the plugin ran.
type socketDir struct {
	dir *os.File
	uid uint32 // who may be at the other end
}

func openSocketDir(path string, uid int) (*socketDir, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the plugin's socket directory: %w", err)
	}
	return &socketDir{dir: os.NewFile(uintptr(fd), path), uid: uint32(uid)}, nil
}

// dial connects to the socket with the given name. A link there could lead to a
// socket of somebody else, so it is opened without following any, and what
// answers must run as the plugin.
func (s *socketDir) dial(ctx context.Context, name string) (net.Conn, error) {
	fd, err := unix.Openat2(int(s.dir.Fd()), name, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, fmt.Errorf("open the plugin's socket: %w", err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("look at the plugin's socket: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return nil, fmt.Errorf("the plugin's %s is no socket", name)
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(fd))
	if err != nil {
		return nil, fmt.Errorf("connect to the plugin: %w", err)
	}
	if err := s.checkPeer(c); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (s *socketDir) checkPeer(c net.Conn) error {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return fmt.Errorf("connection of type %T has no peer credentials", c)
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return fmt.Errorf("read the peer's credentials: %w", err)
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return fmt.Errorf("read the peer's credentials: %w", err)
	}
	if credErr != nil {
		return fmt.Errorf("read the peer's credentials: %w", credErr)
	}
	if cred.Uid != s.uid {
		return fmt.Errorf("uid %d is at the other end, the plugin is uid %d", cred.Uid, s.uid)
	}
	return nil
}

func (s *socketDir) close() { s.dir.Close() }

// peerListener hands on only connections from the plugin's uid.
type peerListener struct {
	net.Listener
	sockets *socketDir
}

func (l peerListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.sockets.checkPeer(c) == nil {
			return c, nil
		}
		c.Close()
	}
}
