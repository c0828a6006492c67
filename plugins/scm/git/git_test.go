package git_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	scmv1 "github.com/numinance/numinance/gen/numinance/ports/scm/v1"
	"github.com/numinance/numinance/plugins/scm/git"
	"github.com/numinance/numinance/sdk/plugintest"
)

const repo = "acme/Widget"

// bench is a forge with one repository, its client, and a clone to make
// commits in.
type bench struct {
	*testing.T
	scm   scmv1.ScmServiceClient
	host  *plugintest.Host
	forge *git.Forge
	data  string
	bare  string
	work  string
	base  string
}

func newBench(t *testing.T, rc git.RepositoryConfig) *bench {
	t.Helper()
	b := &bench{T: t, data: t.TempDir(), work: filepath.Join(t.TempDir(), "work"), host: &plugintest.Host{}}
	rc.Name = repo
	b.bare = git.Directory(b.data, repo)
	b.git("/", "init", "-q", "--bare", "--initial-branch=main", b.bare)
	b.git("/", "clone", "-q", b.bare, b.work)
	b.file("README.md", "# widget\n")
	b.file("src/a.go", "package a\n\nfunc A() int { return 1 }\n")
	b.file("src/b.txt", "one [needle] two\nneedle.*\n")
	b.git(b.work, "checkout", "-q", "-B", "main")
	b.base = b.commit("base")
	b.git(b.work, "push", "-q", "origin", "main")
	c := git.Config{Repositories: []git.RepositoryConfig{rc}}
	var err error
	if b.forge, err = git.Open(context.Background(), b.data, c); err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	b.scm = scmv1.NewScmServiceClient(plugintest.Serve(t, git.Plugin(), plugintest.Options{Config: raw, DataDir: b.data, Host: b.host}))
	return b
}

func (b *bench) git(dir string, args ...string) string {
	b.Helper()
	out, err := b.tryGit(dir, nil, args...)
	if err != nil {
		b.Fatalf("git %v: %v", args, err)
	}
	return out
}

func (b *bench) tryGit(dir string, stdin []byte, args ...string) (string, error) {
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.com",
		"GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.com", "GIT_AUTHOR_DATE=@1700000000 +0000", "GIT_COMMITTER_DATE=@1700000000 +0000")
	cmd.Stdin = bytes.NewReader(stdin)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, stderr.String())
	}
	return strings.TrimSpace(string(out)), nil
}

func (b *bench) file(name, content string) {
	b.Helper()
	path := filepath.Join(b.work, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		b.Fatal(err)
	}
}

func (b *bench) commit(message string) string {
	b.Helper()
	b.git(b.work, "add", "-A")
	b.git(b.work, "commit", "-q", "-m", message)
	return b.git(b.work, "rev-parse", "HEAD")
}

// pack puts a pack of what revision has and base lacks with the host.
func (b *bench) pack(revision, base string) *pluginv1.BlobRef {
	b.Helper()
	cmd := exec.Command("git", "pack-objects", "--revs", "--stdout", "-q")
	cmd.Dir = b.work
	cmd.Stdin = strings.NewReader(revision + "\n^" + base + "\n")
	out, err := cmd.Output()
	if err != nil {
		b.Fatal(err)
	}
	return b.host.Put(out, "application/x-git-packed-objects")
}

func (b *bench) tip(branch string) string {
	b.Helper()
	out, err := b.tryGit(b.bare, nil, "rev-parse", "--verify", "--quiet", "refs/heads/"+branch)
	if err != nil {
		return ""
	}
	return out
}

// branch commits a change on top of base in the clone and creates the branch.
func (b *bench) branch(name, file, content string) (head string) {
	b.Helper()
	b.git(b.work, "checkout", "-q", "--detach", b.base)
	b.file(file, content)
	head = b.commit("change " + file)
	if _, err := b.scm.CreateBranch(context.Background(), &scmv1.CreateBranchRequest{Repository: repo, Branch: name, Revision: head, Objects: b.pack(head, b.base)}); err != nil {
		b.Fatal(err)
	}
	return head
}

func (b *bench) open(ctx context.Context, branch, head string) *scmv1.PullRequest {
	b.Helper()
	a, err := b.scm.OpenPullRequest(ctx, &scmv1.OpenPullRequestRequest{Repository: repo, HeadBranch: branch, HeadRevision: head, BaseBranch: "main", Title: "Change", Body: "text"})
	if err != nil {
		b.Fatal(err)
	}
	return a.GetPullRequest()
}

func (b *bench) wants(err error, want codes.Code) {
	b.Helper()
	if got := status.Code(err); got != want {
		b.Errorf("got %v (%v), want %v", got, err, want)
	}
}

