package hostservice

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/strict"
	"github.com/numinance/numinance/internal/host/blob"
)

const (
	chunk          = 64 << 10
	defaultMaxBlob = 256 << 20
	// IntentCheckpoint is the only intent that Sign signs for.
	IntentCheckpoint = "tlog-checkpoint"
)

// Service is the HostService of one plugin. It is safe for concurrent use and
// keeps nothing between calls but what its Config keeps.
type Service struct {
	pluginv1.UnimplementedHostServiceServer
	c Config
}

// New returns the service of one session.
func New(c Config) (*Service, error) {
	if c.Checker == nil {
		var err error
		if c.Checker, err = strict.New(); err != nil {
			return nil, fmt.Errorf("host service: %w", err)
		}
	}
	if c.MaxBlob <= 0 {
		c.MaxBlob = defaultMaxBlob
	}
	if c.MaxProcess <= 0 {
		c.MaxProcess = time.Hour
	}
	return &Service{c: c}, nil
}

// refuse records a refusal and returns the status for it. Where the record
// cannot be written the plugin is refused all the same and told so.
func (s *Service) refuse(ctx context.Context, code codes.Code, asked, subject, format string, args ...any) error {
	reason := fmt.Sprintf(format, args...)
	if s.c.Refusals != nil {
		r := Refusal{Plugin: s.c.Plugin, Change: s.c.Change, Run: s.c.Run, Asked: asked, Subject: subject, Reason: reason}
		if err := s.c.Refusals.Refused(context.WithoutCancel(ctx), r); err != nil {
			reason += "; the refusal could not be recorded"
		}
	}
	return status.Error(code, asked+": "+reason)
}

func (s *Service) check(m proto.Message) error {
	if len(m.ProtoReflect().GetUnknown()) > 0 {
		return status.Errorf(codes.InvalidArgument, "%s has a field that this host does not know", m.ProtoReflect().Descriptor().FullName())
	}
	if err := s.c.Checker.Bounds(m); err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	return nil
}

// Decide implements HostService.
func (s *Service) Decide(ctx context.Context, r *pluginv1.DecideRequest) (*pluginv1.DecideResponse, error) {
	if err := s.check(r); err != nil {
		return nil, err
	}
	if s.c.Decide == nil {
		return nil, s.refuse(ctx, codes.PermissionDenied, "decide", r.GetTool(), "only the adapter of a run asks for tool decisions")
	}
	d, err := s.c.Decide(ctx, policy.Tool{
		Name: r.GetTool(), Path: r.GetPath(), Host: r.GetHost(), Intent: r.GetIntent(), Argv: r.GetArgv(), Input: digest.Digest(r.GetInputDigest()),
	})
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "decide: %v", err)
	}
	out := &pluginv1.DecideResponse{DecisionId: string(d.ID), Ask: cut(d.Ask, 512), Effect: pluginv1.DecisionEffect_DECISION_EFFECT_DENY}
	switch d.Effect {
	case policy.Allow:
		out.Effect = pluginv1.DecisionEffect_DECISION_EFFECT_ALLOW
	case policy.Escalate:
		out.Effect = pluginv1.DecisionEffect_DECISION_EFFECT_ESCALATE
	}
	for _, reason := range d.Reasons[:min(len(d.Reasons), 16)] {
		out.Reasons = append(out.Reasons, cut(reason.String(), 512))
	}
	return out, nil
}

// GetBlob implements HostService. What may not be resolved and what does not
// exist are answered alike, so that nobody can probe for digests.
func (s *Service) GetBlob(r *pluginv1.GetBlobRequest, out grpc.ServerStreamingServer[pluginv1.GetBlobResponse]) error {
	if err := s.check(r); err != nil {
		return err
	}
	ctx := out.Context()
	d := digest.Digest(r.GetDigest())
	if s.c.Readable == nil || s.c.Blobs == nil || !s.c.Readable(d) {
		return s.refuse(ctx, codes.PermissionDenied, "get-blob", string(d), "%s is no reference that this plugin may resolve now", d)
	}
	f, err := s.c.Blobs.Open(d)
	if err != nil {
		if errors.Is(err, blob.ErrNotFound) {
			return status.Errorf(codes.NotFound, "get-blob: the host does not hold %s any more", d)
		}
		return status.Errorf(codes.Unavailable, "get-blob: %v", err)
	}
	defer f.Close()
	for {
		// A buffer of its own for each message: the transport may still hold it.
		buf := make([]byte, chunk)
		n, err := io.ReadFull(f, buf)
		if n > 0 {
			if err := out.Send(&pluginv1.GetBlobResponse{Chunk: buf[:n]}); err != nil {
				return err
			}
		}
		switch {
		case err == io.EOF || err == io.ErrUnexpectedEOF:
			return nil
		case err != nil:
			return status.Errorf(codes.DataLoss, "get-blob: %v", err)
		}
	}
}

