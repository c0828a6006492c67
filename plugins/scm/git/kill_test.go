package git_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	scmv1 "github.com/numinance/numinance/gen/numinance/ports/scm/v1"
	"github.com/numinance/numinance/plugins/scm/git"
	"github.com/numinance/numinance/sdk"
)

// serveEnv makes the test binary a plugin process.
const serveEnv = "SCM_GIT_TEST_SERVE"

func TestMain(m *testing.M) {
	if os.Getenv(serveEnv) != "" {
		if err := sdk.Serve(context.Background(), git.Plugin()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// process is one life of the plugin as a process of its own.
type process struct {
	cmd    *exec.Cmd
	conn   *grpc.ClientConn
	client pluginv1.PluginServiceClient
}

func (b *bench) start(socket string, config []byte) *process {
	b.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=none")
	cmd.Env = append(os.Environ(), serveEnv+"=1", sdk.EnvPluginSocket+"="+socket)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	conn, err := grpc.NewClient("passthrough:///plugin", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		b.Fatal(err)
	}
	p := &process{cmd: cmd, conn: conn, client: pluginv1.NewPluginServiceClient(conn)}
	ctx, cancel := context.WithTimeout(b.Context(), 30*time.Second)
	defer cancel()
	if _, err := p.client.Handshake(ctx, &pluginv1.HandshakeRequest{SpecVersion: "1.0.0", Config: config, DataDirectory: b.data}); err != nil {
		b.Fatal(err)
	}
	return p
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	p.conn.Close()
}

// call invokes one verb; ok is false if the process died before its answer.
func (p *process) call(b *bench, method, key string, q, answer proto.Message) (ok bool) {
	b.Helper()
	request, err := anypb.New(q)
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(b.Context(), 30*time.Second)
	defer cancel()
	stream, err := p.client.Invoke(ctx, &pluginv1.InvokeRequest{
		Context: &pluginv1.ActionContext{
			ActionId: "act-1", ChangeId: "chg-test", RunId: "run-test", ActorKind: pluginv1.ActorKind_ACTOR_KIND_RUNNER, ActorPrincipal: "service:runner",
			Caller: "test", GrantId: "grt-test", GrantDigest: "sha256:" + strings.Repeat("0", 64), DecisionId: "dec-1",
			Budget: &pluginv1.Budget{Actions: 1, OutputBytes: 1 << 20}, IdempotencyKey: key, Deadline: timestamppb.New(time.Now().Add(time.Minute)), SpecVersion: "1.0.0",
		},
		Target: "numinance.ports.scm.v1.ScmService/" + method, Request: request,
	})
	if err != nil {
		return false
	}
	m, err := stream.Recv()
	if err != nil {
		return false
	}
	if r := m.GetResult(); r.GetStatus() != pluginv1.ActionStatus_ACTION_STATUS_SUCCEEDED {
		b.Fatalf("%s: %v", method, r)
	} else if err := r.GetOutput().UnmarshalTo(answer); err != nil {
		b.Fatal(err)
	}
	return true
}

// P-054, P-056, P-058, P-060: killed at any moment and asked again with the
// same key, each effect is there once.
func TestKilledAtAnyMoment(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{})
	config, err := json.Marshal(git.Config{Repositories: []git.RepositoryConfig{{Name: repo}}})
	if err != nil {
		t.Fatal(err)
	}
	const rounds = 3
	heads := make([]string, rounds)
	b.git(b.work, "checkout", "-q", "--detach", b.base)
	for i := range heads {
		b.file(fmt.Sprintf("src/f%d", i), "x")
		heads[i] = b.commit(fmt.Sprint("change ", i))
	}
	b.git(b.work, "push", "-q", "origin", heads[rounds-1]+":refs/heads/all")
	socket := filepath.Join(b.data, "p.sock")
	p := b.start(socket, config)
	defer func() { p.kill() }()
	killed := 0
	// until calls with one key until an answer comes, killing before the first.
	until := func(method, key string, q, answer proto.Message) {
		t.Helper()
		timer := time.AfterFunc(time.Duration(rand.IntN(60))*time.Millisecond, func() { _ = p.cmd.Process.Kill() })
		ok := p.call(b, method, key, q, answer)
		timer.Stop()
		for !ok {
			killed++
			p.kill()
			p = b.start(socket, config)
			ok = p.call(b, method, key, q, answer)
		}
		p.kill()
		p = b.start(socket, config)
		again := answer.ProtoReflect().New().Interface()
		if !p.call(b, method, key, q, again) || !proto.Equal(answer, again) {
			t.Errorf("%s: answer %v, then %v", method, answer, again)
		}
	}
	for i, head := range heads {
		id := fmt.Sprint(i + 1)
		branch := "numi/" + id
		until("CreateBranch", "create-"+id, &scmv1.CreateBranchRequest{Repository: repo, Branch: branch, Revision: head}, &scmv1.CreateBranchResponse{})
		var opened scmv1.OpenPullRequestResponse
		until("OpenPullRequest", "open-"+id, &scmv1.OpenPullRequestRequest{Repository: repo, HeadBranch: branch, HeadRevision: head, BaseBranch: "main", Title: "t"}, &opened)
		if opened.GetPullRequest().GetId() != id {
			t.Fatalf("pull request %s, want %s", opened.GetPullRequest().GetId(), id)
		}
		var said scmv1.CommentOnPullRequestResponse
		until("CommentOnPullRequest", "say-"+id, &scmv1.CommentOnPullRequestRequest{Repository: repo, PullRequest: id, Body: "x"}, &said)
		if said.GetComment() != "1" {
			t.Errorf("comment %s, want the first", said.GetComment())
		}
		var merged scmv1.MergePullRequestResponse
		until("MergePullRequest", "merge-"+id, b.mergeRequest(opened.GetPullRequest(), head), &merged)
		if merged.GetAlreadyMerged() || b.tip("main") != merged.GetMergedRevision() {
			t.Errorf("got %v, main is %s", &merged, b.tip("main"))
		}
	}
	if got := b.git(b.bare, "rev-list", "--count", "--merges", b.base+"..main"); got != fmt.Sprint(rounds) {
		t.Errorf("%s merges, want %d", got, rounds)
	}
	t.Logf("killed %d of %d calls before their answer", killed, rounds*4)
}
