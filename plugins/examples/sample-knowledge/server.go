package sampleknowledge

import (
	"context"
	"errors"
	"strings"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	knowledgev1 "github.com/numinance/numinance/gen/numinance/ports/knowledge/v1"
)

// snippetBytes is how much text around a hit is shown.
const snippetBytes = 240

// server implements the port over a source.
type server struct {
	knowledgev1.UnimplementedKnowledgeServiceServer
	source     *source
	bounds     protovalidate.Validator
	connection string
}

// request checks what every request has: bounds, a connection that is served,
// and a scope that does not climb. The host has checked the same; a provider that
// is asked by somebody else must not depend on that.
func (s *server) request(m proto.Message, connection string, scope []string, ref string) error {
	if err := s.bounds.Validate(m); err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	if s.connection != "" && connection != s.connection {
		return status.Errorf(codes.InvalidArgument, "this provider serves another connection")
	}
	for _, name := range scope {
		if climbs(name) {
			return status.Error(codes.InvalidArgument, "a scope is a path of plain segments")
		}
	}
	if ref != "" && climbs(ref) {
		return status.Error(codes.InvalidArgument, "a ref is a path of plain segments")
	}
	return nil
}

// Search implements the port.
func (s *server) Search(_ context.Context, r *knowledgev1.SearchRequest) (*knowledgev1.SearchResponse, error) {
	if err := s.request(r, r.GetConnection(), r.GetScope(), ""); err != nil {
		return nil, err
	}
	found, err := s.source.search(r.GetQuery(), r.GetScope(), int(r.GetMaxResults()))
	if err != nil {
		return nil, failure(err)
	}
	out := &knowledgev1.SearchResponse{}
	for _, d := range found {
		v := d.current()
		out.Results = append(out.Results, &knowledgev1.SearchResult{
			Ref: line(d.Ref, 1024), Title: line(d.Title, 1024), Snippet: snippet(v.Content, r.GetQuery()), Version: line(v.Name, 256),
		})
	}
	return out, nil
}

// Fetch implements the port.
func (s *server) Fetch(_ context.Context, r *knowledgev1.FetchRequest) (*knowledgev1.FetchResponse, error) {
	if err := s.request(r, r.GetConnection(), r.GetScope(), r.GetRef()); err != nil {
		return nil, err
	}
	d, err := s.source.get(r.GetRef(), r.GetScope())
	if err != nil {
		return nil, failure(err)
	}
	v, ok := d.version(r.GetVersion())
	if !ok {
		return nil, failure(errAbsent)
	}
	content := text(v.Content)
	cut := clip(content, int(r.GetMaxBytes()))
	return &knowledgev1.FetchResponse{
		Ref: line(d.Ref, 1024), Version: line(v.Name, 256), Title: line(d.Title, 1024), Content: cut, Truncated: len(cut) < len(content),
	}, nil
}

// Resolve implements the port.
func (s *server) Resolve(_ context.Context, r *knowledgev1.ResolveRequest) (*knowledgev1.ResolveResponse, error) {
	if err := s.request(r, r.GetConnection(), r.GetScope(), r.GetRef()); err != nil {
		return nil, err
	}
	d, err := s.source.get(r.GetRef(), r.GetScope())
	if err != nil {
		return nil, failure(err)
	}
	return &knowledgev1.ResolveResponse{CanonicalRef: line(d.Ref, 1024), Version: line(d.current().Name, 256), Title: line(d.Title, 1024)}, nil
}

// failure gives each answer of the source its one code. An outage is an error
// and never an empty answer (K-036).
func failure(err error) error {
	switch {
	case errors.Is(err, errOutage):
		return status.Error(codes.Unavailable, err.Error())
	case errors.Is(err, errAbsent):
		return status.Error(codes.NotFound, err.Error())
	case errors.Is(err, errClosed):
		return status.Error(codes.PermissionDenied, err.Error())
	}
	return status.Error(codes.Internal, err.Error())
}

// snippet returns the text around the first word of the query.
func snippet(content, query string) string {
	clean := text(content)
	at := -1
	if words := strings.Fields(strings.ToLower(query)); len(words) > 0 {
		at = strings.Index(strings.ToLower(clean), words[0])
	}
	// Lower case can have another length than the text; the place is only a hint.
	from := min(max(0, at-snippetBytes/4), len(clean))
	return clip(strings.ToValidUTF8(clean[from:], ""), snippetBytes)
}
