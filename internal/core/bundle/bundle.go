// Package bundle is the evidence of one Change in a form that leaves the
// system: what the evidence context exports and what anyone can verify with
// the network off. The offline verifier and the command line both call it, so
// they cannot disagree.
package bundle

import (
	"archive/zip"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"strconv"

	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/tlog"
)

// Format is the value of bundle.json's "format" member.
const Format = "numinance.bundle.v1"

// The files of a bundle.
const (
	ManifestFile    = "bundle.json"
	RecordsFile     = "records.jsonl"
	HeadsFile       = "heads.jsonl"
	ConsistencyFile = "consistency.jsonl"
	KeysFile        = "keys.txt"
	ReadmeFile      = "README.txt"
)

// Anchor is where a leaf stands in a log, with the proof.
type Anchor struct {
	// Entry is what the log returned as the entry; it must be the leaf.
	Entry []byte
	Index int64
	Proof []tlog.Hash
	// Checkpoint is the signed note the proof leads to.
	Checkpoint []byte
}

// Head is a signed head, anchored or not.
type Head struct {
	Signed []byte
	Anchor *Anchor
}

// Consistency is the proof that a tree of one size begins another.
type Consistency struct {
	First, Second int64
	Proof         []tlog.Hash
}

// Contents is what Write puts into a bundle.
type Contents struct {
	Change identity.ChangeID
	// Records yields the chain in order.
	Records     iter.Seq2[[]byte, error]
	Heads       []Head
	Consistency []Consistency
	// Keys are the public keys that a verifier has to trust, for comparison
	// with those it got on a way of its own.
	Keys Trust
}

type manifestWire struct {
	Change string `json:"change_id"`
	Format string `json:"format"`
}

type headWire struct {
	Anchor *anchorWire `json:"anchor,omitempty"`
	Signed string      `json:"signed_head"`
}

type anchorWire struct {
	Checkpoint string   `json:"checkpoint"`
	Entry      string   `json:"entry"`
	Index      string   `json:"index"`
	Proof      []string `json:"proof"`
}

type consistencyWire struct {
	First  string   `json:"first_size"`
	Proof  []string `json:"proof"`
	Second string   `json:"second_size"`
}

// Write writes a bundle as a zip archive. The same contents give the same
// bytes.
func Write(w io.Writer, c Contents) error {
	z := zip.NewWriter(w)
	manifest, err := digest.Canonical(manifestWire{Change: string(c.Change), Format: Format})
	if err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	if err := file(z, ReadmeFile, []byte(readme)); err != nil {
		return err
	}
	if err := file(z, ManifestFile, append(manifest, '\n')); err != nil {
		return err
	}
	f, err := z.CreateHeader(&zip.FileHeader{Name: RecordsFile, Method: zip.Deflate})
	if err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	for b, err := range c.Records {
		if err != nil {
			return fmt.Errorf("write bundle: %w", err)
		}
		// Canonical JSON holds no line feed, so a line is a record.
		if bytes.IndexByte(b, '\n') >= 0 {
			return fmt.Errorf("write bundle: a record is not canonical JSON")
		}
		if _, err := f.Write(append(b[:len(b):len(b)], '\n')); err != nil {
			return fmt.Errorf("write bundle: %w", err)
		}
	}
	var heads, consistency bytes.Buffer
	for _, h := range c.Heads {
		wire := headWire{Signed: string(h.Signed)}
		if a := h.Anchor; a != nil {
			wire.Anchor = &anchorWire{
				Checkpoint: string(a.Checkpoint), Entry: base64.StdEncoding.EncodeToString(a.Entry),
				Index: strconv.FormatInt(a.Index, 10), Proof: encodeHashes(a.Proof),
			}
		}
		if err := line(&heads, wire); err != nil {
			return err
		}
	}
	for _, p := range c.Consistency {
		if err := line(&consistency, consistencyWire{
			First: strconv.FormatInt(p.First, 10), Second: strconv.FormatInt(p.Second, 10), Proof: encodeHashes(p.Proof),
		}); err != nil {
			return err
		}
	}
	for _, f := range []struct {
		name string
		b    []byte
	}{{HeadsFile, heads.Bytes()}, {ConsistencyFile, consistency.Bytes()}, {KeysFile, []byte(c.Keys.String())}} {
		if err := file(z, f.name, f.b); err != nil {
			return err
		}
	}
	if err := z.Close(); err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	return nil
}

