package tlog

import (
	"crypto/sha256"
	"fmt"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/numinance/numinance/internal/core/chain"
)

// emptyRoot is the root of a tree without leaves, SHA-256 of nothing.
var emptyRoot = Hash(sha256.Sum256(nil))

// maxProof is the longest proof a tree of 2^63 leaves can need.
const maxProof = 64

// Hashes turns raw 32-byte hashes into a proof.
func Hashes(raw [][]byte) ([]Hash, error) {
	if len(raw) > maxProof {
		return nil, chain.Fail(chain.InclusionFailed, "a proof of %d hashes, at most %d are possible", len(raw), maxProof)
	}
	out := make([]Hash, len(raw))
	for i, h := range raw {
		if len(h) != len(out[i]) {
			return nil, chain.Fail(chain.InclusionFailed, "hash %d of the proof is %d bytes", i, len(h))
		}
		copy(out[i][:], h)
	}
	return out, nil
}

// CheckInclusion verifies that leaf is the entry with the given index in the
// tree of c. The failure is labelled inclusion_failed.
func CheckInclusion(c Checkpoint, leaf Leaf, index int64, proof []Hash) error {
	if index < 0 || index >= c.Size {
		return chain.Fail(chain.InclusionFailed, "index %d is outside of a tree of %d", index, c.Size)
	}
	if err := tlog.CheckRecord(tlog.RecordProof(proof), c.Size, c.Root, index, leaf.Hash()); err != nil {
		return chain.Fail(chain.InclusionFailed, "entry %d of %s at size %d: %v", index, c.Origin, c.Size, err)
	}
	return nil
}

// CheckConsistency verifies that the tree of newer begins with the whole tree
// of older (P-217). Trees of equal size need no proof, and every tree extends
// the empty one. Failures: log_foreign, checkpoint_rollback,
// checkpoint_inconsistent, consistency_missing.
func CheckConsistency(older, newer Checkpoint, proof []Hash) error {
	switch {
	case older.Origin != newer.Origin:
		return chain.Fail(chain.LogForeign, "checkpoints of %q and %q", older.Origin, newer.Origin)
	case newer.Size < older.Size:
		return chain.Fail(chain.CheckpointRollback, "size %d, known before was %d", newer.Size, older.Size)
	case newer.Size == older.Size:
		if newer.Root != older.Root {
			return chain.Fail(chain.CheckpointInconsistent, "two roots at size %d", newer.Size)
		}
		return nil
	case older.Size == 0:
		if older.Root != emptyRoot {
			return chain.Fail(chain.CheckpointInconsistent, "an empty tree with a root of its own")
		}
		return nil
	case len(proof) == 0:
		return chain.Fail(chain.ConsistencyMissing, "from size %d to %d", older.Size, newer.Size)
	}
	if err := tlog.CheckTree(tlog.TreeProof(proof), newer.Size, newer.Root, older.Size, older.Root); err != nil {
		return chain.Fail(chain.CheckpointInconsistent, "size %d does not extend size %d: %v", newer.Size, older.Size, err)
	}
	return nil
}

// String names the kind for people.
func (k Kind) String() string {
	switch k {
	case KindHead:
		return "head"
	case KindAttestation:
		return "attestation"
	default:
		return fmt.Sprintf("0x%02x", byte(k))
	}
}
