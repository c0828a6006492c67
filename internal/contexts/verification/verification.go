package verification

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	verifierv1 "github.com/numinance/numinance/gen/numinance/ports/verifier/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/core/untrusted"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/dispatch"
)

// Dispatcher is the policy enforcement point as this context needs it.
type Dispatcher interface {
	// Via returns a connection for stock clients whose calls are dispatched
	// under a and carried out by p.
	Via(a dispatch.Authority, p dispatch.Provider) grpc.ClientConnInterface
}

// Enforcer is the Dispatcher of the runtime.
type Enforcer struct{ Dispatcher *dispatch.Dispatcher }

// Via implements Dispatcher.
func (e Enforcer) Via(a dispatch.Authority, p dispatch.Provider) grpc.ClientConnInterface {
	return e.Dispatcher.Conn(a).Via(p)
}

// Sandboxes makes the sandbox of a verifier; contexts/sandbox implements it.
type Sandboxes interface {
	// Create makes a fresh sandbox whose work tree is that of a revision and
	// which reaches no network.
	Create(ctx context.Context, s SandboxSpec) (Sandbox, error)
}

// SandboxSpec is what the sandbox is built from.
type SandboxSpec struct {
	Authority dispatch.Authority
	Revision  string // commit
	WallTime  time.Duration
}

// Sandbox is one sandbox, from Create to Destroy.
type Sandbox interface {
	// Destroy ends and removes everything; a second call succeeds. It works
	// after the run's context is done.
	Destroy(ctx context.Context) error
}

// Verifiers starts a verifier inside its sandbox; the plugin host implements it.
type Verifiers interface {
	Launch(ctx context.Context, box Sandbox, l Launch) (Verifier, error)
}

// Launch is what a verifier is started with.
type Launch struct {
	Provider  string // name of the verifier, such as command
	Authority dispatch.Authority
	Config    json.RawMessage // the provider's own settings, not the checks
}

// Verifier is a started verifier.
type Verifier interface {
	Provider() dispatch.Provider
	// Close ends it and every call of it.
	Close() error
}

// Blobs keeps configurations and reports.
type Blobs interface {
	PutBytes(ctx context.Context, b []byte) (blob.Ref, error)
}

// Config is what a Context works with. All but Now are required.
type Config struct {
	Dispatcher Dispatcher
	Sandboxes  Sandboxes
	Verifiers  Verifiers
	Blobs      Blobs
	// Now is the clock; nil is the system's.
	Now func() time.Time
}

// Context is the verification context. It is safe for concurrent use and keeps
// the baselines of base revisions.
type Context struct {
	Config

	mu        sync.Mutex // guards baselines
	baselines map[digest.Digest]blob.Ref
}