// forget makes the plugin's memory what kill -9 between an effect and its
// answer leaves: keys that have begun, without a result.
func (b *bench) forget() {
	b.Helper()
	files, err := filepath.Glob(filepath.Join(b.data, "effects", "*.json"))
	if err != nil || len(files) == 0 {
		b.Fatalf("no effects: %v", err)
	}
	for _, name := range files {
		raw, err := os.ReadFile(name)
		if err != nil {
			b.Fatal(err)
		}
		var m map[string]any
		if err := json.Unmarshal(raw, &m); err != nil {
			b.Fatal(err)
		}
		delete(m, "result")
		if raw, err = json.Marshal(m); err != nil {
			b.Fatal(err)
		}
		if err := os.WriteFile(name, raw, 0o600); err != nil {
			b.Fatal(err)
		}
	}
}

// P-050: the repository and its base revision, and the objects of that
// revision alone.
func TestP050GetRepository(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{})
	ctx := context.Background()
	a, err := b.scm.GetRepository(ctx, &scmv1.GetRepositoryRequest{Repository: repo, Objects: scmv1.ObjectsMode_OBJECTS_MODE_REVISION})
	if err != nil {
		t.Fatal(err)
	}
	if a.GetBaseRevision() != b.base || a.GetBaseBranch() != "main" || a.GetRepository().GetDefaultBranch() != "main" {
		t.Errorf("got %v, want main at %s", a, b.base)
	}
	pack, ok := b.host.Blob(a.GetObjects())
	if !ok {
		t.Fatal("the pack was not stored")
	}
	other := t.TempDir()
	b.git("/", "init", "-q", "--bare", other)
	if _, err := b.tryGit(other, pack, "index-pack", "--stdin", "--strict"); err != nil {
		t.Fatal(err)
	}
	if got := b.git(other, "cat-file", "-p", b.base+":src/a.go"); !strings.Contains(got, "func A") {
		t.Errorf("file from the pack: %q", got)
	}
	_, err = b.scm.GetRepository(ctx, &scmv1.GetRepositoryRequest{Repository: "acme/other", Objects: scmv1.ObjectsMode_OBJECTS_MODE_NONE})
	b.wants(err, codes.NotFound)
	_, err = b.scm.GetRepository(ctx, &scmv1.GetRepositoryRequest{Repository: repo, Branch: "nope", Objects: scmv1.ObjectsMode_OBJECTS_MODE_NONE})
	b.wants(err, codes.NotFound)
	_, err = b.scm.GetRepository(ctx, &scmv1.GetRepositoryRequest{Repository: repo})
	b.wants(err, codes.InvalidArgument)
}

func TestEmptyRepositoryAndMissingMirror(t *testing.T) {
	data := t.TempDir()
	if out, err := exec.Command("git", "init", "-q", "--bare", git.Directory(data, "empty")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	client := scmv1.NewScmServiceClient(plugintest.Serve(t, git.Plugin(), plugintest.Options{
		Config: []byte(`{"repositories":[{"name":"empty"},{"name":"late"}]}`), DataDir: data, Host: &plugintest.Host{}}))
	for name, want := range map[string]codes.Code{"empty": codes.FailedPrecondition, "late": codes.Unavailable, "none": codes.NotFound} {
		_, err := client.GetRepository(context.Background(), &scmv1.GetRepositoryRequest{Repository: name, Objects: scmv1.ObjectsMode_OBJECTS_MODE_NONE})
		if status.Code(err) != want {
			t.Errorf("%s: got %v, want %v", name, err, want)
		}
	}
}

// P-072, P-073: full lowercase commit ids only; a name is never a revision.
func TestP072P073RevisionsAreFullCommitIDs(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{})
	for _, revision := range []string{"", "main", "v1.0", "HEAD", b.base[:39], b.base + "0", strings.ToUpper(b.base), b.base[:8], strings.Repeat("a", 63), strings.Repeat("a", 65), "--help" + b.base[6:]} {
		_, err := b.scm.GetFile(context.Background(), &scmv1.GetFileRequest{Repository: repo, Revision: revision, Path: "README.md", MaxBytes: 10})
		b.wants(err, codes.InvalidArgument)
	}
	for _, revision := range []string{strings.Repeat("0", 40), strings.Repeat("a", 64), b.git(b.work, "rev-parse", "HEAD^{tree}")} {
		_, err := b.scm.GetFile(context.Background(), &scmv1.GetFileRequest{Repository: repo, Revision: revision, Path: "README.md", MaxBytes: 10})
		b.wants(err, codes.NotFound)
	}
}

