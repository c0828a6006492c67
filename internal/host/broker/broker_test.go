package broker_test

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/note"

	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/tlog"
	"github.com/numinance/numinance/internal/host/broker"
)

const logName, headName = "log.example/test", "heads.example/test"

func open(t *testing.T, dir string) *broker.Broker {
	t.Helper()
	b, err := broker.Open(broker.Config{Dir: dir, Log: logName, Head: headName})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func checkpoint(origin string, size int64, root byte) []byte {
	return []byte(tlog.Checkpoint{Origin: origin, Size: size, Root: tlog.Hash{root}}.Text())
}

// The log's key signs growth of its own log only, also across restarts.
func TestSignCheckpoint(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "keys")
	b := open(t, dir)
	text := checkpoint(logName, 5, 1)
	sig, err := b.SignCheckpoint(t.Context(), text)
	if err != nil {
		t.Fatal(err)
	}
	if !ed25519.Verify(sig.PublicKey, text, sig.Signature) || sig.KeyName != logName {
		t.Fatalf("signature %x by %s does not verify", sig.Signature, sig.KeyName)
	}
	b = open(t, dir)
	v, err := note.NewVerifier(b.LogKey())
	if err != nil || !v.Verify(text, sig.Signature) {
		t.Fatalf("the key changed over a restart: %v", err)
	}
	for name, bad := range map[string][]byte{
		"smaller":        checkpoint(logName, 4, 1),
		"other root":     checkpoint(logName, 5, 2),
		"other origin":   checkpoint("evil.example", 6, 1),
		"head statement": []byte(chain.HeadDomain + "\nchg-1\n1\n" + string(digest.Of(nil)) + "\n"),
		"extension":      append(checkpoint(logName, 6, 1), "extra\n"...),
		"nothing":        nil,
	} {
		if _, err := b.SignCheckpoint(t.Context(), bad); err == nil {
			t.Errorf("%s: signed", name)
		}
	}
	for _, good := range [][]byte{text, checkpoint(logName, 6, 3)} {
		if _, err := b.SignCheckpoint(t.Context(), good); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
}

// The key that signs heads is another one and signs nothing else.
func TestHeadKeyIsAnother(t *testing.T) {
	b := open(t, filepath.Join(t.TempDir(), "keys"))
	if b.LogKey() == b.HeadKey() {
		t.Fatal("one key for both")
	}
	signed, err := chain.SignHead(chain.Head{Change: "chg-1", Length: 3, Digest: digest.Of([]byte("x"))}, b.Heads())
	if err != nil {
		t.Fatal(err)
	}
	v, err := note.NewVerifier(b.HeadKey())
	if err != nil {
		t.Fatal(err)
	}
	if h, name, err := chain.OpenHead(signed, v); err != nil || h.Length != 3 || name != headName {
		t.Fatalf("got %v, %s, %v", h, name, err)
	}
	if _, err := b.Heads().Sign(checkpoint(logName, 1, 1)); err == nil {
		t.Fatal("the head key signed a checkpoint")
	}
}

// Keys lie in 0600 files in a 0700 directory, and no error shows one.
func TestKeyFilesAreClosed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "keys")
	open(t, dir)
	secret, err := os.ReadFile(filepath.Join(dir, "log.key"))
	if err != nil {
		t.Fatal(err)
	}
	refused := func(name string) {
		t.Helper()
		_, err := broker.Open(broker.Config{Dir: dir, Log: logName, Head: headName})
		if err == nil {
			t.Errorf("%s: accepted", name)
			return
		}
		parts := strings.Split(strings.TrimSpace(string(secret)), "+")
		if strings.Contains(err.Error(), parts[len(parts)-1]) {
			t.Errorf("%s: the error shows the key", name)
		}
	}
	for _, f := range []string{"log.key", "head.key"} {
		path := filepath.Join(dir, f)
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
			t.Fatalf("%s: %v, %v, want mode 0600", f, st, err)
		}
		chmod(t, path, 0o644)
		refused(f + " open to others")
		chmod(t, path, 0o600)
	}
	chmod(t, dir, 0o755)
	refused("directory open to others")
	chmod(t, dir, 0o700)
	link := filepath.Join(dir, "log.key")
	if err := errors.Join(os.Rename(link, link+".real"), os.Symlink(link+".real", link)); err != nil {
		t.Fatal(err)
	}
	refused("a link")
	if err := errors.Join(os.Remove(link), os.WriteFile(link, append(secret[:len(secret)-5], '\n'), 0o600)); err != nil {
		t.Fatal(err)
	}
	refused("a damaged key")
	if _, err := broker.Open(broker.Config{Dir: dir, Log: "x", Head: "x"}); err == nil {
		t.Error("one name for both keys: accepted")
	}
}

// P-043, H-062: there is nothing to give, so every intent is refused.
func TestNoCredential(t *testing.T) {
	b := open(t, filepath.Join(t.TempDir(), "keys"))
	h, err := b.Handle(t.Context(), "dev.numinance.test/x", "run-1", "model-api")
	if !errors.Is(err, broker.ErrNoCredential) || h.Value != "" {
		t.Fatalf("got %v, %v, want a refusal", h, err)
	}
	if printed := []byte(fmt.Sprintf("%v %+v", b.LogKey(), err)); bytes.Contains(printed, []byte("PRIVATE")) {
		t.Fatal("a private key was printed")
	}
}

func chmod(t *testing.T, path string, mode os.FileMode) {
	t.Helper()
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}
