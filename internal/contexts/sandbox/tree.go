package sandbox

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"path"
	"strings"
	"time"

	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/worktree"
)

// Tree gives the entries of a revision, the same at each call;
// *worktree.Store has this form.
type Tree interface {
	Entries(ctx context.Context, revision string) iter.Seq2[worktree.Entry, error]
}

// Blobs keeps trees and output; *blob.Store has this form.
type Blobs interface {
	Put(ctx context.Context, r io.Reader, limit int64) (blob.Ref, error)
	Bytes(d digestOf, limit int64) ([]byte, error)
	Open(d digestOf) (io.ReadCloser, error)
}

// maxTree bounds a work tree in bytes, maxEntries in entries, maxLinked the
// content that hard links of a snapshot repeat.
const (
	maxTree    = 4 << 30
	maxEntries = 400_000
	maxLinked  = 64 << 20
)

// node is one file or link of a tree, whatever it comes from.
type node struct {
	path string
	exec bool
	link string // target of a symbolic link, read from content for a revision
	dir  bool
	size int64
	open func() (io.Reader, error)
}

// nodes yields the same entries each time it is called; open is valid until the
// next step.
type nodes func(yield func(node, error) bool)

// ofRevision yields a revision's entries.
func ofRevision(ctx context.Context, t Tree, revision string) nodes {
	return func(yield func(node, error) bool) {
		for e, err := range t.Entries(ctx, revision) {
			if err != nil {
				yield(node{}, err)
				return
			}
			n := node{path: e.Path, size: e.Size, open: e.Open}
			switch e.Mode {
			case worktree.ModeFile:
			case worktree.ModeExecutable:
				n.exec = true
			case worktree.ModeSymlink:
				n.link = "?"
			case worktree.ModeSubmodule:
				n.dir = true
			default:
				yield(node{}, fmt.Errorf("entry %q has mode %s", e.Path, e.Mode))
				return
			}
			if !yield(n, nil) {
				return
			}
		}
	}
}

// ofSnapshot yields the entries of an untrusted snapshot of a work tree. Owners
// and modes in it count for nothing but the executable bit. Hard links become
// copies; pipes, devices and sockets are left out.
func ofSnapshot(b Blobs, ref blob.Ref, skip []string) nodes {
	return func(yield func(node, error) bool) {
		linked, err := linkTargets(b, ref)
		if err != nil {
			yield(node{}, err)
			return
		}
		kept := map[string][]byte{}
		left := maxLinked
		err = eachInTar(b, ref, func(name string, h *tar.Header, r io.Reader) error {
			if under(name, skip) {
				return nil
			}
			n := node{path: name, exec: h.Mode&0o100 != 0, size: h.Size, open: func() (io.Reader, error) { return r, nil }}
			switch h.Typeflag {
			case tar.TypeReg:
				if linked[name] {
					if h.Size > int64(left) {
						return fmt.Errorf("hard links repeat more than %d bytes", maxLinked)
					}
					content, err := io.ReadAll(r)
					if err != nil {
						return err
					}
					left -= len(content)
					kept[name] = content
					n.open = func() (io.Reader, error) { return bytes.NewReader(content), nil }
				}
			case tar.TypeDir:
				n.dir, n.size = true, 0
			case tar.TypeSymlink:
				n.link = h.Linkname
			case tar.TypeLink:
				target, err := plain(h.Linkname)
				content, ok := kept[target]
				if err != nil || !ok {
					return nil // a link to something that was left out
				}
				n.size = int64(len(content))
				n.open = func() (io.Reader, error) { return bytes.NewReader(content), nil }
			default:
				return nil
			}
			if !yield(n, nil) {
				return errStop
			}
			return nil
		})
		if err != nil && !errors.Is(err, errStop) {
			yield(node{}, err)
		}
	}
}

var errStop = errors.New("stop")

func linkTargets(b Blobs, ref blob.Ref) (map[string]bool, error) {
	out := map[string]bool{}
	err := eachInTar(b, ref, func(_ string, h *tar.Header, _ io.Reader) error {
		if h.Typeflag == tar.TypeLink {
			if t, err := plain(h.Linkname); err == nil {
				out[t] = true
			}
		}
		return nil
	})
	return out, err
}

