package files

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Bounds of the port, repeated here because a store must not depend on its
// caller for them.
const (
	maxBatch  = 256     // records of one append (P-195)
	maxRecord = 1 << 16 // bytes of one record
	// maxAnswer bounds the bytes of one ListRange answer, so that it fits into
	// a message whatever the records' sizes; the answer is then shorter than asked.
	maxAnswer = 2 << 20
)

const (
	chainsDir = "chains"
	tempDir   = "tmp"
	lockFile  = "lock"
	suffix    = ".seg"
)

var (
	errInvalid  = errors.New("invalid request")
	errExists   = errors.New("other bytes are stored there")
	errGap      = errors.New("the request leaves a gap")
	errNotFound = errors.New("no such record")
	errClosed   = errors.New("the store is closed")
	errLocked   = errors.New("another process has this store open")
)

var changePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

// Store keeps evidence records in files of one directory: chains/<change
// id>/<first sequence>.seg, one file for every append. A file comes into being
// by link(2) from a synced temporary file, so it is there whole or not at all
// and is never replaced. The zero value is not usable; use Open.
type Store struct {
	root *os.Root
	lock *os.File

	mu     sync.Mutex // guards chains and closed
	chains map[string]*chain
	closed bool
}

// chain is what is known of one Change's directory.
type chain struct {
	mu     sync.Mutex // guards the fields below; held during an append
	loaded bool
	firsts []uint64 // first sequence of every segment, ascending
	length uint64
	last   [sha256.Size]byte // digest of the last record
}

// Open opens or creates the store in directory and takes its lock, which ends
// with the process. Temporary files of a process that was killed are removed.
func Open(directory string) (*Store, error) {
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return nil, fmt.Errorf("open evidence store: %w", err)
	}
	// An os.Root resolves nothing outside of it, not through links either.
	root, err := os.OpenRoot(directory)
	if err != nil {
		return nil, fmt.Errorf("open evidence store: %w", err)
	}
	s := &Store{root: root, chains: make(map[string]*chain)}
	if err := s.prepare(); err != nil {
		s.Close()
		return nil, fmt.Errorf("open evidence store %s: %w", directory, err)
	}
	return s, nil
}

func (s *Store) prepare() error {
	lock, err := s.root.OpenFile(lockFile, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	s.lock = lock
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return errLocked
		}
		return fmt.Errorf("lock: %w", err)
	}
	for _, dir := range []string{chainsDir, tempDir} {
		if err := s.root.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if err := s.syncDir("."); err != nil {
		return err
	}
	left, err := fs.ReadDir(s.root.FS(), tempDir)
	if err != nil {
		return err
	}
	for _, f := range left {
		if err := s.root.Remove(path.Join(tempDir, f.Name())); err != nil {
			return err
		}
	}
	return nil
}

// Close releases the lock. Appends that returned are durable without it.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	var errs []error
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
		s.lock = nil
	}
	errs = append(errs, s.root.Close())
	return errors.Join(errs...)
}

// open returns the locked chain of change, loaded; the caller unlocks it.
func (s *Store) open(change string) (*chain, error) {
	if !changePattern.MatchString(change) {
		return nil, fmt.Errorf("%w: change id %q", errInvalid, change)
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, errClosed
	}
	c := s.chains[change]
	if c == nil {
		c = &chain{}
		s.chains[change] = c
	}
	s.mu.Unlock()
	c.mu.Lock()
	if !c.loaded {
		if err := s.load(change, c); err != nil {
			c.mu.Unlock()
			return nil, err
		}
	}
	return c, nil
}

