package chain_test

import (
	"crypto/rand"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/note"

	"github.com/numinance/numinance/internal/core/chain"
)

func newKey(t testing.TB, name string) (note.Signer, note.Verifier) {
	t.Helper()
	skey, vkey, err := note.GenerateKey(rand.Reader, name)
	if err != nil {
		t.Fatal(err)
	}
	s, err := note.NewSigner(skey)
	if err != nil {
		t.Fatal(err)
	}
	v, err := note.NewVerifier(vkey)
	if err != nil {
		t.Fatal(err)
	}
	return s, v
}

func TestSignedHeads(t *testing.T) {
	_, head := build(t, "chg-one", 3, false)
	s, v := newKey(t, "example.org/evidence")
	_, other := newKey(t, "example.org/evidence")
	signed, err := chain.SignHead(head, s)
	if err != nil {
		t.Fatal(err)
	}
	again, err := chain.SignHead(head, s)
	if err != nil || string(again) != string(signed) {
		t.Errorf("signing twice gave other bytes: %v", err)
	}
	got, by, err := chain.OpenHead(signed, v)
	if err != nil || got != head || by != "example.org/evidence" {
		t.Errorf("got %v by %s, %v", got, by, err)
	}
	sign := func(text string) []byte {
		b, err := note.Sign(&note.Note{Text: text}, s)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	good, _ := head.Statement()
	for _, c := range []struct {
		name   string
		signed []byte
		key    note.Verifier
		want   chain.Label
	}{
		{"another key of the same name", signed, other, chain.VerifierKeyUntrusted},
		{"edited length", []byte(strings.Replace(string(signed), "\n3\n", "\n2\n", 1)), v, chain.SignatureInvalid},
		{"another domain", sign(strings.Replace(good, chain.HeadDomain, "example.org/log", 1)), v, chain.HeadMalformed},
		{"one more line", sign(good + "x\n"), v, chain.HeadMalformed},
		{"length zero", sign(strings.Replace(good, "\n3\n", "\n0\n", 1)), v, chain.HeadMalformed},
		{"length with a leading zero", sign(strings.Replace(good, "\n3\n", "\n03\n", 1)), v, chain.HeadMalformed},
		{"no note", []byte("hello"), v, chain.HeadMalformed},
	} {
		if _, _, err := chain.OpenHead(c.signed, c.key); chain.LabelOf(err) != c.want {
			t.Errorf("%s: got %v, want %s", c.name, err, c.want)
		}
	}
	if _, err := chain.SignHead(chain.Start("chg-one"), s); err == nil {
		t.Error("the head of an empty chain was signed")
	}
}

func FuzzOpenHead(f *testing.F) {
	_, head := build(f, "chg-one", 3, false)
	s, v := newKey(f, "example.org/evidence")
	signed, err := chain.SignHead(head, s)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(signed)
	f.Add([]byte("a\n\n— x AAAA\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, _, err := chain.OpenHead(b, v)
		if err == nil && h != (chain.Head{Change: head.Change, Length: head.Length, Digest: head.Digest}) {
			t.Fatalf("a head nobody signed: %v", h)
		}
		if err != nil && chain.LabelOf(err) == "" {
			t.Fatalf("no label: %v", err)
		}
	})
}
