package worktree

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/numinance/numinance/internal/core/pathscope"
	"golang.org/x/text/cases"
	"golang.org/x/text/unicode/norm"
)

// Identity is the name that a commit bears.
type Identity struct {
	Name  string
	Email string
}

// Rules say what of a snapshot may become a candidate.
type Rules struct {
	Scope pathscope.Scope
	// Scratch lists directories that are never exported, as "build/cache".
	Scratch []string
	// Author and When go into the commit, for author and committer alike, so
	// that the same snapshot always gives the same commit.
	Author  Identity
	When    time.Time
	Message string
	// Limits of the snapshot; zero stands for the defaults of the package.
	MaxEntries   int
	MaxFileBytes int64
	MaxBytes     int64
}

// Kind is what happened to a path; the zero value is none.
type Kind uint8

// The kinds.
const (
	KindNone Kind = iota
	KindAdded
	KindModified
	KindDeleted
)

func (k Kind) String() string {
	switch k {
	case KindAdded:
		return "added"
	case KindModified:
		return "modified"
	case KindDeleted:
		return "deleted"
	}
	return "none"
}

// Change is one path that differs from the base.
type Change struct {
	Path             string // its exact bytes
	Kind             Kind
	OldMode, NewMode Mode
	OldID, NewID     string
	Size             int64 // of the new content
}

// Violation is one path that may not be as the snapshot has it, and why.
type Violation struct {
	Path   string
	Reason string
}

// Dropped counts what was left behind on purpose.
type Dropped struct {
	Ignored int // untracked, and ignored by the base's rules
	Scratch int // in a scratch directory
	Git     int // in the throw-away .git of the work root
	SetID   int // setuid and setgid bits
}

// Candidate is what a snapshot amounts to. It is a commit of the store even if
// it has violations; the caller must refuse it then.
type Candidate struct {
	Base    string
	Commit  string // equal to Base if nothing changed
	Tree    string
	Changes []Change // in byte order of their paths
	// Violations holds the first 1,000; Violated counts them all. A candidate
	// with any may not leave the host (H-045, P-116).
	Violations []Violation
	Violated   int
	Dropped    Dropped
}

// Clean reports whether nothing is refused.
func (c Candidate) Clean() bool { return c.Violated == 0 }

// Empty reports whether the snapshot equals its base.
func (c Candidate) Empty() bool { return len(c.Changes) == 0 }

func (c *Candidate) refuse(path, format string, args ...any) {
	c.Violated++
	if len(c.Violations) < maxViolations {
		c.Violations = append(c.Violations, Violation{Path: path, Reason: fmt.Sprintf(format, args...)})
	}
}

// Diff reads the tar of a work tree, as a sandbox exported it, and compares it
// with the base revision of the store. Every difference outside the scope or
// on a protected path, and everything that Git cannot or should not hold, is a
// violation. An error (ErrSnapshot among them) means that there is no
// candidate at all. Submodules stay as the base has them.
func (s *Store) Diff(ctx context.Context, base string, snapshot io.Reader, rules Rules) (Candidate, error) {
	if err := rules.check(); err != nil {
		return Candidate{}, fmt.Errorf("diff: %w", err)
	}
	list, err := s.list(ctx, base)
	if err != nil {
		return Candidate{}, fmt.Errorf("diff: %w", err)
	}
	ignore, err := s.newIgnoreRules(ctx, list)
	if err != nil {
		return Candidate{}, fmt.Errorf("diff: %w", err)
	}
	defer ignore.close()
	d := &differ{
		rules:  rules,
		base:   make(map[string]Entry, len(list)),
		found:  make(map[string]Entry, len(list)),
		ignore: ignore,
		write:  s.newObjectWriter(base, list),
		result: Candidate{Base: base},
	}
	for _, e := range list {
		d.base[e.Path] = e
		if e.Mode == ModeSubmodule {
			d.submodules = append(d.submodules, e.Path)
		}
	}
	if err := d.read(ctx, newSnapshot(snapshot, rules.limits())); err != nil {
		return Candidate{}, fmt.Errorf("diff: %w", err)
	}
	d.keep()
	d.result.Changes = compare(d.base, d.found)
	d.result.judge(rules.Scope, d.targets)
	d.result.collisions(d.found)
	if err := d.commit(); err != nil {
		return Candidate{}, fmt.Errorf("diff: write the candidate: %w", err)
	}
	tree, err := s.TreeOf(ctx, d.result.Commit)
	if err != nil {
		return Candidate{}, fmt.Errorf("diff: %w", err)
	}
	if d.result.Tree != "" && tree != d.result.Tree {
		return Candidate{}, fmt.Errorf("diff: git reads tree %s where %s was written", tree, d.result.Tree)
	}
	d.result.Tree = tree
	return d.result, nil
}

