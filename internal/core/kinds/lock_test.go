package kinds_test

import (
	"strings"
	"testing"
	"testing/fstest"

	"google.golang.org/protobuf/proto"

	kindsv1 "github.com/numinance/numinance/gen/numinance/kinds/v1"
	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/kinds"
	"github.com/numinance/numinance/internal/core/lockfile"
)

// K-045, K-050: what needs the lockfile and the provider's manifest.
func TestK045ProvidersResolveInTheLockfile(t *testing.T) {
	set, report := kinds.Load(fstest.MapFS{"c.yaml": {Data: []byte(example(t, "KnowledgeConnection/confluence-eng.yaml"))}})
	if set == nil {
		t.Fatal(report)
	}
	const id = "dev.numinance.official/bridge-mcp"
	locked, err := lockfile.New([]lockfile.Entry{{Kind: lockfile.Plugin, Name: id, Digest: digest.Of(nil), Origin: "registry", Manifest: digest.Of(nil)}})
	if err != nil {
		t.Fatal(err)
	}
	manifest := func(port string, hosts ...string) map[string]*pluginv1.Manifest {
		return map[string]*pluginv1.Manifest{id: {ExtensionId: id, Port: port, EgressHosts: hosts}}
	}
	cases := []struct {
		name      string
		lock      lockfile.File
		manifests map[string]*pluginv1.Manifest
		field     string
		rule      string
	}{
		{"good", locked, manifest("knowledge", "mcp.example.com"), "", ""},
		{"K-045 not locked", lockfile.File{}, manifest("knowledge", "mcp.example.com"), "spec.provider", "provider-locked"},
		{"no manifest", locked, nil, "spec.provider", "provider-manifest"},
		{"K-044 other port", locked, manifest("scm", "mcp.example.com"), "spec.provider", "provider-port"},
		{"K-050 other host", locked, manifest("knowledge", "example.com", "x.mcp.example.com"), "spec.endpoint", "endpoint-in-manifest"},
	}
	for _, c := range cases {
		problems := set.CheckLock(c.lock, c.manifests)
		if c.rule == "" {
			if len(problems) != 0 {
				t.Errorf("%s: %v", c.name, problems)
			}
			continue
		}
		if len(problems) != 1 || problems[0].Field != c.field || problems[0].Rule != c.rule || !strings.HasPrefix(problems[0].String(), "c.yaml:") {
			t.Errorf("%s: %v", c.name, problems)
		}
	}
}

// K-059: a connection lowers the budget of its stage and never raises it.
func TestK059BudgetsOnlyLower(t *testing.T) {
	stage := kinds.StageBudget{Calls: 8, Bytes: 1000}
	if got, why := stage.Lower(&kindsv1.KnowledgeBudgets{CallsPerStage: proto.Uint32(3)}); got != (kinds.StageBudget{Calls: 3, Bytes: 1000}) || len(why) != 0 {
		t.Errorf("below: %+v %v", got, why)
	}
	if got, why := stage.Lower(&kindsv1.KnowledgeBudgets{CallsPerStage: proto.Uint32(9), BytesPerCall: proto.Uint32(2000)}); got != stage || len(why) != 2 {
		t.Errorf("above: %+v %v", got, why)
	}
	if got, why := stage.Lower(nil); got != stage || why != nil {
		t.Errorf("absent: %+v %v", got, why)
	}
}
