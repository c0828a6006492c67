package cli

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/numinance/numinance/internal/core/kinds"
)

func validateCommand(c Config) *cobra.Command {
	var dir string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "validate --files DIR",
		Short: "Check control documents by every rule that a document alone can break",
		Long: `Check the documents of a directory: form, unknown and duplicate fields, types,
and each rule of each kind. References between documents and to the lockfile are
checked when the documents are loaded for a Change.`,
		Example: "  numi validate --files schemas/examples/KnowledgeConnection",
		Args:    exactly(0, "no arguments, only --files"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir == "" {
				return usage("--files is missing: name a directory of documents")
			}
			fi, err := os.Stat(c.path(dir))
			if err != nil {
				return usage("--files: %w", err)
			}
			if !fi.IsDir() {
				return usage("--files: %s is not a directory", dir)
			}
			report := kinds.ValidateFiles(os.DirFS(c.path(dir)))
			if asJSON {
				if err := writeJSON(cmd.OutOrStdout(), report); err != nil {
					return err
				}
			} else {
				fmt.Fprint(cmd.OutOrStdout(), report.String())
			}
			if !report.OK() {
				return &ExitError{Code: ExitUsage, Err: errors.New("some documents are not valid")}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "files", "", "`directory` of documents")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}
