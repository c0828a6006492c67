package files

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	ticketingv1 "github.com/numinance/numinance/gen/numinance/ports/ticketing/v1"
	"github.com/numinance/numinance/sdk"
)

// maxFound bounds the text of one issue in a search answer, so that a hundred
// of them fit one message.
const maxFound = 16 << 10

// server serves the port.
type server struct {
	ticketingv1.UnimplementedTicketingServiceServer
	effects  *sdk.Effects
	workflow workflow
	webURL   string
	imported string // data directory whose projects are served unasked; or empty

	mu       sync.Mutex // guards projects
	projects map[string]*project
}

// known returns a project that is configured, or whose directory is there where
// that is enough; nil if it is neither.
func (s *server) known(name string) *project {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.projects[name]; p != nil {
		return p
	}
	if s.imported == "" || name == "" || len(name) > maxName {
		return nil
	}
	dir := Directory(s.imported, name)
	if fi, err := os.Lstat(dir); err != nil || !fi.IsDir() {
		return nil
	}
	p := &project{name: name, dir: dir, workflow: s.workflow}
	s.projects[name] = p
	return p
}

// valid checks the bounds of the contract.
func valid(m proto.Message) error {
	if err := protovalidate.Validate(m); err != nil {
		return status.Error(codes.InvalidArgument, cut(strings.ToValidUTF8(err.Error(), "\uFFFD"), 1024))
	}
	return nil
}

// open returns the project's directory. A project that is not served holds no
// issue.
func (s *server) open(name string) (*project, *os.Root, error) {
	p := s.known(name)
	if p == nil {
		return nil, nil, errNoIssue
	}
	root, err := p.root()
	return p, root, err
}

func (s *server) message(p *project, root *os.Root, i issue, raw []byte, most int) (*ticketingv1.Issue, error) {
	category := s.workflow.category[strings.ToLower(i.state)]
	if category == 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "issue %s is in state %q, which is none of the workflow", i.key, i.state)
	}
	version, err := p.version(root, i.key, raw)
	if err != nil {
		return nil, err
	}
	body := cut(i.body, most)
	m := &ticketingv1.Issue{
		Key: i.key, Project: p.name, Title: i.title, Body: body, BodyTruncated: len(body) < len(i.body),
		Category: category, State: i.state, Labels: i.labels, Version: version,
	}
	if s.webURL != "" {
		m.WebUrl = cut(strings.ReplaceAll(s.webURL, "%s", i.key), 2048)
	}
	return m, nil
}

func (s *server) GetIssue(_ context.Context, q *ticketingv1.GetIssueRequest) (*ticketingv1.GetIssueResponse, error) {
	if err := valid(q); err != nil {
		return nil, err
	}
	p, root, err := s.open(q.GetProject())
	if err != nil {
		return nil, err
	}
	defer root.Close()
	i, raw, err := p.load(root, q.GetKey())
	if err != nil {
		return nil, err
	}
	m, err := s.message(p, root, i, raw, maxBody)
	if err != nil {
		return nil, err
	}
	return &ticketingv1.GetIssueResponse{Issue: m}, nil
}

func (s *server) SearchIssues(_ context.Context, q *ticketingv1.SearchIssuesRequest) (*ticketingv1.SearchIssuesResponse, error) {
	if err := valid(q); err != nil {
		return nil, err
	}
	if q.GetQueryLanguage() != "" {
		return nil, status.Error(codes.InvalidArgument, "query_language: this tracker has none; put words into query")
	}
	from := 0
	if t := q.GetPageToken(); t != "" {
		n, err := strconv.Atoi(t)
		if err != nil || n <= 0 {
			return nil, status.Errorf(codes.InvalidArgument, "page_token %q was not given by this provider", t)
		}
		from = n
	}
	p, root, err := s.open(q.GetProject())
	if err != nil {
		return nil, err
	}
	defer root.Close()
	keys, err := p.keys(root)
	if err != nil {
		return nil, err
	}
	words := strings.Fields(strings.ToLower(q.GetQuery()))
	type hit struct {
		issue issue
		raw   []byte
		rank  int
	}
	var hits []hit
	for _, key := range keys {
		i, raw, err := p.load(root, key)
		if err == errNoIssue {
			continue // moved to another project, or not ours to read
		}
		if err != nil {
			return nil, err
		}
		if rank, ok := match(i, words); ok && (len(q.GetCategories()) == 0 || slices.Contains(q.GetCategories(), s.workflow.category[strings.ToLower(i.state)])) {
			hits = append(hits, hit{i, raw, rank})
		}
	}
	slices.SortStableFunc(hits, func(a, b hit) int { return b.rank - a.rank })
	a := &ticketingv1.SearchIssuesResponse{}
	to := min(from+int(q.GetMaxResults()), len(hits))
	for _, h := range hits[min(from, to):to] {
		m, err := s.message(p, root, h.issue, h.raw, maxFound)
		if err != nil {
			return nil, err
		}
		a.Issues = append(a.Issues, m)
	}
	if to < len(hits) {
		a.NextPageToken = strconv.Itoa(to)
	}
	return a, nil
}

