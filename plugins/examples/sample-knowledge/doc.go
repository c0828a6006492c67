// Package sampleknowledge is a whole knowledge provider to learn from: it serves
// Search, Fetch and Resolve over a few documents that it is seeded with, and
// shows what every provider of the port must do with scopes, refs, hidden
// documents, outages and untrusted text. It uses no network and keeps nothing.
package sampleknowledge
