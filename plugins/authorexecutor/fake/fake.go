package fake

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	authorexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
	"github.com/numinance/numinance/sdk"
)

// Version is the adapter's own version.
const Version = "1.0.0"

// ExecutorID is the name by which playbooks and grants know the adapter.
const ExecutorID = "fake"

// Config is the provider's configuration in the handshake. Exactly one of
// Script and ScriptRef is set; the handshake holds at most 64 KiB, so that a
// longer script travels as a blob.
type Config struct {
	Script      string            `json:"script,omitempty"`
	ScriptRef   *BlobRef          `json:"script_ref,omitempty"`
	WorkRoot    string            `json:"work_root,omitempty"`   // absolute; empty is /workspace
	Proxy       string            `json:"proxy,omitempty"`       // URL of the egress proxy; empty is http://127.0.0.1:3128
	Environment map[string]string `json:"environment,omitempty"` // of each command, over the defaults
	Attempt     int               `json:"attempt,omitempty"`     // 1 for the first run of the work unit
	Resume      string            `json:"resume,omitempty"`      // label of the checkpoint that this run starts from
}

// BlobRef stands for bytes that the host holds.
type BlobRef struct {
	Digest string `json:"digest"`
	Size   int64  `json:"size"`
}

// Plugin is the adapter as the host starts it.
func Plugin() sdk.Plugin {
	return sdk.Plugin{
		Manifest: &pluginv1.Manifest{
			ExtensionId: "dev.numinance.embedded/authorexecutor-fake",
			Version:     Version,
			Port:        "authorexecutor",
			SpecVersion: "1.0.0",
			Verbs:       []string{"Capabilities", "Execute", "Plan"},
			Description: "Does what a script says: a deterministic executor without a model.",
		},
		Open: func(ctx context.Context, s *sdk.Session) (sdk.Register, error) {
			a, err := open(s)
			if err != nil {
				return nil, err
			}
			return func(r grpc.ServiceRegistrar) { authorexecutorv1.RegisterAuthorExecutorServiceServer(r, a) }, nil
		},
	}
}

// adapter is one opened fake.
type adapter struct {
	authorexecutorv1.UnimplementedAuthorExecutorServiceServer
	config Config
	host   *sdk.Host
	now    func() time.Time
	// ownProcess is true where the plugin is a process of its own, which a crash
	// step may kill.
	ownProcess bool
}

