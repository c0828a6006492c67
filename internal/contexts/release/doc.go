// Package release is the context that brings a verified candidate into the
// repository: pull requests as the author-agent (P-066), merge and pipeline as
// the release-pipeline (P-067, P-111). It is the only caller of scm's write
// verbs and of ciexecutor. The orchestration calls it with references only.
package release
