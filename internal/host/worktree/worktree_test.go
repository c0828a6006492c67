package worktree_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/host/worktree"
)

// source is a repository of a user's, made with plain git.
type source struct {
	*testing.T
	dir string
}

func newSource(t *testing.T, args ...string) source {
	t.Helper()
	s := source{t, filepath.Join(t.TempDir(), "source")}
	s.git(append([]string{"init", "-q", "--initial-branch=main"}, append(args, s.dir)...)...)
	return s
}

func (s source) try(args ...string) (string, error) {
	cmd := exec.Command("git", args...)
	cmd.Dir = s.dir
	if _, err := os.Stat(s.dir); err != nil {
		cmd.Dir = "/"
	}
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.com",
		"GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.com", "GIT_AUTHOR_DATE=@1700000000 +0000", "GIT_COMMITTER_DATE=@1700000000 +0000", "GIT_ALLOW_PROTOCOL=file")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("git %v: %w: %s", args, err, stderr.String())
	}
	return strings.TrimSuffix(string(out), "\n"), err
}

func (s source) git(args ...string) string {
	s.Helper()
	out, err := s.try(args...)
	if err != nil {
		s.Fatal(err)
	}
	return out
}

func (s source) file(name, content string, mode os.FileMode) {
	s.Helper()
	path := filepath.Join(s.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		s.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		s.Fatal(err)
	}
}

func (s source) commit() string {
	s.Helper()
	s.git("add", "-A")
	s.git("commit", "-q", "-m", "work")
	return s.git("rev-parse", "HEAD")
}

// fingerprint is every file of the source with its content and time.
func (s source) fingerprint() string {
	s.Helper()
	var all []string
	err := filepath.Walk(s.dir, func(path string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		line := fmt.Sprintf("%s %v %d %v", path, info.Mode(), info.Size(), info.ModTime())
		all = append(all, line)
		return nil
	})
	if err != nil {
		s.Fatal(err)
	}
	sort.Strings(all)
	return strings.Join(all, "\n")
}

