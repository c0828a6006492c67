package sdk

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
)

// Effects remembers, across kill -9 and power cuts, which idempotency keys had
// their effect. One small file per key lies in the plugin's data directory.
type Effects struct {
	dir string

	mu   sync.Mutex
	busy map[string]*busyKey // keys that a call holds
}

type busyKey struct {
	sync.Mutex
	users int // guarded by Effects.mu
}

func newEffects(dataDir string) *Effects {
	e := &Effects{busy: map[string]*busyKey{}}
	if dataDir != "" {
		e.dir = filepath.Join(dataDir, "effects")
	}
	return e
}

// effectFile is the content of a key's file: first without a result, when the
// effect may have begun, then with it.
type effectFile struct {
	Key     string `json:"key"`
	Target  string `json:"target"`
	Request string `json:"request"` // digest
	Result  []byte `json:"result,omitempty"`
}

// Once runs effect for the idempotency key of the call in ctx unless it is known
// to have happened: then the recorded answer is returned and its receipts are
// attached again. The same key with another verb or request is refused with
// INVALID_ARGUMENT. again is true if a former try may have had its effect (the
// process was killed in it, or it failed): effect must then look at the far side
// before it acts. An error is returned to the host and not remembered as done.
//
// Once must not be used in a dry run.
func Once[R proto.Message](ctx context.Context, e *Effects, request proto.Message, effect func(ctx context.Context, again bool) (R, error)) (R, error) {
	var none R
	c := callOf(ctx)
	switch {
	case c == nil:
		return none, status.Error(codes.Internal, "once: no call in this context")
	case c.action.GetDryRun():
		return none, status.Error(codes.Internal, "once: a dry run has no effect to remember")
	case c.action.GetIdempotencyKey() == "":
		return none, status.Error(codes.InvalidArgument, "the call has no idempotency key")
	case e == nil || e.dir == "":
		return none, status.Error(codes.FailedPrecondition, "this provider needs a data directory to remember its effects")
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(request)
	if err != nil {
		return none, status.Errorf(codes.InvalidArgument, "once: %v", err)
	}
	sum := sha256.Sum256(raw)
	want := effectFile{Key: c.action.GetIdempotencyKey(), Target: c.target, Request: "sha256:" + hex.EncodeToString(sum[:])}

	unlock := e.lock(want.Key)
	defer unlock()
	have, err := e.read(want.Key)
	if err != nil {
		return none, status.Errorf(codes.Internal, "once: %v", err)
	}
	if have != nil {
		if have.Target != want.Target || have.Request != want.Request {
			return none, status.Errorf(codes.InvalidArgument, "idempotency key %s was used for another request", want.Key)
		}
		if have.Result != nil {
			return replay[R](c, have.Result)
		}
	} else if err := e.write(want); err != nil {
		return none, status.Errorf(codes.Internal, "once: %v", err)
	}

	before := len(c.attached(0))
	answer, err := effect(ctx, have != nil)
	if err != nil {
		return none, err
	}
	result := &pluginv1.ActionResult{Status: pluginv1.ActionStatus_ACTION_STATUS_SUCCEEDED, Evidence: c.attached(before)}
	if result.Output, err = pack(answer); err != nil {
		return none, status.Errorf(codes.Internal, "once: %v", err)
	}
	if want.Result, err = proto.Marshal(result); err != nil {
		return none, status.Errorf(codes.Internal, "once: %v", err)
	}
	if err := e.write(want); err != nil {
		return none, status.Errorf(codes.Internal, "once: the effect happened and could not be remembered: %v", err)
	}
	return answer, nil
}

// replay returns a recorded answer and attaches its receipts to the call.
func replay[R proto.Message](c *call, recorded []byte) (R, error) {
	var none R
	var result pluginv1.ActionResult
	if err := proto.Unmarshal(recorded, &result); err != nil {
		return none, status.Errorf(codes.DataLoss, "once: read the recorded result: %v", err)
	}
	m, err := result.GetOutput().UnmarshalNew()
	if err != nil {
		return none, status.Errorf(codes.DataLoss, "once: read the recorded answer: %v", err)
	}
	answer, ok := m.(R)
	if !ok {
		return none, status.Errorf(codes.DataLoss, "once: the recorded answer is a %s", m.ProtoReflect().Descriptor().FullName())
	}
	c.mu.Lock()
	c.evidence = append(c.evidence, result.GetEvidence()...)
	c.mu.Unlock()
	return answer, nil
}

// lock serialises the calls with one key.
func (e *Effects) lock(key string) (unlock func()) {
	e.mu.Lock()
	b := e.busy[key]
	if b == nil {
		b = &busyKey{}
		e.busy[key] = b
	}
	b.users++
	e.mu.Unlock()
	b.Lock()
	return func() {
		b.Unlock()
		e.mu.Lock()
		if b.users--; b.users == 0 {
			delete(e.busy, key)
		}
		e.mu.Unlock()
	}
}

func (e *Effects) path(key string) string {
	sum := sha256.Sum256([]byte(key))
	return filepath.Join(e.dir, hex.EncodeToString(sum[:])+".json")
}

func (e *Effects) read(key string) (*effectFile, error) {
	b, err := os.ReadFile(e.path(key))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the memory of %s: %w", key, err)
	}
	var f effectFile
	if err := json.Unmarshal(b, &f); err != nil {
		return nil, fmt.Errorf("read the memory of %s: %w", key, err)
	}
	if f.Key != key {
		return nil, fmt.Errorf("the memory of %s holds another key", key)
	}
	return &f, nil
}

// write replaces the key's file; when it returns nil, the file and its name
// survive a power cut.
func (e *Effects) write(f effectFile) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("remember %s: %w", f.Key, err)
		}
	}()
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	if err := e.prepare(); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(e.dir, ".tmp-*")
	if err != nil {
		return err
	}
	_, err = tmp.Write(b)
	if err == nil {
		err = tmp.Sync()
	}
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp.Name(), e.path(f.Key))
	}
	if err != nil {
		os.Remove(tmp.Name())
		return err
	}
	return syncDir(e.dir)
}

func (e *Effects) prepare() error {
	if _, err := os.Stat(e.dir); err == nil {
		return nil
	}
	if err := os.MkdirAll(e.dir, 0o700); err != nil {
		return err
	}
	return syncDir(filepath.Dir(e.dir))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
