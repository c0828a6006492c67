package blob_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/host/blob"
)

func open(t *testing.T, c blob.Config) *blob.Store {
	t.Helper()
	if c.Dir == "" {
		c.Dir = t.TempDir()
	}
	if c.Quota == 0 {
		c.Quota = 1 << 20
	}
	s, err := blob.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func files(t *testing.T, dir string) (out []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			out = append(out, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestPutThenOpen(t *testing.T) {
	dir := t.TempDir()
	s := open(t, blob.Config{Dir: dir})
	body := bytes.Repeat([]byte("numinance "), 20_000)
	ref, err := s.Put(t.Context(), iotest.OneByteReader(bytes.NewReader(body[:100])), 100)
	if err != nil {
		t.Fatal(err)
	}
	if want := (blob.Ref{Digest: digest.Of(body[:100]), Size: 100}); ref != want {
		t.Fatalf("got %v, want %v", ref, want)
	}
	if ref, err = s.PutBytes(t.Context(), body); err != nil {
		t.Fatal(err)
	}
	again, err := s.PutBytes(t.Context(), body)
	if err != nil || again != ref {
		t.Fatalf("second put: %v, %v", again, err)
	}
	if got, want := s.Used(), int64(100+len(body)); got != want {
		t.Errorf("used %d, want %d: the same bytes count once", got, want)
	}
	r, err := s.Open(ref.Digest)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, body) {
		t.Fatalf("read %d bytes, %v", len(got), err)
	}
	got := files(t, dir)
	if len(got) != 2 {
		t.Fatalf("files %v, want two blobs and no temporary file", got)
	}
	for _, name := range got {
		if info, err := os.Stat(name); err != nil || info.Mode().Perm() != 0o444 {
			t.Errorf("%s: mode %v, %v, want 0444", name, info.Mode(), err)
		}
	}
	if reopened := open(t, blob.Config{Dir: dir}); reopened.Used() != s.Used() {
		t.Errorf("reopened store counts %d, want %d", reopened.Used(), s.Used())
	}
}

func TestPutRefusesAndLeavesNothing(t *testing.T) {
	broken := errors.New("source broke")
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	for _, c := range []struct {
		name  string
		ctx   context.Context
		r     io.Reader
		limit int64
		want  error
	}{
		{"over its limit", t.Context(), strings.NewReader("123456"), 5, blob.ErrTooLarge},
		{"negative limit", t.Context(), strings.NewReader(""), -1, blob.ErrTooLarge},
		{"over the quota", t.Context(), strings.NewReader(strings.Repeat("x", 101)), 1000, blob.ErrQuota},
		{"source fails", t.Context(), io.MultiReader(strings.NewReader("abc"), iotest.ErrReader(broken)), 10, broken},
		{"cancelled", cancelled, strings.NewReader("abc"), 10, context.Canceled},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, blob.Config{Dir: dir, Quota: 100})
			ref, err := s.Put(c.ctx, c.r, c.limit)
			if !errors.Is(err, c.want) || ref != (blob.Ref{}) {
				t.Errorf("got %v, %v; want %v", ref, err, c.want)
			}
			if got := files(t, dir); len(got) != 0 {
				t.Errorf("left behind %v", got)
			}
			if s.Used() != 0 {
				t.Errorf("used %d after a refused put", s.Used())
			}
		})
	}
}

func TestCorruptBlobIsNeverReadAsGood(t *testing.T) {
	dir := t.TempDir()
	s := open(t, blob.Config{Dir: dir})
	ref, err := s.PutBytes(t.Context(), []byte("the right bytes"))
	if err != nil {
		t.Fatal(err)
	}
	path := files(t, dir)[0]
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("the wrong bytes"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Bytes(ref.Digest, 100); !errors.Is(err, blob.ErrCorrupt) {
		t.Errorf("reading changed bytes: %v, want ErrCorrupt", err)
	}
	if _, err := s.PutBytes(t.Context(), []byte("the right bytes")); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Bytes(ref.Digest, 100); err != nil || string(got) != "the right bytes" {
		t.Errorf("after a new put: %q, %v; want it repaired", got, err)
	}
}

func TestOpenUnknown(t *testing.T) {
	s := open(t, blob.Config{})
	for _, d := range []digest.Digest{digest.Of([]byte("absent")), "", "sha256:../../etc/passwd"} {
		if _, err := s.Open(d); !errors.Is(err, blob.ErrNotFound) {
			t.Errorf("open %q: %v, want ErrNotFound", d, err)
		}
	}
	ref, err := s.PutBytes(t.Context(), []byte("abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Bytes(ref.Digest, 5); !errors.Is(err, blob.ErrTooLarge) {
		t.Errorf("bytes over the limit: %v", err)
	}
	if err := s.Remove(ref.Digest); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Open(ref.Digest); !errors.Is(err, blob.ErrNotFound) || s.Used() != 0 {
		t.Errorf("after remove: %v, used %d", err, s.Used())
	}
}

type inline map[digest.Digest][]byte

func (i inline) Blob(_ context.Context, d digest.Digest) ([]byte, bool, error) {
	b, ok := i[d]
	return b, ok, nil
}

func TestInlineIsReadAndVerified(t *testing.T) {
	good, bad := digest.Of([]byte("good")), digest.Of([]byte("bad"))
	s := open(t, blob.Config{Inline: inline{good: []byte("good"), bad: []byte("changed")}})
	if got, err := s.Bytes(good, 10); err != nil || string(got) != "good" {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := s.Bytes(bad, 10); !errors.Is(err, blob.ErrCorrupt) {
		t.Errorf("changed inline bytes: %v, want ErrCorrupt", err)
	}
}

func TestAccount(t *testing.T) {
	a := open(t, blob.Config{}).Account(10)
	if _, err := a.Put(t.Context(), strings.NewReader("12345678"), 100); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Put(t.Context(), strings.NewReader("123"), 100); !errors.Is(err, blob.ErrQuota) {
		t.Errorf("beyond the account: %v, want ErrQuota", err)
	}
	if _, err := a.Put(t.Context(), strings.NewReader("12"), 2); err != nil {
		t.Errorf("a refused put must cost nothing: %v", err)
	}
}

func TestConcurrentPutsOfOneBlob(t *testing.T) {
	s := open(t, blob.Config{})
	body := bytes.Repeat([]byte("z"), 10_000)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			if _, err := s.PutBytes(t.Context(), body); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if s.Used() != int64(len(body)) {
		t.Errorf("used %d, want %d", s.Used(), len(body))
	}
}
