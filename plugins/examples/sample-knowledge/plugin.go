package sampleknowledge

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	knowledgev1 "github.com/numinance/numinance/gen/numinance/ports/knowledge/v1"
	"github.com/numinance/numinance/sdk"
)

// Config is the provider's configuration. Everything is optional; an unknown
// field is refused.
type Config struct {
	// Connection is the one connection that is served; empty serves any.
	Connection string `json:"connection"`
	// Documents replace the seed.
	Documents []Document `json:"documents"`
	// Outage makes the source unreachable.
	Outage bool `json:"outage"`
}

// Document is one document of the source. Versions are in order, the last one is
// the current one.
type Document struct {
	Ref      string    `json:"ref"`
	Aliases  []string  `json:"aliases"`
	Title    string    `json:"title"`
	Versions []Version `json:"versions"`
	// Hidden documents do not exist for the principal; Closed ones are refused
	// openly.
	Hidden bool `json:"hidden"`
	Closed bool `json:"closed"`
}

// Version is one state of a document.
type Version struct {
	Name    string `json:"name"`
	Content string `json:"content"`
}

// Plugin returns the provider.
func Plugin() sdk.Plugin {
	return sdk.Plugin{
		Manifest: &pluginv1.Manifest{
			ExtensionId: "dev.numinance.examples/sample-knowledge",
			Version:     "1.0.0",
			Port:        "knowledge",
			SpecVersion: "1.0.0",
			Verbs:       []string{"Search", "Fetch", "Resolve"},
			Description: "A knowledge provider over a few documents in memory, to learn from.",
		},
		Open: open,
	}
}

func open(_ context.Context, s *sdk.Session) (sdk.Register, error) {
	var c Config
	if len(s.Config) > 0 {
		d := json.NewDecoder(bytes.NewReader(s.Config))
		d.DisallowUnknownFields()
		if err := d.Decode(&c); err != nil {
			return nil, fmt.Errorf("configuration: %w", err)
		}
	}
	if c.Documents == nil {
		c.Documents = Seed()
	}
	source, err := newSource(c)
	if err != nil {
		return nil, err
	}
	bounds, err := protovalidate.New()
	if err != nil {
		return nil, fmt.Errorf("compile the bounds: %w", err)
	}
	server := &server{source: source, bounds: bounds, connection: c.Connection}
	return func(r grpc.ServiceRegistrar) { knowledgev1.RegisterKnowledgeServiceServer(r, server) }, nil
}

// newSource checks that no two documents claim one name.
func newSource(c Config) (*source, error) {
	s := &source{outage: c.Outage, byName: map[string]*Document{}}
	for i := range c.Documents {
		d := &c.Documents[i]
		if len(d.Versions) == 0 {
			return nil, fmt.Errorf("document %q has no version", d.Ref)
		}
		if climbs(d.Ref) {
			return nil, fmt.Errorf("document %q: its ref is not a path of plain segments", d.Ref)
		}
		for _, name := range append([]string{d.Ref}, d.Aliases...) {
			if s.byName[name] != nil {
				return nil, fmt.Errorf("two documents are named %q", name)
			}
			s.byName[name] = d
		}
		s.documents = append(s.documents, d)
	}
	if len(s.documents) == 0 {
		return nil, errors.New("there are no documents")
	}
	return s, nil
}
