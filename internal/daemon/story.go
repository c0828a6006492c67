package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/numinance/numinance/internal/contexts/execution"
	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/edge/cli"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/host/egress"
	"github.com/numinance/numinance/internal/host/hostservice"
	"github.com/numinance/numinance/internal/host/journal"
	"github.com/numinance/numinance/internal/orchestration"
)

// Kinds of the entries that the daemon itself writes.
const (
	// kindRunEvent is one step of a harness run as it was shown: a claim of the
	// harness, or the decision that a claim echoes.
	kindRunEvent = "RUN_EVENT"
	// kindViolation is a change that the host's own diff refused.
	kindViolation = "PATH_VIOLATION"
)

const hostRecorded = "host-recorded"

// watchers are the people who look at Changes while they run.
type watchers struct {
	mu sync.Mutex // guards of
	of map[identity.ChangeID][]*patient
}

// watch tells o what happens to a Change until the returned function is called,
// which returns when o has been told everything before it.
func (d *Daemon) watch(id identity.ChangeID, o cli.Observer) (stop func()) {
	w := &d.watchers
	one := newPatient(o)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.of[id] = append(w.of[id], one)
	return func() {
		w.forget(id, one)
		one.end()
	}
}

func (w *watchers) forget(id identity.ChangeID, one *patient) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.of[id] = slices.DeleteFunc(w.of[id], func(o *patient) bool { return o == one })
	if len(w.of[id]) == 0 {
		delete(w.of, id)
	}
}

// each has every watcher of a Change told, and waits for none of them.
func (w *watchers) each(id identity.ChangeID, tell func(cli.Observer)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range w.of[id] {
		o.tell(tell)
	}
}

// patient tells one observer everything in order in a goroutine of its own, so
// that somebody who does not read on holds up no run.
type patient struct {
	o     cli.Observer
	ended chan struct{}

	mu    sync.Mutex // guards the rest
	cond  sync.Cond
	queue []func(cli.Observer)
	over  bool
}

func newPatient(o cli.Observer) *patient {
	p := &patient{o: o, ended: make(chan struct{})}
	p.cond.L = &p.mu
	go p.run()
	return p
}

func (p *patient) tell(what func(cli.Observer)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queue = append(p.queue, what)
	p.cond.Signal()
}

// run ends once end was called and everything is told.
func (p *patient) run() {
	defer close(p.ended)
	for {
		p.mu.Lock()
		for len(p.queue) == 0 && !p.over {
			p.cond.Wait()
		}
		told := p.queue
		p.queue = nil
		p.mu.Unlock()
		if len(told) == 0 {
			return
		}
		for _, what := range told {
			what(p.o)
		}
	}
}

func (p *patient) end() {
	p.mu.Lock()
	p.over = true
	p.cond.Signal()
	p.mu.Unlock()
	<-p.ended
}

// Progress shows where a Change stands and has its head anchored at each change
// of state; it is the orchestration's observer.
func (d *Daemon) Progress(p orchestration.Progress) {
	if p.Step == "" {
		d.anchors.want(p.Change)
	}
	d.watchers.each(p.Change, func(o cli.Observer) {
		switch {
		case p.Step == "":
			o.Stage(string(p.Status), false, 0)
		case p.Done && p.Class != change.OK:
			o.Line(cli.Event{At: d.now(), Kind: strings.ToUpper(string(p.Class)), Source: hostRecorded, Subject: p.Step, Detail: p.Reason})
		case p.Done:
			step, _, _ := strings.Cut(p.Step, "#")
			o.Stage(step, true, p.Took)
		}
	})
}

// runEvent is the body of a kindRunEvent entry.
type runEvent struct {
	Type     string `json:"type"`
	Source   string `json:"source"`
	Subject  string `json:"subject"` // untrusted
	Decision string `json:"decision"`
	Effect   string `json:"effect"`
	Reason   string `json:"reason"`
	Layer    string `json:"layer"`
	Run      string `json:"run"`
}

// storyteller shows and records the steps of one run, in order.
type storyteller struct {
	d      *Daemon
	change identity.ChangeID
	run    identity.RunID
}

// Observe records one step and shows it. A step that cannot be recorded is not
// shown either; the decisions themselves are on record already.
func (s storyteller) Observe(l execution.Line) {
	const most = 300
	e := runEvent{Type: l.Type, Source: l.Origin.String(), Subject: l.Subject.Line(most), Run: string(s.run)}
	if l.Decision != nil {
		e.Decision, e.Effect = string(l.Decision.ID), l.Decision.Effect.String()
		e.Reason, e.Layer = why(*l.Decision)
	}
	body, err := digest.Canonical(e)
	if err != nil {
		return
	}
	if _, err := s.d.journal.Append(context.Background(), journal.Entry{At: l.At, Change: s.change, Kind: kindRunEvent, Body: body}); err != nil {
		return
	}
	s.d.watchers.each(s.change, func(o cli.Observer) { o.Line(e.line(l.At)) })
}

