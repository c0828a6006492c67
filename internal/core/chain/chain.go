// Package chain is the evidence chain of a Change: canonical records, each
// naming the SHA-256 of the one before it, an end that states the length, and
// signed heads. The evidence context appends with it; verifiers, ours and the
// offline one, check with it.
package chain

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
)

// Head is where a chain stands: how many records it has and the digest of the
// last. Length 0 with Genesis is the chain before its first record.
type Head struct {
	Change identity.ChangeID
	Length uint64
	Digest digest.Digest
	// Closed is true once the terminal record is written.
	Closed bool
}

// Start returns the head of the empty chain of change.
func Start(change identity.ChangeID) Head {
	return Head{Change: change, Digest: genesis}
}

// Resume returns the head of a chain whose last stored record is last. It
// trusts that what precedes is whole; Verify is what shows it.
func Resume(last []byte) (Head, Record, error) {
	r, err := Parse(last)
	if err != nil {
		return Head{}, Record{}, err
	}
	return Head{Change: r.Change, Length: r.Sequence, Digest: digest.Of(last), Closed: r.Terminal()}, r, nil
}

// Entry is what a caller wants recorded; place and binding come from the head.
type Entry struct {
	At   time.Time
	Kind string
	// Body must be one JSON object; it is brought into the canonical form.
	Body json.RawMessage
}

// ErrClosed is returned by Append and Close on a chain that has ended.
var ErrClosed = errors.New("the chain is closed")

// Append returns the bytes of the next record and the head after it. The
// terminal kind is reserved for Close.
func Append(h Head, e Entry) ([]byte, Head, error) {
	if e.Kind == TerminalKind {
		return nil, h, fmt.Errorf("append to %s: kind %q only ends a chain", h.Change, TerminalKind)
	}
	return next(h, e)
}

// Close returns the terminal record and the head after it. The body may hold
// further members; "length" is set here to the number of records, the terminal
// one included.
func Close(h Head, at time.Time, body map[string]any) ([]byte, Head, error) {
	if h.Length == 0 {
		return nil, h, fmt.Errorf("close %s: the chain has no record", h.Change)
	}
	full := make(map[string]any, len(body)+1)
	for k, v := range body {
		full[k] = v
	}
	full["length"] = strconv.FormatUint(h.Length+1, 10)
	raw, err := json.Marshal(full)
	if err != nil {
		return nil, h, fmt.Errorf("close %s: %w", h.Change, err)
	}
	return next(h, Entry{At: at, Kind: TerminalKind, Body: raw})
}

func next(h Head, e Entry) ([]byte, Head, error) {
	if h.Closed {
		return nil, h, fmt.Errorf("append to %s: %w", h.Change, ErrClosed)
	}
	if h.Length == 0 && h.Digest != genesis {
		return nil, h, fmt.Errorf("append to %s: an empty chain must stand at genesis", h.Change)
	}
	b, err := encode(Record{
		Change: h.Change, Sequence: h.Length + 1, Previous: h.Digest,
		At: e.At, Kind: e.Kind, Body: e.Body,
	})
	if err != nil {
		return nil, h, err
	}
	return b, Head{Change: h.Change, Length: h.Length + 1, Digest: digest.Of(b), Closed: e.Kind == TerminalKind}, nil
}
