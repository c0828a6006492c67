// Package daemon is the composition root: it opens the state directory, joins
// stores, enforcement, contexts and orchestration, and gives the command line
// its runtime. It holds no rule of its own; cmd/numi calls Main.
package daemon

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/numinance/numinance/internal/contexts/evidence"
	"github.com/numinance/numinance/internal/core/bundle"
	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/kinds"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/core/strict"
	"github.com/numinance/numinance/internal/core/tlog"
	"github.com/numinance/numinance/internal/edge/cli"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/broker"
	"github.com/numinance/numinance/internal/host/catalog"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/host/image"
	"github.com/numinance/numinance/internal/host/journal"
	"github.com/numinance/numinance/internal/host/store"
	"github.com/numinance/numinance/internal/host/worktree"
	"github.com/numinance/numinance/internal/orchestration"
	"github.com/numinance/numinance/plugins/scm/git"
)

type tlogCheckpoint = tlog.Checkpoint

// blobQuota bounds all blobs of a state directory: 64 GiB.
const blobQuota = 64 << 30

// Daemon is the runtime of one state directory, from Open to Close. It is safe
// for concurrent use.
type Daemon struct {
	home    Home
	now     func() time.Time
	db      *sql.DB
	journal *journal.Journal
	blobs   *blob.Store
	broker  *broker.Broker
	logName string // origin of the embedded log
	trust   bundle.Trust
	checker *strict.Checker

	controls   controls
	providers  *catalog.Catalog
	pipelines  pipelines
	dispatcher *dispatch.Dispatcher
	evidence   *evidence.Evidence
	anchors    *anchors
	runner     *orchestration.Runner
	live       liveRuns
	begun      begun
	layers     layers
	watchers   watchers

	images     *image.Keeper
	image      digest.Digest // of every sandbox
	program    string        // this binary
	programDir string        // holds a copy of it, for sandboxes

	log      *os.File
	progress io.Writer // may be nil

	proposing sync.Mutex // held while a Change brings in what it rests on

	mu     sync.Mutex // guards stores
	stores map[identity.ChangeID]*worktree.Store

	background sync.WaitGroup
	stop       context.CancelFunc
}

// Open opens the state directory and goes on with every Change that was not at
// its end. The caller holds the lock. progress is told of slow first steps.
func Open(ctx context.Context, home Home, progress io.Writer) (d *Daemon, err error) {
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	d = &Daemon{
		home: home, now: time.Now, progress: progress, stop: stop, anchors: newAnchors(),
		live:     liveRuns{m: map[identity.ChangeID]map[identity.RunID]*box{}},
		watchers: watchers{of: map[identity.ChangeID][]*patient{}},
		stores:   map[identity.ChangeID]*worktree.Store{},
	}
	d.controls = controls{d: d, sets: map[digest.Digest]*kinds.Set{}, engines: map[identity.ChangeID]*policy.Engine{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
			d = nil
		}
	}()
	if err := d.openState(running); err != nil {
		return d, err
	}
	if err := d.openPrograms(ctx); err != nil {
		return d, err
	}
	if err := d.openEnforcement(running); err != nil {
		return d, err
	}
	if err := d.clearLeftovers(); err != nil {
		return d, err
	}
	if err := d.openEvidence(running); err != nil {
		return d, err
	}
	d.runner, err = orchestration.Open(running, orchestration.Config{
		DB: d.db, Recorder: orchestration.NewJournal(d.journal), Steps: steps{d}, Observer: d, Executor: "numi", Now: d.now,
	})
	return d, err
}

