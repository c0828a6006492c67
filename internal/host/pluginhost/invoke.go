package pluginhost

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/ports"
)

// Invoke implements dispatch.Provider. The target must be a verb of the plugin's
// port that both sides agreed on (P-024, P-027); the host's own descriptors say
// whether it streams (P-025). What the plugin sends is bounded in size and
// number, and the envelope around it is checked; the payloads are the caller's to
// decode strictly.
func (p *Plugin) Invoke(ctx context.Context, req *pluginv1.InvokeRequest, each func(*pluginv1.InvokeResponse) error) error {
	v, ok := ports.Lookup(req.GetTarget())
	switch {
	case !ok || v.Full != req.GetTarget():
		return status.Errorf(codes.InvalidArgument, "%q is no port method", req.GetTarget())
	case v.Port != p.manifest.GetPort():
		return status.Errorf(codes.InvalidArgument, "%s is no verb of port %s, which %s implements", v.Full, p.manifest.GetPort(), p.facts.Extension)
	case !p.allowed[v.Method]:
		return status.Error(codes.Unimplemented, p.notAllowed(v))
	case len(req.GetRequest().GetValue()) > MaxMessage:
		return status.Errorf(codes.ResourceExhausted, "the request of %s has %d bytes, the limit is %d", v.Name(), len(req.GetRequest().GetValue()), MaxMessage)
	case p.gone():
		return p.unavailable(v)
	}
	release, err := p.refs.take(v, req)
	if err != nil {
		return err
	}
	defer release()
	deadline := req.GetContext().GetDeadline()
	if !deadline.IsValid() {
		return status.Errorf(codes.Internal, "the action of %s has no deadline", v.Name())
	}
	ctx, cancel := context.WithDeadline(ctx, deadline.AsTime())
	defer cancel()
	call, stop := p.untilEnd(ctx)
	defer stop()

	stream, err := p.client.Invoke(call, req)
	if err != nil {
		return p.fault(ctx, v, err)
	}
	for events := 0; ; {
		m, err := stream.Recv()
		if err == io.EOF {
			return status.Errorf(codes.Internal, "%s ended %s without a result", p.facts.Extension, v.Name())
		}
		if err != nil {
			return p.fault(ctx, v, err)
		}
		if err := p.inspect(v, m); err != nil {
			return err
		}
		if m.GetRunning() != nil {
			if events++; events > MaxEvents {
				return status.Errorf(codes.ResourceExhausted, "%s sent more than %d events", v.Name(), MaxEvents)
			}
			if err := each(m); err != nil {
				return err
			}
			continue
		}
		// One result is the end: anything after it is a fault, and then the
		// result is not taken.
		if _, err := stream.Recv(); err != io.EOF {
			if err != nil {
				return p.fault(ctx, v, err)
			}
			return status.Errorf(codes.Internal, "%s went on after the result of %s", p.facts.Extension, v.Name())
		}
		return each(m)
	}
}

// notAllowed says why a verb of the port may not be called.
func (p *Plugin) notAllowed(v ports.Verb) string {
	if v.Capability != "" {
		return fmt.Sprintf("%s needs capability %s, which host and %s did not agree on", v.Name(), v.Capability, p.facts.Extension)
	}
	return fmt.Sprintf("%s does not serve %s under spec version %s", p.facts.Extension, v.Name(), p.negotiated.SpecVersion)
}

// inspect checks the envelope of one message.
func (p *Plugin) inspect(v ports.Verb, m *pluginv1.InvokeResponse) error {
	if err := known(m.ProtoReflect()); err != nil {
		return status.Errorf(codes.Internal, "answer of %s: %v", v.Name(), err)
	}
	payload := m.GetResult().GetOutput()
	switch {
	case m.GetRunning() != nil:
		payload = m.GetRunning().GetEvent()
		if !v.ServerStreaming {
			return status.Errorf(codes.Internal, "%s is unary and sent an event", v.Name())
		}
	case m.GetResult() == nil:
		return status.Errorf(codes.Internal, "%s sent a message with neither an event nor a result", v.Name())
	}
	if n := len(payload.GetValue()); n > MaxMessage {
		return status.Errorf(codes.ResourceExhausted, "the answer of %s has %d bytes, the limit is %d", v.Name(), n, MaxMessage)
	}
	if err := p.checker.Bounds(m); err != nil {
		return status.Errorf(codes.Internal, "answer of %s: %v", v.Name(), err)
	}
	return nil
}

