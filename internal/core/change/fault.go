package change

import "github.com/numinance/numinance/internal/core/digest"

// Fault is an error that says how a command ended. Contexts and steps return
// it where the class matters; an error without one is Infrastructure.
type Fault struct {
	Class  Class
	Reason string
	// Checkpoint is the last snapshot of a run that ended Lost, Exhausted or
	// Interrupted.
	Checkpoint digest.Digest
	// Action and Ask say which action was escalated, and to whom.
	Action digest.Digest
	Ask    string
	// PullRequest is one that exists although the command failed; the Change
	// closes it.
	PullRequest *PullRequest
	Err         error
}

// Error says the reason, then the cause.
func (f *Fault) Error() string {
	switch {
	case f.Reason != "" && f.Err != nil:
		return f.Reason + ": " + f.Err.Error()
	case f.Reason != "":
		return f.Reason
	case f.Err != nil:
		return f.Err.Error()
	default:
		return string(f.Class)
	}
}

// Unwrap returns the cause.
func (f *Fault) Unwrap() error { return f.Err }
