package kinds

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
)

const maxDepth = 32

// place is where a value stands in its file; lines and columns begin at 1.
type place struct{ line, column int }

// places holds where each field of a document stands, by its path.
type places map[string]place

// find returns the place of a field, or of the nearest field around it.
func (p places) find(field string) place {
	for {
		if at, ok := p[field]; ok {
			return at
		}
		cut := strings.LastIndexAny(field, ".[")
		if cut < 0 {
			break
		}
		field = field[:cut]
	}
	if at, ok := p[""]; ok {
		return at
	}
	return place{1, 1}
}

// has reports whether the document sets a field.
func (p places) has(field string) bool { _, ok := p[field]; return ok }

type decoded struct {
	Document
	problems []Problem
}

// decodeFile reads the documents of one file.
func decodeFile(file string, raw []byte) []decoded {
	fail := func(line, column int, rule, text, fix string) []decoded {
		return []decoded{{Document: Document{File: file}, problems: []Problem{{File: file, Line: line, Column: column, Rule: rule, Text: text, Fix: fix}}}}
	}
	if !utf8.Valid(raw) {
		return fail(1, 1, "utf-8", "the file is not UTF-8", "save it as UTF-8")
	}
	if path.Ext(file) == ".json" {
		var any json.RawMessage
		if err := json.Unmarshal(raw, &any); err != nil {
			var syntax *json.SyntaxError
			line, column := 1, 1
			if errors.As(err, &syntax) {
				line, column = position(raw, int(syntax.Offset))
			}
			return fail(line, column, "syntax", err.Error(), "")
		}
		raw = bytes.ReplaceAll(raw, []byte("\t"), []byte(" "))
	}
	var out []decoded
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	for {
		var root yaml.Node
		if err := dec.Decode(&root); err != nil {
			if errors.Is(err, io.EOF) {
				break
			}
			return append(out, fail(yamlLine(err), 1, "syntax", err.Error(), "")...)
		}
		if root.Kind == yaml.DocumentNode && len(root.Content) == 1 && root.Content[0].Tag == "!!null" && root.Content[0].Value == "" {
			continue // nothing but comments
		}
		out = append(out, decodeDocument(file, root.Content[0]))
	}
	if len(out) == 0 {
		return fail(1, 1, "documents", "the file holds no document", "remove it or write one")
	}
	return out
}

func position(raw []byte, offset int) (line, column int) {
	offset = max(0, min(offset, len(raw)))
	before := raw[:offset]
	return bytes.Count(before, []byte("\n")) + 1, offset - bytes.LastIndexByte(before, '\n')
}

var yamlLinePattern = regexp.MustCompile(`line (\d+)`)

func yamlLine(err error) int {
	if m := yamlLinePattern.FindStringSubmatch(err.Error()); m != nil {
		if n, err := strconv.Atoi(m[1]); err == nil && n > 0 {
			return n
		}
	}
	return 1
}

type decoder struct {
	file     string
	at       places
	problems []Problem
}

