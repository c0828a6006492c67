package daemon

import (
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/kinds"
	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/orchestration"
)

// stateless is a daemon that has its blobs and nothing in memory, as after a
// restart.
func stateless(t *testing.T, blobs *blob.Store) *Daemon {
	t.Helper()
	d := &Daemon{blobs: blobs, now: time.Now}
	d.controls = controls{d: d, sets: map[digest.Digest]*kinds.Set{}, engines: map[identity.ChangeID]*policy.Engine{}}
	return d
}

func openBlobs(t *testing.T) *blob.Store {
	t.Helper()
	blobs, err := blob.Open(blob.Config{Dir: t.TempDir(), Quota: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	return blobs
}

// A process that takes a Change over decides by the Change's own policies, not
// by the shipped ones, and decides nothing before it has them.
func TestPoliciesOfAChangeAreInForceAfterARestart(t *testing.T) {
	files, err := kinds.DefaultSet(kinds.Defaults{Repository: "widget", BaseBranch: "main", Checks: []string{"true"}, Requester: "human:alice"})
	if err != nil {
		t.Fatal(err)
	}
	documents := fstest.MapFS{}
	for name, text := range files {
		documents[name] = &fstest.MapFile{Data: []byte(text)}
	}
	documents["policy.yaml"].Data = append(documents["policy.yaml"].Data,
		"\n    @id(\"no-repository\") forbid (principal, action == Action::\"scm.GetRepository\", resource);\n"...)
	blobs := openBlobs(t)
	control, err := stateless(t, blobs).controls.keep(t.Context(), documents)
	if err != nil {
		t.Fatal(err)
	}

	after := stateless(t, blobs)
	at := time.Now().UTC()
	s := change.Propose("chg-0123456789", change.Request{
		Repository: "widget", Requester: "human:alice", Author: "agent:fake", Reviewer: "agent:reviewer", Control: control,
	}, at)
	j := orchestration.Job{State: s, Command: change.Next(s)[0]}
	plain, err := authority(j, reads("widget"))
	if err != nil {
		t.Fatal(err)
	}
	verb, _ := ports.Lookup("scm.GetRepository")
	ask := policy.Request{
		Caller: plain.Caller, Actor: plain.Actor, Verb: verb, Resources: []string{"widget"}, Grant: plain.Grant, Change: plain.Change, Now: at,
		Provider: policy.ProviderFacts{Extension: "dev.numinance/scm-git", Origin: policy.OriginBundled, Manifest: digest.Of(nil)}, Input: digest.Of(nil),
	}
	if d := after.controls.Decide(ask); d.Effect != policy.Deny || d.Reasons[0].ID != "engine" {
		t.Errorf("before the documents are known: %s", d.Summary())
	}
	a, err := after.authority(j, reads("widget"))
	if err != nil {
		t.Fatal(err)
	}
	ask.Grant = a.Grant
	set, err := after.controls.set(control)
	if err != nil {
		t.Fatal(err)
	}
	d := after.controls.Decide(ask)
	if d.Policy != set.Policies().Revision() || !slices.ContainsFunc(d.Reasons, func(r policy.Reason) bool { return r.ID == "no-repository" }) {
		t.Errorf("under the Change's documents: %s by policy %s", d.Summary(), d.Policy)
	}
	j.State.ID, j.State.Request.Control = "chg-other", digest.Of([]byte("no documents"))
	if _, err := after.authority(j, reads("widget")); err == nil {
		t.Error("a step acts although the documents of its Change cannot be read")
	}
}

// A unit whose scope cannot be read gets no scope, least of all the profile's.
func TestScopeOfAUnit(t *testing.T) {
	s := steps{stateless(t, openBlobs(t))}
	profile := pathscope.Scope{Allowed: []string{"src/", "docs/"}}
	keep := func(text string) digest.Digest {
		ref, err := s.d.blobs.PutBytes(t.Context(), []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return ref.Digest
	}
	for name, c := range map[string]struct {
		plan digest.Digest
		want string // allowed paths; empty is an error
	}{
		"narrower":   {keep(`["src/a/"]`), "src/a/"},
		"none named": {keep(`null`), "src/ docs/"},
		"wider":      {keep(`["etc/"]`), ""},
		"malformed":  {keep(`{`), ""},
		"lost":       {digest.Of([]byte("lost")), ""},
		"not named":  {"", ""},
	} {
		got, err := s.scope(change.Unit{ID: "a", Plan: c.plan}, profile)
		if (err == nil) != (c.want != "") || strings.Join(got.Allowed, " ") != c.want {
			t.Errorf("%s: %q, %v; want %q", name, got.Allowed, err, c.want)
		}
	}
}

// What winds a Change down takes the authority from both runs of a verification.
func TestRunsToRevoke(t *testing.T) {
	s := change.State{ID: "chg-0123456789", Attempts: map[string]int{"verify/@0": 1, "execute/a@0": 1}}
	runs := runsOf(s)
	var verify change.Command
	for _, c := range s.Issued() {
		if c.Kind == change.Verify {
			verify = c
		}
	}
	if len(runs) != 3 || !slices.Contains(runs, verify.Run) || !slices.Contains(runs, baseRun(verify)) {
		t.Errorf("runs %v lack those of %+v", runs, verify)
	}
}
