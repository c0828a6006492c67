// Package tessera is the default provider of the transparencylog port: a
// Merkle log in a directory, laid out as C2SP tlog-tiles by the Tessera
// library. It holds no key: the host signs each checkpoint with the key of
// this log after checking it. The host starts it as a plugin; nothing else
// imports it but tests.
package tessera
