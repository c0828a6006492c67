package evidence

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"

	transparencylogv1 "github.com/numinance/numinance/gen/numinance/ports/transparencylog/v1"
	"github.com/numinance/numinance/internal/core/bundle"
	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/tlog"
)

// AnchorKind is the kind of the system chain's records about anchored heads.
const AnchorKind = "evidence.anchored"

// ErrNoRecord is returned for a Change of which nothing is recorded.
var ErrNoRecord = errors.New("nothing is recorded")

// Anchored is a head that the log has, as far as this context has checked: the
// proof leads to a checkpoint of the trusted log, which extends the one before.
type Anchored struct {
	Head   chain.Head
	Signed []byte // the head as a signed note
	Index  int64
	// Checkpoint is the log's signed note; Parsed is what it says.
	Checkpoint []byte
	Parsed     tlog.Checkpoint
}

// Anchor stores all of the journal so far, signs the head of change and brings
// it into the log. The same head again answers without calling the log. A
// failure leaves the head unanchored and may be tried again.
func (e *Evidence) Anchor(ctx context.Context, change identity.ChangeID) (Anchored, error) {
	head, err := e.headNow(ctx, change)
	if err != nil {
		return Anchored{}, fmt.Errorf("anchor %s: %w", change, err)
	}
	e.anchoring.Lock()
	defer e.anchoring.Unlock()
	if a, ok := e.anchored[change]; ok && a.Head == head {
		return a, nil
	}
	a, err := e.bringIn(ctx, head)
	if err != nil {
		return Anchored{}, fmt.Errorf("anchor %s: %w", change, err)
	}
	if err := e.recordAnchor(ctx, a); err != nil {
		return Anchored{}, fmt.Errorf("anchor %s: %w", change, err)
	}
	if len(e.anchored) >= maxChains {
		clear(e.anchored)
	}
	e.anchored[change] = a
	return a, nil
}

// headNow drains what the journal holds and returns the head of change.
func (e *Evidence) headNow(ctx context.Context, change identity.ChangeID) (chain.Head, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.drainTo(ctx, e.c.Journal.Last()); err != nil {
		return chain.Head{}, err
	}
	s, err := e.chain(ctx, change)
	if err != nil {
		return chain.Head{}, err
	}
	if s.head.Length == 0 {
		return chain.Head{}, ErrNoRecord
	}
	return s.head, nil
}

// bringIn signs a head, appends its leaf and checks everything the log says.
// e.anchoring is held.
func (e *Evidence) bringIn(ctx context.Context, head chain.Head) (Anchored, error) {
	signed, err := chain.SignHead(head, e.c.Heads)
	if err != nil {
		return Anchored{}, err
	}
	if _, _, err := chain.OpenHead(signed, e.c.Keys.Heads...); err != nil {
		return Anchored{}, fmt.Errorf("our own signature: %w", err)
	}
	leaf, err := tlog.HeadLeaf(head.Digest)
	if err != nil {
		return Anchored{}, err
	}
	client, ctx, cancel, err := e.log(ctx, head.Change)
	if err != nil {
		return Anchored{}, err
	}
	defer cancel()
	r, err := client.Append(ctx, &transparencylogv1.AppendRequest{Leaf: leaf[:]})
	if err != nil {
		return Anchored{}, fmt.Errorf("append to the log: %w", err)
	}
	c, err := e.checkInclusion(r.GetCheckpoint(), leaf, r.GetEntry(), r.GetProof())
	if err != nil {
		return Anchored{}, err
	}
	if r.GetIndex() != r.GetProof().GetIndex() {
		return Anchored{}, chain.Fail(chain.InclusionFailed, "the log says entry %d and proves entry %d", r.GetIndex(), r.GetProof().GetIndex())
	}
	if err := e.extend(ctx, client, c); err != nil {
		return Anchored{}, err
	}
	return Anchored{Head: head, Signed: signed, Index: int64(r.GetIndex()), Checkpoint: r.GetCheckpoint(), Parsed: c}, nil
}

// checkInclusion verifies a proof of leaf against a checkpoint of the trusted
// log. The leaf hash is computed here from the entry (P-226).
func (e *Evidence) checkInclusion(raw []byte, leaf tlog.Leaf, entry []byte, p *transparencylogv1.InclusionProof) (tlog.Checkpoint, error) {
	c, err := e.openCheckpoint(raw)
	if err != nil {
		return tlog.Checkpoint{}, err
	}
	got, err := tlog.ParseLeaf(entry)
	if err != nil {
		return tlog.Checkpoint{}, err
	}
	if got != leaf {
		return tlog.Checkpoint{}, chain.Fail(chain.LeafMismatch, "the log answers with the entry of %s %s", got.Kind(), got.Digest())
	}
	if p.GetTreeSize() != uint64(c.Size) || p.GetIndex() > math.MaxInt64 {
		return tlog.Checkpoint{}, chain.Fail(chain.InclusionFailed, "a proof for entry %d in a tree of %d with a checkpoint of %d", p.GetIndex(), p.GetTreeSize(), c.Size)
	}
	hashes, err := tlog.Hashes(p.GetHashes())
	if err != nil {
		return tlog.Checkpoint{}, err
	}
	return c, tlog.CheckInclusion(c, got, int64(p.GetIndex()), hashes)
}

