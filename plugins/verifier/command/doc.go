// Package command is a provider of the verifier port: it runs the commands that
// a configuration names on the candidate in its sandbox, at the candidate's own
// uid, and reads what they say: exit codes, go test -json, JUnit XML or SARIF.
// The verification context starts it in a fresh sandbox without network.
//
// Only config_ref configures it (P-169). A check that crashes, times out or
// cannot complete ends the call FAILED without findings (P-172). A candidate
// that runs fewer tests than its base revision, or changes what a check is
// defined by, has a finding of severity ERROR.
package command
