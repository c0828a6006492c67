package egress

import (
	"context"
	"fmt"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/host/journal"
)

// Kinds of the journal entries of attempts.
const (
	KindAllowed = "EGRESS_ALLOWED"
	KindDenied  = "EGRESS_DENIED"
)

// Journal is the Recorder of the runtime.
type Journal struct{ Journal *journal.Journal }

// Record implements Recorder: a denial also counts for the run, and gets into the
// spill file while the journal cannot be written.
func (j Journal) Record(ctx context.Context, a Attempt) error {
	address := ""
	if a.Address.IsValid() {
		address = a.Address.String()
	}
	body, err := digest.Canonical(map[string]any{
		"run": string(a.Run), "host": clean(a.Host), "port": a.Port, "address": address, "reason": clean(a.Reason), "source": "host",
	})
	if err != nil {
		return fmt.Errorf("record egress to %s: %w", clean(a.Host), err)
	}
	e := journal.Entry{Change: a.Change, Kind: KindDenied, Body: body}
	if e.Change == "" {
		e.Change = identity.SystemChange
	}
	if a.Allowed {
		e.Kind = KindAllowed
		_, err = j.Journal.Append(ctx, e)
	} else {
		_, err = j.Journal.Deny(ctx, a.Run, e)
	}
	if err != nil {
		return fmt.Errorf("record egress to %s: %w", clean(a.Host), err)
	}
	return nil
}
