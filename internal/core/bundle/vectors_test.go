package bundle_test

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"
	xtlog "golang.org/x/mod/sumdb/tlog"

	evidence "github.com/numinance/numinance/conformance/evidence/v1"
	"github.com/numinance/numinance/internal/core/bundle"
	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/tlog"
)

var update = flag.Bool("update", false, "write the golden vectors anew")

const vectorsDir = "../../../conformance/evidence/v1/vectors"

// signer returns the key that name and seed always give.
func signer(name, seed string) (note.Signer, string) {
	sum := sha256.Sum256([]byte("numinance test vector key " + name + seed))
	key := ed25519.NewKeyFromSeed(sum[:])
	vkey, err := note.NewEd25519VerifierKey(name, key.Public().(ed25519.PublicKey))
	if err != nil {
		panic(err)
	}
	hash := strings.Split(vkey, "+")[1]
	s, err := note.NewSigner("PRIVATE+KEY+" + name + "+" + hash + "+" + base64.StdEncoding.EncodeToString(append([]byte{1}, sum[:]...)))
	if err != nil {
		panic(err)
	}
	return s, vkey
}

// The parties of the vectors.
var (
	headKey, headVKey       = signer("example.org/evidence", "")
	oldKey, oldVKey         = signer("example.org/evidence", " of last year")
	strangerKey, _          = signer("example.org/evidence", " of a stranger")
	logKey, logVKey         = signer("example.org/log", "")
	impostorKey, _          = signer("example.org/log", " of an impostor")
	foreignKey, _           = signer("example.net/log", "")
	witnessKey, witnessVKey = signer("example.com/witness", "")
)

// memLog is a log in memory.
type memLog struct {
	stored []xtlog.Hash
	leaves []tlog.Leaf
}

func (l *memLog) ReadHashes(indexes []int64) ([]xtlog.Hash, error) {
	out := make([]xtlog.Hash, len(indexes))
	for i, x := range indexes {
		out[i] = l.stored[x]
	}
	return out, nil
}

func (l *memLog) add(leaf tlog.Leaf) int64 {
	hashes, err := xtlog.StoredHashes(int64(len(l.leaves)), leaf[:], l)
	if err != nil {
		panic(err)
	}
	l.stored, l.leaves = append(l.stored, hashes...), append(l.leaves, leaf)
	return int64(len(l.leaves) - 1)
}

// noise adds what other Changes anchor.
func (l *memLog) noise(name string, n int) *memLog {
	for i := range n {
		leaf, err := tlog.AttestationLeaf(digest.Of([]byte(fmt.Sprint(name, i))))
		if err != nil {
			panic(err)
		}
		l.add(leaf)
	}
	return l
}

func (l *memLog) checkpoint(origin string, size int64) tlog.Checkpoint {
	root, err := xtlog.TreeHash(size, l)
	if err != nil {
		panic(err)
	}
	return tlog.Checkpoint{Origin: origin, Size: size, Root: root}
}

func (l *memLog) now() tlog.Checkpoint {
	return l.checkpoint("example.org/log", int64(len(l.leaves)))
}

func (l *memLog) include(index, size int64) []tlog.Hash {
	p, err := xtlog.ProveRecord(size, index, l)
	if err != nil {
		panic(err)
	}
	return p
}

func (l *memLog) consistency(first, second int64) bundle.Consistency {
	p, err := xtlog.ProveTree(second, first, l)
	if err != nil {
		panic(err)
	}
	return bundle.Consistency{First: first, Second: second, Proof: p}
}

func signed(c tlog.Checkpoint, keys ...note.Signer) []byte {
	b, err := note.Sign(&note.Note{Text: c.Text()}, keys...)
	if err != nil {
		panic(err)
	}
	return b
}

func signHead(h chain.Head, keys ...note.Signer) []byte {
	b, err := chain.SignHead(h, keys...)
	if err != nil {
		panic(err)
	}
	return b
}

