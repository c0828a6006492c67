package git

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"

	"google.golang.org/grpc"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	scmv1 "github.com/numinance/numinance/gen/numinance/ports/scm/v1"
	"github.com/numinance/numinance/sdk"
)

// Config is the provider's configuration.
type Config struct {
	// Repositories are the ones that are served.
	Repositories []RepositoryConfig `json:"repositories"`
	// Imported serves every other repository that the host has imported into the
	// data directory too, under its name, with nothing configured.
	Imported bool `json:"imported,omitempty"`
}

// RepositoryConfig is one repository of the forge.
type RepositoryConfig struct {
	// Name as the control documents have it, 1 to 256 bytes.
	Name string `json:"name"`
	// MirrorOf is the repository that the host imports before the plugin
	// starts; the plugin itself never opens it.
	MirrorOf string `json:"mirror_of,omitempty"`
	// Archived refuses every write.
	Archived bool `json:"archived,omitempty"`
	// WebURL is where a person looks at it, if anywhere.
	WebURL string `json:"web_url,omitempty"`
	// Protection by branch name. It holds until the forge's own is changed. The
	// default branch is protected against direct pushes if nothing is said.
	Protection map[string]Protection `json:"protection,omitempty"`
}

// Plugin returns the plugin.
func Plugin() sdk.Plugin {
	return sdk.Plugin{
		Manifest: &pluginv1.Manifest{
			ExtensionId: "dev.numinance.embedded/scm-git",
			Version:     "1.0.0",
			Port:        "scm",
			SpecVersion: "1.0.0",
			Verbs: []string{"GetRepository", "GetTree", "GetFile", "ListBranches", "CreateBranch", "GetBranchProtection",
				"OpenPullRequest", "UpdatePullRequest", "CommentOnPullRequest", "GetPullRequestStatus", "MergePullRequest", "SearchCode"},
			Description: "Embedded code host: bare Git repositories with pull requests and branch protection in one directory.",
		},
		Open: open,
	}
}

func open(ctx context.Context, s *sdk.Session) (sdk.Register, error) {
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
	forge, err := Open(ctx, s.DataDir, c)
	if err != nil {
		return nil, err
	}
	srv := &server{forge: forge, host: s.Host, effects: s.Effects()}
	return func(r grpc.ServiceRegistrar) { scmv1.RegisterScmServiceServer(r, srv) }, nil
}

// Directory returns where the forge in dataDir keeps the bare repository of
// this name: the destination of the host's import.
func Directory(dataDir, name string) string {
	return filepath.Join(dataDir, escape(name)+".git")
}
