// Package lockfile pins everything that runs by digest: plugins, images,
// binaries, harnesses, policies and tools. The daemon refuses what is not
// locked, and `numi lock` writes and compares the file numinance.lock.
package lockfile

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/numinance/numinance/internal/core/digest"
)

// Name is the file's name in a control directory.
const Name = "numinance.lock"

// MaxBytes bounds a lockfile.
const MaxBytes = 4 << 20

// Kind says what an entry pins.
type Kind string

// The kinds of entries.
const (
	Binary  Kind = "binary"
	Harness Kind = "harness"
	Image   Kind = "image"
	Plugin  Kind = "plugin"
	Policy  Kind = "policy"
	Tool    Kind = "tool"
)

// Entry pins one thing. Name is an extension id, an image or binary name, a
// policy file, or connection/tool. A plugin also has the digest of its manifest
// and its origin: bundled, deployment or registry.
type Entry struct {
	Kind     Kind
	Name     string
	Digest   digest.Digest
	Origin   string
	Manifest digest.Digest
}

// ErrDrift is what every DriftError wraps.
var ErrDrift = errors.New("differs from the lockfile")

// ErrFormat is what every error of Parse wraps.
var ErrFormat = errors.New("malformed lockfile")

// File is a lockfile: sorted entries, none twice. The zero File locks nothing.
type File struct{ entries []Entry }

var namePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}$`)

// New returns the lockfile of entries, in any order.
func New(entries []Entry) (File, error) {
	f := File{entries: slices.Clone(entries)}
	slices.SortFunc(f.entries, compare)
	for i, e := range f.entries {
		if err := e.validate(); err != nil {
			return File{}, err
		}
		if i > 0 && compare(e, f.entries[i-1]) == 0 {
			return File{}, fmt.Errorf("%s %s is listed twice", e.Kind, e.Name)
		}
	}
	return f, nil
}

func compare(a, b Entry) int {
	if c := strings.Compare(string(a.Kind), string(b.Kind)); c != 0 {
		return c
	}
	return strings.Compare(a.Name, b.Name)
}

func (e Entry) validate() error {
	switch e.Kind {
	case Binary, Harness, Image, Policy, Tool:
		if e.Origin != "" || e.Manifest != "" {
			return fmt.Errorf("%s %s: only a plugin has an origin and a manifest", e.Kind, e.Name)
		}
	case Plugin:
		if !slices.Contains([]string{"bundled", "deployment", "registry"}, e.Origin) {
			return fmt.Errorf("plugin %s: origin %q is not bundled, deployment or registry", e.Name, e.Origin)
		}
		if !e.Manifest.Valid() {
			return fmt.Errorf("plugin %s: manifest digest %q is malformed", e.Name, e.Manifest)
		}
	default:
		return fmt.Errorf("entry kind %q is not known", e.Kind)
	}
	if !namePattern.MatchString(e.Name) {
		return fmt.Errorf("%s name %q is malformed", e.Kind, e.Name)
	}
	if !e.Digest.Valid() {
		return fmt.Errorf("%s %s: digest %q is malformed", e.Kind, e.Name, e.Digest)
	}
	return nil
}

const header = "numinance-lock v1\n"

// Format returns the one text of f: a header, a line for each entry, and a sum
// over all that precedes it, which tells a hand edit or a half-written file.
func (f File) Format() []byte {
	var b bytes.Buffer
	b.WriteString(header)
	for _, e := range f.entries {
		fmt.Fprintf(&b, "%s %s %s", e.Kind, e.Name, e.Digest)
		if e.Kind == Plugin {
			fmt.Fprintf(&b, " %s %s", e.Origin, e.Manifest)
		}
		b.WriteByte('\n')
	}
	fmt.Fprintf(&b, "sum %s\n", digest.Of(b.Bytes()))
	return b.Bytes()
}

// Digest names the whole file.
func (f File) Digest() digest.Digest { return digest.Of(f.Format()) }

// Parse reads the text that Format writes and nothing else.
func Parse(text []byte) (File, error) {
	fail := func(line int, format string, args ...any) (File, error) {
		return File{}, fmt.Errorf("%w: line %d: %s", ErrFormat, line, fmt.Sprintf(format, args...))
	}
	if len(text) > MaxBytes {
		return fail(1, "%d bytes, at most %d", len(text), MaxBytes)
	}
	if !bytes.HasPrefix(text, []byte(header)) {
		return fail(1, "does not begin with %q", strings.TrimSpace(header))
	}
	lines := strings.SplitAfter(string(text), "\n")
	if len(lines) < 3 || lines[len(lines)-1] != "" {
		return fail(len(lines), "the file is cut off: run numi lock")
	}
	last := lines[len(lines)-2]
	body := strings.TrimSuffix(string(text), last)
	if want := fmt.Sprintf("sum %s\n", digest.Of([]byte(body))); last != want {
		return fail(len(lines)-1, "the sum does not match: the file was edited by hand or cut off; run numi lock")
	}
	var entries []Entry
	for i, line := range lines[1 : len(lines)-2] {
		words := strings.Split(strings.TrimSuffix(line, "\n"), " ")
		e := Entry{Kind: Kind(words[0])}
		switch {
		case len(words) == 3:
		case len(words) == 5 && e.Kind == Plugin:
			e.Origin, e.Manifest = words[3], digest.Digest(words[4])
		default:
			return fail(i+2, "want kind, name and digest")
		}
		e.Name, e.Digest = words[1], digest.Digest(words[2])
		if err := e.validate(); err != nil {
			return fail(i+2, "%s", err)
		}
		entries = append(entries, e)
	}
	f, err := New(entries)
	if err != nil {
		return fail(1, "%s", err)
	}
	if !bytes.Equal(f.Format(), text) {
		return fail(1, "the entries are not in order")
	}
	return f, nil
}

// Entries returns the entries in order.
func (f File) Entries() []Entry { return slices.Clone(f.entries) }

// Find returns the entry of a thing; what has none does not run (K-045).
func (f File) Find(kind Kind, name string) (Entry, bool) {
	i, ok := slices.BinarySearchFunc(f.entries, Entry{Kind: kind, Name: name}, compare)
	if !ok {
		return Entry{}, false
	}
	return f.entries[i], true
}

// Drift is one difference between the lockfile and what is there. Locked is
// empty for what is not locked, Found for what is gone.
type Drift struct {
	Kind   Kind
	Name   string
	What   string // "digest", "manifest", "origin", "unlocked" or "missing"
	Locked string
	Found  string
}

// String says the difference in one line.
func (d Drift) String() string {
	switch d.What {
	case "unlocked":
		return fmt.Sprintf("%s %s is not locked (it is %s)", d.Kind, d.Name, d.Found)
	case "missing":
		return fmt.Sprintf("%s %s is locked as %s and is not there", d.Kind, d.Name, d.Locked)
	}
	return fmt.Sprintf("%s %s: %s is %s, locked as %s", d.Kind, d.Name, d.What, d.Found, d.Locked)
}

// DriftError lists every difference that Verify found.
type DriftError struct{ Drifts []Drift }

// Error says what changed and what to do.
func (e *DriftError) Error() string {
	lines := make([]string, len(e.Drifts))
	for i, d := range e.Drifts {
		lines[i] = d.String()
	}
	return fmt.Sprintf("%s: %s; look at each, then run numi lock", ErrDrift, strings.Join(lines, "; "))
}

// Unwrap returns ErrDrift.
func (e *DriftError) Unwrap() error { return ErrDrift }

// Diff returns how found differs from f, in the order of kinds and names.
func (f File) Diff(found []Entry) ([]Drift, error) {
	now, err := New(found)
	if err != nil {
		return nil, err
	}
	var out []Drift
	for _, e := range now.entries {
		locked, ok := f.Find(e.Kind, e.Name)
		if !ok {
			out = append(out, Drift{e.Kind, e.Name, "unlocked", "", string(e.Digest)})
			continue
		}
		for _, part := range []struct{ what, locked, found string }{
			{"digest", string(locked.Digest), string(e.Digest)}, {"manifest", string(locked.Manifest), string(e.Manifest)}, {"origin", locked.Origin, e.Origin},
		} {
			if part.locked != part.found {
				out = append(out, Drift{e.Kind, e.Name, part.what, part.locked, part.found})
			}
		}
	}
	for _, e := range f.entries {
		if _, ok := now.Find(e.Kind, e.Name); !ok {
			out = append(out, Drift{e.Kind, e.Name, "missing", string(e.Digest), ""})
		}
	}
	slices.SortStableFunc(out, func(a, b Drift) int {
		return compare(Entry{Kind: a.Kind, Name: a.Name}, Entry{Kind: b.Kind, Name: b.Name})
	})
	return out, nil
}

// Verify returns nil only if what is there is exactly what is locked, else a
// *DriftError. A zero File locks nothing and so verifies only nothing.
func (f File) Verify(found []Entry) error {
	drifts, err := f.Diff(found)
	if err != nil {
		return fmt.Errorf("verify the lockfile: %w", err)
	}
	if len(drifts) > 0 {
		return &DriftError{drifts}
	}
	return nil
}

// Check returns nil only if one thing that is about to run is locked exactly
// as it is.
func (f File) Check(e Entry) error {
	locked, ok := f.Find(e.Kind, e.Name)
	if !ok {
		return &DriftError{[]Drift{{e.Kind, e.Name, "unlocked", "", string(e.Digest)}}}
	}
	one := File{entries: []Entry{locked}}
	return one.Verify([]Entry{e})
}
