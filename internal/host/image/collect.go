package image

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// entry is one name of the image: a directory, a symbolic link, a copy of a
// host file, or content of ours.
type entry struct {
	dir     bool
	link    string // target of a symbolic link
	source  string // host file
	content []byte
	exec    bool
}

// collector gathers what the image will hold, keyed by slash path without a
// leading slash. It follows what programs need: symbolic links, interpreters
// and shared libraries.
type collector struct {
	entries  map[string]entry
	libDirs  []string
	todo     []string // host ELF files whose needs are still to be followed
	seen     map[string]bool
	progress func(string)
}

func newCollector(progress func(string)) *collector {
	c := &collector{entries: map[string]entry{}, seen: map[string]bool{}, progress: progress, libDirs: libraryDirs()}
	// One usr, as every current distribution has it; a host with separate
	// directories is mapped onto it by inImage.
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
		c.entries["usr/"+d] = entry{dir: true}
		c.entries[d] = entry{link: "usr/" + d}
	}
	return c
}

// inImage is where the host path p lies in the image.
func inImage(p string) string {
	p = strings.TrimPrefix(path.Clean("/"+p), "/")
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
		if rest, ok := strings.CutPrefix(p, d+"/"); ok {
			return "usr/" + d + "/" + rest
		}
	}
	return p
}

// program adds a program found on the host's path; found is false if the host
// has none of that name.
func (c *collector) program(name string) (found bool, err error) {
	for _, dir := range programDirs {
		p := filepath.Join(dir, name)
		st, err := os.Stat(p)
		if err != nil || !st.Mode().IsRegular() || st.Mode()&0o111 == 0 {
			continue
		}
		return true, c.file(p, p)
	}
	return false, nil
}

var programDirs = []string{"/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"}

// file adds the host file source so that it is found at target, through a
// symbolic link where source is one.
func (c *collector) file(source, target string) error {
	real, err := filepath.EvalSymlinks(source)
	if err != nil {
		return fmt.Errorf("resolve %s: %w", source, err)
	}
	st, err := os.Stat(real)
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", real)
	}
	at := inImage(target)
	if source == target {
		at = inImage(real)
		if link := inImage(source); link != at {
			c.entries[link] = entry{link: "/" + at}
		}
	}
	if old, ok := c.entries[at]; ok && old.source != "" {
		return nil
	}
	c.entries[at] = entry{source: real, exec: st.Mode()&0o111 != 0}
	c.todo = append(c.todo, real)
	return nil
}

// tree adds a directory of the host at target, without what skip names by its
// path below the directory. Links that lead out of the tree are followed.
func (c *collector) tree(ctx context.Context, source, target string, skip func(rel string, dir bool) bool) error {
	root, err := filepath.EvalSymlinks(source)
	if err != nil {
		return fmt.Errorf("resolve %s: %w", source, err)
	}
	return filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		if rel != "." && skip != nil && skip(rel, d.IsDir()) {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		to := path.Join(target, filepath.ToSlash(rel))
		switch {
		case d.IsDir():
			c.entries[inImage(to)] = entry{dir: true}
			return nil
		case d.Type().IsRegular():
			return c.file(p, to)
		case d.Type() == fs.ModeSymlink:
			return c.treeLink(root, p, to)
		default:
			return nil // sockets, devices and pipes have no place in an image
		}
	})
}

func (c *collector) treeLink(root, p, to string) error {
	real, err := filepath.EvalSymlinks(p)
	if err != nil {
		return nil // dangling on the host as well
	}
	rel, err := filepath.Rel(root, real)
	if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
		st, err := os.Stat(real)
		if err != nil || !st.Mode().IsRegular() {
			return nil
		}
		return c.file(real, to)
	}
	link, err := os.Readlink(p)
	if err != nil {
		return err
	}
	if filepath.IsAbs(link) {
		if link, err = filepath.Rel(filepath.Dir(p), real); err != nil {
			return err
		}
	}
	c.entries[inImage(to)] = entry{link: link}
	return nil
}

