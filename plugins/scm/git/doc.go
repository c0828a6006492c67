// Package git is a code host in one directory: bare Git repositories with
// branches, pull requests, reviews, status checks and branch protection, served
// as a provider of the scm port on top of the git command. It is what a Change
// uses where no other code host is configured; see README.md.
//
// A write is done once per idempotency key, also across kill -9: each write
// first looks whether its effect is there, and each pull request is one file
// that is replaced as a whole. The only way to move a protected branch is a
// merge (P-075).
package git
