// Package image builds, keeps and checks the images that sandboxes are made
// from. They are OCI images under their manifest digest, packed from this
// host's own files and never pulled: nothing of a registry client is linked
// (P-152, P-153). The command line builds them, contexts/sandbox checks them.
package image

import (
	"archive/tar"
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/numinance/numinance/internal/core/digest"
)

// FilesAnnotation is the manifest annotation that holds the digest of the
// image's file list, which ties every unpacked byte to the image digest.
const FilesAnnotation = "dev.numinance.files"

// The fixed time of every entry, so that the same files make the same digest.
var epoch = time.Unix(1_000_000_000, 0).UTC()

// Image is one image in a store, unpacked.
type Image struct {
	Digest digest.Digest `json:"digest"`
	Dir    string        `json:"dir"` // holds manifest.json, files and rootfs
	Files  int           `json:"files"`
	Bytes  int64         `json:"bytes"`
}

// Listed is one line of an image's file list.
type Listed struct {
	Path string `json:"path"`           // below the root, with slashes
	Type string `json:"type"`           // dir, file or link
	Mode uint32 `json:"mode,omitempty"` // permission bits
	Size int64  `json:"size,omitempty"`
	Hash string `json:"sha256,omitempty"` // 64 hex digits
	Link string `json:"link,omitempty"`
}

// Build packs this host's files as s says into an OCI layout in s.Store and
// unpacks them beside it. It needs neither root nor a network, and the same
// files give the same digest.
func Build(ctx context.Context, s Spec) (Image, error) {
	say := s.Progress
	if say == nil {
		say = func(string) {}
	}
	if err := os.MkdirAll(s.Store, 0o755); err != nil {
		return Image{}, fmt.Errorf("make the image store: %w", err)
	}
	c, err := s.collect(ctx, say)
	if err != nil {
		return Image{}, fmt.Errorf("build image: %w", err)
	}
	work, err := os.MkdirTemp(s.Store, ".build-")
	if err != nil {
		return Image{}, fmt.Errorf("build image: %w", err)
	}
	defer os.RemoveAll(work)
	img, err := pack(ctx, c, s.Store, work, say)
	if err != nil {
		return Image{}, fmt.Errorf("build image: %w", err)
	}
	return img, nil
}

func pack(ctx context.Context, c *collector, store, work string, say func(string)) (Image, error) {
	names := c.names()
	say(fmt.Sprintf("packing %d entries", len(names)))
	layerFile := filepath.Join(work, "layer.tar")
	list, layerDigest, err := writeLayer(ctx, c, names, layerFile)
	if err != nil {
		return Image{}, err
	}
	listBytes, err := encodeList(list)
	if err != nil {
		return Image{}, err
	}
	layer, err := keepLayer(store, layerFile, layerDigest)
	if err != nil {
		return Image{}, err
	}
	manifest, sum, err := writeLayout(store, layer, digest.Of(listBytes))
	if err != nil {
		return Image{}, err
	}

	say("unpacking")
	out := filepath.Join(work, "image")
	if err := os.MkdirAll(filepath.Join(out, "rootfs"), 0o755); err != nil {
		return Image{}, err
	}
	if err := unpack(ctx, layer.path, filepath.Join(out, "rootfs")); err != nil {
		return Image{}, err
	}
	for name, b := range map[string][]byte{"manifest.json": manifest, "files": listBytes} {
		if err := os.WriteFile(filepath.Join(out, name), b, 0o644); err != nil {
			return Image{}, err
		}
	}
	dir := Dir(store, sum)
	if _, err := os.Stat(dir); err == nil {
		// Already there. Bytes that no longer match are replaced, not trusted.
		if img, err := Verify(ctx, store, sum); err == nil {
			return img, nil
		}
		if err := os.RemoveAll(dir); err != nil {
			return Image{}, fmt.Errorf("remove the damaged image: %w", err)
		}
	}
	if err := os.Rename(out, dir); err != nil {
		return Image{}, err
	}
	say("checking")
	return Verify(ctx, store, sum)
}

// Dir is where an image lies in a store.
func Dir(store string, d digest.Digest) string { return filepath.Join(store, d.Hex()) }

// writeLayer writes the entries as a tar and lists them.
func writeLayer(ctx context.Context, c *collector, names []string, to string) ([]Listed, v1.Hash, error) {
	f, err := os.Create(to)
	if err != nil {
		return nil, v1.Hash{}, err
	}
	defer f.Close()
	sum := sha256.New()
	buf := bufio.NewWriterSize(io.MultiWriter(f, sum), 1<<20)
	tw := tar.NewWriter(buf)
	list := make([]Listed, 0, len(names))
	for _, name := range names {
		if err := ctx.Err(); err != nil {
			return nil, v1.Hash{}, err
		}
		l, err := writeEntry(tw, name, c.entries[name])
		if err != nil {
			return nil, v1.Hash{}, fmt.Errorf("pack %s: %w", name, err)
		}
		list = append(list, l)
	}
	if err := errors.Join(tw.Close(), buf.Flush(), f.Sync()); err != nil {
		return nil, v1.Hash{}, fmt.Errorf("write layer: %w", err)
	}
	return list, v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum.Sum(nil))}, nil
}

