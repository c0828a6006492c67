package dispatch

import (
	"context"
	"slices"
	"sync"

	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/host/journal"
)

// runs keeps what each run has done so far, for rules over sequences. It is
// read from the journal once and carried on in memory.
type runs struct {
	journal *journal.Journal

	mu    sync.Mutex
	known map[identity.RunID]*policy.RunFacts
}

func newRuns(j *journal.Journal) *runs {
	return &runs{journal: j, known: map[identity.RunID]*policy.RunFacts{}}
}

func (r *runs) facts(ctx context.Context, run identity.RunID) (policy.RunFacts, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f, ok := r.known[run]
	if !ok {
		fact, verbs, err := r.journal.RunFacts(ctx, run)
		if err != nil {
			return policy.RunFacts{}, err
		}
		f = &policy.RunFacts{Tainted: fact.Tainted, Denials: fact.Denials, VerbsUsed: verbs}
		r.known[run] = f
	}
	out := *f
	out.VerbsUsed = slices.Clone(f.VerbsUsed)
	return out, nil
}

// change applies f to a run that is known; one that is not is read when asked
// for, with the change already in the journal.
func (r *runs) change(run identity.RunID, f func(*policy.RunFacts)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if facts, ok := r.known[run]; ok {
		f(facts)
	}
}

func (r *runs) used(run identity.RunID, verb string) {
	r.change(run, func(f *policy.RunFacts) {
		if i, found := slices.BinarySearch(f.VerbsUsed, verb); !found {
			f.VerbsUsed = slices.Insert(f.VerbsUsed, i, verb)
		}
	})
}

func (r *runs) denied(run identity.RunID) {
	r.change(run, func(f *policy.RunFacts) { f.Denials++ })
}

func (r *runs) tainted(run identity.RunID) {
	r.change(run, func(f *policy.RunFacts) { f.Tainted = true })
}
