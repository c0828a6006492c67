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

// Journal is the Recorder of the runtime: a denial in the journal, or in its
// spill file while the journal cannot be written.
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
