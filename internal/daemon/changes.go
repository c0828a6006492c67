package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"time"

	"github.com/numinance/numinance/internal/core/bundle"
	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/edge/cli"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/host/egress"
	"github.com/numinance/numinance/internal/host/hostservice"
	"github.com/numinance/numinance/internal/host/journal"
	"github.com/numinance/numinance/internal/host/worktree"
	"github.com/numinance/numinance/internal/orchestration"
)

// The principals of the scripted executor's runs.
const (
	principalAuthor   identity.Principal = "agent:fake"
	principalReviewer identity.Principal = "agent:reviewer"
)

const pageSize = 500

// Run proposes a Change and drives it until it ends or waits for somebody.
func (d *Daemon) Run(ctx context.Context, r cli.ChangeRequest, o cli.Observer) (cli.Outcome, error) {
	id := orchestration.NewID()
	stop := d.watch(id, o)
	defer stop()
	req, err := d.propose(ctx, id, r)
	if err != nil {
		return cli.Outcome{}, err
	}
	o.Line(cli.Event{At: d.now(), Kind: "CHANGE", Source: "host-recorded", Subject: string(id), Detail: fmt.Sprintf("ticket %s on %s", req.Ticket, req.Repository)})
	s, err := d.runner.Run(ctx, id, req)
	if err != nil {
		return cli.Outcome{}, d.interrupted(id, err)
	}
	if s.Status == change.Released && r.PushBack && r.Repo != "" {
		if err := worktree.PushBack(ctx, d.forge(req.Repository), r.Repo, s.Merge.Revision, "numi/"+string(id)); err != nil {
			return cli.Outcome{}, &cli.ExitError{Code: cli.ExitBroken, Err: fmt.Errorf("%s is released, but pushing it back failed: %w", id, err)}
		}
	}
	return d.outcome(ctx, s)
}

// interrupted says what became of a Change whose command ended early.
func (d *Daemon) interrupted(id identity.ChangeID, err error) error {
	var exit *cli.ExitError
	if errors.As(err, &exit) {
		return err
	}
	return &cli.ExitError{Code: cli.ExitBroken, Err: fmt.Errorf("%w; go on with: numi change resume %s", err, id)}
}

// propose brings everything in that a Change rests on: the mirror, the ticket,
// the control documents and the scripts, each under its digest.
func (d *Daemon) propose(ctx context.Context, id identity.ChangeID, r cli.ChangeRequest) (change.Request, error) {
	usage := func(err error) error { return &cli.ExitError{Code: cli.ExitUsage, Err: err} }
	if r.Executor != executorFake {
		return change.Request{}, usage(fmt.Errorf("executor %q is not installed; there is %q", r.Executor, executorFake))
	}
	if len(r.Script) == 0 {
		return change.Request{}, usage(errors.New("the fake executor follows a script: name one with --script"))
	}
	// The mirror, the tracker and the control directory are files that two
	// Changes on one repository have in common.
	d.proposing.Lock()
	defer d.proposing.Unlock()
	name, branch, err := d.mirror(ctx, id, r)
	if err != nil {
		return change.Request{}, usage(err)
	}
	req := change.Request{
		Repository: name, Branch: branch, Project: name, Executor: r.Executor,
		Requester: requester(), Author: principalAuthor, Reviewer: principalReviewer, PushBack: r.PushBack,
	}
	if req.Ticket, err = d.ticket(id, name, r); err != nil {
		return change.Request{}, usage(err)
	}
	dir := r.Control
	if dir == "" {
		if dir, err = d.generateControl(ctx, id, name, branch, r); err != nil {
			return change.Request{}, usage(err)
		}
	}
	control, err := d.controls.keep(ctx, os.DirFS(dir))
	if err != nil {
		return change.Request{}, usage(fmt.Errorf("%s: %w", dir, err))
	}
	req.Control = control
	b, err := d.bind(control, name)
	if err != nil {
		return change.Request{}, usage(fmt.Errorf("%s: %w", dir, err))
	}
	if b.Pipeline != nil {
		req.Pipeline = b.Pipeline.GetResource()
	}
	script, err := d.blobs.PutBytes(ctx, r.Script)
	if err != nil {
		return change.Request{}, fmt.Errorf("keep the script: %w", err)
	}
	req.Script = script.Digest
	return req, d.prepareProviders()
}

// requester is the person at the keyboard, as far as the machine knows.
func requester() identity.Principal {
	name := "unknown"
	if u, err := user.Current(); err == nil && u.Username != "" {
		name = u.Username
	}
	p := identity.Principal("human:" + name)
	if !p.Valid() {
		p = "human:unknown"
	}
	return p
}

