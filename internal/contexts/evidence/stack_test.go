package evidence_test

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	evidencestorev1 "github.com/numinance/numinance/gen/numinance/ports/evidencestore/v1"
	transparencylogv1 "github.com/numinance/numinance/gen/numinance/ports/transparencylog/v1"
	"github.com/numinance/numinance/internal/contexts/evidence"
	"github.com/numinance/numinance/internal/core/bundle"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/broker"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/host/hostservice"
	"github.com/numinance/numinance/internal/host/journal"
	"github.com/numinance/numinance/internal/host/pluginhost"
	"github.com/numinance/numinance/plugins/evidencestore/files"
	"github.com/numinance/numinance/plugins/transparencylog/tessera"
	"github.com/numinance/numinance/sdk"
)

// providers are the two evidence ports' running plugins.
type providers map[string]dispatch.Provider

func (p providers) Provider(port string) (dispatch.Provider, error) {
	if found := p[port]; found != nil {
		return found, nil
	}
	return nil, status.Errorf(codes.NotFound, "no provider of %s", port)
}

// start launches a bundled plugin in memory behind the real plugin host.
func start(t *testing.T, p sdk.Plugin, dataDir, config string, sign hostservice.Signer) *pluginhost.Plugin {
	t.Helper()
	pin, err := pluginhost.ManifestDigest(p.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	host, err := hostservice.New(hostservice.Config{Sign: sign})
	if err != nil {
		t.Fatal(err)
	}
	running, err := pluginhost.Start(t.Context(), pluginhost.Config{
		Launcher: pluginhost.Memory{DataDir: dataDir, New: func(conn grpc.ClientConnInterface) (pluginv1.PluginServiceServer, error) {
			return sdk.NewService(p, conn)
		}},
		Expect:   pluginhost.Expectation{Port: p.Manifest.GetPort(), Extension: p.Manifest.GetExtensionId(), Origin: policy.OriginBundled, Manifest: pin},
		Settings: []byte(config),
		Host:     func(*pluginhost.Plugin) pluginv1.HostServiceServer { return host },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := running.Close(); err != nil {
			t.Error(err)
		}
	})
	return running
}

// P-201 to P-203, P-221 to P-223: through the real dispatcher, plugin host and
// broker the evidence context stores, anchors and exports; nobody else may call
// its ports, and it may not without its scopes.
func TestP201P221ThroughTheRealStack(t *testing.T) {
	dir := t.TempDir()
	j, err := journal.Open(t.Context(), journal.Config{Path: filepath.Join(dir, "state.db"), Holder: "test", Spill: filepath.Join(dir, "spill"), Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	blobs, err := blob.Open(blob.Config{Dir: filepath.Join(dir, "blobs"), Quota: 64 << 20, Inline: j})
	if err != nil {
		t.Fatal(err)
	}
	keys, err := broker.Open(broker.Config{Dir: filepath.Join(dir, "keys"), Log: origin, Head: "example.org/evidence"})
	if err != nil {
		t.Fatal(err)
	}
	var trust bundle.Trust
	for role, key := range map[string]string{"head": keys.HeadKey(), "log": keys.LogKey()} {
		if err := trust.Add(role, key); err != nil {
			t.Fatal(err)
		}
	}
	running := providers{
		"evidencestore":   start(t, files.Plugin(), filepath.Join(dir, "evidence"), "", nil),
		"transparencylog": start(t, tessera.Plugin(), logDir(t), `{"origin":"`+origin+`"}`, keys),
	}
	engine, err := policy.LoadDefault()
	if err != nil {
		t.Fatal(err)
	}
	d, err := dispatch.New(dispatch.Config{
		Journal: j, Blobs: blobs, Policy: engine, Providers: running, Now: time.Now, Lag: func() time.Duration { return time.Hour },
	})
	if err != nil {
		t.Fatal(err)
	}
	runner := identity.Actor{Kind: identity.KindRunner, Principal: "service:runner", Run: "run-evidence"}
	authority := func(change identity.ChangeID, step string) (dispatch.Authority, error) {
		g, err := dispatch.EvidenceGrant(runner, change, time.Now().Add(-time.Second))
		return dispatch.Authority{
			Caller: ports.CallerEvidence, Actor: runner, Grant: g, Step: step,
			Change: policy.ChangeFacts{ID: change, State: "Executing", Requester: "human:alice"},
		}, err
	}
	e, err := evidence.New(evidence.Config{
		Journal: j, Blobs: blobs, Heads: keys.Heads(), Keys: trust, Now: time.Now,
		Dial: func(change identity.ChangeID, step string) (grpc.ClientConnInterface, error) {
			a, err := authority(change, step)
			if err != nil {
				return nil, err
			}
			return d.Conn(a), nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{journal: j}
	w.write(t, "chg-a", 300)
	w.write(t, identity.SystemChange, 2)
	a, err := e.Anchor(t.Context(), "chg-a")
	if err != nil {
		t.Fatal(err)
	}
	commit, err := bundle.ParseCommit([]byte(a.Trailer()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Close(t.Context(), "chg-a"); err != nil {
		t.Fatal(err)
	}
	r, err := e.Verify(t.Context(), "chg-a", bundle.Options{Closed: true, Trailers: commit})
	if err != nil || r.Chain != "closed 301" || r.Covered != 300 {
		t.Fatalf("%+v, %v", r, err)
	}
	if _, err := e.Verify(t.Context(), identity.SystemChange, bundle.Options{}); err != nil {
		t.Errorf("the system chain: %v", err)
	}
	if last := j.Last(); last != 302 {
		t.Errorf("the journal has %d entries, want 302: evidence verbs are not journaled again", last)
	}

	for name, spoil := range map[string]func(*dispatch.Authority){
		"another context":                 func(a *dispatch.Authority) { a.Caller = ports.CallerRelease },
		"another identity":                func(a *dispatch.Authority) { a.Actor.Kind = identity.KindAuthorAgent },
		"a grant without evidence scopes": func(a *dispatch.Authority) { a.Grant.Scopes = nil },
		"a grant without evidence verbs":  func(a *dispatch.Authority) { a.Grant.Verbs = nil },
	} {
		a, err := authority("chg-a", "spoiled/"+name)
		if err != nil {
			t.Fatal(err)
		}
		spoil(&a)
		store := evidencestorev1.NewEvidenceStoreServiceClient(d.Conn(a))
		log := transparencylogv1.NewTransparencyLogServiceClient(d.Conn(a))
		for verb, call := range map[string]func() error{
			"AppendLocked": func() error {
				_, err := store.AppendLocked(t.Context(), &evidencestorev1.AppendLockedRequest{ChangeId: "chg-z", FirstSequence: 1, Records: [][]byte{[]byte("x")}})
				return err
			},
			"GetRecord": func() error {
				_, err := store.GetRecord(t.Context(), &evidencestorev1.GetRecordRequest{ChangeId: "chg-a", Sequence: 1})
				return err
			},
			"ListRange": func() error {
				_, err := store.ListRange(t.Context(), &evidencestorev1.ListRangeRequest{ChangeId: "chg-a", FirstSequence: 1, MaxRecords: 1})
				return err
			},
			"Head": func() error {
				_, err := store.Head(t.Context(), &evidencestorev1.HeadRequest{ChangeId: "chg-a"})
				return err
			},
			"Append": func() error {
				_, err := log.Append(t.Context(), &transparencylogv1.AppendRequest{Leaf: []byte(strings.Repeat("H", 33))})
				return err
			},
			"Checkpoint": func() error {
				_, err := log.Checkpoint(t.Context(), &transparencylogv1.CheckpointRequest{})
				return err
			},
			"Prove": func() error {
				_, err := log.Prove(t.Context(), &transparencylogv1.ProveRequest{Proof: &transparencylogv1.ProveRequest_Inclusion{Inclusion: &transparencylogv1.InclusionQuery{TreeSize: 1}}})
				return err
			},
			"Lookup": func() error {
				_, err := log.Lookup(t.Context(), &transparencylogv1.LookupRequest{Leaf: []byte(strings.Repeat("H", 33))})
				return err
			},
		} {
			if err := call(); status.Code(err) != codes.PermissionDenied {
				t.Errorf("%s, %s: %v, want a denial", name, verb, err)
			}
		}
	}
}
