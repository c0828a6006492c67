package fake

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// Bounds of a script. MaxEvents is the port's own bound on a stream (P-132); a
// script that could exceed it is refused when it is read.
const (
	MaxScriptBytes = 4 << 20
	MaxEvents      = 1023
	MaxWorkUnits   = 64
	MaxFindings    = 100
	maxPath        = 4096
	maxArguments   = 1024
	// An environment of this size still fits one control message of the host.
	maxArgumentBytes = 128 << 10
)

// Expect says what the decision on a step's intent has to be. The zero value
// is ExpectAllowed, so a denial that the script does not foresee fails the run.
type Expect uint8

// What a step may expect.
const (
	ExpectAllowed Expect = iota
	ExpectDenied
	ExpectAny
)

// Op is what a step does. The zero value is none and never in a parsed script.
type Op uint8

// The steps a script can have.
const (
	OpNone Op = iota
	OpWrite
	OpDelete
	OpPatch
	OpRun
	OpFetch
	OpCredential
	OpMerge
	OpSay
	OpCheckpoint
	OpCrash
	OpStall
	OpExhaust
)

var opNames = [...]string{
	"", "write", "delete", "patch", "run", "fetch", "credential", "merge",
	"say", "checkpoint", "crash", "stall", "exhaust",
}

// String returns the step's key in the script, which is also the name of its
// tool intent.
func (o Op) String() string {
	if int(o) < len(opNames) {
		return opNames[o]
	}
	return ""
}

// Exit is the exit code that a run step has to end with.
type Exit struct {
	NonZero bool // any code but 0; Code is then meaningless
	Code    int
}

// Step is one step of a script; which fields are set depends on Op.
type Step struct {
	Op     Op
	Line   int // where it stands in the script, from 1
	Expect Expect
	Anyway bool

	Path        string        // write, delete
	Content     []byte        // write: the file; say: the text
	Executable  bool          // write
	Files       []FilePatch   // patch
	Argv        []string      // run
	Exit        Exit          // run
	URL         string        // fetch
	Intent      string        // credential
	PullRequest string        // merge
	Duration    time.Duration // stall; 0 is until the run is ended
	Attempts    int           // crash, stall: only in the first so many attempts of a run
}

// WorkUnit is one part of the plan that a script gives.
type WorkUnit struct {
	ID           string
	Title        string
	AllowedPaths []string
	DependsOn    []string
	Steps        []Step
}

// Finding is one remark of the scripted reviewer.
type Finding struct {
	Path     string
	Line     int
	Severity string // info, warning or error
	Message  string
}

// Review is what the scripted reviewer does and says.
type Review struct {
	Approve  bool
	Findings []Finding
	Steps    []Step
}

// Script is a whole script. Exactly one of Steps and WorkUnits is used; both
// empty is a script that changes nothing.
type Script struct {
	Steps     []Step
	WorkUnits []WorkUnit
	Reviewer  Review
}

// StepsOf returns the steps of a work unit: its own, or those of the script if
// that names no work units. ok is false if it names others only.
func (s Script) StepsOf(workUnit string) (steps []Step, ok bool) {
	if len(s.WorkUnits) == 0 {
		return s.Steps, true
	}
	i := slices.IndexFunc(s.WorkUnits, func(u WorkUnit) bool { return u.ID == workUnit })
	if i < 0 {
		return nil, false
	}
	return s.WorkUnits[i].Steps, true
}

// Parse reads a script strictly: an unknown key, a repeated key, a missing or
// ill-typed value and a script that could exceed the event bound are errors
// that name the line.
func Parse(text []byte) (Script, error) {
	if len(text) > MaxScriptBytes {
		return Script{}, fmt.Errorf("script of %d bytes: at most %d", len(text), MaxScriptBytes)
	}
	if !utf8.Valid(text) {
		return Script{}, errors.New("script is not UTF-8")
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var doc yaml.Node
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return Script{}, errors.New("script is empty: give steps, work_units or reviewer")
	} else if err != nil {
		return Script{}, fmt.Errorf("script: %w", err)
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return Script{}, errors.New("script: more than one YAML document")
	}
	var script Script
	root, err := fields(doc.Content[0], "script", "steps", "work_units", "reviewer")
	if err != nil {
		return Script{}, err
	}
	script.Reviewer.Approve = true
	if n, ok := root["steps"]; ok {
		if _, both := root["work_units"]; both {
			return Script{}, at(n, "give steps or work_units, not both")
		}
		if script.Steps, err = steps(n); err != nil {
			return Script{}, err
		}
	}
	if n, ok := root["work_units"]; ok {
		if script.WorkUnits, err = workUnits(n); err != nil {
			return Script{}, err
		}
	}
	if n, ok := root["reviewer"]; ok {
		if script.Reviewer, err = review(n); err != nil {
			return Script{}, err
		}
	}
	return script, nil
}