// Compare lists what differs between two revisions of the store, and which of
// it the scope refuses; for a candidate that was rebased.
func (s *Store) Compare(ctx context.Context, base, commit string, scope pathscope.Scope) (Candidate, error) {
	maps := [2]map[string]Entry{}
	for i, revision := range []string{base, commit} {
		list, err := s.list(ctx, revision)
		if err != nil {
			return Candidate{}, fmt.Errorf("compare: %w", err)
		}
		maps[i] = make(map[string]Entry, len(list))
		for _, e := range list {
			maps[i][e.Path] = e
		}
	}
	tree, err := s.TreeOf(ctx, commit)
	if err != nil {
		return Candidate{}, fmt.Errorf("compare: %w", err)
	}
	c := Candidate{Base: base, Commit: commit, Tree: tree, Changes: compare(maps[0], maps[1])}
	targets, err := s.linkTargets(ctx, c.Changes)
	if err != nil {
		return Candidate{}, fmt.Errorf("compare: %w", err)
	}
	c.judge(scope, targets)
	c.collisions(maps[1])
	return c, nil
}

func (s *Store) linkTargets(ctx context.Context, changes []Change) (map[string]string, error) {
	ctx, cancel := context.WithCancel(ctx)
	blobs, err := s.newBlobReader(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	defer func() {
		cancel()
		blobs.close()
	}()
	targets := map[string]string{}
	for _, c := range changes {
		if c.NewMode != ModeSymlink {
			continue
		}
		if c.Size > maxName {
			return nil, fmt.Errorf("link %q has a target of %d bytes", c.Path, c.Size)
		}
		r, err := blobs.open(c.NewID, c.Size)
		if err != nil {
			return nil, err
		}
		target, err := io.ReadAll(r)
		if err != nil {
			return nil, err
		}
		targets[c.Path] = string(target)
	}
	return targets, nil
}

func (r Rules) check() error {
	if err := r.Scope.Validate(); err != nil {
		return err
	}
	for _, dir := range r.Scratch {
		if err := pathscope.CheckPath(strings.TrimSuffix(dir, "/")); err != nil {
			return fmt.Errorf("scratch directory: %w", err)
		}
	}
	for _, part := range []string{r.Author.Name, r.Author.Email} {
		if part == "" || strings.ContainsAny(part, "<>\n\x00") {
			return fmt.Errorf("author %q <%s>: name and address must be given, without < > and line breaks", r.Author.Name, r.Author.Email)
		}
	}
	switch {
	case r.When.IsZero():
		return errors.New("the date of the commit is not given")
	case r.Message == "" || strings.ContainsRune(r.Message, 0):
		return errors.New("the message of the commit is empty or holds a NUL")
	}
	return nil
}

func (r Rules) limits() limits {
	l := limits{entries: r.MaxEntries, fileBytes: r.MaxFileBytes, bytes: r.MaxBytes}
	if l.entries <= 0 {
		l.entries = DefaultMaxEntries
	}
	if l.fileBytes <= 0 {
		l.fileBytes = DefaultMaxFileBytes
	}
	if l.bytes <= 0 {
		l.bytes = DefaultMaxBytes
	}
	return l
}

type differ struct {
	rules      Rules
	base       map[string]Entry
	found      map[string]Entry
	targets    map[string]string // of symbolic links
	submodules []string
	ignore     *ignoreRules
	write      *objectWriter
	result     Candidate
}

func (d *differ) read(ctx context.Context, s *snapshot) error {
	d.targets = map[string]string{}
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		it, err := s.next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := d.take(it, s.tar); err != nil {
			return fmt.Errorf("%q: %w", it.path, err)
		}
	}
}

