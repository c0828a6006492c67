package tessera

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"

	"google.golang.org/grpc"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	transparencylogv1 "github.com/numinance/numinance/gen/numinance/ports/transparencylog/v1"
	"github.com/numinance/numinance/sdk"
)

// signIntent is the one thing the host signs for a plugin.
const signIntent = "tlog-checkpoint"

// config is the provider's configuration.
type config struct {
	// Origin is the name of the log, the same as that of the host's key for it.
	Origin string `json:"origin"`
	// Directory holds the log, an absolute path; the plugin's data directory if
	// empty.
	Directory string `json:"directory"`
}

// Plugin returns the plugin.
func Plugin() sdk.Plugin {
	return sdk.Plugin{
		Manifest: &pluginv1.Manifest{
			ExtensionId:  "dev.numinance.embedded/transparencylog-tessera",
			Version:      "1.0.0",
			Port:         "transparencylog",
			SpecVersion:  "1.0.0",
			Verbs:        []string{"Append", "Checkpoint", "Prove", "Lookup"},
			Capabilities: []string{"transparencylog.lookup"},
			Description:  "Keeps a C2SP tile log in one directory; the host signs its checkpoints.",
		},
		Open: open,
	}
}

func open(ctx context.Context, s *sdk.Session) (sdk.Register, error) {
	c, err := parseConfig(s.Config, s.DataDir)
	if err != nil {
		return nil, err
	}
	log, err := Open(ctx, Config{Directory: c.Directory, Origin: c.Origin}, host{s.Host})
	if err != nil {
		return nil, err
	}
	// The log needs no farewell: what it acknowledged is published and durable,
	// and its lock ends with the process.
	return func(r grpc.ServiceRegistrar) {
		transparencylogv1.RegisterTransparencyLogServiceServer(r, NewServer(log))
	}, nil
}

// parseConfig reads the configuration; an unknown member is refused.
func parseConfig(raw []byte, dataDir string) (config, error) {
	c := config{Directory: dataDir}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		return config{}, fmt.Errorf("configuration: %w", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return config{}, fmt.Errorf("configuration: more than one document")
	}
	if c.Origin == "" {
		return config{}, fmt.Errorf("configuration: origin, the name of the log, is missing")
	}
	if !filepath.IsAbs(c.Directory) {
		return config{}, fmt.Errorf("configuration: directory %q is not an absolute path", c.Directory)
	}
	return c, nil
}

// host asks the host through the session.
type host struct{ session *sdk.Host }

// Sign implements Signer.
func (h host) Sign(ctx context.Context, text []byte) (Signature, error) {
	r, err := h.session.Sign(ctx, signIntent, text)
	if err != nil {
		return Signature{}, err
	}
	return Signature{Signature: r.GetSignature(), PublicKey: r.GetPublicKey(), KeyName: r.GetKeyName()}, nil
}
