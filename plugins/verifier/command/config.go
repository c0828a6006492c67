package command

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Bounds of a configuration.
const (
	maxConfig = 1 << 20
	// So many check reports fit the 32 KiB of a receipt.
	maxChecks      = 64
	defaultTimeout = 10 * time.Minute
	maxTimeout     = time.Hour // the host lets no process of a run live longer
)

// The formats in which a check tells what it found.
const (
	formatExit   = "exit"
	formatGoTest = "gotest-json"
	formatJUnit  = "junit"
	formatSARIF  = "sarif"
)

// Document is what config_ref stands for.
type Document struct {
	Checks []Check `json:"checks"`
}

// Check is one command. Exactly one of Argv and Command is set; Command is a
// line for /bin/sh.
type Check struct {
	Name        string            `json:"name"`
	Argv        []string          `json:"argv,omitempty"`
	Command     string            `json:"command,omitempty"`
	Timeout     string            `json:"timeout,omitempty"` // such as 5m; 10m if empty
	Format      string            `json:"format,omitempty"`  // exit, gotest-json, junit or sarif; found out if empty
	Report      string            `json:"report,omitempty"`  // file that the command writes, for junit and sarif; empty for standard output
	Directory   string            `json:"directory,omitempty"`
	Environment map[string]string `json:"environment,omitempty"`
	// Inputs are files that define what the command does. They have to be the
	// same on candidate and base.
	Inputs []string `json:"inputs,omitempty"`

	timeout time.Duration
	argv    []string // what is run
	env     map[string]string
}

