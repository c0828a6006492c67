package bundle_test

import (
	"archive/zip"
	"bytes"
	"io"
	"io/fs"
	"iter"
	"strings"
	"testing"
	"testing/fstest"

	evidence "github.com/numinance/numinance/conformance/evidence/v1"
	"github.com/numinance/numinance/internal/core/bundle"
	"github.com/numinance/numinance/internal/core/chain"
)

func seq(records [][]byte) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		for _, r := range records {
			if !yield(r, nil) {
				return
			}
		}
	}
}

func zipped(t testing.TB, c bundle.Contents) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := bundle.Write(&b, c); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func unzip(t testing.TB, c bundle.Contents) map[string]string {
	t.Helper()
	b := zipped(t, c)
	z, err := zip.NewReader(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, f := range z.File {
		r, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		out[f.Name] = string(content)
	}
	return out
}

// TestVectors verifies every published vector and wants its label.
func TestVectors(t *testing.T) {
	all, err := evidence.Vectors()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 60 {
		t.Fatalf("%d vectors", len(all))
	}
	files, err := evidence.Files()
	if err != nil {
		t.Fatal(err)
	}
	read := func(name string) []byte {
		b, err := fs.ReadFile(files, name)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, v := range all {
		t.Run(v.Name, func(t *testing.T) {
			trust, err := bundle.ParseTrust(read(v.Keys))
			if err != nil {
				t.Fatal(err)
			}
			o := bundle.Options{Closed: v.Closed, Witnesses: v.Witnesses}
			if v.Remembered != "" {
				if o.Remembered, err = bundle.ParseRemembered(read(v.Name+"/"+v.Remembered), trust); err != nil {
					t.Fatal(err)
				}
			}
			if v.Commit != "" {
				if o.Trailers, err = bundle.ParseCommit(read(v.Name + "/" + v.Commit)); err != nil {
					t.Fatal(err)
				}
			}
			sub, err := fs.Sub(files, v.Name)
			if err != nil {
				t.Fatal(err)
			}
			r, err := bundle.Verify(sub, trust, o)
			if string(chain.LabelOf(err)) != v.Label || (v.Label == "") != (err == nil) {
				t.Fatalf("got %v, want label %q: %s", err, v.Label, v.Means)
			}
			if err != nil {
				return
			}
			if r.Chain != v.Chain {
				t.Errorf("chain is %q, want %q", r.Chain, v.Chain)
			}
			unprotected := strings.Contains(r.Text(), "does not protect against the log's operator")
			if unprotected == v.Protected {
				t.Errorf("protected %t, but says:\n%s", v.Protected, r.Text())
			}
		})
	}
}

// Every label that a verifier can give has a vector, but for those of reading.
func TestEveryLabelHasAVector(t *testing.T) {
	all, err := evidence.Vectors()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[chain.Label]bool{}
	for _, v := range all {
		seen[chain.Label(v.Label)] = true
	}
	for _, l := range chain.Labels() {
		if !seen[l] {
			t.Errorf("no vector fails with %s", l)
		}
	}
}

func TestWriteThenVerify(t *testing.T) {
	w := closed()
	trust, err := bundle.ParseTrust([]byte(keyFiles()["keys.txt"]))
	if err != nil {
		t.Fatal(err)
	}
	c := bundle.Contents{Change: w.change, Records: seq(w.records), Heads: w.heads, Consistency: w.consistency, Keys: trust}
	b := zipped(t, c)
	if again := zipped(t, c); !bytes.Equal(b, again) {
		t.Error("the same contents gave other bytes")
	}
	z, err := zip.NewReader(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	r, err := bundle.Verify(z, trust, bundle.Options{Change: w.change, Closed: true})
	if err != nil {
		t.Fatal(err)
	}
	if r.Records != 7 || !r.Closed || r.Head != w.prefix(7).Digest {
		t.Errorf("report %+v", r)
	}
	if _, err := bundle.Verify(z, trust, bundle.Options{Change: "chg-other"}); chain.LabelOf(err) != chain.WrongChange {
		t.Errorf("another Change: %v", err)
	}
	if _, err := bundle.Verify(z, bundle.Trust{}, bundle.Options{}); chain.LabelOf(err) != chain.VerifierKeyUntrusted {
		t.Errorf("no key trusted: %v", err)
	}
	keys, err := fs.ReadFile(z, bundle.KeysFile)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := bundle.ParseTrust(keys); err != nil || again.String() != trust.String() {
		t.Errorf("keys.txt does not read back: %v", err)
	}
}

func TestTrustFilesRefuse(t *testing.T) {
	for _, bad := range []string{"x", "head", "head x", "boss " + headVKey, "head " + headVKey + "x", "head " + strings.Replace(headVKey, "+", "-", 1)} {
		if _, err := bundle.ParseTrust([]byte(bad)); err == nil {
			t.Errorf("%q: accepted", bad)
		}
	}
}

func TestCheckpointsFromElsewhere(t *testing.T) {
	w := closed()
	trust, err := bundle.ParseTrust([]byte(keyFiles()["keys.txt"]))
	if err != nil {
		t.Fatal(err)
	}
	now := w.log.now()
	for name, in := range map[string]string{"signed": string(signed(now, logKey)), "a line": "# kept\n" + now.Trailer() + "\n"} {
		got, err := bundle.ParseRemembered([]byte(in), trust)
		if err != nil || len(got) != 1 || got[0].Text() != now.Text() {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	for _, bad := range []string{"", "x", string(signed(now, impostorKey)), "a b c"} {
		if got, err := bundle.ParseRemembered([]byte(bad), trust); err == nil {
			t.Errorf("%q: accepted as %v", bad, got)
		}
	}
	for _, bad := range []string{"", "Merge\n", bundle.TrailerKey + ": x\n"} {
		if got, err := bundle.ParseCommit([]byte(bad)); err == nil {
			t.Errorf("%q: accepted as %v", bad, got)
		}
	}
}

// FuzzVerify feeds spoiled files of a good bundle: never a panic, and nothing
// but the untouched bundle verifies to another head.
func FuzzVerify(f *testing.F) {
	w := closed()
	good := w.files(f)
	trust, err := bundle.ParseTrust([]byte(keyFiles()["keys.txt"]))
	if err != nil {
		f.Fatal(err)
	}
	names := []string{bundle.ManifestFile, bundle.RecordsFile, bundle.HeadsFile, bundle.ConsistencyFile}
	for i, name := range names {
		f.Add(uint8(i), []byte(good[name]))
	}
	f.Fuzz(func(t *testing.T, which uint8, content []byte) {
		files := fstest.MapFS{}
		for name, c := range good {
			files[name] = &fstest.MapFile{Data: []byte(c)}
		}
		files[names[int(which)%len(names)]] = &fstest.MapFile{Data: content}
		r, err := bundle.Verify(files, trust, bundle.Options{})
		if err == nil && r.Head != w.prefix(7).Digest && r.Head != w.prefix(3).Digest {
			t.Fatalf("verified a head nobody signed: %s", r.Head)
		}
		if err != nil && chain.LabelOf(err) == "" {
			t.Fatalf("no label: %v", err)
		}
	})
}

// BenchmarkVerify verifies 10,000 records: one second or less is the figure to
// hold, besides one signature a head.
func BenchmarkVerify(b *testing.B) {
	w := &world{change: "chg-good", records: records("chg-good", 10_000, true, "one")}
	w.anchor(headKey, 5_000, 10_001)
	files := fstest.MapFS{}
	for name, c := range w.files(b) {
		files[name] = &fstest.MapFile{Data: []byte(c)}
	}
	trust, err := bundle.ParseTrust([]byte(keyFiles()["keys.txt"]))
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := bundle.Verify(files, trust, bundle.Options{}); err != nil {
			b.Fatal(err)
		}
	}
}
