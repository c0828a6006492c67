// Package execution is the named context that drives a harness: one run of one
// work unit by one author-agent, or a read-only run of a reviewer-agent, each in
// a sandbox of its own. Orchestration calls it; it alone calls the
// authorexecutor port (P-125).
//
// An adapter's event stream is a claim. The context holds it against the
// stream's rules (P-132..P-135) and against receipts, which are what the host
// itself decided and started for that run; a claim that contradicts a receipt
// ends the run. What the run changed is read from the sandbox's snapshot by the
// host, never from the stream (P-136).
package execution
