package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/numinance/numinance/internal/edge/api"
	"github.com/numinance/numinance/internal/edge/cli"
	"github.com/numinance/numinance/internal/host/doctor"
)

// Main runs one command line. The first process that needs the runtime takes
// the lock on the state directory and serves the others until nothing runs; the
// others are its clients.
func Main(ctx context.Context, version string, args []string, stdout, stderr io.Writer) int {
	home, err := FindHome()
	if err != nil {
		fmt.Fprintln(stderr, "numi:", err)
		return cli.ExitBroken
	}
	dir, err := os.Getwd()
	if err != nil {
		fmt.Fprintln(stderr, "numi: no working directory:", err)
		return cli.ExitBroken
	}
	c := cli.Config{Version: version, Home: string(home), Dir: dir, Plugins: servePlugin, BundledPlugins: bundledNames()}
	if !cli.NeedsRuntime(c, args) {
		return cli.Run(ctx, c, args, stdout, stderr)
	}
	if err := home.Make(); err != nil {
		fmt.Fprintln(stderr, "numi:", err)
		return cli.ExitBroken
	}
	for patience := time.Now().Add(20 * time.Second); ; {
		lock, err := home.Lock()
		switch {
		case err == nil:
			defer lock.Close()
			return own(ctx, home, c, args, stdout, stderr)
		case !errors.Is(err, errHeld):
			fmt.Fprintln(stderr, "numi:", err)
			return cli.ExitBroken
		}
		code, err := api.Forward(ctx, home.OwnerSocket(), api.Request{Args: args, Dir: dir}, stdout, stderr)
		if err == nil {
			return code
		}
		// The owner may be starting, or just leaving: then the lock is next.
		if !errors.Is(err, api.ErrNoServer) || time.Now().After(patience) || ctx.Err() != nil {
			fmt.Fprintln(stderr, "numi:", err)
			return cli.ExitBroken
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// own runs the command in this process and serves others meanwhile.
func own(ctx context.Context, home Home, c cli.Config, args []string, stdout, stderr io.Writer) int {
	shared := &sharedRuntime{home: home}
	c.Open = shared.open
	if err := home.clearSockets(); err != nil {
		fmt.Fprintln(stderr, "numi:", err)
		return cli.ExitBroken
	}
	server, err := api.Listen(home.Socket(), func(ctx context.Context, r api.Request, out, errOut io.Writer) int {
		mine := c
		mine.Dir = r.Dir
		return cli.Run(ctx, mine, r.Args, out, errOut)
	})
	if err != nil {
		fmt.Fprintln(stderr, "numi:", err)
		return cli.ExitBroken
	}
	code := cli.Run(ctx, c, args, stdout, stderr)
	stop := context.AfterFunc(ctx, server.Close)
	server.Drain()
	stop()
	if err := shared.close(); err != nil {
		fmt.Fprintln(stderr, "numi:", err)
		if code == cli.ExitReleased {
			code = cli.ExitBroken
		}
	}
	return code
}

// sharedRuntime opens the runtime when the first command wants it and closes it
// when the process has nothing left to do.
type sharedRuntime struct {
	home Home
	mu   sync.Mutex // guards rt
	rt   *Daemon
}

func (s *sharedRuntime) open(ctx context.Context, progress io.Writer) (cli.Runtime, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rt == nil {
		// Said here once, in doctor's words, and not by each jail that fails.
		if c := doctor.Namespaces(ctx); c.State != doctor.OK {
			return nil, &cli.ExitError{Code: cli.ExitBroken, Err: fmt.Errorf("%s: %s; to mend: %s (numi doctor says more)", c.Name, c.Detail, c.Fix)}
		}
		rt, err := Open(ctx, s.home, progress)
		if err != nil {
			if s.home.full() {
				err = fmt.Errorf("the disk that holds %s is full: free some space, then go on: %w", s.home, err)
			}
			return nil, &cli.ExitError{Code: cli.ExitBroken, Err: err}
		}
		s.rt = rt
	}
	return lent{s.rt}, nil
}

func (s *sharedRuntime) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rt == nil {
		return nil
	}
	return s.rt.Close()
}

// lent is the shared runtime in the hands of one command, which may not end it.
type lent struct{ *Daemon }

func (lent) Close() error { return nil }
