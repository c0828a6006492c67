package execution_test

import (
	"errors"
	"strings"
	"testing"

	authorexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
	"github.com/numinance/numinance/internal/contexts/execution"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/host/blob"
)

func event(name string, refs ...string) *authorexecutorv1.ExecutionEvent {
	e := &authorexecutorv1.ExecutionEvent{
		Type:     authorexecutorv1.ExecutionEventType(authorexecutorv1.ExecutionEventType_value["EXECUTION_EVENT_TYPE_"+name]),
		Sequence: 2,
	}
	for i := 0; i+1 < len(refs); i += 2 {
		e.References = append(e.References, &authorexecutorv1.EventReference{Kind: refs[i], Value: refs[i+1]})
	}
	return e
}

// P-136: what a provider claims is held against what the host did.
func TestClaimsAgainstReceipts(t *testing.T) {
	snapshot := digest.Of([]byte("snapshot"))
	for name, c := range map[string]struct {
		events []*authorexecutorv1.ExecutionEvent
		bad    bool // the last one
	}{
		"allowed echoes":            {[]*authorexecutorv1.ExecutionEvent{event("TOOL_ALLOWED", "decision", "dec-yes")}, false},
		"denied echoes":             {[]*authorexecutorv1.ExecutionEvent{event("TOOL_DENIED", "decision", "dec-no")}, false},
		"allowed without decision":  {[]*authorexecutorv1.ExecutionEvent{event("TOOL_ALLOWED")}, true},
		"allowed by an unknown one": {[]*authorexecutorv1.ExecutionEvent{event("TOOL_ALLOWED", "decision", "dec-other")}, true},
		"allowed against a denial":  {[]*authorexecutorv1.ExecutionEvent{event("TOOL_ALLOWED", "decision", "dec-no")}, true},
		"denied against allowance":  {[]*authorexecutorv1.ExecutionEvent{event("TOOL_DENIED", "decision", "dec-yes")}, true},
		"two decisions in one":      {[]*authorexecutorv1.ExecutionEvent{event("TOOL_ALLOWED", "decision", "dec-yes", "decision", "dec-no")}, true},
		"one decision twice":        {[]*authorexecutorv1.ExecutionEvent{event("TOOL_ALLOWED", "decision", "dec-yes"), event("TOOL_ALLOWED", "decision", "dec-yes")}, true},
		"file of the decision":      {[]*authorexecutorv1.ExecutionEvent{event("TOOL_ALLOWED", "decision", "dec-yes"), event("FILE_CHANGED", "path", "a")}, false},
		"another file":              {[]*authorexecutorv1.ExecutionEvent{event("TOOL_ALLOWED", "decision", "dec-yes"), event("FILE_CHANGED", "path", "b")}, true},
		"file before allowance":     {[]*authorexecutorv1.ExecutionEvent{event("FILE_CHANGED", "path", "a")}, true},
		"command without decision":  {[]*authorexecutorv1.ExecutionEvent{event("TOOL_ALLOWED", "decision", "dec-yes"), event("COMMAND_EXECUTED")}, true},
		"command":                   {[]*authorexecutorv1.ExecutionEvent{event("TOOL_ALLOWED", "decision", "dec-run"), event("COMMAND_EXECUTED", "decision", "dec-run")}, false},
		"command twice":             {[]*authorexecutorv1.ExecutionEvent{event("TOOL_ALLOWED", "decision", "dec-run"), event("COMMAND_EXECUTED"), event("COMMAND_EXECUTED")}, true},
		"network without fetch":     {[]*authorexecutorv1.ExecutionEvent{event("TOOL_ALLOWED", "decision", "dec-yes"), event("NETWORK_REQUEST")}, true},
		"credential":                {[]*authorexecutorv1.ExecutionEvent{event("CREDENTIAL_REQUEST")}, true},
		"checkpoint":                {[]*authorexecutorv1.ExecutionEvent{event("CHECKPOINT", "snapshot", string(snapshot))}, false},
		"checkpoint of no snapshot": {[]*authorexecutorv1.ExecutionEvent{event("CHECKPOINT", "snapshot", string(digest.Of(nil)))}, true},
		"intent is a claim":         {[]*authorexecutorv1.ExecutionEvent{event("TOOL_INTENT"), event("TOOL_RESULT"), event("TEST_RESULT"), event("BUDGET_EVENT")}, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := &execution.Receipts{}
			r.Decided(policy.Tool{Name: "write", Path: "a"}, policy.Decision{ID: "dec-yes", Effect: policy.Allow})
			r.Decided(policy.Tool{Name: "run"}, policy.Decision{ID: "dec-run", Effect: policy.Allow})
			r.Decided(policy.Tool{Name: "write", Path: "c"}, policy.Decision{ID: "dec-no"})
			r.Kept(execution.Checkpoint{Work: blob.Ref{Digest: snapshot}})
			var err error
			for i, e := range c.events {
				if _, err = r.Settle(e); err != nil && i+1 < len(c.events) {
					t.Fatal(err)
				}
			}
			if errors.Is(err, execution.ErrClaim) != c.bad || (err != nil) != c.bad {
				t.Errorf("got %v, want an error: %v", err, c.bad)
			}
		})
	}
}

