package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"sync"
	"time"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/lockfile"
	"github.com/numinance/numinance/internal/host/catalog"
	"github.com/numinance/numinance/internal/host/hostservice"
	"github.com/numinance/numinance/internal/host/pluginhost"
)

// bindings says which bundled provider serves a port of the deployment.
var bindings = map[string]string{
	"scm": "scm/git", "ticketing": "ticketing/files", "knowledge": "knowledge/files", "ciexecutor": "ciexecutor/local",
	"evidencestore": "evidencestore/files", "transparencylog": "transparencylog/tessera", "sandboxprovider": "sandboxprovider/gvisor",
}

// quotaProvider bounds what one deployment-wide plugin may leave with the host.
const quotaProvider = 16 << 30

// openProviders binds the deployment's plugins. Each starts when it is first
// asked for, pinned by the lockfile.
func (d *Daemon) openProviders() error {
	lock, err := d.lockfile()
	if err != nil {
		return err
	}
	c := catalog.Config{Lock: lock, Now: d.now}
	for _, port := range slices.Sorted(maps.Keys(bindings)) {
		b, err := d.binding(port)
		if err != nil {
			return err
		}
		c.Bindings = append(c.Bindings, b)
	}
	d.providers, err = catalog.New(c)
	return err
}

// lockEntry is what the lockfile says of a bundled plugin.
func (e entry) lockEntry() (lockfile.Entry, error) {
	expect, err := e.expectation()
	return lockfile.Entry{Kind: lockfile.Plugin, Name: expect.Extension, Digest: expect.Manifest, Manifest: expect.Manifest, Origin: expect.Origin}, err
}

// lockfile reads the pins of this deployment; the first run writes them.
func (d *Daemon) lockfile() (lockfile.File, error) {
	var entries []lockfile.Entry
	for _, name := range bundledNames() {
		e, err := bundled[name].lockEntry()
		if err != nil {
			return lockfile.File{}, err
		}
		entries = append(entries, e)
	}
	path := d.home.at("numinance.lock")
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		f, err := lockfile.New(entries)
		if err != nil {
			return f, err
		}
		tmp := path + ".new"
		if err := os.WriteFile(tmp, f.Format(), 0o600); err != nil {
			return f, fmt.Errorf("write the lockfile: %w", err)
		}
		return f, os.Rename(tmp, path)
	}
	if err != nil {
		return lockfile.File{}, fmt.Errorf("read the lockfile: %w", err)
	}
	f, err := lockfile.Parse(text)
	if err != nil {
		return f, fmt.Errorf("%s: %w", path, err)
	}
	for _, e := range entries {
		if err := f.Check(e); err != nil {
			return f, fmt.Errorf("%s does not pin the plugins of this binary: %w: remove the file to pin them anew", path, err)
		}
	}
	return f, nil
}

// binding joins a port to its bundled provider.
func (d *Daemon) binding(port string) (catalog.Binding, error) {
	name := bindings[port]
	e := bundled[name]
	expect, err := e.expectation()
	if err != nil {
		return catalog.Binding{}, err
	}
	locked, err := e.lockEntry()
	if err != nil {
		return catalog.Binding{}, err
	}
	settings, err := d.settings(name)
	if err != nil {
		return catalog.Binding{}, err
	}
	return catalog.Binding{Locked: locked, Plugin: pluginhost.Config{
		Launcher: d.launcher(port, nil), Expect: expect, Settings: settings, Checker: d.checker, StartTimeout: 30 * time.Second,
		Host: func(plugin *pluginhost.Plugin) pluginv1.HostServiceServer {
			session := hostservice.Config{
				Plugin: expect.Extension, Readable: plugin.Resolvable, Blobs: d.blobs, Put: d.blobs.Account(quotaProvider),
				MaxBlob: 8 << 30, Credentials: d.broker, Refusals: hostservice.Journal{Journal: d.journal}, Log: d.log, Checker: d.checker,
			}
			if port == "transparencylog" {
				session.Sign = d.broker
			}
			s, err := hostservice.New(session)
			if err != nil {
				return pluginv1.UnimplementedHostServiceServer{}
			}
			return s
		},
	}}, nil
}

