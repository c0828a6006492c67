package orchestration

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/orchestration/engine"
)

// longWait is how often a Change without a deadline looks up while it waits.
const longWait = 30 * 24 * time.Hour

// answer is the recorded result of a command's step.
type answer struct {
	// Look: the command was not started, because the mailbox has to be looked
	// into first.
	Look  bool          `json:"look,omitempty"`
	Event *change.Event `json:"event,omitempty"`
}

// live is the code of every flow: apply what happened, start what is open. It
// runs from the beginning after each start of the process; what is recorded is
// not done again. Whatever it decides, it decides from recorded results.
func (r *Runner) live(f engine.Flow) error {
	var p proposal
	if err := json.Unmarshal(f.Input(), &p); err != nil {
		return fmt.Errorf("read proposal of %s: %w", f.ID(), err)
	}
	s := change.Propose(identity.ChangeID(f.ID()), p.Request, p.At)
	if err := r.record(f, s, Entry{Change: s.ID, After: s.Status, At: p.At, Ask: &p.Request}); err != nil {
		return err
	}
	for !s.Status.Terminal() {
		events, err := r.next(f, s)
		if err != nil {
			return err
		}
		for _, e := range events {
			if s, err = r.apply(f, s, e); err != nil {
				return err
			}
		}
	}
	return nil
}

// next carries out the open commands, or waits for an event.
func (r *Runner) next(f engine.Flow, s change.State) ([]change.Event, error) {
	open := change.Next(s)
	if len(open) == 0 {
		return r.await(f, s)
	}
	// One look at the mailbox decides for all commands that start together.
	look := sync.OnceValue(func() bool { return r.takeMail(s.ID) })
	steps := make([]engine.Step, len(open))
	for i, c := range open {
		steps[i] = engine.Step{Name: c.Step(), Run: func(ctx context.Context) []byte {
			return encode(r.perform(ctx, Job{State: s, Command: c}, look))
		}}
	}
	results, err := f.Steps(steps...)
	if err != nil {
		return nil, err
	}
	var events []change.Event
	looked := false
	for i, raw := range results {
		var a answer
		if err := json.Unmarshal(raw, &a); err != nil {
			return nil, fmt.Errorf("read result of %s: %w", steps[i].Name, err)
		}
		looked = looked || a.Look
		if a.Event != nil {
			events = append(events, *a.Event)
		}
	}
	for looked {
		e, ok, err := receive(f, 0)
		if err != nil {
			return nil, err
		}
		if looked = ok; ok {
			events = append(events, e)
		}
	}
	return events, nil
}

// await waits for an event from outside; when the state's deadline passes, the
// event is the timer.
func (r *Runner) await(f engine.Flow, s change.State) ([]change.Event, error) {
	wait := longWait
	if !s.Deadline.IsZero() {
		now, err := r.now(f)
		if err != nil {
			return nil, err
		}
		if wait = s.Deadline.Sub(now); wait <= 0 {
			return []change.Event{{Kind: change.Timer, At: now}}, nil
		}
	}
	e, ok, err := receive(f, wait)
	if err != nil || !ok {
		return nil, err
	}
	return []change.Event{e}, nil
}

// now is the time as a recorded step, so that a replay sees the same.
func (r *Runner) now(f engine.Flow) (time.Time, error) {
	out, err := f.Steps(engine.Step{Name: "clock", Run: func(context.Context) []byte {
		return encode(stamp(r.c.Now()))
	}})
	if err != nil {
		return time.Time{}, err
	}
	var at time.Time
	if err := json.Unmarshal(out[0], &at); err != nil {
		return at, fmt.Errorf("read clock: %w", err)
	}
	return at, nil
}

func receive(f engine.Flow, wait time.Duration) (e change.Event, ok bool, err error) {
	raw, ok, err := f.Receive(wait)
	if err != nil || !ok {
		return e, false, err
	}
	if err := json.Unmarshal(raw, &e); err != nil {
		return e, false, fmt.Errorf("read message: %w", err)
	}
	return e, true, nil
}

// perform runs one command, unless the mailbox has to be looked into first.
func (r *Runner) perform(ctx context.Context, j Job, look func() bool) answer {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r.begin(j, cancel)
	defer r.end(j)
	if look() {
		return answer{Look: true}
	}
	began := r.c.Now()
	r.observe(Progress{Change: j.State.ID, Status: j.State.Status, Step: j.Command.Step()})
	result, err := settle(ctx, r.c.Steps, j)
	e := outcome(ctx, j.Command, result, err)
	e.At = stamp(r.c.Now())
	r.observe(Progress{
		Change: j.State.ID, Status: j.State.Status, Step: j.Command.Step(),
		Done: true, Took: e.At.Sub(began), Class: e.Class, Reason: e.Reason,
	})
	return answer{Event: &e}
}

func (r *Runner) begin(j Job, cancel context.CancelCauseFunc) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running[j.State.ID] == nil {
		r.running[j.State.ID] = map[change.CommandID]running{}
	}
	r.running[j.State.ID][j.Command.ID] = running{command: j.Command, cancel: cancel}
}

func (r *Runner) end(j Job) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.running[j.State.ID], j.Command.ID)
}

// takeMail reports whether a message may wait: one was sent, or the Change was
// taken over from a process that may have been sent one.
func (r *Runner) takeMail(id identity.ChangeID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	waits, known := r.mail[id]
	r.mail[id] = false
	return waits || !known
}

// apply records the event and returns the state after it. A malformed message
// is dropped; a malformed outcome is a broken step, which must not leave its
// command open for ever.
func (r *Runner) apply(f engine.Flow, s change.State, e change.Event) (change.State, error) {
	next, err := change.Apply(s, e)
	if err != nil && e.Kind == change.Outcome {
		e.Class, e.Result, e.Reason = change.Infrastructure, change.Result{}, cut(err.Error())
		next, err = change.Apply(s, e)
	}
	if err != nil {
		r.observe(Progress{Change: s.ID, Status: s.Status, Step: "refused-event", Done: true, Reason: err.Error()})
		r.moved()
		return s, nil
	}
	return next, r.record(f, next, Entry{
		Change: s.ID, Seq: next.Seq, Before: s.Status, After: next.Status, At: e.At, Event: &e,
		AfterEnd: next.Status.Terminal(),
	})
}

// record makes the event durable and projects the state. It does not give up:
// nothing follows an event that is not recorded. After the Runner's patience
// whoever waits is told.
func (r *Runner) record(f engine.Flow, s change.State, e Entry) error {
	_, err := f.Steps(engine.Step{Name: fmt.Sprintf("record-%d", e.Seq), Run: func(ctx context.Context) []byte {
		began := time.Now()
		for pause := 50 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
			err := r.c.Recorder.Record(ctx, e)
			if err == nil {
				err = r.view.put(ctx, r.view.db, s)
			}
			if err == nil {
				break
			}
			if time.Since(began) > r.c.Patience {
				r.fault(s.ID, err)
			}
			select {
			case <-ctx.Done():
				return nil // stopping: the engine runs this step again
			case <-time.After(pause):
			}
		}
		r.mu.Lock()
		delete(r.faults, s.ID)
		r.mu.Unlock()
		r.moved()
		if e.Before != e.After {
			r.observe(Progress{Change: s.ID, Status: e.After, Reason: s.Failure.Reason})
		}
		return []byte("ok")
	}})
	return err
}

// encode is for values that JSON can always hold.
func encode(v any) []byte {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("encode a recorded result: %v", err))
	}
	return raw
}
