package kinds

import (
	"fmt"
	"io/fs"
	"slices"

	kindsv1 "github.com/numinance/numinance/gen/numinance/kinds/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/policy"
)

// Set is the documents of one control directory. It is live as a whole or not
// at all: Load returns none if any document has a problem.
type Set struct {
	documents []Document
	revision  digest.Digest
	engine    *policy.Engine
}

// Load reads a control directory: every document alone, then the references
// between them and the policies as one set. The set is nil unless the report
// is OK. Without a Policy document the shipped policy is in force.
func Load(fsys fs.FS) (*Set, Report) { return load(sources(fsys)) }

func load(files []source) (*Set, Report) {
	documents, report := read(files)
	s := &Set{documents: documents}
	if report.OK() {
		for _, p := range s.references() {
			i := slices.IndexFunc(report.Outcomes, func(o Outcome) bool { return o.File == p.problem.File && o.Kind == p.kind && o.Name == p.name })
			report.Outcomes[i].Problems = append(report.Outcomes[i].Problems, p.problem)
		}
	}
	if report.OK() {
		if err := s.loadPolicies(); err != nil {
			report.Outcomes = append(report.Outcomes, Outcome{File: ".", Problems: []Problem{{File: ".", Line: 1, Column: 1, Rule: "policies-load", Text: err.Error()}}})
		}
	}
	if report.OK() {
		entries := map[string]string{}
		for _, d := range s.documents {
			entries[d.Kind+"/"+d.Name] = string(d.Digest)
		}
		revision, err := digest.OfCanonical(entries)
		if err != nil {
			report.Outcomes = append(report.Outcomes, Outcome{File: ".", Problems: []Problem{{File: ".", Line: 1, Column: 1, Rule: "revision", Text: err.Error()}}})
		}
		s.revision = revision
	}
	report.Revision = string(s.revision)
	if !report.OK() {
		report.Revision = ""
		return nil, report
	}
	return s, report
}

func (s *Set) loadPolicies() (err error) {
	files := s.PolicyFiles()
	s.engine, err = policy.Load(files)
	return err
}

type dangling struct {
	kind, name string
	problem    Problem
}

// references finds names that no document of the set has.
func (s *Set) references() (out []dangling) {
	for _, d := range s.documents {
		m, ok := d.Message.(*kindsv1.Repository)
		if !ok {
			continue
		}
		for _, ref := range []struct{ field, kind, name string }{
			{"spec.profile", "Profile", orDefault(m.GetSpec().GetProfile())}, {"spec.environment", "Environment", orDefault(m.GetSpec().GetEnvironment())},
			{"spec.pipeline", "Pipeline", m.GetSpec().GetPipeline()}, {"spec.tracker", "Tracker", m.GetSpec().GetTracker()},
		} {
			if ref.name != "" && s.find(ref.kind, ref.name) == nil {
				at := d.at.find(ref.field)
				out = append(out, dangling{d.Kind, d.Name, Problem{
					File: d.File, Line: at.line, Column: at.column, Field: ref.field, Rule: "reference",
					Text: fmt.Sprintf("there is no %s %q", ref.kind, ref.name), Fix: "write one or name another",
				}})
			}
		}
	}
	if n := len(s.of("Organization")); n != 1 {
		for _, d := range s.of("Organization") {
			at := d.at.find("metadata.name")
			out = append(out, dangling{d.Kind, d.Name, Problem{File: d.File, Line: at.line, Column: at.column, Field: "metadata.name", Rule: "one-organization", Text: fmt.Sprintf("the set holds %d", n), Fix: "keep one"}})
		}
	}
	return out
}

func orDefault(name string) string {
	if name == "" {
		return "default"
	}
	return name
}

func (s *Set) of(kind string) (out []Document) {
	for _, d := range s.documents {
		if d.Kind == kind {
			out = append(out, d)
		}
	}
	return out
}

func (s *Set) find(kind, name string) *Document {
	for i, d := range s.documents {
		if d.Kind == kind && d.Name == name {
			return &s.documents[i]
		}
	}
	return nil
}

func get[T any](s *Set, kind, name string) (out T, d digest.Digest, ok bool) {
	if found := s.find(kind, name); found != nil {
		out, ok = found.Message.(T)
		return out, found.Digest, ok
	}
	return out, "", false
}

