package engine_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/numinance/numinance/internal/host/store"
	"github.com/numinance/numinance/internal/orchestration/engine"
)

func open(t testing.TB, path string, body engine.Body, fault func(string, error)) *engine.DBOS {
	t.Helper()
	db, err := store.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	e, err := engine.Open(engine.Config{DB: db, Executor: "test", Fault: fault}, body)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = e.Close(5 * time.Second) // a test may have closed it
		_ = db.Close()
	})
	return e
}

func step(name string, fn func() string) engine.Step {
	return engine.Step{Name: name, Run: func(context.Context) []byte { return []byte(fn()) }}
}

func wait[T any](t testing.TB, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(20 * time.Second):
		t.Fatal("nothing came in 20 s")
		panic("unreachable")
	}
}

func TestMessagesArriveOnceAndInOrder(t *testing.T) {
	got := make(chan string, 10)
	e := open(t, filepath.Join(t.TempDir(), "s.db"), func(f engine.Flow) error {
		for range 3 {
			m, ok, err := f.Receive(time.Minute)
			if err != nil || !ok {
				return fmt.Errorf("receive: %v %w", ok, err)
			}
			got <- string(m)
		}
		_, ok, err := f.Receive(10 * time.Millisecond)
		got <- fmt.Sprint(ok, err)
		return nil
	}, func(_ string, err error) { got <- err.Error() })
	if err := e.Start(t.Context(), "chg-a", nil); err != nil {
		t.Fatal(err)
	}
	for _, m := range []string{"one", "two", "two", "three"} {
		if err := e.Send(t.Context(), "chg-a", m, []byte(m)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Millisecond) // messages of one millisecond have no order
	}
	for _, want := range []string{"one", "two", "three", "false <nil>"} {
		if m := wait(t, got); m != want {
			t.Fatalf("got %q, want %q", m, want)
		}
	}
}

func TestStopInTheMiddleAndGoOn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	var first, second atomic.Int32
	begun, done := make(chan bool, 1), make(chan string, 1)
	hold := true
	body := func(f engine.Flow) error {
		if _, err := f.Steps(step("first", func() string { first.Add(1); return "a" })); err != nil {
			return err
		}
		out, err := f.Steps(engine.Step{Name: "second", Run: func(ctx context.Context) []byte {
			second.Add(1)
			if hold {
				begun <- true
				<-ctx.Done() // cut off by Close
			}
			return []byte("b")
		}})
		if err != nil {
			return err
		}
		m, _, err := f.Receive(time.Hour)
		if err != nil {
			return err
		}
		done <- string(f.Input()) + string(out[0]) + string(m)
		return nil
	}
	e := open(t, path, body, nil)
	if err := e.Start(t.Context(), "chg-a", []byte("in ")); err != nil {
		t.Fatal(err)
	}
	wait(t, begun)
	if err := e.Close(5 * time.Second); err != nil {
		t.Fatal(err)
	}
	hold = false
	e = open(t, path, body, nil)
	if err := e.Send(t.Context(), "chg-a", "k", []byte(" msg")); err != nil {
		t.Fatal(err)
	}
	if got := wait(t, done); got != "in b msg" {
		t.Fatalf("got %q", got)
	}
	if first.Load() != 1 || second.Load() != 2 {
		t.Fatalf("first ran %d times, want 1; second %d, want 2", first.Load(), second.Load())
	}
}

