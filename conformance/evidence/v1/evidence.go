// Package evidence holds the golden vectors of the evidence format: bundles
// that verify and tampered twins that do not, each with the label a verifier
// must give. Our verifier is tested with them, and so can be anyone's.
package evidence

import (
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
)

// vectors holds index.json, the key files and one folder per bundle.
//
//go:embed vectors
var vectors embed.FS

// Vector is one bundle and what a verifier must say to it.
type Vector struct {
	// Name is the bundle's folder.
	Name string `json:"name"`
	// Means says what is special about it.
	Means string `json:"means"`
	// Label is the failure label; empty means that the bundle verifies.
	Label string `json:"label"`
	// Chain is what a verified chain is called: "open through N" or "closed N".
	Chain string `json:"chain,omitempty"`
	// Protected says, for a bundle that verifies, whether a witness or a
	// checkpoint from elsewhere protects against the log's operator.
	Protected bool `json:"protected,omitempty"`
	// Keys is the file of trusted keys.
	Keys string `json:"keys"`
	// Remembered and Commit are files with a checkpoint from elsewhere, if any.
	Remembered string `json:"remembered,omitempty"`
	Commit     string `json:"commit,omitempty"`
	// Closed and Witnesses are demands beyond those every bundle has to meet.
	Closed    bool `json:"closed,omitempty"`
	Witnesses int  `json:"witnesses,omitempty"`
}

// Files returns the folder that index.json, key files and bundles are in.
func Files() (fs.FS, error) {
	return fs.Sub(vectors, "vectors")
}

// Vectors returns all vectors in the order of index.json.
func Vectors() ([]Vector, error) {
	b, err := vectors.ReadFile("vectors/index.json")
	if err != nil {
		return nil, fmt.Errorf("read vectors: %w", err)
	}
	var out []Vector
	if err := json.Unmarshal(b, &out); err != nil {
		return nil, fmt.Errorf("read vectors: %w", err)
	}
	return out, nil
}
