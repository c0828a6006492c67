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

// State is how far an action has come. The zero value is no state.
type State string

// The states of a ledger row.
const (
	Started  State = "started"
	Finished State = "finished"
)

// Amount is what an action may use or has used of a grant's budget.
type Amount struct {
	Actions, Output, Tokens int64 // calls, answer bytes, model tokens
	Wall                    time.Duration
}

// Add returns the sum of two amounts.
func (a Amount) Add(b Amount) Amount {
	return Amount{a.Actions + b.Actions, a.Output + b.Output, a.Tokens + b.Tokens, a.Wall + b.Wall}
}

// Sub returns a less b.
func (a Amount) Sub(b Amount) Amount {
	return Amount{a.Actions - b.Actions, a.Output - b.Output, a.Tokens - b.Tokens, a.Wall - b.Wall}
}

// Start opens a ledger row. It is written with the decision, before the effect.
type Start struct {
	Key      string
	Change   identity.ChangeID
	Run      identity.RunID
	Grant    identity.GrantID
	Verb     string
	Action   identity.ActionID
	Decision identity.DecisionID
	Request  digest.Digest
	// Reserve is held against the grant until the row is finished.
	Reserve Amount
}

// Finish closes a ledger row. It is written with the result.
type Finish struct {
	Key    string
	Grant  identity.GrantID
	Status string
	// Result is the digest of the answer, empty if there is none.
	Result digest.Digest
	// Answers are kept by their digests, at most MaxAnswer bytes each: the
	// answer that Result names, if it is small, and what belongs to it.
	Answers [][]byte
	// Outcome is what a replay needs beside the answer; canonical JSON.
	Outcome []byte
	// Used replaces the reservation in the grant's account.
	Used Amount
	// Tainted names the run that has now read untrusted content, if it has.
	Tainted identity.RunID
}

// RunFact changes what is known of a run: more denials, or that it has read
// untrusted content, which stays true.
type RunFact struct {
	Run     identity.RunID
	Denials int64
	Tainted bool
}

// Row is one action in the ledger.
type Row struct {
	Key                 string
	Change              identity.ChangeID
	Run                 identity.RunID
	Grant               identity.GrantID
	Verb                string
	Action              identity.ActionID
	Decision            identity.DecisionID
	Request             digest.Digest
	State               State
	Status              string
	Result              digest.Digest
	Outcome             []byte
	StartSeq, FinishSeq int64
	// Reserve is what the row holds against its grant until it is finished.
	Reserve Amount
}

// Start writes the entries (the decision) and the started row in one commit
// and returns when both are on disk. A key that is known already is ErrExists
// and nothing is written.
func (j *Journal) Start(ctx context.Context, s Start, entries ...Entry) (int64, error) {
	j.mu.Lock()
	j.keys.started(s.Run, s.Key)
	j.mu.Unlock()
	return j.write(ctx, &Write{Start: &s, Entries: entries})
}

// Finish writes the entries (the result), the finished row, the answer and the
// settlement in one commit and returns when all are on disk. A key that is not
// in state started is ErrNotStarted and nothing is written.
func (j *Journal) Finish(ctx context.Context, f Finish, entries ...Entry) (int64, error) {
	w := &Write{Finish: &f, Entries: entries}
	if f.Tainted != "" {
		w.Run = &RunFact{Run: f.Tainted, Tainted: true}
	}
	return j.write(ctx, w)
}

// Spend writes the entries and charges the grant in one commit, for an action
// that has no row of its own, such as a tool intent.
func (j *Journal) Spend(ctx context.Context, grant identity.GrantID, used Amount, entries ...Entry) (int64, error) {
	return j.write(ctx, &Write{Spend: &Spend{Grant: grant, Used: used}, Entries: entries})
}

// Spend charges a grant.
type Spend struct {
	Grant identity.GrantID
	Used  Amount
}

// Taint notes that a run has been given untrusted content, which stays true.
func (j *Journal) Taint(ctx context.Context, run identity.RunID) error {
	_, err := j.write(ctx, &Write{Run: &RunFact{Run: run, Tainted: true}})
	return err
}

// RunFacts returns what is known of a run: its denials, whether it has read
// untrusted content, and the verbs it has started, in alphabetical order.
func (j *Journal) RunFacts(ctx context.Context, run identity.RunID) (f RunFact, verbs []string, err error) {
	f.Run = run
	err = j.db.QueryRowContext(ctx, `SELECT denials, tainted FROM run_fact WHERE run = ?`, string(run)).Scan(&f.Denials, &f.Tainted)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return f, nil, fmt.Errorf("read the facts of run %s: %w", run, err)
	}
	rows, err := j.db.QueryContext(ctx, `SELECT DISTINCT verb FROM ledger WHERE run = ? ORDER BY verb`, string(run))
	if err != nil {
		return f, nil, fmt.Errorf("read the facts of run %s: %w", run, err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		var verb string
		if err := rows.Scan(&verb); err != nil {
			return f, nil, fmt.Errorf("read the facts of run %s: %w", run, err)
		}
		verbs = append(verbs, verb)
	}
	return f, verbs, rows.Err()
}

