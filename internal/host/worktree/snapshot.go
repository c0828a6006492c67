package worktree

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"unicode/utf8"
)

// Bounds of a snapshot; the zero value of a limit in Rules stands for these.
const (
	DefaultMaxEntries   = 500_000
	DefaultMaxFileBytes = 2 << 30
	DefaultMaxBytes     = 16 << 30
	maxName             = 4096
	maxSegment          = 255
	maxDepth            = 128
	maxViolations       = 1000
)

// ErrSnapshot is a snapshot that no honest sandbox makes; nothing of it is
// used.
var ErrSnapshot = errors.New("snapshot is refused")

// snapshot reads the tar of a work tree that an untrusted sandbox made. Every
// name is relative to the work root, written "./a/b".
type snapshot struct {
	raw     *ending
	tar     *tar.Reader
	limits  limits
	entries int
	bytes   int64
	seen    map[string]byte // path to tar type
}

type limits struct {
	entries   int
	fileBytes int64
	bytes     int64
}

func newSnapshot(r io.Reader, l limits) *snapshot {
	raw := &ending{r: r}
	return &snapshot{raw: raw, tar: tar.NewReader(raw), limits: l, seen: map[string]byte{}}
}

// ending notices when the bytes end before the archive does, which the tar
// reader lets pass between two entries: a cut snapshot would look as if the
// rest had been deleted.
type ending struct {
	r     io.Reader
	short bool
}

func (e *ending) Read(p []byte) (int, error) {
	n, err := e.r.Read(p)
	if n == 0 && err == io.EOF {
		e.short = true
	}
	return n, err
}

// end checks that the archive was whole and that only padding follows it.
func (s *snapshot) end() error {
	if s.raw.short {
		return fmt.Errorf("%w: it is cut off", ErrSnapshot)
	}
	const maxPadding = 1 << 20
	padding, err := io.ReadAll(io.LimitReader(s.raw, maxPadding+1))
	if err != nil {
		return fmt.Errorf("%w: read to its end: %w", ErrSnapshot, err)
	}
	if len(padding) > maxPadding || strings.Trim(string(padding), "\x00") != "" {
		return fmt.Errorf("%w: something follows its end", ErrSnapshot)
	}
	return io.EOF
}

// item is one checked entry of a snapshot; the root itself is never one.
type item struct {
	path   string
	kind   byte // tar.TypeDir, TypeReg, TypeSymlink, TypeLink or another
	exec   bool
	setid  bool
	size   int64
	target string // of a symbolic link, as is; of a hard link, a checked path
}

// next returns the next entry, or io.EOF after the last. Any other error means
// that the whole snapshot is refused.
func (s *snapshot) next() (item, error) {
	for {
		h, err := s.tar.Next()
		if err == io.EOF {
			return item{}, s.end()
		}
		if err != nil {
			return item{}, fmt.Errorf("%w: not a tar: %w", ErrSnapshot, err)
		}
		if s.entries++; s.entries > s.limits.entries {
			return item{}, fmt.Errorf("%w: more than %d entries", ErrSnapshot, s.limits.entries)
		}
		name, err := workPath(h.Name)
		if err != nil {
			return item{}, fmt.Errorf("%w: %w", ErrSnapshot, err)
		}
		if name == "" {
			if h.Typeflag != tar.TypeDir {
				return item{}, fmt.Errorf("%w: the work root is no directory", ErrSnapshot)
			}
			continue
		}
		if strings.HasSuffix(h.Name, "/") && h.Typeflag != tar.TypeDir {
			return item{}, fmt.Errorf("%w: %q is named like a directory", ErrSnapshot, h.Name)
		}
		it := item{path: name, kind: h.Typeflag, exec: h.Mode&0o100 != 0, setid: h.Mode&0o6000 != 0, size: h.Size}
		if err := s.place(it); err != nil {
			return item{}, err
		}
		switch h.Typeflag {
		case tar.TypeReg:
			if s.bytes += h.Size; h.Size < 0 || h.Size > s.limits.fileBytes || s.bytes > s.limits.bytes {
				return item{}, fmt.Errorf("%w: %q: files of %d bytes and %d in all are the most", ErrSnapshot, name, s.limits.fileBytes, s.limits.bytes)
			}
		case tar.TypeSymlink:
			if it.target = h.Linkname; len(it.target) == 0 || len(it.target) > maxName || strings.ContainsRune(it.target, 0) {
				return item{}, fmt.Errorf("%w: %q: its link target has %d bytes", ErrSnapshot, name, len(it.target))
			}
		case tar.TypeLink:
			if it.target, err = workPath(h.Linkname); err != nil || it.target == "" {
				return item{}, fmt.Errorf("%w: %q: hard link to %q leaves the work tree", ErrSnapshot, name, h.Linkname)
			}
			if s.seen[it.target] != tar.TypeReg && s.seen[it.target] != tar.TypeLink || it.target == name {
				return item{}, fmt.Errorf("%w: %q: hard link to %q, which is no earlier file", ErrSnapshot, name, h.Linkname)
			}
		}
		return it, nil
	}
}

