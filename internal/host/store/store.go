// Package store opens the runtime's one SQLite database with the settings on
// which durability rests, and brings each component's tables to their newest
// form. The journal, the read model and the workflow engine call it, each with
// a handle of its own on the same file.
package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	_ "modernc.org/sqlite" // the pure-Go driver named "sqlite"
)

// ErrNewer is returned when the file holds tables of a later release: an older
// binary must not write to them.
var ErrNewer = errors.New("the state database was written by a newer release")

// Open opens (and creates, mode 0600) the database file at path and returns a
// handle for one component. Every connection has WAL with synchronous=FULL, so
// that a commit that returned survives a power cut, a 10 s busy timeout,
// foreign keys, and transactions that take the write lock when they begin. The
// caller closes the handle.
func Open(ctx context.Context, path string) (*sql.DB, error) {
	if err := create(path); err != nil {
		return nil, err
	}
	db, err := sql.Open("sqlite", dsn(path))
	if err != nil {
		return nil, fmt.Errorf("open state database %s: %w", path, err)
	}
	if err := check(ctx, db); err != nil {
		return nil, errors.Join(fmt.Errorf("open state database %s: %w", path, err), db.Close())
	}
	return db, nil
}

// create makes an empty file that only its owner can read before SQLite, which
// would follow the umask, sees the path; SQLite gives its -wal and -shm files
// the same mode.
func create(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("create the state directory: %w", err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("create state database: %w", err)
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("create state database: %w", err)
	}
	return nil
}

func dsn(path string) string {
	q := url.Values{}
	q.Set("_txlock", "immediate")
	// busy_timeout comes first: changing the journal mode takes a lock itself.
	q.Add("_pragma", "busy_timeout(10000)")
	q.Add("_pragma", "journal_mode(WAL)")
	q.Add("_pragma", "synchronous(FULL)")
	q.Add("_pragma", "foreign_keys(1)")
	u := url.URL{Scheme: "file", OmitHost: true, Path: path, RawQuery: q.Encode()}
	return u.String()
}

// check reads the settings back: a file system on which WAL cannot work keeps
// another mode without an error, and that must not go unnoticed.
func check(ctx context.Context, db *sql.DB) error {
	for _, want := range []struct{ pragma, value string }{
		{"journal_mode", "wal"},
		{"synchronous", "2"},
		{"foreign_keys", "1"},
	} {
		var got string
		if err := db.QueryRowContext(ctx, "PRAGMA "+want.pragma).Scan(&got); err != nil {
			return fmt.Errorf("read pragma %s: %w", want.pragma, err)
		}
		if got != want.value {
			return fmt.Errorf("pragma %s is %s, want %s: put the state directory on a local file system", want.pragma, got, want.value)
		}
	}
	return nil
}

// Migrate brings the tables of one component to the newest form. steps are SQL
// scripts in order; each runs once, in one transaction with the note that it
// ran. A file in which the component is already further than len(steps) is
// refused with ErrNewer.
func Migrate(ctx context.Context, db *sql.DB, component string, steps []string) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("migrate %s: %w", component, err)
	}
	defer tx.Rollback() //nolint:errcheck // after Commit it has nothing to do
	if _, err := tx.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS schema_step (
		component TEXT PRIMARY KEY, step INTEGER NOT NULL) STRICT, WITHOUT ROWID`); err != nil {
		return fmt.Errorf("migrate %s: %w", component, err)
	}
	var done int
	err = tx.QueryRowContext(ctx, `SELECT step FROM schema_step WHERE component = ?`, component).Scan(&done)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("migrate %s: %w", component, err)
	}
	if done > len(steps) {
		return fmt.Errorf("%w: %s is at step %d, this binary knows %d", ErrNewer, component, done, len(steps))
	}
	for i, script := range steps[done:] {
		if _, err := tx.ExecContext(ctx, script); err != nil {
			return fmt.Errorf("migrate %s to step %d: %w", component, done+i+1, err)
		}
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO schema_step (component, step) VALUES (?, ?)
		ON CONFLICT (component) DO UPDATE SET step = excluded.step`, component, len(steps)); err != nil {
		return fmt.Errorf("migrate %s: %w", component, err)
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("migrate %s: %w", component, err)
	}
	return nil
}
