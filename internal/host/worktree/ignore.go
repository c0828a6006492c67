package worktree

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// ignoreRules answers which untracked paths the rules of a base revision
// ignore. It is one git process over an empty repository and a directory that
// holds the base's .gitignore files and nothing else.
type ignoreRules struct {
	in     io.WriteCloser
	out    *bufio.Reader
	wait   func() error
	stderr *capped
	cancel context.CancelFunc
	dir    string
}

func (s *Store) newIgnoreRules(ctx context.Context, base []Entry) (*ignoreRules, error) {
	dir, err := os.MkdirTemp("", "numinance-ignore-*")
	if err != nil {
		return nil, fmt.Errorf("lay out ignore rules: %w", err)
	}
	rules := &ignoreRules{dir: dir, cancel: func() {}}
	if err := rules.start(ctx, s, base); err != nil {
		rules.close()
		return nil, fmt.Errorf("lay out ignore rules: %w", err)
	}
	return rules, nil
}

func (r *ignoreRules) start(ctx context.Context, s *Store, base []Entry) error {
	tree, repository := filepath.Join(r.dir, "tree"), filepath.Join(r.dir, "git")
	if err := os.Mkdir(tree, 0o700); err != nil {
		return err
	}
	if err := initBare(ctx, repository, "sha1", "main"); err != nil {
		return err
	}
	if err := s.writeIgnoreFiles(ctx, tree, base); err != nil {
		return err
	}
	ctx, r.cancel = context.WithCancel(ctx)
	git := command{gitDir: repository, env: []string{"GIT_WORK_TREE=" + tree}, magic: true}
	cmd, stderr, err := git.prepare(ctx, []string{"-C", tree, "-c", "core.bare=false", "check-ignore", "--no-index", "--stdin", "-z", "--verbose", "--non-matching"})
	if err != nil {
		return err
	}
	if r.in, err = cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	r.out = bufio.NewReader(out)
	if err := cmd.Start(); err != nil {
		return err
	}
	r.wait, r.stderr = cmd.Wait, stderr
	return nil
}

func (s *Store) writeIgnoreFiles(ctx context.Context, tree string, base []Entry) error {
	const maxRules = 1 << 20
	root, err := os.OpenRoot(tree)
	if err != nil {
		return err
	}
	defer root.Close()
	ctx, cancel := context.WithCancel(ctx)
	blobs, err := s.newBlobReader(ctx)
	if err != nil {
		cancel()
		return err
	}
	defer func() {
		cancel()
		blobs.close()
	}()
	for _, e := range base {
		if path.Base(e.Path) != ".gitignore" || e.Mode != ModeFile && e.Mode != ModeExecutable {
			continue
		}
		if e.Size > maxRules {
			return fmt.Errorf("%q has %d bytes, at most %d", e.Path, e.Size, maxRules)
		}
		content, err := blobs.open(e.ID, e.Size)
		if err != nil {
			return err
		}
		text, err := io.ReadAll(content)
		if err != nil {
			return err
		}
		if err := root.MkdirAll(path.Dir(e.Path), 0o700); err != nil {
			return err
		}
		if err := root.WriteFile(e.Path, text, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// ignores reports whether the base's rules ignore the untracked path.
func (r *ignoreRules) ignores(name string) (bool, error) {
	if _, err := io.WriteString(r.in, "./"+name+"\x00"); err != nil {
		return false, fmt.Errorf("ask for the ignore rules of %q: %w", name, err)
	}
	// Source, line, pattern, path; the first three are empty without a match.
	var fields [4]string
	for i := range fields {
		text, err := r.out.ReadString(0)
		if err != nil {
			return false, fmt.Errorf("read the ignore rules of %q: %w: %s", name, err, r.said())
		}
		fields[i] = strings.TrimSuffix(text, "\x00")
	}
	if fields[3] != "./"+name {
		return false, fmt.Errorf("read the ignore rules of %q: git answers for %q", name, fields[3])
	}
	return fields[2] != "" && !strings.HasPrefix(fields[2], "!"), nil
}

// said ends the process and returns what it said.
func (r *ignoreRules) said() string {
	r.cancel()
	_ = r.wait()
	r.wait = nil
	return strings.TrimSpace(r.stderr.String())
}

func (r *ignoreRules) close() {
	r.cancel()
	if r.wait != nil {
		r.in.Close()
		_ = r.wait()
	}
	os.RemoveAll(r.dir)
}
