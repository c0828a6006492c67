package tlog_test

import (
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/note"
	xtlog "golang.org/x/mod/sumdb/tlog"
	"pgregory.net/rapid"

	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/tlog"
)

// tree is a log in memory.
type tree struct {
	leaves []tlog.Leaf
	stored []xtlog.Hash
}

func (t *tree) ReadHashes(indexes []int64) ([]xtlog.Hash, error) {
	out := make([]xtlog.Hash, len(indexes))
	for i, x := range indexes {
		out[i] = t.stored[x]
	}
	return out, nil
}

func grow(n int) *tree {
	t := &tree{}
	for i := range n {
		l, err := tlog.HeadLeaf(digest.Of([]byte(fmt.Sprint("head", i))))
		if err != nil {
			panic(err)
		}
		hashes, err := xtlog.StoredHashes(int64(i), l[:], t)
		if err != nil {
			panic(err)
		}
		t.leaves, t.stored = append(t.leaves, l), append(t.stored, hashes...)
	}
	return t
}

func (t *tree) at(size int) tlog.Checkpoint {
	root, err := xtlog.TreeHash(int64(size), t)
	if err != nil {
		panic(err)
	}
	if size == 0 {
		root = sha256.Sum256(nil)
	}
	return tlog.Checkpoint{Origin: "example.org/log", Size: int64(size), Root: root}
}

// P-224, P-225: a leaf is 33 bytes and begins with 0x48 or 0x41.
func TestP224P225LeafForm(t *testing.T) {
	raw := make([]byte, 34)
	for _, c := range []struct {
		name string
		kind byte
		size int
		ok   bool
	}{
		{"head", 0x48, 33, true}, {"attestation", 0x41, 33, true},
		{"short", 0x48, 32, false}, {"long", 0x48, 34, false}, {"empty", 0, 0, false},
		{"kind 0x00", 0x00, 33, false}, {"kind 0x42", 0x42, 33, false}, {"kind 0xff", 0xff, 33, false},
	} {
		raw[0] = c.kind
		_, err := tlog.ParseLeaf(raw[:c.size])
		if (err == nil) != c.ok || (err != nil && chain.LabelOf(err) != chain.LeafMalformed) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	l, err := tlog.AttestationLeaf(digest.Of([]byte("x")))
	if err != nil || l.Kind() != tlog.KindAttestation || l.Digest() != digest.Of([]byte("x")) {
		t.Errorf("attestation leaf: %v %v", l, err)
	}
	if _, err := tlog.HeadLeaf("sha256:zz"); err == nil {
		t.Error("leaf of a malformed digest")
	}
}

// P-226: the leaf hash is computed here, SHA-256(0x00 || entry).
func TestP226LeafHash(t *testing.T) {
	l, _ := tlog.HeadLeaf(digest.Of([]byte("x")))
	if got, want := l.Hash(), tlog.Hash(sha256.Sum256(append([]byte{0}, l[:]...))); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
}

// P-217: any inclusion and any consistency of an honest log verifies, and
// nothing else does.
func TestP217Proofs(t *testing.T) {
	full := grow(70)
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(1, 70).Draw(t, "size")
		index := rapid.IntRange(0, size-1).Draw(t, "index")
		proof, err := xtlog.ProveRecord(int64(size), int64(index), full)
		if err != nil {
			t.Fatal(err)
		}
		c := full.at(size)
		if err := tlog.CheckInclusion(c, full.leaves[index], int64(index), proof); err != nil {
			t.Fatal(err)
		}
		other := rapid.IntRange(0, 69).Draw(t, "other")
		if other != index {
			if err := tlog.CheckInclusion(c, full.leaves[other], int64(index), proof); chain.LabelOf(err) != chain.InclusionFailed {
				t.Fatalf("proof for another leaf: %v", err)
			}
			if err := tlog.CheckInclusion(c, full.leaves[index], int64(other), proof); chain.LabelOf(err) != chain.InclusionFailed {
				t.Fatalf("proof for another index: %v", err)
			}
		}
		older := rapid.IntRange(0, size).Draw(t, "older")
		var tp xtlog.TreeProof
		if older > 0 && older < size {
			if tp, err = xtlog.ProveTree(int64(size), int64(older), full); err != nil {
				t.Fatal(err)
			}
		}
		if err := tlog.CheckConsistency(full.at(older), c, tp); err != nil {
			t.Fatal(err)
		}
		if older == 0 || older == size {
			return
		}
		if err := tlog.CheckConsistency(full.at(older), c, nil); chain.LabelOf(err) != chain.ConsistencyMissing {
			t.Fatalf("no proof: %v", err)
		}
		rewritten := full.at(older)
		rewritten.Root[3] ^= 1
		if err := tlog.CheckConsistency(rewritten, c, tp); chain.LabelOf(err) != chain.CheckpointInconsistent {
			t.Fatalf("rewritten log: %v", err)
		}
		if err := tlog.CheckConsistency(c, full.at(older), tp); chain.LabelOf(err) != chain.CheckpointRollback {
			t.Fatalf("rolled back log: %v", err)
		}
	})
}

