package sdk_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	executorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
	ticketingv1 "github.com/numinance/numinance/gen/numinance/ports/ticketing/v1"
	"github.com/numinance/numinance/sdk"
	"github.com/numinance/numinance/sdk/plugintest"
)

// tickets is a small provider whose far side is a file, so that its effects can
// be counted from outside.
type tickets struct {
	ticketingv1.UnimplementedTicketingServiceServer
	session *sdk.Session
	die     func() // between effect and answer, if set
	gate    chan struct{}
}

func (s *tickets) comments() string { return filepath.Join(s.session.DataDir, "comments") }

func (s *tickets) CommentOnIssue(ctx context.Context, r *ticketingv1.CommentOnIssueRequest) (*ticketingv1.CommentOnIssueResponse, error) {
	answer, err := sdk.Once(ctx, s.session.Effects(), r, func(ctx context.Context, again bool) (*ticketingv1.CommentOnIssueResponse, error) {
		have, _ := os.ReadFile(s.comments())
		if !again || !bytes.Contains(have, []byte(r.GetBody()+"\n")) {
			if err := os.WriteFile(s.comments(), append(have, r.GetBody()+"\n"...), 0o600); err != nil {
				return nil, err
			}
		}
		sdk.Attach(ctx, &pluginv1.Evidence{Type: "ticketing-action", Reference: "comment-1"})
		if s.die != nil {
			s.die()
		}
		return &ticketingv1.CommentOnIssueResponse{}, nil
	})
	return answer, err
}

func (s *tickets) LinkIssue(context.Context, *ticketingv1.LinkIssueRequest) (*ticketingv1.LinkIssueResponse, error) {
	return &ticketingv1.LinkIssueResponse{}, nil // without its evidence
}

func (s *tickets) GetIssue(ctx context.Context, r *ticketingv1.GetIssueRequest) (*ticketingv1.GetIssueResponse, error) {
	switch {
	case s.gate != nil:
		s.gate <- struct{}{} // meets its twin, or waits for the deadline
		return &ticketingv1.GetIssueResponse{}, nil
	case r.GetKey() == "PANIC-1":
		panic("secret-value")
	case r.GetKey() == "PLAIN-1":
		return nil, errors.New("no status")
	case r.GetKey() == "NIL-1":
		return nil, nil
	}
	return nil, status.Errorf(codes.NotFound, "no issue %s", strings.Repeat("ü", 4000))
}

func plugin(s *tickets) sdk.Plugin {
	return sdk.Plugin{
		Manifest: &pluginv1.Manifest{
			ExtensionId: "dev.numinance.test/tickets", Version: "1.0.0", Port: "ticketing", SpecVersion: "1.2.0",
			Verbs: []string{"GetIssue", "CommentOnIssue", "TransitionIssue", "LinkIssue"},
		},
		Open: func(_ context.Context, session *sdk.Session) (sdk.Register, error) {
			s.session = session
			return func(r grpc.ServiceRegistrar) { ticketingv1.RegisterTicketingServiceServer(r, s) }, nil
		},
	}
}

// P-016: a provider's status reaches the caller with code and message; anything
// that is no status does not end the process.
func TestStatusReachesTheCaller(t *testing.T) {
	client := ticketingv1.NewTicketingServiceClient(plugintest.Serve(t, plugin(&tickets{}), plugintest.Options{}))
	for _, c := range []struct {
		key  string
		code codes.Code
		text string
	}{
		{"ABC-1", codes.NotFound, "no issue ü"},
		{"PANIC-1", codes.Internal, "panicked"},
		{"PLAIN-1", codes.Unknown, "no status"},
		{"NIL-1", codes.Internal, "neither an answer nor an error"},
	} {
		t.Run(c.key, func(t *testing.T) {
			_, err := client.GetIssue(t.Context(), &ticketingv1.GetIssueRequest{Key: c.key})
			st := status.Convert(err)
			if st.Code() != c.code || !strings.Contains(st.Message(), c.text) || len(st.Message()) > 4096 || strings.Contains(st.Message(), "secret-value") {
				t.Fatalf("got %v: %.80s (%d bytes), want %v with %q", st.Code(), st.Message(), len(st.Message()), c.code, c.text)
			}
		})
	}
}

