package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/kinds"
	"github.com/numinance/numinance/internal/core/untrusted"
	"github.com/numinance/numinance/internal/edge/cli"
	ticketingfiles "github.com/numinance/numinance/plugins/ticketing/files"
)

var ticketKey = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)

// ticket puts a ticket file into the local tracker and returns its key. The key
// of a file without one follows from the Change.
func (d *Daemon) ticket(id identity.ChangeID, project string, r cli.ChangeRequest) (string, error) {
	home := d.home.Provider("ticketing", "files")
	dir := ticketingfiles.Directory(home, project)
	if r.Ticket == nil {
		if !ticketKey.MatchString(r.Key) {
			return "", fmt.Errorf("ticket %q: name a Markdown file or a key such as WID-7", r.Key)
		}
		if _, err := os.Stat(filepath.Join(dir, r.Key+".md")); err != nil {
			return "", fmt.Errorf("the local tracker has no ticket %q in project %s: name a Markdown file", r.Key, project)
		}
		return r.Key, nil
	}
	key := frontMatterKey(r.Ticket)
	if key == "" {
		key = "T-" + strings.TrimPrefix(string(id), "chg-")
	}
	if !ticketKey.MatchString(key) {
		return "", fmt.Errorf("the ticket's key %q is malformed: letters, digits, '_', '.' and '-', such as WID-7", key)
	}
	if err := keepTicket(home, dir, key, r.Ticket); err != nil {
		return "", fmt.Errorf("keep the ticket: %w", err)
	}
	return key, nil
}

// keepTicket writes a ticket below home, the directory of the plugin that serves
// tickets. It is the plugin's to change, so nothing in it leads anywhere else.
func keepTicket(home, dir, key string, text []byte) error {
	root, err := os.OpenRoot(home)
	if err != nil {
		return err
	}
	defer root.Close()
	if dir, err = filepath.Rel(home, dir); err != nil {
		return err
	}
	if err := root.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	path := filepath.Join(dir, key+".md")
	tmp := path + ".new"
	if err := root.Remove(tmp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := root.WriteFile(tmp, text, 0o600); err != nil {
		return err
	}
	if err := root.Rename(tmp, path); err != nil {
		return errors.Join(err, root.Remove(tmp))
	}
	return nil
}

// frontMatterKey finds the key that a ticket file gives itself, or "". The
// provider reads the file again and strictly; this only names the file.
func frontMatterKey(text []byte) string {
	rest, ok := strings.CutPrefix(strings.ReplaceAll(string(text), "\r\n", "\n"), "---\n")
	if !ok {
		return ""
	}
	matter, _, ok := strings.Cut(rest, "\n---")
	if !ok || len(matter) > 64<<10 {
		return ""
	}
	var m struct {
		Key string `yaml:"key"`
	}
	if err := yaml.Unmarshal([]byte(matter), &m); err != nil {
		return ""
	}
	return m.Key
}

// generateControl writes the default control directory of a repository where
// there is none and says where it is.
func (d *Daemon) generateControl(ctx context.Context, id identity.ChangeID, name, branch string, r cli.ChangeRequest) (string, error) {
	if len(r.Checks) == 0 {
		return "", errors.New("--check is missing: name at least one command that verifies the candidate, such as --check \"go test ./...\"")
	}
	def := kinds.Defaults{Repository: name, BaseBranch: branch, Checks: r.Checks, Requester: string(requester())}
	if err := d.suggestPreparation(ctx, &def); err != nil {
		return "", err
	}
	files, err := kinds.DefaultSet(def)
	if err != nil {
		return "", err
	}
	dir := d.home.Control(name + "-" + digest.Of([]byte(strings.Join(r.Checks, "\x00"))).Hex()[:6])
	if err := writeControl(dir, files); err != nil {
		return "", err
	}
	d.tellStage(id, "control documents: "+tilde(dir))
	return dir, nil
}

func hasGo() bool {
	_, err := exec.LookPath("go")
	return err == nil
}

// untrustedLine makes foreign text fit for one line of at most 512 bytes.
func untrustedLine(s string) string {
	const most = 512
	return untrusted.New("", []byte(s), most).Line(most)
}
