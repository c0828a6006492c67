package tessera

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"time"

	"golang.org/x/mod/sumdb/note"
)

// signTimeout bounds one request to the host for a signature.
const signTimeout = 5 * time.Second

// Signature is the host's answer to a signing request.
type Signature struct {
	// Signature is the Ed25519 signature over the payload.
	Signature []byte
	// PublicKey is the key it verifies under: 32 raw bytes, or DER.
	PublicKey []byte
	// KeyName is the name of the key, which is the origin of the log.
	KeyName string
}

// Signer asks the host to sign the text of a checkpoint. The host refuses a
// text that is no checkpoint of this log or that takes the log back.
type Signer interface {
	Sign(ctx context.Context, text []byte) (Signature, error)
}

// hostSigner is a note.Signer whose key is with the host.
type hostSigner struct {
	ctx      context.Context // ends with the log
	host     Signer
	verifier note.Verifier
}

// newHostSigner learns the log's key by having text signed, the state the log
// is in, and checks that the key bears the name of the log.
func newHostSigner(ctx context.Context, host Signer, origin string, text []byte) (*hostSigner, string, error) {
	asking, cancel := context.WithTimeout(ctx, signTimeout)
	defer cancel()
	got, err := host.Sign(asking, text)
	if err != nil {
		return nil, "", fmt.Errorf("ask the host for the log's key: %w", err)
	}
	if got.KeyName != origin {
		return nil, "", fmt.Errorf("the host signs as %q, this log is %q", got.KeyName, origin)
	}
	public, err := ed25519Key(got.PublicKey)
	if err != nil {
		return nil, "", fmt.Errorf("the log's key: %w", err)
	}
	vkey, err := note.NewEd25519VerifierKey(origin, public)
	if err != nil {
		return nil, "", fmt.Errorf("the log's key: %w", err)
	}
	verifier, err := note.NewVerifier(vkey)
	if err != nil {
		return nil, "", fmt.Errorf("the log's key: %w", err)
	}
	if !verifier.Verify(text, got.Signature) {
		return nil, "", errors.New("the host's signature does not verify under the key it names")
	}
	return &hostSigner{ctx: ctx, host: host, verifier: verifier}, vkey, nil
}

func ed25519Key(b []byte) (ed25519.PublicKey, error) {
	if len(b) == ed25519.PublicKeySize {
		return b, nil
	}
	key, err := x509.ParsePKIXPublicKey(b)
	if err != nil {
		return nil, err
	}
	public, ok := key.(ed25519.PublicKey)
	if !ok {
		return nil, fmt.Errorf("a %T, want Ed25519", key)
	}
	return public, nil
}

// Name implements note.Signer.
func (s *hostSigner) Name() string { return s.verifier.Name() }

// KeyHash implements note.Signer.
func (s *hostSigner) KeyHash() uint32 { return s.verifier.KeyHash() }

// Sign implements note.Signer. What the host returns is checked before it is
// published.
func (s *hostSigner) Sign(text []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(s.ctx, signTimeout)
	defer cancel()
	got, err := s.host.Sign(ctx, text)
	if err != nil {
		return nil, fmt.Errorf("sign checkpoint: %w", err)
	}
	if !s.verifier.Verify(text, got.Signature) {
		return nil, errors.New("sign checkpoint: the signature does not verify under the log's key")
	}
	return got.Signature, nil
}

// checkpointText returns the text of a checkpoint of origin.
func checkpointText(origin string, size uint64, root []byte) []byte {
	if size == 0 {
		empty := sha256.Sum256(nil)
		root = empty[:]
	}
	return fmt.Appendf(nil, "%s\n%d\n%s\n", origin, size, base64.StdEncoding.EncodeToString(root))
}
