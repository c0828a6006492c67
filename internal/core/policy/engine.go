package policy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/cedar-policy/cedar-go"
	"github.com/cedar-policy/cedar-go/x/exp/ast"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
)

// Bounds of a policy set.
const (
	MaxPolicies  = 20000
	MaxFileBytes = 4 << 20
)

// Engine is one revision of the policies, immutable and safe for concurrent
// use. A nil or zero Engine denies everything.
type Engine struct {
	revision digest.Digest
	model    *model
	rules    []rule
	byID     map[cedar.PolicyID]*rule
	byAction map[cedar.EntityUID]*index // the rules whose scope matches an action
	memos    *memos
}

// rule is one policy with its annotations read.
type rule struct {
	id       cedar.PolicyID
	policy   *cedar.Policy
	file     string
	text     string
	clause   string
	escalate string // group that may lift this forbid

	// What slicing needs; see slice.go.
	place     int           // in the order of the set
	bare      *cedar.Policy // the policy without the parts of its scope that slicing has checked
	principal cedar.EntityType
	resource  string
}

var (
	idPattern    = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)
	groupPattern = regexp.MustCompile(`^[a-z][a-z0-9-]{0,62}$`)
)

// Load reads a policy set: file name to Cedar text. Every policy has a unique
// @id; a forbid may carry @escalate("group"); @text says in words what the
// policy is for and @clause where it comes from; other annotations are refused.
// Every policy is type-checked against Schema, so a rule over an attribute
// that does not exist is an error here and not a skipped rule later. A permit
// cannot name a reserved scope (P-210). No files is a set that denies all.
func Load(files map[string][]byte) (*Engine, error) {
	m, err := shared()
	if err != nil {
		return nil, err
	}
	e := &Engine{model: m, memos: &memos{}}
	contents := map[string]string{}
	owner := map[cedar.PolicyID]string{}
	var problems []error
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if len(files[name]) > MaxFileBytes {
			return nil, fmt.Errorf("policy file %s: %d bytes, at most %d", name, len(files[name]), MaxFileBytes)
		}
		contents[name] = string(digest.Of(files[name]))
		list, err := cedar.NewPolicyListFromBytes(name, files[name])
		if err != nil {
			problems = append(problems, fmt.Errorf("policy file %s: %w", name, err))
			continue
		}
		for _, p := range list {
			r, err := e.readRule(name, p)
			if err != nil {
				problems = append(problems, err)
				continue
			}
			if first, twice := owner[r.id]; twice {
				problems = append(problems, fmt.Errorf("%s: two policies have @id(%q), the other is in %s", position(name, p), r.id, first))
				continue
			}
			owner[r.id] = position(name, p)
			e.rules = append(e.rules, r)
		}
	}
	if len(e.rules) > MaxPolicies {
		problems = append(problems, fmt.Errorf("%d policies, at most %d", len(e.rules), MaxPolicies))
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	e.revision, err = digest.OfCanonical(map[string]any{"files": contents, "schema": string(digest.Of([]byte(Schema())))})
	if err != nil {
		return nil, fmt.Errorf("name the policy revision: %w", err)
	}
	e.slice()
	return e, nil
}

func position(file string, p *cedar.Policy) string {
	return fmt.Sprintf("%s:%d:%d", file, p.Position().Line, p.Position().Column)
}

func (e *Engine) readRule(file string, p *cedar.Policy) (rule, error) {
	where := position(file, p)
	r := rule{policy: p, file: where}
	for key, value := range p.Annotations() {
		switch v := string(value); key {
		case "id":
			r.id = cedar.PolicyID(v)
		case "text":
			r.text = v
		case "clause":
			r.clause = v
		case "escalate":
			if p.Effect() != cedar.Forbid || !groupPattern.MatchString(v) {
				return rule{}, fmt.Errorf("%s: @escalate names a group, as in @escalate(\"approvers\"), and stands on a forbid", where)
			}
			r.escalate = v
		default:
			return rule{}, fmt.Errorf("%s: annotation @%s is not known: use @id, @text, @clause or @escalate", where, key)
		}
	}
	if !idPattern.MatchString(string(r.id)) {
		return rule{}, fmt.Errorf("%s: every policy needs an @id of 1 to 63 of a-z, 0-9 and '-', has %q", where, r.id)
	}
	if err := e.model.validator.Policy(string(r.id), (*ast.Policy)(p.AST())); err != nil {
		return rule{}, fmt.Errorf("%s: %w", where, err)
	}
	if p.Effect() == cedar.Permit {
		source := string(p.MarshalCedar())
		for _, scope := range []string{grant.ScopeEvidenceWrite, grant.ScopeEvidenceRead, grant.ScopeLogAppend} {
			if strings.Contains(source, `"`+scope+`"`) {
				return rule{}, fmt.Errorf("%s: policy %s: the scope %s is reserved and cannot be granted by a policy (P-210)", where, r.id, scope)
			}
		}
	}
	return r, nil
}

