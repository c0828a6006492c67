package tessera

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/transparency-dev/tessera"
	"github.com/transparency-dev/tessera/api"
	"github.com/transparency-dev/tessera/api/layout"
	"github.com/transparency-dev/tessera/client"
	"github.com/transparency-dev/tessera/storage/posix"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/sys/unix"
)

const (
	leafSize = 33 // bytes of every entry (P-224)

	// One tenant and few writers: what a caller waits for is the age of a batch
	// and the interval of checkpoints, so both are as short as the driver allows.
	batchSize          = 1
	batchAge           = 5 * time.Millisecond
	checkpointInterval = 100 * time.Millisecond
	publicationPoll    = 5 * time.Millisecond
	shutdownTimeout    = 10 * time.Second

	stateDir = ".state"
	lockName = "numinance.lock"
)

var (
	errInvalid     = errors.New("invalid request")
	errNotFound    = errors.New("not in the log")
	errTooNew      = errors.New("the log has not grown so far")
	errUnavailable = errors.New("the log cannot be used")
	errDamaged     = errors.New("the log on disk contradicts itself")
)

// Leaf is one entry of the log.
type leaf [leafSize]byte

// Log is a log in a directory. Two processes cannot have it open.
type Log struct {
	appender *tessera.Appender
	shutdown func(context.Context) error
	reader   tessera.LogReader
	verifier note.Verifier
	vkey     string
	lock     *os.File
	running  context.Context // ends with the log
	end      context.CancelFunc

	mu      sync.Mutex // guards the fields below
	index   map[leaf]uint64
	indexed uint64           // entries below it are in index
	pending map[leaf]*adding // one per leaf on its way in
	stale   bool             // an append failed; the disk knows what is in the log
	latest  published
	read    time.Time // when latest was read
}

// adding is a leaf on its way into the log.
type adding struct {
	done  chan struct{} // closed when index and err are set
	index uint64
	err   error
}

// published is a checkpoint that others can see.
type published struct {
	size uint64
	raw  []byte
}

// Config says where the log is and what it is called.
type Config struct {
	// Directory holds the log and nothing else.
	Directory string
	// Origin is the name of the log and of the host's key for it.
	Origin string
}

// Open opens or creates the log. It waits for the host's signature once, to
// learn the key, and reads every entry to know which leaf stands where.
func Open(ctx context.Context, c Config, host Signer) (*Log, error) {
	l := &Log{index: make(map[leaf]uint64), pending: make(map[leaf]*adding)}
	// The log outlives the call that opens it; Close ends it.
	running, end := context.WithCancel(context.WithoutCancel(ctx))
	l.running, l.end = running, end
	if err := l.open(ctx, running, c, host); err != nil {
		end()
		if l.lock != nil {
			l.lock.Close()
		}
		return nil, fmt.Errorf("open log %s: %w", c.Directory, err)
	}
	return l, nil
}

func (l *Log) open(ctx, running context.Context, c Config, host Signer) error {
	state := filepath.Join(c.Directory, stateDir)
	if err := os.MkdirAll(state, 0o700); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(state, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	l.lock = lock
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("another process has this log open: %w", err)
	}
	if err := sweep(c.Directory); err != nil {
		return err
	}
	size, root, err := treeState(state)
	if err != nil {
		return err
	}
	signer, vkey, err := newHostSigner(running, host, c.Origin, checkpointText(c.Origin, size, root))
	if err != nil {
		return err
	}
	l.verifier, l.vkey = signer.verifier, vkey
	driver, err := posix.New(running, posix.Config{Path: c.Directory})
	if err != nil {
		return err
	}
	options := tessera.NewAppendOptions().
		WithCheckpointSigner(signer).
		WithBatching(batchSize, batchAge).
		WithCheckpointInterval(checkpointInterval).
		WithShutdownTimeout(shutdownTimeout).
		WithCheckpointRepublishInterval(0)
	if l.appender, l.shutdown, l.reader, err = tessera.NewAppender(running, driver, options); err != nil {
		return err
	}
	if _, err := l.published(ctx); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("published checkpoint: %w", err)
	}
	go l.watch(lock.Name())
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reindex(ctx)
}

