// Package sandbox is the context that makes, uses and ends sandboxes. It is the
// only caller of the sandboxprovider port, always as the runner (P-148); its
// siblings use it through interfaces of theirs that the composition root joins.
// Every sandbox is built from a run's grant and the plan, and nothing else
// (P-150); what the provider says of it is a claim, not authority (P-151).
package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	sandboxproviderv1 "github.com/numinance/numinance/gen/numinance/ports/sandboxprovider/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/bridge"
	"github.com/numinance/numinance/internal/host/dispatch"
)

type digestOf = digest.Digest

// Dispatcher is the policy enforcement point as this context needs it.
type Dispatcher interface {
	// Connect returns a connection for stock clients under a's authority.
	Connect(a dispatch.Authority) grpc.ClientConnInterface
}

// Enforcer adapts the dispatcher.
type Enforcer struct{ *dispatch.Dispatcher }

// Connect implements Dispatcher.
func (e Enforcer) Connect(a dispatch.Authority) grpc.ClientConnInterface { return e.Conn(a) }

// Image is the host's own look at an image, not the provider's.
type Image interface {
	// Held returns nil only if the host holds the image under its digest,
	// unchanged (P-152).
	Held(ctx context.Context, d digest.Digest) error
}

// Config is what a Context works with. All are required.
type Config struct {
	Dispatcher Dispatcher
	Blobs      Blobs
	Tree       Tree
	Image      Image
	Links      string        // directory for the link directories of the runs
	Digest     digest.Digest // the image of every sandbox
	Limits     Limits
	// Mounts are the programs every sandbox has read-only, such as the adapter's.
	Mounts []Mount
	// Scratch are directories below the work root that are never exported, from
	// the Environment; git's own is always among them.
	Scratch []string
}

// Limits is what a sandbox may use; every field is required, except CPU.
type Limits struct {
	Memory    int64  // bytes, all processes together
	Processes uint32 // per user inside
	File      int64  // bytes of one file
	Disk      int64  // bytes written in all
	OpenFiles uint32
	CPU       uint32 // thousandths of a core; 0 is no limit
	Output    int64  // bytes kept of one Exec
}

// DefaultLimits let a Go project of ordinary size be built and tested.
func DefaultLimits() Limits {
	return Limits{Memory: 4 << 30, Processes: 1024, File: 1 << 30, Disk: 4 << 30, OpenFiles: 8192, Output: 16 << 20}
}

// Mount is a host file or directory that appears inside. Nothing inside ever
// changes it. A file needs its digest.
type Mount struct {
	Source, Target string
	Digest         digest.Digest
	// CopyOnWrite lets a directory be written to inside; what is written ends
	// with the sandbox and is part of no snapshot.
	CopyOnWrite bool
}

// Context is the sandbox context. It is safe for concurrent use.
type Context struct{ Config }

// New returns the sandbox context.
func New(c Config) (*Context, error) {
	if c.Dispatcher == nil || c.Blobs == nil || c.Tree == nil || c.Image == nil || c.Links == "" || !c.Digest.Valid() {
		return nil, errors.New("sandbox context needs a dispatcher, blobs, trees, an image and a directory for links")
	}
	return &Context{Config: c}, nil
}

// Spec says which run a sandbox is for. Authority is the runner's, for the
// sandbox verbs; Grant is the run's, and what limits the run comes from it.
type Spec struct {
	Authority dispatch.Authority
	Grant     grant.Grant
	Revision  string   // commit whose tree is the work tree
	Work      blob.Ref // if set, this snapshot's tree instead, owned as for Revision
	Home      blob.Ref // if set, the agent's home of a former run
	ReadOnly  bool     // nothing in the work tree can be changed
	NoGit     bool     // leave out the throw-away repository
	Throwaway bool     // nothing of it ever comes back, and the whole tree is the candidate's
	WallTime  time.Duration
	Mounts    []Mount  // for this run alone
	Scratch   blob.Ref // if set, what ScratchLayer made of a preparation
}

// Report is what is recorded of a Create: what was asked for, what the provider
// claims, and what the host saw itself, told apart (P-158).
type Report struct {
	Profile string        `json:"profile"`
	Image   digest.Digest `json:"image"`
	Limits  Limits        `json:"limits"`
	Claims  []Claim       `json:"claims"`
	Checks  []string      `json:"checks"`
}

