// Package dispatch is the policy enforcement point: every action of the
// runtime, a verb of a port or a tool intent of a harness, goes through it and
// through nothing else. Contexts hold a Conn, which is a gRPC client connection
// bound to the authority of one step, and put stock generated clients on it;
// each call on it is decided, recorded, carried out by a provider and recorded
// again, as dispatch.go tells in its twelve steps.
package dispatch
