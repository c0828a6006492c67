package archtest_test

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"testing"
)

const module = "github.com/numinance/numinance/"

// floor is one shelf or floor of the house. A package belongs to the floor with
// the longest matching prefix; a package without a floor is an error, so no
// folder is born unnoticed.
type floor struct {
	prefix string
	// may lists the prefixes of own packages it may import besides itself.
	may []string
	// bans lists standard and foreign packages it may not import.
	bans []string
	// alone means that packages of the floor do not import each other.
	alone bool
}

var pure = []string{"net", "net/http", "os", "os/exec", "database/sql", "google.golang.org/grpc", "syscall", "golang.org/x/sys/unix"}
var calm = []string{"net", "net/http", "os/exec", "database/sql", "syscall", "golang.org/x/sys/unix"}

var floors = []floor{
	{prefix: "gen"},
	{prefix: "sdk", may: []string{"gen"}},
	{prefix: "conformance", may: []string{"gen", "sdk"}},
	{prefix: "plugins", may: []string{"gen", "sdk"}, alone: true},
	{prefix: "internal/core", may: []string{"gen"}, bans: pure},
	{prefix: "internal/host", may: []string{"gen", "internal/core"}},
	{prefix: "internal/contexts", may: []string{"gen", "internal/core", "internal/host"}, bans: calm, alone: true},
	{prefix: "internal/orchestration", may: []string{"gen", "internal/core", "internal/host", "internal/contexts"}},
	{prefix: "internal/edge", may: []string{"gen", "internal/core", "internal/host", "internal/orchestration", "conformance"}},
	{prefix: "internal/daemon", may: []string{"gen", "sdk", "plugins", "internal/core", "internal/host", "internal/contexts", "internal/orchestration", "internal/edge"}},
	{prefix: "internal/archtest"},
	{prefix: "test/e2e"},
	{prefix: "internal/testing", may: []string{"gen", "sdk", "plugins", "internal"}},
	{prefix: "cmd/numi", may: []string{"internal", "plugins", "sdk"}},
	{prefix: "cmd/numi-sandbox"},
	{prefix: "cmd/numi-init", may: []string{"internal/host/bridge"}},
	{prefix: "cmd/numi-verify", may: []string{"internal/core"}},
}

type pkg struct {
	ImportPath string
	Doc        string
	Imports    []string
	GoFiles    []string
	Error      *struct{ Err string }
}

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Doc,Imports,GoFiles,Error", "./...")
	cmd.Dir = root(t)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []pkg
	dec := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("read go list: %v", err)
		}
		if p.Error != nil && len(p.GoFiles) > 0 {
			t.Errorf("%s: %s", p.ImportPath, p.Error.Err)
		}
		p.ImportPath = strings.TrimPrefix(p.ImportPath, module)
		all = append(all, p)
	}
	if len(all) < 10 {
		t.Fatalf("go list found %d packages; the law would pass on nothing", len(all))
	}
	return all
}

func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func under(path, prefix string) bool {
	return path == prefix || strings.HasPrefix(path, prefix+"/")
}

func floorOf(path string) (floor, bool) {
	best, found := floor{}, false
	for _, f := range floors {
		if under(path, f.prefix) && len(f.prefix) >= len(best.prefix) {
			best, found = f, true
		}
	}
	return best, found
}

// room is the folder of a floor that a package lives in: packages of one room
// may import each other where the floor's rooms stand alone.
func room(f floor, path string) string {
	rest := strings.TrimPrefix(strings.TrimPrefix(path, f.prefix), "/")
	parts := strings.Split(rest, "/")
	if f.prefix == "plugins" && len(parts) > 2 {
		parts = parts[:2]
	}
	if f.prefix == "internal/contexts" && len(parts) > 1 {
		parts = parts[:1]
	}
	return strings.Join(parts, "/")
}

