package policy

import (
	"slices"
	"sync"

	"github.com/cedar-policy/cedar-go"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
)

// maxKept bounds each memo; a full one starts anew.
const maxKept = 512

// memo keeps what follows from parts of requests that come again and again, such
// as the grant of a run. Nothing is decided here: whoever reads it takes a value
// only for a part that is equal, in full, to the one it was made from, so a memo
// saves time and changes no decision.
type memo[K comparable, V any] struct {
	mu   sync.RWMutex
	kept map[K]V
}

func (m *memo[K, V]) get(k K) (V, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	v, ok := m.kept[k]
	return v, ok
}

func (m *memo[K, V]) put(k K, v V) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.kept == nil || len(m.kept) >= maxKept {
		m.kept = make(map[K]V, 16)
	}
	m.kept[k] = v
}

// memos are those of one engine.
type memos struct {
	grants    memo[identity.GrantID, *heldGrant]
	providers memo[string, *knownProvider]
	changes   memo[identity.ChangeID, *knownChange]
	runs      memo[identity.RunID, *knownRun]
	actors    memo[actorFacts, cedar.Record]
	times     memo[timeFacts, cedar.Record]
	verbs     memo[verbFacts, cedar.Record]
	resources memo[string, cedar.Set] // of one name
	generals  memo[generalKey, slice]
	verdicts  memo[question, verdict]
}

// question is all that the policies can see of a request for a verb but its
// time and its input. The pointers stand for all that is behind them: nothing
// there changes once it is made.
type question struct {
	action, caller, resource string
	resources                int
	actor                    actorFacts
	verb                     verbFacts
	dryRun                   bool
	known                    known
}

// verdict is what the policies said.
type verdict struct {
	effect  Effect
	reasons []Reason
	ask     string
}

// question returns f's question, if it has one that can come again: not that of
// a tool intent, and no approval, which is given to one input.
func (f *facts) question(k known) (q question, ok bool) {
	if f.Verb == nil || f.Tool != nil || len(f.Approvals.By)+len(f.Approvals.Groups) > 0 || len(f.Resources) > 1 {
		return q, false
	}
	q = question{action: f.Action, caller: f.Caller, resources: len(f.Resources), actor: f.Actor, verb: *f.Verb, dryRun: f.DryRun, known: k}
	if len(f.Resources) == 1 {
		q.resource = f.Resources[0]
	}
	return q, len(q.resource) <= 512
}

// heldGrant is a grant with what follows from it.
type heldGrant struct {
	of     grant.Grant // shares no list with the request it came in
	digest digest.Digest
	err    error // why it is no grant
	facts  grantFacts
	record cedar.Record
	json   []byte // nil if it has texts that need care
}

func (m *memos) grant(g grant.Grant) *heldGrant {
	if h, ok := m.grants.get(g.ID); ok && h.of.Equal(g) {
		return h
	}
	h := &heldGrant{of: g.Clone()}
	h.digest, h.err, h.facts = h.of.Digest(), h.of.Validate(), newGrantFacts(h.of)
	h.record = h.facts.record()
	h.json = written(h.facts.write)
	m.grants.put(g.ID, h)
	return h
}

// knownProvider is a provider with what follows from it.
type knownProvider struct {
	of     ProviderFacts
	facts  providerFacts
	record cedar.Record
	json   []byte
}

func (m *memos) provider(p ProviderFacts) *knownProvider {
	if k, ok := m.providers.get(p.Extension); ok && k.of.Extension == p.Extension && k.of.Origin == p.Origin && k.of.Manifest == p.Manifest &&
		slices.Equal(k.of.Egress, p.Egress) && slices.Equal(k.of.Credentials, p.Credentials) {
		return k
	}
	p.Egress, p.Credentials = slices.Clone(p.Egress), slices.Clone(p.Credentials)
	k := &knownProvider{of: p, facts: newProviderFacts(p)}
	k.record = k.facts.record()
	k.json = written(k.facts.write)
	m.providers.put(p.Extension, k)
	return k
}

// knownChange is what is known of a Change with what follows from it.
type knownChange struct {
	of     ChangeFacts
	facts  changeFacts
	record cedar.Record
	json   []byte
}

func (m *memos) change(c ChangeFacts) *knownChange {
	if k, ok := m.changes.get(c.ID); ok && k.of.ID == c.ID && k.of.State == c.State && k.of.Requester == c.Requester && k.of.Verified == c.Verified &&
		k.of.Approved == c.Approved && k.of.HeadMatches == c.HeadMatches && slices.Equal(k.of.Authors, c.Authors) {
		return k
	}
	c.Authors = slices.Clone(c.Authors)
	k := &knownChange{of: c, facts: newChangeFacts(c)}
	k.record = k.facts.record()
	k.json = written(k.facts.write)
	m.changes.put(c.ID, k)
	return k
}

// knownRun is what is known of a run with what follows from it.
type knownRun struct {
	of     RunFacts
	facts  runFacts
	record cedar.Record
}

func (m *memos) run(id identity.RunID, r RunFacts) *knownRun {
	if k, ok := m.runs.get(id); ok && k.of.Tainted == r.Tainted && k.of.Denials == r.Denials && slices.Equal(k.of.VerbsUsed, r.VerbsUsed) {
		return k
	}
	r.VerbsUsed = slices.Clone(r.VerbsUsed)
	k := &knownRun{of: r, facts: runFacts{Denials: r.Denials, Tainted: r.Tainted, VerbsUsed: list(r.VerbsUsed)}}
	k.record = k.facts.record()
	m.runs.put(id, k)
	return k
}

// recordOf returns the record of facts that can be compared as they are.
func recordOf[F interface {
	comparable
	record() cedar.Record
}](m *memo[F, cedar.Record], f F) cedar.Record {
	if r, ok := m.get(f); ok {
		return r
	}
	r := f.record()
	m.put(f, r)
	return r
}
