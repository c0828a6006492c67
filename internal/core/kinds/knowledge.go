package kinds

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"

	kindsv1 "github.com/numinance/numinance/gen/numinance/kinds/v1"
)

// knowledgeConnection applies the table of the specification, but for the
// lockfile and the manifest, which need the full load (K-045, K-050).
func (r *rules) knowledgeConnection(m *kindsv1.KnowledgeConnection) {
	s := m.GetSpec()
	r.provider("knowledge", s.GetProvider())
	if r.required("spec.endpoint", "endpoint-required", "write an https:// address") {
		if rule, text, fix := checkEndpoint(s.GetEndpoint()); rule != "" {
			r.broken("spec.endpoint", rule, fix, "%s", text)
		}
	}
	r.required("spec.auth", "auth-required", "write KNOWLEDGE_AUTH_USER_DELEGATED or KNOWLEDGE_AUTH_SERVICE_ACCOUNT")
	if r.required("spec.read_only", "read-only-required", "write read_only: true") && !s.GetReadOnly() {
		r.broken("spec.read_only", "read-only-true", "write read_only: true; a knowledge connection never writes", "is false")
	}
	r.knowledgeScope(s.GetScope())
	for field, value := range map[string]uint32{"spec.budgets.calls_per_stage": s.GetBudgets().GetCallsPerStage(), "spec.budgets.bytes_per_call": s.GetBudgets().GetBytesPerCall()} {
		if r.d.at.has(field) && value == 0 {
			r.broken(field, "budget-not-zero", "leave it out for the budget of the stage", "is 0")
		}
	}
	seen := map[string]bool{}
	for i, tool := range s.GetPinnedTools() {
		at := fmt.Sprintf("spec.pinned_tools[%d]", i)
		if seen[tool.GetName()] {
			r.broken(at+".name", "unique-tool", "pin each tool once", "%q is pinned twice", tool.GetName())
		}
		seen[tool.GetName()] = true
		if hash := tool.GetHash().GetValue(); !hashPattern.MatchString(hash) {
			r.broken(at+".hash.value", "tool-hash", "write sha256: and 64 lowercase hex digits", "%q is no digest", hash)
		}
	}
	if s.GetOauth() != nil && m.GetMetadata().GetScope() != kindsv1.Scope_SCOPE_ORG {
		r.broken("spec.oauth.client_id", "oauth-organisation", "move it to a document of scope SCOPE_ORG", "only the organisation sets it")
	}
}

var hashPattern = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// checkEndpoint returns the first rule that an endpoint breaks (K-046 to
// K-049). It takes the address apart itself, so that nothing is normalised
// before it is judged.
func checkEndpoint(s string) (rule, text, fix string) {
	rest, ok := strings.CutPrefix(s, "https://")
	if !ok {
		return "endpoint-https", fmt.Sprintf("%q does not begin with https://", s), "write an https:// address"
	}
	for _, c := range rest {
		if c <= ' ' || c == '\\' || c >= 0x7f {
			return "endpoint-characters", fmt.Sprintf("holds the character %q", c), "write plain ASCII without blanks and backslashes"
		}
	}
	if strings.Contains(rest, "?") {
		return "endpoint-query", "holds a query", "remove what follows the ?"
	}
	if strings.Contains(rest, "#") {
		return "endpoint-fragment", "holds a fragment", "remove what follows the #"
	}
	authority, after, _ := strings.Cut(rest, "/")
	if strings.Contains(authority, "@") {
		return "endpoint-user", "holds user information", "remove what precedes the @"
	}
	host, port, hasPort := strings.Cut(authority, ":")
	if strings.HasPrefix(authority, "[") || strings.Count(authority, ":") > 1 {
		return "endpoint-ip", "names an IP address", "name a DNS host"
	}
	if n, err := strconv.Atoi(port); hasPort && (err != nil || n < 1 || n > 65535 || strconv.Itoa(n) != port) {
		return "endpoint-port", fmt.Sprintf("%q is no port", port), "write 1 to 65535 or leave it out"
	}
	if host != strings.ToLower(host) {
		return "endpoint-lowercase", fmt.Sprintf("host %q is not lowercase", host), "write " + strings.ToLower(host)
	}
	labels := strings.Split(host, ".")
	if last := labels[len(labels)-1]; numberPattern.MatchString(last) {
		return "endpoint-ip", fmt.Sprintf("host %q is an IP address", host), "name a DNS host"
	}
	if len(labels) < 2 {
		return "endpoint-labels", fmt.Sprintf("host %q has one label", host), "write a DNS host of at least two labels"
	}
	for _, label := range labels {
		if !labelPattern.MatchString(label) {
			return "endpoint-host", fmt.Sprintf("%q is no DNS host", host), "write a DNS host such as mcp.example.com"
		}
	}
	if len(host) > 253 {
		return "endpoint-host", "the host is too long", "write a DNS host of at most 253 characters"
	}
	for segment := range strings.SplitSeq(after, "/") {
		if segment == "." || segment == ".." || strings.Contains(strings.ToLower(segment), "%2e") {
			return "endpoint-path", "the path climbs", "write the path without . and .."
		}
	}
	return "", "", ""
}

var (
	labelPattern  = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	numberPattern = regexp.MustCompile(`^([0-9]+|0x[0-9a-f]*)$`)
)

// knowledgeScope applies K-056 and K-057.
func (r *rules) knowledgeScope(scope []string) {
	if !r.required("spec.scope", "scope-required", "list the spaces or projects, as in [ENG, PAY]") {
		return
	}
	if len(scope) == 0 {
		r.broken("spec.scope", "scope-not-empty", "list the spaces or projects, as in [ENG, PAY]", "is empty")
	}
	seen := map[string]bool{}
	for i, entry := range scope {
		field := fmt.Sprintf("spec.scope[%d]", i)
		if seen[entry] {
			r.broken(field, "scope-unique", "list each entry once", "%q is listed twice", entry)
		}
		seen[entry] = true
		if c, ok := badScopeCharacter(entry); !ok {
			r.broken(field, "scope-characters", "write letters, digits, - and _, with / between segments", "%q holds %q", entry, c)
		}
	}
}

func badScopeCharacter(entry string) (string, bool) {
	for segment := range strings.SplitSeq(entry, "/") {
		if segment == "" {
			return "an empty segment", false
		}
		for _, c := range segment {
			if !unicode.IsLetter(c) && !unicode.IsDigit(c) && c != '-' && c != '_' {
				return string(c), false
			}
		}
	}
	return "", true
}
