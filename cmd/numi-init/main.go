// Command numi-init is PID 1 inside a sandbox: it reaps, it holds the only link
// to the host (see internal/host/bridge), it starts processes on the host's
// order under one of three unprivileged uids, and it forwards the one local
// address that leads to the egress proxy. The sandbox provider starts it.
//
// It needs nothing but the standard library and no file of the image.
package main

import (
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/numinance/numinance/internal/host/bridge"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "seen" {
		if err := seen(os.Args[2:]); err != nil {
			fail(err)
		}
		return
	}
	if len(os.Args) > 1 && os.Args[1] == "limited" {
		fail(execLimited(os.Args[2:]))
	}
	if os.Getpid() != 1 || os.Getuid() != 0 {
		fail(fmt.Errorf("this program is PID 1 of a sandbox and does nothing elsewhere"))
	}
	if err := run(); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "numi-init:", err)
	os.Exit(70)
}

// seen shows the provider that what it delivered arrived: a runtime that ignored
// the work tree would have started an empty sandbox.
func seen(paths []string) error {
	for _, p := range paths {
		if _, err := os.Lstat(p); err != nil {
			return fmt.Errorf("not delivered: %w", err)
		}
	}
	return nil
}

func run() error {
	// The adapter's socket directory is closed to others, so the sockets in it
	// may be open; a child's mask is set again before it starts.
	syscall.Umask(0)
	procs := newReaper()
	hostSide, err := listenHost()
	if err != nil {
		return err
	}
	proxy, err := net.Listen("tcp", bridge.ProxyAddress)
	if err != nil {
		return fmt.Errorf("listen for the egress proxy: %w", err)
	}
	go serveHost(hostSide)
	go serveEgress(proxy)
	go keepPlugin()
	go keepControl(procs)

	stop := make(chan os.Signal, 4)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	<-stop
	// The kernel ends every other process with PID 1.
	return nil
}

// dial connects to a socket in the link directory and says what the connection
// is for; with kind 0 it says nothing.
func dial(path string, kind bridge.Kind) (*net.UnixConn, error) {
	c, err := net.DialTimeout("unix", path, 5*time.Second)
	if err != nil {
		return nil, err
	}
	if kind != 0 {
		if _, err := c.Write(bridge.Preamble(kind)); err != nil {
			c.Close()
			return nil, err
		}
	}
	return c.(*net.UnixConn), nil
}

// pause spaces out attempts to reach a host that is not there (yet).
func pause(failures int) { time.Sleep(min(time.Duration(failures+1)*10*time.Millisecond, time.Second)) }
