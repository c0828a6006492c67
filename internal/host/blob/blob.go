// Package blob keeps content-addressed bytes in files: answers, snapshots,
// plans, findings and logs that records name by digest. Dispatch, the plugin
// host and the contexts call it; what it acknowledges survives a power cut.
package blob

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/numinance/numinance/internal/core/digest"
)

// Errors a caller branches on.
var (
	ErrNotFound = errors.New("no blob with this digest")
	ErrTooLarge = errors.New("blob is larger than its limit")
	ErrQuota    = errors.New("blob quota is exhausted")
	ErrCorrupt  = errors.New("blob does not match its digest")
)

// Ref names a stored blob and its size in bytes.
type Ref struct {
	Digest digest.Digest
	Size   int64
}

// Inline is a second place to read from: small answers live in the journal, in
// the same durable write as the result that names them.
type Inline interface {
	// Blob returns the bytes with digest d, or false if it does not hold them.
	Blob(ctx context.Context, d digest.Digest) ([]byte, bool, error)
}

// Config says where a Store keeps its files.
type Config struct {
	Dir string
	// Quota bounds the sum of all blob files in bytes; it must be positive.
	Quota int64
	// Inline may be nil.
	Inline Inline
}

// Store is a directory of read-only files named by their SHA-256. It is safe
// for concurrent use by one process; two stores may share a directory, but
// each then enforces its own view of the quota.
type Store struct {
	dir    string
	quota  int64
	inline Inline

	mu   sync.Mutex // guards used
	used int64
}

// staleTemp is the age after which a half-written file of a dead process is
// removed when a store is opened.
const staleTemp = time.Hour

// Open creates the directories (mode 0700), removes stale temporary files and
// counts what is stored.
func Open(c Config) (*Store, error) {
	if c.Quota <= 0 {
		return nil, errors.New("open blob store: the quota must be positive")
	}
	s := &Store{dir: c.Dir, quota: c.Quota, inline: c.Inline}
	if err := os.MkdirAll(s.incoming(), 0o700); err != nil {
		return nil, fmt.Errorf("open blob store: %w", err)
	}
	err := filepath.WalkDir(s.dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		if filepath.Dir(path) != s.incoming() {
			s.used += info.Size()
		} else if time.Since(info.ModTime()) > staleTemp {
			return os.Remove(path)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("open blob store: %w", err)
	}
	return s, nil
}

func (s *Store) incoming() string { return filepath.Join(s.dir, "incoming") }

func (s *Store) path(d digest.Digest) string {
	return filepath.Join(s.dir, d.Hex()[:2], d.Hex()[2:])
}

// Used returns the sum of the sizes of all blob files in bytes.
func (s *Store) Used() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used
}

// Put stores what r yields, at most limit bytes, and returns only when the
// bytes and their name are on disk. Storing the same bytes again changes
// nothing. It fails with ErrTooLarge, ErrQuota, ctx's error or an I/O error,
// and then leaves nothing behind.
func (s *Store) Put(ctx context.Context, r io.Reader, limit int64) (ref Ref, err error) {
	if limit < 0 {
		return Ref{}, fmt.Errorf("put blob: %w: limit %d", ErrTooLarge, limit)
	}
	tmp, err := os.CreateTemp(s.incoming(), "put-*")
	if err != nil {
		return Ref{}, fmt.Errorf("put blob: %w", err)
	}
	defer func() {
		err = errors.Join(err, tmp.Close(), os.Remove(tmp.Name()))
		if err != nil {
			ref = Ref{}
		}
	}()
	reserved := int64(0)
	defer func() { s.release(reserved) }()
	sum := sha256.New()
	buf := make([]byte, 64<<10)
	var size int64
	for {
		if err := ctx.Err(); err != nil {
			return Ref{}, fmt.Errorf("put blob: %w", err)
		}
		n, readErr := r.Read(buf)
		if n > 0 {
			if size += int64(n); size > limit {
				return Ref{}, fmt.Errorf("put blob: %w: more than %d bytes", ErrTooLarge, limit)
			}
			if !s.reserve(int64(n)) {
				return Ref{}, fmt.Errorf("put blob: %w: %d bytes", ErrQuota, s.quota)
			}
			reserved += int64(n)
			sum.Write(buf[:n])
			if _, err := tmp.Write(buf[:n]); err != nil {
				return Ref{}, fmt.Errorf("put blob: %w", err)
			}
		}
		if readErr == io.EOF {
			break
		}
		if readErr != nil {
			return Ref{}, fmt.Errorf("put blob: read the source: %w", readErr)
		}
	}
	ref = Ref{Digest: digest.FromRaw([32]byte(sum.Sum(nil))), Size: size}
	created, err := s.publish(tmp, ref.Digest)
	if err != nil {
		return Ref{}, fmt.Errorf("put blob %s: %w", ref.Digest, err)
	}
	if created {
		reserved = 0 // the bytes stay, and so does their share of the quota
	}
	return ref, nil
}

// PutBytes is Put for bytes in memory.
func (s *Store) PutBytes(ctx context.Context, b []byte) (Ref, error) {
	return s.Put(ctx, bytes.NewReader(b), int64(len(b)))
}

func (s *Store) reserve(n int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n > s.quota-s.used {
		return false
	}
	s.used += n
	return true
}

func (s *Store) release(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used -= n
}

