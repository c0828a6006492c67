package policy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cedar-policy/cedar-go"
	"github.com/numinance/numinance/internal/core/digest"
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

func newFacts(r Request, valid []Approval) facts {
	f := facts{
		Action: r.Action(),
		Actor:  actorFacts{Kind: r.Actor.Kind.String(), Principal: string(r.Actor.Principal), Run: string(r.Actor.Run), Vendor: r.Actor.Vendor},
		Caller: r.Caller.String(),
		Change: changeFacts{
			Approved: r.Change.Approved, Authors: []string{}, HeadMatches: r.Change.HeadMatches, ID: string(r.Change.ID),
			Requester: string(r.Change.Requester), State: r.Change.State, Verified: r.Change.Verified,
		},
		DryRun: r.DryRun,
		Grant: grantFacts{
			Capabilities: list(r.Grant.Capabilities), Credentials: list(r.Grant.Credentials), Egress: []string{}, ID: string(r.Grant.ID),
			Scopes: list(r.Grant.Scopes), Verbs: list(r.Grant.Verbs), WorkUnit: string(r.Grant.WorkUnit),
		},
		Input: string(r.Input),
		Provider: providerFacts{
			Credentials: list(r.Provider.Credentials), Egress: list(r.Provider.Egress), Extension: r.Provider.Extension,
			Manifest: string(r.Provider.Manifest), Origin: r.Provider.Origin,
		},
		Resources: list(r.Resources),
		Run:       runFacts{Denials: r.Run.Denials, Tainted: r.Run.Tainted, VerbsUsed: list(r.Run.VerbsUsed)},
		Time:      newTimeFacts(r.Now),
		Approvals: approvalFacts{By: []string{}, Groups: []string{}},
	}
	for _, a := range r.Change.Authors {
		f.Change.Authors = append(f.Change.Authors, string(a.Principal))
	}
	for _, d := range r.Grant.Egress {
		f.Grant.Egress = append(f.Grant.Egress, d.String())
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
func (f facts) canonical() (json.RawMessage, error) {
	if f.Run.Denials < 0 || f.Run.Denials > 1<<53 {
		return nil, fmt.Errorf("count of denials %d is out of range", f.Run.Denials)
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

// request turns f into what Cedar evaluates.
func (f facts) request() (cedar.Request, error) {
	kind, err := identity.ParseActorKind(f.Actor.Kind)
	if err != nil {
		return cedar.Request{}, err
	}
	context := cedar.RecordMap{
		"actor":     record(text("kind", f.Actor.Kind), text("principal", f.Actor.Principal), text("run", f.Actor.Run), text("vendor", f.Actor.Vendor)),
		"approvals": record(texts("by", f.Approvals.By), texts("groups", f.Approvals.Groups)),
		"caller":    cedar.String(f.Caller),
		"change": record(flag("approved", f.Change.Approved), texts("authors", f.Change.Authors), flag("head_matches", f.Change.HeadMatches),
			text("id", f.Change.ID), text("requester", f.Change.Requester), text("state", f.Change.State), flag("verified", f.Change.Verified)),
		"dry_run": cedar.Boolean(f.DryRun),
		"grant": record(texts("capabilities", f.Grant.Capabilities), texts("credentials", f.Grant.Credentials), texts("egress", f.Grant.Egress),
			text("id", f.Grant.ID), texts("scopes", f.Grant.Scopes), texts("verbs", f.Grant.Verbs), text("work_unit", f.Grant.WorkUnit)),
		"input": cedar.String(f.Input),
		"provider": record(texts("credentials", f.Provider.Credentials), texts("egress", f.Provider.Egress), text("extension", f.Provider.Extension),
			text("manifest", f.Provider.Manifest), text("origin", f.Provider.Origin)),
		"resources": set(f.Resources),
		"run":       record(number("denials", f.Run.Denials), flag("tainted", f.Run.Tainted), texts("verbs_used", f.Run.VerbsUsed)),
		"time":      record(number("hour", f.Time.Hour), number("unix", f.Time.Unix), text("weekday", f.Time.Weekday)),
	}
	switch {
	case f.Tool != nil && f.Verb == nil:
		context["tool"] = record(texts("argv", f.Tool.Argv), text("command", f.Tool.Command), texts("dirs", f.Tool.Dirs), text("host", f.Tool.Host),
			text("intent", f.Tool.Intent), text("path", f.Tool.Path), number("port", f.Tool.Port), text("program", f.Tool.Program))
	case f.Verb != nil && f.Tool == nil:
		context["verb"] = record(text("exec", f.Verb.Exec), flag("idempotent", f.Verb.Idempotent), text("port", f.Verb.Port), text("risk", f.Verb.Risk))
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
