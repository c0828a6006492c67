package files_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	knowledgev1 "github.com/numinance/numinance/gen/numinance/ports/knowledge/v1"
	"github.com/numinance/numinance/plugins/knowledge/files"
	"github.com/numinance/numinance/sdk/plugintest"
)

type bench struct {
	*testing.T
	client knowledgev1.KnowledgeServiceClient
	dir    string
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{T: t, dir: filepath.Join(t.TempDir(), "wiki")}
	b.write("ENG/guide.md", "# Deploy guide\n\nHow to deploy the widget.\n")
	b.write("ENG/x/deep.txt", "widget internals, no heading\n")
	b.write("ENGINE/secret.md", "# Engine widget secret\n")
	b.write("ENG/my doc.md", "# Blank name\n")
	b.write("ENG/.hidden/x.md", "# widget\n")
	b.write("ENG/image.png", "widget")
	b.client = knowledgev1.NewKnowledgeServiceClient(plugintest.Serve(t, files.Plugin(), plugintest.Options{
		Config: []byte(fmt.Sprintf(`{"connections":{"wiki":%q,"gone":"/nonexistent/wiki"}}`, b.dir))}))
	return b
}

func (b *bench) write(name, text string) {
	b.Helper()
	path := filepath.Join(b.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		b.Fatal(err)
	}
}

func (b *bench) wants(err error, want codes.Code) {
	b.Helper()
	if got := status.Code(err); got != want {
		b.Errorf("got %v (%v), want %v", got, err, want)
	}
}

func (b *bench) search(query string, scope ...string) string {
	b.Helper()
	a, err := b.client.Search(context.Background(), &knowledgev1.SearchRequest{Connection: "wiki", Query: query, Scope: scope, MaxResults: 10})
	if err != nil {
		b.Fatal(err)
	}
	var refs []string
	for _, r := range a.GetResults() {
		refs = append(refs, r.GetRef())
	}
	return strings.Join(refs, " ")
}

func (b *bench) fetch(ref, version string, most uint32, scope ...string) (*knowledgev1.FetchResponse, error) {
	return b.client.Fetch(context.Background(), &knowledgev1.FetchRequest{Connection: "wiki", Ref: ref, Version: version, Scope: scope, MaxBytes: most})
}

// K-011, K-024, K-037: plain words within a scope of whole segments.
func TestK011K024K037Search(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct{ query, scope, want string }{
		{"widget", "ENG", "ENG/guide.md ENG/x/deep.txt"}, {"widget", "ENG/x", "ENG/x/deep.txt"}, {"widget", "EN", ""}, {"widget", "*", "ENGINE/secret.md ENG/guide.md ENG/x/deep.txt"},
		{"WIDGET deploy", "ENG", "ENG/guide.md"}, {`widget OR space = "ENGINE"`, "ENG", ""}, {".*", "ENG", ""}, {"deep", "ENG/guide.md", ""}, {"widget", "none", ""},
	} {
		if got := b.search(c.query, c.scope); got != c.want {
			t.Errorf("%q in %q: got %q, want %q", c.query, c.scope, got, c.want)
		}
	}
}

