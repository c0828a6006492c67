// Command numi is the command line and the runtime of Numinance: it takes a
// ticket and a repository and brings out a verified, reviewed and merged
// change with evidence.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/numinance/numinance/internal/daemon"
	"github.com/numinance/numinance/internal/host/pluginhost/jail"
)

// version is set when the binary is linked.
var version = "unknown"

func main() {
	jail.Enter() // does not return where this process is the first of a jail
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := daemon.Main(ctx, version, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
