// Package strict decodes what crosses the boundary between host and provider:
// a walk over the wire bytes against the host's descriptors refuses whatever
// they do not say, and the bounds of the contract are checked on the result.
// Dispatch calls it on every request and answer.
package strict

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"buf.build/go/protovalidate"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"
)

// ErrRefused is wrapped by every refusal of this package.
var ErrRefused = errors.New("refused by strict decoding")

// Rules says what both sides have agreed on.
type Rules struct {
	// Version is the negotiated spec version, such as "1.0.0". A field newer
	// than its minor is refused (P-020). Empty refuses every annotated field.
	Version string
	// Capabilities are the negotiated ones; a field may be newer than Version
	// if one of them carries it.
	Capabilities []string
}

const typePrefix = "type.googleapis.com/"

// Checker holds the compiled bounds. It is safe for concurrent use.
type Checker struct {
	bounds protovalidate.Validator
	laws   laws
}

// New compiles the bounds of the given messages now rather than at their first
// use; others are compiled when they are met.
func New(warm ...proto.Message) (*Checker, error) {
	v, err := protovalidate.New(protovalidate.WithMessages(warm...))
	if err != nil {
		return nil, fmt.Errorf("compile the bounds of the contract: %w", err)
	}
	return &Checker{bounds: v}, nil
}

// Decode walks b strictly, decodes it into m and checks the bounds of m. m is
// reset first; after an error its content means nothing.
func (c *Checker) Decode(b []byte, m proto.Message, r Rules) error {
	if err := c.Walk(b, m.ProtoReflect().Descriptor(), r); err != nil {
		return err
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return fmt.Errorf("%w: %w", ErrRefused, err)
	}
	return c.Bounds(m)
}

// Any is Decode for a payload in an Any, which must be of exactly m's type
// (P-014).
func (c *Checker) Any(a *anypb.Any, m proto.Message, r Rules) error {
	want := typePrefix + string(m.ProtoReflect().Descriptor().FullName())
	if a == nil {
		return fmt.Errorf("%w: no payload, want a %s", ErrRefused, want)
	}
	if a.GetTypeUrl() != want {
		return fmt.Errorf("%w: payload is a %s, want a %s", ErrRefused, quoted(a.GetTypeUrl()), want)
	}
	return c.Decode(a.GetValue(), m, r)
}

// Bounds checks the contract's rules on a decoded message: sizes, patterns,
// numbers in range, enums set where they must be.
func (c *Checker) Bounds(m proto.Message) error {
	if err := c.bounds.Validate(m); err != nil {
		return fmt.Errorf("%w: %s", ErrRefused, oneLine(err))
	}
	return nil
}

// oneLine makes a validation error fit a reason: rule and field without line
// breaks, and no longer than a person reads.
func oneLine(err error) string {
	var v *protovalidate.ValidationError
	if !errors.As(err, &v) {
		return strings.Join(strings.Fields(err.Error()), " ")
	}
	var parts []string
	for i, violation := range v.Violations {
		if i == 3 {
			parts = append(parts, fmt.Sprintf("and %d more", len(v.Violations)-3))
			break
		}
		parts = append(parts, fmt.Sprintf("%s: %s", protovalidate.FieldPathString(violation.Proto.GetField()), violation.Proto.GetMessage()))
	}
	return strings.Join(parts, "; ")
}

func quoted(s string) string {
	if len(s) > 120 {
		s = s[:120] + "…"
	}
	return strconv.Quote(s)
}

// Newer reports whether a verb or field that appeared in version since may not
// be used between sides that agreed on version. A malformed version is newer
// than everything.
func Newer(since, version string) bool {
	a, aOK := parse(since)
	b, bOK := parse(version)
	if !aOK || !bOK {
		return true
	}
	return newer(a, b)
}

func newer(since, version [3]int) bool {
	if since[0] != version[0] {
		return true // another major is another contract
	}
	return since[1] > version[1]
}

func parse(s string) (v [3]int, ok bool) {
	parts := strings.Split(s, ".")
	if len(parts) != 3 {
		return v, false
	}
	for i, p := range parts {
		n, err := strconv.Atoi(p)
		if err != nil || n < 0 || strconv.Itoa(n) != p {
			return v, false
		}
		v[i] = n
	}
	return v, true
}

// Outside clears every host_only field of m at any depth: it never reaches a
// provider. It reports whether one was set.
func Outside(m protoreflect.Message) (cleared bool) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if annotation(f).GetHostOnly() {
			m.Clear(f)
			cleared = true
			return true
		}
		switch {
		case f.IsMap():
			if f.MapValue().Message() != nil {
				v.Map().Range(func(_ protoreflect.MapKey, e protoreflect.Value) bool {
					cleared = Outside(e.Message()) || cleared
					return true
				})
			}
		case f.Message() == nil:
		case f.IsList():
			for i := range v.List().Len() {
				cleared = Outside(v.List().Get(i).Message()) || cleared
			}
		default:
			cleared = Outside(v.Message()) || cleared
		}
		return true
	})
	return cleared
}
