package evidence_test

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"time"

	"golang.org/x/mod/sumdb/note"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	evidencestorev1 "github.com/numinance/numinance/gen/numinance/ports/evidencestore/v1"
	transparencylogv1 "github.com/numinance/numinance/gen/numinance/ports/transparencylog/v1"
	"github.com/numinance/numinance/internal/contexts/evidence"
	"github.com/numinance/numinance/internal/core/bundle"
	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/tlog"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/journal"
	"github.com/numinance/numinance/plugins/evidencestore/files"
	"github.com/numinance/numinance/plugins/transparencylog/tessera"
	"github.com/numinance/numinance/sdk/plugintest"
)

const origin = "example.org/log"

// world is a deployment: a real journal, the real store and log as plugins.
type world struct {
	journal *journal.Journal
	blobs   *blob.Store
	store   grpc.ClientConnInterface
	log     grpc.ClientConnInterface
	signer  note.Signer
	keys    bundle.Trust
	// fail, if set, may refuse a call before or after it is made.
	fail func(method string, done bool) error
}

func newWorld(t testing.TB) *world {
	t.Helper()
	dir := t.TempDir()
	j, err := journal.Open(t.Context(), journal.Config{
		Path: filepath.Join(dir, "state.db"), Holder: "test", Spill: filepath.Join(dir, "spill"), Now: time.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	blobs, err := blob.Open(blob.Config{Dir: filepath.Join(dir, "blobs"), Quota: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	logVKey, err := note.NewEd25519VerifierKey(origin, public)
	if err != nil {
		t.Fatal(err)
	}
	skey, headVKey, err := note.GenerateKey(nil, "example.org/evidence")
	if err != nil {
		t.Fatal(err)
	}
	w := &world{journal: j, blobs: blobs}
	if w.signer, err = note.NewSigner(skey); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.keys.Add("head", headVKey), w.keys.Add("log", logVKey)); err != nil {
		t.Fatal(err)
	}
	w.store = plugintest.Serve(t, files.Plugin(), plugintest.Options{DataDir: filepath.Join(dir, "evidence")})
	w.log = plugintest.Serve(t, tessera.Plugin(), plugintest.Options{
		Config: []byte(`{"origin":"` + origin + `"}`), DataDir: logDir(t),
		Host: &plugintest.Host{Key: private, KeyName: origin},
	})
	return w
}

// logDir returns a directory for a log in memory, which outlives its plugin and
// ends when its lock is gone; until then it may still write.
func logDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "numinance-log")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			err := os.RemoveAll(dir)
			if err == nil {
				return
			}
			if time.Now().After(deadline) {
				t.Errorf("remove the log: %v", err)
				return
			}
		}
	})
	return dir
}

// conn sends each call to the plugin that serves it.
type conn struct{ w *world }

func (c conn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	to := c.w.store
	if strings.Contains(method, "TransparencyLog") {
		to = c.w.log
	}
	if c.w.fail != nil {
		if err := c.w.fail(method, false); err != nil {
			return err
		}
	}
	if err := to.Invoke(ctx, method, args, reply, opts...); err != nil {
		return err
	}
	if c.w.fail != nil {
		return c.w.fail(method, true)
	}
	return nil
}

func (c conn) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, status.Error(codes.Unimplemented, "no streams here")
}