// mirror makes or renews the forge's copy of the source and returns its name
// there and the base branch. The source is only read.
func (d *Daemon) mirror(ctx context.Context, id identity.ChangeID, r cli.ChangeRequest) (name, branch string, err error) {
	if r.Seed != nil {
		name = r.Name + "-" + strings.TrimPrefix(string(id), "chg-")
		_, err := worktree.Seed(ctx, d.forge(name), "main", r.Seed, time.Unix(1_700_000_000, 0))
		return name, "main", err
	}
	path, err := filepath.EvalSymlinks(r.Repo)
	if err != nil {
		return "", "", fmt.Errorf("repository: %w", err)
	}
	base := strings.TrimSuffix(filepath.Base(path), ".git")
	if r.Name != "" {
		base = r.Name
	}
	name = fmt.Sprintf("%s-%s", resourceName(base), digest.Of([]byte(path)).Hex()[:6])
	dest := d.forge(name)
	var got worktree.Imported
	if _, statErr := os.Stat(dest); statErr == nil {
		got, err = worktree.Renew(ctx, path, dest, r.Branch)
	} else {
		got, err = worktree.Import(ctx, path, dest, r.Branch)
	}
	if err != nil {
		return "", "", err
	}
	if got.Uncommitted > 0 {
		d.tellStage(id, fmt.Sprintf("note: %d uncommitted paths of %s are not part of the run", got.Uncommitted, tilde(path)))
	}
	return name, got.Branch, nil
}

func resourceName(s string) string {
	out := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '_', r == '.':
			return r
		}
		return '-'
	}, s)
	if out == "" || out == "." {
		return "repository"
	}
	return out
}

// outcome is how a Change stands, with the counts that the journal holds.
func (d *Daemon) outcome(ctx context.Context, s change.State) (cli.Outcome, error) {
	out := cli.Outcome{Result: orchestration.ResultOf(s), Exit: orchestration.ExitCode(s), Policy: string(s.Admission.Policy), Files: tilde(string(d.home))}
	for _, a := range s.Approvals {
		out.Reviewers = append(out.Reviewers, fmt.Sprintf("%s (%s)", a.By, a.Kind))
	}
	err := d.entries(ctx, s.ID, func(kind string, body []byte) error {
		switch kind {
		case dispatch.KindDecision:
			var b dispatch.DecisionBody
			if err := json.Unmarshal(body, &b); err != nil {
				return err
			}
			out.Decisions++
			if b.Effect != policy.Allow.String() {
				out.Denials++
				out.Refused = append(out.Refused, refusedBy(b))
			}
		case dispatch.KindResult:
			out.Actions++
		case kindViolation, egress.KindDenied, hostservice.KindRefused:
			line, _, err := tell(journal.Entry{Kind: kind, Body: body})
			if err != nil {
				return err
			}
			out.Denials++
			out.Refused = append(out.Refused, cli.Refusal{What: line.Subject, Layer: line.Layer, Why: line.Detail})
		}
		return nil
	})
	if err != nil {
		return cli.Outcome{}, fmt.Errorf("count what was recorded of %s: %w", s.ID, err)
	}
	return out, nil
}

// refusedBy says what a decision refused, and which layer said no.
func refusedBy(b dispatch.DecisionBody) cli.Refusal {
	r := cli.Refusal{What: b.Verb}
	if t := b.Tool; t != nil {
		r.What = strings.TrimSpace(strings.Join([]string{t.Name, t.Path, t.Host, t.Intent}, " "))
		r.What = strings.Join(strings.Fields(r.What), " ")
	}
	if len(b.Reasons) > 0 {
		r.Layer, r.Why = fmt.Sprintf("%s %s", b.Reasons[0].Layer, b.Reasons[0].ID), b.Reasons[0].Text
	}
	return r
}

// entries hands the journal of one Change to fn, in order.
func (d *Daemon) entries(ctx context.Context, id identity.ChangeID, fn func(kind string, body []byte) error) error {
	for seq := int64(0); ; {
		page, err := d.journal.AfterOf(ctx, id, seq, pageSize)
		if err != nil {
			return err
		}
		for _, e := range page {
			seq = e.Seq
			if err := fn(e.Kind, e.Body); err != nil {
				return fmt.Errorf("journal entry %d: %w", e.Seq, err)
			}
		}
		if len(page) < pageSize {
			return nil
		}
	}
}

func (d *Daemon) id(s string) (identity.ChangeID, error) {
	id := identity.ChangeID(s)
	if !identity.ValidID(id) {
		return "", &cli.ExitError{Code: cli.ExitUsage, Err: fmt.Errorf("%q is no Change id; 'numi change list' shows them", s)}
	}
	return id, nil
}

func unknown(err error) error {
	if errors.Is(err, orchestration.ErrUnknownChange) {
		return &cli.ExitError{Code: cli.ExitUsage, Err: fmt.Errorf("%w; 'numi change list' shows them", err)}
	}
	return err
}

