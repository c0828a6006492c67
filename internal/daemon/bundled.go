package daemon

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/host/pluginhost"
	"github.com/numinance/numinance/plugins/authorexecutor/fake"
	"github.com/numinance/numinance/plugins/ciexecutor/local"
	evidencefiles "github.com/numinance/numinance/plugins/evidencestore/files"
	knowledgefiles "github.com/numinance/numinance/plugins/knowledge/files"
	"github.com/numinance/numinance/plugins/sandboxprovider/gvisor"
	"github.com/numinance/numinance/plugins/scm/git"
	ticketingfiles "github.com/numinance/numinance/plugins/ticketing/files"
	"github.com/numinance/numinance/plugins/transparencylog/tessera"
	"github.com/numinance/numinance/plugins/verifier/command"
	"github.com/numinance/numinance/sdk"
)

// entry is one bundled plugin. Number fixes its reserved uid and never changes,
// because its files belong to that uid.
type entry struct {
	plugin func() sdk.Plugin
	number int
}

// bundled is the table of plugins that come with this binary, by port and name.
var bundled = map[string]entry{
	"scm/git":                 {git.Plugin, 1},
	"ticketing/files":         {ticketingfiles.Plugin, 2},
	"knowledge/files":         {knowledgefiles.Plugin, 3},
	"ciexecutor/local":        {local.Plugin, 4},
	"evidencestore/files":     {evidencefiles.Plugin, 5},
	"transparencylog/tessera": {tessera.Plugin, 6},
	"sandboxprovider/gvisor":  {gvisor.Plugin, 7},
	"authorexecutor/fake":     {fake.Plugin, 8},
	"verifier/command":        {command.Plugin, 9},
}

func bundledNames() []string { return slices.Sorted(maps.Keys(bundled)) }

// expectation is what the host demands of the plugin in the handshake: exactly
// the manifest that this binary was built with.
func (e entry) expectation() (pluginhost.Expectation, error) {
	m := e.plugin().Manifest
	d, err := pluginhost.ManifestDigest(m)
	if err != nil {
		return pluginhost.Expectation{}, err
	}
	return pluginhost.Expectation{Port: m.GetPort(), Extension: m.GetExtensionId(), Origin: policy.OriginBundled, Manifest: d}, nil
}

// servePlugin serves one bundled plugin; the runtime starts itself with it.
func servePlugin(ctx context.Context, name string) error {
	e, ok := bundled[name]
	if !ok {
		return fmt.Errorf("there is no bundled plugin %q; 'numi plugin list' shows them", name)
	}
	return sdk.Serve(ctx, e.plugin())
}