func key(t testing.TB, name string) (note.Signer, note.Verifier) {
	t.Helper()
	skey, vkey, err := note.GenerateKey(rand.Reader, name)
	if err != nil {
		t.Fatal(err)
	}
	s, err := note.NewSigner(skey)
	if err != nil {
		t.Fatal(err)
	}
	v, err := note.NewVerifier(vkey)
	if err != nil {
		t.Fatal(err)
	}
	return s, v
}

func sign(t testing.TB, text string, signers ...note.Signer) []byte {
	t.Helper()
	b, err := note.Sign(&note.Note{Text: text}, signers...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// P-218, P-220: only the log's own signature under its own name counts.
func TestP218P220Checkpoints(t *testing.T) {
	logSigner, logKey := key(t, "example.org/log")
	otherSigner, _ := key(t, "example.org/log")
	hostSigner, _ := key(t, "example.org/host")
	witnessSigner, witnessKey := key(t, "example.org/witness")
	c := grow(5).at(5)
	foreign := c
	foreign.Origin = "example.org/other"

	got, err := tlog.OpenCheckpoint(sign(t, c.Text(), logSigner, witnessSigner), logKey)
	if err != nil || got.Text() != c.Text() {
		t.Fatalf("got %v, %v", got, err)
	}
	for _, tc := range []struct {
		name   string
		signed []byte
		want   chain.Label
	}{
		{"signed by the host", sign(t, c.Text(), hostSigner), chain.LogForeign},
		{"signed by another log of that name", sign(t, c.Text(), otherSigner), chain.LogForeign},
		{"signed by a witness alone", sign(t, c.Text(), witnessSigner), chain.LogForeign},
		{"another origin under the log's key", sign(t, foreign.Text(), logSigner), chain.LogForeign},
		{"edited", []byte(strings.Replace(string(sign(t, c.Text(), logSigner)), "\n5\n", "\n6\n", 1)), chain.SignatureInvalid},
		{"signed text that is no checkpoint", sign(t, "example.org/log\nfive\n", logSigner), chain.CheckpointMalformed},
		{"no note", []byte("x"), chain.CheckpointMalformed},
	} {
		if _, err := tlog.OpenCheckpoint(tc.signed, logKey); chain.LabelOf(err) != tc.want {
			t.Errorf("%s: got %v, want %s", tc.name, err, tc.want)
		}
	}
	names, err := tlog.Witnesses(sign(t, c.Text(), logSigner, witnessSigner), witnessKey)
	if err != nil || len(names) != 1 || names[0] != "example.org/witness" {
		t.Errorf("witnesses: %v, %v", names, err)
	}
	if names, err := tlog.Witnesses(sign(t, c.Text(), logSigner), witnessKey); err != nil || len(names) != 0 {
		t.Errorf("no witness: %v, %v", names, err)
	}
	trailer, err := tlog.ParseTrailer(c.Trailer())
	if err != nil || trailer.Text() != c.Text() {
		t.Errorf("trailer: %v, %v", trailer, err)
	}
}

func TestSigningRequests(t *testing.T) {
	log := grow(9)
	text := func(c tlog.Checkpoint) []byte { return []byte(c.Text()) }
	other, forged, extended, empty, head := log.at(5), log.at(5), log.at(6), log.at(0), log.at(5)
	other.Origin = "example.org/other"
	forged.Root[0] ^= 1
	extended.Extensions = []string{"x"}
	empty.Root = tlog.Hash{}
	head.Origin = chain.HeadDomain
	for _, c := range []struct {
		name       string
		prev, next []byte
		want       chain.Label // "" is signed
	}{
		{"the first", nil, text(log.at(0)), ""},
		{"growth", text(log.at(5)), text(log.at(6)), ""},
		{"the same again", text(log.at(5)), text(log.at(5)), ""},
		{"smaller", text(log.at(5)), text(log.at(4)), chain.CheckpointRollback},
		{"another root", text(log.at(5)), text(forged), chain.CheckpointInconsistent},
		{"another origin", text(log.at(5)), text(other), chain.LogForeign},
		{"extension lines", text(log.at(5)), text(extended), chain.CheckpointMalformed},
		{"an empty tree with a root", nil, text(empty), chain.CheckpointInconsistent},
		{"a head statement", nil, []byte(chain.HeadDomain + "\nchg-one\n3\nsha256:00\n"), chain.CheckpointMalformed},
		{"a checkpoint named like a head statement", nil, text(head), chain.CheckpointMalformed},
		{"a leading zero", nil, []byte("o\n05\n" + strings.Split(log.at(5).Text(), "\n")[2] + "\n"), chain.CheckpointMalformed},
		{"nothing", nil, nil, chain.CheckpointMalformed},
	} {
		err := tlog.CheckSigningRequest(c.prev, c.next)
		if chain.LabelOf(err) != c.want || (c.want == "") != (err == nil) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
	}
}

func FuzzParseCheckpoint(f *testing.F) {
	f.Add(grow(5).at(5).Text())
	f.Add("a\n0\n47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=\n")
	f.Add("a\n1\n\n")
	f.Fuzz(func(t *testing.T, s string) {
		c, err := tlog.ParseCheckpoint(s)
		if err != nil {
			if chain.LabelOf(err) == "" {
				t.Fatalf("no label: %v", err)
			}
			return
		}
		if c.Text() != s {
			t.Fatalf("%q parses but is written as %q", s, c.Text())
		}
	})
}

// FuzzProofs feeds proofs of any shape at any place: never a panic or a hang.
func FuzzProofs(f *testing.F) {
	f.Add(int64(5), int64(2), int64(1<<60), []byte("0123456789abcdef0123456789abcdef"))
	f.Add(int64(1<<60), int64(1<<59), int64(3), []byte{})
	f.Fuzz(func(t *testing.T, size, index, older int64, raw []byte) {
		if size < 0 || size > tlog.MaxSize || older < 0 || older > tlog.MaxSize {
			return
		}
		var proof [][]byte
		for len(raw) >= 32 {
			proof, raw = append(proof, raw[:32]), raw[32:]
		}
		hashes, err := tlog.Hashes(proof)
		if err != nil {
			return
		}
		c := tlog.Checkpoint{Origin: "o", Size: size, Root: tlog.Hash{1}}
		l, _ := tlog.HeadLeaf(digest.Of(nil))
		if tlog.CheckInclusion(c, l, index, hashes) == nil {
			t.Fatal("a proof for a root nobody computed")
		}
		if older != size && older > 0 && tlog.CheckConsistency(tlog.Checkpoint{Origin: "o", Size: older, Root: tlog.Hash{2}}, c, hashes) == nil {
			t.Fatal("a consistency proof nobody computed")
		}
	})
}
