package main

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	evidence "github.com/numinance/numinance/conformance/evidence/v1"
)

const vectorsDir = "../../conformance/evidence/v1/vectors"

func verifyCommand(args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = run(args, &out, &errs)
	return code, out.String(), errs.String()
}

// Every vector goes through the command line: exit code and label are right.
func TestVectorsThroughTheCommandLine(t *testing.T) {
	all, err := evidence.Vectors()
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range all {
		dir := filepath.Join(vectorsDir, v.Name)
		args := []string{dir, "--key", filepath.Join(vectorsDir, v.Keys)}
		if v.Remembered != "" {
			args = append(args, "--remembered", filepath.Join(dir, v.Remembered))
		}
		if v.Commit != "" {
			args = append(args, "--commit", filepath.Join(dir, v.Commit))
		}
		if v.Closed {
			args = append(args, "--closed")
		}
		if v.Witnesses > 0 {
			args = append(args, "--witnesses", "1")
		}
		code, out, errs := verifyCommand(args...)
		if v.Label != "" {
			if code != exitFailed || !strings.HasPrefix(out, "failed: "+v.Label) {
				t.Errorf("%s: code %d, %q, %q; want label %s", v.Name, code, out, errs, v.Label)
			}
		} else if code != exitVerified || !strings.HasPrefix(out, "verified\n") || !strings.Contains(out, v.Chain) {
			t.Errorf("%s: code %d, %q, %q", v.Name, code, out, errs)
		}
		if v.Label == "" && !v.Protected && !strings.Contains(out, "does not protect against the log's operator") {
			t.Errorf("%s: does not say against whom it does not protect:\n%s", v.Name, out)
		}
		code, out, _ = verifyCommand(append(args, "--json")...)
		var object struct {
			Verified bool   `json:"verified"`
			Label    string `json:"label"`
			Chain    string `json:"chain"`
		}
		if err := json.Unmarshal([]byte(out), &object); err != nil {
			t.Errorf("%s: %v in %q", v.Name, err, out)
		}
		if object.Verified != (v.Label == "") || object.Label != v.Label || object.Chain != v.Chain || (code == exitVerified) != object.Verified {
			t.Errorf("%s: code %d, %+v", v.Name, code, object)
		}
	}
}

func TestZipArchive(t *testing.T) {
	name := filepath.Join(t.TempDir(), "bundle.zip")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	z := zip.NewWriter(f)
	if err := z.AddFS(os.DirFS(filepath.Join(vectorsDir, "good-closed"))); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	keys := filepath.Join(vectorsDir, "keys.txt")
	if code, out, errs := verifyCommand("--key", keys, name, "--change", "chg-good"); code != exitVerified {
		t.Errorf("code %d, %q, %q", code, out, errs)
	}
	if code, out, _ := verifyCommand("--key", keys, name, "--change", "chg-other"); code != exitFailed || !strings.Contains(out, "wrong_change") {
		t.Errorf("another Change: code %d, %q", code, out)
	}
}

func TestUsage(t *testing.T) {
	good, keys := filepath.Join(vectorsDir, "good-closed"), filepath.Join(vectorsDir, "keys.txt")
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string][]string{
		"nothing":                  {},
		"no key":                   {good},
		"no bundle":                {"--key", keys},
		"two bundles":              {good, good, "--key", keys},
		"an unknown flag":          {good, "--key", keys, "--trust-me"},
		"a key file that is not":   {good, "--key", filepath.Join(good, "bundle.json")},
		"a missing key file":       {good, "--key", filepath.Join(good, "none")},
		"a missing bundle":         {filepath.Join(good, "none"), "--key", keys},
		"a bundle that is no zip":  {keys, "--key", keys},
		"an ill-formed change":     {good, "--key", keys, "--change", "A B"},
		"less than no witness":     {good, "--key", keys, "--witnesses", "-1"},
		"an empty remembered file": {good, "--key", keys, "--remembered", empty},
		"a commit with no trailer": {good, "--key", keys, "--commit", empty},
	} {
		code, out, errs := verifyCommand(args...)
		if code != exitUsage || out != "" || errs == "" {
			t.Errorf("%s: code %d, %q, %q", name, code, out, errs)
		}
	}
	if code, out, _ := verifyCommand("--help"); code != exitVerified || !strings.HasPrefix(out, "usage: numi-verify") {
		t.Errorf("help: code %d, %q", code, out)
	}
}
