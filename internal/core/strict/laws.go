package strict

import (
	"sync"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	annotationsv1 "github.com/numinance/numinance/gen/numinance/annotations/v1"
)

// laws keeps what the contract says of each field that was met, and of each
// message whether it can hold a host_only field. Descriptors never change, so
// what was read once stays true. The zero value is ready.
type laws struct {
	fields sync.Map // protoreflect.FieldDescriptor -> law
	hides  sync.Map // protoreflect.MessageDescriptor -> bool
}

// law is what the contract says of one field.
type law struct {
	library    bool // of the protobuf library's own types, without annotation
	annotated  bool
	hostOnly   bool
	capability string
	since      [3]int
	sinceOK    bool
}

func (l *laws) of(f protoreflect.FieldDescriptor) law {
	if known, ok := l.fields.Load(f); ok {
		return known.(law)
	}
	var found law
	if a := annotation(f); a != nil {
		found = law{annotated: true, hostOnly: a.GetHostOnly(), capability: a.GetCapability()}
		found.since, found.sinceOK = parse(a.GetSince())
	} else {
		found.library = f.ParentFile().Package() == "google.protobuf"
	}
	l.fields.Store(f, found)
	return found
}

func annotation(f protoreflect.FieldDescriptor) *annotationsv1.FieldAnnotations {
	options := f.Options()
	if !proto.HasExtension(options, annotationsv1.E_Field) {
		return nil
	}
	a, _ := proto.GetExtension(options, annotationsv1.E_Field).(*annotationsv1.FieldAnnotations)
	return a
}

// Hides reports whether a message of this type can hold a host_only field, at
// any depth. Where it cannot, Outside has nothing to clear.
func (c *Checker) Hides(d protoreflect.MessageDescriptor) bool {
	if known, ok := c.laws.hides.Load(d); ok {
		return known.(bool)
	}
	hides := c.laws.hiding(d, map[protoreflect.MessageDescriptor]bool{})
	c.laws.hides.Store(d, hides)
	return hides
}

func (l *laws) hiding(d protoreflect.MessageDescriptor, visited map[protoreflect.MessageDescriptor]bool) bool {
	if visited[d] {
		return false
	}
	visited[d] = true
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		if l.of(f).hostOnly || f.Message() != nil && l.hiding(f.Message(), visited) {
			return true
		}
	}
	return false
}
