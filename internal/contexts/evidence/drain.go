package evidence

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	evidencestorev1 "github.com/numinance/numinance/gen/numinance/ports/evidencestore/v1"
	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/host/journal"
)

const (
	page       = 256     // entries of one drain, and records of one append
	appendSize = 2 << 20 // bytes of one append
	// maxInline is the largest body a record holds itself, the journal's own
	// bound; a larger one is kept as a blob that the record names.
	maxInline = journal.MaxBody
	// maxChains bounds how many chains' heads are remembered.
	maxChains = 4096
)

// Members of a record's body that the drain itself reads again. Exactly one of
// the first two is in every record.
const (
	memberSeq     = "journal_seq"     // the entry the record was made from
	memberThrough = "journal_through" // all entries through it are stored
)

// chainState is what is known of a chain: its head, and the newest journal
// entry that cannot be missing from it.
type chainState struct {
	head    chain.Head
	through int64
}

// Drain moves one page of journal entries into their chains and returns how
// many entries it took. It may be called again after any error or crash: what
// is stored is recognised and not stored twice.
func (e *Evidence) Drain(ctx context.Context) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.drain(ctx)
}

// drainTo drains until everything through seq is stored. e.mu is held.
func (e *Evidence) drainTo(ctx context.Context, seq int64) error {
	for !e.started || e.cursor < seq {
		n, err := e.drain(ctx)
		if err != nil {
			return err
		}
		if n == 0 && e.cursor < seq {
			return fmt.Errorf("drain: the journal ends at %d before %d", e.cursor, seq)
		}
	}
	return nil
}

// drain is Drain with e.mu held.
func (e *Evidence) drain(ctx context.Context) (int, error) {
	n, oldest, err := e.drainPage(ctx)
	e.note(e.cursor, oldest, err)
	return n, err
}

func (e *Evidence) drainPage(ctx context.Context) (n int, oldest time.Time, err error) {
	if !e.started {
		if err := e.start(ctx); err != nil {
			return 0, e.oldestAfter(ctx), fmt.Errorf("drain: %w", err)
		}
	}
	if e.c.Journal.Last() <= e.cursor {
		return 0, time.Time{}, nil
	}
	entries, err := e.c.Journal.After(ctx, e.cursor, page)
	if err != nil {
		return 0, e.c.Now(), fmt.Errorf("drain: %w", err)
	}
	if len(entries) == 0 {
		return 0, time.Time{}, nil
	}
	if err := e.take(ctx, entries); err != nil {
		// What of it is stored, the store knows better than we do.
		clear(e.chains)
		return 0, entries[0].At, fmt.Errorf("drain after entry %d: %w", e.cursor, err)
	}
	e.cursor = entries[len(entries)-1].Seq
	return len(entries), e.oldestAfter(ctx), nil
}

// oldestAfter returns when the entry after the cursor was written.
func (e *Evidence) oldestAfter(ctx context.Context) time.Time {
	if e.c.Journal.Last() <= e.cursor {
		return time.Time{}
	}
	next, err := e.c.Journal.After(ctx, e.cursor, 1)
	if err != nil || len(next) == 0 {
		return e.c.Now()
	}
	return next[0].At
}

// start derives the cursor from the newest record of the system chain that
// says through which entry everything is stored; 0 if there is none.
func (e *Evidence) start(ctx context.Context) error {
	s, err := e.chain(ctx, identity.SystemChange)
	if err != nil {
		return err
	}
	if s.head.Length > 0 {
		first := uint64(1)
		if s.head.Length > page {
			first = s.head.Length - page + 1
		}
		for b, err := range e.records(ctx, identity.SystemChange, first, s.head.Length) {
			if err != nil {
				return err
			}
			r, err := chain.Parse(b)
			if err != nil {
				return fmt.Errorf("record of the system chain: %w", err)
			}
			body, err := members(r.Body)
			if err != nil {
				return fmt.Errorf("record %d of the system chain: %w", r.Sequence, err)
			}
			if body.Through > 0 {
				e.cursor = body.Through
			}
		}
	}
	if last := e.c.Journal.Last(); e.cursor > last {
		return fmt.Errorf("the evidence store holds entry %d, the journal ends at %d: they do not belong together, or the journal was lost", e.cursor, last)
	}
	e.started = true
	return nil
}

