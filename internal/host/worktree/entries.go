package worktree

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"strconv"
	"strings"
)

// Mode is what an entry of a work tree is.
type Mode uint8

// The modes; the zero value is none.
const (
	ModeNone Mode = iota
	ModeFile
	ModeExecutable
	ModeSymlink
	ModeSubmodule
)

func (m Mode) String() string {
	switch m {
	case ModeFile:
		return "file"
	case ModeExecutable:
		return "executable"
	case ModeSymlink:
		return "symlink"
	case ModeSubmodule:
		return "submodule"
	}
	return "none"
}

func modeOf(octal string) (Mode, error) {
	switch octal {
	case "100644", "100664", "100640", "100600":
		return ModeFile, nil
	case "100755", "100775":
		return ModeExecutable, nil
	case "120000":
		return ModeSymlink, nil
	case "160000":
		return ModeSubmodule, nil
	}
	return ModeNone, fmt.Errorf("mode %s is none that a work tree can hold", octal)
}

func (m Mode) octal() string {
	switch m {
	case ModeExecutable:
		return "100755"
	case ModeSymlink:
		return "120000"
	case ModeSubmodule:
		return "160000"
	}
	return "100644"
}

// Entry is one file, link or submodule of a revision.
type Entry struct {
	Path string // from the root, its exact bytes, which need not be UTF-8
	Mode Mode
	ID   string // the Git object
	Size int64  // bytes of a file or of a link's target; 0 for a submodule

	blobs *blobReader
}

// Open returns the content of a file, or the target of a link. It is valid
// until the next step of the iteration that gave the entry.
func (e Entry) Open() (io.Reader, error) {
	if e.Mode == ModeSubmodule || e.blobs == nil {
		return nil, fmt.Errorf("open %q: a %s has no content", e.Path, e.Mode)
	}
	return e.blobs.open(e.ID, e.Size)
}

// Entries iterates over everything of a revision that a work tree holds, in
// Git's order; directories are implied. The iteration ends at the first error.
func (s *Store) Entries(ctx context.Context, revision string) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		list, err := s.list(ctx, revision)
		if err != nil {
			yield(Entry{}, err)
			return
		}
		ctx, cancel := context.WithCancel(ctx)
		blobs, err := s.newBlobReader(ctx)
		if err != nil {
			cancel()
			yield(Entry{}, err)
			return
		}
		defer func() {
			cancel()
			blobs.close()
		}()
		for _, e := range list {
			e.blobs = blobs
			if !yield(e, nil) {
				return
			}
		}
	}
}

func (s *Store) list(ctx context.Context, revision string) ([]Entry, error) {
	if err := s.commit(ctx, revision); err != nil {
		return nil, err
	}
	out, err := s.git.output(ctx, nil, "ls-tree", "-r", "-z", "--long", "--full-tree", revision)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", revision, err)
	}
	return parseTree(out)
}

func parseTree(out []byte) ([]Entry, error) {
	var entries []Entry
	for len(out) > 0 {
		line, rest, ok := bytes.Cut(out, []byte{0})
		head, path, tab := bytes.Cut(line, []byte{'\t'})
		fields := strings.Fields(string(head))
		if !ok || !tab || len(fields) != 4 {
			return nil, fmt.Errorf("tree listing is malformed at %q", line)
		}
		mode, err := modeOf(fields[0])
		if err != nil {
			return nil, fmt.Errorf("entry %q: %w", path, err)
		}
		e := Entry{Path: string(path), Mode: mode, ID: fields[2]}
		if mode != ModeSubmodule {
			if e.Size, err = strconv.ParseInt(fields[3], 10, 64); err != nil {
				return nil, fmt.Errorf("entry %q has no size: its object is missing", path)
			}
		}
		entries = append(entries, e)
		out = rest
	}
	return entries, nil
}

// blobReader is one git cat-file process that serves blobs in turn.
type blobReader struct {
	in      io.WriteCloser
	out     *bufio.Reader
	pending io.Reader // rest of the last blob and its newline
	wait    func() error
}

func (s *Store) newBlobReader(ctx context.Context) (*blobReader, error) {
	cmd, _, err := s.git.prepare(ctx, []string{"cat-file", "--batch"})
	if err != nil {
		return nil, err
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start git cat-file: %w", err)
	}
	return &blobReader{in: in, out: bufio.NewReaderSize(out, 64<<10), wait: cmd.Wait}, nil
}

func (b *blobReader) open(id string, size int64) (io.Reader, error) {
	if b.pending != nil {
		if _, err := io.Copy(io.Discard, b.pending); err != nil {
			return nil, fmt.Errorf("read past the last object: %w", err)
		}
	}
	if _, err := io.WriteString(b.in, id+"\n"); err != nil {
		return nil, fmt.Errorf("ask for object %s: %w", id, err)
	}
	head, err := b.out.ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("read object %s: %w", id, err)
	}
	if want := fmt.Sprintf("%s blob %d\n", id, size); head != want {
		return nil, fmt.Errorf("read object %s: git answers %q", id, strings.TrimSpace(head))
	}
	body := &io.LimitedReader{R: b.out, N: size}
	b.pending = io.MultiReader(body, &io.LimitedReader{R: b.out, N: 1})
	return &exact{r: body}, nil
}

// close ends the process; its context must be cancelled. What it says at its
// end is of no interest, since every answer was checked on its own.
func (b *blobReader) close() {
	b.in.Close()
	_ = b.wait()
}

// exact turns an early end into an error.
type exact struct{ r *io.LimitedReader }

func (e *exact) Read(p []byte) (int, error) {
	n, err := e.r.Read(p)
	if err == io.EOF && e.r.N > 0 {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}
