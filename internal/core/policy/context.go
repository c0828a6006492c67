package policy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cedar-policy/cedar-go"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
)

// facts is the one typed source of every attribute a policy can read. Its JSON
// names are the attribute names; its canonical JSON is what records keep. No
// field is optional, so no policy can be skipped for a missing attribute, but that
// a verb has no tool and a tool no verb. Keep the fields sorted by name.
type facts struct {
	Action    string        `json:"action"`
	Actor     actorFacts    `json:"actor"`
	Approvals approvalFacts `json:"approvals"`
	Caller    string        `json:"caller"`
	Change    changeFacts   `json:"change"`
	DryRun    bool          `json:"dry_run"`
	Grant     grantFacts    `json:"grant"`
	Input     string        `json:"input"`
	Provider  providerFacts `json:"provider"`
	Resources []string      `json:"resources"`
	Run       runFacts      `json:"run"`
	Time      timeFacts     `json:"time"`
	Tool      *toolFacts    `json:"tool,omitempty"`
	Verb      *verbFacts    `json:"verb,omitempty"`
}

type actorFacts struct {
	Kind      string `json:"kind"`
	Principal string `json:"principal"`
	Run       string `json:"run"`
	Vendor    string `json:"vendor"`
}

// approvalFacts holds only approvals that are valid for this very action.
type approvalFacts struct {
	By     []string `json:"by"`
	Groups []string `json:"groups"`
}

type changeFacts struct {
	Approved    bool     `json:"approved"`
	Authors     []string `json:"authors"`
	HeadMatches bool     `json:"head_matches"`
	ID          string   `json:"id"`
	Requester   string   `json:"requester"`
	State       string   `json:"state"`
	Verified    bool     `json:"verified"`
}

type grantFacts struct {
	Capabilities []string `json:"capabilities"`
	Credentials  []string `json:"credentials"`
	Egress       []string `json:"egress"`
	ID           string   `json:"id"`
	Scopes       []string `json:"scopes"`
	Verbs        []string `json:"verbs"`
	WorkUnit     string   `json:"work_unit"`
}

type providerFacts struct {
	Credentials []string `json:"credentials"`
	Egress      []string `json:"egress"`
	Extension   string   `json:"extension"`
	Manifest    string   `json:"manifest"`
	Origin      string   `json:"origin"`
}

type runFacts struct {
	Denials   int64    `json:"denials"`
	Tainted   bool     `json:"tainted"`
	VerbsUsed []string `json:"verbs_used"`
}

type timeFacts struct {
	Hour    int64  `json:"hour"`
	Unix    int64  `json:"unix"`
	Weekday string `json:"weekday"`
}

type toolFacts struct {
	Argv    []string `json:"argv"`
	Command string   `json:"command"`
	Dirs    []string `json:"dirs"`
	Host    string   `json:"host"`
	Intent  string   `json:"intent"`
	Path    string   `json:"path"`
	Port    int64    `json:"port"`
	Program string   `json:"program"`
}

type verbFacts struct {
	Exec       string `json:"exec"`
	Idempotent bool   `json:"idempotent"`
	Port       string `json:"port"`
	Risk       string `json:"risk"`
}

// known are the parts of a request that a memo holds.
type known struct {
	grant    *heldGrant
	provider *knownProvider
	change   *knownChange
	run      *knownRun
}

func (m *memos) known(r Request) known {
	return known{m.grant(r.Grant), m.provider(r.Provider), m.change(r.Change), m.run(r.Actor.Run, r.Run)}
}

func newFacts(r Request, valid []Approval, k known) facts {
	f := facts{
		Action:    r.Action(),
		Actor:     actorFacts{Kind: r.Actor.Kind.String(), Principal: string(r.Actor.Principal), Run: string(r.Actor.Run), Vendor: r.Actor.Vendor},
		Caller:    r.Caller.String(),
		Change:    k.change.facts,
		DryRun:    r.DryRun,
		Grant:     k.grant.facts,
		Input:     string(r.Input),
		Provider:  k.provider.facts,
		Resources: list(r.Resources),
		Run:       k.run.facts,
		Time:      newTimeFacts(r.Now),
		Approvals: approvalFacts{By: []string{}, Groups: []string{}},
	}
	for _, a := range valid {
		f.Approvals.By = append(f.Approvals.By, string(a.Approver))
		f.Approvals.Groups = append(f.Approvals.Groups, a.Groups...)
	}
	if r.Tool != nil {
		f.Tool = newToolFacts(*r.Tool)
	} else {
		f.Verb = &verbFacts{Exec: r.Verb.Exec.String(), Idempotent: r.Verb.Idempotent, Port: r.Verb.Port, Risk: r.Verb.Risk.String()}
	}
	return f
}

func newGrantFacts(g grant.Grant) grantFacts {
	f := grantFacts{
		Capabilities: list(g.Capabilities), Credentials: list(g.Credentials), Egress: []string{}, ID: string(g.ID),
		Scopes: list(g.Scopes), Verbs: list(g.Verbs), WorkUnit: string(g.WorkUnit),
	}
	for _, d := range g.Egress {
		f.Egress = append(f.Egress, d.String())
	}
	return f
}