// P-031: success without declared evidence is PARTIAL.
func TestMissingEvidenceIsPartial(t *testing.T) {
	client := ticketingv1.NewTicketingServiceClient(plugintest.Serve(t, plugin(&tickets{}), plugintest.Options{}))
	ctx, result := plugintest.Capture(t.Context())
	_, err := client.LinkIssue(ctx, &ticketingv1.LinkIssueRequest{})
	var partial *plugintest.PartialError
	if !errors.As(err, &partial) || partial.Missing[0] != "ticketing-action" || result.GetStatus() != pluginv1.ActionStatus_ACTION_STATUS_PARTIAL {
		t.Fatalf("got %v and %v, want a partial result without ticketing-action", err, result)
	}
	if _, err := client.CommentOnIssue(ctx, &ticketingv1.CommentOnIssueRequest{Body: "a"}); err != nil {
		t.Fatalf("with evidence: %v", err)
	}
	if got := result.GetEvidence()[0].GetReference(); got != "comment-1" {
		t.Fatalf("evidence reference %q, want comment-1", got)
	}
}

func count(t *testing.T, dir string) int {
	t.Helper()
	b, _ := os.ReadFile(filepath.Join(dir, "comments"))
	return bytes.Count(b, []byte("\n"))
}

// P-082: the same key twice leaves one effect, in one process and after a kill
// between effect and answer; the same key with another request is refused.
func TestOneEffectPerKey(t *testing.T) {
	dir := t.TempDir()
	dying := &tickets{die: func() { panic("killed here") }}
	ctx, result := plugintest.Capture(plugintest.Key(t.Context(), "key-a"))
	req := &ticketingv1.CommentOnIssueRequest{Key: "ABC-1", Body: "hello"}

	first := ticketingv1.NewTicketingServiceClient(plugintest.Serve(t, plugin(dying), plugintest.Options{DataDir: dir}))
	if _, err := first.CommentOnIssue(ctx, req); status.Code(err) != codes.Internal {
		t.Fatalf("the dying call: got %v, want INTERNAL", err)
	}
	second := ticketingv1.NewTicketingServiceClient(plugintest.Serve(t, plugin(&tickets{}), plugintest.Options{DataDir: dir}))
	for range 2 {
		if _, err := second.CommentOnIssue(ctx, req); err != nil {
			t.Fatalf("the same call again: %v", err)
		}
		if len(result.GetEvidence()) != 1 {
			t.Fatalf("evidence %v, want the one receipt each time", result.GetEvidence())
		}
	}
	if n := count(t, dir); n != 1 {
		t.Fatalf("%d comments, want 1", n)
	}
	if _, err := second.CommentOnIssue(ctx, &ticketingv1.CommentOnIssueRequest{Key: "ABC-1", Body: "other"}); status.Code(err) != codes.InvalidArgument {
		t.Fatalf("another request under the key: got %v, want INVALID_ARGUMENT", err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			_, _ = second.CommentOnIssue(plugintest.Key(t.Context(), "key-b"), &ticketingv1.CommentOnIssueRequest{Key: "ABC-1", Body: "eight"})
		})
	}
	wg.Wait()
	if n := count(t, dir); n != 2 {
		t.Fatalf("%d comments after eight calls with one key, want 2", n)
	}
}

func TestHandlersRunConcurrently(t *testing.T) {
	s := &tickets{gate: make(chan struct{})}
	client := ticketingv1.NewTicketingServiceClient(plugintest.Serve(t, plugin(s), plugintest.Options{}))
	errs := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	go func() {
		_, err := client.GetIssue(ctx, &ticketingv1.GetIssueRequest{Key: "ABC-1"})
		errs <- err
	}()
	select {
	case <-s.gate:
	case <-ctx.Done():
		t.Fatal("the handler did not run")
	}
	if err := <-errs; err != nil {
		t.Fatal(err)
	}
}

