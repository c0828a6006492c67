package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/numinance/numinance/internal/contexts/execution"
	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
)

// clearLeftovers removes what a former process of this state directory left
// behind when it was killed: sandboxes and socket directories. The caller holds
// the lock, so nobody else uses them.
func (d *Daemon) clearLeftovers() error {
	boxes, err := os.ReadDir(filepath.Join(d.home.Provider("sandboxprovider", "gvisor"), "boxes"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("look for sandboxes of a former process: %w", err)
	}
	if len(boxes) > 0 {
		// The provider destroys them before it serves anything.
		if _, err := d.providers.Provider("sandboxprovider"); err != nil {
			return fmt.Errorf("destroy the sandboxes of a former process: %w", err)
		}
	}
	return nil
}

// clearSockets removes the socket directories of a former process.
func (h Home) clearSockets() error {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return fmt.Errorf("look for mounts: %w", err)
	}
	old, err := filepath.Glob(filepath.Join(h.Run(), "numi-plugin-*"))
	if err != nil {
		return err
	}
	for _, dir := range append(old, h.Links()) {
		if strings.Contains(string(mounts), " "+dir) {
			return fmt.Errorf("a former process left a mount under %s: unmount it, then go on", dir)
		}
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove the sockets of a former process: %w", err)
		}
	}
	return nil
}

// kindCheckpoint is a snapshot that a lost run can go on from.
const kindCheckpoint = "CHECKPOINT_KEPT"

// keepCheckpoint records a run's checkpoint, so that it outlives this process.
func (d *Daemon) keepCheckpoint(ctx context.Context, id identity.ChangeID, run identity.RunID, c *execution.Checkpoint) error {
	if c == nil {
		return nil
	}
	ref, err := d.putCheckpoint(ctx, *c)
	if err != nil {
		return err
	}
	body, err := digest.Canonical(map[string]any{"run": string(run), "label": printable(c.Label), "checkpoint": string(ref)})
	if err != nil {
		return fmt.Errorf("record the checkpoint: %w", err)
	}
	return d.record(ctx, id, kindCheckpoint, body)
}

// putCheckpoint keeps the two snapshots of a checkpoint under one digest.
func (d *Daemon) putCheckpoint(ctx context.Context, c execution.Checkpoint) (digest.Digest, error) {
	raw, err := json.Marshal(kept(c))
	if err != nil {
		return "", fmt.Errorf("keep the checkpoint: %w", err)
	}
	ref, err := d.blobs.PutBytes(ctx, raw)
	if err != nil {
		return "", fmt.Errorf("keep the checkpoint: %w", err)
	}
	return ref.Digest, nil
}

// begun are the runs that this process made a sandbox for.
type begun struct {
	mu   sync.Mutex // guards runs
	runs map[identity.RunID]bool
}

// first notes a run and reports whether it was new.
func (b *begun) first(run identity.RunID) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.runs == nil {
		b.runs = map[identity.RunID]bool{}
	}
	was := b.runs[run]
	b.runs[run] = true
	return !was
}

// fresh refuses a run that had a sandbox before: it is gone with everything in
// it, and a step that is carried out again needs a new run. What a former
// process began was cut off by its end and counts for nothing; what this one
// began is lost, and a run is lost only so often.
func (d *Daemon) fresh(ctx context.Context, id identity.ChangeID, run identity.RunID) error {
	first := d.begun.first(run)
	_, verbs, err := d.journal.RunFacts(ctx, run)
	if err != nil {
		return err
	}
	if !slices.Contains(verbs, "sandboxprovider.Create") {
		return nil
	}
	out := &change.Fault{Class: change.Lost, Reason: fmt.Sprintf("the sandbox of run %s is gone", run)}
	if first {
		out.Class, out.Reason = change.Interrupted, fmt.Sprintf("the process that carried out run %s ended", run)
	}
	err = d.entries(ctx, id, func(kind string, body []byte) error {
		if kind != kindCheckpoint {
			return nil
		}
		var c struct {
			Run        identity.RunID `json:"run"`
			Checkpoint digest.Digest  `json:"checkpoint"`
		}
		if err := json.Unmarshal(body, &c); err != nil {
			return err
		}
		if c.Run == run {
			out.Checkpoint = c.Checkpoint
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("look for the last checkpoint of run %s: %w", run, err)
	}
	return out
}
