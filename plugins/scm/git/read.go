package git

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	scmv1 "github.com/numinance/numinance/gen/numinance/ports/scm/v1"
	"github.com/numinance/numinance/sdk"
)

// packType is the media type of a Git pack.
const packType = "application/x-git-packed-objects"

// server serves the port.
type server struct {
	scmv1.UnimplementedScmServiceServer
	forge   *Forge
	host    *sdk.Host
	effects *sdk.Effects
}

// valid checks the bounds of the contract.
func valid(m proto.Message) error {
	if err := protovalidate.Validate(m); err != nil {
		return invalid("%s", text(err.Error(), 1024))
	}
	return nil
}

func (s *server) GetRepository(ctx context.Context, q *scmv1.GetRepositoryRequest) (*scmv1.GetRepositoryResponse, error) {
	if err := valid(q); err != nil {
		return nil, err
	}
	r, err := s.forge.repository(q.GetRepository())
	if err != nil {
		return nil, err
	}
	main, err := r.defaultBranch(ctx)
	if err != nil {
		return nil, err
	}
	branch := q.GetBranch()
	if branch == "" {
		branch = main
	}
	if err := checkBranch("branch", branch); err != nil {
		return nil, err
	}
	revision, ok, err := r.tip(ctx, branch)
	if err != nil {
		return nil, err
	}
	if !ok {
		if refs, err := r.git.line(ctx, "for-each-ref", "--count=1", "refs/heads/"); err == nil && refs == "" {
			return nil, status.Errorf(codes.FailedPrecondition, "repository %q has no commit", q.GetRepository())
		}
		return nil, status.Errorf(codes.NotFound, "no branch %q", branch)
	}
	a := &scmv1.GetRepositoryResponse{
		Repository: &scmv1.Repository{Name: r.config.Name, DefaultBranch: main, Archived: r.config.Archived, WebUrl: r.config.WebURL},
		BaseBranch: branch, BaseRevision: revision,
	}
	if q.GetObjects() == scmv1.ObjectsMode_OBJECTS_MODE_REVISION {
		if a.Objects, err = s.putRevision(ctx, r, revision); err != nil {
			return nil, err
		}
	}
	return a, nil
}

func (s *server) GetTree(ctx context.Context, q *scmv1.GetTreeRequest) (*scmv1.GetTreeResponse, error) {
	r, err := s.at(ctx, q, q.GetRepository(), q.GetRevision())
	if err != nil {
		return nil, err
	}
	if err := checkPath("path", q.GetPath(), true); err != nil {
		return nil, err
	}
	from := 0
	if t := q.GetPageToken(); t != "" {
		if from, err = strconv.Atoi(t); err != nil || from <= 0 {
			return nil, invalid("page_token %q was not given by this provider", t)
		}
	}
	args := []string{"ls-tree", "-z", "--long", "--full-tree"}
	if q.GetRecursive() {
		args = append(args, "-r", "-t")
	}
	object := q.GetRevision() + "^{tree}"
	if q.GetPath() != "" {
		at, err := r.entry(ctx, q.GetRevision(), q.GetPath())
		if err != nil {
			return nil, err
		}
		if at.kind != scmv1.EntryType_ENTRY_TYPE_DIRECTORY {
			return nil, status.Errorf(codes.NotFound, "no directory %q at %s", q.GetPath(), q.GetRevision())
		}
		object = at.id
	}
	out, err := r.git.output(ctx, nil, append(args, "--end-of-options", object)...)
	if err != nil {
		return nil, failed("list tree", err)
	}
	entries, err := parseTree(out)
	if err != nil {
		return nil, failed("list tree", err)
	}
	slices.SortFunc(entries, func(a, b entry) int { return strings.Compare(a.path, b.path) })
	a := &scmv1.GetTreeResponse{}
	to := min(from+int(q.GetPageSize()), len(entries))
	for _, e := range entries[min(from, to):to] {
		if q.GetPath() != "" {
			e.path = q.GetPath() + "/" + e.path
		}
		a.Entries = append(a.Entries, e.message())
	}
	if to < len(entries) {
		a.NextPageToken = strconv.Itoa(to)
	}
	return a, nil
}

