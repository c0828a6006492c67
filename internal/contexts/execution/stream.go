package execution

import (
	"errors"
	"fmt"

	authorexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
)

// The bounds of an event stream (P-132, P-135).
const (
	MaxEvents     = 1023
	MaxEventBytes = 32 << 10
)

// ErrStream is wrapped by every breach of the stream's rules.
var ErrStream = errors.New("event stream breaks the rules of the port")

// Stream checks the form of one event stream as it comes. The zero value is a
// stream of which nothing has come yet.
type Stream struct {
	count    uint32
	terminal authorexecutorv1.ExecutionEventType
	broken   error
}

// Next takes the next event and its encoded size in bytes. After an error the
// stream is broken for good.
func (s *Stream) Next(e *authorexecutorv1.ExecutionEvent, size int) error {
	if s.broken == nil {
		if why := s.breach(e, size); why != "" {
			s.broken = fmt.Errorf("%w: event %d %s", ErrStream, s.count+1, why)
		} else {
			s.count++
			if terminal(e.GetType()) {
				s.terminal = e.GetType()
			}
		}
	}
	return s.broken
}

func (s *Stream) breach(e *authorexecutorv1.ExecutionEvent, size int) string {
	started := authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_EXECUTION_STARTED
	known := authorexecutorv1.ExecutionEventType_name
	_, named := known[int32(e.GetType())]
	switch {
	case e == nil:
		return "is missing from its message"
	case size > MaxEventBytes:
		return fmt.Sprintf("is %d bytes long, at most %d (P-135)", size, MaxEventBytes)
	case s.count >= MaxEvents:
		return fmt.Sprintf("is beyond the %d that a stream may hold (P-132)", MaxEvents)
	case !named || e.GetType() == authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_UNSPECIFIED:
		return fmt.Sprintf("has the unknown type %d", e.GetType())
	case s.terminal != 0:
		return fmt.Sprintf("follows the last one, %s (P-134)", typeName(s.terminal))
	case s.count == 0 && e.GetType() != started:
		return fmt.Sprintf("is %s, the first has to be EXECUTION_STARTED (P-133)", typeName(e.GetType()))
	case s.count > 0 && e.GetType() == started:
		return "is EXECUTION_STARTED again (P-133)"
	case e.GetSequence() != s.count+1:
		return fmt.Sprintf("has sequence %d, want %d (P-133)", e.GetSequence(), s.count+1)
	}
	return ""
}

// End says whether the stream may end here: with at least one event, and with a
// terminal one as its last.
func (s *Stream) End() error {
	switch {
	case s.broken != nil:
		return s.broken
	case s.count == 0:
		return fmt.Errorf("%w: it holds no event (P-132)", ErrStream)
	case s.terminal == 0:
		return fmt.Errorf("%w: it ends after event %d without EXECUTION_COMPLETED or EXECUTION_FAILED (P-134)", ErrStream, s.count)
	}
	return nil
}

// Completed reports whether the stream ended with EXECUTION_COMPLETED.
func (s *Stream) Completed() bool {
	return s.broken == nil && s.terminal == authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_EXECUTION_COMPLETED
}

// Count is how many good events have come.
func (s *Stream) Count() int { return int(s.count) }

func terminal(t authorexecutorv1.ExecutionEventType) bool {
	return t == authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_EXECUTION_COMPLETED ||
		t == authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_EXECUTION_FAILED
}

const typePrefix = "EXECUTION_EVENT_TYPE_"

func typeName(t authorexecutorv1.ExecutionEventType) string { return t.String()[len(typePrefix):] }