// Claim is what a provider says of one wall or limit; it is untrusted text.
type Claim struct {
	Name        string `json:"name"`
	Enforcement string `json:"enforcement"`
	Detail      string `json:"detail,omitempty"`
}

// Sandbox is the one sandbox of a run, from Create to Destroy.
type Sandbox struct {
	ID     string
	Report Report

	run    identity.RunID
	client sandboxproviderv1.SandboxProviderServiceClient
	link   *bridge.Bridge
	blobs  Blobs

	mu   sync.Mutex // one verb at a time, so that keys keep their order; guards gone
	gone bool
}

// Create makes the sandbox of a run and returns once its PID 1 is reached. On
// error nothing is left.
func (c *Context) Create(ctx context.Context, s Spec) (box *Sandbox, err error) {
	run := s.Grant.Run
	fail := func(what string, err error) error { return fmt.Errorf("sandbox of run %s: %s: %w", run, what, err) }
	if err := s.check(); err != nil {
		return nil, fail("check", err)
	}
	if err := c.Image.Held(ctx, c.Digest); err != nil {
		return nil, fail("image", err)
	}
	request, err := c.request(ctx, s)
	if err != nil {
		return nil, fail("build", err)
	}
	link, err := bridge.Make(c.Links, string(run))
	if err != nil {
		return nil, fail("link", err)
	}
	request.Spec.LinkDirectory = link.Dir()
	s.Authority.Caller = ports.CallerSandbox
	box = &Sandbox{
		run: run, link: link, blobs: c.Blobs,
		client: sandboxproviderv1.NewSandboxProviderServiceClient(c.Dispatcher.Connect(s.Authority)),
		Report: Report{Profile: request.Spec.Profile.String(), Image: c.Digest, Limits: c.Limits},
	}
	answer, err := box.client.Create(ctx, request)
	if err != nil {
		return nil, fail("create", errors.Join(err, link.Close()))
	}
	box.ID = answer.GetSandbox()
	made := box // a return of nil takes box away before this runs
	defer func() {
		if err != nil {
			end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
			defer cancel()
			err = errors.Join(err, made.Destroy(end))
		}
	}()
	if err := box.accept(request, answer); err != nil {
		return nil, fail("check", err)
	}
	ready, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err := link.Ready(ready); err != nil {
		return nil, fail("its PID 1 does not answer", err)
	}
	if err := box.look(ready, s); err != nil {
		return nil, fail("look inside", err)
	}
	return box, nil
}

const (
	readyTimeout = 20 * time.Second
	endTimeout   = 30 * time.Second
)

func (s Spec) check() error {
	switch {
	case !identity.ValidID(s.Grant.Run):
		return errors.New("the grant names no run")
	case s.Authority.Actor.Kind != identity.KindRunner:
		return errors.New("only the runner makes sandboxes (P-148)")
	case s.Authority.Actor.Run != s.Grant.Run:
		return errors.New("runner and grant are of different runs")
	case s.WallTime <= 0:
		return errors.New("no time is left")
	}
	return s.Grant.Paths.Validate()
}

// whole is the uid that owns the whole work tree, 0 where the scope decides.
func (s Spec) whole() int {
	if s.Throwaway {
		return bridge.UIDCandidate
	}
	return 0
}

