package command_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	verifierv1 "github.com/numinance/numinance/gen/numinance/ports/verifier/v1"
	"github.com/numinance/numinance/plugins/verifier/command"
	"github.com/numinance/numinance/sdk/plugintest"
)

const tree = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"

// bench is a verifier with a work root that the test fills.
type bench struct {
	*testing.T
	root string
	host *plugintest.Host
	conn *plugintest.Conn
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{T: t, root: t.TempDir(), host: &plugintest.Host{}}
	settings, err := json.Marshal(command.Settings{WorkRoot: b.root, Environment: map[string]string{
		"PATH": os.Getenv("PATH"), "HOME": t.TempDir(), "GOCACHE": goCache(t), "GOFLAGS": "-mod=mod", "GOPROXY": "off",
	}})
	if err != nil {
		t.Fatal(err)
	}
	b.conn = plugintest.Serve(t, command.Plugin(), plugintest.Options{Host: b.host, Config: settings})
	return b
}

func goCache(t *testing.T) string {
	t.Helper()
	dir, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	if c := os.Getenv("GOCACHE"); c != "" {
		return c
	}
	return filepath.Join(dir, "go-build")
}

func (b *bench) file(name, content string) {
	b.Helper()
	path := filepath.Join(b.root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		b.Fatal(err)
	}
}

func (b *bench) run(config string, baseline *verifierv1.VerifierReport) (*verifierv1.RunResponse, error) {
	b.Helper()
	r := &verifierv1.RunRequest{
		ChangeId: "chg-test", RunId: "run-test", Layer: "checks", CandidateTree: tree,
		ConfigRef: b.host.Put([]byte(config), "application/json"),
	}
	if baseline != nil {
		raw, err := protojson.Marshal(baseline)
		if err != nil {
			b.Fatal(err)
		}
		r.BaselineRef = b.host.Put(raw, "application/json")
	}
	return verifierv1.NewVerifierServiceClient(b.conn).Run(context.Background(), r)
}

func (b *bench) must(config string, baseline *verifierv1.VerifierReport) *verifierv1.RunResponse {
	b.Helper()
	a, err := b.run(config, baseline)
	if err != nil {
		b.Fatal(err)
	}
	return a
}

func rules(a *verifierv1.RunResponse) string {
	var out []string
	for _, f := range a.GetFindings() {
		if f.GetSeverity() == verifierv1.Severity_SEVERITY_ERROR {
			out = append(out, f.GetRule())
		}
	}
	return strings.Join(out, ",")
}

// A check that found violations succeeded (P-171); one that did not complete
// failed and has no findings (P-172).
func TestExitStatus(t *testing.T) {
	for _, c := range []struct {
		name   string
		check  string
		errors uint32
		code   codes.Code
	}{
		{"passes", `{"name":"c","argv":["true"]}`, 0, codes.OK},
		{"finds", `{"name":"c","command":"echo bad news >&2; exit 3"}`, 1, codes.OK},
		{"missing program", `{"name":"c","argv":["no-such-program-here"]}`, 0, codes.FailedPrecondition},
		{"missing in shell", `{"name":"c","command":"no-such-program-here --x 'y'"}`, 0, codes.FailedPrecondition},
		{"not executable", `{"name":"c","command":"cd / && /etc/passwd"}`, 0, codes.FailedPrecondition},
		{"crash", `{"name":"c","command":"kill -SEGV $$"}`, 0, codes.Aborted},
		{"child crash", `{"name":"c","command":"sh -c 'kill -9 $$'; exit $?"}`, 0, codes.Aborted},
		{"hangs", `{"name":"c","argv":["sleep","60"],"timeout":"200ms"}`, 0, codes.DeadlineExceeded},
		{"pipeline shows its status", `{"name":"c","command":"false | cat"}`, 1, codes.OK},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			a, err := b.run(`{"checks":[`+c.check+`]}`, nil)
			if status.Code(err) != c.code {
				t.Fatalf("code %v (%v), want %v", status.Code(err), err, c.code)
			}
			if err != nil {
				return
			}
			if got := a.GetReport().GetErrors(); got != c.errors {
				t.Errorf("%d errors, want %d: %v", got, c.errors, a.GetFindings())
			}
			passed := a.GetReport().GetChecks()[0].GetOutcome() == verifierv1.CheckOutcome_CHECK_OUTCOME_PASSED
			if passed != (c.errors == 0) {
				t.Errorf("outcome %v with %d errors", a.GetReport().GetChecks()[0].GetOutcome(), c.errors)
			}
		})
	}
}