// breach returns why path may not import imp, or "".
func breach(path, imp string) string {
	f, ok := floorOf(path)
	if !ok {
		return "stands on no floor: add it to the table of internal/archtest or move it"
	}
	for _, b := range f.bans {
		if imp == b {
			return "the floor " + f.prefix + " may not import " + b
		}
	}
	own, isOwn := strings.CutPrefix(imp, module)
	if !isOwn {
		return ""
	}
	if under(own, f.prefix) {
		if f.alone && room(f, path) != room(f, own) {
			return "rooms of " + f.prefix + " stand alone and do not import each other"
		}
		return ""
	}
	for _, m := range f.may {
		if under(own, m) {
			return ""
		}
	}
	return "the floor " + f.prefix + " may import only " + strings.Join(f.may, ", ")
}

func TestLawOfImports(t *testing.T) {
	for _, p := range packages(t) {
		if reason := breach(p.ImportPath, ""); reason != "" {
			t.Errorf("%s: %s", p.ImportPath, reason)
		}
		for _, imp := range p.Imports {
			if reason := breach(p.ImportPath, imp); reason != "" {
				t.Errorf("%s imports %s: %s", p.ImportPath, imp, reason)
			}
		}
	}
}

// TestLawCatchesOffences plants the offences the law exists for: a check that
// cannot fail would be worse than none.
func TestLawCatchesOffences(t *testing.T) {
	for _, c := range []struct{ name, path, imp string }{
		{"net in core", "internal/core/policy", "net/http"},
		{"exec in core", "internal/core/chain", "os/exec"},
		{"sibling contexts", "internal/contexts/release", module + "internal/contexts/execution"},
		{"plugin into the house", "plugins/scm/git", module + "internal/core/policy"},
		{"sdk into the house", "sdk", module + "internal/core/digest"},
		{"kit into host", "conformance/scm/v1", module + "internal/host/dispatch"},
		{"core up to host", "internal/core/policy", module + "internal/host/journal"},
		{"host up to contexts", "internal/host/dispatch", module + "internal/contexts/evidence"},
		{"edge to contexts", "internal/edge/cli", module + "internal/contexts/release"},
		{"plugin to plugin", "plugins/scm/git", module + "plugins/ticketing/files"},
		{"verifier into host", "cmd/numi-verify", module + "internal/host/journal"},
		{"unlisted folder", "util", ""},
	} {
		if breach(c.path, c.imp) == "" {
			t.Errorf("%s: %s importing %q was not refused", c.name, c.path, c.imp)
		}
	}
}

// TestArchitecturePageIsTrue wants every folder with Go code in the page's
// table, and nothing in the table that does not exist.
func TestArchitecturePageIsTrue(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join(root(t), "ARCHITECTURE.md"))
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for _, line := range strings.Split(string(raw), "\n") {
		cells := strings.Split(line, "|")
		if len(cells) < 3 {
			continue
		}
		for _, word := range strings.Fields(strings.ReplaceAll(cells[1], "`", " ")) {
			listed[strings.Trim(word, ",")] = true
		}
	}
	exists := map[string]bool{}
	for _, p := range packages(t) {
		if len(p.GoFiles) == 0 || under(p.ImportPath, "gen") {
			continue
		}
		exists[p.ImportPath] = true
		if !listed[p.ImportPath] {
			t.Errorf("ARCHITECTURE.md does not list %s", p.ImportPath)
		}
		if strings.TrimSpace(p.Doc) == "" {
			t.Errorf("%s has no package comment: say what it is for and who calls it", p.ImportPath)
		}
	}
	var gone []string
	for l := range listed {
		if (under(l, "internal") || under(l, "plugins") || under(l, "cmd") || under(l, "sdk")) && !exists[l] {
			gone = append(gone, l)
		}
	}
	sort.Strings(gone)
	for _, l := range gone {
		t.Errorf("ARCHITECTURE.md lists %s, which does not exist", l)
	}
}