func TestSpawnNeedsAnAllowedDecision(t *testing.T) {
	r := &execution.Receipts{}
	r.Decided(policy.Tool{Name: "run"}, policy.Decision{ID: "dec-yes", Effect: policy.Allow})
	r.Decided(policy.Tool{Name: "run"}, policy.Decision{ID: "dec-no"})
	r.Decided(policy.Tool{Name: "run"}, policy.Decision{ID: "dec-wait", Effect: policy.Escalate})
	r.Decided(policy.Tool{Name: "say"}, policy.Decision{ID: "dec-say", Effect: policy.Allow})
	if err := r.MaySpawn("dec-yes", nil); err != nil {
		t.Error(err)
	}
	for _, id := range []identity.DecisionID{"", "dec-other", "dec-no", "dec-wait", "dec-say"} {
		if err := r.MaySpawn(id, nil); err == nil {
			t.Errorf("a process under decision %q", id)
		}
	}
}

// A decision is good for one process, and one to run a command for that command.
func TestSpawnUsesItsDecisionUp(t *testing.T) {
	long := strings.Repeat("x", 3000)
	r := &execution.Receipts{}
	for id, tool := range map[identity.DecisionID]policy.Tool{
		"dec-write": {Name: "write", Path: "a"}, "dec-test": {Name: "run", Argv: []string{"go", "test"}},
		"dec-other": {Name: "run", Argv: []string{"go", "test"}}, "dec-long": {Name: "run", Argv: []string{"sh", long[:1024]}},
	} {
		r.Decided(tool, policy.Decision{ID: id, Effect: policy.Allow})
	}
	for _, c := range []struct {
		id   identity.DecisionID
		argv []string
		ok   bool
	}{
		{"dec-other", []string{"curl", "https://x.example"}, false},
		{"dec-other", []string{"go", "test", "./..."}, false},
		{"dec-other", []string{"go"}, false},
		{"dec-test", []string{"go", "test"}, true},
		{"dec-test", []string{"go", "test"}, false},
		{"dec-long", []string{"sh", long}, true},
		{"dec-write", []string{"/bin/sh", "-c", "cat > a"}, true},
		{"dec-write", []string{"/bin/sh", "-c", "cat > a"}, false},
	} {
		if err := r.MaySpawn(c.id, c.argv); (err == nil) != c.ok {
			t.Errorf("%s for %.40q: %v, want it allowed: %v", c.id, c.argv, err, c.ok)
		}
	}
	if got := r.Stats().Spawns; got != 3 {
		t.Errorf("%d processes counted, want 3", got)
	}
	r.Decided(policy.Tool{Name: "checkpoint"}, policy.Decision{ID: "dec-keep", Effect: policy.Allow})
	if !r.MayCheckpoint() || r.MayCheckpoint() {
		t.Error("one decision is good for one checkpoint")
	}
}

// P-132..P-135.
func TestStreamRules(t *testing.T) {
	seq := func(names ...string) (out []*authorexecutorv1.ExecutionEvent) {
		for i, n := range names {
			e := event(n)
			e.Sequence = uint32(i + 1)
			out = append(out, e)
		}
		return out
	}
	long := seq(append(append([]string{"EXECUTION_STARTED"}, strings.Split(strings.Repeat("TOOL_INTENT ", 1022), " ")[:1022]...), "EXECUTION_COMPLETED")...)
	gap := seq("EXECUTION_STARTED", "EXECUTION_COMPLETED")
	gap[1].Sequence = 3
	for name, c := range map[string]struct {
		events []*authorexecutorv1.ExecutionEvent
		size   int
		want   string
	}{
		"good":          {seq("EXECUTION_STARTED", "TOOL_INTENT", "EXECUTION_FAILED"), 10, ""},
		"empty":         {nil, 10, "P-132"},
		"too many":      {long, 10, "P-132"},
		"wrong first":   {seq("TOOL_INTENT"), 10, "P-133"},
		"started twice": {seq("EXECUTION_STARTED", "EXECUTION_STARTED"), 10, "P-133"},
		"gap":           {gap, 10, "P-133"},
		"no end":        {seq("EXECUTION_STARTED", "TOOL_INTENT"), 10, "P-134"},
		"after the end": {seq("EXECUTION_STARTED", "EXECUTION_COMPLETED", "TOOL_INTENT"), 10, "P-134"},
		"two ends":      {seq("EXECUTION_STARTED", "EXECUTION_COMPLETED", "EXECUTION_FAILED"), 10, "P-134"},
		"too long":      {seq("EXECUTION_STARTED", "EXECUTION_COMPLETED"), 32<<10 + 1, "P-135"},
		"unknown type":  {seq("EXECUTION_STARTED", "NO_SUCH_TYPE"), 10, "unknown type"},
		"missing event": {[]*authorexecutorv1.ExecutionEvent{nil}, 10, "missing"},
		"exactly the most": {append(long[:1022:1022], func() *authorexecutorv1.ExecutionEvent {
			e := event("EXECUTION_COMPLETED")
			e.Sequence = 1023
			return e
		}()), 10, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var s execution.Stream
			var err error
			for _, e := range c.events {
				if err = s.Next(e, c.size); err != nil {
					break
				}
			}
			if err == nil {
				err = s.End()
			}
			if (c.want == "") != (err == nil) || (err != nil && (!errors.Is(err, execution.ErrStream) || !strings.Contains(err.Error(), c.want))) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}