// why gives the first reason of a decision and its layer.
func why(d policy.Decision) (text, layer string) {
	if len(d.Reasons) == 0 {
		return "", ""
	}
	r := d.Reasons[0]
	return fmt.Sprintf("%s %s: %s", r.Layer, r.ID, r.Text), r.Layer
}

func (e runEvent) line(at time.Time) cli.Event {
	out := cli.Event{At: at, Kind: e.Type, Source: e.Source, Subject: e.Subject}
	if e.Type == execution.PolicyDecision {
		out.Subject, out.Detail = e.Effect, e.Reason
		if e.Effect != policy.Allow.String() {
			out.Layer = e.Layer
		} else {
			out.Detail = ""
		}
	}
	return out
}

// Events returns the recorded story of a Change in order.
func (d *Daemon) Events(ctx context.Context, s string) ([]cli.Event, error) {
	id, err := d.id(s)
	if err != nil {
		return nil, err
	}
	st, err := d.runner.Get(ctx, id)
	if err != nil {
		return nil, unknown(err)
	}
	var out []cli.Event
	for seq := int64(0); ; {
		page, err := d.journal.AfterOf(ctx, id, seq, pageSize)
		if err != nil {
			return nil, err
		}
		for _, e := range page {
			seq = e.Seq
			if line, ok, err := tell(e); err != nil {
				return nil, fmt.Errorf("journal entry %d: %w", e.Seq, err)
			} else if ok {
				out = append(out, line)
			}
		}
		if len(page) >= pageSize {
			continue
		}
		if st.Status.Terminal() {
			// The entry that ends a Change comes after the end of its own chain.
			out = append(out, cli.Event{At: st.Updated, Kind: "STATE", Source: hostRecorded, Subject: string(st.Status), Detail: st.Failure.Reason})
		}
		return out, nil
	}
}

// tell turns a journal entry into a line of the story, if it is one.
func tell(e journal.Entry) (cli.Event, bool, error) {
	line := cli.Event{At: e.At, Kind: e.Kind, Source: hostRecorded}
	switch e.Kind {
	case kindRunEvent:
		var b runEvent
		if err := json.Unmarshal(e.Body, &b); err != nil {
			return line, false, err
		}
		return b.line(e.At), true, nil
	case orchestration.EntryKind:
		var b orchestration.Entry
		if err := json.Unmarshal(e.Body, &b); err != nil {
			return line, false, err
		}
		if b.Before == b.After {
			return line, false, nil
		}
		line.Kind, line.Subject = "STATE", string(b.After)
		return line, true, nil
	case dispatch.KindDecision:
		var b dispatch.DecisionBody
		if err := json.Unmarshal(e.Body, &b); err != nil {
			return line, false, err
		}
		if b.Tool != nil {
			return line, false, nil // shown with the run's own steps
		}
		line.Subject = fmt.Sprintf("%s %s as %s", b.Effect, b.Verb, b.Actor.Kind)
		if b.Effect != policy.Allow.String() && len(b.Reasons) > 0 {
			line.Detail, line.Layer = b.Reasons[0].String(), b.Reasons[0].Layer
		}
		return line, true, nil
	case dispatch.KindResult:
		var b dispatch.ResultBody
		if err := json.Unmarshal(e.Body, &b); err != nil {
			return line, false, err
		}
		line.Subject = fmt.Sprintf("%s %s", b.Verb, b.Status)
		if b.Message != "" {
			line.Detail = b.Message
		}
		return line, true, nil
	case dispatch.KindRevocation:
		var b struct{ Scope, ID, Reason string }
		if err := json.Unmarshal(e.Body, &b); err != nil {
			return line, false, err
		}
		line.Subject, line.Detail = fmt.Sprintf("grants of %s %s revoked", b.Scope, b.ID), b.Reason
		return line, true, nil
	case kindCheckpoint:
		var b struct{ Label, Run string }
		if err := json.Unmarshal(e.Body, &b); err != nil {
			return line, false, err
		}
		line.Subject, line.Detail = "checkpoint of "+b.Run, b.Label
		return line, true, nil
	case kindViolation:
		var b struct{ Subject, Detail, Layer string }
		if err := json.Unmarshal(e.Body, &b); err != nil {
			return line, false, err
		}
		line.Subject, line.Detail, line.Layer = b.Subject, b.Detail, b.Layer
		return line, true, nil
	case egress.KindDenied, egress.KindAllowed:
		var b struct {
			Host, Reason string
			Port         int
		}
		if err := json.Unmarshal(e.Body, &b); err != nil {
			return line, false, err
		}
		line.Subject, line.Detail = fmt.Sprintf("%s port %d", b.Host, b.Port), b.Reason
		if e.Kind == egress.KindDenied {
			line.Layer = "egress proxy"
		}
		return line, true, nil
	case hostservice.KindRefused:
		var b struct{ Plugin, Asked, Subject, Reason string }
		if err := json.Unmarshal(e.Body, &b); err != nil {
			return line, false, err
		}
		line.Subject, line.Detail, line.Layer = fmt.Sprintf("%s asked for %s %s", b.Plugin, b.Asked, b.Subject), b.Reason, "host"
		return line, true, nil
	}
	return line, false, nil
}