func TestConfigurationIsRefused(t *testing.T) {
	for name, config := range map[string]string{
		"no checks":       `{"checks":[]}`,
		"unknown key":     `{"checks":[{"name":"c","argv":["true"],"allow_failure":true}]}`,
		"both":            `{"checks":[{"name":"c","argv":["true"],"command":"true"}]}`,
		"neither":         `{"checks":[{"name":"c"}]}`,
		"twice":           `{"checks":[{"name":"c","argv":["true"]},{"name":"c","argv":["true"]}]}`,
		"masked":          `{"checks":[{"name":"c","command":"go vet ./... || true"}]}`,
		"masked by colon": `{"checks":[{"name":"c","command":"make lint||:"}]}`,
		"masked at end":   `{"checks":[{"name":"c","command":"make lint; true"}]}`,
		"report outside":  `{"checks":[{"name":"c","argv":["true"],"format":"junit","report":"../r.xml"}]}`,
		"format":          `{"checks":[{"name":"c","argv":["true"],"format":"tap"}]}`,
		"trailing":        `{"checks":[{"name":"c","argv":["true"]}]} {}`,
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := newBench(t).run(config, nil); status.Code(err) != codes.InvalidArgument {
				t.Errorf("got %v, want INVALID_ARGUMENT", err)
			}
		})
	}
}

const goMod = "module example.com/m\n\ngo 1.24\n"

const twoTests = `package m

import "testing"

func TestA(t *testing.T) {}
func TestB(t *testing.T) { t.Run("sub", func(t *testing.T) {}) }
`

const plainGoTest = `{"checks":[{"name":"test","command":"go test ./..."}]}`

// The counts of the base revision have to be reached, whatever a candidate does
// to look as if it had run its tests.
func TestFewerTestsThanBase(t *testing.T) {
	b := newBench(t)
	b.file("go.mod", goMod)
	b.file("m_test.go", twoTests)
	base := b.must(plainGoTest, nil).GetReport()
	if got := base.GetChecks()[0]; got.GetTestsRun() != 3 || base.GetErrors() != 0 {
		t.Fatalf("base: %v", base)
	}
	for name, content := range map[string]string{
		"prints PASS and exits 0": "package m\n\nimport (\n\t\"fmt\"\n\t\"os\"\n\t\"testing\"\n)\n\nfunc TestMain(m *testing.M) { fmt.Println(\"PASS\"); os.Exit(0) }\nfunc TestA(t *testing.T) {}\nfunc TestB(t *testing.T) {}\n",
		"removes a test":          "package m\n\nimport \"testing\"\n\nfunc TestA(t *testing.T) {}\n",
		"skips a test":            "package m\n\nimport \"testing\"\n\nfunc TestA(t *testing.T) { t.Skip() }\nfunc TestB(t *testing.T) { t.Run(\"sub\", func(t *testing.T) {}) }\n",
		"has no tests":            "package m\n",
	} {
		t.Run(name, func(t *testing.T) {
			b.T = t
			b.file("m_test.go", content)
			a := b.must(plainGoTest, base)
			if rules(a) != "tests-removed" {
				t.Errorf("findings %v, want one of rule tests-removed", a.GetFindings())
			}
		})
	}
	t.Run("same tests pass", func(t *testing.T) {
		b.T = t
		b.file("m_test.go", twoTests+"func TestC(t *testing.T) {}\n")
		if a := b.must(plainGoTest, base); a.GetReport().GetErrors() != 0 {
			t.Errorf("findings %v", a.GetFindings())
		}
	})
}