// context returns a new evidence context, as a new process would have.
func (w *world) context(t testing.TB) *evidence.Evidence {
	t.Helper()
	e, err := evidence.New(evidence.Config{
		Journal: w.journal, Blobs: w.blobs, Heads: w.signer, Keys: w.keys, Now: time.Now,
		Dial: func(identity.ChangeID, string) (grpc.ClientConnInterface, error) { return conn{w}, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// write journals n entries of change.
func (w *world) write(t testing.TB, change identity.ChangeID, n int) {
	t.Helper()
	entries := make([]journal.Entry, n)
	for i := range entries {
		body, err := digest.Canonical(map[string]any{"verb": "scm.GetFile", "n": i})
		if err != nil {
			t.Fatal(err)
		}
		entries[i] = journal.Entry{Change: change, Kind: "RESULT", Action: "act-1", Body: body}
	}
	if _, err := w.journal.Append(t.Context(), entries...); err != nil {
		t.Fatal(err)
	}
}

func drainAll(t testing.TB, e *evidence.Evidence) {
	t.Helper()
	for {
		n, err := e.Drain(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			return
		}
	}
}

// stored returns the records of change.
func stored(t testing.TB, e *evidence.Evidence, change identity.ChangeID) [][]byte {
	t.Helper()
	var out [][]byte
	for b, err := range e.Records(t.Context(), change) {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, bytes.Clone(b))
	}
	return out
}

// seqs returns which journal entries a chain was made from, and checks it.
func seqs(t testing.TB, e *evidence.Evidence, change identity.ChangeID) []string {
	t.Helper()
	records := stored(t, e, change)
	if _, err := chain.Verify(change, records); err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, b := range records {
		r, err := chain.Parse(b)
		if err != nil {
			t.Fatal(err)
		}
		var body struct {
			Seq string `json:"journal_seq"`
		}
		if err := json.Unmarshal(r.Body, &body); err != nil {
			t.Fatal(err)
		}
		if body.Seq != "" {
			out = append(out, body.Seq)
		}
	}
	return out
}

func TestEntriesComeIntoTheirChainsInOrder(t *testing.T) {
	w := newWorld(t)
	w.write(t, "chg-a", 2)
	w.write(t, "chg-b", 1)
	w.write(t, identity.SystemChange, 1)
	w.write(t, "chg-a", 300)
	e := w.context(t)
	drainAll(t, e)
	a := seqs(t, e, "chg-a")
	if len(a) != 302 || a[0] != "1" || a[1] != "2" || a[2] != "5" || a[301] != "304" {
		t.Errorf("chain of chg-a: %d records, %v …", len(a), a[:3])
	}
	if b := seqs(t, e, "chg-b"); len(b) != 1 || b[0] != "3" {
		t.Errorf("chain of chg-b: %v", b)
	}
	if s := seqs(t, e, identity.SystemChange); len(s) != 1 || s[0] != "4" {
		t.Errorf("system chain: %v", s)
	}
	if s := e.Status(); s.Drained != 304 || s.Lag != 0 || s.Err != nil {
		t.Errorf("status %+v", s)
	}
	r, err := chain.Parse(stored(t, e, "chg-a")[0])
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"action_id":"act-1","entry":{"n":0,"verb":"scm.GetFile"},"journal_seq":"1"}`; string(r.Body) != want {
		t.Errorf("body %s, want %s", r.Body, want)
	}
}

// P-216: heads are anchored with a proof that verifies; the whole of it leaves
// the system as a bundle that verifies with nothing else.
func TestP216AnchorCloseExportVerify(t *testing.T) {
	w := newWorld(t)
	e := w.context(t)
	w.write(t, "chg-a", 3)
	first, err := e.Anchor(t.Context(), "chg-a")
	if err != nil {
		t.Fatal(err)
	}
	again, err := e.Anchor(t.Context(), "chg-a")
	if err != nil || again.Index != first.Index {
		t.Errorf("anchored again at %d, %v; first at %d", again.Index, err, first.Index)
	}
	commit, err := bundle.ParseCommit([]byte("Merge\n\n" + first.Trailer() + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	w.write(t, "chg-b", 1)
	if _, err := e.Anchor(t.Context(), "chg-b"); err != nil {
		t.Fatal(err)
	}
	w.write(t, "chg-a", 2)
	if r, err := e.Verify(t.Context(), "chg-a", bundle.Options{}); err != nil || r.Chain != "open through 5" {
		t.Errorf("an open Change: %+v, %v", r, err)
	}
	head, err := e.Close(t.Context(), "chg-a")
	if err != nil || !head.Closed || head.Length != 6 {
		t.Fatalf("closed at %+v, %v", head, err)
	}
	if again, err := e.Close(t.Context(), "chg-a"); err != nil || again != head {
		t.Errorf("closed again: %+v, %v", again, err)
	}
	// A new process sees the same.
	e = w.context(t)
	r, err := e.Verify(t.Context(), "chg-a", bundle.Options{Closed: true, Trailers: commit})
	if err != nil {
		t.Fatal(err)
	}
	if r.Chain != "closed 6" || r.Covered != 3 || len(r.Remembered) != 1 {
		t.Errorf("report %+v", r)
	}
	if strings.Contains(r.Text(), "does not protect against the log's operator") {
		t.Errorf("with a commit trailer it protects against the log's operator:\n%s", r.Text())
	}
	if r, err = e.Verify(t.Context(), "chg-a", bundle.Options{}); err != nil || !strings.Contains(r.Text(), "does not protect against the log's operator") {
		t.Errorf("without one it does not: %v\n%s", err, r.Text())
	}
	before := len(stored(t, e, identity.SystemChange))
	e = w.context(t)
	var b bytes.Buffer
	if err := e.Bundle(t.Context(), "chg-a", &b); err != nil {
		t.Fatal(err)
	}
	if after := len(stored(t, e, identity.SystemChange)); after != before {
		t.Errorf("the export of what is anchored left %d records", after-before)
	}
	z, err := zip.NewReader(bytes.NewReader(b.Bytes()), int64(b.Len()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bundle.Verify(z, w.keys, bundle.Options{Change: "chg-a", Closed: true}); err != nil {
		t.Errorf("the bundle: %v", err)
	}
	// One byte of the stored bytes changed is found.
	spoiled := fstest.MapFS{}
	for _, f := range z.File {
		rc, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		var content bytes.Buffer
		if _, err := content.ReadFrom(rc); err != nil {
			t.Fatal(err)
		}
		spoiled[f.Name] = &fstest.MapFile{Data: bytes.Replace(content.Bytes(), []byte("scm.GetFile"), []byte("scm.GetTree"), 1)}
	}
	if _, err := bundle.Verify(spoiled, w.keys, bundle.Options{}); chain.LabelOf(err) != chain.BindingFailed {
		t.Errorf("spoiled: %v", err)
	}
}

func TestNothingRecordedIsAnError(t *testing.T) {
	w := newWorld(t)
	e := w.context(t)
	if _, err := e.Anchor(t.Context(), "chg-none"); !errors.Is(err, evidence.ErrNoRecord) {
		t.Errorf("anchor: %v", err)
	}
	if _, err := e.Close(t.Context(), "chg-none"); !errors.Is(err, evidence.ErrNoRecord) {
		t.Errorf("close: %v", err)
	}
	if err := e.Bundle(t.Context(), "chg-none", &bytes.Buffer{}); !errors.Is(err, evidence.ErrNoRecord) {
		t.Errorf("bundle: %v", err)
	}
	if _, err := e.Close(t.Context(), identity.SystemChange); err == nil {
		t.Error("the system chain was closed")
	}
}

// What happens to a Change after its end is in the system chain, also when the
// process that drains it is another one.
func TestAfterItsEndAChangeIsInTheSystemChain(t *testing.T) {
	w := newWorld(t)
	e := w.context(t)
	w.write(t, "chg-a", 2)
	if _, err := e.Close(t.Context(), "chg-a"); err != nil {
		t.Fatal(err)
	}
	w.write(t, "chg-a", 1)
	w.write(t, "chg-b", 1)
	drainAll(t, e)
	w.write(t, "chg-a", 1)
	e = w.context(t)
	drainAll(t, e)
	if a := seqs(t, e, "chg-a"); strings.Join(a, " ") != "1 2" {
		t.Errorf("chain of chg-a: %v", a)
	}
	if s := seqs(t, e, identity.SystemChange); strings.Join(s, " ") != "3 5" {
		t.Errorf("system chain: %v", s)
	}
	if last := string(stored(t, e, identity.SystemChange)[1]); !strings.Contains(last, `"entry_of":"chg-a"`) {
		t.Errorf("the record does not say of which Change it is: %s", last)
	}
}

// A store that fails before or after it has written, at any call, and contexts
// that die there: every entry is in its chain once.
func TestFailuresNeitherLoseNorRepeatARecord(t *testing.T) {
	w := newWorld(t)
	var calls atomic.Int64
	w.fail = func(string, bool) error {
		if n := calls.Add(1); n%5 == 0 || n%7 == 0 {
			return status.Error(codes.Unavailable, "the store is away")
		}
		return nil
	}
	total := map[identity.ChangeID]int{}
	e := w.context(t)
	failures := 0
	for round := range 40 {
		change := identity.ChangeID(fmt.Sprintf("chg-%d", round%3))
		w.write(t, change, 1+round%4)
		total[change] += 1 + round%4
		if round%6 == 0 {
			w.write(t, identity.SystemChange, 1)
			total[identity.SystemChange]++
		}
		if _, err := e.Drain(t.Context()); err != nil {
			failures++
			if s := e.Status(); s.Err == nil || s.Last == s.Drained {
				t.Errorf("status after a failure: %+v", s)
			}
		}
		if round%3 == 0 {
			if _, err := e.Anchor(t.Context(), change); err != nil {
				failures++
			}
		}
		if round%4 == 0 {
			e = w.context(t) // the process died
		}
	}
	if failures == 0 {
		t.Fatal("nothing failed")
	}
	w.fail = nil
	e = w.context(t)
	drainAll(t, e)
	seen := map[string]bool{}
	for change, n := range total {
		got := seqs(t, e, change)
		if len(got) != n {
			t.Errorf("chain of %s: %d entries, want %d", change, len(got), n)
		}
		for _, s := range got {
			if seen[s] {
				t.Errorf("entry %s is recorded twice", s)
			}
			seen[s] = true
		}
	}
	for change := range total {
		if _, err := e.Verify(t.Context(), change, bundle.Options{}); err != nil {
			t.Errorf("verify %s: %v", change, err)
		}
	}
}

// odd is a journal whose entries are not as they should be.
type odd []journal.Entry

func (o odd) Last() int64 { return int64(len(o)) }
func (o odd) After(_ context.Context, seq int64, limit int) ([]journal.Entry, error) {
	return o[seq:min(int64(len(o)), seq+int64(limit))], nil
}

// No entry can stop the drain: what does not fit is kept and named by digest.
func TestNoEntryStopsTheDrain(t *testing.T) {
	w := newWorld(t)
	big, err := digest.Canonical(map[string]any{"x": strings.Repeat("y", 100_000)})
	if err != nil {
		t.Fatal(err)
	}
	entries := odd{
		{Seq: 1, Change: "chg-a", Kind: "RESULT", Body: big, At: time.Now()},
		{Seq: 2, Change: "chg-a", Kind: "RESULT", Body: []byte(`{"x": 1.5}`), At: time.Now()},
		{Seq: 3, Change: "chg-a", Kind: "a kind with blanks", Body: []byte(`{}`), At: time.Now()},
		{Seq: 4, Change: "", Kind: "RESULT", Body: []byte(`{}`), At: time.Now()},
	}
	e, err := evidence.New(evidence.Config{
		Journal: entries, Blobs: w.blobs, Heads: w.signer, Keys: w.keys, Now: time.Now,
		Dial: func(identity.ChangeID, string) (grpc.ClientConnInterface, error) { return conn{w}, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	drainAll(t, e)
	records := stored(t, e, "chg-a")
	if _, err := chain.Verify("chg-a", records); err != nil || len(records) != 3 {
		t.Fatalf("%d records, %v", len(records), err)
	}
	for i, want := range []string{
		`"entry_digest":"` + string(digest.Of(big)) + `","entry_size":"100008"`,
		`"entry_digest":"` + string(digest.Of([]byte(`{"x": 1.5}`))) + `"`,
		`"entry":{},"entry_kind":"a kind with blanks"`,
	} {
		if !strings.Contains(string(records[i]), want) {
			t.Errorf("record %d: %s, want %s", i+1, records[i], want)
		}
	}
	kept, err := w.blobs.Bytes(digest.Of(big), 1<<20)
	if err != nil || !bytes.Equal(kept, big) {
		t.Errorf("the body is not kept: %v", err)
	}
	if got := len(stored(t, e, identity.SystemChange)); got != 1 {
		t.Errorf("system chain: %d records", got)
	}
}

// Lag grows while the store is away and goes when it is back.
func TestLag(t *testing.T) {
	w := newWorld(t)
	var away atomic.Bool
	w.fail = func(string, bool) error {
		if away.Load() {
			return status.Error(codes.Unavailable, "the store is away")
		}
		return nil
	}
	e := w.context(t)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { e.Run(ctx) })
	defer running.Wait()
	defer cancel()
	eventually := func(what string, ok func() bool) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %+v", what, e.Status())
			}
		}
	}
	w.write(t, "chg-a", 1)
	eventually("drained", func() bool { return e.Status().Drained == 1 && e.Lag() == 0 })
	away.Store(true)
	w.write(t, "chg-a", 1)
	eventually("lagging", func() bool { return e.Lag() > 20*time.Millisecond && e.Status().Err != nil })
	away.Store(false)
	eventually("caught up", func() bool { return e.Status().Drained == 2 && e.Lag() == 0 && e.Status().Err == nil })
}

// A log that goes back, forks or answers for another leaf is caught by the
// context itself, and nothing counts as anchored.
func TestALogThatLiesIsCaught(t *testing.T) {
	w := newWorld(t)
	e := w.context(t)
	w.write(t, "chg-a", 1)
	if _, err := e.Anchor(t.Context(), "chg-a"); err != nil {
		t.Fatal(err)
	}
	// Another log of the same name and key, which does not have that entry.
	honest := w.log
	other := newWorld(t)
	for _, c := range []struct {
		name string
		log  grpc.ClientConnInterface
		want chain.Label
	}{
		{"a log under another key", other.log, chain.LogForeign},
		{"a log that answers for another leaf", wrongLeaf{honest}, chain.LeafMismatch},
	} {
		w.log = c.log
		w.write(t, "chg-a", 1)
		if _, err := e.Anchor(t.Context(), "chg-a"); chain.LabelOf(err) != c.want {
			t.Errorf("%s: %v, want %s", c.name, err, c.want)
		}
	}
	w.log = honest
	if _, err := e.Anchor(t.Context(), "chg-a"); err != nil {
		t.Errorf("the honest log again: %v", err)
	}
}

// wrongLeaf appends another leaf than it was given.
type wrongLeaf struct{ grpc.ClientConnInterface }

func (c wrongLeaf) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	if a, ok := args.(*transparencylogv1.AppendRequest); ok {
		leaf, err := tlog.HeadLeaf(digest.Of(a.GetLeaf()))
		if err != nil {
			return err
		}
		args = &transparencylogv1.AppendRequest{Leaf: leaf[:]}
	}
	return c.ClientConnInterface.Invoke(ctx, method, args, reply, opts...)
}

// A store that was written to by somebody else is an error, not a merge.
func TestASecondWriterIsFound(t *testing.T) {
	w := newWorld(t)
	e := w.context(t)
	w.write(t, "chg-a", 1)
	drainAll(t, e)
	_, err := evidencestorev1.NewEvidenceStoreServiceClient(w.store).AppendLocked(t.Context(), &evidencestorev1.AppendLockedRequest{
		ChangeId: "chg-a", FirstSequence: 2, Records: [][]byte{[]byte("not ours")},
	})
	if err != nil {
		t.Fatal(err)
	}
	w.write(t, "chg-a", 1)
	if _, err := e.Drain(t.Context()); err == nil {
		t.Error("appended over another's record")
	}
	if _, err := w.context(t).Drain(t.Context()); err == nil {
		t.Error("a new process goes on behind another's record")
	}
}

// A context that nobody drains is behind, not up to date.
func TestLagGrowsWhenNobodyDrains(t *testing.T) {
	w := newWorld(t)
	now := time.Now()
	e, err := evidence.New(evidence.Config{
		Journal: w.journal, Blobs: w.blobs, Heads: w.signer, Keys: w.keys, Now: func() time.Time { return now },
		Dial: func(identity.ChangeID, string) (grpc.ClientConnInterface, error) { return conn{w}, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	w.write(t, "chg-a", 1)
	now = now.Add(7 * time.Second)
	if lag := e.Lag(); lag != 7*time.Second {
		t.Errorf("lag %s, want 7s", lag)
	}
	if err := e.CatchUp(t.Context()); err != nil || e.Lag() != 0 {
		t.Errorf("caught up: lag %s, %v", e.Lag(), err)
	}
}

func BenchmarkDrain(b *testing.B) {
	w := newWorld(b)
	for n := b.N; n > 0; n -= 500 {
		w.write(b, "chg-a", min(n, 500))
	}
	e := w.context(b)
	b.ResetTimer()
	drainAll(b, e)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "entries/s")
}
