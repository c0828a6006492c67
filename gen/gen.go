// Package gen embeds the descriptors of the contract. The packages below it are
// generated from proto/ by `make generate`; the host reads the governance
// annotations from these descriptors and from nowhere else.
package gen

import _ "embed"

// Descriptors is a FileDescriptorSet of every .proto file of the contract and
// what they import, in dependency order, without source information.
//
//go:embed descriptors.binpb
var Descriptors []byte
