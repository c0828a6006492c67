// Package kinds reads the control documents of an organisation: strict YAML or
// JSON into the generated messages, every problem with its place, field, rule
// and what to write instead. The daemon loads a control directory with it, and
// `numi validate` prints its report.
package kinds

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	kindsv1 "github.com/numinance/numinance/gen/numinance/kinds/v1"
	"github.com/numinance/numinance/internal/core/digest"
)

// APIVersion is the schema of every document.
const APIVersion = "numinance.dev/v1"

// Bounds of a control directory.
const (
	MaxFileBytes = 5 << 20
	MaxFiles     = 4096
)

// catalog lists the kinds with an empty document of each.
func catalog() map[string]proto.Message {
	return map[string]proto.Message{
		"Organization":        &kindsv1.Organization{},
		"Repository":          &kindsv1.Repository{},
		"Tracker":             &kindsv1.Tracker{},
		"Pipeline":            &kindsv1.Pipeline{},
		"Profile":             &kindsv1.Profile{},
		"Environment":         &kindsv1.Environment{},
		"Policy":              &kindsv1.Policy{},
		"PluginManifest":      &kindsv1.PluginManifest{},
		"KnowledgeConnection": &kindsv1.KnowledgeConnection{},
	}
}

// Names returns the kinds in alphabetical order.
func Names() []string {
	var names []string
	for name := range catalog() {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Document is one document that decoded and kept every rule it can break alone.
type Document struct {
	File    string
	Kind    string
	Name    string
	Scope   kindsv1.Scope
	Digest  digest.Digest
	Message proto.Message

	at places
}

// Problem is one broken rule. Field is a path such as spec.pinned_tools[0].hash,
// empty for a file as a whole; Fix says what to write instead.
type Problem struct {
	File   string
	Line   int
	Column int
	Field  string
	Rule   string
	Text   string
	Fix    string
}

// String returns the problem in one line: file:line:column field rule: text.
func (p Problem) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s:%d:%d ", p.File, p.Line, p.Column)
	if p.Field != "" {
		b.WriteString(p.Field + " ")
	}
	fmt.Fprintf(&b, "%s: %s", p.Rule, p.Text)
	if p.Fix != "" {
		b.WriteString("; " + p.Fix)
	}
	return b.String()
}

// Outcome is what became of one document, or of a file that holds none.
type Outcome struct {
	File     string
	Kind     string
	Name     string
	Problems []Problem
}

// Report is what validation found, in the order of the files.
type Report struct {
	Revision string
	Outcomes []Outcome
}

// OK reports whether there is at least one document and no problem.
func (r Report) OK() bool { return len(r.Outcomes) > 0 && len(r.Problems()) == 0 }

// Problems returns the problems of all outcomes.
func (r Report) Problems() (out []Problem) {
	for _, o := range r.Outcomes {
		out = append(out, o.Problems...)
	}
	return out
}

// String returns the report as `numi validate` prints it (K-087): the revision,
// then a line for each document, problems below the one they belong to.
func (r Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "revision: %q\n", r.Revision)
	for _, o := range r.Outcomes {
		word := "ok"
		if len(o.Problems) > 0 {
			word = "failed"
		}
		fmt.Fprintf(&b, "%-8s file %q", word, o.File)
		if o.Kind != "" {
			fmt.Fprintf(&b, " %s %q", o.Kind, o.Name)
		}
		b.WriteByte('\n')
		for _, p := range o.Problems {
			fmt.Fprintf(&b, "         %s\n", p)
		}
	}
	return b.String()
}

// ValidateFiles checks every document of a folder alone: form, types, bounds
// and the rules of its kind, and that no two have one kind and name. It does
// not resolve references or the lockfile (K-086).
func ValidateFiles(fsys fs.FS) Report {
	_, report := read(sources(fsys))
	report.Revision = "files"
	return report
}

// source is one file to read, or the problem that stands in its place.
type source struct {
	file    string
	raw     []byte
	problem *Problem
}

