// Package profile is the context that reads what a Change stands on: the base
// revision, through scm.GetRepository and no other verb (P-064), and the
// documents that govern the repository. The orchestration calls it at admission.
package profile
