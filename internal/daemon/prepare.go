package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/numinance/numinance/internal/contexts/sandbox"
	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/orchestration"

	kindsv1 "github.com/numinance/numinance/gen/numinance/kinds/v1"
)

// layer is what one preparation left behind. It is kept by its key and used by
// every Change of the same key.
type layer struct {
	Snapshot  blob.Ref     `json:"snapshot"` // as it came out of the sandbox
	Agent     blob.Ref     `json:"agent"`    // scratch directories, owned by the agent
	Candidate blob.Ref     `json:"candidate"`
	Steps     []stepResult `json:"steps"`
}

// stepResult is how one prepare step ended.
type stepResult struct {
	Name       string `json:"name"`
	Exit       int32  `json:"exit"`
	Limit      string `json:"limit,omitempty"`
	DurationMS int64  `json:"duration_ms"`
}

// layers lets one preparation of a key run at a time.
type layers struct {
	mu   sync.Mutex // guards of
	of   map[digest.Digest]*sync.Mutex
	seen map[identity.ChangeID]digest.Digest // layer on record for the Change
}

func (l *layers) lock(key digest.Digest) (unlock func()) {
	l.mu.Lock()
	if l.of == nil {
		l.of = map[digest.Digest]*sync.Mutex{}
	}
	m := l.of[key]
	if m == nil {
		m = &sync.Mutex{}
		l.of[key] = m
	}
	l.mu.Unlock()
	m.Lock()
	return m.Unlock
}

// first reports whether the Change did not use the layer before, in this process.
func (l *layers) first(id identity.ChangeID, of digest.Digest) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.seen == nil {
		l.seen = map[identity.ChangeID]digest.Digest{}
	}
	if l.seen[id] == of {
		return false
	}
	l.seen[id] = of
	return true
}

// prepareKey names everything that decides what a preparation makes: the image,
// the steps and the environment they run in, the Environment document, and the
// lockfiles as they are at base. Code of the base revision runs while preparing,
// so what it leaves is only for whoever would run that code anyway: source is
// the repository, whose later revisions a build cache serves too, or the very
// tree, wherever it comes from.
func prepareKey(source string, image digest.Digest, document digest.Digest, steps []*kindsv1.PrepareStep, environment map[string]string, lockfiles map[string]digest.Digest) (digest.Digest, error) {
	type step struct {
		Argv       []string `json:"argv"`
		BestEffort bool     `json:"best_effort"`
	}
	var all []step
	for _, s := range steps {
		all = append(all, step{s.GetArgv(), s.GetBestEffort()})
	}
	return digest.OfCanonical(map[string]any{
		"format": "2", "source": source, "image": string(image), "document": string(document), "steps": all, "environment": environment, "lockfiles": lockfiles,
	})
}

// layer returns the layer of the Change's environment, and prepares it first
// where nobody did so before.
func (d *Daemon) layer(ctx context.Context, j orchestration.Job, docs bound, p preparation) (layer, error) {
	locks := map[string]digest.Digest{}
	for _, path := range docs.Environment.GetLockfiles() {
		b, err := d.fileAt(ctx, j, path)
		if err != nil {
			return layer{}, fmt.Errorf("read the lockfile %s: %w", path, err)
		}
		if b != nil {
			locks[path] = digest.Of(b)
		}
	}
	var keys []digest.Digest // the tree's first: it fits best
	for _, source := range []string{"tree " + j.State.Admission.BaseTree, "repository " + j.State.Request.Repository} {
		key, err := prepareKey(source, d.image, docs.EnvironmentDigest, docs.Environment.GetPrepare(), p.environment, locks)
		if err != nil {
			return layer{}, err
		}
		keys = append(keys, key)
	}
	defer d.layers.lock(keys[0])()
	l, key, err := d.anyLayer(keys)
	if err != nil {
		return layer{}, err
	}
	reused := l.Snapshot.Digest != ""
	if !reused {
		if l, err = d.prepare(ctx, j, docs, p); err != nil {
			return layer{}, err
		}
		for _, key := range keys {
			if err := d.keepLayer(key, l); err != nil {
				return layer{}, err
			}
		}
	}
	if err := d.unpack(l); err != nil {
		return layer{}, err
	}
	if !d.layers.first(j.State.ID, l.Snapshot.Digest) {
		return l, nil
	}
	body, err := digest.Canonical(map[string]any{"key": string(key), "layer": l, "reused": reused})
	if err != nil {
		return layer{}, err
	}
	if err := d.record(ctx, j.State.ID, "PREPARED", body); err != nil {
		return layer{}, fmt.Errorf("record the preparation: %w", err)
	}
	return l, nil
}

