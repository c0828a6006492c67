package kinds_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	kindsv1 "github.com/numinance/numinance/gen/numinance/kinds/v1"
	"github.com/numinance/numinance/internal/core/kinds"
	"github.com/numinance/numinance/internal/core/policy"
)

const examples = "../../../schemas/examples"

func example(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(examples, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func validate(files map[string]string) kinds.Report {
	fsys := fstest.MapFS{}
	for name, text := range files {
		fsys[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return kinds.ValidateFiles(fsys)
}

// K-087: the report of the published folder, byte for byte.
func TestK087ReportOfTheExamples(t *testing.T) {
	got := kinds.ValidateFiles(os.DirFS(filepath.Join(examples, "KnowledgeConnection"))).String()
	want := `revision: "files"
ok       file "confluence-eng.yaml" KnowledgeConnection "confluence-eng"
ok       file "confluence-oauth.yaml" KnowledgeConnection "confluence-oauth"
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatal(diff)
	}
}

func TestEveryKindHasAnExampleThatValidates(t *testing.T) {
	for _, kind := range kinds.Names() {
		report := kinds.ValidateFiles(os.DirFS(filepath.Join(examples, kind)))
		if !report.OK() {
			t.Errorf("%s:\n%s", kind, report)
		}
		for _, o := range report.Outcomes {
			if o.Kind != kind {
				t.Errorf("%s holds a %s", kind, o.Kind)
			}
		}
	}
}

func connection(t testing.TB, name string) *kindsv1.KnowledgeConnection {
	t.Helper()
	set, report := kinds.Load(fstest.MapFS{"x.yaml": {Data: []byte(example(t, "KnowledgeConnection/"+name))}})
	if set == nil {
		t.Fatal(report)
	}
	for _, c := range set.Connections() {
		return c
	}
	t.Fatal("no connection")
	return nil
}

// K-040, K-041, K-042, K-043: the example's values.
func TestK041ExampleValues(t *testing.T) {
	c := connection(t, "confluence-eng.yaml")
	s := c.GetSpec()
	got := []any{
		c.GetMetadata().GetName(), c.GetMetadata().GetScope(), s.GetProvider(), s.GetEndpoint(), s.GetAuth(), s.GetReadOnly(), s.GetScope(),
		s.GetBudgets().GetCallsPerStage(), s.GetBudgets().GetBytesPerCall(), s.GetCacheTtl().GetSeconds(), len(s.GetPinnedTools()),
		s.GetPinnedTools()[0].GetName(), s.GetPinnedTools()[0].GetHash().GetValue(), s.GetPinnedTools()[1].GetName(), s.GetPinnedTools()[1].GetHash().GetValue(),
	}
	want := []any{
		"confluence-eng", kindsv1.Scope_SCOPE_ORG, "dev.numinance.official/bridge-mcp", "https://mcp.example.com/v1/mcp",
		kindsv1.KnowledgeAuth_KNOWLEDGE_AUTH_USER_DELEGATED, true, []string{"ENG", "PAY"}, uint32(8), uint32(65536), int64(2592000), 2,
		"searchConfluenceUsingCql", "sha256:3f1a9c0e5b7d2a4f6e8c1b3d5a7f9e2c4b6d8a0f1e3c5b7d9a2f4e6c8b0d1a3f",
		"getConfluencePage", "sha256:9b2d4f6a8c0e1b3d5f7a9c2e4b6d8f0a1c3e5b7d9f2a4c6e8b0d2f4a6c8e0b1d",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatal(diff)
	}
	if connection(t, "confluence-oauth.yaml").GetSpec().GetOauth().GetClientId() == "" {
		t.Fatal("K-043: no client id")
	}
}

// edit is one change to the good document that has to be refused with the
// named field and rule.
type edit struct{ name, from, to, field, rule string }

func refused(t *testing.T, base string, edits []edit) {
	t.Helper()
	for _, e := range edits {
		if e.from != "" && strings.Count(base, e.from) != 1 {
			t.Fatalf("%s: %q stands %d times in the document", e.name, e.from, strings.Count(base, e.from))
		}
		report := validate(map[string]string{"x.yaml": strings.Replace(base, e.from, e.to, 1)})
		found := false
		for _, p := range report.Problems() {
			found = found || (p.Field == e.field && p.Rule == e.rule)
			if p.Line < 1 || p.Column < 1 || p.Text == "" {
				t.Errorf("%s: incomplete problem %+v", e.name, p)
			}
		}
		if report.OK() || !found {
			t.Errorf("%s: want %s %s, got\n%s", e.name, e.field, e.rule, report)
		}
	}
}

// K-039, K-042, K-044, K-046..K-049, K-051, K-055..K-057, K-060, K-062, K-063:
// every rule of the knowledge table that a document alone can break.
func TestKnowledgeConnectionRules(t *testing.T) {
	base := example(t, "KnowledgeConnection/confluence-eng.yaml")
	endpoint := func(name, to, rule string) edit {
		return edit{name, "https://mcp.example.com/v1/mcp", to, "spec.endpoint", rule}
	}
	edits := []edit{
		{"K-044 missing", "  provider: dev.numinance.official/bridge-mcp\n", "", "spec.provider", "provider-required"},
		{"K-044 no id", "dev.numinance.official/bridge-mcp", "bridge", "spec.provider", "provider-extension-id"},
		{"K-044 other port", "dev.numinance.official/bridge-mcp", "dev.numinance.embedded/scm-git", "spec.provider", "provider-port"},
		{"K-046 missing", "  endpoint: https://mcp.example.com/v1/mcp\n", "", "spec.endpoint", "endpoint-required"},
		endpoint("K-046 http", "http://mcp.example.com/v1/mcp", "endpoint-https"),
		endpoint("K-046 capitals", "HTTPS://mcp.example.com/v1/mcp", "endpoint-https"),
		endpoint("K-046 bare", "mcp.example.com", "endpoint-https"),
		endpoint("K-047 uppercase", "https://MCP.example.com/v1", "endpoint-lowercase"),
		endpoint("K-047 one label", "https://localhost/v1", "endpoint-labels"),
		endpoint("K-047 trailing dot", "https://mcp.example.com./v1", "endpoint-host"),
		endpoint("K-047 no host", "https:///v1", "endpoint-labels"),
		endpoint("K-047 unicode", "https://mcp.exämple.com/v1", "endpoint-characters"),
		endpoint("K-047 percent", "https://mcp%2eexample.com/v1", "endpoint-host"),
		endpoint("K-048 IPv4", "https://192.0.2.1/v1", "endpoint-ip"),
		endpoint("K-048 IPv6", `"https://[2001:db8::1]/v1"`, "endpoint-ip"),
		endpoint("K-048 decimal", "https://3221225985/v1", "endpoint-ip"),
		endpoint("K-048 hex", "https://0xc0000201/v1", "endpoint-ip"),
		endpoint("K-048 short", "https://127.1/v1", "endpoint-ip"),
		endpoint("K-048 hex octet", "https://192.0.2.0x1/v1", "endpoint-ip"),
		endpoint("K-049 user", "https://user@mcp.example.com/v1", "endpoint-user"),
		endpoint("K-049 user and password", `"https://u:p@mcp.example.com/v1"`, "endpoint-user"),
		endpoint("K-049 query", `"https://mcp.example.com/v1?q=1"`, "endpoint-query"),
		endpoint("K-049 empty query", `"https://mcp.example.com/v1?"`, "endpoint-query"),
		endpoint("K-049 fragment", `"https://mcp.example.com/v1#f"`, "endpoint-fragment"),
		endpoint("backslash", `'https://mcp.example.com\@evil.example/'`, "endpoint-characters"),
		endpoint("port", `"https://mcp.example.com:0/v1"`, "endpoint-port"),
		endpoint("climbing", "https://mcp.example.com/a/../b", "endpoint-path"),
		{"K-051 missing", "  auth: KNOWLEDGE_AUTH_USER_DELEGATED\n", "", "spec.auth", "auth-required"},
		{"K-051 unspecified", "KNOWLEDGE_AUTH_USER_DELEGATED", "KNOWLEDGE_AUTH_UNSPECIFIED", "spec.auth", "known-value"},
		{"K-051 other", "KNOWLEDGE_AUTH_USER_DELEGATED", "KNOWLEDGE_AUTH_NONE", "spec.auth", "known-value"},
		{"K-051 number", "KNOWLEDGE_AUTH_USER_DELEGATED", "1", "spec.auth", "known-value"},
		{"K-055 missing", "  read_only: true\n", "", "spec.read_only", "read-only-required"},
		{"K-055 false", "read_only: true", "read_only: false", "spec.read_only", "read-only-true"},
		{"K-055 text", "read_only: true", `read_only: "true"`, "spec.read_only", "wrong-type"},
		{"K-055 yes", "read_only: true", "read_only: yes", "spec.read_only", "wrong-type"},
		{"K-056 missing", "  scope: [ENG, PAY]\n", "", "spec.scope", "scope-required"},
		{"K-056 empty", "[ENG, PAY]", "[]", "spec.scope", "scope-not-empty"},
		{"K-056 twice", "[ENG, PAY]", "[ENG, ENG]", "spec.scope[1]", "scope-unique"},
		{"K-060 calls", "calls_per_stage: 8", "calls_per_stage: 0", "spec.budgets.calls_per_stage", "budget-not-zero"},
		{"K-060 bytes", "bytes_per_call: 65536", "bytes_per_call: 0", "spec.budgets.bytes_per_call", "budget-not-zero"},
		{"K-059 above the verb's bound", "bytes_per_call: 65536", "bytes_per_call: 1048577", "spec.budgets.bytes_per_call", "uint32.gte_lte"},
		{"K-059 negative", "calls_per_stage: 8", "calls_per_stage: -1", "spec.budgets.calls_per_stage", "wrong-type"},
		{"K-039 days", "2592000s", "30d", "spec.cache_ttl", "duration-seconds"},
		{"K-039 negative", "2592000s", "-1s", "spec.cache_ttl", "duration-seconds"},
		{"K-039 bare", "2592000s", "2592000", "spec.cache_ttl", "duration-seconds"},
		{"K-042 63 digits", "8b0d1a3f", "8b0d1a3", "spec.pinned_tools[0].hash.value", "tool-hash"},
		{"K-042 no algorithm", "sha256:3f1a", "3f1a", "spec.pinned_tools[0].hash.value", "tool-hash"},
		{"K-042 uppercase", "sha256:3f1a", "sha256:3F1A", "spec.pinned_tools[0].hash.value", "tool-hash"},
		{"K-042 no hash", `, hash: {value: "sha256:9b2d4f6a8c0e1b3d5f7a9c2e4b6d8f0a1c3e5b7d9f2a4c6e8b0d2f4a6c8e0b1d"}`, "", "spec.pinned_tools[1].hash.value", "tool-hash"},
		{"pinned twice", "name: getConfluencePage", "name: searchConfluenceUsingCql", "spec.pinned_tools[1].name", "unique-tool"},
		{"K-062 secret", "  cache_ttl:", "  oauth: {client_id: a, client_secret: b}\n  cache_ttl:", "spec.oauth.client_secret", "unknown-field"},
		{"P-210 reserved scope", "[ENG, PAY]", "[ENG, evidence.read]", "spec.scope[1]", "reserved-scope"},
	}
	for _, c := range []string{"*", ".", "..", "a.b", "/ENG", "ENG/", "a//b", "?", "a?b", "a&b", "a=b", "[", "]", "{", "}", "!", "~", "%2e", `\\`, " ", "a b", ":", "#", "'", "(", "<", "|", "^", "+", ",", ";", "@", "$", "\u200b", "a/../b"} {
		edits = append(edits, edit{"K-057 " + c, "[ENG, PAY]", `[ENG, "` + c + `"]`, "spec.scope[1]", "scope-characters"})
	}
	for _, scope := range []string{"SCOPE_TEAM", "SCOPE_REPO"} {
		narrow := strings.Replace(example(t, "KnowledgeConnection/confluence-oauth.yaml"), "SCOPE_ORG", scope, 1)
		refused(t, narrow, []edit{{"K-063 " + scope, "", "", "spec.oauth.client_id", "oauth-organisation"}})
	}
	refused(t, base, edits)

	for _, good := range []edit{
		{from: "budgets: {calls_per_stage: 8, bytes_per_call: 65536}", to: "budgets: {}"},
		{from: "  budgets: {calls_per_stage: 8, bytes_per_call: 65536}\n", to: ""},
		{from: "KNOWLEDGE_AUTH_USER_DELEGATED", to: "KNOWLEDGE_AUTH_SERVICE_ACCOUNT"},
		{from: "https://mcp.example.com/v1/mcp", to: "https://a.b:8443"},
		{from: "[ENG, PAY]", to: "[ENG/a_b-c, Ünï]"},
		{from: "2592000s", to: "0.5s"},
	} {
		if report := validate(map[string]string{"x.yaml": strings.Replace(base, good.from, good.to, 1)}); !report.OK() {
			t.Errorf("%q refused:\n%s", good.to, report)
		}
	}
}

// Strictness that holds for every kind.
func TestStrictDecoding(t *testing.T) {
	base := example(t, "Repository/widget.yaml")
	refused(t, base, []edit{
		{"unknown field", "  profile: default", "  profil: default", "spec.profil", "unknown-field"},
		{"camel case", "  base_branch:", "  baseBranch:", "spec.baseBranch", "unknown-field"},
		{"duplicate field", "  profile: default", "  profile: default\n  profile: other", "spec.profile", "duplicate-field"},
		{"number for text", "base_branch: main", "base_branch: 12", "spec.base_branch", "wrong-type"},
		{"list for text", "base_branch: main", "base_branch: [main]", "spec.base_branch", "wrong-type"},
		{"text for list", "[deploy/]", "deploy/", "spec.protected_paths", "wrong-type"},
		{"null", "base_branch: main", "base_branch:", "spec.base_branch", "no-null"},
		{"missing", "  base_branch: main\n", "", "spec.base_branch", "required"},
		{"anchor", "base_branch: main", "base_branch: &b main", "spec.base_branch", "no-anchor"},
		{"alias", "base_branch: main", "base_branch: &b main\n  resource2: *b", "spec.resource2", "unknown-field"},
		{"merge", "spec:\n", "spec:\n  <<: {profile: other}\n", "spec.<<", "no-merge"},
		{"tag", "base_branch: main", "base_branch: !!str main", "spec.base_branch", "no-tag"},
		{"other version", "numinance.dev/v1", "numinance.dev/v2", "apiVersion", "api-version"},
		{"other kind", "kind: Repository", "kind: Repo", "kind", "known-kind"},
		{"no scope", ", scope: SCOPE_REPO", "", "metadata.scope", "required"},
		{"bad name", "{name: widget,", "{name: Widget,", "metadata.name", "string.pattern"},
		{"provider of another port", "embedded/scm-git", "embedded/ticketing-files", "spec.provider", "provider-port"},
		{"bad path", "[deploy/]", "[../deploy]", "spec.protected_paths", "path-form"},
		{"no document", base, "- a\n", "", "mapping"},
		{"broken", base, "a: [", "", "syntax"},
		{"not UTF-8", base, "\xff\xfe", "", "utf-8"},
		{"empty", base, "# nothing\n", "", "documents"},
	})
	report := validate(map[string]string{"a.yaml": base, "b.yaml": base})
	if p := report.Problems(); len(p) != 1 || p[0].Rule != "unique-name" || p[0].File != "b.yaml" || !strings.Contains(p[0].Text, "a.yaml") {
		t.Errorf("two documents of one name:\n%s", report)
	}
	if report := validate(map[string]string{"a.yaml": base + "---\n" + base}); len(report.Problems()) != 1 {
		t.Errorf("two documents of one name in one file:\n%s", report)
	}
	if report := validate(nil); report.OK() {
		t.Error("an empty folder validates")
	}
}

// A problem is one line that says where, what, which rule and what to write.
func TestProblemSaysWhereAndWhat(t *testing.T) {
	report := validate(map[string]string{"bad.yaml": strings.Replace(example(t, "KnowledgeConnection/confluence-eng.yaml"), "https://", "http://", 1)})
	want := `revision: "files"
failed   file "bad.yaml" KnowledgeConnection "confluence-eng"
         bad.yaml:6:13 spec.endpoint endpoint-https: "http://mcp.example.com/v1/mcp" does not begin with https://; write an https:// address
`
	if diff := cmp.Diff(want, report.String()); diff != "" {
		t.Fatal(diff)
	}
}

func TestRulesOfOtherKinds(t *testing.T) {
	refused(t, example(t, "Organization/example.yaml"), []edit{
		{"private key", `"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGwNf3W1cBGCHRUr0b0YkRrVWtfQ0ZC0Yb0sVQmSxV3K alice@example.com"`, `"-----BEGIN OPENSSH PRIVATE KEY-----"`, "spec.people[0].ssh_keys[0]", "public-key"},
		{"no key", `"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGwNf3W1cBGCHRUr0b0YkRrVWtfQ0ZC0Yb0sVQmSxV3K alice@example.com"`, `"my key, which is long"`, "spec.people[0].ssh_keys[0]", "public-key"},
		{"one person twice", "human:bob", "human:alice", "spec.people[1]", "one-person"},
		{"agent", "human:bob", "agent:bob", "spec.people[1].principal", "string.pattern"},
		{"metadata range", "10.20.0.0/24", "169.254.169.254/32", "spec.private_hosts[0].ranges[0]", "range-closed"},
		{"everything", "10.20.0.0/24", "0.0.0.0/0", "spec.private_hosts[0].ranges[0]", "range-closed"},
		{"loopback", "10.20.0.0/24", "127.0.0.1/32", "spec.private_hosts[0].ranges[0]", "range-closed"},
		{"mapped", "[10.20.0.0/24]", `["::ffff:169.254.0.0/112"]`, "spec.private_hosts[0].ranges[0]", "range-closed"},
	})
	refused(t, example(t, "Policy/no-friday-migrations.yaml"), []edit{
		{"unknown attribute", "context.time.weekday", "context.time.weekdays", "spec.cedar", "policy-loads"},
		{"no id", `@id("no-migrations-on-friday")`, "", "spec.cedar", "policy-loads"},
	})
	refused(t, example(t, "Profile/default.yaml"), []edit{
		{"no checks", "  checks:\n    - {name: vet, argv: [go, vet, ./...]}\n    - {name: test, argv: [go, test, -json, ./...], timeout: 1200s, format: CHECK_FORMAT_GO_TEST_JSON}\n", "", "spec.checks", "required"},
		{"name twice", "name: vet", "name: test", "spec.checks[1].name", "unique-name"},
		{"report of JUnit", "CHECK_FORMAT_GO_TEST_JSON", "CHECK_FORMAT_JUNIT", "spec.checks[1].report", "report-required"},
		{"H-056 vendor for capability", "- EXECUTOR_CAPABILITY_SHELL", "- claude-code", "spec.capabilities[2]", "known-value"},
		{"glob", `["**"]`, `["src/*.go"]`, "spec.allowed_paths", "path-form"},
		{"P-210 reserved", "denied_paths: [vendor/]", "credentials: [transparencylog.append]", "spec.credentials[0]", "reserved-scope"},
	})
	refused(t, example(t, "PluginManifest/sample-knowledge.yaml"), []edit{
		{"unknown port", "port: knowledge", "port: email", "spec.port", "known-port"},
		{"unknown verb", "Resolve]", "Resolve, VendorCall]", "spec.verbs[3]", "known-verb"},
		{"P-028 side effect missing", "port: knowledge", "port: scm", "spec.verbs", "every-side-effect"},
		{"P-210 reserved", "verbs: [Search, Fetch, Resolve]", "verbs: [Search, Fetch, Resolve]\n  credential_intents: [evidence.write]", "spec.credential_intents[0]", "reserved-scope"},
	})
	refused(t, example(t, "Environment/default.yaml"), []edit{
		{"tag for image", "  limits:", "  image: debian:12\n  limits:", "spec.image", "string.pattern"},
		{"IP registry", "modules.example.com", "10.0.0.1:80", "spec.prepare_egress[0].host", "string.pattern"},
		{"no program", "[go, mod, download]", "[]", "spec.prepare[0].argv", "repeated.min_items"},
	})
}

func TestJSONIsTheSameDocument(t *testing.T) {
	yamlText := example(t, "Tracker/widget.yaml")
	jsonText := "{\"apiVersion\": \"numinance.dev/v1\",\n\t\"kind\": \"Tracker\", \"metadata\": {\"name\": \"widget\", \"scope\": \"SCOPE_TEAM\"},\n\t\"spec\": {\"project\": \"widget\", \"provider\": \"dev.numinance.embedded/ticketing-files\"}}"
	a, ra := kinds.Load(fstest.MapFS{"a.yaml": {Data: []byte(yamlText)}})
	b, rb := kinds.Load(fstest.MapFS{"b.json": {Data: []byte(jsonText)}})
	if a == nil || b == nil {
		t.Fatalf("%s%s", ra, rb)
	}
	if a.Revision() != b.Revision() || !proto.Equal(a.Documents()[0].Message, b.Documents()[0].Message) {
		t.Fatal("YAML and JSON of one document differ")
	}
}

func TestSetIsLiveAsAWhole(t *testing.T) {
	files := fstest.MapFS{}
	for _, name := range []string{"Repository/widget.yaml", "Profile/default.yaml", "Environment/default.yaml", "Pipeline/release.yaml", "Tracker/widget.yaml", "Organization/example.yaml"} {
		files[strings.ReplaceAll(name, "/", "-")] = &fstest.MapFile{Data: []byte(example(t, name))}
	}
	set, report := kinds.Load(files)
	if set == nil {
		t.Fatal(report)
	}
	bound, err := set.Bind("widget")
	if err != nil || bound.Profile == nil || bound.Environment == nil || bound.Pipeline == nil || bound.Tracker == nil || !bound.ProfileDigest.Valid() {
		t.Fatalf("Bind: %+v, %v", bound, err)
	}
	if diff := cmp.Diff([]string{"migrations/", "**/*.tf", "deploy/"}, bound.Protected); diff != "" {
		t.Error(diff)
	}
	if _, err := set.Bind("gadget"); err == nil {
		t.Error("bound a repository that is not there")
	}
	revision := set.Revision()
	delete(files, "Tracker-widget.yaml")
	if set, report := kinds.Load(files); set != nil || report.OK() || !strings.Contains(report.String(), `there is no Tracker "widget"`) {
		t.Errorf("a dangling reference loads:\n%s", report)
	}
	files["Tracker-widget.yaml"] = &fstest.MapFile{Data: []byte(strings.Replace(example(t, "Tracker/widget.yaml"), "project: widget", "project: other", 1))}
	if set, _ := kinds.Load(files); set == nil || set.Revision() == revision {
		t.Error("the revision does not follow a document")
	}
}

func TestDefaultSetLoads(t *testing.T) {
	for name, d := range map[string]kinds.Defaults{
		"small": {Repository: "widget", BaseBranch: "main", Checks: []string{"go test ./..."}},
		"full": {
			Repository: "Acme/Widget.js", BaseBranch: "release/1.x", Checks: []string{"npm test", `sh -c "npm run lint && true"`}, Allowed: []string{"src/", "package.json"},
			Prepare: []string{"npm ci"}, Registries: []string{"packages.example.com"}, Lockfiles: []string{"package-lock.json"}, Scratch: []string{"node_modules/"},
			Requester: "human:alice", SSHKey: "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGwNf3W1cBGCHRUr0b0YkRrVWtfQ0ZC0Yb0sVQmSxV3K a@b\n", Pipeline: []string{"npm run build"},
		},
		"hostile": {Repository: "a\": {b}\n", BaseBranch: "main: &x", Checks: []string{"echo \"\u2028\" '}'"}},
	} {
		files, err := kinds.DefaultSet(d)
		if name == "hostile" {
			if err == nil {
				t.Error("a repository with control characters in its name is accepted")
			}
			continue
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		fsys := fstest.MapFS{}
		for file, text := range files {
			fsys[file] = &fstest.MapFile{Data: []byte(text)}
		}
		set, report := kinds.Load(fsys)
		if set == nil {
			t.Fatalf("%s: %s", name, report)
		}
		b, err := set.Bind(set.Repositories()[0])
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if b.Environment.GetLimits().GetCpuMillis() != 0 {
			t.Errorf("%s: the default environment asks for a limit that not every host can enforce", name)
		}
		if b.Repository.GetResource() != d.Repository || b.Repository.GetBaseBranch() != d.BaseBranch || len(b.Profile.GetChecks()) != len(d.Checks) || (b.Pipeline != nil) != (len(d.Pipeline) > 0) {
			t.Errorf("%s: %+v", name, b)
		}
		shipped, err := policy.LoadDefault()
		if err != nil || len(set.Policies().Rules()) != len(shipped.Rules()) {
			t.Errorf("%s: the default directory does not hold the shipped policy: %v", name, err)
		}
	}
	if _, err := kinds.DefaultSet(kinds.Defaults{Repository: "x", BaseBranch: "main"}); err == nil {
		t.Error("a default set without checks")
	}
}

func FuzzValidate(f *testing.F) {
	for _, name := range []string{"KnowledgeConnection/confluence-eng.yaml", "Organization/example.yaml", "Policy/no-friday-migrations.yaml", "PluginManifest/sample-knowledge.yaml"} {
		f.Add(example(f, name))
		validate(map[string]string{"x.yaml": example(f, name)}) // what is built once is built before the first input
	}
	f.Add("a: &a [*a, *a]\n")
	f.Fuzz(func(t *testing.T, text string) {
		report := validate(map[string]string{"x.yaml": text})
		for _, o := range report.Outcomes {
			if len(o.Problems) == 0 && (o.Kind == "" || o.Name == "") {
				t.Fatalf("a document without kind or name is ok: %q", text)
			}
		}
	})
}
