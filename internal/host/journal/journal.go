// Package journal is the durable point of the runtime: the ordered log of
// decisions and results, and the ledger that knows which action has started
// and which has finished. Dispatch writes it, the evidence context and the read
// model follow it, and an effect happens only after its decision is in it.
//
// One goroutine owns all writing. It takes whatever callers have queued, puts
// it into one transaction and acknowledges all of it after one flush. Every
// insert names the lease epoch under which this process took the journal over;
// when a later process has taken it, nothing of ours is written any more.
package journal

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/host/store"
)

// Errors a caller branches on.
var (
	// ErrFenced: another process holds the journal now; this one must stop.
	ErrFenced = errors.New("journal lease was taken over by another process")
	// ErrUnavailable: the entry is not on disk. Deny.
	ErrUnavailable = errors.New("journal cannot be written")
	// ErrExists: the key is in the ledger already; Lookup tells how far it came.
	ErrExists = errors.New("idempotency key is already in the ledger")
	// ErrNotStarted: Finish of a key that is unknown or finished already.
	ErrNotStarted = errors.New("idempotency key is not in state started")
	// ErrClosed: the journal was closed.
	ErrClosed = errors.New("journal is closed")
)

// Bounds.
const (
	// MaxBody is the most bytes one entry's body may have: an evidence record
	// holds it and a little more.
	MaxBody = 60 << 10
	// MaxAnswer is the most bytes of an answer that are kept beside its result;
	// a larger answer goes to the blob store first.
	MaxAnswer = 64 << 10
	// LazyDelay is the longest a lazy write waits before its commit begins. With
	// the flush it stays below 50 ms on a disk that flushes within 30 ms.
	LazyDelay = 20 * time.Millisecond

	maxBatch   = 512
	maxPending = 4096
)

// Entry is one line of the journal. Seq is given by the journal: dense, from 1.
// Body is canonical JSON. Key and Request are empty for entries that belong to
// no action.
type Entry struct {
	Seq     int64
	At      time.Time
	Change  identity.ChangeID
	Kind    string
	Action  identity.ActionID
	Key     string
	Request digest.Digest
	Body    []byte

	// canonical: Body was made by With and needs no second look.
	canonical bool
}

// With returns the entry with the canonical form of v as its body, which must
// not be changed afterwards.
func (e Entry) With(v any) (Entry, error) {
	var err error
	if e.Body, err = digest.Canonical(v); err != nil {
		return Entry{}, fmt.Errorf("journal entry %s: %w", e.Kind, err)
	}
	e.canonical = true
	return e, nil
}

// WithCanonical returns the entry with a body that the caller made from
// canonical parts and vouches for; it must not be changed afterwards.
func (e Entry) WithCanonical(body []byte) Entry {
	e.Body, e.canonical = body, true
	return e
}

// Config says how a process takes the journal over.
type Config struct {
	// Path of the state database.
	Path string
	// Holder names this process in the lease, for a person to read.
	Holder string
	// Spill is the path of the preallocated file that takes denials when the
	// database cannot be written.
	Spill string
	// Now gives the time of entries whose At is zero.
	Now func() time.Time
}

// Journal is open for writing by this process until it is closed or fenced.
// It is safe for concurrent use.
type Journal struct {
	db    *sql.DB
	w     *writer
	row   *sql.Stmt // finds a ledger row by its key
	epoch int64
	now   func() time.Time

	queued queue
	stop   chan struct{}
	done   chan struct{}
	closed sync.Once

	fenced  atomic.Bool
	healthy atomic.Bool

	spill *spill

	mu       sync.Mutex               // guards what follows
	rows     map[string]Row           // finished rows of lazy writes not yet on disk
	answers  map[digest.Digest][]byte // answers of the same
	revoked  map[Revocation]bool      // all of them, on disk or about to be
	keys     keys                     // of the ledger, by run
	advanced chan struct{}            // closed and replaced at each commit
	last     int64                    // newest seq on disk
}

// Open takes the journal over: it raises the lease epoch, so that a process
// that held it before can write nothing more, and drains what the spill file
// holds. The caller closes it.
func Open(ctx context.Context, c Config) (*Journal, error) {
	if c.Now == nil {
		return nil, errors.New("open journal: no clock given")
	}
	db, err := store.Open(ctx, c.Path)
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	j := &Journal{
		db: db, now: c.Now,
		queued: queue{wake: make(chan struct{}, 1)}, stop: make(chan struct{}), done: make(chan struct{}),
		rows: map[string]Row{}, answers: map[digest.Digest][]byte{}, revoked: map[Revocation]bool{},
		advanced: make(chan struct{}),
	}
	if err := j.open(ctx, c); err != nil {
		return nil, errors.Join(fmt.Errorf("open journal: %w", err), db.Close())
	}
	go j.run()
	if err := j.drainSpill(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("open journal: %w", err), j.Close())
	}
	return j, nil
}

