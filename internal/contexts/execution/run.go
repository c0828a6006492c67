package execution

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	authorexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
	"github.com/numinance/numinance/internal/core/ports"
)

// Causes with which a run's context ends.
var (
	errIdle     = errors.New("the adapter said and asked nothing for too long")
	errDeadline = errors.New("the run's deadline passed")
)

// cleanup bounds what happens after a run's own context is done.
const cleanup = 30 * time.Second

// carryOut tells the life of one run once: check, sandbox, adapter, stream,
// close the desk, snapshot, destroy, diff. The sandbox is gone when it returns.
func (c *Context) carryOut(ctx context.Context, r Run, m mode) (res Result, err error) {
	r.Authority.Caller = ports.CallerExecution
	if err := r.check(m); err != nil {
		return Result{}, fmt.Errorf("run %s: %w", r.Authority.Grant.Run, err)
	}
	request, err := r.request()
	if err != nil {
		return Result{}, fmt.Errorf("run %s: %w", r.Authority.Grant.Run, err)
	}
	config, err := r.config()
	if err != nil {
		return Result{}, fmt.Errorf("run %s: %w", r.Authority.Grant.Run, err)
	}
	wall := r.Deadline.Sub(c.Now())
	if g := r.Authority.Grant.Budget.Wall; g > 0 {
		wall = min(wall, g)
	}
	if wall <= 0 {
		return Result{}, fmt.Errorf("run %s: its time is over before it began", r.Authority.Grant.Run)
	}

	spec := SandboxSpec{Authority: r.Authority, Revision: r.Revision, ReadOnly: m != authoring, WallTime: wall + cleanup}
	if r.Restore != nil {
		spec.Restore = *r.Restore
	}
	box, err := c.Sandboxes.Create(ctx, spec)
	if err != nil {
		return Result{}, fmt.Errorf("run %s: create its sandbox: %w", r.Authority.Grant.Run, err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanup)
		defer cancel()
		if derr := box.Destroy(ctx); derr != nil {
			err = errors.Join(err, fmt.Errorf("run %s: destroy its sandbox: %w", r.Authority.Grant.Run, derr))
		}
	}()

	runCtx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	deadline := time.AfterFunc(wall, func() { cancel(errDeadline) })
	defer deadline.Stop()
	idle := time.AfterFunc(c.Idle, func() { cancel(errIdle) })
	defer idle.Stop()

	desk := &Desk{
		tools: c.Dispatcher, authority: r.Authority, box: box, readable: r.readable(),
		busy: func() { idle.Reset(c.Idle) },
	}
	defer desk.close()
	// Task and plan come from a tracker and a harness. From here on the run has
	// read them, for every rule that asks, whether or not the adapter says so.
	if err := c.Dispatcher.Taint(runCtx, r.Authority.Grant.Run); err != nil {
		return Result{}, fmt.Errorf("run %s: %w", r.Authority.Grant.Run, err)
	}
	adapter, err := c.Adapters.Launch(runCtx, box, Launch{Executor: r.Executor, Authority: r.Authority, Config: config, Desk: desk})
	if err != nil {
		return Result{}, fmt.Errorf("run %s: start its adapter %s: %w", r.Authority.Grant.Run, r.Executor, err)
	}
	var last *authorexecutorv1.ExecutionEvent
	stream := &Stream{}
	follow := func() error {
		client := authorexecutorv1.NewAuthorExecutorServiceClient(c.Dispatcher.Via(r.Authority, adapter.Provider()))
		next, err := open(runCtx, client, request, m)
		if err != nil {
			return err
		}
		last, err = c.follow(next, stream, desk, r.Observer)
		return err
	}
	followErr := follow()
	cause := context.Cause(runCtx)
	// From here on nothing that the adapter still does counts.
	desk.close()
	if cerr := adapter.Close(); cerr != nil && followErr == nil {
		followErr = fmt.Errorf("close the adapter: %w", cerr)
	}
	for _, d := range desk.receipts.unclaimed() {
		showDecision(r.Observer, c.Now(), noSubject, d)
	}

	res = c.judge(stream, desk, last, followErr, cause)
	if refused := refusal(followErr); refused != nil && stream.Count() == 0 {
		return Result{}, fmt.Errorf("run %s: %w", r.Authority.Grant.Run, refused)
	}
	if res.Outcome != Completed {
		return res, nil
	}
	return c.harvest(ctx, r, m, box, last, res)
}

// next yields events until io.EOF.
type next func() (*authorexecutorv1.ExecutionEvent, int, error)