// take appends a page of entries to their chains.
func (e *Evidence) take(ctx context.Context, entries []journal.Entry) error {
	batches := map[identity.ChangeID]*batch{}
	var order []identity.ChangeID
	for _, entry := range entries {
		s, err := e.chain(ctx, entry.Change)
		if err != nil {
			return err
		}
		// What happens to a Change after its end belongs to the system chain.
		if s.head.Closed && entry.Seq > s.through {
			if s, err = e.chain(ctx, identity.SystemChange); err != nil {
				return err
			}
		}
		if entry.Seq <= s.through {
			continue // stored before a crash
		}
		raw, head, err := e.record(ctx, s.head, entry)
		if err != nil {
			return fmt.Errorf("entry %d: %w", entry.Seq, err)
		}
		b := batches[s.head.Change]
		if b == nil {
			b = &batch{first: s.head.Length + 1}
			batches[s.head.Change] = b
			order = append(order, s.head.Change)
		}
		b.records = append(b.records, raw)
		s.head, s.through = head, entry.Seq
	}
	for _, change := range order {
		if err := e.append(ctx, change, batches[change]); err != nil {
			return err
		}
	}
	return nil
}

// batch is a run of records of one chain.
type batch struct {
	first   uint64
	records [][]byte
}

// append stores a batch, in pieces that fit into one call.
func (e *Evidence) append(ctx context.Context, change identity.ChangeID, b *batch) error {
	for len(b.records) > 0 {
		n, size := 0, 0
		for n < len(b.records) && n < page && (n == 0 || size+len(b.records[n]) <= appendSize) {
			size += len(b.records[n])
			n++
		}
		client, ctx, cancel, err := e.store(ctx, change)
		if err != nil {
			return err
		}
		r, err := client.AppendLocked(ctx, &evidencestorev1.AppendLockedRequest{
			ChangeId: string(change), FirstSequence: b.first, Records: b.records[:n],
		})
		cancel()
		if err != nil {
			return fmt.Errorf("append records %d to %d of %s: %w", b.first, b.first+uint64(n)-1, change, err)
		}
		if want := b.first + uint64(n) - 1; r.GetLength() != want {
			return fmt.Errorf("append to %s: the store says it has %d records, we wrote through %d: somebody else writes there", change, r.GetLength(), want)
		}
		b.first, b.records = b.first+uint64(n), b.records[n:]
	}
	return nil
}

// entryBody is the body of a record made from a journal entry. What it says
// depends on the entry alone, so that the same entry always gives the same
// record.
type entryBody struct {
	Action  string          `json:"action_id,omitempty"`
	Digest  digest.Digest   `json:"entry_digest,omitempty"` // of an entry kept as a blob
	Entry   json.RawMessage `json:"entry,omitempty"`
	Kind    string          `json:"entry_kind,omitempty"` // if it is no record kind
	Of      string          `json:"entry_of,omitempty"`   // if it is not the chain's Change
	Size    string          `json:"entry_size,omitempty"`
	Key     string          `json:"idempotency_key,omitempty"`
	Request digest.Digest   `json:"request_digest,omitempty"`
	Seq     string          `json:"journal_seq"`
}

