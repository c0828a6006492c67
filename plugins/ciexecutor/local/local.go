package local

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gowebpki/jcs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	ciexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/ciexecutor/v1"
	"github.com/numinance/numinance/sdk"
)

// Evidence is the type of the receipt of a started operation.
const Evidence = "ci-run-ref"

// Plugin is the CI as the host starts it. It needs a data directory.
func Plugin() sdk.Plugin {
	return sdk.Plugin{
		Manifest: &pluginv1.Manifest{
			ExtensionId: "dev.numinance.embedded/ciexecutor-local",
			Version:     "1.0.0",
			Port:        "ciexecutor",
			SpecVersion: "1.0.0",
			Verbs:       []string{"StartOperation", "GetOperation", "CancelOperation", "ListArtifacts", "GetLogReference"},
			Description: "A small CI server that runs the pipelines of its configuration as child processes.",
		},
		Open: func(ctx context.Context, s *sdk.Session) (sdk.Register, error) {
			srv, err := open(ctx, s)
			if err != nil {
				return nil, err
			}
			return func(r grpc.ServiceRegistrar) { ciexecutorv1.RegisterCiExecutorServiceServer(r, srv) }, nil
		},
	}
}

type server struct {
	ciexecutorv1.UnimplementedCiExecutorServiceServer
	config  Config
	data    string
	host    *sdk.Host
	effects *sdk.Effects
	slots   chan struct{}
	lock    *os.File // held as long as this process serves the directory

	mu      sync.Mutex // guards running
	running map[string]*running
}

// running is an operation that this process carries out.
type running struct {
	cancel context.CancelCauseFunc
	done   chan struct{}
}

func open(ctx context.Context, session *sdk.Session) (*server, error) {
	config, err := parseConfig(session.Config)
	if err != nil {
		return nil, err
	}
	if session.DataDir == "" {
		return nil, errors.New("a CI needs a data directory for its operations")
	}
	s := &server{
		config: config, data: session.DataDir, host: session.Host, effects: session.Effects(),
		slots: make(chan struct{}, config.Concurrent), running: map[string]*running{},
	}
	if err := os.MkdirAll(filepath.Join(s.data, "operations"), 0o700); err != nil {
		return nil, err
	}
	if err := s.own(); err != nil {
		return nil, err
	}
	return s, s.recover(ctx)
}

// own makes sure that one process serves the directory: two would each take the
// other's operations for orphans.
func (s *server) own() error {
	f, err := os.OpenFile(filepath.Join(s.data, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	// The process before this one may still be ending.
	for range 50 {
		if err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
			s.lock = f
			return nil
		}
		time.Sleep(40 * time.Millisecond)
	}
	f.Close()
	return fmt.Errorf("another process serves %s: %w", s.data, err)
}

// recover settles what a killed process left: what ran has failed, what waited
// is started.
func (s *server) recover(ctx context.Context) error {
	if err := os.RemoveAll(filepath.Join(s.data, "work")); err != nil {
		return err
	}
	entries, err := os.ReadDir(filepath.Join(s.data, "operations"))
	if err != nil {
		return err
	}
	for _, e := range entries {
		o, err := s.load(e.Name())
		if errors.Is(err, errNoOperation) {
			continue // it was never answered for
		}
		if err != nil {
			return err
		}
		switch o.State {
		case stateRunning:
			s.finish(o, stateFailed, "the runner ended while the operation ran; start it anew")
		case stateQueued:
			s.start(ctx, o)
		}
	}
	return nil
}

// start carries out an operation that is on disk; it outlives ctx.
func (s *server) start(ctx context.Context, o operation) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	r := &running{cancel: cancel, done: make(chan struct{})}
	s.mu.Lock()
	s.running[o.Name] = r
	s.mu.Unlock()
	go func() {
		defer func() {
			cancel(nil)
			s.mu.Lock()
			delete(s.running, o.Name)
			s.mu.Unlock()
			close(r.done)
		}()
		s.runOperation(ctx, o)
	}()
}

