// Package pluginhost starts plugins, agrees with them on version and
// capabilities, and carries Invokes to them: in memory, in a jailed process, or
// inside a run's sandbox. The dispatcher calls a Plugin as its Provider; the
// daemon and contexts/execution start and close them.
package pluginhost
