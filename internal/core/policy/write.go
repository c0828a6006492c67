package policy

import "strconv"

// writer writes the canonical JSON of facts whose texts need no care: printable
// ASCII without quotes and backslashes, which stands for itself. Its users name
// the members in order. Once odd is set what was written means nothing, and the
// canonicaliser has to do it.
type writer struct {
	b   []byte
	odd bool
}

// name begins a member of the open object.
func (w *writer) name(n string) {
	if last := w.b[len(w.b)-1]; last != '{' {
		w.b = append(w.b, ',')
	}
	w.b = append(append(append(w.b, '"'), n...), '"', ':')
}

func (w *writer) string(s string) {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			w.odd = true
			return
		}
	}
	w.b = append(append(append(w.b, '"'), s...), '"')
}

func (w *writer) text(n, s string) { w.name(n); w.string(s) }

func (w *writer) texts(n string, list []string) {
	w.name(n)
	w.b = append(w.b, '[')
	for i, s := range list {
		if i > 0 {
			w.b = append(w.b, ',')
		}
		w.string(s)
	}
	w.b = append(w.b, ']')
}

func (w *writer) flag(n string, v bool) { w.name(n); w.b = strconv.AppendBool(w.b, v) }

func (w *writer) number(n string, v int64) { w.name(n); w.b = strconv.AppendInt(w.b, v, 10) }

func (w *writer) open()  { w.b = append(w.b, '{') }
func (w *writer) close() { w.b = append(w.b, '}') }

// ready is a member whose value was written before, or else by the function.
func (w *writer) ready(n string, json []byte, write func(*writer) bool) {
	w.name(n)
	if json != nil {
		w.b = append(w.b, json...)
		return
	}
	write(w)
}

// write appends f and reports whether all of it could be. Parts that a memo has
// written already are taken from it.
func (f *facts) write(w *writer, k known) bool {
	w.open()
	w.text("action", f.Action)
	w.name("actor")
	w.open()
	w.text("kind", f.Actor.Kind)
	w.text("principal", f.Actor.Principal)
	w.text("run", f.Actor.Run)
	w.text("vendor", f.Actor.Vendor)
	w.close()
	w.name("approvals")
	w.open()
	w.texts("by", f.Approvals.By)
	w.texts("groups", f.Approvals.Groups)
	w.close()
	w.text("caller", f.Caller)
	w.ready("change", k.change.json, f.Change.write)
	w.flag("dry_run", f.DryRun)
	w.ready("grant", k.grant.json, f.Grant.write)
	w.text("input", f.Input)
	w.ready("provider", k.provider.json, f.Provider.write)
	w.texts("resources", f.Resources)
	w.name("run")
	w.open()
	w.number("denials", f.Run.Denials)
	w.flag("tainted", f.Run.Tainted)
	w.texts("verbs_used", f.Run.VerbsUsed)
	w.close()
	w.name("time")
	w.open()
	w.number("hour", f.Time.Hour)
	w.number("unix", f.Time.Unix)
	w.text("weekday", f.Time.Weekday)
	w.close()
	if t := f.Tool; t != nil {
		w.name("tool")
		w.open()
		w.texts("argv", t.Argv)
		w.text("command", t.Command)
		w.texts("dirs", t.Dirs)
		w.text("host", t.Host)
		w.text("intent", t.Intent)
		w.text("path", t.Path)
		w.number("port", t.Port)
		w.text("program", t.Program)
		w.close()
	}
	if v := f.Verb; v != nil {
		w.name("verb")
		w.open()
		w.text("exec", v.Exec)
		w.flag("idempotent", v.Idempotent)
		w.text("port", v.Port)
		w.text("risk", v.Risk)
		w.close()
	}
	w.close()
	return !w.odd
}

func (f grantFacts) write(w *writer) bool {
	w.open()
	w.texts("capabilities", f.Capabilities)
	w.texts("credentials", f.Credentials)
	w.texts("egress", f.Egress)
	w.text("id", f.ID)
	w.texts("scopes", f.Scopes)
	w.texts("verbs", f.Verbs)
	w.text("work_unit", f.WorkUnit)
	w.close()
	return !w.odd
}

func (f providerFacts) write(w *writer) bool {
	w.open()
	w.texts("credentials", f.Credentials)
	w.texts("egress", f.Egress)
	w.text("extension", f.Extension)
	w.text("manifest", f.Manifest)
	w.text("origin", f.Origin)
	w.close()
	return !w.odd
}

func (f changeFacts) write(w *writer) bool {
	w.open()
	w.flag("approved", f.Approved)
	w.texts("authors", f.Authors)
	w.flag("head_matches", f.HeadMatches)
	w.text("id", f.ID)
	w.text("requester", f.Requester)
	w.text("state", f.State)
	w.flag("verified", f.Verified)
	w.close()
	return !w.odd
}
