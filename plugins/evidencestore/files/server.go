package files

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	evidencestorev1 "github.com/numinance/numinance/gen/numinance/ports/evidencestore/v1"
)

// Server serves a Store as the evidencestore port.
type Server struct {
	evidencestorev1.UnimplementedEvidenceStoreServiceServer
	store *Store
}

// NewServer returns a server of store.
func NewServer(store *Store) *Server { return &Server{store: store} }

// AppendLocked implements P-195.
func (s *Server) AppendLocked(ctx context.Context, r *evidencestorev1.AppendLockedRequest) (*evidencestorev1.AppendLockedResponse, error) {
	length, written, err := s.store.Append(ctx, r.GetChangeId(), r.GetFirstSequence(), r.GetRecords())
	if err != nil {
		return nil, statusOf(err)
	}
	return &evidencestorev1.AppendLockedResponse{Length: length, Written: uint32(written)}, nil
}

// GetRecord implements P-196.
func (s *Server) GetRecord(_ context.Context, r *evidencestorev1.GetRecordRequest) (*evidencestorev1.GetRecordResponse, error) {
	if r.GetSequence() == 0 {
		return nil, status.Error(codes.InvalidArgument, "sequences begin at 1")
	}
	b, err := s.store.Get(r.GetChangeId(), r.GetSequence())
	if err != nil {
		return nil, statusOf(err)
	}
	return &evidencestorev1.GetRecordResponse{Record: b}, nil
}

// ListRange implements P-197.
func (s *Server) ListRange(_ context.Context, r *evidencestorev1.ListRangeRequest) (*evidencestorev1.ListRangeResponse, error) {
	if r.GetMaxRecords() > maxBatch {
		return nil, status.Errorf(codes.InvalidArgument, "max_records %d, at most %d", r.GetMaxRecords(), maxBatch)
	}
	records, length, err := s.store.List(r.GetChangeId(), r.GetFirstSequence(), int(r.GetMaxRecords()))
	if err != nil {
		return nil, statusOf(err)
	}
	return &evidencestorev1.ListRangeResponse{Records: records, Length: length}, nil
}

// Head implements P-198.
func (s *Server) Head(_ context.Context, r *evidencestorev1.HeadRequest) (*evidencestorev1.HeadResponse, error) {
	length, last, err := s.store.Head(r.GetChangeId())
	if err != nil {
		return nil, statusOf(err)
	}
	return &evidencestorev1.HeadResponse{Length: length, LastDigest: last}, nil
}

// statusOf chooses the code of an error, once.
func statusOf(err error) error {
	code := codes.Internal
	switch {
	case errors.Is(err, errInvalid):
		code = codes.InvalidArgument
	case errors.Is(err, errExists):
		code = codes.AlreadyExists
	case errors.Is(err, errGap):
		code = codes.FailedPrecondition
	case errors.Is(err, errNotFound):
		code = codes.NotFound
	case errors.Is(err, errDamaged):
		code = codes.DataLoss
	case errors.Is(err, errClosed):
		code = codes.Unavailable
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EFBIG):
		code = codes.ResourceExhausted
	case errors.Is(err, context.DeadlineExceeded):
		code = codes.DeadlineExceeded
	case errors.Is(err, context.Canceled):
		code = codes.Canceled
	}
	return status.Error(code, err.Error())
}