func (s *server) GetFile(ctx context.Context, q *scmv1.GetFileRequest) (*scmv1.GetFileResponse, error) {
	r, err := s.at(ctx, q, q.GetRepository(), q.GetRevision())
	if err != nil {
		return nil, err
	}
	if err := checkPath("path", q.GetPath(), false); err != nil {
		return nil, err
	}
	e, err := r.entry(ctx, q.GetRevision(), q.GetPath())
	if err != nil {
		return nil, err
	}
	a := &scmv1.GetFileResponse{ObjectId: e.id, Type: e.kind, TotalBytes: e.size}
	switch e.kind {
	case scmv1.EntryType_ENTRY_TYPE_DIRECTORY:
		return nil, status.Errorf(codes.NotFound, "no file %q at %s: it is a directory", q.GetPath(), q.GetRevision())
	case scmv1.EntryType_ENTRY_TYPE_SUBMODULE:
		return a, nil
	}
	head := &first{left: int(q.GetMaxBytes())}
	if err := r.git.run(ctx, nil, head, "cat-file", "blob", e.id); err != nil && !head.full {
		return nil, failed("read file", err)
	}
	a.Content = head.bytes
	a.Truncated = int64(len(a.Content)) < e.size
	return a, nil
}

func (s *server) ListBranches(ctx context.Context, q *scmv1.ListBranchesRequest) (*scmv1.ListBranchesResponse, error) {
	if err := valid(q); err != nil {
		return nil, err
	}
	r, err := s.forge.repository(q.GetRepository())
	if err != nil {
		return nil, err
	}
	after, err := base64.RawURLEncoding.DecodeString(q.GetPageToken())
	if err != nil {
		return nil, invalid("page_token %q was not given by this provider", q.GetPageToken())
	}
	out, err := r.git.output(ctx, nil, "for-each-ref", "--format=%(objectname) %(refname)", "refs/heads/")
	if err != nil {
		return nil, failed("list branches", err)
	}
	protections, err := r.protections(ctx)
	if err != nil {
		return nil, err
	}
	var all []*scmv1.Branch
	for line := range strings.SplitSeq(strings.TrimSuffix(out, "\n"), "\n") {
		revision, ref, _ := strings.Cut(line, " ")
		name := strings.TrimPrefix(ref, "refs/heads/")
		// A name that no request could carry cannot be listed either.
		if name == "" || len(name) > 256 || !utf8.ValidString(name) || name <= string(after) || !strings.HasPrefix(name, q.GetPrefix()) {
			continue
		}
		_, protected := protections[name]
		all = append(all, &scmv1.Branch{Name: name, Revision: revision, Protected: protected})
	}
	slices.SortFunc(all, func(a, b *scmv1.Branch) int { return strings.Compare(a.GetName(), b.GetName()) })
	a := &scmv1.ListBranchesResponse{Branches: all}
	if size := int(q.GetPageSize()); len(all) > size {
		a.Branches = all[:size]
		a.NextPageToken = base64.RawURLEncoding.EncodeToString([]byte(all[size-1].GetName()))
	}
	return a, nil
}

func (s *server) GetBranchProtection(ctx context.Context, q *scmv1.GetBranchProtectionRequest) (*scmv1.GetBranchProtectionResponse, error) {
	if err := valid(q); err != nil {
		return nil, err
	}
	r, err := s.forge.repository(q.GetRepository())
	if err != nil {
		return nil, err
	}
	if err := checkBranch("branch", q.GetBranch()); err != nil {
		return nil, err
	}
	if _, err := r.mustTip(ctx, q.GetBranch()); err != nil {
		return nil, err
	}
	if err := r.ensureGuard(ctx); err != nil {
		return nil, failed("read protection", err)
	}
	p, protected, err := r.protection(ctx, q.GetBranch())
	if err != nil {
		return nil, err
	}
	if !protected {
		p = Protection{DirectPush: true, ForcePush: true}
	}
	return &scmv1.GetBranchProtectionResponse{Protection: &scmv1.BranchProtection{
		Protected: protected, RequiredApprovals: uint32(p.RequiredApprovals), RequiredChecks: p.RequiredChecks,
		DismissStaleApprovals: p.DismissStaleApprovals, DirectPush: p.DirectPush, ForcePush: p.ForcePush,
		EnforcedForAdmins: protected, ProtectedPaths: p.ProtectedPaths,
	}}, nil
}

