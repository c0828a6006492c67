package bundle

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"

	"golang.org/x/mod/sumdb/note"

	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/tlog"
)

// Bounds on what a verifier reads into memory; records are streamed.
const (
	maxLine  = 256 << 10
	maxLines = 100_000
)

// Options are demands beyond the ones every bundle has to meet.
type Options struct {
	// Change is the Change the bundle must be of; empty takes the bundle's word.
	Change identity.ChangeID
	// Closed demands that the chain has ended.
	Closed bool
	// Witnesses is how many trusted witnesses must have signed the newest
	// checkpoint.
	Witnesses int
	// Remembered are checkpoints of the log known from elsewhere, such as an
	// earlier verification of any Change.
	Remembered []tlog.Checkpoint
	// Trailers are checkpoints from merge commits of this very Change; a head of
	// the Change must have been in the log by then.
	Trailers []tlog.Checkpoint
}

// Report is a bundle that verified.
type Report struct {
	Change identity.ChangeID `json:"change_id"`
	// Chain says "open through N" or "closed N".
	Chain   string        `json:"chain"`
	Records uint64        `json:"records,string"`
	Closed  bool          `json:"closed"`
	Head    digest.Digest `json:"head"`
	// SignedBy is the trusted key that signed the head.
	SignedBy string `json:"signed_by"`
	// Log, Index and Size say where the head is anchored.
	Log   string `json:"log"`
	Index int64  `json:"index,string"`
	Size  int64  `json:"size,string"`
	// Checkpoint is the newest checkpoint on one line, to be remembered.
	Checkpoint string `json:"checkpoint"`
	// Witnesses are the trusted witnesses that signed it.
	Witnesses []string `json:"witnesses"`
	// Remembered are the checkpoints from elsewhere that the log still extends.
	Remembered []string `json:"remembered"`
	// Covered is how many records were anchored by the time of a remembered
	// checkpoint: nobody, whatever keys he holds, can have changed them since.
	Covered uint64 `json:"covered,string"`
	// Protects and Unprotected say against whom this result holds and against
	// whom it does not.
	Protects    []string `json:"protects_against"`
	Unprotected []string `json:"does_not_protect_against"`
}

// Verify checks the bundle in files against the trusted keys. A *chain.Failure
// names what is wrong with the evidence; any other error means that it could
// not be read.
func Verify(files fs.FS, t Trust, o Options) (Report, error) {
	change, err := manifest(files)
	if err != nil {
		return Report{}, err
	}
	if o.Change != "" && o.Change != change {
		return Report{}, chain.Fail(chain.WrongChange, "the bundle is of %s, not of %s", change, o.Change)
	}
	v := verifier{files: files, trust: t, options: o, change: change, signed: map[uint64]signedHead{}}
	if err := v.heads(); err != nil {
		return Report{}, err
	}
	if err := v.chain(); err != nil {
		return Report{}, err
	}
	if err := v.anchors(); err != nil {
		return Report{}, err
	}
	if err := v.log(); err != nil {
		return Report{}, err
	}
	return v.report(), nil
}

// signedHead is a head that a trusted key signed.
type signedHead struct {
	head   chain.Head
	by     string
	anchor *Anchor
}

// verifier carries what one verification has found so far.
type verifier struct {
	files   fs.FS
	trust   Trust
	options Options
	change  identity.ChangeID

	signed  map[uint64]signedHead // by length
	longest uint64
	head    chain.Head

	checkpoints []checkpoint // every one that opened, by size
	index       int64        // of the last head
	newest      checkpoint
	witnesses   []string
	remembered  []string
	covered     uint64
}

type checkpoint struct {
	tlog.Checkpoint
	raw []byte
	key note.Verifier
}

func manifest(files fs.FS) (identity.ChangeID, error) {
	b, err := readAll(files, ManifestFile)
	if err != nil {
		return "", err
	}
	var m manifestWire
	if err := decode(ManifestFile, bytes.TrimSuffix(b, []byte("\n")), &m); err != nil {
		return "", err
	}
	if m.Format != Format || !identity.ValidID(identity.ChangeID(m.Change)) {
		return "", chain.Fail(chain.BundleMalformed, "%s: format %q of change %q", ManifestFile, m.Format, m.Change)
	}
	return identity.ChangeID(m.Change), nil
}

// heads opens every signed head.
func (v *verifier) heads() error {
	return eachLine(v.files, HeadsFile, true, func(b []byte) error {
		var w headWire
		if err := decode(HeadsFile, b, &w); err != nil {
			return err
		}
		h, err := w.head()
		if err != nil {
			return err
		}
		head, by, err := chain.OpenHead(h.Signed, v.trust.Heads...)
		if err != nil {
			return err
		}
		if head.Change != v.change {
			return chain.Fail(chain.WrongChange, "a signed head is of %s", head.Change)
		}
		if other, ok := v.signed[head.Length]; ok && other.head.Digest != head.Digest {
			return chain.Fail(chain.Fork, "two heads of length %d are signed, by %s and %s", head.Length, other.by, by)
		}
		if other, ok := v.signed[head.Length]; !ok || other.anchor == nil {
			v.signed[head.Length] = signedHead{head: head, by: by, anchor: h.Anchor}
		}
		v.longest = max(v.longest, head.Length)
		return nil
	})
}

