package chain

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"time"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
)

// Format is the value of every record's "format" member.
const Format = "numinance.evidence.v1"

// MaxRecord is the largest record in bytes. What is larger belongs in a blob
// that the record names by digest.
const MaxRecord = 1 << 16

// TerminalKind is the kind of the record that ends a chain.
const TerminalKind = "chain.closed"

// TimeLayout is the form of "at": UTC, always nine digits of a second, so that
// one instant has one spelling.
const TimeLayout = "2006-01-02T15:04:05.000000000Z"

// genesis stands as "previous" in the first record of every chain.
var genesis = digest.Of([]byte(Format + " genesis"))

// Genesis returns the digest that the first record of every chain names as its
// previous one: SHA-256 of the ASCII text "numinance.evidence.v1 genesis".
func Genesis() digest.Digest { return genesis }

var kindPattern = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_.-]{0,63}$`)

// Record is one entry of a chain, decoded. What is hashed and stored is always
// the bytes, never this struct encoded again.
type Record struct {
	Change identity.ChangeID
	// Sequence counts from 1, so the last sequence is the chain's length.
	Sequence uint64
	Previous digest.Digest
	At       time.Time
	Kind     string
	// Body is the canonical JSON object of the kind.
	Body json.RawMessage
}

// Terminal reports whether r ends its chain.
func (r Record) Terminal() bool { return r.Kind == TerminalKind }

// wire is the record as it stands in JSON. The members are exactly these.
type wire struct {
	At       *string         `json:"at"`
	Body     json.RawMessage `json:"body"`
	Change   *string         `json:"change_id"`
	Format   *string         `json:"format"`
	Kind     *string         `json:"kind"`
	Previous *string         `json:"previous"`
	Sequence *string         `json:"sequence"`
}

// encode returns the canonical bytes of r.
func encode(r Record) ([]byte, error) {
	if !identity.ValidID(r.Change) {
		return nil, fmt.Errorf("encode record: change id %q is malformed", r.Change)
	}
	if !kindPattern.MatchString(r.Kind) {
		return nil, fmt.Errorf("encode record: kind %q is malformed", r.Kind)
	}
	if r.At.Year() < 1970 || r.At.Year() > 9999 {
		return nil, fmt.Errorf("encode record: time %v is out of range", r.At)
	}
	at, change, format := r.At.UTC().Format(TimeLayout), string(r.Change), Format
	previous, sequence := string(r.Previous), strconv.FormatUint(r.Sequence, 10)
	b, err := digest.Canonical(wire{
		At: &at, Body: r.Body, Change: &change, Format: &format,
		Kind: &r.Kind, Previous: &previous, Sequence: &sequence,
	})
	if err != nil {
		return nil, fmt.Errorf("encode record %d of %s: %w", r.Sequence, r.Change, err)
	}
	if len(b) > MaxRecord {
		return nil, fmt.Errorf("encode record %d of %s: %d bytes, at most %d fit", r.Sequence, r.Change, len(b), MaxRecord)
	}
	// A reader must accept what was written; the body could still hold
	// something else than an object, or members that decode in two ways.
	if _, err := parse(b); err != nil {
		return nil, fmt.Errorf("encode record %d of %s: %w", r.Sequence, r.Change, err)
	}
	return b, nil
}

// Parse decodes one record. It canonicalises and compares, and refuses unknown
// or missing members, so every accepted record has exactly one spelling.
// Failures carry NotCanonical or MalformedRecord.
func Parse(b []byte) (Record, error) {
	if len(b) > MaxRecord {
		return Record{}, Fail(MalformedRecord, "%d bytes, at most %d are allowed", len(b), MaxRecord)
	}
	if err := digest.CheckCanonical(b); err != nil {
		return Record{}, Fail(NotCanonical, "%v", err)
	}
	return parse(b)
}

// parse is Parse of bytes that are known to be canonical.
func parse(b []byte) (Record, error) {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var w wire
	if err := dec.Decode(&w); err != nil {
		return Record{}, Fail(MalformedRecord, "%v", err)
	}
	if err := exactMembers(b); err != nil {
		return Record{}, err
	}
	if w.At == nil || w.Change == nil || w.Format == nil || w.Kind == nil || w.Previous == nil || w.Sequence == nil {
		return Record{}, Fail(MalformedRecord, "a member is null")
	}
	if *w.Format != Format {
		return Record{}, Fail(MalformedRecord, "format %q, want %q", *w.Format, Format)
	}
	r := Record{Change: identity.ChangeID(*w.Change), Kind: *w.Kind, Body: w.Body}
	if !identity.ValidID(r.Change) {
		return Record{}, Fail(MalformedRecord, "change_id %q", *w.Change)
	}
	if !kindPattern.MatchString(r.Kind) {
		return Record{}, Fail(MalformedRecord, "kind %q", r.Kind)
	}
	if len(r.Body) == 0 || r.Body[0] != '{' {
		return Record{}, Fail(MalformedRecord, "body is not an object")
	}
	var err error
	if r.Sequence, err = ParseCount(*w.Sequence); err != nil || r.Sequence == 0 {
		return Record{}, Fail(MalformedRecord, "sequence %q: want a decimal from 1, no leading zero", *w.Sequence)
	}
	if r.Previous, err = digest.Parse(*w.Previous); err != nil {
		return Record{}, Fail(MalformedRecord, "previous: %v", err)
	}
	if r.At, err = time.Parse(TimeLayout, *w.At); err != nil || r.At.Format(TimeLayout) != *w.At {
		return Record{}, Fail(MalformedRecord, "at %q: want UTC with nine digits of a second", *w.At)
	}
	return r, nil
}

// exactMembers refuses member names that encoding/json would take for others:
// it matches names without regard to case.
func exactMembers(b []byte) error {
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(b, &raw); err != nil {
		return Fail(MalformedRecord, "%v", err)
	}
	for _, name := range []string{"at", "body", "change_id", "format", "kind", "previous", "sequence"} {
		if _, ok := raw[name]; !ok {
			return Fail(MalformedRecord, "member %q is missing", name)
		}
	}
	if len(raw) != 7 {
		return Fail(MalformedRecord, "%d members, want 7", len(raw))
	}
	return nil
}

// ParseCount reads a 64-bit count in its only spelling: decimal digits without
// a sign or a leading zero.
func ParseCount(s string) (uint64, error) {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("count %q: %w", s, err)
	}
	if strconv.FormatUint(n, 10) != s {
		return 0, fmt.Errorf("count %q: not in its shortest form", s)
	}
	return n, nil
}

// terminalBody is what a terminal record must say, at least.
type terminalBody struct {
	Length *string `json:"length"`
}

// terminalLength returns the length a terminal record states.
func terminalLength(r Record) (uint64, error) {
	var body map[string]json.RawMessage
	if err := json.Unmarshal(r.Body, &body); err != nil {
		return 0, FailAt(MalformedRecord, r.Sequence, "%v", err)
	}
	var t terminalBody
	raw, ok := body["length"]
	if !ok || json.Unmarshal(raw, &t.Length) != nil || t.Length == nil {
		return 0, FailAt(TerminalLength, r.Sequence, "the terminal record states no length")
	}
	n, err := ParseCount(*t.Length)
	if err != nil {
		return 0, FailAt(TerminalLength, r.Sequence, "%v", err)
	}
	return n, nil
}

// ValidKind reports whether s can be a record's kind: a letter, then at most 63
// letters, digits, '_', '.' and '-'.
func ValidKind(s string) bool { return kindPattern.MatchString(s) }
