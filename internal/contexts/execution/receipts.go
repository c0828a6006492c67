package execution

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/host/blob"
)

// Receipts is what the host itself observed of one run: each decision it took,
// each process it started, each checkpoint it kept. It is safe for concurrent
// use; the zero value is an empty one.
type Receipts struct {
	mu          sync.Mutex // guards all below
	order       []identity.DecisionID
	decisions   map[identity.DecisionID]*decided
	checkpoints []Checkpoint
	spawns      int
}

// decided is one decision and what came of it.
type decided struct {
	tool     policy.Tool
	decision policy.Decision
	claimed  bool // an event echoed it
	effect   bool // an event claimed its effect
	used     bool // a process was started or a checkpoint taken under it
}

// Checkpoint is a state of the run that another run can start from.
type Checkpoint struct {
	Label string
	Work  blob.Ref // work tree as a tar
	Home  blob.Ref // private home as a tar; zero if there is none
}

// LayerBudget is the layer that dispatch names in the reason of a denial for
// want of budget.
const LayerBudget = "budget"

// Decided records a decision. A decision without an id allows nothing and is
// not recorded.
func (r *Receipts) Decided(t policy.Tool, d policy.Decision) {
	if d.ID == "" {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.decisions == nil {
		r.decisions = map[identity.DecisionID]*decided{}
	}
	if _, twice := r.decisions[d.ID]; twice {
		return
	}
	t.Argv = slices.Clone(t.Argv)
	r.decisions[d.ID] = &decided{tool: t, decision: d}
	r.order = append(r.order, d.ID)
}

// spawnTools are the intents that are carried out by a process at the agent's
// uid.
var spawnTools = []string{"write", "patch", "delete", "run", "read"}

// MaySpawn says whether a process may be started under a decision, and uses the
// decision up. Only an allowed intent that a process carries out is good for
// that, for one process; a decision to run a command is good for that command.
func (r *Receipts) MaySpawn(id identity.DecisionID, argv []string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	d := r.decisions[id]
	switch {
	case id == "":
		return fmt.Errorf("a process needs the decision that allowed it; ask for one first")
	case d == nil:
		return fmt.Errorf("decision %s was not taken in this run", id)
	case d.decision.Effect != policy.Allow:
		return fmt.Errorf("decision %s does not allow it: %s", id, d.decision.Summary())
	case !slices.Contains(spawnTools, d.tool.Name):
		return fmt.Errorf("decision %s allows %s, which is not carried out by a process", id, d.tool.Name)
	case d.used:
		return fmt.Errorf("decision %s was used for a process already; ask for another one", id)
	case d.tool.Name == "run" && !slices.Equal(d.tool.Argv, bounded(argv)):
		return fmt.Errorf("decision %s allows another command", id)
	}
	d.used = true
	r.spawns++
	return nil
}

// Bounds of a command in a decision; numinance.plugin.v1 has them as well.
const (
	maxArgs = 64
	maxArg  = 1024
)

// bounded cuts a command as an adapter has to cut it for a decision: what lies
// beyond the bounds, a decision says nothing about.
func bounded(argv []string) []string {
	var out []string
	for _, a := range argv[:min(len(argv), maxArgs)] {
		a = strings.ToValidUTF8(a, "\uFFFD")
		if len(a) > maxArg {
			a = strings.ToValidUTF8(a[:maxArg], "")
		}
		out = append(out, a)
	}
	return out
}

// MayHold says whether an allowed decision of this run covers a credential
// intent.
func (r *Receipts) MayHold(intent string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range r.decisions {
		if d.decision.Effect == policy.Allow && d.tool.Name == "credential" && d.tool.Intent == intent {
			return true
		}
	}
	return false
}

// MayCheckpoint says whether a checkpoint was allowed, and uses the oldest
// decision that is good for one up.
func (r *Receipts) MayCheckpoint() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range r.order {
		if d := r.decisions[id]; d.decision.Effect == policy.Allow && d.tool.Name == "checkpoint" && !d.used {
			d.used = true
			return true
		}
	}
	return false
}

// Kept records a checkpoint.
func (r *Receipts) Kept(c Checkpoint) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.checkpoints = append(r.checkpoints, c)
}

// Last returns the last checkpoint, or nil.
func (r *Receipts) Last() *Checkpoint {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.checkpoints) == 0 {
		return nil
	}
	c := r.checkpoints[len(r.checkpoints)-1]
	return &c
}

// Stats counts what the host observed in a run.
type Stats struct {
	Events    int
	Decisions int
	Denials   int
	Spawns    int
}

// Stats counts the receipts; Events is left 0.
func (r *Receipts) Stats() Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := Stats{Decisions: len(r.decisions), Spawns: r.spawns}
	for _, d := range r.decisions {
		if d.decision.Effect != policy.Allow {
			s.Denials++
		}
	}
	return s
}

// OutOfBudget reports whether a decision was refused for want of budget.
func (r *Receipts) OutOfBudget() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range r.decisions {
		if d.decision.Effect != policy.Allow && slices.ContainsFunc(d.decision.Reasons, func(x policy.Reason) bool { return x.Layer == LayerBudget }) {
			return true
		}
	}
	return false
}

// unclaimed returns the decisions that no event echoed, in the order they were
// taken. That is normal: a receipt needs no claim.
func (r *Receipts) unclaimed() []policy.Decision {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []policy.Decision
	for _, id := range r.order {
		if d := r.decisions[id]; !d.claimed {
			out = append(out, d.decision)
		}
	}
	return out
}
