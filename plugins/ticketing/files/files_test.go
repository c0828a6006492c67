package files_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	ticketingv1 "github.com/numinance/numinance/gen/numinance/ports/ticketing/v1"
	"github.com/numinance/numinance/plugins/ticketing/files"
	"github.com/numinance/numinance/sdk/plugintest"
)

// bench is a tracker with the projects WID and OPS.
type bench struct {
	*testing.T
	tracker ticketingv1.TicketingServiceClient
	wid     string
	ops     string
	data    string
}

func newBench(t *testing.T, workflow ...files.State) *bench {
	t.Helper()
	b := &bench{T: t, wid: t.TempDir(), ops: t.TempDir(), data: t.TempDir()}
	raw, err := json.Marshal(files.Config{Projects: map[string]string{"WID": b.wid, "OPS": b.ops}, Workflow: workflow, WebURL: "https://t.example/%s"})
	if err != nil {
		t.Fatal(err)
	}
	b.tracker = ticketingv1.NewTicketingServiceClient(plugintest.Serve(t, files.Plugin(), plugintest.Options{Config: raw, DataDir: b.data}))
	b.write(b.wid, "WID-7.md", "---\nkey: WID-7\ntitle: Fix the widget\nproject: WID\nstate: todo\nlabels: [bug, \"good first\"]\n---\n\nIt breaks on *Tuesdays*.\n\n---\nA rule.\n")
	b.write(b.wid, "WID-10.md", "# Paint it\n\nBlue, for the widget.\n")
	b.write(b.ops, "OPS-1.md", "---\ntitle: Move the widget server\nstate: In Progress\n---\nbody\n")
	return b
}

func (b *bench) write(dir, name, text string) {
	b.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		b.Fatal(err)
	}
}

func (b *bench) wants(err error, want codes.Code) {
	b.Helper()
	if got := status.Code(err); got != want {
		b.Errorf("got %v (%v), want %v", got, err, want)
	}
}

func (b *bench) get(key string) *ticketingv1.Issue {
	b.Helper()
	a, err := b.tracker.GetIssue(context.Background(), &ticketingv1.GetIssueRequest{Project: "WID", Key: key})
	if err != nil {
		b.Fatal(err)
	}
	return a.GetIssue()
}

func (b *bench) lines(name string) int {
	b.Helper()
	raw, err := os.ReadFile(filepath.Join(b.wid, name))
	if err != nil {
		b.Fatal(err)
	}
	return strings.Count(string(raw), "\n")
}

// forget makes the plugin's memory what kill -9 between an effect and its
// answer leaves.
func (b *bench) forget() {
	b.Helper()
	names, err := filepath.Glob(filepath.Join(b.data, "effects", "*.json"))
	if err != nil || len(names) == 0 {
		b.Fatal("no effects")
	}
	for _, name := range names {
		raw, err := os.ReadFile(name)
		if err != nil {
			b.Fatal(err)
		}
		var m map[string]any
		if err := json.Unmarshal(raw, &m); err != nil {
			b.Fatal(err)
		}
		delete(m, "result")
		if raw, err = json.Marshal(m); err != nil {
			b.Fatal(err)
		}
		if err := os.WriteFile(name, raw, 0o600); err != nil {
			b.Fatal(err)
		}
	}
}

// P-080: key, title, body and state.
func TestP080GetIssue(t *testing.T) {
	b := newBench(t)
	i := b.get("WID-7")
	if i.GetTitle() != "Fix the widget" || i.GetBody() != "It breaks on *Tuesdays*.\n\n---\nA rule." || i.GetCategory() != ticketingv1.StateCategory_STATE_CATEGORY_TODO ||
		fmt.Sprint(i.GetLabels()) != "[bug good first]" || i.GetWebUrl() != "https://t.example/WID-7" || i.GetProject() != "WID" {
		t.Errorf("got %v", i)
	}
	if i := b.get("WID-10"); i.GetTitle() != "Paint it" || i.GetBody() != "Blue, for the widget." || i.GetState() != "todo" {
		t.Errorf("got %v", i)
	}
}

