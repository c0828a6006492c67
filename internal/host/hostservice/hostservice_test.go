package hostservice_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	knowledgev1 "github.com/numinance/numinance/gen/numinance/ports/knowledge/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/tlog"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/bridge"
	"github.com/numinance/numinance/internal/host/broker"
	"github.com/numinance/numinance/internal/host/hostservice"
	"github.com/numinance/numinance/internal/host/pluginhost"
	"github.com/numinance/numinance/sdk"
)

// recorder keeps refusals.
type recorder struct {
	mu  sync.Mutex
	all []hostservice.Refusal
	err error

	processes []hostservice.Process
}

func (r *recorder) Process(_ context.Context, p hostservice.Process) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.processes = append(r.processes, p)
	return r.err
}

func (r *recorder) Refused(_ context.Context, x hostservice.Refusal) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, x)
	return r.err
}

func (r *recorder) asked() (out []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, x := range r.all {
		out = append(out, x.Asked+" "+x.Subject)
	}
	return out
}

// session serves a plugin with the given authority over the real wire and
// returns the plugin's side of it.
func session(t *testing.T, c hostservice.Config) *sdk.Host {
	t.Helper()
	var host *sdk.Host
	p := sdk.Plugin{
		Manifest: &pluginv1.Manifest{ExtensionId: "dev.numinance.test/k", Version: "1", Port: "knowledge", SpecVersion: "1.0.0", Verbs: []string{"Search", "Fetch", "Resolve"}},
		Open: func(_ context.Context, s *sdk.Session) (sdk.Register, error) {
			host = s.Host
			return func(r grpc.ServiceRegistrar) {
				knowledgev1.RegisterKnowledgeServiceServer(r, knowledgev1.UnimplementedKnowledgeServiceServer{})
			}, nil
		},
	}
	c.Plugin = "dev.numinance.test/k"
	svc, err := hostservice.New(c)
	if err != nil {
		t.Fatal(err)
	}
	plugin, err := pluginhost.Start(t.Context(), pluginhost.Config{
		Expect:   pluginhost.Expectation{Port: "knowledge", Unpinned: true},
		Launcher: pluginhost.Memory{New: func(h grpc.ClientConnInterface) (pluginv1.PluginServiceServer, error) { return sdk.NewService(p, h) }},
		Host:     func(*pluginhost.Plugin) pluginv1.HostServiceServer { return svc },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { plugin.Close() })
	return host
}

// The zero authority allows nothing, and every refusal is recorded.
func TestZeroAuthorityRefusesAll(t *testing.T) {
	r := &recorder{}
	h := session(t, hostservice.Config{Refusals: r})
	ctx := t.Context()
	d := string(digest.Of([]byte("x")))
	start := &pluginv1.SpawnStart{Argv: []string{"true"}, WorkingDirectory: "/", User: pluginv1.ProcessUser_PROCESS_USER_AGENT, Timeout: durationpb.New(time.Second)}
	for name, call := range map[string]func() error{
		"decide": func() error {
			_, err := h.Decide(ctx, &pluginv1.DecideRequest{Tool: "run", InputDigest: d})
			return err
		},
		"get-blob":   func() error { _, err := h.ReadDigest(ctx, d, 10); return err },
		"put-blob":   func() error { _, err := h.PutBytes(ctx, []byte("x"), ""); return err },
		"checkpoint": func() error { _, err := h.Checkpoint(ctx, "x"); return err },
		"sign":       func() error { _, err := h.Sign(ctx, hostservice.IntentCheckpoint, []byte("x")); return err },
		"credential": func() error { _, err := h.Credential(ctx, "model"); return err },
		"spawn":      func() error { _, err := h.Spawn(ctx, start); return err },
	} {
		if err := call(); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s: got %v, want PERMISSION_DENIED", name, err)
		}
		if !slices.ContainsFunc(r.asked(), func(s string) bool { return strings.HasPrefix(s, name+" ") }) {
			t.Errorf("%s: no record in %v", name, r.asked())
		}
	}
}

