package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/numinance/numinance/internal/host/bridge"
)

// pluginPatience is how long a host's call waits for the plugin to listen: the
// plugin may just be starting.
const pluginPatience = 10 * time.Second

// listenHost makes the socket where the plugin finds its host. The directory
// belongs to the adapter's uid and is closed to every other.
func listenHost() (*net.UnixListener, error) {
	if err := os.MkdirAll(bridge.SocketDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the plugin's socket directory: %w", err)
	}
	if err := os.Remove(bridge.HostSocket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("make the host socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: bridge.HostSocket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("make the host socket: %w", err)
	}
	// Owner 0 first: only an owner may set the mode, and PID 1 has no capability
	// to do so on another's directory.
	for _, step := range []error{
		os.Chown(bridge.SocketDir, 0, 0),
		os.Chmod(bridge.SocketDir, 0o700),
		os.Chown(bridge.SocketDir, bridge.UIDAdapter, bridge.UIDAdapter),
	} {
		if step != nil {
			return nil, fmt.Errorf("give the plugin its socket directory: %w", step)
		}
	}
	return l, nil
}

// serveHost carries the plugin's connections to the host.
func serveHost(l *net.UnixListener) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			pause(1)
			continue
		}
		go func() {
			if err := peerIs(c, bridge.UIDAdapter); err != nil {
				c.Close()
				return
			}
			up, err := dial(bridge.HostLink, bridge.KindHost)
			if err != nil {
				c.Close()
				return
			}
			join(c, up, nil)
		}()
	}
}

// keepPlugin always keeps one connection towards the host that waits for the
// host to speak, since the host is the client there.
func keepPlugin() {
	failures := 0
	for {
		up, err := dial(bridge.HostLink, bridge.KindPlugin)
		if err != nil {
			pause(failures)
			failures++
			continue
		}
		first := make([]byte, 4096)
		n, err := up.Read(first)
		if err != nil {
			up.Close()
			pause(failures)
			failures++
			continue
		}
		failures = 0
		go func() {
			down, err := dialPlugin()
			if err != nil {
				fmt.Fprintln(os.Stderr, "numi-init:", err)
				up.Close()
				return
			}
			join(up, down, first[:n])
		}()
	}
}

// dialPlugin connects to the plugin's socket, if that is one the adapter's uid
// made: the directory is the plugin's own to fill.
func dialPlugin() (*net.UnixConn, error) {
	deadline := time.Now().Add(pluginPatience)
	for {
		c, err := tryPlugin()
		if err == nil {
			return c, nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("reach the plugin: %w", err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func tryPlugin() (*net.UnixConn, error) {
	st, err := os.Lstat(bridge.PluginSocket)
	if err != nil {
		return nil, err
	}
	if st.Mode().Type() != os.ModeSocket {
		return nil, fmt.Errorf("%s is not a socket", bridge.PluginSocket)
	}
	c, err := dial(bridge.PluginSocket, 0)
	if err != nil {
		return nil, err
	}
	if err := peerIs(c, bridge.UIDAdapter); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// serveEgress carries local connections to the run's egress proxy. Any uid may
// come: the proxy, not this forwarder, decides.
func serveEgress(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			pause(1)
			continue
		}
		go func() {
			up, err := dial(bridge.EgressLink, 0)
			if err != nil {
				// Answered as a proxy would, so that a person reading the tool's
				// output learns the cause.
				c.SetDeadline(time.Now().Add(2 * time.Second))
				_, _ = io.WriteString(c, "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\nthis sandbox has no way out: no egress was granted to its run\n")
				c.Close()
				return
			}
			join(c.(*net.TCPConn), up, nil)
		}()
	}
}

// halfCloser is a connection whose two directions end one by one.
type halfCloser interface {
	net.Conn
	CloseWrite() error
}

// join copies both ways, after sending first to b, and closes both when both
// directions ended or either broke.
func join(a, b halfCloser, first []byte) {
	defer a.Close()
	defer b.Close()
	if len(first) > 0 {
		if _, err := b.Write(first); err != nil {
			return
		}
	}
	var wg sync.WaitGroup
	oneWay := func(dst, src halfCloser) {
		if _, err := io.Copy(dst, src); err != nil {
			a.Close()
			b.Close()
			return
		}
		_ = dst.CloseWrite()
	}
	wg.Go(func() { oneWay(b, a) })
	wg.Go(func() { oneWay(a, b) })
	wg.Wait()
}

// peerIs checks who is at the other end of a connection inside the sandbox.
func peerIs(c *net.UnixConn, uid int) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *syscall.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if credErr != nil {
		return fmt.Errorf("peer credentials: %w", credErr)
	}
	if int(cred.Uid) != uid {
		return fmt.Errorf("peer has uid %d, want %d", cred.Uid, uid)
	}
	return nil
}
