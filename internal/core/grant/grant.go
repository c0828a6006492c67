// Package grant says what one run may do: verbs, resources, scopes, paths,
// capabilities, destinations, credential intents and a budget, for a time. The
// host builds a grant from plan, playbook and policy; every action is checked
// against it, and it can only ever be narrowed.
package grant

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/pathscope"
)

// MaxEntries bounds each list of a grant.
const MaxEntries = 1024

// The reserved scope names, which only a runner's grant carries (P-208, P-210).
const (
	ScopeEvidenceWrite = "evidence.write"
	ScopeEvidenceRead  = "evidence.read"
	ScopeLogAppend     = "transparencylog.append"
)

// Capability names that the runtime itself attaches a meaning to.
const (
	CapabilityRead    = "EXECUTOR_CAPABILITY_FILESYSTEM_READ"
	CapabilityWrite   = "EXECUTOR_CAPABILITY_FILESYSTEM_WRITE"
	CapabilityShell   = "EXECUTOR_CAPABILITY_SHELL"
	CapabilityNetwork = "EXECUTOR_CAPABILITY_NETWORK"
)

// Reserved reports whether scope is one that documents, manifests and policies
// can neither define nor grant (P-210).
func Reserved(scope string) bool {
	return scope == ScopeEvidenceWrite || scope == ScopeEvidenceRead || scope == ScopeLogAppend
}

// Destination is one host and port that a run may reach; Host is a lowercase
// DNS name or an IP literal without brackets.
type Destination struct {
	Host string
	Port int
}

// String returns host:port, with brackets around an IPv6 literal.
func (d Destination) String() string {
	if strings.Contains(d.Host, ":") {
		return "[" + d.Host + "]:" + strconv.Itoa(d.Port)
	}
	return d.Host + ":" + strconv.Itoa(d.Port)
}

// Budget bounds what a run may use up. Zero is none, not unlimited.
type Budget struct {
	Actions     int64         // dispatched actions and tool intents
	OutputBytes int64         // bytes of answers and events
	Tokens      int64         // model tokens, in and out
	Wall        time.Duration // time from the run's start
}

// Grant is the authority of one run. The zero value grants nothing and is not
// valid. WorkUnit is empty for a grant that belongs to a Change as a whole.
//
// Resources are exact names, or prefixes of whole segments when they end in
// "/". Verbs are port verbs such as "scm.GetFile"; tool intents are governed
// by Capabilities, Paths, Egress and Credentials instead (H-044).
type Grant struct {
	ID           identity.GrantID
	Change       identity.ChangeID
	WorkUnit     identity.WorkUnitID
	Run          identity.RunID
	Actor        identity.Actor
	Verbs        []string
	Resources    []string
	Scopes       []string
	Paths        pathscope.Scope
	Capabilities []string
	Egress       []Destination
	Credentials  []string
	Budget       Budget
	NotBefore    time.Time
	Expires      time.Time
}

// New returns g with its lists sorted and without repetitions, or an error if
// any part is malformed or g grants what its actor kind cannot hold.
func New(g Grant) (Grant, error) {
	g = g.normal()
	if err := g.Validate(); err != nil {
		return Grant{}, err
	}
	return g, nil
}