// StartLazy is Start that does not wait for the disk: the entries are there
// within 50 ms and before any write queued later. It is for SYNC READs without a
// credential handle only. Lookup sees the row at once. It refuses with
// ErrUnavailable while the journal is not healthy.
func (j *Journal) StartLazy(ctx context.Context, s Start, entries ...Entry) error {
	if !j.Healthy() {
		return fmt.Errorf("start %s: %w", s.Verb, ErrUnavailable)
	}
	j.mu.Lock()
	switch _, exists := j.rows[s.Key]; {
	case exists:
		j.mu.Unlock()
		return fmt.Errorf("start %s: %w", s.Verb, ErrExists)
	case len(j.rows) >= maxPending:
		j.mu.Unlock()
		return fmt.Errorf("start %s: %w: %d actions wait for the disk", s.Verb, ErrUnavailable, maxPending)
	}
	j.rows[s.Key] = rowOf(s)
	j.keys.started(s.Run, s.Key)
	j.mu.Unlock()
	if err := j.queue(ctx, &op{write: &Write{Start: &s, Entries: entries}, lazy: true}); err != nil {
		j.mu.Lock()
		delete(j.rows, s.Key)
		j.mu.Unlock()
		return fmt.Errorf("start %s: %w", s.Verb, err)
	}
	return nil
}

// FinishLazy is Finish for a row of StartLazy. Lookup and Blob see the result
// at once.
func (j *Journal) FinishLazy(ctx context.Context, f Finish, entries ...Entry) error {
	w := &Write{Finish: &f, Entries: entries}
	if f.Tainted != "" {
		w.Run = &RunFact{Run: f.Tainted, Tainted: true}
	}
	if err := j.prepare(w); err != nil {
		return err
	}
	j.mu.Lock()
	row, ok := j.rows[f.Key]
	if !ok || row.State != Started {
		j.mu.Unlock()
		return fmt.Errorf("finish: %w", ErrNotStarted)
	}
	row.State, row.Status, row.Result, row.Outcome, row.Reserve = Finished, f.Status, f.Result, f.Outcome, Amount{}
	j.rows[f.Key] = row
	for _, b := range f.Answers {
		j.answers[digest.Of(b)] = b
	}
	j.mu.Unlock()
	if err := j.queue(ctx, &op{write: w, lazy: true}); err != nil {
		return fmt.Errorf("finish: %w", err)
	}
	return nil
}

// settled drops what lazy writes kept in memory once the disk holds it. The
// caller holds mu.
func (j *Journal) settled(w *Write) {
	if w.Finish == nil {
		return
	}
	delete(j.rows, w.Finish.Key)
	for _, b := range w.Finish.Answers {
		delete(j.answers, digest.Of(b))
	}
}

func rowOf(s Start) Row {
	return Row{
		Key: s.Key, Change: s.Change, Run: s.Run, Grant: s.Grant, Verb: s.Verb, Action: s.Action,
		Decision: s.Decision, Request: s.Request, State: Started, Reserve: s.Reserve,
	}
}

const rowColumns = `key, change, run, grant_id, verb, action, decision, request, state, status, result, outcome, start_seq, finish_seq,
	r_actions, r_output, r_tokens, r_wall`

type scanner interface{ Scan(...any) error }

func scanRow(s scanner) (r Row, err error) {
	err = s.Scan(&r.Key, &r.Change, &r.Run, &r.Grant, &r.Verb, &r.Action, &r.Decision, &r.Request,
		&r.State, &r.Status, &r.Result, &r.Outcome, &r.StartSeq, &r.FinishSeq,
		&r.Reserve.Actions, &r.Reserve.Output, &r.Reserve.Tokens, &r.Reserve.Wall)
	return r, err
}

// Lookup returns the row of an idempotency key, or false if it never started.
func (j *Journal) Lookup(ctx context.Context, key string) (Row, bool, error) {
	j.mu.Lock()
	row, ok := j.rows[key]
	j.mu.Unlock()
	if ok {
		return row, true, nil
	}
	row, err := scanRow(j.row.QueryRowContext(ctx, key))
	if errors.Is(err, sql.ErrNoRows) {
		return Row{}, false, nil
	}
	if err != nil {
		return Row{}, false, fmt.Errorf("look up an idempotency key: %w", err)
	}
	return row, true, nil
}

// LookupOf is Lookup for a key that only this run can have started. That it has
// not is known without the disk once the run's keys were read: nobody else
// writes the ledger while this process holds the lease.
func (j *Journal) LookupOf(ctx context.Context, run identity.RunID, key string) (Row, bool, error) {
	j.mu.Lock()
	absent, load := j.keys.absent(run, key)
	j.mu.Unlock()
	if absent && !j.fenced.Load() {
		return Row{}, false, nil
	}
	if load {
		if err := j.loadKeys(ctx, run); err != nil {
			return Row{}, false, err
		}
	}
	return j.Lookup(ctx, key)
}

