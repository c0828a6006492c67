package evidence

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/mod/sumdb/note"
	"google.golang.org/grpc"

	evidencestorev1 "github.com/numinance/numinance/gen/numinance/ports/evidencestore/v1"
	transparencylogv1 "github.com/numinance/numinance/gen/numinance/ports/transparencylog/v1"
	"github.com/numinance/numinance/internal/core/bundle"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/tlog"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/journal"
)

// Journal is what the drain reads, in the order of the entries.
type Journal interface {
	// After returns at most limit entries that follow seq.
	After(ctx context.Context, seq int64, limit int) ([]journal.Entry, error)
	// Last is the sequence number of the newest entry, 0 if there is none.
	Last() int64
}

// Blobs keeps bodies that are too large for a record.
type Blobs interface {
	PutBytes(ctx context.Context, b []byte) (blob.Ref, error)
}

// Dial returns a connection on which calls run as the runner in the evidence
// context, under the fixed evidence grant of change. The step makes the calls'
// keys distinct.
type Dial func(change identity.ChangeID, step string) (grpc.ClientConnInterface, error)

// Config is what the context works with.
type Config struct {
	Journal Journal
	Blobs   Blobs
	Dial    Dial
	// Heads signs chain heads; its key is with the broker.
	Heads note.Signer
	// Keys are the public keys of this deployment: the head key and the log's.
	Keys bundle.Trust
	// Now is the clock of terminal and anchor records.
	Now func() time.Time
	// Deadline bounds one call to a store or a log; 30 s if zero.
	Deadline time.Duration
	// MaxPause bounds how long Run waits after a failure before it tries again;
	// 1 s if zero.
	MaxPause time.Duration
}

// Evidence is the context. It is safe for concurrent use.
type Evidence struct {
	c     Config
	steps atomic.Int64

	mu     sync.Mutex // guards chains and cursor; held while records are appended
	chains map[identity.ChangeID]*chainState
	// cursor is the newest journal entry up to which everything is in the store.
	cursor  int64
	started bool // cursor was derived from the store

	anchoring sync.Mutex // guards anchored and known; held while the log is called
	anchored  map[identity.ChangeID]Anchored
	known     *tlog.Checkpoint // the newest checkpoint seen

	indexing sync.Mutex // guards index
	index    anchorIndex

	status sync.Mutex // guards the fields below
	behind int64      // copy of cursor for Lag
	oldest time.Time  // when the oldest entry that is not stored was written
	looked time.Time  // when the journal was last looked at
	last   error      // of the newest attempt to drain
}

// New returns the context. Nothing runs until Run, Drain or another method is
// called.
func New(c Config) (*Evidence, error) {
	if c.Journal == nil || c.Blobs == nil || c.Dial == nil || c.Heads == nil || c.Now == nil {
		return nil, errors.New("new evidence context: journal, blobs, dial, head key and clock must be given")
	}
	if len(c.Keys.Heads) == 0 || len(c.Keys.Logs) == 0 {
		return nil, errors.New("new evidence context: the public keys of heads and log must be given")
	}
	if c.Deadline == 0 {
		c.Deadline = 30 * time.Second
	}
	if c.MaxPause == 0 {
		c.MaxPause = time.Second
	}
	return &Evidence{
		c: c, looked: c.Now(), chains: make(map[identity.ChangeID]*chainState), anchored: make(map[identity.ChangeID]Anchored),
	}, nil
}

// Poll is how often Run looks for new entries; looking costs no disk access.
const Poll = 10 * time.Millisecond

// Run drains the journal until ctx ends, which is no error. A store that fails
// is tried again; meanwhile Lag grows and dispatch stops the work.
func (e *Evidence) Run(ctx context.Context) {
	pause := Poll
	for {
		n, err := e.Drain(ctx)
		switch {
		case err != nil:
			pause = min(2*pause, e.c.MaxPause)
		case n > 0:
			pause = 0
		default:
			pause = Poll
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = max(pause, Poll)
	}
}

// CatchUp stores all of the journal so far. A new process calls it before it
// lets work begin: until then Lag is the age of entries it has not looked at.
func (e *Evidence) CatchUp(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.drainTo(ctx, e.c.Journal.Last())
}

// Status is how far the store is behind the journal.
type Status struct {
	// Drained is the newest entry that is stored with all before it; Last is
	// the newest of the journal.
	Drained, Last int64
	Lag           time.Duration
	// Err is why the newest attempt to drain failed.
	Err error
}

// Status reports how far the store is behind.
func (e *Evidence) Status() Status {
	e.status.Lock()
	defer e.status.Unlock()
	s := Status{Drained: e.behind, Last: e.c.Journal.Last(), Err: e.last}
	if s.Last > s.Drained {
		// What came since the last look is no older than that, and if nobody looks
		// any more it gets older.
		since := e.oldest
		if since.IsZero() {
			since = e.looked
		}
		s.Lag = max(0, e.c.Now().Sub(since))
	}
	return s
}

// Lag is the age of the oldest journal entry that is not in the store, 0 if
// there is none.
func (e *Evidence) Lag() time.Duration { return e.Status().Lag }

// note remembers what a drain came to.
func (e *Evidence) note(cursor int64, oldest time.Time, err error) {
	e.status.Lock()
	defer e.status.Unlock()
	e.behind, e.oldest, e.looked, e.last = cursor, oldest, e.c.Now(), err
}

// store returns a client of the evidence store and a bounded context.
func (e *Evidence) store(ctx context.Context, change identity.ChangeID) (evidencestorev1.EvidenceStoreServiceClient, context.Context, context.CancelFunc, error) {
	conn, err := e.c.Dial(change, e.step())
	if err != nil {
		return nil, nil, nil, fmt.Errorf("reach the evidence store: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, e.c.Deadline)
	return evidencestorev1.NewEvidenceStoreServiceClient(conn), ctx, cancel, nil
}

// log returns a client of the transparency log and a bounded context.
func (e *Evidence) log(ctx context.Context, change identity.ChangeID) (transparencylogv1.TransparencyLogServiceClient, context.Context, context.CancelFunc, error) {
	conn, err := e.c.Dial(change, e.step())
	if err != nil {
		return nil, nil, nil, fmt.Errorf("reach the transparency log: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, e.c.Deadline)
	return transparencylogv1.NewTransparencyLogServiceClient(conn), ctx, cancel, nil
}

func (e *Evidence) step() string {
	return "evidence/" + strconv.FormatInt(e.steps.Add(1), 10)
}
