package strict

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// maxDepth bounds nesting; no message of the contract comes near it.
const maxDepth = 64

// Walk checks the encoded message b against d and returns the first thing that
// is wrong. Refused at any depth: a field d does not know; one newer than what
// was negotiated; a wrong wire type; a number that does not fit its field or is
// not in its shortest form; an enum number without a name; a text that is not
// UTF-8; a field, oneof or map key given twice; an Any. Walking the bytes
// rather than a decoded copy sees what a decoder would drop or merge.
func Walk(b []byte, d protoreflect.MessageDescriptor, r Rules) error {
	return walk(b, d, r, &laws{})
}

// Walk is the function of this name, with what was read of the contract before.
func (c *Checker) Walk(b []byte, d protoreflect.MessageDescriptor, r Rules) error {
	return walk(b, d, r, &c.laws)
}

func walk(b []byte, d protoreflect.MessageDescriptor, r Rules, l *laws) error {
	w := walker{rules: r, laws: l}
	w.version, w.versionOK = parse(r.Version)
	if err := w.message(b, d, string(d.Name()), 0, false); err != nil {
		return fmt.Errorf("%w: %w", ErrRefused, err)
	}
	return nil
}

type walker struct {
	rules     Rules
	version   [3]int // of rules
	versionOK bool
	laws      *laws
}