// take puts one entry where it belongs: dropped, refused or found.
func (d *differ) take(it item, content io.Reader) error {
	if it.path == ".git" || strings.HasPrefix(it.path, ".git/") {
		d.result.Dropped.Git++
		return nil
	}
	if d.scratch(it.path) {
		d.result.Dropped.Scratch++
		return nil
	}
	if it.kind == tar.TypeDir {
		// Git holds no directories, so only a forbidden name matters; a
		// protected placeholder that stayed empty vanishes here.
		return d.checkDirectory(it.path)
	}
	if at := d.inSubmodule(it.path); at != "" {
		d.result.refuse(it.path, "lies in the submodule %q, which a run may not change", at)
		return nil
	}
	if _, tracked := d.base[it.path]; !tracked {
		ignored, err := d.ignore.ignores(it.path)
		if err != nil {
			return err
		}
		if ignored {
			d.result.Dropped.Ignored++
			return nil
		}
	}
	if it.setid {
		d.result.Dropped.SetID++
	}
	e := Entry{Path: it.path, Mode: ModeFile, Size: it.size}
	if it.exec {
		e.Mode = ModeExecutable
	}
	var err error
	switch it.kind {
	case tar.TypeReg:
		e.ID, err = d.write.blob(content, it.size)
	case tar.TypeSymlink:
		e.Mode, e.Size = ModeSymlink, int64(len(it.target))
		d.targets[it.path] = it.target
		e.ID, err = d.write.object("blob", []byte(it.target))
	case tar.TypeLink:
		first, ok := d.found[it.target]
		if !ok || first.Mode == ModeSymlink {
			d.result.refuse(it.path, "hard link to %q, which does not leave the sandbox", it.target)
			return nil
		}
		e.ID, e.Size, e.Mode = first.ID, first.Size, first.Mode
	default:
		d.result.refuse(it.path, "is a device, pipe, socket or other special file (tar type %q)", it.kind)
		return nil
	}
	d.found[it.path] = e
	return err
}

// checkDirectory refuses directories that a checkout elsewhere would take for
// something else. Their files would be refused as well; an empty one is
// refused so that nothing is dropped unseen.
func (d *differ) checkDirectory(path string) error {
	segment := path[strings.LastIndexByte(path, '/')+1:]
	if strings.HasPrefix(path, ".git/") || !looksLikeGit(segment) {
		return nil
	}
	ignored, err := d.ignore.ignores(path + "/x")
	if err != nil {
		return err
	}
	if ignored || d.inSubmodule(path) != "" {
		return nil
	}
	d.result.refuse(path, "a repository inside the work tree; only the .git of the work root is thrown away")
	return nil
}

// looksLikeGit reports whether a file system or code host could take the name
// for .git.
func looksLikeGit(segment string) bool {
	visible := strings.Map(func(r rune) rune {
		if unicode.Is(unicode.Cf, r) || unicode.Is(unicode.Variation_Selector, r) || unicode.Is(unicode.Other_Default_Ignorable_Code_Point, r) {
			return -1
		}
		return r
	}, norm.NFKC.String(segment))
	name, _, _ := strings.Cut(foldName(visible), ":")
	name = strings.TrimRight(name, ". ")
	return name == ".git" || name == "git~1"
}

func (d *differ) scratch(path string) bool {
	for _, dir := range d.rules.Scratch {
		dir = strings.TrimSuffix(dir, "/")
		if path == dir || strings.HasPrefix(path, dir+"/") {
			return true
		}
	}
	return false
}

func (d *differ) inSubmodule(path string) string {
	for _, at := range d.submodules {
		if path == at || strings.HasPrefix(path, at+"/") {
			return at
		}
	}
	return ""
}

// keep adds what a snapshot never carries back: submodules, and what the base
// has in scratch directories.
func (d *differ) keep() {
	for path, e := range d.base {
		if e.Mode == ModeSubmodule || d.scratch(path) {
			d.found[path] = e
		}
	}
}

