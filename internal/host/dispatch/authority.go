package dispatch

import (
	"encoding/binary"
	"strconv"
	"time"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/ports"
)

// Authority is on whose behalf the calls of one step run. It travels as a value
// and a Conn is bound to it, so that no caller can forget it.
type Authority struct {
	Caller   ports.Caller
	Actor    identity.Actor
	Grant    grant.Grant
	Change   policy.ChangeFacts
	WorkUnit identity.WorkUnitID
	// Step names the step of the Change's life, such as "release/merge". It is
	// the same when the step runs again after a crash.
	Step string
	// Revision counts the Change's revisions from 0.
	Revision  int
	Approvals []policy.Approval
}

// key derives the idempotency key of the call with this ordinal in the step. It
// is never random: the same step, run again after a crash, makes the same keys,
// and a new run makes new ones.
func (a Authority) key(ordinal int64) string {
	return "key-" + name("key", string(a.Change.ID), a.Step, strconv.Itoa(a.Revision), string(a.Actor.Run), a.Caller.String(),
		strconv.FormatInt(ordinal, 10)).Hex()[:40]
}

// name returns a digest that stands for the parts and their order: each is
// hashed after its length.
func name(parts ...string) digest.Digest {
	var b []byte
	for _, p := range parts {
		b = append(binary.AppendUvarint(b, uint64(len(p))), p...)
	}
	return digest.Of(b)
}

// actionID follows from the key, so that an action keeps its id after a crash.
func actionID(key string) identity.ActionID {
	return identity.ActionID("act-" + name("action", key).Hex()[:20])
}

// EvidenceGrant is the fixed grant under which the evidence context keeps and
// anchors records of a Change (P-208). It holds the verbs of the two evidence
// ports and their scopes and nothing else; they run without a budget, because a
// record must always be writable. It is in force for a day from now.
func EvidenceGrant(runner identity.Actor, change identity.ChangeID, now time.Time) (grant.Grant, error) {
	g := grant.Grant{
		ID: "grt-evidence", Change: change, Run: runner.Run, Actor: runner,
		Scopes:    []string{grant.ScopeEvidenceWrite, grant.ScopeEvidenceRead, grant.ScopeLogAppend},
		NotBefore: now, Expires: now.Add(24 * time.Hour),
	}
	for _, port := range []string{portEvidenceStore, portTransparencyLog} {
		for _, v := range ports.Of(port) {
			g.Verbs = append(g.Verbs, v.Name())
		}
	}
	return grant.New(g)
}

const (
	portEvidenceStore   = "evidencestore"
	portTransparencyLog = "transparencylog"
	portAuthorExecutor  = "authorexecutor"
)

// isEvidence reports whether v is one of the verbs by which the evidence
// context drains the journal. They are decided like all others, but by fixed
// floors and a fixed grant, and they are not journaled: that would never end.
func isEvidence(v ports.Verb) bool {
	return v.Port == portEvidenceStore || v.Port == portTransparencyLog
}