func (e *Evidence) openCheckpoint(raw []byte) (c tlog.Checkpoint, err error) {
	for _, key := range e.c.Keys.Logs {
		if c, err = tlog.OpenCheckpoint(raw, key); chain.LabelOf(err) != chain.LogForeign {
			return c, err
		}
	}
	return c, err
}

// extend checks that c extends the newest checkpoint this context has seen, so
// that a log that goes back or shows another tree is found at once.
// e.anchoring is held.
func (e *Evidence) extend(ctx context.Context, client transparencylogv1.TransparencyLogServiceClient, c tlog.Checkpoint) error {
	if e.known == nil {
		if err := e.recall(ctx); err != nil {
			return err
		}
	}
	if e.known == nil {
		e.known = &c
		return nil
	}
	if _, err := e.consistency(ctx, client, *e.known, c); err != nil {
		return err
	}
	e.known = &c
	return nil
}

// consistency asks for the proof that newer extends older, and checks it.
func (e *Evidence) consistency(ctx context.Context, client transparencylogv1.TransparencyLogServiceClient, older, newer tlog.Checkpoint) ([]tlog.Hash, error) {
	var proof []tlog.Hash
	if older.Origin == newer.Origin && 0 < older.Size && older.Size < newer.Size {
		r, err := client.Prove(ctx, &transparencylogv1.ProveRequest{Proof: &transparencylogv1.ProveRequest_Consistency{
			Consistency: &transparencylogv1.ConsistencyQuery{FirstSize: uint64(older.Size), SecondSize: uint64(newer.Size)},
		}})
		if err != nil {
			return nil, fmt.Errorf("prove that the log has only grown: %w", err)
		}
		if proof, err = tlog.Hashes(r.GetConsistency().GetHashes()); err != nil {
			return nil, err
		}
	}
	return proof, tlog.CheckConsistency(older, newer, proof)
}

// anchorBody is the body of an AnchorKind record.
type anchorBody struct {
	Change     string        `json:"anchored_change"`
	Checkpoint string        `json:"checkpoint"`
	Head       digest.Digest `json:"head"`
	Index      string        `json:"leaf_index"`
	Length     string        `json:"length"`
	Signed     string        `json:"signed_head"`
	Through    string        `json:"journal_through"`
}

// recordAnchor writes into the system chain what was anchored, because a closed
// chain takes nothing more, and the proof of a head cannot be in the head.
func (e *Evidence) recordAnchor(ctx context.Context, a Anchored) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	s, err := e.chain(ctx, identity.SystemChange)
	if err != nil {
		return err
	}
	// A page that was stored in part has put the system chain ahead of the
	// cursor. The record says through which entry all is stored, and what it
	// says must not go back. A sequence number of 0 would say nothing; a journal
	// that a head was made from has at least one entry.
	if err := e.drainTo(ctx, max(1, s.through)); err != nil {
		return err
	}
	if s, err = e.chain(ctx, identity.SystemChange); err != nil {
		return err
	}
	body, err := json.Marshal(anchorBody{
		Change: string(a.Head.Change), Checkpoint: string(a.Checkpoint), Head: a.Head.Digest,
		Index: strconv.FormatInt(a.Index, 10), Length: strconv.FormatUint(a.Head.Length, 10),
		Signed: string(a.Signed), Through: strconv.FormatInt(e.cursor, 10),
	})
	if err != nil {
		return err
	}
	raw, head, err := chain.Append(s.head, chain.Entry{At: e.c.Now(), Kind: AnchorKind, Body: body})
	if err != nil {
		return err
	}
	return e.put(ctx, s, raw, head)
}

// put stores one record that was not made from an entry. e.mu is held.
func (e *Evidence) put(ctx context.Context, s *chainState, raw []byte, head chain.Head) error {
	if err := e.append(ctx, s.head.Change, &batch{first: s.head.Length + 1, records: [][]byte{raw}}); err != nil {
		delete(e.chains, s.head.Change)
		return err
	}
	s.head, s.through = head, e.cursor
	return nil
}