// Revision names the policy set and the schema it was checked against.
func (e *Engine) Revision() digest.Digest {
	if e == nil {
		return ""
	}
	return e.revision
}

// Rules returns the ids of the policies, in the order of their files.
func (e *Engine) Rules() []string {
	if e == nil {
		return nil
	}
	out := make([]string, len(e.rules))
	for i, r := range e.rules {
		out[i] = string(r.id)
	}
	return out
}

// Decide answers one request: floors, then the shape of the request, then the
// grant, then the policies. The first layer that refuses gives all its reasons;
// later layers are not asked. It is pure: the same engine and request give the
// same decision. Anything unexpected is a denial.
func (e *Engine) Decide(r Request) (d Decision) {
	defer func() {
		if p := recover(); p != nil {
			d = Decision{Policy: e.Revision(), Reasons: []Reason{{Layer: LayerStrict, ID: "engine", Text: fmt.Sprintf("the policy engine failed: %v", p)}}}
		}
	}()
	if e == nil || e.model == nil {
		d = Decision{Policy: e.Revision(), Grant: r.Grant.Digest()}
		return d.refused(refuse(LayerStrict, "engine", "", "load a policy set", "no policies are loaded"))
	}
	k := e.memos.known(r)
	d = Decision{Policy: e.revision, Grant: k.grant.digest}
	f := newFacts(r, e.validApprovals(r), k)
	context, err := f.written(k)
	if err == nil {
		d.Context = context
	}
	if found := checkFloors(r); len(found) > 0 {
		return d.refused(found...)
	}
	if found := checkStrict(r); len(found) > 0 {
		return d.refused(found...)
	}
	if err != nil {
		return d.refused(refuse(LayerStrict, "context", "", "report this with the decision", "the context has no canonical form: %s", err))
	}
	if found := checkGrant(r, k.grant.err); len(found) > 0 {
		return d.refused(found...)
	}
	d.Effect, d.Reasons, d.Ask = e.ask(&f, k)
	return d
}

func (d Decision) refused(found ...refusal) Decision {
	d.Effect = Deny
	var asks []string
	for _, f := range found {
		d.Reasons = append(d.Reasons, f.reason)
		if f.ask != "" && !slices.Contains(asks, f.ask) {
			asks = append(asks, f.ask)
		}
	}
	d.Ask = strings.Join(asks, "; ")
	return d
}

// Replay decides a recorded context again under this engine's policies. Floors
// and grants are not asked again: it answers what the policies would say.
func (e *Engine) Replay(context json.RawMessage) (Effect, []Reason, error) {
	if e == nil || e.model == nil {
		return Deny, nil, errors.New("replay: no policies are loaded")
	}
	if err := digest.CheckCanonical(context); err != nil {
		return Deny, nil, fmt.Errorf("replay: %w", err)
	}
	var f facts
	dec := json.NewDecoder(bytes.NewReader(context))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&f); err != nil {
		return Deny, nil, fmt.Errorf("replay: %w", err)
	}
	again, err := f.canonical()
	if err != nil || !bytes.Equal(again, context) {
		return Deny, nil, errors.New("replay: the context lacks an attribute")
	}
	effect, reasons, _ := e.evaluate(&f, f.records())
	return effect, reasons, nil
}

