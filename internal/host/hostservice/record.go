package hostservice

import (
	"context"
	"fmt"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/host/journal"
)

// KindRefused is the kind of the journal entry of a refusal.
const KindRefused = "HOST_CALL_REFUSED"

// Kinds of the journal entries of processes.
const (
	KindProcessStarted = "PROCESS_STARTED"
	KindProcessEnded   = "PROCESS_ENDED"
)

// Process implements ProcessRecorder.
func (j Journal) Process(ctx context.Context, p Process) error {
	kind, about := KindProcessStarted, map[string]any{
		"plugin": p.Plugin, "run": string(p.Run), "decision": cut(p.Decision, 64), "user": p.User, "program": cut(p.Program, 256),
		"command": string(p.Command), "source": "host",
	}
	if p.Ended {
		kind = KindProcessEnded
		for name, value := range map[string]any{
			"pid": p.PID, "exit_code": p.Exit, "signal": p.Signal, "limit": p.Limit, "failure": cut(p.Failure, 1024),
		} {
			about[name] = value
		}
	}
	body, err := digest.Canonical(about)
	if err != nil {
		return fmt.Errorf("record a process of %s: %w", p.Run, err)
	}
	if _, err := j.Journal.Append(ctx, journal.Entry{Change: p.Change, Kind: kind, Body: body}); err != nil {
		return fmt.Errorf("record a process of %s: %w", p.Run, err)
	}
	return nil
}

// Journal is the recorder of the runtime: a denial is in the journal, or in its
// spill file while the journal cannot be written; a process is in the journal,
// or is not started.
type Journal struct{ Journal *journal.Journal }

// Refused implements Recorder.
func (j Journal) Refused(ctx context.Context, r Refusal) error {
	body, err := digest.Canonical(map[string]any{
		"plugin": r.Plugin, "run": string(r.Run), "asked": r.Asked, "subject": cut(r.Subject, 256), "reason": cut(r.Reason, 1024), "source": "host",
	})
	if err != nil {
		return fmt.Errorf("record the refusal of %s: %w", r.Asked, err)
	}
	change := r.Change
	if change == "" {
		change = identity.SystemChange
	}
	if _, err := j.Journal.Deny(ctx, r.Run, journal.Entry{Change: change, Kind: KindRefused, Body: body}); err != nil {
		return fmt.Errorf("record the refusal of %s: %w", r.Asked, err)
	}
	return nil
}