// match wants every word in title, body or key; words in the title rank higher.
func match(i issue, words []string) (rank int, ok bool) {
	title, body := strings.ToLower(i.title), strings.ToLower(i.body)
	for _, w := range words {
		switch {
		case strings.Contains(title, w) || strings.EqualFold(i.key, w):
			rank++
		case !strings.Contains(body, w):
			return 0, false
		}
	}
	return rank, true
}

// change is the frame of every write: locked, once per key, with its receipt.
func change[R proto.Message](ctx context.Context, s *server, q proto.Message, name, key string, effect func(p *project, root *os.Root, again bool) (answer R, reference string, err error)) (R, error) {
	run := func(ctx context.Context, again bool) (R, error) {
		var none R
		p, root, err := s.open(name)
		if err != nil {
			return none, err
		}
		defer root.Close()
		unlock, err := p.lock()
		if err != nil {
			return none, err
		}
		defer unlock()
		answer, reference, err := effect(p, root, again)
		if err != nil {
			return none, err
		}
		if !sdk.DryRun(ctx) {
			attach(ctx, name, key, reference)
		}
		return answer, nil
	}
	if sdk.DryRun(ctx) {
		return run(ctx, false)
	}
	return sdk.Once(ctx, s.effects, q, run)
}

// attach attaches evidence ticketing-action (P-096).
func attach(ctx context.Context, project, key, reference string) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	// A map's keys are written in order, as canonical JSON wants it.
	if err := enc.Encode(map[string]string{"action": reference, "key": key, "project": project}); err != nil {
		return // a map of strings always encodes; without the receipt the host says PARTIAL
	}
	sdk.Attach(ctx, &pluginv1.Evidence{
		Type: "ticketing-action", Reference: cut(project+"/"+key+"#"+reference, 1024), Payload: bytes.TrimSuffix(b.Bytes(), []byte("\n")),
	})
}

func newRow(ctx context.Context, id int) row {
	return row{ID: id, Key: sdk.Action(ctx).GetIdempotencyKey(), Author: sdk.Action(ctx).GetActorPrincipal(), Time: time.Now().UTC().Format(time.RFC3339)}
}

func (s *server) CommentOnIssue(ctx context.Context, q *ticketingv1.CommentOnIssueRequest) (*ticketingv1.CommentOnIssueResponse, error) {
	if err := valid(q); err != nil {
		return nil, err
	}
	return change(ctx, s, q, q.GetProject(), q.GetKey(), func(p *project, root *os.Root, again bool) (*ticketingv1.CommentOnIssueResponse, string, error) {
		if _, _, err := p.load(root, q.GetKey()); err != nil {
			return nil, "", err
		}
		all, whole, err := rows(root, q.GetKey()+comments)
		if err != nil {
			return nil, "", err
		}
		r := newRow(ctx, len(all)+1)
		r.Body = q.GetBody()
		for _, old := range all {
			if again && old.Key == r.Key {
				r.ID = old.ID
			}
		}
		if r.ID > len(all) {
			if err := add(root, q.GetKey()+comments, whole, r); err != nil {
				return nil, "", err
			}
		}
		id := strconv.Itoa(r.ID)
		return &ticketingv1.CommentOnIssueResponse{Comment: id}, "comment-" + id, nil
	})
}