// ask is evaluate for a request that was put together from known parts. Where no
// rule for its action looks at the time or the input, the same question has the
// same answer.
func (e *Engine) ask(f *facts, k known) (Effect, []Reason, string) {
	x := e.byAction[actionUID(f.Action)]
	if x == nil || x.moving {
		return e.evaluate(f, e.memos.records(f, k))
	}
	q, again := f.question(k)
	if again {
		if v, ok := e.memos.verdicts.get(q); ok {
			return v.effect, slices.Clone(v.reasons), v.ask
		}
	}
	effect, reasons, ask := e.evaluate(f, e.memos.records(f, k))
	if again {
		e.memos.verdicts.put(q, verdict{effect, slices.Clone(reasons), ask})
	}
	return effect, reasons, ask
}

// evaluate is the Cedar layer. Any evaluation error is a denial: the language
// skips a policy that fails, and a skipped forbid would allow.
func (e *Engine) evaluate(f *facts, parts records) (Effect, []Reason, string) {
	request, err := f.request(parts)
	if err == nil {
		err = e.model.admit(request, f)
	}
	if err != nil {
		return Deny, []Reason{{Layer: LayerPolicy, ID: "schema", Text: err.Error()}}, ""
	}
	rules := e.candidates(request, f.Resources)
	allowed, matched, failed := e.authorize(rules, request)
	switch {
	case len(failed) > 0:
		return Deny, failed, "repair the policy: a rule that cannot be evaluated denies"
	case allowed:
		return Allow, reasons(matched), ""
	case len(matched) == 0:
		text := fmt.Sprintf("no policy permits %s for %s called by the %s context at %q", f.Action, f.Actor.Kind, f.Caller, f.Change.State)
		return Deny, []Reason{{Layer: LayerPolicy, ID: "default-deny", Text: text}}, "ask whoever keeps the policies for a permit"
	}
	lasting := slices.Collect(func(yield func(*rule) bool) {
		for _, r := range matched {
			if r.escalate == "" && !yield(r) {
				return
			}
		}
	})
	if len(lasting) > 0 {
		return Deny, reasons(lasting), "ask whoever keeps the policies"
	}
	rest := slices.DeleteFunc(slices.Clone(rules), func(r *rule) bool { return slices.Contains(matched, r) })
	allowed, permits, failed := e.authorize(rest, request)
	switch {
	case len(failed) > 0:
		return Deny, failed, "repair the policy: a rule that cannot be evaluated denies"
	case !allowed:
		return Deny, reasons(matched), "no policy permits this even with an approval"
	}
	var waiting []string
	for _, r := range matched {
		if !slices.Contains(f.Approvals.Groups, r.escalate) && !slices.Contains(waiting, r.escalate) {
			waiting = append(waiting, r.escalate)
		}
	}
	if len(waiting) > 0 {
		return Escalate, reasons(matched), "approval of " + strings.Join(waiting, " and of ")
	}
	out := reasons(permits)
	for _, r := range matched {
		out = append(out, Reason{Layer: LayerApproval, ID: string(r.id), Text: fmt.Sprintf("%s approved for %s", strings.Join(f.Approvals.By, ", "), r.escalate), Clause: r.clause})
	}
	return Allow, out, ""
}

// authorize runs Cedar over rules and returns the deciding rules, or the
// errors of those that could not be evaluated.
func (e *Engine) authorize(rules slice, request cedar.Request) (allowed bool, matched []*rule, failed []Reason) {
	decision, diagnostic := cedar.Authorize(rules, e.model.actions, request)
	for _, err := range diagnostic.Errors {
		failed = append(failed, Reason{Layer: LayerPolicy, ID: string(err.PolicyID), Text: "could not be evaluated: " + err.Message})
	}
	for _, reason := range diagnostic.Reasons {
		matched = append(matched, e.byID[reason.PolicyID])
	}
	return decision == cedar.Allow && len(failed) == 0, matched, failed
}

func reasons(rules []*rule) []Reason {
	out := make([]Reason, len(rules))
	for i, r := range rules {
		text := r.text
		if text == "" {
			text = "policy at " + r.file
		}
		out[i] = Reason{Layer: LayerPolicy, ID: string(r.id), Text: text, Clause: r.clause}
	}
	return out
}
