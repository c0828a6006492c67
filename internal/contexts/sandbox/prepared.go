package sandbox

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/bridge"
)

// PreparedDir is where preparation puts what is no part of the work tree, such
// as module and build caches, and where every later sandbox finds it again: a
// build cache holds paths.
const PreparedDir = "/opt/numi/prepared"

// The two parts of a snapshot of ScopePrepared.
const (
	partPrepared = "prepared"
	partScratch  = "scratch"
)

// Unpack writes the part of a preparation's snapshot that belongs at PreparedDir
// to dir, an empty directory of the host. The snapshot is untrusted: nothing is
// written outside of dir, whatever its names and links say; owners, times and
// modes count for nothing but the executable bit, and what is no file,
// directory or link is left out. Everything is writable to everybody, because
// inside it belongs to whoever uses it; dir has to lie in a private directory.
// skip leaves files out by their path.
func Unpack(b Blobs, ref blob.Ref, dir string, skip func(path string) bool) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("unpack what was prepared: %w", err)
	}
	defer root.Close()
	dirs := []string{"."}
	err = eachInTar(b, ref, func(name string, h *tar.Header, r io.Reader) error {
		name, ok := strings.CutPrefix(name, partPrepared+"/")
		if !ok || skip(name) {
			return nil
		}
		if h.Typeflag == tar.TypeDir {
			dirs = append(dirs, name)
		}
		return unpackEntry(root, name, h, r)
	})
	if err != nil {
		return fmt.Errorf("unpack what was prepared: %w", err)
	}
	for _, d := range dirs {
		if err := root.Chmod(d, 0o777); err != nil {
			return fmt.Errorf("unpack what was prepared: %w", err)
		}
	}
	return nil
}

func unpackEntry(root *os.Root, name string, h *tar.Header, r io.Reader) error {
	if err := root.MkdirAll(path.Dir(name), 0o777); err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if err := root.Mkdir(name, 0o777); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	case tar.TypeReg:
		mode := os.FileMode(0o666)
		if h.Mode&0o111 != 0 {
			mode = 0o777
		}
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, r)
		return errors.Join(err, f.Chmod(mode), f.Close())
	case tar.TypeSymlink:
		return root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		to, err := plain(h.Linkname)
		if err != nil {
			return err
		}
		if to, ok := strings.CutPrefix(to, partPrepared+"/"); ok {
			return root.Link(to, name)
		}
	}
	return nil
}

// ScratchLayer makes of a preparation's snapshot the layer that brings the
// scratch directories of the work tree to a later sandbox, owned by the user who
// works with them there. The directories themselves are in it even where
// preparation left them empty.
func ScratchLayer(ctx context.Context, b Blobs, ref blob.Ref, scratch []string, user User) (blob.Ref, error) {
	uid, ok := map[User]int{Agent: bridge.UIDAgent, Candidate: bridge.UIDCandidate}[user]
	if !ok {
		return blob.Ref{}, errors.New("layer of scratch directories: no user named")
	}
	r, w := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.CloseWithError(writeScratch(w, ofSnapshot(b, ref, []string{partPrepared}), scratch, uid))
	}()
	out, err := b.Put(ctx, r, maxTree)
	r.Close()
	<-done
	if err != nil {
		return blob.Ref{}, fmt.Errorf("layer of scratch directories: %w", err)
	}
	return out, nil
}

func writeScratch(w io.Writer, all nodes, scratch []string, uid int) error {
	tw := tar.NewWriter(w)
	const work = "." + bridge.WorkRoot + "/"
	put := func(h *tar.Header) error {
		h.Uid, h.Gid, h.ModTime = uid, uid, time.Unix(1_000_000_000, 0)
		return tw.WriteHeader(h)
	}
	for _, s := range scratch {
		if err := put(&tar.Header{Typeflag: tar.TypeDir, Name: work + s + "/", Mode: 0o755}); err != nil {
			return err
		}
	}
	for n, err := range iter.Seq2[node, error](all) {
		if err != nil {
			return err
		}
		name, ok := strings.CutPrefix(n.path, partScratch+"/")
		if !ok || !under(name, scratch) || n.dir && slices.Contains(scratch, name) {
			continue
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: work + name, Size: n.size, Mode: 0o644}
		switch {
		case n.dir:
			h.Typeflag, h.Name, h.Mode = tar.TypeDir, h.Name+"/", 0o755
		case n.link != "":
			h.Typeflag, h.Linkname, h.Size, h.Mode = tar.TypeSymlink, n.link, 0, 0o777
		case n.exec:
			h.Mode = 0o755
		}
		if err := put(h); err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		r, err := n.open()
		if err != nil {
			return err
		}
		if _, err := io.Copy(tw, r); err != nil {
			return err
		}
	}
	return tw.Close()
}