// P-098: one answer, byte for byte, for an issue that is absent, unreadable or
// in another project.
func TestP098NotFoundIsNoOracle(t *testing.T) {
	b := newBench(t)
	b.write(b.wid, "WID-8.md", "---\ntitle: Moved\nproject: OPS\n---\n")
	if err := os.Symlink("/etc/passwd", filepath.Join(b.wid, "WID-9.md")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(b.wid, "WID-11.md"), 0o755); err != nil {
		t.Fatal(err)
	}
	var want string
	for _, q := range []*ticketingv1.GetIssueRequest{
		{Project: "WID", Key: "WID-99"}, {Project: "WID", Key: "WID-8"}, {Project: "WID", Key: "WID-9"}, {Project: "WID", Key: "WID-11"},
		{Project: "WID", Key: "OPS-1"}, {Project: "OPS", Key: "WID-7"}, {Project: "NONE", Key: "WID-7"}, {Project: "WID", Key: "../OPS-1"}, {Project: "WID", Key: ".lock"},
	} {
		_, err := b.tracker.GetIssue(context.Background(), q)
		b.wants(err, codes.NotFound)
		if want == "" {
			want = err.Error()
		}
		if err.Error() != want {
			t.Errorf("%v: %q, want %q", q, err, want)
		}
	}
	_, err := b.tracker.CommentOnIssue(context.Background(), &ticketingv1.CommentOnIssueRequest{Project: "WID", Key: "WID-8", Body: "x"})
	if err == nil || err.Error() != want {
		t.Errorf("comment: %v", err)
	}
}

// P-081, P-099: words of title and body within the project; operators are text.
func TestP081P099SearchIssues(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	find := func(query string, most uint32, token string, in ...ticketingv1.StateCategory) (string, string) {
		t.Helper()
		a, err := b.tracker.SearchIssues(ctx, &ticketingv1.SearchIssuesRequest{Project: "WID", Query: query, MaxResults: most, PageToken: token, Categories: in})
		if err != nil {
			t.Fatal(err)
		}
		var keys []string
		for _, i := range a.GetIssues() {
			keys = append(keys, i.GetKey())
		}
		return strings.Join(keys, " "), a.GetNextPageToken()
	}
	for query, want := range map[string]string{
		"widget": "WID-7 WID-10", "": "WID-7 WID-10", "Blue WIDGET": "WID-10", "server": "", `project = OPS OR title ~ "server"`: "", "*Tuesdays*": "WID-7", "WID-10": "WID-10", ".*": "",
	} {
		if got, _ := find(query, 10, ""); got != want {
			t.Errorf("%q: got %q, want %q", query, got, want)
		}
	}
	first, token := find("widget", 1, "")
	second, end := find("widget", 1, token)
	if first != "WID-7" || second != "WID-10" || end != "" {
		t.Errorf("pages %q, %q, then %q", first, second, end)
	}
	if got, _ := find("", 10, "", ticketingv1.StateCategory_STATE_CATEGORY_DONE); got != "" {
		t.Errorf("done: %q", got)
	}
	_, err := b.tracker.SearchIssues(ctx, &ticketingv1.SearchIssuesRequest{Project: "WID", Query: "x", MaxResults: 1, QueryLanguage: "project = WID"})
	if err == nil {
		t.Error("a query language was taken without its capability")
	}
}

