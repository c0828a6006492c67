package pluginhost

import (
	"fmt"
	"os"
	"strings"
	"sync"
)

// Bounds of a plugin's log: a file is put aside when it is full, and one such is
// kept, so that a chatty plugin cannot fill the disk.
const (
	logBytes  = 1 << 20
	tailBytes = 2 << 10
)

// output takes what a plugin prints. It is kept for people and never parsed.
type output struct {
	mu   sync.Mutex // guards all
	path string
	file *os.File
	size int64
	tail []byte
}

// newOutput appends to the file at path; without a path only the tail is kept.
func newOutput(path string) (*output, error) {
	o := &output{path: path}
	if path == "" {
		return o, nil
	}
	return o, o.open()
}

func (o *output) open() error {
	f, err := os.OpenFile(o.path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open the plugin's log: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return fmt.Errorf("open the plugin's log: %w", err)
	}
	o.file, o.size = f, st.Size()
	return nil
}

// Write never fails: a plugin must not be able to tell that its log is full.
func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.tail = append(o.tail, b...)
	if n := len(o.tail) - tailBytes; n > 0 {
		o.tail = append(o.tail[:0], o.tail[n:]...)
	}
	if o.file == nil {
		return len(b), nil
	}
	if o.size+int64(len(b)) > logBytes {
		o.file.Close()
		o.file = nil
		if err := os.Rename(o.path, o.path+".1"); err == nil {
			if err := o.open(); err != nil {
				o.file = nil
			}
		}
	}
	if o.file != nil {
		n, _ := o.file.Write(b[:min(len(b), logBytes)])
		o.size += int64(n)
	}
	return len(b), nil
}

// last returns the last lines, quoted.
func (o *output) last() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	s := strings.TrimSpace(string(o.tail))
	if s == "" {
		return "it printed nothing"
	}
	return fmt.Sprintf("it printed last: %q", s)
}

func (o *output) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.file != nil {
		o.file.Close()
		o.file = nil
	}
}