// P-051, P-052: tree and file at a revision, whatever names it holds.
func TestP051P052TreeAndFile(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{})
	ctx := context.Background()
	b.file("bin/run", "#!/bin/sh\n")
	if err := os.Chmod(filepath.Join(b.work, "bin/run"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(b.work, "link")); err != nil {
		t.Fatal(err)
	}
	b.file("odd\xff\n name", "odd")
	b.file("src.go", "x")
	// An empty directory stands for the submodule, else add takes it away.
	if err := os.Mkdir(filepath.Join(b.work, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	b.git(b.work, "update-index", "--add", "--cacheinfo", "160000,"+b.base+",sub")
	head := b.commit("odd names")
	b.git(b.work, "push", "-q", "origin", "HEAD:refs/heads/odd")

	var got []string
	token := ""
	for {
		a, err := b.scm.GetTree(ctx, &scmv1.GetTreeRequest{Repository: repo, Revision: head, Recursive: true, PageSize: 3, PageToken: token})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range a.GetEntries() {
			got = append(got, fmt.Sprintf("%s %s", e.GetPath(), strings.TrimPrefix(e.GetType().String(), "ENTRY_TYPE_")))
			if strings.HasPrefix(e.GetPath(), "odd") && string(e.GetRawPath()) != "odd\xff\n name" {
				t.Errorf("raw path %q", e.GetRawPath())
			}
		}
		if token = a.GetNextPageToken(); token == "" {
			break
		}
	}
	want := []string{"README.md FILE", "bin DIRECTORY", "bin/run EXECUTABLE", "link SYMLINK", "odd\uFFFD\n name FILE", "src DIRECTORY", "src.go FILE", "src/a.go FILE", "src/b.txt FILE", "sub SUBMODULE"}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	file, err := b.scm.GetFile(ctx, &scmv1.GetFileRequest{Repository: repo, Revision: head, Path: "src/a.go", MaxBytes: 9})
	if err != nil || string(file.GetContent()) != "package a" || !file.GetTruncated() || file.GetTotalBytes() != 37 {
		t.Errorf("got %v, %v", file, err)
	}
	link, err := b.scm.GetFile(ctx, &scmv1.GetFileRequest{Repository: repo, Revision: head, Path: "link", MaxBytes: 100})
	if err != nil || string(link.GetContent()) != "/etc/passwd" || link.GetType() != scmv1.EntryType_ENTRY_TYPE_SYMLINK {
		t.Errorf("a link is its target and is never followed: %v, %v", link, err)
	}
	for path, want := range map[string]codes.Code{"nope": codes.NotFound, "src": codes.NotFound, "../x": codes.InvalidArgument, "/etc/passwd": codes.InvalidArgument, "src/*": codes.NotFound, ":(glob)**": codes.NotFound, "src/../README.md": codes.InvalidArgument} {
		_, err := b.scm.GetFile(ctx, &scmv1.GetFileRequest{Repository: repo, Revision: head, Path: path, MaxBytes: 10})
		b.wants(err, want)
	}
	sub, err := b.scm.GetTree(ctx, &scmv1.GetTreeRequest{Repository: repo, Revision: head, Path: "src", PageSize: 10})
	if err != nil || len(sub.GetEntries()) != 2 || sub.GetEntries()[0].GetPath() != "src/a.go" {
		t.Errorf("got %v, %v", sub, err)
	}
}

// P-061: the query is text at a revision.
func TestP061SearchCode(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{})
	ctx := context.Background()
	find := func(q, prefix string, most uint32) *scmv1.SearchCodeResponse {
		t.Helper()
		a, err := b.scm.SearchCode(ctx, &scmv1.SearchCodeRequest{Repository: repo, Revision: b.base, Query: q, PathPrefix: prefix, MaxResults: most})
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	if a := find("needle.*", "", 10); len(a.GetMatches()) != 1 || a.GetMatches()[0].GetLine() != 2 || a.GetMatches()[0].GetPath() != "src/b.txt" || a.GetTruncated() {
		t.Errorf("got %v", a)
	}
	if a := find("[needle]", "src", 10); len(a.GetMatches()) != 1 || a.GetMatches()[0].GetSnippet() != "one [needle] two" {
		t.Errorf("got %v", a)
	}
	if a := find("needle", "", 1); len(a.GetMatches()) != 1 || !a.GetTruncated() {
		t.Errorf("got %v", a)
	}
	if a := find("needle", "sr", 10); len(a.GetMatches()) != 0 {
		t.Errorf("a prefix is a directory: %v", a)
	}
	if a := find("--version", "", 10); len(a.GetMatches()) != 0 {
		t.Errorf("got %v", a)
	}
	_, err := b.scm.SearchCode(ctx, &scmv1.SearchCodeRequest{Repository: repo, Revision: b.base, Query: "a\nb", MaxResults: 1})
	b.wants(err, codes.InvalidArgument)
}

// P-053, P-054: branches with full ids; the same call twice leaves one.
func TestP053P054Branches(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{})
	ctx := context.Background()
	head := b.branch("numi/x", "src/a.go", "package a\n")
	again := plugintest.Key(ctx, "k1")
	for range 2 {
		a, err := b.scm.CreateBranch(again, &scmv1.CreateBranchRequest{Repository: repo, Branch: "numi/x", Revision: head})
		if err != nil || a.GetBranch().GetRevision() != head {
			t.Errorf("got %v, %v", a, err)
		}
	}
	_, err := b.scm.CreateBranch(again, &scmv1.CreateBranchRequest{Repository: repo, Branch: "numi/y", Revision: head})
	b.wants(err, codes.InvalidArgument) // same key, another request
	_, err = b.scm.CreateBranch(ctx, &scmv1.CreateBranchRequest{Repository: repo, Branch: "numi/x", Revision: b.base})
	b.wants(err, codes.AlreadyExists)
	_, err = b.scm.CreateBranch(ctx, &scmv1.CreateBranchRequest{Repository: repo, Branch: "main", Revision: head})
	b.wants(err, codes.AlreadyExists)
	_, err = b.scm.CreateBranch(ctx, &scmv1.CreateBranchRequest{Repository: repo, Branch: "z", Revision: strings.Repeat("a", 40)})
	b.wants(err, codes.NotFound)
	for _, name := range []string{"-x", "a..b", "a b", "a/.b", "refs^", "x.lock", "a//b", "@", "a\x01"} {
		_, err := b.scm.CreateBranch(ctx, &scmv1.CreateBranchRequest{Repository: repo, Branch: name, Revision: head})
		b.wants(err, codes.InvalidArgument)
	}
	first, err := b.scm.ListBranches(ctx, &scmv1.ListBranchesRequest{Repository: repo, PageSize: 1})
	if err != nil || len(first.GetBranches()) != 1 || first.GetBranches()[0].GetName() != "main" || !first.GetBranches()[0].GetProtected() {
		t.Fatalf("got %v, %v", first, err)
	}
	second, err := b.scm.ListBranches(ctx, &scmv1.ListBranchesRequest{Repository: repo, PageSize: 1, PageToken: first.GetNextPageToken()})
	if err != nil || len(second.GetBranches()) != 1 || second.GetBranches()[0].GetRevision() != head || second.GetNextPageToken() != "" {
		t.Errorf("got %v, %v", second, err)
	}
}

// A pack is taken as a whole or not at all.
func TestPackIsChecked(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{})
	ctx := context.Background()
	b.git(b.work, "checkout", "-q", "--detach", b.base)
	b.file("a", "1")
	middle := b.commit("middle")
	b.file("b", "2")
	head := b.commit("head")
	create := func(ref *pluginv1.BlobRef) error {
		_, err := b.scm.CreateBranch(ctx, &scmv1.CreateBranchRequest{Repository: repo, Branch: "x", Revision: head, Objects: ref})
		return err
	}
	b.wants(create(b.pack(head, middle)), codes.InvalidArgument)                                                  // its parent is missing
	b.wants(create(b.pack(middle, b.base)), codes.InvalidArgument)                                                // not the commit named
	b.wants(create(b.host.Put([]byte("PACK garbage"), "x")), codes.InvalidArgument)                               // no pack
	b.wants(create(&pluginv1.BlobRef{Digest: "sha256:" + strings.Repeat("0", 64), SizeBytes: 3}), codes.NotFound) // no such blob
	evil, err := b.tryGit(b.work, fmt.Appendf(nil, "040000 tree %s\t.git\n", b.git(b.work, "rev-parse", head+"^{tree}")), "mktree")
	if err != nil {
		t.Fatal(err)
	}
	head = b.git(b.work, "commit-tree", "-p", b.base, "-m", "evil", evil)
	b.wants(create(b.pack(head, b.base)), codes.InvalidArgument) // a tree with .git
	if b.tip("x") != "" {
		t.Error("the branch was made")
	}
	if got, err := b.tryGit(b.bare, nil, "cat-file", "-t", evil); err == nil {
		t.Errorf("a refused object is in the repository: %s", got)
	}
}

