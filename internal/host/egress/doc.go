// Package egress is the one way out of a sandbox: a proxy on a unix socket per
// run, which carries a tunnel only to a destination of the run's grant, only to
// an address that is not of a special range, and only for TLS that names that
// destination. Every attempt is recorded before it is answered. The sandbox
// context serves it beside the run's link, the daemon joins its Recorder to the
// journal.
//
// A tunnel's life: head read and parsed, destination looked up in the grant,
// name resolved by Go's own resolver, every address checked, the attempt
// recorded, the address dialled and checked again at the socket, 200 answered,
// the client's TLS hello read and its server name compared, and only then bytes
// carried, until either side ends, the grant expires or the proxy is closed.
package egress