// StartOperation puts an operation on disk and returns while it runs (P-107).
// NOT_FOUND: no such pipeline or repository. FAILED_PRECONDITION: the revision
// is not in the repository. INVALID_ARGUMENT: a parameter that the pipeline does
// not declare.
func (s *server) StartOperation(ctx context.Context, r *ciexecutorv1.StartOperationRequest) (*ciexecutorv1.StartOperationResponse, error) {
	pipeline, ok := s.config.Pipelines[r.GetPipeline()]
	if !ok {
		return nil, status.Errorf(codes.NotFound, "no pipeline is called %q", r.GetPipeline())
	}
	if _, ok := s.config.Repositories[r.GetRepository()]; !ok {
		return nil, status.Errorf(codes.NotFound, "no repository is called %q", r.GetRepository())
	}
	for name := range r.GetParameters() {
		if !slices.Contains(pipeline.Parameters, name) {
			return nil, status.Errorf(codes.InvalidArgument, "pipeline %s has no parameter %q", r.GetPipeline(), name)
		}
	}
	if !revision(r.GetRevision()) {
		return nil, status.Errorf(codes.InvalidArgument, "revision %q is no full commit id", r.GetRevision())
	}
	kind, err := s.git(ctx, r.GetRepository(), nil, "cat-file", "-t", r.GetRevision())
	if err != nil || kind != "commit" {
		if ctx.Err() != nil {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		return nil, status.Errorf(codes.FailedPrecondition, "%s is no commit of %s", r.GetRevision(), r.GetRepository())
	}
	o := operation{
		Name: nameOf(sdk.Action(ctx).GetIdempotencyKey()), Pipeline: r.GetPipeline(), Repository: r.GetRepository(),
		Revision: r.GetRevision(), Parameters: r.GetParameters(), State: stateQueued, Created: time.Now().UTC(),
	}
	if sdk.DryRun(ctx) {
		o.Name = "dry-run"
		return &ciexecutorv1.StartOperationResponse{Operation: o.proto()}, nil
	}
	return sdk.Once(ctx, s.effects, r, func(ctx context.Context, again bool) (*ciexecutorv1.StartOperationResponse, error) {
		if before, err := s.load(o.Name); err == nil {
			o = before // it was put on disk and the answer lost
		} else if !errors.Is(err, errNoOperation) {
			return nil, status.Error(codes.Internal, err.Error())
		} else {
			if err := s.save(o); err != nil {
				return nil, status.Error(codes.Internal, err.Error())
			}
			s.start(ctx, o)
		}
		if err := receipt(ctx, o); err != nil {
			return nil, err
		}
		return &ciexecutorv1.StartOperationResponse{Operation: o.proto()}, nil
	})
}

func revision(s string) bool {
	_, err := hex.DecodeString(s)
	return err == nil && (len(s) == 40 || len(s) == 64) && strings.ToLower(s) == s
}

func receipt(ctx context.Context, o operation) error {
	b, err := json.Marshal(map[string]string{"operation": o.Name, "pipeline": o.Pipeline, "repository": o.Repository, "revision": o.Revision})
	if err == nil {
		b, err = jcs.Transform(b)
	}
	if err != nil {
		return status.Errorf(codes.Internal, "encode the receipt: %v", err)
	}
	sdk.Attach(ctx, &pluginv1.Evidence{Type: Evidence, Reference: o.Pipeline + "/" + o.Name, Payload: b})
	return nil
}

// find loads an operation of a pipeline; one of another pipeline is none.
func (s *server) find(pipeline, name string) (operation, error) {
	o, err := s.load(name)
	switch {
	case errors.Is(err, errNoOperation), err == nil && o.Pipeline != pipeline:
		return operation{}, status.Errorf(codes.NotFound, "pipeline %q has no operation %q", pipeline, name)
	case err != nil:
		return operation{}, status.Error(codes.Internal, err.Error())
	}
	return o, nil
}

// GetOperation returns how an operation stands.
func (s *server) GetOperation(_ context.Context, r *ciexecutorv1.GetOperationRequest) (*ciexecutorv1.GetOperationResponse, error) {
	o, err := s.find(r.GetPipeline(), r.GetOperation())
	if err != nil {
		return nil, err
	}
	return &ciexecutorv1.GetOperationResponse{Operation: o.proto()}, nil
}

// CancelOperation ends an operation and waits for its end; a finished one stays
// as it is.
func (s *server) CancelOperation(ctx context.Context, r *ciexecutorv1.CancelOperationRequest) (*ciexecutorv1.CancelOperationResponse, error) {
	o, err := s.find(r.GetPipeline(), r.GetOperation())
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	run := s.running[o.Name]
	s.mu.Unlock()
	if run != nil {
		run.cancel(errCancelled)
		select {
		case <-run.done:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		if o, err = s.find(r.GetPipeline(), r.GetOperation()); err != nil {
			return nil, err
		}
	}
	return &ciexecutorv1.CancelOperationResponse{Operation: o.proto()}, nil
}

// ListArtifacts hands the files of an operation to the host and lists their
// references, in byte order of their names.
func (s *server) ListArtifacts(ctx context.Context, r *ciexecutorv1.ListArtifactsRequest) (*ciexecutorv1.ListArtifactsResponse, error) {
	o, err := s.find(r.GetPipeline(), r.GetOperation())
	if err != nil {
		return nil, err
	}
	after := r.GetPageToken()
	rest := o.Artifacts[:0:0]
	for _, a := range o.Artifacts {
		if after == "" || a.Name > after {
			rest = append(rest, a)
		}
	}
	size := int(r.GetPageSize())
	if size <= 0 {
		size = maxArtifacts
	}
	out := &ciexecutorv1.ListArtifactsResponse{}
	if len(rest) > size {
		rest = rest[:size]
		out.NextPageToken = rest[size-1].Name
	}
	for _, a := range rest {
		ref, err := s.put(ctx, filepath.Join(s.dir(o.Name), "artifacts", strings.TrimPrefix(a.Digest, "sha256:")), "application/octet-stream")
		if err != nil {
			return nil, err
		}
		if ref.GetDigest() != a.Digest {
			return nil, status.Errorf(codes.DataLoss, "artifact %s is damaged on disk", a.Name)
		}
		out.Artifacts = append(out.Artifacts, &ciexecutorv1.Artifact{Name: a.Name, Content: ref})
	}
	return out, nil
}

// GetLogReference hands the log so far to the host and returns its reference.
func (s *server) GetLogReference(ctx context.Context, r *ciexecutorv1.GetLogReferenceRequest) (*ciexecutorv1.GetLogReferenceResponse, error) {
	o, err := s.find(r.GetPipeline(), r.GetOperation())
	if err != nil {
		return nil, err
	}
	ref, err := s.put(ctx, filepath.Join(s.dir(o.Name), "log"), "text/plain")
	if err != nil {
		return nil, err
	}
	return &ciexecutorv1.GetLogReferenceResponse{Log: ref, Complete: o.done()}, nil
}

func (s *server) put(ctx context.Context, path, media string) (*pluginv1.BlobRef, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return s.host.PutBytes(ctx, nil, media) // nothing was printed yet
	}
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	defer f.Close()
	return s.host.PutBlob(ctx, f, media)
}
