package journal_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/host/journal"
)

// TestLookupOfIsLookup asks both ways about keys that were started durably,
// lazily, in an earlier life, by another run, side by side, or never.
func TestLookupOfIsLookup(t *testing.T) {
	dir := t.TempDir()
	ctx := t.Context()
	j := open(t, config(dir))
	same := func(run identity.RunID, key string, want bool) {
		t.Helper()
		row, known, err := j.Lookup(ctx, key)
		got, gotKnown, gotErr := j.LookupOf(ctx, run, key)
		if err != nil || gotErr != nil || known != want || gotKnown != known || got.Key != row.Key || got.State != row.State {
			t.Errorf("%s of %s: %+v, %v, %v; want %+v, %v, %v", key, run, got, gotKnown, gotErr, row, known, err)
		}
	}
	run := start("").Run
	if _, err := j.Start(ctx, start("before"), entry("D", 1)); err != nil {
		t.Fatal(err)
	}
	same(run, "before", true)
	same(run, "never", false)
	if err := observe(ctx, j, "lazy", 1); err != nil {
		t.Fatal(err)
	}
	same(run, "lazy", true)
	other := start("other")
	other.Run = "run-other"
	if _, err := j.Start(ctx, other, entry("D", 2)); err != nil {
		t.Fatal(err)
	}
	same("run-other", "other", true)
	same("run-other", "never", false)

	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = open(t, config(dir))
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 20 {
				key := fmt.Sprintf("k-%d-%d", w, i)
				if _, known, err := j.LookupOf(ctx, run, key); known || err != nil {
					t.Errorf("%s: %v, %v", key, known, err)
				}
				if err := observe(ctx, j, key, i); err != nil {
					t.Error(err)
				}
				if row, known, err := j.LookupOf(ctx, run, key); !known || err != nil || row.State != journal.Finished {
					t.Errorf("%s: %+v, %v, %v", key, row, known, err)
				}
			}
		})
	}
	wg.Wait()
	if err := j.Flush(ctx); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"before", "lazy", "k-0-0", "k-7-19"} {
		same(run, key, true)
	}
	same(run, "never", false)
}