func file(z *zip.Writer, name string, b []byte) error {
	f, err := z.CreateHeader(&zip.FileHeader{Name: name, Method: zip.Deflate})
	if err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	if _, err := f.Write(b); err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	return nil
}

func line(w *bytes.Buffer, v any) error {
	b, err := digest.Canonical(v)
	if err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	w.Write(b)
	w.WriteByte('\n')
	return nil
}

func encodeHashes(hs []tlog.Hash) []string {
	out := make([]string, len(hs))
	for i, h := range hs {
		out[i] = base64.StdEncoding.EncodeToString(h[:])
	}
	return out
}

func decodeHashes(in []string) ([]tlog.Hash, error) {
	raw := make([][]byte, len(in))
	for i, s := range in {
		b, err := base64.StdEncoding.Strict().DecodeString(s)
		if err != nil {
			return nil, chain.Fail(chain.BundleMalformed, "a proof is not base64")
		}
		raw[i] = b
	}
	return tlog.Hashes(raw)
}

// decode reads one canonical JSON document into v and refuses unknown members.
func decode(name string, b []byte, v any) error {
	if err := digest.CheckCanonical(b); err != nil {
		return chain.Fail(chain.BundleMalformed, "%s: %v", name, err)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return chain.Fail(chain.BundleMalformed, "%s: %v", name, err)
	}
	return nil
}

func (w headWire) head() (Head, error) {
	h := Head{Signed: []byte(w.Signed)}
	if w.Anchor == nil {
		return h, nil
	}
	entry, err := base64.StdEncoding.Strict().DecodeString(w.Anchor.Entry)
	if err != nil {
		return Head{}, chain.Fail(chain.BundleMalformed, "%s: an entry is not base64", HeadsFile)
	}
	index, err := size(w.Anchor.Index)
	if err != nil {
		return Head{}, chain.Fail(chain.BundleMalformed, "%s: index: %v", HeadsFile, err)
	}
	proof, err := decodeHashes(w.Anchor.Proof)
	if err != nil {
		return Head{}, err
	}
	h.Anchor = &Anchor{Entry: entry, Index: index, Proof: proof, Checkpoint: []byte(w.Anchor.Checkpoint)}
	return h, nil
}

func (w consistencyWire) consistency() (Consistency, error) {
	first, err1 := size(w.First)
	second, err2 := size(w.Second)
	if err1 != nil || err2 != nil {
		return Consistency{}, chain.Fail(chain.BundleMalformed, "%s: sizes %q and %q", ConsistencyFile, w.First, w.Second)
	}
	proof, err := decodeHashes(w.Proof)
	return Consistency{First: first, Second: second, Proof: proof}, err
}

func size(s string) (int64, error) {
	n, err := chain.ParseCount(s)
	if err != nil {
		return 0, err
	}
	if n > tlog.MaxSize {
		return 0, fmt.Errorf("count %s is out of range", s)
	}
	return int64(n), nil
}

const readme = `This is the evidence of one governed Change, exported to be verified by anyone,
with the network off.

  bundle.json        format and change id
  records.jsonl      the chain: one canonical JSON record (RFC 8785) per line, each
                     naming the SHA-256 of the line before it (without line feed)
  heads.jsonl        signed heads (C2SP signed notes, Ed25519) and where each stands
                     in the transparency log: entry, index, RFC 6962 inclusion
                     proof and the log's signed checkpoint
  consistency.jsonl  proofs that older checkpoints are prefixes of the newest one
  keys.txt           the public keys that sign; compare them with those you got on
                     a way of your own, and trust only those

Verify:  numi-verify BUNDLE --key FILE
where FILE holds the lines of keys.txt that you have reason to trust. The format
is described byte by byte in docs/evidence-format.md of the numinance repository.
`