// Close ends the chain of change with a terminal record, after all of the
// journal so far; what is journaled of the Change later goes to the system
// chain. Closing a closed chain changes nothing. The head is not anchored by it.
func (e *Evidence) Close(ctx context.Context, change identity.ChangeID) (chain.Head, error) {
	if change == identity.SystemChange {
		return chain.Head{}, errors.New("close: the system chain has no end")
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.drainTo(ctx, e.c.Journal.Last()); err != nil {
		return chain.Head{}, fmt.Errorf("close %s: %w", change, err)
	}
	s, err := e.chain(ctx, change)
	if err != nil {
		return chain.Head{}, fmt.Errorf("close %s: %w", change, err)
	}
	switch {
	case s.head.Closed:
		return s.head, nil
	case s.head.Length == 0:
		return chain.Head{}, fmt.Errorf("close %s: %w", change, ErrNoRecord)
	}
	raw, head, err := chain.Close(s.head, e.c.Now(), map[string]any{memberThrough: strconv.FormatInt(e.cursor, 10)})
	if err != nil {
		return chain.Head{}, err
	}
	if err := e.put(ctx, s, raw, head); err != nil {
		return chain.Head{}, fmt.Errorf("close %s: %w", change, err)
	}
	return head, nil
}

// anchorIndex says where in the system chain each Change's anchors are. It is
// read once and then only grows.
type anchorIndex struct {
	through uint64 // records of the system chain that were read
	of      map[identity.ChangeID][]uint64
}

// systemLength returns how many records the system chain has.
func (e *Evidence) systemLength(ctx context.Context) (uint64, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s, err := e.chain(ctx, identity.SystemChange)
	if err != nil {
		return 0, err
	}
	return s.head.Length, nil
}

// anchors reads from the system chain which heads of change were anchored,
// oldest first.
func (e *Evidence) anchors(ctx context.Context, change identity.ChangeID) ([]Anchored, error) {
	length, err := e.systemLength(ctx)
	if err != nil {
		return nil, err
	}
	e.indexing.Lock()
	defer e.indexing.Unlock()
	if e.index.of == nil {
		e.index.of = make(map[identity.ChangeID][]uint64)
	}
	for raw, err := range e.records(ctx, identity.SystemChange, e.index.through+1, length) {
		if err != nil {
			return nil, err
		}
		sequence := e.index.through + 1
		a, ok, err := e.anchorIn(raw, sequence)
		if err != nil {
			return nil, err
		}
		if ok {
			e.index.of[a.Head.Change] = append(e.index.of[a.Head.Change], sequence)
		}
		e.index.through = sequence
	}
	var out []Anchored
	for _, sequence := range e.index.of[change] {
		for raw, err := range e.records(ctx, identity.SystemChange, sequence, sequence) {
			if err != nil {
				return nil, err
			}
			a, _, err := e.anchorIn(raw, sequence)
			if err != nil {
				return nil, err
			}
			out = append(out, a)
		}
	}
	return out, nil
}

// anchorIn reads the record of an anchor; false if it is a record of another
// kind. The checkpoint in it must be one of a trusted log.
func (e *Evidence) anchorIn(raw []byte, sequence uint64) (Anchored, bool, error) {
	r, err := chain.Parse(raw)
	if err != nil {
		return Anchored{}, false, fmt.Errorf("record %d of the system chain: %w", sequence, err)
	}
	if r.Kind != AnchorKind {
		return Anchored{}, false, nil
	}
	a, err := parseAnchor(r)
	if err == nil {
		a.Parsed, err = e.openCheckpoint(a.Checkpoint)
	}
	if err != nil {
		return Anchored{}, false, fmt.Errorf("record %d of the system chain: %w", sequence, err)
	}
	return a, true, nil
}

// recall takes the newest recorded checkpoint as known; it looks from the end
// of the system chain. e.anchoring is held.
func (e *Evidence) recall(ctx context.Context) error {
	last, err := e.systemLength(ctx)
	if err != nil {
		return fmt.Errorf("recall the newest checkpoint: %w", err)
	}
	for last > 0 && e.known == nil {
		first := uint64(1)
		if last > page {
			first = last - page + 1
		}
		sequence := first
		for raw, err := range e.records(ctx, identity.SystemChange, first, last) {
			if err != nil {
				return fmt.Errorf("recall the newest checkpoint: %w", err)
			}
			a, ok, err := e.anchorIn(raw, sequence)
			if err != nil {
				return fmt.Errorf("recall the newest checkpoint: %w", err)
			}
			if ok {
				e.known = &a.Parsed
			}
			sequence++
		}
		last = first - 1
	}
	return nil
}

func parseAnchor(r chain.Record) (Anchored, error) {
	var b anchorBody
	if err := json.Unmarshal(r.Body, &b); err != nil {
		return Anchored{}, err
	}
	length, err := chain.ParseCount(b.Length)
	if err != nil {
		return Anchored{}, err
	}
	index, err := chain.ParseCount(b.Index)
	if err != nil || index > tlog.MaxSize {
		return Anchored{}, fmt.Errorf("leaf index %q", b.Index)
	}
	return Anchored{
		Head:   chain.Head{Change: identity.ChangeID(b.Change), Length: length, Digest: b.Head},
		Signed: []byte(b.Signed), Index: int64(index), Checkpoint: []byte(b.Checkpoint),
	}, nil
}

// Trailer returns the commit trailer that leaves a's checkpoint outside of our
// own disk.
func (a Anchored) Trailer() string { return bundle.TrailerKey + ": " + a.Parsed.Trailer() }
