package local

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	ciexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/ciexecutor/v1"
)

// The states of an operation on disk.
const (
	stateQueued    = "queued"
	stateRunning   = "running"
	stateSucceeded = "succeeded"
	stateFailed    = "failed"
	stateCancelled = "cancelled"
	stateTimedOut  = "timed-out"
)

// operation is one run of a pipeline as it is kept on disk.
type operation struct {
	Name       string            `json:"name"`
	Pipeline   string            `json:"pipeline"`
	Repository string            `json:"repository"`
	Revision   string            `json:"revision"`
	Parameters map[string]string `json:"parameters,omitempty"`
	State      string            `json:"state"`
	Detail     string            `json:"detail,omitempty"`
	Created    time.Time         `json:"created"`
	Started    time.Time         `json:"started,omitzero"`
	Finished   time.Time         `json:"finished,omitzero"`
	Artifacts  []artifact        `json:"artifacts,omitempty"` // in byte order of their names
}

// artifact is one kept file; its bytes lie under their digest.
type artifact struct {
	Name   string `json:"name"`
	Digest string `json:"digest"`
	Size   int64  `json:"size"`
}

func (o operation) done() bool { return o.State != stateQueued && o.State != stateRunning }

var operationName = regexp.MustCompile(`^op-[0-9a-f]{24}$`)

// nameOf gives the same name to every try with one idempotency key, so that a
// key can never have two operations.
func nameOf(key string) string {
	sum := sha256.Sum256([]byte("ciexecutor operation " + key))
	return "op-" + hex.EncodeToString(sum[:12])
}

func (o operation) proto() *ciexecutorv1.Operation {
	states := map[string]ciexecutorv1.OperationState{
		stateQueued:    ciexecutorv1.OperationState_OPERATION_STATE_QUEUED,
		stateRunning:   ciexecutorv1.OperationState_OPERATION_STATE_RUNNING,
		stateSucceeded: ciexecutorv1.OperationState_OPERATION_STATE_SUCCEEDED,
		stateFailed:    ciexecutorv1.OperationState_OPERATION_STATE_FAILED,
		stateCancelled: ciexecutorv1.OperationState_OPERATION_STATE_CANCELLED,
		stateTimedOut:  ciexecutorv1.OperationState_OPERATION_STATE_TIMED_OUT,
	}
	out := &ciexecutorv1.Operation{Name: o.Name, State: states[o.State], Revision: o.Revision, Detail: o.Detail}
	if !o.Started.IsZero() {
		out.StartedAt = timestamppb.New(o.Started)
	}
	if !o.Finished.IsZero() {
		out.FinishedAt = timestamppb.New(o.Finished)
	}
	return out
}

var errNoOperation = errors.New("no such operation")

func (s *server) dir(name string) string { return filepath.Join(s.data, "operations", name) }

func (s *server) load(name string) (operation, error) {
	var o operation
	if !operationName.MatchString(name) {
		return o, errNoOperation
	}
	b, err := os.ReadFile(filepath.Join(s.dir(name), "operation.json"))
	if errors.Is(err, os.ErrNotExist) {
		return o, errNoOperation
	}
	if err != nil {
		return o, err
	}
	if err := json.Unmarshal(b, &o); err != nil || o.Name != name {
		return o, fmt.Errorf("operation %s on disk is damaged: %v", name, err)
	}
	return o, nil
}

// save replaces the operation on disk; after it returns nil the new state
// survives a power cut.
func (s *server) save(o operation) error {
	b, err := json.MarshalIndent(o, "", "\t")
	if err != nil {
		return err
	}
	dir := s.dir(o.Name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("keep operation %s: %w", o.Name, err)
	}
	tmp := filepath.Join(dir, "operation.json.new")
	if err := writeSynced(tmp, b); err != nil {
		return fmt.Errorf("keep operation %s: %w", o.Name, err)
	}
	if err := os.Rename(tmp, filepath.Join(dir, "operation.json")); err != nil {
		return fmt.Errorf("keep operation %s: %w", o.Name, err)
	}
	return errors.Join(syncDir(dir), syncDir(filepath.Dir(dir)))
}

func writeSynced(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
