package gvisor

import (
	"archive/tar"
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"
)

// The places inside. The runtime's PID 1 knows the same ones.
const (
	workRoot  = "workspace"
	agentHome = "home/agent"
	// preparedDir takes what preparation makes and every user of the sandbox uses.
	preparedDir = "opt/numi/prepared"
	linkDir     = "/run/numi"
	initDir     = "/opt/numi/init"
	initPath    = initDir + "/numi-init"
)

// The uids inside; each has a group of the same number.
const (
	uidAgent     = 1000
	uidCandidate = 1001
	uidAdapter   = 10001
)

// maxTreeEntries bounds the files of all tars of one sandbox together.
const maxTreeEntries = 500_000

// source is one tar on disk whose entries appear below prefix.
type source struct {
	file   string
	prefix string // "" or a directory without slashes at its ends
}

// writeUpper makes the sandbox's writable layer from tars, later ones over
// earlier ones. Every name it writes begins with "./" and every directory comes
// before what is in it: the runtime reads no other form.
func writeUpper(to string, sources []source, scratch []string, marker string) error {
	dirs := baseDirs(scratch)
	winner := map[string]int{}
	for i, s := range sources {
		err := eachEntry(s, func(name string, h *tar.Header, _ io.Reader) error {
			if len(winner) > maxTreeEntries {
				return fmt.Errorf("more than %d entries", maxTreeEntries)
			}
			if h.Typeflag == tar.TypeDir {
				dirs[name] = h
			} else {
				delete(dirs, name)
			}
			winner[name] = i
			return nil
		})
		if err != nil {
			return err
		}
	}
	for name := range winner {
		for d := path.Dir(name); d != "."; d = path.Dir(d) {
			if _, isDir := dirs[d]; isDir {
				continue
			}
			if _, taken := winner[d]; taken {
				return fmt.Errorf("tree: %q lies below something that is no directory", name)
			}
			dirs[d] = dirHeader(0, 0o755)
		}
	}

	f, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("write the work tree: %w", err)
	}
	defer f.Close()
	buf := bufio.NewWriterSize(f, 1<<20)
	tw := tar.NewWriter(buf)
	if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755, ModTime: time.Unix(0, 0)}); err != nil {
		return fmt.Errorf("write the work tree: %w", err)
	}
	for _, name := range slices.Sorted(maps.Keys(dirs)) {
		h := *dirs[name]
		h.Name = "./" + name + "/"
		if err := tw.WriteHeader(&h); err != nil {
			return fmt.Errorf("write the work tree: %w", err)
		}
	}
	for i, s := range sources {
		err := eachEntry(s, func(name string, h *tar.Header, r io.Reader) error {
			if h.Typeflag == tar.TypeDir || winner[name] != i {
				return nil
			}
			h.Name = "./" + name
			if err := tw.WriteHeader(h); err != nil {
				return err
			}
			_, err := io.Copy(tw, r)
			return err
		})
		if err != nil {
			return err
		}
	}
	if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "./" + marker, Mode: 0o444, ModTime: time.Unix(0, 0)}); err != nil {
		return fmt.Errorf("write the work tree: %w", err)
	}
	if err := errors.Join(tw.Close(), buf.Flush()); err != nil {
		return fmt.Errorf("write the work tree: %w", err)
	}
	return nil
}

// baseDirs are there whatever the tars hold: homes that belong to their users,
// and the scratch directories, which belong to the agent.
func baseDirs(scratch []string) map[string]*tar.Header {
	dirs := map[string]*tar.Header{
		workRoot:          dirHeader(0, 0o755),
		"home":            dirHeader(0, 0o755),
		agentHome:         dirHeader(uidAgent, 0o700),
		"home/candidate":  dirHeader(uidCandidate, 0o700),
		"home/adapter":    dirHeader(uidAdapter, 0o700),
		"opt":             dirHeader(0, 0o755),
		"opt/numi":        dirHeader(0, 0o755),
		preparedDir:       dirHeader(0, 0o1777),
		"run":             dirHeader(0, 0o755),
		"run/numi-plugin": dirHeader(uidAdapter, 0o700),
	}
	for _, s := range scratch {
		dirs[path.Join(workRoot, s)] = dirHeader(uidAgent, 0o755)
	}
	return dirs
}

