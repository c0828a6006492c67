package files

import (
	"context"
	"os"
	"slices"
	"strings"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	knowledgev1 "github.com/numinance/numinance/gen/numinance/ports/knowledge/v1"
)

// server serves the port.
type server struct {
	knowledgev1.UnimplementedKnowledgeServiceServer
	sources map[string]*source
}

// begin checks the bounds of the contract and opens the source.
func (s *server) begin(q proto.Message, connection string, scope []string) (*source, *os.Root, []string, error) {
	if err := protovalidate.Validate(q); err != nil {
		return nil, nil, nil, status.Error(codes.InvalidArgument, cut(sanitize([]byte(err.Error())), 1024))
	}
	clean, err := scopes(scope)
	if err != nil {
		return nil, nil, nil, err
	}
	src := s.sources[connection]
	if src == nil {
		return nil, nil, nil, status.Errorf(codes.NotFound, "no connection %q", connection)
	}
	root, err := src.root()
	return src, root, clean, err
}

func (s *server) Search(ctx context.Context, q *knowledgev1.SearchRequest) (*knowledgev1.SearchResponse, error) {
	src, root, scope, err := s.begin(q, q.GetConnection(), q.GetScope())
	if err != nil {
		return nil, err
	}
	defer root.Close()
	refs, err := src.list(ctx, root, scope)
	if err != nil {
		return nil, err
	}
	// Every word is text; a source's operators are words like any other (K-037).
	words := strings.Fields(strings.ToLower(q.GetQuery()))
	type hit struct {
		rank   int
		result *knowledgev1.SearchResult
	}
	var hits []hit
	for _, ref := range refs {
		if ctx.Err() != nil {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		d, err := src.read(root, ref)
		switch status.Code(err) {
		case codes.OK:
		case codes.NotFound, codes.PermissionDenied, codes.FailedPrecondition:
			continue // hidden, gone since, or too large to be read
		default:
			return nil, err
		}
		title := titleOf(ref, d.text)
		rank, ok := match(title, ref, d.text, words)
		if !ok || len(ref) > 1024 {
			continue
		}
		hits = append(hits, hit{rank, &knowledgev1.SearchResult{Ref: ref, Title: title, Snippet: snippet(d.text, words), Version: d.version}})
	}
	slices.SortStableFunc(hits, func(a, b hit) int { return b.rank - a.rank })
	a := &knowledgev1.SearchResponse{}
	for _, h := range hits[:min(len(hits), int(q.GetMaxResults()))] {
		a.Results = append(a.Results, h.result)
	}
	return a, nil
}

// match wants every word; the title counts most, then the name, then how often
// the words are there.
func match(title, ref, text string, words []string) (rank int, ok bool) {
	if len(words) == 0 {
		return 0, false
	}
	title, ref, text = strings.ToLower(title), strings.ToLower(ref), strings.ToLower(text)
	for _, w := range words {
		n := min(strings.Count(text, w), 50)
		if strings.Contains(title, w) {
			n += 1000
		}
		if strings.Contains(ref, w) {
			n += 100
		}
		if n == 0 {
			return 0, false
		}
		rank += n
	}
	return rank, true
}

// find returns the document that a ref means.
func (s *source) find(root *os.Root, ref string, scope []string) (document, error) {
	all, err := candidates(ref)
	if err != nil {
		return document{}, err
	}
	for _, c := range all {
		if !within(scope, c) {
			continue
		}
		d, err := s.read(root, c)
		if status.Code(err) == codes.NotFound {
			continue
		}
		return d, err
	}
	return document{}, errAbsent
}

func (s *server) Fetch(_ context.Context, q *knowledgev1.FetchRequest) (*knowledgev1.FetchResponse, error) {
	src, root, scope, err := s.begin(q, q.GetConnection(), q.GetScope())
	if err != nil {
		return nil, err
	}
	defer root.Close()
	d, err := src.find(root, q.GetRef(), scope)
	if err != nil {
		return nil, err
	}
	if v := q.GetVersion(); v != "" && v != d.version {
		if d, err = src.history.recall(d, v); err != nil {
			return nil, err
		}
	}
	content := cut(d.text, int(q.GetMaxBytes()))
	return &knowledgev1.FetchResponse{Ref: d.ref, Version: d.version, Title: titleOf(d.ref, d.text), Content: content, Truncated: len(content) < len(d.text)}, nil
}

func (s *server) Resolve(_ context.Context, q *knowledgev1.ResolveRequest) (*knowledgev1.ResolveResponse, error) {
	src, root, scope, err := s.begin(q, q.GetConnection(), q.GetScope())
	if err != nil {
		return nil, err
	}
	defer root.Close()
	d, err := src.find(root, q.GetRef(), scope)
	if err != nil {
		return nil, err
	}
	return &knowledgev1.ResolveResponse{CanonicalRef: d.ref, Version: d.version, Title: titleOf(d.ref, d.text)}, nil
}
