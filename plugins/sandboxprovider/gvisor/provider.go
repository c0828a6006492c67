package gvisor

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	sandboxproviderv1 "github.com/numinance/numinance/gen/numinance/ports/sandboxprovider/v1"
	"github.com/numinance/numinance/sdk"
)

const profile = sandboxproviderv1.SandboxProfile_SANDBOX_PROFILE_ISOLATED_KERNEL

// provider serves the port. A run has one sandbox, named after the run, so that
// what a killed process left behind is found again by its name.
type provider struct {
	sandboxproviderv1.UnimplementedSandboxProviderServiceServer
	cfg    Config
	blobs  *sdk.Host
	lock   *os.File // held for the life of the process
	tools  string
	images *images
	rt     *runtime

	mu    sync.Mutex // guards the rest
	boxes map[string]*box
	gone  map[string]bool // destroyed by this process
}

// sandboxID is the sandbox of a run, unique on this host: two deployments may
// have runs of one name.
func (p *provider) sandboxID(run string) string {
	return "sbx-" + hashOf([]byte(p.cfg.State + "\x00" + run))[:24]
}

// sweep destroys every sandbox a former process left: nobody holds its link or
// its output any more.
func (p *provider) sweep(ctx context.Context) error {
	dir := filepath.Join(p.cfg.State, "boxes")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("look for sandboxes of a former process: %w", err)
	}
	for _, e := range entries {
		b := &box{ID: e.Name(), dir: filepath.Join(dir, e.Name())}
		if raw, err := os.ReadFile(filepath.Join(b.dir, "box.json")); err == nil {
			_ = json.Unmarshal(raw, b)
			b.ID = e.Name()
		}
		if err := p.remove(ctx, b); err != nil {
			return fmt.Errorf("remove sandbox %s of a former process: %w", b.ID, err)
		}
	}
	return nil
}

// Create implements P-141.
func (p *provider) Create(ctx context.Context, r *sandboxproviderv1.CreateRequest) (*sandboxproviderv1.CreateResponse, error) {
	spec := r.GetSpec()
	if spec.GetProfile() != profile {
		return nil, status.Errorf(codes.FailedPrecondition, "this provider gives a sandbox a kernel of its own; profile %v cannot be met", spec.GetProfile())
	}
	if err := p.checkSpec(spec); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(r)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "encode the request: %v", err)
	}
	key, request := sdk.Action(ctx).GetIdempotencyKey(), hashOf(raw)
	id := p.sandboxID(r.GetRunId())
	answer := &sandboxproviderv1.CreateResponse{
		Sandbox: id, ImageDigest: spec.GetImageDigest(), Profile: profile, Claims: p.claims(spec),
	}

	b, err := p.claimBox(id, key, request, sdk.DryRun(ctx))
	if err != nil {
		return nil, err
	}
	if b != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.ready {
			return answer, nil
		}
		if b.ended {
			return nil, status.Errorf(codes.Aborted, "the sandbox of run %s is being destroyed", r.GetRunId())
		}
	}
	rootfs, err := p.images.rootfs(spec.GetImageDigest())
	if err == nil && b == nil {
		return answer, nil // dry run
	}
	if err == nil {
		err = p.start(ctx, b, rootfs, spec)
	}
	if err == nil {
		return answer, nil
	}
	if b != nil {
		// What could not be made whole is not left half made.
		if rmErr := p.remove(context.WithoutCancel(ctx), b); rmErr != nil {
			err = errors.Join(err, rmErr)
		}
		b.ended = true
		p.forget(b)
	}
	return nil, createStatus(ctx, err)
}

func createStatus(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, errNoImage):
		return status.Error(codes.NotFound, err.Error())
	case ctx.Err() != nil:
		return status.FromContextError(ctx.Err()).Err()
	}
	if st, ok := status.FromError(err); ok {
		return st.Err()
	}
	return status.Errorf(codes.FailedPrecondition, "the sandbox cannot be made as asked: %v", err)
}

