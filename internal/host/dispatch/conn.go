package dispatch

import (
	"context"
	"fmt"
	"io"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Conn is a gRPC client connection whose every call runs under one authority.
// Stock generated clients are put on it, as in scmv1.NewScmServiceClient(conn).
//
// A call returns nil, *DeniedError, *PartialError, *FailedError or
// *UnsettledError, and nothing else once it was dispatched; call options are
// ignored. Each call takes the next ordinal of the step, from which its
// idempotency key follows: a step that runs again makes a new Conn from the
// same Authority and must make the same calls in the same order. Calls that run
// side by side need a Conn, and a Step, each.
type Conn struct {
	d         *Dispatcher
	authority Authority
	via       Provider
	dryRun    bool
	ordinal   *atomic.Int64
}

// Conn binds a connection to the authority of one step.
func (d *Dispatcher) Conn(a Authority) *Conn {
	return &Conn{d: d, authority: a, ordinal: new(atomic.Int64)}
}

// Via returns a connection of the same step whose calls go to p instead of the
// deployment's provider: a plugin inside a run's sandbox. Everything else is
// the same, and ordinals go on.
func (c *Conn) Via(p Provider) *Conn {
	out := *c
	out.via = p
	return &out
}

// DryRun returns a connection of the same step whose calls have no effect; a
// verb without a dry run is denied on it.
func (c *Conn) DryRun() *Conn {
	out := *c
	out.dryRun = true
	return &out
}

func (c *Conn) call(method string, request any) (*call, error) {
	m, ok := request.(proto.Message)
	if !ok || !m.ProtoReflect().IsValid() {
		return nil, status.Errorf(codes.Internal, "%s: request of type %T", method, request)
	}
	return &call{
		authority: c.authority, method: method, ordinal: c.ordinal.Add(1), dryRun: c.dryRun, via: c.via, request: m,
	}, nil
}

// Invoke implements grpc.ClientConnInterface for unary verbs.
func (c *Conn) Invoke(ctx context.Context, method string, args, reply any, _ ...grpc.CallOption) error {
	out, ok := reply.(proto.Message)
	if !ok {
		return status.Errorf(codes.Internal, "%s: reply of type %T", method, reply)
	}
	one, err := c.call(method, args)
	if err != nil {
		return err
	}
	one.reply = out
	return c.d.do(ctx, one)
}

// NewStream implements grpc.ClientConnInterface for server-streaming verbs; no
// port has another kind of stream. The caller reads until an error (io.EOF
// after the last event of a success) or ends ctx.
func (c *Conn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	if desc.ClientStreams || !desc.ServerStreams {
		return nil, status.Errorf(codes.Unimplemented, "%s: only server streams are dispatched", method)
	}
	return &stream{conn: c, method: method, ctx: ctx, events: make(chan proto.Message), end: make(chan struct{})}, nil
}

// stream is one server-streaming action seen as a grpc.ClientStream. The
// goroutine that SendMsg starts ends with the action; it owns err until it
// closes end.
type stream struct {
	conn   *Conn
	method string
	ctx    context.Context
	sent   bool
	events chan proto.Message
	end    chan struct{}
	err    error
}

func (s *stream) Header() (metadata.MD, error) { return nil, nil }
func (s *stream) Trailer() metadata.MD         { return nil }
func (s *stream) CloseSend() error             { return nil }
func (s *stream) Context() context.Context     { return s.ctx }

// SendMsg takes the one request and starts the action.
func (s *stream) SendMsg(m any) error {
	if s.sent {
		return status.Errorf(codes.Internal, "%s: a streaming verb has one request", s.method)
	}
	one, err := s.conn.call(s.method, m)
	if err != nil {
		return err
	}
	s.sent = true
	one.emit = func(event proto.Message) error {
		select {
		case s.events <- event:
			return nil
		case <-s.ctx.Done():
			return status.FromContextError(s.ctx.Err()).Err()
		}
	}
	go func() {
		defer close(s.end)
		s.err = s.conn.d.do(s.ctx, one)
	}()
	return nil
}

// RecvMsg returns the next event, or how the action ended.
func (s *stream) RecvMsg(m any) error {
	if !s.sent {
		return status.Errorf(codes.Internal, "%s: no request was sent", s.method)
	}
	into, ok := m.(proto.Message)
	if !ok {
		return status.Errorf(codes.Internal, "%s: event of type %T", s.method, m)
	}
	select {
	case event := <-s.events:
		proto.Reset(into)
		proto.Merge(into, event)
		return nil
	case <-s.end:
		if s.err == nil {
			return io.EOF
		}
		return s.err
	}
}

var _ grpc.ClientConnInterface = (*Conn)(nil)

// String names the connection's step, for logs.
func (c *Conn) String() string {
	return fmt.Sprintf("%s of %s as %s", c.authority.Step, c.authority.Change.ID, c.authority.Actor.Kind)
}