// place refuses a name that was there before, or that lies below something
// that is no directory.
func (s *snapshot) place(it item) error {
	if _, ok := s.seen[it.path]; ok {
		return fmt.Errorf("%w: %q is there twice", ErrSnapshot, it.path)
	}
	s.seen[it.path] = it.kind
	for dir := path.Dir(it.path); dir != "."; dir = path.Dir(dir) {
		kind, ok := s.seen[dir]
		if ok && kind != tar.TypeDir {
			return fmt.Errorf("%w: %q lies below %q, which is no directory", ErrSnapshot, it.path, dir)
		}
		if ok {
			return nil
		}
		s.seen[dir] = tar.TypeDir
	}
	return nil
}

// workPath turns the tar name "./a/b" or "./a/" into "a/b" or "a", and "./"
// into "". No other spelling of a path is taken.
func workPath(name string) (string, error) {
	rest, ok := strings.CutPrefix(name, "./")
	switch {
	case name == ".":
		return "", nil
	case !ok:
		return "", fmt.Errorf("name %q does not begin with ./", name)
	case len(name) > maxName:
		return "", fmt.Errorf("name of %d bytes, at most %d", len(name), maxName)
	case strings.ContainsRune(name, 0):
		return "", fmt.Errorf("name %q holds a NUL", name)
	}
	rest = strings.TrimSuffix(rest, "/")
	if rest == "" {
		return "", nil
	}
	depth := 0
	for segment := range strings.SplitSeq(rest, "/") {
		if segment == "" || segment == "." || segment == ".." || len(segment) > maxSegment {
			return "", fmt.Errorf("name %q holds the segment %q", name, segment)
		}
		if depth++; depth > maxDepth {
			return "", fmt.Errorf("name %q is more than %d directories deep", name, maxDepth)
		}
	}
	return rest, nil
}

// linkFault says why a symbolic link at name with this target may not come
// back: "" if it stays inside the work tree.
func linkFault(name, target string) string {
	switch {
	case strings.HasPrefix(target, "/"):
		return fmt.Sprintf("symbolic link to the absolute path %q", target)
	case strings.Contains(target, `\`) || !utf8.ValidString(target):
		return fmt.Sprintf("symbolic link to %q, which holds a backslash or is not UTF-8", target)
	}
	// Every prefix must stay inside: "a/../../b" leaves even if it returns.
	depth := strings.Count(name, "/")
	for segment := range strings.SplitSeq(target, "/") {
		switch segment {
		case "", ".":
		case "..":
			if depth--; depth < 0 {
				return fmt.Sprintf("symbolic link to %q, which leaves the work tree", target)
			}
		default:
			depth++
		}
	}
	return ""
}