// launcher starts this binary again as a port's provider, in its jail.
func (d *Daemon) launcher(port string, readable []string) pluginhost.Process {
	name := bindings[port]
	profile := pluginhost.BundledProfile(name)
	profile.Readable = append(profile.Readable, readable...)
	return pluginhost.Process{
		Argv: []string{d.program, "plugin", "serve", name}, DataDir: d.home.Provider(port, path.Base(name)), RunDir: d.home.Run(),
		Log: d.home.at("plugins-" + port + ".log"), UID: pluginhost.UIDBase + bundled[name].number, Profile: profile,
	}
}

// settings is a provider's configuration before any Change is known.
func (d *Daemon) settings(name string) ([]byte, error) {
	var config any
	switch name {
	case "scm/git":
		config = map[string]any{"repositories": []any{}, "imported": true}
	case "ticketing/files":
		config = map[string]any{"projects": map[string]string{}, "imported": true}
	case "transparencylog/tessera":
		config = map[string]any{"origin": d.logName}
	case "sandboxprovider/gvisor":
		config = map[string]any{"runtime": d.beside("numi-sandbox"), "init": d.beside("numi-init"), "images": d.home.Images()}
	case "ciexecutor/local":
		config = map[string]any{"pipelines": map[string]any{}, "repositories": map[string]string{}}
	case "knowledge/files":
		config = map[string]any{"connections": map[string]string{}}
	default:
		return nil, nil
	}
	return json.Marshal(config)
}

// prepareProviders hands what the runtime made for a Change over to the plugins
// that serve it: the forge's mirror and the tracker's project.
func (d *Daemon) prepareProviders() error {
	if err := d.handOver("scm/git", d.home.Provider("scm", "git")); err != nil {
		return err
	}
	return d.handOver("ticketing/files", d.home.Provider("ticketing", "files"))
}

// pipelines is what the embedded CI knows: the pipelines of all Changes that
// came to theirs in this process.
type pipelines struct {
	mu   sync.Mutex // guards both; held while the provider is configured
	of   map[string]any
	from map[string]string // repository to directory
}

// usePipeline makes the pipeline of a Change known to the provider that runs it.
// A process that took the Change over does so as well as the one that began it.
func (d *Daemon) usePipeline(req change.Request, b bound) error {
	if b.Pipeline == nil {
		return nil
	}
	type step struct {
		Name    string   `json:"name"`
		Argv    []string `json:"argv"`
		Timeout string   `json:"timeout,omitempty"`
	}
	var steps []step
	for _, s := range b.Pipeline.GetSteps() {
		one := step{Name: s.GetName(), Argv: s.GetArgv()}
		if s.GetTimeout() != nil {
			one.Timeout = s.GetTimeout().AsDuration().String()
		}
		steps = append(steps, one)
	}
	p := &d.pipelines
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of == nil {
		p.of, p.from = map[string]any{}, map[string]string{}
	}
	p.of[b.Pipeline.GetResource()] = map[string]any{"steps": steps}
	p.from[req.Repository] = d.forge(req.Repository)
	settings, err := json.Marshal(map[string]any{"pipelines": p.of, "repositories": p.from})
	if err != nil {
		return err
	}
	return d.providers.Configure("ciexecutor", settings, d.launcher("ciexecutor", []string{d.home.Provider("scm", "git")}))
}

// handOver gives what the runtime wrote into a plugin's directory to the uid
// that the plugin runs as.
func (d *Daemon) handOver(name, dir string) error {
	if os.Getuid() != 0 {
		return nil
	}
	uid := pluginhost.UIDBase + bundled[name].number
	if err := give(dir, uid); err != nil {
		return fmt.Errorf("hand %s over to its plugin: %w", dir, err)
	}
	return nil
}

// give makes everything below dir belong to uid. The plugin may be running and
// change the directory meanwhile: nothing outside of it is reached, whatever
// stands in the place of a directory by then.
func give(dir string, uid int) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	return fs.WalkDir(root.FS(), ".", func(path string, _ fs.DirEntry, err error) error {
		if err == nil {
			err = root.Lchown(path, uid, uid)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the plugin removed it
		}
		return err
	})
}

// changes lists the Changes that have sandboxes open.
func (l *liveRuns) changes() (out []identity.ChangeID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id := range l.m {
		out = append(out, id)
	}
	return out
}