// P-130: what the plugin may not resolve is refused with a record, whether it
// exists or not; a refusal that cannot be recorded is one all the same.
func TestGetBlob(t *testing.T) {
	store, err := blob.Open(blob.Config{Dir: t.TempDir(), Quota: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	yes, err := store.PutBytes(t.Context(), bytes.Repeat([]byte("yes"), 50000))
	if err != nil {
		t.Fatal(err)
	}
	no, err := store.PutBytes(t.Context(), []byte("no"))
	if err != nil {
		t.Fatal(err)
	}
	gone := digest.Of([]byte("gone"))
	r := &recorder{err: errors.New("disk full")}
	h := session(t, hostservice.Config{Blobs: store, Refusals: r, Readable: func(d digest.Digest) bool { return d == yes.Digest || d == gone }})
	b, err := h.ReadBlob(t.Context(), &pluginv1.BlobRef{Digest: string(yes.Digest), SizeBytes: yes.Size}, 1<<20)
	if err != nil || len(b) != 150000 {
		t.Fatalf("got %d bytes, %v", len(b), err)
	}
	_, forbidden := h.ReadDigest(t.Context(), string(no.Digest), 1<<20)
	_, absent := h.ReadDigest(t.Context(), string(digest.Of([]byte("never stored"))), 1<<20)
	if status.Code(forbidden) != codes.PermissionDenied || status.Code(absent) != codes.PermissionDenied {
		t.Errorf("got %v and %v, want PERMISSION_DENIED twice", forbidden, absent)
	}
	if !strings.Contains(forbidden.Error(), "could not be recorded") || len(r.asked()) != 2 {
		t.Errorf("got %v, records %v", forbidden, r.asked())
	}
	if _, err := h.ReadDigest(t.Context(), string(gone), 10); status.Code(err) != codes.NotFound {
		t.Errorf("a lost blob: got %v, want NOT_FOUND", err)
	}
}

func TestPutBlobQuota(t *testing.T) {
	store, err := blob.Open(blob.Config{Dir: t.TempDir(), Quota: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	r := &recorder{}
	h := session(t, hostservice.Config{Put: store.Account(100_000), MaxBlob: 90_000, Refusals: r})
	ref, err := h.PutBytes(t.Context(), bytes.Repeat([]byte("a"), 80_000), "text/plain")
	if err != nil || ref.GetSizeBytes() != 80_000 {
		t.Fatalf("got %v, %v", ref, err)
	}
	for _, n := range []int{30_000, 95_000} {
		if _, err := h.PutBytes(t.Context(), bytes.Repeat([]byte("b"), n), ""); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("%d bytes more: got %v, want RESOURCE_EXHAUSTED", n, err)
		}
	}
	if len(r.asked()) != 2 {
		t.Errorf("records %v, want two", r.asked())
	}
	// A call that breaks off never becomes a blob.
	ctx, cancel := context.WithCancel(t.Context())
	before := store.Used()
	pr, pw := io.Pipe()
	go func() {
		_, _ = pw.Write(bytes.Repeat([]byte("c"), 10))
		cancel()
		pw.CloseWithError(errors.New("plugin died"))
	}()
	if _, err := h.PutBlob(ctx, pr, ""); err == nil || store.Used() != before {
		t.Errorf("a broken put: %v, used %d, before %d", err, store.Used(), before)
	}
}

// Only ALLOW allows; reasons and the way to ask reach the adapter.
func TestDecide(t *testing.T) {
	var got policy.Tool
	answer := policy.Decision{ID: "dec-1"}
	h := session(t, hostservice.Config{Decide: func(_ context.Context, tool policy.Tool) (policy.Decision, error) {
		got = tool
		if tool.Name == "broken" {
			return policy.Decision{ID: "dec-2", Effect: policy.Allow}, errors.New("journal down")
		}
		return answer, nil
	}})
	in := digest.Of([]byte("intent"))
	req := &pluginv1.DecideRequest{Tool: "run", Argv: []string{"git", "push"}, Path: "a/b", Host: "h:1", Intent: "i", InputDigest: string(in)}
	for effect, want := range map[policy.Effect]pluginv1.DecisionEffect{
		policy.Deny: pluginv1.DecisionEffect_DECISION_EFFECT_DENY, policy.Allow: pluginv1.DecisionEffect_DECISION_EFFECT_ALLOW,
		policy.Escalate: pluginv1.DecisionEffect_DECISION_EFFECT_ESCALATE, 77: pluginv1.DecisionEffect_DECISION_EFFECT_DENY,
	} {
		answer = policy.Decision{ID: "dec-1", Effect: effect, Ask: "ask alice", Reasons: []policy.Reason{{Layer: "floor", ID: "x", Text: strings.Repeat("ü", 600)}}}
		r, err := h.Decide(t.Context(), req)
		if err != nil || r.GetEffect() != want || r.GetAsk() != "ask alice" || len(r.GetReasons()) != 1 {
			t.Errorf("effect %d: got %v, %v, want %v", effect, r, err, want)
		}
	}
	if got.Name != "run" || got.Path != "a/b" || got.Host != "h:1" || got.Intent != "i" || len(got.Argv) != 2 || got.Input != in {
		t.Errorf("the tool intent arrived as %+v", got)
	}
	if r, err := h.Decide(t.Context(), &pluginv1.DecideRequest{Tool: "broken", InputDigest: string(in)}); err == nil {
		t.Errorf("an error beside an ALLOW: got %v, want a failure", r)
	}
	if _, err := h.Decide(t.Context(), &pluginv1.DecideRequest{Tool: "run"}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("without a digest: got %v, want INVALID_ARGUMENT", err)
	}
}

// P-043: a handle needs a declared intent, and the log's key signs only growth.
func TestBrokerIsBehind(t *testing.T) {
	b, err := broker.Open(broker.Config{Dir: filepath.Join(t.TempDir(), "keys"), Log: "log.test", Head: "head.test"})
	if err != nil {
		t.Fatal(err)
	}
	r := &recorder{}
	h := session(t, hostservice.Config{Sign: b, Credentials: b, Intents: []string{"declared"}, Refusals: r})
	if _, err := h.Credential(t.Context(), "undeclared"); status.Code(err) != codes.PermissionDenied {
		t.Errorf("undeclared: got %v, want PERMISSION_DENIED", err)
	}
	if _, err := h.Credential(t.Context(), "declared"); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("declared without a credential: got %v, want FAILED_PRECONDITION", err)
	}
	text := func(n int64) []byte {
		return []byte(tlog.Checkpoint{Origin: "log.test", Size: n, Root: tlog.Hash{1}}.Text())
	}
	if sig, err := h.Sign(t.Context(), hostservice.IntentCheckpoint, text(5)); err != nil || sig.GetKeyName() != "log.test" {
		t.Errorf("sign: %v, %v", sig, err)
	}
	if _, err := h.Sign(t.Context(), hostservice.IntentCheckpoint, text(4)); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a smaller log: got %v, want FAILED_PRECONDITION", err)
	}
	if _, err := h.Sign(t.Context(), "anything", text(6)); status.Code(err) != codes.PermissionDenied {
		t.Errorf("another intent: got %v, want PERMISSION_DENIED", err)
	}
	if n := len(r.asked()); n != 4 {
		t.Errorf("%d records, want 4: %v", n, r.asked())
	}
}

func TestLogLineIsQuoted(t *testing.T) {
	var out bytes.Buffer
	h := session(t, hostservice.Config{Log: &out})
	h.Log(t.Context(), pluginv1.LogLevel_LOG_LEVEL_WARN, "a\nroot: \x1b[31mforged")
	if got := out.String(); got != "dev.numinance.test/k warn \"a\\nroot: \\x1b[31mforged\"\n" {
		t.Errorf("got %q", got)
	}
}

// A process of the agent needs a decision that is good once; a process of the
// candidate needs a verifier. The process itself runs behind a real bridge.
func TestSpawn(t *testing.T) {
	b, err := bridge.Listen(shortDir(t))
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	go pidOne(b.Dir())
	if err := b.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	used := map[identity.DecisionID]bool{}
	r := &recorder{}
	h := session(t, hostservice.Config{Spawn: b.Spawn, Refusals: r, Processes: r, Change: "chg-0123456789", Run: "run-1", AgentSpawn: func(id identity.DecisionID, argv []string) error {
		if id != "dec-ok" || used[id] || len(argv) != 3 {
			return errors.New("no decision of this run allows it")
		}
		used[id] = true
		return nil
	}})
	start := func(id string, u pluginv1.ProcessUser) *pluginv1.SpawnStart {
		return &pluginv1.SpawnStart{Argv: []string{"/bin/sh", "-c", "cat; echo $V >&2; exit 4"}, Environment: map[string]string{"V": "42"},
			WorkingDirectory: "/", User: u, DecisionId: id, Timeout: durationpb.New(20 * time.Second)}
	}
	const agent, candidate = pluginv1.ProcessUser_PROCESS_USER_AGENT, pluginv1.ProcessUser_PROCESS_USER_CANDIDATE
	for _, bad := range []*pluginv1.SpawnStart{start("", agent), start("dec-no", agent), start("dec-ok", candidate)} {
		if _, err := h.Spawn(t.Context(), bad); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%v with %q: got %v, want PERMISSION_DENIED", bad.GetUser(), bad.GetDecisionId(), err)
		}
	}
	p, err := h.Spawn(t.Context(), start("dec-ok", agent))
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.WriteString(p.Stdin, "through"); p.Stdin.Close() }()
	errText := make(chan string, 1)
	go func() { b, _ := io.ReadAll(p.Stderr); errText <- string(b) }()
	out, err := io.ReadAll(p.Stdout)
	exit, werr := p.Wait()
	if err != nil || werr != nil || string(out) != "through" || <-errText != "42\n" || exit.GetExitCode() != 4 {
		t.Fatalf("got %q, %v, %v, %v", out, exit, err, werr)
	}
	if _, err := h.Spawn(t.Context(), start("dec-ok", agent)); status.Code(err) != codes.PermissionDenied {
		t.Errorf("the decision again: got %v, want PERMISSION_DENIED", err)
	}
	if n := len(r.asked()); n != 4 {
		t.Errorf("%d records, want 4: %v", n, r.asked())
	}
	// P-138: what was started is recorded before it starts and when it has ended.
	command, err := digest.OfCanonical(map[string]any{"argv": start("dec-ok", agent).GetArgv()})
	if err != nil {
		t.Fatal(err)
	}
	want := hostservice.Process{
		Plugin: "dev.numinance.test/k", Change: "chg-0123456789", Run: "run-1", Decision: "dec-ok", User: "agent", Program: "/bin/sh", Command: command,
	}
	ended := want
	ended.Ended, ended.Exit = true, 4
	if len(r.processes) == 2 && r.processes[1].PID > 0 {
		ended.PID = r.processes[1].PID
	}
	if !slices.Equal(r.processes, []hostservice.Process{want, ended}) {
		t.Errorf("receipts %+v, want %+v and its end with a pid", r.processes, want)
	}
	used, r.err = map[identity.DecisionID]bool{}, errors.New("disk full")
	if _, err := h.Spawn(t.Context(), start("dec-ok", agent)); status.Code(err) != codes.Unavailable || len(r.processes) != 3 {
		t.Errorf("a process that cannot be recorded: %v, %d receipts", err, len(r.processes))
	}
	r.err = nil
	b.Close()
	used = map[identity.DecisionID]bool{}
	if _, err := h.Spawn(t.Context(), start("dec-ok", agent)); status.Code(err) != codes.Unavailable {
		t.Errorf("after the run: got %v, want UNAVAILABLE", err)
	}
}

