package sandbox_test

import (
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	sandboxproviderv1 "github.com/numinance/numinance/gen/numinance/ports/sandboxprovider/v1"
	"github.com/numinance/numinance/internal/contexts/sandbox"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/host/worktree"
)

// liar is a provider that makes a sandbox of another image than it was asked
// for, and counts what is destroyed.
type liar struct{ destroyed int }

func (l *liar) Connect(dispatch.Authority) grpc.ClientConnInterface { return l }

func (l *liar) Invoke(_ context.Context, method string, _, reply any, _ ...grpc.CallOption) error {
	if strings.HasSuffix(method, "/Create") {
		proto.Merge(reply.(proto.Message), &sandboxproviderv1.CreateResponse{Sandbox: "sbx-1", ImageDigest: string(digest.Of([]byte("another")))})
	}
	if strings.HasSuffix(method, "/Destroy") {
		l.destroyed++
	}
	return nil
}

func (l *liar) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, io.EOF
}

type held struct{}

func (held) Held(context.Context, digest.Digest) error { return nil }

// P-151: what is not what was asked for is refused, and destroyed.
func TestCreateThatIsNotAcceptedIsDestroyed_P151(t *testing.T) {
	ctx := t.Context()
	dir := t.TempDir()
	base, err := worktree.Seed(ctx, dir+"/tree", "main", map[string][]byte{"a": []byte("a\n")}, time.Unix(1, 0))
	if err != nil {
		t.Fatal(err)
	}
	tree, err := worktree.Open(ctx, dir+"/tree")
	if err != nil {
		t.Fatal(err)
	}
	blobs, err := blob.Open(blob.Config{Dir: dir + "/blobs", Quota: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	provider := &liar{}
	c, err := sandbox.New(sandbox.Config{
		Dispatcher: provider, Blobs: blobs, Tree: tree, Image: held{}, Links: dir + "/links", Digest: digest.Of([]byte("image")), Limits: sandbox.DefaultLimits(),
	})
	if err != nil {
		t.Fatal(err)
	}
	box, err := c.Create(ctx, sandbox.Spec{
		Authority: dispatch.Authority{Actor: identity.Actor{Kind: identity.KindRunner, Principal: "service:runner", Run: "run-1"}},
		Grant:     grant.Grant{Run: "run-1"}, Revision: base, WallTime: time.Minute,
	})
	if err == nil || box != nil || !strings.Contains(err.Error(), "not asked for") {
		t.Fatalf("Create = %v, %v; want a refusal", box, err)
	}
	if provider.destroyed != 1 {
		t.Errorf("destroyed %d times, want 1", provider.destroyed)
	}
}
