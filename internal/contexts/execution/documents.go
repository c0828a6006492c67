package execution

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	authorexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/core/untrusted"
)

// Names of the documents that an adapter leaves with the host.
const (
	PlanSchema   = "numinance.plan/v1"
	ReviewSchema = "numinance.review/v1"
)

// Bounds of those documents.
const (
	maxDocument  = 1 << 20
	maxWorkUnits = 64
	maxFindings  = 1000
	maxReason    = 1024
)

// Plan is a proposal of the harness; the host narrows grants by it and never
// widens one.
type Plan struct {
	Digest    digest.Digest
	WorkUnits []WorkUnit
}

// WorkUnit is one part of a plan. Empty AllowedPaths narrow nothing.
type WorkUnit struct {
	ID           identity.WorkUnitID
	Title        untrusted.Text
	AllowedPaths []string
	DependsOn    []identity.WorkUnitID
}

// Review is the verdict of a reviewer run. It is one party's word about the
// candidate: what it settles is for the gate to say.
type Review struct {
	Digest   digest.Digest
	Approve  bool
	Findings []Finding
}

// Finding is one remark of a reviewer.
type Finding struct {
	Path     untrusted.Text
	Line     int
	Severity string // info, warning or error
	Message  untrusted.Text
}

type planDocument struct {
	Schema    string `json:"schema"`
	WorkUnits []struct {
		ID           string   `json:"id"`
		Title        string   `json:"title"`
		AllowedPaths []string `json:"allowed_paths"`
		DependsOn    []string `json:"depends_on"`
	} `json:"work_units"`
}

type reviewDocument struct {
	Schema   string `json:"schema"`
	Verdict  string `json:"verdict"`
	Findings []struct {
		Path     string `json:"path"`
		Line     int    `json:"line"`
		Severity string `json:"severity"`
		Message  string `json:"message"`
	} `json:"findings"`
}

// readDocument reads the document that the last event refers to, strictly.
func (c *Context) readDocument(last *authorexecutorv1.ExecutionEvent, kind string, into any) (digest.Digest, error) {
	of, err := digest.Parse(Reference(last, kind))
	if err != nil {
		return "", fmt.Errorf("the last event refers to no %s: %w", kind, err)
	}
	b, err := c.Blobs.Bytes(of, maxDocument)
	if err != nil {
		return "", fmt.Errorf("read the %s %s: %w", kind, of, err)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return "", fmt.Errorf("read the %s %s: %w", kind, of, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return "", fmt.Errorf("read the %s %s: something follows the document", kind, of)
	}
	return of, nil
}

func (c *Context) readPlan(last *authorexecutorv1.ExecutionEvent) (*Plan, error) {
	var doc planDocument
	of, err := c.readDocument(last, RefPlan, &doc)
	if err != nil {
		return nil, err
	}
	if doc.Schema != PlanSchema || len(doc.WorkUnits) == 0 || len(doc.WorkUnits) > maxWorkUnits {
		return nil, fmt.Errorf("plan %s: want schema %s and 1 to %d work units", of, PlanSchema, maxWorkUnits)
	}
	plan := &Plan{Digest: of}
	var seen []identity.WorkUnitID
	for _, u := range doc.WorkUnits {
		id := identity.WorkUnitID(u.ID)
		if !identity.ValidID(id) || slices.Contains(seen, id) {
			return nil, fmt.Errorf("plan %s: work unit id %.80q is malformed or there twice", of, u.ID)
		}
		if err := (pathscope.Scope{Allowed: u.AllowedPaths}).Validate(); err != nil {
			return nil, fmt.Errorf("plan %s: work unit %s: %w", of, id, err)
		}
		unit := WorkUnit{ID: id, Title: untrusted.New("plan", []byte(u.Title), 256), AllowedPaths: u.AllowedPaths}
		for _, d := range u.DependsOn {
			// Only on units before it, so that no order has a circle.
			if !slices.Contains(seen, identity.WorkUnitID(d)) {
				return nil, fmt.Errorf("plan %s: work unit %s depends on %.80q, which does not stand before it", of, id, d)
			}
			unit.DependsOn = append(unit.DependsOn, identity.WorkUnitID(d))
		}
		seen = append(seen, id)
		plan.WorkUnits = append(plan.WorkUnits, unit)
	}
	return plan, nil
}

func (c *Context) readReview(last *authorexecutorv1.ExecutionEvent) (*Review, error) {
	var doc reviewDocument
	of, err := c.readDocument(last, RefReview, &doc)
	if err != nil {
		return nil, err
	}
	if doc.Schema != ReviewSchema || len(doc.Findings) > maxFindings {
		return nil, fmt.Errorf("review %s: want schema %s and at most %d findings", of, ReviewSchema, maxFindings)
	}
	review := &Review{Digest: of}
	switch doc.Verdict {
	case "approve":
		review.Approve = true
	case "request_changes":
	default:
		return nil, fmt.Errorf("review %s: verdict %.40q is neither approve nor request_changes", of, doc.Verdict)
	}
	for _, f := range doc.Findings {
		if f.Severity != "info" && f.Severity != "warning" && f.Severity != "error" {
			return nil, fmt.Errorf("review %s: severity %.40q is none of info, warning and error", of, f.Severity)
		}
		review.Findings = append(review.Findings, Finding{
			Path: untrusted.New("review", []byte(f.Path), 4096), Line: f.Line, Severity: f.Severity,
			Message: untrusted.New("review", []byte(f.Message), maxReason),
		})
	}
	return review, nil
}

// noSubject stands where nobody gave a subject.
var noSubject = untrusted.New("authorexecutor event", nil, 0)

// reasonOf is what a terminal event says, as one line.
func reasonOf(e *authorexecutorv1.ExecutionEvent) string {
	if e == nil {
		return "no reason given"
	}
	return untrusted.New("authorexecutor event", []byte(e.GetSubject()), maxReason).Line(maxReason)
}