func writeEntry(tw *tar.Writer, name string, e entry) (Listed, error) {
	h := &tar.Header{Name: name, ModTime: epoch, Format: tar.FormatPAX}
	l := Listed{Path: name}
	switch {
	case e.dir:
		h.Typeflag, h.Name, h.Mode = tar.TypeDir, name+"/", 0o755
		l.Type, l.Mode = "dir", 0o755
		return l, tw.WriteHeader(h)
	case e.link != "":
		h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, e.link, 0o777
		l.Type, l.Link = "link", e.link
		return l, tw.WriteHeader(h)
	}
	h.Typeflag, h.Mode = tar.TypeReg, 0o644
	if e.exec {
		h.Mode = 0o755
	}
	content := e.content
	if e.source != "" {
		b, err := os.ReadFile(e.source)
		if err != nil {
			return l, err
		}
		content = b
	}
	h.Size = int64(len(content))
	if err := tw.WriteHeader(h); err != nil {
		return l, err
	}
	l.Type, l.Mode, l.Size, l.Hash = "file", uint32(h.Mode), h.Size, digest.Of(content).Hex()
	_, err := tw.Write(content)
	return l, err
}

func encodeList(list []Listed) ([]byte, error) {
	var out []byte
	for _, l := range list {
		b, err := json.Marshal(l)
		if err != nil {
			return nil, err
		}
		out = append(append(out, b...), '\n')
	}
	return out, nil
}

// keepLayer moves the tar to its place among the layout's blobs.
func keepLayer(store, from string, sum v1.Hash) (*fileLayer, error) {
	dir := filepath.Join(store, "oci", "blobs", "sha256")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	st, err := os.Stat(from)
	if err != nil {
		return nil, err
	}
	to := filepath.Join(dir, sum.Hex)
	if err := os.Rename(from, to); err != nil {
		return nil, err
	}
	return &fileLayer{path: to, hash: sum, size: st.Size()}, nil
}

// writeLayout adds the image of the one layer to the store's OCI layout and
// returns its manifest and digest.
func writeLayout(store string, layer *fileLayer, files digest.Digest) ([]byte, digest.Digest, error) {
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.ConfigFile(base, &v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH, RootFS: v1.RootFS{Type: "layers"}})
	if err != nil {
		return nil, "", fmt.Errorf("image config: %w", err)
	}
	if img, err = mutate.AppendLayers(img, layer); err != nil {
		return nil, "", fmt.Errorf("image layer: %w", err)
	}
	img, ok := mutate.Annotations(img, map[string]string{FilesAnnotation: string(files)}).(v1.Image)
	if !ok {
		return nil, "", errors.New("image annotations: not an image any more")
	}
	raw, err := img.RawManifest()
	if err != nil {
		return nil, "", fmt.Errorf("image manifest: %w", err)
	}
	root := filepath.Join(store, "oci")
	p, err := layout.FromPath(root)
	if errors.Is(err, fs.ErrNotExist) {
		p, err = layout.Write(root, empty.Index)
	}
	if err != nil {
		return nil, "", fmt.Errorf("open the image layout: %w", err)
	}
	hash, err := img.Digest()
	if err != nil {
		return nil, "", fmt.Errorf("image digest: %w", err)
	}
	keep := func(d v1.Descriptor) bool { return d.Digest == hash }
	if err := p.ReplaceImage(img, keep); err != nil {
		return nil, "", fmt.Errorf("write the image layout: %w", err)
	}
	return raw, digest.Digest(hash.String()), nil
}

// fileLayer is an uncompressed layer that lies in a file. Compressing would
// take longer than everything else, for bytes that never leave this host.
type fileLayer struct {
	path string
	hash v1.Hash
	size int64
}

func (l *fileLayer) Digest() (v1.Hash, error)             { return l.hash, nil }
func (l *fileLayer) DiffID() (v1.Hash, error)             { return l.hash, nil }
func (l *fileLayer) Size() (int64, error)                 { return l.size, nil }
func (l *fileLayer) MediaType() (types.MediaType, error)  { return types.OCIUncompressedLayer, nil }
func (l *fileLayer) Compressed() (io.ReadCloser, error)   { return os.Open(l.path) }
func (l *fileLayer) Uncompressed() (io.ReadCloser, error) { return os.Open(l.path) }
