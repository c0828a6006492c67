package tlog

import (
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"

	"github.com/numinance/numinance/internal/core/chain"
)

// MaxCheckpoint bounds a signed checkpoint, cosignatures included, in bytes.
const MaxCheckpoint = 16 << 10

// MaxSize bounds the size of a tree, in leaves, far above any real log: the
// arithmetic of proofs is only sound while powers of two around the size fit.
const MaxSize = 1 << 60

// Checkpoint is the state a log committed to (C2SP tlog-checkpoint).
type Checkpoint struct {
	Origin string
	Size   int64
	Root   Hash
	// Extensions are the lines after the root hash, without line ends.
	Extensions []string
}

// Text returns the note text of c: what a log's signature covers.
func (c Checkpoint) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n%d\n%s\n", c.Origin, c.Size, base64.StdEncoding.EncodeToString(c.Root[:]))
	for _, line := range c.Extensions {
		b.WriteString(line + "\n")
	}
	return b.String()
}

// ParseCheckpoint reads the text of a checkpoint, without signatures. Only the
// one spelling that Text gives is accepted.
func ParseCheckpoint(text string) (Checkpoint, error) {
	if len(text) > MaxCheckpoint {
		return Checkpoint{}, chain.Fail(chain.CheckpointMalformed, "%d bytes, at most %d are allowed", len(text), MaxCheckpoint)
	}
	lines := strings.Split(text, "\n")
	if len(lines) < 4 || lines[len(lines)-1] != "" {
		return Checkpoint{}, chain.Fail(chain.CheckpointMalformed, "want an origin, a size and a root hash, each on its line")
	}
	lines = lines[:len(lines)-1]
	c := Checkpoint{Origin: lines[0]}
	if c.Origin == "" || strings.TrimSpace(c.Origin) != c.Origin {
		return Checkpoint{}, chain.Fail(chain.CheckpointMalformed, "origin %q", c.Origin)
	}
	if strings.HasPrefix(c.Origin, chain.Format) {
		return Checkpoint{}, chain.Fail(chain.CheckpointMalformed, "origin %q is reserved for statements of the evidence format", c.Origin)
	}
	size, err := chain.ParseCount(lines[1])
	if err != nil || size > MaxSize {
		return Checkpoint{}, chain.Fail(chain.CheckpointMalformed, "size %q", lines[1])
	}
	c.Size = int64(size)
	root, err := base64.StdEncoding.Strict().DecodeString(lines[2])
	if err != nil || len(root) != len(c.Root) {
		return Checkpoint{}, chain.Fail(chain.CheckpointMalformed, "root hash %q", lines[2])
	}
	copy(c.Root[:], root)
	for _, line := range lines[3:] {
		if line == "" {
			return Checkpoint{}, chain.Fail(chain.CheckpointMalformed, "an extension line is empty")
		}
		c.Extensions = append(c.Extensions, line)
	}
	return c, nil
}

// OpenCheckpoint verifies a signed checkpoint against one log's key. The
// checkpoint's origin must be that key's name; anything the key did not sign
// is log_foreign, whatever else signed it (P-218, P-220).
func OpenCheckpoint(signed []byte, log note.Verifier) (Checkpoint, error) {
	n, err := chain.OpenNote(signed, log)
	if err != nil {
		switch chain.LabelOf(err) {
		case chain.VerifierKeyUntrusted:
			return Checkpoint{}, chain.Fail(chain.LogForeign, "not signed by the trusted log %s", log.Name())
		case chain.HeadMalformed:
			return Checkpoint{}, chain.Fail(chain.CheckpointMalformed, "%v", err)
		}
		return Checkpoint{}, err
	}
	c, err := ParseCheckpoint(n.Text)
	if err != nil {
		return Checkpoint{}, err
	}
	if c.Origin != log.Name() {
		return Checkpoint{}, chain.Fail(chain.LogForeign, "origin %q, want %q", c.Origin, log.Name())
	}
	return c, nil
}

// Witnesses returns the names of the given keys that signed the checkpoint. A
// key that is named by a signature which does not verify is an error.
func Witnesses(signed []byte, keys ...note.Verifier) ([]string, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	n, err := chain.OpenNote(signed, keys...)
	if chain.LabelOf(err) == chain.VerifierKeyUntrusted {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(n.Sigs))
	for _, s := range n.Sigs {
		names = append(names, s.Name)
	}
	return names, nil
}

// trailerFields are origin, size and root hash.
const trailerFields = 3

// Trailer returns c on one line, for the trailer of a merge commit: origin,
// size and root hash, separated by blanks. It is no proof by itself; it pins
// the log from outside of the log's disk.
func (c Checkpoint) Trailer() string {
	return c.Origin + " " + strconv.FormatInt(c.Size, 10) + " " + base64.StdEncoding.EncodeToString(c.Root[:])
}

// ParseTrailer is the inverse of Trailer.
func ParseTrailer(line string) (Checkpoint, error) {
	f := strings.Fields(line)
	if len(f) != trailerFields {
		return Checkpoint{}, chain.Fail(chain.CheckpointMalformed, "want origin, size and root hash on one line")
	}
	return ParseCheckpoint(strings.Join(f, "\n") + "\n")
}

// CheckSigningRequest decides whether the holder of a log's key may sign next,
// the text of a checkpoint, when prev is the text it signed before, or nil for
// the first. It checks form and growth: a well-formed checkpoint without
// extensions, of the same origin, never smaller, and of the same size only with
// the same root. It cannot check that the larger tree contains the smaller one;
// verifiers do that with a consistency proof.
func CheckSigningRequest(prev, next []byte) error {
	n, err := ParseCheckpoint(string(next))
	if err != nil {
		return fmt.Errorf("signing request: %w", err)
	}
	if len(n.Extensions) > 0 {
		return fmt.Errorf("signing request: %w", chain.Fail(chain.CheckpointMalformed, "extension lines are not signed"))
	}
	if n.Size == 0 && n.Root != emptyRoot {
		return fmt.Errorf("signing request: %w", chain.Fail(chain.CheckpointInconsistent, "an empty tree with a root of its own"))
	}
	if prev == nil {
		return nil
	}
	p, err := ParseCheckpoint(string(prev))
	if err != nil {
		return fmt.Errorf("signing request: checkpoint signed before: %w", err)
	}
	switch {
	case p.Origin != n.Origin:
		return fmt.Errorf("signing request: %w", chain.Fail(chain.LogForeign, "origin %q, signed before was %q", n.Origin, p.Origin))
	case n.Size < p.Size:
		return fmt.Errorf("signing request: %w", chain.Fail(chain.CheckpointRollback, "size %d, signed before was %d", n.Size, p.Size))
	case n.Size == p.Size && n.Root != p.Root:
		return fmt.Errorf("signing request: %w", chain.Fail(chain.CheckpointInconsistent, "another root at size %d", n.Size))
	}
	return nil
}
