package tessera

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	transparencylogv1 "github.com/numinance/numinance/gen/numinance/ports/transparencylog/v1"
)

// Server serves a Log as the transparencylog port.
type Server struct {
	transparencylogv1.UnimplementedTransparencyLogServiceServer
	log *Log
}

// NewServer returns a server of log.
func NewServer(log *Log) *Server { return &Server{log: log} }

// Append implements P-212. The host's signature over the leaf is not kept: an
// entry of this log is the leaf alone.
func (s *Server) Append(ctx context.Context, r *transparencylogv1.AppendRequest) (*transparencylogv1.AppendResponse, error) {
	i, err := s.log.Append(ctx, r.GetLeaf())
	if err != nil {
		return nil, statusOf(err)
	}
	return &transparencylogv1.AppendResponse{
		Index: i.Index, Entry: i.Entry, Checkpoint: i.Checkpoint,
		Proof: &transparencylogv1.InclusionProof{Index: i.Index, TreeSize: i.Size, Hashes: i.Proof},
	}, nil
}

// Checkpoint implements P-213.
func (s *Server) Checkpoint(ctx context.Context, _ *transparencylogv1.CheckpointRequest) (*transparencylogv1.CheckpointResponse, error) {
	raw, err := s.log.Checkpoint(ctx)
	if err != nil {
		return nil, statusOf(err)
	}
	return &transparencylogv1.CheckpointResponse{Checkpoint: raw}, nil
}

// Prove implements P-214.
func (s *Server) Prove(ctx context.Context, r *transparencylogv1.ProveRequest) (*transparencylogv1.ProveResponse, error) {
	switch q := r.GetProof().(type) {
	case *transparencylogv1.ProveRequest_Inclusion:
		index, size := q.Inclusion.GetIndex(), q.Inclusion.GetTreeSize()
		i, err := s.log.Inclusion(ctx, index, size)
		if err != nil {
			return nil, statusOf(err)
		}
		return &transparencylogv1.ProveResponse{
			Entry: i.Entry,
			Proof: &transparencylogv1.ProveResponse_Inclusion{Inclusion: &transparencylogv1.InclusionProof{Index: index, TreeSize: size, Hashes: i.Proof}},
		}, nil
	case *transparencylogv1.ProveRequest_Consistency:
		first, second := q.Consistency.GetFirstSize(), q.Consistency.GetSecondSize()
		hashes, err := s.log.Consistency(ctx, first, second)
		if err != nil {
			return nil, statusOf(err)
		}
		return &transparencylogv1.ProveResponse{
			Proof: &transparencylogv1.ProveResponse_Consistency{Consistency: &transparencylogv1.ConsistencyProof{FirstSize: first, SecondSize: second, Hashes: hashes}},
		}, nil
	default:
		return nil, status.Error(codes.InvalidArgument, "want an inclusion or a consistency query")
	}
}

// Lookup implements P-215.
func (s *Server) Lookup(ctx context.Context, r *transparencylogv1.LookupRequest) (*transparencylogv1.LookupResponse, error) {
	i, err := s.log.Lookup(ctx, r.GetLeaf())
	if err != nil {
		return nil, statusOf(err)
	}
	return &transparencylogv1.LookupResponse{Index: i}, nil
}

// statusOf chooses the code of an error, once.
func statusOf(err error) error {
	code := codes.Internal
	switch {
	case errors.Is(err, errInvalid):
		code = codes.InvalidArgument
	case errors.Is(err, errNotFound):
		code = codes.NotFound
	case errors.Is(err, errTooNew):
		code = codes.FailedPrecondition
	case errors.Is(err, errDamaged):
		code = codes.DataLoss
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EFBIG):
		code = codes.ResourceExhausted
	case errors.Is(err, errUnavailable):
		code = codes.Unavailable
	case errors.Is(err, context.DeadlineExceeded):
		code = codes.DeadlineExceeded
	case errors.Is(err, context.Canceled):
		code = codes.Canceled
	}
	return status.Error(code, err.Error())
}
