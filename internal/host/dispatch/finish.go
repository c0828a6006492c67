package dispatch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/host/journal"
)

// recorded is what a replay needs of a finished action beside its answer.
type recorded struct {
	Code          int      `json:"code"`
	EffectUnknown bool     `json:"effect_unknown"`
	HasBody       bool     `json:"has_body"`
	Host          bool     `json:"host"`
	Message       string   `json:"message"`
	Missing       []string `json:"missing"`
}

// finish is step 12. The caller's context may have ended by now; the record is
// written nevertheless.
func (d *Dispatcher) finish(ctx context.Context, c *call) error {
	ctx = context.WithoutCancel(ctx)
	a := c.answer
	used := journal.Amount{Actions: c.held.Actions, Output: int64(len(a.body)), Wall: d.c.Now().Sub(c.began)}
	used.Tokens = a.usage.GetInputTokens() + a.usage.GetOutputTokens()
	f := journal.Finish{Key: c.key, Grant: c.authority.Grant.ID, Status: a.status, Used: used}
	if a.hasBody {
		f.Result = digest.Of(a.body)
		if len(a.body) <= journal.MaxAnswer {
			f.Answers = append(f.Answers, a.body)
		} else if _, err := d.c.Blobs.PutBytes(ctx, a.body); err != nil {
			return d.unrecorded(c, err)
		}
		// Whatever a provider answers is untrusted data.
		f.Tainted = validRun(c.authority.Actor.Run)
	}
	for _, e := range a.evidence {
		if len(e.GetPayload()) > 0 {
			f.Answers = append(f.Answers, e.GetPayload())
		}
	}
	var err error
	outcome := recorded{
		Code: int(a.code), EffectUnknown: a.effectUnknown, HasBody: a.hasBody, Host: a.host, Message: strings.ToValidUTF8(a.message, "�"),
		Missing: append([]string{}, a.missing...),
	}
	f.Outcome, err = outcome.canonical()
	if err != nil {
		return d.unrecorded(c, err)
	}
	entry, err := d.resultEntry(c, f.Result, used)
	if err != nil {
		return d.unrecorded(c, err)
	}
	if c.lazy {
		err = d.c.Journal.FinishLazy(ctx, f, entry)
	} else {
		_, err = d.c.Journal.Finish(ctx, f, entry)
	}
	if err != nil {
		return d.unrecorded(c, err)
	}
	d.budgets.settle(c.authority.Grant.ID, c.held, used)
	if f.Tainted != "" {
		d.runs.tainted(f.Tainted)
	}
	return c.outcome()
}

// unrecorded is an action that was carried out but whose result is not on disk:
// its row says started, so running the step again settles it.
func (d *Dispatcher) unrecorded(c *call, err error) error {
	return &UnsettledError{
		Verb: c.verb.Name(), Key: c.key, Compensating: c.verb.Compensating, kind: ErrInDoubt,
		Cause: fmt.Errorf("record the result: %w", err),
	}
}

// unsettled ends a call from which no result came. What can be repeated stays
// in doubt; what cannot is lost.
func (d *Dispatcher) unsettled(ctx context.Context, c *call, cause error) error {
	if !c.verb.Idempotent {
		return d.markLost(ctx, c, cause)
	}
	if entry, err := d.doubtEntry(c, cause); err == nil {
		_, err = d.c.Journal.Append(context.WithoutCancel(ctx), entry)
		cause = errors.Join(cause, err)
	}
	return &UnsettledError{Verb: c.verb.Name(), Key: c.key, Compensating: c.verb.Compensating, Cause: cause, kind: ErrInDoubt}
}

// lose ends an action that had started when the process died and cannot be
// repeated.
func (d *Dispatcher) lose(ctx context.Context, c *call, row journal.Row) error {
	c.held, c.decision.ID, c.action, c.resumed = row.Reserve, row.Decision, row.Action, true
	d.budgets.leftAfter(c.authority.Grant, row.Reserve) // loads the account that is settled
	return d.markLost(ctx, c, errors.New("the runtime stopped while it ran"))
}

func (d *Dispatcher) markLost(ctx context.Context, c *call, cause error) error {
	c.answer = &answer{status: StatusLost, code: codes.Aborted, message: clip(cause.Error(), 1024), host: true, effectUnknown: c.verb.SideEffecting()}
	return d.finish(ctx, c)
}

// outcome is what the caller gets for the answer; its reply is filled already.
func (c *call) outcome() error {
	a := c.answer
	switch a.status {
	case StatusSucceeded:
		return nil
	case StatusPartial:
		e := &PartialError{Verb: c.verb.Name(), Output: c.reply, Missing: a.missing, Compensating: c.verb.Compensating}
		if a.hasBody {
			e.Result = digest.Of(a.body)
		}
		return e
	case StatusLost:
		return &UnsettledError{Verb: c.verb.Name(), Key: c.key, Compensating: c.verb.Compensating, Cause: errors.New(a.message), kind: ErrLost}
	}
	return &FailedError{Verb: c.verb.Name(), Code: a.code, Message: a.message, EffectUnknown: a.effectUnknown, Compensating: c.verb.Compensating}
}

// replay gives the recorded result again: no new decision, no budget, no call.
func (d *Dispatcher) replay(ctx context.Context, c *call, row journal.Row) error {
	var r recorded
	if err := json.Unmarshal(row.Outcome, &r); err != nil {
		return fmt.Errorf("%s: read the recorded outcome: %w", c.verb.Name(), err)
	}
	c.answer = &answer{
		status: row.Status, code: codes.Code(r.Code), message: r.Message, host: r.Host, effectUnknown: r.EffectUnknown,
		hasBody: r.HasBody, missing: r.Missing,
	}
	if r.HasBody {
		body, inline, err := d.c.Journal.Blob(ctx, row.Result)
		if err == nil && !inline {
			body, err = d.c.Blobs.Bytes(row.Result, MaxEvents*(MaxEvent+8))
		}
		if err != nil {
			return fmt.Errorf("%s: read the recorded answer: %w", c.verb.Name(), err)
		}
		c.answer.body = body
		if c.verb.ServerStreaming {
			if err := c.replayEvents(body); err != nil {
				return fmt.Errorf("%s: read the recorded events: %w", c.verb.Name(), err)
			}
		} else if err := proto.Unmarshal(body, c.reply); err != nil {
			return fmt.Errorf("%s: read the recorded answer: %w", c.verb.Name(), err)
		}
	}
	return c.outcome()
}

func (c *call) replayEvents(b []byte) error {
	kind, err := protoregistry.GlobalTypes.FindMessageByName(c.verb.Output.FullName())
	if err != nil {
		return err
	}
	for len(b) > 0 {
		one, n := protowire.ConsumeBytes(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		event := kind.New().Interface()
		if err := proto.Unmarshal(one, event); err != nil {
			return err
		}
		if err := c.emit(event); err != nil {
			return err
		}
	}
	return nil
}

// clip cuts s to at most n bytes of valid UTF-8.
func clip(s string, n int) string {
	s = strings.ToValidUTF8(s, "�")
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "")
}
