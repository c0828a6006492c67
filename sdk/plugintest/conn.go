package plugintest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	annotationsv1 "github.com/numinance/numinance/gen/numinance/annotations/v1"
	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
)

const typePrefix = "type.googleapis.com/"

// Conn carries stock clients' calls to a plugin through Invoke. It is safe for
// concurrent use. Each call has a key of its own unless With sets one.
type Conn struct {
	// Host is what the plugin asks.
	Host *Host
	// DataDir is the plugin's directory.
	DataDir string
	// Handshake is what the plugin answered.
	Handshake *pluginv1.HandshakeResponse

	client pluginv1.PluginServiceClient
	calls  atomic.Int64
}

// PartialError is the end of a call that succeeded without evidence its verb
// declares (P-031).
type PartialError struct {
	Target string
	// Missing are the evidence types that were not attached.
	Missing []string
	// Output is the answer.
	Output proto.Message
}

func (e *PartialError) Error() string {
	return fmt.Sprintf("%s is partial: no evidence of type %s", e.Target, strings.Join(e.Missing, ", "))
}

type withKey struct{}
type resultKey struct{}

// With returns a context whose calls have an action context changed by f, for
// example to set a dry run or a key. Several add up, the last one last.
func With(ctx context.Context, f func(*pluginv1.ActionContext)) context.Context {
	before, _ := ctx.Value(withKey{}).(func(*pluginv1.ActionContext))
	return context.WithValue(ctx, withKey{}, func(a *pluginv1.ActionContext) {
		if before != nil {
			before(a)
		}
		f(a)
	})
}

// DryRun returns a context whose calls are dry runs.
func DryRun(ctx context.Context) context.Context {
	return With(ctx, func(a *pluginv1.ActionContext) { a.DryRun = true })
}

// Key returns a context whose calls have the given idempotency key.
func Key(ctx context.Context, key string) context.Context {
	return With(ctx, func(a *pluginv1.ActionContext) { a.IdempotencyKey = key })
}

// Result is the ActionResult of the last call made with a context of Capture.
type Result struct{ *pluginv1.ActionResult }

// Capture returns a context whose calls leave their ActionResult in the Result.
func Capture(ctx context.Context) (context.Context, *Result) {
	r := &Result{}
	return context.WithValue(ctx, resultKey{}, r), r
}

// Context returns the action context that a call with ctx would have.
func (c *Conn) Context(ctx context.Context) *pluginv1.ActionContext {
	n := strconv.FormatInt(c.calls.Add(1), 10)
	sum := sha256.Sum256([]byte("grant of a test"))
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(time.Minute)
	}
	a := &pluginv1.ActionContext{
		ActionId: "act-" + n, ChangeId: "chg-test", RunId: "run-test",
		ActorKind: pluginv1.ActorKind_ACTOR_KIND_RUNNER, ActorPrincipal: "service:runner", Caller: "test",
		GrantId: "grt-test", GrantDigest: "sha256:" + hex.EncodeToString(sum[:]), DecisionId: "dec-" + n,
		Budget:         &pluginv1.Budget{Actions: 1 << 20, OutputBytes: 1 << 40, Tokens: 1 << 30},
		IdempotencyKey: "key-" + n,
		Deadline:       timestamppb.New(deadline),
		SpecVersion:    c.Handshake.GetSpecVersion(),
	}
	if f, _ := ctx.Value(withKey{}).(func(*pluginv1.ActionContext)); f != nil {
		f(a)
	}
	return a
}

// InvokeRaw sends one InvokeRequest as it is, for tests of what a plugin refuses.
func (c *Conn) InvokeRaw(ctx context.Context, r *pluginv1.InvokeRequest) (grpc.ServerStreamingClient[pluginv1.InvokeResponse], error) {
	return c.client.Invoke(ctx, r)
}

func (c *Conn) start(ctx context.Context, method string, args any) (*invocation, error) {
	m, ok := args.(proto.Message)
	if !ok {
		return nil, status.Errorf(codes.Internal, "request of type %T", args)
	}
	value, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "encode request: %v", err)
	}
	target := strings.TrimPrefix(method, "/")
	action := c.Context(ctx)
	stream, err := c.client.Invoke(ctx, &pluginv1.InvokeRequest{
		Context: action, Target: target,
		Request: &anypb.Any{TypeUrl: typePrefix + string(m.ProtoReflect().Descriptor().FullName()), Value: value},
	})
	if err != nil {
		return nil, err
	}
	keep, _ := ctx.Value(resultKey{}).(*Result)
	return &invocation{target: target, dryRun: action.GetDryRun(), stream: stream, keep: keep}, nil
}