// record turns an entry into the next record of its chain. Nothing in an entry
// can stop the drain: what does not fit is kept as a blob and named by digest.
func (e *Evidence) record(ctx context.Context, h chain.Head, entry journal.Entry) ([]byte, chain.Head, error) {
	body := entryBody{
		Action: string(entry.Action), Key: entry.Key, Request: entry.Request, Seq: strconv.FormatInt(entry.Seq, 10),
	}
	if entry.Change != h.Change {
		body.Of = string(entry.Change)
	}
	kind := entry.Kind
	if !chain.ValidKind(kind) {
		kind, body.Kind = "journal.entry", entry.Kind
	}
	next := func() ([]byte, chain.Head, error) {
		raw, err := json.Marshal(body)
		if err != nil {
			return nil, h, err
		}
		return chain.Append(h, chain.Entry{At: entry.At, Kind: kind, Body: raw})
	}
	if len(entry.Body) <= maxInline && digest.CheckCanonical(entry.Body) == nil {
		body.Entry = entry.Body
		if raw, head, err := next(); err == nil {
			return raw, head, nil
		}
		body.Entry = nil
	}
	ref, err := e.c.Blobs.PutBytes(ctx, entry.Body)
	if err != nil {
		return nil, h, fmt.Errorf("keep its body: %w", err)
	}
	body.Digest, body.Size = ref.Digest, strconv.FormatInt(ref.Size, 10)
	return next()
}

// bodyMembers are the members of a body that the drain reads again.
type bodyMembers struct {
	Seq, Through int64
}

func members(body json.RawMessage) (bodyMembers, error) {
	var wire map[string]json.RawMessage
	if err := json.Unmarshal(body, &wire); err != nil {
		return bodyMembers{}, err
	}
	var m bodyMembers
	for name, into := range map[string]*int64{memberSeq: &m.Seq, memberThrough: &m.Through} {
		raw, ok := wire[name]
		if !ok {
			continue
		}
		var s string
		if err := json.Unmarshal(raw, &s); err != nil {
			return bodyMembers{}, fmt.Errorf("%s: %w", name, err)
		}
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil || n < 0 {
			return bodyMembers{}, fmt.Errorf("%s %q is no sequence number", name, s)
		}
		*into = n
	}
	if (m.Seq == 0) == (m.Through == 0) {
		return bodyMembers{}, errors.New("want one of " + memberSeq + " and " + memberThrough)
	}
	return m, nil
}

// chain returns what is known of a chain, from the store the first time.
func (e *Evidence) chain(ctx context.Context, change identity.ChangeID) (*chainState, error) {
	if change == "" {
		change = identity.SystemChange
	}
	if s := e.chains[change]; s != nil {
		return s, nil
	}
	s, err := e.load(ctx, change)
	if err != nil {
		return nil, fmt.Errorf("read the chain of %s: %w", change, err)
	}
	e.chains[change] = s
	return s, nil
}

// load reads where a chain stands and checks that its last record is its own.
func (e *Evidence) load(ctx context.Context, change identity.ChangeID) (*chainState, error) {
	client, ctx, cancel, err := e.store(ctx, change)
	if err != nil {
		return nil, err
	}
	defer cancel()
	head, err := client.Head(ctx, &evidencestorev1.HeadRequest{ChangeId: string(change)})
	if err != nil {
		return nil, err
	}
	if head.GetLength() == 0 {
		return &chainState{head: chain.Start(change)}, nil
	}
	last, err := client.GetRecord(ctx, &evidencestorev1.GetRecordRequest{ChangeId: string(change), Sequence: head.GetLength()})
	if err != nil {
		return nil, err
	}
	h, r, err := chain.Resume(last.GetRecord())
	if err != nil {
		return nil, fmt.Errorf("last record: %w", err)
	}
	if h.Change != change || h.Length != head.GetLength() || string(h.Digest) != head.GetLastDigest() {
		return nil, fmt.Errorf("the store says %d records ending in %s, its last record is %d of %s with %s",
			head.GetLength(), head.GetLastDigest(), h.Length, h.Change, h.Digest)
	}
	m, err := members(r.Body)
	if err != nil {
		return nil, fmt.Errorf("last record: %w", err)
	}
	return &chainState{head: h, through: max(m.Seq, m.Through)}, nil
}
