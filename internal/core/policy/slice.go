package policy

import (
	"cmp"
	"iter"
	"slices"

	"github.com/cedar-policy/cedar-go"
	public "github.com/cedar-policy/cedar-go/ast"
	"github.com/cedar-policy/cedar-go/x/exp/ast"
)

// A decision looks only at the rules that can match it. Three things are known
// of a rule when it is loaded: the actions that its scope names, the kind of
// principal, and a resource without which its first condition is false. A rule
// that is left out for one of them would have been evaluated to false, and could
// not have failed: scopes cannot fail, nor can asking the set of resources, and
// what follows a false operand of && is not evaluated.

// slice is the part of a set that one evaluation sees, in the order of the set.
type slice []*rule

// All implements cedar.PolicyIterator.
func (s slice) All() iter.Seq2[cedar.PolicyID, *cedar.Policy] {
	return func(yield func(cedar.PolicyID, *cedar.Policy) bool) {
		for _, r := range s {
			if !yield(r.id, r.bare) {
				return
			}
		}
	}
}

// index is the rules of one action.
type index struct {
	always     slice
	byResource map[string]slice
	// moving: one of the rules looks at what differs between any two requests.
	moving bool
}

// slice fills the engine's indices in.
func (e *Engine) slice() {
	moving := make([]bool, len(e.rules))
	e.byID, e.byAction = make(map[cedar.PolicyID]*rule, len(e.rules)), map[cedar.EntityUID]*index{}
	for i := range e.rules {
		r := &e.rules[i]
		e.byID[r.id] = r
		r.place = i
		bare := *(*ast.Policy)(r.policy.AST())
		bare.Action = ast.ScopeTypeAll{}
		if is, ok := bare.Principal.(ast.ScopeTypeIs); ok {
			r.principal, bare.Principal = is.Type, ast.ScopeTypeAll{}
		}
		r.resource = neededResource(&bare)
		moving[i] = readsMoment(&bare)
		r.bare = cedar.NewPolicyFromAST((*public.Policy)(&bare))
	}
	for uid := range e.model.actions {
		x := &index{byResource: map[string]slice{}}
		for i := range e.rules {
			r := &e.rules[i]
			if !e.model.matches(r.policy, uid) {
				continue
			}
			x.moving = x.moving || moving[i]
			if r.resource != "" {
				x.byResource[r.resource] = append(x.byResource[r.resource], r)
			} else {
				x.always = append(x.always, r)
			}
		}
		e.byAction[uid] = x
	}
}

// neededResource returns the name in a policy's first condition if that begins
// with context.resources.contains("name").
func neededResource(p *ast.Policy) string {
	if len(p.Conditions) == 0 || p.Conditions[0].Condition != ast.ConditionWhen {
		return ""
	}
	first := p.Conditions[0].Body
	for {
		and, ok := first.(ast.NodeTypeAnd)
		if !ok {
			break
		}
		first = and.Left
	}
	contains, _ := first.(ast.NodeTypeContains)
	access, _ := contains.Left.(ast.NodeTypeAccess)
	variable, _ := access.Arg.(ast.NodeTypeVariable)
	literal, _ := contains.Right.(ast.NodeValue)
	if variable.Name != "context" || access.Value != "resources" {
		return ""
	}
	name, _ := literal.Value.(cedar.String)
	return string(name)
}

// readsMoment reports whether a policy reads the time or the input of a request,
// or could: whatever takes the context as a whole is taken to read all of it.
func readsMoment(p *ast.Policy) (reads bool) {
	for _, c := range p.Conditions {
		ast.Inspect(ast.NewNode(c.Body), func(n ast.IsNode) bool {
			var of ast.IsNode
			var name cedar.String
			switch n := n.(type) {
			case ast.NodeTypeVariable:
				reads = reads || n.Name == "context"
				return false
			case ast.NodeTypeAccess:
				of, name = n.Arg, n.Value
			case ast.NodeTypeHas:
				of, name = n.Arg, n.Value
			}
			if v, ok := of.(ast.NodeTypeVariable); !ok || v.Name != "context" {
				return true
			}
			reads = reads || name == "time" || name == "input"
			return false
		})
	}
	return reads
}

// covers reports whether the principal part of the rule's scope can match.
func (r *rule) covers(t cedar.EntityType) bool { return r.principal == "" || r.principal == t }

type generalKey struct {
	action    cedar.EntityUID
	principal cedar.EntityType
}

// general returns the rules of an index that need no resource. It is only read.
func (m *memos) general(k generalKey, x *index) slice {
	if known, ok := m.generals.get(k); ok {
		return known
	}
	var out slice
	for _, r := range x.always {
		if r.covers(k.principal) {
			out = append(out, r)
		}
	}
	m.generals.put(k, out)
	return out
}

// candidates returns the rules that can match a request, in the order of the
// set.
func (e *Engine) candidates(request cedar.Request, resources []string) slice {
	x := e.byAction[request.Action]
	if x == nil {
		return nil
	}
	general := e.memos.general(generalKey{request.Action, request.Principal.Type}, x)
	if len(x.byResource) == 0 {
		return general
	}
	out := general
	for i, name := range resources {
		named := x.byResource[name]
		if len(named) == 0 || slices.Contains(resources[:i], name) {
			continue
		}
		out = slices.Concat(out, slice(slices.DeleteFunc(slices.Clone(named), func(r *rule) bool { return !r.covers(request.Principal.Type) })))
	}
	if len(out) > len(general) {
		slices.SortFunc(out, func(a, b *rule) int { return cmp.Compare(a.place, b.place) })
	}
	return out
}

// matches reports whether the action part of a policy's scope can match uid.
func (m *model) matches(p *cedar.Policy, uid cedar.EntityUID) bool {
	in := func(e cedar.EntityUID) bool { return e == uid || slices.Contains(m.parents[uid], e) }
	switch scope := (*ast.Policy)(p.AST()).Action.(type) {
	case ast.ScopeTypeEq:
		return scope.Entity == uid
	case ast.ScopeTypeIn:
		return in(scope.Entity)
	case ast.ScopeTypeInSet:
		return slices.ContainsFunc(scope.Entities, in)
	}
	return true
}
