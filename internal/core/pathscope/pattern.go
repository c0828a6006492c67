package pathscope

import (
	"fmt"
	"strings"
)

type form uint8

const (
	formFile   form = iota // "a/b.go": this path
	formDir                // "src/", "src/**": this directory and all below
	formAll                // "**": the whole tree
	formName               // "**/CODEOWNERS", "**/.git/": this name at any depth
	formEnding             // "**/*.cedar": names with this ending at any depth
)

// pattern is one parsed entry; text has no trailing slash and no stars. folded
// is text as the wide match compares it; only deep parsing fills it in.
type pattern struct {
	form   form
	text   string
	folded string
}

// guard is one denied or protected entry, ready to match. A malformed entry
// has err and matches everything.
type guard struct {
	entry   string
	pattern pattern
	err     error
}

func guards(entries []string) []guard {
	out := make([]guard, len(entries))
	for i, entry := range entries {
		p, err := parse(entry, true)
		out[i] = guard{entry, p, err}
	}
	return out
}

// parse reads one entry; deep entries ("**/…") are only taken where a wider
// match is the safer one.
func parse(entry string, deep bool) (pattern, error) {
	if entry == "**" {
		return pattern{form: formAll}, nil
	}
	p := pattern{form: formFile, text: entry}
	if rest, ok := strings.CutPrefix(entry, "**/"); ok {
		if !deep {
			return pattern{}, fmt.Errorf("%q: a name at any depth cannot be allowed; list files and directories", entry)
		}
		p = pattern{form: formName, text: strings.TrimSuffix(rest, "/")}
		if ending, ok := strings.CutPrefix(rest, "*"); ok {
			p = pattern{form: formEnding, text: ending}
			if !strings.HasPrefix(ending, ".") {
				return pattern{}, fmt.Errorf("%q: an ending begins with a dot, as in **/*.cedar", entry)
			}
		}
		if strings.Contains(p.text, "/") {
			return pattern{}, fmt.Errorf("%q: only one name can follow **/", entry)
		}
	} else if rest, ok := strings.CutSuffix(entry, "/**"); ok {
		p = pattern{form: formDir, text: rest}
	} else if rest, ok := strings.CutSuffix(entry, "/"); ok {
		p = pattern{form: formDir, text: rest}
	}
	if strings.Contains(p.text, "*") {
		return pattern{}, fmt.Errorf("%q: no wildcards but a whole tree (**) or directory (src/**)", entry)
	}
	if err := CheckPath(p.text); err != nil {
		return pattern{}, err
	}
	if deep {
		p.folded = fold(p.text)
		if p.form == formEnding {
			p.folded = strings.ToLower(p.text)
		}
	}
	return p, nil
}

// allows is the exact match of an allowed entry. A directory entry allows what
// lies below it, not the directory's own name.
func (p pattern) allows(path string) bool {
	switch p.form {
	case formAll:
		return true
	case formFile:
		return path == p.text
	case formDir:
		return strings.HasPrefix(path, p.text+"/")
	}
	return false
}

// refuses is the wide match of a denied or protected entry on a folded path:
// the entry itself and everything below it.
func (p pattern) refuses(folded string) bool {
	switch p.form {
	case formAll:
		return true
	case formFile, formDir:
		return folded == p.folded || strings.HasPrefix(folded, p.folded) && folded[len(p.folded)] == '/'
	case formName:
		for segment := range strings.SplitSeq(folded, "/") {
			if segment == p.folded {
				return true
			}
		}
	case formEnding:
		for segment := range strings.SplitSeq(folded, "/") {
			if strings.HasSuffix(segment, p.folded) {
				return true
			}
		}
	}
	return false
}

// isBelow reports whether the entry lies strictly below a folded path.
func (p pattern) isBelow(folded string) bool {
	return (p.form == formFile || p.form == formDir) && len(p.folded) > len(folded) &&
		strings.HasPrefix(p.folded, folded) && p.folded[len(folded)] == '/'
}

// coversAllowed reports whether everything that other allows p allows too.
func (p pattern) coversAllowed(other pattern) bool {
	switch {
	case p.form == formAll:
		return true
	case other.form == formAll:
		return false
	case p.form == formFile:
		return other.form == formFile && other.text == p.text
	case other.form == formFile:
		return p.allows(other.text)
	}
	return other.text == p.text || strings.HasPrefix(other.text, p.text+"/")
}
