package orchestration

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/host/journal"
)

// EntryKind is the kind of journal entry that holds one event of a Change.
const EntryKind = "change.event"

// Entry is one event as the journal keeps it. From the entries of a Change its
// state can be rebuilt to the byte.
type Entry struct {
	Change identity.ChangeID `json:"change"`
	// Seq is the state's Seq after the event; 0 is the proposal.
	Seq    int             `json:"seq"`
	Before change.Status   `json:"before,omitempty"`
	After  change.Status   `json:"after"`
	At     time.Time       `json:"at"`
	Event  *change.Event   `json:"event,omitempty"`
	Ask    *change.Request `json:"request,omitempty"`
	// AfterEnd: the evidence chain of the Change is already closed, so the
	// entry belongs to the system chain.
	AfterEnd bool `json:"after_end,omitempty"`
}

// Recorder keeps the events of all Changes.
type Recorder interface {
	// Record makes e durable. Recording a change and seq again adds nothing.
	Record(ctx context.Context, e Entry) error
	// Replay hands every entry to fn, those of one Change in order of Seq.
	Replay(ctx context.Context, fn func(Entry) error) error
}

// Journal is the Recorder on the host's journal.
type Journal struct {
	j *journal.Journal

	mu   sync.Mutex // guards last, and keeps two records of one Change apart
	last map[identity.ChangeID]int
}

// NewJournal returns a Recorder that writes to j.
func NewJournal(j *journal.Journal) *Journal {
	return &Journal{j: j, last: map[identity.ChangeID]int{}}
}

// Record appends one entry of EntryKind. An entry after the end of the Change's
// chain is journaled for the system chain.
func (r *Journal) Record(ctx context.Context, e Entry) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	last, known := r.last[e.Change]
	if !known {
		last = -1
		if e.Seq > 0 { // another process may have recorded it before it died
			err := r.replay(ctx, func(seen Entry) error {
				if seen.Change == e.Change && seen.Seq > last {
					last = seen.Seq
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
	}
	if e.Seq <= last {
		r.last[e.Change] = last
		return nil
	}
	body, err := digest.Canonical(e)
	if err != nil {
		return fmt.Errorf("record event %d of %s: %w", e.Seq, e.Change, err)
	}
	owner := e.Change
	if e.AfterEnd {
		owner = identity.SystemChange
	}
	if _, err := r.j.Append(ctx, journal.Entry{At: e.At, Change: owner, Kind: EntryKind, Body: body}); err != nil {
		return fmt.Errorf("record event %d of %s: %w", e.Seq, e.Change, err)
	}
	r.last[e.Change] = e.Seq
	return nil
}

// Replay reads the journal from its beginning.
func (r *Journal) Replay(ctx context.Context, fn func(Entry) error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.replay(ctx, fn)
}

func (r *Journal) replay(ctx context.Context, fn func(Entry) error) error {
	const page = 500
	for seq := int64(0); ; {
		entries, err := r.j.After(ctx, seq, page)
		if err != nil {
			return fmt.Errorf("replay events: %w", err)
		}
		for _, raw := range entries {
			seq = raw.Seq
			if raw.Kind != EntryKind {
				continue
			}
			var e Entry
			if err := json.Unmarshal(raw.Body, &e); err != nil {
				return fmt.Errorf("replay journal entry %d: %w", raw.Seq, err)
			}
			if err := fn(e); err != nil {
				return err
			}
		}
		if len(entries) < page {
			return nil
		}
	}
}