// PutBlob implements HostService.
func (s *Service) PutBlob(in grpc.ClientStreamingServer[pluginv1.PutBlobRequest, pluginv1.PutBlobResponse]) error {
	ctx := in.Context()
	if s.c.Put == nil {
		return s.refuse(ctx, codes.PermissionDenied, "put-blob", "", "this plugin has no quota for blobs")
	}
	ref, err := s.c.Put.Put(ctx, &chunks{s: s, in: in}, s.c.MaxBlob)
	switch {
	case errors.Is(err, blob.ErrQuota):
		return s.refuse(ctx, codes.ResourceExhausted, "put-blob", "", "the quota for blobs is used up")
	case errors.Is(err, blob.ErrTooLarge):
		return s.refuse(ctx, codes.ResourceExhausted, "put-blob", "", "the blob is above the limit of %d bytes", s.c.MaxBlob)
	case err != nil:
		if st, ok := status.FromError(err); ok {
			return st.Err()
		}
		return status.Errorf(codes.Unavailable, "put-blob: %v", err)
	}
	return in.SendAndClose(&pluginv1.PutBlobResponse{Blob: &pluginv1.BlobRef{Digest: string(ref.Digest), SizeBytes: ref.Size}})
}

// chunks reads the pieces of a PutBlob. Only the client's own end of the stream
// is io.EOF; a broken call never looks like a complete blob.
type chunks struct {
	s    *Service
	in   grpc.ClientStreamingServer[pluginv1.PutBlobRequest, pluginv1.PutBlobResponse]
	rest []byte
}

func (c *chunks) Read(p []byte) (int, error) {
	for len(c.rest) == 0 {
		m, err := c.in.Recv()
		if err != nil {
			return 0, err
		}
		if err := c.s.check(m); err != nil {
			return 0, err
		}
		c.rest = m.GetChunk()
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// Checkpoint implements HostService.
func (s *Service) Checkpoint(ctx context.Context, r *pluginv1.CheckpointRequest) (*pluginv1.CheckpointResponse, error) {
	if err := s.check(r); err != nil {
		return nil, err
	}
	if s.c.Checkpoint == nil {
		return nil, s.refuse(ctx, codes.PermissionDenied, "checkpoint", "", "only the adapter of a run asks for checkpoints")
	}
	ref, err := s.c.Checkpoint(ctx, r.GetLabel())
	if err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "checkpoint: %v", err)
	}
	return &pluginv1.CheckpointResponse{Snapshot: &pluginv1.BlobRef{Digest: string(ref.Digest), SizeBytes: ref.Size, MediaType: "application/x-tar"}}, nil
}

// Sign implements HostService.
func (s *Service) Sign(ctx context.Context, r *pluginv1.SignRequest) (*pluginv1.SignResponse, error) {
	if err := s.check(r); err != nil {
		return nil, err
	}
	if s.c.Sign == nil || r.GetIntent() != IntentCheckpoint {
		return nil, s.refuse(ctx, codes.PermissionDenied, "sign", r.GetIntent(), "this plugin may not have %q signed", r.GetIntent())
	}
	sig, err := s.c.Sign.SignCheckpoint(ctx, r.GetPayload())
	if err != nil {
		return nil, s.refuse(ctx, codes.FailedPrecondition, "sign", r.GetIntent(), "%v", err)
	}
	return &pluginv1.SignResponse{Signature: sig.Signature, PublicKey: sig.PublicKey, KeyName: sig.KeyName}, nil
}

// CredentialHandle implements HostService.
func (s *Service) CredentialHandle(ctx context.Context, r *pluginv1.CredentialHandleRequest) (*pluginv1.CredentialHandleResponse, error) {
	if err := s.check(r); err != nil {
		return nil, err
	}
	if !slices.Contains(s.c.Intents, r.GetIntent()) {
		return nil, s.refuse(ctx, codes.PermissionDenied, "credential", r.GetIntent(), "the manifest does not declare the intent %q", r.GetIntent())
	}
	if s.c.MayHold != nil {
		if err := s.c.MayHold(r.GetIntent()); err != nil {
			return nil, s.refuse(ctx, codes.PermissionDenied, "credential", r.GetIntent(), "%v", err)
		}
	}
	if s.c.Credentials == nil {
		return nil, s.refuse(ctx, codes.FailedPrecondition, "credential", r.GetIntent(), "there is no credential broker")
	}
	h, err := s.c.Credentials.Handle(ctx, s.c.Plugin, s.c.Run, r.GetIntent())
	if err != nil {
		return nil, s.refuse(ctx, codes.FailedPrecondition, "credential", r.GetIntent(), "%v", err)
	}
	return &pluginv1.CredentialHandleResponse{Handle: h.Value, Header: h.Header, Expires: timestamppb.New(h.Expires)}, nil
}

// Log implements HostService. The line is quoted: it can look like nothing else.
func (s *Service) Log(_ context.Context, r *pluginv1.LogRequest) (*pluginv1.LogResponse, error) {
	if err := s.check(r); err != nil {
		return nil, err
	}
	if s.c.Log != nil {
		level := strings.ToLower(strings.TrimPrefix(r.GetLevel().String(), "LOG_LEVEL_"))
		if _, err := fmt.Fprintf(s.c.Log, "%s %s %q\n", s.c.Plugin, level, r.GetMessage()); err != nil {
			return nil, status.Error(codes.Unavailable, "log: the line could not be written")
		}
	}
	return &pluginv1.LogResponse{}, nil
}

// cut shortens s to at most n bytes of valid UTF-8.
func cut(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) > n {
		s = strings.ToValidUTF8(s[:n], "")
	}
	return s
}
