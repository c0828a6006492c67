package policy

import (
	"fmt"
	"strings"
	"sync"

	"github.com/cedar-policy/cedar-go"
	"github.com/cedar-policy/cedar-go/x/exp/schema"
	"github.com/cedar-policy/cedar-go/x/exp/schema/validate"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy/floors"
	"github.com/numinance/numinance/internal/core/ports"
)

// principalType is the Cedar entity type of an actor kind.
func principalType(k identity.ActorKind) cedar.EntityType {
	switch k {
	case identity.KindHuman:
		return "Human"
	case identity.KindAuthorAgent:
		return "AuthorAgent"
	case identity.KindReviewerAgent:
		return "ReviewerAgent"
	case identity.KindRunner:
		return "Runner"
	case identity.KindReleasePipeline:
		return "ReleasePipeline"
	}
	return "Unknown"
}

func actionUID(name string) cedar.EntityUID {
	return cedar.NewEntityUID("Action", cedar.String(name))
}

const schemaHead = `// The actors. The id of an entity is its principal, such as "agent:fake".
entity Human, AuthorAgent, ReviewerAgent, Runner, ReleasePipeline;
// What every action belongs to. The id is the change id, or "system".
entity Change;

type Actor = { kind: String, principal: String, run: String, vendor: String };
type Approvals = { by: Set<String>, groups: Set<String> };
type Facts = { approved: Bool, authors: Set<String>, head_matches: Bool, id: String, requester: String, state: String, verified: Bool };
type Grant = { capabilities: Set<String>, credentials: Set<String>, egress: Set<String>, id: String, scopes: Set<String>, verbs: Set<String>, work_unit: String };
type Provider = { credentials: Set<String>, egress: Set<String>, extension: String, manifest: String, origin: String };
type Run = { denials: Long, tainted: Bool, verbs_used: Set<String> };
type Time = { hour: Long, unix: Long, weekday: String };
type Tool = { argv: Set<String>, command: String, dirs: Set<String>, host: String, intent: String, path: String, port: Long, program: String };
type Verb = { exec: String, idempotent: Bool, port: String, risk: String };
`

const schemaCommon = "actor: Actor, approvals: Approvals, caller: String, change: Facts, dry_run: Bool, grant: Grant, input: String, " +
	"provider: Provider, resources: Set<String>, run: Run, time: Time"

// Schema returns the Cedar schema that policies are validated against: one
// action for each verb of the ports, in the groups "verbs", "port.<port>" and
// "risk.<RISK>", and one for each tool intent, in the group "tools".
func Schema() string {
	var b strings.Builder
	b.WriteString(schemaHead)
	fmt.Fprintf(&b, "// What a policy can read of a port verb.\ntype VerbContext = { %s, verb: Verb };\n", schemaCommon)
	fmt.Fprintf(&b, "// What a policy can read of a tool intent.\ntype ToolContext = { %s, tool: Tool };\n\n", schemaCommon)
	b.WriteString("action \"verbs\";\naction \"tools\";\n")
	seen := map[string]bool{}
	for _, v := range ports.All() {
		for _, group := range []string{"port." + v.Port, "risk." + v.Risk.String()} {
			if !seen[group] {
				seen[group] = true
				fmt.Fprintf(&b, "action %q;\n", group)
			}
		}
	}
	applies := func(context string) string {
		return "appliesTo { principal: [Human, AuthorAgent, ReviewerAgent, Runner, ReleasePipeline], resource: Change, context: " + context + " }"
	}
	for _, v := range ports.All() {
		fmt.Fprintf(&b, "action %q in [\"verbs\", \"port.%s\", \"risk.%s\"] %s;\n", v.Name(), v.Port, v.Risk, applies("VerbContext"))
	}
	for _, name := range floors.ToolNames() {
		fmt.Fprintf(&b, "action %q in [\"tools\"] %s;\n", "tool."+name, applies("ToolContext"))
	}
	return b.String()
}

// model is the schema in its usable forms.
type model struct {
	validator *validate.Validator
	actions   cedar.EntityMap                       // every action and group with its parents
	parents   map[cedar.EntityUID][]cedar.EntityUID // action -> its groups
	admitted  map[admission]bool
}

// admission is all that the schema can tell apart in a request: its action, the
// types of its entities, and whether its context is that of a verb or of a tool.
// The types inside of a context are those of facts, whatever its values are.
type admission struct {
	action              cedar.EntityUID
	principal, resource cedar.EntityType
	tool                bool
}

// admit returns why a request is not one of the schema, or nil.
func (m *model) admit(r cedar.Request, f *facts) error {
	if m.admitted[admission{r.Action, r.Principal.Type, r.Resource.Type, f.Tool != nil}] {
		return nil
	}
	return m.validator.Request(r)
}

// admissions asks the validator about a request of each kind once.
func (m *model) admissions() error {
	m.admitted = map[admission]bool{}
	for kind := identity.KindHuman; kind <= identity.KindReleasePipeline; kind++ {
		for _, f := range []facts{{Verb: &verbFacts{}}, {Tool: &toolFacts{}}} {
			f.Actor.Kind = kind.String()
			r, err := f.request(f.records())
			if err != nil {
				return fmt.Errorf("ask the policy schema: %w", err)
			}
			for uid := range m.actions {
				r.Action = uid
				if m.validator.Request(r) == nil {
					m.admitted[admission{uid, r.Principal.Type, r.Resource.Type, f.Tool != nil}] = true
				}
			}
		}
	}
	return nil
}

// shared is the one model: the schema follows from the contract alone, so it is
// read once and never changes.
var shared = sync.OnceValues(newModel)

func newModel() (*model, error) {
	var s schema.Schema
	s.SetFilename("schema")
	if err := s.UnmarshalCedar([]byte(Schema())); err != nil {
		return nil, fmt.Errorf("read policy schema: %w", err)
	}
	resolved, err := s.Resolve()
	if err != nil {
		return nil, fmt.Errorf("resolve policy schema: %w", err)
	}
	m := &model{validator: validate.New(resolved), actions: cedar.EntityMap{}, parents: map[cedar.EntityUID][]cedar.EntityUID{}}
	for uid, action := range resolved.Actions {
		m.actions[uid] = action.Entity
		for parent := range action.Entity.Parents.All() {
			m.parents[uid] = append(m.parents[uid], parent)
		}
	}
	return m, m.admissions()
}
