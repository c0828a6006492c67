// Package pathscope says which paths of a work tree a run may change: a scope
// of allowed, denied and protected entries, matched by whole segments. Grants
// carry a scope, the policy core checks tool intents against it, and the host
// checks the diff of every snapshot against it.
package pathscope

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of one path and of one list of a scope.
const (
	MaxPath    = 4096
	MaxEntries = 4096
)

// Scope is what a run may change. The zero value allows nothing.
//
// An entry is a literal file ("a/b.go"), a directory ("src/" or "src/**") or
// the whole tree ("**"). Denied and Protected also take a name at any depth
// ("**/CODEOWNERS", "**/.git/") and an ending at any depth ("**/*.cedar").
// Allowed entries match exactly; denied and protected ones match every name
// that a file system could take for theirs. Denied and protected win, and the
// built-in set of Default is protected in every scope (H-045, P-116).
type Scope struct {
	Allowed   []string
	Denied    []string
	Protected []string
}

// Check reports whether path may be created, changed or deleted, and if not,
// why, in words for the person who asked.
func (s Scope) Check(path string) (ok bool, reason string) {
	if err := CheckPath(path); err != nil {
		return false, err.Error()
	}
	folded := fold(path)
	if entry, why := firstMatch(builtin(), folded); why != "" {
		return false, fmt.Sprintf("%q %s %q, which is always protected", path, why, entry)
	}
	if entry, why := firstMatch(guards(s.Protected), folded); why != "" {
		return false, fmt.Sprintf("%q %s %q, which is protected", path, why, entry)
	}
	if entry, why := firstMatch(guards(s.Denied), folded); why != "" {
		return false, fmt.Sprintf("%q %s %q, which is denied", path, why, entry)
	}
	for _, entry := range s.Allowed {
		p, err := parse(entry, false)
		if err == nil && p.allows(path) {
			return true, ""
		}
	}
	if len(s.Allowed) == 0 {
		return false, fmt.Sprintf("%q: no path is allowed", path)
	}
	return false, fmt.Sprintf("%q is in none of the allowed paths", path)
}

// IsProtected reports whether path is, or lies below, a protected entry of the
// scope or of Default, in any spelling. A malformed path is protected.
func (s Scope) IsProtected(path string) bool {
	path = strings.TrimSuffix(path, "/")
	if err := CheckPath(path); err != nil {
		return true
	}
	folded := fold(path)
	return within(builtin(), folded) || within(guards(s.Protected), folded)
}

// HoldsProtected reports whether a protected entry could lie below path, so
// that replacing path as a whole would replace the entry with it.
func (s Scope) HoldsProtected(path string) bool {
	path = strings.TrimSuffix(path, "/")
	if err := CheckPath(path); err != nil {
		return true
	}
	folded := fold(path)
	for _, list := range [][]guard{builtin(), guards(s.Protected)} {
		for _, g := range list {
			if g.err != nil || g.pattern.isBelow(folded) {
				return true
			}
		}
	}
	return false
}

// Validate returns the first malformed entry of the scope, or nil.
func (s Scope) Validate() error {
	lists := []struct {
		name    string
		entries []string
		deep    bool
	}{{"allowed", s.Allowed, false}, {"denied", s.Denied, true}, {"protected", s.Protected, true}}
	for _, list := range lists {
		if len(list.entries) > MaxEntries {
			return fmt.Errorf("%s paths: %d entries, at most %d", list.name, len(list.entries), MaxEntries)
		}
		for _, entry := range list.entries {
			if _, err := parse(entry, list.deep); err != nil {
				return fmt.Errorf("%s path %w", list.name, err)
			}
		}
	}
	return nil
}

// Narrow returns the scope that allows what to allows and refuses what either
// refuses. It is an error for to to allow a path that s does not list: whoever
// asks for more than they hold is told so, not silently cut down (H-048).
func (s Scope) Narrow(to Scope) (Scope, error) {
	if err := s.Validate(); err != nil {
		return Scope{}, err
	}
	if err := to.Validate(); err != nil {
		return Scope{}, err
	}
	for _, entry := range to.Allowed {
		if !s.covers(entry) {
			return Scope{}, fmt.Errorf("allowed path %q is wider than the scope that is narrowed", entry)
		}
	}
	return Scope{
		Allowed:   union(nil, to.Allowed),
		Denied:    union(s.Denied, to.Denied),
		Protected: union(s.Protected, to.Protected),
	}, nil
}

func (s Scope) covers(entry string) bool {
	want, err := parse(entry, false)
	if err != nil {
		return false
	}
	for _, have := range s.Allowed {
		p, err := parse(have, false)
		if err == nil && p.coversAllowed(want) {
			return true
		}
	}
	return false
}

func union(a, b []string) []string {
	out := slices.Concat(a, b)
	slices.Sort(out)
	return slices.Compact(out)
}

// firstMatch returns the first entry that path is, lies below, or would
// replace as a whole. A malformed entry matches everything.
func firstMatch(list []guard, folded string) (entry, why string) {
	for _, g := range list {
		switch {
		case g.err != nil:
			return g.entry, "cannot be checked against the malformed entry"
		case g.pattern.refuses(folded):
			return g.entry, "is within"
		case g.pattern.isBelow(folded):
			return g.entry, "holds"
		}
	}
	return "", ""
}

func within(list []guard, folded string) bool {
	for _, g := range list {
		if g.err != nil || g.pattern.refuses(folded) {
			return true
		}
	}
	return false
}

// CheckPath refuses what can be no path of a work tree: absolute paths, empty,
// "." and ".." segments, backslashes, control and bidi characters, text that
// is not UTF-8, and more than MaxPath bytes.
func CheckPath(path string) error {
	switch {
	case path == "":
		return fmt.Errorf("path is empty")
	case len(path) > MaxPath:
		return fmt.Errorf("path of %d bytes: at most %d", len(path), MaxPath)
	case !utf8.ValidString(path):
		return fmt.Errorf("path %q is not UTF-8", path)
	case strings.HasPrefix(path, "/"):
		return fmt.Errorf("path %q is absolute: write it relative to the work root", path)
	case strings.Contains(path, `\`):
		return fmt.Errorf("path %q holds a backslash", path)
	}
	for _, r := range path {
		if unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || r == '\u2028' || r == '\u2029' {
			return fmt.Errorf("path %q holds a control character", path)
		}
	}
	for segment := range strings.SplitSeq(path, "/") {
		switch segment {
		case "":
			return fmt.Errorf("path %q holds an empty segment", path)
		case ".", "..":
			return fmt.Errorf("path %q holds the segment %q", path, segment)
		}
	}
	return nil
}
