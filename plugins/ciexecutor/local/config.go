package local

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// Config is the provider's configuration in the handshake.
type Config struct {
	Pipelines    map[string]Pipeline `json:"pipelines"`
	Repositories map[string]string   `json:"repositories"`             // name to bare repository on disk
	Environment  map[string]string   `json:"environment,omitempty"`    // of every step, over the defaults
	Concurrent   int                 `json:"max_concurrent,omitempty"` // operations that run at once; 1 if 0
}

// Pipeline is what one operation does.
type Pipeline struct {
	Steps []Step `json:"steps"`
	// Artifacts are patterns of files to keep, relative to the checkout: as
	// path.Match has them, or a directory with a slash at its end.
	Artifacts []string `json:"artifacts,omitempty"`
	// Parameters are the inputs that StartOperation may give; a step sees them
	// as CI_PARAM_NAME.
	Parameters []string `json:"parameters,omitempty"`
}

// Step is one command.
type Step struct {
	Name    string   `json:"name"`
	Argv    []string `json:"argv"`
	Timeout string   `json:"timeout,omitempty"` // such as 5m; 30m if empty

	timeout time.Duration
}

const (
	defaultTimeout = 30 * time.Minute
	maxTimeout     = 12 * time.Hour
	maxSteps       = 100
	maxPatterns    = 64
)

var parameterName = regexp.MustCompile(`^[A-Z][A-Z0-9_]{0,63}$`)

func parseConfig(b []byte) (Config, error) {
	var c Config
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		return c, fmt.Errorf("configuration: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return c, errors.New("configuration: something follows the document")
	}
	if c.Concurrent == 0 {
		c.Concurrent = 1
	}
	if c.Concurrent < 0 || c.Concurrent > 64 {
		return c, fmt.Errorf("configuration: max_concurrent %d: want 1 to 64", c.Concurrent)
	}
	for name, dir := range c.Repositories {
		if name == "" || !filepath.IsAbs(dir) {
			return c, fmt.Errorf("configuration: repository %q: want a name and an absolute path", name)
		}
	}
	for name, p := range c.Pipelines {
		if err := p.complete(); err != nil {
			return c, fmt.Errorf("configuration: pipeline %q: %w", name, err)
		}
	}
	return c, nil
}

func (p Pipeline) complete() error {
	if len(p.Steps) == 0 || len(p.Steps) > maxSteps || len(p.Artifacts) > maxPatterns {
		return fmt.Errorf("it has %d steps and %d artifact patterns: want 1 to %d and at most %d", len(p.Steps), len(p.Artifacts), maxSteps, maxPatterns)
	}
	for i := range p.Steps {
		s := &p.Steps[i]
		if s.Name == "" || len(s.Argv) == 0 || s.Argv[0] == "" {
			return fmt.Errorf("step %d needs a name and argv", i+1)
		}
		s.timeout = defaultTimeout
		if s.Timeout != "" {
			d, err := time.ParseDuration(s.Timeout)
			if err != nil || d <= 0 || d > maxTimeout {
				return fmt.Errorf("step %q: timeout %q: want a time such as 5m, at most %v", s.Name, s.Timeout, maxTimeout)
			}
			s.timeout = d
		}
	}
	for _, a := range p.Artifacts {
		clean := strings.TrimSuffix(a, "/")
		if _, err := path.Match(a, "x"); err != nil || clean == "" || path.IsAbs(a) || path.Clean(clean) != clean || strings.HasPrefix(clean, "..") {
			return fmt.Errorf("artifact pattern %q: want a clean relative pattern", a)
		}
	}
	for _, n := range p.Parameters {
		if !parameterName.MatchString(n) {
			return fmt.Errorf("parameter %q: want capital letters, digits and _", n)
		}
	}
	return nil
}

// matches reports whether a file is an artifact.
func (p Pipeline) matches(name string) bool {
	for _, a := range p.Artifacts {
		if strings.HasSuffix(a, "/") && strings.HasPrefix(name, a) {
			return true
		}
		if ok, _ := path.Match(a, name); ok {
			return true
		}
	}
	return false
}