func newProviderFacts(p ProviderFacts) providerFacts {
	return providerFacts{
		Credentials: list(p.Credentials), Egress: list(p.Egress), Extension: p.Extension, Manifest: string(p.Manifest), Origin: p.Origin,
	}
}

func newChangeFacts(c ChangeFacts) changeFacts {
	f := changeFacts{
		Approved: c.Approved, Authors: []string{}, HeadMatches: c.HeadMatches, ID: string(c.ID), Requester: string(c.Requester),
		State: c.State, Verified: c.Verified,
	}
	for _, a := range c.Authors {
		f.Authors = append(f.Authors, string(a.Principal))
	}
	return f
}

func newTimeFacts(now time.Time) timeFacts {
	now = now.UTC()
	return timeFacts{Hour: int64(now.Hour()), Unix: now.Unix(), Weekday: now.Weekday().String()}
}

func newToolFacts(t Tool) *toolFacts {
	f := &toolFacts{Argv: list(t.Argv), Command: strings.Join(t.Argv, " "), Dirs: []string{}, Intent: t.Intent, Path: t.Path}
	for i, c := range t.Path {
		if c == '/' && i > 0 {
			f.Dirs = append(f.Dirs, t.Path[:i])
		}
	}
	if len(t.Argv) > 0 {
		f.Program = t.Argv[0]
	}
	if t.Host != "" {
		if host, port, err := splitHost(t.Host); err == nil {
			f.Host, f.Port = host, int64(port)
		} else {
			f.Host = t.Host
		}
	}
	return f
}

// splitHost reads "host" or "host:port"; the port is 443 where none is given.
func splitHost(s string) (host string, port int, err error) {
	host, text := s, "443"
	switch i := strings.LastIndexByte(s, ':'); {
	case strings.HasPrefix(s, "["):
		end := strings.IndexByte(s, ']')
		if end < 0 {
			return "", 0, fmt.Errorf("host %q: no closing bracket", s)
		}
		host = s[1:end]
		if rest := s[end+1:]; rest != "" {
			after, ok := strings.CutPrefix(rest, ":")
			if !ok {
				return "", 0, fmt.Errorf("host %q: want [address]:port", s)
			}
			text = after
		}
	case i >= 0 && strings.Count(s, ":") == 1:
		host, text = s[:i], s[i+1:]
	}
	port, err = strconv.Atoi(text)
	if err != nil || port < 1 || port > 65535 || host == "" || strconv.Itoa(port) != text {
		return "", 0, fmt.Errorf("host %q: want host or host:port", s)
	}
	return host, port, nil
}