// Revision names the whole set: kinds, names and digests of its documents.
func (s *Set) Revision() digest.Digest { return s.revision }

// Documents returns every document, in the order of the files.
func (s *Set) Documents() []Document { return slices.Clone(s.documents) }

// Policies returns the engine over the Policy documents of the set, or over the
// shipped policy if there is none.
func (s *Set) Policies() *policy.Engine { return s.engine }

// PolicyFiles returns the Cedar text in force by name.
func (s *Set) PolicyFiles() map[string][]byte {
	files := map[string][]byte{}
	for _, d := range s.of("Policy") {
		if m, ok := d.Message.(*kindsv1.Policy); ok {
			files[d.Name+".cedar"] = []byte(m.GetSpec().GetCedar())
		}
	}
	if len(files) == 0 {
		files[policy.DefaultFile] = []byte(policy.Default())
	}
	return files
}

// Organization returns the organisation's document, or an empty one: no people,
// no private hosts.
func (s *Set) Organization() *kindsv1.OrganizationSpec {
	for _, d := range s.of("Organization") {
		if m, ok := d.Message.(*kindsv1.Organization); ok {
			return m.GetSpec()
		}
	}
	return &kindsv1.OrganizationSpec{}
}

// Repositories returns the names of the Repository documents, sorted.
func (s *Set) Repositories() (names []string) {
	for _, d := range s.of("Repository") {
		names = append(names, d.Name)
	}
	slices.Sort(names)
	return names
}

// Bound is everything a Change on one repository rests on, with the digests
// that a run records. Pipeline and Tracker are nil where there is none.
type Bound struct {
	Name              string
	Repository        *kindsv1.RepositorySpec
	Profile           *kindsv1.ProfileSpec
	ProfileDigest     digest.Digest
	Environment       *kindsv1.EnvironmentSpec
	EnvironmentDigest digest.Digest
	Pipeline          *kindsv1.PipelineSpec
	Tracker           *kindsv1.TrackerSpec
	Protected         []string // the organisation's and the repository's, without the built-in ones
}

// Bind returns the documents of one repository.
func (s *Set) Bind(name string) (Bound, error) {
	repository, _, ok := get[*kindsv1.Repository](s, "Repository", name)
	if !ok {
		return Bound{}, fmt.Errorf("control set %s: there is no Repository %q", s.revision, name)
	}
	spec := repository.GetSpec()
	b := Bound{Name: name, Repository: spec, Protected: slices.Concat(s.Organization().GetProtectedPaths(), spec.GetProtectedPaths())}
	profile, d, ok := get[*kindsv1.Profile](s, "Profile", orDefault(spec.GetProfile()))
	if !ok {
		return Bound{}, fmt.Errorf("repository %s: there is no Profile %q", name, orDefault(spec.GetProfile()))
	}
	b.Profile, b.ProfileDigest = profile.GetSpec(), d
	environment, d, ok := get[*kindsv1.Environment](s, "Environment", orDefault(spec.GetEnvironment()))
	if !ok {
		return Bound{}, fmt.Errorf("repository %s: there is no Environment %q", name, orDefault(spec.GetEnvironment()))
	}
	b.Environment, b.EnvironmentDigest = environment.GetSpec(), d
	if p, _, ok := get[*kindsv1.Pipeline](s, "Pipeline", spec.GetPipeline()); ok {
		b.Pipeline = p.GetSpec()
	}
	if t, _, ok := get[*kindsv1.Tracker](s, "Tracker", spec.GetTracker()); ok {
		b.Tracker = t.GetSpec()
	}
	return b, nil
}

// Manifests returns the PluginManifest documents by extension id.
func (s *Set) Manifests() map[string]*kindsv1.PluginManifest {
	out := map[string]*kindsv1.PluginManifest{}
	for _, d := range s.of("PluginManifest") {
		if m, ok := d.Message.(*kindsv1.PluginManifest); ok {
			out[m.GetSpec().GetExtensionId()] = m
		}
	}
	return out
}

// Connections returns the KnowledgeConnection documents by name.
func (s *Set) Connections() map[string]*kindsv1.KnowledgeConnection {
	out := map[string]*kindsv1.KnowledgeConnection{}
	for _, d := range s.of("KnowledgeConnection") {
		if m, ok := d.Message.(*kindsv1.KnowledgeConnection); ok {
			out[d.Name] = m
		}
	}
	return out
}
