package pathscope

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/cases"
	"golang.org/x/text/unicode/norm"
)

// fold brings a path to the form in which protected and denied entries are
// compared: two names that any common file system or code host could take for
// one another fold to one text. It covers case, Unicode normalisation and
// compatibility forms, code points that some file systems ignore, trailing
// dots and blanks, alternate data streams and the short name of .git.
func fold(path string) string {
	segments := strings.Split(path, "/")
	for i, segment := range segments {
		segments[i] = foldSegment(segment)
	}
	return strings.Join(segments, "/")
}

func foldSegment(s string) string {
	if !plainASCII(s) {
		s = norm.NFKC.String(strings.ToValidUTF8(s, "\uFFFD"))
		s = norm.NFKC.String(cases.Fold().String(s))
		s = strings.Map(dropIgnorable, s)
	}
	s = strings.ToLower(s)
	if before, _, found := strings.Cut(s, ":"); found && before != "" {
		s = before
	}
	if trimmed := strings.TrimRight(s, ". "); trimmed != "" {
		s = trimmed
	}
	if s == "git~1" {
		s = ".git"
	}
	return s
}

func plainASCII(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// dropIgnorable removes format characters, variation selectors and the
// combining grapheme joiner, none of which changes what a name looks like.
func dropIgnorable(r rune) rune {
	if unicode.Is(unicode.Cf, r) || unicode.Is(unicode.Variation_Selector, r) || unicode.Is(unicode.Other_Default_Ignorable_Code_Point, r) {
		return -1
	}
	return r
}