func open(s *sdk.Session) (*adapter, error) {
	a := &adapter{host: s.Host, now: time.Now}
	_, a.ownProcess = os.LookupEnv(sdk.EnvPluginSocket)
	if len(bytes.TrimSpace(s.Config)) > 0 {
		dec := json.NewDecoder(bytes.NewReader(s.Config))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&a.config); err != nil {
			return nil, fmt.Errorf("configuration: %w", err)
		}
	}
	c := &a.config
	if c.Script != "" && c.ScriptRef != nil {
		return nil, errors.New("configuration: give script or script_ref, not both")
	}
	if c.WorkRoot == "" {
		c.WorkRoot = "/workspace"
	}
	if !path.IsAbs(c.WorkRoot) {
		return nil, fmt.Errorf("configuration: work_root %q is not absolute", c.WorkRoot)
	}
	if c.Proxy == "" {
		c.Proxy = "http://127.0.0.1:3128"
	}
	c.Attempt = max(c.Attempt, 1)
	if c.Script != "" {
		// A script that does not parse is refused before a run begins.
		if _, err := Parse([]byte(c.Script)); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// script returns the run's script; without one the run changes nothing and the
// reviewer approves.
func (a *adapter) script(ctx context.Context) (Script, error) {
	text := []byte(a.config.Script)
	if r := a.config.ScriptRef; r != nil {
		var err error
		text, err = a.host.ReadBlob(ctx, &pluginv1.BlobRef{Digest: r.Digest, SizeBytes: r.Size}, MaxScriptBytes)
		if err != nil {
			return Script{}, fmt.Errorf("read the script: %w", err)
		}
	}
	if len(text) == 0 {
		return Script{Reviewer: Review{Approve: true}}, nil
	}
	script, err := Parse(text)
	if err != nil {
		return Script{}, status.Error(codes.InvalidArgument, err.Error())
	}
	return script, nil
}

// Capabilities claims what the steps of a script need.
func (a *adapter) Capabilities(context.Context, *authorexecutorv1.CapabilitiesRequest) (*authorexecutorv1.CapabilitiesResponse, error) {
	return &authorexecutorv1.CapabilitiesResponse{
		ExecutorId: ExecutorID,
		Version:    Version,
		Capabilities: []authorexecutorv1.ExecutorCapability{
			authorexecutorv1.ExecutorCapability_EXECUTOR_CAPABILITY_FILESYSTEM_READ,
			authorexecutorv1.ExecutorCapability_EXECUTOR_CAPABILITY_FILESYSTEM_WRITE,
			authorexecutorv1.ExecutorCapability_EXECUTOR_CAPABILITY_SHELL,
			authorexecutorv1.ExecutorCapability_EXECUTOR_CAPABILITY_NETWORK,
			authorexecutorv1.ExecutorCapability_EXECUTOR_CAPABILITY_STRUCTURED_PLAN,
			authorexecutorv1.ExecutorCapability_EXECUTOR_CAPABILITY_APPROVAL_CALLBACKS,
		},
	}, nil
}

// Execute runs the steps of the run's work unit, or the reviewer's part of the
// script for a run of a reviewer-agent.
func (a *adapter) Execute(r *authorexecutorv1.ExecuteRequest, out grpc.ServerStreamingServer[authorexecutorv1.ExecuteResponse]) error {
	ctx := out.Context()
	script, err := a.script(ctx)
	if err != nil {
		return err
	}
	ev := &events{now: a.now, send: func(e *authorexecutorv1.ExecutionEvent) error {
		return out.Send(&authorexecutorv1.ExecuteResponse{Event: e})
	}}
	run := &run{adapter: a, events: ev, request: r.GetRequest(), reviewer: reviewing(ctx)}
	if run.reviewer {
		return run.review(ctx, script.Reviewer)
	}
	steps, ok := script.StepsOf(r.GetRequest().GetWorkUnitId())
	if !ok {
		return status.Errorf(codes.InvalidArgument, "the script has no work unit %q", r.GetRequest().GetWorkUnitId())
	}
	return run.execute(ctx, steps)
}

// Plan gives the script's work units as a structured plan.
func (a *adapter) Plan(r *authorexecutorv1.PlanRequest, out grpc.ServerStreamingServer[authorexecutorv1.PlanResponse]) error {
	ctx := out.Context()
	script, err := a.script(ctx)
	if err != nil {
		return err
	}
	ev := &events{now: a.now, send: func(e *authorexecutorv1.ExecutionEvent) error {
		return out.Send(&authorexecutorv1.PlanResponse{Event: e})
	}}
	run := &run{adapter: a, events: ev, request: r.GetRequest()}
	return run.plan(ctx, script)
}

func reviewing(ctx context.Context) bool {
	return sdk.Action(ctx).GetActorKind() == pluginv1.ActorKind_ACTOR_KIND_REVIEWER_AGENT
}

// environment is the whole environment of a command.
func (a *adapter) environment() map[string]string {
	env := map[string]string{
		"PATH":       "/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME":       "/tmp",
		"LANG":       "C.UTF-8",
		"HTTP_PROXY": a.config.Proxy, "http_proxy": a.config.Proxy,
		"HTTPS_PROXY": a.config.Proxy, "https_proxy": a.config.Proxy,
		// The work tree belongs to another uid than the agent's.
		"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
	}
	maps.Copy(env, a.config.Environment)
	return env
}

// maxOutput bounds what is kept of a command's output; the rest is dropped.
const maxOutput = 1 << 20

// spawned is how a command ended.
type spawned struct {
	exit   int
	signal uint32
	limit  string
	output []byte // stdout and stderr as they came, cut at maxOutput
}

// spawn runs one command at the agent's uid under a decision.
func (a *adapter) spawn(ctx context.Context, decision string, stdin []byte, argv ...string) (spawned, error) {
	timeout := time.Hour
	if d, ok := ctx.Deadline(); ok {
		timeout = min(timeout, time.Until(d))
	}
	p, err := a.host.Spawn(ctx, &pluginv1.SpawnStart{
		Argv:             argv,
		Environment:      a.environment(),
		WorkingDirectory: a.config.WorkRoot,
		User:             pluginv1.ProcessUser_PROCESS_USER_AGENT,
		DecisionId:       decision,
		Timeout:          duration(timeout),
	})
	if err != nil {
		return spawned{}, err
	}
	go func() {
		// A process that does not read its input ends all the same.
		_, _ = p.Stdin.Write(stdin)
		_ = p.Stdin.Close()
	}()
	kept := &kept{limit: maxOutput}
	drained := make(chan error, 1)
	go func() {
		_, err := io.Copy(kept, p.Stderr)
		drained <- err
	}()
	_, err = io.Copy(kept, p.Stdout)
	err = errors.Join(err, <-drained)
	exit, werr := p.Wait()
	if werr != nil {
		return spawned{}, werr
	}
	if err != nil {
		return spawned{}, fmt.Errorf("read the output of %s: %w", path.Base(argv[0]), err)
	}
	return spawned{exit: int(exit.GetExitCode()), signal: exit.GetSignal(), limit: exit.GetLimit(), output: kept.bytes()}, nil
}

// crash ends the adapter as a harness that dies does: without an end of the
// stream. Where the plugin is not a process of its own only its call ends.
func (a *adapter) crash() error {
	if a.ownProcess {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	return status.Error(codes.Aborted, "the harness crashed, as its script says")
}

func lastLine(b []byte) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return lines[len(lines)-1]
}
