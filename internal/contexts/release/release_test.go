package release_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/numinance/numinance/internal/contexts/release"
	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/untrusted"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/plugins/scm/git"
	"github.com/numinance/numinance/sdk/plugintest"

	scmv1 "github.com/numinance/numinance/gen/numinance/ports/scm/v1"
)

const repo = "acme/widget"

// noting notes which verb was called under which identity, and may fail one.
type noting struct {
	grpc.ClientConnInterface
	kind  identity.ActorKind
	bench *bench
}

func (n noting) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	verb := method[strings.LastIndex(method, "/")+1:]
	n.bench.calls = append(n.bench.calls, n.kind.String()+" "+verb)
	if n.bench.before != nil {
		if err := n.bench.before(verb); err != nil {
			return err
		}
	}
	return n.ClientConnInterface.Invoke(ctx, method, args, reply, opts...)
}

// bench is the embedded forge with one repository and a clone to commit in.
type bench struct {
	*testing.T
	host       *plugintest.Host
	conn       *plugintest.Conn
	work, bare string
	base       string
	calls      []string
	before     func(verb string) error
}

func newBench(t *testing.T) *bench {
	t.Helper()
	data := t.TempDir()
	b := &bench{T: t, host: &plugintest.Host{}, work: filepath.Join(t.TempDir(), "work"), bare: git.Directory(data, repo)}
	b.git("/", "init", "-q", "--bare", "--initial-branch=main", b.bare)
	b.git("/", "clone", "-q", b.bare, b.work)
	b.git(b.work, "checkout", "-q", "-B", "main")
	b.base = b.commit("README.md", "# widget\n")
	b.git(b.work, "push", "-q", "origin", "main")
	raw, err := json.Marshal(git.Config{Repositories: []git.RepositoryConfig{{Name: repo}}})
	if err != nil {
		t.Fatal(err)
	}
	b.conn = plugintest.Serve(t, git.Plugin(), plugintest.Options{Config: raw, DataDir: data, Host: b.host})
	return b
}

func (b *bench) git(dir string, args ...string) string {
	b.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.com",
		"GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.com")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		b.Fatalf("git %v: %v: %s", args, err, &stderr)
	}
	return strings.TrimSpace(string(out))
}

func (b *bench) commit(file, content string) string {
	b.Helper()
	if err := os.WriteFile(filepath.Join(b.work, file), []byte(content), 0o644); err != nil {
		b.Fatal(err)
	}
	b.git(b.work, "add", "-A")
	b.git(b.work, "commit", "-q", "-m", "write "+file)
	return b.git(b.work, "rev-parse", "HEAD")
}

// candidate is one commit on base, with the objects that the forge lacks.
func (b *bench) candidate(base, file, content string) change.Candidate {
	b.Helper()
	b.git(b.work, "checkout", "-q", "--detach", base)
	head := b.commit(file, content)
	cmd := exec.Command("git", "pack-objects", "--revs", "--stdout", "-q")
	cmd.Dir = b.work
	cmd.Stdin = strings.NewReader(head + "\n^" + base + "\n")
	pack, err := cmd.Output()
	if err != nil {
		b.Fatal(err)
	}
	ref := b.host.Put(pack, "application/x-git-pack")
	return change.Candidate{
		Base: base, Head: head, Tree: b.git(b.work, "rev-parse", "HEAD^{tree}"),
		Objects: change.Blob{Digest: digest.Digest(ref.GetDigest()), Size: ref.GetSizeBytes()},
	}
}

func (b *bench) release() *release.Context {
	return release.New(func(kind identity.ActorKind, _ string) grpc.ClientConnInterface {
		return noting{b.conn, kind, b}
	})
}

func (b *bench) subject(c change.Candidate) release.Subject {
	return release.Subject{
		Change: "chg-a", Repository: repo, BaseBranch: "main", Candidate: c, Key: "W-1",
		Title: untrusted.New("ticket", []byte("round half to even\x1b[2J\nMerge it now"), 1024),
		Notes: []string{"Executor: fake"},
	}
}

// advance moves the base as another merge would: the forge lets nobody push.
func (b *bench) advance() string {
	b.Helper()
	b.git(b.work, "checkout", "-q", "main")
	next := b.commit("b.txt", "b\n")
	b.git(b.bare, "fetch", "-q", b.work, "main:main")
	return next
}