func at(n *yaml.Node, format string, args ...any) error {
	return fmt.Errorf("script line %d: %s", n.Line, fmt.Sprintf(format, args...))
}

// fields returns the values of a mapping by key; only the named keys may occur.
func fields(n *yaml.Node, what string, allowed ...string) (map[string]*yaml.Node, error) {
	out := map[string]*yaml.Node{}
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return out, nil
	}
	if n.Kind != yaml.MappingNode {
		return nil, at(n, "%s has to be a map", what)
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if key.Kind != yaml.ScalarNode || !slices.Contains(allowed, key.Value) {
			return nil, at(key, "%s has no key %q; it has %s", what, key.Value, strings.Join(allowed, ", "))
		}
		if _, twice := out[key.Value]; twice {
			return nil, at(key, "%s has the key %q twice", what, key.Value)
		}
		if value.Kind == yaml.AliasNode {
			return nil, at(value, "%s: anchors and aliases are not used in scripts", what)
		}
		out[key.Value] = value
	}
	return out, nil
}

func list(n *yaml.Node, what string, limit int) ([]*yaml.Node, error) {
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return nil, nil
	}
	if n.Kind != yaml.SequenceNode {
		return nil, at(n, "%s has to be a list", what)
	}
	if len(n.Content) > limit {
		return nil, at(n, "%s has %d entries; at most %d", what, len(n.Content), limit)
	}
	return n.Content, nil
}

func text(n *yaml.Node, what string, limit int) (string, error) {
	switch {
	case n.Kind != yaml.ScalarNode || n.Tag != "!!str":
		return "", at(n, "%s has to be a string (quote it if it looks like a number or a truth value)", what)
	case len(n.Value) > limit:
		return "", at(n, "%s is %d bytes long; at most %d", what, len(n.Value), limit)
	case strings.ContainsRune(n.Value, 0):
		return "", at(n, "%s holds a NUL byte", what)
	}
	return n.Value, nil
}

func required(m map[string]*yaml.Node, parent *yaml.Node, what, key string, limit int) (string, error) {
	n, ok := m[key]
	if !ok {
		return "", at(parent, "%s needs %s", what, key)
	}
	s, err := text(n, what+"."+key, limit)
	if err == nil && s == "" {
		err = at(n, "%s.%s is empty", what, key)
	}
	return s, err
}

