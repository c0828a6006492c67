package daemon

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	kindsv1 "github.com/numinance/numinance/gen/numinance/kinds/v1"
	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/kinds"
	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/host/blob"
	"github.com/numinance/numinance/internal/host/journal"
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
	plain, err := authority(j, reads("widget"), at)
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

// What winds a Change down takes the authority from every run of a verification
// that did something.
func TestRunsToRevoke(t *testing.T) {
	d := stateless(t, openBlobs(t))
	var err error
	d.journal, err = journal.Open(t.Context(), journal.Config{
		Path: filepath.Join(t.TempDir(), "state.db"), Spill: filepath.Join(t.TempDir(), "spill"), Holder: "test", Now: time.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.journal.Close() })
	const own identity.RunID = "run-verify"
	if _, err := d.journal.Start(t.Context(), journal.Start{
		Key: "key-1", Change: "chg-0123456789", Run: baseRun(own), Verb: "sandboxprovider.Create", Request: digest.Of(nil),
	}, journal.Entry{Change: "chg-0123456789", Kind: "TEST", Body: []byte("{}")}); err != nil {
		t.Fatal(err)
	}
	runs, err := steps{d}.withOthers(t.Context(), own)
	if err != nil || !slices.Equal(runs, []identity.RunID{own, baseRun(own)}) {
		t.Errorf("runs %v, %v", runs, err)
	}
}

// An approval that ran out since the command was issued approves nothing: a
// merge that a crash held up is not carried out on it.
func TestApprovalsRunOutBetweenIssueAndStep(t *testing.T) {
	at := time.Now().UTC()
	s := change.Propose("chg-0123456789", change.Request{Repository: "widget", Requester: "human:alice", Author: "agent:fake", Reviewer: "agent:reviewer"}, at)
	s.Needs = change.Needs{Humans: 1}
	s.Candidate, s.Verdict = change.Candidate{Head: "h", Tree: "t"}, change.Verdict{Passed: true, Tree: "t"}
	s.PullRequest = change.PullRequest{ID: "1", Head: "h", Tree: "t"}
	s.Approvals = []change.Approval{{By: "human:bob", Kind: identity.KindHuman, Head: "h", Tree: "t", Expires: at.Add(time.Hour)}}
	j := orchestration.Job{State: s, Command: change.Next(s)[0]}
	for after, want := range map[time.Duration]bool{time.Minute: true, 2 * time.Hour: false} {
		a, err := authority(j, merges("widget"), at.Add(after))
		if err != nil {
			t.Fatal(err)
		}
		if a.Change.Approved != want {
			t.Errorf("%s after the command was issued: approved %v, want %v", after, a.Change.Approved, want)
		}
	}
}

// An author run may reach what its Profile names; a reviewer and a verifier
// reach nothing.
func TestEgressComesFromTheProfile(t *testing.T) {
	profile := bound{Bound: kinds.Bound{Profile: &kindsv1.ProfileSpec{Egress: []*kindsv1.Destination{{Host: "modules.example.com", Port: 443}}, Credentials: []string{"model"}}}}
	at := time.Now().UTC()
	s := change.Propose("chg-0123456789", change.Request{Requester: "human:alice", Author: "agent:fake", Reviewer: "agent:reviewer"}, at)
	j := orchestration.Job{State: s, Command: change.Next(s)[0]}
	for name, c := range map[string]struct {
		role role
		want int
	}{
		"author":   {authors("a", pathscope.Scope{Allowed: []string{"src/"}}, profile), 1},
		"reviewer": {reviews(profile.budget()), 0},
		"verifier": {verifies(verifyBudget), 0},
		"planner":  {plans(profile.budget()), 0},
	} {
		a, err := authority(j, c.role, at)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if len(a.Grant.Egress) != c.want || len(a.Grant.Credentials) != c.want || c.want == 1 && !a.Grant.HasDestination("modules.example.com", 443) {
			t.Errorf("%s: egress %v, credentials %v", name, a.Grant.Egress, a.Grant.Credentials)
		}
	}
}
