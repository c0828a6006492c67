package policy_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/policy/floors"
)

// The examples of docs/policy.md load beside the shipped policy and do what
// the page says; its table lists every floor and its words name real attributes.
func TestPolicyPage(t *testing.T) {
	raw, err := os.ReadFile("../../../docs/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(raw)
	files := map[string][]byte{policy.DefaultFile: []byte(policy.Default())}
	for i, block := range regexp.MustCompile("(?s)```cedar\n(.*?)```").FindAllStringSubmatch(page, -1) {
		files[string(rune('a'+i))+".cedar"] = []byte(block[1])
	}
	e, err := policy.Load(files)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != 4 {
		t.Fatalf("found %d examples", len(files)-1)
	}
	for _, row := range floors.Table() {
		if !strings.Contains(page, "| `"+row.ID+"` |") {
			t.Errorf("the page does not list the floor %s", row.ID)
		}
	}
	for _, name := range floors.ToolNames() {
		if !strings.Contains(page, "`tool."+name+"`") {
			t.Errorf("the page does not list tool.%s", name)
		}
	}

	migration := tool(t, author, "Executing", policy.Tool{Name: "write", Path: "db/migrations/1.sql"})
	if d := e.Decide(migration); d.Effect != policy.Allow {
		t.Errorf("db/migrations is another directory: %s", d.Summary())
	}
	migration.Tool = &policy.Tool{Name: "write", Path: "migrations/2026/1.sql"}
	if d := e.Decide(migration); d.Effect != policy.Deny || !has(d, "policy", "no-migrations-on-friday") || !strings.Contains(d.Summary(), "agents do not touch migrations on a Friday") {
		t.Errorf("on a Friday: %s", d.Summary())
	}
	migration.Now = now.AddDate(0, 0, -1)
	migration.Grant.NotBefore = migration.Now
	if d := e.Decide(migration); d.Effect != policy.Allow {
		t.Errorf("on a Thursday: %s", d.Summary())
	}
	many := tool(t, author, "Executing", policy.Tool{Name: "say"})
	many.Run.Denials = 10
	if d := e.Decide(many); d.Effect != policy.Escalate || !strings.Contains(d.Ask, "approvers") {
		t.Errorf("ten denials: %s", d.Summary())
	}
	tainted := tool(t, author, "Executing", policy.Tool{Name: "credential", Intent: "scm-write"})
	tainted.Run.Tainted = true
	if d := e.Decide(tainted); d.Effect != policy.Deny || !has(d, "policy", "tainted-runs-get-no-credentials") {
		t.Errorf("a tainted run: %s", d.Summary())
	}
}
