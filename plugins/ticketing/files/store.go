package files

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	maxIssues  = 20_000
	maxSidecar = 64 << 20
)

var keyPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)

// errNoIssue is the one answer for an issue that does not exist, that may not
// be read, or that lies in another project (P-098).
var errNoIssue = status.Error(codes.NotFound, "no such issue in this project")

// project is one directory of issues.
type project struct {
	name     string
	dir      string
	workflow workflow

	mu sync.Mutex // held by writers, with the file lock
}

// root opens the directory; nothing is read or written outside of it, also by
// way of links.
func (p *project) root() (*os.Root, error) {
	root, err := os.OpenRoot(p.dir)
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "the directory of project %q cannot be read: %v", p.name, rootless(err))
	}
	return root, nil
}

// rootless drops the path from an error: it is the host's own.
func rootless(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}

// lock admits one writer at a time, in this process and in others.
func (p *project) lock() (unlock func(), err error) {
	p.mu.Lock()
	f, err := os.OpenFile(filepath.Join(p.dir, ".lock"), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err == nil {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			f.Close()
		}
	}
	if err != nil {
		p.mu.Unlock()
		return nil, status.Errorf(codes.Unavailable, "the directory of project %q cannot be written: %v", p.name, rootless(err))
	}
	return func() {
		f.Close() // gives the file lock back
		p.mu.Unlock()
	}, nil
}

// load returns an issue and its file.
func (p *project) load(root *os.Root, key string) (issue, []byte, error) {
	if !keyPattern.MatchString(key) {
		return issue{}, nil, errNoIssue
	}
	f, err := root.Open(key + ".md")
	if err != nil {
		// A link that leaves the directory is no issue either.
		return issue{}, nil, errNoIssue
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return issue{}, nil, errNoIssue
	}
	raw, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return issue{}, nil, status.Errorf(codes.Unavailable, "issue %s cannot be read: %v", key, rootless(err))
	}
	i, err := parseIssue(key, raw)
	if err != nil {
		return issue{}, nil, status.Errorf(codes.FailedPrecondition, "issue file %s.md is refused: %v", key, err)
	}
	if i.project != "" && i.project != p.name {
		return issue{}, nil, errNoIssue
	}
	return i, raw, nil
}

// keys lists the issues in natural order of their keys.
func (p *project) keys(root *os.Root) ([]string, error) {
	d, err := root.Open(".")
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "list issues: %v", rootless(err))
	}
	defer d.Close()
	entries, err := d.ReadDir(-1)
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "list issues: %v", rootless(err))
	}
	var keys []string
	for _, e := range entries {
		if key, ok := strings.CutSuffix(e.Name(), ".md"); ok && e.Type().IsRegular() && keyPattern.MatchString(key) {
			keys = append(keys, key)
		}
	}
	if len(keys) > maxIssues {
		return nil, status.Errorf(codes.ResourceExhausted, "project has %d issues, at most %d can be searched", len(keys), maxIssues)
	}
	slices.SortFunc(keys, func(a, b string) int {
		if len(a) != len(b) {
			return len(a) - len(b) // WID-9 before WID-10
		}
		return strings.Compare(a, b)
	})
	return keys, nil
}

// version changes whenever the issue, its comments or its links change.
func (p *project) version(root *os.Root, key string, raw []byte) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%d\n", len(raw))
	h.Write(raw)
	for _, side := range []string{comments, links} {
		rows, err := root.ReadFile(key + side)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", status.Errorf(codes.Unavailable, "issue %s cannot be read: %v", key, rootless(err))
		}
		fmt.Fprintf(h, "%d\n", len(rows))
		h.Write(rows)
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), nil
}

// The sidecar files of an issue, one JSON object a line.
const (
	comments = ".comments.jsonl"
	links    = ".links.jsonl"
	moves    = ".moves.jsonl"
)

// row is one line of a sidecar.
type row struct {
	ID     int    `json:"id"`
	Key    string `json:"key"` // idempotency key of the call that made it
	Author string `json:"author"`
	Time   string `json:"time"`

	Body    string `json:"body,omitempty"`            // of a comment
	Project string `json:"blocked_project,omitempty"` // of a link
	Issue   string `json:"blocks,omitempty"`
	From    string `json:"from,omitempty"` // of a move, states
	To      string `json:"to,omitempty"`
}

// rows reads a sidecar. A last line without its end was cut off by a crash and
// never answered; it does not count.
func rows(root *os.Root, name string) (all []row, whole int64, err error) {
	f, err := root.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, status.Errorf(codes.Unavailable, "%s cannot be read: %v", name, rootless(err))
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxSidecar+1))
	if err != nil {
		return nil, 0, status.Errorf(codes.Unavailable, "%s cannot be read: %v", name, rootless(err))
	}
	if len(raw) > maxSidecar {
		return nil, 0, status.Errorf(codes.ResourceExhausted, "%s has more than %d bytes", name, maxSidecar)
	}
	for {
		line, rest, ok := bytes.Cut(raw, []byte("\n"))
		if !ok {
			return all, whole, nil
		}
		var r row
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, 0, status.Errorf(codes.DataLoss, "%s is damaged in line %d: %v", name, len(all)+1, err)
		}
		all = append(all, r)
		whole += int64(len(line)) + 1
		raw = rest
	}
}

// add appends a row durably after the whole rows; the project must be locked.
func add(root *os.Root, name string, whole int64, r row) error {
	var line bytes.Buffer
	enc := json.NewEncoder(&line)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(r); err != nil {
		return status.Errorf(codes.Internal, "encode %s: %v", name, err)
	}
	f, err := root.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return status.Errorf(codes.Unavailable, "%s cannot be written: %v", name, rootless(err))
	}
	err = f.Truncate(whole) // of a line that a crash cut off
	if err == nil {
		_, err = f.WriteAt(line.Bytes(), whole)
	}
	if err := errors.Join(err, f.Sync(), f.Close(), syncRoot(root)); err != nil {
		return status.Errorf(codes.Unavailable, "%s cannot be written: %v", name, rootless(err))
	}
	return nil
}

// replace puts a new issue file in place of the old one.
func replace(root *os.Root, key string, content []byte) error {
	const tmp = ".tmp-issue"
	f, err := root.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err == nil {
		_, err = f.Write(content)
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err == nil {
		err = root.Rename(tmp, key+".md")
	}
	if err == nil {
		err = syncRoot(root)
	}
	if err != nil {
		return status.Errorf(codes.Unavailable, "issue %s cannot be written: %v", key, rootless(err))
	}
	return nil
}

func syncRoot(root *os.Root) error {
	d, err := root.Open(".")
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
