package journal

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
)

// Write is what goes to disk together or not at all.
type Write struct {
	Start   *Start
	Finish  *Finish
	Spend   *Spend
	Revoke  *Revocation
	Run     *RunFact
	Entries []Entry
	// drained is the generation of the spill file that the entries came from.
	drained int64
}

// op is one Write on its way through the writing goroutine.
type op struct {
	write *Write
	lazy  bool
	// seq and err are set before done is closed.
	seq  int64
	err  error
	done chan struct{}
}

func (j *Journal) write(ctx context.Context, w *Write) (int64, error) {
	o := &op{write: w, done: make(chan struct{})}
	if err := j.queue(ctx, o); err != nil {
		return 0, err
	}
	select {
	case <-o.done:
	case <-j.done:
		// Closed: either the last commit took it or nobody will.
		select {
		case <-o.done:
		default:
			return 0, ErrClosed
		}
	}
	if o.err == nil && w.drained == 0 && !j.spill.empty() {
		// The disk takes writes again. What fails here is tried at the next
		// write and at the next start.
		_ = j.drainSpill(context.WithoutCancel(ctx))
	}
	return o.seq, o.err
}

func (j *Journal) queue(ctx context.Context, o *op) error {
	if err := j.prepare(o.write); err != nil {
		return err
	}
	if j.fenced.Load() {
		return ErrFenced
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("write to the journal: %w", err)
	}
	select {
	case <-j.stop:
		return ErrClosed
	default:
	}
	if !j.queued.add(o) {
		return ErrClosed
	}
	return nil
}

// prepare checks a write in the caller's goroutine, so that the one goroutine
// that writes only writes.
func (j *Journal) prepare(w *Write) error {
	now := j.now()
	for i := range w.Entries {
		e := &w.Entries[i]
		if e.At.IsZero() {
			e.At = now
		}
		if !identity.ValidID(e.Change) {
			return fmt.Errorf("journal entry %s: change %q is not an id", e.Kind, e.Change)
		}
		if e.Kind == "" {
			return errors.New("journal entry: no kind given")
		}
		if len(e.Body) > MaxBody {
			return fmt.Errorf("journal entry %s: body has %d bytes, at most %d", e.Kind, len(e.Body), MaxBody)
		}
		if e.canonical {
			continue
		}
		if err := digest.CheckCanonical(e.Body); err != nil {
			return fmt.Errorf("journal entry %s: body: %w", e.Kind, err)
		}
	}
	if s := w.Start; s != nil && (s.Key == "" || !s.Request.Valid()) {
		return fmt.Errorf("start %s: key and request digest must be given", s.Verb)
	}
	if f := w.Finish; f != nil {
		for _, b := range f.Answers {
			if len(b) > MaxAnswer {
				return fmt.Errorf("finish: answer has %d bytes, at most %d", len(b), MaxAnswer)
			}
		}
		if f.Key == "" || f.Status == "" {
			return errors.New("finish: key and status must be given")
		}
	}
	return nil
}

// run is the one goroutine that writes.
func (j *Journal) run() {
	defer close(j.done)
	var again []*op // lazy ones that found no room, oldest first
	due := time.NewTimer(time.Hour)
	due.Stop()
	ticking := false
	for {
		select {
		case <-j.queued.wake:
			urgent, waiting := j.queued.look()
			if !urgent {
				if waiting && !ticking {
					due.Reset(LazyDelay)
					ticking = true
				}
				continue
			}
		case <-due.C:
		case <-j.stop:
			// What was queued before Close is written, lazy writes included.
			for _, o := range j.commit(append(again, j.queued.take(true)...)) {
				o.settle(0, ErrUnavailable)
			}
			return
		}
		due.Stop()
		again = j.commit(append(again, j.queued.take(false)...))
		if ticking = len(again) > 0; ticking {
			due.Reset(LazyDelay)
		}
	}
}

func (o *op) settle(seq int64, err error) {
	o.seq, o.err = seq, err
	if o.done != nil {
		close(o.done)
	}
}