// request derives the whole spec from grant and plan.
func (c *Context) request(ctx context.Context, s Spec) (*sandboxproviderv1.CreateRequest, error) {
	scratch := slices.Clone(c.Scratch)
	if !s.NoGit {
		scratch = append(scratch, ".git")
	}
	slices.Sort(scratch)
	scratch = slices.Compact(scratch)
	all := ofRevision(ctx, c.Tree, s.Revision)
	if s.Work.Digest != "" {
		all = ofSnapshot(c.Blobs, s.Work, scratch)
	}
	tree, err := c.store(ctx, func(w io.Writer) error { return writeTree(w, all, s.Grant.Paths, s.ReadOnly, s.whole()) })
	if err != nil {
		return nil, fmt.Errorf("work tree: %w", err)
	}
	var layers []*pluginv1.BlobRef
	if s.Scratch.Digest != "" {
		layers = append(layers, &pluginv1.BlobRef{Digest: string(s.Scratch.Digest), SizeBytes: s.Scratch.Size, MediaType: "application/x-tar"})
	}
	if s.Home.Digest != "" {
		home, err := c.store(ctx, func(w io.Writer) error { return writeHome(w, ofSnapshot(c.Blobs, s.Home, nil)) })
		if err != nil {
			return nil, fmt.Errorf("home: %w", err)
		}
		layers = append(layers, home)
	}
	var mounts []*sandboxproviderv1.ReadOnlyMount
	for _, m := range slices.Concat(c.Mounts, s.Mounts) {
		mounts = append(mounts, &sandboxproviderv1.ReadOnlyMount{Source: m.Source, Target: m.Target, Digest: string(m.Digest), CopyOnWrite: m.CopyOnWrite})
	}
	l := c.Limits
	return &sandboxproviderv1.CreateRequest{RunId: string(s.Grant.Run), Spec: &sandboxproviderv1.SandboxSpec{
		Profile:     sandboxproviderv1.SandboxProfile_SANDBOX_PROFILE_ISOLATED_KERNEL,
		ImageDigest: string(c.Digest), WorkTree: tree, Layers: layers, Scratch: scratch, Mounts: mounts,
		Marker: bridge.WorkRoot, Environment: Environment(),
		Limits: &sandboxproviderv1.Limits{
			MemoryBytes: l.Memory, Processes: l.Processes, FileBytes: l.File, DiskBytes: l.Disk, OpenFiles: l.OpenFiles,
			CpuMillis: l.CPU, OutputBytes: l.Output, WallTime: durationpb.New(s.WallTime),
		},
	}}, nil
}

// Environment is what every process inside starts from. It holds no host value.
func Environment() map[string]string {
	return map[string]string{
		"PATH": "/opt/numi/bin:/usr/local/go/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
		"LANG": "C.UTF-8", "TMPDIR": "/tmp",
		"HTTP_PROXY": bridge.ProxyURL, "HTTPS_PROXY": bridge.ProxyURL,
		"http_proxy": bridge.ProxyURL, "https_proxy": bridge.ProxyURL, "NO_PROXY": "127.0.0.1,localhost",
		"SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
		"GOTOOLCHAIN":   "local", "GOFLAGS": "-buildvcs=false", "CGO_ENABLED": "0",
		"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
		"GIT_TERMINAL_PROMPT": "0", "PAGER": "cat",
	}
}

// EnvironmentList is Environment as a complete list for Spawn, with a user's
// home and what extra adds or replaces.
func EnvironmentList(home string, extra map[string]string) []string {
	env := Environment()
	env["HOME"] = home
	maps.Copy(env, extra)
	out := make([]string, 0, len(env))
	for _, k := range slices.Sorted(maps.Keys(env)) {
		out = append(out, k+"="+env[k])
	}
	return out
}

// store keeps what write produces as a blob.
func (c *Context) store(ctx context.Context, write func(io.Writer) error) (*pluginv1.BlobRef, error) {
	r, w := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.CloseWithError(write(w))
	}()
	ref, err := c.Blobs.Put(ctx, r, maxTree)
	r.Close()
	<-done
	if err != nil {
		return nil, err
	}
	return &pluginv1.BlobRef{Digest: string(ref.Digest), SizeBytes: ref.Size, MediaType: "application/x-tar"}, nil
}

// accept holds the provider's answer against the request. It believes no claim;
// it refuses one that admits less than was asked for.
func (b *Sandbox) accept(r *sandboxproviderv1.CreateRequest, a *sandboxproviderv1.CreateResponse) error {
	if a.GetImageDigest() != r.GetSpec().GetImageDigest() || a.GetProfile() != r.GetSpec().GetProfile() {
		return fmt.Errorf("the provider made a sandbox of image %s and profile %v, which was not asked for", a.GetImageDigest(), a.GetProfile())
	}
	for _, cl := range a.GetClaims() {
		b.Report.Claims = append(b.Report.Claims, Claim{Name: cl.GetName(), Enforcement: cl.GetEnforcement().String(), Detail: cl.GetDetail()})
		if cl.GetEnforcement() == sandboxproviderv1.Enforcement_ENFORCEMENT_UNAVAILABLE {
			return fmt.Errorf("the provider cannot hold the limit %q", cl.GetName())
		}
	}
	b.saw("the image is held under its digest")
	return nil
}

func (b *Sandbox) saw(what string) { b.Report.Checks = append(b.Report.Checks, what) }