// records returns a chain of n records, and a terminal one if closed.
func records(change identity.ChangeID, n int, closed bool, mark string) [][]byte {
	h := chain.Start(change)
	at := time.Date(2026, 11, 30, 12, 0, 0, 123456789, time.UTC)
	var out [][]byte
	for i := range n {
		body, err := json.Marshal(map[string]any{"journal_seq": strconv.Itoa(i*3 + 1), "verb": "scm.GetFile", "note": mark + " é <>&"})
		if err != nil {
			panic(err)
		}
		b, next, err := chain.Append(h, chain.Entry{At: at.Add(time.Duration(i) * time.Second), Kind: "RESULT", Body: body})
		if err != nil {
			panic(err)
		}
		out, h = append(out, b), next
	}
	if closed {
		b, _, err := chain.Close(h, at.Add(time.Minute), map[string]any{"journal_through": "40"})
		if err != nil {
			panic(err)
		}
		out = append(out, b)
	}
	return out
}

// rechain makes records consecutive again after an edit, as somebody does who
// knows the format but has no key. Edited bodies and kinds stay.
func rechain(change identity.ChangeID, in [][]byte) [][]byte {
	previous := chain.Genesis()
	var out [][]byte
	for i, b := range in {
		b = set(set(set(b, "previous", string(previous)), "sequence", strconv.Itoa(i+1)), "change_id", string(change))
		out, previous = append(out, b), digest.Of(b)
	}
	return out
}

// set replaces a member of a record, at any depth of dots.
func set(b []byte, member string, value any) []byte {
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		panic(err)
	}
	at := m
	parts := strings.Split(member, ".")
	for _, p := range parts[:len(parts)-1] {
		at = at[p].(map[string]any)
	}
	if value == nil {
		delete(at, parts[len(parts)-1])
	} else {
		at[parts[len(parts)-1]] = value
	}
	out, err := digest.Canonical(m)
	if err != nil {
		panic(err)
	}
	return out
}

// world is a bundle in the making: a chain, its signed heads and a log.
type world struct {
	evidence.Vector
	change      identity.ChangeID
	records     [][]byte
	heads       []bundle.Head
	consistency []bundle.Consistency
	log         *memLog
	remembered  string
	commit      string
	// spoil edits the files after everything else.
	spoil func(files map[string]string)
}

// prefix returns the head of the first n records, whatever is wrong with them.
func (w *world) prefix(n int) chain.Head {
	return chain.Head{Change: w.change, Length: uint64(n), Digest: digest.Of(w.records[n-1])}
}

// anchor appends heads of the given lengths, signs and proves them, and the
// trailer of the merge commit between the first and the second. The log grows
// by other leaves in between.
func (w *world) anchor(key note.Signer, lengths ...int) {
	if w.log == nil {
		w.log = (&memLog{}).noise("before", 3)
	}
	var index []int64
	for i, n := range lengths {
		leaf, err := tlog.HeadLeaf(w.prefix(n).Digest)
		if err != nil {
			panic(err)
		}
		index = append(index, w.log.add(leaf))
		w.log.noise(fmt.Sprint("between", i), 2)
		if i == 0 {
			w.commit = "Merge\n\nFixes the rounding.\n\n" + bundle.TrailerKey + ": " + w.log.now().Trailer() + "\n"
		}
	}
	now := w.log.now()
	w.heads = nil
	for i, n := range lengths {
		w.heads = append(w.heads, bundle.Head{Signed: signHead(w.prefix(n), key), Anchor: &bundle.Anchor{
			Entry: w.log.leaves[index[i]][:], Index: index[i], Proof: w.log.include(index[i], now.Size), Checkpoint: signed(now, logKey),
		}})
	}
	w.consistency = []bundle.Consistency{w.log.consistency(index[0]+3, now.Size)}
}

// closed is the world most twins are made from: six records and the end, heads
// at 3 and 7.
func closed() *world {
	w := &world{change: "chg-good", records: records("chg-good", 6, true, "one")}
	w.Keys = "keys.txt"
	w.anchor(headKey, 3, 7)
	return w
}

func open() *world {
	w := &world{change: "chg-open", records: records("chg-open", 5, false, "two")}
	w.Keys = "keys.txt"
	w.anchor(headKey, 2, 5)
	return w
}

func (w *world) last() *bundle.Head { return &w.heads[len(w.heads)-1] }

// checkpoint replaces the checkpoint of all anchors.
func (w *world) checkpoint(raw []byte) {
	for i := range w.heads {
		w.heads[i].Anchor.Checkpoint = raw
	}
}

