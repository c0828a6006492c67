package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"google.golang.org/grpc"

	changectx "github.com/numinance/numinance/internal/contexts/change"
	"github.com/numinance/numinance/internal/contexts/knowledge"
	"github.com/numinance/numinance/internal/contexts/profile"
	"github.com/numinance/numinance/internal/contexts/release"
	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/untrusted"
	"github.com/numinance/numinance/internal/host/journal"
	"github.com/numinance/numinance/internal/orchestration"
)

// steps joins the contexts to the life of a Change. Each method is one command
// of core/change: it derives its authority from the job, calls one context and
// returns references. What a step needs beyond the job is read from the host's
// own stores under digests that the state names.
type steps struct{ d *Daemon }

var _ orchestration.Steps = steps{}

// connect returns a connection for one role of one job.
func (s steps) connect(j orchestration.Job, r role, part string) (grpc.ClientConnInterface, error) {
	a, err := s.d.authority(j, r)
	if err != nil {
		return nil, err
	}
	if part != "" {
		a.Step += "/" + part
	}
	return s.d.dispatcher.Conn(a), nil
}

// Admit reads the base revision and what governs the repository.
func (s steps) Admit(ctx context.Context, j orchestration.Job) (change.Admission, error) {
	conn, err := s.connect(j, reads(j.State.Request.Repository), "")
	if err != nil {
		return change.Admission{}, err
	}
	in := profile.In{Repository: j.State.Request.Repository, Branch: j.State.Request.Branch}
	a, err := profile.New(conn, governing{s.d, j.State.Request.Control}).Admit(ctx, in)
	if err != nil {
		return change.Admission{}, err
	}
	store, err := s.d.objects(ctx, j.State.ID)
	if err != nil {
		return change.Admission{}, err
	}
	pack, err := s.d.blobs.Open(a.Objects.Digest)
	if err != nil {
		return change.Admission{}, fmt.Errorf("read the base revision: %w", err)
	}
	defer pack.Close()
	if err := store.AddBase(ctx, pack, a.BaseRevision); err != nil {
		return change.Admission{}, fmt.Errorf("keep the base revision: %w", err)
	}
	a.BaseTree, err = store.TreeOf(ctx, a.BaseRevision)
	return a, err
}

// Intake reads the ticket.
func (s steps) Intake(ctx context.Context, j orchestration.Job) (change.Task, error) {
	conn, err := s.connect(j, intake(j.State.Request.Project), "")
	if err != nil {
		return change.Task{}, err
	}
	out, err := changectx.New(conn, s.d.blobs).Intake(ctx, changectx.Ticket{Project: j.State.Request.Project, Key: j.State.Request.Ticket})
	return out.Task, err
}

// Resolve gathers context from the connections that the documents approve.
func (s steps) Resolve(ctx context.Context, j orchestration.Job) (change.Bundle, error) {
	docs, err := s.d.documents(j.State)
	if err != nil {
		return change.Bundle{}, err
	}
	connections := docs.connections()
	if len(connections) == 0 {
		return change.Bundle{}, nil
	}
	names := make([]string, len(connections))
	for i, c := range connections {
		names[i] = c.Name
	}
	conn, err := s.connect(j, looksUp(names), "")
	if err != nil {
		return change.Bundle{}, err
	}
	return knowledge.New(conn, s.d.blobs).Gather(ctx, knowledge.In{Connections: connections, About: s.title(j)})
}

// title is the ticket's title as it was kept at intake.
func (s steps) title(j orchestration.Job) untrusted.Text {
	b, err := s.d.blobs.Bytes(j.State.Task.Title, changectx.MaxTitle)
	if err != nil {
		b = nil // the title decorates; the task itself is read where it counts
	}
	return untrusted.New("ticket title", b, changectx.MaxTitle)
}

func (s steps) subject(j orchestration.Job) release.Subject {
	st := j.State
	notes := []string{
		fmt.Sprintf("Executor: %s", st.Request.Executor),
		fmt.Sprintf("Policy: %s", st.Admission.Policy),
	}
	if st.Verdict.Passed {
		notes = append(notes, fmt.Sprintf("Verified tree: %s (%s)", st.Verdict.Tree, st.Verdict.Summary))
	}
	for _, a := range st.Approvals {
		notes = append(notes, fmt.Sprintf("Reviewed-by: %s (%s)", a.By, a.Kind))
	}
	return release.Subject{
		Change: st.ID, Repository: st.Request.Repository, BaseBranch: st.Admission.BaseBranch,
		Candidate: st.Candidate, Key: st.Task.Key, Title: s.title(j), Notes: notes,
	}
}

// release gives the release context with connections for the identities that
// it may act under.
func (s steps) release(j orchestration.Job) *release.Context {
	return release.New(func(kind identity.ActorKind, part string) grpc.ClientConnInterface {
		r := proposes(j.State.Request.Repository)
		if kind == identity.KindReleasePipeline {
			r = merges(j.State.Request.Repository)
			if j.Command.Kind == change.RunPipeline {
				r = builds(j.State.Request.Repository, j.State.Request.Pipeline)
			}
		}
		conn, err := s.connect(j, r, part)
		if err != nil {
			return refused{err}
		}
		return conn
	})
}

// OpenPullRequest opens the pull request as the author-agent.
func (s steps) OpenPullRequest(ctx context.Context, j orchestration.Job) (change.PullRequest, error) {
	return s.release(j).Open(ctx, s.subject(j))
}

// UpdatePullRequest moves its head to the candidate.
func (s steps) UpdatePullRequest(ctx context.Context, j orchestration.Job) (change.PullRequest, error) {
	return s.release(j).Update(ctx, s.subject(j), j.State.PullRequest)
}

