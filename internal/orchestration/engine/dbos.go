package engine

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"time"

	"github.com/dbos-inc/dbos-transact-golang/dbos"
	_ "github.com/dbos-inc/dbos-transact-golang/dbos/driver/sqlite" // classifies SQLite's errors for the library
)

// Version names the code of the flows in this binary. Recovery takes only
// flows of its own version, so it is fixed by hand and changes only together
// with a way to carry open flows over.
const Version = "change-v1"

const (
	appName  = "numinance"
	flowName = "change"
	topic    = "events"
)

// DBOS is the engine on DBOS Transact and SQLite.
type DBOS struct {
	ctx dbos.Context
	run dbos.Workflow[string, string]
}

// Config says where an engine lives.
type Config struct {
	// DB is a handle on the state database with synchronous=FULL; the caller
	// closes it after Close.
	DB *sql.DB
	// Executor is the stable name of the process that owns the state directory.
	Executor string
	// Logger receives the library's messages; nil drops them.
	Logger *slog.Logger
	// Fault is told that a body failed. The flow stays open and runs again after the next start: the library
	// would otherwise close it for good. Nil ignores faults.
	Fault func(id string, err error)
}

// Open prepares the engine's tables and goes on with every flow that was not
// finished when its process ended. body is the code of all flows.
func Open(c Config, body Body) (*DBOS, error) {
	if c.DB == nil || c.Executor == "" || body == nil {
		return nil, errors.New("open engine: a database, an executor name and a body are needed")
	}
	logger := c.Logger
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	// The library cancels flows for good when the context it was opened with
	// ends; only Close may stop it.
	ctx, err := dbos.NewContext(context.Background(), dbos.Config{
		AppName:            appName,
		SQLiteSystemDB:     c.DB,
		ApplicationVersion: Version,
		ExecutorID:         c.Executor,
		Logger:             logger,
	})
	if err != nil {
		return nil, fmt.Errorf("open engine: %w", err)
	}
	e := &DBOS{ctx: ctx}
	// Variables of the environment override both names without a word.
	if ctx.GetApplicationVersion() != Version || ctx.GetExecutorID() != c.Executor {
		return nil, errors.Join(errors.New("open engine: unset DBOS__APPVERSION and DBOS__VMID: they would hide open changes"), e.Close(time.Second))
	}
	e.run = func(ctx dbos.Context, input string) (string, error) {
		id, err := dbos.GetWorkflowID(ctx)
		if err == nil {
			err = guarded(body, &flow{ctx: ctx, id: id, input: []byte(input)})
		}
		if err != nil {
			if c.Fault != nil && ctx.Err() == nil {
				c.Fault(id, err)
			}
			<-ctx.Done()
		}
		return "", err
	}
	dbos.RegisterWorkflow(ctx, e.run,
		dbos.WithWorkflowName(flowName),
		// The default would give a Change up that outlived a hundred starts.
		dbos.WithMaxRecoveryAttempts(math.MaxInt32))
	if err := dbos.Launch(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("open engine: %w", err), e.Close(time.Second))
	}
	return e, nil
}

// Start begins a flow. Starting one that exists changes nothing.
func (e *DBOS) Start(_ context.Context, id string, input []byte) error {
	if _, err := dbos.RunWorkflow(e.ctx, e.run, string(input), dbos.WithWorkflowID(id)); err != nil {
		return fmt.Errorf("start %s: %w", id, err)
	}
	return nil
}

// Send puts a message into the flow's mailbox, durably. A key that was used
// before adds no second message.
func (e *DBOS) Send(_ context.Context, id, key string, message []byte) error {
	if err := dbos.Send(e.ctx, id, string(message), topic, dbos.WithIdempotencyKey(id+"/"+key)); err != nil {
		return fmt.Errorf("send to %s: %w", id, err)
	}
	return nil
}

// Close stops every flow where it stands, waiting at most wait for the steps
// that run to return.
func (e *DBOS) Close(wait time.Duration) error {
	if err := dbos.Shutdown(e.ctx, wait); err != nil {
		return fmt.Errorf("close engine: %w", err)
	}
	return nil
}

type flow struct {
	ctx   dbos.Context
	id    string
	input []byte
}

func (f *flow) ID() string    { return f.id }
func (f *flow) Input() []byte { return f.input }

func (f *flow) Steps(steps ...Step) ([][]byte, error) {
	out := make([][]byte, len(steps))
	if len(steps) == 1 {
		got, err := dbos.RunAsStep(f.ctx, text(steps[0]), dbos.WithStepName(steps[0].Name))
		out[0] = []byte(got)
		return out, f.err(steps[0].Name, err)
	}
	waits := make([]<-chan dbos.StepOutcome[string], len(steps))
	for i, s := range steps {
		ch, err := dbos.Go(f.ctx, text(s), dbos.WithStepName(s.Name))
		if err != nil {
			return nil, f.err(s.Name, err)
		}
		waits[i] = ch
	}
	var first error
	for i, ch := range waits { // all of them: none may outlive the flow
		got := <-ch
		if got.Err != nil && first == nil {
			first = f.err(steps[i].Name, got.Err)
		}
		out[i] = []byte(got.Result)
	}
	return out, first
}

func text(s Step) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) { return string(s.Run(ctx)), nil }
}

func (f *flow) Receive(wait time.Duration) ([]byte, bool, error) {
	got, err := dbos.Recv[string](f.ctx, topic, wait)
	if errors.Is(err, dbos.ErrTimeout) && errors.Is(err, context.DeadlineExceeded) && f.ctx.Err() == nil {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, f.err("receive", err)
	}
	return []byte(got), got != "", nil
}

func (f *flow) err(doing string, err error) error {
	switch {
	case err == nil:
		return nil
	case f.ctx.Err() != nil:
		return fmt.Errorf("%s: %w", doing, ErrStopped)
	default:
		return fmt.Errorf("%s: %w", doing, err)
	}
}

// guarded turns a panic of the body into a fault, so that it does not close
// the flow.
func guarded(body Body, f Flow) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("flow panicked: %v", r)
		}
	}()
	return body(f)
}
