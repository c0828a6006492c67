package files

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// sanitize makes a document's bytes text that shows what it is: what is not
// UTF-8, and control, format and bidi characters but newline and tab, become
// U+FFFD.
func sanitize(raw []byte) string {
	text := strings.ToValidUTF8(strings.TrimPrefix(string(raw), "\ufeff"), "\uFFFD")
	text = strings.ReplaceAll(text, "\r\n", "\n")
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return r
		case unicode.IsControl(r), unicode.Is(unicode.Cf, r), r == '\u2028', r == '\u2029':
			return unicode.ReplacementChar
		}
		return r
	}, text)
}

// cut keeps at most max bytes, at a character boundary (K-018).
func cut(s string, max int) string {
	if len(s) <= max {
		return s
	}
	for max > 0 && !utf8.RuneStart(s[max]) {
		max--
	}
	return s[:max]
}

// titleOf is the first heading of a document, else its name.
func titleOf(ref, text string) string {
	const look = 50 // lines
	n := 0
	for line := range strings.SplitSeq(text, "\n") {
		if title, ok := strings.CutPrefix(line, "# "); ok && strings.TrimSpace(title) != "" {
			return cut(strings.TrimSpace(strings.ReplaceAll(title, "\t", " ")), 1024)
		}
		if n++; n == look {
			break
		}
	}
	name := ref[strings.LastIndexByte(ref, '/')+1:]
	return cut(sanitize([]byte(name)), 1024)
}

// snippet is some text around the first of the words.
func snippet(text string, words []string) string {
	const before, most = 120, 400
	lower := strings.ToLower(text)
	at := 0
	// Lower case may have another length; then the beginning does.
	if len(lower) == len(text) {
		for _, w := range words {
			if i := strings.Index(lower, w); i >= 0 {
				at = max(0, i-before)
				break
			}
		}
	}
	for at > 0 && !utf8.RuneStart(text[at]) {
		at--
	}
	return strings.TrimSpace(cut(text[at:], most))
}