// sources reads the files of a folder.
func sources(fsys fs.FS) (out []source) {
	files, problems := list(fsys)
	for _, p := range problems {
		out = append(out, source{file: p.File, problem: &p})
	}
	for _, file := range files {
		raw, err := readBounded(fsys, file)
		if err != nil {
			out = append(out, source{file: file, problem: &Problem{File: file, Line: 1, Column: 1, Rule: "readable", Text: err.Error()}})
			continue
		}
		out = append(out, source{file: file, raw: raw})
	}
	return out
}

// read decodes and checks every document of the files.
func read(files []source) ([]Document, Report) {
	var report Report
	var documents []Document
	first := map[string]string{}
	for _, f := range files {
		if f.problem != nil {
			report.Outcomes = append(report.Outcomes, Outcome{File: f.file, Problems: []Problem{*f.problem}})
			continue
		}
		for _, d := range decodeFile(f.file, f.raw) {
			key := d.Kind + " " + d.Name
			if earlier, twice := first[key]; twice && d.Kind != "" && d.Name != "" {
				at := d.at.find("metadata.name")
				d.problems = append(d.problems, Problem{
					File: f.file, Line: at.line, Column: at.column, Field: "metadata.name", Rule: "unique-name",
					Text: fmt.Sprintf("%s %q is already in %s", d.Kind, d.Name, earlier), Fix: "give one of them another name",
				})
			} else {
				first[key] = f.file
			}
			report.Outcomes = append(report.Outcomes, Outcome{File: f.file, Kind: d.Kind, Name: d.Name, Problems: d.problems})
			if len(d.problems) == 0 {
				documents = append(documents, d.Document)
			}
		}
	}
	if len(report.Outcomes) == 0 {
		report.Outcomes = []Outcome{{File: ".", Problems: []Problem{{File: ".", Line: 1, Column: 1, Rule: "documents", Text: "no .yaml, .yml or .json file here", Fix: "name the folder that holds the documents"}}}}
	}
	return documents, report
}

func list(fsys fs.FS) (files []string, problems []Problem) {
	err := fs.WalkDir(fsys, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name != "." && strings.HasPrefix(path.Base(name), ".") {
			if entry.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		switch path.Ext(name) {
		case ".yaml", ".yml", ".json":
		default:
			return nil
		}
		switch {
		case entry.IsDir():
		case !entry.Type().IsRegular():
			problems = append(problems, Problem{File: name, Line: 1, Column: 1, Rule: "regular-file", Text: "is a link or a special file", Fix: "put the document itself here"})
		case len(files) == MaxFiles:
			return fmt.Errorf("more than %d files", MaxFiles)
		default:
			files = append(files, name)
		}
		return nil
	})
	if err != nil {
		problems = append(problems, Problem{File: ".", Line: 1, Column: 1, Rule: "readable", Text: err.Error()})
	}
	return files, problems
}

func readBounded(fsys fs.FS, name string) ([]byte, error) {
	info, err := fs.Stat(fsys, name)
	if err != nil {
		return nil, err
	}
	if info.Size() > MaxFileBytes {
		return nil, fmt.Errorf("%d bytes, at most %d", info.Size(), MaxFileBytes)
	}
	raw, err := fs.ReadFile(fsys, name)
	if err != nil {
		return nil, err
	}
	if len(raw) > MaxFileBytes {
		return nil, fmt.Errorf("%d bytes, at most %d", len(raw), MaxFileBytes)
	}
	return raw, nil
}

// Canonical returns the canonical JSON of a document, which its digest names:
// comments, order and the choice of YAML or JSON do not matter.
func Canonical(m proto.Message) ([]byte, error) {
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	return digest.Canonical(rawJSON(raw))
}

type rawJSON []byte

// MarshalJSON implements json.Marshaler.
func (r rawJSON) MarshalJSON() ([]byte, error) { return r, nil }

func metadataOf(m proto.Message) *kindsv1.Metadata {
	r := m.ProtoReflect()
	fd := r.Descriptor().Fields().ByName(protoreflect.Name("metadata"))
	if fd == nil || !r.Has(fd) {
		return &kindsv1.Metadata{}
	}
	meta, _ := r.Get(fd).Message().Interface().(*kindsv1.Metadata)
	return meta
}