// P-056, P-074: one pull request per key, with evidence; a dry run opens none;
// UpdatePullRequest closes it.
func TestP056OpenPullRequest(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{WebURL: "https://code.example/acme"})
	head := b.branch("numi/x", "src/a.go", "package a\n")
	q := &scmv1.OpenPullRequestRequest{Repository: repo, HeadBranch: "numi/x", HeadRevision: head, BaseBranch: "main", Title: "Change"}
	ctx := context.Background()
	if a, err := b.scm.OpenPullRequest(plugintest.DryRun(ctx), q); err != nil || a.GetPullRequest().GetId() == "" {
		t.Errorf("dry run: %v, %v", a, err)
	}
	_, err := b.scm.GetPullRequestStatus(ctx, &scmv1.GetPullRequestStatusRequest{Repository: repo, PullRequest: "1"})
	b.wants(err, codes.NotFound)

	keyed := plugintest.Key(ctx, "open-1")
	captured, result := plugintest.Capture(keyed)
	first, err := b.scm.OpenPullRequest(captured, q)
	if err != nil {
		t.Fatal(err)
	}
	if e := result.GetEvidence(); len(e) != 1 || e[0].GetType() != "pr-ref" || e[0].GetReference() != repo+"#1" || !json.Valid(e[0].GetPayload()) {
		t.Errorf("evidence %v", result.GetEvidence())
	}
	b.forget()
	captured, result = plugintest.Capture(keyed)
	second, err := b.scm.OpenPullRequest(captured, q)
	if err != nil || second.GetPullRequest().GetId() != first.GetPullRequest().GetId() || len(result.GetEvidence()) != 1 {
		t.Errorf("same key again: %v, %v", second, err)
	}
	_, err = b.scm.OpenPullRequest(ctx, q)
	b.wants(err, codes.AlreadyExists)
	_, err = b.scm.UpdatePullRequest(ctx, &scmv1.UpdatePullRequestRequest{Repository: repo, PullRequest: "1", State: scmv1.PullRequestState_PULL_REQUEST_STATE_MERGED})
	b.wants(err, codes.InvalidArgument)
	closed, err := b.scm.UpdatePullRequest(ctx, &scmv1.UpdatePullRequestRequest{Repository: repo, PullRequest: "1", State: scmv1.PullRequestState_PULL_REQUEST_STATE_CLOSED, Title: "Other"})
	if err != nil || closed.GetPullRequest().GetState() != scmv1.PullRequestState_PULL_REQUEST_STATE_CLOSED || closed.GetPullRequest().GetTitle() != "Other" {
		t.Errorf("got %v, %v", closed, err)
	}
	for _, bad := range []*scmv1.OpenPullRequestRequest{
		{Repository: repo, HeadBranch: "main", HeadRevision: b.base, BaseBranch: "main", Title: "x"},
		{Repository: repo, HeadBranch: "numi/x", HeadRevision: head, BaseBranch: "main", Title: "two\nlines"},
		{Repository: repo, HeadBranch: "numi/x", HeadRevision: "main", BaseBranch: "main", Title: "x"},
	} {
		_, err := b.scm.OpenPullRequest(ctx, bad)
		b.wants(err, codes.InvalidArgument)
	}
	_, err = b.scm.OpenPullRequest(ctx, &scmv1.OpenPullRequestRequest{Repository: repo, HeadBranch: "numi/x", HeadRevision: b.base, BaseBranch: "main", Title: "x"})
	b.wants(err, codes.FailedPrecondition)
}

