package fake

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	authorexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
)

// The event types, short.
const (
	started       = authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_EXECUTION_STARTED
	planAccepted  = authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_PLAN_ACCEPTED
	toolIntent    = authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_TOOL_INTENT
	toolAllowed   = authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_TOOL_ALLOWED
	toolDenied    = authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_TOOL_DENIED
	toolResult    = authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_TOOL_RESULT
	fileChanged   = authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_FILE_CHANGED
	commandRan    = authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_COMMAND_EXECUTED
	networkAsked  = authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_NETWORK_REQUEST
	credentialAsk = authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_CREDENTIAL_REQUEST
	checkpointed  = authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_CHECKPOINT
	budgetEvent   = authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_BUDGET_EVENT
	completed     = authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_EXECUTION_COMPLETED
	failed        = authorexecutorv1.ExecutionEventType_EXECUTION_EVENT_TYPE_EXECUTION_FAILED
)

// Kinds of references.
const (
	refDecision = "decision"
	refInput    = "input"
	refPath     = "path"
	refContent  = "content"
	refExit     = "exit-code"
	refOutput   = "output"
	refHost     = "host"
	refStatus   = "status"
	refIntent   = "intent"
	refSnapshot = "snapshot"
	refPlan     = "plan"
	refReview   = "review"
	refReason   = "reason"
	refAttempt  = "attempt"
	refLine     = "script-line"
)

// Schemas of the documents that a run leaves with the host.
const (
	planSchema   = "numinance.plan/v1"
	reviewSchema = "numinance.review/v1"
)

// run is one Execute or Plan: it walks the steps and emits the stream.
type run struct {
	*adapter
	events   *events
	request  *authorexecutorv1.ChangeExecutionRequest
	reviewer bool
}

// failure ends the run with EXECUTION_FAILED; every other error breaks the
// stream off.
type failure struct {
	reason string // a word for machines
	text   string
}

func (f *failure) Error() string { return f.text }

func failf(reason, format string, args ...any) error {
	return &failure{reason: reason, text: fmt.Sprintf(format, args...)}
}

// finish emits the last event for how the steps went.
func (r *run) finish(err error, refs ...ref) error {
	var f *failure
	switch {
	case err == nil:
		return r.events.emit(completed, "completed", refs...)
	case errors.As(err, &f):
		return r.events.emit(failed, f.text, ref{refReason, f.reason})
	}
	return err
}

func (r *run) execute(ctx context.Context, steps []Step) error {
	if err := r.events.emit(started, "fake "+Version); err != nil {
		return err
	}
	if plan := r.request.GetPlanRef(); plan != "" {
		if err := r.events.emit(planAccepted, "plan", ref{refPlan, plan}); err != nil {
			return err
		}
	}
	return r.finish(r.walk(ctx, steps))
}

// walk does the steps, from where the run before it left off.
func (r *run) walk(ctx context.Context, steps []Step) error {
	first, err := r.resumeAt(len(steps))
	if err != nil {
		return err
	}
	for i := first; i < len(steps); i++ {
		if err := r.step(ctx, i, steps[i]); err != nil {
			return err
		}
	}
	return nil
}

const labelPrefix = "step-"

// resumeAt returns the index of the step after the checkpoint that the run
// starts from.
func (r *run) resumeAt(steps int) (int, error) {
	if r.config.Resume == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(strings.TrimPrefix(r.config.Resume, labelPrefix))
	if err != nil || !strings.HasPrefix(r.config.Resume, labelPrefix) || n < 1 || n > steps {
		return 0, failf("resume", "no checkpoint of this script is called %q", r.config.Resume)
	}
	return n, nil
}

func (r *run) review(ctx context.Context, review Review) error {
	if err := r.events.emit(started, "fake reviewer "+Version); err != nil {
		return err
	}
	if err := r.walk(ctx, review.Steps); err != nil {
		return r.finish(err)
	}
	type finding struct {
		Path     string `json:"path"`
		Line     int    `json:"line"`
		Severity string `json:"severity"`
		Message  string `json:"message"`
	}
	doc := struct {
		Schema   string    `json:"schema"`
		Verdict  string    `json:"verdict"`
		Findings []finding `json:"findings"`
	}{Schema: reviewSchema, Verdict: "request_changes", Findings: []finding{}}
	if review.Approve {
		doc.Verdict = "approve"
	}
	for _, f := range review.Findings {
		doc.Findings = append(doc.Findings, finding(f))
	}
	blob, err := r.put(ctx, doc)
	if err != nil {
		return err
	}
	return r.finish(nil, ref{refReview, blob.GetDigest()})
}

