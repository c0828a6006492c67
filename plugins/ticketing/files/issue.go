package files

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// Bounds of an issue, in bytes.
const (
	maxFile   = 8 << 20
	maxMatter = 64 << 10
	maxBody   = 256 << 10
	maxTitle  = 1024
	maxLabels = 100
)

// issue is what a file says. Text is as it is in the file, made UTF-8: control
// and bidi characters are the reader's to judge, not ours to hide.
type issue struct {
	key     string
	project string // empty if the file does not say
	title   string
	body    string
	state   string
	labels  []string
}

// matter is the front matter.
type matter struct {
	Key     string   `yaml:"key"`
	Title   string   `yaml:"title"`
	Project string   `yaml:"project"`
	State   string   `yaml:"state"`
	Labels  []string `yaml:"labels"`
}

// parseIssue reads a Markdown file, with front matter between two lines of
// "---" or without. Without a title there, the first heading or line is it.
func parseIssue(key string, raw []byte) (issue, error) {
	if len(raw) > maxFile {
		return issue{}, fmt.Errorf("it has %d bytes, at most %d", len(raw), maxFile)
	}
	text := strings.ToValidUTF8(strings.TrimPrefix(string(raw), "\ufeff"), "\uFFFD")
	text = strings.ReplaceAll(text, "\r\n", "\n")
	if strings.TrimSpace(text) == "" {
		return issue{}, errors.New("it is empty: write a title and what is to be done")
	}
	var m matter
	body := text
	if start, end, ok, err := findMatter(text); err != nil {
		return issue{}, err
	} else if ok {
		if m, err = parseMatter(text[start:end]); err != nil {
			return issue{}, err
		}
		body = strings.TrimPrefix(text[end:], "---\n")
		if body == "---" {
			body = ""
		}
	}
	if m.Key != "" && m.Key != key {
		return issue{}, fmt.Errorf("front matter says key %q: name the file %q.md or mend the key", m.Key, m.Key)
	}
	title := m.Title
	if title == "" {
		title, body = splitTitle(body)
	}
	if title = oneLine(title); title == "" {
		return issue{}, errors.New("it has no title: add `title:` to its front matter or a heading")
	}
	i := issue{key: key, project: m.Project, title: cut(title, maxTitle), body: strings.Trim(body, "\n"), state: m.State, labels: m.Labels}
	if i.state == "" {
		i.state = "todo"
	}
	return i, nil
}

// findMatter returns where the front matter begins and where its closing line
// does.
func findMatter(text string) (start, end int, ok bool, err error) {
	if !strings.HasPrefix(text, "---\n") {
		return 0, 0, false, nil
	}
	start = len("---\n")
	window := text[start:]
	if len(window) > maxMatter {
		window = window[:maxMatter]
	}
	if strings.HasPrefix(window, "---\n") || window == "---" {
		return start, start, true, nil
	}
	at := strings.Index(window, "\n---\n")
	if at < 0 && strings.HasSuffix(text, "\n---") && len(text)-start <= maxMatter {
		at = len(window) - len("\n---")
	}
	if at < 0 {
		return 0, 0, false, fmt.Errorf("its front matter has no closing line of --- within %d bytes", maxMatter)
	}
	return start, start + at + 1, true, nil
}

// parseMatter takes one flat YAML mapping: no anchors, no aliases, no tags of
// its own, no key twice, no key that is not known.
func parseMatter(text string) (matter, error) {
	var m matter
	var node yaml.Node
	dec := yaml.NewDecoder(strings.NewReader(text))
	if err := dec.Decode(&node); err != nil {
		if strings.TrimSpace(text) == "" {
			return m, nil
		}
		return m, fmt.Errorf("front matter: %w", err)
	}
	if err := flat(&node, 0); err != nil {
		return m, fmt.Errorf("front matter: %w", err)
	}
	strict := yaml.NewDecoder(bytes.NewReader([]byte(text)))
	strict.KnownFields(true)
	if err := strict.Decode(&m); err != nil {
		return m, fmt.Errorf("front matter takes key, title, project, state and labels: %w", err)
	}
	if len(m.Labels) > maxLabels {
		return m, fmt.Errorf("front matter: %d labels, at most %d", len(m.Labels), maxLabels)
	}
	for i, l := range m.Labels {
		if m.Labels[i] = cut(oneLine(l), 256); m.Labels[i] == "" {
			return m, errors.New("front matter: a label is empty")
		}
	}
	m.State = oneLine(m.State)
	if len(m.Project) > 256 || len(m.State) > 128 {
		return m, errors.New("front matter: project has at most 256 bytes and state 128")
	}
	return m, nil
}

func flat(n *yaml.Node, depth int) error {
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		return fmt.Errorf("line %d: anchors and aliases are not taken", n.Line)
	}
	if depth > 3 {
		return fmt.Errorf("line %d: nested too deep", n.Line)
	}
	for _, c := range n.Content {
		if err := flat(c, depth+1); err != nil {
			return err
		}
	}
	return nil
}

func splitTitle(body string) (title, rest string) {
	for body != "" {
		line, after, _ := strings.Cut(body, "\n")
		if strings.TrimSpace(line) != "" {
			return strings.TrimLeft(line, "# "), after
		}
		body = after
	}
	return "", ""
}

// withState returns the file with another state and nothing else changed.
func withState(raw []byte, state string) ([]byte, error) {
	line := "state: " + quoteYAML(state) + "\n"
	bom := ""
	text := string(raw)
	if t, ok := strings.CutPrefix(text, "\ufeff"); ok {
		bom, text = "\ufeff", t
	}
	crlf := strings.HasPrefix(text, "---\r\n")
	if crlf {
		text = strings.ReplaceAll(text, "\r\n", "\n")
	}
	start, end, ok, err := findMatter(text)
	if err != nil {
		return nil, err
	}
	switch {
	case !ok:
		text = "---\n" + line + "---\n" + text
	default:
		var out strings.Builder
		replaced := false
		skipping := false
		for l := range strings.SplitAfterSeq(text[start:end], "\n") {
			// A state that goes on over further lines goes with its first.
			if skipping && (strings.HasPrefix(l, " ") || strings.HasPrefix(l, "\t")) {
				continue
			}
			skipping = false
			if strings.HasPrefix(l, "state:") {
				out.WriteString(line)
				replaced, skipping = true, true
				continue
			}
			out.WriteString(l)
		}
		if !replaced {
			out.WriteString(line)
		}
		text = text[:start] + out.String() + text[end:]
	}
	if crlf {
		text = strings.ReplaceAll(text, "\n", "\r\n")
	}
	return []byte(bom + text), nil
}

func quoteYAML(s string) string {
	for _, r := range s {
		if r != ' ' && r != '_' && r != '-' && !unicode.IsLetter(r) {
			return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
		}
	}
	switch strings.ToLower(s) {
	case "null", "true", "false", "yes", "no", "on", "off", "y", "n", "-":
		return `"` + s + `"`
	}
	if strings.TrimSpace(s) != s || strings.HasPrefix(s, "-") {
		return `"` + s + `"`
	}
	return s
}

func isControl(r rune) bool { return unicode.IsControl(r) || r == '\u2028' || r == '\u2029' }

func oneLine(s string) string {
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if isControl(r) {
			return ' '
		}
		return r
	}, s))
}

// cut keeps at most max bytes, at a character boundary.
func cut(s string, max int) string {
	if len(s) <= max {
		return s
	}
	for max > 0 && !utf8.RuneStart(s[max]) {
		max--
	}
	return s[:max]
}
