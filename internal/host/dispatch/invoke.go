package dispatch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/core/strict"
)

// Statuses of an action, as the ledger and the records write them.
const (
	StatusSucceeded = "SUCCEEDED"
	StatusPartial   = "PARTIAL"
	StatusFailed    = "FAILED"
	StatusLost      = "LOST"
)

// answer is what came of an action.
type answer struct {
	status        string
	code          codes.Code
	message       string // the provider's own text unless host is set
	host          bool
	effectUnknown bool
	// body is the output as it came, or the events of a streaming verb, each
	// after its length. It is stored by its digest.
	body     []byte
	hasBody  bool
	events   int
	missing  []string
	evidence []*pluginv1.Evidence
	usage    *pluginv1.Usage
}

// failure is an answer that the host gives itself.
func failure(code codes.Code, message string) *answer {
	return &answer{status: StatusFailed, code: code, message: message, host: true}
}

// invoke is steps 9 and 10: it calls the provider and leaves the checked answer
// in c.answer. An error means that no result came and the outcome is open. An
// idempotent verb is tried again under the same key first.
func (d *Dispatcher) invoke(ctx context.Context, c *call) error {
	for try := 1; ; try++ {
		err := d.once(ctx, c)
		if err == nil {
			return nil
		}
		code := status.Code(err)
		switch {
		case definite(code):
			// The provider refused before the verb ran.
			c.answer = failure(code, reasonOf(err))
			return nil
		case c.verb.Risk == ports.RiskRead:
			if ctx.Err() == nil && c.verb.Idempotent && code == codes.Unavailable && try < attempts {
				break
			}
			// Nothing can have happened; the call failed.
			c.answer = failure(code, reasonOf(err))
			return nil
		case c.verb.Idempotent && try < attempts && ctx.Err() == nil:
		case ctx.Err() == nil && !open(code):
			// The verb ran and its answer is what is wrong.
			c.answer = failure(code, reasonOf(err))
			c.answer.effectUnknown = true
			return nil
		default:
			if cause := context.Cause(ctx); cause != nil {
				err = errors.Join(err, cause)
			}
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(d.c.RetryDelay * time.Duration(try)):
		}
		if c.via == nil {
			if again, err := d.c.Providers.Provider(c.verb.Port); err == nil {
				c.provider = again
			}
		}
	}
}

// definite tells the codes with which a plugin refuses before the verb runs.
func definite(c codes.Code) bool {
	return c == codes.Unimplemented || c == codes.FailedPrecondition || c == codes.InvalidArgument
}

// open tells the codes that leave the outcome open: the call was cut off.
func open(c codes.Code) bool {
	return c == codes.Unavailable || c == codes.DeadlineExceeded || c == codes.Canceled || c == codes.Aborted
}

func reasonOf(err error) string { return clip(status.Convert(err).Message(), 2048) }

// once is one try of an Invoke.
func (d *Dispatcher) once(ctx context.Context, c *call) error {
	if err := ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	r := receiver{d: d, c: c, ctx: ctx, answer: &answer{}}
	if c.verb.ServerStreaming {
		kind, err := protoregistry.GlobalTypes.FindMessageByName(c.verb.Output.FullName())
		if err != nil {
			return status.Errorf(codes.Internal, "find the event type of %s: %v", c.verb.Name(), err)
		}
		r.event = kind
	}
	err := c.provider.Invoke(ctx, d.envelope(ctx, c), r.each)
	switch {
	case r.refused != nil:
		// The verb ran; what is wrong is the answer (P-032, P-033).
		c.answer = failure(codes.Internal, "the provider's answer was refused: "+clip(r.refused.Error(), 1024))
		c.answer.effectUnknown = c.verb.SideEffecting()
		return nil
	case err != nil:
		return err
	case !r.ended:
		return status.Error(codes.Unavailable, "the provider ended the call without a result")
	}
	c.answer = r.answer
	return nil
}