// chain streams the records. What is wrong in the chain itself is reported
// before what does not fit its heads, because it says more.
func (v *verifier) chain() error {
	records := chain.NewVerifier(v.change)
	var mismatch error
	err := eachLine(v.files, RecordsFile, false, func(b []byte) error {
		if _, err := records.Next(b); err != nil {
			return err
		}
		h := records.Head()
		if s, ok := v.signed[h.Length]; ok && s.head.Digest != h.Digest && mismatch == nil {
			mismatch = chain.FailAt(chain.HeadMismatch, h.Length, "%s signed %s, this is %s", s.by, s.head.Digest, h.Digest)
		}
		return nil
	})
	if err != nil {
		return err
	}
	v.head = records.Head()
	switch {
	case v.head.Length == 0:
		return chain.Fail(chain.ChainMissing, "no record of %s", v.change)
	case mismatch != nil:
		return mismatch
	case v.longest > v.head.Length:
		return chain.Fail(chain.TailTruncated, "%d records, %s signed %d", v.head.Length, v.signed[v.longest].by, v.longest)
	case v.longest < v.head.Length:
		return chain.Fail(chain.HeadMissing, "%d records, signed are %d", v.head.Length, v.longest)
	case v.options.Closed && !v.head.Closed:
		return chain.Fail(chain.TerminalMissing, "the chain is open through %d", v.head.Length)
	}
	return nil
}

// anchors checks where the log has the heads.
func (v *verifier) anchors() error {
	for _, length := range sortedLengths(v.signed) {
		s := v.signed[length]
		if s.anchor == nil {
			continue
		}
		c, err := v.open(s.anchor.Checkpoint)
		if err != nil {
			return err
		}
		entry, err := tlog.ParseLeaf(s.anchor.Entry)
		if err != nil {
			return err
		}
		want, err := tlog.HeadLeaf(s.head.Digest)
		if err != nil {
			return err
		}
		if entry != want {
			return chain.Fail(chain.LeafMismatch, "the log's entry names %s %s, not the head of length %d", entry.Kind(), entry.Digest(), length)
		}
		if err := tlog.CheckInclusion(c.Checkpoint, entry, s.anchor.Index, s.anchor.Proof); err != nil {
			return err
		}
		v.checkpoints = append(v.checkpoints, c)
		v.index = s.anchor.Index
	}
	if v.signed[v.head.Length].anchor == nil {
		return chain.Fail(chain.AnchorMissing, "the head of length %d is not in a log", v.head.Length)
	}
	return nil
}

// open verifies a checkpoint under whichever trusted log signed it.
func (v *verifier) open(raw []byte) (checkpoint, error) {
	err := chain.Fail(chain.LogForeign, "no log is trusted")
	for _, key := range v.trust.Logs {
		var c tlog.Checkpoint
		if c, err = tlog.OpenCheckpoint(raw, key); err == nil {
			return checkpoint{Checkpoint: c, raw: raw, key: key}, nil
		}
		if chain.LabelOf(err) != chain.LogForeign {
			return checkpoint{}, err
		}
	}
	return checkpoint{}, err
}

// log checks that all checkpoints are states of one growing log, and that it
// still extends those that are remembered.
func (v *verifier) log() error {
	proofs, err := v.proofs()
	if err != nil {
		return err
	}
	slices.SortStableFunc(v.checkpoints, func(a, b checkpoint) int { return int(min(1, max(-1, a.Size-b.Size))) })
	v.newest = v.checkpoints[len(v.checkpoints)-1]
	for _, c := range v.checkpoints[:len(v.checkpoints)-1] {
		if err := tlog.CheckConsistency(c.Checkpoint, v.newest.Checkpoint, proofs[sizes{c.Size, v.newest.Size}]); err != nil {
			return err
		}
	}
	for i, r := range slices.Concat(v.options.Remembered, v.options.Trailers) {
		older, newer := r, v.newest.Checkpoint
		if older.Size > newer.Size {
			older, newer = newer, older
		}
		proof, ok := proofs[sizes{older.Size, newer.Size}]
		if r.Size > v.newest.Size && r.Origin == v.newest.Origin && !ok {
			return chain.Fail(chain.CheckpointRollback, "the bundle's log has %d entries, known are %d; export the bundle again", v.newest.Size, r.Size)
		}
		if err := tlog.CheckConsistency(older, newer, proof); err != nil {
			return err
		}
		covered := v.coveredBy(r)
		if covered == 0 && i >= len(v.options.Remembered) {
			return chain.Fail(chain.AnchorLate, "no head of %s was in the log when the checkpoint of its merge commit was made", v.change)
		}
		v.covered = max(v.covered, covered)
		v.remembered = append(v.remembered, r.Trailer())
	}
	if v.witnesses, err = tlog.Witnesses(v.newest.raw, v.trust.Witnesses...); err != nil {
		return err
	}
	if len(v.witnesses) < v.options.Witnesses {
		return chain.Fail(chain.WitnessMissing, "%d of %d demanded witnesses signed", len(v.witnesses), v.options.Witnesses)
	}
	return nil
}

