package execution

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	authorexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/pathscope"
)

// mode is what a run is for.
type mode uint8

const (
	authoring mode = iota + 1
	reviewing
	planning
)

// writing capabilities, which neither a review nor a plan has.
var writing = []string{grant.CapabilityWrite, grant.CapabilityShell, grant.CapabilityNetwork}

// check refuses a run whose grant does not fit what it is for, before anything
// is made for it. The floors check the same again at each call.
func (r Run) check(m mode) error {
	g := r.Authority.Grant
	if err := g.Validate(); err != nil {
		return err
	}
	kind := r.Authority.Actor.Kind
	switch {
	case g.Actor != r.Authority.Actor:
		return errors.New("the grant was given to another actor")
	case g.WorkUnit == "" || g.WorkUnit != r.Authority.WorkUnit:
		return errors.New("the grant is not for this work unit")
	case kind != identity.KindAuthorAgent && kind != identity.KindReviewerAgent:
		return fmt.Errorf("a harness runs for an author-agent or a reviewer-agent, not for a %s (P-126)", kind)
	case m == reviewing && kind != identity.KindReviewerAgent:
		return fmt.Errorf("a review is a run of a reviewer-agent, not of an %s", kind)
	case m == authoring && kind != identity.KindAuthorAgent:
		return fmt.Errorf("an author run is a run of an author-agent, not of a %s", kind)
	case r.Executor == "" || r.Revision == "":
		return errors.New("a run needs an executor and a revision")
	case r.Deadline.IsZero():
		return errors.New("a run needs a deadline")
	case r.Refs.Task == "":
		return errors.New("a run needs a task")
	}
	if m == authoring {
		return nil
	}
	if len(g.Paths.Allowed) > 0 {
		return errors.New("a read-only run has allowed paths (P-127)")
	}
	if len(g.Credentials) > 0 {
		return errors.New("a read-only run has credential capabilities (P-128)")
	}
	for _, c := range writing {
		if slices.Contains(g.Capabilities, c) {
			return fmt.Errorf("a read-only run has %s (P-129)", c)
		}
	}
	return nil
}

// request says to the adapter what the grant says, and nothing else.
func (r Run) request() (*authorexecutorv1.ChangeExecutionRequest, error) {
	g := r.Authority.Grant
	model := r.Model
	if model == "" {
		model = "none"
	}
	out := &authorexecutorv1.ChangeExecutionRequest{
		ChangeId:               string(g.Change),
		WorkUnitId:             string(g.WorkUnit),
		RunId:                  string(g.Run),
		GrantId:                string(g.ID),
		RepositoryDigest:       string(r.Digests.Repository),
		EnvironmentDigest:      string(r.Digests.Environment),
		PolicyDigest:           string(r.Digests.Policy),
		ProfileDigest:          string(r.Digests.Profile),
		TaskRef:                string(r.Refs.Task),
		PlanRef:                string(r.Refs.Plan),
		ContextBundleRef:       string(r.Refs.ContextBundle),
		TestRequirementsRef:    string(r.Refs.TestRequirements),
		AllowedPaths:           g.Paths.Allowed,
		DeniedPaths:            g.Paths.Denied,
		ProtectedResources:     protected(g.Paths),
		CredentialCapabilities: g.Credentials,
		Budget: &authorexecutorv1.ExecutionBudget{
			MaxToolCalls:   uint32(min(g.Budget.Actions, 1<<31)),
			MaxTokens:      g.Budget.Tokens,
			MaxOutputBytes: g.Budget.OutputBytes,
			MaxWallTime:    durationpb.New(g.Budget.Wall),
		},
		Deadline:   timestamppb.New(r.Deadline),
		ExecutorId: r.Executor,
		ModelId:    model,
	}
	for _, name := range g.Capabilities {
		v, ok := authorexecutorv1.ExecutorCapability_value[name]
		if !ok || v == 0 {
			return nil, fmt.Errorf("the grant has the unknown capability %q", name)
		}
		out.AllowedCapabilities = append(out.AllowedCapabilities, authorexecutorv1.ExecutorCapability(v))
	}
	return out, nil
}

func protected(s pathscope.Scope) []string {
	return append(pathscope.Default(), s.Protected...)
}

// readable lists what the adapter may resolve.
func (r Run) readable() []digest.Digest {
	all := append([]digest.Digest{r.Refs.Task, r.Refs.Plan, r.Refs.ContextBundle, r.Refs.TestRequirements}, r.Refs.Blobs...)
	return slices.DeleteFunc(all, func(d digest.Digest) bool { return d == "" })
}

// config adds to the provider's configuration which attempt this is and where
// the last one left off, so that a harness can go on.
func (r Run) config() (json.RawMessage, error) {
	object := map[string]json.RawMessage{}
	if len(strings.TrimSpace(string(r.Config))) > 0 {
		if err := json.Unmarshal(r.Config, &object); err != nil {
			return nil, fmt.Errorf("configuration of %s is not a JSON object: %w", r.Executor, err)
		}
	}
	put := func(key string, v any) error {
		b, err := json.Marshal(v)
		object[key] = b
		return err
	}
	err := put("attempt", max(r.Attempt, 1))
	if err == nil && r.Restore != nil {
		err = put("resume", r.Restore.Label)
	}
	if err != nil {
		return nil, err
	}
	return json.Marshal(object)
}