// P-014, P-023, P-024: only the declared type under a verb's own name is run.
func TestInvokeRefuses(t *testing.T) {
	const get = "numinance.ports.ticketing.v1.TicketingService/GetIssue"
	issue, _ := anypb.New(&ticketingv1.GetIssueRequest{Key: "ABC-1"})
	link, _ := anypb.New(&ticketingv1.LinkIssueRequest{})
	conn := plugintest.Serve(t, plugin(&tickets{}), plugintest.Options{})
	for _, c := range []struct {
		name, target string
		request      *anypb.Any
		change       func(*pluginv1.ActionContext)
		code         codes.Code
	}{
		{"no verb", "numinance.plugin.v1.PluginService/Invoke", issue, nil, codes.Unimplemented},
		{"not in the manifest", "numinance.ports.ticketing.v1.TicketingService/SearchIssues", issue, nil, codes.Unimplemented},
		{"another type", get, link, nil, codes.InvalidArgument},
		{"another type url", get, &anypb.Any{TypeUrl: "evil/" + string(issue.MessageName()), Value: issue.Value}, nil, codes.InvalidArgument},
		{"unknown field", get, &anypb.Any{TypeUrl: issue.TypeUrl, Value: []byte("\xa2\x06\x01x")}, nil, codes.InvalidArgument},
		{"dry run of a verb without one", get, issue, func(a *pluginv1.ActionContext) { a.DryRun = true }, codes.InvalidArgument},
		{"another version", get, issue, func(a *pluginv1.ActionContext) { a.SpecVersion = "1.0.0" }, codes.FailedPrecondition},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx := t.Context()
			if c.change != nil {
				ctx = plugintest.With(ctx, c.change)
			}
			stream, err := conn.InvokeRaw(ctx, &pluginv1.InvokeRequest{Context: conn.Context(ctx), Target: c.target, Request: c.request})
			if err != nil {
				t.Fatal(err)
			}
			m, err := stream.Recv()
			got := status.Code(err)
			if err == nil {
				got = codes.Code(m.GetResult().GetCode())
			}
			if got != c.code {
				t.Fatalf("got %v (%v, %v), want %v", got, m, err, c.code)
			}
		})
	}
}

// The lower minor wins and another major is refused; a verb newer than the
// agreed version is not served.
func TestHandshakeNegotiates(t *testing.T) {
	for _, c := range []struct{ host, plugin, want string }{
		{"1.2.0", "1.0.0", "1.0.0"}, {"1.0.0", "1.2.0", "1.0.0"}, {"1.1.0", "1.2.0", "1.1.0"},
		{"2.0.0", "1.2.0", ""}, {"1.2.0", "0.9.0", ""}, {"1.2", "1.2.0", ""},
	} {
		t.Run(c.host+"/"+c.plugin, func(t *testing.T) {
			p := plugin(&tickets{})
			p.Manifest.SpecVersion = c.plugin
			conn, err := plugintest.Open(t, p, plugintest.Options{SpecVersion: c.host})
			if c.want == "" {
				if status.Code(err) != codes.FailedPrecondition {
					t.Fatalf("got %v, want FAILED_PRECONDITION", err)
				}
				return
			}
			if err != nil || conn.Handshake.GetSpecVersion() != c.want {
				t.Fatalf("got %v, %v, want %s", conn, err, c.want)
			}
			if c.want == "1.0.0" {
				_, err := ticketingv1.NewTicketingServiceClient(conn).GetIssue(t.Context(), &ticketingv1.GetIssueRequest{Key: "A-1"})
				if status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), "1.2.0") {
					t.Fatalf("ticketing under 1.0.0: got %v, want UNIMPLEMENTED that names 1.2.0", err)
				}
			}
		})
	}
}

// executor streams five events and uses what the host offers.
type executor struct {
	executorv1.UnimplementedAuthorExecutorServiceServer
	host *sdk.Host
	t    *testing.T
}

func (e *executor) Execute(r *executorv1.ExecuteRequest, s grpc.ServerStreamingServer[executorv1.ExecuteResponse]) error {
	for range 5 {
		if err := s.Send(&executorv1.ExecuteResponse{}); err != nil {
			return err
		}
	}
	ctx := s.Context()
	ref, err := e.host.PutBytes(ctx, bytes.Repeat([]byte("0123456789"), 20000), "text/plain")
	if err != nil {
		return err
	}
	back, err := e.host.ReadBlob(ctx, ref, 1<<20)
	if err != nil || len(back) != 200000 {
		return fmt.Errorf("read back %d bytes: %w", len(back), err)
	}
	lie := &pluginv1.BlobRef{Digest: ref.Digest, SizeBytes: ref.SizeBytes - 1}
	if _, err := e.host.ReadBlob(ctx, lie, 1<<20); status.Code(err) != codes.DataLoss {
		return fmt.Errorf("a reference with a wrong size: %v, want DATA_LOSS", err)
	}
	d, err := e.host.Decide(ctx, &pluginv1.DecideRequest{Tool: "run"})
	if err != nil || d.GetEffect() != pluginv1.DecisionEffect_DECISION_EFFECT_DENY {
		return fmt.Errorf("decide: %v, %v, want a denial", d, err)
	}
	if _, err := e.host.Credential(ctx, "anything"); status.Code(err) != codes.PermissionDenied {
		return fmt.Errorf("credential: %v, want PERMISSION_DENIED", err)
	}
	p, err := e.host.Spawn(ctx, &pluginv1.SpawnStart{
		Argv: []string{"/bin/sh", "-c", "cat; echo oops >&2; exit 3"}, WorkingDirectory: "/",
		User: pluginv1.ProcessUser_PROCESS_USER_AGENT, Timeout: durationpb.New(30 * time.Second),
	})
	if err != nil {
		return err
	}
	errText := make(chan string, 1)
	go func() { b, _ := io.ReadAll(p.Stderr); errText <- string(b) }()
	if _, err := io.WriteString(p.Stdin, "ping"); err != nil {
		return err
	}
	if err := p.Stdin.Close(); err != nil {
		return err
	}
	out, err := io.ReadAll(p.Stdout)
	exit, werr := p.Wait()
	if err != nil || werr != nil || string(out) != "ping" || <-errText != "oops\n" || exit.GetExitCode() != 3 {
		return fmt.Errorf("process: %q, %v, %v, %v", out, exit, err, werr)
	}
	return nil
}