// eachInTar reads a snapshot, to its end so that the store checks its digest.
func eachInTar(b Blobs, ref blob.Ref, f func(name string, h *tar.Header, r io.Reader) error) error {
	r, err := b.Open(ref.Digest)
	if err != nil {
		return fmt.Errorf("open snapshot: %w", err)
	}
	defer r.Close()
	tr := tar.NewReader(r)
	for n := 0; ; n++ {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("read snapshot: %w", err)
		}
		if n >= maxEntries {
			return fmt.Errorf("read snapshot: more than %d entries", maxEntries)
		}
		name, err := plain(h.Name)
		if err != nil {
			return fmt.Errorf("read snapshot: %w", err)
		}
		if name == "." {
			continue
		}
		if err := f(name, h, tr); err != nil {
			return err
		}
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		return fmt.Errorf("read snapshot: %w", err)
	}
	return nil
}

// plain returns the path of a "./" name of a tar, "." for its root.
func plain(name string) (string, error) {
	rest := strings.TrimSuffix(strings.TrimPrefix(strings.TrimSuffix(name, "/"), "./"), "/")
	if rest == "" || rest == "." {
		return ".", nil
	}
	if path.Clean(rest) != rest || path.IsAbs(rest) || rest == ".." || strings.HasPrefix(rest, "../") || strings.ContainsRune(rest, 0) {
		return "", fmt.Errorf("entry %q is not a plain path", name)
	}
	return rest, nil
}

func under(name string, dirs []string) bool {
	for _, d := range dirs {
		if name == d || strings.HasPrefix(name, d+"/") {
			return true
		}
	}
	return false
}

// writeTree writes the work tree with the owners that the scope gives.
func writeTree(w io.Writer, all nodes, scope pathscope.Scope, readOnly bool, whole int) error {
	var files, dirs []string
	exists := map[string]bool{}
	for n, err := range iter.Seq2[node, error](all) {
		if err != nil {
			return err
		}
		if len(exists) >= maxEntries {
			return fmt.Errorf("work tree: more than %d entries", maxEntries)
		}
		exists[n.path] = true
		if n.dir {
			dirs = append(dirs, n.path)
		} else {
			files = append(files, n.path)
		}
	}
	o := newOwnership(files, dirs, scope, readOnly)
	o.whole = whole
	tw := tar.NewWriter(w)
	put := func(h *tar.Header, by owner) error {
		h.Uid, h.Gid, h.Mode, h.ModTime = by.uid, by.gid, by.mode, time.Unix(1_000_000_000, 0)
		return tw.WriteHeader(h)
	}
	names, owners := o.directories(func(p string) bool { return exists[p] })
	for _, d := range names {
		name := "./" + d + "/"
		if d == "." {
			name = "./"
		}
		if err := put(&tar.Header{Typeflag: tar.TypeDir, Name: name}, owners[d]); err != nil {
			return fmt.Errorf("write work tree: %w", err)
		}
	}
	for n, err := range iter.Seq2[node, error](all) {
		if err != nil {
			return err
		}
		if n.dir {
			continue
		}
		if err := writeNode(tw, put, n, o); err != nil {
			return fmt.Errorf("write work tree: %q: %w", n.path, err)
		}
	}
	if err := tw.Close(); err != nil {
		return fmt.Errorf("write work tree: %w", err)
	}
	return nil
}

func writeNode(tw *tar.Writer, put func(*tar.Header, owner) error, n node, o *ownership) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: "./" + n.path, Size: n.size}
	by := o.file(n.path, n.exec)
	if n.link != "" {
		h.Typeflag, h.Size, h.Linkname = tar.TypeSymlink, 0, n.link
		if n.link == "?" {
			target, err := content(n)
			if err != nil {
				return err
			}
			h.Linkname = string(target)
		}
		by.mode = 0o777
		return put(h, by)
	}
	if err := put(h, by); err != nil {
		return err
	}
	r, err := n.open()
	if err != nil {
		return err
	}
	_, err = io.Copy(tw, r)
	return err
}

// content reads a link's target, which is short.
func content(n node) ([]byte, error) {
	r, err := n.open()
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(r, 4097))
	if err == nil && len(b) > 4096 {
		err = errors.New("link target of more than 4096 bytes")
	}
	return b, err
}