func compare(base, now map[string]Entry) []Change {
	var changes []Change
	for path, e := range now {
		old, ok := base[path]
		switch {
		case !ok:
			changes = append(changes, Change{Path: path, Kind: KindAdded, NewMode: e.Mode, NewID: e.ID, Size: e.Size})
		case old.ID != e.ID || old.Mode != e.Mode:
			changes = append(changes, Change{Path: path, Kind: KindModified, OldMode: old.Mode, NewMode: e.Mode, OldID: old.ID, NewID: e.ID, Size: e.Size})
		}
	}
	for path, old := range base {
		if _, ok := now[path]; !ok {
			changes = append(changes, Change{Path: path, Kind: KindDeleted, OldMode: old.Mode, OldID: old.ID})
		}
	}
	slices.SortFunc(changes, func(a, b Change) int { return strings.Compare(a.Path, b.Path) })
	return changes
}

// judge refuses every change that the scope does not allow (H-045, P-116).
func (c *Candidate) judge(scope pathscope.Scope, targets map[string]string) {
	for _, change := range c.Changes {
		if ok, reason := scope.Check(change.Path); !ok {
			c.refuse(change.Path, "%s: %s", change.Kind, reason)
			continue
		}
		if change.NewMode == ModeSubmodule || change.OldMode == ModeSubmodule {
			c.refuse(change.Path, "%s: a run may not change a submodule", change.Kind)
		}
		if change.NewMode == ModeSymlink {
			if fault := linkFault(change.Path, targets[change.Path]); fault != "" {
				c.refuse(change.Path, "%s: %s", change.Kind, fault)
			}
		}
	}
}

// collisions refuses added names that some file system would take for another
// name of the same tree. What the base already has may stay.
func (c *Candidate) collisions(now map[string]Entry) {
	added := false
	for _, change := range c.Changes {
		added = added || change.Kind == KindAdded
	}
	if !added {
		return
	}
	names := make(map[string][]string, len(now))
	for path := range now {
		// Directories collide too: "A/x" and "a/y".
		for end := 0; end < len(path); end++ {
			next := strings.IndexByte(path[end:], '/')
			if next < 0 {
				end = len(path)
			} else {
				end += next
			}
			spelling := path[:end]
			folded := foldName(spelling)
			if !slices.Contains(names[folded], spelling) {
				names[folded] = append(names[folded], spelling)
			}
		}
	}
	for _, change := range c.Changes {
		if change.Kind != KindAdded {
			continue
		}
		for end := 0; end < len(change.Path); end++ {
			next := strings.IndexByte(change.Path[end:], '/')
			if next < 0 {
				end = len(change.Path)
			} else {
				end += next
			}
			spelling := change.Path[:end]
			if same := names[foldName(spelling)]; len(same) > 1 {
				other := same[0]
				if other == spelling {
					other = same[1]
				}
				c.refuse(change.Path, "added: %q and %q are one name on file systems that fold case or Unicode", spelling, other)
				break
			}
		}
	}
}

func foldName(s string) string {
	for i := 0; i < len(s); i++ {
		if s[i] >= 0x80 {
			return norm.NFC.String(cases.Fold().String(norm.NFC.String(s)))
		}
	}
	return strings.ToLower(s)
}

// commit writes the tree and the commit; with no change it is the base.
func (d *differ) commit() error {
	if len(d.result.Changes) == 0 {
		d.result.Commit = d.result.Base
		return nil
	}
	root := newNode()
	for path, e := range d.found {
		if err := root.add(path, leaf{octal: e.Mode.octal(), id: e.ID}); err != nil {
			return err
		}
	}
	tree, err := d.write.tree(root)
	if err != nil {
		return err
	}
	d.result.Tree = tree
	if d.result.Commit, err = d.write.object("commit", encodeCommit(tree, d.result.Base, d.rules.Author, d.rules.When, d.rules.Message)); err != nil {
		return err
	}
	return d.write.sync()
}

func encodeCommit(tree, parent string, by Identity, when time.Time, message string) []byte {
	who := fmt.Sprintf("%s <%s> %d +0000", by.Name, by.Email, when.Unix())
	return fmt.Appendf(nil, "tree %s\nparent %s\nauthor %s\ncommitter %s\n\n%s\n", tree, parent, who, who, strings.TrimRight(message, "\n"))
}
