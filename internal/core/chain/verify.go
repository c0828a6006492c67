package chain

import (
	"fmt"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
)

// Verifier checks a chain record by record in constant memory.
type Verifier struct {
	head     Head
	previous digest.Digest // what the last accepted record named
}

// NewVerifier returns a verifier for the chain of change.
func NewVerifier(change identity.ChangeID) *Verifier {
	return &Verifier{head: Start(change)}
}

// Next checks the next record and moves the head. After a failure the verifier
// must not be used any more: nothing behind a broken link is bound to anything.
func (v *Verifier) Next(b []byte) (Record, error) {
	want := v.head.Length + 1
	if v.head.Closed {
		return Record{}, FailAt(RecordAfterTerminal, want, "the chain ended at record %d", v.head.Length)
	}
	r, err := Parse(b)
	if err != nil {
		if f, ok := err.(*Failure); ok {
			f.Sequence = want
		}
		return Record{}, err
	}
	switch {
	case r.Change != v.head.Change:
		return r, FailAt(WrongChange, want, "belongs to %s, not to %s", r.Change, v.head.Change)
	case r.Sequence > want:
		return r, FailAt(ReceiptChainGap, want, "missing: the next record is %d", r.Sequence)
	case r.Sequence == v.head.Length && r.Previous == v.previous && digest.Of(b) != v.head.Digest:
		return r, FailAt(Fork, r.Sequence, "two different records claim this place")
	case r.Sequence < want:
		return r, FailAt(SequenceRepeated, want, "record %d stands here", r.Sequence)
	case r.Previous != v.head.Digest:
		return r, FailAt(BindingFailed, want, "names %s as previous, which is %s", r.Previous, v.head.Digest)
	}
	if r.Terminal() {
		n, err := terminalLength(r)
		if err != nil {
			return r, err
		}
		if n != r.Sequence {
			return r, FailAt(TerminalLength, r.Sequence, "states length %d", n)
		}
	}
	v.previous = r.Previous
	v.head = Head{Change: r.Change, Length: r.Sequence, Digest: digest.Of(b), Closed: r.Terminal()}
	return r, nil
}

// Head returns where the checked part of the chain stands.
func (v *Verifier) Head() Head { return v.head }

// Result is a verified chain.
type Result struct{ Head Head }

// String says "open through N" or "closed N".
func (r Result) String() string {
	if r.Head.Closed {
		return fmt.Sprintf("closed %d", r.Head.Length)
	}
	return fmt.Sprintf("open through %d", r.Head.Length)
}

// Verify checks a whole chain of change. No record at all is ChainMissing.
func Verify(change identity.ChangeID, records [][]byte) (Result, error) {
	v := NewVerifier(change)
	for _, b := range records {
		if _, err := v.Next(b); err != nil {
			return Result{}, err
		}
	}
	if v.head.Length == 0 {
		return Result{}, Fail(ChainMissing, "no record of %s", change)
	}
	return Result{Head: v.head}, nil
}
