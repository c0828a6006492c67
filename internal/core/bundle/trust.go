package bundle

import (
	"bufio"
	"bytes"
	"fmt"
	"strings"

	"golang.org/x/mod/sumdb/note"
)

// Trust is the set of public keys a verifier has reason to believe in. It
// never comes from the bundle that is verified.
type Trust struct {
	// Heads may sign chain heads.
	Heads []note.Verifier
	// Logs may sign checkpoints under their own name.
	Logs []note.Verifier
	// Witnesses may cosign checkpoints.
	Witnesses []note.Verifier
	lines     []string
}

// maxTrust bounds a trust file.
const maxTrust = 1 << 20

// ParseTrust reads a trust file: lines "head KEY", "log KEY" or "witness KEY",
// where KEY is the key in the form of signed notes (name+hash+base64). Empty
// lines and lines beginning with '#' say nothing.
func ParseTrust(b []byte) (Trust, error) {
	if len(b) > maxTrust {
		return Trust{}, fmt.Errorf("key file: %d bytes, at most %d are allowed", len(b), maxTrust)
	}
	var t Trust
	lines := bufio.NewScanner(bytes.NewReader(b))
	for n := 1; lines.Scan(); n++ {
		text := strings.TrimSpace(lines.Text())
		if text == "" || strings.HasPrefix(text, "#") {
			continue
		}
		role, key, _ := strings.Cut(text, " ")
		if err := t.Add(role, strings.TrimSpace(key)); err != nil {
			return Trust{}, fmt.Errorf("key file, line %d: %w", n, err)
		}
	}
	if err := lines.Err(); err != nil {
		return Trust{}, fmt.Errorf("key file: %w", err)
	}
	return t, nil
}

// Add trusts a key in a role: head, log or witness.
func (t *Trust) Add(role, vkey string) error {
	key, err := note.NewVerifier(vkey)
	if err != nil {
		return fmt.Errorf("key %q: %w", vkey, err)
	}
	switch role {
	case "head":
		t.Heads = append(t.Heads, key)
	case "log":
		t.Logs = append(t.Logs, key)
	case "witness":
		t.Witnesses = append(t.Witnesses, key)
	default:
		return fmt.Errorf("role %q: want head, log or witness", role)
	}
	t.lines = append(t.lines, role+" "+vkey)
	return nil
}

// String returns t as a trust file.
func (t Trust) String() string {
	if len(t.lines) == 0 {
		return ""
	}
	return strings.Join(t.lines, "\n") + "\n"
}
