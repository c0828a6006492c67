package kinds

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	kindsv1 "github.com/numinance/numinance/gen/numinance/kinds/v1"
	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/ports"
)

// rules collects what a document breaks beyond types and bounds.
type rules struct {
	d        Document
	problems []Problem
}

func (r *rules) broken(field, rule, fix, format string, args ...any) {
	at := r.d.at.find(field)
	r.problems = append(r.problems, Problem{
		File: r.d.File, Line: at.line, Column: at.column, Field: field, Rule: rule, Text: fmt.Sprintf(format, args...), Fix: fix,
	})
}

// required reports whether the document sets field, and complains if not.
func (r *rules) required(field, rule, fix string) bool {
	if r.d.at.has(field) {
		return true
	}
	r.broken(field, rule, fix, "is required")
	return false
}

// checkKind applies the rules of the document's kind that it can break alone.
func checkKind(d Document) []Problem {
	r := &rules{d: d}
	switch m := d.Message.(type) {
	case *kindsv1.KnowledgeConnection:
		r.knowledgeConnection(m)
	case *kindsv1.Organization:
		r.organization(m.GetSpec())
	case *kindsv1.Repository:
		r.provider("scm", m.GetSpec().GetProvider())
		r.paths("spec.protected_paths", pathscope.Scope{Protected: m.GetSpec().GetProtectedPaths()})
	case *kindsv1.Tracker:
		r.provider("ticketing", m.GetSpec().GetProvider())
	case *kindsv1.Pipeline:
		r.provider("ciexecutor", m.GetSpec().GetProvider())
		named(r, "spec.steps", m.GetSpec().GetSteps())
	case *kindsv1.Profile:
		r.profile(m.GetSpec())
	case *kindsv1.Environment:
		named(r, "spec.prepare", m.GetSpec().GetPrepare())
		r.paths("spec.scratch", pathscope.Scope{Denied: m.GetSpec().GetScratch()})
		r.paths("spec.lockfiles", pathscope.Scope{Allowed: m.GetSpec().GetLockfiles()})
	case *kindsv1.Policy:
		if _, err := policy.Load(map[string][]byte{d.Name + ".cedar": []byte(m.GetSpec().GetCedar())}); err != nil {
			r.broken("spec.cedar", "policy-loads", "lines are counted from the start of the text", "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
		}
	case *kindsv1.PluginManifest:
		r.pluginManifest(m)
	}
	return r.problems
}

var extensionPattern = regexp.MustCompile(`^[a-z0-9.-]+/[a-z0-9._-]+$`)

// embedded is the publisher of the bundled providers, whose names begin with
// their port.
const embedded = "dev.numinance.embedded/"

// provider checks that spec.provider can be the extension id of a provider of
// port; whether it is in the lockfile is for the full load.
func (r *rules) provider(port, id string) {
	const field = "spec.provider"
	if !r.required(field, "provider-required", fmt.Sprintf("name the extension id of a %s provider, as in %s%s-…", port, embedded, port)) {
		return
	}
	if !extensionPattern.MatchString(id) {
		r.broken(field, "provider-extension-id", "write publisher/name, as in dev.example/"+port, "%q is no extension id", id)
		return
	}
	if rest, ok := strings.CutPrefix(id, embedded); ok {
		for _, other := range ports.Names() {
			if other != port && (rest == other || strings.HasPrefix(rest, other+"-")) {
				r.broken(field, "provider-port", "name a provider of the port "+port, "%s is a provider of the port %s", id, other)
			}
		}
	}
}

func (r *rules) paths(field string, s pathscope.Scope) {
	if err := s.Validate(); err != nil {
		r.broken(field, "path-form", "list files (a/b.go) and directories (src/)", "%s", err)
	}
}

// named wants every step under a name of its own.
func named[S interface{ GetName() string }](r *rules, field string, steps []S) {
	seen := map[string]bool{}
	for i, s := range steps {
		if seen[s.GetName()] {
			r.broken(fmt.Sprintf("%s[%d].name", field, i), "unique-name", "give it another name", "%q is listed twice", s.GetName())
		}
		seen[s.GetName()] = true
	}
}

func (r *rules) profile(s *kindsv1.ProfileSpec) {
	r.paths("spec.allowed_paths", pathscope.Scope{Allowed: s.GetAllowedPaths()})
	r.paths("spec.denied_paths", pathscope.Scope{Denied: s.GetDeniedPaths()})
	seen := map[string]bool{}
	for i, c := range s.GetChecks() {
		at := fmt.Sprintf("spec.checks[%d]", i)
		if seen[c.GetName()] {
			r.broken(at+".name", "unique-name", "give it another name", "%q is listed twice", c.GetName())
		}
		seen[c.GetName()] = true
		report := c.GetReport()
		needs := c.GetFormat() == kindsv1.CheckFormat_CHECK_FORMAT_JUNIT || c.GetFormat() == kindsv1.CheckFormat_CHECK_FORMAT_SARIF
		switch {
		case needs && report == "":
			r.broken(at+".report", "report-required", "name the file that the check writes", "%s reads a file", c.GetFormat())
		case report != "" && pathscope.CheckPath(report) != nil:
			r.broken(at+".report", "path-form", "write it relative to the work root", "%s", pathscope.CheckPath(report))
		}
	}
}

var sshKeyPattern = regexp.MustCompile(`^(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(256|384|521)|sk-ssh-ed25519@openssh\.com|sk-ecdsa-sha2-nistp256@openssh\.com) [A-Za-z0-9+/]{40,}={0,2}( [^\x00-\x1f]*)?$`)

// never lists what no document can open: this host, link-local addresses and
// with them the metadata services.
func never() []netip.Prefix {
	var out []netip.Prefix
	for _, s := range []string{"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "255.255.255.255/32", "100.100.100.200/32", "192.0.0.192/32", "::/128", "::1/128", "fe80::/10", "ff00::/8", "fd00:ec2::254/128", "::ffff:0.0.0.0/96"} {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func (r *rules) organization(s *kindsv1.OrganizationSpec) {
	seen := map[string]string{}
	for i, p := range s.GetPeople() {
		at := fmt.Sprintf("spec.people[%d]", i)
		for _, name := range append([]string{p.GetPrincipal()}, p.GetAliases()...) {
			if other, twice := seen[name]; twice {
				r.broken(at, "one-person", "list a person once, with all aliases", "%q is also a name of %s", name, other)
			}
			seen[name] = p.GetPrincipal()
		}
		for k, key := range p.GetSshKeys() {
			field := fmt.Sprintf("%s.ssh_keys[%d]", at, k)
			switch {
			case strings.Contains(key, "PRIVATE KEY"):
				r.broken(field, "public-key", "write the line of the .pub file, and replace the key: it is no longer secret", "is a private key")
			case !sshKeyPattern.MatchString(key):
				r.broken(field, "public-key", "write the line of the .pub file, as in ssh-ed25519 AAAA…", "is no SSH public key")
			case seen[strings.Fields(key)[1]] != "":
				r.broken(field, "one-person", "every person has keys of their own", "is also a key of %s", seen[strings.Fields(key)[1]])
			default:
				seen[strings.Fields(key)[1]] = p.GetPrincipal()
			}
		}
	}
	r.paths("spec.protected_paths", pathscope.Scope{Protected: s.GetProtectedPaths()})
	for i, h := range s.GetPrivateHosts() {
		for k, text := range h.GetRanges() {
			prefix, err := netip.ParsePrefix(text)
			if err != nil {
				continue // the bounds say so
			}
			for _, closed := range never() {
				if prefix.Overlaps(closed) {
					r.broken(fmt.Sprintf("spec.private_hosts[%d].ranges[%d]", i, k), "range-closed", "name the exact range of the host", "%s holds addresses of %s, which nothing opens", prefix, closed)
				}
			}
		}
	}
}

func (r *rules) pluginManifest(m *kindsv1.PluginManifest) {
	s := m.GetSpec()
	verbs := ports.Of(s.GetPort())
	if r.d.at.has("spec.port") && len(verbs) == 0 {
		r.broken("spec.port", "known-port", "write one of "+strings.Join(ports.Names(), ", "), "%q is no port", s.GetPort())
		return
	}
	declared := map[string]bool{}
	for i, name := range s.GetVerbs() {
		declared[name] = true
		if _, ok := ports.Lookup(s.GetPort() + "." + name); !ok {
			r.broken(fmt.Sprintf("spec.verbs[%d]", i), "known-verb", "", "%q is no verb of %s", name, s.GetPort())
		}
	}
	for _, v := range verbs {
		if v.SideEffecting() && v.Capability == "" && !declared[v.Method] {
			r.broken("spec.verbs", "every-side-effect", "serve it, or the host refuses the provider (P-028)", "does not declare %s", v.Method)
		}
	}
	if s.GetPort() == "verifier" && len(s.GetEgressHosts())+len(s.GetCredentialIntents()) > 0 {
		r.broken("spec", "verifier-isolated", "remove them (P-167, P-168)", "a verifier names no destination and no credential intent")
	}
}
