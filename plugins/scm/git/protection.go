package git

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Protection is what the forge enforces on a branch. A branch that has one
// moves by merges only, for everybody, unless DirectPush says otherwise.
type Protection struct {
	// RequiredApprovals counts approving reviews, 0 to 100.
	RequiredApprovals int `json:"required_approvals,omitempty"`
	// RequiredChecks must have succeeded on the head.
	RequiredChecks []string `json:"required_checks,omitempty"`
	// DismissStaleApprovals counts only approvals of the head as it is now.
	DismissStaleApprovals bool `json:"dismiss_stale_approvals,omitempty"`
	DirectPush            bool `json:"direct_push,omitempty"`
	ForcePush             bool `json:"force_push,omitempty"`
	// ProtectedPaths are files ("a/b") or directories ("a/") that a merge may
	// not change.
	ProtectedPaths []string `json:"protected_paths,omitempty"`
}

func (p Protection) check(branch string) error {
	if err := checkBranch("branch", branch); err != nil {
		return err
	}
	if p.RequiredApprovals < 0 || p.RequiredApprovals > 100 || len(p.RequiredChecks) > 100 || len(p.ProtectedPaths) > 1000 {
		return fmt.Errorf("protection of %q: at most 100 approvals, 100 checks and 1000 paths", branch)
	}
	for _, name := range p.RequiredChecks {
		if name == "" || len(name) > 256 {
			return fmt.Errorf("protection of %q: check %q: 1 to 256 bytes", branch, name)
		}
	}
	for _, path := range p.ProtectedPaths {
		if err := checkPath("protected path", strings.TrimSuffix(path, "/"), false); err != nil {
			return err
		}
	}
	return nil
}

// Protect sets the protection of a branch, or lifts it if p is nil.
func (f *Forge) Protect(ctx context.Context, repository, branch string, p *Protection) error {
	r, unlock, err := f.write(repository)
	if err != nil {
		return err
	}
	defer unlock()
	if p != nil {
		if err := p.check(branch); err != nil {
			return err
		}
	}
	all, err := r.protections(ctx)
	if err != nil {
		return err
	}
	if p == nil {
		delete(all, branch)
	} else {
		all[branch] = *p
	}
	if err := saveJSON(filepath.Join(r.state, "protection.json"), all); err != nil {
		return fmt.Errorf("protect %q: %w", branch, err)
	}
	return r.guard(all)
}

// protections returns the forge's own table, which the configuration fills as
// long as nobody changed it.
func (r *repository) protections(ctx context.Context) (map[string]Protection, error) {
	all := map[string]Protection{}
	found, err := loadJSON(filepath.Join(r.state, "protection.json"), &all)
	if err != nil {
		return nil, status.Errorf(codes.DataLoss, "read protection: %v", err)
	}
	if found {
		return all, nil
	}
	main, err := r.defaultBranch(ctx)
	if err != nil {
		return nil, err
	}
	all[main] = Protection{}
	for branch, p := range r.config.Protection {
		all[branch] = p
	}
	return all, nil
}

func (r *repository) protection(ctx context.Context, branch string) (p Protection, protected bool, err error) {
	all, err := r.protections(ctx)
	if err != nil {
		return Protection{}, false, err
	}
	p, protected = all[branch]
	return p, protected, nil
}

// receiveHook refuses pushes by Git itself to what is listed beside it. The
// forge's own commands run without hooks.
const receiveHook = `#!/bin/sh
# Written by the forge; changes are lost.
zero=0000000000000000000000000000000000000000
while read -r old new ref; do
	case "$ref" in refs/heads/*) ;; *) echo "$ref: only branches can be pushed" >&2; exit 1 ;; esac
	if grep -qxF -e "push $ref" "$GIT_DIR/forge-protected"; then
		echo "$ref is protected: open a pull request" >&2; exit 1
	fi
	if grep -qxF -e "force $ref" "$GIT_DIR/forge-protected"; then
		case "$new" in *[!0]*) ;; *) echo "$ref is protected: it cannot be deleted" >&2; exit 1 ;; esac
		case "$old" in *[!0]*) git merge-base --is-ancestor "$old" "$new" || { echo "$ref is protected: it cannot be rewritten" >&2; exit 1; } ;; esac
	fi
done
test -r "$GIT_DIR/forge-protected" || { echo "protection cannot be read" >&2; exit 1; }
`