// fault turns what broke a call into the status that the caller sees.
func (p *Plugin) fault(ctx context.Context, v ports.Verb, err error) error {
	switch {
	case ctx.Err() != nil:
		return status.FromContextError(ctx.Err()).Err()
	case p.gone():
		return p.unavailable(v)
	}
	// grpc names a message above the transport's limit with its size; ours says
	// what it was the answer to as well.
	st := status.Convert(err)
	if st.Code() == codes.ResourceExhausted && strings.Contains(st.Message(), "larger than max") {
		return status.Errorf(codes.ResourceExhausted, "the answer of %s: %s", v.Name(), st.Message())
	}
	return status.Error(st.Code(), st.Message())
}

func (p *Plugin) unavailable(v ports.Verb) error {
	why := "it was closed"
	select {
	case <-p.link.Ended:
		if p.link.Why != nil && p.link.Why() != "" {
			why = p.link.Why()
		}
	default:
	}
	return status.Errorf(codes.Unavailable, "%s cannot carry out %s: %s", p.facts.Extension, v.Name(), why)
}

// known refuses a message of the envelope with a field that this host does not
// know. The payloads inside are bytes here.
func known(m protoreflect.Message) error {
	if len(m.GetUnknown()) > 0 {
		return fmt.Errorf("%s has a field that this host does not know", m.Descriptor().FullName())
	}
	var err error
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.Message() == nil || f.IsMap():
		case f.IsList():
			for i := 0; i < v.List().Len() && err == nil; i++ {
				err = known(v.List().Get(i).Message())
			}
		default:
			err = known(v.Message())
		}
		return err == nil
	})
	return err
}

// resolvable are the only references of an execution request that an adapter may
// resolve (P-130).
var resolvable = map[protoreflect.Name]bool{
	"task_ref": true, "plan_ref": true, "context_bundle_ref": true, "test_requirements_ref": true,
}

const blobRef = protoreflect.FullName("numinance.plugin.v1.BlobRef")

// references counts, by digest, the calls under way that carry a reference.
type references struct {
	mu    sync.Mutex
	calls map[digest.Digest]int
}

func (r *references) holds(d digest.Digest) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.calls[d] > 0
}

// take adds the references of a request until release is called.
func (r *references) take(v ports.Verb, req *pluginv1.InvokeRequest) (release func(), err error) {
	m := dynamicpb.NewMessage(v.Input)
	if err := proto.Unmarshal(req.GetRequest().GetValue(), m); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "decode the request of %s: %v", v.Name(), err)
	}
	var found []digest.Digest
	collect(m, v.Port == "authorexecutor", &found)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.calls == nil {
		r.calls = map[digest.Digest]int{}
	}
	for _, d := range found {
		r.calls[d]++
	}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, d := range found {
			if r.calls[d]--; r.calls[d] == 0 {
				delete(r.calls, d)
			}
		}
	}, nil
}

// collect gathers what a request refers to: for an executor the four named
// fields, for every other port its blob references.
func collect(m protoreflect.Message, executor bool, found *[]digest.Digest) {
	add := func(s string) {
		if d, err := digest.Parse(s); err == nil {
			*found = append(*found, d)
		}
	}
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		each := func(v protoreflect.Value) {
			switch {
			case f.Kind() == protoreflect.StringKind && executor && resolvable[f.Name()]:
				add(v.String())
			case f.Message() == nil:
			case f.Message().FullName() == blobRef:
				if !executor {
					add(v.Message().Get(f.Message().Fields().ByName("digest")).String())
				}
			default:
				collect(v.Message(), executor, found)
			}
		}
		switch {
		case f.IsMap():
			if f.MapValue().Message() != nil {
				v.Map().Range(func(_ protoreflect.MapKey, e protoreflect.Value) bool {
					collect(e.Message(), executor, found)
					return true
				})
			}
		case f.IsList():
			for i := range v.List().Len() {
				each(v.List().Get(i))
			}
		default:
			each(v)
		}
		return true
	})
}
