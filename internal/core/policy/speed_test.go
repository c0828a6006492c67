package policy

import (
	"bytes"
	"fmt"
	"iter"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cedar-policy/cedar-go"
	"pgregory.net/rapid"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy/floors"
	"github.com/numinance/numinance/internal/core/ports"
)

// What makes a decision fast is held here against the plain way of doing it.

var word = rapid.OneOf(rapid.SampledFrom([]string{"", "a", "widget", "r1", `q"\`, "€", "\u2028", "<&>", "\xff", "\n"}), rapid.String())

func drawRequest(t *rapid.T) Request {
	words := func(name string) []string { return rapid.SliceOfN(word, 0, 3).Draw(t, name) }
	actor := identity.Actor{
		Kind: identity.ActorKind(rapid.IntRange(1, 5).Draw(t, "kind")), Principal: identity.Principal(word.Draw(t, "principal")),
		Run: identity.RunID(word.Draw(t, "run")), Vendor: word.Draw(t, "vendor"),
	}
	r := Request{
		Actor: actor, Caller: ports.Caller(rapid.IntRange(0, 8).Draw(t, "caller")), Resources: words("resources"),
		Grant: grant.Grant{
			ID: "g", WorkUnit: identity.WorkUnitID(word.Draw(t, "unit")), Actor: actor, Verbs: words("verbs"), Scopes: words("scopes"),
			Capabilities: words("capabilities"), Credentials: words("credentials"), Egress: []grant.Destination{{Host: word.Draw(t, "host"), Port: 1}},
		},
		Change: ChangeFacts{
			ID: "c", State: word.Draw(t, "state"), Authors: []identity.Actor{actor}, Requester: "human:a", Verified: rapid.Bool().Draw(t, "verified"),
			Approved: rapid.Bool().Draw(t, "approved"), HeadMatches: rapid.Bool().Draw(t, "head"),
		},
		Run:      RunFacts{Tainted: rapid.Bool().Draw(t, "tainted"), Denials: rapid.Int64Range(-1, 1<<53+1).Draw(t, "denials"), VerbsUsed: words("used")},
		Provider: ProviderFacts{Extension: "p", Origin: word.Draw(t, "origin"), Egress: words("egress"), Credentials: words("intents")},
		DryRun:   rapid.Bool().Draw(t, "dry"), Now: time.Unix(rapid.Int64Range(0, 1<<34).Draw(t, "now"), 0), Input: "i",
	}
	if rapid.Bool().Draw(t, "tool") {
		r.Tool = &Tool{Name: rapid.SampledFrom(floors.ToolNames()).Draw(t, "name"), Path: word.Draw(t, "path"), Host: word.Draw(t, "at"), Intent: word.Draw(t, "intent"), Argv: words("argv")}
	} else {
		r.Verb = rapid.SampledFrom(ports.All()).Draw(t, "verb")
	}
	return r
}

// TestMemosChangeNothing: one set of memos, asked about requests whose parts
// share their names and little else, gives what fresh ones give, and the
// context is the one that the encoder and the canonicaliser make.
func TestMemosChangeNothing(t *testing.T) {
	old := &memos{}
	rapid.Check(t, func(t *rapid.T) {
		r := drawRequest(t)
		for range 2 {
			k, fresh := old.known(r), (&memos{}).known(r)
			if k.grant.digest != r.Grant.Digest() || fmt.Sprint(k.grant.err) != fmt.Sprint(r.Grant.Validate()) {
				t.Fatalf("grant %s, %v", k.grant.digest, k.grant.err)
			}
			f, g := newFacts(r, nil, k), newFacts(r, nil, fresh)
			want, wantErr := g.canonical()
			got, err := f.written(k)
			if fmt.Sprint(err) != fmt.Sprint(wantErr) || !bytes.Equal(got, want) {
				t.Fatalf("written %s, %v\nwant    %s, %v", got, err, want, wantErr)
			}
			a, err := f.request(old.records(&f, k))
			b, errB := g.request(g.records())
			if err != nil || errB != nil || a.Principal != b.Principal || a.Action != b.Action || a.Resource != b.Resource || !a.Context.Equal(b.Context) {
				t.Fatalf("%v, %v\n%v, %v", a, err, b, errB)
			}
		}
	})
}

// TestMemoDoesNotKeepWhatTheCallerChanges: a grant that is changed in place after
// a decision is a new grant.
func TestMemoDoesNotKeepWhatTheCallerChanges(t *testing.T) {
	m := &memos{}
	g := grant.Grant{ID: "g", Verbs: []string{"scm.GetFile"}}
	before := m.grant(g)
	g.Verbs[0] = "scm.MergePullRequest"
	if after := m.grant(g); after.digest == before.digest || after.digest != g.Digest() || before.facts.Verbs[0] != "scm.GetFile" {
		t.Errorf("%s and %s", before.digest, after.digest)
	}
	p := ProviderFacts{Extension: "p", Credentials: []string{"a"}}
	m.provider(p)
	p.Credentials[0] = "b"
	if got := m.provider(p).facts.Credentials[0]; got != "b" {
		t.Errorf("provider keeps %s", got)
	}
	c := ChangeFacts{ID: "c", Authors: []identity.Actor{{Principal: "agent:a"}}}
	m.change(c)
	c.Authors[0].Principal = "agent:b"
	if got := m.change(c).facts.Authors[0]; got != "agent:b" {
		t.Errorf("change keeps %s", got)
	}
	r := RunFacts{VerbsUsed: []string{"a"}}
	m.run("r", r)
	r.VerbsUsed[0] = "b"
	if got := m.run("r", r).facts.VerbsUsed[0]; got != "b" {
		t.Errorf("run keeps %s", got)
	}
	for i := range 3 * maxKept {
		m.grant(grant.Grant{ID: identity.GrantID(fmt.Sprint(i))})
	}
	if n := len(m.grants.kept); n > maxKept {
		t.Errorf("%d grants are kept", n)
	}
}

// TestAdmissionIsTheSchemas: what is known of a request's kind is what the
// validator says of the request itself.
func TestAdmissionIsTheSchemas(t *testing.T) {
	m, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		r := drawRequest(t)
		f := newFacts(r, nil, (&memos{}).known(r))
		request, err := f.request(f.records())
		if err != nil {
			t.Fatal(err)
		}
		if rapid.Bool().Draw(t, "another action") {
			request.Action = actionUID(rapid.SampledFrom([]string{"verbs", "port.scm", "scm.Nothing", "tool.read", "scm.GetFile"}).Draw(t, "action"))
		}
		kind := admission{request.Action, request.Principal.Type, request.Resource.Type, f.Tool != nil}
		if valid := m.validator.Request(request) == nil; m.admitted[kind] != valid {
			t.Fatalf("%+v: admitted %v, valid %v", kind, m.admitted[kind], valid)
		}
	})
}

// whole is a set without any slicing.
type whole []rule

func (w whole) All() iter.Seq2[cedar.PolicyID, *cedar.Policy] {
	return func(yield func(cedar.PolicyID, *cedar.Policy) bool) {
		for i := range w {
			if !yield(w[i].id, w[i].policy) {
				return
			}
		}
	}
}

// TestSlicesLeaveOutOnlyWhatIsFalse evaluates random sets whole and sliced: the
// same decision, the same rules in the same order, the same errors.
func TestSlicesLeaveOutOnlyWhatIsFalse(t *testing.T) {
	scopes := []string{
		"principal, action, resource", "principal is Runner, action, resource", `principal == Runner::"a", action in Action::"port.scm", resource`,
		`principal in AuthorAgent::"a", action in [Action::"verbs", Action::"tools"], resource`, `principal, action == Action::"scm.GetFile", resource == Change::"c"`,
		`principal is ReviewerAgent, action in Action::"tools", resource in Change::"c"`,
	}
	conditions := []string{
		`true`, `context.resources.contains("widget")`, `context.resources.contains("widget") && context.run.tainted`,
		`context.resources.contains("a") && context.resources.contains("r1")`, `context.run.denials * 9223372036854775807 > 0 && context.resources.contains("a")`,
		`context.resources.contains("r1") && context.run.denials * 9223372036854775807 > 0`, `context.resources.contains("a") || context.run.tainted`,
		`!context.resources.contains("a")`, `context.grant.verbs.contains("a")`, `context.resources.contains("")`, `context.change.verified && context.resources.contains("a")`,
		`if context.resources.contains("a") then context.dry_run else true`,
	}
	rapid.Check(t, func(t *rapid.T) {
		var text strings.Builder
		n := rapid.IntRange(0, 12).Draw(t, "policies")
		for i := range n {
			fmt.Fprintf(&text, "@id(\"p%d\") %s (%s)", i, rapid.SampledFrom([]string{"permit", "forbid"}).Draw(t, "effect"), rapid.SampledFrom(scopes).Draw(t, "scope"))
			for range rapid.IntRange(0, 2).Draw(t, "conditions") {
				fmt.Fprintf(&text, " %s { %s }", rapid.SampledFrom([]string{"when", "unless"}).Draw(t, "clause"), rapid.SampledFrom(conditions).Draw(t, "condition"))
			}
			text.WriteString(";\n")
		}
		e, err := Load(map[string][]byte{"x": []byte(text.String())})
		if err != nil {
			t.Fatal(err)
		}
		r := drawRequest(t)
		f := newFacts(r, nil, e.memos.known(r))
		request, err := f.request(f.records())
		if err != nil {
			t.Fatal(err)
		}
		wantDecision, want := cedar.Authorize(whole(e.rules), e.model.actions, request)
		decision, got := cedar.Authorize(e.candidates(request, f.Resources), e.model.actions, request)
		if decision != wantDecision || !slices.Equal(got.Reasons, want.Reasons) || !slices.Equal(got.Errors, want.Errors) {
			t.Fatalf("%s\n%v %+v\nwant %v %+v", text.String(), decision, got, wantDecision, want)
		}
	})
}

// TestVerdictsAreAskedAgainWhereTheyMove: an engine that keeps what it was asked
// answers a sequence of requests as it would without, whatever the rules read.
func TestVerdictsAreAskedAgainWhereTheyMove(t *testing.T) {
	conditions := []string{
		`context.run.tainted`, `context.time.unix < 100`, `context["time"].hour > 12`, `context has time`, `context.input == "i"`, `context == context`,
		`(if context.dry_run then context else context).time.unix < 100`, `context.dry_run`, `context.caller == "release"`, `context.change.verified`, `context.grant.verbs.contains("a")`, `context.provider.origin == "a"`,
		`context.actor.vendor == "a"`, `context.verb.risk == "READ"`, `context.resources.contains("a")`, `[context].contains(context)`,
	}
	engine := func(text string) *Engine {
		e, err := Load(map[string][]byte{"x": []byte(text)})
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		return e
	}
	rapid.Check(t, func(t *rapid.T) {
		text := `@id("all") permit (principal, action in Action::"verbs", resource);`
		for i := range rapid.IntRange(0, 3).Draw(t, "rules") {
			text += fmt.Sprintf("@id(\"f%d\") forbid (principal, action in Action::\"verbs\", resource) when { %s };", i, rapid.SampledFrom(conditions).Draw(t, "condition"))
		}
		old := engine(text)
		r := drawRequest(t)
		r.Tool, r.Verb, r.Run.Denials = nil, rapid.SampledFrom(ports.All()).Draw(t, "verb"), 0
		for range 8 {
			switch rapid.IntRange(0, 6).Draw(t, "change") {
			case 0:
				r.Now = time.Unix(rapid.Int64Range(0, 200000).Draw(t, "now"), 0)
			case 1:
				r.Run.Tainted = !r.Run.Tainted
			case 2:
				r.DryRun = !r.DryRun
			case 3:
				r.Change.Verified = !r.Change.Verified
			case 4:
				r.Resources = rapid.SliceOfN(rapid.SampledFrom([]string{"a", ""}), 0, 2).Draw(t, "resources")
			case 5:
				r.Provider.Origin = rapid.SampledFrom([]string{"a", "b"}).Draw(t, "origin")
			case 6:
				r.Input = digest.Digest(rapid.SampledFrom([]string{"i", "j"}).Draw(t, "input"))
			}
			k := old.memos.known(r)
			f := newFacts(r, nil, k)
			effect, reasons, ask := old.ask(&f, k)
			wantEffect, wantReasons, wantAsk := old.evaluate(&f, f.records())
			if effect != wantEffect || ask != wantAsk || !slices.Equal(reasons, wantReasons) {
				t.Fatalf("%s\n%s %v\nwant %s %v", text, effect, reasons, wantEffect, wantReasons)
			}
			for i := range reasons {
				reasons[i].Text = "the caller's own"
			}
		}
	})
}
