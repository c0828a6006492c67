package sandbox

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/numinance/numinance/internal/core/pathscope"
)

// H-064: what a run may not change, and every directory above it, is root's;
// directories take new entries only where the scope does.
func TestOwnership_H064(t *testing.T) {
	files := []string{"README.md", "go.mod", "src/a.go", "src/sub/b.go", "src/CODEOWNERS", "lib/c.go", "lib/deep/d.go"}
	const (
		root, agent = "0:0", "1000:1000"
		plainDir    = " 755"
	)
	cases := []struct {
		name     string
		scope    pathscope.Scope
		readOnly bool
		want     map[string]string
	}{
		{"nothing allowed", pathscope.Scope{}, false, map[string]string{
			"./": root + plainDir, "./src/": root + plainDir, "./src/a.go": root + " 644", "./README.md": root + " 644",
		}},
		{"a directory with a protected file in it", pathscope.Scope{Allowed: []string{"src/"}}, false, map[string]string{
			"./": root + plainDir, "./src/": "0:1000 1775", "./src/a.go": agent + " 644", "./src/CODEOWNERS": root + " 644",
			"./src/sub/": agent + plainDir, "./lib/": root + plainDir, "./lib/c.go": root + " 644",
		}},
		{"a clean directory", pathscope.Scope{Allowed: []string{"lib/**"}}, false, map[string]string{
			"./": root + plainDir, "./lib/": agent + plainDir, "./lib/deep/": agent + plainDir, "./lib/c.go": agent + " 644", "./src/": root + plainDir,
		}},
		{"a protected directory inside an allowed one", pathscope.Scope{Allowed: []string{"lib/"}, Protected: []string{"lib/deep/"}}, false, map[string]string{
			"./lib/": "0:1000 1775", "./lib/deep/": root + plainDir, "./lib/deep/d.go": root + " 644", "./lib/c.go": agent + " 644",
		}},
		{"the whole tree", pathscope.Scope{Allowed: []string{"**"}}, false, map[string]string{
			"./": "0:1000 1775", "./README.md": agent + " 644", "./lib/": agent + plainDir, "./src/": "0:1000 1775",
			"./.github/": "0:1000 1775", "./.github/workflows/": root + plainDir, "./.numinance/": root + plainDir,
		}},
		{"a file that exists", pathscope.Scope{Allowed: []string{"lib/c.go"}}, false, map[string]string{
			"./lib/": root + plainDir, "./lib/c.go": agent + " 644", "./lib/deep/d.go": root + " 644",
		}},
		{"a file that does not exist", pathscope.Scope{Allowed: []string{"lib/new.go", "made/x.go"}}, false, map[string]string{
			"./lib/": "0:1000 1775", "./lib/c.go": root + " 644", "./made/": "0:1000 1775", "./": root + plainDir,
		}},
		{"a directory that does not exist", pathscope.Scope{Allowed: []string{"made/new/"}}, false, map[string]string{
			"./made/": root + plainDir, "./made/new/": agent + plainDir,
		}},
		{"a denied file in an allowed directory", pathscope.Scope{Allowed: []string{"lib/"}, Denied: []string{"lib/deep/d.go"}}, false, map[string]string{
			"./lib/": "0:1000 1775", "./lib/deep/": "0:1000 1775", "./lib/deep/d.go": root + " 644",
		}},
		{"read only", pathscope.Scope{Allowed: []string{"**"}}, true, map[string]string{
			"./": root + plainDir, "./README.md": root + " 644", "./src/": root + plainDir,
		}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			var buf bytes.Buffer
			if err := writeTree(&buf, listOf(files), tc.scope, tc.readOnly, 0); err != nil {
				t.Fatal(err)
			}
			got := map[string]string{}
			tr := tar.NewReader(&buf)
			for {
				h, err := tr.Next()
				if err == io.EOF {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				if _, ok := tc.want[h.Name]; ok {
					got[h.Name] = fmt.Sprintf("%d:%d %o", h.Uid, h.Gid, h.Mode)
				}
				if !strings.HasPrefix(h.Name, "./") {
					t.Errorf("entry %q does not begin with ./", h.Name)
				}
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func listOf(files []string) nodes {
	return func(yield func(node, error) bool) {
		for _, f := range files {
			n := node{path: f, size: 2, open: func() (io.Reader, error) { return strings.NewReader("x\n"), nil }}
			if !yield(n, nil) {
				return
			}
		}
	}
}

// P-165: a verifier's sandbox is thrown away, and tests write beside themselves;
// there the whole tree is the candidate's, by no scope.
func TestWholeTreeIsTheCandidates_P165(t *testing.T) {
	var buf bytes.Buffer
	if err := writeTree(&buf, listOf([]string{"go.mod", "pkg/a_test.go", ".github/workflows/ci.yml"}), pathscope.Scope{}, false, 1001); err != nil {
		t.Fatal(err)
	}
	entries := 0
	for r := tar.NewReader(&buf); ; entries++ {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 1001 || h.Gid != 1001 || h.Mode&0o200 == 0 {
			t.Errorf("%s belongs to %d:%d with mode %o", h.Name, h.Uid, h.Gid, h.Mode)
		}
	}
	if entries != 7 {
		t.Errorf("%d entries, want 3 files and 4 directories", entries)
	}
}
