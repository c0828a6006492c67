package journal_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/numinance/numinance/internal/host/journal"
)

const killDir = "NUMI_TEST_JOURNAL_DIR"

// TestMain turns the test binary into the process that TestKilledProcess kills.
func TestMain(m *testing.M) {
	if dir := os.Getenv(killDir); dir != "" {
		writeForever(dir, os.Getenv(killDir+"_ROUND"))
	}
	os.Exit(m.Run())
}

// writeForever starts and finishes actions in eight goroutines and says on
// standard output what the journal has acknowledged, each after the fact.
func writeForever(dir, round string) {
	ctx := context.Background()
	j, err := journal.Open(ctx, config(dir))
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	var mu sync.Mutex
	say := func(what, key string) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Println(what, key)
	}
	for w := range 8 {
		go func() {
			for i := 0; ; i++ {
				key := fmt.Sprintf("key-%s-%d-%d", round, w, i)
				if _, err := j.Start(ctx, start(key), entry("DECISION", i)); err != nil {
					say("error", err.Error())
					return
				}
				say("started", key)
				if _, err := j.Finish(ctx, finish(key), entry("RESULT", i)); err != nil {
					say("error", err.Error())
					return
				}
				say("finished", key)
			}
		}()
	}
	select {}
}

// TestKilledProcessLosesNothingAcknowledged kills a writing process without
// warning, again and again: what it was told is on disk is on disk, in an order
// without gaps.
func TestKilledProcessLosesNothingAcknowledged(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	acknowledged := map[string]journal.State{}
	for round := range 5 {
		cmd := exec.Command(self, "-test.run=^$")
		cmd.Env = append(os.Environ(), killDir+"="+dir, fmt.Sprintf("%s_ROUND=%d", killDir, round))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := 0; lines.Scan(); n++ {
			what, key, _ := strings.Cut(lines.Text(), " ")
			switch what {
			case "started":
				acknowledged[key] = journal.Started
			case "finished":
				acknowledged[key] = journal.Finished
			default:
				t.Errorf("round %d: %s", round, lines.Text())
			}
			if n == 200+37*round {
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		}
		_ = cmd.Wait() // it was killed
	}
	j := open(t, config(dir))
	if j.Epoch() != 6 {
		t.Errorf("epoch %d after five processes, want 6", j.Epoch())
	}
	for key, want := range acknowledged {
		row, ok, err := j.Lookup(t.Context(), key)
		if err != nil || !ok {
			t.Errorf("%s was acknowledged and is gone: %v", key, err)
			continue
		}
		if want == journal.Finished && row.State != journal.Finished {
			t.Errorf("%s was finished and says %s", key, row.State)
		}
	}
	decisions, results := 0, 0
	for _, kind := range kinds(t, j) { // also checks that there are no gaps
		switch kind {
		case "DECISION":
			decisions++
		case "RESULT":
			results++
		}
	}
	doubt, err := j.InDoubt(t.Context(), chg)
	if err != nil || decisions != results+len(doubt) {
		t.Errorf("%d decisions, %d results, %d in doubt, %v", decisions, results, len(doubt), err)
	}
	t.Logf("%d actions acknowledged over five kills, %d in doubt", len(acknowledged), len(doubt))
}