func TestGoTestFailures(t *testing.T) {
	for name, c := range map[string]struct{ code, want string }{
		"failing test":   {"package m\n\nimport \"testing\"\n\nfunc TestA(t *testing.T) { t.Fatal(\"five is not six\") }\n", "five is not six"},
		"panics":         {"package m\n\nimport \"testing\"\n\nfunc TestA(t *testing.T) { panic(\"boom\") }\n", "TestA"},
		"does not build": {"package m\n\nfunc f() { return 1 }\n", "too many return values"},
		"exits early":    {"package m\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nfunc TestA(t *testing.T) { os.Exit(1) }\n", "TestA"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.file("go.mod", goMod)
			b.file("m_test.go", c.code)
			a := b.must(plainGoTest, nil)
			if a.GetReport().GetErrors() == 0 || !strings.Contains(fmt.Sprint(a.GetFindings()), c.want) {
				t.Errorf("findings %v, want one with %q", a.GetFindings(), c.want)
			}
		})
	}
}

// Four candidates that look good and are not: a known bad one, a removed check
// file, a suppression, and a masked exit status.
func TestAnchorCandidates(t *testing.T) {
	t.Run("a target that masks its status is a redefined check", func(t *testing.T) {
		b := newBench(t)
		config := `{"checks":[{"name":"lint","argv":["make","lint"]}]}`
		b.file("Makefile", "lint:\n\ttrue\n")
		base := b.must(config, nil).GetReport()
		b.file("Makefile", "lint:\n\tfalse || true\n")
		if a := b.must(config, base); rules(a) != "check-redefined" {
			t.Errorf("findings %v", a.GetFindings())
		}
	})
	t.Run("only the scripts of package.json define a check", func(t *testing.T) {
		b := newBench(t)
		config := `{"checks":[{"name":"npm","argv":["true"],"format":"exit","inputs":["package.json#scripts"]}]}`
		b.file("package.json", `{"scripts":{"test":"node t.js"},"version":"1"}`)
		base := b.must(config, nil).GetReport()
		b.file("package.json", `{"version":"2", "scripts":{ "test":"node t.js"}}`)
		if a := b.must(config, base); rules(a) != "" {
			t.Errorf("a new version is a finding: %v", a.GetFindings())
		}
		b.file("package.json", `{"version":"2","scripts":{"test":"exit 0"}}`)
		if a := b.must(config, base); rules(a) != "check-redefined" {
			t.Errorf("findings %v", a.GetFindings())
		}
	})
	t.Run("a suppression in SARIF does not count (P-170)", func(t *testing.T) {
		b := newBench(t)
		b.file("out.sarif", `{"version":"2.1.0","runs":[{"tool":{"driver":{"name":"t"}},"results":[{"ruleId":"R1","level":"error","message":{"text":"bad"},"suppressions":[{"kind":"inSource"}]}]}]}`)
		if a := b.must(`{"checks":[{"name":"s","argv":["cat","out.sarif"],"format":"sarif"}]}`, nil); rules(a) != "R1" {
			t.Errorf("findings %v", a.GetFindings())
		}
	})
	t.Run("a removed test script is not passed", func(t *testing.T) {
		b := newBench(t)
		_, err := b.run(`{"checks":[{"name":"t","argv":["./test.sh"]}]}`, nil)
		if status.Code(err) != codes.FailedPrecondition {
			t.Errorf("got %v", err)
		}
	})
}

