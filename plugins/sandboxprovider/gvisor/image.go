package gvisor

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

// errNoImage means that the runner holds no image of that digest.
var errNoImage = errors.New("the runner holds no such image; build one with: numi image build --from-host")

// filesAnnotation ties the file list to the image's digest.
const filesAnnotation = "dev.numinance.files"

// images checks unpacked images against their digests. It trusts nothing it did
// not hash itself; a file is hashed again as soon as anything about it that the
// kernel keeps (inode, size, change time) differs from when it was hashed.
type images struct {
	dir string

	mu    sync.Mutex // guards known
	known map[string]identity
}

type identity struct {
	dev, ino     uint64
	size         int64
	ctime, mtime syscall.Timespec
	hash         string
}

func newImages(dir string) *images { return &images{dir: dir, known: map[string]identity{}} }

// rootfs returns the root of the image of that digest ("sha256:..."), every
// byte of it checked (P-152).
func (m *images) rootfs(digest string) (string, error) {
	hexSum, ok := strings.CutPrefix(digest, "sha256:")
	if raw, err := hex.DecodeString(hexSum); !ok || err != nil || len(raw) != 32 {
		return "", fmt.Errorf("image digest %q is malformed", digest)
	}
	dir := filepath.Join(m.dir, hexSum)
	manifest, err := os.ReadFile(filepath.Join(dir, "manifest.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", errNoImage
	}
	if err != nil {
		return "", err
	}
	if hashOf(manifest) != hexSum {
		return "", errors.New("the image's manifest was changed")
	}
	var doc struct {
		Annotations map[string]string `json:"annotations"`
	}
	if err := json.Unmarshal(manifest, &doc); err != nil {
		return "", fmt.Errorf("image manifest: %w", err)
	}
	list, err := os.ReadFile(filepath.Join(dir, "files"))
	if err != nil {
		return "", fmt.Errorf("image file list: %w", err)
	}
	if "sha256:"+hashOf(list) != doc.Annotations[filesAnnotation] {
		return "", errors.New("the image's file list was changed")
	}
	root := filepath.Join(dir, "rootfs")
	if err := m.tree(root, list); err != nil {
		return "", err
	}
	return root, nil
}

type listed struct {
	Path string `json:"path"`
	Type string `json:"type"`
	Mode uint32 `json:"mode"`
	Size int64  `json:"size"`
	Hash string `json:"sha256"`
	Link string `json:"link"`
}

func (m *images) tree(root string, list []byte) error {
	want := map[string]listed{}
	for line := range bytes.Lines(list) {
		var l listed
		if err := json.Unmarshal(line, &l); err != nil {
			return fmt.Errorf("image file list: %w", err)
		}
		want[l.Path] = l
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == root {
			return err
		}
		name := filepath.ToSlash(strings.TrimPrefix(p, root+"/"))
		l, ok := want[name]
		if !ok {
			return fmt.Errorf("image: %s does not belong to it", name)
		}
		delete(want, name)
		if err := m.same(p, d, l); err != nil {
			return fmt.Errorf("image: %s: %w", name, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for name := range want {
		return fmt.Errorf("image: %s is missing", name)
	}
	return nil
}

func (m *images) same(p string, d fs.DirEntry, l listed) error {
	st, err := d.Info()
	if err != nil {
		return err
	}
	switch {
	case l.Type == "dir" && st.IsDir() && uint32(st.Mode().Perm()) == l.Mode:
		return nil
	case l.Type == "link" && st.Mode().Type() == fs.ModeSymlink:
		to, err := os.Readlink(p)
		if err == nil && to != l.Link {
			err = errors.New("it links elsewhere")
		}
		return err
	case l.Type == "file" && st.Mode().IsRegular() && uint32(st.Mode().Perm()) == l.Mode && st.Size() == l.Size:
	default:
		return fmt.Errorf("its type, mode or size changed (%v)", st.Mode())
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return errors.New("the host does not say what file this is")
	}
	id := identity{dev: uint64(sys.Dev), ino: sys.Ino, size: st.Size(), ctime: sys.Ctim, mtime: sys.Mtim, hash: l.Hash}
	if m.known[p] == id {
		return nil
	}
	f, err := os.Open(p)
	if err != nil {
		return err
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return err
	}
	if hex.EncodeToString(sum.Sum(nil)) != l.Hash {
		delete(m.known, p)
		return errors.New("its content changed")
	}
	m.known[p] = id
	return nil
}

func hashOf(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
