package grant

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/pathscope"
)

// document is the recorded form of a grant. Integers are strings, as in every
// canonical document. The fields stand in the order of their names, so that
// encoding one gives the canonical form directly.
type document struct {
	Kind         string   `json:"actor_kind"`
	Principal    string   `json:"actor_principal"`
	Vendor       string   `json:"actor_vendor"`
	Allowed      []string `json:"allowed_paths"`
	Actions      string   `json:"budget_actions"`
	OutputBytes  string   `json:"budget_output_bytes"`
	Tokens       string   `json:"budget_tokens"`
	WallNanos    string   `json:"budget_wall_ns"`
	Capabilities []string `json:"capabilities"`
	Change       string   `json:"change"`
	Credentials  []string `json:"credentials"`
	Denied       []string `json:"denied_paths"`
	Egress       []target `json:"egress"`
	Expires      string   `json:"expires"`
	ID           string   `json:"id"`
	NotBefore    string   `json:"not_before"`
	Protected    []string `json:"protected_paths"`
	Resources    []string `json:"resources"`
	Run          string   `json:"run"`
	Scopes       []string `json:"scopes"`
	Verbs        []string `json:"verbs"`
	WorkUnit     string   `json:"work_unit"`
}

type target struct {
	Host string `json:"host"`
	Port int    `json:"port"`
}

// Canonical returns the grant's recorded form: canonical JSON in which the
// order of lists does not matter. Parse reads it back.
func (g Grant) Canonical() ([]byte, error) {
	g = g.normal()
	d := document{
		ID: string(g.ID), Change: string(g.Change), WorkUnit: string(g.WorkUnit), Run: string(g.Run),
		Kind: g.Actor.Kind.String(), Principal: string(g.Actor.Principal), Vendor: g.Actor.Vendor,
		Verbs: list(g.Verbs), Resources: list(g.Resources), Scopes: list(g.Scopes),
		Allowed: list(g.Paths.Allowed), Denied: list(g.Paths.Denied), Protected: list(g.Paths.Protected),
		Capabilities: list(g.Capabilities), Egress: []target{}, Credentials: list(g.Credentials),
		Actions: number(g.Budget.Actions), OutputBytes: number(g.Budget.OutputBytes), Tokens: number(g.Budget.Tokens),
		WallNanos: number(int64(g.Budget.Wall)),
		NotBefore: g.NotBefore.Format(time.RFC3339Nano), Expires: g.Expires.Format(time.RFC3339Nano),
	}
	for _, e := range g.Egress {
		d.Egress = append(d.Egress, target(e))
	}
	return encode(d)
}

// encode is digest.Canonical for a document whose fields are in order and whose
// numbers are small; it falls back to it wherever the plain encoding could
// differ from the canonical one.
func encode(d document) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(d); err != nil {
		return nil, fmt.Errorf("encode grant: %w", err)
	}
	out := bytes.TrimSuffix(b.Bytes(), []byte("\n"))
	for _, escaped := range []string{`\u2028`, `\u2029`, `\ufffd`} {
		if bytes.Contains(out, []byte(escaped)) {
			return digest.Canonical(d)
		}
	}
	return out, nil
}

// Digest names the grant's canonical form. It is "" for a grant that has none,
// which is equal to no digest.
func (g Grant) Digest() digest.Digest {
	b, err := g.Canonical()
	if err != nil {
		return ""
	}
	return digest.Of(b)
}

// Parse reads a grant back from its canonical form and validates it.
func Parse(b []byte) (Grant, error) {
	if err := digest.CheckCanonical(b); err != nil {
		return Grant{}, fmt.Errorf("read grant: %w", err)
	}
	var d document
	if err := json.Unmarshal(b, &d); err != nil {
		return Grant{}, fmt.Errorf("read grant: %w", err)
	}
	kind, err := identity.ParseActorKind(d.Kind)
	if err != nil {
		return Grant{}, fmt.Errorf("read grant: %w", err)
	}
	g := Grant{
		ID: identity.GrantID(d.ID), Change: identity.ChangeID(d.Change), WorkUnit: identity.WorkUnitID(d.WorkUnit), Run: identity.RunID(d.Run),
		Actor: identity.Actor{Kind: kind, Principal: identity.Principal(d.Principal), Run: identity.RunID(d.Run), Vendor: d.Vendor},
		Verbs: d.Verbs, Resources: d.Resources, Scopes: d.Scopes,
		Paths:        pathscope.Scope{Allowed: d.Allowed, Denied: d.Denied, Protected: d.Protected},
		Capabilities: d.Capabilities, Credentials: d.Credentials,
	}
	for _, e := range d.Egress {
		g.Egress = append(g.Egress, Destination(e))
	}
	var wall int64
	for _, n := range []struct {
		text string
		into *int64
	}{{d.Actions, &g.Budget.Actions}, {d.OutputBytes, &g.Budget.OutputBytes}, {d.Tokens, &g.Budget.Tokens}, {d.WallNanos, &wall}} {
		if *n.into, err = strconv.ParseInt(n.text, 10, 64); err != nil {
			return Grant{}, fmt.Errorf("read grant: budget %q: %w", n.text, err)
		}
	}
	g.Budget.Wall = time.Duration(wall)
	if g.NotBefore, err = time.Parse(time.RFC3339Nano, d.NotBefore); err != nil {
		return Grant{}, fmt.Errorf("read grant: %w", err)
	}
	if g.Expires, err = time.Parse(time.RFC3339Nano, d.Expires); err != nil {
		return Grant{}, fmt.Errorf("read grant: %w", err)
	}
	g, err = New(g)
	if err != nil {
		return Grant{}, err
	}
	again, err := g.Canonical()
	if err != nil || string(again) != string(b) {
		return Grant{}, fmt.Errorf("read grant %s: not in its recorded form", g.ID)
	}
	return g, nil
}

func list(in []string) []string {
	if in == nil {
		return []string{}
	}
	return in
}

func number(n int64) string { return strconv.FormatInt(n, 10) }
