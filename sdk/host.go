package sdk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
)

// chunk is how many bytes of a blob or a stream travel in one message.
const chunk = 64 << 10

// Host asks the host on behalf of the plugin. Who asks is known from the socket;
// every method fails with UNAVAILABLE where there is no host, and with the
// host's own status where it refuses.
type Host struct {
	client pluginv1.HostServiceClient
}

func newHost(c grpc.ClientConnInterface) *Host {
	if c == nil {
		c = noHost{}
	}
	return &Host{client: pluginv1.NewHostServiceClient(c)}
}

// noHost is the connection of a plugin that was started without a host.
type noHost struct{}

var errNoHost = status.Error(codes.Unavailable, "this plugin was started without a host: "+EnvHostSocket+" is not set")

func (noHost) Invoke(context.Context, string, any, any, ...grpc.CallOption) error { return errNoHost }
func (noHost) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, errNoHost
}

// Decide asks for a policy decision on a tool intent of a harness; the host
// records it. Only DECISION_EFFECT_ALLOW allows (H-021).
func (h *Host) Decide(ctx context.Context, r *pluginv1.DecideRequest) (*pluginv1.DecideResponse, error) {
	return h.client.Decide(ctx, r)
}

// Credential returns a handle for an intent that the manifest declares, never
// key material (P-043). The handle works at the egress proxy alone.
func (h *Host) Credential(ctx context.Context, intent string) (*pluginv1.CredentialHandleResponse, error) {
	return h.client.CredentialHandle(ctx, &pluginv1.CredentialHandleRequest{Intent: intent})
}

// Checkpoint has the host pause the run and take a snapshot of its work tree;
// label is a word for people, at most 128 bytes.
func (h *Host) Checkpoint(ctx context.Context, label string) (*pluginv1.BlobRef, error) {
	r, err := h.client.Checkpoint(ctx, &pluginv1.CheckpointRequest{Label: label})
	return r.GetSnapshot(), err
}

// Sign has the host sign payload, 1 to 4096 bytes, for an intent; there is one,
// tlog-checkpoint, whose form and growth the host checks.
func (h *Host) Sign(ctx context.Context, intent string, payload []byte) (*pluginv1.SignResponse, error) {
	return h.client.Sign(ctx, &pluginv1.SignRequest{Intent: intent, Payload: payload})
}

// Log writes one line to the plugin's log on the host, cut at 4096 bytes. A line
// that cannot be written is lost; a log is no evidence.
func (h *Host) Log(ctx context.Context, level pluginv1.LogLevel, format string, args ...any) {
	line := clip(fmt.Sprintf(format, args...), maxReason)
	if line == "" {
		return
	}
	_, _ = h.client.Log(ctx, &pluginv1.LogRequest{Level: level, Message: line})
}

// GetBlob returns a reader of the bytes behind ref. It ends with io.EOF only
// after length and digest were checked; any other end is an error, and then
// nothing may be done with what was read. The reader must be closed.
func (h *Host) GetBlob(ctx context.Context, ref *pluginv1.BlobRef) (io.ReadCloser, error) {
	if ref.GetDigest() == "" {
		return nil, status.Error(codes.InvalidArgument, "get blob: the reference is empty")
	}
	ctx, cancel := context.WithCancel(ctx)
	stream, err := h.client.GetBlob(ctx, &pluginv1.GetBlobRequest{Digest: ref.GetDigest()})
	if err != nil {
		cancel()
		return nil, err
	}
	return &blobReader{stream: stream, cancel: cancel, ref: ref, sum: sha256.New()}, nil
}

