package image_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/host/image"
)

func build(t *testing.T, store string) image.Image {
	t.Helper()
	img, err := image.Build(t.Context(), image.Spec{Store: store, Progress: func(s string) { t.Log(s) }})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// P-152: the image is the one held under its digest; a flipped byte, an added
// or a missing file, a changed list or manifest, and an unknown digest are
// refused.
func TestImageIsItsDigest_P152(t *testing.T) {
	store := t.TempDir()
	img := build(t, store)
	if img.Files < 100 || img.Bytes < 1<<20 {
		t.Fatalf("image has %d files and %d bytes: not a userland", img.Files, img.Bytes)
	}
	if again := build(t, t.TempDir()); again.Digest != img.Digest {
		t.Errorf("a second build has digest %s, want %s", again.Digest, img.Digest)
	}
	passwd := filepath.Join(img.Dir, "rootfs/etc/passwd")
	tampering := []struct {
		name string
		do   func() error
		undo func() error
	}{
		{"a flipped byte", func() error { return flip(passwd) }, func() error { return flip(passwd) }},
		{"a changed mode", func() error { return os.Chmod(passwd, 0o666) }, func() error { return os.Chmod(passwd, 0o644) }},
		{"an added file", func() error { return os.WriteFile(passwd+"2", nil, 0o644) }, func() error { return os.Remove(passwd + "2") }},
		{"a missing file", func() error { return os.Rename(passwd, filepath.Join(store, "x")) }, func() error { return os.Rename(filepath.Join(store, "x"), passwd) }},
		{"a changed list", func() error { return flip(filepath.Join(img.Dir, "files")) }, func() error { return flip(filepath.Join(img.Dir, "files")) }},
		{"a changed manifest", func() error { return flip(filepath.Join(img.Dir, "manifest.json")) }, func() error { return flip(filepath.Join(img.Dir, "manifest.json")) }},
	}
	for _, tc := range tampering {
		t.Run(tc.name, func(t *testing.T) {
			if err := tc.do(); err != nil {
				t.Fatal(err)
			}
			if _, err := image.Verify(t.Context(), store, img.Digest); err == nil {
				t.Error("the image still passes")
			}
			if err := tc.undo(); err != nil {
				t.Fatal(err)
			}
			if _, err := image.Verify(t.Context(), store, img.Digest); err != nil {
				t.Errorf("undone, the image is refused: %v", err)
			}
		})
	}
	if _, err := image.Verify(t.Context(), store, digest.Of([]byte("other"))); !errors.Is(err, image.ErrNotHeld) {
		t.Errorf("unknown digest: got %v, want ErrNotHeld", err)
	}
}

// P-153: nothing that could pull an image is linked.
func TestNoRegistryClientIsLinked_P153(t *testing.T) {
	out, err := exec.CommandContext(context.Background(), "go", "list", "-deps", "github.com/numinance/numinance/internal/host/image").Output()
	if err != nil {
		t.Fatal(err)
	}
	for pkg := range strings.Lines(string(out)) {
		if strings.Contains(pkg, "pkg/v1/remote") || strings.Contains(pkg, "containerd/remotes") {
			t.Errorf("linked: %s", pkg)
		}
	}
}

func flip(p string) error {
	b, err := os.ReadFile(p)
	if err != nil {
		return err
	}
	b[len(b)/2] ^= 1
	return os.WriteFile(p, b, 0o644)
}
