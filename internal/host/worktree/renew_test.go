package worktree_test

import (
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/numinance/numinance/internal/host/worktree"
)

func commit(t *testing.T, dir, name string) string {
	t.Helper()
	for _, args := range [][]string{
		{"-C", dir, "-c", "user.name=t", "-c", "user.email=t@t.invalid", "commit", "-q", "--allow-empty", "-m", name},
	} {
		if out, err := exec.Command("git", args...).CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
	}
	out, err := exec.Command("git", "-C", dir, "rev-parse", "HEAD").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

func TestRenewFollowsTheSourceAndKeepsMerges(t *testing.T) {
	ctx := context.Background()
	src, dest := t.TempDir(), filepath.Join(t.TempDir(), "m.git")
	if out, err := exec.Command("git", "init", "-q", "-b", "main", src).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	first := commit(t, src, "one")
	if got, err := worktree.Import(ctx, src, dest, ""); err != nil || got.Revision != first {
		t.Fatalf("Import = %v, %v", got, err)
	}
	second := commit(t, src, "two")
	if got, err := worktree.Renew(ctx, src, dest, ""); err != nil || got.Revision != second {
		t.Fatalf("Renew of a source ahead = %v, %v; want %s", got, err, second)
	}
	// A merge in the mirror.
	tree, _ := exec.Command("git", "-C", dest, "rev-parse", second+"^{tree}").Output()
	out, err := exec.Command("git", "-C", dest, "-c", "user.name=t", "-c", "user.email=t@t.invalid", "commit-tree", "-p", second, "-m", "merge", strings.TrimSpace(string(tree))).Output()
	if err != nil {
		t.Fatal(err)
	}
	merged := strings.TrimSpace(string(out))
	if err := exec.Command("git", "-C", dest, "update-ref", "refs/heads/main", merged).Run(); err != nil {
		t.Fatal(err)
	}
	if got, err := worktree.Renew(ctx, src, dest, ""); err != nil || got.Revision != merged {
		t.Fatalf("Renew of a mirror ahead = %v, %v; want %s", got, err, merged)
	}
	commit(t, src, "three")
	if _, err := worktree.Renew(ctx, src, dest, ""); !errors.Is(err, worktree.ErrDiverged) {
		t.Fatalf("both ahead: got %v, want ErrDiverged", err)
	}
}

func TestSeedIsDeterministic(t *testing.T) {
	when := time.Unix(1_700_000_000, 0)
	files := map[string][]byte{"a.txt": []byte("x\n"), "d/b.txt": []byte("no newline")}
	var got [2]string
	for i := range got {
		rev, err := worktree.Seed(context.Background(), filepath.Join(t.TempDir(), "r.git"), "main", files, when)
		if err != nil {
			t.Fatal(err)
		}
		got[i] = rev
	}
	if got[0] != got[1] {
		t.Errorf("two seeds of one input: %s and %s", got[0], got[1])
	}
	if _, err := worktree.Seed(context.Background(), filepath.Join(t.TempDir(), "r.git"), "main", map[string][]byte{"../x": nil}, when); err == nil {
		t.Error("a path out of the tree was committed")
	}
}
