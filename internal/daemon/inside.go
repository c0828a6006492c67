package daemon

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/numinance/numinance/internal/contexts/execution"
	"github.com/numinance/numinance/internal/contexts/sandbox"
	"github.com/numinance/numinance/internal/contexts/verification"
	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/bridge"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/host/hostservice"
	"github.com/numinance/numinance/internal/host/pluginhost"
	"github.com/numinance/numinance/internal/orchestration"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
)

// Where the program that serves adapters and verifiers appears in a sandbox.
const (
	programsInside = "/opt/numi/bin"
	programInside  = programsInside + "/numi"
)

// quotaInside bounds what one plugin inside a sandbox may leave with the host.
const quotaInside = 256 << 20

// adapterProgram is a directory that holds a copy of this very binary, named by
// its digest, and nothing else.
func (d *Daemon) adapterProgram() sandbox.Mount {
	return sandbox.Mount{Source: d.programDir, Target: programsInside}
}

// keepProgram copies this binary to where sandboxes find it. A copy whose digest
// is another is made again.
func (d *Daemon) keepProgram() error {
	want, err := measure(d.program)
	if err != nil {
		return err
	}
	d.programDir = d.home.at("programs", want.Hex()[:16])
	to := filepath.Join(d.programDir, "numi")
	if have, err := measure(to); err == nil && have == want {
		return nil
	}
	if err := os.MkdirAll(d.programDir, 0o755); err != nil {
		return fmt.Errorf("keep this program for sandboxes: %w", err)
	}
	b, err := os.ReadFile(d.program)
	if err != nil {
		return fmt.Errorf("keep this program for sandboxes: %w", err)
	}
	if digest.Of(b) != want {
		return errors.New("keep this program for sandboxes: it changed while it was read; start again")
	}
	tmp := to + ".new"
	if err := os.WriteFile(tmp, b, 0o755); err != nil {
		return fmt.Errorf("keep this program for sandboxes: %w", err)
	}
	return os.Rename(tmp, to)
}

// inside is a plugin that runs in a sandbox.
type inside struct {
	plugin  *pluginhost.Plugin
	process *bridge.Process
}

func (i *inside) Provider() dispatch.Provider { return i.plugin }

// Close ends the plugin and every call of it. The sandbox's end would do so too.
func (i *inside) Close() error {
	err := i.plugin.Close()
	if serr := i.process.Signal(killSignal); serr != nil && !errors.Is(serr, bridge.ErrOver) {
		err = errors.Join(err, serr)
	}
	return err
}

// launchInside starts a bundled plugin in a sandbox and shakes hands with it.
func (d *Daemon) launchInside(ctx context.Context, b *box, name string, settings []byte, session hostservice.Config) (*inside, error) {
	entry, ok := bundled[name]
	if !ok {
		return nil, &change.Fault{Class: change.Denied, Reason: fmt.Sprintf("there is no bundled plugin %q", name)}
	}
	expect, err := entry.expectation()
	if err != nil {
		return nil, err
	}
	process, err := b.Bridge().Spawn(ctx, bridge.Command{
		Argv: []string{programInside, "plugin", "serve", name}, Dir: "/", UID: bridge.UIDAdapter,
		Env: sandbox.EnvironmentList("/home/adapter", map[string]string{
			"NUMI_PLUGIN_SOCKET": bridge.PluginSocket, "NUMI_HOST_SOCKET": bridge.HostSocket,
		}),
	})
	if err != nil {
		return nil, fmt.Errorf("start %s inside: %w", name, err)
	}
	said := &tail{}
	d.background.Go(func() { _, _ = io.Copy(said, process.Stderr) })
	d.background.Go(func() { _, _ = io.Copy(io.Discard, process.Stdout) })
	session.Plugin, session.Change, session.Run = expect.Extension, b.change, b.run
	session.Spawn = b.Bridge().Spawn
	session.Blobs = d.blobs
	session.Put = d.blobs.Account(quotaInside)
	session.Credentials = d.broker
	recorder := hostservice.Journal{Journal: d.journal}
	session.Refusals, session.Processes = recorder, recorder
	session.Log = d.log
	session.Checker = d.checker
	plugin, err := pluginhost.Start(ctx, pluginhost.Config{
		Launcher: pluginhost.Inside{Bridge: b.Bridge(), Why: said.why}, Expect: expect, Settings: settings, Checker: d.checker,
		StartTimeout: 30 * time.Second,
		Host: func(p *pluginhost.Plugin) pluginv1.HostServiceServer {
			if session.Readable == nil {
				session.Readable = p.Resolvable
			}
			s, err := hostservice.New(session)
			if err != nil {
				return pluginv1.UnimplementedHostServiceServer{}
			}
			return s
		},
	})
	if err != nil {
		return nil, errors.Join(err, process.Signal(killSignal))
	}
	return &inside{plugin: plugin, process: process}, nil
}

