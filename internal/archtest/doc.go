// Package archtest holds the law of imports as a test: which folders exist,
// what each floor may import, and that ARCHITECTURE.md lists the same folders.
package archtest
