package policy_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/ports"
)

func BenchmarkDecide(b *testing.B) {
	for _, n := range []int{0, 100, 1000} {
		var extra strings.Builder
		for i := range n {
			fmt.Fprintf(&extra, "@id(\"x%d\") forbid (principal, action in Action::\"port.scm\", resource) when { context.resources.contains(\"r%d\") };\n", i, i)
		}
		e, err := policy.Load(map[string][]byte{"a": []byte(policy.Default()), "b": []byte(extra.String())})
		if err != nil {
			b.Fatal(err)
		}
		r := verb(b, ports.CallerRelease, release, "scm.MergePullRequest", "Releasing")
		b.Run(fmt.Sprintf("%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if e.Decide(r).Effect != policy.Allow {
					b.Fatal("denied")
				}
			}
		})
	}
}
