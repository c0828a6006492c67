package cli

import (
	"context"
	"time"

	"github.com/numinance/numinance/internal/orchestration"
)

// Runtime is the process that owns the state directory, as far as commands
// need it.
type Runtime interface {
	ChangeRunner
	ChangeReader
	// Close waits for what runs and releases the state directory.
	Close() error
}

// Outcome is how a Change stands, and the exit code of a command that ends with it.
type Outcome struct {
	orchestration.Result
	Exit int `json:"-"`
	// What a receipt says besides: who reviewed, under which policy, what was
	// refused and where the files are.
	Reviewers []string  `json:"-"`
	Policy    string    `json:"-"`
	Refused   []Refusal `json:"-"`
	Files     string    `json:"-"`
}

// Refusal is one thing that was refused, and by which layer.
type Refusal struct{ What, Layer, Why string }

// ChangeRunner drives Changes.
type ChangeRunner interface {
	// Run starts a Change and drives it until it ends or waits for somebody.
	Run(ctx context.Context, r ChangeRequest, o Observer) (Outcome, error)
	// Resume drives a Change that a crash or an interrupt left behind.
	Resume(ctx context.Context, id string, o Observer) (Outcome, error)
	// Cancel revokes a Change's grants first and then winds it down.
	Cancel(ctx context.Context, id, reason string, o Observer) (Outcome, error)
}

// ChangeReader answers questions about Changes.
type ChangeReader interface {
	List(ctx context.Context) ([]Outcome, error)
	Show(ctx context.Context, id string) (Outcome, error)
	// Events returns the recorded story of a Change in order.
	Events(ctx context.Context, id string) ([]Event, error)
	// Verify checks a Change's evidence as an outsider would and exports the
	// bundle it checked to the directory, if one is given.
	Verify(ctx context.Context, id, export string) (Verification, error)
}

// ChangeRequest is one `numi change run`.
type ChangeRequest struct {
	Repo     string   // local Git repository; nothing in it is written
	Branch   string   // base branch; empty for the current one
	Ticket   []byte   // Markdown with front matter; nil if Key is given
	Key      string   // key of the local tracker
	Executor string   // executor id
	Script   []byte   // author script of the fake executor
	Checks   []string // commands that verify the candidate
	Control  string   // directory of control documents; empty for a generated one
	PushBack bool     // push the merged revision to numi/<change> in Repo
	// Seed holds files to make a repository of, instead of Repo; by the demo.
	Seed map[string][]byte
	Name string // name of the repository; empty for the last element of Repo
}

// Observer is told what happens while a Change runs.
type Observer interface {
	// Stage is called when a stage begins (took is 0) and when it ended.
	Stage(name string, ended bool, took time.Duration)
	// Line is one event of the story; source is "harness claim" or "host-recorded".
	Line(e Event)
}

// Event is one line of a Change's story.
type Event struct {
	At      time.Time `json:"at"`
	Kind    string    `json:"kind"`   // such as TOOL_INTENT or POLICY_DECISION
	Source  string    `json:"source"` // harness claim, or host-recorded
	Subject string    `json:"subject"`
	Detail  string    `json:"detail,omitempty"`
	Layer   string    `json:"layer,omitempty"` // what refused it
}

// Verification is the outcome of checking a Change's evidence.
type Verification struct {
	ChangeID string   `json:"change_id"`
	Evidence string   `json:"evidence"` // "verified" or a failure label
	Detail   string   `json:"detail"`
	Records  uint64   `json:"records"`
	Protects []string `json:"protects"` // against whom it protects, and against whom not
	Bundle   string   `json:"bundle,omitempty"`
}
