package daemon

import (
	"slices"
	"testing"
	"time"

	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/edge/cli"
)

// stuck is somebody who does not read on before they are let go.
type stuck struct {
	let  chan struct{}
	seen []string
}

func (s *stuck) Stage(name string, _ bool, _ time.Duration) { <-s.let; s.seen = append(s.seen, name) }
func (s *stuck) Line(e cli.Event)                           { <-s.let; s.seen = append(s.seen, e.Kind) }

// A watcher who does not read holds up neither the Change nor another watcher,
// and is told everything in order before watching ends.
func TestAWatcherHoldsUpNobody(t *testing.T) {
	d := &Daemon{watchers: watchers{of: map[identity.ChangeID][]*patient{}}}
	slow, quick := &stuck{let: make(chan struct{})}, &stuck{let: make(chan struct{})}
	close(quick.let)
	stopSlow := d.watch("chg-0123456789", slow)
	stopQuick := d.watch("chg-0123456789", quick)
	want := []string{"a", "b", "c"}
	for _, stage := range want {
		d.tellStage("chg-0123456789", stage)
	}
	stopQuick()
	close(slow.let)
	stopSlow()
	d.tellStage("chg-0123456789", "after")
	for i, name := range want {
		want[i] = "  " + name
	}
	if !slices.Equal(quick.seen, want) || !slices.Equal(slow.seen, want) || len(d.watchers.of) != 0 {
		t.Errorf("told %q and %q, want %q; %d Changes are watched", slow.seen, quick.seen, want, len(d.watchers.of))
	}
}
