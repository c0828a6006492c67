package daemon

import (
	"archive/zip"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/numinance/numinance/internal/contexts/knowledge"
	"github.com/numinance/numinance/internal/contexts/profile"
	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/kinds"
	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/core/policy"
)

// maxControl bounds a control directory: 16 MiB.
const maxControl = 16 << 20

// controls holds the control documents of Changes. A Change rests on the
// documents as they were when it was proposed: they are kept as one archive
// under its digest, and what a directory says later changes nothing.
type controls struct {
	d *Daemon

	mu      sync.Mutex // guards what follows
	sets    map[digest.Digest]*kinds.Set
	engines map[identity.ChangeID]*policy.Engine
}

// keep stores the documents of a directory and returns the digest of the
// archive. The documents have to load as a whole.
func (c *controls) keep(ctx context.Context, files fs.FS) (digest.Digest, error) {
	_, report := kinds.Load(files)
	if !report.OK() {
		return "", fmt.Errorf("the control documents do not load: %s", report.Problems()[0])
	}
	texts := map[string][]byte{}
	total := 0
	err := fs.WalkDir(files, ".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		b, err := fs.ReadFile(files, path)
		if total += len(b); total > maxControl {
			return fmt.Errorf("the control directory is larger than %d bytes", maxControl)
		}
		texts[path] = b
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read the control directory: %w", err)
	}
	archive, err := pack(texts)
	if err != nil {
		return "", err
	}
	ref, err := c.d.blobs.PutBytes(ctx, archive)
	if err != nil {
		return "", fmt.Errorf("keep the control documents: %w", err)
	}
	return ref.Digest, nil
}

// pack writes the files into an archive that is the same for the same files.
func pack(files map[string][]byte) ([]byte, error) {
	var buf bytes.Buffer
	w := zip.NewWriter(&buf)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		f, err := w.CreateHeader(&zip.FileHeader{Name: name, Method: zip.Store})
		if err != nil {
			return nil, fmt.Errorf("pack %s: %w", name, err)
		}
		if _, err := f.Write(files[name]); err != nil {
			return nil, fmt.Errorf("pack %s: %w", name, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("pack: %w", err)
	}
	return buf.Bytes(), nil
}

// set loads kept documents.
func (c *controls) set(of digest.Digest) (*kinds.Set, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s, ok := c.sets[of]; ok {
		return s, nil
	}
	b, err := c.d.blobs.Bytes(of, 2*maxControl)
	if err != nil {
		return nil, fmt.Errorf("read the control documents: %w", err)
	}
	archive, err := zip.NewReader(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return nil, fmt.Errorf("read the control documents: %w", err)
	}
	s, report := kinds.Load(archive)
	if !report.OK() {
		return nil, fmt.Errorf("the control documents %s do not load any more: %s", of, report.Problems()[0])
	}
	c.sets[of] = s
	return s, nil
}

// govern puts the policies of a Change's documents in force for its decisions.
// Documents that cannot be had are an error: then nothing is decided.
func (c *controls) govern(id identity.ChangeID, control digest.Digest) error {
	c.mu.Lock()
	_, ok := c.engines[id]
	c.mu.Unlock()
	if ok {
		return nil
	}
	s, err := c.set(control)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.engines[id] = s.Policies()
	return nil
}

// Decide decides by the policies that govern the Change of r, and by no others:
// a Change that was not put under its own policies is denied everything by the
// zero engine. Evidence, which belongs to no Change, is not decided by policies.
func (c *controls) Decide(r policy.Request) policy.Decision {
	c.mu.Lock()
	engine := c.engines[r.Change.ID]
	c.mu.Unlock()
	return engine.Decide(r)
}

// bound are the documents that govern one Change.
type bound struct {
	kinds.Bound
	set *kinds.Set
}

// documents returns what governs a Change.
func (d *Daemon) documents(s change.State) (bound, error) {
	return d.bind(s.Request.Control, s.Request.Repository)
}

func (d *Daemon) bind(control digest.Digest, resource string) (bound, error) {
	set, err := d.controls.set(control)
	if err != nil {
		return bound{}, err
	}
	for _, name := range set.Repositories() {
		b, err := set.Bind(name)
		if err != nil {
			return bound{}, err
		}
		if b.Repository.GetResource() == resource {
			return bound{Bound: b, set: set}, nil
		}
	}
	return bound{}, &change.Fault{Class: change.Denied, Reason: fmt.Sprintf("no Repository document has the resource %q: a repository without documents takes no changes", resource)}
}

// paths is what an author run may change.
func (b bound) paths() pathscope.Scope {
	return pathscope.Scope{Allowed: b.Profile.GetAllowedPaths(), Denied: b.Profile.GetDeniedPaths(), Protected: b.Protected}
}

func (b bound) capabilities() []string {
	var out []string
	for _, c := range b.Profile.GetCapabilities() {
		out = append(out, c.String())
	}
	return out
}

// egress is what an author run may reach.
func (b bound) egress() []grant.Destination {
	var out []grant.Destination
	for _, d := range b.Profile.GetEgress() {
		out = append(out, grant.Destination{Host: d.GetHost(), Port: int(d.GetPort())})
	}
	return out
}

func (b bound) budget() grant.Budget {
	g := b.Profile.GetBudget()
	return grant.Budget{
		Actions: int64(g.GetActions()), OutputBytes: int64(g.GetOutputBytes()), Tokens: int64(g.GetTokens()), Wall: g.GetWall().AsDuration(),
	}
}

// connections are the knowledge connections that a Change may ask.
func (b bound) connections() []knowledge.Connection {
	all := b.set.Connections()
	var out []knowledge.Connection
	for _, name := range slices.Sorted(maps.Keys(all)) {
		spec := all[name].GetSpec()
		out = append(out, knowledge.Connection{
			Name: name, Scope: spec.GetScope(),
			MaxItems: int(spec.GetBudgets().GetCallsPerStage()), MaxBytes: int(spec.GetBudgets().GetBytesPerCall()),
		})
	}
	return out
}

// governing tells the profile context what governs a repository.
type governing struct {
	d       *Daemon
	control digest.Digest
}

// Governing returns the documents of the Change's own control set.
func (g governing) Governing(_ context.Context, repository, _ string) (profile.Governing, error) {
	b, err := g.d.bind(g.control, repository)
	if err != nil {
		return profile.Governing{}, err
	}
	name, err := digest.OfCanonical(map[string]any{"repository": repository, "control": string(b.set.Revision())})
	if err != nil {
		return profile.Governing{}, err
	}
	limits := change.DefaultLimits()
	limits.Revisions = int(b.Profile.GetMaxRevisions())
	return profile.Governing{
		Profile: b.ProfileDigest, Policy: b.set.Policies().Revision(), Repository: name, Environment: b.EnvironmentDigest,
		Needs: change.Needs{Reviewers: 1}, Limits: &limits,
	}, nil
}

// writeControl writes generated documents where a person can read and edit
// them. A directory that is there already is left as it is.
func writeControl(dir string, files map[string]string) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("look at the control directory: %w", err)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".control-")
	if err != nil {
		return fmt.Errorf("write the control directory: %w", err)
	}
	defer os.RemoveAll(tmp)
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(tmp, name), []byte(text), 0o600); err != nil {
			return fmt.Errorf("write the control directory: %w", err)
		}
	}
	if err := os.Rename(tmp, dir); err != nil {
		return fmt.Errorf("write the control directory: %w", err)
	}
	return nil
}
