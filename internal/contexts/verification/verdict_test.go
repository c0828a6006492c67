package verification_test

import (
	"strings"
	"testing"

	verifierv1 "github.com/numinance/numinance/gen/numinance/ports/verifier/v1"
	"github.com/numinance/numinance/internal/contexts/verification"
	"github.com/numinance/numinance/internal/core/digest"
)

// P-173, P-176: only a whole, clean report about exactly the question passes.
func TestJudge(t *testing.T) {
	config := digest.Of([]byte("config"))
	tree := strings.Repeat("a", 40)
	const passed, found = verifierv1.CheckOutcome_CHECK_OUTCOME_PASSED, verifierv1.CheckOutcome_CHECK_OUTCOME_FINDINGS
	for name, c := range map[string]struct {
		change func(*verifierv1.VerifierReport)
		want   verification.Outcome
	}{
		"clean":              {func(*verifierv1.VerifierReport) {}, verification.Passed},
		"warnings":           {func(r *verifierv1.VerifierReport) { r.Warnings = 3 }, verification.Passed},
		"an error":           {func(r *verifierv1.VerifierReport) { r.Errors = 1 }, verification.Failed},
		"a check found":      {func(r *verifierv1.VerifierReport) { r.Checks[1].Outcome = found }, verification.Failed},
		"a check is missing": {func(r *verifierv1.VerifierReport) { r.Checks = r.Checks[:1] }, verification.Inconclusive},
		"no outcome":         {func(r *verifierv1.VerifierReport) { r.Checks[0].Outcome = 0 }, verification.Inconclusive},
		"unknown outcome":    {func(r *verifierv1.VerifierReport) { r.Checks[0].Outcome = 9 }, verification.Inconclusive},
		"one check twice":    {func(r *verifierv1.VerifierReport) { r.Checks[1].Name = "test" }, verification.Inconclusive},
		"another tree":       {func(r *verifierv1.VerifierReport) { r.CandidateTree = strings.Repeat("b", 40) }, verification.Inconclusive},
		"another config":     {func(r *verifierv1.VerifierReport) { r.ConfigDigest = string(digest.Of(nil)) }, verification.Inconclusive},
		"another layer":      {func(r *verifierv1.VerifierReport) { r.Layer = "other" }, verification.Inconclusive},
		"an additional check": {func(r *verifierv1.VerifierReport) {
			r.Checks = append(r.Checks, &verifierv1.CheckReport{Name: "x", Outcome: passed})
		}, verification.Passed},
	} {
		t.Run(name, func(t *testing.T) {
			r := &verifierv1.VerifierReport{Layer: "checks", CandidateTree: tree, ConfigDigest: string(config), Checks: []*verifierv1.CheckReport{
				{Name: "test", Outcome: passed}, {Name: "lint", Outcome: passed},
			}}
			c.change(r)
			q := verification.Question{Layer: "checks", Tree: tree, Config: config, Required: []string{"test", "lint"}}
			if got, why := verification.Judge(q, r); got != c.want || why == "" {
				t.Errorf("%v (%s), want %v", got, why, c.want)
			}
		})
	}
	for name, q := range map[string]verification.Question{
		"nothing required": {Layer: "checks", Tree: tree, Config: config},
		"empty question":   {},
	} {
		if got, _ := verification.Judge(q, &verifierv1.VerifierReport{Layer: q.Layer, CandidateTree: q.Tree, ConfigDigest: string(q.Config)}); got != verification.Inconclusive {
			t.Errorf("%s: %v", name, got)
		}
	}
	if got, _ := verification.Judge(verification.Question{}, nil); got != verification.Inconclusive {
		t.Errorf("no report: %v", got)
	}
}
