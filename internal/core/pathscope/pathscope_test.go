package pathscope_test

import (
	"strings"
	"testing"

	"github.com/numinance/numinance/internal/core/pathscope"
	"pgregory.net/rapid"
)

func TestCheckMatchesWholeSegments(t *testing.T) {
	s := pathscope.Scope{
		Allowed: []string{"a/b.go", "src/", "lib/**"},
		Denied:  []string{"src/gen/", "**/secret.txt"},
	}
	cases := []struct {
		path string
		want bool
	}{
		{"a/b.go", true}, {"a/b.gox", false}, {"a/b.go/c", false}, {"A/b.go", false},
		{"src/x.go", true}, {"src/deep/x.go", true}, {"src", false}, {"srcs/x.go", false},
		{"lib/x", true}, {"library/x", false},
		{"src/gen/x.go", false}, {"src/GEN/x.go", false}, {"src/gen", false}, {"src/generator/x.go", true},
		{"src/secret.txt", false}, {"src/a/Secret.TXT", false},
		{"other", false}, {"README.md", false},
	}
	for _, c := range cases {
		got, reason := s.Check(c.path)
		if got != c.want {
			t.Errorf("Check(%q) = %v (%s), want %v", c.path, got, reason, c.want)
		}
		if !got && reason == "" {
			t.Errorf("Check(%q) refuses without a reason", c.path)
		}
	}
}

func TestZeroScopeAllowsNothing(t *testing.T) {
	if ok, _ := (pathscope.Scope{}).Check("a"); ok {
		t.Fatal("the zero scope allowed a path")
	}
}

func TestMalformedPathsRefused(t *testing.T) {
	all := pathscope.Scope{Allowed: []string{"**"}}
	for _, path := range []string{
		"", "/etc/passwd", "../x", "a/../b", "a/..", ".", "a/./b", "a//b", "a/", `a\b`, "a\x00b", "a\nb",
		"a\x7fb", "a\u0085b", "a\u202eb", "a\u2028b", "a\xffb", strings.Repeat("a/", 2100) + "a",
	} {
		if ok, _ := all.Check(path); ok {
			t.Errorf("Check(%q) allowed", path)
		}
		if path != "a/" && !all.IsProtected(path) {
			t.Errorf("IsProtected(%q) = false for a malformed path", path)
		}
	}
	for _, path := range []string{"[id].tsx", "a b", "ä/ö.go", "..a", "a..b", "日本/語.txt"} {
		if ok, reason := all.Check(path); !ok {
			t.Errorf("Check(%q) refused: %s", path, reason)
		}
	}
}

// H-045, P-116: policy, CI definitions, IAM and workflow files are protected
// in every spelling a file system could take for theirs, whatever is allowed.
func TestH045ProtectedInEverySpelling(t *testing.T) {
	all := pathscope.Scope{Allowed: []string{"**"}}
	for _, path := range []string{
		".github/workflows/release.yml", ".github/workflows", ".github", ".GitHub/Workflows/x.yml",
		".github/workflows./x.yml", ".github/workflows::$INDEX_ALLOCATION/x.yml",
		".gitlab-ci.yml", "Jenkinsfile", "svc/jenkinsfile", ".ci/run", ".ci",
		".git/hooks/pre-commit", "vendor/sub/.git/hooks/pre-commit", "vendor/sub/.git", ".GIT/config",
		".g\u200cit/config", ".git\ufe0f/config", "git~1/config", "GIT~1/x", ".git ./x", ".git. /x", ".git\u00a0/x",
		"\uff0egit/config", ".ｇｉｔ/config",
		"CODEOWNERS", ".github/codeowners", "docs/CodeOwners",
		".numinance/policy.yaml", "rules/a.cedar", "rules/A.CEDAR", "rules/a.rego",
		"iam/roles.json", "iam", "infra/iam/x.tf", "x/iam.tf", ".gitmodules",
	} {
		if ok, _ := all.Check(path); ok {
			t.Errorf("Check(%q) allowed", path)
		}
	}
	for _, path := range []string{".github/workflows/a.yml", "a/.git", ".GITLAB-CI.YML", "iam/x"} {
		if !all.IsProtected(path) {
			t.Errorf("IsProtected(%q) = false", path)
		}
	}
	if all.IsProtected(".github") || !all.HoldsProtected(".github") {
		t.Error(".github is no protected entry but holds one")
	}
	for _, path := range []string{".github/ISSUE_TEMPLATE.md", ".gitignore", ".gitattributes", "src/iamb.go", "codeowners.md", "workflows/x.yml", "git~1x"} {
		if ok, reason := all.Check(path); !ok {
			t.Errorf("Check(%q) refused: %s", path, reason)
		}
	}
}

