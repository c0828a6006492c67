package orchestration_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/orchestration"
)

// TestKillAtRandom kills a process that drives a Change at random moments, and
// lets the next one go on. NUMI_KILLS sets how often; the seed is printed. At
// the end every event is recorded once, no command ran after the Change had
// gone past it, and the projection is what the events say.
func TestKillAtRandom(t *testing.T) {
	if dir := os.Getenv("NUMI_RANDOM_KILL"); dir != "" {
		drive(t, dir)
		return
	}
	kills := 6
	if n, err := strconv.Atoi(os.Getenv("NUMI_KILLS")); err == nil {
		kills = n
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	killed, released := 0, 0
	for killed < kills {
		dir := t.TempDir()
		for {
			cmd := exec.Command(os.Args[0], "-test.run=^TestKillAtRandom$")
			cmd.Env = append(os.Environ(), "NUMI_RANDOM_KILL="+dir)
			var output bytes.Buffer
			cmd.Stdout, cmd.Stderr = &output, &output
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			timer := time.AfterFunc(time.Duration(20+random.IntN(330))*time.Millisecond, func() { _ = cmd.Process.Kill() })
			if killed >= kills { // a slow machine would never get to the end
				timer.Stop()
			}
			err := cmd.Wait()
			timer.Stop()
			var exit *exec.ExitError
			if errors.As(err, &exit) && strings.Contains(exit.String(), "killed") {
				killed++
				continue
			}
			if err != nil {
				t.Fatalf("child: %v\n%s", err, &output)
			}
			break
		}
		released++
		check(t, dir)
	}
	t.Logf("%d kills, %d changes released", killed, released)
}

func drive(t *testing.T, dir string) {
	h := open(t, dir, &script{before: func(_ context.Context, j orchestration.Job) error {
		// Run again after a kill is right while the outcome is not recorded.
		f, err := os.OpenFile(filepath.Join(dir, "ran"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		if _, err := f.WriteString(string(j.Command.ID) + "\n"); err != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond) // work that a kill can meet
		return f.Close()
	}})
	s, err := h.runner.Run(within(t), "chg-a", request())
	if err != nil || s.Status != change.Released {
		t.Fatalf("%s %v", s.Status, err)
	}
}

func check(t *testing.T, dir string) {
	t.Helper()
	h := open(t, dir, &script{})
	s, err := h.runner.Get(t.Context(), "chg-a")
	if err != nil || s.Status != change.Released {
		t.Fatalf("%s %v", s.Status, err)
	}
	replayed := change.State{}
	next := 0
	err = h.recorder.Replay(t.Context(), func(e orchestration.Entry) error {
		if e.Seq != next {
			t.Fatalf("event %d recorded where %d belongs", e.Seq, next)
		}
		next++
		if e.Ask != nil {
			replayed = change.Propose(e.Change, *e.Ask, e.At)
			return nil
		}
		replayed, err = change.Apply(replayed, *e.Event)
		return err
	})
	if err != nil || replayed.Seq != s.Seq || replayed.Status != s.Status {
		t.Fatalf("events say %s after %d, the projection %s after %d (%v)", replayed.Status, replayed.Seq, s.Status, s.Seq, err)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "ran"))
	if err != nil {
		t.Fatal(err)
	}
	var order []string
	for _, id := range strings.Fields(string(raw)) {
		if len(order) == 0 || order[len(order)-1] != id {
			order = append(order, id)
		}
	}
	if len(order) != 13 {
		t.Fatalf("%d commands in a row, want 13: one ran after the Change had gone past it:\n%s", len(order), raw)
	}
}
