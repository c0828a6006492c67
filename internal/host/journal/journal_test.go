package journal_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/host/journal"
)

const chg identity.ChangeID = "chg-0000000001"

func config(dir string) journal.Config {
	return journal.Config{Path: filepath.Join(dir, "state.db"), Holder: "test", Spill: filepath.Join(dir, "spill"), Now: time.Now}
}

func open(t testing.TB, c journal.Config) *journal.Journal {
	t.Helper()
	j, err := journal.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return j
}

func entry(kind string, n int) journal.Entry {
	body, err := digest.Canonical(map[string]any{"n": n, "kind": kind})
	if err != nil {
		panic(err)
	}
	return journal.Entry{Change: chg, Kind: kind, Body: body}
}

func start(key string) journal.Start {
	return journal.Start{
		Key: key, Change: chg, Run: "run-1", Grant: "grt-1", Verb: "scm.CreateBranch", Action: "act-1", Decision: "dec-1",
		Request: digest.Of([]byte(key)), Reserve: journal.Amount{Actions: 1, Output: 100},
	}
}

func finish(key string) journal.Finish {
	answer := []byte("answer to " + key)
	return journal.Finish{
		Key: key, Grant: "grt-1", Status: "SUCCEEDED", Result: digest.Of(answer), Answers: [][]byte{answer},
		Outcome: []byte(`{}`), Used: journal.Amount{Actions: 1, Output: int64(len(answer)), Wall: time.Second},
	}
}

func kinds(t *testing.T, j *journal.Journal) (out []string) {
	t.Helper()
	all, err := j.After(t.Context(), 0, 10_000)
	if err != nil {
		t.Fatal(err)
	}
	for i, e := range all {
		if e.Seq != int64(i+1) {
			t.Errorf("entry %d has sequence number %d: the journal must be dense", i, e.Seq)
		}
		out = append(out, e.Kind)
	}
	return out
}

