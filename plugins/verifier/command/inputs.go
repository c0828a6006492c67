package command

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/gowebpki/jcs"
)

// readFile reads a regular file below the work root without following a link
// out of it; missing is os.ErrNotExist.
func (v *verifier) readFile(name string, limit int64) ([]byte, error) {
	root, err := os.OpenRoot(v.settings.WorkRoot)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no regular file", name)
	}
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%s is longer than %d bytes", name, limit)
	}
	return b, err
}

// inputsDigest names the files that define a check: names and contents, in
// order; a missing file is named as missing. "" if the check has none.
func (v *verifier) inputsDigest(c Check) (string, error) {
	if len(c.Inputs) == 0 {
		return "", nil
	}
	names := slices.Sorted(slices.Values(c.Inputs))
	all := sha256.New()
	for _, name := range names {
		file, key, part := strings.Cut(name, "#")
		b, err := v.readFile(joinPath(c.Directory, file), maxReport)
		switch {
		case errors.Is(err, os.ErrNotExist):
			fmt.Fprintf(all, "%q missing\n", name)
			continue
		case err != nil:
			return "", fmt.Errorf("read %s, which defines the check: %w", file, err)
		}
		if part {
			b = member(b, key)
		}
		fmt.Fprintf(all, "%q %x\n", name, sha256.Sum256(b))
	}
	return "sha256:" + hex.EncodeToString(all.Sum(nil)), nil
}

// member returns one member of a JSON object in canonical form, so that a
// change elsewhere in the file is none. A file that is no such object counts as
// a whole.
func member(b []byte, key string) []byte {
	var object map[string]json.RawMessage
	dec := json.NewDecoder(bytes.NewReader(b))
	if dec.Decode(&object) != nil {
		return b
	}
	if canonical, err := jcs.Transform(object[key]); err == nil {
		return canonical
	}
	return b
}

func joinPath(dir, file string) string {
	if dir == "" {
		return file
	}
	return dir + "/" + file
}