// anyLayer returns what is kept under the first of keys that has something, and
// that key; the first key and nothing if none has.
func (d *Daemon) anyLayer(keys []digest.Digest) (layer, digest.Digest, error) {
	for _, key := range keys {
		if l, err := d.keptLayer(key); err != nil || l.Snapshot.Digest != "" {
			return l, key, err
		}
	}
	return layer{}, keys[0], nil
}

// keptLayer returns what is kept under key; nothing if it is not whole any more.
func (d *Daemon) keptLayer(key digest.Digest) (layer, error) {
	b, err := os.ReadFile(d.home.at("prepared", "keys", key.Hex()+".json"))
	if errors.Is(err, os.ErrNotExist) {
		return layer{}, nil
	}
	if err != nil {
		return layer{}, fmt.Errorf("look for a kept preparation: %w", err)
	}
	var l layer
	if err := json.Unmarshal(b, &l); err != nil {
		return layer{}, nil // prepared again and written over
	}
	for _, ref := range []blob.Ref{l.Snapshot, l.Agent, l.Candidate} {
		if ref.Digest == "" {
			continue
		}
		r, err := d.blobs.Open(ref.Digest)
		if err != nil {
			return layer{}, nil
		}
		r.Close()
	}
	return l, nil
}

func (d *Daemon) keepLayer(key digest.Digest, l layer) error {
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	to := d.home.at("prepared", "keys", key.Hex()+".json")
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return fmt.Errorf("keep the preparation: %w", err)
	}
	if err := os.WriteFile(to+".new", b, 0o600); err != nil {
		return fmt.Errorf("keep the preparation: %w", err)
	}
	if err := os.Rename(to+".new", to); err != nil {
		return fmt.Errorf("keep the preparation: %w", err)
	}
	return nil
}

// layerDir is where a layer lies unpacked: in a directory that is private to
// this user, because inside of it everything is writable.
func (d *Daemon) layerDir(l layer) string {
	return d.home.at("prepared", "layers", l.Snapshot.Digest.Hex()[:32])
}

// unpack makes sure that the layer lies unpacked.
func (d *Daemon) unpack(l layer) error {
	dir := d.layerDir(l)
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return fmt.Errorf("unpack the preparation: %w", err)
	}
	if err := os.Chmod(d.home.at("prepared"), 0o700); err != nil {
		return fmt.Errorf("unpack the preparation: %w", err)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".unpack-")
	if err != nil {
		return fmt.Errorf("unpack the preparation: %w", err)
	}
	defer os.RemoveAll(tmp)
	if err := sandbox.Unpack(d.blobs, l.Snapshot, tmp, uselessLater); err != nil {
		return err
	}
	if err := os.Rename(tmp, dir); err != nil {
		return fmt.Errorf("unpack the preparation: %w", err)
	}
	return nil
}

// uselessLater are files that a tool downloads and never reads again once it
// unpacked them.
func uselessLater(path string) bool {
	return strings.HasPrefix(path, "go-mod/cache/download/") && strings.HasSuffix(path, ".zip") || strings.HasPrefix(path, "go-mod/cache/vcs/")
}

// prepareTimeout is how long a step may take where the document says nothing.
const prepareTimeout = 30 * time.Minute

// prepares is the role of a preparation: the runner's, in the sandbox context.
// It may change nothing of the work tree but scratch directories, holds no
// credential, and reaches the registries that the Environment names.
func prepares(docs bound) role {
	r := keepsSandboxes()
	r.unit = "prepare"
	for _, h := range docs.Environment.GetPrepareEgress() {
		r.egress = append(r.egress, grant.Destination{Host: h.GetHost(), Port: int(h.GetPort())})
	}
	return r
}