func TestAppendIsOrderedAndSurvivesReopening(t *testing.T) {
	dir := t.TempDir()
	j := open(t, config(dir))
	for i := range 5 {
		seq, err := j.Append(t.Context(), entry("A", i), entry("B", i))
		if err != nil || seq != int64(2*i+1) {
			t.Fatalf("append %d: seq %d, %v", i, seq, err)
		}
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := j.Append(t.Context(), entry("A", 0)); !errors.Is(err, journal.ErrClosed) {
		t.Errorf("append after close: %v, want ErrClosed", err)
	}
	again := open(t, config(dir))
	if got, want := strings.Join(kinds(t, again), ""), "ABABABABAB"; got != want {
		t.Errorf("kinds %s, want %s", got, want)
	}
	if again.Last() != 10 || again.Epoch() != 2 {
		t.Errorf("last %d, epoch %d; want 10 and 2", again.Last(), again.Epoch())
	}
	page, err := again.AfterOf(t.Context(), chg, 4, 3)
	if err != nil || len(page) != 3 || page[0].Seq != 5 || string(page[0].Body) != string(entry("A", 2).Body) {
		t.Errorf("page after 4: %v, %v", page, err)
	}
}

func TestAppendRefuses(t *testing.T) {
	j := open(t, config(t.TempDir()))
	for name, e := range map[string]journal.Entry{
		"no change":       {Kind: "A", Body: []byte(`{}`)},
		"no kind":         {Change: chg, Body: []byte(`{}`)},
		"body not JSON":   {Change: chg, Kind: "A", Body: []byte(`{`)},
		"not canonical":   {Change: chg, Kind: "A", Body: []byte(`{"b":1,"a":2}`)},
		"body over bound": {Change: chg, Kind: "A", Body: []byte(`{"a":"` + strings.Repeat("x", journal.MaxBody) + `"}`)},
	} {
		if _, err := j.Append(t.Context(), entry("good", 1), e); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if got := kinds(t, j); len(got) != 0 {
		t.Errorf("a refused append wrote %v", got)
	}
}

func TestFencedEpochWritesNothing(t *testing.T) {
	dir := t.TempDir()
	old := open(t, config(dir))
	if _, err := old.Start(t.Context(), start("k"), entry("DECISION", 1)); err != nil {
		t.Fatal(err)
	}
	current := open(t, config(dir))
	if _, err := old.Append(t.Context(), entry("LATE", 1)); !errors.Is(err, journal.ErrFenced) {
		t.Errorf("append under the old epoch: %v, want ErrFenced", err)
	}
	if _, err := old.Finish(t.Context(), finish("k"), entry("LATE", 2)); !errors.Is(err, journal.ErrFenced) {
		t.Errorf("finish under the old epoch: %v, want ErrFenced", err)
	}
	if spilled, err := old.Deny(t.Context(), "run-1", entry("LATE", 3)); spilled || !errors.Is(err, journal.ErrFenced) {
		t.Errorf("denial under the old epoch: spilled %v, %v, want ErrFenced", spilled, err)
	}
	if old.Healthy() {
		t.Error("a fenced journal says that it is healthy")
	}
	if _, err := current.Append(t.Context(), entry("NEW", 1)); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(kinds(t, current), " "); got != "DECISION NEW" {
		t.Errorf("journal holds %q", got)
	}
}

func TestLedger(t *testing.T) {
	dir := t.TempDir()
	j := open(t, config(dir))
	ctx := t.Context()
	if _, ok, err := j.Lookup(ctx, "k"); ok || err != nil {
		t.Fatalf("unknown key: %v, %v", ok, err)
	}
	seq, err := j.Start(ctx, start("k"), entry("DECISION", 1))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := j.Start(ctx, start("k"), entry("DECISION", 2)); !errors.Is(err, journal.ErrExists) {
		t.Errorf("second start: %v, want ErrExists", err)
	}
	if a, err := j.Spent(ctx, "grt-1"); err != nil || a != (journal.Amount{Actions: 1, Output: 100}) {
		t.Errorf("reserved %v, %v", a, err)
	}
	if rows, err := j.InDoubt(ctx, chg); err != nil || len(rows) != 1 || rows[0].StartSeq != seq {
		t.Errorf("in doubt: %v, %v", rows, err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}

	j = open(t, config(dir))
	row, ok, err := j.Lookup(ctx, "k")
	if err != nil || !ok || row.State != journal.Started || row.Decision != "dec-1" {
		t.Fatalf("after a restart: %+v, %v, %v", row, ok, err)
	}
	f := finish("k")
	if _, err := j.Finish(ctx, f, entry("RESULT", 1)); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"k", "never started"} {
		if _, err := j.Finish(ctx, finish(key), entry("RESULT", 2)); !errors.Is(err, journal.ErrNotStarted) {
			t.Errorf("finish of %q: %v, want ErrNotStarted", key, err)
		}
	}
	row, _, err = j.Lookup(ctx, "k")
	if err != nil || row.State != journal.Finished || row.Result != f.Result || row.Status != "SUCCEEDED" {
		t.Errorf("finished row: %+v, %v", row, err)
	}
	if b, ok, err := j.Blob(ctx, f.Result); err != nil || !ok || string(b) != "answer to k" {
		t.Errorf("answer: %q, %v, %v", b, ok, err)
	}
	if a, err := j.Spent(ctx, "grt-1"); err != nil || a != f.Used {
		t.Errorf("settled %v, %v; want %v", a, err, f.Used)
	}
	if got := strings.Join(kinds(t, j), " "); got != "DECISION RESULT" {
		t.Errorf("journal holds %q", got)
	}
}

func TestRunFactsAndSpending(t *testing.T) {
	dir := t.TempDir()
	j := open(t, config(dir))
	ctx := t.Context()
	for range 3 {
		if _, err := j.Deny(ctx, "run-1", entry("DENIED", 1)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := j.Start(ctx, start("k"), entry("DECISION", 1)); err != nil {
		t.Fatal(err)
	}
	f := finish("k")
	f.Tainted = "run-1"
	if _, err := j.Finish(ctx, f, entry("RESULT", 1)); err != nil {
		t.Fatal(err)
	}
	if _, err := j.Spend(ctx, "grt-1", journal.Amount{Actions: 1}, entry("TOOL", 1)); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = open(t, config(dir))
	fact, verbs, err := j.RunFacts(ctx, "run-1")
	if err != nil || fact != (journal.RunFact{Run: "run-1", Denials: 3, Tainted: true}) || len(verbs) != 1 || verbs[0] != "scm.CreateBranch" {
		t.Errorf("facts %v, verbs %v, %v", fact, verbs, err)
	}
	if fact, verbs, err := j.RunFacts(ctx, "run-2"); err != nil || fact != (journal.RunFact{Run: "run-2"}) || len(verbs) != 0 {
		t.Errorf("facts of an unknown run %v, verbs %v, %v", fact, verbs, err)
	}
	if a, err := j.Spent(ctx, "grt-1"); err != nil || a != f.Used.Add(journal.Amount{Actions: 1}) {
		t.Errorf("spent %v, %v", a, err)
	}
}

func observe(ctx context.Context, j *journal.Journal, key string, n int) error {
	if err := j.StartLazy(ctx, start(key), entry("READ", n)); err != nil {
		return err
	}
	return j.FinishLazy(ctx, finish(key), entry("ANSWER", n))
}

// A message whose fields are all zero is encoded in no bytes at all.
func TestAnEmptyAnswerIsKept(t *testing.T) {
	j := open(t, config(t.TempDir()))
	if _, err := j.Start(t.Context(), start("k"), entry("CALL", 1)); err != nil {
		t.Fatal(err)
	}
	f := finish("k")
	f.Answers, f.Result = [][]byte{nil}, digest.Of(nil)
	if _, err := j.Finish(t.Context(), f, entry("ANSWER", 2)); err != nil {
		t.Fatal(err)
	}
	if b, ok, err := j.Blob(t.Context(), f.Result); err != nil || !ok || len(b) != 0 {
		t.Errorf("empty answer: %q, %v, %v", b, ok, err)
	}
}

func TestLazyWritesReachTheDiskInOrder(t *testing.T) {
	dir := t.TempDir()
	j := open(t, config(dir))
	ctx := t.Context()
	if err := observe(ctx, j, "r1", 1); err != nil {
		t.Fatal(err)
	}
	row, ok, err := j.Lookup(ctx, "r1")
	if err != nil || !ok || row.State != journal.Finished {
		t.Errorf("a lazy row must be seen at once: %+v, %v, %v", row, ok, err)
	}
	if b, ok, err := j.Blob(ctx, finish("r1").Result); err != nil || !ok || string(b) != "answer to r1" {
		t.Errorf("a lazy answer must be seen at once: %q, %v, %v", b, ok, err)
	}
	if err := observe(ctx, j, "r1", 1); !errors.Is(err, journal.ErrExists) {
		t.Errorf("same key again: %v, want ErrExists", err)
	}
	// A later durable write takes the lazy one to disk before itself.
	if _, err := j.Start(ctx, start("w"), entry("DECISION", 2)); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(kinds(t, j), " "); got != "READ ANSWER DECISION" {
		t.Errorf("journal holds %q, want the READ first", got)
	}
	// And without one it gets there by itself.
	before := time.Now()
	if err := observe(ctx, j, "r2", 3); err != nil {
		t.Fatal(err)
	}
	seen := make(chan time.Duration, 1)
	sub, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_ = j.Subscribe(sub, 3, sinkFunc(func(e journal.Entry) error {
		seen <- time.Since(before)
		return errors.New("enough")
	}))
	t.Logf("lazy entry on disk after %v", <-seen)
	if err := observe(ctx, j, "r3", 4); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(kinds(t, open(t, config(dir))), " "); got != "READ ANSWER DECISION READ ANSWER READ ANSWER" {
		t.Errorf("after close the journal holds %q", got)
	}
}

type sinkFunc func(journal.Entry) error

func (f sinkFunc) Entry(_ context.Context, e journal.Entry) error { return f(e) }

func TestSubscribeSeesEveryEntryOnce(t *testing.T) {
	j := open(t, config(t.TempDir()))
	const writers, each = 8, 100
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var got []int64
	ended := make(chan error, 1)
	go func() {
		ended <- j.Subscribe(ctx, 0, sinkFunc(func(e journal.Entry) error {
			if got = append(got, e.Seq); len(got) == writers*each {
				cancel()
			}
			return nil
		}))
	}()
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				if _, err := j.Append(t.Context(), entry(fmt.Sprint("w", w), i)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	for i, seq := range got {
		if seq != int64(i+1) {
			t.Fatalf("entry %d was seen with sequence number %d", i, seq)
		}
	}
}

func TestRevocationHoldsForGood(t *testing.T) {
	dir := t.TempDir()
	j := open(t, config(dir))
	if err := j.Revoke(t.Context(), journal.Revocation{Scope: "everything", ID: "x"}); err == nil {
		t.Error("an unknown scope was accepted")
	}
	if err := j.Revoke(t.Context(), journal.Revocation{Scope: journal.ScopeRun, ID: "run-1"}, entry("REVOKED", 1)); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = open(t, config(dir))
	for _, c := range []struct {
		run  identity.RunID
		want bool
	}{{"run-1", true}, {"run-2", false}} {
		if _, got := j.Revoked(c.run, chg, "grt-1"); got != c.want {
			t.Errorf("%s revoked: %v, want %v", c.run, got, c.want)
		}
	}
}

// fill appends ever smaller entries until not even the smallest finds room.
func fill(t *testing.T, j *journal.Journal) {
	t.Helper()
	for _, size := range []int{20_000, 2000, 1} {
		body, err := digest.Canonical(map[string]any{"pad": strings.Repeat("x", size)})
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; ; i++ {
			if i == 10_000 {
				t.Fatal("the disk never got full")
			}
			_, err := j.Append(t.Context(), journal.Entry{Change: chg, Kind: "PAD", Body: body})
			if err == nil {
				continue
			}
			if !errors.Is(err, journal.ErrUnavailable) {
				t.Fatalf("full disk: %v, want ErrUnavailable", err)
			}
			break
		}
	}
}

func diskFull(t *testing.T, j *journal.Journal, reopen func() *journal.Journal) {
	ctx := t.Context()
	fill(t, j)
	if j.Healthy() {
		t.Error("a journal on a full disk says that it is healthy")
	}
	if _, err := j.Start(ctx, start("k"), entry("DECISION", 1)); !errors.Is(err, journal.ErrUnavailable) {
		t.Errorf("start on a full disk: %v, want ErrUnavailable", err)
	}
	if err := observe(ctx, j, "r", 1); !errors.Is(err, journal.ErrUnavailable) {
		t.Errorf("lazy write on a full disk: %v, want ErrUnavailable", err)
	}
	huge, err := digest.Canonical(map[string]any{"pad": strings.Repeat("y", 50_000)})
	if err != nil {
		t.Fatal(err)
	}
	denials := []journal.Entry{entry("DENIED", 1), {Change: chg, Kind: "DENIED", Body: huge}, entry("DENIED", 3)}
	for i, e := range denials {
		spilled, err := j.Deny(ctx, "run-1", e)
		if err != nil || !spilled {
			t.Fatalf("denial %d on a full disk: spilled %v, %v", i, spilled, err)
		}
	}
	j = reopen()
	all, err := j.After(ctx, 0, 10_000)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range all {
		if e.Kind != "PAD" {
			got = append(got, e.Kind+" "+string(e.Body))
		}
	}
	if len(got) != 4 || !strings.Contains(got[0], `"n":1`) || !strings.Contains(got[1], `"cut":true`) || !strings.Contains(got[2], `"n":3`) ||
		got[3] != `JOURNAL_SPILL {"cut":1,"damaged":0,"drained":3,"overflow":"0"}` {
		t.Errorf("after the disk has room again the journal holds\n%s", strings.Join(got, "\n"))
	}
	if _, err := j.Append(ctx, entry("GOES ON", 1)); err != nil {
		t.Error(err)
	}
}

func TestFullDatabaseSpillsDenials(t *testing.T) {
	dir := t.TempDir()
	j := open(t, config(dir))
	pages, err := j.Pages(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := j.LimitPages(t.Context(), pages+40); err != nil {
		t.Fatal(err)
	}
	diskFull(t, j, func() *journal.Journal {
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		j := open(t, config(dir))
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		return open(t, config(dir)) // a second start must not drain again
	})
}

func TestRoomAgainDrainsWithoutARestart(t *testing.T) {
	j := open(t, config(t.TempDir()))
	pages, err := j.Pages(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := j.LimitPages(t.Context(), pages+40); err != nil {
		t.Fatal(err)
	}
	diskFull(t, j, func() *journal.Journal {
		if err := j.LimitPages(t.Context(), 1<<30); err != nil {
			t.Fatal(err)
		}
		if err := j.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		return j
	})
}

// TestFullDiskSpillsDenials is the same on a file system that is really full.
func TestFullDiskSpillsDenials(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=6m,mode=0700"); err != nil {
		t.Skipf("needs the right to mount a small file system: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	j := open(t, config(dir))
	diskFull(t, j, func() *journal.Journal {
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("", dir, "", unix.MS_REMOUNT, "size=32m"); err != nil {
			t.Fatal(err)
		}
		return open(t, config(dir))
	})
}

func TestSpillOverflowAndDamageAreCounted(t *testing.T) {
	dir := t.TempDir()
	j := open(t, config(dir))
	if _, err := j.Append(t.Context(), entry("FIRST", 0)); err != nil {
		t.Fatal(err)
	}
	pages, err := j.Pages(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := j.LimitPages(t.Context(), pages); err != nil {
		t.Fatal(err)
	}
	fill(t, j)
	for i := range journal.SpillSlots + 5 {
		if spilled, err := j.Deny(t.Context(), "run-1", padded(t, i)); err != nil || !spilled {
			t.Fatalf("denial %d: spilled %v, %v", i, spilled, err)
		}
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "spill"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("torn"), 7*8192+100); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		j = open(t, config(dir))
		var reports []string
		all, err := j.After(t.Context(), 0, 10_000)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range all {
			if e.Kind == journal.SpillKind {
				reports = append(reports, string(e.Body))
			}
		}
		want := fmt.Sprintf(`{"cut":0,"damaged":1,"drained":%d,"overflow":"5"}`, journal.SpillSlots-1)
		if len(reports) != 1 || reports[0] != want {
			t.Errorf("reports %v, want one: %s", reports, want)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// padded is a denial too large for what little room a page still has.
func padded(t *testing.T, n int) journal.Entry {
	t.Helper()
	body, err := digest.Canonical(map[string]any{"n": n, "pad": strings.Repeat("z", 4200)})
	if err != nil {
		t.Fatal(err)
	}
	return journal.Entry{Change: chg, Kind: "DENIED", Body: body}
}

func TestDamagedSpillFileIsNotOverwritten(t *testing.T) {
	c := config(t.TempDir())
	if err := os.WriteFile(c.Spill, []byte("something else"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := journal.Open(t.Context(), c); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("opened over a damaged spill file: %v", err)
	}
}
