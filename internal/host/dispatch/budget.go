package dispatch

import (
	"context"
	"sync"
	"time"

	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/host/journal"
)

// budgets keeps what each grant has used and reserved. The journal is the
// truth; this is its copy for the grants of this process, so that reserving
// needs no disk.
type budgets struct {
	journal *journal.Journal

	mu   sync.Mutex
	used map[identity.GrantID]journal.Amount // used and reserved together
}

func newBudgets(j *journal.Journal) *budgets {
	return &budgets{journal: j, used: map[identity.GrantID]journal.Amount{}}
}

// load returns the account of a grant. The caller holds mu.
func (b *budgets) load(ctx context.Context, id identity.GrantID) (journal.Amount, error) {
	used, ok := b.used[id]
	if ok {
		return used, nil
	}
	used, err := b.journal.Spent(ctx, id)
	if err == nil {
		b.used[id] = used
	}
	return used, err
}

// reserve holds want against the grant, or as much output and tokens as are
// left, and returns what it held and what was left with this action still in
// it. A budget of zero is none (H-058).
func (b *budgets) reserve(ctx context.Context, g grant.Grant, want journal.Amount, now time.Time) (held, left journal.Amount, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	used, err := b.load(ctx, g.ID)
	if err != nil {
		return held, left, refused("budget", "unreadable", "", "free or repair the state database", "%v", err)
	}
	left = remaining(g, used)
	ask := "a person decides whether the run goes on under a new grant"
	switch {
	case left.Actions < want.Actions:
		return held, left, refused("budget", "actions", "H-058", ask, "grant %s has used its %d actions", g.ID, g.Budget.Actions)
	case left.Output <= 0 && want.Output > 0:
		return held, left, refused("budget", "output", "H-058", ask, "grant %s has used its %d bytes of output", g.ID, g.Budget.OutputBytes)
	case left.Tokens < 0:
		return held, left, refused("budget", "tokens", "H-058", ask, "grant %s has used more than its %d tokens", g.ID, g.Budget.Tokens)
	case now.Sub(g.NotBefore) >= g.Budget.Wall:
		return held, left, refused("budget", "wall", "H-058", ask, "grant %s has had its %s since the run's start", g.ID, g.Budget.Wall)
	}
	held = journal.Amount{Actions: want.Actions, Output: min(want.Output, left.Output)}
	b.used[g.ID] = used.Add(held)
	return held, left, nil
}

// settle replaces what was held by what was used.
func (b *budgets) settle(id identity.GrantID, held, used journal.Amount) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if account, ok := b.used[id]; ok {
		b.used[id] = account.Add(used).Sub(held)
	}
}

// leftAfter returns what is left for an action that already holds its share.
func (b *budgets) leftAfter(g grant.Grant, held journal.Amount) journal.Amount {
	b.mu.Lock()
	defer b.mu.Unlock()
	used, err := b.load(context.Background(), g.ID)
	if err != nil {
		return journal.Amount{}
	}
	return remaining(g, used.Sub(held))
}

func remaining(g grant.Grant, used journal.Amount) journal.Amount {
	return journal.Amount{
		Actions: g.Budget.Actions, Output: g.Budget.OutputBytes, Tokens: g.Budget.Tokens, Wall: g.Budget.Wall,
	}.Sub(used)
}
