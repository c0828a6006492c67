package pathscope_test

import (
	"testing"

	"github.com/numinance/numinance/internal/core/pathscope"
)

func BenchmarkCheck(b *testing.B) {
	s := pathscope.Scope{Allowed: []string{"src/", "docs/"}, Denied: []string{"src/gen/"}, Protected: []string{"migrations/"}}
	for b.Loop() {
		if ok, reason := s.Check("src/internal/deep/tree/of/things/file.go"); !ok {
			b.Fatal(reason)
		}
	}
}