// P-082, P-096: one comment per key, with its receipt.
func TestP082P096Comment(t *testing.T) {
	b := newBench(t)
	keyed := plugintest.Key(context.Background(), "say")
	q := &ticketingv1.CommentOnIssueRequest{Project: "WID", Key: "WID-7", Body: "hello\n{\"id\":9}\n"}
	before := b.get("WID-7").GetVersion()
	for range 3 {
		ctx, result := plugintest.Capture(keyed)
		a, err := b.tracker.CommentOnIssue(ctx, q)
		if err != nil || a.GetComment() != "1" || len(result.GetEvidence()) != 1 || result.GetEvidence()[0].GetType() != "ticketing-action" {
			t.Fatalf("got %v, %v, %v", a, err, result)
		}
		b.forget()
	}
	if n := b.lines("WID-7.comments.jsonl"); n != 1 || b.get("WID-7").GetVersion() == before {
		t.Errorf("%d comments, version %s", n, before)
	}
	// A line that a crash cut off is written over.
	f, err := os.OpenFile(filepath.Join(b.wid, "WID-7.comments.jsonl"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"id":2,"key":"cut`); err != nil {
		t.Fatal(err)
	}
	f.Close()
	a, err := b.tracker.CommentOnIssue(context.Background(), q)
	if err != nil || a.GetComment() != "2" || b.lines("WID-7.comments.jsonl") != 2 {
		t.Errorf("got %v, %v", a, err)
	}
}

// P-083, P-085: a move to a category, back by the same verb; a dry run moves
// nothing; states keep the tracker's own names.
func TestP083P085Transition(t *testing.T) {
	b := newBench(t, files.State{Name: "todo", Category: "todo"}, files.State{Name: "Being done: now", Category: "in_progress"}, files.State{Name: "done", Category: "done"})
	ctx := context.Background()
	const todo, doing = ticketingv1.StateCategory_STATE_CATEGORY_TODO, ticketingv1.StateCategory_STATE_CATEGORY_IN_PROGRESS
	move := func(ctx context.Context, key string, to, expected ticketingv1.StateCategory) (*ticketingv1.TransitionIssueResponse, error) {
		return b.tracker.TransitionIssue(ctx, &ticketingv1.TransitionIssueRequest{Project: "WID", Key: key, Category: to, ExpectedCategory: expected})
	}
	original, err := os.ReadFile(filepath.Join(b.wid, "WID-7.md"))
	if err != nil {
		t.Fatal(err)
	}
	dry, err := move(plugintest.DryRun(ctx), "WID-7", doing, todo)
	if err != nil || dry.GetCategory() != doing || b.get("WID-7").GetCategory() != todo {
		t.Errorf("dry run: %v, %v", dry, err)
	}
	keyed := plugintest.Key(ctx, "move")
	for range 2 {
		a, err := move(keyed, "WID-7", doing, todo)
		if err != nil || a.GetPreviousCategory() != todo || a.GetCategory() != doing || a.GetState() != "Being done: now" {
			t.Fatalf("got %v, %v", a, err)
		}
		b.forget()
	}
	i := b.get("WID-7")
	if i.GetState() != "Being done: now" || i.GetTitle() != "Fix the widget" || b.lines("WID-7.moves.jsonl") != 1 {
		t.Errorf("got %v", i)
	}
	_, err = move(ctx, "WID-7", doing, todo)
	b.wants(err, codes.FailedPrecondition)
	_, err = move(ctx, "WID-7", ticketingv1.StateCategory_STATE_CATEGORY_CANCELLED, 0)
	b.wants(err, codes.FailedPrecondition) // no such state in this workflow
	if _, err := move(ctx, "WID-7", todo, doing); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(filepath.Join(b.wid, "WID-7.md")); err != nil || string(text) != string(original) {
		t.Errorf("after the way back: %q", text)
	}
	if a, err := move(ctx, "WID-10", doing, 0); err != nil || a.GetPreviousCategory() != todo || b.get("WID-10").GetTitle() != "Paint it" {
		t.Errorf("without front matter: %v, %v", a, err)
	}
}

// P-084, P-086, P-097: the same link twice is one; it has a direction.
func TestP084P086Link(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	q := &ticketingv1.LinkIssueRequest{Project: "WID", Key: "WID-7", BlockedProject: "OPS", BlockedKey: "OPS-1"}
	var names []string
	for range 2 {
		a, err := b.tracker.LinkIssue(ctx, q)
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, a.GetLink())
	}
	raw, err := os.ReadFile(filepath.Join(b.wid, "WID-7.links.jsonl"))
	if err != nil || names[0] != names[1] || b.lines("WID-7.links.jsonl") != 1 || !strings.Contains(string(raw), `"blocks":"OPS-1"`) {
		t.Errorf("links %v: %s", names, raw)
	}
	_, err = b.tracker.LinkIssue(ctx, &ticketingv1.LinkIssueRequest{Project: "WID", Key: "WID-7", BlockedProject: "OPS", BlockedKey: "OPS-9"})
	b.wants(err, codes.NotFound)
	_, err = b.tracker.LinkIssue(ctx, &ticketingv1.LinkIssueRequest{Project: "WID", Key: "WID-7", BlockedProject: "WID", BlockedKey: "WID-7"})
	b.wants(err, codes.InvalidArgument)
}

