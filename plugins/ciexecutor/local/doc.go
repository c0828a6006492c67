// Package local is a provider of the ciexecutor port: a small CI server with a
// runner of its own. Its pipelines come from the configuration that the control
// documents give it, never from the repository it runs on (P-114); steps run as
// child processes in a fresh checkout. The release context calls it.
//
// An operation is durable from the moment StartOperation answers. It lives as a
// directory: operation.json (replaced, never changed in place), log, artifacts.
package local