// publish gives the finished temporary file its name. The file is flushed
// before it has the name and the directory after, so that a name never leads
// to missing bytes; the link refuses to replace an existing blob.
func (s *Store) publish(tmp *os.File, d digest.Digest) (created bool, err error) {
	if err := tmp.Chmod(0o444); err != nil {
		return false, err
	}
	if err := tmp.Sync(); err != nil {
		return false, err
	}
	final := s.path(d)
	shard := filepath.Dir(final)
	if err := os.Mkdir(shard, 0o700); err == nil {
		if err := syncDir(s.dir); err != nil {
			return false, err
		}
	} else if !errors.Is(err, fs.ErrExist) {
		return false, err
	}
	switch err := os.Link(tmp.Name(), final); {
	case err == nil:
		created = true
	case !errors.Is(err, fs.ErrExist):
		return false, err
	case verifyFile(final, d) != nil:
		// The disk lost or changed the old bytes; these are the right ones.
		if err := repair(tmp.Name(), final); err != nil {
			return false, err
		}
	}
	// Also when the name was there: its writer may not have flushed it yet.
	return created, syncDir(shard)
}

func repair(good, final string) error {
	spare := good + "-repair"
	if err := os.Link(good, spare); err != nil {
		return err
	}
	return os.Rename(spare, final)
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

func verifyFile(path string, d digest.Digest) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, newVerifying(f, d))
	return errors.Join(err, f.Close())
}

// Open returns a reader of the blob. The digest is verified while reading: at
// the end the reader returns ErrCorrupt instead of io.EOF if it does not match,
// so nothing may be done with the bytes before io.EOF was seen. A caller that
// wants verified bytes at once uses Bytes. An unknown digest is ErrNotFound.
func (s *Store) Open(d digest.Digest) (io.ReadCloser, error) {
	if !d.Valid() {
		return nil, fmt.Errorf("open blob %q: %w", string(d), ErrNotFound)
	}
	f, err := os.Open(s.path(d))
	if err == nil {
		return newVerifying(f, d), nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open blob %s: %w", d, err)
	}
	if s.inline != nil {
		b, ok, err := s.inline.Blob(context.Background(), d)
		if err != nil {
			return nil, fmt.Errorf("open blob %s: %w", d, err)
		}
		if ok {
			return newVerifying(io.NopCloser(bytes.NewReader(b)), d), nil
		}
	}
	return nil, fmt.Errorf("open blob %s: %w", d, ErrNotFound)
}

// Bytes returns the whole verified blob, or ErrTooLarge if it has more than
// limit bytes.
func (s *Store) Bytes(d digest.Digest, limit int64) ([]byte, error) {
	r, err := s.Open(d)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	var out bytes.Buffer
	n, err := io.CopyN(&out, r, limit+1)
	if n > limit {
		return nil, fmt.Errorf("read blob %s: %w: more than %d bytes", d, ErrTooLarge, limit)
	}
	if !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read blob %s: %w", d, err)
	}
	return out.Bytes(), nil
}

// Remove deletes the file of a blob, for content that must not outlive its
// Change such as a checkpoint's snapshot. Removing an absent blob is no error.
func (s *Store) Remove(d digest.Digest) error {
	if !d.Valid() {
		return fmt.Errorf("remove blob %q: %w", string(d), ErrNotFound)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	info, err := os.Lstat(s.path(d))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove blob %s: %w", d, err)
	}
	if err := os.Remove(s.path(d)); err != nil {
		return fmt.Errorf("remove blob %s: %w", d, err)
	}
	s.used -= info.Size()
	return syncDir(filepath.Dir(s.path(d)))
}

// Account gives one owner, such as a run that stores blobs through the host
// service, a share of the store: at most quota bytes over its life, counted
// whether or not the same bytes were stored before.
func (s *Store) Account(quota int64) *Account { return &Account{store: s, left: quota} }

// Account is one owner's share of a Store.
type Account struct {
	store *Store

	mu   sync.Mutex // guards left
	left int64
}

// Put is Store.Put within what is left of the account; beyond that it fails
// with ErrQuota.
func (a *Account) Put(ctx context.Context, r io.Reader, limit int64) (Ref, error) {
	a.mu.Lock()
	share := min(limit, a.left)
	a.left -= share
	a.mu.Unlock()
	ref, err := a.store.Put(ctx, r, share)
	a.mu.Lock()
	a.left += share - ref.Size
	a.mu.Unlock()
	if errors.Is(err, ErrTooLarge) && share < limit {
		return Ref{}, fmt.Errorf("put blob: %w: this run may store no more than %d bytes now", ErrQuota, share)
	}
	return ref, err
}

// verifying hashes what is read through it and checks the sum at the end.
type verifying struct {
	io.Closer
	src  io.Reader
	sum  hash.Hash
	want digest.Digest
	err  error
}

func newVerifying(src io.ReadCloser, d digest.Digest) *verifying {
	return &verifying{Closer: src, src: src, sum: sha256.New(), want: d}
}

func (v *verifying) Read(p []byte) (int, error) {
	if v.err != nil {
		return 0, v.err
	}
	n, err := v.src.Read(p)
	v.sum.Write(p[:n])
	if err == io.EOF {
		if got := digest.FromRaw([32]byte(v.sum.Sum(nil))); got != v.want {
			err = fmt.Errorf("%w: want %s, have %s", ErrCorrupt, short(v.want), short(got))
		}
	}
	v.err = err
	return n, err
}

func short(d digest.Digest) string { return d.Hex()[:12] }
