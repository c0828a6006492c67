package orchestration

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/host/store"
)

var readModelSteps = []string{`CREATE TABLE change_view (
	id      TEXT PRIMARY KEY,
	status  TEXT NOT NULL,
	seq     INTEGER NOT NULL,
	started INTEGER NOT NULL, -- Unix nanoseconds
	updated INTEGER NOT NULL,
	state   TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX change_view_started ON change_view (started);`}

// ReadModel answers what Changes there are and where they stand. It is a
// projection: Rebuild makes it anew from the recorded events.
type ReadModel struct{ db *sql.DB }

// OpenReadModel prepares the tables in the state database.
func OpenReadModel(ctx context.Context, db *sql.DB) (*ReadModel, error) {
	if err := store.Migrate(ctx, db, "change-view", readModelSteps); err != nil {
		return nil, fmt.Errorf("open read model: %w", err)
	}
	return &ReadModel{db: db}, nil
}

// Get returns the state of one Change, or ErrUnknownChange.
func (m *ReadModel) Get(ctx context.Context, id identity.ChangeID) (change.State, error) {
	var raw string
	err := m.db.QueryRowContext(ctx, `SELECT state FROM change_view WHERE id = ?`, string(id)).Scan(&raw)
	if errors.Is(err, sql.ErrNoRows) {
		return change.State{}, fmt.Errorf("%s: %w", id, ErrUnknownChange)
	}
	if err != nil {
		return change.State{}, fmt.Errorf("read change %s: %w", id, err)
	}
	return decode(raw)
}

// List returns all Changes, newest first, at most limit.
func (m *ReadModel) List(ctx context.Context, limit int) (out []change.State, err error) {
	rows, err := m.db.QueryContext(ctx, `SELECT state FROM change_view ORDER BY started DESC, id LIMIT ?`, limit)
	if err != nil {
		return nil, fmt.Errorf("list changes: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var raw string
		if err := rows.Scan(&raw); err != nil {
			return nil, fmt.Errorf("list changes: %w", err)
		}
		s, err := decode(raw)
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("list changes: %w", err)
	}
	return out, nil
}

func decode(raw string) (change.State, error) {
	var s change.State
	if err := json.Unmarshal([]byte(raw), &s); err != nil {
		return s, fmt.Errorf("read change state: %w", err)
	}
	return s, nil
}

type execer interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}

// put writes s unless a newer state of the same Change is there.
func (m *ReadModel) put(ctx context.Context, db execer, s change.State) error {
	raw, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("project change %s: %w", s.ID, err)
	}
	_, err = db.ExecContext(ctx, `INSERT INTO change_view (id, status, seq, started, updated, state) VALUES (?, ?, ?, ?, ?, ?)
		ON CONFLICT (id) DO UPDATE SET status = excluded.status, seq = excluded.seq, updated = excluded.updated, state = excluded.state
		WHERE excluded.seq >= change_view.seq`,
		string(s.ID), string(s.Status), s.Seq, s.Started.UnixNano(), s.Updated.UnixNano(), string(raw))
	if err != nil {
		return fmt.Errorf("project change %s: %w", s.ID, err)
	}
	return nil
}

// Rebuild empties the projection and fills it from the recorded events. The
// rows are the same bytes as before.
func (m *ReadModel) Rebuild(ctx context.Context, r Recorder) error {
	states := map[identity.ChangeID]change.State{}
	err := r.Replay(ctx, func(e Entry) error {
		if e.Ask != nil {
			states[e.Change] = change.Propose(e.Change, *e.Ask, e.At)
			return nil
		}
		s, ok := states[e.Change]
		if !ok || e.Event == nil || e.Seq != s.Seq+1 {
			return fmt.Errorf("rebuild read model: event %d of %s has no place", e.Seq, e.Change)
		}
		s, err := change.Apply(s, *e.Event)
		if err != nil {
			return fmt.Errorf("rebuild read model: event %d of %s: %w", e.Seq, e.Change, err)
		}
		states[e.Change] = s
		return nil
	})
	if err != nil {
		return err
	}
	tx, err := m.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("rebuild read model: %w", err)
	}
	defer tx.Rollback() //nolint:errcheck // after Commit it has nothing to do
	if _, err := tx.ExecContext(ctx, `DELETE FROM change_view`); err != nil {
		return fmt.Errorf("rebuild read model: %w", err)
	}
	for _, s := range states {
		if err := m.put(ctx, tx, s); err != nil {
			return err
		}
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("rebuild read model: %w", err)
	}
	return nil
}

// stamp is t as it reads back from JSON: without the monotonic clock, in UTC.
func stamp(t time.Time) time.Time { return t.UTC().Round(0) }
