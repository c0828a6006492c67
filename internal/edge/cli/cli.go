// Package cli is the numi command line: one file per group of commands. It
// knows what a person types and sees and nothing of how a Change is driven; the
// runtime behind it is handed in by cmd/numi.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
)

// The exit codes of numi. They are part of its interface.
const (
	ExitReleased   = 0 // released, or the command did what was asked
	ExitUsage      = 2 // the command line or a document is wrong
	ExitRefused    = 3 // refused or escalated by policy
	ExitUnverified = 4 // verification failed
	ExitBroken     = 5 // infrastructure failed
)

// Config is what the process hands to the command line.
type Config struct {
	Version string
	// Home is the state directory.
	Home string
	// Dir is the directory that relative paths start from.
	Dir string
	// Open gives the runtime that owns Home. It is called by commands that need
	// one, at most once. Nil where the process is only a client.
	Open func(ctx context.Context, progress io.Writer) (Runtime, error)
	// Plugins serves one bundled plugin; it is how the runtime starts itself again.
	Plugins func(ctx context.Context, name string) error
	// BundledPlugins are the names that Plugins knows.
	BundledPlugins []string
}

// ExitError carries an exit code with a message, so that every command ends in
// one place.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string {
	if e.Err == nil {
		return ""
	}
	return e.Err.Error()
}

func (e *ExitError) Unwrap() error { return e.Err }

// usage marks err as the user's to mend.
func usage(format string, a ...any) error {
	return &ExitError{Code: ExitUsage, Err: fmt.Errorf(format, a...)}
}

// Run runs one command line and returns its exit code.
func Run(ctx context.Context, c Config, args []string, stdout, stderr io.Writer) int {
	root := newRoot(c)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return ExitReleased
	}
	var exit *ExitError
	if errors.As(err, &exit) {
		if exit.Err != nil {
			fmt.Fprintln(stderr, "numi:", exit.Err)
		}
		return exit.Code
	}
	fmt.Fprintln(stderr, "numi:", err)
	return ExitBroken
}

// NeedsRuntime reports whether the command line works on the state directory
// and so has to run in the process that holds it.
func NeedsRuntime(c Config, args []string) bool {
	cmd, rest, err := newRoot(c).Find(args)
	if err != nil || cmd == nil {
		return false
	}
	for _, a := range rest {
		if a == "--help" || a == "-h" {
			return false
		}
	}
	return cmd.Annotations[needsRuntime] != ""
}

const needsRuntime = "runtime"

func newRoot(c Config) *cobra.Command {
	root := &cobra.Command{
		Use:   "numi",
		Short: "Hand software work to coding agents without handing them authority",
		Long: `numi takes a ticket and a repository and brings out a verified, reviewed and
merged change, with evidence that an outsider can check offline. The agent works
in a sandbox under a grant; every privileged action is decided outside it first.`,
		Example: `  numi demo
  numi change run --repo ~/src/widget --ticket fix-rounding.md \
      --executor fake --script author.yaml --check "go test ./..."
  numi change show chg-4f0k2m8q1z
  numi evidence verify chg-4f0k2m8q1z`,
		Version:       c.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usage("%w; see '%s --help'", err, cmd.CommandPath())
	})
	root.SetVersionTemplate("numi {{.Version}}\n")
	root.CompletionOptions.HiddenDefaultCmd = false
	root.AddCommand(
		changeCommand(c), demoCommand(c), evidenceCommand(c), doctorCommand(c), validateCommand(c),
		policyCommand(), specCommand(), imageCommand(c), pluginCommand(c), serveCommand(c), exitCodesTopic(),
	)
	return root
}

func exitCodesTopic() *cobra.Command {
	return &cobra.Command{
		Use:   "exit-codes",
		Short: "What numi's exit codes mean",
		Long: `Exit codes of numi:

  0  released, or the command did what was asked
  2  usage: the command line or a document is wrong
  3  refused or escalated by policy
  4  verification failed
  5  infrastructure failed; 'numi doctor' says what this machine lacks`,
	}
}

// exactly wants n arguments and says what they are.
func exactly(n int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != n {
			return usage("want %s; see '%s --help'", what, cmd.CommandPath())
		}
		return nil
	}
}

// group is a command that only holds others.
func group(use, short string, children ...*cobra.Command) *cobra.Command {
	g := &cobra.Command{Use: use, Short: short, Args: cobra.ArbitraryArgs, RunE: func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			return usage("unknown command %q; see '%s --help'", args[0], cmd.CommandPath())
		}
		return cmd.Help()
	}}
	g.AddCommand(children...)
	return g
}

// path makes p absolute from the directory that the person typed it in.
func (c Config) path(p string) string {
	if p == "" || filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(c.Dir, p)
}

// readSmall reads a file that a person named, up to limit bytes.
func (c Config) readSmall(what, p string, limit int64) ([]byte, error) {
	f, err := os.Open(c.path(p))
	if err != nil {
		return nil, usage("%s: %w", what, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, usage("%s %s: %w", what, p, err)
	}
	if int64(len(b)) > limit {
		return nil, usage("%s %s is larger than %d bytes; shorten it or link to the rest", what, p, limit)
	}
	return b, nil
}
