package cli

import (
	"fmt"

	"github.com/spf13/cobra"
)

func pluginCommand(c Config) *cobra.Command {
	serve := &cobra.Command{
		Use:   "serve PORT/NAME",
		Short: "Serve one bundled plugin; the runtime calls this, inside a jail",
		Args:  exactly(1, "one bundled plugin, such as scm/git"),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return c.BundledPlugins, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if c.Plugins == nil {
				return usage("this process has no bundled plugins")
			}
			return c.Plugins(cmd.Context(), args[0])
		},
	}
	list := &cobra.Command{
		Use:   "list",
		Short: "List the bundled plugins",
		Args:  exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, p := range c.BundledPlugins {
				fmt.Fprintln(cmd.OutOrStdout(), p)
			}
			return nil
		},
	}
	return group("plugin", "Providers of the ports", list, serve)
}

func serveCommand(c Config) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Keep the runtime up until interrupted",
		Long: `Keep the runtime of this state directory up. Without it the first numi that
needs the runtime serves the others and ends when nothing runs.`,
		Args: exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			rt, err := c.Open(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "serving %s; interrupt to stop\n", c.Home)
			<-cmd.Context().Done()
			return rt.Close()
		},
	}
	return onRuntime(cmd)
}