// vectors lists every good bundle and every tampered twin.
func vectors() []*world {
	var out []*world
	add := func(name string, label chain.Label, means string, w *world) {
		w.Name, w.Means, w.Label = name, means, string(label)
		out = append(out, w)
	}
	good := func(name, chained string, protected bool, means string, w *world) {
		add(name, "", means, w)
		w.Chain, w.Protected = chained, protected
	}
	twin := func(name string, label chain.Label, means string, do func(w *world)) {
		w := closed()
		do(w)
		add(name, label, means, w)
	}

	good("good-closed", "closed 7", false, "a finished Change", closed())
	good("good-open", "open through 5", false, "a Change that goes on", open())
	{
		w := closed()
		w.Commit = "commit.txt"
		good("good-commit-trailer", "closed 7", true, "checked against the trailer of the merge commit", w)
		w = closed()
		w.Remembered, w.remembered = "remembered.txt", w.log.now().Trailer()+"\n"
		good("good-remembered", "closed 7", true, "checked against a checkpoint of an earlier verification", w)
		w = closed()
		w.checkpoint(signed(w.log.now(), logKey, witnessKey))
		w.Witnesses = 1
		good("good-witnessed", "closed 7", true, "the checkpoint bears a witness's signature", w)
		w = closed()
		w.anchor(headKey, 3, 7)
		w.heads[0].Signed = signHead(w.prefix(3), oldKey)
		w.Keys = "keys-rotated.txt"
		good("good-rotated-key", "closed 7", false, "an early head is signed by a key that was rotated since and is still trusted", w)
		w = closed()
		w.heads[0].Anchor = nil
		good("good-early-head-not-anchored", "closed 7", false, "only the last head needs an anchor", w)
	}

	// The records.
	twin("edit", chain.BindingFailed, "a record in the middle is edited", func(w *world) {
		w.records[3] = set(w.records[3], "body.verb", "scm.GetTree")
	})
	twin("edit-last", chain.HeadMismatch, "the last record is edited", func(w *world) {
		w.records[6] = set(w.records[6], "body.journal_through", "41")
	})
	twin("edit-and-rehash", chain.HeadMismatch, "a record is edited and all after it are bound anew", func(w *world) {
		w.records[3] = set(w.records[3], "body.verb", "scm.GetTree")
		w.records = rechain(w.change, w.records)
	})
	twin("edit-time", chain.BindingFailed, "the time of a record is edited", func(w *world) {
		w.records[1] = set(w.records[1], "at", "2026-11-30T11:00:00.000000000Z")
	})
	twin("swap", chain.ReceiptChainGap, "two neighbours changed places", func(w *world) {
		w.records[2], w.records[3] = w.records[3], w.records[2]
	})
	twin("insert", chain.Fork, "a well-bound record stands before the true one", func(w *world) {
		b := set(w.records[3], "body.verb", "scm.GetTree")
		w.records = append(w.records[:3:3], append([][]byte{b}, w.records[3:]...)...)
	})
	twin("insert-repeat", chain.SequenceRepeated, "a record stands there twice", func(w *world) {
		w.records = append(w.records[:4:4], w.records[3:]...)
	})
	twin("insert-old", chain.SequenceRepeated, "an early record stands again later", func(w *world) {
		w.records = append(w.records[:5:5], append([][]byte{w.records[1]}, w.records[5:]...)...)
	})
	twin("insert-and-rehash", chain.HeadMismatch, "a record is inserted and all after it are bound anew", func(w *world) {
		b := set(w.records[3], "body.verb", "scm.GetTree")
		w.records = rechain(w.change, append(w.records[:1:1], append([][]byte{b}, w.records[1:6]...)...))
	})
	twin("delete-middle", chain.ReceiptChainGap, "a record in the middle is gone", func(w *world) {
		w.records = append(w.records[:3:3], w.records[4:]...)
	})
	twin("delete-renumbered", chain.BindingFailed, "a record is gone and those after it are renumbered", func(w *world) {
		w.records = append(w.records[:3:3], w.records[4:]...)
		for i := 3; i < len(w.records); i++ {
			w.records[i] = set(w.records[i], "sequence", strconv.Itoa(i+1))
		}
	})
	twin("delete-first", chain.ReceiptChainGap, "the first record is gone", func(w *world) { w.records = w.records[1:] })
	twin("gap", chain.ReceiptChainGap, "a sequence number is left out, everything else is bound", func(w *world) {
		w.records[3] = set(w.records[3], "sequence", "5")
	})
	twin("tail-cut", chain.TailTruncated, "the last record is gone", func(w *world) { w.records = w.records[:6] })
	twin("tail-cut-far", chain.TailTruncated, "the last four records are gone", func(w *world) { w.records = w.records[:3] })
	twin("chain-deleted", chain.ChainMissing, "all records are gone", func(w *world) { w.records = nil })
	twin("chain-and-heads-deleted", chain.ChainMissing, "all records and heads are gone", func(w *world) { w.records, w.heads = nil, nil })
	twin("first-previous", chain.BindingFailed, "the first record names something else than genesis", func(w *world) {
		w.records[0] = set(w.records[0], "previous", string(digest.Of(nil)))
	})
	twin("wrong-change-record", chain.WrongChange, "one record is of another Change", func(w *world) {
		w.records[3] = set(w.records[3], "change_id", "chg-other")
	})
	twin("wrong-change-chain", chain.WrongChange, "all records are those of another Change", func(w *world) {
		w.records = records("chg-other", 6, true, "one")
	})
	twin("wrong-change-bundle", chain.WrongChange, "a whole good bundle is passed off as that of another Change", func(w *world) {
		w.spoil = func(f map[string]string) {
			f[bundle.ManifestFile] = strings.Replace(f[bundle.ManifestFile], "chg-good", "chg-other", 1)
		}
	})

	// The form of records. Whoever holds the key signs them, and they are
	// refused all the same.
	forms := func(name string, label chain.Label, means string, edit func(string) string) {
		w := &world{change: "chg-good", records: records("chg-good", 3, false, "one")}
		w.Keys = "keys.txt"
		w.records[2] = []byte(edit(string(w.records[2])))
		w.anchor(headKey, 2, 3)
		add(name, label, means, w)
	}
	replace := func(old, new string) func(string) string {
		return func(s string) string {
			if !strings.Contains(s, old) {
				panic("no " + old + " in " + s)
			}
			return strings.Replace(s, old, new, 1)
		}
	}
	forms("form-white-space", chain.NotCanonical, "a blank after a colon", replace(`"body":`, `"body": `))
	forms("form-key-order", chain.NotCanonical, "members out of order", func(s string) string {
		return `{"kind":"RESULT",` + strings.Replace(s[1:], `"kind":"RESULT",`, "", 1)
	})
	forms("form-duplicate-key", chain.NotCanonical, "a member stands there twice", replace(`"journal_seq":"7"`, `"journal_seq":"7","journal_seq":"8"`))
	forms("form-big-integer", chain.NotCanonical, "an integer that a double cannot hold", replace(`"journal_seq":"7"`, `"journal_seq":9007199254740993`))
	forms("form-float", chain.NotCanonical, "a number with a fraction", replace(`"journal_seq":"7"`, `"journal_seq":7.5`))
	forms("form-escape", chain.NotCanonical, "a character is escaped that need not be", replace(`é`, `\u00e9`))
	forms("form-utf8", chain.NotCanonical, "a string is not UTF-8", replace(`é`, "\xff"))
	forms("form-surrogate", chain.NotCanonical, "half a surrogate pair", replace(`é`, `\ud800`))
	forms("form-trailing", chain.NotCanonical, "a second document on the line", func(s string) string { return s + "{}" })
	forms("form-empty-line", chain.NotCanonical, "an empty line", func(string) string { return "" })
	forms("form-unknown-member", chain.MalformedRecord, "a member nobody knows", func(s string) string { return string(set([]byte(s), "extra", "x")) })
	forms("form-missing-member", chain.MalformedRecord, "a member is missing", func(s string) string { return string(set([]byte(s), "kind", nil)) })
	forms("form-member-case", chain.MalformedRecord, "a member's name in another case", replace(`"kind"`, `"kinD"`))
	forms("form-short-time", chain.MalformedRecord, "a time with three digits of a second", replace(`.123456789Z`, `.123Z`))
	forms("form-zone", chain.MalformedRecord, "a time with a zone", replace(`.123456789Z`, `.123456789+00:00`))
	forms("form-sequence-zero", chain.MalformedRecord, "a sequence with a leading zero", replace(`"sequence":"3"`, `"sequence":"03"`))
	forms("form-sequence-number", chain.MalformedRecord, "a sequence that is a number", replace(`"sequence":"3"`, `"sequence":3`))
	forms("form-format", chain.MalformedRecord, "another format", replace(`evidence.v1`, `evidence.v2`))
	forms("form-body", chain.MalformedRecord, "a body that is no object", func(s string) string {
		var m map[string]any
		if err := json.Unmarshal([]byte(s), &m); err != nil {
			panic(err)
		}
		return string(set([]byte(s), "body", "text"))
	})

	// The end.
	twin("after-the-end", chain.RecordAfterTerminal, "a record follows the terminal one", func(w *world) {
		b := set(set(w.records[5], "sequence", "8"), "previous", string(digest.Of(w.records[6])))
		w.records = append(w.records, b)
		w.anchor(headKey, 3, 8)
	})
	twin("length-lie", chain.TerminalLength, "the terminal record states another length", func(w *world) {
		w.records[6] = set(w.records[6], "body.length", "6")
		w.anchor(headKey, 3, 7)
	})
	twin("length-missing", chain.TerminalLength, "the terminal record states no length", func(w *world) {
		w.records[6] = set(w.records[6], "body.length", nil)
		w.anchor(headKey, 3, 7)
	})
	twin("end-missing", chain.TerminalMissing, "the end is cut off together with the head that covers it", func(w *world) {
		w.records, w.heads = w.records[:3], w.heads[:1]
		w.Closed = true
	})

	// The heads.
	twin("head-missing", chain.HeadMissing, "records follow the last signed head", func(w *world) { w.heads = w.heads[:1] })
	twin("heads-deleted", chain.HeadMissing, "there is no signed head", func(w *world) { w.heads = nil })
	twin("fork", chain.Fork, "the key signed two heads of one length", func(w *world) {
		h := w.prefix(7)
		h.Digest = digest.Of([]byte("another history"))
		w.heads = append(w.heads, bundle.Head{Signed: signHead(h, headKey)})
	})
	twin("key-swap", chain.VerifierKeyUntrusted, "another key of the same name signed", func(w *world) {
		w.last().Signed = signHead(w.prefix(7), strangerKey)
	})
	twin("key-of-the-log", chain.VerifierKeyUntrusted, "the log's key signed the head", func(w *world) {
		w.last().Signed = signHead(w.prefix(7), logKey)
	})
	twin("key-retired", chain.VerifierKeyUntrusted, "a retired key signed the newest head", func(w *world) {
		w.last().Signed = signHead(w.prefix(7), oldKey)
	})
	twin("re-sign", chain.VerifierKeyUntrusted, "edited, bound anew and signed by a stranger", func(w *world) {
		w.records[3] = set(w.records[3], "body.verb", "scm.GetTree")
		w.records = rechain(w.change, w.records)
		w.anchor(strangerKey, 3, 7)
	})
	twin("head-edited", chain.SignatureInvalid, "the length of a signed head is edited", func(w *world) {
		w.last().Signed = []byte(strings.Replace(string(w.last().Signed), "\n7\n", "\n6\n", 1))
	})
	twin("head-no-statement", chain.HeadMalformed, "the evidence key signed something else", func(w *world) {
		b, err := note.Sign(&note.Note{Text: "hello\n"}, headKey)
		if err != nil {
			panic(err)
		}
		w.last().Signed = b
	})

	// The log.
	twin("log-foreign", chain.LogForeign, "anchored in a log nobody trusts", func(w *world) {
		w.checkpoint(signed(w.log.checkpoint("example.net/log", w.log.now().Size), foreignKey))
	})
	twin("log-impostor", chain.LogForeign, "anchored in a log of the same name under another key", func(w *world) {
		w.checkpoint(signed(w.log.now(), impostorKey))
	})
	twin("log-re-signed", chain.LogForeign, "the evidence key signed the checkpoint", func(w *world) {
		w.checkpoint(signed(w.log.now(), headKey))
	})
	twin("log-origin", chain.LogForeign, "the log's key signed a checkpoint of another origin", func(w *world) {
		w.checkpoint(signed(w.log.checkpoint("example.net/log", w.log.now().Size), logKey))
	})
	twin("checkpoint-edited", chain.SignatureInvalid, "the root of a signed checkpoint is edited", func(w *world) {
		raw := string(w.last().Anchor.Checkpoint)
		root := strings.Split(raw, "\n")[2]
		w.checkpoint([]byte(strings.Replace(raw, root, base64.StdEncoding.EncodeToString(make([]byte, 32)), 1)))
	})
	twin("checkpoint-malformed", chain.CheckpointMalformed, "the log's key signed something else", func(w *world) {
		b, err := note.Sign(&note.Note{Text: "example.org/log\nmany\n"}, logKey)
		if err != nil {
			panic(err)
		}
		w.checkpoint(b)
	})
	twin("anchor-missing", chain.AnchorMissing, "the last head has no anchor", func(w *world) { w.last().Anchor = nil })
	twin("leaf-kind-attestation", chain.LeafMismatch, "the entry says attestation and names the head", func(w *world) {
		leaf, err := tlog.AttestationLeaf(w.prefix(7).Digest)
		if err != nil {
			panic(err)
		}
		a := w.last().Anchor
		a.Entry, a.Index = leaf[:], w.log.add(leaf)
		now := w.log.now()
		a.Proof, a.Checkpoint = w.log.include(a.Index, now.Size), signed(now, logKey)
	})
	twin("leaf-kind-unknown", chain.LeafMalformed, "the entry has an unknown kind byte", func(w *world) {
		a := w.last().Anchor
		a.Entry = append([]byte{0x42}, a.Entry[1:]...)
	})
	twin("leaf-short", chain.LeafMalformed, "the entry has 32 bytes", func(w *world) {
		a := w.last().Anchor
		a.Entry = a.Entry[:32]
	})
	twin("leaf-of-another-head", chain.LeafMismatch, "a good proof of another head", func(w *world) { w.heads[1].Anchor = w.heads[0].Anchor })
	twin("proof-of-another-leaf", chain.InclusionFailed, "the right entry with the proof of another", func(w *world) {
		w.heads[1].Anchor.Proof = w.heads[0].Anchor.Proof
	})
	twin("index-lie", chain.InclusionFailed, "the proof of one place for another", func(w *world) { w.last().Anchor.Index-- })
	twin("index-outside", chain.InclusionFailed, "a place beyond the tree", func(w *world) { w.last().Anchor.Index = 1 << 40 })
	twin("proof-cut", chain.InclusionFailed, "the last hash of the proof is gone", func(w *world) {
		a := w.last().Anchor
		a.Proof = a.Proof[:len(a.Proof)-1]
	})
	twin("rollback", chain.CheckpointRollback, "the log is smaller than it was known to be", func(w *world) {
		larger := *w.log
		larger.noise("later", 3)
		w.Remembered, w.remembered = "remembered.txt", larger.now().Trailer()+"\n"
	})
	twin("split-view", chain.CheckpointInconsistent, "another root was known at the same size", func(w *world) {
		c := w.log.now()
		c.Root[0] ^= 1
		w.Remembered, w.remembered = "remembered.txt", c.Trailer()+"\n"
	})
	twin("remembered-foreign", chain.LogForeign, "the remembered checkpoint is of another log", func(w *world) {
		w.Remembered, w.remembered = "remembered.txt", w.log.checkpoint("example.net/log", 3).Trailer()+"\n"
	})
	twin("consistency-missing", chain.ConsistencyMissing, "nothing shows that the log extends the commit's trailer", func(w *world) {
		w.consistency = nil
		w.Commit = "commit.txt"
	})
	twin("consistency-of-others", chain.CheckpointInconsistent, "the consistency proof is one of other sizes", func(w *world) {
		w.consistency[0].Proof = w.log.consistency(2, w.log.now().Size).Proof
		w.Commit = "commit.txt"
	})
	twin("witness-missing", chain.WitnessMissing, "a witness is demanded and none signed", func(w *world) { w.Witnesses = 1 })

	// Who holds the keys.
	rewrite := func(log *memLog) func(*world) {
		return func(w *world) {
			commit := w.commit
			w.records = records(w.change, 6, true, "another history")
			w.log = log
			w.anchor(headKey, 3, 7)
			w.commit = commit
		}
	}
	twin("operator-rewrites-all", chain.CheckpointInconsistent, "an operator with all keys writes another history and another log; the merge commit remembers the true one", func(w *world) {
		rewrite(nil)(w)
		w.Commit = "commit.txt"
	})
	{
		w := closed()
		rewrite(nil)(w)
		good("operator-rewrites-all-unseen", "closed 7", false, "the same without a checkpoint from elsewhere: it verifies, and the verifier must say that it does not protect against the log's operator", w)
	}
	twin("key-holder-rewrites-chain", chain.AnchorLate, "a holder of the evidence key writes another history and anchors it in the honest log, after the merge", func(w *world) {
		commit, log := w.commit, w.log
		size, err := bundle.ParseCommit([]byte(commit))
		if err != nil {
			panic(err)
		}
		rewrite(log)(w)
		w.consistency = append(w.consistency, w.log.consistency(size[0].Size, w.log.now().Size))
		w.commit, w.Commit = commit, "commit.txt"
	})

	// The bundle.
	spoil := func(name string, means string, do func(f map[string]string)) {
		twin(name, chain.BundleMalformed, means, func(w *world) { w.spoil = do })
	}
	spoil("bundle-no-manifest", "bundle.json is missing", func(f map[string]string) { delete(f, bundle.ManifestFile) })
	spoil("bundle-no-records", "records.jsonl is missing", func(f map[string]string) { delete(f, bundle.RecordsFile) })
	spoil("bundle-no-heads", "heads.jsonl is missing", func(f map[string]string) { delete(f, bundle.HeadsFile) })
	spoil("bundle-format", "another format", func(f map[string]string) {
		f[bundle.ManifestFile] = strings.Replace(f[bundle.ManifestFile], "bundle.v1", "bundle.v2", 1)
	})
	spoil("bundle-cut", "the last line of the records is cut", func(f map[string]string) {
		f[bundle.RecordsFile] = f[bundle.RecordsFile][:len(f[bundle.RecordsFile])-9]
	})
	spoil("bundle-base64", "an entry is not base64", func(f map[string]string) {
		f[bundle.HeadsFile] = strings.Replace(f[bundle.HeadsFile], `"entry":"S`, `"entry":"!`, 1)
	})
	spoil("bundle-unknown-member", "a head with a member nobody knows", func(f map[string]string) {
		f[bundle.HeadsFile] = strings.Replace(f[bundle.HeadsFile], `"signed_head"`, `"signed_heads"`, 1)
	})
	return out
}

