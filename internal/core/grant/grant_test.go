package grant_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/pathscope"
	"pgregory.net/rapid"
)

var start = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

func author() grant.Grant {
	return grant.Grant{
		ID: "grt-1", Change: "chg-1", WorkUnit: "wu-1", Run: "run-1",
		Actor: identity.Actor{Kind: identity.KindAuthorAgent, Principal: "agent:fake", Run: "run-1"},
		Verbs: []string{"scm.OpenPullRequest", "scm.GetFile"}, Resources: []string{"widget", "mirrors/"}, Scopes: []string{"docs.read"},
		Paths:        pathscope.Scope{Allowed: []string{"src/"}, Denied: []string{"src/gen/"}},
		Capabilities: []string{grant.CapabilityRead, grant.CapabilityWrite, grant.CapabilityShell},
		Egress:       []grant.Destination{{Host: "proxy.example.com", Port: 443}}, Credentials: []string{"scm-write"},
		Budget:    grant.Budget{Actions: 100, OutputBytes: 1 << 20, Tokens: 1000, Wall: time.Hour},
		NotBefore: start, Expires: start.Add(time.Hour),
	}
}

func TestNewRefusesMalformed(t *testing.T) {
	cases := map[string]func(*grant.Grant){
		"no id":               func(g *grant.Grant) { g.ID = "" },
		"no change":           func(g *grant.Grant) { g.Change = "" },
		"no actor":            func(g *grant.Grant) { g.Actor = identity.Actor{} },
		"run of another":      func(g *grant.Grant) { g.Run = "run-2" },
		"no expiry":           func(g *grant.Grant) { g.Expires = time.Time{} },
		"expiry before start": func(g *grant.Grant) { g.Expires = g.NotBefore },
		"negative budget":     func(g *grant.Grant) { g.Budget.Tokens = -1 },
		"verb pattern":        func(g *grant.Grant) { g.Verbs = []string{"scm.*"} },
		"empty resource":      func(g *grant.Grant) { g.Resources = []string{""} },
		"capability":          func(g *grant.Grant) { g.Capabilities = []string{"SHELL"} },
		"destination":         func(g *grant.Grant) { g.Egress = []grant.Destination{{Host: "*.example.com", Port: 443}} },
		"port":                func(g *grant.Grant) { g.Egress = []grant.Destination{{Host: "example.com"}} },
		"path":                func(g *grant.Grant) { g.Paths.Allowed = []string{"../"} },
	}
	for name, spoil := range cases {
		g := author()
		spoil(&g)
		if _, err := grant.New(g); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := grant.New(grant.Grant{}); err == nil {
		t.Error("the zero grant was accepted")
	}
	if _, err := grant.New(author()); err != nil {
		t.Errorf("good grant refused: %v", err)
	}
}

// P-208: only a runner grant carries the reserved scopes.
func TestP208ReservedScopesOnlyForRunner(t *testing.T) {
	kinds := []identity.ActorKind{identity.KindHuman, identity.KindAuthorAgent, identity.KindReviewerAgent, identity.KindRunner, identity.KindReleasePipeline}
	for _, kind := range kinds {
		for _, scope := range []string{"evidence.write", "evidence.read", "transparencylog.append"} {
			g := author()
			g.Actor.Kind = kind
			g.Paths, g.Egress, g.Credentials, g.Capabilities = pathscope.Scope{}, nil, nil, nil
			g.Scopes = []string{scope}
			_, err := grant.New(g)
			if (err == nil) != (kind == identity.KindRunner) {
				t.Errorf("%s with %s: err = %v", kind, scope, err)
			}
		}
	}
}

// P-127, P-128, P-129: a reviewer-agent grant is read-only.
func TestP127ReviewerGrantIsReadOnly(t *testing.T) {
	base := author()
	base.Actor.Kind = identity.KindReviewerAgent
	base.Paths, base.Egress, base.Credentials = pathscope.Scope{}, nil, nil
	base.Capabilities = []string{grant.CapabilityRead}
	if _, err := grant.New(base); err != nil {
		t.Fatalf("read-only reviewer grant refused: %v", err)
	}
	cases := map[string]func(*grant.Grant){
		"path":       func(g *grant.Grant) { g.Paths.Allowed = []string{"a"} },
		"credential": func(g *grant.Grant) { g.Credentials = []string{"x"} },
		"egress":     func(g *grant.Grant) { g.Egress = []grant.Destination{{Host: "a.example", Port: 1}} },
		"write":      func(g *grant.Grant) { g.Capabilities = []string{grant.CapabilityWrite} },
		"shell":      func(g *grant.Grant) { g.Capabilities = []string{grant.CapabilityShell} },
		"network":    func(g *grant.Grant) { g.Capabilities = []string{grant.CapabilityNetwork} },
	}
	for name, spoil := range cases {
		g := base
		spoil(&g)
		if _, err := grant.New(g); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// H-048: whoever asks for more than they hold is refused, part by part.
func TestH048NarrowRefusesMore(t *testing.T) {
	cases := map[string]func(*grant.Grant){
		"change":     func(g *grant.Grant) { g.Change = "chg-2" },
		"run":        func(g *grant.Grant) { g.Run, g.Actor.Run = "run-2", "run-2" },
		"kind":       func(g *grant.Grant) { g.Actor.Kind = identity.KindReleasePipeline },
		"work unit":  func(g *grant.Grant) { g.WorkUnit = "wu-2" },
		"verb":       func(g *grant.Grant) { g.Verbs = []string{"scm.MergePullRequest"} },
		"resource":   func(g *grant.Grant) { g.Resources = []string{"other"} },
		"climbing":   func(g *grant.Grant) { g.Resources = []string{"mirrors/../other"} },
		"scope":      func(g *grant.Grant) { g.Scopes = []string{"docs.write"} },
		"path":       func(g *grant.Grant) { g.Paths.Allowed = []string{"**"} },
		"capability": func(g *grant.Grant) { g.Capabilities = []string{grant.CapabilityNetwork} },
		"host":       func(g *grant.Grant) { g.Egress = []grant.Destination{{Host: "evil.example", Port: 443}} },
		"port":       func(g *grant.Grant) { g.Egress = []grant.Destination{{Host: "proxy.example.com", Port: 80}} },
		"credential": func(g *grant.Grant) { g.Credentials = []string{"cloud-admin"} },
		"budget":     func(g *grant.Grant) { g.Budget.Actions++ },
		"expiry":     func(g *grant.Grant) { g.Expires = g.Expires.Add(1) },
		"start":      func(g *grant.Grant) { g.NotBefore = g.NotBefore.Add(-1) },
	}
	g, err := grant.New(author())
	if err != nil {
		t.Fatal(err)
	}
	for name, widen := range cases {
		to := author()
		widen(&to)
		if got, err := g.Narrow(to); err == nil {
			t.Errorf("%s: narrowed to %+v", name, got)
		}
	}
}

func subset[T any](t *rapid.T, name string, from []T) []T {
	var out []T
	for _, v := range from {
		if rapid.Bool().Draw(t, name) {
			out = append(out, v)
		}
	}
	return out
}

// No sequence of narrowings widens: what the last grant holds, the first held,
// and a denied path stays denied.
func TestNarrowNeverWidens(t *testing.T) {
	verbs := []string{"scm.GetFile", "scm.OpenPullRequest", "scm.MergePullRequest", "scm.GetTree"}
	names := []string{"widget", "widget/", "widget/a", "other", "other/b"}
	paths := []string{"src/", "src/a.go", "src/gen/", "docs/", "**", "src/gen/x.go"}
	any := rapid.Custom(func(t *rapid.T) grant.Grant {
		g := author()
		g.Verbs = subset(t, "verbs", verbs)
		g.Resources = subset(t, "resources", names)
		g.Paths.Allowed = subset(t, "allowed", paths)
		g.Paths.Denied = subset(t, "denied", paths[2:4])
		g.Capabilities = subset(t, "capabilities", []string{grant.CapabilityRead, grant.CapabilityShell, grant.CapabilityNetwork})
		g.Egress = subset(t, "egress", []grant.Destination{{"a.example", 443}, {"a.example", 80}, {"b.example", 443}})
		g.Credentials = subset(t, "credentials", []string{"x", "y"})
		g.Budget.Actions = rapid.Int64Range(0, 9).Draw(t, "actions")
		g.Expires = start.Add(time.Duration(rapid.IntRange(1, 5).Draw(t, "hours")) * time.Hour)
		return g
	})
	rapid.Check(t, func(t *rapid.T) {
		first, err := grant.New(any.Draw(t, "first"))
		if err != nil {
			t.Fatal(err)
		}
		last := first
		for range rapid.IntRange(1, 5).Draw(t, "steps") {
			if next, err := last.Narrow(any.Draw(t, "to")); err == nil {
				last = next
			}
		}
		for _, v := range verbs {
			if last.HasVerb(v) && !first.HasVerb(v) {
				t.Fatalf("gained verb %s", v)
			}
		}
		for _, n := range append(names, "widget/a/b", "widgets", "other/b/c") {
			if last.HasResource(n) && !first.HasResource(n) {
				t.Fatalf("gained resource %s", n)
			}
		}
		for _, p := range []string{"src/a.go", "src/b.go", "src/gen/x.go", "docs/a", "z"} {
			was, _ := first.Paths.Check(p)
			if is, _ := last.Paths.Check(p); is && !was {
				t.Fatalf("gained path %s", p)
			}
		}
		for _, d := range last.Egress {
			if !first.HasDestination(d.Host, d.Port) {
				t.Fatalf("gained destination %s", d)
			}
		}
		if last.Budget.Actions > first.Budget.Actions || last.Expires.After(first.Expires) || last.Actor != first.Actor {
			t.Fatal("gained budget, time or identity")
		}
	})
}

func TestDigestIgnoresOrderAndSeesEveryField(t *testing.T) {
	a, b := author(), author()
	b.Verbs = []string{"scm.GetFile", "scm.OpenPullRequest", "scm.GetFile"}
	if a.Digest() != b.Digest() || !a.Digest().Valid() {
		t.Fatal("order or repetition changed the digest")
	}
	for name, change := range map[string]func(*grant.Grant){
		"verb":       func(g *grant.Grant) { g.Verbs = g.Verbs[:1] },
		"path":       func(g *grant.Grant) { g.Paths.Protected = []string{"x"} },
		"egress":     func(g *grant.Grant) { g.Egress = nil },
		"budget":     func(g *grant.Grant) { g.Budget.Wall++ },
		"expires":    func(g *grant.Grant) { g.Expires = g.Expires.Add(1) },
		"vendor":     func(g *grant.Grant) { g.Actor.Vendor = "v" },
		"credential": func(g *grant.Grant) { g.Credentials = nil },
	} {
		c := author()
		change(&c)
		if c.Digest() == a.Digest() {
			t.Errorf("%s: same digest", name)
		}
	}
}

// The form that is hashed is canonical whatever the values are.
func TestCanonicalIsCanonical(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := author()
		g.Actor.Vendor = rapid.String().Draw(t, "vendor")
		g.Resources = rapid.SliceOf(rapid.String()).Draw(t, "resources")
		g.Paths.Denied = append(rapid.SliceOf(rapid.String()).Draw(t, "denied"), "a\u2028<&>\x01\xff\x7f")
		b, err := g.Canonical()
		if err != nil {
			t.Fatal(err)
		}
		if err := digest.CheckCanonical(b); err != nil {
			t.Fatalf("%s: %v", b, err)
		}
	})
}

func TestCanonicalRoundTrip(t *testing.T) {
	g, err := grant.New(author())
	if err != nil {
		t.Fatal(err)
	}
	b, err := g.Canonical()
	if err != nil {
		t.Fatal(err)
	}
	got, err := grant.Parse(b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(g, got, cmpopts.EquateEmpty()); diff != "" {
		t.Fatal(diff)
	}
	for _, bad := range []string{"", "{}", string(b) + " ", string(b[:len(b)-1]) + `,"zz":1}`} {
		if _, err := grant.Parse([]byte(bad)); err == nil {
			t.Errorf("Parse(%.40q) accepted", bad)
		}
	}
}
