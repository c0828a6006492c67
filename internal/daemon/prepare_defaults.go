package daemon

import (
	"context"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/numinance/numinance/internal/core/kinds"
	"github.com/numinance/numinance/internal/host/gomodules"
	"github.com/numinance/numinance/internal/host/worktree"
)

// suggestPreparation fills in what a generated Environment says of preparation,
// from the files at the root of the base branch. Registries are those that this
// machine's own tools are set to use; whoever edits the document decides.
func (d *Daemon) suggestPreparation(ctx context.Context, def *kinds.Defaults) error {
	forge := d.forge(def.Repository)
	root, err := worktree.RootFiles(ctx, forge, def.BaseBranch)
	if err != nil {
		return err
	}
	def.Variables = map[string]string{}
	if root["go.mod"] {
		if err := suggestGo(ctx, def, root, forge); err != nil {
			return err
		}
	}
	if root["package.json"] {
		suggestNode(ctx, def, root)
	}
	if root["requirements.txt"] || root["pyproject.toml"] || root["setup.py"] {
		suggestPython(def, root)
	}
	return nil
}

// suggestGo compiles what the checks will compile, without running anything of
// it. Modules are downloaded only where this machine lacks some of them.
func suggestGo(ctx context.Context, def *kinds.Defaults, root map[string]bool, forge string) error {
	def.Lockfiles = append(def.Lockfiles, "go.mod")
	if root["go.sum"] {
		def.Lockfiles = append(def.Lockfiles, "go.sum")
		sum, err := worktree.RootFile(ctx, forge, def.BaseBranch, "go.sum", maxLockfile)
		if err != nil {
			return err
		}
		cache, err := hostModules(ctx)
		if err != nil {
			return err
		}
		missing, err := gomodules.Missing(ctx, sum, cache)
		if err != nil {
			return err
		}
		if len(missing) > 0 {
			def.Prepare = append(def.Prepare, "go mod download")
			proxies := strings.FieldsFunc(configured(ctx, "go", "env", "GOPROXY"), func(r rune) bool { return r == ',' || r == '|' })
			proxies = slices.DeleteFunc(proxies, func(p string) bool { return !strings.HasPrefix(p, "https://") })
			// Without one the step fails and says that no host may be reached.
			if len(proxies) > 0 {
				def.Variables["GOPROXY"] = strings.Join(proxies, ",")
			}
			for _, p := range proxies {
				addRegistry(def, p)
			}
		}
	}
	warm := []string{"go test -exec true ./..."}
	for _, c := range def.Checks {
		argv := kinds.Argv(c)
		if len(argv) < 2 || argv[0] != "go" {
			continue
		}
		switch argv[1] {
		case "vet", "build":
			warm = append(warm, c)
		case "test":
			warm = append(warm, strings.Replace(c, "go test", "go test -exec true", 1))
		}
	}
	slices.Sort(warm)
	def.Warm = append(def.Warm, slices.Compact(warm)...)
	return nil
}

// suggestNode installs exactly what the lockfile names, without running any
// package's scripts.
func suggestNode(ctx context.Context, def *kinds.Defaults, root map[string]bool) {
	if !root["node_modules"] {
		def.Scratch = append(def.Scratch, "node_modules/")
	}
	if !root["package-lock.json"] && !root["npm-shrinkwrap.json"] {
		return
	}
	for _, f := range []string{"package.json", "package-lock.json", "npm-shrinkwrap.json"} {
		if root[f] {
			def.Lockfiles = append(def.Lockfiles, f)
		}
	}
	def.Prepare = append(def.Prepare, "npm ci --ignore-scripts")
	// Without one the step fails and says that no host may be reached.
	if registry := configured(ctx, "npm", "config", "get", "registry"); strings.HasPrefix(registry, "https://") {
		def.Variables["npm_config_registry"] = registry
		addRegistry(def, registry)
	}
}

// suggestPython reaches no index: what is needed beyond the standard library
// lies in the repository as wheels.
func suggestPython(def *kinds.Defaults, root map[string]bool) {
	for _, f := range []string{"requirements.txt", "pyproject.toml", "setup.py"} {
		if root[f] {
			def.Lockfiles = append(def.Lockfiles, f)
		}
	}
	def.Scratch = append(def.Scratch, ".venv/", ".pytest_cache/")
	for _, wheels := range []string{"wheels", "wheelhouse", "vendor"} {
		if root[wheels] && root["requirements.txt"] {
			def.Prepare = append(def.Prepare, "python3 -m venv .venv", ".venv/bin/pip install --no-index --find-links "+wheels+" -r requirements.txt")
			return
		}
	}
}

// configured asks a tool of this machine for a setting of its own; "" if it does
// not say.
func configured(ctx context.Context, argv ...string) string {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = os.TempDir() // not in a repository, whose own settings count for nothing
	out, err := cmd.Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

func addRegistry(def *kinds.Defaults, from string) {
	u, err := url.Parse(from)
	if err != nil || u.Hostname() == "" || u.User != nil {
		return
	}
	host := strings.ToLower(u.Hostname())
	if p := u.Port(); p != "" {
		host += ":" + p
	}
	if !slices.Contains(def.Registries, host) {
		def.Registries = append(def.Registries, host)
	}
}
