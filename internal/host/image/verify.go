package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/numinance/numinance/internal/core/digest"
)

// ErrNotHeld means the store has no image of that digest.
var ErrNotHeld = errors.New("this runner holds no such image; build one with: numi image build --from-host")

// Bounds of an unpacked layer.
const (
	maxEntries = 200_000
	maxBytes   = 8 << 30
)

// unpack writes a layer's entries below root, which must be empty. It knows
// directories, files and symbolic links only; anything else is an error.
func unpack(ctx context.Context, layer, root string) error {
	f, err := os.Open(layer)
	if err != nil {
		return fmt.Errorf("open layer: %w", err)
	}
	defer f.Close()
	r, err := os.OpenRoot(root)
	if err != nil {
		return fmt.Errorf("open the image's root: %w", err)
	}
	defer r.Close()
	tr := tar.NewReader(bufio.NewReaderSize(f, 1<<20))
	var total int64
	for n := 0; ; n++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read layer: %w", err)
		}
		total += h.Size
		if n >= maxEntries || total > maxBytes {
			return fmt.Errorf("layer has more than %d entries or %d bytes", maxEntries, int64(maxBytes))
		}
		name := strings.TrimSuffix(h.Name, "/")
		if !fs.ValidPath(name) {
			return fmt.Errorf("layer entry %q: not a plain path", h.Name)
		}
		mode := fs.FileMode(h.Mode) & 0o777
		switch h.Typeflag {
		case tar.TypeDir:
			// Chmod as well: the modes are listed, whatever this process's mask is.
			if err = r.MkdirAll(name, mode); err == nil {
				err = r.Chmod(name, mode)
			}
		case tar.TypeSymlink:
			err = r.Symlink(h.Linkname, name)
		case tar.TypeReg:
			err = writeFile(r, name, mode, tr)
		default:
			err = fmt.Errorf("entry type %q is not allowed in an image", h.Typeflag)
		}
		if err != nil {
			return fmt.Errorf("unpack %s: %w", name, err)
		}
	}
}

func writeFile(r *os.Root, name string, mode fs.FileMode, from io.Reader) error {
	f, err := r.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, from)
	return errors.Join(err, f.Chmod(mode), f.Close())
}

// Verify checks every byte of an unpacked image against its digest: manifest,
// file list, and each listed file, with nothing missing and nothing added.
func Verify(ctx context.Context, store string, d digest.Digest) (Image, error) {
	dir := Dir(store, d)
	list, err := readList(dir, d)
	if err != nil {
		return Image{}, err
	}
	img := Image{Digest: d, Dir: dir, Files: len(list)}
	root := filepath.Join(dir, "rootfs")
	want := make(map[string]Listed, len(list))
	for _, l := range list {
		want[l.Path] = l
	}
	err = filepath.WalkDir(root, func(p string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil || rel == "." {
			return err
		}
		name := filepath.ToSlash(rel)
		l, ok := want[name]
		if !ok {
			return fmt.Errorf("%s is not part of the image", name)
		}
		delete(want, name)
		img.Bytes += l.Size
		if err := same(p, l); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
	if err != nil {
		return Image{}, fmt.Errorf("image %s does not match its digest; build it again: %w", d, err)
	}
	for name := range want {
		return Image{}, fmt.Errorf("image %s does not match its digest; build it again: %s is missing", d, name)
	}
	return img, nil
}

func same(p string, l Listed) error {
	st, err := os.Lstat(p)
	if err != nil {
		return err
	}
	switch l.Type {
	case "dir":
		if !st.IsDir() || uint32(st.Mode().Perm()) != l.Mode {
			return fmt.Errorf("is %v", st.Mode())
		}
		return nil
	case "link":
		to, err := os.Readlink(p)
		if err != nil {
			return err
		}
		if to != l.Link {
			return fmt.Errorf("links to %q", to)
		}
		return nil
	case "file":
		if !st.Mode().IsRegular() || uint32(st.Mode().Perm()) != l.Mode || st.Size() != l.Size {
			return fmt.Errorf("is %v with %d bytes", st.Mode(), st.Size())
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
			return errors.New("its content changed")
		}
		return nil
	default:
		return fmt.Errorf("unknown type %q in the file list", l.Type)
	}
}

// readList reads the file list, checked against the manifest, checked against
// the digest.
func readList(dir string, d digest.Digest) ([]Listed, error) {
	if !d.Valid() {
		return nil, fmt.Errorf("image digest %q is malformed", string(d))
	}
	manifest, err := os.ReadFile(filepath.Join(dir, "manifest.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("image %s: %w", d, ErrNotHeld)
	}
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", d, err)
	}
	if digest.Of(manifest) != d {
		return nil, fmt.Errorf("image %s: its manifest was changed", d)
	}
	var m struct {
		Annotations map[string]string `json:"annotations"`
	}
	if err := json.Unmarshal(manifest, &m); err != nil {
		return nil, fmt.Errorf("image %s: manifest: %w", d, err)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "files"))
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", d, err)
	}
	if string(digest.Of(raw)) != m.Annotations[FilesAnnotation] {
		return nil, fmt.Errorf("image %s: its file list was changed", d)
	}
	var list []Listed
	for line := range bytes.Lines(raw) {
		var l Listed
		if err := json.Unmarshal(line, &l); err != nil {
			return nil, fmt.Errorf("image %s: file list: %w", d, err)
		}
		if !fs.ValidPath(l.Path) || path.Clean(l.Path) != l.Path {
			return nil, fmt.Errorf("image %s: file list names %q", d, l.Path)
		}
		list = append(list, l)
	}
	return list, nil
}

// List returns the digests of the images in a store, sorted.
func List(store string) ([]digest.Digest, error) {
	entries, err := os.ReadDir(store)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	var out []digest.Digest
	for _, e := range entries {
		if d, err := digest.Parse("sha256:" + e.Name()); err == nil && e.IsDir() {
			out = append(out, d)
		}
	}
	slices.Sort(out)
	return out, nil
}

// Keeper answers whether images are held, checking each in full once; later
// damage is the provider's to find, which checks at every Create.
type Keeper struct {
	Store string

	mu      sync.Mutex
	checked map[digest.Digest]bool // guarded by mu
}

// Held returns nil only if the store holds the image unchanged (P-152).
func (k *Keeper) Held(ctx context.Context, d digest.Digest) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.checked[d] {
		return nil
	}
	if _, err := Verify(ctx, k.Store, d); err != nil {
		return err
	}
	if k.checked == nil {
		k.checked = map[digest.Digest]bool{}
	}
	k.checked[d] = true
	return nil
}
