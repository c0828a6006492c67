package execution

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/dispatch"
)

// ErrOver is what an adapter gets once its run is over.
var ErrOver = errors.New("the run is over")

// Desk answers what the adapter of one run asks of the host, and keeps the
// receipts. The plugin host calls it for the calls that arrive on this run's
// socket; it is safe for concurrent use.
type Desk struct {
	tools     Dispatcher
	authority dispatch.Authority
	box       Sandbox
	readable  []digest.Digest
	receipts  Receipts
	busy      func() // tells that the adapter is alive

	checkpointing sync.Mutex // one checkpoint at a time
	over          atomic.Bool
}

// Decide takes a decision on a tool intent. A recorded denial is a decision and
// no error; an error says that no decision could be recorded, which is a denial
// too.
func (d *Desk) Decide(ctx context.Context, t policy.Tool) (policy.Decision, error) {
	if d.over.Load() {
		return policy.Decision{}, ErrOver
	}
	d.busy()
	decision, err := d.tools.Tool(ctx, d.authority, t)
	var denied *dispatch.DeniedError
	if errors.As(err, &denied) && denied.Unrecorded == nil && denied.Decision.Effect != policy.Allow {
		decision, err = denied.Decision, nil
	}
	if err != nil {
		return policy.Decision{}, fmt.Errorf("decide on %s: %w", t.Name, err)
	}
	if decision.ID == "" {
		return policy.Decision{}, fmt.Errorf("decide on %s: the decision has no id", t.Name)
	}
	d.receipts.Decided(t, decision)
	return decision, nil
}

// MaySpawn says whether the adapter may start a process at the agent's uid
// under a decision, and uses the decision up.
func (d *Desk) MaySpawn(id identity.DecisionID, argv []string) error {
	if d.over.Load() {
		return ErrOver
	}
	d.busy()
	return d.receipts.MaySpawn(id, argv)
}

// MayHold says whether the adapter may have a handle for a credential intent:
// only after a decision allowed it.
func (d *Desk) MayHold(intent string) error {
	if d.over.Load() {
		return ErrOver
	}
	d.busy()
	if !d.receipts.MayHold(intent) {
		return fmt.Errorf("no decision of this run allows the credential intent %q; ask for one first", intent)
	}
	return nil
}

// MayRead says whether the adapter may resolve a reference (P-130).
func (d *Desk) MayRead(of digest.Digest) bool {
	return !d.over.Load() && slices.Contains(d.readable, of)
}

// maxCheckpoint bounds how long a checkpoint may hold the run up.
const maxCheckpoint = 30 * time.Second

// Checkpoint keeps the run's state after a decision allowed it. The label says
// where in its work the adapter stood.
func (d *Desk) Checkpoint(ctx context.Context, label string) (blob.Ref, error) {
	if d.over.Load() {
		return blob.Ref{}, ErrOver
	}
	d.busy()
	defer d.busy()
	if !d.receipts.MayCheckpoint() {
		return blob.Ref{}, errors.New("no decision of this run allows a checkpoint; ask for one first")
	}
	d.checkpointing.Lock()
	defer d.checkpointing.Unlock()
	ctx, cancel := context.WithTimeout(ctx, maxCheckpoint)
	defer cancel()
	work, err := d.box.Snapshot(ctx, ScopeWork)
	if err != nil {
		return blob.Ref{}, fmt.Errorf("keep the work tree: %w", err)
	}
	home, err := d.box.Snapshot(ctx, ScopeHome)
	if err != nil {
		return blob.Ref{}, fmt.Errorf("keep the home directory: %w", err)
	}
	d.receipts.Kept(Checkpoint{Label: label, Work: work, Home: home})
	return work, nil
}

// Receipts are what the host observed of the run so far.
func (d *Desk) Receipts() *Receipts { return &d.receipts }

func (d *Desk) close() { d.over.Store(true) }
