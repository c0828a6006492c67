package chain

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
)

// HeadDomain is the first line of every head statement. No checkpoint can
// begin with it, so a signature over one can never be passed off as the other.
const HeadDomain = Format + "/head"

// maxNote bounds a signed head before it is parsed.
const maxNote = 16 << 10

// Statement returns the text that a head's signature covers: four lines, the
// domain, the change id, the length and the digest.
func (h Head) Statement() (string, error) {
	if !identity.ValidID(h.Change) || h.Length == 0 || !h.Digest.Valid() {
		return "", fmt.Errorf("head statement of %q: no record to sign", h.Change)
	}
	return HeadDomain + "\n" + string(h.Change) + "\n" + strconv.FormatUint(h.Length, 10) + "\n" + string(h.Digest) + "\n", nil
}

// SignHead returns h as a C2SP signed note. With an Ed25519 key the same head
// gives the same bytes every time, so signing again after a crash is harmless.
func SignHead(h Head, signers ...note.Signer) ([]byte, error) {
	text, err := h.Statement()
	if err != nil {
		return nil, err
	}
	if len(signers) == 0 {
		return nil, errors.New("sign head: no signer")
	}
	b, err := note.Sign(&note.Note{Text: text}, signers...)
	if err != nil {
		return nil, fmt.Errorf("sign head of %s: %w", h.Change, err)
	}
	return b, nil
}

// OpenHead verifies a signed head against the trusted keys and returns the
// head and the name of a key that signed it. Closed is not part of a statement
// and is false.
func OpenHead(b []byte, trusted ...note.Verifier) (Head, string, error) {
	n, err := OpenNote(b, trusted...)
	if err != nil {
		return Head{}, "", err
	}
	h, err := parseStatement(n.Text)
	if err != nil {
		return Head{}, "", err
	}
	return h, n.Sigs[0].Name, nil
}

// OpenNote verifies a signed note and labels what is wrong with it:
// SignatureInvalid for a trusted key whose signature is false,
// VerifierKeyUntrusted when no trusted key signed, HeadMalformed else.
func OpenNote(b []byte, trusted ...note.Verifier) (*note.Note, error) {
	if len(b) > maxNote {
		return nil, Fail(HeadMalformed, "signed note of %d bytes, at most %d are allowed", len(b), maxNote)
	}
	n, err := note.Open(b, note.VerifierList(trusted...))
	var invalid *note.InvalidSignatureError
	var unverified *note.UnverifiedNoteError
	switch {
	case err == nil:
		return n, nil
	case errors.As(err, &invalid):
		return nil, Fail(SignatureInvalid, "the signature of %s does not verify", invalid.Name)
	case errors.As(err, &unverified):
		return nil, Fail(VerifierKeyUntrusted, "signed by %s, none of them trusted", signerNames(unverified.Note))
	default:
		return nil, Fail(HeadMalformed, "%v", err)
	}
}

func signerNames(n *note.Note) string {
	names := make([]string, 0, len(n.UnverifiedSigs))
	for _, s := range n.UnverifiedSigs {
		names = append(names, fmt.Sprintf("%s+%08x", s.Name, s.Hash))
	}
	if len(names) == 0 {
		return "no key"
	}
	return strings.Join(names, ", ")
}

func parseStatement(text string) (Head, error) {
	lines := strings.Split(text, "\n")
	if len(lines) != 5 || lines[4] != "" || lines[0] != HeadDomain {
		return Head{}, Fail(HeadMalformed, "not a head statement of four lines beginning with %s", HeadDomain)
	}
	h := Head{Change: identity.ChangeID(lines[1])}
	if !identity.ValidID(h.Change) {
		return Head{}, Fail(HeadMalformed, "change id %q", lines[1])
	}
	var err error
	if h.Length, err = ParseCount(lines[2]); err != nil || h.Length == 0 {
		return Head{}, Fail(HeadMalformed, "length %q", lines[2])
	}
	if h.Digest, err = digest.Parse(lines[3]); err != nil {
		return Head{}, Fail(HeadMalformed, "%v", err)
	}
	return h, nil
}
