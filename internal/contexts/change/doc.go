// Package change is the context that turns a ticket into the task of a Change
// and reports back to it. Everything a tracker answers is untrusted text: cut,
// cleaned, labelled and kept by digest. The orchestration calls it at intake
// (P-092) and after the merge.
package change
