package orchestration

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/orchestration/engine"
)

// Observer is told what happens, for a person to watch. It must not block.
type Observer interface {
	Progress(Progress)
}

// Progress is one thing a watcher sees: a command that began or ended, or a
// status that was entered.
type Progress struct {
	Change identity.ChangeID
	Status change.Status
	// Step is the command's step name; empty for an entered status.
	Step string
	// Done is set when the command ended, after Took, with Class.
	Done  bool
	Took  time.Duration
	Class change.Class
	// Reason says why, if the command did not end well.
	Reason string
}

// Config says what a Runner works with.
type Config struct {
	// DB is a handle on the state database, opened by host/store, for the
	// engine and the read model. The caller closes it after the Runner.
	DB       *sql.DB
	Recorder Recorder
	Steps    Steps
	// Observer may be nil.
	Observer Observer
	// Executor is the stable name of the owner of the state directory.
	Executor string
	// Now gives the time of events.
	Now func() time.Time
	// Logger may be nil.
	Logger *slog.Logger
	// Patience is how long the journal may be unwritable before Wait gives up;
	// zero is 30 s.
	Patience time.Duration
}

// Runner drives every open Change of the state directory. It is safe for
// concurrent use.
type Runner struct {
	c      Config
	engine *engine.DBOS
	view   *ReadModel

	mu      sync.Mutex // guards what follows
	mail    map[identity.ChangeID]bool
	running map[identity.ChangeID]map[change.CommandID]running
	faults  map[identity.ChangeID]error
	news    chan struct{} // closed and replaced whenever something moved
}

type running struct {
	command change.Command
	cancel  context.CancelCauseFunc
}

// Open goes on with every Change that was not at its end, and returns the
// Runner that drives them.
func Open(ctx context.Context, c Config) (*Runner, error) {
	if c.DB == nil || c.Recorder == nil || c.Steps == nil || c.Now == nil || c.Executor == "" {
		return nil, errors.New("open runner: database, recorder, steps, clock and executor are needed")
	}
	if c.Patience <= 0 {
		c.Patience = 30 * time.Second
	}
	view, err := OpenReadModel(ctx, c.DB)
	if err != nil {
		return nil, err
	}
	r := &Runner{
		c: c, view: view,
		mail:    map[identity.ChangeID]bool{},
		running: map[identity.ChangeID]map[change.CommandID]running{},
		faults:  map[identity.ChangeID]error{},
		news:    make(chan struct{}),
	}
	r.engine, err = engine.Open(engine.Config{
		DB: c.DB, Executor: c.Executor, Logger: c.Logger,
		Fault: func(id string, err error) { r.fault(identity.ChangeID(id), err) },
	}, r.live)
	if err != nil {
		return nil, err
	}
	return r, nil
}

// Close stops every Change where it stands; the next Open goes on. It waits at
// most wait for running steps to give up.
func (r *Runner) Close(wait time.Duration) error { return r.engine.Close(wait) }

// NewID returns a fresh change id.
func NewID() identity.ChangeID {
	var b [5]byte
	_, _ = rand.Read(b[:]) // never fails
	return identity.ChangeID("chg-" + hex.EncodeToString(b[:]))
}

// proposal is the input of a flow.
type proposal struct {
	Request change.Request `json:"request"`
	At      time.Time      `json:"at"`
}

// Propose begins a Change. Proposing an id again changes nothing.
func (r *Runner) Propose(ctx context.Context, id identity.ChangeID, req change.Request) error {
	if err := checkRequest(id, req); err != nil {
		return fmt.Errorf("propose %s: %w", id, err)
	}
	in, err := json.Marshal(proposal{Request: req, At: stamp(r.c.Now())})
	if err != nil {
		return fmt.Errorf("propose %s: %w", id, err)
	}
	r.mu.Lock()
	if _, known := r.mail[id]; !known {
		r.mail[id] = false // a new Change has no message that could wait
	}
	r.mu.Unlock()
	if err := r.engine.Start(ctx, string(id), in); err != nil {
		return err
	}
	_, err = r.until(ctx, id, func(change.State) bool { return true })
	return err
}

func checkRequest(id identity.ChangeID, req change.Request) error {
	switch {
	case !identity.ValidID(id) || id == identity.SystemChange:
		return fmt.Errorf("id %q: want 1 to 63 of a-z, 0-9 and -", string(id))
	case req.Repository == "":
		return errors.New("no repository")
	case req.Ticket == "" || req.Project == "":
		return errors.New("no ticket")
	case !req.Requester.Valid() || !req.Author.Valid() || !req.Reviewer.Valid():
		return errors.New("requester, author and reviewer must be principals such as human:alice")
	case req.Author == req.Reviewer:
		return fmt.Errorf("author and reviewer are both %s: nobody reviews their own work", req.Author)
	}
	return nil
}

// Run proposes a Change and waits for it.
func (r *Runner) Run(ctx context.Context, id identity.ChangeID, req change.Request) (change.State, error) {
	if err := r.Propose(ctx, id, req); err != nil {
		return change.State{}, err
	}
	return r.wait(ctx, id, 0)
}

