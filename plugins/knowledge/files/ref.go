package files

import (
	"net/url"
	"path"
	"regexp"
	"strings"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

var encoded = regexp.MustCompile(`%[0-9A-Fa-f]{2}`)

func climbs(what, text string) error {
	return status.Errorf(codes.InvalidArgument, "%s %q: a path below the connection's root, without . and .. segments, backslashes and double encoding", what, text)
}

// clean checks a path as a caller writes it, decodes it once, and refuses
// everything that could climb, in any encoding (K-026).
func clean(what, text string) (string, error) {
	plain, err := url.PathUnescape(text)
	if err != nil || encoded.MatchString(plain) || !utf8.ValidString(plain) {
		return "", climbs(what, text)
	}
	if strings.ContainsAny(plain, "\\\x00") || strings.HasPrefix(plain, "/") {
		return "", climbs(what, text)
	}
	plain = strings.TrimSuffix(plain, "/")
	for segment := range strings.SplitSeq(plain, "/") {
		if segment == "" || segment == "." || segment == ".." {
			return "", climbs(what, text)
		}
	}
	return plain, nil
}

// scopes cleans a scope: directories below the root by whole segments. "*"
// alone stands for the root.
func scopes(raw []string) ([]string, error) {
	var all []string
	for _, s := range raw {
		if s == "*" {
			all = append(all, "")
			continue
		}
		c, err := clean("scope", s)
		if err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, nil
}

// within compares whole segments, never raw prefixes (K-024).
func within(scope []string, ref string) bool {
	for _, s := range scope {
		if s == "" || ref == s || strings.HasPrefix(ref, s+"/") {
			return true
		}
	}
	return false
}

// candidates returns the documents that a ref may mean: as written, or without
// its ending. A fragment names a place in the document.
func candidates(raw string) ([]string, error) {
	text, _, _ := strings.Cut(raw, "#")
	c, err := clean("ref", text)
	if err != nil {
		return nil, err
	}
	if isDocument(c) {
		return []string{c}, nil
	}
	var all []string
	for _, ending := range endings {
		all = append(all, c+ending)
	}
	return all, nil
}

var endings = []string{".md", ".markdown", ".txt"}

// isDocument takes visible Markdown and text files; a hidden file or directory
// (.git) holds none.
func isDocument(ref string) bool {
	for segment := range strings.SplitSeq(ref, "/") {
		if strings.HasPrefix(segment, ".") {
			return false
		}
	}
	for _, ending := range endings {
		if path.Ext(ref) == ending {
			return true
		}
	}
	return false
}
