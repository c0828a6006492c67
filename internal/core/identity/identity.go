// Package identity says who acts: the actor kinds of the system, principals,
// and the ids of changes, work units, runs, grants, decisions and actions.
// Every floor that separates duties compares values of this package.
package identity

import (
	"fmt"
	"strings"
)

// ActorKind is the kind of identity an action runs under. The zero value is
// no kind at all and is refused everywhere.
type ActorKind uint8

// The five actor kinds.
const (
	KindUnknown ActorKind = iota
	KindHuman
	KindAuthorAgent
	KindReviewerAgent
	KindRunner
	KindReleasePipeline
)

var kindNames = [...]string{"unknown", "human", "author-agent", "reviewer-agent", "runner", "release-pipeline"}

// String returns the kind's name as it stands in records and policies.
func (k ActorKind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return kindNames[0]
}

// ParseActorKind is the inverse of String; "unknown" and any other text are errors.
func ParseActorKind(s string) (ActorKind, error) {
	for i, name := range kindNames {
		if i > 0 && name == s {
			return ActorKind(i), nil
		}
	}
	return KindUnknown, fmt.Errorf("actor kind %q: want human, author-agent, reviewer-agent, runner or release-pipeline", s)
}

// Principal is a stable name of someone or something that can be held to what
// it did, such as "human:alice" or "agent:fake". Two actors with one principal
// are the same party whatever kind they present.
type Principal string

// Ids of the things an action belongs to. ValidID says what form they have.
type (
	ChangeID   string
	WorkUnitID string
	RunID      string
	GrantID    string
	DecisionID string
	ActionID   string
)

// SystemChange is the pseudo change id of the chain that holds what belongs to
// no Change.
const SystemChange ChangeID = "system"

// ValidID reports whether s can be an id: 1 to 63 of a-z, 0-9 and '-', not
// beginning with '-'.
func ValidID[T ~string](s T) bool {
	if len(s) < 1 || len(s) > 63 || s[0] == '-' {
		return false
	}
	for i := range len(s) {
		if c := s[i]; !lower(c) && !digit(c) && c != '-' {
			return false
		}
	}
	return true
}

// Valid reports whether p is a type of a-z, a colon, and a name of 1 to 127 of
// letters, digits and "._@/-" that begins with a letter or digit, as in
// "human:alice".
func (p Principal) Valid() bool {
	kind, name, ok := strings.Cut(string(p), ":")
	if !ok || kind == "" || len(name) < 1 || len(name) > 127 {
		return false
	}
	for i := range len(kind) {
		if !lower(kind[i]) {
			return false
		}
	}
	for i := range len(name) {
		c := name[i]
		if lower(c) || digit(c) || c >= 'A' && c <= 'Z' {
			continue
		}
		if i == 0 || c != '.' && c != '_' && c != '@' && c != '/' && c != '-' {
			return false
		}
	}
	return true
}

func lower(c byte) bool { return c >= 'a' && c <= 'z' }
func digit(c byte) bool { return c >= '0' && c <= '9' }

// Actor is one party under one identity in one run.
type Actor struct {
	Kind      ActorKind
	Principal Principal
	Run       RunID
	// Vendor is the maker of the model behind an agent, empty for others.
	Vendor string
}

// Valid reports whether a names a kind, a principal and a run.
func (a Actor) Valid() bool {
	return a.Kind > KindUnknown && int(a.Kind) < len(kindNames) && a.Principal.Valid() && ValidID(a.Run)
}
