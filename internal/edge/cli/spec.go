package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/numinance/numinance/internal/core/policy"
	"github.com/numinance/numinance/internal/core/ports"
)

// verbRow is one verb as `numi spec show --json` prints it.
type verbRow struct {
	Port         string   `json:"port"`
	Service      string   `json:"service"`
	Verb         string   `json:"verb"`
	Request      string   `json:"request"`
	Response     string   `json:"response"`
	Streaming    bool     `json:"server_streaming"`
	Risk         string   `json:"risk"`
	ExecMode     string   `json:"exec_mode"`
	Idempotent   bool     `json:"idempotent"`
	DryRun       bool     `json:"dry_run"`
	Compensating string   `json:"compensating_action"`
	Evidence     []string `json:"evidence"`
	Capability   string   `json:"capability"`
	Scopes       []string `json:"scopes"`
	Since        string   `json:"since"`
}

func specCommand() *cobra.Command {
	var asJSON bool
	show := &cobra.Command{
		Use:   "show [PORT[/Verb]]",
		Short: "Print the verbs of the ports with their law",
		Example: `  numi spec show
  numi spec show scm
  numi spec show scm/MergePullRequest --json`,
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return ports.Names(), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			rows := []verbRow{}
			port, verb, _ := strings.Cut(strings.Join(args, ""), "/")
			for _, v := range ports.All() {
				if (port != "" && v.Port != port) || (verb != "" && v.Method != verb) {
					continue
				}
				rows = append(rows, verbRow{
					Port: v.Port, Service: v.Service[strings.LastIndex(v.Service, ".")+1:], Verb: v.Method,
					Request: string(v.Input.Name()), Response: string(v.Output.Name()), Streaming: v.ServerStreaming,
					Risk: v.Risk.String(), ExecMode: v.Exec.String(), Idempotent: v.Idempotent, DryRun: v.DryRun,
					Compensating: v.Compensating, Evidence: notNil(v.Evidence), Capability: v.Capability,
					Scopes: notNil(v.Scopes), Since: v.Since,
				})
			}
			if len(rows) == 0 {
				return usage("no port or verb %q; the ports are %s", args[0], strings.Join(ports.Names(), ", "))
			}
			if asJSON {
				return writeJSON(cmd.OutOrStdout(), rows)
			}
			writeSpec(cmd.OutOrStdout(), rows)
			return nil
		},
	}
	show.Flags().BoolVar(&asJSON, "json", false, "print an array of objects")
	return group("spec", "The contract: ports, verbs and their law", show)
}

func notNil(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

func writeSpec(w io.Writer, rows []verbRow) {
	last := ""
	for _, r := range rows {
		if r.Port != last {
			if last != "" {
				fmt.Fprintln(w)
			}
			fmt.Fprintf(w, "%s  %s\n", r.Port, r.Service)
			last = r.Port
		}
		var law []string
		if r.Idempotent {
			law = append(law, "idempotent")
		}
		if r.DryRun {
			law = append(law, "dry run")
		}
		if r.Streaming {
			law = append(law, "streams")
		}
		if r.Compensating != "" {
			law = append(law, "undone by "+r.Compensating)
		}
		for _, e := range r.Evidence {
			law = append(law, "evidence "+e)
		}
		if r.Capability != "" {
			law = append(law, "capability "+r.Capability)
		}
		for _, s := range r.Scopes {
			law = append(law, "scope "+s)
		}
		fmt.Fprintf(w, "  %-22s %-11s %-10s %s\n", r.Verb, r.Risk, r.ExecMode, strings.Join(law, ", "))
	}
}

func policyCommand() *cobra.Command {
	show := &cobra.Command{
		Use:     "show",
		Short:   "Print the policy that is shipped",
		Example: "  numi policy show > policy.cedar",
		Args:    exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			fmt.Fprint(cmd.OutOrStdout(), policy.Default())
			return nil
		},
	}
	schema := &cobra.Command{
		Use:   "schema",
		Short: "Print the schema that policies are checked against",
		Args:  exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			fmt.Fprint(cmd.OutOrStdout(), policy.Schema())
			return nil
		},
	}
	return group("policy", "The rules that decide", show, schema)
}

func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}