// adapters starts the adapter of a run.
type adapters struct{ d *Daemon }

func (a adapters) Launch(ctx context.Context, s execution.Sandbox, l execution.Launch) (execution.Adapter, error) {
	b, ok := s.(*box)
	if !ok {
		return nil, errors.New("the sandbox is none of this runtime")
	}
	desk := l.Desk
	return a.d.launchInside(ctx, b, "authorexecutor/"+l.Executor, l.Config, hostservice.Config{
		Decide:     func(ctx context.Context, t policy.Tool) (policy.Decision, error) { return desk.Decide(ctx, t) },
		AgentSpawn: desk.MaySpawn, Readable: desk.MayRead, MayHold: desk.MayHold,
		Checkpoint: func(ctx context.Context, label string) (blob.Ref, error) {
			ref, err := desk.Checkpoint(ctx, label)
			if err != nil {
				return ref, err
			}
			return ref, a.d.keepCheckpoint(ctx, b.change, b.run, desk.Receipts().Last())
		},
	})
}

// verifiers starts the verifier of a layer.
type verifiers struct{ d *Daemon }

func (v verifiers) Launch(ctx context.Context, s verification.Sandbox, l verification.Launch) (verification.Verifier, error) {
	b, ok := s.(*box)
	if !ok {
		return nil, errors.New("the sandbox is none of this runtime")
	}
	return v.d.launchInside(ctx, b, "verifier/"+l.Provider, l.Config, hostservice.Config{CandidateSpawn: true})
}

// checkDocument is the one configuration that the verifier honours: the
// profile's checks.
func checkDocument(b bound, env map[string]string) (raw []byte, required []string, err error) {
	type check struct {
		Name        string            `json:"name"`
		Argv        []string          `json:"argv"`
		Timeout     string            `json:"timeout,omitempty"`
		Format      string            `json:"format,omitempty"`
		Report      string            `json:"report,omitempty"`
		Environment map[string]string `json:"environment,omitempty"`
	}
	var doc struct {
		Checks []check `json:"checks"`
	}
	for _, c := range b.Profile.GetChecks() {
		one := check{Name: c.GetName(), Argv: c.GetArgv(), Format: checkFormats[c.GetFormat().String()], Report: c.GetReport(), Environment: env}
		if c.GetTimeout() != nil {
			one.Timeout = c.GetTimeout().AsDuration().String()
		}
		doc.Checks = append(doc.Checks, one)
		required = append(required, c.GetName())
	}
	raw, err = json.Marshal(doc)
	return raw, required, err
}

var checkFormats = map[string]string{
	"CHECK_FORMAT_EXIT_CODE": "exit", "CHECK_FORMAT_GO_TEST_JSON": "gotest-json", "CHECK_FORMAT_JUNIT": "junit", "CHECK_FORMAT_SARIF": "sarif",
}