// rich is a repository with everything a work tree can hold.
func rich(t *testing.T, args ...string) (source, string) {
	s := newSource(t, args...)
	s.file("README.md", "# hello\n", 0o644)
	s.file("bin/run", "#!/bin/sh\n", 0o755)
	s.file("odd\xff name", "odd", 0o644)
	s.file("src/main.go", "package main\n", 0o644)
	s.file("src/deep/er/x.txt", "x\n", 0o644)
	s.file(".gitignore", "/out/\n*.log\n!keep.log\n", 0o644)
	s.file("src/.gitignore", "gen\n", 0o644)
	s.file(".github/workflows/ci.yml", "on: push\n", 0o644)
	s.file("big.bin", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", 0o644)
	s.file(".gitattributes", "*.bin filter=lfs diff=lfs merge=lfs\n", 0o644)
	if err := os.Symlink("src/main.go", filepath.Join(s.dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(s.dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	id := strings.Repeat("1", 40)
	if len(args) > 0 {
		id = strings.Repeat("1", 64)
	}
	s.git("update-index", "--add", "--cacheinfo", "160000,"+id+",sub")
	return s, s.commit()
}

// open imports the source and opens a store with its base, as the forge and the
// host do it: by a pack without history.
func open(t *testing.T, s source, revision string) *worktree.Store {
	t.Helper()
	bare := filepath.Join(t.TempDir(), "mirror.git")
	if _, err := worktree.Import(t.Context(), s.dir, bare, ""); err != nil {
		t.Fatal(err)
	}
	store, err := worktree.Open(t.Context(), filepath.Join(t.TempDir(), "objects.git"))
	if err != nil {
		t.Fatal(err)
	}
	addBase(t, store, bare, revision)
	return store
}

func addBase(t *testing.T, store *worktree.Store, bare, revision string) {
	t.Helper()
	list, err := exec.Command("git", "--git-dir="+bare, "rev-list", "--objects", "--no-walk", "--no-object-names", revision).Output()
	if err != nil {
		t.Fatal(err)
	}
	pack := exec.Command("git", "--git-dir="+bare, "pack-objects", "--stdout", "-q")
	pack.Stdin = bytes.NewReader(list)
	out, err := pack.Output()
	if err != nil {
		t.Fatal(err)
	}
	if err := store.AddBase(t.Context(), bytes.NewReader(out), revision); err != nil {
		t.Fatal(err)
	}
}

func rules(allowed ...string) worktree.Rules {
	return worktree.Rules{
		Scope:   pathscope.Scope{Allowed: allowed},
		Author:  worktree.Identity{Name: "agent:fake", Email: "agent@numinance.invalid"},
		When:    time.Unix(1800000000, 0),
		Message: "Do the work",
	}
}

// row is one entry of a tar.
type row struct {
	name, body string
	kind       byte
	mode       int64
	link       string
}

func archive(t testing.TB, rows []row) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, r := range rows {
		h := &tar.Header{Name: r.name, Typeflag: r.kind, Mode: r.mode, Linkname: r.link, Size: int64(len(r.body)), Format: tar.FormatPAX}
		if r.kind == 0 {
			h.Typeflag = tar.TypeReg
			if strings.HasSuffix(r.name, "/") {
				h.Typeflag = tar.TypeDir
			}
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, r.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// rows lays a revision out as a sandbox exports it.
func rows(t *testing.T, s *worktree.Store, revision string) []row {
	t.Helper()
	all := []row{{name: "./"}}
	for e, err := range s.Entries(t.Context(), revision) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Mode == worktree.ModeSubmodule {
			all = append(all, row{name: "./" + e.Path + "/"})
			continue
		}
		r, err := e.Open()
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		switch e.Mode {
		case worktree.ModeSymlink:
			all = append(all, row{name: "./" + e.Path, kind: tar.TypeSymlink, link: string(body)})
		case worktree.ModeExecutable:
			all = append(all, row{name: "./" + e.Path, body: string(body), mode: 0o755})
		default:
			all = append(all, row{name: "./" + e.Path, body: string(body)})
		}
	}
	return all
}

// with never shares memory with all, which several cases start from.
func with(all []row, more ...row) []row { return slices.Concat(all, more) }

func without(all []row, name string) []row {
	var out []row
	for _, r := range all {
		if r.name != name {
			out = append(out, r)
		}
	}
	return out
}

func diff(t *testing.T, s *worktree.Store, base string, all []row, r worktree.Rules) worktree.Candidate {
	t.Helper()
	c, err := s.Diff(t.Context(), base, bytes.NewReader(archive(t, all)), r)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func kinds(c worktree.Candidate) map[string]string {
	m := map[string]string{}
	for _, change := range c.Changes {
		m[change.Path] = change.Kind.String()
	}
	return m
}

func TestRoundTripChangesNothing(t *testing.T) {
	for _, args := range [][]string{nil, {"--object-format=sha256"}} {
		t.Run(fmt.Sprint(args), func(t *testing.T) {
			s, base := rich(t, args...)
			store := open(t, s, base)
			all := rows(t, store, base)
			if len(all) != 13 {
				t.Fatalf("%d entries", len(all))
			}
			c := diff(t, store, base, all, rules())
			if !c.Empty() || !c.Clean() || c.Commit != base || c.Tree != s.git("rev-parse", base+"^{tree}") {
				t.Errorf("got %+v", c)
			}
		})
	}
}

func TestCandidateIsWhatGitWouldMake(t *testing.T) {
	for _, args := range [][]string{nil, {"--object-format=sha256"}} {
		t.Run(fmt.Sprint(args), func(t *testing.T) {
			s, base := rich(t, args...)
			store := open(t, s, base)
			all := without(without(rows(t, store, base), "./src/main.go"), "./src/deep/er/x.txt")
			large := strings.Repeat("large\n", 1<<18)
			all = append(all,
				row{name: "./src/main.go", body: "package main // changed\n", mode: 0o755},
				row{name: "./src/new/a", body: large},
				row{name: "./src/l", kind: tar.TypeSymlink, link: "../README.md"},
				row{name: "./src/hard", kind: tar.TypeLink, link: "./src/new/a"},
				row{name: "./src.txt", body: "sorts before src/"},
				row{name: "./out/obj", body: "ignored"}, row{name: "./src/gen/z", body: "ignored"}, row{name: "./a.log", body: "ignored"},
				row{name: "./src/keep.log", body: "kept"},
				row{name: "./.git/"}, row{name: "./.git/config", body: "[core]\nfsmonitor=evil"}, row{name: "./.git/hooks/pre-commit", body: "evil", mode: 0o755},
				row{name: "./cache/deps/x/.git/config", body: "scratch"},
			)
			r := rules("src/", "src.txt")
			r.Scratch = []string{"cache/"}
			c := diff(t, store, base, all, r)
			if !c.Clean() {
				t.Fatalf("violations %v", c.Violations)
			}
			want := map[string]string{"src/main.go": "modified", "src/new/a": "added", "src/l": "added", "src/hard": "added", "src.txt": "added", "src/keep.log": "added", "src/deep/er/x.txt": "deleted"}
			if d := cmp.Diff(want, kinds(c)); d != "" {
				t.Error(d)
			}
			if c.Dropped.Ignored != 3 || c.Dropped.Git != 3 || c.Dropped.Scratch != 1 {
				t.Errorf("dropped %+v", c.Dropped)
			}
			// The same by plain git.
			s.file("src/main.go", "package main // changed\n", 0o644)
			if err := os.Chmod(filepath.Join(s.dir, "src/main.go"), 0o755); err != nil {
				t.Fatal(err)
			}
			s.file("src/new/a", large, 0o644)
			s.file("src/hard", large, 0o644)
			s.file("src.txt", "sorts before src/", 0o644)
			s.file("src/keep.log", "kept", 0o644)
			if err := os.Symlink("../README.md", filepath.Join(s.dir, "src/l")); err != nil {
				t.Fatal(err)
			}
			if err := os.RemoveAll(filepath.Join(s.dir, "src/deep")); err != nil {
				t.Fatal(err)
			}
			s.git("add", "-A")
			if tree := s.git("write-tree"); tree != c.Tree {
				t.Errorf("tree %s, git makes %s", c.Tree, tree)
			}
			// The same snapshot gives the same commit.
			if again := diff(t, store, base, all, r); again.Commit != c.Commit {
				t.Errorf("commit %s, then %s", c.Commit, again.Commit)
			}
			var pack bytes.Buffer
			if err := store.Pack(t.Context(), &pack, c.Commit, base); err != nil {
				t.Fatal(err)
			}
			index := exec.Command("git", "index-pack", "--stdin", "--strict")
			index.Dir, index.Stdin = s.dir, &pack
			if out, err := index.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if got := s.git("log", "-1", "--format=%an|%ct|%P|%s", c.Commit); got != "agent:fake|1800000000|"+base+"|Do the work" {
				t.Errorf("commit %q", got)
			}
			if out, err := s.try("fsck", "--strict", c.Commit); err != nil {
				t.Errorf("%v %s", err, out)
			}
		})
	}
}

// H-045, P-116: what lies outside the scope, on protected paths and in places
// that only look harmless is refused by the host's own diff.
func TestH045HostileTreesAreRefused(t *testing.T) {
	s, base := rich(t)
	store := open(t, s, base)
	all := rows(t, store, base)
	cases := []struct {
		name string
		rows []row
		want string // path with the violation
	}{
		{"outside the scope", with(all, row{name: "./other/x", body: "x"}), "other/x"},
		{"deleted outside the scope", without(all, "./README.md"), "README.md"},
		{"workflow", with(without(all, "./.github/workflows/ci.yml"), row{name: "./.github/workflows/ci.yml", body: "evil"}), ".github/workflows/ci.yml"},
		{"new workflow", with(all, row{name: "./.github/workflows/new.yml", body: "evil"}), ".github/workflows/new.yml"},
		{"workflow in another case", with(all, row{name: "./.GitHub/Workflows/new.yml", body: "evil"}), ".GitHub/Workflows/new.yml"},
		{"workflows as a link", with(without(all, "./.github/workflows/ci.yml"), row{name: "./.github/workflows", kind: tar.TypeSymlink, link: "src"}), ".github/workflows"},
		{"nested repository", with(all, row{name: "./src/v/.git/hooks/x", body: "evil"}), "src/v/.git/hooks/x"},
		{"gitdir file", with(all, row{name: "./src/v/.git", body: "gitdir: /etc"}), "src/v/.git"},
		{".GIT", with(all, row{name: "./.GIT/config", body: "evil"}), ".GIT/config"},
		{"git~1", with(all, row{name: "./git~1/config", body: "evil"}), "git~1/config"},
		{".git with an invisible letter", with(all, row{name: "./.g\u200cit/config", body: "evil"}), ".g\u200cit/config"},
		{"empty .GIT", with(all, row{name: "./src/.GIT/"}), "src/.GIT"},
		{"absolute link", with(all, row{name: "./src/x", kind: tar.TypeSymlink, link: "/etc/shadow"}), "src/x"},
		{"climbing link", with(all, row{name: "./src/x", kind: tar.TypeSymlink, link: "../../etc/shadow"}), "src/x"},
		{"link that returns", with(all, row{name: "./src/x", kind: tar.TypeSymlink, link: "../../source/src"}), "src/x"},
		{"fifo", with(all, row{name: "./src/x", kind: tar.TypeFifo}), "src/x"},
		{"device", with(all, row{name: "./src/x", kind: tar.TypeChar}), "src/x"},
		{"hard link to what is thrown away", with(all, row{name: "./.git/x", body: "x"}, row{name: "./src/x", kind: tar.TypeLink, link: "./.git/x"}), "src/x"},
		{"case collision", with(all, row{name: "./src/Main.go", body: "x"}), "src/Main.go"},
		{"directory collision", with(all, row{name: "./Src/other", body: "x"}), "Src/other"},
		{"two new names that collide", with(all, row{name: "./src/\u00e9", body: "x"}, row{name: "./src/e\u0301", body: "x"}), "src/\u00e9"},
		{"not UTF-8", with(all, row{name: "./src/\xfe", body: "x"}), "src/\xfe"},
		{"control character", with(all, row{name: "./src/a\nb", body: "x"}), "src/a\nb"},
		{"backslash", with(all, row{name: `./src/..\..\x`, body: "x"}), `src/..\..\x`},
		{"into a submodule", with(all, row{name: "./sub/x", body: "x"}), "sub/x"},
		{"file for a submodule", with(without(all, "./sub/"), row{name: "./sub", body: "x"}), "sub"},
		{"directory for a file", with(without(all, "./README.md"), row{name: "./README.md/x", body: "x"}), "README.md"},
		{"mode outside the scope", with(without(all, "./README.md"), row{name: "./README.md", body: "# hello\n", mode: 0o755}), "README.md"},
		{"ignore rules of the agent hide nothing", with(without(all, "./src/.gitignore"), row{name: "./src/.gitignore", body: "*\n"}, row{name: "./evil/x", body: "x"}), "evil/x"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got := diff(t, store, base, c.rows, rules("src/", "Src/", ".GIT/", "git~1/", "sub/", "sub"))
			for _, v := range got.Violations {
				if v.Path == c.want && v.Reason != "" {
					return
				}
			}
			t.Errorf("no violation of %q: %+v", c.want, got)
		})
	}
}

// A tar that no honest sandbox writes is refused as a whole.
func TestHostileTars(t *testing.T) {
	s, base := rich(t)
	store := open(t, s, base)
	all := rows(t, store, base)
	cases := map[string][]row{
		"climbs":               with(all, row{name: "./../x", body: "x"}),
		"climbs inside":        with(all, row{name: "./src/../../x", body: "x"}),
		"absolute":             with(all, row{name: "/etc/passwd", body: "x"}),
		"no ./":                with(all, row{name: "src/x", body: "x"}),
		"double slash":         with(all, row{name: "./src//x", body: "x"}),
		"dot segment":          with(all, row{name: "./src/./x", body: "x"}),
		"twice":                with(all, row{name: "./README.md", body: "x"}),
		"twice as a directory": with(all, row{name: "./README.md/"}),
		"below a file":         with(all, row{name: "./README.md/x", body: "x"}),
		"below a link":         with(all, row{name: "./link/x", body: "x"}),
		"file above a file":    with(all, row{name: "./src", body: "x"}),
		"hard link out":        with(all, row{name: "./src/x", kind: tar.TypeLink, link: "/etc/passwd"}),
		"hard link climbs":     with(all, row{name: "./src/x", kind: tar.TypeLink, link: "./../etc/passwd"}),
		"hard link to nothing": with(all, row{name: "./src/x", kind: tar.TypeLink, link: "./nope"}),
		"hard link to itself":  with(all, row{name: "./src/x", kind: tar.TypeLink, link: "./src/x"}),
		"hard link to a link":  with(all, row{name: "./src/x", kind: tar.TypeLink, link: "./link"}),
		"root is a file":       {{name: "./", kind: tar.TypeSymlink, link: "/"}},
		"long name":            with(all, row{name: "./" + strings.Repeat("a/", 2100) + "a", body: "x"}),
		"long segment":         with(all, row{name: "./" + strings.Repeat("a", 300), body: "x"}),
		"deep":                 with(all, row{name: "./" + strings.Repeat("a/", 200) + "a", body: "x"}),
		"too large":            with(all, row{name: "./src/x", body: strings.Repeat("x", 1<<16)}),
		"too many":             with(all, many(200)...),
		"too large in all":     with(all, row{name: "./src/x", body: strings.Repeat("x", 5000)}, row{name: "./src/y", body: strings.Repeat("x", 5000)}, row{name: "./src/z", body: strings.Repeat("x", 5000)}),
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			r := rules("src/")
			r.MaxEntries, r.MaxFileBytes, r.MaxBytes = 100, 10_000, 14_000
			got, err := store.Diff(t.Context(), base, bytes.NewReader(archive(t, c)), r)
			if !errors.Is(err, worktree.ErrSnapshot) {
				t.Errorf("got %+v, %v; want ErrSnapshot", got, err)
			}
		})
	}
	whole := archive(t, all)
	for name, raw := range map[string][]byte{"no tar": []byte("hello"), "empty": nil, "cut": whole[:len(whole)-1024], "cut in a file": whole[:1600], "followed by another": slices.Concat(whole, whole)} {
		if _, err := store.Diff(t.Context(), base, bytes.NewReader(raw), rules("**")); !errors.Is(err, worktree.ErrSnapshot) {
			t.Errorf("%s: got %v, want ErrSnapshot", name, err)
		}
	}
	if _, err := store.Diff(t.Context(), base, bytes.NewReader(slices.Concat(whole, make([]byte, 9216))), rules()); err != nil {
		t.Errorf("padding: %v", err)
	}
}

func many(n int) []row {
	var out []row
	for i := range n {
		out = append(out, row{name: fmt.Sprintf("./src/%d", i), body: "x"})
	}
	return out
}

func TestImportLeavesTheSourceAlone(t *testing.T) {
	s, base := rich(t)
	s.file("README.md", "# changed\n", 0o644)
	s.file("untracked", "x", 0o644)
	canary := filepath.Join(t.TempDir(), "canary")
	for _, setting := range []string{"core.fsmonitor", "filter.lfs.clean", "filter.lfs.smudge", "filter.lfs.process", "uploadpack.packObjectsHook", "core.sshCommand", "core.alternateRefsCommand", "diff.lfs.textconv"} {
		s.git("config", setting, "touch "+canary)
	}
	for _, hook := range []string{"post-checkout", "reference-transaction", "pre-auto-gc"} {
		s.file(".git/hooks/"+hook, "#!/bin/sh\ntouch "+canary+"\n", 0o755)
	}
	before := s.fingerprint()
	bare := filepath.Join(t.TempDir(), "x.git")
	got, err := worktree.Import(t.Context(), s.dir, bare, "")
	if err != nil {
		t.Fatal(err)
	}
	if got.Branch != "main" || got.Revision != base || got.Uncommitted != 2 || got.Format != "sha1" {
		t.Errorf("got %+v", got)
	}
	if after := s.fingerprint(); after != before {
		t.Errorf("the source changed:\n%s", cmp.Diff(before, after))
	}
	mirror := source{t, bare}
	if mirror.git("rev-parse", "refs/heads/main") != base || mirror.git("symbolic-ref", "HEAD") != "refs/heads/main" {
		t.Error("the mirror has another main")
	}
	mirror.git("fsck", "--strict")
	if _, err := os.Stat(filepath.Join(bare, "hooks")); err == nil {
		t.Error("the mirror has hooks")
	}
	if _, err := worktree.Import(t.Context(), s.dir, bare, ""); err == nil {
		t.Error("an import over a repository passed")
	}

	// Back again: one branch, nothing else.
	s.git("config", "--unset", "core.fsmonitor")
	s.git("config", "--remove-section", "filter.lfs")
	next := mirror.git("commit-tree", "-p", base, "-m", "next", base+"^{tree}")
	status := s.git("status", "--porcelain")
	if err := os.Remove(canary); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for range 2 {
		if err := worktree.PushBack(t.Context(), bare, s.dir, next, "numi/chg-1"); err != nil {
			t.Fatal(err)
		}
	}
	if s.git("rev-parse", "numi/chg-1") != next || s.git("rev-parse", "main") != base || s.git("status", "--porcelain") != status {
		t.Error("more than the one branch changed")
	}
	if err := worktree.PushBack(t.Context(), bare, s.dir, base, "numi/chg-1"); err == nil {
		t.Error("a branch was moved")
	}
	if err := worktree.PushBack(t.Context(), bare, s.dir, next, "main"); err == nil {
		t.Error("main was pushed")
	}
}

func TestImportKinds(t *testing.T) {
	ctx := context.Background()
	s, base := rich(t)
	dest := func() string { return filepath.Join(t.TempDir(), "x.git") }
	bare := dest()
	s.git("clone", "-q", "--bare", s.dir, bare)
	shallow := filepath.Join(t.TempDir(), "shallow")
	s.file("more", "x", 0o644)
	tip := s.commit()
	s.git("clone", "-q", "--depth=1", "file://"+s.dir, shallow)
	shared := filepath.Join(t.TempDir(), "shared")
	s.git("clone", "-q", "--shared", s.dir, shared)
	linked := filepath.Join(t.TempDir(), "linked")
	s.git("worktree", "add", "-q", "-b", "other", linked, base)
	for name, c := range map[string]struct{ path, branch, want string }{
		"bare": {bare, "", base}, "shallow": {shallow, "", tip}, "alternates": {shared, "main", tip}, "linked work tree": {linked, "", base}, "named branch": {s.dir, "other", base},
	} {
		to := dest()
		got, err := worktree.Import(ctx, c.path, to, c.branch)
		if err != nil || got.Revision != c.want || got.Uncommitted != 0 {
			t.Errorf("%s: %+v, %v; want %s", name, got, err, c.want)
			continue
		}
		source{t, to}.git("fsck", "--strict")
	}
}

func TestImportFaults(t *testing.T) {
	empty := newSource(t)
	s, base := rich(t)
	s.git("branch", "second")
	detached := filepath.Join(t.TempDir(), "detached")
	s.git("worktree", "add", "-q", "--detach", detached, base)
	damaged, _ := rich(t)
	loose, err := filepath.Glob(filepath.Join(damaged.dir, ".git/objects/??/*"))
	if err != nil || len(loose) == 0 {
		t.Fatal("no objects")
	}
	blob := damaged.git("rev-parse", "HEAD:README.md")
	if err := os.Remove(filepath.Join(damaged.dir, ".git/objects", blob[:2], blob[2:])); err != nil {
		t.Fatal(err)
	}
	plain := t.TempDir()
	for name, c := range map[string]struct {
		path, branch string
		want         error
		says         string
	}{
		"no repository":    {plain, "", worktree.ErrNotRepository, "git init"},
		"below its top":    {filepath.Join(s.dir, "src"), "", worktree.ErrNotRepository, "top directory"},
		"a file":           {filepath.Join(s.dir, "README.md"), "", worktree.ErrNotRepository, "file"},
		"absent":           {filepath.Join(plain, "x"), "", os.ErrNotExist, "no such file"},
		"no commit":        {empty.dir, "", worktree.ErrNoCommits, "commit something"},
		"no branch":        {s.dir, "nope", worktree.ErrNoBranch, "second"},
		"detached":         {detached, "", nil, "no branch is checked out"},
		"option as branch": {s.dir, "--help", nil, "branch"},
		"damaged":          {damaged.dir, "", worktree.ErrMissing, "git fsck"},
	} {
		to := filepath.Join(t.TempDir(), "x.git")
		_, err := worktree.Import(t.Context(), c.path, to, c.branch)
		if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %v, want %v that says %q", name, err, c.want, c.says)
		}
		if _, err := os.Stat(to); err == nil {
			t.Errorf("%s: something was left at the destination", name)
		}
	}
}

func TestRebase(t *testing.T) {
	s := newSource(t)
	s.file("a", "1\n2\n3\n4\n5\n6\n7\n", 0o644)
	s.file("b", "b\n", 0o644)
	base := s.commit()
	store := open(t, s, base)
	mine := diff(t, store, base, []row{{name: "./"}, {name: "./a", body: "one\n2\n3\n4\n5\n6\n7\n"}, {name: "./b", body: "b\n"}}, rules("a"))

	next := func(a string) string {
		t.Helper()
		s.git("checkout", "-q", "-B", "main", base)
		s.file("a", a, 0o644)
		s.file("c", "c\n", 0o644)
		revision := s.commit()
		bare := filepath.Join(t.TempDir(), "x.git")
		if _, err := worktree.Import(t.Context(), s.dir, bare, ""); err != nil {
			t.Fatal(err)
		}
		addBase(t, store, bare, revision)
		return revision
	}
	clean := next("1\n2\n3\n4\n5\n6\nseven\n")
	got, err := store.Rebase(t.Context(), mine.Commit, clean)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := store.Rebase(t.Context(), mine.Commit, clean); err != nil || again != got {
		t.Errorf("again: %s, %v; want %s", again, err, got)
	}
	c, err := store.Compare(t.Context(), clean, got, pathscope.Scope{Allowed: []string{"a"}})
	if err != nil || !c.Clean() || len(c.Changes) != 1 || c.Changes[0].Path != "a" {
		t.Errorf("got %+v, %v", c, err)
	}
	if refused, err := store.Compare(t.Context(), clean, got, pathscope.Scope{Allowed: []string{"b"}}); err != nil || refused.Clean() {
		t.Errorf("got %+v, %v; want a violation", refused, err)
	}
	_, err = store.Rebase(t.Context(), mine.Commit, next("uno\n2\n3\n4\n5\n6\n7\n"))
	var conflict *worktree.ConflictError
	if !errors.As(err, &conflict) || len(conflict.Paths) != 1 || conflict.Paths[0] != "a" {
		t.Errorf("got %v, want a conflict in a", err)
	}
	same, err := store.Rebase(t.Context(), mine.Commit, base)
	if err != nil || same != mine.Commit {
		t.Errorf("got %s, %v", same, err)
	}
}

// Work units are put on top of one another; when the base moves, all of them
// move.
func TestRebaseMovesEveryUnit(t *testing.T) {
	s := newSource(t)
	s.file("a", "a\n", 0o644)
	s.file("b", "b\n", 0o644)
	base := s.commit()
	store := open(t, s, base)
	one := diff(t, store, base, []row{{name: "./"}, {name: "./a", body: "one\n"}, {name: "./b", body: "b\n"}}, rules("a"))
	two := diff(t, store, base, []row{{name: "./"}, {name: "./a", body: "a\n"}, {name: "./b", body: "two\n"}}, rules("b"))
	both, err := store.Rebase(t.Context(), two.Commit, one.Commit)
	if err != nil {
		t.Fatal(err)
	}
	s.file("c", "c\n", 0o644)
	next := s.commit()
	bare := filepath.Join(t.TempDir(), "x.git")
	if _, err := worktree.Import(t.Context(), s.dir, bare, ""); err != nil {
		t.Fatal(err)
	}
	addBase(t, store, bare, next)
	got, err := store.Rebase(t.Context(), both, next)
	if err != nil {
		t.Fatal(err)
	}
	c, err := store.Compare(t.Context(), next, got, pathscope.Scope{Allowed: []string{"a", "b"}})
	if d := cmp.Diff(map[string]string{"a": "modified", "b": "modified"}, kinds(c)); err != nil || d != "" || !c.Clean() {
		t.Errorf("%v\n%s", err, d)
	}
	var pack bytes.Buffer
	if err := store.Pack(t.Context(), &pack, got, next); err != nil {
		t.Fatal(err)
	}
	index := exec.Command("git", "index-pack", "--stdin", "--strict")
	index.Dir, index.Stdin = s.dir, &pack
	if out, err := index.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if n := s.git("rev-list", "--count", next+".."+got); n != "2" {
		t.Errorf("%s commits, want one per unit", n)
	}
}

func TestStoreRefusesDangerousPacks(t *testing.T) {
	s := newSource(t)
	s.file("x", "x", 0o644)
	base := s.commit()
	store := open(t, s, base)
	blob := s.git("rev-parse", "HEAD:x")
	evil := exec.Command("git", "mktree")
	evil.Dir, evil.Stdin = s.dir, strings.NewReader("100644 blob "+blob+"\t.GIT\n")
	out, err := evil.Output()
	if err != nil {
		t.Fatal(err)
	}
	commit := s.git("commit-tree", "-p", base, "-m", "evil", strings.TrimSpace(string(out)))
	pack := exec.Command("git", "pack-objects", "--revs", "--stdout", "-q")
	pack.Dir, pack.Stdin = s.dir, strings.NewReader(commit+"\n^"+base+"\n")
	raw, err := pack.Output()
	if err != nil {
		t.Fatal(err)
	}
	if err := store.AddPack(t.Context(), bytes.NewReader(raw)); err == nil {
		t.Error("a tree that holds .GIT was taken")
	}
	if store.Has(t.Context(), commit) || !store.Has(t.Context(), base) || store.Has(t.Context(), "main") {
		t.Error("Has is wrong")
	}
	for range store.Entries(t.Context(), base) {
		break // ends the process behind it
	}
	for _, err := range store.Entries(t.Context(), "main") {
		if err == nil {
			t.Error("a branch name was taken for a revision")
		}
	}
}

func FuzzSnapshot(f *testing.F) {
	f.Add(archive(f, []row{{name: "./"}, {name: "./a", body: "x"}, {name: "./b/c", kind: tar.TypeSymlink, link: "../a"}}))
	f.Add(archive(f, []row{{name: "./../x", body: "x"}}))
	f.Add([]byte("no tar"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		worktree.CheckSnapshot(t, raw)
	})
}
