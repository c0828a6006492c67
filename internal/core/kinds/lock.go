package kinds

import (
	"fmt"
	"slices"
	"strings"

	kindsv1 "github.com/numinance/numinance/gen/numinance/kinds/v1"
	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	"github.com/numinance/numinance/internal/core/lockfile"
)

// CheckLock returns what keeps a set from being live with a lockfile: a
// provider that is not locked (K-045) or whose manifest is of another port, and
// an endpoint whose host the provider's manifest does not name (K-050).
// Manifests are those that the locked plugins presented, by extension id.
func (s *Set) CheckLock(f lockfile.File, manifests map[string]*pluginv1.Manifest) []Problem {
	var out []Problem
	for _, d := range s.documents {
		r := &rules{d: d}
		switch m := d.Message.(type) {
		case *kindsv1.Repository:
			r.locked(f, manifests, "spec.provider", "scm", m.GetSpec().GetProvider())
		case *kindsv1.Tracker:
			r.locked(f, manifests, "spec.provider", "ticketing", m.GetSpec().GetProvider())
		case *kindsv1.Pipeline:
			r.locked(f, manifests, "spec.provider", "ciexecutor", m.GetSpec().GetProvider())
		case *kindsv1.Profile:
			for i, id := range m.GetSpec().GetVerifiers() {
				r.locked(f, manifests, fmt.Sprintf("spec.verifiers[%d]", i), "verifier", id)
			}
		case *kindsv1.KnowledgeConnection:
			r.locked(f, manifests, "spec.provider", "knowledge", m.GetSpec().GetProvider())
			host := endpointHost(m.GetSpec().GetEndpoint())
			if manifest, ok := manifests[m.GetSpec().GetProvider()]; ok && !slices.Contains(manifest.GetEgressHosts(), host) {
				r.broken("spec.endpoint", "endpoint-in-manifest", "name a host of the provider's egress allow-list", "%q is no host of the manifest of %s", host, m.GetSpec().GetProvider())
			}
		}
		out = append(out, r.problems...)
	}
	return out
}

func (r *rules) locked(f lockfile.File, manifests map[string]*pluginv1.Manifest, field, port, id string) {
	if _, ok := f.Find(lockfile.Plugin, id); !ok {
		r.broken(field, "provider-locked", "run numi lock, or name a locked provider", "%s is not in the lockfile", id)
		return
	}
	manifest, ok := manifests[id]
	switch {
	case !ok:
		r.broken(field, "provider-manifest", "install the provider that the lockfile names", "%s presented no manifest", id)
	case manifest.GetPort() != port:
		r.broken(field, "provider-port", "name a provider of the port "+port, "%s is a provider of the port %s", id, manifest.GetPort())
	}
}

// endpointHost returns the host of an endpoint that kept its rules.
func endpointHost(endpoint string) string {
	authority, _, _ := strings.Cut(strings.TrimPrefix(endpoint, "https://"), "/")
	host, _, _ := strings.Cut(authority, ":")
	return host
}

// StageBudget is what one stage may ask of a knowledge connection.
type StageBudget struct{ Calls, Bytes uint32 }

// Lower returns the budget in force for a connection: what the document lowers
// is lower, what it would raise stays the stage's, and why is said (K-059).
func (b StageBudget) Lower(to *kindsv1.KnowledgeBudgets) (StageBudget, []string) {
	var why []string
	lower := func(field string, stage uint32, asked *uint32) uint32 {
		switch {
		case asked == nil || *asked == stage:
			return stage
		case *asked < stage:
			return *asked
		}
		why = append(why, fmt.Sprintf("%s: the connection asks for %d, the stage allows %d", field, *asked, stage))
		return stage
	}
	if to == nil {
		return b, nil
	}
	return StageBudget{Calls: lower("calls_per_stage", b.Calls, to.CallsPerStage), Bytes: lower("bytes_per_call", b.Bytes, to.BytesPerCall)}, why
}
