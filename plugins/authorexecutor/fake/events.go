package fake

import (
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/timestamppb"

	authorexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
)

// maxText bounds subjects and reference values in bytes, as the port does.
const maxText = 1024

// events emits one stream: it numbers the events and cleans what they carry.
type events struct {
	send     func(*authorexecutorv1.ExecutionEvent) error
	now      func() time.Time
	sequence uint32
}

// ref is one reference of an event.
type ref struct{ kind, value string }

// emit sends the next event. References without a value are left out; events
// carry references and digests, never content (H-018).
func (e *events) emit(t authorexecutorv1.ExecutionEventType, subject string, refs ...ref) error {
	e.sequence++
	event := &authorexecutorv1.ExecutionEvent{
		Type:       t,
		Sequence:   e.sequence,
		OccurredAt: timestamppb.New(e.now()),
		Subject:    clean(subject),
	}
	for _, r := range refs {
		if r.value != "" {
			event.References = append(event.References, &authorexecutorv1.EventReference{Kind: r.kind, Value: clean(r.value)})
		}
	}
	return e.send(event)
}

// clean makes s one line of valid UTF-8 within the bound.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
	for len(s) > maxText {
		_, size := utf8.DecodeLastRuneInString(s[:maxText])
		cut := maxText
		if r, _ := utf8.DecodeLastRuneInString(s[:maxText]); r == utf8.RuneError {
			cut -= size
		}
		s = strings.ToValidUTF8(s[:cut], "")
	}
	return s
}