func (r *run) plan(ctx context.Context, script Script) error {
	if err := r.events.emit(started, "fake planner "+Version); err != nil {
		return err
	}
	type unit struct {
		ID           string   `json:"id"`
		Title        string   `json:"title"`
		AllowedPaths []string `json:"allowed_paths,omitempty"`
		DependsOn    []string `json:"depends_on,omitempty"`
	}
	doc := struct {
		Schema    string `json:"schema"`
		WorkUnits []unit `json:"work_units"`
	}{Schema: planSchema}
	for _, u := range script.WorkUnits {
		doc.WorkUnits = append(doc.WorkUnits, unit{u.ID, u.Title, u.AllowedPaths, u.DependsOn})
	}
	if len(doc.WorkUnits) == 0 {
		id := r.request.GetWorkUnitId()
		doc.WorkUnits = append(doc.WorkUnits, unit{ID: id, Title: id})
	}
	blob, err := r.put(ctx, doc)
	if err != nil {
		return err
	}
	return r.finish(nil, ref{refPlan, blob.GetDigest()})
}

func (r *run) put(ctx context.Context, doc any) (*pluginv1.BlobRef, error) {
	b, err := json.Marshal(doc)
	if err != nil {
		return nil, err
	}
	return r.host.PutBytes(ctx, b, "application/json")
}

// step does one step. Steps that are no tool call come first.
func (r *run) step(ctx context.Context, index int, s Step) error {
	switch s.Op {
	case OpCrash:
		if r.config.Attempt > s.Attempts {
			return nil
		}
		return r.crash()
	case OpStall:
		return r.stall(ctx, s)
	case OpExhaust:
		return r.exhaust(ctx)
	case OpPatch:
		for _, f := range s.Files {
			if err := r.tool(ctx, index, s, f); err != nil {
				return err
			}
		}
		return nil
	}
	return r.tool(ctx, index, s, FilePatch{})
}

