package gvisor

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A snapshot keeps every file's content whatever name of it the runtime wrote
// first, and nothing of what is skipped, outside or hidden.
func TestFilterSnapshot(t *testing.T) {
	raw := filepath.Join(t.TempDir(), "raw.tar")
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	for _, e := range []struct {
		kind       byte
		name, body string
	}{
		{tar.TypeDir, "./", ""},
		{tar.TypeDir, "./home/agent/", ""},
		{tar.TypeReg, "./home/agent/shared", "from home"},
		{tar.TypeReg, "./home/agent/private", "private"},
		{tar.TypeDir, "./workspace/", ""},
		{tar.TypeChar, "./workspace/.git/config.lock", ""},
		{tar.TypeReg, "./workspace/.git/object", "object"},
		{tar.TypeLink, "./workspace/hidden", "./workspace/.git/config.lock"},
		{tar.TypeLink, "./workspace/hidden2", "./workspace/hidden"},
		{tar.TypeLink, "./workspace/from-git", "./workspace/.git/object"},
		{tar.TypeLink, "./workspace/from-git-too", "./workspace/.git/object"},
		{tar.TypeLink, "./workspace/from-home", "./home/agent/shared"},
		{tar.TypeReg, "./workspace/a", "a"},
		{tar.TypeLink, "./workspace/b", "./workspace/a"},
		{tar.TypeSymlink, "./workspace/s", "/etc/shadow"},
		{tar.TypeFifo, "./workspace/fifo", ""},
		{tar.TypeReg, "./workspaces/other", "no"},
	} {
		h := &tar.Header{Typeflag: e.kind, Name: e.name, Mode: 0o644}
		switch e.kind {
		case tar.TypeReg:
			h.Size = int64(len(e.body))
		case tar.TypeLink, tar.TypeSymlink:
			h.Linkname = e.body
		}
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if e.kind == tar.TypeReg {
			io.WriteString(tw, e.body)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(raw, buf.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := filterSnapshot(&out, raw, []part{{dir: "workspace"}}, []string{".git"}); err != nil {
		t.Fatal(err)
	}
	var got []string
	tr := tar.NewReader(&out)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(tr)
		got = append(got, fmt.Sprintf("%c %s %s%s", h.Typeflag, h.Name, h.Linkname, body))
	}
	want := []string{
		"5 ./ ", "0 ./from-git object", "1 ./from-git-too ./from-git", "0 ./from-home from home",
		"0 ./a a", "1 ./b ./a", "2 ./s /etc/shadow", "6 ./fifo ",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestPlainNames(t *testing.T) {
	for name, want := range map[string]string{"./": ".", "./a": "a", "./a/b/": "a/b"} {
		if got, err := plainName(name); err != nil || got != want {
			t.Errorf("%q: %q, %v", name, got, err)
		}
	}
	for _, name := range []string{"", "a", "/a", "../a", "./../a", "./a/../../b", ".//a", "./a//b", "./a/./b", "./a\x00b", ".\\a"} {
		if got, err := plainName(name); err == nil {
			t.Errorf("%q was taken as %q", name, got)
		}
	}
}