var (
	verbPattern       = regexp.MustCompile(`^[a-z]+\.[A-Z][A-Za-z]{0,63}$`)
	resourcePattern   = regexp.MustCompile(`^[\x21-\x7e]{1,512}$`)
	namePattern       = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$`)
	capabilityPattern = regexp.MustCompile(`^EXECUTOR_CAPABILITY_[A-Z][A-Z_]{0,63}$`)
	hostPattern       = regexp.MustCompile(`^[a-z0-9]([a-z0-9.:-]{0,251}[a-z0-9])?$`)
)

// Validate returns why g is not a grant, or nil. Whoever uses a grant that
// came from elsewhere validates it again: an invalid grant grants nothing.
func (g Grant) Validate() error {
	switch {
	case !identity.ValidID(g.ID):
		return fmt.Errorf("grant id %q is malformed", g.ID)
	case !identity.ValidID(g.Change):
		return fmt.Errorf("grant %s: change id %q is malformed", g.ID, g.Change)
	case g.WorkUnit != "" && !identity.ValidID(g.WorkUnit):
		return fmt.Errorf("grant %s: work unit id %q is malformed", g.ID, g.WorkUnit)
	case !g.Actor.Valid():
		return fmt.Errorf("grant %s: actor needs a kind, a principal and a run", g.ID)
	case g.Run != g.Actor.Run:
		return fmt.Errorf("grant %s: run %q is not the actor's run %q", g.ID, g.Run, g.Actor.Run)
	case g.NotBefore.IsZero() || g.Expires.IsZero() || !g.NotBefore.Before(g.Expires):
		return fmt.Errorf("grant %s: needs a start and a later expiry", g.ID)
	case g.Budget.Actions < 0 || g.Budget.OutputBytes < 0 || g.Budget.Tokens < 0 || g.Budget.Wall < 0:
		return fmt.Errorf("grant %s: a budget is negative", g.ID)
	}
	if err := g.validateLists(); err != nil {
		return fmt.Errorf("grant %s: %w", g.ID, err)
	}
	if err := g.Paths.Validate(); err != nil {
		return fmt.Errorf("grant %s: %w", g.ID, err)
	}
	if err := g.CheckKind(); err != nil {
		return fmt.Errorf("grant %s: %w", g.ID, err)
	}
	return nil
}

func (g Grant) validateLists() error {
	lists := []struct {
		name    string
		values  []string
		pattern *regexp.Regexp
	}{
		{"verb", g.Verbs, verbPattern}, {"resource", g.Resources, resourcePattern}, {"scope", g.Scopes, namePattern},
		{"capability", g.Capabilities, capabilityPattern}, {"credential intent", g.Credentials, namePattern},
	}
	for _, list := range lists {
		if len(list.values) > MaxEntries {
			return fmt.Errorf("%d entries of %s: at most %d", len(list.values), list.name, MaxEntries)
		}
		for _, v := range list.values {
			if !list.pattern.MatchString(v) {
				return fmt.Errorf("%s %q is malformed", list.name, v)
			}
		}
	}
	if len(g.Egress) > MaxEntries {
		return fmt.Errorf("%d destinations: at most %d", len(g.Egress), MaxEntries)
	}
	for _, d := range g.Egress {
		if !hostPattern.MatchString(d.Host) || d.Port < 1 || d.Port > 65535 {
			return fmt.Errorf("destination %q is malformed: want a lowercase host and a port", d)
		}
	}
	return nil
}

// CheckKind returns an error if g holds what its actor's kind can never hold:
// a reserved scope outside a runner's grant (P-208), or, for a reviewer-agent,
// paths, credentials, destinations, or the write, shell or network capability
// (P-127, P-128, P-129).
func (g Grant) CheckKind() error {
	if g.Actor.Kind != identity.KindRunner {
		for _, scope := range g.Scopes {
			if Reserved(scope) {
				return fmt.Errorf("scope %q is reserved for runner grants, not for %s", scope, g.Actor.Kind)
			}
		}
	}
	if g.Actor.Kind != identity.KindReviewerAgent {
		return nil
	}
	switch {
	case len(g.Paths.Allowed) > 0:
		return errors.New("a reviewer-agent grant holds no allowed paths")
	case len(g.Credentials) > 0:
		return errors.New("a reviewer-agent grant holds no credential intents")
	case len(g.Egress) > 0:
		return errors.New("a reviewer-agent grant holds no destinations")
	}
	for _, c := range []string{CapabilityWrite, CapabilityShell, CapabilityNetwork} {
		if slices.Contains(g.Capabilities, c) {
			return fmt.Errorf("a reviewer-agent grant does not hold %s", c)
		}
	}
	return nil
}

// Narrow returns the grant that to asks for, if g covers it: same Change, run
// and actor, nothing g does not hold, no larger budget, no longer time. Asking
// for more is an error that names what (H-048); there is no way to widen.
func (g Grant) Narrow(to Grant) (Grant, error) {
	if err := g.Validate(); err != nil {
		return Grant{}, err
	}
	to = to.normal()
	wider := func(what, value string) (Grant, error) {
		return Grant{}, fmt.Errorf("narrow grant %s: %s %q is not in it", g.ID, what, value)
	}
	switch {
	case to.Change != g.Change:
		return wider("change", string(to.Change))
	case to.Run != g.Run || to.Actor != g.Actor:
		return wider("actor or run", string(to.Run))
	case g.WorkUnit != "" && to.WorkUnit != g.WorkUnit:
		return wider("work unit", string(to.WorkUnit))
	case to.NotBefore.Before(g.NotBefore) || to.Expires.After(g.Expires):
		return wider("time", to.NotBefore.UTC().Format(time.RFC3339)+" to "+to.Expires.UTC().Format(time.RFC3339))
	case to.Budget.Actions > g.Budget.Actions || to.Budget.OutputBytes > g.Budget.OutputBytes ||
		to.Budget.Tokens > g.Budget.Tokens || to.Budget.Wall > g.Budget.Wall:
		return wider("budget", fmt.Sprintf("%+v", to.Budget))
	}
	for _, list := range []struct {
		name string
		want []string
		has  func(string) bool
	}{
		{"verb", to.Verbs, g.HasVerb}, {"resource", to.Resources, g.HasResource}, {"scope", to.Scopes, g.HasScope},
		{"capability", to.Capabilities, g.HasCapability}, {"credential intent", to.Credentials, g.HasCredential},
	} {
		for _, v := range list.want {
			if !list.has(v) {
				return wider(list.name, v)
			}
		}
	}
	for _, d := range to.Egress {
		if !g.HasDestination(d.Host, d.Port) {
			return wider("destination", d.String())
		}
	}
	paths, err := g.Paths.Narrow(to.Paths)
	if err != nil {
		return Grant{}, fmt.Errorf("narrow grant %s: %w", g.ID, err)
	}
	to.Paths = paths
	return New(to)
}

// Equal reports whether two grants are the same in every part as it stands:
// lists in one order and times in one zone. Whatever follows from one then
// follows from the other.
func (g Grant) Equal(o Grant) bool {
	return g.ID == o.ID && g.Change == o.Change && g.WorkUnit == o.WorkUnit && g.Run == o.Run && g.Actor == o.Actor &&
		g.Budget == o.Budget && g.NotBefore == o.NotBefore && g.Expires == o.Expires &&
		slices.Equal(g.Verbs, o.Verbs) && slices.Equal(g.Resources, o.Resources) && slices.Equal(g.Scopes, o.Scopes) &&
		slices.Equal(g.Paths.Allowed, o.Paths.Allowed) && slices.Equal(g.Paths.Denied, o.Paths.Denied) &&
		slices.Equal(g.Paths.Protected, o.Paths.Protected) && slices.Equal(g.Capabilities, o.Capabilities) &&
		slices.Equal(g.Egress, o.Egress) && slices.Equal(g.Credentials, o.Credentials)
}

// Clone returns a grant that shares no list with g.
func (g Grant) Clone() Grant {
	for _, list := range []*[]string{
		&g.Verbs, &g.Resources, &g.Scopes, &g.Paths.Allowed, &g.Paths.Denied, &g.Paths.Protected, &g.Capabilities, &g.Credentials,
	} {
		*list = slices.Clone(*list)
	}
	g.Egress = slices.Clone(g.Egress)
	return g
}

// HasVerb reports whether the grant holds a verb, by its exact name.
func (g Grant) HasVerb(verb string) bool { return slices.Contains(g.Verbs, verb) }

// HasScope reports whether the grant holds a scope.
func (g Grant) HasScope(scope string) bool { return slices.Contains(g.Scopes, scope) }

// HasCapability reports whether the grant holds an executor capability.
func (g Grant) HasCapability(c string) bool { return slices.Contains(g.Capabilities, c) }

// HasCredential reports whether the grant holds a credential intent.
func (g Grant) HasCredential(intent string) bool { return slices.Contains(g.Credentials, intent) }

// HasDestination reports whether the grant holds exactly this host and port.
func (g Grant) HasDestination(host string, port int) bool {
	return slices.Contains(g.Egress, Destination{Host: host, Port: port})
}

// HasResource reports whether a resource name is granted: the same name, or
// one below a granted prefix that ends in "/". Names with "." or ".." segments
// are in no grant (P-029).
func (g Grant) HasResource(name string) bool {
	if name == "" {
		return false
	}
	for segment := range strings.SplitSeq(name, "/") {
		if segment == "." || segment == ".." {
			return false
		}
	}
	for _, r := range g.Resources {
		if name == r || (strings.HasSuffix(r, "/") && strings.HasPrefix(name, r)) {
			return true
		}
	}
	return false
}

// ActiveAt reports whether the grant is in its time at now.
func (g Grant) ActiveAt(now time.Time) bool {
	return !now.IsZero() && !now.Before(g.NotBefore) && now.Before(g.Expires)
}

func (g Grant) normal() Grant {
	g.Verbs = sorted(g.Verbs)
	g.Resources = sorted(g.Resources)
	g.Scopes = sorted(g.Scopes)
	g.Capabilities = sorted(g.Capabilities)
	g.Credentials = sorted(g.Credentials)
	g.Paths = pathscope.Scope{Allowed: sorted(g.Paths.Allowed), Denied: sorted(g.Paths.Denied), Protected: sorted(g.Paths.Protected)}
	g.Egress = slices.Clone(g.Egress)
	slices.SortFunc(g.Egress, func(a, b Destination) int { return strings.Compare(a.String(), b.String()) })
	g.Egress = slices.Compact(g.Egress)
	g.NotBefore = g.NotBefore.UTC().Round(0)
	g.Expires = g.Expires.UTC().Round(0)
	return g
}

func sorted(in []string) []string {
	out := slices.Clone(in)
	slices.Sort(out)
	return slices.Compact(out)
}
