package grant_test

import (
	"reflect"
	"testing"
	"time"

	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/pathscope"
)

// TestEqualSeesEveryPart changes each part of a grant in turn, at any depth, so
// that a part added later cannot be forgotten, and holds Clone to sharing none.
func TestEqualSeesEveryPart(t *testing.T) {
	full := func() grant.Grant {
		list := func() []string { return []string{"a", "b"} }
		at := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
		return grant.Grant{
			ID: "g", Change: "c", WorkUnit: "w", Run: "r",
			Actor: identity.Actor{Kind: identity.KindRunner, Principal: "service:runner", Run: "r", Vendor: "v"},
			Verbs: list(), Resources: list(), Scopes: list(), Paths: pathscope.Scope{Allowed: list(), Denied: list(), Protected: list()},
			Capabilities: list(), Egress: []grant.Destination{{Host: "h", Port: 1}}, Credentials: list(),
			Budget: grant.Budget{Actions: 1, OutputBytes: 2, Tokens: 3, Wall: 4}, NotBefore: at, Expires: at.Add(time.Hour),
		}
	}
	parts := 0
	var change func(v reflect.Value, path string, whole *grant.Grant)
	change = func(v reflect.Value, path string, whole *grant.Grant) {
		old := reflect.New(v.Type()).Elem()
		old.Set(v)
		switch {
		case v.Type() == reflect.TypeFor[time.Time]():
			v.Set(reflect.ValueOf(v.Interface().(time.Time).Add(time.Nanosecond)))
		case v.Kind() == reflect.Struct:
			for i := range v.NumField() {
				change(v.Field(i), path+"."+v.Type().Field(i).Name, whole)
			}
			return
		case v.Kind() == reflect.Slice:
			change(v.Index(v.Len()-1), path+"[]", whole)
			v.Set(v.Slice(0, v.Len()-1))
		case v.Kind() == reflect.String:
			v.SetString(v.String() + "x")
		case v.CanInt():
			v.SetInt(v.Int() + 1)
		case v.CanUint():
			v.SetUint(v.Uint() + 1)
		default:
			t.Fatalf("%s: a %s, which this test cannot change", path, v.Type())
		}
		parts++
		if whole.Equal(full()) || full().Equal(*whole) {
			t.Errorf("a change of %s is not seen", path)
		}
		v.Set(old)
		if !whole.Equal(full()) {
			t.Fatalf("%s: not undone", path)
		}
	}
	g := full()
	clone := g.Clone()
	change(reflect.ValueOf(&g).Elem(), "Grant", &g)
	if parts < 30 {
		t.Errorf("only %d parts were changed", parts)
	}
	change(reflect.ValueOf(&clone).Elem(), "Clone", &clone)
	for _, list := range [][]string{clone.Verbs, clone.Resources, clone.Scopes, clone.Paths.Allowed, clone.Paths.Denied, clone.Paths.Protected, clone.Capabilities, clone.Credentials} {
		list[0] = "other"
	}
	clone.Egress[0].Host = "other"
	if !g.Equal(full()) {
		t.Error("a clone shares a list")
	}
}
