package digest

import (
	"bytes"
	"strconv"
	"unicode/utf8"
)

// isCanonical reports in one pass that b is a JSON object in its canonical
// form. It may miss one, and then the canonicaliser decides; it never says so of
// anything else. Most documents that are hashed here were encoded with their
// members in order and end in this pass.
func isCanonical(b []byte) bool {
	if len(b) == 0 || b[0] != '{' {
		return false
	}
	s := scan{b: b}
	return s.value(0) && s.at == len(b)
}

// scan is a pass over the bytes of a document. Each method takes one thing that
// begins at at and reports whether it is in its canonical form.
type scan struct {
	b  []byte
	at int
}

// next takes the byte c if it is there.
func (s *scan) next(c byte) bool {
	if s.at < len(s.b) && s.b[s.at] == c {
		s.at++
		return true
	}
	return false
}

func (s *scan) value(depth int) bool {
	if s.at >= len(s.b) {
		return false
	}
	switch c := s.b[s.at]; c {
	case '{':
		s.at++
		return depth < maxDepth && s.object(depth+1)
	case '[':
		s.at++
		return depth < maxDepth && s.list(depth+1)
	case '"':
		s.at++
		return s.text()
	case 't':
		return s.word("true")
	case 'f':
		return s.word("false")
	case 'n':
		return s.word("null")
	default:
		return s.integer()
	}
}

func (s *scan) word(w string) bool {
	if len(s.b)-s.at < len(w) || string(s.b[s.at:s.at+len(w)]) != w {
		return false
	}
	s.at += len(w)
	return true
}

// object takes the rest of an object. Its names must be plain ASCII: among these
// the order of bytes is the order of UTF-16 units that RFC 8785 asks for.
func (s *scan) object(depth int) bool {
	if s.next('}') {
		return true
	}
	var before []byte
	for first := true; ; first = false {
		if !s.next('"') {
			return false
		}
		begin := s.at
		for s.at < len(s.b) && plain(s.b[s.at]) {
			s.at++
		}
		name := s.b[begin:s.at]
		if !first && bytes.Compare(before, name) >= 0 {
			return false
		}
		before = name
		if !s.next('"') || !s.next(':') || !s.value(depth) {
			return false
		}
		if s.next('}') {
			return true
		}
		if !s.next(',') {
			return false
		}
	}
}

func (s *scan) list(depth int) bool {
	if s.next(']') {
		return true
	}
	for s.value(depth) {
		if s.next(']') {
			return true
		}
		if !s.next(',') {
			return false
		}
	}
	return false
}

// plain reports whether c is ASCII and stands for itself in a text.
func plain(c byte) bool { return c >= ' ' && c < utf8.RuneSelf && c != '"' && c != '\\' }

// text takes the rest of a text.
func (s *scan) text() bool {
	for s.at < len(s.b) {
		switch c := s.b[s.at]; {
		case plain(c):
			s.at++
		case c == '"':
			s.at++
			return true
		case c == '\\':
			if !s.escape() {
				return false
			}
		case c < ' ':
			return false
		default:
			r, n := utf8.DecodeRune(s.b[s.at:])
			if r == utf8.RuneError && n < 2 {
				return false
			}
			s.at += n
		}
	}
	return false
}

// escape takes one escape: the short one where there is one, and \u00xx in
// lowercase for the other control characters. Nothing else is escaped.
func (s *scan) escape() bool {
	rest := s.b[s.at:]
	if len(rest) < 2 {
		return false
	}
	switch rest[1] {
	case '"', '\\', 'b', 'f', 'n', 'r', 't':
		s.at += 2
		return true
	case 'u':
	default:
		return false
	}
	if len(rest) < 6 || rest[2] != '0' || rest[3] != '0' || rest[4] != '0' && rest[4] != '1' {
		return false
	}
	low := rest[5]
	if (low < '0' || low > '9') && (low < 'a' || low > 'f') {
		return false
	}
	if rest[4] == '0' && (low == '8' || low == '9' || low == 'a' || low == 'c' || low == 'd') {
		return false // has a short escape
	}
	s.at += 6
	return true
}

// integer takes a whole number within ±2^53 in its shortest form.
func (s *scan) integer() bool {
	begin := s.at
	negative := s.next('-')
	digits := s.at
	for s.at < len(s.b) && s.b[s.at] >= '0' && s.b[s.at] <= '9' {
		s.at++
	}
	switch n := s.at - digits; {
	case n == 0 || n > 16:
		return false
	case s.b[digits] == '0':
		return n == 1 && !negative
	}
	i, err := strconv.ParseInt(string(s.b[begin:s.at]), 10, 64)
	return err == nil && i <= maxExact && i >= -maxExact
}