func (s *server) GetPullRequestStatus(ctx context.Context, q *scmv1.GetPullRequestStatusRequest) (*scmv1.GetPullRequestStatusResponse, error) {
	if err := valid(q); err != nil {
		return nil, err
	}
	r, err := s.forge.repository(q.GetRepository())
	if err != nil {
		return nil, err
	}
	p, err := r.settled(ctx, q.GetPullRequest())
	if err != nil {
		return nil, err
	}
	view, err := r.view(ctx, p)
	if err != nil {
		return nil, err
	}
	a := &scmv1.GetPullRequestStatusResponse{PullRequest: view, Mergeability: scmv1.Mergeability_MERGEABILITY_UNKNOWN}
	checks, err := r.checks(view.GetHeadRevision())
	if err != nil {
		return nil, err
	}
	for name, c := range checks {
		a.Checks = append(a.Checks, &scmv1.Check{Name: name, State: checkStates[c.State], Revision: view.GetHeadRevision(), WebUrl: c.WebURL})
	}
	slices.SortFunc(a.Checks, func(x, y *scmv1.Check) int { return strings.Compare(x.GetName(), y.GetName()) })
	for _, rv := range p.Reviews {
		a.Reviews = append(a.Reviews, &scmv1.Review{Reviewer: rv.Reviewer, State: reviewStates[rv.State], Revision: rv.Revision})
	}
	if p.State == "open" {
		if a.Mergeability, err = r.mergeability(ctx, p, view); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// settled is pull after any interrupted merge was ended.
func (r *repository) settled(ctx context.Context, name string) (*pull, error) {
	p, err := r.pull(name)
	if err != nil || p.Merging == nil {
		return p, err
	}
	unlock, err := r.lock()
	if err != nil {
		return nil, failed("read pull request", err)
	}
	defer unlock()
	if p, err = r.pull(name); err != nil {
		return nil, err
	}
	return p, r.settle(ctx, p)
}

func (r *repository) mergeability(ctx context.Context, p *pull, view *scmv1.PullRequest) (scmv1.Mergeability, error) {
	const unknown = scmv1.Mergeability_MERGEABILITY_UNSPECIFIED
	_, err := r.mergeTree(ctx, view.GetBaseRevision(), view.GetHeadRevision(), false)
	switch {
	case errors.Is(err, errConflict):
		return scmv1.Mergeability_MERGEABILITY_CONFLICT, nil
	case errors.Is(err, errNothing):
		return scmv1.Mergeability_MERGEABILITY_BLOCKED, nil
	case err != nil:
		return unknown, failed("try the merge", err)
	}
	why, err := r.blocked(ctx, p, view.GetHeadRevision(), view.GetBaseRevision())
	switch {
	case err != nil:
		return unknown, err
	case why != "":
		return scmv1.Mergeability_MERGEABILITY_BLOCKED, nil
	}
	return scmv1.Mergeability_MERGEABILITY_CLEAN, nil
}

func (s *server) SearchCode(ctx context.Context, q *scmv1.SearchCodeRequest) (*scmv1.SearchCodeResponse, error) {
	r, err := s.at(ctx, q, q.GetRepository(), q.GetRevision())
	if err != nil {
		return nil, err
	}
	if err := checkPath("path_prefix", q.GetPathPrefix(), true); err != nil {
		return nil, err
	}
	if strings.ContainsAny(q.GetQuery(), "\x00\n\r") {
		return nil, invalid("query: a line of a file holds no line break or NUL")
	}
	args := []string{"grep", "-z", "-n", "-F", "-I", "--no-color", "--full-name", "--no-textconv", "-e", q.GetQuery(), q.GetRevision()}
	if q.GetPathPrefix() != "" {
		args = append(args, "--", q.GetPathPrefix()+"/")
	}
	const most = 2 << 20 // bytes of raw matches; enough for any 100 lines that a person reads
	raw := &first{left: most}
	if err := r.git.run(ctx, nil, raw, args...); err != nil && !raw.full && !exited(err, 1) {
		return nil, failed("search", err)
	}
	a := &scmv1.SearchCodeResponse{Truncated: raw.full}
	type match struct {
		path string
		line uint32
		text string
	}
	var matches []match
	for line := range strings.SplitSeq(string(raw.bytes), "\n") {
		line, ok := strings.CutPrefix(line, q.GetRevision()+":")
		fields := strings.SplitN(line, "\x00", 3)
		if !ok || len(fields) != 3 {
			continue // the end, or a line that was cut
		}
		n, err := strconv.ParseUint(fields[1], 10, 32)
		if err != nil {
			continue
		}
		matches = append(matches, match{fields[0], uint32(n), fields[2]})
	}
	slices.SortStableFunc(matches, func(x, y match) int { return strings.Compare(x.path, y.path) })
	if size := int(q.GetMaxResults()); len(matches) > size {
		matches, a.Truncated = matches[:size], true
	}
	for _, m := range matches {
		e, err := r.entry(ctx, q.GetRevision(), m.path)
		if err != nil {
			return nil, err
		}
		a.Matches = append(a.Matches, &scmv1.CodeMatch{Path: text(m.path, 4096), Line: m.line, Snippet: text(m.text, 1024), ObjectId: e.id})
	}
	return a, nil
}

// at is the start of every verb that reads at a revision.
func (s *server) at(ctx context.Context, q proto.Message, name, revision string) (*repository, error) {
	if err := checkRevision("revision", revision); err != nil {
		return nil, err
	}
	if err := valid(q); err != nil {
		return nil, err
	}
	r, err := s.forge.repository(name)
	if err != nil {
		return nil, err
	}
	return r, r.mustCommit(ctx, revision)
}

// entry is one row of a tree.
type entry struct {
	path string
	kind scmv1.EntryType
	id   string
	size int64
}

func (e entry) message() *scmv1.TreeEntry {
	m := &scmv1.TreeEntry{Path: text(e.path, 4096), Type: e.kind, ObjectId: e.id, SizeBytes: e.size}
	if !utf8.ValidString(e.path) {
		m.RawPath = []byte(e.path)
	}
	return m
}

// entry returns what is at path, or NOT_FOUND.
func (r *repository) entry(ctx context.Context, revision, path string) (entry, error) {
	out, err := r.git.output(ctx, nil, "ls-tree", "-z", "--long", "--full-tree", "--end-of-options", revision, "--", path)
	if err != nil {
		return entry{}, failed("read tree", err)
	}
	entries, err := parseTree(out)
	if err != nil {
		return entry{}, failed("read tree", err)
	}
	for _, e := range entries {
		if e.path == path {
			return e, nil
		}
	}
	return entry{}, status.Errorf(codes.NotFound, "no path %q at %s", path, revision)
}

func parseTree(out string) ([]entry, error) {
	var entries []entry
	for out != "" {
		row, rest, ok := strings.Cut(out, "\x00")
		head, path, tab := strings.Cut(row, "\t")
		f := strings.Fields(head)
		if !ok || !tab || len(f) != 4 {
			return nil, fmt.Errorf("tree listing is malformed at %q", row)
		}
		e := entry{path: path, id: f[2]}
		switch {
		case f[0] == "040000":
			e.kind = scmv1.EntryType_ENTRY_TYPE_DIRECTORY
		case f[0] == "160000":
			e.kind = scmv1.EntryType_ENTRY_TYPE_SUBMODULE
		case f[0] == "120000":
			e.kind = scmv1.EntryType_ENTRY_TYPE_SYMLINK
		case f[1] == "blob" && (f[0] == "100755" || f[0] == "100775"):
			e.kind = scmv1.EntryType_ENTRY_TYPE_EXECUTABLE
		case f[1] == "blob":
			e.kind = scmv1.EntryType_ENTRY_TYPE_FILE
		default:
			return nil, fmt.Errorf("entry %q has the mode %s", path, f[0])
		}
		if f[1] == "blob" {
			size, err := strconv.ParseInt(f[3], 10, 64)
			if err != nil {
				return nil, fmt.Errorf("entry %q: its object is missing", path)
			}
			e.size = size
		}
		entries = append(entries, e)
		out = rest
	}
	return entries, nil
}

// first takes a bound of bytes and then ends the process that writes.
type first struct {
	bytes []byte
	left  int
	full  bool
}

func (f *first) Write(p []byte) (int, error) {
	n := min(len(p), f.left)
	f.bytes = append(f.bytes, p[:n]...)
	f.left -= n
	if n < len(p) {
		f.full = true
		return n, io.ErrShortWrite
	}
	return n, nil
}
