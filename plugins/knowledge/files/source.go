package files

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Bounds of a source.
const (
	maxDocument  = 16 << 20
	maxDocuments = 50_000
)

// errAbsent is the one answer for a ref that is not there, not in the scope, or
// not a document (K-033).
var errAbsent = status.Error(codes.NotFound, "no such document in this scope")

// source is the directory of one connection.
type source struct {
	dir     string
	history history
}

// document is one file as it is now.
type document struct {
	ref     string
	text    string // sanitised
	version string
}

// root opens the directory. What cannot be reached is an outage, never an empty
// source (K-035, K-036).
func (s *source) root() (*os.Root, error) {
	root, err := os.OpenRoot(s.dir)
	if err != nil {
		return nil, unavailable(err)
	}
	return root, nil
}

// unavailable leaves the path out: it is the host's own.
func unavailable(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		err = p.Err
	}
	return status.Errorf(codes.Unavailable, "the source cannot be reached: %v", err)
}

// read returns a document. No link is followed, not even inside the root: it
// would lead from one scope into another.
func (s *source) read(root *os.Root, ref string) (document, error) {
	if !isDocument(ref) {
		return document{}, errAbsent
	}
	for dir := path.Dir(ref); dir != "."; dir = path.Dir(dir) {
		info, err := root.Lstat(dir)
		if err := verdict(err); err != nil {
			return document{}, err
		}
		if !info.IsDir() {
			return document{}, errAbsent
		}
	}
	f, err := root.OpenFile(ref, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err := verdict(err); err != nil {
		return document{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err := verdict(err); err != nil {
		return document{}, err
	}
	// A root follows a last link itself where it stays inside, so ask again.
	if link, err := root.Lstat(ref); err != nil || !link.Mode().IsRegular() || !info.Mode().IsRegular() || !os.SameFile(link, info) {
		return document{}, errAbsent
	}
	raw, err := io.ReadAll(io.LimitReader(f, maxDocument+1))
	if err := verdict(err); err != nil {
		return document{}, err
	}
	if len(raw) > maxDocument {
		return document{}, status.Errorf(codes.FailedPrecondition, "the document has more than %d bytes", maxDocument)
	}
	sum := sha256.Sum256(raw)
	d := document{ref: ref, text: sanitize(raw), version: "sha256:" + hex.EncodeToString(sum[:])}
	s.history.remember(d.ref, d.version, raw)
	return d, nil
}

// verdict tells absent, refused and out of reach apart (K-033..K-035).
func verdict(err error) error {
	var p *fs.PathError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.ENXIO):
		return errAbsent
	case errors.Is(err, fs.ErrPermission):
		return status.Error(codes.PermissionDenied, "the source refuses to show this document")
	case errors.As(err, &p) && strings.Contains(p.Err.Error(), "escapes"):
		return errAbsent
	}
	return unavailable(err)
}

// list returns the refs of all documents in the scope, in order.
func (s *source) list(ctx context.Context, root *os.Root, scope []string) ([]string, error) {
	var refs []string
	err := fs.WalkDir(root.FS(), ".", func(name string, e fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			if name != "." && (errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist)) {
				return nil // hidden, or gone since
			}
			return err
		}
		if e.IsDir() {
			if name != "." && strings.HasPrefix(e.Name(), ".") {
				return fs.SkipDir
			}
			return nil
		}
		if e.Type().IsRegular() && isDocument(name) && within(scope, name) {
			if refs = append(refs, name); len(refs) > maxDocuments {
				return status.Errorf(codes.ResourceExhausted, "more than %d documents: narrow the scope", maxDocuments)
			}
		}
		return nil
	})
	if err != nil {
		if _, ok := status.FromError(err); ok {
			return nil, err
		}
		if ctx.Err() != nil {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		return nil, unavailable(err)
	}
	slices.Sort(refs)
	return refs, nil
}

// history keeps what was shown, so that it can be fetched again at its version.
// It holds the last versions of each document; without a data directory, none.
type history struct {
	dataDir    string
	connection string
}

const maxVersions = 16

func (h history) dir(ref string) string {
	sum := sha256.Sum256([]byte(h.connection + "\x00" + ref))
	return filepath.Join(h.dataDir, "versions", hex.EncodeToString(sum[:]))
}

// remember keeps a version. If it cannot, an old version is NOT_FOUND later;
// the answer of now is not wrong for it.
func (h history) remember(ref, version string, raw []byte) {
	if h.dataDir == "" {
		return
	}
	dir := h.dir(ref)
	name := filepath.Join(dir, strings.TrimPrefix(version, "sha256:"))
	if _, err := os.Stat(name); err == nil {
		return
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return
	}
	f, err := os.CreateTemp(dir, ".tmp-*")
	if err != nil {
		return
	}
	_, err = f.Write(raw)
	if errors.Join(err, f.Close()) != nil || os.Rename(f.Name(), name) != nil {
		os.Remove(f.Name())
		return
	}
	h.trim(dir)
}

func (h history) trim(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) <= maxVersions {
		return
	}
	age := func(e os.DirEntry) int64 {
		info, err := e.Info()
		if err != nil {
			return 0
		}
		return info.ModTime().UnixNano()
	}
	slices.SortFunc(entries, func(a, b os.DirEntry) int { return int(min(max(age(a)-age(b), -1), 1)) })
	for _, e := range entries[:len(entries)-maxVersions] {
		os.Remove(filepath.Join(dir, e.Name()))
	}
}

// recall returns a former version of a document that is still there.
func (h history) recall(d document, version string) (document, error) {
	id, ok := strings.CutPrefix(version, "sha256:")
	if _, err := hex.DecodeString(id); !ok || err != nil || len(id) != 64 || h.dataDir == "" {
		return document{}, errAbsent
	}
	raw, err := os.ReadFile(filepath.Join(h.dir(d.ref), id))
	if err != nil {
		return document{}, errAbsent
	}
	if sum := sha256.Sum256(raw); hex.EncodeToString(sum[:]) != id {
		return document{}, status.Error(codes.DataLoss, "the kept version is damaged")
	}
	return document{ref: d.ref, text: sanitize(raw), version: version}, nil
}
