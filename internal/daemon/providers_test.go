package daemon

import (
	"os"
	"path/filepath"
	"testing"
)

// A plugin's directory is the plugin's to change while the runtime writes there
// as root: what it puts in the way leads nowhere outside.
func TestPluginDirectoriesLeadNowhereElse(t *testing.T) {
	outside := t.TempDir()
	victim := filepath.Join(outside, "WID-7.md.new")
	if err := os.WriteFile(victim, []byte("as it was"), 0o600); err != nil {
		t.Fatal(err)
	}
	home := t.TempDir()
	dir := filepath.Join(home, "projects", "aa")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, filepath.Join(dir, "WID-7.md.new")); err != nil {
		t.Fatal(err)
	}
	if err := keepTicket(home, dir, "WID-7", []byte("ticket")); err != nil {
		t.Errorf("a link in the place of the new file: %v", err)
	}
	if b, err := os.ReadFile(victim); err != nil || string(b) != "as it was" {
		t.Errorf("a file outside was written: %q, %v", b, err)
	}
	if err := os.Symlink(outside, filepath.Join(home, "projects", "bb")); err != nil {
		t.Fatal(err)
	}
	if err := keepTicket(home, filepath.Join(home, "projects", "bb"), "WID-7", []byte("ticket")); err == nil {
		t.Error("a ticket was written through a link out of the plugin's directory")
	}
	if err := give(home, os.Getuid()); err != nil {
		t.Errorf("give: %v", err)
	}
}