func (d *Daemon) openState(ctx context.Context) (err error) {
	if d.log, err = os.OpenFile(d.home.at("plugins.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600); err != nil {
		return fmt.Errorf("open the plugins' log: %w", err)
	}
	if d.db, err = store.Open(ctx, d.home.Database()); err != nil {
		return err
	}
	if d.journal, err = journal.Open(ctx, journal.Config{
		Path: d.home.Database(), Holder: fmt.Sprintf("numi process %d", os.Getpid()), Spill: d.home.at("state", "spill"), Now: d.now,
	}); err != nil {
		return err
	}
	if d.blobs, err = blob.Open(blob.Config{Dir: d.home.Blobs(), Quota: blobQuota, Inline: d.journal}); err != nil {
		return err
	}
	name, err := d.deployment()
	if err != nil {
		return err
	}
	d.logName = name + "/log"
	if d.broker, err = broker.Open(broker.Config{Dir: d.home.Keys(), Log: d.logName, Head: name + "/head"}); err != nil {
		return err
	}
	if err := d.trust.Add("head", d.broker.HeadKey()); err != nil {
		return err
	}
	if err := d.trust.Add("log", d.broker.LogKey()); err != nil {
		return err
	}
	d.checker, err = strict.New()
	return err
}

// deployment is a name for this state directory's keys and log: two of them are
// never the same.
func (d *Daemon) deployment() (string, error) {
	path := d.home.at("state", "deployment")
	if b, err := os.ReadFile(path); err == nil {
		if name := strings.TrimSpace(string(b)); name != "" {
			return name, nil
		}
	}
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails
	name := "numinance.local/" + hex.EncodeToString(b[:])
	tmp := path + ".new"
	if err := os.WriteFile(tmp, []byte(name+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("name the deployment: %w", err)
	}
	return name, os.Rename(tmp, path)
}

// openPrograms finds the binaries beside this one and the sandbox image, which
// the first run makes from this machine's files.
func (d *Daemon) openPrograms(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	if d.program, err = filepath.EvalSymlinks(self); err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	for _, name := range []string{"numi-sandbox", "numi-init"} {
		if _, err := os.Stat(d.beside(name)); err != nil {
			return fmt.Errorf("%s is missing beside numi in %s: run 'make build' or install the four binaries together", name, filepath.Dir(d.program))
		}
	}
	if err := d.keepProgram(); err != nil {
		return err
	}
	d.images = &image.Keeper{Store: d.home.Images()}
	d.image, err = d.chooseImage(ctx)
	return err
}

// beside is another of the four binaries.
func (d *Daemon) beside(name string) string { return filepath.Join(filepath.Dir(d.program), name) }

// chooseImage returns the image that is recorded as this deployment's, or makes
// one.
func (d *Daemon) chooseImage(ctx context.Context) (digest.Digest, error) {
	path := filepath.Join(d.home.Images(), "default")
	if b, err := os.ReadFile(path); err == nil {
		want, err := digest.Parse(strings.TrimSpace(string(b)))
		if err != nil {
			return "", fmt.Errorf("%s: %w: remove the file to choose again", path, err)
		}
		return want, d.images.Held(ctx, want)
	}
	d.say("making the sandbox image from this machine's files; this happens once")
	img, err := image.Build(ctx, image.Spec{Store: d.home.Images(), Go: hasGo(), Node: true, Python: true, Progress: func(s string) { d.say("  %s", s) }})
	if err != nil {
		return "", fmt.Errorf("make the sandbox image: %w", err)
	}
	tmp := path + ".new"
	if err := os.WriteFile(tmp, []byte(string(img.Digest)+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("record the sandbox image: %w", err)
	}
	return img.Digest, os.Rename(tmp, path)
}

func (d *Daemon) openEnforcement(ctx context.Context) (err error) {
	if err := d.openProviders(); err != nil {
		return err
	}
	d.dispatcher, err = dispatch.New(dispatch.Config{
		Journal: d.journal, Blobs: d.blobs, Policy: &d.controls, Providers: d.providers, Now: d.now,
		Lag: func() time.Duration { return d.evidence.Lag() },
	})
	return err
}

func (d *Daemon) openEvidence(ctx context.Context) (err error) {
	runner := identity.Actor{Kind: identity.KindRunner, Principal: principalRunner, Run: "run-evidence"}
	d.evidence, err = evidence.New(evidence.Config{
		Journal: d.journal, Blobs: d.blobs, Heads: d.broker.Heads(), Keys: d.trust, Now: d.now,
		Dial: func(id identity.ChangeID, step string) (grpc.ClientConnInterface, error) {
			g, err := dispatch.EvidenceGrant(runner, id, d.now())
			if err != nil {
				return nil, err
			}
			return d.dispatcher.Conn(dispatch.Authority{
				Caller: ports.CallerEvidence, Actor: runner, Grant: g, Change: policy.ChangeFacts{ID: id}, Step: step,
			}), nil
		},
	})
	if err != nil {
		return err
	}
	if err := d.evidence.CatchUp(ctx); err != nil {
		return fmt.Errorf("bring the evidence store up to the journal: %w", err)
	}
	d.background.Go(func() { d.evidence.Run(ctx) })
	d.background.Go(func() {
		d.anchors.run(ctx, func(ctx context.Context, id identity.ChangeID) error {
			_, err := d.evidence.Anchor(ctx, id)
			return err
		}, func(id identity.ChangeID, err error) {
			fmt.Fprintf(d.log, "anchor the head of %s: %v\n", id, err)
		})
	})
	return nil
}

// Close stops every Change where it stands; the next Open goes on.
func (d *Daemon) Close() error {
	var errs []error
	if d.runner != nil {
		errs = append(errs, d.runner.Close(20*time.Second))
	}
	for _, id := range d.live.changes() {
		for _, b := range d.live.of(id) {
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			errs = append(errs, b.Destroy(ctx))
			cancel()
		}
	}
	if d.evidence != nil && d.journal != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		errs = append(errs, d.evidence.CatchUp(ctx))
		cancel()
	}
	d.stop()
	d.background.Wait()
	if d.providers != nil {
		errs = append(errs, d.providers.Close())
	}
	if d.journal != nil {
		errs = append(errs, d.journal.Close())
	}
	if d.db != nil {
		errs = append(errs, d.db.Close())
	}
	if d.log != nil {
		errs = append(errs, d.log.Close())
	}
	return errors.Join(errs...)
}

// say tells the person whose command opened the runtime about a slow first step;
// what concerns a Change is told by tellStage to whoever watches it.
func (d *Daemon) say(format string, a ...any) {
	if d.progress != nil {
		fmt.Fprintf(d.progress, format+"\n", a...)
	}
}

// tellStage shows what a step is at.
func (d *Daemon) tellStage(id identity.ChangeID, what string) {
	d.watchers.each(id, func(o cli.Observer) { o.Stage("  "+what, false, 0) })
}

// record journals something about a Change.
func (d *Daemon) record(ctx context.Context, id identity.ChangeID, kind string, body []byte) error {
	_, err := d.journal.Append(ctx, journal.Entry{At: d.now(), Change: id, Kind: kind, Body: body})
	return err
}

// objects is the host's own store of the Git objects of one Change.
func (d *Daemon) objects(ctx context.Context, id identity.ChangeID) (*worktree.Store, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s, ok := d.stores[id]; ok {
		return s, nil
	}
	dir := d.home.at("objects", string(id))
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return nil, fmt.Errorf("open the objects of %s: %w", id, err)
	}
	s, err := worktree.Open(ctx, dir)
	if err != nil {
		return nil, err
	}
	d.stores[id] = s
	return s, nil
}

// pack keeps the objects that commit needs beyond base.
func (d *Daemon) pack(ctx context.Context, s *worktree.Store, commit, base string) (blob.Ref, error) {
	r, w := io.Pipe()
	go func() { w.CloseWithError(s.Pack(ctx, w, commit, base)) }()
	ref, err := d.blobs.Put(ctx, r, 8<<30)
	r.CloseWithError(err)
	if err != nil {
		return blob.Ref{}, fmt.Errorf("keep the objects of %s: %w", commit, err)
	}
	return ref, nil
}

// forge is where the embedded code host keeps a repository.
func (d *Daemon) forge(name string) string { return git.Directory(d.home.Provider("scm", "git"), name) }

// anchor brings the head of a Change's chain into the log.
func (d *Daemon) anchor(ctx context.Context, id identity.ChangeID) (change.Anchor, error) {
	a, err := d.evidence.Anchor(ctx, id)
	if err != nil {
		return change.Anchor{}, err
	}
	return change.Anchor{Head: a.Head.Digest, Origin: a.Parsed.Origin, Size: a.Parsed.Size, Trailer: a.Parsed.Trailer()}, nil
}

// Close ends the Change's chain, anchors its last head and checks the whole as
// an outsider would.
func (s steps) Close(ctx context.Context, j orchestration.Job) (change.Closing, error) {
	id := j.State.ID
	head, err := s.d.evidence.Close(ctx, id)
	if err != nil {
		return change.Closing{}, err
	}
	a, err := s.d.evidence.Anchor(ctx, id)
	if err != nil {
		return change.Closing{}, err
	}
	out := change.Closing{Records: int64(head.Length), Head: head.Digest, Origin: a.Parsed.Origin, Size: a.Parsed.Size}
	v, err := s.d.verify(ctx, j.State, true)
	if err != nil {
		return change.Closing{}, err
	}
	out.Evidence = v.Evidence
	return out, nil
}

// printable makes foreign text fit for a line: control and format characters
// become U+FFFD.
func printable(s string) string { return untrustedLine(s) }