func TestOddFiles(t *testing.T) {
	b := newBench(t)
	hostile := "# \u202eevil\x07 title\n\nbody \u202e\x1b[31m \xff\xfe end\r\nnext\n"
	b.write(b.wid, "WID-20.md", hostile)
	if i := b.get("WID-20"); i.GetTitle() != "\u202eevil  title" || i.GetBody() != "body \u202e\x1b[31m \uFFFD end\nnext" {
		t.Errorf("text is data, as it is: %q %q", i.GetTitle(), i.GetBody())
	}
	b.write(b.wid, "WID-21.md", "# Long\n\n"+strings.Repeat("ä", 200_000))
	if i := b.get("WID-21"); len(i.GetBody()) != 256<<10 || !i.GetBodyTruncated() {
		t.Errorf("%d bytes", len(i.GetBody()))
	}
	for name, c := range map[string]struct{ text, says string }{
		"empty":          {"", "empty"},
		"blank":          {" \n\n", "empty"},
		"10 MB":          {strings.Repeat("x", 10<<20), "at most"},
		"unclosed":       {"---\ntitle: x\n", "no closing line"},
		"bad YAML":       {"---\ntitle: [\n---\n", "front matter"},
		"twice":          {"---\ntitle: a\ntitle: b\n---\n", "already"},
		"unknown key":    {"---\ntitle: a\nasignee: b\n---\n", "asignee"},
		"alias":          {"---\ntitle: &a x\nstate: *a\n---\n", "anchors"},
		"bomb":           {"---\nlabels: &a [x,x]\ntitle: x\nproject: *a\n---\n", "anchors"},
		"nested":         {"---\ntitle: {a: {b: {c: {d: e}}}}\n---\n", "deep"},
		"another key":    {"---\nkey: WID-1\ntitle: a\n---\n", "WID-1"},
		"no title":       {"---\nstate: todo\n---\n", "title"},
		"unknown state":  {"---\ntitle: a\nstate: odd\n---\n", "odd"},
		"long matter":    {"---\ntitle: " + strings.Repeat("x", 70<<10) + "\n---\n", "closing line"},
		"too many label": {"---\ntitle: x\nlabels: [" + strings.Repeat("a,", 101) + "]\n---\n", "labels"},
	} {
		b.write(b.wid, "WID-30.md", c.text)
		_, err := b.tracker.GetIssue(context.Background(), &ticketingv1.GetIssueRequest{Project: "WID", Key: "WID-30"})
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want a refusal that says %q", name, err, c.says)
		}
	}
}

func TestOutageIsUnavailable(t *testing.T) {
	b := newBench(t)
	if err := os.RemoveAll(b.wid); err != nil {
		t.Fatal(err)
	}
	_, err := b.tracker.GetIssue(context.Background(), &ticketingv1.GetIssueRequest{Project: "WID", Key: "WID-7"})
	b.wants(err, codes.Unavailable)
	_, err = b.tracker.SearchIssues(context.Background(), &ticketingv1.SearchIssuesRequest{Project: "WID", MaxResults: 1})
	b.wants(err, codes.Unavailable)
}

// P-089: a peer that speaks less than 1.2 is not served.
func TestP089OlderPeerIsNotServed(t *testing.T) {
	conn, err := plugintest.Open(t, files.Plugin(), plugintest.Options{SpecVersion: "1.0.0", Config: []byte(fmt.Sprintf(`{"projects":{"WID":%q}}`, t.TempDir()))})
	if err != nil {
		return // refused at the handshake
	}
	if _, err := ticketingv1.NewTicketingServiceClient(conn).GetIssue(context.Background(), &ticketingv1.GetIssueRequest{Project: "WID", Key: "WID-7"}); err == nil {
		t.Error("ticketing was served at 1.0.0")
	} else if code := status.Code(err); code == codes.NotFound {
		t.Errorf("the verb was carried out: %v", err)
	}
}
