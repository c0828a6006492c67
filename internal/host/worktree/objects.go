package worktree

import (
	"bytes"
	"compress/zlib"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// memoryBlob is the largest blob that is hashed in memory; larger ones pass
// through a file.
const memoryBlob = 1 << 20

// objectWriter writes loose objects of one store. An object that the base has
// is not written again.
type objectWriter struct {
	dir    string // the store's objects
	format string
	have   map[string]bool
}

func (s *Store) newObjectWriter(base string, entries []Entry) *objectWriter {
	w := &objectWriter{dir: filepath.Join(s.dir, "objects"), format: formatOf(base), have: make(map[string]bool, len(entries))}
	for _, e := range entries {
		w.have[e.ID] = true
	}
	return w
}

// blob stores size bytes of r and returns the object's id.
func (w *objectWriter) blob(r io.Reader, size int64) (string, error) {
	if size <= memoryBlob {
		body := make([]byte, size)
		if _, err := io.ReadFull(r, body); err != nil {
			return "", err
		}
		return w.object("blob", body)
	}
	spool, err := os.CreateTemp(w.dir, ".tmp-blob-*")
	if err != nil {
		return "", err
	}
	defer os.Remove(spool.Name())
	defer spool.Close()
	h := newHash(w.format)
	head := fmt.Sprintf("blob %d\x00", size)
	io.WriteString(h, head)
	if _, err := io.CopyN(io.MultiWriter(h, spool), r, size); err != nil {
		return "", err
	}
	id := hex.EncodeToString(h.Sum(nil))
	if w.have[id] {
		return id, nil
	}
	if _, err := spool.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	return id, w.store(id, io.MultiReader(strings.NewReader(head), spool))
}

func (w *objectWriter) object(kind string, body []byte) (string, error) {
	h := newHash(w.format)
	head := fmt.Sprintf("%s %d\x00", kind, len(body))
	io.WriteString(h, head)
	h.Write(body)
	id := hex.EncodeToString(h.Sum(nil))
	if w.have[id] {
		return id, nil
	}
	return id, w.store(id, io.MultiReader(strings.NewReader(head), bytes.NewReader(body)))
}

func (w *objectWriter) store(id string, content io.Reader) error {
	dir := filepath.Join(w.dir, id[:2])
	path := filepath.Join(dir, id[2:])
	if _, err := os.Lstat(path); err == nil {
		w.have[id] = true
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".tmp-obj-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	z, err := zlib.NewWriterLevel(f, zlib.BestSpeed)
	if err != nil {
		return err
	}
	_, err = io.Copy(z, content)
	err = errors.Join(err, z.Close(), f.Chmod(0o444), f.Close())
	if err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	w.have[id] = true
	return nil
}

// sync makes everything that was written survive a crash.
func (w *objectWriter) sync() error {
	d, err := os.Open(w.dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return unix.Syncfs(int(d.Fd()))
}

// node is a directory of a tree that is being built.
type node struct {
	dirs  map[string]*node
	files map[string]leaf
}

type leaf struct {
	octal string
	id    string
}

func newNode() *node { return &node{dirs: map[string]*node{}, files: map[string]leaf{}} }

func (n *node) add(path string, l leaf) error {
	for {
		name, rest, below := strings.Cut(path, "/")
		if !below {
			if n.dirs[name] != nil {
				return fmt.Errorf("%q is both a file and a directory", path)
			}
			n.files[name] = l
			return nil
		}
		if _, ok := n.files[name]; ok {
			return fmt.Errorf("%q is both a file and a directory", name)
		}
		next := n.dirs[name]
		if next == nil {
			next = newNode()
			n.dirs[name] = next
		}
		n, path = next, rest
	}
}

// tree writes the node and everything below it and returns its id.
func (w *objectWriter) tree(n *node) (string, error) {
	type row struct{ key, name, octal, id string }
	rows := make([]row, 0, len(n.dirs)+len(n.files))
	for name, l := range n.files {
		rows = append(rows, row{name, name, l.octal, l.id})
	}
	for name, d := range n.dirs {
		id, err := w.tree(d)
		if err != nil {
			return "", err
		}
		// Git sorts a directory as if its name ended in a slash.
		rows = append(rows, row{name + "/", name, "40000", id})
	}
	slices.SortFunc(rows, func(a, b row) int { return strings.Compare(a.key, b.key) })
	var body bytes.Buffer
	for _, r := range rows {
		id, err := hex.DecodeString(r.id)
		if err != nil {
			return "", fmt.Errorf("object id %q: %w", r.id, err)
		}
		fmt.Fprintf(&body, "%s %s\x00", r.octal, r.name)
		body.Write(id)
	}
	return w.object("tree", body.Bytes())
}