// Wait returns once the Change is at its end or waits for a person, or with an
// error if ctx ends or the runtime below it fails; the Change then stays as it
// is and can be resumed.
func (r *Runner) Wait(ctx context.Context, id identity.ChangeID) (change.State, error) {
	if _, err := r.view.Get(ctx, id); err != nil {
		return change.State{}, err
	}
	return r.wait(ctx, id, 0)
}

// Cancel takes a Change back: its grants are revoked before anything else. It
// returns when the Change is at its end.
func (r *Runner) Cancel(ctx context.Context, id identity.ChangeID, by identity.Principal, why string) (change.State, error) {
	return r.tell(ctx, id, change.Event{Kind: change.CancelRequested, By: by, Reason: cut(why)})
}

// Approve adds an approval. Its signature was checked by the caller.
func (r *Runner) Approve(ctx context.Context, id identity.ChangeID, a change.Approval) (change.State, error) {
	return r.tell(ctx, id, change.Event{Kind: change.Approved, By: a.By, Approval: &a})
}

// Withdraw refuses a Change whose policy was withdrawn.
func (r *Runner) Withdraw(ctx context.Context, id identity.ChangeID, why string) (change.State, error) {
	return r.tell(ctx, id, change.Event{Kind: change.PolicyWithdrawn, Reason: cut(why)})
}

// Resume goes on with a Change: one that escalated starts its command anew,
// one that a crash left open is already being driven.
func (r *Runner) Resume(ctx context.Context, id identity.ChangeID, by identity.Principal) (change.State, error) {
	s, err := r.view.Get(ctx, id)
	if err != nil {
		return s, err
	}
	if s.Status != change.Escalated {
		return r.wait(ctx, id, 0)
	}
	return r.tell(ctx, id, change.Event{Kind: change.ResumeRequested, By: by})
}

// Get and List read the projection.
func (r *Runner) Get(ctx context.Context, id identity.ChangeID) (change.State, error) {
	return r.view.Get(ctx, id)
}

// List returns at most limit Changes, newest first.
func (r *Runner) List(ctx context.Context, limit int) ([]change.State, error) {
	return r.view.List(ctx, limit)
}

// tell puts an event into the Change's mailbox and waits for what it leads to.
func (r *Runner) tell(ctx context.Context, id identity.ChangeID, e change.Event) (change.State, error) {
	s, err := r.view.Get(ctx, id)
	if err != nil {
		return s, err
	}
	if s.Status.Terminal() {
		return s, nil
	}
	e.At = stamp(r.c.Now())
	raw, err := json.Marshal(e)
	if err != nil {
		return s, fmt.Errorf("tell %s of %s: %w", id, e.Kind, err)
	}
	var key [8]byte
	_, _ = rand.Read(key[:])
	if err := r.engine.Send(ctx, string(id), hex.EncodeToString(key[:]), raw); err != nil {
		return s, err
	}
	r.mailArrived(id, e.Kind == change.CancelRequested || e.Kind == change.PolicyWithdrawn)
	return r.wait(ctx, id, s.Seq+1)
}

// mailArrived makes the flow look into its mailbox before its next command,
// and cuts off what may be cut off.
func (r *Runner) mailArrived(id identity.ChangeID, interrupt bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mail[id] = true
	if !interrupt {
		return
	}
	for _, run := range r.running[id] {
		if run.command.Interruptible() {
			run.cancel(errInterrupted)
		}
	}
}

// wait returns when the projected state has at least seq events and nothing
// but a person can move it.
func (r *Runner) wait(ctx context.Context, id identity.ChangeID, seq int) (change.State, error) {
	return r.until(ctx, id, func(s change.State) bool {
		return s.Seq >= seq && (s.Status.Terminal() || s.Waiting())
	})
}

// until returns when the projected state satisfies enough.
func (r *Runner) until(ctx context.Context, id identity.ChangeID, enough func(change.State) bool) (change.State, error) {
	for {
		r.mu.Lock()
		news, fault := r.news, r.faults[id]
		r.mu.Unlock()
		s, err := r.view.Get(ctx, id)
		switch {
		case err != nil && ctx.Err() == nil && !errors.Is(err, ErrUnknownChange):
			return s, err
		case err == nil && enough(s):
			return s, nil
		case fault != nil:
			return s, fmt.Errorf("%s stopped at %s and can be resumed: %w", id, s.Status, fault)
		}
		select {
		case <-ctx.Done():
			return s, fmt.Errorf("wait for %s: %w", id, context.Cause(ctx))
		case <-news:
		}
	}
}

func (r *Runner) fault(id identity.ChangeID, err error) {
	r.mu.Lock()
	r.faults[id] = err
	r.mu.Unlock()
	r.moved()
}

func (r *Runner) moved() {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.news)
	r.news = make(chan struct{})
}

func (r *Runner) observe(p Progress) {
	if r.c.Observer != nil {
		r.c.Observer.Progress(p)
	}
}
