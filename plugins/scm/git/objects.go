package git

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
)

// maxPack bounds a pack that is received, in bytes.
const maxPack = 4 << 30

// putRevision stores a pack of the commit, its trees and blobs, without
// history, with the host.
func (s *server) putRevision(ctx context.Context, r *repository, revision string) (*pluginv1.BlobRef, error) {
	list, err := r.git.output(ctx, nil, "rev-list", "--objects", "--no-walk", "--no-object-names", "--end-of-options", revision)
	if err != nil {
		return nil, failed("list objects", err)
	}
	pr, pw := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := r.git.run(ctx, strings.NewReader(list), pw, "pack-objects", "--stdout", "-q")
		pw.CloseWithError(err)
		packed <- err
	}()
	ref, err := s.host.PutBlob(ctx, pr, packType)
	pr.CloseWithError(errors.New("the host took no more"))
	if packErr := <-packed; packErr != nil && err == nil {
		err = packErr
	}
	if err != nil {
		return nil, failed("store the objects of the revision", err)
	}
	return ref, nil
}

// receive takes the pack behind ref into quarantine, checks it and that
// revision needs nothing that is not there, and only then into the repository.
// Without a pack, revision must be there. The repository must be locked.
func (s *server) receive(ctx context.Context, r *repository, ref *pluginv1.BlobRef, revision string) error {
	if ref.GetDigest() == "" {
		return r.mustCommit(ctx, revision)
	}
	if ref.GetSizeBytes() > maxPack {
		return status.Errorf(codes.ResourceExhausted, "pack of %d bytes, at most %d", ref.GetSizeBytes(), int64(maxPack))
	}
	quarantine, err := os.MkdirTemp(r.state, "quarantine-*")
	if err != nil {
		return failed("receive objects", err)
	}
	defer os.RemoveAll(quarantine)
	objects := filepath.Join(r.git.dir, "objects")
	git := r.git.in("GIT_OBJECT_DIRECTORY="+quarantine, alternates(objects))
	pack, err := s.host.GetBlob(ctx, ref)
	if err != nil {
		return err
	}
	defer pack.Close()
	// What git takes for the end may come before the pack's own end; whole
	// reads on to the verdict over its digest.
	whole := &drain{r: pack}
	if err := git.run(ctx, whole, io.Discard, "index-pack", "--stdin", "--strict", "--fsck-objects", "--max-input-size=4294967296"); err != nil {
		if whole.err != nil {
			return failed("receive objects", whole.err)
		}
		return status.Errorf(codes.InvalidArgument, "objects: the pack is refused: %v", err)
	}
	if _, err := io.Copy(io.Discard, whole); err != nil {
		return failed("receive objects", err)
	}
	if kind, err := git.line(ctx, "cat-file", "-t", revision); err != nil || kind != "commit" {
		return status.Errorf(codes.InvalidArgument, "objects: the pack and the repository hold no commit %s", revision)
	}
	if err := git.run(ctx, nil, io.Discard, "rev-list", "--objects", "--quiet", revision, "--not", "--all"); err != nil {
		return status.Errorf(codes.InvalidArgument, "objects: %s needs objects that neither the pack nor the repository holds", revision)
	}
	return adopt(quarantine, objects)
}

func alternates(objects string) string {
	return `GIT_ALTERNATE_OBJECT_DIRECTORIES="` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(objects) + `"`
}

// adopt moves packs, which git wrote and synced, into the repository. The
// index comes last: a pack without one is not seen.
func adopt(quarantine, objects string) error {
	from, to := filepath.Join(quarantine, "pack"), filepath.Join(objects, "pack")
	entries, err := os.ReadDir(from)
	if err != nil {
		return failed("adopt objects", err)
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return failed("adopt objects", err)
	}
	for _, last := range []bool{false, true} {
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), "pack-") || strings.HasSuffix(e.Name(), ".keep") || strings.HasSuffix(e.Name(), ".idx") != last {
				continue
			}
			if err := os.Rename(filepath.Join(from, e.Name()), filepath.Join(to, e.Name())); err != nil {
				return failed("adopt objects", err)
			}
		}
	}
	if err := syncDir(to); err != nil {
		return failed("adopt objects", err)
	}
	return nil
}

// drain remembers why reading failed, which git cannot tell.
type drain struct {
	r   io.Reader
	err error
}

func (d *drain) Read(p []byte) (int, error) {
	n, err := d.r.Read(p)
	if err != nil && err != io.EOF {
		d.err = err
	}
	return n, err
}
