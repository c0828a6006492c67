package execution

import (
	"time"

	authorexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/untrusted"
)

// Origin says whose word a line is. The zero value is a claim.
type Origin uint8

// The two origins (H-025).
const (
	HarnessClaim Origin = iota
	HostRecorded
)

// String returns "harness claim" or "host-recorded".
func (o Origin) String() string {
	if o == HostRecorded {
		return "host-recorded"
	}
	return "harness claim"
}

// PolicyDecision is the type of a line that shows a decision; it is a host
// record and never an event of a provider (H-017).
const PolicyDecision = "POLICY_DECISION"

// Line is one step of a run as it is shown. Subject came from outside.
type Line struct {
	Type     string // of the event, without its prefix, or POLICY_DECISION
	Origin   Origin
	At       time.Time
	Subject  untrusted.Text
	Decision *policy.Decision // POLICY_DECISION, TOOL_ALLOWED, TOOL_DENIED
	Event    *authorexecutorv1.ExecutionEvent
}

// Observer is told each step, in the order of the stream, from one goroutine. It
// must not block for long: the run waits.
type Observer interface {
	Observe(Line)
}

// maxSubject bounds a shown subject in bytes.
const maxSubject = 1024

// show tells the observer of an event. A decision that the event echoes comes
// first: the host took it before the adapter could speak of it.
func show(o Observer, now time.Time, e *authorexecutorv1.ExecutionEvent, echoed *policy.Decision) {
	if o == nil {
		return
	}
	l := Line{
		Type:    typeName(e.GetType()),
		At:      now,
		Subject: untrusted.New("authorexecutor event", []byte(e.GetSubject()), maxSubject),
		Event:   e,
	}
	if echoed != nil {
		showDecision(o, now, l.Subject, *echoed)
		l.Origin, l.Decision = HostRecorded, echoed
	}
	o.Observe(l)
}

func showDecision(o Observer, now time.Time, subject untrusted.Text, d policy.Decision) {
	if o != nil {
		o.Observe(Line{Type: PolicyDecision, Origin: HostRecorded, At: now, Subject: subject, Decision: &d})
	}
}
