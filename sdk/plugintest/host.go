package plugintest

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
)

// Host answers a plugin in a test. Its zero value holds no blobs, denies every
// tool intent, has no credentials, and runs spawned processes for real, as the
// user that runs the test and without any sandbox. Fields are set before Serve.
type Host struct {
	pluginv1.UnimplementedHostServiceServer

	// OnDecide answers Decide; nil denies.
	OnDecide func(*pluginv1.DecideRequest) *pluginv1.DecideResponse
	// OnCheckpoint answers Checkpoint; nil refuses with FAILED_PRECONDITION.
	OnCheckpoint func(label string) (*pluginv1.BlobRef, error)
	// OnStart may change what is spawned, such as the working directory.
	OnStart func(*pluginv1.SpawnStart)
	// Intents are the credential intents for which there is a handle.
	Intents []string
	// Key signs for the intent tlog-checkpoint; nil refuses.
	Key ed25519.PrivateKey
	// KeyName is the name of Key.
	KeyName string

	manifest *pluginv1.Manifest

	mu      sync.Mutex // guards what follows
	blobs   map[string][]byte
	decided []*pluginv1.DecideRequest
	spawned []*pluginv1.SpawnStart
	lines   []string
}

// Put stores b and returns its reference.
func (h *Host) Put(b []byte, mediaType string) *pluginv1.BlobRef {
	sum := sha256.Sum256(b)
	ref := &pluginv1.BlobRef{Digest: "sha256:" + hex.EncodeToString(sum[:]), SizeBytes: int64(len(b)), MediaType: mediaType}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.blobs == nil {
		h.blobs = map[string][]byte{}
	}
	h.blobs[ref.Digest] = slices.Clone(b)
	return ref
}

// Blob returns the bytes behind ref, which a plugin may have stored.
func (h *Host) Blob(ref *pluginv1.BlobRef) ([]byte, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	b, ok := h.blobs[ref.GetDigest()]
	return slices.Clone(b), ok
}

// Decided returns the tool intents asked so far.
func (h *Host) Decided() []*pluginv1.DecideRequest {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.decided)
}

// Spawned returns the processes started so far.
func (h *Host) Spawned() []*pluginv1.SpawnStart {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.spawned)
}

// Lines returns the lines logged so far.
func (h *Host) Lines() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.lines)
}

// Decide implements HostService.
func (h *Host) Decide(_ context.Context, r *pluginv1.DecideRequest) (*pluginv1.DecideResponse, error) {
	h.mu.Lock()
	h.decided = append(h.decided, r)
	n := len(h.decided)
	h.mu.Unlock()
	d := &pluginv1.DecideResponse{Effect: pluginv1.DecisionEffect_DECISION_EFFECT_DENY, Reasons: []string{"the test allows no tool intent"}}
	if h.OnDecide != nil {
		d = h.OnDecide(r)
	}
	if d.GetDecisionId() == "" {
		d.DecisionId = fmt.Sprintf("dec-tool-%d", n)
	}
	return d, nil
}

// CredentialHandle implements HostService.
func (h *Host) CredentialHandle(_ context.Context, r *pluginv1.CredentialHandleRequest) (*pluginv1.CredentialHandleResponse, error) {
	if !slices.Contains(h.manifest.GetCredentialIntents(), r.GetIntent()) {
		return nil, status.Errorf(codes.PermissionDenied, "the manifest does not declare intent %q", r.GetIntent())
	}
	if !slices.Contains(h.Intents, r.GetIntent()) {
		return nil, status.Errorf(codes.FailedPrecondition, "there is no credential for intent %q", r.GetIntent())
	}
	return &pluginv1.CredentialHandleResponse{Handle: "handle-" + r.GetIntent(), Header: "Authorization", Expires: timestamppb.New(time.Now().Add(time.Hour))}, nil
}

// GetBlob implements HostService.
func (h *Host) GetBlob(r *pluginv1.GetBlobRequest, s grpc.ServerStreamingServer[pluginv1.GetBlobResponse]) error {
	h.mu.Lock()
	b, ok := h.blobs[r.GetDigest()]
	h.mu.Unlock()
	if !ok {
		return status.Errorf(codes.NotFound, "no blob %s", r.GetDigest())
	}
	for part := range slices.Chunk(b, 64<<10) {
		if err := s.Send(&pluginv1.GetBlobResponse{Chunk: part}); err != nil {
			return err
		}
	}
	return nil
}

// PutBlob implements HostService.
func (h *Host) PutBlob(s grpc.ClientStreamingServer[pluginv1.PutBlobRequest, pluginv1.PutBlobResponse]) error {
	var all []byte
	for {
		m, err := s.Recv()
		if err == io.EOF {
			return s.SendAndClose(&pluginv1.PutBlobResponse{Blob: h.Put(all, "")})
		}
		if err != nil {
			return err
		}
		all = append(all, m.GetChunk()...)
	}
}