// P-057: an update moves the head once, under the expected one.
func TestP057UpdatePullRequestMovesHead(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{})
	ctx := context.Background()
	head := b.branch("numi/x", "src/a.go", "package a\n")
	pr := b.open(ctx, "numi/x", head)
	b.file("src/a.go", "package a // more\n")
	next := b.commit("more")
	q := &scmv1.UpdatePullRequestRequest{Repository: repo, PullRequest: pr.GetId(), HeadRevision: next, ExpectedHeadRevision: head, Objects: b.pack(next, head)}
	keyed := plugintest.Key(ctx, "move")
	for range 2 {
		a, err := b.scm.UpdatePullRequest(keyed, q)
		if err != nil || a.GetPullRequest().GetHeadRevision() != next || b.tip("numi/x") != next {
			t.Errorf("got %v, %v", a, err)
		}
		b.forget()
	}
	stale := &scmv1.UpdatePullRequestRequest{Repository: repo, PullRequest: pr.GetId(), HeadRevision: head, ExpectedHeadRevision: head}
	_, err := b.scm.UpdatePullRequest(ctx, stale)
	b.wants(err, codes.FailedPrecondition)
	_, err = b.scm.UpdatePullRequest(ctx, &scmv1.UpdatePullRequestRequest{Repository: repo, PullRequest: pr.GetId(), HeadRevision: head})
	b.wants(err, codes.InvalidArgument)
}

// P-058: one comment per key.
func TestP058Comment(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{})
	ctx := context.Background()
	pr := b.open(ctx, "numi/x", b.branch("numi/x", "src/a.go", "package a\n"))
	q := &scmv1.CommentOnPullRequestRequest{Repository: repo, PullRequest: pr.GetId(), Body: "hello"}
	keyed := plugintest.Key(ctx, "say")
	var ids []string
	for range 3 {
		a, err := b.scm.CommentOnPullRequest(keyed, q)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, a.GetComment())
		b.forget()
	}
	other, err := b.scm.CommentOnPullRequest(ctx, q)
	if err != nil || fmt.Sprint(ids) != "[1 1 1]" || other.GetComment() != "2" {
		t.Errorf("got %v then %v, %v", ids, other, err)
	}
	_, err = b.scm.CommentOnPullRequest(ctx, &scmv1.CommentOnPullRequestRequest{Repository: repo, PullRequest: "99", Body: "x"})
	b.wants(err, codes.NotFound)
}

func (b *bench) mergeRequest(pr *scmv1.PullRequest, head string) *scmv1.MergePullRequestRequest {
	b.Helper()
	return &scmv1.MergePullRequestRequest{
		Repository: repo, PullRequest: pr.GetId(), ExpectedHeadRevision: head, ExpectedTree: b.git(b.work, "rev-parse", head+"^{tree}"),
		Method: scmv1.MergeMethod_MERGE_METHOD_MERGE, Title: "Merge change", Body: "Why.\n\nNuminance-Change: chg-1",
	}
}

