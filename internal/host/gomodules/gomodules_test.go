package gomodules_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/numinance/numinance/internal/host/gomodules"
)

// sum is the go.sum of a module that this repository itself depends on, so that
// the host's module cache holds it.
const sum = `golang.org/x/mod v0.43.0 h1:MFuq5J6s35W9D3IjkwyWc9vHh0nENOrt5K8Iof4ofmg=
golang.org/x/mod v0.43.0/go.mod h1:4ec1JnuyBz5+FIVhg86UsA39YG8BpnrZdJYSNHmGzHY=
`

func modcache(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOMODCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

func TestAssembledModulesBuildWithoutANetwork(t *testing.T) {
	dest := t.TempDir()
	missing, err := gomodules.Assemble(context.Background(), []byte(sum), modcache(t), dest)
	if err != nil || len(missing) > 0 {
		t.Fatalf("Assemble: missing %v, %v", missing, err)
	}
	src := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module example.com/x\n\ngo 1.26.0\n\nrequire golang.org/x/mod v0.43.0\n",
		"go.sum": sum,
		"x.go":   "package x\n\nimport \"golang.org/x/mod/semver\"\n\nvar V = semver.IsValid(\"v1.0.0\")\n",
	} {
		if err := os.WriteFile(filepath.Join(src, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("go", "vet", ".")
	cmd.Dir = src
	cmd.Env = append(os.Environ(), "GOPROXY=file://"+dest, "GOSUMDB=off", "GOFLAGS=-modcacherw", "GOMODCACHE="+t.TempDir())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build from the assembled modules: %v\n%s", err, out)
	}
}

func TestWhatIsNotHeldOrDiffersIsMissing(t *testing.T) {
	other := strings.Replace(sum, "h1:MFuq5J6s35W9", "h1:AAAAAAAAAAAA", 1)
	missing, err := gomodules.Assemble(context.Background(), []byte(other+"example.com/none v1.0.0 h1:x=\n"), modcache(t), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(missing, " "); got != "example.com/none@v1.0.0 golang.org/x/mod@v0.43.0" {
		t.Errorf("missing %q; a wrong hash and an absent module must both be", got)
	}
}

func TestMalformedSumIsRefused(t *testing.T) {
	for _, text := range []string{"a b", "../up v1.0.0 h1:x=", "golang.org/x/mod notaversion h1:x=", "golang.org/x/mod v0.43.0 sha256:x"} {
		if _, err := gomodules.Assemble(context.Background(), []byte(text), t.TempDir(), t.TempDir()); err == nil {
			t.Errorf("%q was accepted", text)
		}
	}
}