// open starts the verb that the mode is for.
func open(ctx context.Context, client authorexecutorv1.AuthorExecutorServiceClient, r *authorexecutorv1.ChangeExecutionRequest, m mode) (next, error) {
	if m == planning {
		s, err := client.Plan(ctx, &authorexecutorv1.PlanRequest{Request: r})
		if err != nil {
			return nil, err
		}
		return func() (*authorexecutorv1.ExecutionEvent, int, error) {
			p, err := s.Recv()
			return p.GetEvent(), proto.Size(p), err
		}, nil
	}
	s, err := client.Execute(ctx, &authorexecutorv1.ExecuteRequest{Request: r})
	if err != nil {
		return nil, err
	}
	return func() (*authorexecutorv1.ExecutionEvent, int, error) {
		p, err := s.Recv()
		return p.GetEvent(), proto.Size(p), err
	}, nil
}

// follow reads the stream to its end and holds each event against rules and
// receipts before it is shown.
func (c *Context) follow(recv next, stream *Stream, desk *Desk, o Observer) (last *authorexecutorv1.ExecutionEvent, err error) {
	for {
		e, size, err := recv()
		if errors.Is(err, io.EOF) {
			return last, stream.End()
		}
		if err != nil {
			return last, err
		}
		desk.busy()
		if err := stream.Next(e, size); err != nil {
			return last, err
		}
		echoed, err := desk.receipts.Settle(e)
		if err != nil {
			return last, err
		}
		show(o, c.Now(), e, echoed)
		last = e
	}
}

// judge says how the run ended. What the host saw comes before what the adapter
// said: an exhausted budget, a passed deadline or a false claim is not undone by
// EXECUTION_COMPLETED.
func (c *Context) judge(stream *Stream, desk *Desk, last *authorexecutorv1.ExecutionEvent, err, cause error) Result {
	res := Result{Checkpoint: desk.receipts.Last(), Stats: desk.receipts.Stats()}
	res.Stats.Events = stream.Count()
	end := func(o Outcome, format string, args ...any) Result {
		res.Outcome, res.Reason = o, fmt.Sprintf(format, args...)
		return res
	}
	switch {
	case errors.Is(err, ErrStream) || errors.Is(err, ErrClaim):
		return end(Contradicted, "%v", err)
	case desk.receipts.OutOfBudget():
		return end(BudgetExhausted, "the run used up its budget after %d decisions; raise the budget in the Profile and start a new run", res.Stats.Decisions)
	case errors.Is(cause, errIdle):
		return end(Stalled, "%v (%v); the run was ended", cause, c.Idle)
	case errors.Is(cause, errDeadline):
		return end(Stalled, "%v; the run was ended", cause)
	case cause != nil:
		return end(Cancelled, "the run was cancelled: %v", cause)
	case err != nil && code(err) == codes.DeadlineExceeded:
		return end(Stalled, "the adapter's call ran out of time: %v", err)
	case err != nil && !lost(code(err)):
		return end(HarnessFailed, "the adapter refused the run: %v", err)
	case err != nil:
		return end(Lost, "the adapter ended without an end of its stream: %v", err)
	case !stream.Completed():
		return end(HarnessFailed, "the harness ended with EXECUTION_FAILED: %s", reasonOf(last))
	}
	return end(Completed, "")
}

// lost says whether a call with this code may go better from the last
// checkpoint. The others would fail the same way again.
func lost(c codes.Code) bool {
	switch c {
	case codes.InvalidArgument, codes.NotFound, codes.PermissionDenied, codes.FailedPrecondition, codes.Unimplemented, codes.OutOfRange, codes.ResourceExhausted:
		return false
	}
	return true
}

// code is the status code of an error of a stock client, looking through what
// wraps it.
func code(err error) codes.Code {
	var s interface{ GRPCStatus() *status.Status }
	if errors.As(err, &s) {
		return s.GRPCStatus().Code()
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return codes.DeadlineExceeded
	}
	return codes.Unknown
}

// harvest takes what a completed run left: an author's tree, a reviewer's
// verdict, a plan.
func (c *Context) harvest(ctx context.Context, r Run, m mode, box Sandbox, last *authorexecutorv1.ExecutionEvent, res Result) (Result, error) {
	run := r.Authority.Grant.Run
	switch m {
	case reviewing:
		review, err := c.readReview(last)
		if err != nil {
			return contradicted(res, err), nil
		}
		res.Review = review
		return res, nil
	case planning:
		plan, err := c.readPlan(last)
		if err != nil {
			return contradicted(res, err), nil
		}
		res.Plan = plan
		return res, nil
	}
	snapshot, err := box.Snapshot(ctx, ScopeWork)
	if err != nil {
		return Result{}, fmt.Errorf("run %s: take its work tree: %w", run, err)
	}
	candidate, err := c.Trees.Diff(ctx, DiffSpec{Authority: r.Authority, Base: r.Revision, Snapshot: snapshot, Paths: r.Authority.Grant.Paths})
	if err != nil {
		return Result{}, fmt.Errorf("run %s: read what it changed: %w", run, err)
	}
	res.Candidate = &candidate
	return res, nil
}

func contradicted(res Result, err error) Result {
	res.Outcome, res.Reason = Contradicted, err.Error()
	return res
}