// commit writes ops in one transaction. Lazy ones that could not be written for
// want of disk are returned, to be tried again; all others have their answer.
func (j *Journal) commit(ops []*op) (again []*op) {
	if len(ops) == 0 {
		return nil
	}
	last, err := j.w.commit(ops)
	if errors.Is(err, ErrFenced) {
		j.fenced.Store(true)
	}
	j.healthy.Store(err == nil)
	if err != nil {
		for _, o := range ops {
			if o.lazy && !errors.Is(err, ErrFenced) {
				again = append(again, o)
			} else {
				o.settle(0, err)
			}
		}
		return again
	}
	// Whoever is told that a write is on disk finds the journal to say so.
	j.mu.Lock()
	for _, o := range ops {
		j.settled(o.write)
	}
	if last > j.last {
		j.last = last
	}
	close(j.advanced)
	j.advanced = make(chan struct{})
	j.mu.Unlock()
	for _, o := range ops {
		o.settle(o.seq, o.err)
	}
	return nil
}

// writer holds the connection and the statements of the writing goroutine.
type writer struct {
	conn  *sql.Conn
	epoch int64

	entry, start, finish, spent, answer, revoke, drained, fact *sql.Stmt

	// Of the transaction under way.
	spends map[identity.GrantID]Amount
	facts  map[identity.RunID]RunFact
}

func newWriter(ctx context.Context, db *sql.DB, epoch int64) (*writer, error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, fmt.Errorf("open the writing connection: %w", err)
	}
	w := &writer{conn: conn, epoch: epoch, spends: map[identity.GrantID]Amount{}, facts: map[identity.RunID]RunFact{}}
	for _, s := range []struct {
		stmt **sql.Stmt
		text string
	}{
		// Both inserts select from the lease: under another epoch there is no
		// row to insert.
		{&w.entry, `INSERT INTO journal (seq, at, epoch, change, kind, action, key, request, body)
			SELECT ?, ?, epoch, ?, ?, ?, ?, ?, ? FROM lease WHERE epoch = ?`},
		{&w.start, `INSERT INTO ledger (` + rowColumns + `)
			SELECT ?, ?, ?, ?, ?, ?, ?, ?, 'started', '', '', x'', ?, 0, ?, ?, ?, ? FROM lease WHERE epoch = ?
			ON CONFLICT (key) DO NOTHING`},
		{&w.finish, `UPDATE ledger SET state = 'finished', status = ?, result = ?, outcome = ?, finish_seq = ?,
			r_actions = 0, r_output = 0, r_tokens = 0, r_wall = 0 WHERE key = ? AND state = 'started'`},
		{&w.spent, `INSERT INTO spent (grant_id, actions, output, tokens, wall) VALUES (?, ?, ?, ?, ?)
			ON CONFLICT (grant_id) DO UPDATE SET actions = actions + excluded.actions, output = output + excluded.output,
			tokens = tokens + excluded.tokens, wall = wall + excluded.wall`},
		{&w.answer, `INSERT INTO answer (digest, body) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING`},
		{&w.revoke, `INSERT INTO revoked (scope, id) VALUES (?, ?) ON CONFLICT DO NOTHING`},
		{&w.fact, `INSERT INTO run_fact (run, denials, tainted) VALUES (?, ?, ?)
			ON CONFLICT (run) DO UPDATE SET denials = denials + excluded.denials, tainted = max(tainted, excluded.tainted)`},
		{&w.drained, `INSERT INTO spill_drained (generation) VALUES (?)`},
	} {
		if *s.stmt, err = conn.PrepareContext(ctx, s.text); err != nil {
			return nil, errors.Join(fmt.Errorf("prepare the journal's statements: %w", err), conn.Close())
		}
	}
	return w, nil
}

func (w *writer) close() error {
	var errs []error
	for _, s := range []*sql.Stmt{w.entry, w.start, w.finish, w.spent, w.answer, w.revoke, w.drained, w.fact} {
		errs = append(errs, s.Close())
	}
	return errors.Join(append(errs, w.conn.Close())...)
}

