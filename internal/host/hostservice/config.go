package hostservice

import (
	"context"
	"io"
	"time"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/strict"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/bridge"
)

// Config is the authority of one plugin's session. Everything that is nil is
// refused with a reason; the zero Config allows nothing.
type Config struct {
	// Plugin is the extension id, for records.
	Plugin string
	// Change and Run are what the session belongs to; empty for a provider of the
	// whole deployment.
	Change identity.ChangeID
	Run    identity.RunID

	// Decide decides a tool intent and records the decision (adapters). A denial
	// is a Decision; an error means that nothing could be decided.
	Decide func(context.Context, policy.Tool) (policy.Decision, error)
	// Spawn starts a process in the run's sandbox (adapters and verifiers).
	Spawn func(context.Context, bridge.Command) (*bridge.Process, error)
	// AgentSpawn says whether a process may start at the agent's uid under a
	// decision, as this command, and uses the decision up; nil refuses (adapters).
	AgentSpawn func(id identity.DecisionID, argv []string) error
	// CandidateSpawn lets processes start at the candidate's uid (verifiers).
	CandidateSpawn bool
	// Processes records what was started; without it nothing is.
	Processes ProcessRecorder
	// Limits bound every spawned process.
	Limits bridge.Limits
	// MaxProcess bounds the life of a spawned process; 0 is an hour.
	MaxProcess time.Duration

	// Readable says which blobs the plugin may resolve now (P-130).
	Readable func(digest.Digest) bool
	// Blobs reads them.
	Blobs Blobs
	// Put stores what the plugin leaves, within its quota.
	Put Putter
	// MaxBlob bounds one stored blob in bytes; 0 is 256 MiB.
	MaxBlob int64

	// Checkpoint keeps the state of the run (adapters).
	Checkpoint func(ctx context.Context, label string) (blob.Ref, error)
	// Sign signs a checkpoint of a log (the transparency log's provider).
	Sign Signer
	// Intents are the credential intents of the manifest (P-043).
	Intents []string
	// MayHold says whether the run may have a handle for an intent; nil leaves it
	// to the broker.
	MayHold func(intent string) error
	// Credentials gives handles.
	Credentials Credentials

	// Refusals records what was refused.
	Refusals Recorder
	// Log takes the plugin's lines.
	Log io.Writer
	// Checker holds the bounds of the contract; New makes one if nil.
	Checker *strict.Checker
}

// Blobs opens a blob; blob.Store implements it.
type Blobs interface {
	Open(digest.Digest) (io.ReadCloser, error)
}

// Putter stores bytes; blob.Account implements it.
type Putter interface {
	Put(ctx context.Context, r io.Reader, limit int64) (blob.Ref, error)
}

// Signer signs the text of a log's checkpoint after checking form and growth;
// broker.Broker implements it.
type Signer interface {
	SignCheckpoint(ctx context.Context, text []byte) (Signature, error)
}

// Signature is an Ed25519 signature, with the key it verifies under.
type Signature struct {
	Signature, PublicKey []byte
	KeyName              string
}

// Credentials gives out handles that stand for a credential at the egress proxy;
// it never gives key material. An error is a refusal with its reason.
type Credentials interface {
	Handle(ctx context.Context, plugin string, run identity.RunID, intent string) (Handle, error)
}

// Handle stands for a credential, for one run, until it expires.
type Handle struct {
	Value   string
	Header  string
	Expires time.Time
}

// Refusal is one thing that a plugin asked for and did not get.
type Refusal struct {
	Plugin  string
	Change  identity.ChangeID
	Run     identity.RunID
	Asked   string // such as "get-blob"
	Subject string // a digest, an intent, a decision id; from the plugin
	Reason  string
}

// Process is one process that a plugin had started, as the host observed it: once
// before it starts and once when it has ended.
type Process struct {
	Plugin   string
	Change   identity.ChangeID
	Run      identity.RunID
	Decision string        // that allowed it; empty for a verifier's
	User     string        // agent or candidate
	Program  string        // as the plugin named it
	Command  digest.Digest // names {"argv": …}: arguments may hold what no record may
	PID      int           // inside the sandbox; 0 if it did not start
	Ended    bool
	Exit     int    // its code, -1 if a signal ended it
	Signal   int    // 0 if none
	Limit    string // that ended it, or empty
	Failure  string // why it did not start or its end was not seen
}

// ProcessRecorder keeps a process durably. One that cannot be recorded is not
// started (P-138).
type ProcessRecorder interface {
	Process(context.Context, Process) error
}

// Recorder keeps a refusal durably before the plugin is told.
type Recorder interface {
	Refused(context.Context, Refusal) error
}
