package pluginhost

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// Attach waits for a plugin that its author starts by hand, for example under a
// debugger, in a shell of the runtime's own user. Nothing confines it, so it is
// for development alone.
type Attach struct {
	// Dir is where the sockets are made; empty is the directory for temporary
	// files.
	Dir string
	// DataDir is the plugin's directory; empty if it keeps nothing.
	DataDir string
	// Announce is told the two variables to start the plugin with.
	Announce func(environment []string)
}

// Launch implements Launcher. It waits for the plugin as long as ctx allows.
func (a Attach) Launch(ctx context.Context) (*Link, error) {
	uid, gid := os.Getuid(), os.Getgid()
	p := &process{ended: make(chan struct{})}
	end := sync.OnceFunc(func() { close(p.ended) })
	var err error
	if p.out, err = newOutput(""); err != nil {
		return nil, err
	}
	if err := p.prepare(Process{RunDir: a.Dir, DataDir: a.DataDir}, uid, gid); err != nil {
		_ = p.close()
		return nil, err
	}
	dir := filepath.Join(p.work, "s")
	if a.Announce != nil {
		a.Announce([]string{
			"NUMI_PLUGIN_SOCKET=" + filepath.Join(dir, pluginSocket),
			"NUMI_HOST_SOCKET=" + filepath.Join(dir, hostSocket),
		})
	}
	for {
		c, err := p.sockets.dial(ctx, pluginSocket)
		if err == nil {
			c.Close()
			break
		}
		select {
		case <-ctx.Done():
			_ = p.close()
			return nil, fmt.Errorf("no plugin came: %w", ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
	return &Link{
		Dial: func(ctx context.Context) (net.Conn, error) { return p.sockets.dial(ctx, pluginSocket) },
		Host: p.host, Ended: p.ended, Why: func() string { return "it was started by hand" }, DataDir: a.DataDir,
		Jail:  "none: its author started it by hand",
		Close: sync.OnceValue(func() error { end(); return p.close() }),
	}, nil
}
