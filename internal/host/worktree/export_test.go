package worktree

import (
	"bytes"
	"path"
	"strings"
	"testing"
)

// CheckSnapshot reads raw as a snapshot and fails if any entry that is let
// through could lie outside of the work tree.
func CheckSnapshot(t *testing.T, raw []byte) {
	s := newSnapshot(bytes.NewReader(raw), limits{entries: 100, fileBytes: 1 << 16, bytes: 1 << 20})
	seen := map[string]bool{}
	for {
		it, err := s.next()
		if err != nil {
			return
		}
		if it.path == "" || path.Clean("/"+it.path) != "/"+it.path || strings.ContainsRune(it.path, 0) || seen[it.path] {
			t.Fatalf("entry %q was let through", it.path)
		}
		seen[it.path] = true
	}
}