// canonical returns the recorded form of f. The fields of facts stand in the
// order of their names, so that encoding it gives the canonical form directly;
// wherever the plain encoding could differ, the canonicaliser does it.
func (f *facts) canonical() (json.RawMessage, error) {
	if err := f.inRange(); err != nil {
		return nil, err
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(f); err != nil {
		return nil, fmt.Errorf("encode the context: %w", err)
	}
	out := bytes.TrimSuffix(b.Bytes(), []byte("\n"))
	for _, escaped := range []string{`\u2028`, `\u2029`, `\ufffd`} {
		if bytes.Contains(out, []byte(escaped)) {
			return digest.Canonical(f)
		}
	}
	return out, nil
}

func (f *facts) inRange() error {
	if f.Run.Denials < 0 || f.Run.Denials > 1<<53 {
		return fmt.Errorf("count of denials %d is out of range", f.Run.Denials)
	}
	return nil
}

// written is canonical with the help of what a memo has written before.
func (f *facts) written(k known) (json.RawMessage, error) {
	if err := f.inRange(); err != nil {
		return nil, err
	}
	w := digest.NewWriter(1024 + len(k.grant.json) + len(k.provider.json) + len(k.change.json))
	f.write(w, k)
	if b, ok := w.Bytes(); ok {
		return b, nil
	}
	return f.canonical()
}

// records are the parts of a context that Cedar reads and that a memo can hold.
type records struct {
	actor, approvals, change, grant, provider, run, time, verb cedar.Record
	resources                                                  cedar.Set
}

// records makes all of f's parts anew.
func (f *facts) records() records {
	r := records{
		actor: f.Actor.record(), change: f.Change.record(), grant: f.Grant.record(), provider: f.Provider.record(),
		run: f.Run.record(), time: f.Time.record(), approvals: f.Approvals.record(), resources: set(f.Resources),
	}
	if f.Verb != nil {
		r.verb = f.Verb.record()
	}
	return r
}

// records takes f's parts from the memos where they are there.
func (m *memos) records(f *facts, k known) records {
	r := records{
		actor: recordOf(&m.actors, f.Actor), change: k.change.record, grant: k.grant.record, provider: k.provider.record,
		run: k.run.record, time: recordOf(&m.times, f.Time), approvals: noApprovals(),
	}
	if len(f.Approvals.By)+len(f.Approvals.Groups) > 0 {
		r.approvals = f.Approvals.record()
	}
	if len(f.Resources) == 1 && len(f.Resources[0]) <= 512 {
		var ok bool
		if r.resources, ok = m.resources.get(f.Resources[0]); !ok {
			r.resources = set(f.Resources)
			m.resources.put(f.Resources[0], r.resources)
		}
	} else {
		r.resources = set(f.Resources)
	}
	if f.Verb != nil {
		r.verb = recordOf(&m.verbs, *f.Verb)
	}
	return r
}

// noApprovals is the record of a request without any.
var noApprovals = sync.OnceValue(approvalFacts{}.record)

func (f approvalFacts) record() cedar.Record {
	return record(texts("by", f.By), texts("groups", f.Groups))
}

func (f actorFacts) record() cedar.Record {
	return record(text("kind", f.Kind), text("principal", f.Principal), text("run", f.Run), text("vendor", f.Vendor))
}

func (f changeFacts) record() cedar.Record {
	return record(flag("approved", f.Approved), texts("authors", f.Authors), flag("head_matches", f.HeadMatches), text("id", f.ID),
		text("requester", f.Requester), text("state", f.State), flag("verified", f.Verified))
}

func (f grantFacts) record() cedar.Record {
	return record(texts("capabilities", f.Capabilities), texts("credentials", f.Credentials), texts("egress", f.Egress), text("id", f.ID),
		texts("scopes", f.Scopes), texts("verbs", f.Verbs), text("work_unit", f.WorkUnit))
}

func (f providerFacts) record() cedar.Record {
	return record(texts("credentials", f.Credentials), texts("egress", f.Egress), text("extension", f.Extension), text("manifest", f.Manifest),
		text("origin", f.Origin))
}

func (f runFacts) record() cedar.Record {
	return record(number("denials", f.Denials), flag("tainted", f.Tainted), texts("verbs_used", f.VerbsUsed))
}

func (f timeFacts) record() cedar.Record {
	return record(number("hour", f.Hour), number("unix", f.Unix), text("weekday", f.Weekday))
}

func (f verbFacts) record() cedar.Record {
	return record(text("exec", f.Exec), flag("idempotent", f.Idempotent), text("port", f.Port), text("risk", f.Risk))
}

func (f *toolFacts) record() cedar.Record {
	return record(texts("argv", f.Argv), text("command", f.Command), texts("dirs", f.Dirs), text("host", f.Host), text("intent", f.Intent),
		text("path", f.Path), number("port", f.Port), text("program", f.Program))
}

// request turns f into what Cedar evaluates; r are its parts.
func (f *facts) request(r records) (cedar.Request, error) {
	kind, err := identity.ParseActorKind(f.Actor.Kind)
	if err != nil {
		return cedar.Request{}, err
	}
	context := cedar.RecordMap{
		"actor": r.actor, "approvals": r.approvals, "caller": cedar.String(f.Caller),
		"change": r.change, "dry_run": cedar.Boolean(f.DryRun), "grant": r.grant, "input": cedar.String(f.Input), "provider": r.provider,
		"resources": r.resources, "run": r.run, "time": r.time,
	}
	switch {
	case f.Tool != nil && f.Verb == nil:
		context["tool"] = f.Tool.record()
	case f.Verb != nil && f.Tool == nil:
		context["verb"] = r.verb
	default:
		return cedar.Request{}, fmt.Errorf("action %q is neither a verb nor a tool intent", f.Action)
	}
	return cedar.Request{
		Principal: cedar.NewEntityUID(principalType(kind), cedar.String(f.Actor.Principal)),
		Action:    actionUID(f.Action),
		Resource:  cedar.NewEntityUID("Change", cedar.String(f.Change.ID)),
		Context:   cedar.NewRecord(context),
	}, nil
}

type attribute struct {
	name  cedar.String
	value cedar.Value
}

func text(name, v string) attribute {
	return attribute{cedar.String(name), cedar.String(v)}
}
func flag(name string, v bool) attribute {
	return attribute{cedar.String(name), cedar.Boolean(v)}
}
func number(name string, v int64) attribute {
	return attribute{cedar.String(name), cedar.Long(v)}
}
func texts(name string, v []string) attribute {
	return attribute{cedar.String(name), set(v)}
}

func set(in []string) cedar.Set {
	if len(in) == 0 {
		return cedar.Set{}
	}
	values := make([]cedar.Value, len(in))
	for i, s := range in {
		values[i] = cedar.String(s)
	}
	return cedar.NewSet(values...)
}

func record(attributes ...attribute) cedar.Record {
	m := make(cedar.RecordMap, len(attributes))
	for _, a := range attributes {
		m[a.name] = a.value
	}
	return cedar.NewRecord(m)
}

func list(in []string) []string {
	if in == nil {
		return []string{}
	}
	return in
}
