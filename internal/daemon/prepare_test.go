package daemon

import (
	"testing"

	kindsv1 "github.com/numinance/numinance/gen/numinance/kinds/v1"
	"github.com/numinance/numinance/internal/core/digest"
)

// Code of a base revision runs while its environment is prepared, so one
// repository must never be handed what another one's code left behind, and
// nothing that decides what is prepared may be left out of the key.
func TestPreparationsAreKeptApart(t *testing.T) {
	type in struct {
		source, image, document, lock, argv, env string
		best                                     bool
	}
	base := in{"repository a", "image", "document", "lock", "make", "x", false}
	key := func(i in) digest.Digest {
		k, err := prepareKey(i.source, digest.Of([]byte(i.image)), digest.Of([]byte(i.document)),
			[]*kindsv1.PrepareStep{{Argv: []string{i.argv}, BestEffort: i.best}}, map[string]string{"E": i.env},
			map[string]digest.Digest{"go.sum": digest.Of([]byte(i.lock))})
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	first := key(base)
	if again := key(base); again != first {
		t.Error("one preparation has two keys")
	}
	for name, change := range map[string]func(*in){
		"repository": func(i *in) { i.source = "repository b" }, "tree of that name": func(i *in) { i.source = "tree a" },
		"image": func(i *in) { i.image = "other" }, "document": func(i *in) { i.document = "other" }, "lockfile": func(i *in) { i.lock = "other" },
		"step": func(i *in) { i.argv = "other" }, "environment": func(i *in) { i.env = "other" }, "best effort": func(i *in) { i.best = true },
	} {
		other := base
		change(&other)
		if key(other) == first {
			t.Errorf("another %s has the same key", name)
		}
	}
}
