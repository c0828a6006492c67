package fake

import (
	"bytes"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
)

// kept keeps the first bytes written to it; two streams may write at once.
type kept struct {
	mu    sync.Mutex // guards buf
	buf   bytes.Buffer
	limit int
}

// Write never fails, so that a command with much output is not held up.
func (k *kept) Write(p []byte) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.buf.Write(p[:min(len(p), k.limit-k.buf.Len())])
	return len(p), nil
}

func (k *kept) bytes() []byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	return bytes.Clone(k.buf.Bytes())
}

func duration(d time.Duration) *durationpb.Duration { return durationpb.New(max(d, time.Millisecond)) }