func (j *Journal) loadKeys(ctx context.Context, run identity.RunID) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("read the keys of run %s: %w", run, err)
		}
	}()
	rows, err := j.db.QueryContext(ctx, `SELECT key FROM ledger WHERE run = ? LIMIT ?`, string(run), maxKeys)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	var all []string
	for rows.Next() {
		var key string
		if err := rows.Scan(&key); err != nil {
			return err
		}
		all = append(all, key)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, key := range all {
		j.keys.started(run, key)
	}
	j.keys.loaded(run)
	return nil
}

// InDoubt returns the rows of a Change that started and did not finish.
func (j *Journal) InDoubt(ctx context.Context, change identity.ChangeID) (out []Row, err error) {
	rows, err := j.db.QueryContext(ctx,
		`SELECT `+rowColumns+` FROM ledger WHERE state = 'started' AND change = ? ORDER BY start_seq`, string(change))
	if err != nil {
		return nil, fmt.Errorf("list actions in doubt: %w", err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		row, err := scanRow(rows)
		if err != nil {
			return nil, fmt.Errorf("list actions in doubt: %w", err)
		}
		out = append(out, row)
	}
	return out, rows.Err()
}

// Spent returns what a grant has used plus what its unfinished actions reserve.
// Lazy writes that wait for the disk are not in it.
func (j *Journal) Spent(ctx context.Context, grant identity.GrantID) (Amount, error) {
	var a Amount
	err := j.db.QueryRowContext(ctx, `SELECT coalesce(sum(a), 0), coalesce(sum(o), 0), coalesce(sum(t), 0), coalesce(sum(w), 0) FROM (
		SELECT actions AS a, output AS o, tokens AS t, wall AS w FROM spent WHERE grant_id = ?1
		UNION ALL
		SELECT r_actions, r_output, r_tokens, r_wall FROM ledger WHERE grant_id = ?1 AND state = 'started')`,
		string(grant)).Scan(&a.Actions, &a.Output, &a.Tokens, &a.Wall)
	if err != nil {
		return Amount{}, fmt.Errorf("read the account of grant %s: %w", grant, err)
	}
	return a, nil
}

// Blob returns the answer with digest d if the journal keeps it, for the blob
// store to read through.
func (j *Journal) Blob(ctx context.Context, d digest.Digest) ([]byte, bool, error) {
	j.mu.Lock()
	b, ok := j.answers[d]
	j.mu.Unlock()
	if ok {
		return b, true, nil
	}
	err := j.db.QueryRowContext(ctx, `SELECT body FROM answer WHERE digest = ?`, string(d)).Scan(&b)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("read an answer: %w", err)
	}
	return b, true, nil
}

// Revocation names a run, a Change or a grant whose authority has ended.
type Revocation struct{ Scope, ID string }

// Scopes of a Revocation.
const (
	ScopeRun    = "run"
	ScopeChange = "change"
	ScopeGrant  = "grant"
)

// Revoke ends an authority for good: from its call on, Revoked says so, even
// if the disk then fails. It returns when the revocation and the entries that
// tell of it are on disk.
func (j *Journal) Revoke(ctx context.Context, r Revocation, entries ...Entry) error {
	switch r.Scope {
	case ScopeRun, ScopeChange, ScopeGrant:
	default:
		return fmt.Errorf("revoke %q: scope %q is none of run, change, grant", r.ID, r.Scope)
	}
	if !identity.ValidID(r.ID) {
		return fmt.Errorf("revoke %s %q: not an id", r.Scope, r.ID)
	}
	j.mu.Lock()
	j.revoked[r] = true
	j.mu.Unlock()
	_, err := j.write(ctx, &Write{Revoke: &r, Entries: entries})
	return err
}

// Revoked reports whether one of the three, in this order, has been revoked.
func (j *Journal) Revoked(run identity.RunID, change identity.ChangeID, grant identity.GrantID) (Revocation, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, r := range []Revocation{{ScopeRun, string(run)}, {ScopeChange, string(change)}, {ScopeGrant, string(grant)}} {
		if j.revoked[r] {
			return r, true
		}
	}
	return Revocation{}, false
}

func (j *Journal) loadRevoked(ctx context.Context) (err error) {
	rows, err := j.db.QueryContext(ctx, `SELECT scope, id FROM revoked`)
	if err != nil {
		return fmt.Errorf("load revocations: %w", err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		var r Revocation
		if err := rows.Scan(&r.Scope, &r.ID); err != nil {
			return fmt.Errorf("load revocations: %w", err)
		}
		j.revoked[r] = true
	}
	return rows.Err()
}
