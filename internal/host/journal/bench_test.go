package journal_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/host/journal"
)

// BenchmarkAppend64Writers: 5,000 durable entries a second or more with the
// 99th percentile at 25 ms or less is the figure to hold.
func BenchmarkAppend64Writers(b *testing.B) {
	j := open(b, config(b.TempDir()))
	body, err := digest.Canonical(map[string]any{"pad": strings.Repeat("x", 600)})
	if err != nil {
		b.Fatal(err)
	}
	const writers = 64
	took := make([][]time.Duration, writers)
	var wg sync.WaitGroup
	b.ResetTimer()
	for w := range writers {
		wg.Go(func() {
			for i := w; i < b.N; i += writers {
				begin := time.Now()
				if _, err := j.Append(b.Context(), journal.Entry{Change: chg, Kind: "DECISION", Body: body}); err != nil {
					b.Error(err)
					return
				}
				took[w] = append(took[w], time.Since(begin))
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	all := slices.Concat(took...)
	slices.Sort(all)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "entries/s")
	b.ReportMetric(float64(all[len(all)*99/100].Microseconds())/1000, "p99-ms")
}

// BenchmarkAppendLoneWriter: one flush plus 1.5 ms or less is the figure to
// hold. Each append is followed by one write of 4 KiB to a file beside the
// database and its flush, which is the least that a commit does.
func BenchmarkAppendLoneWriter(b *testing.B) {
	dir := b.TempDir()
	j := open(b, config(dir))
	e := entry("DECISION", 1)
	f, err := os.Create(filepath.Join(dir, "flushed"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	page := make([]byte, 4096)
	var appends, flushes []time.Duration
	for b.Loop() {
		begin := time.Now()
		if _, err := j.Append(b.Context(), e); err != nil {
			b.Fatal(err)
		}
		between := time.Now()
		if _, err := f.Write(page); err != nil {
			b.Fatal(err)
		}
		if err := f.Sync(); err != nil {
			b.Fatal(err)
		}
		appends, flushes = append(appends, between.Sub(begin)), append(flushes, time.Since(between))
	}
	slices.Sort(appends)
	slices.Sort(flushes)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	one, flush := appends[len(appends)/2], flushes[len(flushes)/2]
	b.ReportMetric(ms(one), "median-ms")
	b.ReportMetric(ms(appends[len(appends)*99/100]), "p99-ms")
	b.ReportMetric(ms(flush), "flush-ms")
	b.ReportMetric(ms(one-flush), "beyond-ms")
	b.ReportMetric(1/max(flush.Seconds(), 1e-9), "flushes/s")
}

// BenchmarkAction is a decision and a result, two durable writes.
func BenchmarkAction(b *testing.B) {
	j := open(b, config(b.TempDir()))
	for i := 0; b.Loop(); i++ {
		key := entry("k", i).Body
		if _, err := j.Start(b.Context(), start(string(key)), entry("DECISION", i)); err != nil {
			b.Fatal(err)
		}
		if _, err := j.Finish(b.Context(), finish(string(key)), entry("RESULT", i)); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkLazyAction is a READ that does not wait for the disk.
func BenchmarkLazyAction(b *testing.B) {
	j := open(b, config(b.TempDir()))
	for i := 0; b.Loop(); i++ {
		key := string(entry("k", i).Body)
		if err := observe(b.Context(), j, key, i); err != nil {
			b.Fatal(err)
		}
		if i%1000 == 999 {
			if err := j.Flush(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	}
}