func decodeDocument(file string, node *yaml.Node) decoded {
	d := decoder{file: file, at: places{"": {node.Line, node.Column}}}
	out := decoded{Document: Document{File: file, at: d.at}}
	if node.Kind != yaml.MappingNode {
		d.problem(node, "", "mapping", "a document is a mapping of apiVersion, kind, metadata and spec", "")
		out.problems = d.problems
		return out
	}
	head := map[string]string{}
	for i := 0; i+1 < len(node.Content); i += 2 {
		if v := node.Content[i+1]; v.Kind == yaml.ScalarNode {
			head[node.Content[i].Value] = v.Value
			d.at[node.Content[i].Value] = place{v.Line, v.Column}
		}
	}
	if head["apiVersion"] != APIVersion {
		d.problemAt("apiVersion", "api-version", fmt.Sprintf("%q is not known", head["apiVersion"]), "write apiVersion: "+APIVersion)
	}
	message, known := catalog()[head["kind"]]
	if !known {
		d.problemAt("kind", "known-kind", fmt.Sprintf("%q is no kind", head["kind"]), "write one of "+strings.Join(Names(), ", "))
	}
	if len(d.problems) > 0 {
		out.problems = d.problems
		return out
	}
	out.Kind, out.Message = head["kind"], message
	d.message(node, message.ProtoReflect(), "", 0)
	meta := metadataOf(message)
	out.Name, out.Scope = meta.GetName(), meta.GetScope()
	if len(d.problems) == 0 {
		d.problems = checkKind(out.Document)
		d.problems = append(d.problems, bounds(file, d.at, message, d.problems)...)
		slices.SortStableFunc(d.problems, func(a, b Problem) int {
			return cmp.Or(a.Line-b.Line, a.Column-b.Column, strings.Compare(a.Field, b.Field))
		})
	}
	out.problems = d.problems
	if len(out.problems) > 0 {
		return out
	}
	canonical, err := Canonical(message)
	if err != nil {
		d.problem(node, "", "canonical", err.Error(), "")
		out.problems = d.problems
		return out
	}
	out.Digest = digest.Of(canonical)
	return out
}

func (d *decoder) problem(n *yaml.Node, field, rule, text, fix string) {
	d.problems = append(d.problems, Problem{File: d.file, Line: n.Line, Column: n.Column, Field: field, Rule: rule, Text: text, Fix: fix})
}

func (d *decoder) problemAt(field, rule, text, fix string) {
	at := d.at.find(field)
	d.problems = append(d.problems, Problem{File: d.file, Line: at.line, Column: at.column, Field: field, Rule: rule, Text: text, Fix: fix})
}

// plain refuses what could hide content: anchors, aliases, merges and tags.
func (d *decoder) plain(n *yaml.Node, field string) bool {
	switch {
	case n.Kind == yaml.AliasNode:
		d.problem(n, field, "no-alias", "an alias hides what stands there", "write the value out")
	case n.Anchor != "":
		d.problem(n, field, "no-anchor", "an anchor lets content stand elsewhere", "remove the anchor")
	case n.Tag == "!!merge":
		d.problem(n, field, "no-merge", "a merge key hides what stands there", "write the fields out")
	case n.Style&yaml.TaggedStyle != 0:
		d.problem(n, field, "no-tag", fmt.Sprintf("the tag %s changes what the value means", n.Tag), "remove the tag")
	case n.Tag == "!!null":
		d.problem(n, field, "no-null", "the value is empty", "write a value or leave the field out")
	default:
		return true
	}
	return false
}

func fieldName(fd protoreflect.FieldDescriptor) string {
	if fd.Name() == "api_version" {
		return "apiVersion"
	}
	return string(fd.Name())
}

func join(at, name string) string {
	if at == "" {
		return name
	}
	return at + "." + name
}

func (d *decoder) message(n *yaml.Node, m protoreflect.Message, at string, depth int) {
	if !d.plain(n, at) {
		return
	}
	if depth > maxDepth {
		d.problem(n, at, "depth", "nested too deeply", "")
		return
	}
	if n.Kind != yaml.MappingNode {
		d.problem(n, at, "wrong-type", fmt.Sprintf("is %s, not a mapping", shape(n)), "write it as fields")
		return
	}
	fields := map[string]protoreflect.FieldDescriptor{}
	var known []string
	for i := range m.Descriptor().Fields().Len() {
		fd := m.Descriptor().Fields().Get(i)
		fields[fieldName(fd)] = fd
		known = append(known, fieldName(fd))
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		field := join(at, key.Value)
		if !d.plain(key, field) {
			continue
		}
		fd, ok := fields[key.Value]
		switch {
		case key.Kind != yaml.ScalarNode:
			d.problem(key, at, "wrong-type", "a field name is a plain word", "")
			continue
		case !ok:
			d.problem(key, field, "unknown-field", fmt.Sprintf("%s has no field %q", m.Descriptor().Name(), key.Value), "write one of "+strings.Join(known, ", "))
			continue
		case seen[key.Value]:
			d.problem(key, field, "duplicate-field", "is set twice", "keep one of them")
			continue
		}
		seen[key.Value] = true
		d.at[field] = place{value.Line, value.Column}
		d.field(value, m, fd, field, depth)
	}
}

