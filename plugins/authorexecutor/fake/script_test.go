package fake_test

import (
	"strings"
	"testing"

	"github.com/numinance/numinance/plugins/authorexecutor/fake"
)

func TestParseErrorsNameTheLine(t *testing.T) {
	for name, c := range map[string]struct{ script, want string }{
		"empty":              {"", "empty"},
		"unknown key":        {"steps: []\nstep: []\n", "line 2"},
		"unknown step":       {"steps:\n- say: {text: a}\n- copy: {path: a}\n", "line 3"},
		"two keys":           {"steps:\n- say: {text: a}\n  expect: denied\n", "line 2"},
		"unknown field":      {"steps:\n- say: {text: a, loud: true}\n", "line 2"},
		"repeated field":     {"steps:\n- say: {text: a, text: b}\n", "line 2"},
		"number as text":     {"steps:\n- write: {path: a, content: 1}\n", "quote it"},
		"no content":         {"steps:\n- write: {path: a}\n", "content"},
		"bad expect":         {"steps:\n- say: {text: a, expect: no}\n", "line 2"},
		"expect on crash":    {"steps:\n- crash: {expect: denied}\n", "line 2"},
		"bad url":            {"steps:\n- fetch: {url: 'ftp://x/'}\n", "http"},
		"password in url":    {"steps:\n- fetch: {url: 'http://a:b@x/'}\n", "password"},
		"bad exit":           {"steps:\n- run: {argv: [a], exit: 256}\n", "0 to 255"},
		"empty argv":         {"steps:\n- run: {argv: []}\n", "empty"},
		"bad duration":       {"steps:\n- stall: {duration: soon}\n", "line 2"},
		"both":               {"steps: []\nwork_units: [{id: a}]\n", "not both"},
		"unit twice":         {"work_units: [{id: a}, {id: a}]\n", "two work units"},
		"unit order":         {"work_units: [{id: a, depends_on: [b]}, {id: b}]\n", "depends on"},
		"verdict":            {"reviewer: {verdict: maybe}\n", "verdict"},
		"alias":              {"steps:\n- say: {text: &a hi}\n- say: {text: *a}\n", "line 3"},
		"two documents":      {"steps: []\n---\nsteps: []\n", "more than one"},
		"rename":             {"steps:\n- patch: {diff: \"diff --git a/a b/b\\nrename from a\\nrename to b\\n\"}\n", "rename"},
		"patch without file": {"steps:\n- patch: {diff: \"hello\\n\"}\n", "no file"},
		"cut patch":          {"steps:\n- patch: {diff: \"--- a/a\\n+++ b/a\\n@@ -1,2 +1,2 @@\\n a\\n\"}\n", "cut off"},
		"quoted name":        {"steps:\n- patch: {diff: \"--- a/a\\n+++ \\\"b/\\\\303\\\"\\n@@ -1 +1 @@\\n-a\\n+b\\n\"}\n", "unquoted"},
		"too many events":    {"steps:\n" + strings.Repeat("- say: {text: a}\n", 256), "1023 events"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := fake.Parse([]byte(c.script))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestParsePatchIntoFiles(t *testing.T) {
	diff := `A mail about it.

diff --git a/a.go b/a.go
index 1..2 100644
--- a/a.go
+++ b/a.go
@@ -1,2 +1,3 @@ func
 a
--- not a header
+++ neither
+x
diff --git a/new.go b/new.go
new file mode 100644
--- /dev/null
+++ b/new.go
@@ -0,0 +1 @@
+n
\ No newline at end of file
diff --git a/old.go b/old.go
deleted file mode 100644
--- a/old.go
+++ /dev/null
@@ -1 +0,0 @@
-o
`
	s, err := fake.Parse([]byte("steps:\n- patch:\n    diff: |\n      " + strings.ReplaceAll(strings.TrimSuffix(diff, "\n"), "\n", "\n      ") + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	files := s.Steps[0].Files
	if len(files) != 3 || files[0].Path != "a.go" || files[1].Path != "new.go" || files[2].Path != "old.go" || !files[2].Delete || files[0].Delete {
		t.Fatalf("files %+v", files)
	}
	if strings.Contains(string(files[0].Diff), "mail") || !strings.HasSuffix(string(files[1].Diff), "end of file\n") {
		t.Errorf("diffs %q, %q", files[0].Diff, files[1].Diff)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("steps:\n- write: {path: a, content: b, expect: denied, anyway: true}\n- stall: {duration: 3s}\n"))
	f.Add([]byte("work_units: [{id: a, steps: [{run: {argv: [x], exit: nonzero}}]}]\nreviewer: {verdict: approve}\n"))
	f.Add([]byte("steps:\n- patch: {diff: \"--- a/a\\n+++ b/a\\n@@ -1 +1 @@\\n-a\\n+b\\n\"}\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := fake.Parse(b)
		if err != nil {
			return
		}
		for _, step := range s.Steps {
			if step.Op == fake.OpNone || step.Line < 1 {
				t.Errorf("step %+v", step)
			}
			for _, file := range step.Files {
				if file.Path == "" || len(file.Diff) == 0 {
					t.Errorf("patch %+v", file)
				}
			}
		}
	})
}
