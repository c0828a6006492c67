package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/numinance/numinance/internal/edge/demo"
)

func demoCommand(c Config) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run one governed Change on a small repository that comes along",
		Long: `Run one governed Change on a small Go repository with a real bug. A scripted
author mends it and also tries what a compromised agent would try: to write a
workflow file, to reach a host, to take a credential, to merge its own work.
Each attempt is decided outside the author, refused and recorded.`,
		Example: "  numi demo\n  numi demo --json",
		Args:    exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := demo.Load()
			if err != nil {
				return err
			}
			return withRuntime(cmd, c, asJSON, func(ctx context.Context, rt Runtime, o Observer) (Outcome, error) {
				return rt.Run(ctx, ChangeRequest{
					Seed: f.Repository, Name: demo.Name, Ticket: f.Ticket, Executor: "fake",
					Script: f.Author, Checks: []string{demo.Check},
				}, o)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object last, as 'change run' does")
	return onRuntime(cmd)
}