// P-036: each event is one RUNNING message, then the result.
func TestStreamAndHost(t *testing.T) {
	e := &executor{t: t}
	p := sdk.Plugin{
		Manifest: &pluginv1.Manifest{ExtensionId: "dev.numinance.test/executor", Version: "1.0.0", Port: "authorexecutor", SpecVersion: "1.0.0", Verbs: []string{"Execute"}},
		Open: func(_ context.Context, s *sdk.Session) (sdk.Register, error) {
			e.host = s.Host
			return func(r grpc.ServiceRegistrar) { executorv1.RegisterAuthorExecutorServiceServer(r, e) }, nil
		},
	}
	conn := plugintest.Serve(t, p, plugintest.Options{})
	request, _ := anypb.New(&executorv1.ExecuteRequest{})
	stream, err := conn.InvokeRaw(t.Context(), &pluginv1.InvokeRequest{
		Context: conn.Context(t.Context()), Target: "numinance.ports.authorexecutor.v1.AuthorExecutorService/Execute", Request: request,
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		m, err := stream.Recv()
		if err != nil || m.GetRunning() == nil {
			t.Fatalf("message %d: %v, %v, want RUNNING", i, m, err)
		}
	}
	m, err := stream.Recv()
	if err != nil || m.GetResult().GetStatus() != pluginv1.ActionStatus_ACTION_STATUS_SUCCEEDED {
		t.Fatalf("the end: %v, %v, want success", m, err)
	}
	if _, err := stream.Recv(); err != io.EOF {
		t.Fatalf("after the result: %v, want the end", err)
	}
}

// A plugin without a host still serves; its calls to the host are UNAVAILABLE.
// The socket has mode 0600, a dead one is replaced, and it is gone afterwards.
func TestServeOnASocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p.sock")
	t.Setenv(sdk.EnvPluginSocket, path)
	t.Setenv(sdk.EnvHostSocket, "")
	var session *sdk.Session
	p := plugin(&tickets{})
	open := p.Open
	p.Open = func(ctx context.Context, s *sdk.Session) (sdk.Register, error) { session = s; return open(ctx, s) }
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- sdk.Serve(ctx, p) }()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := pluginv1.NewPluginServiceClient(conn)
	hs := &pluginv1.HandshakeRequest{SpecVersion: "1.2.0"}
	if _, err := client.Handshake(t.Context(), hs, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Handshake(t.Context(), hs); err != nil {
		t.Fatalf("the same handshake again: %v", err)
	}
	if _, err := client.Handshake(t.Context(), &pluginv1.HandshakeRequest{SpecVersion: "1.1.0"}); status.Code(err) != codes.FailedPrecondition {
		t.Fatalf("another handshake: %v, want FAILED_PRECONDITION", err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Fatalf("socket: %v, %v, want mode 0600", st, err)
	}
	if err := sdk.Serve(ctx, p); err == nil || !strings.Contains(err.Error(), "another process serves it") {
		t.Fatalf("a second server: %v, want a refusal", err)
	}
	if _, err := session.Host.Decide(t.Context(), &pluginv1.DecideRequest{}); status.Code(err) != codes.Unavailable {
		t.Fatalf("host call: %v, want UNAVAILABLE", err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Fatalf("the socket is still there: %v", err)
	}
}