// Verify runs the profile's checks on exactly the candidate, after the same
// checks on its base.
func (s steps) Verify(ctx context.Context, j orchestration.Job) (change.Verdict, error) {
	docs, err := s.d.documents(j.State)
	if err != nil {
		return change.Verdict{}, err
	}
	prepared, err := s.d.prepared(ctx, j, docs, sandbox.Candidate)
	if err != nil {
		return change.Verdict{}, fmt.Errorf("prepare the environment: %w", err)
	}
	checks, required, err := checkDocument(docs, prepared.environment)
	if err != nil {
		return change.Verdict{}, err
	}
	budget := verifyBudget
	if wall := docs.budget().Wall; wall > 0 {
		budget.Wall = wall
	}
	a, err := s.d.authority(j, verifies(budget))
	if err != nil {
		return change.Verdict{}, err
	}
	base := j
	base.Command.Run = baseRun(j.Command.Run)
	ba, err := s.d.authority(base, verifies(budget))
	if err != nil {
		return change.Verdict{}, err
	}
	ba.Step += "/base"
	store, err := s.d.objects(ctx, j.State.ID)
	if err != nil {
		return change.Verdict{}, err
	}
	baseTree, err := store.TreeOf(ctx, j.State.Candidate.Base)
	if err != nil {
		return change.Verdict{}, err
	}
	c, err := verification.New(verification.Config{
		Dispatcher: verification.Enforcer{Dispatcher: s.d.dispatcher}, Sandboxes: verificationBoxes{boxes{s.d, j, docs}},
		Verifiers: verifiers(s), Blobs: s.d.blobs, Now: s.d.now,
	})
	if err != nil {
		return change.Verdict{}, err
	}
	v, err := c.Verify(ctx, verification.In{
		Layer:     verification.Layer{Name: "checks", Provider: "command", Checks: checks, Required: required},
		Authority: a, BaseAuthority: ba, Deadline: s.d.now().Add(budget.Wall),
		Candidate: verification.Revision{Commit: j.State.Candidate.Head, Tree: j.State.Candidate.Tree},
		Base:      verification.Revision{Commit: j.State.Candidate.Base, Tree: baseTree},
		Progress:  func(what string) { s.d.tellStage(j.State.ID, what) },
	})
	if err != nil {
		return change.Verdict{}, err
	}
	if v.Outcome == verification.Inconclusive {
		return change.Verdict{}, &change.Fault{Class: change.Unverified, Reason: "verification is inconclusive: " + v.Reason}
	}
	findings, err := json.Marshal(shown(v))
	if err != nil {
		return change.Verdict{}, err
	}
	kept, err := s.d.blobs.PutBytes(ctx, findings)
	if err != nil {
		return change.Verdict{}, fmt.Errorf("keep the findings: %w", err)
	}
	summary := v.Reason
	if v.Outcome == verification.Passed {
		summary = fmt.Sprintf("%d checks passed", len(required))
	}
	return change.Verdict{Passed: v.Outcome == verification.Passed, Tree: v.Tree, Findings: kept.Digest, Report: v.Receipt.Digest, Summary: printable(summary)}, nil
}

// baseRun is the second run of a verification, on the base revision.
func baseRun(of identity.RunID) identity.RunID { return "base-" + of }

// preparingRun is the run of a preparation that another run had to wait for.
func preparingRun(of identity.RunID) identity.RunID { return "prep-" + of }

// shown is what the author of a revision reads of the findings: text between
// marks that name it as data.
func shown(v verification.Verdict) []map[string]any {
	out := []map[string]any{}
	for _, f := range v.Findings {
		out = append(out, map[string]any{
			"check": f.Check, "severity": f.Severity, "line": f.Line,
			"rule": f.Rule.Quoted(), "path": f.Path.Quoted(), "message": f.Message.Quoted(),
		})
	}
	return out
}

const killSignal = syscall.SIGKILL

// tail keeps the end of what a plugin printed, for the person who asks why it
// did not start.
type tail struct {
	mu   sync.Mutex // guards text
	text []byte
}

const tailBytes = 4 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	if over := len(t.text) - tailBytes; over > 0 {
		t.text = t.text[over:]
	}
	return len(p), nil
}

func (t *tail) why() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.text) == 0 {
		return "its sandbox is gone: the run is over"
	}
	return fmt.Sprintf("it said %q", t.text)
}

// measure returns the digest of a program, which mounts are pinned by.
func measure(path string) (digest.Digest, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("measure %s: %w", path, err)
	}
	return digest.FromRaw([32]byte(h.Sum(nil))), nil
}