func (d *decoder) field(n *yaml.Node, m protoreflect.Message, fd protoreflect.FieldDescriptor, at string, depth int) {
	if !d.plain(n, at) {
		return
	}
	switch {
	case fd.IsMap():
		if n.Kind != yaml.MappingNode {
			d.problem(n, at, "wrong-type", fmt.Sprintf("is %s, not a mapping", shape(n)), "write it as names and values")
			return
		}
		out := m.Mutable(fd).Map()
		for i := 0; i+1 < len(n.Content); i += 2 {
			key, value := n.Content[i], n.Content[i+1]
			field := fmt.Sprintf("%s[%q]", at, key.Value)
			d.at[field] = place{value.Line, value.Column}
			if !d.plain(key, field) || !d.plain(value, field) {
				continue
			}
			k := protoreflect.ValueOfString(key.Value).MapKey()
			if out.Has(k) {
				d.problem(key, field, "duplicate-field", "is set twice", "keep one of them")
				continue
			}
			if v, ok := d.scalar(value, fd.MapValue(), field); ok {
				out.Set(k, v)
			}
		}
	case fd.IsList():
		if n.Kind != yaml.SequenceNode {
			d.problem(n, at, "wrong-type", fmt.Sprintf("is %s, not a list", shape(n)), "write it as a list, as in [a, b]")
			return
		}
		out := m.Mutable(fd).List()
		for i, item := range n.Content {
			field := fmt.Sprintf("%s[%d]", at, i)
			d.at[field] = place{item.Line, item.Column}
			if fd.Message() != nil {
				v := out.NewElement()
				d.message(item, v.Message(), field, depth+1)
				out.Append(v)
			} else if d.plain(item, field) {
				if v, ok := d.scalar(item, fd, field); ok {
					out.Append(v)
				}
			}
		}
	case fd.Message() != nil && fd.Message().FullName() == "google.protobuf.Duration":
		if v, ok := d.duration(n, at); ok {
			m.Set(fd, protoreflect.ValueOfMessage(v.ProtoReflect()))
		}
	case fd.Message() != nil:
		d.message(n, m.Mutable(fd).Message(), at, depth+1)
	default:
		if v, ok := d.scalar(n, fd, at); ok {
			m.Set(fd, v)
		}
	}
}

var (
	wholePattern    = regexp.MustCompile(`^(0|[1-9][0-9]*)$`)
	durationPattern = regexp.MustCompile(`^(0|[1-9][0-9]{0,11})(\.[0-9]{1,9})?s$`)
)

func (d *decoder) duration(n *yaml.Node, at string) (*durationpb.Duration, bool) {
	if n.Kind != yaml.ScalarNode || n.Tag != "!!str" || !durationPattern.MatchString(n.Value) {
		d.problem(n, at, "duration-seconds", fmt.Sprintf("%q is no duration", n.Value), "write seconds and an s, as in 3600s")
		return nil, false
	}
	whole, fraction, _ := strings.Cut(strings.TrimSuffix(n.Value, "s"), ".")
	seconds, err := strconv.ParseInt(whole, 10, 64)
	if err != nil || seconds > 315576000000 {
		d.problem(n, at, "duration-seconds", fmt.Sprintf("%q is out of range", n.Value), "write fewer seconds")
		return nil, false
	}
	nanos, _ := strconv.ParseInt((fraction + "000000000")[:9], 10, 32)
	return &durationpb.Duration{Seconds: seconds, Nanos: int32(nanos)}, true
}