// New returns the verification context.
func New(c Config) (*Context, error) {
	if c.Dispatcher == nil || c.Sandboxes == nil || c.Verifiers == nil || c.Blobs == nil {
		return nil, errors.New("verification context needs a dispatcher, sandboxes, verifiers and blobs")
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	return &Context{Config: c, baselines: map[digest.Digest]blob.Ref{}}, nil
}

// Layer is one layer of verification.
type Layer struct {
	Name     string          // such as checks
	Provider string          // the verifier, such as command
	Checks   []byte          // what config_ref stands for
	Settings json.RawMessage // the provider's own settings in the handshake
	Required []string        // names of the checks that have to pass
}

// Revision is a commit and its tree.
type Revision struct {
	Commit string
	Tree   string
}

// In is one verification. Each of the two runs has an authority of its own,
// since a run has one sandbox; both are of a reviewer-agent that is no author
// of the Change.
type In struct {
	Layer         Layer
	Authority     dispatch.Authority // of the run on the candidate
	BaseAuthority dispatch.Authority // of the run on the base revision
	Candidate     Revision
	Base          Revision
	Deadline      time.Time
	// Progress is told what goes on, in a few words; it may be nil.
	Progress func(string)
}

// Verdict is what a layer says about a candidate.
type Verdict struct {
	Outcome  Outcome
	Reason   string // for a person
	Layer    string
	Tree     string // exactly what was verified
	Config   digest.Digest
	Report   *verifierv1.VerifierReport // nil if there is none
	Receipt  blob.Ref                   // the report as canonical JSON; zero if there is none
	Baseline blob.Ref                   // the base revision's report
	Findings []Finding                  // the first ones, for people
	All      digest.Digest              // all findings as JSON lines, if there are more
}

// Finding is one violation, as the verifier tells it. It settles nothing.
type Finding struct {
	Check    string
	Rule     untrusted.Text
	Severity string // INFO, WARNING or ERROR
	Path     untrusted.Text
	Line     int
	Message  untrusted.Text
}

// Verify runs the layer on the base revision, unless its report is known, and
// then on the candidate, and judges. An error says that the verification was
// refused or could not be carried out; a check that could not complete is an
// Inconclusive verdict.
func (c *Context) Verify(ctx context.Context, in In) (Verdict, error) {
	if err := in.check(); err != nil {
		return Verdict{}, fmt.Errorf("verify %s: %w", in.Candidate.Tree, err)
	}
	config, err := c.Blobs.PutBytes(ctx, in.Layer.Checks)
	if err != nil {
		return Verdict{}, fmt.Errorf("keep the configuration of layer %s: %w", in.Layer.Name, err)
	}
	v := Verdict{Layer: in.Layer.Name, Tree: in.Candidate.Tree, Config: config.Digest}

	baseline, reason, err := c.baseline(ctx, in, config)
	if err != nil {
		return Verdict{}, err
	}
	if reason != "" {
		v.Reason = "on the base revision: " + reason
		return v, nil
	}
	v.Baseline = baseline

	in.tell("checking the candidate")
	answer, reason, err := c.run(ctx, in, in.Authority, in.Candidate, config, &baseline)
	if err != nil {
		return Verdict{}, err
	}
	if reason != "" {
		v.Reason = reason
		return v, nil
	}
	v.Report, v.Findings = answer.GetReport(), findings(answer)
	v.All = digest.Digest(answer.GetAllFindings().GetDigest())
	if v.Receipt, err = c.keep(ctx, v.Report); err != nil {
		return Verdict{}, err
	}
	v.Outcome, v.Reason = Judge(Question{Layer: in.Layer.Name, Tree: in.Candidate.Tree, Config: config.Digest, Required: in.Layer.Required}, v.Report)
	return v, nil
}

func (in In) tell(what string) {
	if in.Progress != nil {
		in.Progress(what)
	}
}

func (in In) check() error {
	for _, a := range []dispatch.Authority{in.Authority, in.BaseAuthority} {
		g := a.Grant
		if err := g.Validate(); err != nil {
			return err
		}
		switch {
		case a.Actor.Kind != identity.KindReviewerAgent:
			return fmt.Errorf("a %s may not verify, only a reviewer-agent (P-162)", a.Actor.Kind)
		case g.Actor != a.Actor:
			return errors.New("the grant was given to another actor")
		case len(a.Change.Authors) == 0:
			return errors.New("the authors of the Change are not known")
		case a.Change.IsAuthor(a.Actor.Principal, a.Actor.Run):
			return fmt.Errorf("%s or its run is an author of the Change (P-163, P-164)", a.Actor.Principal)
		case len(g.Egress) > 0 || len(g.Credentials) > 0:
			return errors.New("a verifier has neither egress nor credentials (P-166)")
		}
	}
	switch {
	case in.Authority.Actor.Run == in.BaseAuthority.Actor.Run:
		return errors.New("the runs on base and candidate have one id; a run has one sandbox")
	case in.Candidate.Tree == "" || in.Candidate.Commit == "" || in.Base.Tree == "" || in.Base.Commit == "":
		return errors.New("candidate and base need a commit and a tree each")
	case len(in.Layer.Required) == 0:
		return errors.New("no check is required; name at least one")
	case in.Deadline.IsZero():
		return errors.New("a verification needs a deadline")
	}
	return nil
}

// baseline returns the report of the layer on the base revision. It depends on
// nothing but that revision and the configuration, and is run once.
func (c *Context) baseline(ctx context.Context, in In, config blob.Ref) (blob.Ref, string, error) {
	key, err := digest.OfCanonical(map[string]any{
		"tree": in.Base.Tree, "config": string(config.Digest), "layer": in.Layer.Name, "provider": in.Layer.Provider,
		"settings": string(in.Layer.Settings),
	})
	if err != nil {
		return blob.Ref{}, "", err
	}
	c.mu.Lock()
	known, ok := c.baselines[key]
	c.mu.Unlock()
	if ok {
		return known, "", nil
	}
	in.tell("checking the base revision")
	answer, reason, err := c.run(ctx, in, in.BaseAuthority, in.Base, config, nil)
	if err != nil || reason != "" {
		return blob.Ref{}, reason, err
	}
	report := answer.GetReport()
	if report.GetCandidateTree() != in.Base.Tree || report.GetConfigDigest() != string(config.Digest) || report.GetLayer() != in.Layer.Name {
		return blob.Ref{}, "the report is about something else", nil
	}
	ref, err := c.keep(ctx, report)
	if err != nil {
		return blob.Ref{}, "", err
	}
	c.mu.Lock()
	c.baselines[key] = ref
	c.mu.Unlock()
	return ref, "", nil
}

// keep stores a report in its canonical form.
func (c *Context) keep(ctx context.Context, r *verifierv1.VerifierReport) (blob.Ref, error) {
	raw, err := protojson.Marshal(r)
	if err != nil {
		return blob.Ref{}, fmt.Errorf("encode the report: %w", err)
	}
	canonical, err := digest.Canonical(json.RawMessage(raw))
	if err != nil {
		return blob.Ref{}, fmt.Errorf("encode the report: %w", err)
	}
	ref, err := c.Blobs.PutBytes(ctx, canonical)
	if err != nil {
		return blob.Ref{}, fmt.Errorf("keep the report: %w", err)
	}
	return ref, nil
}

// cleanup bounds what happens after the run's own time.
const cleanup = 30 * time.Second

// run has one revision checked in a sandbox of its own. reason says why there is
// no report, when that is the checks' doing.
func (c *Context) run(ctx context.Context, in In, a dispatch.Authority, of Revision, config blob.Ref, baseline *blob.Ref) (answer *verifierv1.RunResponse, reason string, err error) {
	a.Caller = ports.CallerVerification
	wall := in.Deadline.Sub(c.Now())
	if wall <= 0 {
		return nil, "the time for verification is over", nil
	}
	ctx, cancel := context.WithTimeout(ctx, wall)
	defer cancel()
	box, err := c.Sandboxes.Create(ctx, SandboxSpec{Authority: a, Revision: of.Commit, WallTime: wall + cleanup})
	if err != nil {
		return nil, "", fmt.Errorf("run %s: create the verifier's sandbox: %w", a.Actor.Run, err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanup)
		defer cancel()
		if derr := box.Destroy(ctx); derr != nil {
			err = errors.Join(err, fmt.Errorf("run %s: destroy the verifier's sandbox: %w", a.Actor.Run, derr))
		}
	}()
	verifier, err := c.Verifiers.Launch(ctx, box, Launch{Provider: in.Layer.Provider, Authority: a, Config: in.Layer.Settings})
	if err != nil {
		return nil, "", fmt.Errorf("run %s: start the verifier %s: %w", a.Actor.Run, in.Layer.Provider, err)
	}
	defer func() {
		if cerr := verifier.Close(); cerr != nil && !errors.Is(cerr, io.EOF) {
			err = errors.Join(err, fmt.Errorf("run %s: close the verifier: %w", a.Actor.Run, cerr))
		}
	}()
	request := &verifierv1.RunRequest{
		ChangeId: string(a.Change.ID), RunId: string(a.Actor.Run), Layer: in.Layer.Name, CandidateTree: of.Tree,
		ConfigRef: reference(config, "application/json"),
	}
	if baseline != nil {
		request.BaselineRef = reference(*baseline, "application/json")
	}
	answer, err = verifierv1.NewVerifierServiceClient(c.Dispatcher.Via(a, verifier.Provider())).Run(ctx, request)
	if err == nil {
		return answer, "", nil
	}
	var failed *dispatch.FailedError
	var partial *dispatch.PartialError
	var unsettled *dispatch.UnsettledError
	switch {
	case errors.As(err, &failed):
		return nil, fmt.Sprintf("the checks did not complete (%s): %s", failed.Code, failed.Message), nil
	case errors.As(err, &partial):
		return nil, "the verifier left no report as evidence (P-174)", nil
	case errors.As(err, &unsettled) && context.Cause(ctx) != nil:
		return nil, "the checks did not complete in time", nil
	}
	return nil, "", fmt.Errorf("run %s: %w", a.Actor.Run, err)
}

func reference(r blob.Ref, media string) *pluginv1.BlobRef {
	return &pluginv1.BlobRef{Digest: string(r.Digest), SizeBytes: r.Size, MediaType: media}
}

func findings(r *verifierv1.RunResponse) []Finding {
	var out []Finding
	for _, f := range r.GetFindings() {
		out = append(out, Finding{
			Check:    f.GetCheck(),
			Rule:     untrusted.New("verifier", []byte(f.GetRule()), 256),
			Severity: f.GetSeverity().String()[len("SEVERITY_"):],
			Path:     untrusted.New("verifier", []byte(f.GetPath()), 4096),
			Line:     int(f.GetLine()),
			Message:  untrusted.New("verifier", []byte(f.GetMessage()), 1024),
		})
	}
	return out
}
