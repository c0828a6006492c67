package sdk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
)

const typePrefix = "type.googleapis.com/"

// maxReason bounds an ActionResult's message in bytes.
const maxReason = 4096

// Service is the PluginService of one process of a plugin. It lives from
// NewService, takes one Handshake, and then any number of Invokes at a time.
type Service struct {
	pluginv1.UnimplementedPluginServiceServer
	plugin Plugin
	host   grpc.ClientConnInterface

	mu       sync.Mutex
	request  []byte // the first handshake request, for a repeat
	response *pluginv1.HandshakeResponse
	verbs    map[string]*verb
	agreed   string
}

// NewService returns the PluginService of p. host may be nil: then every call to
// the host fails with UNAVAILABLE.
func NewService(p Plugin, host grpc.ClientConnInterface) (*Service, error) {
	if p.Manifest == nil || p.Open == nil {
		return nil, errors.New("a plugin needs a manifest and an Open function")
	}
	if _, err := parseVersion(p.Manifest.GetSpecVersion()); err != nil {
		return nil, fmt.Errorf("manifest: %w", err)
	}
	return &Service{plugin: p, host: host}, nil
}

// Handshake agrees on a version and on capabilities and opens the plugin. The
// same request again gets the same answer; another one is refused.
func (s *Service) Handshake(ctx context.Context, req *pluginv1.HandshakeRequest) (*pluginv1.HandshakeResponse, error) {
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(req)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "handshake: %v", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.response != nil {
		if !bytes.Equal(raw, s.request) {
			return nil, status.Error(codes.FailedPrecondition, "this process has already agreed on another handshake; start a new one")
		}
		return proto.CloneOf(s.response), nil
	}
	m := s.plugin.Manifest
	agreed, err := negotiate(req.GetSpecVersion(), m.GetSpecVersion())
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	var capabilities []string
	for _, c := range m.GetCapabilities() {
		if slices.Contains(req.GetCapabilities(), c) {
			capabilities = append(capabilities, c)
		}
	}
	slices.Sort(capabilities)
	session := &Session{
		Config:       req.GetConfig(),
		DataDir:      req.GetDataDirectory(),
		SpecVersion:  agreed.String(),
		Capabilities: capabilities,
		Host:         newHost(s.host),
		effects:      newEffects(req.GetDataDirectory()),
	}
	// What Open starts outlives this call.
	register, err := s.plugin.Open(context.WithoutCancel(ctx), session)
	if err != nil {
		if _, ok := status.FromError(err); ok {
			return nil, err
		}
		return nil, status.Errorf(codes.FailedPrecondition, "open %s: %v", m.GetExtensionId(), err)
	}
	var r registrar
	register(&r)
	verbs, err := r.verbs(m, agreed, capabilities)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "plugin %s: %v", m.GetExtensionId(), err)
	}
	s.request, s.verbs, s.agreed = raw, verbs, agreed.String()
	s.response = &pluginv1.HandshakeResponse{
		SpecVersion:  agreed.String(),
		Manifest:     m,
		Capabilities: capabilities,
	}
	return proto.CloneOf(s.response), nil
}

// Invoke runs one verb. It ends with exactly one ActionResult; only a call that
// never reached a verb ends with a status instead.
func (s *Service) Invoke(req *pluginv1.InvokeRequest, stream grpc.ServerStreamingServer[pluginv1.InvokeResponse]) error {
	s.mu.Lock()
	v, open, agreed := s.verbs[req.GetTarget()], s.response != nil, s.agreed
	s.mu.Unlock()
	action := req.GetContext()
	switch {
	case !open:
		return status.Error(codes.FailedPrecondition, "Invoke before a handshake")
	case action == nil:
		return status.Error(codes.InvalidArgument, "Invoke without an action context")
	case v == nil:
		return status.Errorf(codes.Unimplemented, "%q is no verb of this plugin", req.GetTarget())
	case v.refused != "":
		return status.Error(codes.Unimplemented, v.refused)
	case action.GetSpecVersion() != agreed:
		return status.Errorf(codes.FailedPrecondition, "the action says spec version %s, negotiated was %s", action.GetSpecVersion(), agreed)
	case action.GetDryRun() && !v.dryRun:
		return status.Errorf(codes.InvalidArgument, "%s has no dry run", req.GetTarget())
	}
	ctx := stream.Context()
	if d := action.GetDeadline(); d.IsValid() && d.AsTime().Unix() > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, d.AsTime())
		defer cancel()
	}
	c := &call{action: action, target: req.GetTarget()}
	ctx = context.WithValue(ctx, callKey{}, c)
	output, err := v.run(ctx, req, stream)
	result := c.result(err)
	if err == nil && output != nil {
		if result.Output, err = pack(output); err != nil {
			return status.Errorf(codes.Internal, "answer of %s: %v", req.GetTarget(), err)
		}
	}
	return stream.Send(&pluginv1.InvokeResponse{Step: &pluginv1.InvokeResponse_Result{Result: result}})
}