// P-060: a dry run merges nothing; the same key merges once; head and tree must
// be the expected ones.
func TestP060MergePullRequest(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{})
	ctx := context.Background()
	head := b.branch("numi/x", "src/a.go", "package a\n")
	pr := b.open(ctx, "numi/x", head)
	q := b.mergeRequest(pr, head)
	dry, err := b.scm.MergePullRequest(plugintest.DryRun(ctx), q)
	if err != nil || dry.GetMergedRevision() != b.base || dry.GetTree() != q.GetExpectedTree() || b.tip("main") != b.base {
		t.Errorf("dry run: %v, %v", dry, err)
	}
	for _, bad := range []func(*scmv1.MergePullRequestRequest){
		func(q *scmv1.MergePullRequestRequest) { q.ExpectedHeadRevision = b.base },
		func(q *scmv1.MergePullRequestRequest) { q.ExpectedTree = strings.Repeat("0", 40) },
	} {
		q := b.mergeRequest(pr, head)
		bad(q)
		_, err := b.scm.MergePullRequest(ctx, q)
		b.wants(err, codes.FailedPrecondition)
	}
	keyed := plugintest.Key(ctx, "merge")
	first, err := b.scm.MergePullRequest(keyed, q)
	if err != nil {
		t.Fatal(err)
	}
	if b.tip("main") != first.GetMergedRevision() || first.GetAlreadyMerged() {
		t.Errorf("got %v, main is %s", first, b.tip("main"))
	}
	if got := b.git(b.bare, "log", "-1", "--format=%an <%ae> %ct|%P|%(trailers:key=Numinance-Change,valueonly)", "main"); got != "Numinance Release <release@numinance.invalid> 1700000000|"+b.base+" "+head+"|chg-1" {
		t.Errorf("merge commit: %s", got)
	}
	for range 2 {
		b.forget()
		again, err := b.scm.MergePullRequest(keyed, q)
		if err != nil || again.GetMergedRevision() != first.GetMergedRevision() || again.GetAlreadyMerged() {
			t.Errorf("same key: %v, %v", again, err)
		}
	}
	other, err := b.scm.MergePullRequest(ctx, q)
	if err != nil || !other.GetAlreadyMerged() || other.GetMergedRevision() != first.GetMergedRevision() {
		t.Errorf("another key: %v, %v", other, err)
	}
	if got := b.git(b.bare, "rev-list", "--count", b.base+"..main"); got != "2" {
		t.Errorf("%s commits were merged, want the change and its merge", got)
	}
	_, err = b.scm.UpdatePullRequest(ctx, &scmv1.UpdatePullRequestRequest{Repository: repo, PullRequest: pr.GetId(), State: scmv1.PullRequestState_PULL_REQUEST_STATE_CLOSED})
	b.wants(err, codes.FailedPrecondition)
}

