package identity_test

import (
	"regexp"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/numinance/numinance/internal/core/identity"
)

var (
	id        = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)
	principal = regexp.MustCompile(`^[a-z]+:[A-Za-z0-9][A-Za-z0-9._@/-]{0,126}$`)
)

func agree(t interface{ Fatalf(string, ...any) }, s string) {
	if got, want := identity.ValidID(s), id.MatchString(s); got != want {
		t.Fatalf("id %q: %v, want %v", s, got, want)
	}
	if got, want := identity.Principal(s).Valid(), principal.MatchString(s); got != want {
		t.Fatalf("principal %q: %v, want %v", s, got, want)
	}
}

// TestForms holds ids and principals against the patterns that define them.
func TestForms(t *testing.T) {
	for _, s := range []string{
		"", "-", "-a", "a-", "a", "A", "0", "a\n", "ä", "a b", "a:", ":a", "a:a", "A:a", "a::a", "a:a:b", "a:.a", "a:A._@/-9", "a:a\n", "a1:a", "human:ä",
		strings.Repeat("a", 63), strings.Repeat("a", 64), "a:" + strings.Repeat("a", 127), "a:" + strings.Repeat("a", 128), strings.Repeat("a", 300) + ":a",
	} {
		agree(t, s)
	}
	rapid.Check(t, func(t *rapid.T) { agree(t, rapid.StringMatching(`[a-z0-9:A._@/ -]{0,10}`).Draw(t, "s")) })
	rapid.Check(t, func(t *rapid.T) { agree(t, rapid.String().Draw(t, "s")) })
}

func FuzzForms(f *testing.F) {
	f.Add("human:alice")
	f.Fuzz(func(t *testing.T, s string) { agree(t, s) })
}
