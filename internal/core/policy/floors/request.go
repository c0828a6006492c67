package floors

import (
	"slices"
	"time"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/ports"
)

// Request is everything one decision depends on. Package policy, which the
// rest of the system uses, gives it the name policy.Request. Exactly one of
// Verb and Tool is set.
type Request struct {
	Caller    ports.Caller
	Actor     identity.Actor
	Verb      ports.Verb
	Tool      *Tool
	Resources []string
	Grant     grant.Grant
	Change    ChangeFacts
	Run       RunFacts
	Provider  ProviderFacts
	DryRun    bool
	Now       time.Time
	Input     digest.Digest
	Approvals []Approval
}

// Tool is an intent of a harness inside a sandbox: write, delete, patch, read,
// run, fetch, credential, say or checkpoint. Path is relative to the work
// root, Host is a host with an optional port (443 without), Input names the
// bytes of the intent.
type Tool struct {
	Name   string
	Path   string
	Host   string
	Intent string
	Argv   []string
	Input  digest.Digest
}

// ChangeFacts is what the host knows about the Change an action belongs to.
// Head is the verified head revision; Verified, Approved and HeadMatches are
// the host's own findings about it, never a provider's.
type ChangeFacts struct {
	ID          identity.ChangeID
	State       string
	Authors     []identity.Actor
	Requester   identity.Principal
	Head        string
	Verified    bool // the verdict on Head is passed
	Approved    bool // an approval of Head is recorded and in force
	HeadMatches bool // what would be merged is Head
}

// RunFacts is what the host knows about the run so far, so that rules over
// sequences are possible.
type RunFacts struct {
	Tainted   bool // the run has read untrusted content
	Denials   int64
	VerbsUsed []string
}

// Origins of a provider.
const (
	OriginBundled    = "bundled"    // part of this release
	OriginDeployment = "deployment" // bound by whoever runs the runtime
	OriginRegistry   = "registry"   // installed from a registry
)

// ProviderFacts is what the lockfile and the manifest say of the provider that
// would carry out the action. Egress and Credentials are what its manifest
// names.
type ProviderFacts struct {
	Extension   string
	Origin      string
	Manifest    digest.Digest
	Egress      []string
	Credentials []string
}

// Approval is one verified signature over an action, as the host recorded it.
// Groups are those of the approver by the Organization's document.
type Approval struct {
	ID       string
	Approver identity.Principal
	Groups   []string
	Action   digest.Digest
	Head     string
	Policy   digest.Digest
	Expires  time.Time
}

// Action names what is asked for: a verb ("scm.GetFile") or a tool intent
// ("tool.write"). It is "" if the request has neither or both.
func (r Request) Action() string {
	switch {
	case r.Tool != nil && r.Verb.Full != "":
		return ""
	case r.Tool != nil:
		return "tool." + r.Tool.Canonical()
	case r.Verb.Full != "":
		return r.Verb.Name()
	}
	return ""
}

// ToolNames are the tool intents that can be allowed at all.
func ToolNames() []string {
	return []string{"checkpoint", "credential", "delete", "fetch", "read", "run", "say", "write"}
}

// Canonical returns the tool's name with its aliases resolved: a patch writes.
func (t Tool) Canonical() string {
	if t.Name == "patch" {
		return "write"
	}
	return t.Name
}

// IsAuthor reports whether a principal or run is one of an author run of the
// Change, whatever kind it presents.
func (c ChangeFacts) IsAuthor(p identity.Principal, run identity.RunID) bool {
	return slices.ContainsFunc(c.Authors, func(a identity.Actor) bool {
		return a.Principal == p || (run != "" && a.Run == run)
	})
}