// envelope is the InvokeRequest of an action.
func (d *Dispatcher) envelope(ctx context.Context, c *call) *pluginv1.InvokeRequest {
	a := c.authority
	deadline := a.Grant.Expires
	if t, ok := ctx.Deadline(); ok && t.Before(deadline) {
		deadline = t
	}
	grantDigest := c.decision.Grant
	if grantDigest == "" {
		grantDigest = a.Grant.Digest()
	}
	return &pluginv1.InvokeRequest{
		Target: c.verb.Full,
		Request: &anypb.Any{
			TypeUrl: "type.googleapis.com/" + string(c.verb.Input.FullName()), Value: c.payload,
		},
		Context: &pluginv1.ActionContext{
			ActionId: string(c.action), ChangeId: string(a.Change.ID), WorkUnitId: string(a.WorkUnit), RunId: string(a.Actor.Run),
			ActorKind: actorKind(a.Actor.Kind), ActorPrincipal: string(a.Actor.Principal), Caller: a.Caller.String(),
			GrantId: string(a.Grant.ID), GrantDigest: string(grantDigest), DecisionId: string(c.decision.ID),
			Budget: &pluginv1.Budget{
				Actions: max(c.left.Actions, 0), OutputBytes: max(c.left.Output, 0), Tokens: max(c.left.Tokens, 0),
			},
			IdempotencyKey: c.key, DryRun: c.dryRun, Deadline: timestamppb.New(deadline), SpecVersion: c.rules.Version,
		},
	}
}

func actorKind(k identity.ActorKind) pluginv1.ActorKind {
	switch k {
	case identity.KindHuman:
		return pluginv1.ActorKind_ACTOR_KIND_HUMAN
	case identity.KindAuthorAgent:
		return pluginv1.ActorKind_ACTOR_KIND_AUTHOR_AGENT
	case identity.KindReviewerAgent:
		return pluginv1.ActorKind_ACTOR_KIND_REVIEWER_AGENT
	case identity.KindRunner:
		return pluginv1.ActorKind_ACTOR_KIND_RUNNER
	case identity.KindReleasePipeline:
		return pluginv1.ActorKind_ACTOR_KIND_RELEASE_PIPELINE
	}
	return pluginv1.ActorKind_ACTOR_KIND_UNSPECIFIED
}

// receiver takes the messages of one answer and refuses what does not belong.
type receiver struct {
	d       *Dispatcher
	c       *call
	ctx     context.Context
	event   protoreflect.MessageType
	answer  *answer
	ended   bool
	refused error
}

// each is handed to the provider's Invoke. Its error ends the call.
func (r *receiver) each(m *pluginv1.InvokeResponse) error {
	err := r.take(m)
	if err != nil && r.refused == nil && r.ctx.Err() == nil {
		r.refused = err
	}
	return err
}

func (r *receiver) take(m *pluginv1.InvokeResponse) error {
	if r.ended {
		return errors.New("a message after the result")
	}
	if len(m.ProtoReflect().GetUnknown()) > 0 {
		return errors.New("the envelope has an unknown field")
	}
	switch step := m.GetStep().(type) {
	case *pluginv1.InvokeResponse_Running:
		return r.running(step.Running)
	case *pluginv1.InvokeResponse_Result:
		r.ended = true
		return r.result(step.Result)
	}
	return errors.New("a message that is neither an event nor a result")
}

// limit is how many bytes of answer the action may still yield.
func (r *receiver) limit() int64 {
	most := int64(MaxAnswer)
	if r.c.verb.ServerStreaming {
		most = MaxEvents * MaxEvent
	}
	if isEvidence(r.c.verb) {
		return most
	}
	return min(most, r.c.held.Output) - int64(len(r.answer.body))
}

func (r *receiver) running(m *pluginv1.Running) error {
	v := r.c.verb
	if !v.ServerStreaming {
		return fmt.Errorf("an event, but %s does not stream", v.Name())
	}
	if len(m.ProtoReflect().GetUnknown()) > 0 || len(m.GetEvent().ProtoReflect().GetUnknown()) > 0 {
		return errors.New("the envelope has an unknown field")
	}
	if r.answer.events++; r.answer.events > MaxEvents {
		return fmt.Errorf("more than %d events", MaxEvents)
	}
	b := m.GetEvent().GetValue()
	if len(b) > MaxEvent {
		return fmt.Errorf("event %d has %d bytes, at most %d", r.answer.events, len(b), MaxEvent)
	}
	if left := r.limit(); int64(len(b)) > left {
		return fmt.Errorf("event %d has %d bytes, the budget has %d left", r.answer.events, len(b), left)
	}
	event := r.event.New().Interface()
	if err := r.d.check.Any(m.GetEvent(), event, r.c.rules); err != nil {
		return fmt.Errorf("event %d: %w", r.answer.events, err)
	}
	if r.d.check.Hides(r.event.Descriptor()) && strict.Outside(event.ProtoReflect()) {
		return fmt.Errorf("event %d has a host_only field", r.answer.events)
	}
	r.answer.body = protowire.AppendBytes(r.answer.body, b)
	r.answer.hasBody = true
	return r.c.emit(event)
}