// needs follows the interpreters and shared libraries of all ELF files until
// nothing new is found.
func (c *collector) needs(ctx context.Context) error {
	for len(c.todo) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		p := c.todo[0]
		c.todo = c.todo[1:]
		if c.seen[p] {
			continue
		}
		c.seen[p] = true
		if err := c.needsOf(p); err != nil {
			return err
		}
	}
	return nil
}

func (c *collector) needsOf(p string) error {
	f, err := elf.Open(p)
	if err != nil {
		var format *elf.FormatError
		if errors.As(err, &format) || isShort(p) {
			return nil // a script or data
		}
		return fmt.Errorf("read %s: %w", p, err)
	}
	defer f.Close()
	for _, prog := range f.Progs {
		if prog.Type != elf.PT_INTERP {
			continue
		}
		b := make([]byte, prog.Filesz)
		if _, err := prog.ReadAt(b, 0); err != nil {
			return fmt.Errorf("read %s: %w", p, err)
		}
		interp := strings.TrimRight(string(b), "\x00")
		if err := c.file(interp, interp); err != nil {
			return fmt.Errorf("loader of %s: %w", p, err)
		}
	}
	libs, err := f.ImportedLibraries()
	if err != nil {
		return nil // static
	}
	dirs := slices.Clone(c.libDirs)
	for _, tag := range []elf.DynTag{elf.DT_RPATH, elf.DT_RUNPATH} {
		paths, _ := f.DynString(tag)
		for _, list := range paths {
			for d := range strings.SplitSeq(list, ":") {
				d = strings.NewReplacer("$ORIGIN", filepath.Dir(p), "${ORIGIN}", filepath.Dir(p)).Replace(d)
				dirs = slices.Insert(dirs, 0, filepath.Clean(d))
			}
		}
	}
	for _, lib := range libs {
		found := findLibrary(lib, dirs, f.Machine, f.Class)
		if found == "" {
			return fmt.Errorf("%s needs the shared library %s, which this host does not have", p, lib)
		}
		if err := c.file(found, found); err != nil {
			return err
		}
	}
	return nil
}

func isShort(p string) bool {
	st, err := os.Stat(p)
	return err == nil && st.Size() < 64
}

func findLibrary(name string, dirs []string, m elf.Machine, class elf.Class) string {
	if strings.Contains(name, "/") {
		return name
	}
	for _, d := range dirs {
		p := filepath.Join(d, name)
		f, err := elf.Open(p)
		if err != nil {
			continue
		}
		fits := f.Machine == m && f.Class == class
		f.Close()
		if fits {
			return p
		}
	}
	return ""
}

// libraryDirs lists where the host's loader looks, from its configuration and
// the directories it knows by itself.
func libraryDirs() []string {
	var dirs []string
	var read func(file string, depth int)
	read = func(file string, depth int) {
		b, err := os.ReadFile(file)
		if err != nil || depth > 4 {
			return
		}
		for line := range strings.Lines(string(b)) {
			line = strings.TrimSpace(line)
			if pattern, ok := strings.CutPrefix(line, "include "); ok {
				pattern = strings.TrimSpace(pattern)
				if !filepath.IsAbs(pattern) {
					pattern = filepath.Join("/etc", pattern)
				}
				matches, _ := filepath.Glob(pattern)
				for _, m := range matches {
					read(m, depth+1)
				}
				continue
			}
			if strings.HasPrefix(line, "/") {
				dirs = append(dirs, line)
			}
		}
	}
	read("/etc/ld.so.conf", 0)
	for _, base := range []string{"/usr/lib", "/lib"} {
		matches, _ := filepath.Glob(base + "/*-linux-*")
		dirs = append(dirs, matches...)
	}
	return append(dirs, "/usr/lib64", "/lib64", "/usr/lib", "/lib")
}

// names returns all entries' names sorted, with every parent directory present.
func (c *collector) names() []string {
	for name := range maps.Clone(c.entries) {
		for d := path.Dir(name); d != "."; d = path.Dir(d) {
			if _, ok := c.entries[d]; !ok {
				c.entries[d] = entry{dir: true}
			}
		}
	}
	return slices.Sorted(maps.Keys(c.entries))
}
