// Package tlog checks what a transparency log says: 33-byte leaves, signed
// checkpoints, inclusion and consistency proofs. It is built on x/mod alone,
// not on the library the embedded log runs on, so that the log is judged by a
// second implementation. The evidence context, the host's key broker and the
// offline verifier call it.
package tlog

import (
	"golang.org/x/mod/sumdb/tlog"

	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/digest"
)

// LeafSize is the size in bytes of every entry of the log (P-224).
const LeafSize = 33

// Kind says what a leaf anchors. The zero value is no kind and is refused.
type Kind byte

// The two kinds of leaf (P-225).
const (
	KindHead        Kind = 0x48 // 'H': digest of the last record of a chain
	KindAttestation Kind = 0x41 // 'A': digest of a DSSE envelope
)

// Leaf is one entry: a kind byte and 32 raw bytes.
type Leaf [LeafSize]byte

// Hash is an RFC 6962 tree hash.
type Hash = tlog.Hash

// HeadLeaf returns the leaf of a chain head.
func HeadLeaf(head digest.Digest) (Leaf, error) { return newLeaf(KindHead, head) }

// AttestationLeaf returns the leaf of a DSSE envelope's digest.
func AttestationLeaf(envelope digest.Digest) (Leaf, error) { return newLeaf(KindAttestation, envelope) }

func newLeaf(k Kind, d digest.Digest) (Leaf, error) {
	raw, err := d.Raw()
	if err != nil {
		return Leaf{}, err
	}
	var l Leaf
	l[0] = byte(k)
	copy(l[1:], raw[:])
	return l, nil
}

// ParseLeaf checks that b is a leaf: 33 bytes with a known kind byte
// (P-224, P-225). The failure is labelled leaf_malformed.
func ParseLeaf(b []byte) (Leaf, error) {
	if len(b) != LeafSize {
		return Leaf{}, chain.Fail(chain.LeafMalformed, "a leaf is %d bytes, this one is %d", LeafSize, len(b))
	}
	if k := Kind(b[0]); k != KindHead && k != KindAttestation {
		return Leaf{}, chain.Fail(chain.LeafMalformed, "kind byte 0x%02x, want 0x48 or 0x41", b[0])
	}
	return Leaf(b), nil
}

// Kind returns what l anchors.
func (l Leaf) Kind() Kind { return Kind(l[0]) }

// Digest returns what l names.
func (l Leaf) Digest() digest.Digest { return digest.FromRaw([32]byte(l[1:])) }

// Hash returns the RFC 6962 leaf hash, SHA-256(0x00 || l), computed here from
// the entry bytes and never taken from the log (P-226).
func (l Leaf) Hash() Hash { return tlog.RecordHash(l[:]) }
