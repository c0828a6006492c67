package kinds_test

import "testing"

func BenchmarkValidate(b *testing.B) {
	files := map[string]string{"a.yaml": example(b, "KnowledgeConnection/confluence-eng.yaml"), "b.yaml": example(b, "Profile/default.yaml")}
	for b.Loop() {
		if !validate(files).OK() {
			b.Fatal("refused")
		}
	}
}