func TestMalformedEntriesFailClosed(t *testing.T) {
	for _, s := range []pathscope.Scope{
		{Allowed: []string{"src/*.go"}}, {Allowed: []string{"/src/"}}, {Allowed: []string{"**/x"}}, {Allowed: []string{""}},
		{Allowed: []string{"**"}, Denied: []string{"a/*/b"}}, {Allowed: []string{"**"}, Protected: []string{"../x"}},
		{Allowed: []string{"**"}, Denied: []string{"**/*go"}}, {Allowed: []string{"**"}, Protected: []string{"**/a/b"}},
	} {
		if err := s.Validate(); err == nil {
			t.Errorf("%+v: Validate = nil", s)
		}
		if ok, _ := s.Check("src/a.go"); ok {
			t.Errorf("%+v: a malformed scope allowed a path", s)
		}
		if _, err := s.Narrow(pathscope.Scope{}); err == nil {
			t.Errorf("%+v: a malformed scope was narrowed", s)
		}
	}
}

var (
	segments = rapid.SampledFrom([]string{"a", "b", "A", "src", "gen", "x.go", ".git", ".github", "workflows", "iam"})
	paths    = rapid.Custom(func(t *rapid.T) string {
		return strings.Join(rapid.SliceOfN(segments, 1, 4).Draw(t, "segments"), "/")
	})
	allowedEntries = rapid.Custom(func(t *rapid.T) string {
		p := paths.Draw(t, "path")
		return rapid.SampledFrom([]string{p, p + "/", p + "/**", "**"}).Draw(t, "entry")
	})
	scopes = rapid.Custom(func(t *rapid.T) pathscope.Scope {
		return pathscope.Scope{
			Allowed:   rapid.SliceOfN(allowedEntries, 0, 4).Draw(t, "allowed"),
			Denied:    rapid.SliceOfN(allowedEntries, 0, 2).Draw(t, "denied"),
			Protected: rapid.SliceOfN(allowedEntries, 0, 2).Draw(t, "protected"),
		}
	})
)

func TestNarrowNeverWidens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := scopes.Draw(t, "start")
		now := start
		for range rapid.IntRange(1, 4).Draw(t, "steps") {
			next, err := now.Narrow(scopes.Draw(t, "to"))
			if err != nil {
				continue
			}
			now = next
		}
		path := paths.Draw(t, "path")
		if ok, _ := now.Check(path); ok {
			if was, reason := start.Check(path); !was {
				t.Fatalf("narrowing %+v to %+v gained %q (%s)", start, now, path, reason)
			}
		}
	})
}

func TestNarrowRefusesWider(t *testing.T) {
	s := pathscope.Scope{Allowed: []string{"src/", "a.go"}}
	for _, entry := range []string{"**", "srcs/", "a.go/", "a.go/**", "b.go", "Src/x"} {
		if _, err := s.Narrow(pathscope.Scope{Allowed: []string{entry}}); err == nil {
			t.Errorf("narrowed to the wider %q", entry)
		}
	}
	for _, entry := range []string{"src/", "src/**", "src/x/", "src/x.go", "a.go"} {
		if _, err := s.Narrow(pathscope.Scope{Allowed: []string{entry}}); err != nil {
			t.Errorf("not narrowed to %q: %v", entry, err)
		}
	}
}

func FuzzCheck(f *testing.F) {
	for _, seed := range []string{"src/a.go", ".git/config", "../x", "src/.GIT/x", "src/\u200c.git", "src/a\x00", ".ci", "src//"} {
		f.Add(seed)
	}
	s := pathscope.Scope{Allowed: []string{"src/"}}
	f.Fuzz(func(t *testing.T, path string) {
		ok, reason := s.Check(path)
		if ok == (reason != "") {
			t.Fatalf("Check(%q) = %v with reason %q", path, ok, reason)
		}
		if !ok {
			return
		}
		if !strings.HasPrefix(path, "src/") || strings.Contains(path, "\\") {
			t.Fatalf("Check(%q) allowed outside src/", path)
		}
		for segment := range strings.SplitSeq(path, "/") {
			if segment == "" || segment == "." || segment == ".." || strings.EqualFold(segment, ".git") {
				t.Fatalf("Check(%q) allowed the segment %q", path, segment)
			}
		}
		if s.IsProtected(path) || s.HoldsProtected(path) {
			t.Fatalf("Check(%q) allowed a protected path", path)
		}
	})
}
