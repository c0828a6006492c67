package files

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"google.golang.org/grpc"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	ticketingv1 "github.com/numinance/numinance/gen/numinance/ports/ticketing/v1"
	"github.com/numinance/numinance/sdk"
)

// Config is the provider's configuration.
type Config struct {
	// Projects maps a project's name to its directory, an absolute path; empty
	// for one in the plugin's data directory.
	Projects map[string]string `json:"projects"`
	// Imported serves every other project whose directory the host has made in
	// the data directory too.
	Imported bool `json:"imported,omitempty"`
	// Workflow replaces the default states. The first state of a category is
	// the one that a transition to it gives.
	Workflow []State `json:"workflow,omitempty"`
	// WebURL is the address of a page per issue with %s for its key, if any.
	WebURL string `json:"web_url,omitempty"`
}

// State is one state of the workflow by the tracker's own name.
type State struct {
	Name string `json:"name"`
	// Category is todo, in_progress, done or cancelled.
	Category string `json:"category"`
}

// Plugin returns the plugin.
func Plugin() sdk.Plugin {
	return sdk.Plugin{
		Manifest: &pluginv1.Manifest{
			ExtensionId: "dev.numinance.embedded/ticketing-files",
			Version:     "1.0.0",
			Port:        "ticketing",
			SpecVersion: "1.2.0",
			Verbs:       []string{"GetIssue", "SearchIssues", "CommentOnIssue", "TransitionIssue", "LinkIssue"},
			Description: "Embedded tracker: one Markdown file per issue, one directory per project.",
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
	srv := &server{effects: s.Effects(), webURL: c.WebURL, projects: map[string]*project{}}
	if c.Imported {
		srv.imported = s.DataDir
	}
	var err error
	if srv.workflow, err = newWorkflow(c.Workflow); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	for name, dir := range c.Projects {
		if name == "" || len(name) > 256 {
			return nil, fmt.Errorf("configuration: project %q: 1 to 256 bytes", name)
		}
		if dir == "" {
			if s.DataDir == "" {
				return nil, fmt.Errorf("configuration: project %q has no directory and the plugin no data directory", name)
			}
			if len(name) > maxName {
				return nil, fmt.Errorf("configuration: project %q: give it a directory, its name is too long for one", name)
			}
			dir = Directory(s.DataDir, name)
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return nil, fmt.Errorf("make the directory of project %q: %w", name, err)
			}
		}
		if !filepath.IsAbs(dir) {
			return nil, fmt.Errorf("configuration: project %q: directory %q is not an absolute path", name, dir)
		}
		srv.projects[name] = &project{name: name, dir: dir, workflow: srv.workflow}
	}
	return func(r grpc.ServiceRegistrar) { ticketingv1.RegisterTicketingServiceServer(r, srv) }, nil
}

// maxName bounds the name of a project that lies in the data directory.
const maxName = 100

// Directory returns where the tracker in dataDir keeps the issues of a project
// that has no directory of its own.
func Directory(dataDir, name string) string {
	return filepath.Join(dataDir, "projects", fmt.Sprintf("%x", name))
}