// claimBox returns the box to make or already made under this key; nil for a
// dry run. Another key, or the same key with another request, is refused.
func (p *provider) claimBox(id, key, request string, dry bool) (*box, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b, ok := p.boxes[id]; ok {
		switch {
		case b.Key != key:
			return nil, status.Error(codes.AlreadyExists, "this run has a sandbox already; one run has one sandbox")
		case b.Request != request:
			return nil, status.Error(codes.InvalidArgument, "the same idempotency key came with another request")
		}
		return b, nil
	}
	if dry {
		return nil, nil
	}
	b := &box{ID: id, Key: key, Request: request, dir: filepath.Join(p.cfg.State, "boxes", id), execs: map[string]*process{}}
	p.boxes[id] = b
	return b, nil
}

func (p *provider) forget(b *box) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.boxes[b.ID] == b {
		delete(p.boxes, b.ID)
	}
}

// start makes the sandbox whole: tree, bundle, running PID 1, tree seen inside.
func (p *provider) start(ctx context.Context, b *box, rootfs string, spec *sandboxproviderv1.SandboxSpec) error {
	lim := spec.GetLimits()
	b.Disk, b.Link = lim.GetDiskBytes(), spec.GetLinkDirectory() != ""
	b.output, b.scratch, b.env = lim.GetOutputBytes(), spec.GetScratch(), spec.GetEnvironment()
	if err := os.Mkdir(b.dir, 0o700); err != nil {
		return fmt.Errorf("make the sandbox's directory: %w", err)
	}
	// Written first: whatever starts from here on is found by a later sweep.
	raw, err := json.Marshal(b)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(b.dir, "box.json"), raw, 0o600); err != nil {
		return fmt.Errorf("note the sandbox: %w", err)
	}
	var sources []source
	for i, ref := range append(append([]*pluginv1.BlobRef{}, spec.GetLayers()...), spec.GetWorkTree()) {
		if ref.GetDigest() == "" {
			continue
		}
		s := source{file: filepath.Join(b.dir, fmt.Sprintf("tree-%d.tar", i))}
		if i == len(spec.GetLayers()) {
			s.prefix = workRoot
		}
		if err := p.fetch(ctx, ref, s.file); err != nil {
			return err
		}
		sources = append(sources, s)
	}
	marker := "run/numi-tree-" + randomHex()
	if err := writeUpper(filepath.Join(b.dir, "upper.tar"), sources, b.scratch, marker); err != nil {
		return err
	}
	for _, s := range sources {
		os.Remove(s.file)
	}
	if err := p.writeBundle(b, rootfs, spec); err != nil {
		return err
	}
	if err := p.rt.run(ctx, b, "run", "-detach", "-bundle", b.dir, b.ID); err != nil {
		return err
	}
	// A runtime that ignored the tree must not pass for a sandbox with one.
	seen := []string{"exec", b.ID, initPath, "seen", "/" + marker}
	if spec.GetMarker() != "" {
		seen = append(seen, spec.GetMarker())
	}
	if _, err := p.rt.output(ctx, b, seen...); err != nil {
		return fmt.Errorf("the work tree did not arrive inside: %w", err)
	}
	os.Remove(filepath.Join(b.dir, "upper.tar"))
	b.pid, _ = p.rt.state(ctx, b)
	b.over = make(chan struct{})
	b.ready = true
	go p.watch(b, b.over, lim.GetWallTime().AsDuration(), lim.GetMemoryBytes()+sentryMemory)
	return nil
}

// fetch copies a blob of the host to a file; the SDK checks its digest.
func (p *provider) fetch(ctx context.Context, ref *pluginv1.BlobRef, to string) error {
	r, err := p.blobs.GetBlob(ctx, ref)
	if err != nil {
		return fmt.Errorf("fetch blob %s: %w", ref.GetDigest(), err)
	}
	defer r.Close()
	f, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("fetch blob %s: %w", ref.GetDigest(), err)
	}
	return nil
}

