// Package evidence is the context that turns the journal into evidence: it
// drains journal entries in order into the chains of their Changes, signs and
// anchors heads, closes chains and exports them. Orchestration calls Anchor and
// Close, the edge calls Bundle and Verify, dispatch asks Lag.
//
// It keeps no state of its own. Every record carries the sequence number of
// the journal entry it was made from, and what a chain already holds is read
// from its last record, so that after a crash the drain goes on where the
// store, not a cursor file, says that it stopped.
package evidence