// coveredBy returns how many records were anchored by the time of r. The log
// is known to extend r, so an entry below r's size was in it then.
func (v *verifier) coveredBy(r tlog.Checkpoint) uint64 {
	var longest uint64
	for length, s := range v.signed {
		if s.anchor != nil && s.anchor.Index < r.Size {
			longest = max(longest, length)
		}
	}
	return longest
}

type sizes struct{ first, second int64 }

func (v *verifier) proofs() (map[sizes][]tlog.Hash, error) {
	out := map[sizes][]tlog.Hash{}
	err := eachLine(v.files, ConsistencyFile, true, func(b []byte) error {
		var w consistencyWire
		if err := decode(ConsistencyFile, b, &w); err != nil {
			return err
		}
		c, err := w.consistency()
		if err != nil {
			return err
		}
		out[sizes{c.First, c.Second}] = c.Proof
		return nil
	})
	return out, err
}

func (v *verifier) report() Report {
	s := v.signed[v.head.Length]
	r := Report{
		Change: v.change, Chain: chain.Result{Head: v.head}.String(), Records: v.head.Length, Closed: v.head.Closed,
		Head: v.head.Digest, SignedBy: s.by, Log: v.newest.Origin, Index: v.index, Size: v.newest.Size,
		Checkpoint: v.newest.Trailer(), Witnesses: v.witnesses, Remembered: v.remembered,
		Covered: v.covered,
		Protects: []string{
			"anyone who does not hold the evidence key " + s.by + ": no record was changed, inserted, removed or put elsewhere",
		},
	}
	if v.covered > 0 {
		r.Protects = append(r.Protects, fmt.Sprintf("everyone, the log's operator and the holder of the evidence key included, for records 1 to %d: they were in the log before a checkpoint known from elsewhere", v.covered))
	}
	for _, w := range v.witnesses {
		r.Protects = append(r.Protects, "a log's operator who shows different logs to different people, as long as the witness "+w+" is independent of him")
	}
	if len(v.witnesses) == 0 && len(v.remembered) == 0 {
		r.Unprotected = append(r.Unprotected, "the log's operator: no witness signed the checkpoint, and no checkpoint from a commit trailer or an earlier verification was given")
	}
	if v.covered < v.head.Length {
		r.Unprotected = append(r.Unprotected, fmt.Sprintf("the holder of the evidence key, who could have rewritten records %d to %d and anchored them anew", v.covered+1, v.head.Length))
	}
	if !v.head.Closed {
		r.Unprotected = append(r.Unprotected, "an exporter who leaves out what was recorded after this head: the chain is still open")
	}
	return r
}

func sortedLengths(m map[uint64]signedHead) []uint64 {
	out := make([]uint64, 0, len(m))
	for n := range m {
		out = append(out, n)
	}
	slices.Sort(out)
	return out
}

func readAll(files fs.FS, name string) ([]byte, error) {
	f, err := files.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, chain.Fail(chain.BundleMalformed, "%s is missing", name)
	}
	if err != nil {
		return nil, fmt.Errorf("read bundle: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxLine+1))
	if err != nil {
		return nil, fmt.Errorf("read bundle: %s: %w", name, err)
	}
	if len(b) > maxLine {
		return nil, chain.Fail(chain.BundleMalformed, "%s is too large", name)
	}
	return b, nil
}

// eachLine calls do for every line of a file, without its line feed. Every line
// must end with one. An absent file is a failure.
func eachLine(files fs.FS, name string, bounded bool, do func([]byte) error) error {
	f, err := files.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return chain.Fail(chain.BundleMalformed, "%s is missing", name)
	}
	if err != nil {
		return fmt.Errorf("read bundle: %w", err)
	}
	defer f.Close()
	r := bufio.NewReaderSize(f, maxLine)
	for n := 1; ; n++ {
		b, err := r.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			return chain.Fail(chain.BundleMalformed, "%s: line %d is longer than %d bytes", name, n, maxLine)
		case errors.Is(err, io.EOF) && len(b) == 0:
			return nil
		case errors.Is(err, io.EOF):
			return chain.Fail(chain.BundleMalformed, "%s: the last line is cut", name)
		case err != nil:
			return fmt.Errorf("read bundle: %s: %w", name, err)
		case bounded && n > maxLines:
			return chain.Fail(chain.BundleMalformed, "%s: more than %d lines", name, maxLines)
		}
		if err := do(b[:len(b)-1]); err != nil {
			return err
		}
	}
}
