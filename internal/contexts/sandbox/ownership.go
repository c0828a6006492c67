package sandbox

import (
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/numinance/numinance/internal/core/pathscope"
	"github.com/numinance/numinance/internal/host/bridge"
)

// owner is who owns an entry of the work tree inside, and how it is open.
type owner struct {
	uid, gid int
	mode     int64
}

// The owners. A sticky directory takes new entries of the agent's and lets it
// replace its own alone.
var (
	rootDir   = owner{0, 0, 0o755}
	stickyDir = owner{0, bridge.UIDAgent, 0o1775}
	agentDir  = owner{bridge.UIDAgent, bridge.UIDAgent, 0o755}
)

// ownership decides by paths alone who owns what. It turns a scope into the
// walls of a file system: whatever may not be changed, and every directory above
// it, belongs to root. It is the first wall only; names at any depth, case
// variants and protected files that do not exist yet are refused by the host's
// diff of the snapshot, which is the authority.
type ownership struct {
	scope    pathscope.Scope
	readOnly bool
	whole    int             // uid that owns everything, by no scope; 0 for none
	dirs     map[string]bool // every directory, "." for the work root
	pinned   map[string]bool // directories with something of root's below
}

// probe is a name no scope lists: a directory takes new entries if it may hold
// this one.
const probe = "numinance-new-entry"

// newOwnership looks at all files of the tree, and at the directories that exist
// only in the scope.
func newOwnership(files, dirs []string, scope pathscope.Scope, readOnly bool) *ownership {
	o := &ownership{scope: scope, readOnly: readOnly, dirs: map[string]bool{".": true}, pinned: map[string]bool{".": true}}
	for _, f := range files {
		o.addDir(path.Dir(f))
	}
	for _, d := range dirs {
		o.addDir(d)
	}
	if !readOnly {
		o.scopeDirs()
	}
	for _, f := range files {
		if !o.allowed(f) {
			o.pin(path.Dir(f))
		}
	}
	denied := pathscope.Scope{Protected: scope.Denied}
	for d := range o.dirs {
		if d == "." {
			continue
		}
		if !o.takesNew(d) || scope.IsProtected(d) || scope.HoldsProtected(d) || denied.HoldsProtected(d) {
			o.pin(d)
		}
	}
	return o
}

// scopeDirs adds the allowed directories and the parents of allowed files that
// do not exist yet, and placeholders for protected directories that could be
// made otherwise.
func (o *ownership) scopeDirs() {
	for _, entry := range o.scope.Allowed {
		if entry == "**" {
			continue
		}
		if dir, ok := directory(entry); ok {
			o.addDir(dir)
		} else if pathscope.CheckPath(entry) == nil {
			o.addDir(path.Dir(entry))
		}
	}
	for _, entry := range slices.Concat(pathscope.Default(), o.scope.Protected, o.scope.Denied) {
		dir, ok := directory(entry)
		if !ok || o.dirs[dir] {
			continue
		}
		if o.takesNew(nearest(o.dirs, dir)) {
			o.addDir(dir)
		}
	}
}

// directory returns the directory a plain directory entry names.
func directory(entry string) (string, bool) {
	dir, ok := strings.CutSuffix(entry, "/**")
	if !ok {
		dir, ok = strings.CutSuffix(entry, "/")
	}
	return dir, ok && pathscope.CheckPath(dir) == nil && !strings.Contains(dir, "*")
}

// nearest returns the lowest directory above p that exists.
func nearest(dirs map[string]bool, p string) string {
	for d := path.Dir(p); ; d = path.Dir(d) {
		if dirs[d] {
			return d
		}
	}
}

func (o *ownership) addDir(d string) {
	for ; d != "." && !o.dirs[d]; d = path.Dir(d) {
		o.dirs[d] = true
	}
}

// pin marks d and everything above as root's.
func (o *ownership) pin(d string) {
	for ; d != "." && !o.pinned[d]; d = path.Dir(d) {
		o.pinned[d] = true
	}
}

func (o *ownership) allowed(p string) bool {
	if o.readOnly {
		return false
	}
	ok, _ := o.scope.Check(p)
	return ok
}

// takesNew reports whether the scope allows new entries in d: any, or a file it
// names that is not there yet.
func (o *ownership) takesNew(d string) bool {
	return o.allowed(path.Join(d, probe))
}

// file returns the owner of a file; exec is its one mode bit that matters.
func (o *ownership) file(p string, exec bool) owner {
	mode := int64(0o644)
	if exec {
		mode = 0o755
	}
	if o.whole != 0 {
		return owner{o.whole, o.whole, mode}
	}
	if o.allowed(p) {
		return owner{bridge.UIDAgent, bridge.UIDAgent, mode}
	}
	return owner{0, 0, mode}
}

// directories returns every directory with its owner, parents first. absent
// reports files that the scope names and the tree lacks: their directory must
// take new entries.
func (o *ownership) directories(exists func(string) bool) ([]string, map[string]owner) {
	wants := map[string]bool{}
	if !o.readOnly {
		for _, entry := range o.scope.Allowed {
			if _, isDir := directory(entry); !isDir && entry != "**" && o.allowed(entry) && !exists(entry) {
				wants[path.Dir(entry)] = true
			}
		}
	}
	names := slices.Sorted(maps.Keys(o.dirs))
	owners := make(map[string]owner, len(names))
	for _, d := range names {
		switch {
		case o.whole != 0:
			owners[d] = owner{o.whole, o.whole, 0o755}
		case !o.pinned[d]:
			owners[d] = agentDir
		case o.takesNew(d) || wants[d]:
			owners[d] = stickyDir
		default:
			owners[d] = rootDir
		}
	}
	return names, owners
}