// load reads which segments a chain has. It syncs the directory first: a
// segment may have been linked by a process that was killed before its sync,
// and from here on it is answered as stored.
func (s *Store) load(change string, c *chain) error {
	c.firsts, c.length, c.last = nil, 0, [sha256.Size]byte{}
	dir := path.Join(chainsDir, change)
	entries, err := fs.ReadDir(s.root.FS(), dir)
	if errors.Is(err, fs.ErrNotExist) {
		c.loaded = true
		return nil
	}
	if err != nil {
		return fmt.Errorf("read chain %s: %w", change, err)
	}
	if err := s.syncDir(dir); err != nil {
		return fmt.Errorf("sync chain %s: %w", change, err)
	}
	if err := s.syncDir(chainsDir); err != nil {
		return fmt.Errorf("sync chain %s: %w", change, err)
	}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), suffix)
		first, err := strconv.ParseUint(name, 10, 64)
		if !ok || err != nil || segmentName(first) != e.Name() || !e.Type().IsRegular() {
			return fmt.Errorf("read chain %s: %w: unexpected entry %q", change, errDamaged, e.Name())
		}
		c.firsts = append(c.firsts, first)
	}
	sort.Slice(c.firsts, func(i, j int) bool { return c.firsts[i] < c.firsts[j] })
	if len(c.firsts) > 0 {
		if c.firsts[0] != 1 {
			return fmt.Errorf("read chain %s: %w: records before %d are gone", change, errDamaged, c.firsts[0])
		}
		first := c.firsts[len(c.firsts)-1]
		records, err := s.readSegment(change, first)
		if err != nil {
			return err
		}
		c.length = first + uint64(len(records)) - 1
		c.last = sha256.Sum256(records[len(records)-1])
	}
	c.loaded = true
	return nil
}

func segmentName(first uint64) string { return fmt.Sprintf("%020d%s", first, suffix) }

func (s *Store) readSegment(change string, first uint64) ([][]byte, error) {
	name := path.Join(chainsDir, change, segmentName(first))
	file, err := s.root.ReadFile(name)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("read %s: %w: the file is gone", name, errDamaged)
		}
		return nil, fmt.Errorf("read segment: %w", err)
	}
	records, err := decodeSegment(file, change, first)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return records, nil
}

// segment returns the records of the i-th segment of c, which must reach
// exactly to the next.
func (s *Store) segment(change string, c *chain, i int) ([][]byte, error) {
	records, err := s.readSegment(change, c.firsts[i])
	if err != nil {
		return nil, err
	}
	end := c.length + 1
	if i+1 < len(c.firsts) {
		end = c.firsts[i+1]
	}
	if c.firsts[i]+uint64(len(records)) != end {
		return nil, fmt.Errorf("read chain %s: %w: segment %d does not reach record %d", change, errDamaged, c.firsts[i], end)
	}
	return records, nil
}

// Append writes consecutive records from first on, all or nothing, durable on
// return, and reports the chain's length and how many records were new. Bytes
// that already stand where they belong are left alone; others are errExists.
func (s *Store) Append(ctx context.Context, change string, first uint64, records [][]byte) (length uint64, written int, err error) {
	if first == 0 || len(records) == 0 || len(records) > maxBatch {
		return 0, 0, fmt.Errorf("%w: first sequence %d, %d records; want 1 to %d from 1 on", errInvalid, first, len(records), maxBatch)
	}
	if first+uint64(len(records)) < first {
		return 0, 0, fmt.Errorf("%w: first sequence %d is out of range", errInvalid, first)
	}
	for i, r := range records {
		if len(r) == 0 || len(r) > maxRecord {
			return 0, 0, fmt.Errorf("%w: record %d has %d bytes; want 1 to %d", errInvalid, first+uint64(i), len(r), maxRecord)
		}
	}
	c, err := s.open(change)
	if err != nil {
		return 0, 0, err
	}
	defer c.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return 0, 0, err
	}
	if first > c.length+1 {
		return 0, 0, fmt.Errorf("append to %s: %w: it begins at %d, the chain ends at %d", change, errGap, first, c.length)
	}
	old := int(min(c.length+1-first, uint64(len(records))))
	if err := s.compare(change, c, first, records[:old]); err != nil {
		return 0, 0, err
	}
	fresh := records[old:]
	if len(fresh) == 0 {
		return c.length, 0, nil
	}
	if err := s.write(change, c.length+1, fresh); err != nil {
		// Whether the segment is there is only known from the directory now.
		c.loaded = false
		return 0, 0, err
	}
	c.firsts = append(c.firsts, c.length+1)
	c.length += uint64(len(fresh))
	c.last = sha256.Sum256(fresh[len(fresh)-1])
	return c.length, len(fresh), nil
}