// Invoke implements grpc.ClientConnInterface.
func (c *Conn) Invoke(ctx context.Context, method string, args, reply any, _ ...grpc.CallOption) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	inv, err := c.start(ctx, method, args)
	if err != nil {
		return err
	}
	event, err := inv.next()
	if event != nil {
		return status.Errorf(codes.Internal, "%s is unary and sent an event", inv.target)
	}
	if err != io.EOF {
		return err
	}
	if err := decode(inv.result.GetOutput(), reply); err != nil {
		return err
	}
	return inv.verdict(reply.(proto.Message))
}

// NewStream implements grpc.ClientConnInterface for server-streaming verbs.
func (c *Conn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	if desc.ClientStreams || !desc.ServerStreams {
		return nil, status.Errorf(codes.Unimplemented, "%s: no port has client streams", method)
	}
	return &clientStream{ctx: ctx, conn: c, method: method}, nil
}

// invocation is one Invoke under way.
type invocation struct {
	target string
	dryRun bool
	stream grpc.ServerStreamingClient[pluginv1.InvokeResponse]
	keep   *Result
	result *pluginv1.ActionResult
}

// next returns the next event, or io.EOF when the call succeeded and result is
// set, or the error it failed with.
func (v *invocation) next() (*anypb.Any, error) {
	m, err := v.stream.Recv()
	if err == io.EOF {
		return nil, status.Errorf(codes.Internal, "%s ended without a result", v.target)
	}
	if err != nil {
		return nil, err
	}
	if r := m.GetRunning(); r != nil {
		return r.GetEvent(), nil
	}
	v.result = m.GetResult()
	if v.keep != nil {
		v.keep.ActionResult = v.result
	}
	switch v.result.GetStatus() {
	case pluginv1.ActionStatus_ACTION_STATUS_SUCCEEDED, pluginv1.ActionStatus_ACTION_STATUS_PARTIAL:
	case pluginv1.ActionStatus_ACTION_STATUS_FAILED:
		return nil, status.Error(codes.Code(v.result.GetCode()), v.result.GetMessage())
	default:
		return nil, status.Errorf(codes.Internal, "%s ended with %v", v.target, v.result.GetStatus())
	}
	if _, err := v.stream.Recv(); err != io.EOF {
		return nil, status.Errorf(codes.Internal, "%s went on after its result: %v", v.target, err)
	}
	return nil, io.EOF
}

// verdict checks the declared evidence, as the host does.
func (v *invocation) verdict(output proto.Message) error {
	if v.dryRun {
		return nil
	}
	service, method, _ := strings.Cut(v.target, "/")
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service + "." + method))
	if err != nil {
		return status.Errorf(codes.Internal, "find %s: %v", v.target, err)
	}
	opts, _ := d.Options().(*descriptorpb.MethodOptions)
	a, _ := proto.GetExtension(opts, annotationsv1.E_Action).(*annotationsv1.ActionOptions)
	var missing []string
	for _, want := range a.GetEvidence() {
		if !slices.ContainsFunc(v.result.GetEvidence(), func(e *pluginv1.Evidence) bool { return e.GetType() == want }) {
			missing = append(missing, want)
		}
	}
	if len(missing) == 0 && v.result.GetStatus() == pluginv1.ActionStatus_ACTION_STATUS_SUCCEEDED {
		return nil
	}
	v.result.Status = pluginv1.ActionStatus_ACTION_STATUS_PARTIAL
	return &PartialError{Target: v.target, Missing: missing, Output: output}
}

func decode(a *anypb.Any, into any) error {
	m, ok := into.(proto.Message)
	if !ok {
		return status.Errorf(codes.Internal, "answer of type %T", into)
	}
	if want := typePrefix + string(m.ProtoReflect().Descriptor().FullName()); a.GetTypeUrl() != want {
		return status.Errorf(codes.Internal, "answer is a %q, declared is %q", a.GetTypeUrl(), want)
	}
	if err := proto.Unmarshal(a.GetValue(), m); err != nil {
		return status.Errorf(codes.Internal, "decode answer: %v", err)
	}
	return nil
}

// clientStream is what a stock client of a server-streaming verb reads from.
type clientStream struct {
	ctx    context.Context
	conn   *Conn
	method string
	inv    *invocation
}

func (s *clientStream) Header() (metadata.MD, error) { return nil, nil }
func (s *clientStream) Trailer() metadata.MD         { return nil }
func (s *clientStream) CloseSend() error             { return nil }
func (s *clientStream) Context() context.Context     { return s.ctx }

func (s *clientStream) SendMsg(m any) (err error) {
	s.inv, err = s.conn.start(s.ctx, s.method, m)
	return err
}

func (s *clientStream) RecvMsg(into any) error {
	if s.inv == nil {
		return status.Error(codes.Internal, "nothing was asked yet")
	}
	event, err := s.inv.next()
	if err == io.EOF {
		if err := s.inv.verdict(nil); err != nil {
			return err
		}
		return io.EOF
	}
	if err != nil {
		return err
	}
	return decode(event, into)
}