// message walks one message. Fields of a map's entry carry no annotations: the
// map's field does.
func (w *walker) message(b []byte, d protoreflect.MessageDescriptor, path string, depth int, entry bool) error {
	if depth > maxDepth {
		return fmt.Errorf("%s: nested deeper than %d", path, maxDepth)
	}
	if d.FullName() == "google.protobuf.Any" {
		return fmt.Errorf("%s: an Any inside a payload", path)
	}
	var seen numbers
	var oneofs map[protoreflect.OneofDescriptor]bool
	var keys map[protowire.Number]map[string]bool
	fields := d.Fields()
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return fmt.Errorf("%s: broken tag: %w", path, protowire.ParseError(n))
		}
		if n != protowire.SizeTag(num) {
			return fmt.Errorf("%s: tag of field %d is longer than need be", path, num)
		}
		b = b[n:]
		f := fields.ByNumber(num)
		if f == nil {
			return fmt.Errorf("%s: unknown field %d", path, num)
		}
		in := place{path, f}
		if !entry {
			if err := w.negotiated(f); err != nil {
				return fmt.Errorf("%s: %w", in.name(), err)
			}
		}
		packed := f.IsList() && typ == protowire.BytesType && packable(f.Kind())
		if !packed && typ != wireType(f.Kind()) {
			return fmt.Errorf("%s: wire type %d, want %d", in.name(), typ, wireType(f.Kind()))
		}
		if !f.IsList() && !f.IsMap() || packed {
			if !seen.add(num) {
				return fmt.Errorf("%s: given twice", in.name())
			}
		}
		if o := f.ContainingOneof(); o != nil && !o.IsSynthetic() {
			if oneofs[o] {
				return fmt.Errorf("%s: a second member of oneof %s", in.name(), o.Name())
			}
			if oneofs == nil {
				oneofs = map[protoreflect.OneofDescriptor]bool{}
			}
			oneofs[o] = true
		}
		var value []byte
		switch typ {
		case protowire.BytesType:
			v, n := protowire.ConsumeBytes(b)
			if n < 0 {
				return fmt.Errorf("%s: %w", in.name(), protowire.ParseError(n))
			}
			if n != protowire.SizeBytes(len(v)) {
				return fmt.Errorf("%s: its length is longer than need be", in.name())
			}
			value, b = v, b[n:]
		case protowire.StartGroupType:
			v, n := protowire.ConsumeGroup(num, b)
			if n < 0 {
				return fmt.Errorf("%s: %w", in.name(), protowire.ParseError(n))
			}
			value, b = v, b[n:]
		default:
			n := protowire.ConsumeFieldValue(num, typ, b)
			if n < 0 {
				return fmt.Errorf("%s: %w", in.name(), protowire.ParseError(n))
			}
			value, b = b[:n], b[n:]
		}
		var err error
		switch {
		case f.IsMap():
			if keys == nil {
				keys = map[protowire.Number]map[string]bool{}
			}
			if keys[num] == nil {
				keys[num] = map[string]bool{}
			}
			err = w.mapEntry(value, in, depth, keys[num])
		case packed:
			err = w.packed(value, in)
		case f.Message() != nil:
			err = w.message(value, f.Message(), in.name(), depth+1, false)
		default:
			err = scalar(value, in)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// mapEntry is a message of its own on the wire; its key must be new.
func (w *walker) mapEntry(b []byte, in place, depth int, keys map[string]bool) error {
	f := in.field
	if err := w.message(b, f.Message(), in.name(), depth+1, true); err != nil {
		return err
	}
	// The entry was walked, so the key is at most once in it and well formed; an
	// absent key is the type's zero, which a key given as zero would repeat.
	key := string(zeroKey(f.MapKey().Kind()))
	for rest := b; len(rest) > 0; {
		num, typ, n := protowire.ConsumeTag(rest)
		rest = rest[n:]
		size := protowire.ConsumeFieldValue(num, typ, rest)
		if num == f.MapKey().Number() {
			key = string(rest[:size])
		}
		rest = rest[size:]
	}
	if keys[key] {
		return fmt.Errorf("%s: a key is given twice", in.name())
	}
	keys[key] = true
	return nil
}

func zeroKey(k protoreflect.Kind) []byte {
	switch wireType(k) {
	case protowire.Fixed32Type:
		return make([]byte, 4)
	case protowire.Fixed64Type:
		return make([]byte, 8)
	}
	return []byte{0} // a varint zero, or the length of an empty string
}

func (w *walker) packed(b []byte, in place) error {
	f := in.field
	typ := wireType(f.Kind())
	for len(b) > 0 {
		n := protowire.ConsumeFieldValue(f.Number(), typ, b)
		if n < 0 {
			return fmt.Errorf("%s: %w", in.name(), protowire.ParseError(n))
		}
		if err := scalar(b[:n], in); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// scalar checks one value: for lengths, b is what follows the length.
func scalar(b []byte, in place) error {
	f := in.field
	switch f.Kind() {
	case protoreflect.StringKind:
		if !utf8.Valid(b) {
			return fmt.Errorf("%s: not UTF-8", in.name())
		}
		return nil
	case protoreflect.BytesKind:
		return nil
	}
	if wireType(f.Kind()) != protowire.VarintType {
		return nil // fixed sizes have one form
	}
	v, n := protowire.ConsumeVarint(b)
	if n < 0 {
		return fmt.Errorf("%s: %w", in.name(), protowire.ParseError(n))
	}
	if n != protowire.SizeVarint(v) {
		return fmt.Errorf("%s: its number is longer than need be", in.name())
	}
	fits := true
	switch f.Kind() {
	case protoreflect.BoolKind:
		fits = v <= 1
	case protoreflect.Int32Kind, protoreflect.EnumKind:
		fits = int64(v) >= math.MinInt32 && int64(v) <= math.MaxInt32
	case protoreflect.Uint32Kind, protoreflect.Sint32Kind:
		fits = v <= math.MaxUint32
	}
	if !fits {
		return fmt.Errorf("%s: number does not fit a %s", in.name(), f.Kind())
	}
	if f.Kind() == protoreflect.EnumKind && f.Enum().Values().ByNumber(protoreflect.EnumNumber(int32(v))) == nil {
		return fmt.Errorf("%s: %s has no value %d", in.name(), f.Enum().Name(), int32(v))
	}
	return nil
}

// place is a field of the message at a path. Its name is put together only for
// an error or a message below.
type place struct {
	path  string
	field protoreflect.FieldDescriptor
}

func (p place) name() string { return p.path + "." + string(p.field.Name()) }

// numbers is a set of field numbers.
type numbers struct {
	low  uint64
	high map[protowire.Number]bool
}

// add reports whether n was not in the set yet.
func (s *numbers) add(n protowire.Number) bool {
	if n < 64 {
		bit := uint64(1) << uint(n)
		fresh := s.low&bit == 0
		s.low |= bit
		return fresh
	}
	if s.high[n] {
		return false
	}
	if s.high == nil {
		s.high = map[protowire.Number]bool{}
	}
	s.high[n] = true
	return true
}

// negotiated refuses a field that the agreed version does not have and no
// agreed capability carries. Fields of the protobuf library's own types carry
// no annotation and belong to every version.
func (w *walker) negotiated(f protoreflect.FieldDescriptor) error {
	switch l := w.laws.of(f); {
	case l.library:
		return nil
	case !l.annotated:
		return errors.New("field carries no governance annotation")
	case l.capability != "":
		if slices.Contains(w.rules.Capabilities, l.capability) {
			return nil
		}
		return fmt.Errorf("needs capability %s, which was not negotiated", l.capability)
	case !l.sinceOK || !w.versionOK || newer(l.since, w.version):
		return fmt.Errorf("is since %s, but version %s was negotiated", annotation(f).GetSince(), quoted(w.rules.Version))
	}
	return nil
}

func packable(k protoreflect.Kind) bool {
	switch k {
	case protoreflect.StringKind, protoreflect.BytesKind, protoreflect.MessageKind, protoreflect.GroupKind:
		return false
	}
	return true
}

func wireType(k protoreflect.Kind) protowire.Type {
	switch k {
	case protoreflect.Fixed32Kind, protoreflect.Sfixed32Kind, protoreflect.FloatKind:
		return protowire.Fixed32Type
	case protoreflect.Fixed64Kind, protoreflect.Sfixed64Kind, protoreflect.DoubleKind:
		return protowire.Fixed64Type
	case protoreflect.StringKind, protoreflect.BytesKind, protoreflect.MessageKind:
		return protowire.BytesType
	case protoreflect.GroupKind:
		return protowire.StartGroupType
	}
	return protowire.VarintType
}
