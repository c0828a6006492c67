package dispatch

import (
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/policy"
)

// ErrLost is wrapped by the error of an action that cannot be repeated and
// whose outcome a crash hid: its sandbox is destroyed and the step starts anew
// from the last checkpoint with a new run, whose keys are new.
var ErrLost = errors.New("the outcome of the action is lost")

// ErrInDoubt is wrapped by the error of an action whose outcome is not known
// yet: running the same step again settles it under the same key.
var ErrInDoubt = errors.New("the outcome of the action is in doubt")

// errRevoked is the cause with which calls in flight end when their authority
// does.
var errRevoked = errors.New("the authority of this run was revoked")

// DeniedError says that an action was not allowed and had no effect. Its status
// is PERMISSION_DENIED. Decision.Effect tells a denial from an escalation.
type DeniedError struct {
	Verb     string // "scm.MergePullRequest" or "tool.write"
	Decision policy.Decision
	// Spilled: the record is in the spill file, because the journal could not be
	// written.
	Spilled bool
	// Unrecorded is why no record could be written at all, or nil.
	Unrecorded error
}

// Error names the verb and the reasons.
func (e *DeniedError) Error() string {
	s := e.Verb + ": " + e.Decision.Summary()
	if e.Decision.Ask != "" {
		s += "; " + e.Decision.Ask
	}
	if e.Unrecorded != nil {
		s += fmt.Sprintf("; the denial could not be recorded: %v", e.Unrecorded)
	}
	return s
}

// GRPCStatus lets status.Code see the denial.
func (e *DeniedError) GRPCStatus() *status.Status {
	return status.New(codes.PermissionDenied, e.Error())
}

// PartialError says that the action was carried out but evidence that its verb
// declares is missing. It is never retried and stops a release. Its status is
// FAILED_PRECONDITION.
type PartialError struct {
	Verb string
	// Output is the decoded answer: the effect exists.
	Output  proto.Message
	Result  digest.Digest // of the answer's bytes
	Missing []string      // evidence types
	// Compensating is the verb that undoes the effect, or empty.
	Compensating string
}

// Error names the verb and the missing evidence.
func (e *PartialError) Error() string {
	s := fmt.Sprintf("%s: partial: done without evidence %s", e.Verb, strings.Join(e.Missing, ", "))
	if len(e.Missing) == 0 {
		s = e.Verb + ": partial: the provider says that it was not done in full"
	}
	return s + offer(e.Compensating)
}

// GRPCStatus lets status.Code see that this is no success.
func (e *PartialError) GRPCStatus() *status.Status {
	return status.New(codes.FailedPrecondition, e.Error())
}

// FailedError says that the provider reports failure, or that its answer was
// refused. Its status has the provider's code.
type FailedError struct {
	Verb string
	Code codes.Code
	// Message is the provider's own text, untrusted, or the host's reason.
	Message string
	// EffectUnknown: the verb may have had its effect, because what was wrong is
	// the answer. Compensating undoes it, if not empty.
	EffectUnknown bool
	Compensating  string
}

// Error names verb, code and message.
func (e *FailedError) Error() string {
	s := fmt.Sprintf("%s: failed: %s: %s", e.Verb, e.Code, e.Message)
	if e.EffectUnknown {
		s += "; the effect may have happened" + offer(e.Compensating)
	}
	return s
}

// GRPCStatus carries the provider's code.
func (e *FailedError) GRPCStatus() *status.Status { return status.New(e.Code, e.Error()) }

// UnsettledError is an action whose outcome is in doubt or lost; it wraps
// ErrInDoubt or ErrLost. Its status is UNAVAILABLE or ABORTED.
type UnsettledError struct {
	Verb string
	Key  string
	// Compensating undoes the effect if the action is abandoned, or is empty.
	Compensating string
	Cause        error // what hid the outcome
	kind         error
}

// Error names the verb and what to do.
func (e *UnsettledError) Error() string {
	s := fmt.Sprintf("%s: %v", e.Verb, e.kind)
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s + offer(e.Compensating)
}

// Unwrap gives ErrLost or ErrInDoubt, and the cause.
func (e *UnsettledError) Unwrap() []error {
	if e.Cause == nil {
		return []error{e.kind}
	}
	return []error{e.kind, e.Cause}
}

// GRPCStatus lets status.Code see that the outcome is open.
func (e *UnsettledError) GRPCStatus() *status.Status {
	if errors.Is(e.kind, ErrLost) {
		return status.New(codes.Aborted, e.Error())
	}
	return status.New(codes.Unavailable, e.Error())
}

func offer(compensating string) string {
	if compensating == "" {
		return ""
	}
	return "; " + compensating + " undoes it"
}
