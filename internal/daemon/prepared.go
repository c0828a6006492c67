package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/numinance/numinance/internal/contexts/sandbox"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/gomodules"
	"github.com/numinance/numinance/internal/host/worktree"
	"github.com/numinance/numinance/internal/orchestration"
)

// preparation is what an environment adds to every sandbox of a Change.
type preparation struct {
	mounts      []sandbox.Mount
	scratch     blob.Ref // layer of the scratch directories; zero if there are none
	environment map[string]string
	// name is the digest of what prepare left behind; empty where there is no
	// prepare.
	name digest.Digest
}

// Where prepared things appear in a sandbox.
const goProxyInside = "/opt/numi/goproxy"

// prepared makes what the base revision needs to build without a network: the
// Go modules that its go.sum names, as far as this machine holds them with the
// right hashes, and what the Environment's prepare steps leave behind.
func (d *Daemon) prepared(ctx context.Context, j orchestration.Job, docs bound, user sandbox.User) (preparation, error) {
	p, err := d.offline(ctx, j, docs)
	if err != nil || len(docs.Environment.GetPrepare()) == 0 {
		return p, err
	}
	l, err := d.layer(ctx, j, docs, p)
	if err != nil {
		return p, err
	}
	p.name = l.Snapshot.Digest
	p.mounts = append(p.mounts, sandbox.Mount{Source: d.layerDir(l), Target: sandbox.PreparedDir, CopyOnWrite: true})
	p.scratch = l.Agent
	if user == sandbox.Candidate {
		p.scratch = l.Candidate
	}
	return p, nil
}

// offline is the part of a preparation that needs no sandbox and no network.
func (d *Daemon) offline(ctx context.Context, j orchestration.Job, docs bound) (preparation, error) {
	p := preparation{environment: toolEnvironment()}
	maps.Copy(p.environment, docs.Environment.GetVariables())
	sum, err := d.fileAt(ctx, j, "go.sum")
	if err != nil || sum == nil {
		return p, err
	}
	dir := d.home.at("cache", "goproxy-"+digest.Of(sum).Hex()[:16])
	if _, err := os.Stat(dir); err != nil {
		if err := d.assembleModules(ctx, j.State.ID, sum, dir); err != nil {
			return p, err
		}
	}
	p.mounts = append(p.mounts, sandbox.Mount{Source: dir, Target: goProxyInside})
	after := p.environment["GOPROXY"]
	p.environment["GOPROXY"] = "file://" + goProxyInside + "," + after
	return p, nil
}

func (d *Daemon) assembleModules(ctx context.Context, id identity.ChangeID, sum []byte, dir string) error {
	cache, err := hostModules(ctx)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o711); err != nil {
		return fmt.Errorf("assemble Go modules: %w", err)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".goproxy-")
	if err != nil {
		return fmt.Errorf("assemble Go modules: %w", err)
	}
	defer os.RemoveAll(tmp)
	missing, err := gomodules.Assemble(ctx, sum, cache, tmp)
	if err != nil {
		return fmt.Errorf("assemble Go modules: %w", err)
	}
	if len(missing) > 0 {
		d.tellStage(id, fmt.Sprintf("note: %d Go modules are not in this machine's module cache (%s …); preparation fetches them if the Environment's prepare_egress allows", len(missing), missing[0]))
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return fmt.Errorf("assemble Go modules: %w", err)
	}
	if err := os.Rename(tmp, dir); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("assemble Go modules: %w", err)
	}
	return nil
}

// hostModules is this machine's Go module cache, or nothing where there is no Go.
func hostModules(ctx context.Context) (string, error) {
	if !hasGo() {
		return os.DevNull, nil
	}
	out, err := exec.CommandContext(ctx, "go", "env", "GOMODCACHE").Output()
	if err != nil {
		return "", fmt.Errorf("find the Go module cache: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// maxLockfile bounds a lockfile of the repository that is read by the host.
const maxLockfile = 16 << 20

// fileAt returns a regular file of the base revision, or nil if it has none.
func (d *Daemon) fileAt(ctx context.Context, j orchestration.Job, path string) ([]byte, error) {
	store, err := d.objects(ctx, j.State.ID)
	if err != nil {
		return nil, err
	}
	for e, err := range store.Entries(ctx, j.State.Admission.BaseRevision) {
		if err != nil {
			return nil, err
		}
		if e.Path != path || (e.Mode != worktree.ModeFile && e.Mode != worktree.ModeExecutable) {
			continue
		}
		r, err := e.Open()
		if err != nil {
			return nil, err
		}
		b, err := io.ReadAll(io.LimitReader(r, maxLockfile+1))
		if err == nil && len(b) > maxLockfile {
			err = fmt.Errorf("%s is larger than %d bytes", path, maxLockfile)
		}
		return b, err
	}
	return nil, nil
}

// toolEnvironment lets tools work without a network, with their caches outside
// of what is snapshotted. Preparation and use have the same, since a build cache
// is of use at its own path alone.
func toolEnvironment() map[string]string {
	return map[string]string{
		"GOTOOLCHAIN": "local", "GOFLAGS": "-buildvcs=false", "GOSUMDB": "off", "GOPROXY": "off",
		"GOCACHE": sandbox.PreparedDir + "/go-build", "GOMODCACHE": sandbox.PreparedDir + "/go-mod",
		// Packages as they came are fetched once and need not be kept.
		"npm_config_cache": "/tmp/npm", "npm_config_update_notifier": "false", "npm_config_fund": "false", "npm_config_audit": "false",
		// A host that is refused stays refused: waiting for it only hides why.
		"npm_config_fetch_retries": "1", "npm_config_fetch_retry_mintimeout": "500", "npm_config_fetch_retry_maxtimeout": "2000",
		"PIP_CACHE_DIR": "/tmp/pip", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1",
		"NODE_EXTRA_CA_CERTS": "/etc/ssl/certs/ca-certificates.crt",
	}
}

// scratch are the Environment's scratch directories as plain paths.
func (b bound) scratch() []string {
	var out []string
	for _, s := range b.Environment.GetScratch() {
		out = append(out, strings.TrimSuffix(strings.TrimSuffix(s, "**"), "/"))
	}
	return out
}
