package digest_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/numinance/numinance/internal/core/digest"
)

func TestParse(t *testing.T) {
	good := "sha256:" + strings.Repeat("0a", 32)
	if d, err := digest.Parse(good); err != nil || string(d) != good {
		t.Errorf("got %v, %v", d, err)
	}
	for _, bad := range []string{"", "sha256:", strings.Repeat("0a", 32), "sha256:" + strings.Repeat("0A", 32), "sha256:" + strings.Repeat("0g", 32), good + "0", "sha512:" + strings.Repeat("0a", 32), " " + good} {
		if _, err := digest.Parse(bad); err == nil {
			t.Errorf("%q: accepted", bad)
		}
		if digest.Digest(bad).Valid() {
			t.Errorf("%q: valid", bad)
		}
		if _, err := digest.Digest(bad).Raw(); err == nil {
			t.Errorf("%q: has raw bytes", bad)
		}
	}
	d := digest.Of([]byte("abc"))
	if want := "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"; string(d) != want {
		t.Errorf("got %s, want %s", d, want)
	}
	raw, err := d.Raw()
	if err != nil || digest.FromRaw(raw) != d {
		t.Errorf("raw bytes do not lead back: %v", err)
	}
}

func TestCanonicalForm(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{`{}`, `{}`},
		{` { "b" : 1 , "a" : [ true , null ] } `, `{"a":[true,null],"b":1}`},
		{`{"x":"<&>/"}`, `{"x":"<&>/"}`},
		{`{"x":"\u20ac\u000f\n\"\\"}`, `{"x":"€\u000f\n\"\\"}`},
		// RFC 8785 3.2.3: keys sort by UTF-16 code units.
		{`{"\u20ac":1,"\r":2,"\ufb33":3,"1":4,"\ud83d\ude00":5,"\u0080":6,"\u00f6":7}`, "{\"\\r\":2,\"1\":4,\"\u0080\":6,\"\u00f6\":7,\"\u20ac\":1,\"\U0001f600\":5,\"\ufb33\":3}"},
		{`{"x":9007199254740992,"y":-9007199254740992}`, `{"x":9007199254740992,"y":-9007199254740992}`},
	} {
		got, err := digest.Canonical(json.RawMessage(c.in))
		if err != nil || string(got) != c.want {
			t.Errorf("%s: got %s, %v; want %s", c.in, got, err, c.want)
			continue
		}
		if err := digest.CheckCanonical(got); err != nil {
			t.Errorf("%s: its own canonical form is refused: %v", c.in, err)
		}
		if c.in != c.want {
			if err := digest.CheckCanonical([]byte(c.in)); !errors.Is(err, digest.ErrNotCanonical) {
				t.Errorf("%s: got %v, want ErrNotCanonical", c.in, err)
			}
		}
	}
}

func TestCanonicalFormRefuses(t *testing.T) {
	for _, bad := range []string{
		``, ` `, `[]`, `"x"`, `1`, `null`, `{`, `{}{}`, `{} x`,
		`{"a":1,"a":2}`, `{"a":1.5}`, `{"a":1e3}`, `{"a":1.0}`, `{"a":-0}`, `{"a":01}`,
		`{"a":9007199254740993}`, `{"a":-9007199254740993}`, `{"a":1e400}`, `{"a":NaN}`,
		"{\"a\":\"\xff\"}", `{"a":"\ud800"}`, "{\"a\":\"\x01\"}",
		strings.Repeat(`{"a":`, 65) + `1` + strings.Repeat(`}`, 65),
		`{"a":` + strings.Repeat(`[`, 1_000_000),
	} {
		if err := digest.CheckCanonical([]byte(bad)); err == nil {
			t.Errorf("%.60q: accepted", bad)
		}
	}
	if _, err := digest.Canonical(map[string]any{"f": 0.5}); err == nil {
		t.Error("a float: accepted")
	}
	if _, err := digest.OfCanonical(make(chan int)); err == nil {
		t.Error("a channel: accepted")
	}
}

// Two spellings of one document have one digest.
func TestOneDocumentHasOneDigest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := rapid.MapOf(rapid.String(), rapid.OneOf(rapid.String().AsAny(), rapid.Int32().AsAny(), rapid.Bool().AsAny())).Draw(t, "m")
		a, err := digest.OfCanonical(m)
		if err != nil {
			t.Fatal(err)
		}
		spaced, err := json.MarshalIndent(m, " ", "\t")
		if err != nil {
			t.Fatal(err)
		}
		b, err := digest.OfCanonical(json.RawMessage(spaced))
		if err != nil || a != b {
			t.Fatalf("%s and %s (%v) for %s", a, b, err, spaced)
		}
	})
}

func FuzzCanonical(f *testing.F) {
	for _, s := range []string{`{}`, `{"a":[1,"x",null,{"b":-1}]}`, `{"€":"\ud83d\ude00"}`, `{"a":9007199254740993}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if digest.CheckCanonical(b) != nil {
			return
		}
		again, err := digest.Canonical(json.RawMessage(b))
		if err != nil || string(again) != string(b) {
			t.Fatalf("accepted %q, again %q, %v", b, again, err)
		}
	})
}
