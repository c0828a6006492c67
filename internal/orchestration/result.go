package orchestration

import (
	"strings"
	"time"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
)

// Exit codes of the commands that drive a Change.
const (
	ExitReleased       = 0
	ExitUsage          = 2
	ExitRefused        = 3 // refused, cancelled, or waiting for a person
	ExitUnverified     = 4
	ExitInfrastructure = 5
)

// Result is what a command prints of a Change at its end. The counts come from
// the journal; the caller fills them in.
type Result struct {
	Change         identity.ChangeID `json:"change_id"`
	State          change.Status     `json:"state"`
	Reason         string            `json:"reason,omitempty"`
	Executor       string            `json:"executor"`
	BaseRevision   string            `json:"base_revision"`
	MergedRevision string            `json:"merged_revision"`
	PullRequest    string            `json:"pull_request"`
	Decisions      int64             `json:"decisions"`
	Denials        int64             `json:"denials"`
	Actions        int64             `json:"actions"`
	Records        int64             `json:"records"`
	Head           digest.Digest     `json:"head"`
	Checkpoint     Checkpoint        `json:"checkpoint"`
	Evidence       string            `json:"evidence"`
	DurationMS     int64             `json:"duration_ms"`
	Stages         []StageTime       `json:"stages"`
}

// Checkpoint is where the head is anchored.
type Checkpoint struct {
	Origin string `json:"origin"`
	Size   int64  `json:"size"`
}

// StageTime is how long a Change was in one status.
type StageTime struct {
	Name string `json:"name"`
	MS   int64  `json:"ms"`
}

// ResultOf is the result of s as far as the state knows it.
func ResultOf(s change.State) Result {
	end := s.Updated
	r := Result{
		Change: s.ID, State: s.Status, Executor: s.Request.Executor,
		BaseRevision: s.Admission.BaseRevision, MergedRevision: s.Merge.Revision, PullRequest: s.PullRequest.ID,
		Records: s.Closing.Records, Head: s.Closing.Head,
		Checkpoint: Checkpoint{Origin: s.Closing.Origin, Size: s.Closing.Size},
		Evidence:   s.Closing.Evidence, DurationMS: milliseconds(s.Started, end),
		Stages: []StageTime{},
	}
	switch {
	case s.Status == change.Escalated:
		r.Reason = s.Escalation.Reason
	case s.Status != change.Released:
		r.Reason = s.Failure.Reason
	}
	for _, st := range s.Stages {
		until := st.Ended
		if until.IsZero() {
			until = end
		}
		if st.Name.Terminal() {
			continue
		}
		r.Stages = append(r.Stages, StageTime{Name: stageName(st.Name), MS: milliseconds(st.Started, until)})
	}
	return r
}

func milliseconds(from, to time.Time) int64 { return max(0, to.Sub(from).Milliseconds()) }

// stageName writes AwaitingApproval as awaiting-approval.
func stageName(s change.Status) string {
	var b strings.Builder
	for i, c := range string(s) {
		if c >= 'A' && c <= 'Z' {
			if i > 0 {
				b.WriteByte('-')
			}
			c += 'a' - 'A'
		}
		b.WriteRune(c)
	}
	return b.String()
}

// ExitCode is the exit code of a command that ends with s. A Change that waits
// for a person exits like an escalated one.
func ExitCode(s change.State) int {
	switch {
	case s.Status == change.Released:
		return ExitReleased
	case s.Status == change.Failed && s.Failure.Class == change.Unverified:
		return ExitUnverified
	case s.Status == change.Failed:
		return ExitInfrastructure
	case s.Status.Terminal(), s.Waiting():
		return ExitRefused
	default:
		return ExitInfrastructure
	}
}
