package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
)

func evidenceCommand(c Config) *cobra.Command {
	var asJSON bool
	var export string
	verify := &cobra.Command{
		Use:   "verify ID",
		Short: "Check a Change's evidence as an outsider would",
		Long: `Check a Change's evidence chain, its signed head and its place in the
transparency log, and say against whom the check protects. --export writes the
bundle that was checked, for 'numi-verify' on another machine.`,
		Example: `  numi evidence verify chg-4f0k2m8q1z
  numi evidence verify chg-4f0k2m8q1z --export bundle/`,
		Args: exactly(1, "one Change id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return reading(cmd, c, func(ctx context.Context, rt Runtime) error {
				v, err := rt.Verify(ctx, args[0], c.path(export))
				if err != nil {
					return err
				}
				w := cmd.OutOrStdout()
				if asJSON {
					if err := writeJSON(w, v); err != nil {
						return err
					}
				} else {
					fmt.Fprintf(w, "%s  %s  %d records\n", v.ChangeID, v.Evidence, v.Records)
					if v.Detail != "" {
						fmt.Fprintf(w, "  %s\n", visible(v.Detail))
					}
					for _, p := range v.Protects {
						for _, l := range fold(p, 76) {
							fmt.Fprintf(w, "  %s\n", l)
						}
					}
					if v.Bundle != "" {
						fmt.Fprintf(w, "  bundle: %s\n", v.Bundle)
					}
				}
				if v.Evidence != "verified" {
					return &ExitError{Code: ExitUnverified, Err: errors.New("the evidence does not verify: " + v.Evidence)}
				}
				return nil
			})
		},
	}
	verify.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	verify.Flags().StringVar(&export, "export", "", "write the bundle to this new `directory`")
	return group("evidence", "What was recorded, and whether it holds", onRuntime(verify))
}
