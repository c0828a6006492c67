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
	evidencestorev1 "github.com/numinance/numinance/gen/numinance/ports/evidencestore/v1"
	"github.com/numinance/numinance/sdk"
)

// config is the provider's configuration.
type config struct {
	// Directory is where the records are kept, an absolute path on storage of
	// the customer's; the plugin's data directory if empty (P-201).
	Directory string `json:"directory"`
}

// Plugin returns the plugin.
func Plugin() sdk.Plugin {
	return sdk.Plugin{
		Manifest: &pluginv1.Manifest{
			ExtensionId: "dev.numinance.embedded/evidencestore-files",
			Version:     "1.0.0",
			Port:        "evidencestore",
			SpecVersion: "1.0.0",
			Verbs:       []string{"AppendLocked", "GetRecord", "ListRange", "Head"},
			Description: "Keeps evidence records in write-once files of one directory.",
		},
		Open: open,
	}
}

func open(_ context.Context, s *sdk.Session) (sdk.Register, error) {
	dir, err := directory(s.Config, s.DataDir)
	if err != nil {
		return nil, err
	}
	store, err := Open(dir)
	if err != nil {
		return nil, err
	}
	// The store needs no farewell: what it acknowledged is durable, and its
	// lock ends with the process.
	return func(r grpc.ServiceRegistrar) {
		evidencestorev1.RegisterEvidenceStoreServiceServer(r, NewServer(store))
	}, nil
}

// directory reads the configuration; an unknown member is refused.
func directory(raw []byte, dataDir string) (string, error) {
	c := config{Directory: dataDir}
	if len(bytes.TrimSpace(raw)) > 0 {
		dec := json.NewDecoder(bytes.NewReader(raw))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&c); err != nil {
			return "", fmt.Errorf("configuration: %w", err)
		}
		if _, err := dec.Token(); err != io.EOF {
			return "", fmt.Errorf("configuration: more than one document")
		}
	}
	if !filepath.IsAbs(c.Directory) {
		return "", fmt.Errorf("configuration: directory %q is not an absolute path", c.Directory)
	}
	return c.Directory, nil
}