// A merge that is cut off after the base moved is found and not done again.
func TestP060MergeIsSettledAfterCrash(t *testing.T) {
	for _, moved := range []bool{true, false} {
		t.Run(fmt.Sprintf("moved=%v", moved), func(t *testing.T) {
			b := newBench(t, git.RepositoryConfig{})
			ctx := context.Background()
			head := b.branch("numi/x", "src/a.go", "package a\n")
			pr := b.open(ctx, "numi/x", head)
			q, keyed := b.mergeRequest(pr, head), plugintest.Key(ctx, "merge")
			first, err := b.scm.MergePullRequest(keyed, q)
			if err != nil {
				t.Fatal(err)
			}
			// Take the files back to the moment around the move of the base.
			b.forget()
			files, _ := filepath.Glob(filepath.Join(b.data, "*.forge", "pulls", "1.json"))
			raw, err := os.ReadFile(files[0])
			if err != nil {
				t.Fatal(err)
			}
			text := strings.Replace(strings.Replace(string(raw), `"merged":`, `"merging":`, 1), `"state": "merged"`, `"state": "open"`, 1)
			if text == string(raw) {
				t.Fatal("the file has another form")
			}
			if err := os.WriteFile(files[0], []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if !moved {
				b.git(b.bare, "update-ref", "refs/heads/main", b.base)
			}
			again, err := b.scm.MergePullRequest(keyed, q)
			if err != nil || again.GetMergedRevision() != first.GetMergedRevision() || again.GetAlreadyMerged() || b.tip("main") != first.GetMergedRevision() {
				t.Errorf("got %v, %v; main is %s, want %s", again, err, b.tip("main"), first.GetMergedRevision())
			}
		})
	}
}

// A git that was killed leaves a lock on the ref, and a receiver a quarantine.
func TestLeftoversOfAKilledWriter(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{})
	ctx := context.Background()
	head := b.branch("numi/x", "src/a.go", "package a\n")
	pr := b.open(ctx, "numi/x", head)
	lock := filepath.Join(b.bare, "refs/heads/main.lock")
	if err := os.WriteFile(lock, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := b.scm.MergePullRequest(ctx, b.mergeRequest(pr, head))
	b.wants(err, codes.Unavailable)
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(lock, old, old); err != nil {
		t.Fatal(err)
	}
	states, _ := filepath.Glob(filepath.Join(b.data, "*.forge"))
	quarantine := filepath.Join(states[0], "quarantine-1", "pack")
	if err := os.MkdirAll(quarantine, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := b.scm.MergePullRequest(ctx, b.mergeRequest(pr, head)); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(quarantine); err == nil {
		t.Error("the quarantine was left")
	}
}

func TestMergeOnMovedBaseAndConflict(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{})
	ctx := context.Background()
	one := b.branch("one", "src/a.go", "package a // one\n")
	two := b.branch("two", "src/c.go", "package a // two\n")
	three := b.branch("three", "src/a.go", "package a // three\n")
	p1, p2, p3 := b.open(ctx, "one", one), b.open(ctx, "two", two), b.open(ctx, "three", three)
	if _, err := b.scm.MergePullRequest(ctx, b.mergeRequest(p1, one)); err != nil {
		t.Fatal(err)
	}
	_, err := b.scm.MergePullRequest(ctx, b.mergeRequest(p2, two))
	b.wants(err, codes.FailedPrecondition) // the tree is not the verified one
	_, err = b.scm.MergePullRequest(ctx, b.mergeRequest(p3, three))
	b.wants(err, codes.FailedPrecondition)
	for id, want := range map[string]scmv1.Mergeability{p2.GetId(): scmv1.Mergeability_MERGEABILITY_CLEAN, p3.GetId(): scmv1.Mergeability_MERGEABILITY_CONFLICT} {
		a, err := b.scm.GetPullRequestStatus(ctx, &scmv1.GetPullRequestStatusRequest{Repository: repo, PullRequest: id})
		if err != nil || a.GetMergeability() != want {
			t.Errorf("pull request %s: %v, %v, want %v", id, a.GetMergeability(), err, want)
		}
	}
	if count := b.git(b.bare, "rev-list", "--count", b.base+"..main"); count != "2" {
		t.Errorf("%s commits on main", count)
	}
}

// P-055, P-075: the answer is what a refused push shows, and follows a change.
func TestP055P075ProtectionIsWhatIsEnforced(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{})
	ctx := context.Background()
	get := func(branch string) *scmv1.BranchProtection {
		t.Helper()
		a, err := b.scm.GetBranchProtection(ctx, &scmv1.GetBranchProtectionRequest{Repository: repo, Branch: branch})
		if err != nil {
			t.Fatal(err)
		}
		return a.GetProtection()
	}
	push := func(branch string) bool {
		b.file("pushed", branch)
		b.git(b.work, "add", "-A")
		b.git(b.work, "commit", "-q", "--allow-empty", "-m", "push")
		_, err := b.tryGit(b.work, nil, "push", "-q", "origin", "HEAD:refs/heads/"+branch)
		return err == nil
	}
	if p := get("main"); !p.GetProtected() || p.GetDirectPush() || p.GetForcePush() || push("main") {
		t.Errorf("main: %v, and the push must be refused", p)
	}
	b.branch("free", "src/a.go", "package a\n")
	if p := get("free"); p.GetProtected() || !p.GetDirectPush() {
		t.Errorf("free: %v", p)
	}
	if err := b.forge.Protect(ctx, repo, "main", &git.Protection{DirectPush: true, RequiredApprovals: 2}); err != nil {
		t.Fatal(err)
	}
	b.git(b.work, "checkout", "-q", "--detach", b.base)
	if p := get("main"); !p.GetDirectPush() || p.GetRequiredApprovals() != 2 || !push("main") {
		t.Errorf("main: %v, and the push must pass", p)
	}
	if _, err := b.tryGit(b.work, nil, "push", "-q", "-f", "origin", b.base+":refs/heads/main"); err == nil {
		t.Error("a rewrite of main passed")
	}
	if _, err := b.tryGit(b.work, nil, "push", "-q", "origin", ":refs/heads/main"); err == nil {
		t.Error("a deletion of main passed")
	}
}

