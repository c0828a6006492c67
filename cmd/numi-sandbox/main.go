// Command numi-sandbox is gVisor and nothing else: the container runtime that
// the bundled sandbox provider starts by path. It is a binary of its own
// because the same file becomes the sentry and the gofer of every sandbox, and
// each library linked here would be carried, started and trusted there too.
//
// Unlike the upstream main package it embeds no side-car binaries (they serve
// checkpoints to object stores and double the size). Whatever name the runtime
// gives its own children (runsc-sandbox, runsc-gofer, /proc/self/exe), this
// program is always the runtime, so it needs no rule to tell them apart.
package main

import (
	"github.com/google/subcommands"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"
)

func main() {
	cli.Run(nil, commands(), []subcommands.Command{new(cmd.Platforms)})
}

// commands is everything the provider uses and the three that the runtime
// starts on its own behalf. There is no install, no debug and no trace.
func commands() map[util.SubCommand]string {
	const internal = "internal use only"
	return map[util.SubCommand]string{
		new(cmd.Create):       "",
		new(cmd.Delete):       "",
		new(cmd.Do):           "",
		new(cmd.Events):       "",
		new(cmd.Exec):         "",
		new(cmd.Kill):         "",
		new(cmd.List):         "",
		new(cmd.PS):           "",
		new(cmd.Pause):        "",
		new(cmd.Resume):       "",
		new(cmd.Run):          "",
		new(cmd.Start):        "",
		new(cmd.State):        "",
		new(cmd.Tar):          "",
		new(cmd.Wait):         "",
		new(sentrycmd.Boot):   internal,
		new(cmd.Gofer):        internal,
		new(sentrycmd.Umount): internal,
	}
}