// claims says how each wall and limit is held here.
func (p *provider) claims(spec *sandboxproviderv1.SandboxSpec) []*sandboxproviderv1.Claim {
	const (
		enforced = sandboxproviderv1.Enforcement_ENFORCEMENT_ENFORCED
		watched  = sandboxproviderv1.Enforcement_ENFORCEMENT_WATCHED
	)
	claim := func(name string, e sandboxproviderv1.Enforcement, detail string) *sandboxproviderv1.Claim {
		return &sandboxproviderv1.Claim{Name: name, Enforcement: e, Detail: detail}
	}
	mode := "started by root"
	if p.rt.rootless {
		mode = "started by an unprivileged user in a user namespace"
	}
	out := []*sandboxproviderv1.Claim{
		claim("kernel", enforced, "gVisor, platform systrap, "+mode),
		claim("network", enforced, "loopback only; the way out is the run's link directory"),
		claim("image", enforced, "every file checked against the image digest before the start"),
		claim("processes", enforced, "limit of the sandbox's kernel, per user"),
		claim("file", enforced, "limit of the sandbox's kernel"),
		claim("open-files", enforced, "limit of the sandbox's kernel"),
		claim("disk", enforced, "size of the writable layer, which lies in memory; /tmp has the same again"),
		claim("output", enforced, "cut at the limit, outside the sandbox"),
		claim("wall-clock", watched, "the sandbox is killed when its time is over"),
	}
	if p.rt.cgroups {
		out = append(out, claim("memory", enforced, "control group; 192 MiB more for the sandbox's own kernel"))
	} else {
		out = append(out, claim("memory", watched, "looked at every second and killed on excess: no control group may be made here"))
	}
	if spec.GetLimits().GetCpuMillis() > 0 {
		out = append(out, claim("cpu", enforced, "control group"))
	}
	return out
}

// watch kills the sandbox when its time is over or, without control groups,
// when it uses too much memory.
func (p *provider) watch(b *box, over <-chan struct{}, wall time.Duration, memory int64) {
	deadline := time.NewTimer(wall)
	defer deadline.Stop()
	look := time.NewTicker(time.Second)
	defer look.Stop()
	for {
		select {
		case <-over:
			return
		case <-deadline.C:
			p.kill(b, "wall-clock")
			return
		case <-look.C:
			if p.rt.cgroups {
				continue
			}
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			used, err := p.rt.memory(ctx, b)
			cancel()
			if err == nil && used > memory {
				p.kill(b, "memory")
				return
			}
		}
	}
}

// kill ends the processes inside for having reached a limit; what is left is
// removed by Destroy.
func (p *provider) kill(b *box, limit string) {
	b.mu.Lock()
	if b.limit == "" {
		b.limit = limit
	}
	b.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
	defer cancel()
	_ = p.rt.run(ctx, b, "kill", b.ID, "KILL")
}

// find returns a sandbox that can be used.
func (p *provider) find(id string) (*box, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b, ok := p.boxes[id]; ok {
		return b, nil
	}
	if p.gone[id] {
		return nil, status.Errorf(codes.FailedPrecondition, "sandbox %s was destroyed", id)
	}
	return nil, status.Errorf(codes.NotFound, "there is no sandbox %s", id)
}

