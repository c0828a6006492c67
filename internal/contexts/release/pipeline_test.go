package release_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/numinance/numinance/internal/contexts/release"
	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/identity"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	ciexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/ciexecutor/v1"
)

const revision = "00000000000000000000000000000000000000aa"

// ci is a CI whose runs end after some questions.
type ci struct {
	ciexecutorv1.UnimplementedCiExecutorServiceServer
	asks int // questions until the end
	end  ciexecutorv1.OperationState
	ran  string

	mu        sync.Mutex
	cancelled int
}

func (c *ci) op(s ciexecutorv1.OperationState) *ciexecutorv1.Operation {
	return &ciexecutorv1.Operation{Name: "op-1", State: s, Revision: c.ran}
}

func (c *ci) StartOperation(_ context.Context, r *ciexecutorv1.StartOperationRequest) (*ciexecutorv1.StartOperationResponse, error) {
	if c.ran == "" {
		c.ran = r.GetRevision()
	}
	return &ciexecutorv1.StartOperationResponse{Operation: c.op(ciexecutorv1.OperationState_OPERATION_STATE_QUEUED)}, nil
}

func (c *ci) GetOperation(context.Context, *ciexecutorv1.GetOperationRequest) (*ciexecutorv1.GetOperationResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.asks == 0 {
		return nil, status.Error(codes.Unavailable, "CI is away")
	}
	if c.asks--; c.asks > 0 {
		return &ciexecutorv1.GetOperationResponse{Operation: c.op(ciexecutorv1.OperationState_OPERATION_STATE_RUNNING)}, nil
	}
	return &ciexecutorv1.GetOperationResponse{Operation: c.op(c.end)}, nil
}

func (c *ci) CancelOperation(context.Context, *ciexecutorv1.CancelOperationRequest) (*ciexecutorv1.CancelOperationResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cancelled++
	return &ciexecutorv1.CancelOperationResponse{Operation: c.op(ciexecutorv1.OperationState_OPERATION_STATE_CANCELLED)}, nil
}

func (c *ci) GetLogReference(context.Context, *ciexecutorv1.GetLogReferenceRequest) (*ciexecutorv1.GetLogReferenceResponse, error) {
	return &ciexecutorv1.GetLogReferenceResponse{Log: &pluginv1.BlobRef{Digest: "sha256:log"}, Complete: true}, nil
}

func (c *ci) serve(t *testing.T) *release.Context {
	t.Helper()
	l := bufconn.Listen(1 << 16)
	srv := grpc.NewServer()
	ciexecutorv1.RegisterCiExecutorServiceServer(srv, c)
	go srv.Serve(l) //nolint:errcheck // ends with Stop
	t.Cleanup(srv.Stop)
	conn, err := grpc.NewClient("passthrough:///ci", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	r := release.New(func(kind identity.ActorKind, _ string) grpc.ClientConnInterface {
		if kind != identity.KindReleasePipeline {
			t.Errorf("ciexecutor under %s (P-111)", kind)
		}
		return conn
	})
	r.Poll = release.Poll{First: time.Millisecond, Most: 2 * time.Millisecond, Limit: time.Minute, Factor: 1.5}
	return r
}

var pipelineIn = release.PipelineIn{Pipeline: "release", Repository: repo, Revision: revision}

func TestP111PipelineRunsToItsEnd(t *testing.T) {
	for _, tc := range []struct {
		end  ciexecutorv1.OperationState
		good bool
	}{
		{ciexecutorv1.OperationState_OPERATION_STATE_SUCCEEDED, true},
		{ciexecutorv1.OperationState_OPERATION_STATE_FAILED, false},
		{ciexecutorv1.OperationState_OPERATION_STATE_CANCELLED, false},
		{ciexecutorv1.OperationState_OPERATION_STATE_TIMED_OUT, false},
		{ciexecutorv1.OperationState_OPERATION_STATE_UNSPECIFIED, false},
		{99, false},
	} {
		c := &ci{asks: 3, end: tc.end}
		got, err := c.serve(t).Run(t.Context(), pipelineIn)
		if err != nil || got.Succeeded != tc.good || got.ID != "op-1" || c.cancelled != 0 {
			t.Errorf("%s: %+v %v", tc.end, got, err)
		}
	}
}

func TestPipelineOnAnotherRevisionIsNoSuccess(t *testing.T) {
	c := &ci{asks: 1, end: ciexecutorv1.OperationState_OPERATION_STATE_SUCCEEDED, ran: "00000000000000000000000000000000000000bb"}
	if got, err := c.serve(t).Run(t.Context(), pipelineIn); class(err) != change.Unverified {
		t.Fatalf("%+v %v", got, err)
	}
}

func TestPipelineGivenUpIsCancelled(t *testing.T) {
	t.Run("interrupted", func(t *testing.T) {
		c := &ci{asks: 1 << 30}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(20*time.Millisecond, cancel)
		if _, err := c.serve(t).Run(ctx, pipelineIn); err == nil || c.cancelled != 1 {
			t.Fatalf("%v, cancelled %d times", err, c.cancelled)
		}
	})
	t.Run("too long", func(t *testing.T) {
		c := &ci{asks: 1 << 30}
		r := c.serve(t)
		r.Poll.Limit = 20 * time.Millisecond
		if _, err := r.Run(t.Context(), pipelineIn); class(err) != change.Unverified || c.cancelled != 1 {
			t.Fatalf("%v, cancelled %d times", err, c.cancelled)
		}
	})
	t.Run("CI away", func(t *testing.T) {
		c := &ci{}
		if _, err := c.serve(t).Run(t.Context(), pipelineIn); err == nil || c.cancelled != 1 {
			t.Fatalf("%v, cancelled %d times", err, c.cancelled)
		}
	})
}
