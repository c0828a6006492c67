// Package files is the default provider of the evidencestore port: a write-once
// store in a directory of the customer's, readable without any tool of ours.
// The host starts it as a plugin; nothing else imports it but tests.
package files