// prepare runs the steps on the base revision in a sandbox of its own and keeps
// what they leave behind.
func (d *Daemon) prepare(ctx context.Context, j orchestration.Job, docs bound, p preparation) (l layer, err error) {
	run := j
	run.Command.Run = preparingRun(j.Command.Run)
	a, err := d.authority(run, prepares(docs))
	if err != nil {
		return layer{}, err
	}
	a.Step += "/prepare"
	a.Caller = ports.CallerSandbox
	wall := time.Minute
	for _, s := range docs.Environment.GetPrepare() {
		wall += stepTime(s)
	}
	d.tellStage(j.State.ID, fmt.Sprintf("preparing the environment: %d steps, once for this image and these lockfiles", len(docs.Environment.GetPrepare())))
	b, err := boxes{d, run, docs}.open(ctx, plan{
		authority: a, revision: j.State.Admission.BaseRevision, noGit: true, wall: wall, user: sandbox.Agent, with: &p,
	})
	if err != nil {
		return layer{}, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		err = errors.Join(err, b.Destroy(ctx))
	}()
	for _, s := range docs.Environment.GetPrepare() {
		done, err := d.prepareStep(ctx, j.State.ID, b, s, p.environment)
		if err != nil {
			return layer{}, err
		}
		l.Steps = append(l.Steps, done)
	}
	if l.Snapshot, err = b.Sandbox.Snapshot(ctx, sandbox.ScopePrepared); err != nil {
		return layer{}, err
	}
	scratch := docs.scratch()
	if len(scratch) == 0 {
		return l, nil
	}
	if l.Agent, err = sandbox.ScratchLayer(ctx, d.blobs, l.Snapshot, scratch, sandbox.Agent); err != nil {
		return layer{}, err
	}
	l.Candidate, err = sandbox.ScratchLayer(ctx, d.blobs, l.Snapshot, scratch, sandbox.Candidate)
	return l, err
}

func stepTime(s *kindsv1.PrepareStep) time.Duration {
	if t := s.GetTimeout().AsDuration(); t > 0 {
		return t
	}
	return prepareTimeout
}

// prepareStep runs one step to its end. A failure refuses the run, except that
// of a step whose result nothing rests on.
func (d *Daemon) prepareStep(ctx context.Context, id identity.ChangeID, b *box, s *kindsv1.PrepareStep, env map[string]string) (stepResult, error) {
	d.tellStage(id, "preparing: "+printable(strings.Join(s.GetArgv(), " ")))
	start := d.now()
	r, err := b.Exec(ctx, sandbox.Command{Argv: s.GetArgv(), Env: env, User: sandbox.Agent, Timeout: stepTime(s)})
	if err != nil {
		return stepResult{}, fmt.Errorf("prepare step %s: %w", s.GetName(), err)
	}
	out := stepResult{Name: s.GetName(), Exit: r.Code, Limit: r.Limit, DurationMS: d.now().Sub(start).Milliseconds()}
	if r.Code == 0 && r.Limit == "" {
		return out, nil
	}
	how := fmt.Sprintf("ended with exit code %d", r.Code)
	if r.Limit != "" {
		how = "reached its limit: " + r.Limit
	}
	said := d.lastWords(r)
	if s.GetBestEffort() {
		d.tellStage(id, fmt.Sprintf("prepare step %s %s; going on without it: %s", s.GetName(), how, said))
		return out, nil
	}
	return stepResult{}, &change.Fault{Class: change.Denied, Reason: fmt.Sprintf(
		"prepare step %s (%s) %s: %s. It runs on the base revision and reaches only the hosts of prepare_egress in the Environment; one with a private or reserved address needs an exact grant under private_hosts in the Organization too ('numi change events %s' shows what was refused)",
		s.GetName(), printable(strings.Join(s.GetArgv(), " ")), how, said, id)}
}

// lastWords is the end of what a command said, for one line.
func (d *Daemon) lastWords(r sandbox.Result) string {
	for _, ref := range []blob.Ref{r.Stderr, r.Stdout} {
		b, err := d.blobs.Bytes(ref.Digest, 64<<20)
		if err != nil {
			continue
		}
		text := strings.TrimSpace(string(b))
		if text == "" {
			continue
		}
		lines := strings.Split(text, "\n")
		return printable(strings.Join(lines[max(0, len(lines)-4):], " | "))
	}
	return "it said nothing"
}
