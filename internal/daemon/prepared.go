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
	"github.com/numinance/numinance/internal/host/gomodules"
	"github.com/numinance/numinance/internal/host/worktree"
	"github.com/numinance/numinance/internal/orchestration"
)

// preparation is what an environment adds to every sandbox of a Change.
type preparation struct {
	mounts      []sandbox.Mount
	environment map[string]string
}

// Where prepared things appear in a sandbox.
const goProxyInside = "/opt/numi/goproxy"

// prepared makes what the base revision needs to build without a network: the
// Go modules that its go.sum names, as far as this machine holds them with the
// right hashes.
func (d *Daemon) prepared(ctx context.Context, j orchestration.Job, docs bound, user sandbox.User) (preparation, error) {
	p := preparation{environment: toolEnvironment()}
	maps.Copy(p.environment, docs.Environment.GetVariables())
	sum, err := d.fileAt(ctx, j, "go.sum")
	if err != nil || sum == nil {
		return p, err
	}
	dir := d.home.at("cache", "goproxy-"+digest.Of(sum).Hex()[:16])
	if _, err := os.Stat(dir); err != nil {
		if err := d.assembleModules(ctx, sum, dir); err != nil {
			return p, err
		}
	}
	p.mounts = append(p.mounts, sandbox.Mount{Source: dir, Target: goProxyInside})
	p.environment["GOPROXY"] = "file://" + goProxyInside + ",off"
	return p, nil
}

func (d *Daemon) assembleModules(ctx context.Context, sum []byte, dir string) error {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMODCACHE").Output()
	if err != nil {
		return fmt.Errorf("find the Go module cache: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o711); err != nil {
		return fmt.Errorf("assemble Go modules: %w", err)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".goproxy-")
	if err != nil {
		return fmt.Errorf("assemble Go modules: %w", err)
	}
	defer os.RemoveAll(tmp)
	missing, err := gomodules.Assemble(ctx, sum, strings.TrimSpace(string(out)), tmp)
	if err != nil {
		return fmt.Errorf("assemble Go modules: %w", err)
	}
	if len(missing) > 0 {
		d.say("note: %d Go modules are not in this machine's module cache (%s …); a build that needs them will fail: run 'go mod download' in the repository", len(missing), missing[0])
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return fmt.Errorf("assemble Go modules: %w", err)
	}
	if err := os.Rename(tmp, dir); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("assemble Go modules: %w", err)
	}
	return nil
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
// of what is snapshotted.
func toolEnvironment() map[string]string {
	return map[string]string{
		"GOTOOLCHAIN": "local", "GOFLAGS": "-buildvcs=false", "GOSUMDB": "off", "GOPROXY": "off",
		"GOCACHE": "/tmp/go-build", "GOMODCACHE": "/tmp/go-mod",
	}
}
