// Package digest names bytes by their SHA-256 and defines the canonical form
// that every hashed document of the system is first brought into. Every other
// package hashes through this one, so that two parts of the system can never
// disagree about what the digest of a document is.
package digest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/gowebpki/jcs"
)

// Digest is "sha256:" followed by 64 lowercase hex digits. The zero value ""
// names nothing and is never equal to the digest of any bytes.
type Digest string

const prefix = "sha256:"

// ErrNotCanonical is returned when bytes are valid JSON but not in the
// canonical form (RFC 8785) that they would have to be in to be hashed.
var ErrNotCanonical = errors.New("not canonical JSON")

// Of returns the digest of b.
func Of(b []byte) Digest {
	sum := sha256.Sum256(b)
	return FromRaw(sum)
}

// FromRaw returns the digest with the given 32 raw bytes.
func FromRaw(sum [32]byte) Digest { return Digest(prefix + hex.EncodeToString(sum[:])) }

// Parse checks the form of s and returns it as a Digest.
func Parse(s string) (Digest, error) {
	if !Digest(s).Valid() {
		return "", fmt.Errorf("digest %q: want sha256: and 64 lowercase hex digits", s)
	}
	return Digest(s), nil
}

// Valid reports whether d has the form of a digest.
func (d Digest) Valid() bool {
	rest, ok := strings.CutPrefix(string(d), prefix)
	if !ok || len(rest) != 64 {
		return false
	}
	for i := range len(rest) {
		if c := rest[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// Hex returns the 64 hex digits without the algorithm.
func (d Digest) Hex() string { return strings.TrimPrefix(string(d), prefix) }

// Raw returns the 32 bytes of d, or an error if d is malformed.
func (d Digest) Raw() ([32]byte, error) {
	var out [32]byte
	if _, err := Parse(string(d)); err != nil {
		return out, err
	}
	raw, err := hex.DecodeString(d.Hex())
	if err != nil {
		return out, fmt.Errorf("digest %q: %w", string(d), err)
	}
	copy(out[:], raw)
	return out, nil
}

// Canonical returns the RFC 8785 form of v, which must encode to a JSON object.
// Numbers must be integers within ±2^53; larger integers are carried as
// strings, because canonical JSON would silently round them. At most 64 levels
// may be nested.
func Canonical(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // as the canonical form has it
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encode for the canonical form: %w", err)
	}
	return canonicalise(bytes.TrimSuffix(b.Bytes(), []byte("\n")))
}

// OfCanonical returns the digest of the canonical form of v.
func OfCanonical(v any) (Digest, error) {
	b, err := Canonical(v)
	if err != nil {
		return "", err
	}
	return Of(b), nil
}

// CheckCanonical returns nil only if b is already the canonical form of one
// JSON object: readers canonicalise, compare, and refuse anything else.
func CheckCanonical(b []byte) error {
	if isCanonical(b) {
		return nil
	}
	again, err := canonicalise(b)
	if err != nil {
		return err
	}
	if !bytes.Equal(again, b) {
		return ErrNotCanonical
	}
	return nil
}

func canonicalise(raw []byte) ([]byte, error) {
	if isCanonical(raw) {
		return raw, nil
	}
	trimmed := bytes.TrimLeft(raw, " \t\r\n")
	if len(trimmed) == 0 || trimmed[0] != '{' {
		return nil, errors.New("canonical form: the top level must be a JSON object")
	}
	if err := integersOnly(raw); err != nil {
		return nil, err
	}
	out, err := jcs.Transform(raw)
	if err != nil {
		return nil, fmt.Errorf("canonical form: %w", err)
	}
	return out, nil
}

const maxExact = 1 << 53

// maxDepth bounds how deep objects and lists may be nested. The canonicaliser
// descends once per level, and so does every reader of the document.
const maxDepth = 64

// integersOnly refuses floats and integers that a double cannot hold exactly:
// the canonicaliser would round them without a word. It also bounds the depth.
func integersOnly(raw []byte) error {
	depth := 0
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	for {
		tok, err := dec.Token()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("canonical form: %w", err)
		}
		switch tok {
		case json.Delim('{'), json.Delim('['):
			if depth++; depth > maxDepth {
				return fmt.Errorf("canonical form: nested more than %d levels deep", maxDepth)
			}
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
		n, ok := tok.(json.Number)
		if !ok {
			continue
		}
		i, err := n.Int64()
		if err != nil || i > maxExact || i < -maxExact || n.String() == "-0" {
			return fmt.Errorf("canonical form: number %s: only integers within ±2^53; write larger ones as strings", n)
		}
	}
}