// stall keeps the call open and says nothing, as a harness that hangs.
func (r *run) stall(ctx context.Context, s Step) error {
	if r.config.Attempt > s.Attempts {
		return nil
	}
	var over <-chan time.Time
	if s.Duration > 0 {
		t := time.NewTimer(s.Duration)
		defer t.Stop()
		over = t.C
	}
	select {
	case <-over:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// maxExhaust bounds how often exhaust asks: a run without any bound would never
// end it.
const maxExhaust = 100_000

// exhaust asks for decisions until the budget of the run refuses one (H-058).
func (r *run) exhaust(ctx context.Context) error {
	limit := min(int(r.request.GetBudget().GetMaxToolCalls())+1, maxExhaust)
	request := &pluginv1.DecideRequest{Tool: OpSay.String(), InputDigest: digestOf([]byte("exhaust"))}
	for range limit {
		d, err := r.host.Decide(ctx, request)
		if status.Code(err) == codes.ResourceExhausted {
			return r.budget("")
		}
		if err != nil {
			return err
		}
		if outOfBudget(d) {
			return r.budget(d.GetDecisionId())
		}
		if d.GetEffect() != pluginv1.DecisionEffect_DECISION_EFFECT_ALLOW {
			return failf("denied", "exhaust: say is denied before the budget is used up: %s", reasons(d))
		}
	}
	return failf("budget", "the budget of %d tool calls was not enforced", limit-1)
}

func (r *run) budget(decision string) error {
	if err := r.events.emit(budgetEvent, "the budget is used up", ref{refDecision, decision}); err != nil {
		return err
	}
	return failf("budget", "the budget is used up")
}

// outOfBudget reports whether a denial names the budget as its layer.
func outOfBudget(d *pluginv1.DecideResponse) bool {
	if d.GetEffect() == pluginv1.DecisionEffect_DECISION_EFFECT_ALLOW {
		return false
	}
	for _, why := range d.GetReasons() {
		if strings.HasPrefix(why, "budget") {
			return true
		}
	}
	return false
}

// tool is one tool call from intent to result (H-019..H-024).
func (r *run) tool(ctx context.Context, index int, s Step, f FilePatch) error {
	request, subject, err := intent(s, f)
	if err != nil {
		return err
	}
	line := ref{refLine, strconv.Itoa(s.Line)}
	if err := r.events.emit(toolIntent, subject, ref{refInput, request.GetInputDigest()}, line); err != nil {
		return err
	}
	d, err := r.host.Decide(ctx, request)
	if err != nil {
		if ctx.Err() != nil || status.Code(err) == codes.Unavailable {
			return err
		}
		return failf("no-decision", "%s: the host took no decision: %v", subject, err)
	}
	decision := ref{refDecision, d.GetDecisionId()}
	if d.GetEffect() != pluginv1.DecisionEffect_DECISION_EFFECT_ALLOW {
		return r.denied(ctx, s, f, d, subject, decision)
	}
	if err := r.events.emit(toolAllowed, subject, decision); err != nil {
		return err
	}
	if s.Expect == ExpectDenied {
		if err := r.events.emit(toolResult, subject+": not done", decision, line); err != nil {
			return err
		}
		return failf("expectation", "script line %d: %s was allowed, the script expects a denial", s.Line, subject)
	}
	done := r.perform(ctx, index, s, f, d.GetDecisionId())
	if done.err != nil {
		return done.err
	}
	for _, e := range done.effects {
		if err := r.events.emit(e.kind, e.subject, append(e.refs, decision)...); err != nil {
			return err
		}
	}
	refs := append([]ref{decision, line}, done.refs...)
	if err := r.events.emit(toolResult, subject+": "+done.text, refs...); err != nil {
		return err
	}
	if done.failed {
		return failf("step", "script line %d: %s: %s", s.Line, subject, done.text)
	}
	return nil
}

func (r *run) denied(ctx context.Context, s Step, f FilePatch, d *pluginv1.DecideResponse, subject string, decision ref) error {
	if err := r.events.emit(toolDenied, subject+": "+reasons(d), decision); err != nil {
		return err
	}
	text, refs := "not done", []ref{decision, {refLine, strconv.Itoa(s.Line)}}
	broken := ""
	if s.Anyway {
		tries := r.attempt(ctx, s, f, d.GetDecisionId())
		text = "done anyway and stopped"
		for _, t := range tries {
			refs = append(refs, ref{refAttempt, t.way + ": " + t.outcome})
			text += "; " + t.way + ": " + t.outcome
			if t.through {
				broken = t.way
			}
		}
		if broken != "" {
			text = strings.Replace(text, "and stopped", "and NOT stopped", 1)
		}
	}
	if err := r.events.emit(toolResult, subject+": "+text, refs...); err != nil {
		return err
	}
	switch {
	case broken != "":
		return failf("wall", "script line %d: %s was denied, and yet %s carried it out", s.Line, subject, broken)
	case outOfBudget(d):
		return r.budget("")
	case s.Expect == ExpectAllowed:
		return failf("denied", "script line %d: %s was denied: %s", s.Line, subject, reasons(d))
	}
	return nil
}

func reasons(d *pluginv1.DecideResponse) string {
	if len(d.GetReasons()) == 0 {
		return "no reason given"
	}
	return strings.Join(d.GetReasons(), "; ")
}

// intent says what the step asks a decision for.
func intent(s Step, f FilePatch) (*pluginv1.DecideRequest, string, error) {
	d := &pluginv1.DecideRequest{Tool: s.Op.String()}
	subject := d.Tool
	whole := struct {
		Tool, Path, Host, Intent string
		Argv                     []string
		Input                    string
	}{Tool: d.Tool}
	switch s.Op {
	case OpWrite:
		d.Path, whole.Input = s.Path, digestOf(s.Content)
	case OpDelete:
		d.Path = s.Path
	case OpPatch:
		d.Path, whole.Input = f.Path, digestOf(f.Diff)
	case OpRun:
		d.Argv = bounded(s.Argv)
		whole.Argv = s.Argv
		subject += " " + path.Base(s.Argv[0])
	case OpFetch:
		host, err := destination(s.URL)
		if err != nil {
			return nil, "", failf("step", "script line %d: fetch: %v", s.Line, err)
		}
		d.Host, whole.Input = host, digestOf([]byte(s.URL))
		subject += " " + host
	case OpCredential:
		d.Intent = s.Intent
		subject += " " + s.Intent
	case OpMerge:
		d.Argv = []string{s.PullRequest}
		subject += " " + s.PullRequest
	case OpSay:
		whole.Input = digestOf(s.Content)
	}
	if d.Path != "" {
		subject += " " + d.Path
	}
	whole.Path, whole.Host, whole.Intent = d.Path, d.Host, d.Intent
	b, err := json.Marshal(whole)
	if err != nil {
		return nil, "", err
	}
	d.InputDigest = digestOf(b)
	return d, subject, nil
}

// bounded cuts arguments to what a decision takes, and changes nothing else of
// them: the host holds the process that is started later against them.
func bounded(argv []string) []string {
	var out []string
	for _, a := range argv[:min(len(argv), 64)] {
		a = strings.ToValidUTF8(a, "\uFFFD")
		if len(a) > 1024 {
			a = strings.ToValidUTF8(a[:1024], "")
		}
		out = append(out, a)
	}
	return out
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// destination returns host and port of an http or https URL.
func destination(raw string) (string, error) {
	u, err := url.Parse(raw)
	if err != nil || u.Hostname() == "" || u.User != nil {
		return "", fmt.Errorf("%q is not a URL with a host and without a password", raw)
	}
	port := u.Port()
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return "", fmt.Errorf("%q is neither http nor https", raw)
	case port == "" && u.Scheme == "http":
		port = "80"
	case port == "":
		port = "443"
	}
	return net.JoinHostPort(u.Hostname(), port), nil
}
