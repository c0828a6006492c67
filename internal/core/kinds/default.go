package kinds

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/numinance/numinance/internal/core/policy"
)

// Defaults is what a default control directory is made from.
type Defaults struct {
	Repository string            // name of the repository, also its resource
	BaseBranch string            // branch that Changes merge into
	Checks     []string          // commands, as a person types them
	Allowed    []string          // paths that runs may change; all where empty
	Prepare    []string          // commands that fetch dependencies on the base revision
	Warm       []string          // commands after Prepare that save time and may fail
	Variables  map[string]string // set for every process
	Registries []string          // host or host:port that Prepare may reach; port 443 where none is given
	Lockfiles  []string          // files that decide whether Prepare runs again
	Scratch    []string          // directories that are never exported
	Requester  string            // principal that may approve, such as human:alice; empty for nobody
	SSHKey     string            // public key of the requester
	Pipeline   []string          // commands of the pipeline that a release runs; none where empty
}

var nameRun = regexp.MustCompile(`[^a-z0-9]+`)

// DefaultName returns name in the form of a document name.
func DefaultName(name string) string {
	out := strings.Trim(nameRun.ReplaceAllString(strings.ToLower(name), "-"), "-")
	if len(out) > 63 {
		out = strings.TrimRight(out[:63], "-")
	}
	if out == "" {
		return "repository"
	}
	return out
}

// DefaultSet returns the documents of a control directory for one repository,
// file name to YAML text, with comments for the person who will edit them.
// They load; an error says which of the Defaults does not.
func DefaultSet(d Defaults) (map[string]string, error) {
	name := DefaultName(d.Repository)
	if d.Repository == "" || d.BaseBranch == "" || len(d.Checks) == 0 {
		return nil, fmt.Errorf("default control directory: needs a repository, a base branch and at least one check")
	}
	allowed := d.Allowed
	if len(allowed) == 0 {
		allowed = []string{"**"}
	}
	pipeline := ""
	files := map[string]string{
		"policy.yaml": head("The policy in force: what no rule here permits is denied. The floors, which no\n# rule lifts, are printed by `numi policy show` too.", "Policy", "default") +
			"spec:\n  cedar: |\n" + indent(policy.Default(), "    "),
		"environment.yaml": head("What the sandboxes of runs consist of. prepare runs once per image and\n# lockfile, on the base revision, without agent and credential. A limit on the\n# processor, cpu_millis: 2000 for two, may be added where control groups may be\n# made: numi doctor tells. It is refused where it cannot be enforced.", "Environment", "default") +
			"spec:\n  limits: {memory_bytes: 4294967296, pids: 2048, disk_bytes: 10737418240}\n" +
			prepareSteps(d.Prepare, d.Warm) + hosts("prepare_egress", d.Registries) + texts("lockfiles", d.Lockfiles) + texts("scratch", d.Scratch) + variables(d.Variables),
		"profile.yaml": head("What a run may do, and what a candidate has to pass before it is reviewed.", "Profile", "default") +
			"spec:\n" + steps("checks", "check", d.Checks) + texts("allowed_paths", allowed) +
			"  capabilities: [EXECUTOR_CAPABILITY_FILESYSTEM_READ, EXECUTOR_CAPABILITY_FILESYSTEM_WRITE, EXECUTOR_CAPABILITY_SHELL]\n" +
			"  budget: {actions: 1000, output_bytes: 268435456, tokens: 5000000, wall: 3600s}\n  max_revisions: 2\n" +
			"  verifiers: [" + embedded + "verifier-command]\n",
		"tracker.yaml": head("Where tickets come from.", "Tracker", name) + "spec:\n  provider: " + embedded + "ticketing-files\n  project: " + quote(d.Repository) + "\n",
	}
	if len(d.Pipeline) > 0 {
		pipeline = "  pipeline: " + name + "\n"
		files["pipeline.yaml"] = head("What a release runs. It is defined here and never by a Change.", "Pipeline", name) +
			"spec:\n  provider: " + embedded + "ciexecutor-local\n  resource: " + quote(d.Repository) + "\n" + steps("steps", "step", d.Pipeline)
	}
	files["repository.yaml"] = head("The repository that Changes are made on.", "Repository", name) +
		"spec:\n  provider: " + embedded + "scm-git\n  resource: " + quote(d.Repository) + "\n  base_branch: " + quote(d.BaseBranch) + "\n" +
		"  profile: default\n  environment: default\n" + pipeline + "  tracker: " + name + "\n"
	people := "spec: {}\n"
	if d.Requester != "" {
		people = "spec:\n  people:\n    - principal: " + quote(d.Requester) + "\n      groups: [approvers]\n"
		if d.SSHKey != "" {
			people += "      ssh_keys: [" + quote(strings.TrimSpace(d.SSHKey)) + "]\n"
		}
	}
	files["organization.yaml"] = head("Who may approve. Public keys only.", "Organization", "default") + people
	var written []source
	for _, file := range slices.Sorted(maps.Keys(files)) {
		written = append(written, source{file: file, raw: []byte(files[file])})
	}
	if _, report := load(written); !report.OK() {
		return nil, fmt.Errorf("default control directory: %s", report.Problems()[0])
	}
	return files, nil
}

