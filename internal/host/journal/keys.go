package journal

import (
	"hash/maphash"

	"github.com/numinance/numinance/internal/core/identity"
)

// maxKeys bounds how many keys are remembered; beyond it the disk is asked every
// time.
const maxKeys = 1 << 20

// keys remembers which keys the ledger may hold, as hashes, so that a key that
// is new needs no look at the disk. A key that it takes for known may be new; it
// never takes a known one for new. The journal's mu guards it.
type keys struct {
	seed maphash.Seed
	runs map[identity.RunID]*runKeys
	size int
	full bool
}

// runKeys are those of one run: all that are on disk if read is set, and all
// that were started since.
type runKeys struct {
	read   bool
	hashes map[uint64]struct{}
}

func (k *keys) of(run identity.RunID) *runKeys {
	if k.runs == nil {
		k.seed, k.runs = maphash.MakeSeed(), map[identity.RunID]*runKeys{}
	}
	r := k.runs[run]
	if r == nil {
		r = &runKeys{hashes: map[uint64]struct{}{}}
		k.runs[run] = r
		k.size++
	}
	return r
}

// started adds a key. It is called before the row is written.
func (k *keys) started(run identity.RunID, key string) {
	if k.full {
		return
	}
	r := k.of(run)
	n := len(r.hashes)
	r.hashes[maphash.String(k.seed, key)] = struct{}{}
	if k.size += len(r.hashes) - n; k.size >= maxKeys {
		k.full, k.runs = true, nil
	}
}

// loaded notes that every key of the run that was on disk has been added.
func (k *keys) loaded(run identity.RunID) {
	if !k.full {
		k.of(run).read = true
	}
}

// absent reports whether the ledger holds no such key, and if that is not known,
// whether reading the run's keys would tell.
func (k *keys) absent(run identity.RunID, key string) (absent, load bool) {
	if k.full {
		return false, false
	}
	r := k.of(run)
	if !r.read {
		return false, true
	}
	_, maybe := r.hashes[maphash.String(k.seed, key)]
	return !maybe, false
}