func (j *Journal) open(ctx context.Context, c Config) error {
	if err := store.Migrate(ctx, j.db, "journal", schema); err != nil {
		return err
	}
	if err := j.db.QueryRowContext(ctx,
		`UPDATE lease SET epoch = epoch + 1, holder = ? RETURNING epoch`, c.Holder).Scan(&j.epoch); err != nil {
		return fmt.Errorf("take the lease: %w", err)
	}
	if err := j.db.QueryRowContext(ctx, `SELECT coalesce(max(seq), 0) FROM journal`).Scan(&j.last); err != nil {
		return fmt.Errorf("find the newest entry: %w", err)
	}
	if err := j.loadRevoked(ctx); err != nil {
		return err
	}
	var err error
	if j.spill, err = openSpill(c.Spill); err != nil {
		return err
	}
	if j.w, err = newWriter(ctx, j.db, j.epoch); err != nil {
		return errors.Join(err, j.spill.close())
	}
	if j.row, err = j.db.PrepareContext(ctx, `SELECT `+rowColumns+` FROM ledger WHERE key = ?`); err != nil {
		return errors.Join(fmt.Errorf("prepare the journal's statements: %w", err), j.w.close(), j.spill.close())
	}
	j.healthy.Store(true)
	return nil
}

// Close writes what lazy writes are pending, ends the writing goroutine and
// closes the files. Writes that come after it fail with ErrClosed.
func (j *Journal) Close() error {
	var err error
	j.closed.Do(func() {
		close(j.stop)
		<-j.done
		err = errors.Join(j.row.Close(), j.w.close(), j.spill.close(), j.db.Close())
	})
	return err
}

// Epoch is the lease epoch under which this process writes.
func (j *Journal) Epoch() int64 { return j.epoch }

// Healthy reports whether the newest attempt to write succeeded. While it is
// false nothing may rely on a lazy write.
func (j *Journal) Healthy() bool { return j.healthy.Load() && !j.fenced.Load() }

// Last is the sequence number of the newest entry on disk, 0 if there is none.
func (j *Journal) Last() int64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.last
}

// Append writes entries in order, all or none, and returns when they are on
// disk with the sequence number of the first. It fails with ErrFenced,
// ErrUnavailable, ErrClosed or ctx's error, and then wrote none of them. Once
// queued it waits for the disk whatever ctx says, because the caller has to
// know.
func (j *Journal) Append(ctx context.Context, entries ...Entry) (int64, error) {
	if len(entries) == 0 {
		return 0, errors.New("append to the journal: no entries given")
	}
	return j.write(ctx, &Write{Entries: entries})
}

// Flush returns when every lazy write queued before it is on disk.
func (j *Journal) Flush(ctx context.Context) error {
	_, err := j.write(ctx, &Write{})
	return err
}

// After returns at most limit entries that follow seq, in order. Only what is
// on disk is seen.
func (j *Journal) After(ctx context.Context, seq int64, limit int) ([]Entry, error) {
	return j.read(ctx, `SELECT seq, at, change, kind, action, key, request, body FROM journal
		WHERE seq > ? ORDER BY seq LIMIT ?`, seq, limit)
}

// AfterOf is After for the entries of one Change.
func (j *Journal) AfterOf(ctx context.Context, change identity.ChangeID, seq int64, limit int) ([]Entry, error) {
	return j.read(ctx, `SELECT seq, at, change, kind, action, key, request, body FROM journal
		WHERE change = ? AND seq > ? ORDER BY seq LIMIT ?`, string(change), seq, limit)
}

func (j *Journal) read(ctx context.Context, query string, args ...any) (out []Entry, err error) {
	rows, err := j.db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, fmt.Errorf("read the journal: %w", err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		var e Entry
		var at int64
		if err := rows.Scan(&e.Seq, &at, &e.Change, &e.Kind, &e.Action, &e.Key, &e.Request, &e.Body); err != nil {
			return nil, fmt.Errorf("read the journal: %w", err)
		}
		e.At = time.Unix(0, at).UTC()
		out = append(out, e)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read the journal: %w", err)
	}
	return out, nil
}

// Sink receives entries in order, each once per subscription.
type Sink interface {
	// Entry handles one entry; an error ends the subscription.
	Entry(ctx context.Context, e Entry) error
}

// Subscribe hands every entry after seq to sink, those on disk first and then
// each as it gets there, until ctx ends (which is no error), the sink fails or
// the journal is closed. It reads from disk, so a slow sink holds up nobody and
// loses nothing.
func (j *Journal) Subscribe(ctx context.Context, seq int64, sink Sink) error {
	for {
		j.mu.Lock()
		advanced := j.advanced
		j.mu.Unlock()
		for {
			page, err := j.After(ctx, seq, maxBatch)
			if ctx.Err() != nil {
				return nil
			}
			if err != nil {
				return err
			}
			for _, e := range page {
				if err := sink.Entry(ctx, e); err != nil {
					return fmt.Errorf("hand on journal entry %d: %w", e.Seq, err)
				}
				seq = e.Seq
			}
			if len(page) < maxBatch {
				break
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-j.done:
			return ErrClosed
		case <-advanced:
		}
	}
}
