package sampleknowledge

import (
	"strings"
	"unicode"
)

// text makes a document's text safe to pass on: control, format and bidi
// characters, which hide or reorder what a person reads, become U+FFFD (K-078).
// Line ends and tabs are the text's own. Bytes that are no UTF-8 become U+FFFD
// as well.
func text(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return r
		}
		return visible(r)
	}, strings.ToValidUTF8(s, "\uFFFD"))
}

// line is text for one line of at most n bytes.
func line(s string, n int) string {
	return clip(strings.Map(visible, strings.ToValidUTF8(s, "\uFFFD")), n)
}

func visible(r rune) rune {
	if unicode.IsControl(r) || unicode.In(r, unicode.Cf, unicode.Zl, unicode.Zp, unicode.Bidi_Control) {
		return unicode.ReplacementChar
	}
	return r
}

// clip returns at most n bytes of s and ends before a character that does not fit
// whole (K-018, K-079). s is valid UTF-8.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	end := 0
	for i := range s {
		if i > n {
			break
		}
		end = i
	}
	return s[:end]
}