// K-012..K-015, K-017, K-022: the bounds of the contract hold at the provider.
func TestK012ToK017Bounds(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	many := make([]string, 257)
	for i := range many {
		many[i] = fmt.Sprint("s", i)
	}
	for name, q := range map[string]*knowledgev1.SearchRequest{
		"no query": {Scope: []string{"ENG"}, MaxResults: 1}, "long query": {Query: strings.Repeat("ä", 512) + "a", Scope: []string{"ENG"}, MaxResults: 1},
		"no scope": {Query: "x", MaxResults: 1}, "many scopes": {Query: "x", Scope: many, MaxResults: 1}, "scope twice": {Query: "x", Scope: []string{"ENG", "ENG"}, MaxResults: 1},
		"no results": {Query: "x", Scope: []string{"ENG"}}, "many results": {Query: "x", Scope: []string{"ENG"}, MaxResults: 101},
	} {
		q.Connection = "wiki"
		if _, err := b.client.Search(ctx, q); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, most := range []uint32{0, 1<<20 + 1} {
		_, err := b.fetch("ENG/guide.md", "", most, "ENG")
		b.wants(err, codes.InvalidArgument)
	}
	_, err := b.fetch("ENG/guide.md", "", 1)
	b.wants(err, codes.InvalidArgument)
	_, err = b.client.Resolve(ctx, &knowledgev1.ResolveRequest{Connection: "wiki", Ref: "ENG/guide.md"})
	b.wants(err, codes.InvalidArgument)
}

// K-026: what tries to climb is INVALID_ARGUMENT on every verb.
func TestK026Climbing(t *testing.T) {
	b := newBench(t)
	for _, bad := range []string{"ENG/../ENGINE/secret.md", "../x", "ENG/%2e%2e/ENGINE/secret.md", "ENG/%252e%252e/ENGINE/secret.md", "ENG/..", "/etc/passwd", `ENG\..\x`, "ENG/./guide.md", "ENG//guide.md", "ENG/%2e/x", "ENG/%00", "ENG/%zz", "%2fetc/passwd", "ENG/.%2e/x"} {
		_, err := b.fetch(bad, "", 10, "ENG")
		b.wants(err, codes.InvalidArgument)
		_, err = b.client.Resolve(context.Background(), &knowledgev1.ResolveRequest{Connection: "wiki", Ref: bad, Scope: []string{"ENG"}})
		b.wants(err, codes.InvalidArgument)
		_, err = b.fetch("ENG/guide.md", "", 10, bad)
		b.wants(err, codes.InvalidArgument)
		_, err = b.client.Search(context.Background(), &knowledgev1.SearchRequest{Connection: "wiki", Query: "x", Scope: []string{bad}, MaxResults: 1})
		b.wants(err, codes.InvalidArgument)
	}
}

// K-016, K-018: content at a version, cut at a character boundary.
func TestK016K018Fetch(t *testing.T) {
	b := newBench(t)
	b.write("ENG/ä.md", "# Ä\nää€")
	for most := uint32(1); most < 14; most++ {
		a, err := b.fetch("ENG/ä.md", "", most, "ENG")
		if err != nil {
			t.Fatal(err)
		}
		if c := a.GetContent(); len(c) > int(most) || !utf8.ValidString(c) || a.GetTruncated() != (len(c) < 12) {
			t.Errorf("%d bytes: %q truncated=%v", most, c, a.GetTruncated())
		}
	}
	first, err := b.fetch("ENG/guide.md", "", 1000, "ENG")
	if err != nil || first.GetTitle() != "Deploy guide" {
		t.Fatalf("got %v, %v", first, err)
	}
	b.write("ENG/guide.md", "# Second\n")
	old, err := b.fetch("ENG/guide.md", first.GetVersion(), 1000, "ENG")
	if err != nil || old.GetContent() != first.GetContent() || old.GetTitle() != "Deploy guide" {
		t.Errorf("old version: %v, %v", old, err)
	}
	now, err := b.fetch("ENG/guide.md", "", 1000, "ENG")
	if err != nil || now.GetContent() != "# Second\n" || now.GetVersion() == first.GetVersion() {
		t.Errorf("now: %v, %v", now, err)
	}
	for _, v := range []string{"1", "sha256:" + strings.Repeat("0", 64), "sha256:../../x"} {
		_, err := b.fetch("ENG/guide.md", v, 10, "ENG")
		b.wants(err, codes.NotFound)
	}
	if err := os.Remove(filepath.Join(b.dir, "ENG/guide.md")); err != nil {
		t.Fatal(err)
	}
	_, err = b.fetch("ENG/guide.md", first.GetVersion(), 10, "ENG")
	b.wants(err, codes.NotFound) // a document that is gone has no past
}

func TestTextIsSanitised(t *testing.T) {
	b := newBench(t)
	b.write("ENG/evil.md", "# Evil \u202etitle\n\x1b[31mred\x07 \u200bzero\u2066 \xff\tend\r\n")
	a, err := b.fetch("ENG/evil.md", "", 1000, "ENG")
	if want := "# Evil \uFFFDtitle\n\uFFFD[31mred\uFFFD \uFFFDzero\uFFFD \uFFFD\tend\n"; err != nil || a.GetContent() != want || a.GetTitle() != "Evil \uFFFDtitle" {
		t.Errorf("got %q, %v", a.GetContent(), err)
	}
}

// K-019: two spellings of one document resolve to one ref, two documents to two.
func TestK019Resolve(t *testing.T) {
	b := newBench(t)
	resolve := func(ref string) string {
		t.Helper()
		a, err := b.client.Resolve(context.Background(), &knowledgev1.ResolveRequest{Connection: "wiki", Ref: ref, Scope: []string{"ENG"}})
		if err != nil {
			t.Fatal(err)
		}
		return a.GetCanonicalRef()
	}
	for _, ref := range []string{"ENG/guide.md", "ENG/guide", "ENG/guide.md#steps", "ENG%2Fguide.md"} {
		if got := resolve(ref); got != "ENG/guide.md" {
			t.Errorf("%q resolves to %q", ref, got)
		}
	}
	if resolve("ENG/x/deep") != "ENG/x/deep.txt" || resolve("ENG/my%20doc") != "ENG/my doc.md" {
		t.Error("another document")
	}
}

// K-033: absent, hidden and out of scope are one answer. K-034: an open refusal.
func TestK033K034NotFound(t *testing.T) {
	b := newBench(t)
	for link, to := range map[string]string{"ENG/link.md": "../ENGINE/secret.md", "ENG/out.md": "/etc/passwd", "ENG/dir": "../ENGINE"} {
		if err := os.Symlink(to, filepath.Join(b.dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(b.dir, "ENG/folder.md"), 0o755); err != nil {
		t.Fatal(err)
	}
	want := ""
	for _, ref := range []string{"ENG/absent", "ENGINE/secret.md", "ENG/link.md", "ENG/out.md", "ENG/dir/secret.md", "ENG/.hidden/x.md", "ENG/image.png", "ENG/guide.md/x", "ENG/folder.md", "ENG"} {
		_, err := b.fetch(ref, "", 10, "ENG")
		b.wants(err, codes.NotFound)
		if want == "" {
			want = err.Error()
		}
		if err.Error() != want {
			t.Errorf("%s: %q, want %q", ref, err, want)
		}
	}
	if got := b.search("secret", "ENG"); got != "" {
		t.Errorf("search went over a link: %s", got)
	}
	if os.Getuid() == 0 {
		return // root may read everything
	}
	if err := os.Chmod(filepath.Join(b.dir, "ENG/guide.md"), 0); err != nil {
		t.Fatal(err)
	}
	_, err := b.fetch("ENG/guide.md", "", 10, "ENG")
	b.wants(err, codes.PermissionDenied)
}

// K-035, K-036: an outage is UNAVAILABLE on all three verbs.
func TestK035K036Outage(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	_, err := b.client.Search(ctx, &knowledgev1.SearchRequest{Connection: "gone", Query: "x", Scope: []string{"ENG"}, MaxResults: 1})
	b.wants(err, codes.Unavailable)
	_, err = b.client.Fetch(ctx, &knowledgev1.FetchRequest{Connection: "gone", Ref: "x", Scope: []string{"ENG"}, MaxBytes: 1})
	b.wants(err, codes.Unavailable)
	_, err = b.client.Resolve(ctx, &knowledgev1.ResolveRequest{Connection: "gone", Ref: "x", Scope: []string{"ENG"}})
	b.wants(err, codes.Unavailable)
	if strings.Contains(err.Error(), "/nonexistent") {
		t.Errorf("the answer shows a path of the host: %v", err)
	}
	_, err = b.client.Search(ctx, &knowledgev1.SearchRequest{Connection: "none", Query: "x", Scope: []string{"ENG"}, MaxResults: 1})
	b.wants(err, codes.NotFound)
}
