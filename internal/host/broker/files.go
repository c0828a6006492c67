package broker

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/mod/sumdb/note"

	"github.com/numinance/numinance/internal/core/tlog"
)

const (
	logKeyFile  = "log.key"
	headKeyFile = "head.key"
	lastFile    = "log.last"

	maxFile = tlog.MaxCheckpoint
)

// closedDir makes dir, or checks that it is the runtime's alone.
func closedDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the directory for keys: %w", err)
	}
	st, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("look at the directory for keys: %w", err)
	}
	owner, ok := st.Sys().(*syscall.Stat_t)
	if !st.IsDir() || st.Mode().Perm()&0o077 != 0 || !ok || int(owner.Uid) != os.Geteuid() {
		return fmt.Errorf("%s must be a directory of this user with mode 0700, so that nobody else reads the keys", dir)
	}
	return nil
}

// loadKey reads a note signer key from a 0600 file, or makes one. Errors never
// hold what the file holds.
func loadKey(dir, file, name string) (key, error) {
	text, err := readClosed(filepath.Join(dir, file))
	if errors.Is(err, os.ErrNotExist) {
		private, _, err := note.GenerateKey(rand.Reader, name)
		if err != nil {
			return key{}, fmt.Errorf("make a key named %q: %w", name, err)
		}
		text = []byte(private + "\n")
		if err := writeDurably(dir, file, text); err != nil {
			return key{}, err
		}
	} else if err != nil {
		return key{}, err
	}
	skey := strings.TrimSuffix(string(text), "\n")
	signer, err := note.NewSigner(skey)
	if err != nil {
		return key{}, fmt.Errorf("%s holds no signer key", file)
	}
	if signer.Name() != name {
		return key{}, fmt.Errorf("%s holds the key of %q, wanted is %q", file, signer.Name(), name)
	}
	// The key's data is the algorithm, 1, and the 32-byte seed.
	parts := strings.SplitN(skey, "+", 5) // base64 may hold a '+' of its own
	raw, err := base64.StdEncoding.DecodeString(parts[len(parts)-1])
	if err != nil || len(raw) != 1+ed25519.SeedSize || raw[0] != 1 {
		return key{}, fmt.Errorf("%s holds no Ed25519 key", file)
	}
	private := ed25519.NewKeyFromSeed(raw[1:])
	verifier, err := note.NewEd25519VerifierKey(name, private.Public().(ed25519.PublicKey))
	if err != nil {
		return key{}, fmt.Errorf("public half of %s: %w", file, err)
	}
	return key{private: private, signer: signer, verifier: verifier}, nil
}

// readClosed reads a file that is closed to others; a link is not followed.
func readClosed(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() || st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s must be a file with mode 0600, it has %v: make it so, and replace the key if others could read it", path, st.Mode())
	}
	return io.ReadAll(io.LimitReader(f, maxFile))
}

// readLast returns the text that the log's key signed last, nil if none.
func readLast(dir string) ([]byte, error) {
	b, err := readClosed(filepath.Join(dir, lastFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the last checkpoint: %w", err)
	}
	return b, nil
}

// writeDurably replaces a file of mode 0600; when it returns nil, the file and
// its name survive a power cut.
func writeDurably(dir, file string, b []byte) (err error) {
	tmp, err := os.CreateTemp(dir, ".tmp-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	_, err = tmp.Write(b)
	if err == nil {
		err = tmp.Sync()
	}
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp.Name(), filepath.Join(dir, file))
	}
	if err != nil {
		os.Remove(tmp.Name())
		return fmt.Errorf("write %s: %w", file, err)
	}
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	return nil
}