var checkName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9 ._:/-]{0,127}$`)

// parseConfig reads a configuration strictly and completes each check.
func parseConfig(b []byte) ([]Check, error) {
	if len(b) > maxConfig {
		return nil, fmt.Errorf("configuration of %d bytes: at most %d", len(b), maxConfig)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var doc Document
	if err := dec.Decode(&doc); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("configuration: something follows the document")
	}
	if len(doc.Checks) == 0 || len(doc.Checks) > maxChecks {
		return nil, fmt.Errorf("configuration has %d checks: want 1 to %d", len(doc.Checks), maxChecks)
	}
	seen := map[string]bool{}
	for i := range doc.Checks {
		c := &doc.Checks[i]
		if !checkName.MatchString(c.Name) || seen[c.Name] {
			return nil, fmt.Errorf("check %d: name %q is malformed or there twice", i+1, c.Name)
		}
		seen[c.Name] = true
		if err := c.complete(); err != nil {
			return nil, fmt.Errorf("check %q: %w", c.Name, err)
		}
	}
	return doc.Checks, nil
}

func (c *Check) complete() error {
	c.timeout = defaultTimeout
	if c.Timeout != "" {
		d, err := time.ParseDuration(c.Timeout)
		if err != nil || d <= 0 || d > maxTimeout {
			return fmt.Errorf("timeout %q: want a time such as 5m, at most %v", c.Timeout, maxTimeout)
		}
		c.timeout = d
	}
	if (len(c.Argv) == 0) == (c.Command == "") {
		return errors.New("give argv or command, one of them")
	}
	for _, p := range append([]string{c.Report, c.Directory}, c.Inputs...) {
		if p != "" && (path.IsAbs(p) || path.Clean(p) != p || p == ".." || strings.HasPrefix(p, "../")) {
			return fmt.Errorf("path %q: want a clean path below the work root", p)
		}
	}
	if err := c.resolve(); err != nil {
		return err
	}
	switch c.Format {
	case formatExit, formatGoTest:
		if c.Report != "" {
			return fmt.Errorf("format %s is read from exit code and standard output; leave report out", c.Format)
		}
	case formatJUnit, formatSARIF:
	default:
		return fmt.Errorf("format %q: want exit, gotest-json, junit or sarif", c.Format)
	}
	if len(c.Inputs) == 0 && c.Format == formatExit {
		c.Inputs = definedBy(c.argv)
	}
	return nil
}

// resolve finds out what is run and, where nothing is said, in which format.
func (c *Check) resolve() error {
	c.env = c.Environment
	words := c.Argv
	if c.Command != "" {
		if err := honest(c.Command); err != nil {
			return err
		}
		env, plain, ok := split(c.Command)
		switch {
		case ok && (len(env) == 0 || isGoTest(plain)):
			words = plain
			c.env = map[string]string{}
			for k, v := range c.Environment {
				c.env[k] = v
			}
			for k, v := range env {
				c.env[k] = v
			}
		case piped(c.Command):
			// The status of a pipeline is that of its last command unless the
			// shell is told otherwise, and not every sh can be told.
			words = []string{"bash", "-o", "pipefail", "-c", c.Command}
		default:
			words = []string{"/bin/sh", "-c", c.Command}
		}
	}
	c.argv = slices.Clone(words)
	if c.argv[0] == "" {
		return errors.New("the program's name is empty")
	}
	goTest := isGoTest(c.argv)
	if c.Format == "" {
		c.Format = formatExit
		if goTest {
			c.Format = formatGoTest
		}
	}
	if c.Format == formatGoTest && goTest && !slices.ContainsFunc(c.argv, func(a string) bool { return a == "-json" || a == "--json" || a == "-json=true" }) {
		c.argv = slices.Insert(c.argv, 2, "-json")
	}
	return nil
}

func isGoTest(argv []string) bool {
	return len(argv) >= 2 && path.Base(argv[0]) == "go" && argv[1] == "test" &&
		!slices.ContainsFunc(argv, func(a string) bool { return a == "-c" || a == "-list" || strings.HasPrefix(a, "-list=") })
}

// masks are endings that make a command succeed whatever happened.
var masks = regexp.MustCompile(`\|\|\s*(true|:|exit\s+0|/bin/true|/usr/bin/true|echo\b[^;&|]*)\s*(;|$|\n)|;\s*(true|:|exit\s+0)\s*$`)

// honest refuses a line whose status cannot say that it failed.
func honest(line string) error {
	if m := masks.FindString(line); m != "" {
		return fmt.Errorf("command ends with %q, which hides its exit status: such a check can never fail", strings.TrimSpace(m))
	}
	return nil
}

var assignment = regexp.MustCompile(`^([A-Za-z_][A-Za-z0-9_]*)=(.*)$`)

// split takes a line without any shell syntax apart: assignments, then words.
func split(line string) (env map[string]string, words []string, ok bool) {
	if strings.ContainsAny(line, "\"'`$\\|&;<>(){}[]*?~#!\n\r%^") {
		return nil, nil, false
	}
	env = map[string]string{}
	for _, w := range strings.Fields(line) {
		if m := assignment.FindStringSubmatch(w); m != nil && len(words) == 0 {
			env[m[1]] = m[2]
			continue
		}
		words = append(words, w)
	}
	return env, words, len(words) > 0 && !builtins[words[0]]
}

// builtins run in a shell only.
var builtins = map[string]bool{"cd": true, ".": true, "source": true, "export": true, "set": true, "unset": true, "eval": true, "exec": true, "ulimit": true, "umask": true, "if": true, "for": true, "while": true, "exit": true, "true": true, ":": true}

// piped reports whether a line has a pipe that is no "||". Quoted ones count
// too: bash runs those lines as well.
func piped(line string) bool {
	return strings.Contains(strings.ReplaceAll(line, "||", ""), "|")
}

// definedBy lists files that say what well-known runners do. Only their exit
// code tells how it went, so a candidate could make them succeed by definition.
// The fragment after # is a key of a JSON file.
func definedBy(argv []string) []string {
	if len(argv) == 3 && argv[1] == "-c" {
		if _, words, ok := split(argv[2]); ok {
			argv = words
		}
	}
	switch path.Base(argv[0]) {
	case "make", "gmake":
		return []string{"GNUmakefile", "Makefile", "makefile"}
	case "npm", "yarn", "pnpm", "bun":
		return []string{"package.json#scripts"}
	case "just":
		return []string{"Justfile", "justfile"}
	case "task":
		return []string{"Taskfile.yaml", "Taskfile.yml"}
	case "tox":
		return []string{"tox.ini"}
	}
	return nil
}
