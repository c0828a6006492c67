package command

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	verifierv1 "github.com/numinance/numinance/gen/numinance/ports/verifier/v1"
)

// Bounds of what a check's output may hold; above them it could not complete.
const (
	maxReport   = 16 << 20
	maxStdout   = 256 << 20
	maxTests    = 200_000
	maxFindings = 10_000
	maxDepth    = 64
)

// errReport is wrapped by everything that is wrong with a check's report.
var errReport = errors.New("report cannot be read")

// results is what one check said.
type results struct {
	run, failed, skipped int
	findings             []*verifierv1.Finding
	dropped              int // findings above maxFindings
}

const (
	severityInfo    = verifierv1.Severity_SEVERITY_INFO
	severityWarning = verifierv1.Severity_SEVERITY_WARNING
	severityError   = verifierv1.Severity_SEVERITY_ERROR
)

func (r *results) add(severity verifierv1.Severity, rule, path string, line int, message string) {
	if len(r.findings) >= maxFindings {
		// Errors are never lost to warnings before them.
		r.dropped++
		if severity != severityError || slices.ContainsFunc(r.findings, func(f *verifierv1.Finding) bool { return f.GetSeverity() == severityError }) {
			return
		}
		r.findings = r.findings[:maxFindings-1]
	}
	r.findings = append(r.findings, &verifierv1.Finding{
		Rule: clip(rule, 256), Severity: severity, Path: clip(path, 4096), Line: uint32(max(0, min(line, 1<<31-1))), Message: clip(message, 1024),
	})
}

func (r *results) errors() int {
	n := 0
	for _, f := range r.findings {
		if f.GetSeverity() == severityError {
			n++
		}
	}
	return n
}

func unreadable(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errReport, fmt.Sprintf(format, args...))
}

// clip cuts foreign text to at most n bytes of printable UTF-8.
func clip(s string, n int) string {
	if len(s) > 4*n {
		s = s[:4*n]
	}
	s = strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || !unicode.IsControl(r) {
			return r
		}
		return -1
	}, strings.ToValidUTF8(s, "\uFFFD"))
	s = strings.TrimSpace(s)
	for len(s) > n {
		cut := n
		for cut > 0 && !utf8.RuneStart(s[cut]) {
			cut--
		}
		s = s[:cut]
	}
	return s
}
