package command

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strconv"
	"strings"
)

// readJUnit reads a JUnit XML report: <testcase> elements at any depth below
// <testsuites> or <testsuite>, each with at most one of failure, error and
// skipped that counts. Counters of suites are not believed, but errors that a
// suite names beyond its test cases are findings.
func readJUnit(b []byte) (*results, error) {
	r := &results{}
	dec := xml.NewDecoder(bytes.NewReader(b))
	var (
		depth   int
		roots   int
		current *junitCase
		claimed int
		message strings.Builder
		taking  bool
	)
	for {
		tok, err := dec.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, unreadable("JUnit XML: %v", err)
		}
		switch e := tok.(type) {
		case xml.Directive:
			return nil, unreadable("JUnit XML: it has a document type or entities")
		case xml.StartElement:
			if depth++; depth > maxDepth {
				return nil, unreadable("JUnit XML: nested more than %d levels deep", maxDepth)
			}
			name := e.Name.Local
			if depth == 1 {
				if roots++; name != "testsuites" && name != "testsuite" || roots > 1 {
					return nil, unreadable("JUnit XML: root element %q, want one testsuites or testsuite", name)
				}
			}
			switch {
			case name == "testsuite":
				claimed += number(e, "errors") + number(e, "failures")
			case name == "testcase" && current == nil:
				current = &junitCase{
					name: joined(attribute(e, "classname"), attribute(e, "name")), path: attribute(e, "file"), line: number(e, "line"), depth: depth,
				}
				if r.run+r.skipped >= maxTests {
					return nil, unreadable("JUnit XML: more than %d tests", maxTests)
				}
			case current != nil && (name == "failure" || name == "error"):
				current.failed = true
				message.Reset()
				message.WriteString(attribute(e, "message") + "\n")
				taking = true
			case current != nil && name == "skipped":
				current.skipped = true
			}
		case xml.CharData:
			if taking && message.Len() < maxKept {
				message.Write(e[:min(len(e), maxKept)])
			}
		case xml.EndElement:
			if current != nil && depth == current.depth {
				switch {
				case current.failed:
					r.run++
					r.failed++
					r.add(severityError, "test", current.path, current.line, current.name+" failed: "+message.String())
				case current.skipped:
					r.skipped++
				default:
					r.run++
				}
				current = nil
			}
			if name := e.Name.Local; name == "failure" || name == "error" {
				taking = false
			}
			depth--
		}
	}
	if roots == 0 {
		return nil, unreadable("JUnit XML: it is empty")
	}
	if claimed > 0 && r.failed == 0 {
		r.add(severityError, "test", "", 0, "the report counts "+strconv.Itoa(claimed)+" failures or errors outside of its test cases")
	}
	return r, nil
}

type junitCase struct {
	name, path      string
	line, depth     int
	failed, skipped bool
}

func joined(class, name string) string {
	if class == "" {
		return name
	}
	return class + "." + name
}

func attribute(e xml.StartElement, name string) string {
	for _, a := range e.Attr {
		if a.Name.Local == name {
			return a.Value
		}
	}
	return ""
}

func number(e xml.StartElement, name string) int {
	n, err := strconv.Atoi(attribute(e, name))
	if err != nil || n < 0 || n > maxTests {
		return 0
	}
	return n
}
