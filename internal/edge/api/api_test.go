package api_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/numinance/numinance/internal/edge/api"
)

func TestForwardCarriesOutputAndExitCode(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	s, err := api.Listen(path, func(_ context.Context, r api.Request, out, errOut io.Writer) int {
		fmt.Fprintf(out, "%s in %s\n", r.Args, r.Dir)
		fmt.Fprint(errOut, "careful\n")
		_, _ = out.Write(bytes.Repeat([]byte{'x'}, 3<<20))
		return 3
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("socket mode %v, %v; want 0600", fi.Mode(), err)
	}
	var out, errOut bytes.Buffer
	code, err := api.Forward(context.Background(), path, api.Request{Args: []string{"change", "list"}, Dir: "/d"}, &out, &errOut)
	if err != nil || code != 3 {
		t.Fatalf("Forward = %d, %v; want 3", code, err)
	}
	if want := len("[change list] in /d\n") + 3<<20; out.Len() != want {
		t.Errorf("got %d bytes of output, want %d", out.Len(), want)
	}
	if errOut.String() != "careful\n" {
		t.Errorf("stderr %q", errOut.String())
	}
}

func TestInterruptReachesTheCommand(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	started := make(chan struct{})
	s, err := api.Listen(path, func(ctx context.Context, _ api.Request, _, errOut io.Writer) int {
		close(started)
		<-ctx.Done()
		fmt.Fprint(errOut, "interrupted\n")
		return 5
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ctx, cancel := context.WithCancel(context.Background())
	go func() { <-started; cancel() }()
	var errOut bytes.Buffer
	code, err := api.Forward(ctx, path, api.Request{}, io.Discard, &errOut)
	if err != nil || code != 5 || errOut.String() != "interrupted\n" {
		t.Fatalf("Forward = %d, %v, %q; the command must end in its own words", code, err, errOut.String())
	}
}

func TestNobodyServes(t *testing.T) {
	_, err := api.Forward(context.Background(), filepath.Join(t.TempDir(), "s"), api.Request{}, io.Discard, io.Discard)
	if !errors.Is(err, api.ErrNoServer) {
		t.Fatalf("got %v, want ErrNoServer", err)
	}
}

func TestCloseLetsCommandsEndInTheirOwnWords(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	begun := make(chan struct{})
	s, err := api.Listen(path, func(ctx context.Context, _ api.Request, out, _ io.Writer) int {
		fmt.Fprint(out, "begun")
		close(begun)
		<-ctx.Done()
		return 7
	})
	if err != nil {
		t.Fatal(err)
	}
	go func() { <-begun; s.Close() }()
	var out bytes.Buffer
	code, err := api.Forward(context.Background(), path, api.Request{}, &out, io.Discard)
	if err != nil || code != 7 || out.String() != "begun" {
		t.Fatalf("Forward = %d, %v, %q; want 7 and the output before the end", code, err, out.String())
	}
}
