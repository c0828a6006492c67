//go:build linux

// Package jail starts one program in namespaces of its own with a small read-only
// root, no network, no privilege and no way back, and reaps what it leaves. The
// plugin host's process launcher calls Command; the program's main calls Enter,
// which takes over when the binary was started as the first process of a jail.
//
// The life of a jail: Command makes a process that is PID 1 of new namespaces,
// from the runtime's own binary. Enter, in it, reads the Spec, builds the root
// and moves into it, restricts its thread (resource limits, no_new_privs,
// landlock, seccomp), starts the program from that thread at the plugin's uid,
// reports what is enforced, and waits. When the program ends, PID 1 ends, and
// with it everything in the PID namespace; when the runtime dies, the kernel
// kills PID 1.
package jail
