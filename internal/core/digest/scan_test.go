package digest

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// throughout is canonicalise without its short way.
func throughout(raw []byte) ([]byte, error) {
	return canonicalise(append([]byte(" "), raw...))
}

// agree fails if the short way says of b what the canonicaliser does not.
func agree(t interface{ Fatalf(string, ...any) }, b []byte) {
	again, err := throughout(b)
	if isCanonical(b) && (err != nil || !bytes.Equal(again, b)) {
		t.Fatalf("%q is taken for canonical; the canonicaliser says %q, %v", b, again, err)
	}
}

// TestScanSeesCanonicalForms: what records are made of needs no canonicaliser.
func TestScanSeesCanonicalForms(t *testing.T) {
	for _, s := range []string{
		`{}`, `{"a":[],"b":{}}`, `{"A":true,"a":false,"b":null}`, `{"a":[-1,0,1,9007199254740992,-9007199254740992]}`,
		`{"a":"€ \"\\\b\f\n\r\t\u0000\u000b\u001f<&>\u007f/😀"}`, `{"a":"x` + "\x7f\uffff\ufffd" + `"}`,
		strings.Repeat(`{"a":`, 63) + `{}` + strings.Repeat(`}`, 63),
	} {
		if s = strings.ReplaceAll(s, `\u007f`, "\x7f"); !isCanonical([]byte(s)) {
			t.Errorf("%s: not seen", s)
		}
		agree(t, []byte(s))
	}
}

func TestScanRefuses(t *testing.T) {
	for _, s := range []string{
		``, `[]`, `1`, ` {}`, `{} `, `{`, `{"a"`, `{"a":`, `{"a":1`, `{"a":1,`, `{"a":1,}`, `{"a":[1,]}`, `{"a":[`, `{}{}`, `{"a" :1}`, `{"a": 1}`,
		`{"b":1,"a":2}`, `{"a":1,"a":2}`, `{"€":1}`, `{"\u0061":1}`, `{"a":01}`, `{"a":-0}`, `{"a":-}`, `{"a":1.0}`, `{"a":1e3}`, `{"a":+1}`,
		`{"a":9007199254740993}`, `{"a":99999999999999999999}`, `{"a":"\u000a"}`, `{"a":"\u001F"}`, `{"a":"\u0041"}`, `{"a":"\/"}`, `{"a":"\u2028"}`,
		`{"a":"\ud83d\ude00"}`, `{"a":"\x"}`, `{"a":"\`, `{"a":"\u00`, "{\"a\":\"\xff\"}", "{\"a\":\"\xed\xa0\x80\"}", "{\"a\":\"\n\"}", `{"a":tru}`, `{"a":nul`,
		strings.Repeat(`{"a":`, 65) + `1` + strings.Repeat(`}`, 65), `{"a":` + strings.Repeat(`[`, 100_000),
	} {
		if isCanonical([]byte(s)) {
			t.Errorf("%.60q: taken for canonical", s)
		}
		agree(t, []byte(s))
	}
}

// TestScanSeesWhatGoEncodes: a map of plain names is in its canonical form when
// it is encoded, whatever its texts are.
func TestScanSeesWhatGoEncodes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := rapid.MapOf(rapid.StringMatching(`[a-z_]{0,5}`), rapid.OneOf(rapid.String().AsAny(), rapid.Int32().AsAny(), rapid.Bool().AsAny(),
			rapid.SliceOf(rapid.String()).AsAny())).Draw(t, "m")
		b, err := Canonical(m)
		if err != nil {
			t.Fatal(err)
		}
		if !isCanonical(b) {
			t.Fatalf("%s: not seen", b)
		}
		agree(t, b)
		want, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if slow, err := throughout(want); err != nil || !bytes.Equal(slow, b) {
			t.Fatalf("%s and %s, %v", b, slow, err)
		}
	})
}

func FuzzScan(f *testing.F) {
	for _, s := range []string{`{}`, `{"a":[1,"x",null,{"b":-1}],"b":"\u001f\n€"}`, `{"a":"\ud83d\ude00"}`, `{"a":9007199254740993}`, `{"b":true,"c":false}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) { agree(t, b) })
}

func BenchmarkCanonical(b *testing.B) {
	doc := map[string]any{"actor": map[string]any{"kind": "runner", "run": "run-1"}, "text": strings.Repeat("word ", 100), "list": []string{"a", "b", "c"}, "n": 12}
	for b.Loop() {
		if _, err := Canonical(doc); err != nil {
			b.Fatal(err)
		}
	}
}

// TestWriter: what it vouches for is canonical.
func TestWriter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.OneOf(rapid.StringMatching(`[ -~]{0,6}`), rapid.String())
		a, list, n := text.Draw(t, "a"), rapid.SliceOf(text).Draw(t, "list"), rapid.OneOf(rapid.Int64Range(-5, 5), rapid.Int64()).Draw(t, "n")
		w := NewWriter(0)
		w.Open()
		w.Text("a", a)
		w.Texts("b", list)
		w.Number("c", n)
		w.Flag("d", true)
		w.Name("e")
		w.Open()
		w.Close()
		w.Name("f")
		w.Raw([]byte(`{"z":1}`))
		w.Close()
		b, ok := w.Bytes()
		if !ok {
			return
		}
		if list == nil {
			list = []string{}
		}
		want, err := Canonical(map[string]any{"a": a, "b": list, "c": n, "d": true, "e": map[string]any{}, "f": map[string]any{"z": 1}})
		if err != nil || !bytes.Equal(b, want) {
			t.Fatalf("%s, want %s, %v", b, want, err)
		}
	})
}