// P-059: checks and reviews of the pull request, and what protection makes of
// them.
func TestP059StatusReviewsAndChecks(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{Protection: map[string]git.Protection{"main": {RequiredApprovals: 1, RequiredChecks: []string{"build"}, DismissStaleApprovals: true, ProtectedPaths: []string{"infra/"}}}})
	ctx := plugintest.With(context.Background(), func(a *pluginv1.ActionContext) { a.ActorPrincipal = "agent:fake" })
	head := b.branch("numi/x", "src/a.go", "package a\n")
	pr := b.open(ctx, "numi/x", head)
	state := func() *scmv1.GetPullRequestStatusResponse {
		t.Helper()
		a, err := b.scm.GetPullRequestStatus(ctx, &scmv1.GetPullRequestStatusRequest{Repository: repo, PullRequest: pr.GetId()})
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	refused := func(why string) {
		t.Helper()
		_, err := b.scm.MergePullRequest(ctx, b.mergeRequest(pr, head))
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), why) {
			t.Errorf("merge: %v, want a refusal that says %q", err, why)
		}
		if m := state().GetMergeability(); m != scmv1.Mergeability_MERGEABILITY_BLOCKED {
			t.Errorf("mergeability %v", m)
		}
	}
	refused("0 of 1 approvals")
	b.wants(b.forge.Review(ctx, repo, pr.GetId(), "agent:fake", "approved"), codes.PermissionDenied)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(b.forge.Review(ctx, repo, pr.GetId(), "human:alice", "approved"))
	refused(`check "build" is missing`)
	must(b.forge.Report(ctx, repo, head, "build", "failed", ""))
	refused(`check "build" is failed`)
	must(b.forge.Report(ctx, repo, head, "build", "succeeded", "https://ci.example/1"))
	must(b.forge.Review(ctx, repo, pr.GetId(), "human:bob", "changes_requested"))
	refused("human:bob asks for changes")
	must(b.forge.Review(ctx, repo, pr.GetId(), "human:bob", "dismissed"))
	a := state()
	if a.GetMergeability() != scmv1.Mergeability_MERGEABILITY_CLEAN || len(a.GetReviews()) != 3 || len(a.GetChecks()) != 1 || a.GetChecks()[0].GetState() != scmv1.CheckState_CHECK_STATE_SUCCEEDED {
		t.Errorf("got %v", a)
	}
	b.file("infra/x", "y")
	next := b.commit("infra")
	if _, err := b.scm.UpdatePullRequest(ctx, &scmv1.UpdatePullRequestRequest{Repository: repo, PullRequest: pr.GetId(), HeadRevision: next, ExpectedHeadRevision: head, Objects: b.pack(next, head)}); err != nil {
		t.Fatal(err)
	}
	head = next
	refused("0 of 1 approvals") // the approval was of the former head
	must(b.forge.Review(ctx, repo, pr.GetId(), "human:alice", "approved"))
	must(b.forge.Report(ctx, repo, head, "build", "succeeded", ""))
	refused("protected path")
}

func TestArchivedRefusesWrites(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{Archived: true})
	_, err := b.scm.CreateBranch(context.Background(), &scmv1.CreateBranchRequest{Repository: repo, Branch: "x", Revision: b.base})
	b.wants(err, codes.FailedPrecondition)
	if _, err := b.scm.ListBranches(context.Background(), &scmv1.ListBranchesRequest{Repository: repo, PageSize: 10}); err != nil {
		t.Error(err)
	}
}

// Nothing that a repository configures runs.
func TestRepositoryConfigurationIsNotRun(t *testing.T) {
	b := newBench(t, git.RepositoryConfig{})
	canary := filepath.Join(t.TempDir(), "canary")
	b.file(".gitattributes", "* diff=evil filter=evil merge=evil\n")
	head := b.commit("attributes")
	b.git(b.work, "push", "-q", "origin", "HEAD:refs/heads/attr")
	for _, setting := range []string{"diff.evil.textconv", "diff.evil.command", "filter.evil.clean", "filter.evil.smudge", "merge.evil.driver", "core.fsmonitor", "core.pager", "core.sshCommand", "gpg.program"} {
		b.git(b.bare, "config", setting, "touch "+canary)
	}
	for _, hook := range []string{"reference-transaction", "update", "post-update"} {
		if err := os.MkdirAll(filepath.Join(b.bare, "hooks"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(b.bare, "hooks", hook), []byte("#!/bin/sh\ntouch "+canary+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	ctx := context.Background()
	change := b.branch("numi/x", "src/a.go", "package a\n")
	pr := b.open(ctx, "numi/x", change)
	if _, err := b.scm.MergePullRequest(ctx, b.mergeRequest(pr, change)); err != nil {
		t.Fatal(err)
	}
	for _, query := range []string{"package", "touch"} {
		if _, err := b.scm.SearchCode(ctx, &scmv1.SearchCodeRequest{Repository: repo, Revision: head, Query: query, MaxResults: 5}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(canary); err == nil {
		t.Error("a configured command ran")
	}
}

func TestNamesNeverMeet(t *testing.T) {
	seen := map[string]string{}
	for _, name := range []string{"a", "A", "a/b", "a%2fb", "a.b", ".git", "..", "ä", "a b", strings.Repeat("x", 256), strings.Repeat("x", 255) + "y", strings.Repeat("/", 256)} {
		dir := git.Directory("/d", name)
		if other, ok := seen[strings.ToLower(dir)]; ok || filepath.Dir(dir) != "/d" || len(filepath.Base(dir)) > 200 {
			t.Errorf("%q lies at %q, as does %q", name, dir, other)
		}
		seen[strings.ToLower(dir)] = name
	}
}