func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "numi-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// pidOne stands at the other end of the bridge: it carries out one order a
// connection with a real process.
func pidOne(dir string) {
	for {
		sockets, _ := filepath.Glob(filepath.Join(dir, "*.sock"))
		if len(sockets) == 0 {
			return
		}
		c, err := net.Dial("unix", sockets[0])
		if err != nil {
			return
		}
		_, _ = c.Write(bridge.Preamble(bridge.KindControl))
		r := bufio.NewReader(c)
		o, err := bridge.ReadOrder(r)
		if err != nil {
			c.Close()
			return
		}
		go carryOut(c, r, o)
	}
}

func carryOut(c net.Conn, r *bufio.Reader, o bridge.Order) {
	defer c.Close()
	cmd := exec.Command(o.Command.Argv[0], o.Command.Argv[1:]...)
	cmd.Env, cmd.Dir = o.Command.Env, o.Command.Dir
	in, _ := cmd.StdinPipe()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Start(); err != nil {
		_ = bridge.WriteFrame(c, bridge.FrameFailed, []byte(err.Error()))
		return
	}
	_ = bridge.WriteFrame(c, bridge.FrameStarted, binary.BigEndian.AppendUint32(nil, uint32(cmd.Process.Pid)))
	go func() {
		for {
			f, b, err := bridge.ReadFrame(r)
			if err != nil || f == bridge.FrameStdinEOF {
				in.Close()
				return
			}
			if f == bridge.FrameStdin {
				_, _ = in.Write(b)
			}
		}
	}()
	_ = cmd.Wait()
	_ = bridge.WriteFrame(c, bridge.FrameStdout, stdout.Bytes())
	_ = bridge.WriteFrame(c, bridge.FrameStdoutEOF, nil)
	_ = bridge.WriteFrame(c, bridge.FrameStderr, stderr.Bytes())
	_ = bridge.WriteFrame(c, bridge.FrameStderrEOF, nil)
	e, _ := json.Marshal(bridge.Exit{Code: cmd.ProcessState.ExitCode()})
	_ = bridge.WriteFrame(c, bridge.FrameExit, e)
}