// Resume goes on with a Change that a crash or an interrupt left behind.
func (d *Daemon) Resume(ctx context.Context, s string, o cli.Observer) (cli.Outcome, error) {
	id, err := d.id(s)
	if err != nil {
		return cli.Outcome{}, err
	}
	stop := d.watch(id, o)
	defer stop()
	st, err := d.runner.Resume(ctx, id, requester())
	if err != nil {
		return cli.Outcome{}, d.interrupted(id, unknown(err))
	}
	return d.outcome(ctx, st)
}

// Cancel revokes a Change's grants and winds it down.
func (d *Daemon) Cancel(ctx context.Context, s, reason string, o cli.Observer) (cli.Outcome, error) {
	id, err := d.id(s)
	if err != nil {
		return cli.Outcome{}, err
	}
	stop := d.watch(id, o)
	defer stop()
	st, err := d.runner.Cancel(ctx, id, requester(), reason)
	if err != nil {
		return cli.Outcome{}, d.interrupted(id, unknown(err))
	}
	return d.outcome(ctx, st)
}

// List returns the newest thousand Changes.
func (d *Daemon) List(ctx context.Context) ([]cli.Outcome, error) {
	states, err := d.runner.List(ctx, 1000)
	if err != nil {
		return nil, err
	}
	var out []cli.Outcome
	for _, s := range states {
		o, err := d.outcome(ctx, s)
		if err != nil {
			return nil, err
		}
		out = append(out, o)
	}
	return out, nil
}

// Show returns how one Change stands.
func (d *Daemon) Show(ctx context.Context, s string) (cli.Outcome, error) {
	id, err := d.id(s)
	if err != nil {
		return cli.Outcome{}, err
	}
	st, err := d.runner.Get(ctx, id)
	if err != nil {
		return cli.Outcome{}, unknown(err)
	}
	return d.outcome(ctx, st)
}

// Verify exports the Change's evidence as a bundle and checks that bundle with
// the public keys alone, as an outsider would, together with the checkpoint
// that the merge commit carries.
func (d *Daemon) Verify(ctx context.Context, s, export string) (cli.Verification, error) {
	id, err := d.id(s)
	if err != nil {
		return cli.Verification{}, err
	}
	st, err := d.runner.Get(ctx, id)
	if err != nil {
		return cli.Verification{}, unknown(err)
	}
	v, err := d.verify(ctx, st, st.Status.Terminal())
	if err != nil {
		return v, err
	}
	if export != "" {
		if err := d.export(ctx, id, export); err != nil {
			return v, err
		}
		v.Bundle = export
	}
	return v, nil
}

func (d *Daemon) verify(ctx context.Context, st change.State, closed bool) (cli.Verification, error) {
	v := cli.Verification{ChangeID: string(st.ID)}
	o := bundle.Options{Change: st.ID, Closed: closed}
	if st.Merge.Revision != "" {
		var err error
		if o.Trailers, err = d.trailers(ctx, st); err != nil {
			return v, err
		}
	}
	report, err := d.evidence.Verify(ctx, st.ID, o)
	var failure *chain.Failure
	switch {
	case errors.As(err, &failure):
		v.Evidence, v.Detail = string(failure.Label), failure.Error()
	case err != nil:
		return v, fmt.Errorf("verify %s: %w", st.ID, err)
	default:
		v.Evidence, v.Records, v.Detail = verified, report.Records, report.Chain
		for _, p := range report.Protects {
			v.Protects = append(v.Protects, "protects against "+p)
		}
		for _, p := range report.Unprotected {
			v.Protects = append(v.Protects, "does not protect against "+p)
		}
	}
	return v, nil
}

const verified = "verified"

// trailers reads the checkpoint that the merge commit carries: it lies in the
// repository, outside of what the evidence store could change.
func (d *Daemon) trailers(ctx context.Context, s change.State) ([]tlogCheckpoint, error) {
	message, err := worktree.Message(ctx, d.forge(s.Request.Repository), s.Merge.Revision)
	if err != nil {
		return nil, fmt.Errorf("read the merge commit: %w", err)
	}
	return bundle.ParseCommit(message)
}

// export writes the bundle, the public keys and the merge commit's message into
// a new directory, for `numi-verify` on another machine.
func (d *Daemon) export(ctx context.Context, id identity.ChangeID, dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return &cli.ExitError{Code: cli.ExitUsage, Err: fmt.Errorf("export: %w", err)}
	}
	f, err := os.Create(filepath.Join(dir, "bundle.zip"))
	if err != nil {
		return fmt.Errorf("export: %w", err)
	}
	defer f.Close()
	if err := d.evidence.Bundle(ctx, id, f); err != nil {
		return fmt.Errorf("export: %w", err)
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("export: %w", err)
	}
	return os.WriteFile(filepath.Join(dir, "trust.txt"), []byte(d.trust.String()), 0o644)
}
