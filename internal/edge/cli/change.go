package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
)

const (
	maxTicket = 1 << 20
	maxScript = 4 << 20
)

func changeCommand(c Config) *cobra.Command {
	return group("change", "Run and look at governed Changes",
		changeRun(c), changeList(c), changeShow(c), changeEvents(c), changeResume(c), changeCancel(c))
}

func onRuntime(cmd *cobra.Command) *cobra.Command {
	cmd.Annotations = map[string]string{needsRuntime: "yes"}
	return cmd
}

func changeRun(c Config) *cobra.Command {
	var r ChangeRequest
	var ticket, script string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run one Change from a ticket to a merged pull request",
		Long: `Run one Change: the ticket is read, an agent works in a sandbox under a grant,
its change is verified and reviewed, and merged in the embedded forge. Nothing
in the repository you name is written; with --push-back the merged revision is
pushed there as the branch numi/<change>.`,
		Example: `  numi change run --repo ~/src/widget --ticket fix-rounding.md \
      --executor fake --script author.yaml --check "go test ./..." --json`,
		Args: exactly(0, "no arguments, only flags"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if r.Repo == "" {
				return usage("--repo is missing: name a local Git repository")
			}
			if ticket == "" {
				return usage("--ticket is missing: name a Markdown file or a key of the local tracker")
			}
			r.Repo, r.Control = c.path(r.Repo), c.path(r.Control)
			if strings.HasSuffix(ticket, ".md") || strings.ContainsAny(ticket, `/\`) {
				text, err := c.readSmall("ticket", ticket, maxTicket)
				if err != nil {
					return err
				}
				if len(strings.TrimSpace(string(text))) == 0 {
					return usage("ticket %s is empty: say what is to be done", ticket)
				}
				r.Ticket = text
			} else {
				r.Key = ticket
			}
			if script != "" {
				text, err := c.readSmall("script", script, maxScript)
				if err != nil {
					return err
				}
				r.Script = text
			}
			return withRuntime(cmd, c, asJSON, func(ctx context.Context, rt Runtime, o Observer) (Outcome, error) {
				return rt.Run(ctx, r, o)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&r.Repo, "repo", "", "local Git `repository` to change; it is only read")
	f.StringVar(&r.Branch, "branch", "", "base `branch` (default: the repository's current one)")
	f.StringVar(&ticket, "ticket", "", "Markdown `file` with front matter, or a key of the local tracker")
	f.StringVar(&r.Executor, "executor", "fake", "`executor` that does the work")
	f.StringVar(&script, "script", "", "YAML `file` that the fake executor follows")
	f.StringArrayVar(&r.Checks, "check", nil, "`command` that verifies the candidate; repeat for more")
	f.StringVar(&r.Control, "control", "", "`directory` of control documents (default: a generated one)")
	f.BoolVar(&r.PushBack, "push-back", false, "push the merged revision to the branch numi/<change> of the repository")
	f.BoolVar(&asJSON, "json", false, "print one JSON object last")
	return onRuntime(cmd)
}

// withRuntime opens the runtime, runs do, prints the outcome and turns it into
// the exit code.
func withRuntime(cmd *cobra.Command, c Config, asJSON bool, do func(context.Context, Runtime, Observer) (Outcome, error)) error {
	if c.Open == nil {
		return &ExitError{Code: ExitBroken, Err: errors.New("this process has no runtime")}
	}
	story := cmd.OutOrStdout()
	if asJSON {
		story = cmd.ErrOrStderr() // standard output holds the object and nothing else
	}
	rt, err := c.Open(cmd.Context(), story)
	if err != nil {
		return err
	}
	defer rt.Close()
	res, err := do(cmd.Context(), rt, &printer{w: story})
	if err != nil {
		return err
	}
	if asJSON {
		if err := writeJSON(cmd.OutOrStdout(), res); err != nil {
			return err
		}
	} else {
		writeReceipt(story, res)
	}
	if code := res.Exit; code != 0 {
		return &ExitError{Code: code}
	}
	return nil
}

func changeList(c Config) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List Changes, newest first",
		Example: "  numi change list --json",
		Args:    exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return reading(cmd, c, func(ctx context.Context, rt Runtime) error {
				all, err := rt.List(ctx)
				if err != nil {
					return err
				}
				if asJSON {
					if all == nil {
						all = []Outcome{}
					}
					return writeJSON(cmd.OutOrStdout(), all)
				}
				if len(all) == 0 {
					fmt.Fprintln(cmd.OutOrStdout(), "no Changes yet; 'numi demo' runs one")
					return nil
				}
				w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
				fmt.Fprintln(w, "CHANGE\tSTATE\tEXECUTOR\tMERGED\tDENIALS")
				for _, r := range all {
					fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\n", r.Change, r.State, r.Executor, short(r.MergedRevision), r.Denials)
				}
				return w.Flush()
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print an array of objects")
	return onRuntime(cmd)
}

func changeShow(c Config) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "show ID",
		Short:   "Show how a Change stands",
		Example: "  numi change show chg-4f0k2m8q1z --json",
		Args:    exactly(1, "one Change id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return reading(cmd, c, func(ctx context.Context, rt Runtime) error {
				r, err := rt.Show(ctx, args[0])
				if err != nil {
					return err
				}
				if asJSON {
					return writeJSON(cmd.OutOrStdout(), r)
				}
				writeReceipt(cmd.OutOrStdout(), r)
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return onRuntime(cmd)
}

func changeEvents(c Config) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "events ID",
		Short:   "Print a Change's recorded story: decisions, claims and receipts",
		Example: "  numi change events chg-4f0k2m8q1z",
		Args:    exactly(1, "one Change id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return reading(cmd, c, func(ctx context.Context, rt Runtime) error {
				events, err := rt.Events(ctx, args[0])
				if err != nil {
					return err
				}
				if asJSON {
					if events == nil {
						events = []Event{}
					}
					return writeJSON(cmd.OutOrStdout(), events)
				}
				p := &printer{w: cmd.OutOrStdout()}
				for _, e := range events {
					p.Line(e)
				}
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print an array of objects")
	return onRuntime(cmd)
}

func changeResume(c Config) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "resume ID",
		Short:   "Go on with a Change that a crash or an interrupt left behind",
		Example: "  numi change resume chg-4f0k2m8q1z",
		Args:    exactly(1, "one Change id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withRuntime(cmd, c, asJSON, func(ctx context.Context, rt Runtime, o Observer) (Outcome, error) {
				return rt.Resume(ctx, args[0], o)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object last")
	return onRuntime(cmd)
}

func changeCancel(c Config) *cobra.Command {
	var asJSON bool
	var reason string
	cmd := &cobra.Command{
		Use:     "cancel ID",
		Short:   "Revoke a Change's grants and wind it down",
		Example: `  numi change cancel chg-4f0k2m8q1z --reason "wrong ticket"`,
		Args:    exactly(1, "one Change id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			err := withRuntime(cmd, c, asJSON, func(ctx context.Context, rt Runtime, o Observer) (Outcome, error) {
				return rt.Cancel(ctx, args[0], reason, o)
			})
			var exit *ExitError
			if errors.As(err, &exit) && exit.Err == nil && exit.Code == ExitRefused {
				return nil // cancelled is what was asked for
			}
			return err
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "cancelled by a person", "why, for the record")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object last")
	return onRuntime(cmd)
}

func reading(cmd *cobra.Command, c Config, do func(context.Context, Runtime) error) error {
	if c.Open == nil {
		return &ExitError{Code: ExitBroken, Err: errors.New("this process has no runtime")}
	}
	rt, err := c.Open(cmd.Context(), io.Discard)
	if err != nil {
		return err
	}
	defer rt.Close()
	return do(cmd.Context(), rt)
}

// printer tells the story as it happens, in lines of 80 columns.
type printer struct{ w io.Writer }

func (p *printer) Stage(name string, ended bool, took time.Duration) {
	if !ended {
		fmt.Fprintf(p.w, "%s\n", name)
		return
	}
	if took >= 100*time.Millisecond {
		fmt.Fprintf(p.w, "  %s took %s\n", name, took.Round(10*time.Millisecond))
	}
}

func (p *printer) Line(e Event) {
	text := e.Subject
	if e.Detail != "" {
		text += ": " + e.Detail
	}
	if e.Kind == "TOOL_DENIED" {
		text, _, _ = strings.Cut(text, ": ") // the decision above it says why
	}
	const width = 42
	lines := fold(visible(text), width)
	fmt.Fprintf(p.w, "  %-19s %-13s  %s\n", e.Kind, e.Source, lines[0])
	for _, l := range lines[1:] {
		fmt.Fprintf(p.w, "  %-19s %-13s  %s\n", "", "", l)
	}
}

func short(revision string) string {
	if len(revision) > 12 {
		return revision[:12]
	}
	return revision
}

// visible replaces what could move the cursor or hide text; what agents and
// trackers write is never sent to a terminal as it is.
func visible(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r < 0x20 || r == 0x7f:
			return ' '
		case r >= 0x80 && r < 0xa0, r >= 0x200b && r <= 0x200f, r >= 0x202a && r <= 0x202e, r >= 0x2060 && r <= 0x2069, r >= 0xe0000 && r <= 0xe007f, r == 0xfeff:
			return '\ufffd'
		}
		return r
	}, s)
}

// fold cuts s into lines of at most width runes, at spaces where it can. It
// returns at least one line.
func fold(s string, width int) []string {
	var lines []string
	r := []rune(strings.TrimSpace(s))
	for len(r) > width {
		cut := width
		for i := width; i > width/2; i-- {
			if r[i] == ' ' {
				cut = i
				break
			}
		}
		lines = append(lines, string(r[:cut]))
		r = []rune(strings.TrimLeft(string(r[cut:]), " "))
	}
	return append(lines, string(r))
}