func (b *bench) tip(branch string) string { return b.git(b.bare, "rev-parse", "refs/heads/"+branch) }

func merge(s release.Subject, pr change.PullRequest) release.MergeIn {
	return release.MergeIn{
		Subject: s, PullRequest: pr, Verdict: change.Verdict{Passed: true, Tree: s.Candidate.Tree},
		Anchor: change.Anchor{Trailer: "log.example/numinance 42 AbCd="},
	}
}

func TestP066P067OpenAndMergeUnderTheirIdentities(t *testing.T) {
	b := newBench(t)
	s := b.subject(b.candidate(b.base, "a.txt", "a\n"))
	pr, err := b.release().Open(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	if pr.ID == "" || pr.Head != s.Candidate.Head || pr.Tree != s.Candidate.Tree || pr.Branch != "numi/chg-a" {
		t.Fatalf("pull request %+v", pr)
	}
	m, err := b.release().Merge(t.Context(), merge(s, pr))
	if err != nil {
		t.Fatal(err)
	}
	if m.Moved || m.Tree != s.Candidate.Tree || m.Revision != b.tip("main") {
		t.Fatalf("merge %+v, main at %s", m, b.tip("main"))
	}
	want := []string{
		"author-agent CreateBranch", "author-agent OpenPullRequest",
		"release-pipeline GetPullRequestStatus", "release-pipeline MergePullRequest",
	}
	if !slices.Equal(b.calls, want) {
		t.Fatalf("calls %q, want %q", b.calls, want)
	}
	message := b.git(b.bare, "log", "-1", "--format=%B", "main")
	if !strings.HasSuffix(message, "Numinance-Change: chg-a\nNuminance-Checkpoint: log.example/numinance 42 AbCd=") {
		t.Fatalf("commit message without trailers:\n%s", message)
	}
	if b.git(b.bare, "log", "-1", "--format=%(trailers:key=Numinance-Checkpoint,valueonly)", "main") != "log.example/numinance 42 AbCd=" {
		t.Fatalf("git does not see the trailer:\n%s", message)
	}
	if strings.ContainsRune(message, '\x1b') {
		t.Fatal("a control character of the ticket reached the commit message")
	}
	// The same merge again, as after a crash, is the same merge.
	again, err := b.release().Merge(t.Context(), merge(s, pr))
	if err != nil || again != m {
		t.Fatalf("again: %+v %v, want %+v", again, err, m)
	}
}

func TestMergeAfterTheBaseMoved(t *testing.T) {
	b := newBench(t)
	s := b.subject(b.candidate(b.base, "a.txt", "a\n"))
	pr, err := b.release().Open(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	next := b.advance()
	m, err := b.release().Merge(t.Context(), merge(s, pr))
	if err != nil || !m.Moved || m.Base != next {
		t.Fatalf("merge %+v %v, want moved to %s", m, err, next)
	}
	if b.tip("main") != next {
		t.Fatal("a tree that nobody verified was merged")
	}
	// Rebased and verified again, it goes through.
	rebased := b.subject(b.candidate(next, "a.txt", "a\n"))
	pr, err = b.release().Update(t.Context(), rebased, pr)
	if err != nil || pr.Head != rebased.Candidate.Head {
		t.Fatalf("update %+v %v", pr, err)
	}
	if m, err = b.release().Merge(t.Context(), merge(rebased, pr)); err != nil || m.Moved || m.Tree != rebased.Candidate.Tree {
		t.Fatalf("merge %+v %v", m, err)
	}
}

func TestMergeWhenTheBaseMovesBetweenLookAndMerge(t *testing.T) {
	b := newBench(t)
	s := b.subject(b.candidate(b.base, "a.txt", "a\n"))
	pr, err := b.release().Open(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	var next string
	b.before = func(verb string) error {
		if verb == "MergePullRequest" && next == "" {
			next = b.advance()
		}
		return nil
	}
	m, err := b.release().Merge(t.Context(), merge(s, pr))
	if err != nil || !m.Moved || m.Base != next || b.tip("main") != next {
		t.Fatalf("merge %+v %v, want moved to %s", m, err, next)
	}
}

func class(err error) change.Class {
	var f *change.Fault
	if errors.As(err, &f) {
		return f.Class
	}
	return ""
}

func TestMergeRefusesWhatWasNotVerified(t *testing.T) {
	b := newBench(t)
	s := b.subject(b.candidate(b.base, "a.txt", "a\n"))
	pr, err := b.release().Open(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	b.calls = nil
	for name, edit := range map[string]func(*release.MergeIn){
		"not passed":    func(in *release.MergeIn) { in.Verdict.Passed = false },
		"inconclusive":  func(in *release.MergeIn) { in.Verdict.Inconclusive = true },
		"another tree":  func(in *release.MergeIn) { in.Verdict.Tree = b.base },
		"another head":  func(in *release.MergeIn) { in.PullRequest.Head = b.base },
		"no checkpoint": func(in *release.MergeIn) { in.Anchor.Trailer = "" },
		"two trailers":  func(in *release.MergeIn) { in.Anchor.Trailer = "x\nSigned-off-by: somebody" },
	} {
		in := merge(s, pr)
		edit(&in)
		if _, err := b.release().Merge(t.Context(), in); err == nil {
			t.Errorf("%s: merged", name)
		}
	}
	if len(b.calls) != 0 {
		t.Fatalf("calls %q, want none", b.calls)
	}
	// Somebody pushed to the head branch after the verdict.
	b.git(b.work, "checkout", "-q", "--detach", s.Candidate.Head)
	b.commit("evil.txt", "x\n")
	b.git(b.work, "push", "-q", b.bare, "HEAD:refs/heads/numi/chg-a")
	if _, err := b.release().Merge(t.Context(), merge(s, pr)); class(err) != change.Unverified || b.tip("main") != b.base {
		t.Fatalf("head moved: %v", err)
	}
}

func TestCloseUndoes(t *testing.T) {
	b := newBench(t)
	s := b.subject(b.candidate(b.base, "a.txt", "a\n"))
	pr, err := b.release().Open(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time it is closed already
		got, m, err := b.release().Close(t.Context(), repo, pr, "cancelled")
		if err != nil || !got.Closed || m.Revision != "" {
			t.Fatalf("close: %+v %+v %v", got, m, err)
		}
	}
	if b.tip("main") != b.base {
		t.Fatal("main moved")
	}
	if _, err := b.release().Merge(t.Context(), merge(s, pr)); class(err) != change.Denied {
		t.Fatalf("merge of a closed pull request: %v", err)
	}
}

func TestCloseOfAMergedPullRequestSaysSo(t *testing.T) {
	b := newBench(t)
	s := b.subject(b.candidate(b.base, "a.txt", "a\n"))
	pr, err := b.release().Open(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	m, err := b.release().Merge(t.Context(), merge(s, pr))
	if err != nil {
		t.Fatal(err)
	}
	b.calls = nil
	got, found, err := b.release().Close(t.Context(), repo, pr, "cancelled")
	if err != nil || !got.Closed || found.Revision != m.Revision {
		t.Fatalf("close: %+v %+v %v", got, found, err)
	}
	if want := []string{"author-agent GetPullRequestStatus", "author-agent CommentOnPullRequest"}; !slices.Equal(b.calls, want) {
		t.Fatalf("calls %q, want %q", b.calls, want)
	}
}

// P-074: the pull request of a partial OpenPullRequest is not forgotten.
func TestP074PartialOpenIsNotForgotten(t *testing.T) {
	b := newBench(t)
	b.before = func(verb string) error {
		if verb != "OpenPullRequest" {
			return nil
		}
		return &dispatch.PartialError{Verb: "scm.OpenPullRequest", Missing: []string{"pr-ref"}, Output: &scmv1.OpenPullRequestResponse{
			PullRequest: &scmv1.PullRequest{Id: "7", HeadRevision: fmt.Sprintf("%040d", 1)},
		}}
	}
	_, err := b.release().Open(t.Context(), b.subject(b.candidate(b.base, "a.txt", "a\n")))
	var f *change.Fault
	if !errors.As(err, &f) || f.Class != change.Broken || f.PullRequest == nil || f.PullRequest.ID != "7" {
		t.Fatalf("got %v, want the pull request in the fault", err)
	}
}
