// Package fake is a scripted, deterministic provider of the authorexecutor
// port: it does what its script says and nothing else, so that a run with it
// needs no model and comes out the same every time (H-029). The execution
// context runs it inside a work unit's sandbox; tests serve it in memory.
//
// It behaves like any adapter: it announces each tool call, asks the host for a
// decision, and only then acts, at the agent's uid and through the sandbox's
// walls. A step marked anyway also acts after a denial, as a compromised harness
// would, and reports which wall stopped it. docs/fake-executor.md is the
// reference of the script.
package fake