// watchInterval is how often the log makes sure that its directory is its own.
const watchInterval = 50 * time.Millisecond

// watch ends the log when its lock file is gone or another one: without the
// lock it must not write any more. It ends with the log.
func (l *Log) watch(name string) {
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		select {
		case <-l.running.Done():
			return
		case <-tick.C:
		}
		ours, err := l.lock.Stat()
		if err != nil {
			return // the log was closed
		}
		if there, err := os.Stat(name); err != nil || !os.SameFile(ours, there) {
			l.end()
		}
	}
}

var tempPattern = regexp.MustCompile(`^(checkpoint|treeState|version|gcState)[0-9]+$`)

// sweep removes temporary files that a killed process left.
func sweep(directory string) error {
	for _, dir := range []string{directory, filepath.Join(directory, stateDir)} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if e.Type().IsRegular() && tempPattern.MatchString(e.Name()) {
				if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// treeState reads the size and root the library has committed to disk, zero
// for a log that does not exist yet.
func treeState(dir string) (uint64, []byte, error) {
	raw, err := os.ReadFile(filepath.Join(dir, "treeState"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil, nil
	}
	if err != nil {
		return 0, nil, err
	}
	var s struct {
		Size uint64 `json:"size"`
		Root []byte `json:"root"`
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		return 0, nil, fmt.Errorf("%w: tree state: %v", errDamaged, err)
	}
	return s.Size, s.Root, nil
}

// reindex reads the entries that are not in the index yet. l.mu is held.
func (l *Log) reindex(ctx context.Context) error {
	size, err := l.reader.IntegratedSize(ctx)
	if err != nil {
		return fmt.Errorf("read tree size: %w", err)
	}
	for l.indexed < size {
		entries, err := l.entries(ctx, l.indexed/layout.EntryBundleWidth, size)
		if err != nil {
			return err
		}
		skip := l.indexed % layout.EntryBundleWidth
		if uint64(len(entries)) <= skip {
			return fmt.Errorf("%w: entry %d is missing", errDamaged, l.indexed)
		}
		for _, e := range entries[skip:] {
			if len(e) != leafSize {
				return fmt.Errorf("%w: entry %d has %d bytes", errDamaged, l.indexed, len(e))
			}
			// The first place a leaf was given is the one it keeps.
			if _, ok := l.index[leaf(e)]; !ok {
				l.index[leaf(e)] = l.indexed
			}
			l.indexed++
		}
	}
	l.stale = false
	return nil
}

// entries reads one bundle of a tree of the given size.
func (l *Log) entries(ctx context.Context, bundle, size uint64) ([][]byte, error) {
	raw, err := l.reader.ReadEntryBundle(ctx, bundle, layout.PartialTileSize(0, bundle, size))
	if err != nil {
		return nil, fmt.Errorf("read entries: %w", err)
	}
	var b api.EntryBundle
	if err := b.UnmarshalText(raw); err != nil {
		return nil, fmt.Errorf("%w: entries: %v", errDamaged, err)
	}
	return b.Entries, nil
}

// Close waits until everything acknowledged is published, then ends the log.
func (l *Log) Close(ctx context.Context) error {
	var err error
	if l.running.Err() == nil {
		err = l.shutdown(ctx)
	}
	l.end()
	return errors.Join(err, l.lock.Close())
}

// VerifierKey returns the key of the log in the form of signed notes.
func (l *Log) VerifierKey() string { return l.vkey }

// Inclusion is an entry with the proof that a checkpoint covers it.
type Inclusion struct {
	Index      uint64
	Size       uint64
	Entry      []byte
	Proof      [][]byte
	Checkpoint []byte
}

// Append brings b into the log once, however often it is asked to, waits until
// a published checkpoint covers it and proves it.
func (l *Log) Append(ctx context.Context, b []byte) (Inclusion, error) {
	want, err := parseLeaf(b)
	if err != nil {
		return Inclusion{}, err
	}
	index, err := l.place(ctx, want)
	if err != nil {
		return Inclusion{}, err
	}
	for {
		p, err := l.published(ctx)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return Inclusion{}, err
		}
		if err == nil && p.size > index {
			proof, err := l.Inclusion(ctx, index, p.size)
			if err != nil {
				return Inclusion{}, err
			}
			proof.Checkpoint = p.raw
			return proof, nil
		}
		select {
		case <-l.running.Done():
			return Inclusion{}, fmt.Errorf("%w: it was closed", errUnavailable)
		case <-ctx.Done():
			return Inclusion{}, fmt.Errorf("%w: entry %d is stored but not yet in a signed checkpoint: %w", errUnavailable, index, ctx.Err())
		case <-time.After(publicationPoll):
		}
	}
}

// place returns the index of want, which it adds if it is not there.
func (l *Log) place(ctx context.Context, want leaf) (uint64, error) {
	if l.running.Err() != nil {
		return 0, fmt.Errorf("%w: it was closed", errUnavailable)
	}
	l.mu.Lock()
	if l.stale {
		if err := l.reindex(ctx); err != nil {
			l.mu.Unlock()
			return 0, fmt.Errorf("%w: %w", errUnavailable, err)
		}
	}
	if i, ok := l.index[want]; ok {
		l.mu.Unlock()
		return i, nil
	}
	a := l.pending[want]
	if a == nil {
		a = &adding{done: make(chan struct{})}
		l.pending[want] = a
		// Not under the caller's context: one who gives up must not take the
		// leaf away from another who waits for the same.
		future := l.appender.Add(context.WithoutCancel(ctx), tessera.NewEntry(want[:]))
		go l.settle(want, a, future)
	}
	l.mu.Unlock()
	select {
	case <-a.done:
		return a.index, a.err
	case <-l.running.Done():
		return 0, fmt.Errorf("%w: it was closed", errUnavailable)
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// settle records what became of a leaf on its way in. It ends with the
// library's answer, which comes at the latest when the log is closed.
func (l *Log) settle(want leaf, a *adding, future tessera.IndexFuture) {
	i, err := future()
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.pending, want)
	if err != nil {
		l.stale = true
		a.err = fmt.Errorf("%w: add to the log: %w", errUnavailable, err)
	} else {
		a.index = i.Index
		l.index[want] = i.Index
	}
	close(a.done)
}

// published returns the newest checkpoint, verified. The file is read at most
// once per poll interval, whoever waits.
func (l *Log) published(ctx context.Context) (published, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.latest.raw != nil && time.Since(l.read) < publicationPoll/2 {
		return l.latest, nil
	}
	raw, err := l.reader.ReadCheckpoint(ctx)
	if err != nil {
		return published{}, fmt.Errorf("%w: read checkpoint: %w", errUnavailable, err)
	}
	n, err := note.Open(raw, note.VerifierList(l.verifier))
	if err != nil {
		return published{}, fmt.Errorf("%w: published checkpoint: %v", errDamaged, err)
	}
	lines := strings.SplitN(n.Text, "\n", 3)
	if len(lines) < 3 || lines[0] != l.verifier.Name() {
		return published{}, fmt.Errorf("%w: published checkpoint of %q", errDamaged, lines[0])
	}
	size, err := strconv.ParseUint(lines[1], 10, 64)
	if err != nil {
		return published{}, fmt.Errorf("%w: published checkpoint: %v", errDamaged, err)
	}
	l.latest, l.read = published{size: size, raw: raw}, time.Now()
	return l.latest, nil
}

// Checkpoint returns the newest published checkpoint.
func (l *Log) Checkpoint(ctx context.Context) ([]byte, error) {
	p, err := l.published(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: no checkpoint is published yet", errUnavailable)
	}
	return p.raw, err
}

// Inclusion proves the entry at index in the tree of the given size, which
// must be published.
func (l *Log) Inclusion(ctx context.Context, index, size uint64) (Inclusion, error) {
	if index >= size {
		return Inclusion{}, fmt.Errorf("%w: entry %d of a tree of %d", errNotFound, index, size)
	}
	prover, current, err := l.prover(ctx, size)
	if err != nil {
		return Inclusion{}, err
	}
	entries, err := l.entries(ctx, index/layout.EntryBundleWidth, current)
	if err != nil {
		return Inclusion{}, err
	}
	i := index % layout.EntryBundleWidth
	if uint64(len(entries)) <= i {
		return Inclusion{}, fmt.Errorf("%w: entry %d is missing", errDamaged, index)
	}
	proof, err := prover.InclusionProof(ctx, index)
	if err != nil {
		return Inclusion{}, fmt.Errorf("prove entry %d: %w", index, err)
	}
	return Inclusion{Index: index, Size: size, Entry: entries[i], Proof: proof}, nil
}

// Consistency proves that the tree of size first is the beginning of that of
// size second, which must be published.
func (l *Log) Consistency(ctx context.Context, first, second uint64) ([][]byte, error) {
	if first > second || second == 0 {
		return nil, fmt.Errorf("%w: from size %d to %d", errInvalid, first, second)
	}
	prover, _, err := l.prover(ctx, second)
	if err != nil {
		return nil, err
	}
	if first == 0 || first == second {
		return nil, nil
	}
	proof, err := prover.ConsistencyProof(ctx, first, second)
	if err != nil {
		return nil, fmt.Errorf("prove size %d to %d: %w", first, second, err)
	}
	return proof, nil
}

// prover returns a prover for a published size, and the published size now.
func (l *Log) prover(ctx context.Context, size uint64) (*client.ProofBuilder, uint64, error) {
	p, err := l.published(ctx)
	if err != nil {
		return nil, 0, err
	}
	if size > p.size {
		return nil, 0, fmt.Errorf("%w: size %d, published is %d", errTooNew, size, p.size)
	}
	prover, err := client.NewProofBuilder(ctx, size, func(ctx context.Context, level, index uint64, partial uint8) ([]byte, error) {
		return l.tile(ctx, level, index, partial, p.size)
	})
	if err != nil {
		return nil, 0, fmt.Errorf("prove in a tree of %d: %w", size, err)
	}
	return prover, p.size, nil
}

const hashSize = 32

// tile reads a tile of an older tree. A partial tile of just that width may
// never have been written, or be gone; the one of the present tree begins with
// the same hashes.
func (l *Log) tile(ctx context.Context, level, index uint64, partial uint8, size uint64) ([]byte, error) {
	raw, err := l.reader.ReadTile(ctx, level, index, partial)
	if !errors.Is(err, fs.ErrNotExist) || partial == 0 {
		return raw, err
	}
	now := layout.PartialTileSize(level, index, size)
	if raw, err = l.reader.ReadTile(ctx, level, index, now); err != nil {
		return nil, err
	}
	if len(raw) < int(partial)*hashSize {
		return nil, fmt.Errorf("%w: tile %d/%d is short", errDamaged, level, index)
	}
	return raw[:int(partial)*hashSize], nil
}

// Lookup returns the index of a leaf that a published checkpoint covers.
func (l *Log) Lookup(ctx context.Context, b []byte) (uint64, error) {
	want, err := parseLeaf(b)
	if err != nil {
		return 0, err
	}
	p, err := l.published(ctx)
	if err != nil {
		return 0, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stale {
		if err := l.reindex(ctx); err != nil {
			return 0, fmt.Errorf("%w: %w", errUnavailable, err)
		}
	}
	i, ok := l.index[want]
	if !ok || i >= p.size {
		return 0, fmt.Errorf("%w: this leaf", errNotFound)
	}
	return i, nil
}

// parseLeaf checks length and kind byte (P-224, P-225).
func parseLeaf(b []byte) (leaf, error) {
	if len(b) != leafSize {
		return leaf{}, fmt.Errorf("%w: a leaf has %d bytes, this one %d", errInvalid, leafSize, len(b))
	}
	if b[0] != 0x48 && b[0] != 0x41 {
		return leaf{}, fmt.Errorf("%w: kind byte 0x%02x, want 0x48 or 0x41", errInvalid, b[0])
	}
	return leaf(b), nil
}
