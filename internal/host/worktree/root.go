package worktree

import (
	"context"
	"fmt"
	"strings"
)

// RootFiles returns the names of the entries at the root of a branch of a bare
// repository.
func RootFiles(ctx context.Context, dir, branch string) (map[string]bool, error) {
	raw, err := command{gitDir: dir}.output(ctx, nil, "ls-tree", "-z", "--name-only", "refs/heads/"+branch)
	if err != nil {
		return nil, fmt.Errorf("list the root of branch %s: %w", branch, err)
	}
	out := map[string]bool{}
	for name := range strings.SplitSeq(string(raw), "\x00") {
		if name != "" {
			out[name] = true
		}
	}
	return out, nil
}

// RootFile returns a file at the root of a branch of a bare repository, at most
// limit bytes of it.
func RootFile(ctx context.Context, dir, branch, name string, limit int) ([]byte, error) {
	raw, err := command{gitDir: dir}.output(ctx, nil, "cat-file", "blob", "refs/heads/"+branch+":"+name)
	if err != nil {
		return nil, fmt.Errorf("read %s of branch %s: %w", name, branch, err)
	}
	if len(raw) > limit {
		return nil, fmt.Errorf("%s is larger than %d bytes", name, limit)
	}
	return raw, nil
}