// Snapshot implements P-144: the sandbox stands still while its writable layer
// is read, and goes on whatever happens meanwhile.
func (p *provider) Snapshot(ctx context.Context, r *sandboxproviderv1.SnapshotRequest) (*sandboxproviderv1.SnapshotResponse, error) {
	b, err := p.find(r.GetSandbox())
	if err != nil {
		return nil, err
	}
	var keep []part
	var skip []string
	switch r.GetScope() {
	case sandboxproviderv1.SnapshotScope_SNAPSHOT_SCOPE_WORK:
		keep, skip = []part{{dir: workRoot}}, b.scratch
	case sandboxproviderv1.SnapshotScope_SNAPSHOT_SCOPE_HOME:
		keep = []part{{dir: agentHome}}
	case sandboxproviderv1.SnapshotScope_SNAPSHOT_SCOPE_PREPARED:
		keep = []part{{dir: preparedDir, as: "prepared"}}
		for _, s := range b.scratch {
			keep = append(keep, part{dir: path.Join(workRoot, s), as: path.Join("scratch", s)})
		}
	default:
		return nil, status.Errorf(codes.InvalidArgument, "snapshot scope %v", r.GetScope())
	}
	b.snapshots.Lock()
	defer b.snapshots.Unlock()
	if err := b.usable(); err != nil {
		return nil, err
	}
	file := filepath.Join(b.dir, "snapshot-"+randomHex()+".tar")
	defer os.Remove(file)
	if err := p.snapshot(ctx, b, keep, skip, file, r.GetMaxBytes()); err != nil {
		if st, ok := status.FromError(err); ok {
			return nil, st.Err()
		}
		return nil, status.Errorf(codes.Internal, "snapshot: %v", err)
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "snapshot: %v", err)
	}
	defer f.Close()
	ref, err := p.blobs.PutBlob(ctx, f, "application/x-tar")
	if err != nil {
		return nil, fmt.Errorf("store the snapshot: %w", err)
	}
	return &sandboxproviderv1.SnapshotResponse{Snapshot: ref}, nil
}

// snapshot writes the filtered tar to a file.
func (p *provider) snapshot(ctx context.Context, b *box, keep []part, skip []string, file string, limit int64) error {
	raw := file + ".raw"
	defer os.Remove(raw)
	if err := p.copyLayer(ctx, b, raw); err != nil {
		return err
	}
	out, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	err = filterSnapshot(&capped{w: out, left: limit}, raw, keep, skip)
	if errors.Is(err, errTooLarge) {
		return status.Errorf(codes.ResourceExhausted, "the snapshot is larger than %d bytes", limit)
	}
	return err
}

// copyLayer writes the whole writable layer to a file while the sandbox stands
// still, which is for as long as that takes and no longer. The layer's own size
// limit bounds the file.
func (p *provider) copyLayer(ctx context.Context, b *box, file string) (err error) {
	if err := p.rt.run(ctx, b, "pause", b.ID); err != nil {
		return err
	}
	defer func() {
		again := context.WithoutCancel(ctx)
		if rerr := p.rt.run(again, b, "resume", b.ID); rerr != nil && b.usable() == nil {
			err = errors.Join(err, fmt.Errorf("the sandbox stands still: %w", rerr))
		}
	}()
	return p.rt.run(ctx, b, "tar", "rootfs-upper", "-file", file, b.ID)
}

var errTooLarge = errors.New("larger than allowed")

// capped fails instead of writing more than left bytes.
type capped struct {
	w    io.Writer
	left int64
}

func (c *capped) Write(b []byte) (int, error) {
	if int64(len(b)) > c.left {
		return 0, errTooLarge
	}
	c.left -= int64(len(b))
	return c.w.Write(b)
}

// Destroy implements P-145.
func (p *provider) Destroy(ctx context.Context, r *sandboxproviderv1.DestroyRequest) (*sandboxproviderv1.DestroyResponse, error) {
	p.mu.Lock()
	b, ok := p.boxes[r.GetSandbox()]
	p.mu.Unlock()
	if !ok {
		return &sandboxproviderv1.DestroyResponse{}, nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended {
		return &sandboxproviderv1.DestroyResponse{}, nil
	}
	if err := p.remove(context.WithoutCancel(ctx), b); err != nil {
		return nil, status.Errorf(codes.Internal, "destroy: %v", err)
	}
	b.ended = true
	if b.over != nil {
		close(b.over)
	}
	p.mu.Lock()
	p.gone[b.ID] = true
	p.mu.Unlock()
	p.forget(b)
	return &sandboxproviderv1.DestroyResponse{Existed: true}, nil
}

func randomHex() string {
	var b [8]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}
