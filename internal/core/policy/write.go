package policy

import "github.com/numinance/numinance/internal/core/digest"

// ready is a member whose value was written before, or else by the function.
func ready(w *digest.Writer, n string, json []byte, write func(*digest.Writer)) {
	w.Name(n)
	if json != nil {
		w.Raw(json)
		return
	}
	write(w)
}

// written returns what a part writes, or nil if it has texts that need care.
func written(write func(*digest.Writer)) []byte {
	var w digest.Writer
	write(&w)
	if b, ok := w.Bytes(); ok {
		return b
	}
	return nil
}

// write appends f. Parts that a memo has written already are taken from it.
func (f *facts) write(w *digest.Writer, k known) {
	w.Open()
	w.Text("action", f.Action)
	w.Name("actor")
	w.Open()
	w.Text("kind", f.Actor.Kind)
	w.Text("principal", f.Actor.Principal)
	w.Text("run", f.Actor.Run)
	w.Text("vendor", f.Actor.Vendor)
	w.Close()
	w.Name("approvals")
	w.Open()
	w.Texts("by", f.Approvals.By)
	w.Texts("groups", f.Approvals.Groups)
	w.Close()
	w.Text("caller", f.Caller)
	ready(w, "change", k.change.json, f.Change.write)
	w.Flag("dry_run", f.DryRun)
	ready(w, "grant", k.grant.json, f.Grant.write)
	w.Text("input", f.Input)
	ready(w, "provider", k.provider.json, f.Provider.write)
	w.Texts("resources", f.Resources)
	w.Name("run")
	w.Open()
	w.Number("denials", f.Run.Denials)
	w.Flag("tainted", f.Run.Tainted)
	w.Texts("verbs_used", f.Run.VerbsUsed)
	w.Close()
	w.Name("time")
	w.Open()
	w.Number("hour", f.Time.Hour)
	w.Number("unix", f.Time.Unix)
	w.Text("weekday", f.Time.Weekday)
	w.Close()
	if t := f.Tool; t != nil {
		w.Name("tool")
		w.Open()
		w.Texts("argv", t.Argv)
		w.Text("command", t.Command)
		w.Texts("dirs", t.Dirs)
		w.Text("host", t.Host)
		w.Text("intent", t.Intent)
		w.Text("path", t.Path)
		w.Number("port", t.Port)
		w.Text("program", t.Program)
		w.Close()
	}
	if v := f.Verb; v != nil {
		w.Name("verb")
		w.Open()
		w.Text("exec", v.Exec)
		w.Flag("idempotent", v.Idempotent)
		w.Text("port", v.Port)
		w.Text("risk", v.Risk)
		w.Close()
	}
	w.Close()
}

func (f grantFacts) write(w *digest.Writer) {
	w.Open()
	w.Texts("capabilities", f.Capabilities)
	w.Texts("credentials", f.Credentials)
	w.Texts("egress", f.Egress)
	w.Text("id", f.ID)
	w.Texts("scopes", f.Scopes)
	w.Texts("verbs", f.Verbs)
	w.Text("work_unit", f.WorkUnit)
	w.Close()
}

func (f providerFacts) write(w *digest.Writer) {
	w.Open()
	w.Texts("credentials", f.Credentials)
	w.Texts("egress", f.Egress)
	w.Text("extension", f.Extension)
	w.Text("manifest", f.Manifest)
	w.Text("origin", f.Origin)
	w.Close()
}

func (f changeFacts) write(w *digest.Writer) {
	w.Open()
	w.Flag("approved", f.Approved)
	w.Texts("authors", f.Authors)
	w.Flag("head_matches", f.HeadMatches)
	w.Text("id", f.ID)
	w.Text("requester", f.Requester)
	w.Text("state", f.State)
	w.Flag("verified", f.Verified)
	w.Close()
}
