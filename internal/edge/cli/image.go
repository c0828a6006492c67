package cli

import (
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/numinance/numinance/internal/host/image"
)

func imageCommand(c Config) *cobra.Command {
	var asJSON, fromHost bool
	var spec image.Spec
	build := &cobra.Command{
		Use:   "build --from-host",
		Short: "Pack a sandbox image from this machine's own files",
		Long: `Pack the programs that agents and checks need from this machine into an image
that is known by its digest. It needs no network and no root, and the same files
give the same digest.`,
		Example: "  numi image build --from-host\n  numi image build --from-host --node --python",
		Args:    exactly(0, "no arguments, only flags"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !fromHost {
				return usage("say --from-host: it is the only source of images so far")
			}
			spec.Store = filepath.Join(c.Home, "images")
			spec.Progress = func(s string) { fmt.Fprintln(cmd.ErrOrStderr(), "image  ", s) }
			img, err := image.Build(cmd.Context(), spec)
			if err != nil {
				return &ExitError{Code: ExitBroken, Err: err}
			}
			if asJSON {
				return writeJSON(cmd.OutOrStdout(), img)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s  %d files, %.1f MB\n", img.Digest, img.Files, float64(img.Bytes)/1e6)
			return nil
		},
	}
	f := build.Flags()
	f.BoolVar(&fromHost, "from-host", false, "pack this machine's files")
	f.BoolVar(&spec.Go, "go", true, "pack the Go toolchain")
	f.BoolVar(&spec.Node, "node", false, "pack Node.js")
	f.BoolVar(&spec.Python, "python", false, "pack Python 3")
	f.StringArrayVar(&spec.Programs, "program", nil, "pack this `program` too; repeat for more")
	f.BoolVar(&asJSON, "json", false, "print one JSON object")
	return group("image", "Sandbox images", build)
}