func texts(n *yaml.Node, what string, limit, each int) ([]string, error) {
	nodes, err := list(n, what, limit)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, n := range nodes {
		s, err := text(n, what, each)
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

func boolean(m map[string]*yaml.Node, what, key string) (bool, error) {
	n, ok := m[key]
	if !ok {
		return false, nil
	}
	if n.Kind != yaml.ScalarNode || n.Tag != "!!bool" {
		return false, at(n, "%s.%s has to be true or false", what, key)
	}
	return n.Value == "true" || n.Value == "True" || n.Value == "TRUE", nil
}

func number(m map[string]*yaml.Node, what, key string, low, high, otherwise int) (int, error) {
	n, ok := m[key]
	if !ok {
		return otherwise, nil
	}
	v, err := strconv.Atoi(n.Value)
	if n.Kind != yaml.ScalarNode || n.Tag != "!!int" || err != nil || v < low || v > high {
		return 0, at(n, "%s.%s has to be a number from %d to %d", what, key, low, high)
	}
	return v, nil
}

func steps(n *yaml.Node) ([]Step, error) {
	nodes, err := list(n, "steps", MaxEvents)
	if err != nil {
		return nil, err
	}
	var out []Step
	events := 3 // started, plan accepted and the end
	for _, n := range nodes {
		s, err := step(n)
		if err != nil {
			return nil, err
		}
		if events += s.events(); events > MaxEvents {
			return nil, at(n, "with this step the run could have more than %d events", MaxEvents)
		}
		out = append(out, s)
	}
	return out, nil
}

// events is the most events that a step can cause.
func (s Step) events() int {
	switch s.Op {
	case OpPatch:
		return 4 * len(s.Files)
	case OpCrash:
		return 0
	case OpStall, OpExhaust:
		return 1
	}
	return 4 // intent, decision, effect, result
}

// The keys of each step's map, beside expect and anyway where those apply.
var stepKeys = map[Op][]string{
	OpWrite:      {"path", "content", "executable"},
	OpDelete:     {"path"},
	OpPatch:      {"diff"},
	OpRun:        {"argv", "exit"},
	OpFetch:      {"url"},
	OpCredential: {"intent"},
	OpMerge:      {"pull_request"},
	OpSay:        {"text"},
	OpCheckpoint: {},
	OpCrash:      {"attempts"},
	OpStall:      {"duration", "attempts"},
	OpExhaust:    {},
}

func step(n *yaml.Node) (Step, error) {
	all := opNames[1:]
	if n.Kind != yaml.MappingNode || len(n.Content) != 2 {
		return Step{}, at(n, "a step is a map with one key, one of %s", strings.Join(all, ", "))
	}
	key, body := n.Content[0], n.Content[1]
	index := slices.Index(all, key.Value)
	if index < 0 {
		return Step{}, at(key, "no step is called %q; there are %s", key.Value, strings.Join(all, ", "))
	}
	s := Step{Op: Op(index + 1), Line: key.Line}
	keys := slices.Clone(stepKeys[s.Op])
	decided := s.Op != OpCrash && s.Op != OpStall && s.Op != OpExhaust
	if decided {
		keys = append(keys, "expect", "anyway")
	}
	m, err := fields(body, key.Value, keys...)
	if err != nil {
		return Step{}, err
	}
	if err := s.expectation(m, key.Value); err != nil {
		return Step{}, err
	}
	if err := s.body(m, key); err != nil {
		return Step{}, err
	}
	return s, nil
}

func (s *Step) expectation(m map[string]*yaml.Node, what string) (err error) {
	if n, ok := m["expect"]; ok {
		switch n.Value {
		case "allowed":
			s.Expect = ExpectAllowed
		case "denied":
			s.Expect = ExpectDenied
		case "any":
			s.Expect = ExpectAny
		default:
			return at(n, "%s.expect has to be allowed, denied or any", what)
		}
	}
	s.Anyway, err = boolean(m, what, "anyway")
	return err
}

func (s *Step) body(m map[string]*yaml.Node, key *yaml.Node) (err error) {
	what := key.Value
	switch s.Op {
	case OpWrite:
		if s.Path, err = required(m, key, what, "path", maxPath); err != nil {
			return err
		}
		content, ok := m["content"]
		if !ok {
			return at(key, "write needs content; an empty file is content: \"\"")
		}
		body, err := text(content, "write.content", MaxScriptBytes)
		if err != nil {
			return err
		}
		s.Content = []byte(body)
		s.Executable, err = boolean(m, what, "executable")
		return err
	case OpDelete:
		s.Path, err = required(m, key, what, "path", maxPath)
	case OpPatch:
		diff, err := required(m, key, what, "diff", MaxScriptBytes)
		if err != nil {
			return err
		}
		if s.Files, err = splitPatch(diff); err != nil {
			return at(key, "patch: %v", err)
		}
	case OpRun:
		return s.run(m, key)
	case OpFetch:
		s.URL, err = required(m, key, what, "url", 2048)
		if err == nil {
			if _, err = destination(s.URL); err != nil {
				err = at(key, "fetch: %v", err)
			}
		}
	case OpCredential:
		s.Intent, err = required(m, key, what, "intent", 128)
	case OpMerge:
		s.PullRequest, err = required(m, key, what, "pull_request", 256)
	case OpSay:
		var said string
		said, err = required(m, key, what, "text", 1<<16)
		s.Content = []byte(said)
	case OpCrash, OpStall:
		if s.Attempts, err = number(m, what, "attempts", 1, 1000, 1); err != nil {
			return err
		}
		return s.stall(m, what)
	}
	return err
}

func (s *Step) run(m map[string]*yaml.Node, key *yaml.Node) error {
	n, ok := m["argv"]
	if !ok {
		return at(key, "run needs argv, a list of strings")
	}
	var err error
	if s.Argv, err = texts(n, "run.argv", maxArguments, maxArgumentBytes); err != nil {
		return err
	}
	if len(s.Argv) == 0 || s.Argv[0] == "" {
		return at(n, "run.argv is empty")
	}
	exit, ok := m["exit"]
	if ok && exit.Kind == yaml.ScalarNode && exit.Value == "nonzero" {
		s.Exit = Exit{NonZero: true}
		return nil
	}
	s.Exit.Code, err = number(m, "run", "exit", 0, 255, 0)
	return err
}

func (s *Step) stall(m map[string]*yaml.Node, what string) error {
	n, ok := m["duration"]
	if !ok {
		return nil
	}
	word, err := text(n, what+".duration", 32)
	if err != nil {
		return err
	}
	s.Duration, err = time.ParseDuration(word)
	if err != nil || s.Duration <= 0 || s.Duration > 24*time.Hour {
		return at(n, "%s.duration has to be a time such as 30s or 5m, at most 24h", what)
	}
	return nil
}

var idPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

func workUnits(n *yaml.Node) ([]WorkUnit, error) {
	nodes, err := list(n, "work_units", MaxWorkUnits)
	if err != nil {
		return nil, err
	}
	var out []WorkUnit
	seen := map[string]bool{}
	for _, n := range nodes {
		u, err := workUnit(n)
		if err != nil {
			return nil, err
		}
		if seen[u.ID] {
			return nil, at(n, "two work units are called %q", u.ID)
		}
		for _, d := range u.DependsOn {
			if !seen[d] {
				return nil, at(n, "work unit %q depends on %q, which does not stand before it", u.ID, d)
			}
		}
		seen[u.ID] = true
		out = append(out, u)
	}
	if len(out) == 0 {
		return nil, at(n, "work_units is empty; leave it out for a single work unit")
	}
	return out, nil
}

func workUnit(n *yaml.Node) (u WorkUnit, err error) {
	m, err := fields(n, "work unit", "id", "title", "allowed_paths", "depends_on", "steps")
	if err != nil {
		return u, err
	}
	if u.ID, err = required(m, n, "work unit", "id", 63); err != nil {
		return u, err
	}
	if !idPattern.MatchString(u.ID) {
		return u, at(n, "work unit id %q has to match %s", u.ID, idPattern)
	}
	u.Title = u.ID
	if t, ok := m["title"]; ok {
		if u.Title, err = text(t, "work unit title", 256); err != nil {
			return u, err
		}
	}
	if p, ok := m["allowed_paths"]; ok {
		if u.AllowedPaths, err = texts(p, "allowed_paths", 1024, maxPath); err != nil {
			return u, err
		}
	}
	if d, ok := m["depends_on"]; ok {
		if u.DependsOn, err = texts(d, "depends_on", MaxWorkUnits, 63); err != nil {
			return u, err
		}
	}
	if s, ok := m["steps"]; ok {
		u.Steps, err = steps(s)
	}
	return u, err
}

func review(n *yaml.Node) (Review, error) {
	r := Review{Approve: true}
	m, err := fields(n, "reviewer", "verdict", "findings", "steps")
	if err != nil {
		return r, err
	}
	if v, ok := m["verdict"]; ok {
		switch v.Value {
		case "approve":
		case "request_changes":
			r.Approve = false
		default:
			return r, at(v, "reviewer.verdict has to be approve or request_changes")
		}
	}
	if s, ok := m["steps"]; ok {
		if r.Steps, err = steps(s); err != nil {
			return r, err
		}
	}
	f, ok := m["findings"]
	if !ok {
		return r, nil
	}
	nodes, err := list(f, "reviewer.findings", MaxFindings)
	if err != nil {
		return r, err
	}
	for _, n := range nodes {
		one, err := finding(n)
		if err != nil {
			return r, err
		}
		r.Findings = append(r.Findings, one)
	}
	return r, nil
}

func finding(n *yaml.Node) (f Finding, err error) {
	m, err := fields(n, "finding", "path", "line", "severity", "message")
	if err != nil {
		return f, err
	}
	if f.Message, err = required(m, n, "finding", "message", 1024); err != nil {
		return f, err
	}
	if p, ok := m["path"]; ok {
		if f.Path, err = text(p, "finding.path", maxPath); err != nil {
			return f, err
		}
	}
	if f.Line, err = number(m, "finding", "line", 0, 1<<30, 0); err != nil {
		return f, err
	}
	f.Severity = "error"
	if s, ok := m["severity"]; ok {
		if f.Severity = s.Value; !slices.Contains([]string{"info", "warning", "error"}, f.Severity) {
			return f, at(s, "finding.severity has to be info, warning or error")
		}
	}
	return f, nil
}