// Checkpoint implements HostService.
func (h *Host) Checkpoint(_ context.Context, r *pluginv1.CheckpointRequest) (*pluginv1.CheckpointResponse, error) {
	if h.OnCheckpoint == nil {
		return nil, status.Error(codes.FailedPrecondition, "the test takes no checkpoints")
	}
	ref, err := h.OnCheckpoint(r.GetLabel())
	if err != nil {
		return nil, err
	}
	return &pluginv1.CheckpointResponse{Snapshot: ref}, nil
}

// Sign implements HostService.
func (h *Host) Sign(_ context.Context, r *pluginv1.SignRequest) (*pluginv1.SignResponse, error) {
	if r.GetIntent() != "tlog-checkpoint" || h.Key == nil {
		return nil, status.Errorf(codes.PermissionDenied, "no key signs for intent %q", r.GetIntent())
	}
	return &pluginv1.SignResponse{
		Signature: ed25519.Sign(h.Key, r.GetPayload()),
		PublicKey: h.Key.Public().(ed25519.PublicKey),
		KeyName:   h.KeyName,
	}, nil
}

// Log implements HostService.
func (h *Host) Log(_ context.Context, r *pluginv1.LogRequest) (*pluginv1.LogResponse, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lines = append(h.lines, r.GetMessage())
	return &pluginv1.LogResponse{}, nil
}

// Spawn implements HostService with a real process of the test's own user.
func (h *Host) Spawn(s grpc.BidiStreamingServer[pluginv1.SpawnRequest, pluginv1.SpawnResponse]) error {
	first, err := s.Recv()
	if err != nil {
		return err
	}
	start := first.GetStart()
	if start == nil || len(start.GetArgv()) == 0 {
		return status.Error(codes.InvalidArgument, "spawn begins with a start")
	}
	h.mu.Lock()
	h.spawned = append(h.spawned, start)
	h.mu.Unlock()
	if h.OnStart != nil {
		h.OnStart(start)
	}
	ctx := s.Context()
	if t := start.GetTimeout(); t != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, t.AsDuration())
		defer cancel()
	}
	cmd := exec.CommandContext(ctx, start.GetArgv()[0], start.GetArgv()[1:]...)
	cmd.Dir = start.GetWorkingDirectory()
	cmd.Env = []string{}
	for k, v := range start.GetEnvironment() {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	// Killed as a tree; a grandchild that keeps a pipe open is not waited for.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	in, err := cmd.StdinPipe() // Wait closes it when the process has ended
	if err != nil {
		return status.Errorf(codes.Internal, "spawn: %v", err)
	}
	out := &sender{stream: s}
	cmd.Stdout = out.as(func(b []byte) *pluginv1.SpawnResponse {
		return &pluginv1.SpawnResponse{Step: &pluginv1.SpawnResponse_Stdout{Stdout: b}}
	})
	cmd.Stderr = out.as(func(b []byte) *pluginv1.SpawnResponse {
		return &pluginv1.SpawnResponse{Step: &pluginv1.SpawnResponse_Stderr{Stderr: b}}
	})
	out.mu.Lock() // started comes before any output
	if err := cmd.Start(); err != nil {
		out.mu.Unlock()
		return status.Errorf(codes.FailedPrecondition, "spawn: %v", err)
	}
	err = s.Send(&pluginv1.SpawnResponse{Step: &pluginv1.SpawnResponse_Started{Started: uint32(cmd.Process.Pid)}})
	out.mu.Unlock()
	if err != nil {
		_ = cmd.Cancel()
	}
	go func() {
		defer in.Close()
		for {
			m, err := s.Recv()
			if err != nil {
				return
			}
			switch step := m.GetStep().(type) {
			case *pluginv1.SpawnRequest_Stdin:
				_, _ = in.Write(step.Stdin)
			case *pluginv1.SpawnRequest_CloseStdin:
				in.Close()
			case *pluginv1.SpawnRequest_Signal:
				_ = cmd.Process.Signal(syscall.Signal(step.Signal))
			}
		}
	}()
	waitErr := cmd.Wait()
	var ee *exec.ExitError
	if waitErr != nil && !errors.As(waitErr, &ee) && !errors.Is(waitErr, exec.ErrWaitDelay) && ctx.Err() == nil {
		return status.Errorf(codes.Internal, "spawn: %v", waitErr)
	}
	exit := &pluginv1.SpawnExit{ExitCode: int32(cmd.ProcessState.ExitCode())}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		exit.Signal = uint32(ws.Signal())
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) && s.Context().Err() == nil {
		exit.Limit = "wall-clock"
	}
	return s.Send(&pluginv1.SpawnResponse{Step: &pluginv1.SpawnResponse_Exit{Exit: exit}})
}

// sender serialises what two output streams send on one call.
type sender struct {
	mu     sync.Mutex
	stream grpc.BidiStreamingServer[pluginv1.SpawnRequest, pluginv1.SpawnResponse]
}

type senderFunc func([]byte) (int, error)

func (f senderFunc) Write(b []byte) (int, error) { return f(b) }

func (s *sender) as(wrap func([]byte) *pluginv1.SpawnResponse) io.Writer {
	return senderFunc(func(b []byte) (int, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for part := range slices.Chunk(b, 64<<10) {
			if err := s.stream.Send(wrap(part)); err != nil {
				return 0, err
			}
		}
		return len(b), nil
	})
}
