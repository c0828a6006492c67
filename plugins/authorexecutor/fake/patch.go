package fake

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// FilePatch is the part of a unified diff that changes one file.
type FilePatch struct {
	Path   string
	Delete bool
	Diff   []byte // a patch on its own, as git apply takes it
}

// MaxPatchFiles bounds the files of one patch step.
const MaxPatchFiles = 200

// splitPatch cuts a unified diff into one patch a file, because each file is a
// tool intent of its own: a decision covers one path. Renames, copies and
// binary patches are refused; a rename is a deletion and a new file.
func splitPatch(diff string) ([]FilePatch, error) {
	var (
		out     []FilePatch
		current strings.Builder
		file    FilePatch
		old     string
		left    [2]int // lines that the current hunk still takes from and gives
		git     bool
		named   bool
	)
	flush := func() error {
		if current.Len() == 0 {
			return nil
		}
		if !named {
			return errors.New("a part names no file (--- and +++ lines are missing; an empty or mode-only change is not a patch)")
		}
		file.Diff = []byte(current.String())
		out = append(out, file)
		if len(out) > MaxPatchFiles {
			return fmt.Errorf("more than %d files", MaxPatchFiles)
		}
		current.Reset()
		file, old, git, named = FilePatch{}, "", false, false
		return nil
	}
	for line := range strings.Lines(strings.TrimSuffix(diff, "\n") + "\n") {
		word := strings.TrimSuffix(strings.TrimSuffix(line, "\n"), "\r")
		inHunk := left[0] > 0 || left[1] > 0
		switch {
		case inHunk:
			if err := count(word, &left); err != nil {
				return nil, err
			}
		case strings.HasPrefix(word, `\ No newline`):
		case strings.HasPrefix(word, "diff --git "):
			if err := flush(); err != nil {
				return nil, err
			}
			git = true
		case strings.HasPrefix(word, "--- "):
			if named || !git {
				if err := flush(); err != nil {
					return nil, err
				}
			}
			old = headerPath(word)
		case strings.HasPrefix(word, "+++ "):
			path := headerPath(word)
			file.Delete = path == "/dev/null"
			if file.Delete {
				path = old
			}
			var err error
			if file.Path, err = stripped(path); err != nil {
				return nil, err
			}
			if !file.Delete && old != "/dev/null" {
				if before, err := stripped(old); err != nil || before != file.Path {
					return nil, fmt.Errorf("%q becomes %q: make a rename a deletion and a new file (git diff --no-renames)", old, path)
				}
			}
			named = true
		case strings.HasPrefix(word, "@@ "):
			if !named {
				return nil, errors.New("a hunk stands before the name of its file")
			}
			var err error
			if left, err = hunk(word); err != nil {
				return nil, err
			}
		case strings.HasPrefix(word, "rename "), strings.HasPrefix(word, "copy "), strings.HasPrefix(word, "GIT binary patch"), strings.HasPrefix(word, "Binary files "):
			return nil, fmt.Errorf("%q: renames, copies and binary files are not taken (git diff --no-renames --text)", word)
		case !git && current.Len() == 0:
			continue // prose before the first file
		}
		current.WriteString(line)
	}
	if left[0] > 0 || left[1] > 0 {
		return nil, errors.New("the last hunk is cut off")
	}
	if err := flush(); err != nil {
		return nil, err
	}
	if len(out) == 0 {
		return nil, errors.New("no file in it: give a unified diff with --- and +++ lines")
	}
	return out, nil
}

func count(line string, left *[2]int) error {
	switch {
	case line == "" || line[0] == ' ':
		left[0]--
		left[1]--
	case line[0] == '-':
		left[0]--
	case line[0] == '+':
		left[1]--
	case line[0] == '\\':
	default:
		return fmt.Errorf("%.40q inside a hunk begins with none of space, +, - and \\", line)
	}
	if left[0] < 0 || left[1] < 0 {
		return errors.New("a hunk has more lines than its header says")
	}
	return nil
}

func headerPath(line string) string {
	path := line[4:]
	if tab := strings.IndexByte(path, '\t'); tab >= 0 {
		path = path[:tab]
	}
	return path
}

func stripped(path string) (string, error) {
	rest, ok := strings.CutPrefix(path, "a/")
	if !ok {
		rest, ok = strings.CutPrefix(path, "b/")
	}
	if !ok || rest == "" || len(rest) > maxPath {
		return "", fmt.Errorf("file name %q: want a/ or b/ and a path, as git diff prints it (unquoted)", path)
	}
	return rest, nil
}

// hunk reads "@@ -1,2 +3,4 @@".
func hunk(line string) (left [2]int, err error) {
	parts := strings.SplitN(line, " ", 4)
	if len(parts) < 4 || !strings.HasPrefix(parts[3], "@@") {
		return left, fmt.Errorf("%.60q is not a hunk header", line)
	}
	for i, sign := range []string{"-", "+"} {
		rest, ok := strings.CutPrefix(parts[1+i], sign)
		_, lines, some := strings.Cut(rest, ",")
		left[i] = 1
		if some {
			left[i], err = strconv.Atoi(lines)
		}
		if !ok || err != nil || left[i] < 0 {
			return left, fmt.Errorf("%.60q is not a hunk header", line)
		}
	}
	return left, nil
}