func (d *decoder) scalar(n *yaml.Node, fd protoreflect.FieldDescriptor, at string) (protoreflect.Value, bool) {
	wrong := func(want, fix string) (protoreflect.Value, bool) {
		d.problem(n, at, "wrong-type", fmt.Sprintf("is %s, not %s", shape(n), want), fix)
		return protoreflect.Value{}, false
	}
	if n.Kind != yaml.ScalarNode {
		return wrong("a single value", "")
	}
	switch fd.Kind() {
	case protoreflect.StringKind:
		if n.Tag != "!!str" {
			return wrong("text", fmt.Sprintf("put it in quotes: %q", n.Value))
		}
		if grant.Reserved(n.Value) {
			d.problem(n, at, "reserved-scope", fmt.Sprintf("%s is reserved for runner grants (P-210)", n.Value), "leave it out")
			return protoreflect.Value{}, false
		}
		return protoreflect.ValueOfString(n.Value), true
	case protoreflect.BoolKind:
		if n.Tag != "!!bool" || (n.Value != "true" && n.Value != "false") {
			return wrong("true or false", "write true or false")
		}
		return protoreflect.ValueOfBool(n.Value == "true"), true
	case protoreflect.EnumKind:
		v := fd.Enum().Values().ByName(protoreflect.Name(n.Value))
		if v == nil || v.Number() == 0 || n.Tag != "!!str" {
			d.problem(n, at, "known-value", fmt.Sprintf("%q is no value of %s", n.Value, fd.Enum().Name()), "write one of "+strings.Join(values(fd.Enum()), ", "))
			return protoreflect.Value{}, false
		}
		return protoreflect.ValueOfEnum(v.Number()), true
	case protoreflect.Uint32Kind, protoreflect.Uint64Kind:
		bits := 64
		if fd.Kind() == protoreflect.Uint32Kind {
			bits = 32
		}
		if n.Tag != "!!int" || !wholePattern.MatchString(n.Value) {
			return wrong("a whole number", "write decimal digits without quotes")
		}
		v, err := strconv.ParseUint(n.Value, 10, bits)
		if err != nil {
			return wrong(fmt.Sprintf("a number of %d bits", bits), "write a smaller number")
		}
		if bits == 32 {
			return protoreflect.ValueOfUint32(uint32(v)), true
		}
		return protoreflect.ValueOfUint64(v), true
	}
	return wrong("a value this field can hold", "")
}

func values(e protoreflect.EnumDescriptor) (out []string) {
	for i := range e.Values().Len() {
		if v := e.Values().Get(i); v.Number() != 0 {
			out = append(out, string(v.Name()))
		}
	}
	return out
}

func shape(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	switch n.Tag {
	case "!!int", "!!float":
		return fmt.Sprintf("the number %s", n.Value)
	case "!!bool":
		return fmt.Sprintf("the truth value %s", n.Value)
	case "!!str":
		return fmt.Sprintf("the text %q", n.Value)
	}
	return fmt.Sprintf("%s %q", n.Tag, n.Value)
}

// bounds applies the bounds that the contract itself declares and points each
// broken one at its place. Fields that a rule of the kind has already spoken of
// are left to it.
func bounds(file string, at places, m proto.Message, said []Problem) (out []Problem) {
	for _, v := range violations(m) {
		field := strings.Replace(v.field, "api_version", "apiVersion", 1)
		if slices.ContainsFunc(said, func(p Problem) bool { return p.Field == field || strings.HasPrefix(field, p.Field+".") }) {
			continue
		}
		where := at.find(field)
		p := Problem{File: file, Line: where.line, Column: where.column, Field: field, Rule: v.rule, Text: v.text}
		if !at.has(field) {
			p.Rule, p.Text, p.Fix = "required", "is missing", "add it"
		}
		out = append(out, p)
	}
	return out
}
