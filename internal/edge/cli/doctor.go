package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/numinance/numinance/internal/host/doctor"
)

func doctorCommand(c Config) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say in plain words what this machine can enforce, and what it lacks",
		Long: `Try out what sandboxes and jails need on this machine, really and with a time
limit, and say what is enforced, what is only watched and what is missing, with
the command that allows it.`,
		Example: "  numi doctor\n  numi doctor --json",
		Args:    exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			self, err := os.Executable()
			if err != nil {
				return &ExitError{Code: ExitBroken, Err: err}
			}
			dir := filepath.Dir(self)
			report := doctor.Run(cmd.Context(), doctor.Config{
				Runtime: filepath.Join(dir, "numi-sandbox"), Init: filepath.Join(dir, "numi-init"), Image: c.image,
			})
			if asJSON {
				if err := writeJSON(cmd.OutOrStdout(), report); err != nil {
					return err
				}
			} else {
				writeDoctor(cmd.OutOrStdout(), report)
			}
			if !report.Ready() {
				return &ExitError{Code: ExitBroken, Err: errors.New("this machine lacks something that runs need; see above")}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}

func writeDoctor(w io.Writer, r doctor.Report) {
	for _, c := range r.Checks {
		lines := fold(c.Detail, 50)
		fmt.Fprintf(w, "%-16s %-8s %s\n", c.Name, c.State, lines[0])
		for _, l := range lines[1:] {
			fmt.Fprintf(w, "%-25s %s\n", "", l)
		}
		if c.Fix == "" {
			continue
		}
		for _, l := range fold("to mend: "+c.Fix, 50) {
			fmt.Fprintf(w, "%-25s %s\n", "", l)
		}
	}
}

// image says which sandbox image would be used.
func (c Config) image(context.Context) (string, error) {
	b, err := os.ReadFile(filepath.Join(c.Home, "images", "default"))
	if errors.Is(err, fs.ErrNotExist) {
		return "none yet: the first run makes one from this machine's files", nil
	}
	return strings.TrimSpace(string(b)), err
}
