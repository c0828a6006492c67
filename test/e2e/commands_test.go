package e2e_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"
)

// fixture holds what most scripts start from: a repository with a check that
// wants the file done.txt.
var fixture = map[string]string{
	"README.md":                "A widget.\n",
	"check.sh":                 "test -f done.txt\n",
	".github/workflows/ci.yml": "on: push\n",
}

// git runs git in dir with a fixed person and clock.
func git(dir string, args ...string) (string, error) {
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1",
		"GIT_AUTHOR_NAME=Ann", "GIT_AUTHOR_EMAIL=ann@example.com", "GIT_COMMITTER_NAME=Ann", "GIT_COMMITTER_EMAIL=ann@example.com")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// makeRepository writes the fixture to dir and commits it.
func makeRepository(dir string) error {
	for name, text := range fixture {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	for _, args := range [][]string{{"init", "-q", "-b", "main"}, {"add", "-A"}, {"commit", "-q", "-m", "Begin"}} {
		if _, err := git(dir, args...); err != nil {
			return err
		}
	}
	return nil
}

// repository is: repository DIR.
func repository(ts *testscript.TestScript, neg bool, args []string) {
	ts.Check(makeRepository(ts.MkAbs(args[0])))
}

// listing is: listing DIR FILE. It writes every entry of a directory with mode,
// size, time of change and content, and the refs, so that two can be compared.
func listing(ts *testscript.TestScript, neg bool, args []string) {
	dir := ts.MkAbs(args[0])
	var lines []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := e.Info()
		if err != nil {
			return err
		}
		sum := ""
		if fi.Mode().IsRegular() {
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			sum = fmt.Sprintf("%x", sha256.Sum256(b))
		}
		rel, err := filepath.Rel(dir, path)
		lines = append(lines, fmt.Sprintf("%q %v %d %d %s", rel, fi.Mode(), fi.Size(), fi.ModTime().UnixNano(), sum))
		return err
	})
	ts.Check(err)
	slices.Sort(lines)
	refs, err := git(dir, "for-each-ref")
	ts.Check(err)
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), []byte(strings.Join(lines, "\n")+"\n"+refs+"\n"), 0o644))
}

// big is: big FILE BYTES [TEXT]. It writes a file that compresses badly enough,
// or the text over and over.
func big(ts *testscript.TestScript, neg bool, args []string) {
	size, err := strconv.ParseInt(args[1], 10, 64)
	ts.Check(err)
	f, err := os.Create(ts.MkAbs(args[0]))
	ts.Check(err)
	defer f.Close()
	piece := strings.Repeat("0123456789abcdef", 4096)
	for n := int64(0); n < size; n += int64(len(piece)) {
		_, err := f.WriteString(piece[:min(int64(len(piece)), size-n)])
		ts.Check(err)
	}
	ts.Check(f.Close())
}

// members is: members FILE KEY,KEY… It wants the object to have exactly these.
func members(ts *testscript.TestScript, neg bool, args []string) {
	var object map[string]json.RawMessage
	ts.Check(json.Unmarshal([]byte(ts.ReadFile(args[0])), &object))
	want := strings.Split(args[1], ",")
	var got []string
	for k := range object {
		got = append(got, k)
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		ts.Fatalf("%s has the members\n%v, want\n%v", args[0], got, want)
	}
}

// forge is: forge PRS MERGES. It counts at the far side: the pull requests that
// the one repository of the embedded code host has, and the merges on its main
// branch.
func forge(ts *testscript.TestScript, neg bool, args []string) {
	got, err := countAtForge(ts.Getenv("NUMI_HOME"))
	ts.Check(err)
	want := fmt.Sprintf("%s pull requests, %s merges", args[0], args[1])
	if got := fmt.Sprintf("%d pull requests, %d merges", got.pulls, got.merges); got != want {
		ts.Fatalf("the forge has %s, want %s", got, want)
	}
}

type counted struct{ pulls, merges, branches int }

// countAtForge looks at all repositories of a state directory's code host.
func countAtForge(home string) (c counted, err error) {
	root := filepath.Join(home, "providers", "scm-git")
	pulls, err := filepath.Glob(filepath.Join(root, "*.forge", "pulls", "*.json"))
	if err != nil {
		return c, err
	}
	c.pulls = len(pulls)
	repositories, err := filepath.Glob(filepath.Join(root, "*.git"))
	if err != nil {
		return c, err
	}
	for _, path := range repositories {
		branches, err := git("/", "-c", "safe.directory=*", "--git-dir", path, "for-each-ref", "--format=%(refname)", "refs/heads/numi/")
		if err != nil {
			return c, err
		}
		c.branches += len(strings.Fields(branches))
		merges, err := git("/", "-c", "safe.directory=*", "--git-dir", path, "rev-list", "--count", "--merges", "refs/heads/main")
		if err != nil {
			return c, err
		}
		n, err := strconv.Atoi(merges)
		if err != nil {
			return c, err
		}
		c.merges += n
	}
	return c, nil
}
