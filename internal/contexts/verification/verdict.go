package verification

import (
	"fmt"
	"slices"
	"strings"

	verifierv1 "github.com/numinance/numinance/gen/numinance/ports/verifier/v1"
	"github.com/numinance/numinance/internal/core/digest"
)

// Outcome is what a layer says about a candidate. The zero value is
// Inconclusive, which is never passed (P-173).
type Outcome uint8

// The three outcomes.
const (
	Inconclusive Outcome = iota
	Passed
	Failed
)

// String returns the outcome in lower case.
func (o Outcome) String() string {
	switch o {
	case Passed:
		return "passed"
	case Failed:
		return "failed"
	}
	return "inconclusive"
}

// Question is what a report has to be about to settle anything.
type Question struct {
	Layer    string
	Tree     string
	Config   digest.Digest
	Required []string // names of the checks that have to pass
}

// Judge says what a report settles. Only a report about exactly the question,
// without errors, in which every required check ran and passed, passes.
func Judge(q Question, r *verifierv1.VerifierReport) (Outcome, string) {
	switch {
	case r == nil:
		return Inconclusive, "there is no report"
	case r.GetLayer() != q.Layer:
		return Inconclusive, fmt.Sprintf("the report is about layer %q, not %q", r.GetLayer(), q.Layer)
	case r.GetCandidateTree() != q.Tree || q.Tree == "":
		return Inconclusive, fmt.Sprintf("the report is about tree %s, not %s", r.GetCandidateTree(), q.Tree)
	case r.GetConfigDigest() != string(q.Config) || q.Config == "":
		return Inconclusive, "the report stands on another configuration of the checks"
	case len(q.Required) == 0:
		return Inconclusive, "no check is required, so nothing can pass"
	}
	outcomes := map[string]verifierv1.CheckOutcome{}
	for _, c := range r.GetChecks() {
		if _, twice := outcomes[c.GetName()]; twice {
			return Inconclusive, fmt.Sprintf("the report has the check %q twice", c.GetName())
		}
		outcomes[c.GetName()] = c.GetOutcome()
	}
	var bad []string
	for _, name := range q.Required {
		switch o, ran := outcomes[name]; {
		case !ran:
			return Inconclusive, fmt.Sprintf("the required check %q did not run", name)
		case o == verifierv1.CheckOutcome_CHECK_OUTCOME_FINDINGS:
			bad = append(bad, name)
		case o != verifierv1.CheckOutcome_CHECK_OUTCOME_PASSED:
			return Inconclusive, fmt.Sprintf("the required check %q has no outcome", name)
		}
	}
	slices.Sort(bad)
	switch {
	case len(bad) > 0:
		return Failed, "failed: " + strings.Join(bad, ", ")
	case r.GetErrors() > 0:
		return Failed, fmt.Sprintf("%d errors were found", r.GetErrors())
	}
	return Passed, fmt.Sprintf("%d of %d checks passed", len(q.Required), len(q.Required))
}
