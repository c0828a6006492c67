package bundle

import (
	"fmt"
	"strings"

	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/tlog"
)

// TrailerKey is the key of the commit trailer that carries a checkpoint.
const TrailerKey = "Numinance-Checkpoint"

// Text returns r as it is shown to people: what was verified, and against whom
// that protects.
func (r Report) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "verified\n")
	fmt.Fprintf(&b, "  change      %s, %s\n", r.Change, r.Chain)
	fmt.Fprintf(&b, "  head        %s\n", r.Head)
	fmt.Fprintf(&b, "  signed by   %s\n", r.SignedBy)
	fmt.Fprintf(&b, "  anchored    entry %d of %s, %d entries\n", r.Index, r.Log, r.Size)
	fmt.Fprintf(&b, "  remember    %s\n", r.Checkpoint)
	for _, p := range r.Protects {
		fmt.Fprintf(&b, "protects against %s\n", p)
	}
	for _, p := range r.Unprotected {
		fmt.Fprintf(&b, "does not protect against %s\n", p)
	}
	return b.String()
}

// ParseRemembered reads checkpoints that somebody kept: a signed checkpoint of
// a trusted log, or lines of origin, size and root hash. Such a file is trusted
// as it is, because it comes from the reader's own keeping.
func ParseRemembered(b []byte, t Trust) ([]tlog.Checkpoint, error) {
	for _, key := range t.Logs {
		if c, err := tlog.OpenCheckpoint(b, key); err == nil {
			return []tlog.Checkpoint{c}, nil
		}
	}
	var out []tlog.Checkpoint
	for n, text := range strings.Split(string(b), "\n") {
		text = strings.TrimSpace(text)
		if text == "" || strings.HasPrefix(text, "#") {
			continue
		}
		c, err := tlog.ParseTrailer(text)
		if err != nil {
			return nil, fmt.Errorf("remembered checkpoint, line %d: %w", n+1, err)
		}
		out = append(out, c)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("remembered checkpoint: %w", chain.Fail(chain.CheckpointMalformed, "no checkpoint in the file"))
	}
	return out, nil
}

// ParseCommit reads the checkpoint trailers of a commit message. A message
// without one is an error: who gives a commit expects it to say something.
func ParseCommit(message []byte) ([]tlog.Checkpoint, error) {
	var out []tlog.Checkpoint
	for _, text := range strings.Split(string(message), "\n") {
		value, ok := strings.CutPrefix(strings.TrimSpace(text), TrailerKey+":")
		if !ok {
			continue
		}
		c, err := tlog.ParseTrailer(value)
		if err != nil {
			return nil, fmt.Errorf("commit trailer: %w", err)
		}
		out = append(out, c)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("commit message: no %s trailer", TrailerKey)
	}
	return out, nil
}