func TestJUnitReport(t *testing.T) {
	const write = `{"checks":[{"name":"j","command":"cp good.xml out.xml","format":"junit","report":"out.xml"}]}`
	good := `<?xml version="1.0"?><testsuites><testsuite name="s"><testcase classname="c" name="a"/><testcase name="b" file="b.py" line="7"><failure message="no">trace</failure></testcase><testcase name="d"><skipped/></testcase></testsuite></testsuites>`
	b := newBench(t)
	b.file("good.xml", good)
	a := b.must(write, nil)
	c := a.GetReport().GetChecks()[0]
	if c.GetTestsRun() != 2 || c.GetTestsFailed() != 1 || c.GetTestsSkipped() != 1 || a.GetFindings()[0].GetPath() != "b.py" || a.GetFindings()[0].GetLine() != 7 {
		t.Errorf("got %v", a)
	}
	t.Run("a report that lies in the candidate is not read", func(t *testing.T) {
		b := newBench(t)
		b.file("out.xml", `<testsuite><testcase name="a"/></testsuite>`)
		_, err := b.run(`{"checks":[{"name":"j","argv":["true"],"format":"junit","report":"out.xml"}]}`, nil)
		if status.Code(err) != codes.FailedPrecondition {
			t.Errorf("got %v, want FAILED_PRECONDITION", err)
		}
	})
	t.Run("a link out of the work root is not followed", func(t *testing.T) {
		b := newBench(t)
		outside := filepath.Join(t.TempDir(), "r.xml")
		if err := os.WriteFile(outside, []byte(`<testsuite><testcase name="a"/></testsuite>`), 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := b.run(`{"checks":[{"name":"j","argv":["ln","-s",`+quote(outside)+`,"out.xml"],"format":"junit","report":"out.xml"}]}`, nil)
		if status.Code(err) != codes.FailedPrecondition {
			t.Errorf("got %v, want FAILED_PRECONDITION", err)
		}
	})
}

func quote(s string) string { b, _ := json.Marshal(s); return string(b) }

// The receipt is compact and holds no finding (P-175); the same key gets the
// same answer.
func TestReceipt(t *testing.T) {
	b := newBench(t)
	ctx, result := plugintest.Capture(plugintest.Key(context.Background(), "key-1"))
	request := &verifierv1.RunRequest{
		ChangeId: "chg-test", RunId: "run-test", Layer: "checks", CandidateTree: tree,
		ConfigRef: b.host.Put([]byte(`{"checks":[{"name":"c","command":"echo secret-finding; exit 1"}]}`), ""),
	}
	client := verifierv1.NewVerifierServiceClient(b.conn)
	first, err := client.Run(ctx, request)
	if err != nil {
		t.Fatal(err)
	}
	ev := result.GetEvidence()
	if len(ev) != 1 || ev[0].GetType() != "VerifierReport" || len(ev[0].GetPayload()) > 2048 || strings.Contains(string(ev[0].GetPayload()), "secret-finding") {
		t.Errorf("evidence %v", ev)
	}
	second, err := client.Run(ctx, request)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := first.GetReport().GetChecks()[0].GetDuration().AsDuration(), second.GetReport().GetChecks()[0].GetDuration().AsDuration(); a != b || len(b2s(result.GetEvidence())) == 0 {
		t.Errorf("the same key ran again: %v, %v", a, b)
	}
	if got := len(b.host.Spawned()); got != 1 {
		t.Errorf("%d processes for one key", got)
	}
	if u := b.host.Spawned()[0].GetUser(); u != pluginv1.ProcessUser_PROCESS_USER_CANDIDATE {
		t.Errorf("the check ran as %v", u)
	}
}

func b2s(e []*pluginv1.Evidence) string {
	if len(e) == 0 {
		return ""
	}
	return string(e[0].GetPayload())
}

func TestManyFindingsTravelAsBlob(t *testing.T) {
	b := newBench(t)
	var xml strings.Builder
	xml.WriteString("<testsuite>")
	for range 150 {
		xml.WriteString(`<testcase name="x"><error>e</error></testcase>`)
	}
	xml.WriteString("</testsuite>")
	b.file("in.xml", xml.String())
	a := b.must(`{"checks":[{"name":"j","argv":["cat","in.xml"],"format":"junit"}]}`, nil)
	if len(a.GetFindings()) != 100 || a.GetReport().GetErrors() != 150 {
		t.Fatalf("%d findings, %d errors", len(a.GetFindings()), a.GetReport().GetErrors())
	}
	all, ok := b.host.Blob(a.GetAllFindings())
	if !ok || strings.Count(string(all), "\n") != 150 {
		t.Error(errors.New("the blob does not hold all findings"))
	}
}
