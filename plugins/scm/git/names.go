package git

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

var revisionPattern = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})$`)

func invalid(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}

// checkRevision takes full commit ids only (P-072, P-073).
func checkRevision(field, revision string) error {
	if !revisionPattern.MatchString(revision) {
		return invalid("%s %q: a revision is a full commit id of 40 or 64 lowercase hex characters, never a name", field, revision)
	}
	return nil
}

// checkBranch takes the names that Git takes for a branch.
func checkBranch(field, name string) error {
	bad := name == "" || len(name) > 256 || !utf8.ValidString(name) || strings.HasPrefix(name, "-") || name == "@" ||
		strings.Contains(name, "..") || strings.Contains(name, "@{") || strings.ContainsAny(name, " ~^:?*[\\") ||
		strings.HasSuffix(name, ".") || strings.ContainsFunc(name, unicode.IsControl)
	for segment := range strings.SplitSeq(name, "/") {
		bad = bad || segment == "" || strings.HasPrefix(segment, ".") || strings.HasSuffix(segment, ".lock")
	}
	if bad {
		return invalid("%s %q is no branch name", field, name)
	}
	return nil
}

// checkPath takes paths inside a repository; empty is the root where root is
// true.
func checkPath(field, path string, root bool) error {
	if path == "" && root {
		return nil
	}
	bad := path == "" || len(path) > 4096 || strings.ContainsRune(path, 0)
	for segment := range strings.SplitSeq(path, "/") {
		bad = bad || segment == "" || segment == "." || segment == ".."
	}
	if bad {
		return invalid("%s %q: write a path from the root of the repository, without empty, . and .. segments", field, path)
	}
	return nil
}

// escape turns a repository name into one file name, so that different names
// never meet, also where case is folded.
func escape(name string) string {
	const most = 180
	var b strings.Builder
	for i := 0; i < len(name); i++ {
		switch c := name[i]; {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9', c == '_', c == '-', c == '.' && i > 0:
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "%%%02x", c)
		}
	}
	if b.Len() <= most {
		return b.String()
	}
	sum := sha256.Sum256([]byte(name))
	return b.String()[:most-66] + "%-" + hex.EncodeToString(sum[:])
}

// text makes foreign bytes fit a string field: U+FFFD for what is not UTF-8,
// cut at a character boundary to max bytes.
func text(s string, max int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= max {
		return s
	}
	for max > 0 && !utf8.RuneStart(s[max]) {
		max--
	}
	return s[:max]
}