func TestWaitingFlowOutlivesManyStarts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	got, waiting := make(chan string, 1), make(chan bool, 8)
	body := func(f engine.Flow) error {
		waiting <- true
		m, ok, err := f.Receive(time.Hour)
		if err != nil {
			return err
		}
		got <- fmt.Sprintf("%v %s", ok, m)
		return nil
	}
	for i := range 4 {
		e := open(t, path, body, nil)
		if i == 0 {
			if err := e.Start(t.Context(), "chg-a", nil); err != nil {
				t.Fatal(err)
			}
		}
		wait(t, waiting)
		if i == 3 {
			if err := e.Send(t.Context(), "chg-a", "k", []byte("go")); err != nil {
				t.Fatal(err)
			}
			if g := wait(t, got); g != "true go" {
				t.Fatalf("got %q", g)
			}
		}
		if err := e.Close(5 * time.Second); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFaultAndPanicKeepTheFlow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	faults, done := make(chan string, 1), make(chan bool, 1)
	mode := 0
	body := func(f engine.Flow) error {
		switch mode {
		case 0:
			return errors.New("database is locked")
		case 1:
			panic("impossible")
		}
		done <- true
		return nil
	}
	for _, want := range []string{"database is locked", "flow panicked: impossible"} {
		e := open(t, path, body, func(_ string, err error) { faults <- err.Error() })
		if mode == 0 {
			if err := e.Start(t.Context(), "chg-a", nil); err != nil {
				t.Fatal(err)
			}
		}
		if got := wait(t, faults); got != want {
			t.Fatalf("fault %q, want %q", got, want)
		}
		if err := e.Close(5 * time.Second); err != nil {
			t.Fatal(err)
		}
		mode++
	}
	open(t, path, body, nil)
	wait(t, done)
}

func TestStepsRunTogether(t *testing.T) {
	done := make(chan string, 1)
	e := open(t, filepath.Join(t.TempDir(), "s.db"), func(f engine.Flow) error {
		a, b := make(chan bool), make(chan bool)
		out, err := f.Steps(
			step("a", func() string { close(a); <-b; return "1" }),
			step("b", func() string { close(b); <-a; return "2" }))
		if err != nil {
			return err
		}
		done <- string(out[0]) + string(out[1])
		return nil
	}, nil)
	if err := e.Start(t.Context(), "chg-a", nil); err != nil {
		t.Fatal(err)
	}
	if got := wait(t, done); got != "12" {
		t.Fatalf("got %q", got)
	}
}

func TestEnvironmentCannotRenameTheEngine(t *testing.T) {
	t.Setenv("DBOS__VMID", "elsewhere")
	db, err := store.Open(t.Context(), filepath.Join(t.TempDir(), "s.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := engine.Open(engine.Config{DB: db, Executor: "test"}, func(engine.Flow) error { return nil }); err == nil {
		t.Fatal("opened under another executor's name")
	}
}

// TestKill runs itself as a child that is killed with SIGKILL at its third
// step, again and again, until the flow has finished: every step's effect is
// there exactly once, because the effect is keyed.
func TestKill(t *testing.T) {
	const steps = 6
	dir := os.Getenv("NUMI_ENGINE_KILL")
	body := func(f engine.Flow) error {
		for i := range steps {
			_, err := f.Steps(step(fmt.Sprint("s", i), func() string {
				name := filepath.Join(dir, fmt.Sprint("effect-", i))
				if _, err := os.Stat(name); err == nil {
					return "again"
				}
				if err := os.WriteFile(name, nil, 0o600); err != nil {
					return err.Error()
				}
				if i%2 == 1 { // the effect is done, its record is not
					_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				}
				return "done"
			}))
			if err != nil {
				return err
			}
		}
		return os.WriteFile(filepath.Join(dir, "finished"), nil, 0o600)
	}
	if dir != "" {
		e := open(t, filepath.Join(dir, "s.db"), body, nil)
		if err := e.Start(t.Context(), "chg-a", nil); err != nil {
			t.Fatal(err)
		}
		for range 2000 {
			if _, err := os.Stat(filepath.Join(dir, "finished")); err == nil {
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
		t.Fatal("not finished in 10 s")
	}
	dir = t.TempDir()
	kills := 0
	for range steps {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKill$")
		cmd.Env = append(os.Environ(), "NUMI_ENGINE_KILL="+dir)
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if errors.As(err, &exit) && strings.Contains(exit.String(), "killed") {
			kills++
			continue
		}
		if err != nil {
			t.Fatalf("child: %v\n%s", err, out)
		}
		break
	}
	if _, err := os.Stat(filepath.Join(dir, "finished")); err != nil || kills != steps/2 {
		t.Fatalf("after %d kills: %v", kills, err)
	}
}