func head(comment, kind, name string) string {
	return fmt.Sprintf("# %s\napiVersion: %s\nkind: %s\nmetadata: {name: %s, scope: SCOPE_ORG}\n", comment, APIVersion, kind, quote(name))
}

// quote writes a YAML text; JSON's quoting is a subset of YAML's.
func quote(s string) string {
	if plainPattern.MatchString(s) {
		return s
	}
	return strconv.QuoteToASCII(s)
}

var plainPattern = regexp.MustCompile(`^[a-z][a-z0-9_/-]*[a-z0-9]$`)

func texts(field string, values []string) string {
	if len(values) == 0 {
		return ""
	}
	quoted := make([]string, len(values))
	for i, v := range values {
		quoted[i] = strconv.QuoteToASCII(v)
	}
	return "  " + field + ": [" + strings.Join(quoted, ", ") + "]\n"
}

func hosts(field string, names []string) string {
	if len(names) == 0 {
		return ""
	}
	out := "  " + field + ":\n"
	for _, name := range names {
		host, port, ok := strings.Cut(name, ":")
		if _, err := strconv.ParseUint(port, 10, 16); !ok || err != nil {
			port = "443"
		}
		out += "    - {host: " + strconv.QuoteToASCII(host) + ", port: " + port + "}\n"
	}
	return out
}

func steps(field, name string, commands []string) string {
	if len(commands) == 0 {
		return ""
	}
	out := "  " + field + ":\n"
	for i, c := range commands {
		out += fmt.Sprintf("    - {name: %s-%d, argv: %s}\n", name, i+1, argv(c))
	}
	return out
}

// prepareSteps writes the commands and then those that may fail.
func prepareSteps(commands, warm []string) string {
	out := steps("prepare", "prepare", commands)
	if out == "" && len(warm) > 0 {
		out = "  prepare:\n"
	}
	for i, c := range warm {
		out += fmt.Sprintf("    - {name: warm-%d, best_effort: true, argv: %s}\n", i+1, argv(c))
	}
	return out
}

func argv(command string) string {
	quoted := []string{}
	for _, a := range Argv(command) {
		quoted = append(quoted, strconv.QuoteToASCII(a))
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

func variables(of map[string]string) string {
	if len(of) == 0 {
		return ""
	}
	out := "  variables:\n"
	for _, name := range slices.Sorted(maps.Keys(of)) {
		out += "    " + strconv.QuoteToASCII(name) + ": " + strconv.QuoteToASCII(of[name]) + "\n"
	}
	return out
}

// Argv turns a command line into arguments: split at blanks where no shell is
// needed to read it, else given to sh as a whole.
func Argv(command string) []string {
	if strings.ContainsAny(command, "\"'`$&|;<>(){}[]*?~#\\!=\n") {
		return []string{"sh", "-c", command}
	}
	return strings.Fields(command)
}

func indent(text, by string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if strings.TrimSpace(line) != "" {
			b.WriteString(by)
		}
		b.WriteString(line)
	}
	return b.String()
}
