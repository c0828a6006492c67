package files

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"

	"google.golang.org/grpc"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	knowledgev1 "github.com/numinance/numinance/gen/numinance/ports/knowledge/v1"
	"github.com/numinance/numinance/sdk"
)

// Config is the provider's configuration.
type Config struct {
	// Connections maps the name of a KnowledgeConnection to its directory, an
	// absolute path.
	Connections map[string]string `json:"connections"`
}

// Plugin returns the plugin.
func Plugin() sdk.Plugin {
	return sdk.Plugin{
		Manifest: &pluginv1.Manifest{
			ExtensionId: "dev.numinance.embedded/knowledge-files",
			Version:     "1.0.0",
			Port:        "knowledge",
			SpecVersion: "1.0.0",
			Verbs:       []string{"Search", "Fetch", "Resolve"},
			Description: "Embedded knowledge source: the Markdown and text files of one directory per connection.",
		},
		Open: open,
	}
}

func open(_ context.Context, s *sdk.Session) (sdk.Register, error) {
	var c Config
	if len(bytes.TrimSpace(s.Config)) > 0 {
		dec := json.NewDecoder(bytes.NewReader(s.Config))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&c); err != nil {
			return nil, fmt.Errorf("configuration: %w", err)
		}
		if _, err := dec.Token(); err != io.EOF {
			return nil, fmt.Errorf("configuration: more than one document")
		}
	}
	srv := &server{sources: map[string]*source{}}
	for name, dir := range c.Connections {
		if name == "" || len(name) > 128 || !filepath.IsAbs(dir) {
			return nil, fmt.Errorf("configuration: connection %q: a name of 1 to 128 bytes and an absolute path", name)
		}
		srv.sources[name] = &source{dir: dir, history: history{dataDir: s.DataDir, connection: name}}
	}
	return func(r grpc.ServiceRegistrar) { knowledgev1.RegisterKnowledgeServiceServer(r, srv) }, nil
}