// files returns the bundle of w as files.
func (w *world) files(t testing.TB) map[string]string {
	t.Helper()
	f := unzip(t, bundle.Contents{Change: w.change, Records: seq(nil), Heads: w.heads, Consistency: w.consistency})
	delete(f, bundle.ReadmeFile)
	delete(f, bundle.KeysFile)
	// Not through Write, which refuses what is no line.
	var b strings.Builder
	for _, r := range w.records {
		b.Write(r)
		b.WriteByte('\n')
	}
	f[bundle.RecordsFile] = b.String()
	if w.spoil != nil {
		w.spoil(f)
	}
	if w.Remembered != "" {
		f[w.Remembered] = w.remembered
	}
	if w.Commit != "" {
		f[w.Commit] = w.commit
	}
	return f
}

func keyFiles() map[string]string {
	comment := "# Public keys of the test vectors.\n"
	both := "head " + headVKey + "\nlog " + logVKey + "\nwitness " + witnessVKey + "\n"
	return map[string]string{"keys.txt": comment + both, "keys-rotated.txt": comment + both + "head " + oldVKey + "\n"}
}

// TestVectorsAreCurrent writes the vectors with -update and compares without.
func TestVectorsAreCurrent(t *testing.T) {
	want := keyFiles()
	var index []evidence.Vector
	for _, w := range vectors() {
		index = append(index, w.Vector)
		for name, content := range w.files(t) {
			want[w.Name+"/"+name] = content
		}
	}
	b, err := json.MarshalIndent(index, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	want["index.json"] = string(b) + "\n"
	if *update {
		if err := os.RemoveAll(vectorsDir); err != nil {
			t.Fatal(err)
		}
		for name, content := range want {
			path := filepath.Join(vectorsDir, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	seen := 0
	err = filepath.WalkDir(vectorsDir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		seen++
		name, err := filepath.Rel(vectorsDir, path)
		if err != nil {
			return err
		}
		got, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if want[filepath.ToSlash(name)] != string(got) {
			t.Errorf("%s is not what the format gives; run go test ./internal/core/bundle -update and look at the difference", name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen != len(want) {
		t.Errorf("%d files, want %d", seen, len(want))
	}
}