// ReadBlob returns all bytes behind ref, verified, or RESOURCE_EXHAUSTED if the
// reference says that there are more than limit.
func (h *Host) ReadBlob(ctx context.Context, ref *pluginv1.BlobRef, limit int64) ([]byte, error) {
	if ref.GetSizeBytes() > limit {
		return nil, status.Errorf(codes.ResourceExhausted, "blob %s has %d bytes, the limit is %d", ref.GetDigest(), ref.GetSizeBytes(), limit)
	}
	r, err := h.GetBlob(ctx, ref)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// ReadDigest returns all bytes with the given digest, verified, for a reference
// that is a digest alone; RESOURCE_EXHAUSTED if there are more than limit.
func (h *Host) ReadDigest(ctx context.Context, digest string, limit int64) ([]byte, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := h.client.GetBlob(ctx, &pluginv1.GetBlobRequest{Digest: digest})
	if err != nil {
		return nil, err
	}
	var all []byte
	for {
		m, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		if int64(len(all)+len(m.GetChunk())) > limit {
			return nil, status.Errorf(codes.ResourceExhausted, "blob %s has more than %d bytes", digest, limit)
		}
		all = append(all, m.GetChunk()...)
	}
	sum := sha256.Sum256(all)
	if "sha256:"+hex.EncodeToString(sum[:]) != digest {
		return nil, status.Errorf(codes.DataLoss, "the bytes of blob %s do not match its digest", digest)
	}
	return all, nil
}

// PutBlob stores what r yields, within the run's quota, and returns its
// reference with the given media type.
func (h *Host) PutBlob(ctx context.Context, r io.Reader, mediaType string) (*pluginv1.BlobRef, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := h.client.PutBlob(ctx)
	if err != nil {
		return nil, err
	}
	sum, buf := sha256.New(), make([]byte, chunk)
	var size int64
	for {
		n, err := io.ReadFull(r, buf)
		if n > 0 {
			sum.Write(buf[:n])
			size += int64(n)
			if err := stream.Send(&pluginv1.PutBlobRequest{Chunk: buf[:n]}); err != nil {
				if errors.Is(err, io.EOF) {
					break // the host ended the call; its reason is the status
				}
				return nil, err
			}
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read the blob to store: %w", err)
		}
	}
	res, err := stream.CloseAndRecv()
	if err != nil {
		return nil, err
	}
	if want := digestOf(sum); res.GetBlob().GetDigest() != want || res.GetBlob().GetSizeBytes() != size {
		return nil, status.Errorf(codes.DataLoss, "the host stored %s of %d bytes, sent were %s of %d bytes", res.GetBlob().GetDigest(), res.GetBlob().GetSizeBytes(), want, size)
	}
	return &pluginv1.BlobRef{Digest: res.GetBlob().GetDigest(), SizeBytes: size, MediaType: mediaType}, nil
}

// PutBytes is PutBlob for bytes in memory.
func (h *Host) PutBytes(ctx context.Context, b []byte, mediaType string) (*pluginv1.BlobRef, error) {
	return h.PutBlob(ctx, bytes.NewReader(b), mediaType)
}

func digestOf(h hash.Hash) string { return "sha256:" + hex.EncodeToString(h.Sum(nil)) }

// blobReader checks what it passes on.
type blobReader struct {
	stream grpc.ServerStreamingClient[pluginv1.GetBlobResponse]
	cancel context.CancelFunc
	ref    *pluginv1.BlobRef
	sum    hash.Hash
	size   int64
	rest   []byte
	err    error
}

func (b *blobReader) Read(p []byte) (int, error) {
	for len(b.rest) == 0 {
		if b.err != nil {
			return 0, b.err
		}
		m, err := b.stream.Recv()
		switch {
		case err == io.EOF:
			b.err = b.verdict()
		case err != nil:
			b.err = err
		default:
			b.rest = m.GetChunk()
			b.sum.Write(b.rest)
			b.size += int64(len(b.rest))
			if b.size > b.ref.GetSizeBytes() {
				b.rest = nil
				b.err = b.mismatch()
			}
		}
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

func (b *blobReader) verdict() error {
	if b.size != b.ref.GetSizeBytes() || digestOf(b.sum) != b.ref.GetDigest() {
		return b.mismatch()
	}
	return io.EOF
}

func (b *blobReader) mismatch() error {
	return status.Errorf(codes.DataLoss, "the bytes of blob %s do not match its digest and size of %d", b.ref.GetDigest(), b.ref.GetSizeBytes())
}

func (b *blobReader) Close() error {
	b.cancel()
	if b.err == nil {
		b.err = io.ErrClosedPipe
	}
	return nil
}