func (s *server) TransitionIssue(ctx context.Context, q *ticketingv1.TransitionIssueRequest) (*ticketingv1.TransitionIssueResponse, error) {
	if err := valid(q); err != nil {
		return nil, err
	}
	return change(ctx, s, q, q.GetProject(), q.GetKey(), func(p *project, root *os.Root, again bool) (*ticketingv1.TransitionIssueResponse, string, error) {
		i, raw, err := p.load(root, q.GetKey())
		if err != nil {
			return nil, "", err
		}
		now := s.workflow.category[strings.ToLower(i.state)]
		to := s.workflow.state[q.GetCategory()]
		switch {
		case now == 0:
			return nil, "", status.Errorf(codes.FailedPrecondition, "issue %s is in state %q, which is none of the workflow", i.key, i.state)
		case to == "":
			return nil, "", status.Errorf(codes.FailedPrecondition, "the workflow has no state of category %s", q.GetCategory())
		}
		all, whole, err := rows(root, q.GetKey()+moves)
		if err != nil {
			return nil, "", err
		}
		r := newRow(ctx, len(all)+1)
		answer := &ticketingv1.TransitionIssueResponse{PreviousCategory: now, Category: q.GetCategory(), State: to}
		reference := func(id int) string { return fmt.Sprintf("move-%d", id) }
		for _, old := range all {
			if again && old.Key == r.Key && now == q.GetCategory() {
				// This call moved it before it was cut off.
				answer.PreviousCategory = s.workflow.category[strings.ToLower(old.From)]
				answer.State = i.state
				return answer, reference(old.ID), nil
			}
		}
		if want := q.GetExpectedCategory(); want != 0 && want != now {
			return nil, "", status.Errorf(codes.FailedPrecondition, "issue %s is in category %s, not %s", i.key, now, want)
		}
		if now == q.GetCategory() {
			answer.State = i.state // it is there; nothing to move
			return answer, reference(len(all)), nil
		}
		if sdk.DryRun(ctx) {
			return answer, "", nil
		}
		text, err := withState(raw, to)
		if err != nil {
			return nil, "", status.Errorf(codes.FailedPrecondition, "issue file %s.md is refused: %v", i.key, err)
		}
		// What the edit made must say what was asked for, and nothing else new.
		moved, err := parseIssue(i.key, text)
		if err != nil || moved.state != to || moved.title != i.title || moved.body != i.body {
			return nil, "", status.Errorf(codes.FailedPrecondition, "the front matter of issue file %s.md cannot be edited: write state on a line of its own", i.key)
		}
		// The intent first: a crash between the two is told apart by the state.
		r.From, r.To = i.state, to
		if err := add(root, q.GetKey()+moves, whole, r); err != nil {
			return nil, "", err
		}
		return answer, reference(r.ID), replace(root, q.GetKey(), text)
	})
}

func (s *server) LinkIssue(ctx context.Context, q *ticketingv1.LinkIssueRequest) (*ticketingv1.LinkIssueResponse, error) {
	if err := valid(q); err != nil {
		return nil, err
	}
	if q.GetProject() == q.GetBlockedProject() && q.GetKey() == q.GetBlockedKey() {
		return nil, status.Error(codes.InvalidArgument, "an issue cannot block itself")
	}
	return change(ctx, s, q, q.GetProject(), q.GetKey(), func(p *project, root *os.Root, _ bool) (*ticketingv1.LinkIssueResponse, string, error) {
		if _, _, err := p.load(root, q.GetKey()); err != nil {
			return nil, "", err
		}
		other, otherRoot, err := s.open(q.GetBlockedProject())
		if err != nil {
			return nil, "", err
		}
		defer otherRoot.Close()
		if _, _, err := other.load(otherRoot, q.GetBlockedKey()); err != nil {
			return nil, "", err
		}
		all, whole, err := rows(root, q.GetKey()+links)
		if err != nil {
			return nil, "", err
		}
		r := newRow(ctx, len(all)+1)
		r.Project, r.Issue = q.GetBlockedProject(), q.GetBlockedKey()
		for _, old := range all {
			if old.Project == r.Project && old.Issue == r.Issue {
				r.ID = old.ID
			}
		}
		if r.ID > len(all) {
			if err := add(root, q.GetKey()+links, whole, r); err != nil {
				return nil, "", err
			}
		}
		name := fmt.Sprintf("%s.blocks.%d", q.GetKey(), r.ID)
		return &ticketingv1.LinkIssueResponse{Link: name}, name, nil
	})
}
