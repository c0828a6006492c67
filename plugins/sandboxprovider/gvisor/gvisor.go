// Package gvisor implements the sandboxprovider port with gVisor: each sandbox
// has a kernel of its own, no network, and its writable layer in memory. It
// starts the program numi-sandbox by path and is served by the runtime itself,
// since only a provider bound to the deployment may make sandboxes (P-149).
package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"google.golang.org/grpc"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	sandboxproviderv1 "github.com/numinance/numinance/gen/numinance/ports/sandboxprovider/v1"
	"github.com/numinance/numinance/sdk"
)

// Config is the provider's configuration, as JSON in the handshake.
type Config struct {
	Runtime string `json:"runtime"` // path of numi-sandbox
	Init    string `json:"init"`    // path of numi-init
	Images  string `json:"images"`  // directory of the unpacked images
	State   string `json:"state"`   // directory of the sandboxes; "" is the plugin's own
}

// Plugin is the gVisor provider. It needs a data directory and a Config.
func Plugin() sdk.Plugin {
	return sdk.Plugin{
		Manifest: &pluginv1.Manifest{
			ExtensionId: "dev.numinance.embedded/sandboxprovider-gvisor",
			Version:     "1.0.0", Port: "sandboxprovider", SpecVersion: "1.0.0",
			Verbs:       []string{"Create", "Exec", "Wait", "Snapshot", "Destroy"},
			Description: "Sandboxes with a kernel of their own, by gVisor.",
		},
		Open: func(ctx context.Context, s *sdk.Session) (sdk.Register, error) {
			var c Config
			if err := json.Unmarshal(s.Config, &c); err != nil {
				return nil, fmt.Errorf("gvisor provider: configuration: %w", err)
			}
			if c.State == "" {
				c.State = s.DataDir
			}
			p, err := open(ctx, c, s.Host)
			if err != nil {
				return nil, fmt.Errorf("gvisor provider: %w", err)
			}
			return func(r grpc.ServiceRegistrar) { sandboxproviderv1.RegisterSandboxProviderServiceServer(r, p) }, nil
		},
	}
}

// open takes the state directory for this process alone and removes what a
// killed predecessor left there.
func open(ctx context.Context, c Config, blobs *sdk.Host) (*provider, error) {
	for name, p := range map[string]string{"runtime": c.Runtime, "init": c.Init, "images": c.Images, "state": c.State} {
		if !filepath.IsAbs(p) {
			return nil, fmt.Errorf("%s %q is not an absolute path", name, p)
		}
	}
	for _, p := range []string{c.Runtime, c.Init} {
		if st, err := os.Stat(p); err != nil || !st.Mode().IsRegular() || st.Mode()&0o111 == 0 {
			return nil, fmt.Errorf("%s is not a program; it belongs in the same directory as numi", p)
		}
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(c.Runtime), "gvisor-bin")); err == nil {
		return nil, fmt.Errorf("remove %s: the runtime would start programs from there that nobody pinned", filepath.Join(filepath.Dir(c.Runtime), "gvisor-bin"))
	}
	if err := os.MkdirAll(filepath.Join(c.State, "boxes"), 0o700); err != nil {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	lock, err := lockDir(c.State)
	if err != nil {
		return nil, err
	}
	tools, err := installInit(c)
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	p := &provider{
		cfg: c, blobs: blobs, lock: lock, tools: tools, images: newImages(c.Images),
		rt:    newRuntime(c.Runtime, filepath.Join(c.State, "runtime")),
		boxes: map[string]*box{}, gone: map[string]bool{},
	}
	if err := p.sweep(ctx); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return p, nil
}

// installInit puts a copy of PID 1's program alone into a directory, so that
// nothing else of the host's appears where it is bound.
func installInit(c Config) (string, error) {
	b, err := os.ReadFile(c.Init)
	if err != nil {
		return "", fmt.Errorf("read PID 1's program: %w", err)
	}
	dir := filepath.Join(c.State, "init-"+hashOf(b)[:16])
	to := filepath.Join(dir, "numi-init")
	if have, err := os.ReadFile(to); err == nil && hashOf(have) == hashOf(b) {
		return dir, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("install PID 1's program: %w", err)
	}
	tmp := to + ".new"
	if err := os.WriteFile(tmp, b, 0o755); err != nil {
		return "", fmt.Errorf("install PID 1's program: %w", err)
	}
	if err := errors.Join(os.Chmod(tmp, 0o755), os.Chmod(dir, 0o755), os.Rename(tmp, to)); err != nil {
		return "", fmt.Errorf("install PID 1's program: %w", err)
	}
	return dir, nil
}