// compare checks that records stand in the store from first on.
func (s *Store) compare(change string, c *chain, first uint64, records [][]byte) error {
	for len(records) > 0 {
		i := c.find(first)
		stored, err := s.segment(change, c, i)
		if err != nil {
			return err
		}
		stored = stored[first-c.firsts[i]:]
		n := min(len(stored), len(records))
		for j := range n {
			if !bytes.Equal(stored[j], records[j]) {
				return fmt.Errorf("append to %s: record %d: %w", change, first+uint64(j), errExists)
			}
		}
		first += uint64(n)
		records = records[n:]
	}
	return nil
}

// find returns the segment that holds the given sequence.
func (c *chain) find(sequence uint64) int {
	return sort.Search(len(c.firsts), func(i int) bool { return c.firsts[i] > sequence }) - 1
}

// write brings a new segment into being: synced temporary file, link, synced
// directory.
func (s *Store) write(change string, first uint64, records [][]byte) (err error) {
	dir := path.Join(chainsDir, change)
	if err := s.root.Mkdir(dir, 0o700); err == nil {
		if err := s.syncDir(chainsDir); err != nil {
			return fmt.Errorf("create chain %s: %w", change, err)
		}
	} else if !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("create chain %s: %w", change, err)
	}
	temp := path.Join(tempDir, change+"."+segmentName(first))
	// One process has the store and one append the chain, so what stands there
	// is the rest of an append that failed.
	if err := s.root.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("write segment: %w", err)
	}
	f, err := s.root.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o444)
	if err != nil {
		return fmt.Errorf("write segment: %w", err)
	}
	defer func() {
		if rmErr := s.root.Remove(temp); err == nil && rmErr != nil {
			err = fmt.Errorf("remove temporary file: %w", rmErr)
		}
	}()
	if _, err := f.Write(encodeSegment(change, first, records)); err != nil {
		f.Close()
		return fmt.Errorf("write segment: %w", err)
	}
	// The mode is set again because the umask had its say at creation.
	if err := errors.Join(f.Chmod(0o444), f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write segment: %w", err)
	}
	name := path.Join(dir, segmentName(first))
	if err := s.root.Link(temp, name); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("write segment %s: %w: a file nobody here wrote stands there", name, errDamaged)
		}
		return fmt.Errorf("write segment: %w", err)
	}
	if err := s.syncDir(dir); err != nil {
		return fmt.Errorf("write segment: %w", err)
	}
	return nil
}

func (s *Store) syncDir(dir string) error {
	d, err := s.root.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Get returns the bytes of one record.
func (s *Store) Get(change string, sequence uint64) ([]byte, error) {
	c, err := s.open(change)
	if err != nil {
		return nil, err
	}
	defer c.mu.Unlock()
	if sequence == 0 || sequence > c.length {
		return nil, fmt.Errorf("record %d of %s: %w: the chain has %d", sequence, change, errNotFound, c.length)
	}
	i := c.find(sequence)
	records, err := s.segment(change, c, i)
	if err != nil {
		return nil, err
	}
	return records[sequence-c.firsts[i]], nil
}

// List returns up to most records from first on, fewer if they are large, none
// past the end, and the chain's length.
func (s *Store) List(change string, first uint64, most int) ([][]byte, uint64, error) {
	if first == 0 || most < 1 || most > maxBatch {
		return nil, 0, fmt.Errorf("%w: %d records from %d", errInvalid, most, first)
	}
	c, err := s.open(change)
	if err != nil {
		return nil, 0, err
	}
	defer c.mu.Unlock()
	var out [][]byte
	size := 0
	for len(out) < most && first <= c.length {
		i := c.find(first)
		records, err := s.segment(change, c, i)
		if err != nil {
			return nil, 0, err
		}
		for _, r := range records[first-c.firsts[i]:] {
			if len(out) == most || len(out) > 0 && size+len(r) > maxAnswer {
				return out, c.length, nil
			}
			out, size, first = append(out, r), size+len(r), first+1
		}
	}
	return out, c.length, nil
}

// Head returns the chain's length and the digest of its last record, 0 and ""
// for a chain that does not exist.
func (s *Store) Head(change string) (uint64, string, error) {
	c, err := s.open(change)
	if err != nil {
		return 0, "", err
	}
	defer c.mu.Unlock()
	if c.length == 0 {
		return 0, "", nil
	}
	return c.length, "sha256:" + hex.EncodeToString(c.last[:]), nil
}