// run calls the handler and turns a panic into an error, so that one bad input
// does not end the calls beside it.
func (v *verb) run(ctx context.Context, req *pluginv1.InvokeRequest, out grpc.ServerStreamingServer[pluginv1.InvokeResponse]) (output proto.Message, err error) {
	defer func() {
		if p := recover(); p != nil {
			fmt.Fprintf(os.Stderr, "panic in %s: %v\n%s", req.GetTarget(), p, debug.Stack())
			output, err = nil, status.Errorf(codes.Internal, "%s panicked; the stack is in the plugin's log", req.GetTarget())
		}
	}()
	if v.stream != nil {
		return nil, v.stream.Handler(v.impl, &eventStream{ctx: ctx, request: req.GetRequest(), out: out})
	}
	answer, err := v.unary.Handler(v.impl, ctx, func(into any) error { return unpack(req.GetRequest(), into) }, nil)
	if err != nil {
		return nil, err
	}
	output, ok := answer.(proto.Message)
	if !ok || answer == nil || !output.ProtoReflect().IsValid() {
		return nil, status.Errorf(codes.Internal, "%s returned neither an answer nor an error", req.GetTarget())
	}
	return output, nil
}

// eventStream is the grpc.ServerStream that a generated streaming handler sees:
// each message sent becomes one RUNNING message (P-036).
type eventStream struct {
	ctx     context.Context
	request *anypb.Any
	out     grpc.ServerStreamingServer[pluginv1.InvokeResponse]
	read    bool
}

func (e *eventStream) Context() context.Context     { return e.ctx }
func (e *eventStream) SetHeader(metadata.MD) error  { return nil }
func (e *eventStream) SendHeader(metadata.MD) error { return nil }
func (e *eventStream) SetTrailer(metadata.MD)       {}

func (e *eventStream) RecvMsg(into any) error {
	if e.read {
		return status.Error(codes.Internal, "a streaming verb has one request")
	}
	e.read = true
	return unpack(e.request, into)
}

func (e *eventStream) SendMsg(m any) error {
	if err := e.ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	msg, ok := m.(proto.Message)
	if !ok {
		return status.Errorf(codes.Internal, "event of type %T", m)
	}
	event, err := pack(msg)
	if err != nil {
		return err
	}
	return e.out.Send(&pluginv1.InvokeResponse{Step: &pluginv1.InvokeResponse_Running{
		Running: &pluginv1.Running{Event: event},
	}})
}

func pack(m proto.Message) (*anypb.Any, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return nil, err
	}
	if len(b) > MaxMessage {
		return nil, status.Errorf(codes.ResourceExhausted, "answer of %d bytes is above the limit of %d; store it with PutBlob and answer with the reference", len(b), MaxMessage)
	}
	return &anypb.Any{TypeUrl: typePrefix + string(m.ProtoReflect().Descriptor().FullName()), Value: b}, nil
}

// unpack decodes exactly the declared type and refuses fields that this build of
// the plugin does not know: it would act on half a request.
func unpack(a *anypb.Any, into any) error {
	m, ok := into.(proto.Message)
	if !ok {
		return status.Errorf(codes.Internal, "request of type %T", into)
	}
	want := typePrefix + string(m.ProtoReflect().Descriptor().FullName())
	if a.GetTypeUrl() != want {
		return status.Errorf(codes.InvalidArgument, "request is a %q, declared is %q", a.GetTypeUrl(), want)
	}
	if len(a.GetValue()) > MaxMessage {
		return status.Errorf(codes.ResourceExhausted, "request of %d bytes is above the limit of %d", len(a.GetValue()), MaxMessage)
	}
	if err := proto.Unmarshal(a.GetValue(), m); err != nil {
		return status.Errorf(codes.InvalidArgument, "decode %s: %v", want, err)
	}
	return knownOnly(m.ProtoReflect())
}

func knownOnly(m protoreflect.Message) error {
	if len(m.GetUnknown()) > 0 {
		return status.Errorf(codes.InvalidArgument, "%s has a field that this plugin does not know", m.Descriptor().FullName())
	}
	var err error
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsMap() && f.MapValue().Message() != nil:
			v.Map().Range(func(_ protoreflect.MapKey, e protoreflect.Value) bool {
				err = knownOnly(e.Message())
				return err == nil
			})
		case f.IsMap():
		case f.IsList() && f.Message() != nil:
			for i := 0; i < v.List().Len() && err == nil; i++ {
				err = knownOnly(v.List().Get(i).Message())
			}
		case !f.IsList() && f.Message() != nil:
			err = knownOnly(v.Message())
		}
		return err == nil
	})
	return err
}

// clip cuts s to at most n bytes of valid UTF-8.
func clip(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= n {
		return s
	}
	// The cut may split a character; what is left of it goes.
	return strings.ToValidUTF8(s[:n], "")
}