func dirHeader(uid int, mode int64) *tar.Header {
	return &tar.Header{Typeflag: tar.TypeDir, Uid: uid, Gid: uid, Mode: mode, ModTime: time.Unix(0, 0)}
}

// eachEntry reads one tar and calls f for every entry below its root with the
// entry's place in the sandbox. It takes files, directories and symbolic links
// under plain names; anything else is an error.
func eachEntry(s source, f func(name string, h *tar.Header, r io.Reader) error) error {
	file, err := os.Open(s.file)
	if err != nil {
		return fmt.Errorf("read the tree: %w", err)
	}
	defer file.Close()
	tr := tar.NewReader(bufio.NewReaderSize(file, 1<<20))
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the tree: %w", err)
		}
		name, err := plainName(h.Name)
		if err != nil {
			return err
		}
		switch h.Typeflag {
		case tar.TypeReg, tar.TypeDir, tar.TypeSymlink:
		default:
			return fmt.Errorf("tree entry %q: type %q is not a file, a directory or a symbolic link", h.Name, h.Typeflag)
		}
		name = path.Join(s.prefix, name)
		if name == "." || name == "" {
			continue
		}
		if s.prefix == "" && !mayLayer(name) {
			return fmt.Errorf("layer entry %q: layers may only bring homes and the work tree", h.Name)
		}
		// Only what the runtime is meant to see: no extended attributes, no
		// names of host users, no bits beyond permissions and the sticky bit.
		clean := &tar.Header{
			Typeflag: h.Typeflag, Linkname: h.Linkname, Size: h.Size, Mode: h.Mode & 0o1777,
			Uid: h.Uid, Gid: h.Gid, ModTime: h.ModTime.Truncate(time.Second),
		}
		if err := f(name, clean, tr); err != nil {
			return fmt.Errorf("tree entry %q: %w", h.Name, err)
		}
	}
}

// plainName returns the path below the tar's root, "." for the root itself.
func plainName(n string) (string, error) {
	trimmed := strings.TrimSuffix(n, "/")
	rest, ok := strings.CutPrefix(trimmed+"/", "./")
	if !ok {
		return "", fmt.Errorf("tree entry %q: names begin with ./", n)
	}
	rest = strings.TrimSuffix(rest, "/")
	if rest == "" {
		return ".", nil
	}
	if path.Clean(rest) != rest || strings.HasPrefix(rest, "/") || rest == ".." || strings.HasPrefix(rest, "../") || strings.ContainsRune(rest, 0) {
		return "", fmt.Errorf("tree entry %q: not a plain path", n)
	}
	return rest, nil
}

func mayLayer(name string) bool {
	top, _, _ := strings.Cut(name, "/")
	return top == "home" || top == workRoot
}

// maxMoved bounds what hard links into a snapshot from outside of it may hold.
const maxMoved = 64 << 20

// part is a directory of the writable layer and its place in a snapshot, "" for
// the root.
type part struct{ dir, as string }

// filterSnapshot copies from the runtime's tar of the whole writable layer, in a
// file, the kept parts, renamed, leaving out the skipped directories and
// whiteouts. The first name of a file with several names may lie
// outside of what is kept; then the first kept name becomes the file.
func filterSnapshot(w io.Writer, file string, keep []part, skip []string) error {
	f := filter{keep: keep, skip: skip, whiteouts: map[string]bool{}, outside: map[string]*moved{}}
	if err := eachRaw(file, f.survey); err != nil {
		return err
	}
	tw := tar.NewWriter(w)
	if err := eachRaw(file, func(h *tar.Header, r io.Reader) error { return f.copy(tw, h, r) }); err != nil {
		return err
	}
	if err := tw.Close(); err != nil {
		return fmt.Errorf("write the snapshot: %w", err)
	}
	return nil
}

