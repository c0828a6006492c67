package store_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/numinance/numinance/internal/host/store"
)

func TestOpenIsDurableAndPrivate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "odd name?#%.db")
	db, err := store.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := store.Migrate(t.Context(), db, "a", []string{`CREATE TABLE a (x INTEGER) STRICT`}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{path, path + "-wal", path + "-shm"} {
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		if got := info.Mode().Perm(); got != 0o600 {
			t.Errorf("%s has mode %o, want 600", name, got)
		}
	}
}

func TestTwoHandlesShareOneFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	first, err := store.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	second, err := store.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if err := store.Migrate(t.Context(), first, "a", []string{`CREATE TABLE a (x INTEGER) STRICT; INSERT INTO a VALUES (7)`}); err != nil {
		t.Fatal(err)
	}
	var x int
	if err := second.QueryRow(`SELECT x FROM a`).Scan(&x); err != nil || x != 7 {
		t.Fatalf("second handle reads %d, %v; want 7", x, err)
	}
}

func TestMigrate(t *testing.T) {
	db, err := store.Open(t.Context(), filepath.Join(t.TempDir(), "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	one := `CREATE TABLE a (x INTEGER) STRICT; INSERT INTO a VALUES (1)`
	two := `ALTER TABLE a ADD COLUMN y INTEGER; INSERT INTO a VALUES (2, 2)`
	for _, steps := range [][]string{{one}, {one}, {one, two}, {one, two}} {
		if err := store.Migrate(t.Context(), db, "a", steps); err != nil {
			t.Fatal(err)
		}
	}
	var rows int
	if err := db.QueryRow(`SELECT count(*) FROM a`).Scan(&rows); err != nil || rows != 2 {
		t.Fatalf("%d rows, %v: each step must run once", rows, err)
	}
	if err := store.Migrate(t.Context(), db, "a", []string{one}); !errors.Is(err, store.ErrNewer) {
		t.Errorf("older binary on a newer file: %v, want ErrNewer", err)
	}
	if err := store.Migrate(t.Context(), db, "b", []string{`CREATE TABLE b (x INTEGER) STRICT`, `nonsense`}); err == nil {
		t.Fatal("broken script accepted")
	}
	if err := db.QueryRow(`SELECT count(*) FROM b`).Scan(&rows); err == nil {
		t.Error("a failed migration left its table behind")
	}
}
