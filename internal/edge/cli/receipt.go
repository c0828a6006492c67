package cli

import (
	"fmt"
	"io"
	"strings"
)

// writeReceipt prints what a Change came to, for a person.
func writeReceipt(w io.Writer, r Outcome) {
	row := func(label, format string, a ...any) {
		text := visible(fmt.Sprintf(format, a...))
		for i, l := range fold(text, 62) {
			if i > 0 {
				label = ""
			}
			fmt.Fprintf(w, "  %-14s %s\n", label, l)
		}
	}
	fmt.Fprintf(w, "\n%s  %s\n", r.Change, r.State)
	if r.Reason != "" {
		row("because", "%s", r.Reason)
	}
	row("executor", "%s", r.Executor)
	if r.BaseRevision != "" {
		row("base", "%s", r.BaseRevision)
	}
	if r.MergedRevision != "" {
		row("merged", "%s as pull request %s", r.MergedRevision, r.PullRequest)
	} else if r.PullRequest != "" {
		row("pull request", "%s", r.PullRequest)
	}
	if len(r.Reviewers) > 0 {
		row("reviewed by", "%s", strings.Join(r.Reviewers, ", "))
	}
	if r.Policy != "" {
		row("policy", "%s", r.Policy)
	}
	row("decisions", "%d taken, %d refused, %d actions done", r.Decisions, r.Denials, r.Actions)
	for i, x := range r.Refused {
		label := ""
		if i == 0 {
			label = "refused"
		}
		if i == maxRefusals {
			row("", "and %d more", len(r.Refused)-maxRefusals)
			break
		}
		row(label, "%s, by the %s", x.What, x.Layer)
	}
	row("evidence", "%s", evidenceLine(r))
	if r.Checkpoint.Origin != "" {
		row("checkpoint", "%s at size %d", r.Checkpoint.Origin, r.Checkpoint.Size)
	}
	var stages []string
	for _, s := range r.Stages {
		stages = append(stages, fmt.Sprintf("%s %.1f s", s.Name, float64(s.MS)/1000))
	}
	if len(stages) > 0 {
		row("time", "%.1f s: %s", float64(r.DurationMS)/1000, strings.Join(stages, ", "))
	}
	row("verify", "numi evidence verify %s", r.Change)
	row("story", "numi change events %s", r.Change)
	if r.Files != "" {
		row("files", "%s", r.Files)
	}
}

// maxRefusals is how many refusals a receipt lists.
const maxRefusals = 12

func evidenceLine(r Outcome) string {
	if r.Evidence == "" {
		return fmt.Sprintf("%d records", r.Records)
	}
	return fmt.Sprintf("%s, %d records", r.Evidence, r.Records)
}
