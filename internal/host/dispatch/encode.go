package dispatch

import (
	"github.com/numinance/numinance/internal/core/digest"
)

// The bodies of the entries that each action writes are written here member by
// member in the order of their names. A body with a text that needs care, or
// with a part that is seldom there, is left to digest.Canonical.

// canonical returns the body of a decision in its canonical form.
func (b *DecisionBody) canonical() ([]byte, error) {
	if b.Tool != nil {
		return digest.Canonical(b)
	}
	w := digest.NewWriter(1200 + len(b.Context))
	w.Open()
	w.Text("action", string(b.Action))
	w.Name("actor")
	w.Open()
	w.Text("kind", b.Actor.Kind)
	w.Text("principal", b.Actor.Principal)
	w.Text("run", b.Actor.Run)
	w.Close()
	w.Text("ask", b.Ask)
	w.Text("caller", b.Caller)
	if len(b.Context) > 0 {
		w.Name("context")
		w.Raw(b.Context)
	}
	if b.ContextDigest != "" {
		w.Text("context_digest", string(b.ContextDigest))
	}
	w.Text("decision", string(b.Decision))
	w.Flag("dry_run", b.DryRun)
	w.Text("effect", b.Effect)
	w.Text("grant", string(b.Grant))
	w.Text("grant_digest", string(b.GrantDigest))
	w.Text("key", b.Key)
	w.Text("policy", string(b.Policy))
	w.Name("provider")
	w.Open()
	w.Text("extension", b.Provider.Extension)
	w.Text("manifest", string(b.Provider.Manifest))
	w.Text("origin", b.Provider.Origin)
	w.Close()
	w.Name("reasons")
	w.List(len(b.Reasons), func(i int) {
		r := b.Reasons[i]
		w.Open()
		if r.Clause != "" {
			w.Text("clause", r.Clause)
		}
		w.Text("id", r.ID)
		w.Text("layer", r.Layer)
		w.Text("text", r.Text)
		w.Close()
	})
	w.Text("request", string(b.Request))
	w.Texts("resources", b.Resources)
	w.Number("revision", int64(b.Revision))
	w.Text("risk", b.Risk)
	w.Text("source", b.Source)
	w.Text("step", b.Step)
	w.Text("verb", b.Verb)
	w.Text("work_unit", string(b.WorkUnit))
	w.Close()
	if out, ok := w.Bytes(); ok {
		return out, nil
	}
	return digest.Canonical(b)
}

// canonical returns the body of a result in its canonical form.
func (b *ResultBody) canonical() ([]byte, error) {
	w := digest.NewWriter(800)
	w.Open()
	w.Text("action", string(b.Action))
	w.Text("bytes", b.Bytes)
	w.Text("code", b.Code)
	w.Text("compensating", b.Compensating)
	w.Text("decision", string(b.Decision))
	w.Flag("effect_unknown", b.EffectUnknown)
	w.Name("evidence")
	w.List(len(b.Evidence), func(i int) {
		e := b.Evidence[i]
		w.Open()
		w.Text("digest", e.Digest)
		w.Text("payload_digest", string(e.PayloadDigest))
		w.Text("reference", e.Reference)
		w.Text("type", e.Type)
		w.Close()
	})
	w.Text("key", b.Key)
	w.Text("message", b.Message)
	w.Flag("message_by_host", b.MessageByHost)
	w.Texts("missing_evidence", b.Missing)
	w.Text("result", string(b.Result))
	w.Flag("resumed", b.Resumed)
	w.Text("run", string(b.Run))
	w.Text("status", b.Status)
	w.Text("tokens", b.Tokens)
	w.Flag("untrusted", b.Untrusted)
	w.Text("verb", b.Verb)
	w.Text("wall_ms", b.WallMS)
	w.Close()
	if out, ok := w.Bytes(); ok {
		return out, nil
	}
	return digest.Canonical(b)
}

// canonical returns what a replay needs in its canonical form.
func (r *recorded) canonical() ([]byte, error) {
	if r.Missing == nil {
		return digest.Canonical(r)
	}
	w := digest.NewWriter(128)
	w.Open()
	w.Number("code", int64(r.Code))
	w.Flag("effect_unknown", r.EffectUnknown)
	w.Flag("has_body", r.HasBody)
	w.Flag("host", r.Host)
	w.Text("message", r.Message)
	w.Texts("missing", r.Missing)
	w.Close()
	if out, ok := w.Bytes(); ok {
		return out, nil
	}
	return digest.Canonical(r)
}