// commit writes all ops in one transaction and sets seq and err of each. An
// error of its own means that nothing was written.
func (w *writer) commit(ops []*op) (last int64, err error) {
	ctx := context.Background()
	if _, err := w.conn.ExecContext(ctx, `BEGIN IMMEDIATE`); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	defer func() {
		if err != nil {
			// After some failures SQLite has rolled back by itself.
			_, _ = w.conn.ExecContext(ctx, `ROLLBACK`)
		}
	}()
	clear(w.spends)
	clear(w.facts)
	var held, next int64
	if err := w.conn.QueryRowContext(ctx,
		`SELECT epoch, (SELECT coalesce(max(seq), 0) + 1 FROM journal) FROM lease`).Scan(&held, &next); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if held != w.epoch {
		return 0, fmt.Errorf("%w: epoch %d is over, the journal is at epoch %d", ErrFenced, w.epoch, held)
	}
	for _, o := range ops {
		err := w.put(ctx, o.write, next)
		if errors.Is(err, ErrExists) || errors.Is(err, ErrNotStarted) {
			// Found before anything of this op was written; the others go on.
			o.err = err
			continue
		}
		if err != nil {
			return 0, err
		}
		o.seq, o.err = 0, nil
		if n := int64(len(o.write.Entries)); n > 0 {
			o.seq = next
			next += n
		}
	}
	if err := w.settleTotals(ctx); err != nil {
		return 0, err
	}
	if _, err := w.conn.ExecContext(ctx, `COMMIT`); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return next - 1, nil
}

// put writes one op, its entries from seq on.
func (w *writer) put(ctx context.Context, wr *Write, seq int64) error {
	if s := wr.Start; s != nil {
		n, err := w.exec(ctx, w.start, s.Key, string(s.Change), string(s.Run), string(s.Grant), s.Verb, string(s.Action),
			string(s.Decision), string(s.Request), seq, s.Reserve.Actions, s.Reserve.Output, s.Reserve.Tokens, int64(s.Reserve.Wall), w.epoch)
		if err != nil {
			return err
		}
		if n == 0 {
			return fmt.Errorf("start %s: %w", s.Verb, ErrExists)
		}
	}
	if f := wr.Finish; f != nil {
		outcome := f.Outcome
		if outcome == nil {
			outcome = []byte{}
		}
		n, err := w.exec(ctx, w.finish, f.Status, string(f.Result), outcome, seq, f.Key)
		if err != nil {
			return err
		}
		if n == 0 {
			return fmt.Errorf("finish: %w", ErrNotStarted)
		}
		w.spends[f.Grant] = w.spends[f.Grant].Add(f.Used)
		for _, b := range f.Answers {
			if b == nil {
				b = []byte{} // an empty answer is an answer; nil would be stored as none
			}
			if _, err := w.exec(ctx, w.answer, string(digest.Of(b)), b); err != nil {
				return err
			}
		}
	}
	if wr.Spend != nil {
		w.spends[wr.Spend.Grant] = w.spends[wr.Spend.Grant].Add(wr.Spend.Used)
	}
	if f := wr.Run; f != nil {
		total := w.facts[f.Run]
		w.facts[f.Run] = RunFact{Run: f.Run, Denials: total.Denials + f.Denials, Tainted: total.Tainted || f.Tainted}
	}
	if r := wr.Revoke; r != nil {
		if _, err := w.exec(ctx, w.revoke, r.Scope, r.ID); err != nil {
			return err
		}
	}
	if wr.drained != 0 {
		if _, err := w.exec(ctx, w.drained, wr.drained); err != nil {
			return err
		}
	}
	for i := range wr.Entries {
		e := &wr.Entries[i]
		n, err := w.exec(ctx, w.entry, seq+int64(i), e.At.UnixNano(), string(e.Change), e.Kind, string(e.Action), e.Key, string(e.Request), e.Body, w.epoch)
		if err != nil {
			return err
		}
		if n == 0 {
			return fmt.Errorf("%w: epoch %d is over", ErrFenced, w.epoch)
		}
	}
	return nil
}

// settleTotals writes what the ops of one transaction have spent and learnt, each
// grant and each run once.
func (w *writer) settleTotals(ctx context.Context) error {
	for grant, used := range w.spends {
		if _, err := w.exec(ctx, w.spent, string(grant), used.Actions, used.Output, used.Tokens, int64(used.Wall)); err != nil {
			return err
		}
	}
	for _, f := range w.facts {
		if _, err := w.exec(ctx, w.fact, string(f.Run), f.Denials, f.Tainted); err != nil {
			return err
		}
	}
	return nil
}

func (w *writer) exec(ctx context.Context, s *sql.Stmt, args ...any) (int64, error) {
	res, err := s.ExecContext(ctx, args...)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	n, err := res.RowsAffected()
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return n, nil
}