type filter struct {
	keep      []part
	skip      []string
	whiteouts map[string]bool   // names, cleaned
	outside   map[string]*moved // left-out names that a kept hard link points to
	left      int64
}

// moved is a file whose first name is left out.
type moved struct {
	header  tar.Header
	content []byte
	name    string // its first kept name, once written
}

// kept returns an entry's name in the snapshot, if it has one.
func (f *filter) kept(name string) (string, bool) {
	for _, p := range f.keep {
		if rest, inside := below(name, "./"+p.dir); inside && !skipped(rest, f.skip) {
			return path.Join(p.as, rest), true
		}
	}
	return "", false
}

func (f *filter) survey(h *tar.Header, _ io.Reader) error {
	name := path.Clean(h.Name)
	switch {
	case isWhiteout(h), h.Typeflag == tar.TypeLink && f.whiteouts[path.Clean(h.Linkname)]:
		f.whiteouts[name] = true
	case h.Typeflag == tar.TypeLink:
		_, wanted := f.kept(h.Name)
		if _, has := f.kept(h.Linkname); wanted && !has {
			f.outside[path.Clean(h.Linkname)] = &moved{}
		}
	}
	return nil
}

func (f *filter) copy(tw *tar.Writer, h *tar.Header, r io.Reader) error {
	if f.whiteouts[path.Clean(h.Name)] {
		return nil
	}
	if m, ok := f.outside[path.Clean(h.Name)]; ok && h.Typeflag == tar.TypeReg {
		if f.left += h.Size; f.left > maxMoved {
			return fmt.Errorf("snapshot: hard links from outside of it hold more than %d bytes", maxMoved)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			return fmt.Errorf("read the snapshot: %w", err)
		}
		m.header, m.content = *h, content
	}
	name, ok := f.kept(h.Name)
	if !ok {
		return nil
	}
	h.Name = "./" + name
	if h.Typeflag == tar.TypeDir && name != "" {
		h.Name += "/"
	}
	if h.Typeflag == tar.TypeLink {
		m, ok := f.outside[path.Clean(h.Linkname)]
		switch {
		case ok && m.name == "":
			own := m.header
			own.Name, m.name = h.Name, h.Name
			h, r = &own, bytes.NewReader(m.content)
		case ok:
			h.Linkname = m.name
		default:
			to, _ := f.kept(h.Linkname)
			h.Linkname = "./" + to
		}
	}
	h.Format = tar.FormatUnknown
	if err := tw.WriteHeader(h); err != nil {
		return fmt.Errorf("write the snapshot: %w", err)
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	if _, err := io.Copy(tw, r); err != nil {
		return fmt.Errorf("write the snapshot: %w", err)
	}
	return nil
}

func eachRaw(file string, f func(*tar.Header, io.Reader) error) error {
	in, err := os.Open(file)
	if err != nil {
		return fmt.Errorf("read the snapshot: %w", err)
	}
	defer in.Close()
	tr := tar.NewReader(bufio.NewReaderSize(in, 1<<20))
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the snapshot: %w", err)
		}
		if err := f(h, tr); err != nil {
			return err
		}
	}
}

// isWhiteout reports whether an entry only says that something of the image is
// hidden there, as a rename leaves behind. The image has nothing below the
// directories that snapshots keep, so it says nothing.
func isWhiteout(h *tar.Header) bool {
	return h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0
}

// below returns name relative to prefix, "" for the prefix itself.
func below(name, prefix string) (string, bool) {
	name = "./" + strings.TrimPrefix(strings.TrimPrefix(path.Clean(name), "./"), "/")
	if name == prefix {
		return "", true
	}
	return strings.CutPrefix(name, prefix+"/")
}

func skipped(name string, skip []string) bool {
	for _, s := range skip {
		if name == s || strings.HasPrefix(name, s+"/") {
			return true
		}
	}
	return false
}
