package daemon

import (
	"context"
	"sync"

	"github.com/numinance/numinance/internal/core/identity"
)

// anchors brings the heads of Changes into the log whenever their state
// changes, beside the work: an anchor takes as long as the log's next
// checkpoint. What fails here is tried again at the next change of state, and
// nothing is released without the anchor that the release itself makes.
type anchors struct {
	mu   sync.Mutex // guards due
	due  map[identity.ChangeID]bool
	wake chan struct{} // holds one token while something is due
}

func newAnchors() *anchors {
	return &anchors{due: map[identity.ChangeID]bool{}, wake: make(chan struct{}, 1)}
}

// want asks for the head of id to be anchored soon. It does not block.
func (a *anchors) want(id identity.ChangeID) {
	a.mu.Lock()
	a.due[id] = true
	a.mu.Unlock()
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// run anchors what is due until ctx ends.
func (a *anchors) run(ctx context.Context, anchor func(context.Context, identity.ChangeID) error, failed func(identity.ChangeID, error)) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.wake:
		}
		a.mu.Lock()
		due := a.due
		a.due = map[identity.ChangeID]bool{}
		a.mu.Unlock()
		for id := range due {
			if err := anchor(ctx, id); err != nil && ctx.Err() == nil {
				failed(id, err)
			}
		}
	}
}
