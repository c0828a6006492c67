// Package broker holds what no plugin may hold: the key of the embedded log, the
// key that signs chain heads, and, once a deployment has any, credentials. It
// gives out signatures and handles, never key material. The host service asks it
// for plugins, the evidence context for heads.
package broker

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"strings"
	"sync"

	"golang.org/x/mod/sumdb/note"

	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/tlog"
	"github.com/numinance/numinance/internal/host/hostservice"
)

// ErrNoCredential is why a handle was refused: nothing is known for the intent.
var ErrNoCredential = errors.New("this deployment has no credential for the intent")

// Config says where the keys are and what they are called.
type Config struct {
	// Dir is a directory of the runtime's alone, mode 0700; it is made if absent.
	Dir string
	// Log is the origin of the embedded log and the name of its key.
	Log string
	// Head is the name of the key that signs heads; never that of the log.
	Head string
}

// Broker is the deployment's one holder of keys. It is safe for concurrent use
// by one process; the runtime's lease keeps a second one away.
type Broker struct {
	dir  string
	log  key
	head key

	mu sync.Mutex // serialises checkpoints: each is checked against the last
}

// key is an Ed25519 key under a name.
type key struct {
	private  ed25519.PrivateKey
	signer   note.Signer
	verifier string
}

// Open reads the two keys and makes those that are not there yet.
func Open(c Config) (*Broker, error) {
	if c.Log == "" || c.Head == "" || c.Log == c.Head {
		return nil, fmt.Errorf("open the broker: the log's key and the head key need two names, not %q and %q", c.Log, c.Head)
	}
	if err := closedDir(c.Dir); err != nil {
		return nil, fmt.Errorf("open the broker: %w", err)
	}
	b := &Broker{dir: c.Dir}
	var err error
	if b.log, err = loadKey(c.Dir, logKeyFile, c.Log); err != nil {
		return nil, fmt.Errorf("open the broker: the log's key: %w", err)
	}
	if b.head, err = loadKey(c.Dir, headKeyFile, c.Head); err != nil {
		return nil, fmt.Errorf("open the broker: the head key: %w", err)
	}
	if b.log.private.Equal(b.head.private) {
		return nil, errors.New("open the broker: the log's key and the head key are the same")
	}
	return b, nil
}

// String names the broker and nothing in it, so that no print shows a key.
func (b *Broker) String() string { return "broker of " + b.log.verifier }

// LogKey returns the public key of the embedded log, as a note verifier key.
func (b *Broker) LogKey() string { return b.log.verifier }

// HeadKey returns the public key of chain heads, as a note verifier key.
func (b *Broker) HeadKey() string { return b.head.verifier }

// Heads returns a signer that signs head statements and nothing else, so that a
// head's signature is never one over a checkpoint.
func (b *Broker) Heads() note.Signer { return headSigner{b.head.signer} }

type headSigner struct{ note.Signer }

func (h headSigner) Sign(msg []byte) ([]byte, error) {
	if !strings.HasPrefix(string(msg), chain.HeadDomain+"\n") {
		return nil, errors.New("the head key signs head statements only")
	}
	return h.Signer.Sign(msg)
}

// SignCheckpoint signs the text of a checkpoint of the embedded log with the
// log's key, if it has the right form and the log has not gone back since the
// last one. The last text is on disk before its signature leaves, so that no
// restart lets the log sign two histories.
func (b *Broker) SignCheckpoint(ctx context.Context, text []byte) (hostservice.Signature, error) {
	var none hostservice.Signature
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return none, err
	}
	next, err := tlog.ParseCheckpoint(string(text))
	if err != nil {
		return none, fmt.Errorf("not the text of a checkpoint: %w", err)
	}
	if next.Origin != b.log.signer.Name() {
		return none, fmt.Errorf("the checkpoint is of %q; this key signs for %q", next.Origin, b.log.signer.Name())
	}
	last, err := readLast(b.dir)
	if err != nil {
		return none, err
	}
	if err := tlog.CheckSigningRequest(last, text); err != nil {
		return none, err
	}
	if string(last) != string(text) {
		if err := writeDurably(b.dir, lastFile, text); err != nil {
			return none, fmt.Errorf("remember the checkpoint: %w", err)
		}
	}
	sig, err := b.log.signer.Sign(text)
	if err != nil {
		return none, fmt.Errorf("sign the checkpoint: %w", err)
	}
	return hostservice.Signature{
		Signature: sig,
		PublicKey: b.log.private.Public().(ed25519.PublicKey),
		KeyName:   b.log.signer.Name(),
	}, nil
}

// Handle implements hostservice.Credentials. This deployment holds no
// credentials, so every intent is refused; the host service records it.
func (b *Broker) Handle(_ context.Context, _ string, _ identity.RunID, intent string) (hostservice.Handle, error) {
	return hostservice.Handle{}, fmt.Errorf("%w %q", ErrNoCredential, intent)
}
