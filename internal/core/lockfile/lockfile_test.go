package lockfile_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/lockfile"
)

func sum(s string) digest.Digest { return digest.Of([]byte(s)) }

func entries() []lockfile.Entry {
	return []lockfile.Entry{
		{Kind: lockfile.Plugin, Name: "dev.numinance.embedded/scm-git", Digest: sum("a"), Origin: "bundled", Manifest: sum("m")},
		{Kind: lockfile.Image, Name: "default", Digest: sum("b")},
		{Kind: lockfile.Binary, Name: "numi", Digest: sum("c")},
		{Kind: lockfile.Policy, Name: "default.cedar", Digest: sum("d")},
		{Kind: lockfile.Tool, Name: "confluence-eng/getConfluencePage", Digest: sum("e")},
	}
}

func file(t testing.TB) lockfile.File {
	t.Helper()
	f, err := lockfile.New(entries())
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestRoundTrip(t *testing.T) {
	f := file(t)
	got, err := lockfile.Parse(f.Format())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(f.Entries(), got.Entries()); diff != "" {
		t.Fatal(diff)
	}
	reversed := entries()
	reversed[0], reversed[4] = reversed[4], reversed[0]
	again, err := lockfile.New(reversed)
	if err != nil || again.Digest() != f.Digest() {
		t.Fatalf("order changes the file: %v", err)
	}
}

func TestParseRefusesEverythingElse(t *testing.T) {
	good := string(file(t).Format())
	resum := func(s string) string {
		i := strings.LastIndex(s, "sum ")
		return s[:i] + "sum " + string(digest.Of([]byte(s[:i]))) + "\n"
	}
	lines := strings.SplitAfter(good, "\n")
	for name, text := range map[string]string{
		"empty":             "",
		"no header":         strings.TrimPrefix(good, "numinance-lock v1\n"),
		"other version":     resum(strings.Replace(good, "v1", "v2", 1)),
		"cut":               good[:len(good)-10],
		"cut at a line":     strings.Join(lines[:3], ""),
		"no last newline":   strings.TrimSuffix(good, "\n"),
		"more after":        good + "x\n",
		"hand edit":         strings.Replace(good, string(sum("b")), string(sum("z")), 1),
		"removed line":      strings.Replace(good, lines[2], "", 1),
		"out of order":      resum(lines[0] + lines[2] + lines[1] + strings.Join(lines[3:], "")),
		"twice":             resum(lines[0] + lines[1] + lines[1] + strings.Join(lines[2:], "")),
		"unknown kind":      resum(strings.Replace(good, "image ", "image2 ", 1)),
		"double blank":      resum(strings.Replace(good, "image ", "image  ", 1)),
		"bad digest":        resum(strings.Replace(good, string(sum("b")), "sha256:00", 1)),
		"bad origin":        resum(strings.Replace(good, " bundled ", " moon ", 1)),
		"plugin without":    resum(strings.Replace(good, " bundled "+string(sum("m")), "", 1)),
		"image with origin": resum(strings.Replace(good, string(sum("b")), string(sum("b"))+" bundled "+string(sum("m")), 1)),
		"carriage return":   resum(strings.Replace(good, "\n", "\r\n", 2)),
		"comment":           resum(strings.Replace(good, "image ", "# image\nimage ", 1)),
	} {
		if f, err := lockfile.Parse([]byte(text)); !errors.Is(err, lockfile.ErrFormat) {
			t.Errorf("%s: parsed %d entries, %v", name, len(f.Entries()), err)
		}
	}
}

func TestDriftSaysWhatChanged(t *testing.T) {
	f := file(t)
	if err := f.Verify(entries()); err != nil {
		t.Fatal(err)
	}
	now := entries()
	now[0].Digest, now[0].Origin = sum("other"), "registry"
	now[1] = lockfile.Entry{Kind: lockfile.Image, Name: "other", Digest: sum("x")}
	err := f.Verify(now)
	var drift *lockfile.DriftError
	if !errors.As(err, &drift) || !errors.Is(err, lockfile.ErrDrift) {
		t.Fatalf("got %v", err)
	}
	var got []string
	for _, d := range drift.Drifts {
		got = append(got, d.String())
	}
	want := []string{
		"image default is locked as " + string(sum("b")) + " and is not there",
		"image other is not locked (it is " + string(sum("x")) + ")",
		"plugin dev.numinance.embedded/scm-git: digest is " + string(sum("other")) + ", locked as " + string(sum("a")),
		"plugin dev.numinance.embedded/scm-git: origin is registry, locked as bundled",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatal(diff)
	}
}

// Nothing unlocked runs, and nothing runs that differs from its entry.
func TestCheckOne(t *testing.T) {
	f := file(t)
	for _, e := range entries() {
		if err := f.Check(e); err != nil {
			t.Errorf("%s: %v", e.Name, err)
		}
		e.Digest = sum("changed")
		if f.Check(e) == nil {
			t.Errorf("%s: a changed digest passes", e.Name)
		}
		if (lockfile.File{}).Check(e) == nil {
			t.Errorf("%s: an empty lockfile passes it", e.Name)
		}
	}
}

func FuzzParse(f *testing.F) {
	good, err := lockfile.New(entries())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good.Format())
	f.Add([]byte("numinance-lock v1\nsum x\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := lockfile.Parse(text)
		if err == nil && string(got.Format()) != string(text) {
			t.Fatalf("Parse accepts %q, which is not its own form", text)
		}
	})
}
