package command

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
)

// maxLine bounds one line of go test -json; longer ones are output of a test
// and cut.
const maxLine = 1 << 20

// goTestEvent is one line of go test -json.
type goTestEvent struct {
	Action      string
	Package     string
	ImportPath  string
	Test        string
	Output      string
	FailedBuild string
}

// goTest is the state of one stream of go test -json.
type goTest struct {
	results
	events   int
	running  map[[2]string]bool
	done     map[[2]string]bool
	failed   map[string]bool // packages with a failed test
	output   map[[2]string]*bytes.Buffer
	build    map[string]*bytes.Buffer
	packages int
}

// maxKept bounds the output that is kept of one test for its finding.
const maxKept = 1 << 10

// readGoTest reads the output of go test -json. A test counts as run when it
// passed or failed; one that began and did not end has failed. Lines that are no
// events are output and do not count.
func readGoTest(r io.Reader) (*goTest, error) {
	t := &goTest{
		running: map[[2]string]bool{}, done: map[[2]string]bool{}, failed: map[string]bool{},
		output: map[[2]string]*bytes.Buffer{}, build: map[string]*bytes.Buffer{},
	}
	in := bufio.NewReaderSize(r, 64<<10)
	for {
		line, cut, err := readLine(in)
		if !cut && len(line) > 0 && line[0] == '{' {
			var e goTestEvent
			if json.Unmarshal(line, &e) == nil && e.Action != "" {
				if terr := t.take(e); terr != nil {
					return nil, terr
				}
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
	}
	for key := range t.running {
		t.run++
		t.results.failed++
		t.failed[key[0]] = true
		t.add(severityError, "go-test", "", 0, key[0]+"."+key[1]+" began and did not end")
	}
	return t, nil
}

// readLine returns the next line without its end, cut at maxLine.
func readLine(in *bufio.Reader) (line []byte, cut bool, err error) {
	for {
		part, err := in.ReadSlice('\n')
		if len(line)+len(part) <= maxLine {
			line = append(line, part...)
		} else {
			cut = true
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		return bytes.TrimRight(line, "\r\n"), cut, err
	}
}

func (t *goTest) take(e goTestEvent) error {
	t.events++
	key := [2]string{e.Package, e.Test}
	switch e.Action {
	case "build-output":
		keep(t.build, e.ImportPath, e.Output)
		return nil
	case "output":
		if e.Test != "" || len(t.output) < maxTests {
			keep(t.output, key, e.Output)
		}
		return nil
	}
	if e.Test == "" {
		return t.takePackage(e)
	}
	if len(t.done)+len(t.running) > maxTests {
		return unreadable("more than %d tests", maxTests)
	}
	switch e.Action {
	case "run":
		if !t.done[key] {
			t.running[key] = true
		}
	case "pass", "fail", "skip":
		// With -count a test ends more than once; it is one test.
		delete(t.running, key)
		first := !t.done[key]
		t.done[key] = true
		if e.Action == "skip" {
			if first {
				t.skipped++
			}
			delete(t.output, key)
			return nil
		}
		if first {
			t.run++
		}
		if e.Action == "fail" {
			t.results.failed++
			t.failed[e.Package] = true
			t.add(severityError, "go-test", "", 0, e.Package+"."+e.Test+" failed: "+text(t.output[key]))
		}
		delete(t.output, key)
	}
	return nil
}

func (t *goTest) takePackage(e goTestEvent) error {
	key := [2]string{e.Package, ""}
	switch e.Action {
	case "pass", "skip":
		t.packages++
		delete(t.output, key)
	case "fail":
		t.packages++
		if !t.failed[e.Package] {
			why := text(t.output[key])
			if b := t.build[e.FailedBuild]; b != nil {
				why = text(b)
			}
			t.add(severityError, "go-test", "", 0, e.Package+" failed: "+why)
		}
		delete(t.output, key)
	}
	return nil
}

func keep[K comparable](m map[K]*bytes.Buffer, key K, s string) {
	b := m[key]
	if b == nil {
		b = &bytes.Buffer{}
		m[key] = b
	}
	b.WriteString(s[:min(len(s), maxKept-min(b.Len(), maxKept))])
}

func text(b *bytes.Buffer) string {
	if b == nil {
		return "no output"
	}
	return strings.ToValidUTF8(b.String(), "")
}
