package profile_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/numinance/numinance/internal/contexts/profile"
	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/plugins/scm/git"
	"github.com/numinance/numinance/sdk/plugintest"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
)

const repo = "acme/widget"

// documents governs repo and nothing else, and notes the revision it was asked
// about.
type documents struct{ revision string }

func (d *documents) Governing(_ context.Context, repository, revision string) (profile.Governing, error) {
	d.revision = revision
	if repository != repo {
		return profile.Governing{}, errors.New("no repository document names it")
	}
	return profile.Governing{Policy: digest.Of([]byte("policy")), Needs: change.Needs{Reviewers: 1}}, nil
}

// counting notes the verbs that were called.
type counting struct {
	grpc.ClientConnInterface
	verbs *[]string
}

func (c counting) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	*c.verbs = append(*c.verbs, method[strings.LastIndex(method, "/")+1:])
	return c.ClientConnInterface.Invoke(ctx, method, args, reply, opts...)
}

func run(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.com",
		"GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.com")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func forge(t *testing.T, c git.RepositoryConfig, names ...string) (*plugintest.Conn, *plugintest.Host, string) {
	t.Helper()
	data, work := t.TempDir(), filepath.Join(t.TempDir(), "work")
	host := &plugintest.Host{}
	base := ""
	config := git.Config{}
	for _, name := range names {
		bare := git.Directory(data, name)
		run(t, "/", "init", "-q", "--bare", "--initial-branch=main", bare)
		c.Name = name
		config.Repositories = append(config.Repositories, c)
		if base == "" {
			run(t, "/", "clone", "-q", bare, work)
			run(t, work, "checkout", "-q", "-B", "main")
			if err := os.WriteFile(filepath.Join(work, "README.md"), []byte("# widget\n"), 0o644); err != nil {
				t.Fatal(err)
			}
			run(t, work, "add", "-A")
			run(t, work, "commit", "-q", "-m", "base")
			base = run(t, work, "rev-parse", "HEAD")
		}
		run(t, work, "push", "-q", bare, "main")
	}
	raw, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	return plugintest.Serve(t, git.Plugin(), plugintest.Options{Config: raw, DataDir: data, Host: host}), host, base
}

func TestP064BaseRevisionThroughGetRepositoryAlone(t *testing.T) {
	conn, host, base := forge(t, git.RepositoryConfig{}, repo)
	var verbs []string
	docs := &documents{}
	a, err := profile.New(counting{conn, &verbs}, docs).Admit(t.Context(), profile.In{Repository: repo})
	if err != nil {
		t.Fatal(err)
	}
	if a.BaseRevision != base || a.BaseBranch != "main" || docs.revision != base || a.Policy == "" || a.Needs.Reviewers != 1 {
		t.Fatalf("admission %+v, documents read at %s, want %s", a, docs.revision, base)
	}
	if len(verbs) != 1 || verbs[0] != "GetRepository" {
		t.Fatalf("verbs %q", verbs)
	}
	pack, ok := host.Blob(&pluginv1.BlobRef{Digest: string(a.Objects.Digest), SizeBytes: a.Objects.Size})
	if !ok || !strings.HasPrefix(string(pack), "PACK") {
		t.Fatalf("objects %+v are not a pack", a.Objects)
	}
}

func TestAdmitRefuses(t *testing.T) {
	conn, _, _ := forge(t, git.RepositoryConfig{}, repo, "acme/ungoverned")
	for name, in := range map[string]profile.In{
		"no documents":  {Repository: "acme/ungoverned"},
		"no repository": {Repository: "acme/none"},
		"no branch":     {Repository: repo, Branch: "gone"},
	} {
		if a, err := profile.New(conn, &documents{}).Admit(t.Context(), in); err == nil {
			t.Errorf("%s: admitted %+v", name, a)
		}
	}
	archived, _, _ := forge(t, git.RepositoryConfig{Archived: true}, repo)
	_, err := profile.New(archived, &documents{}).Admit(t.Context(), profile.In{Repository: repo})
	var f *change.Fault
	if !errors.As(err, &f) || f.Class != change.Denied {
		t.Errorf("archived: %v", err)
	}
}