// RequestApproval leaves a record that people have to act on.
func (s steps) RequestApproval(ctx context.Context, j orchestration.Job) error {
	return s.note(ctx, j, "approval.requested", map[string]any{
		"head": j.State.PullRequest.Head, "tree": j.State.Verdict.Tree, "pull_request": j.State.PullRequest.ID, "humans": j.State.Needs.Humans,
	})
}

// note journals something that is neither an action nor an event of the machine.
func (s steps) note(ctx context.Context, j orchestration.Job, kind string, body map[string]any) error {
	body["command"] = string(j.Command.ID)
	b, err := digest.Canonical(body)
	if err != nil {
		return fmt.Errorf("record %s: %w", kind, err)
	}
	_, err = s.d.journal.Append(ctx, journal.Entry{At: s.d.now(), Change: j.State.ID, Kind: kind, Body: json.RawMessage(b)})
	return err
}

// Pipeline runs the customer's pipeline on the verified head.
func (s steps) Pipeline(ctx context.Context, j orchestration.Job) (change.PipelineRun, error) {
	docs, err := s.d.documents(j.State)
	if err != nil {
		return change.PipelineRun{}, err
	}
	if err := s.d.usePipeline(j.State.Request, docs); err != nil {
		return change.PipelineRun{}, err
	}
	return s.release(j).Run(ctx, release.PipelineIn{
		Pipeline: j.State.Request.Pipeline, Repository: j.State.Request.Repository, Revision: j.State.PullRequest.Head,
	})
}

// Anchor anchors the head of the Change's chain as it stands.
func (s steps) Anchor(ctx context.Context, j orchestration.Job) (change.Anchor, error) {
	return s.d.anchor(ctx, j.State.ID)
}

// Merge merges the verified head as the release-pipeline.
func (s steps) Merge(ctx context.Context, j orchestration.Job) (change.Merge, error) {
	m, err := s.release(j).Merge(ctx, release.MergeIn{
		Subject: s.subject(j), PullRequest: j.State.PullRequest, Verdict: j.State.Verdict, Anchor: j.State.Anchor,
	})
	if err != nil || !m.Moved {
		return m, err
	}
	// The rebase needs the new base's objects; they come the way the first ones
	// came.
	conn, err := s.connect(j, reads(j.State.Request.Repository), "base")
	if err != nil {
		return change.Merge{}, err
	}
	a, err := profile.New(conn, governing{s.d, j.State.Request.Control}).Admit(ctx, profile.In{Repository: j.State.Request.Repository, Branch: j.State.Admission.BaseBranch})
	if err != nil {
		return change.Merge{}, fmt.Errorf("read the base that moved: %w", err)
	}
	store, err := s.d.objects(ctx, j.State.ID)
	if err != nil {
		return change.Merge{}, err
	}
	pack, err := s.d.blobs.Open(a.Objects.Digest)
	if err != nil {
		return change.Merge{}, fmt.Errorf("read the base that moved: %w", err)
	}
	defer pack.Close()
	if err := store.AddBase(ctx, pack, a.BaseRevision); err != nil {
		return change.Merge{}, fmt.Errorf("keep the base that moved: %w", err)
	}
	m.Base = a.BaseRevision
	return m, nil
}

// ReportTicket tells the tracker what came of the ticket.
func (s steps) ReportTicket(ctx context.Context, j orchestration.Job) error {
	conn, err := s.connect(j, reports(j.State.Request.Project), "")
	if err != nil {
		return err
	}
	text := fmt.Sprintf("Change %s was merged as %s by pull request %s.", j.State.ID, j.State.Merge.Revision, j.State.PullRequest.ID)
	return changectx.New(conn, s.d.blobs).Report(ctx, changectx.Ticket{Project: j.State.Request.Project, Key: j.State.Request.Ticket}, text)
}

// RevokeGrants ends the authority of every run of the Change so far, and the
// calls of theirs that are in flight. The commands that wind the Change down
// have runs of their own.
func (s steps) RevokeGrants(ctx context.Context, j orchestration.Job) error {
	for _, own := range j.State.Runs() {
		runs, err := s.withOthers(ctx, own)
		if err != nil {
			return err
		}
		for _, run := range runs {
			if err := s.d.dispatcher.RevokeRun(ctx, j.State.ID, run, "the Change is winding down"); err != nil {
				return fmt.Errorf("revoke the grants of run %s: %w", run, err)
			}
		}
	}
	return nil
}

// withOthers are the runs of one command: its own, and of those beside it the
// ones that did something.
func (s steps) withOthers(ctx context.Context, own identity.RunID) ([]identity.RunID, error) {
	runs := []identity.RunID{own}
	for _, run := range []identity.RunID{baseRun(own), preparingRun(own)} {
		_, verbs, err := s.d.journal.RunFacts(ctx, run)
		if err != nil {
			return nil, err
		}
		if len(verbs) > 0 {
			runs = append(runs, run)
		}
	}
	return runs, nil
}

// Compensate closes the pull request of a Change that did not end well.
func (s steps) Compensate(ctx context.Context, j orchestration.Job) (orchestration.Compensation, error) {
	pr, m, err := s.release(j).Close(ctx, j.State.Request.Repository, j.State.PullRequest, strings.TrimSpace(j.State.Failure.Reason))
	return orchestration.Compensation{PullRequest: pr, Merge: m}, err
}

// refused is the connection of a step whose authority could not be built: every
// call on it fails with the reason.
type refused struct{ err error }

func (r refused) Invoke(context.Context, string, any, any, ...grpc.CallOption) error { return r.err }

func (r refused) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, r.err
}