// guard makes Git refuse what the table refuses.
func (r *repository) guard(all map[string]Protection) error {
	var list strings.Builder
	for branch, p := range all {
		if !p.DirectPush {
			fmt.Fprintf(&list, "push refs/heads/%s\n", branch)
		}
		if !p.ForcePush {
			fmt.Fprintf(&list, "force refs/heads/%s\n", branch)
		}
	}
	if err := writeDurable(filepath.Join(r.git.dir, "forge-protected"), []byte(list.String()), 0o600); err != nil {
		return fmt.Errorf("write the push guard: %w", err)
	}
	hooks := filepath.Join(r.git.dir, "hooks")
	if err := os.MkdirAll(hooks, 0o700); err != nil {
		return fmt.Errorf("write the push guard: %w", err)
	}
	if err := writeDurable(filepath.Join(hooks, "pre-receive"), []byte(receiveHook), 0o700); err != nil {
		return fmt.Errorf("write the push guard: %w", err)
	}
	return nil
}

// ensureGuard brings the guard in line with the table.
func (r *repository) ensureGuard(ctx context.Context) error {
	if _, err := os.Stat(filepath.Join(r.git.dir, "hooks", "pre-receive")); err == nil {
		return nil
	}
	all, err := r.protections(ctx)
	if err != nil {
		return err
	}
	return r.guard(all)
}

// blocked says what keeps a pull request from being merged, protection and
// draft; empty if nothing does.
func (r *repository) blocked(ctx context.Context, pull *pull, head, base string) (string, error) {
	if pull.Draft {
		return "it is a draft", nil
	}
	p, protected, err := r.protection(ctx, pull.BaseName)
	if err != nil || !protected {
		return "", err
	}
	return r.unmet(ctx, p, pull, head, base)
}

// unmet says what of the protection a pull request lacks; empty if nothing.
func (r *repository) unmet(ctx context.Context, p Protection, pull *pull, head, base string) (string, error) {
	approvals := 0
	for _, review := range latestReviews(pull) {
		switch {
		case review.State == "changes_requested":
			return fmt.Sprintf("%s asks for changes", review.Reviewer), nil
		case review.State == "approved" && (!p.DismissStaleApprovals || review.Revision == head):
			approvals++
		}
	}
	if approvals < p.RequiredApprovals {
		return fmt.Sprintf("%d of %d approvals", approvals, p.RequiredApprovals), nil
	}
	checks, err := r.checks(head)
	if err != nil {
		return "", err
	}
	for _, name := range p.RequiredChecks {
		if state := checks[name].State; state != "succeeded" {
			if state == "" {
				state = "missing"
			}
			return fmt.Sprintf("check %q is %s", name, state), nil
		}
	}
	if len(p.ProtectedPaths) == 0 {
		return "", nil
	}
	changed, err := r.git.output(ctx, nil, "diff-tree", "-r", "-z", "--name-only", "--no-renames", "--merge-base", base, head)
	if err != nil {
		return "", failed("compare head and base", err)
	}
	for path := range strings.SplitSeq(strings.TrimSuffix(changed, "\x00"), "\x00") {
		for _, protected := range p.ProtectedPaths {
			dir := strings.TrimSuffix(protected, "/")
			if path == dir || strings.HasPrefix(path, dir+"/") {
				return fmt.Sprintf("the protected path %q changes", text(path, 256)), nil
			}
		}
	}
	return "", nil
}
