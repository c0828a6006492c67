package dispatch

import (
	"bytes"
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"github.com/numinance/numinance/internal/core/digest"
)

// TestBodiesAreCanonical fills every member of each body with drawn values and
// holds what is written against the canonicaliser, so that a member that is added
// and not written is found.
func TestBodiesAreCanonical(t *testing.T) {
	text := rapid.OneOf(rapid.SampledFrom([]string{"", "plain", "two words", `q"\`, "ü", "\u2028", "<&>", "\x7f", "\n"}), rapid.StringMatching(`[ -~]{0,8}`))
	context := rapid.SampledFrom([]string{"", `{}`, `{"a":[1,"ü"],"b":{"c":null}}`})
	var fill func(t *rapid.T, v reflect.Value)
	fill = func(t *rapid.T, v reflect.Value) {
		switch {
		case v.Type().Name() == "RawMessage":
			if c := context.Draw(t, "context"); c != "" {
				v.SetBytes([]byte(c))
			}
		case v.Kind() == reflect.Struct:
			for i := range v.NumField() {
				fill(t, v.Field(i))
			}
		case v.Kind() == reflect.Pointer:
			if rapid.IntRange(0, 4).Draw(t, "there") == 0 {
				v.Set(reflect.New(v.Type().Elem()))
				fill(t, v.Elem())
			}
		case v.Kind() == reflect.Slice:
			n := rapid.IntRange(0, 3).Draw(t, "length")
			v.Set(reflect.MakeSlice(v.Type(), n, n))
			for i := range n {
				fill(t, v.Index(i))
			}
		case v.Kind() == reflect.String:
			v.SetString(text.Draw(t, "text"))
		case v.Kind() == reflect.Bool:
			v.SetBool(rapid.Bool().Draw(t, "flag"))
		case v.Kind() == reflect.Int:
			v.SetInt(rapid.Int64Range(-1, 1<<53).Draw(t, "number"))
		default:
			t.Fatalf("a %s, which this test cannot fill", v.Type())
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		for _, body := range []interface{ canonical() ([]byte, error) }{&DecisionBody{}, &ResultBody{}, &recorded{}} {
			fill(t, reflect.ValueOf(body).Elem())
			got, err := body.canonical()
			want, wantErr := digest.Canonical(body)
			if err != nil || wantErr != nil || !bytes.Equal(got, want) {
				t.Fatalf("%T\n%s, %v\nwant %s, %v", body, got, err, want, wantErr)
			}
		}
	})
}
