// Package gomodules assembles the Go modules that a repository's go.sum names
// from the module cache of this host, so that a sandbox without any network can
// build: what is copied is checked against go.sum first, and nothing is ever
// downloaded. The daemon calls it when it prepares an environment.
package gomodules

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"golang.org/x/mod/module"
	"golang.org/x/mod/sumdb/dirhash"
)

// need is what go.sum says of one module version.
type need struct {
	zip, mod string // h1: hashes; zip is empty where only the go.mod is needed
}

// maxSum bounds a go.sum: 16 MiB.
const maxSum = 16 << 20

// Assemble copies into dest, laid out as a file-based module proxy, every
// module version that goSum names and cache (a GOMODCACHE) holds with the right
// hash. It returns the versions that are missing, as path@version, sorted; a
// version whose bytes do not have the hash of go.sum is missing too.
func Assemble(ctx context.Context, goSum []byte, cache, dest string) (missing []string, err error) {
	needs, err := parse(goSum)
	if err != nil {
		return nil, err
	}
	for m, n := range needs {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		ok, err := copyVersion(m, n, filepath.Join(cache, "cache", "download"), dest)
		if err != nil {
			return nil, err
		}
		if !ok {
			missing = append(missing, m.String())
		}
	}
	sort.Strings(missing)
	return missing, nil
}

// Missing returns the module versions that goSum names the content of and that
// cache does not hold, as path@version, sorted. It looks at names alone.
func Missing(ctx context.Context, goSum []byte, cache string) ([]string, error) {
	needs, err := parse(goSum)
	if err != nil {
		return nil, err
	}
	var out []string
	for m, n := range needs {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		path, perr := module.EscapePath(m.Path)
		version, verr := module.EscapeVersion(m.Version)
		if err := errors.Join(perr, verr); err != nil {
			return nil, fmt.Errorf("module %s: %w", m, err)
		}
		kind := ".mod"
		if n.zip != "" {
			kind = ".zip"
		}
		if _, err := os.Stat(filepath.Join(cache, "cache", "download", filepath.FromSlash(path), "@v", version+kind)); err != nil {
			out = append(out, m.String())
		}
	}
	sort.Strings(out)
	return out, nil
}

func parse(goSum []byte) (map[module.Version]need, error) {
	if len(goSum) > maxSum {
		return nil, fmt.Errorf("go.sum is larger than %d bytes", maxSum)
	}
	needs := map[module.Version]need{}
	scan := bufio.NewScanner(bytes.NewReader(goSum))
	scan.Buffer(nil, 1<<20)
	for line := 1; scan.Scan(); line++ {
		f := strings.Fields(scan.Text())
		if len(f) == 0 {
			continue
		}
		if len(f) != 3 || !strings.HasPrefix(f[2], "h1:") {
			return nil, fmt.Errorf("go.sum line %d: want a module, a version and an h1: hash", line)
		}
		version, isMod := strings.CutSuffix(f[1], "/go.mod")
		m := module.Version{Path: f[0], Version: version}
		if err := module.Check(m.Path, m.Version); err != nil {
			return nil, fmt.Errorf("go.sum line %d: %w", line, err)
		}
		n := needs[m]
		if isMod {
			n.mod = f[2]
		} else {
			n.zip = f[2]
		}
		needs[m] = n
	}
	return needs, scan.Err()
}

func copyVersion(m module.Version, n need, from, dest string) (bool, error) {
	path, err := module.EscapePath(m.Path)
	if err != nil {
		return false, fmt.Errorf("module %s: %w", m, err)
	}
	version, err := module.EscapeVersion(m.Version)
	if err != nil {
		return false, fmt.Errorf("module %s: %w", m, err)
	}
	src := filepath.Join(from, filepath.FromSlash(path), "@v", version)
	dst := filepath.Join(dest, filepath.FromSlash(path), "@v", version)
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
		return false, fmt.Errorf("module %s: %w", m, err)
	}
	if n.mod != "" {
		if ok, err := copyChecked(src+".mod", dst+".mod", n.mod, hashMod); !ok || err != nil {
			return false, wrap(m, err)
		}
	}
	if n.zip != "" {
		if ok, err := copyChecked(src+".zip", dst+".zip", n.zip, hashZip); !ok || err != nil {
			return false, wrap(m, err)
		}
	}
	// The .info file only names the version and its time; go.sum says nothing of it.
	info := fmt.Sprintf("{\"Version\":%q}\n", m.Version)
	return true, wrap(m, os.WriteFile(dst+".info", []byte(info), 0o644))
}

func wrap(m module.Version, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("module %s: %w", m, err)
}

func hashMod(path string) (string, error) {
	return dirhash.Hash1([]string{"go.mod"}, func(string) (io.ReadCloser, error) { return os.Open(path) })
}

func hashZip(path string) (string, error) { return dirhash.HashZip(path, dirhash.Hash1) }

// copyChecked copies src to dst and hashes the copy, so that what was checked is
// what will be used. A file that is not there, or is another one, is no error.
func copyChecked(src, dst, want string, hash func(string) (string, error)) (bool, error) {
	in, err := os.Open(src)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return false, err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return false, err
	}
	if err := out.Close(); err != nil {
		return false, err
	}
	got, err := hash(dst)
	if err != nil || got != want {
		return false, os.Remove(dst)
	}
	return true, nil
}