func (r *receiver) result(m *pluginv1.ActionResult) error {
	a, v := r.answer, r.c.verb
	if err := r.d.head(m); err != nil {
		return err
	}
	a.code, a.message, a.evidence, a.usage = codes.Code(m.GetCode()), m.GetMessage(), m.GetEvidence(), m.GetUsage()
	switch m.GetStatus() {
	case pluginv1.ActionStatus_ACTION_STATUS_FAILED:
		a.status = StatusFailed
		if a.code == codes.OK {
			a.code = codes.Unknown
		}
		if m.GetOutput() != nil {
			return errors.New("a failed result with an output")
		}
		return nil
	case pluginv1.ActionStatus_ACTION_STATUS_SUCCEEDED:
		a.status = StatusSucceeded
	case pluginv1.ActionStatus_ACTION_STATUS_PARTIAL:
		a.status = StatusPartial
	default:
		return fmt.Errorf("result with status %d", m.GetStatus())
	}
	if a.code != codes.OK {
		return fmt.Errorf("a result that is %s with code %s", a.status, a.code)
	}
	if v.ServerStreaming {
		if m.GetOutput() != nil {
			return fmt.Errorf("an output, but %s answers by events", v.Name())
		}
		if a.events == 0 {
			return errors.New("a stream without an event")
		}
		return nil
	}
	if len(m.GetOutput().ProtoReflect().GetUnknown()) > 0 {
		return errors.New("the envelope has an unknown field")
	}
	out := m.GetOutput().GetValue()
	if limit := r.limit(); int64(len(out)) > limit {
		return fmt.Errorf("%d bytes, at most %d are allowed", len(out), limit)
	}
	if err := r.d.check.Any(m.GetOutput(), r.c.reply, r.c.rules); err != nil {
		return err
	}
	if r.d.check.Hides(r.c.reply.ProtoReflect().Descriptor()) && strict.Outside(proto.Clone(r.c.reply).ProtoReflect()) {
		return errors.New("the answer has a host_only field")
	}
	a.body, a.hasBody = out, true
	return nil
}

// head checks a result without its payload, which is checked by its own type.
func (d *Dispatcher) head(m *pluginv1.ActionResult) error {
	if m.GetStatus() == pluginv1.ActionStatus_ACTION_STATUS_SUCCEEDED && len(m.GetEvidence()) == 0 && m.GetUsage() == nil && m.GetCode() == 0 &&
		m.GetMessage() == "" && len(m.ProtoReflect().GetUnknown()) == 0 {
		return nil // one enum value that the contract has
	}
	head := &pluginv1.ActionResult{Status: m.GetStatus(), Evidence: m.GetEvidence(), Usage: m.GetUsage(), Code: m.GetCode(), Message: m.GetMessage()}
	head.ProtoReflect().SetUnknown(m.ProtoReflect().GetUnknown())
	b, err := marshal(head)
	if err != nil {
		return err
	}
	// The envelope belongs to the host's own minor, whatever was negotiated.
	if err := d.check.Walk(b, head.ProtoReflect().Descriptor(), strict.Rules{Version: "1.0.0"}); err != nil {
		return err
	}
	return d.check.Bounds(head)
}

// demandEvidence is step 11: without a declared type of evidence the action is
// PARTIAL (P-031). A dry run has no effect that evidence could be about.
func (c *call) demandEvidence() {
	if c.answer.status != StatusSucceeded && c.answer.status != StatusPartial || c.dryRun {
		return
	}
	for _, want := range c.verb.Evidence {
		found := false
		for _, e := range c.answer.evidence {
			found = found || e.GetType() == want && (e.GetReference() != "" || e.GetDigest() != "" || len(e.GetPayload()) > 0)
		}
		if !found {
			c.answer.missing = append(c.answer.missing, want)
			c.answer.status = StatusPartial
		}
	}
}
