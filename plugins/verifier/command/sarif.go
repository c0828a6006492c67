package command

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"

	verifierv1 "github.com/numinance/numinance/gen/numinance/ports/verifier/v1"
)

// sarif is the part of SARIF 2.1.0 that is read.
type sarif struct {
	Version string `json:"version"`
	Runs    []struct {
		Tool struct {
			Driver struct {
				Rules []struct {
					ID            string `json:"id"`
					Configuration struct {
						Level string `json:"level"`
					} `json:"defaultConfiguration"`
				} `json:"rules"`
			} `json:"driver"`
		} `json:"tool"`
		Invocations []struct {
			Successful *bool `json:"executionSuccessful"`
		} `json:"invocations"`
		Results []struct {
			RuleID        string `json:"ruleId"`
			Level         string `json:"level"`
			Kind          string `json:"kind"`
			BaselineState string `json:"baselineState"`
			Message       struct {
				Text string `json:"text"`
			} `json:"message"`
			Locations []struct {
				Physical struct {
					Artifact struct {
						URI string `json:"uri"`
					} `json:"artifactLocation"`
					Region struct {
						Line int `json:"startLine"`
					} `json:"region"`
				} `json:"physicalLocation"`
			} `json:"locations"`
		} `json:"results"`
	} `json:"runs"`
}

// readSARIF reads a SARIF report. Suppressed results count like all others: a
// candidate cannot switch a check off (P-170). A run that says that it was not
// carried out is no report.
func readSARIF(b []byte) (*results, error) {
	dec := json.NewDecoder(bytes.NewReader(b))
	var doc sarif
	if err := dec.Decode(&doc); err != nil {
		return nil, unreadable("SARIF: %v", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, unreadable("SARIF: something follows the document")
	}
	if doc.Version != "2.1.0" {
		return nil, unreadable("SARIF: version %.20q, want 2.1.0", doc.Version)
	}
	if len(doc.Runs) == 0 {
		return nil, unreadable("SARIF: no run in it")
	}
	r := &results{}
	for _, run := range doc.Runs {
		for _, i := range run.Invocations {
			if i.Successful != nil && !*i.Successful {
				return nil, unreadable("SARIF: the tool says that it was not carried out successfully")
			}
		}
		defaults := map[string]string{}
		for _, rule := range run.Tool.Driver.Rules {
			defaults[rule.ID] = rule.Configuration.Level
		}
		for _, one := range run.Results {
			if one.BaselineState == "absent" {
				continue // it was there once
			}
			switch one.Kind {
			case "", "fail", "open", "review":
			case "pass", "notApplicable", "informational":
				continue
			default:
				return nil, unreadable("SARIF: result of the unknown kind %.40q", one.Kind)
			}
			level := one.Level
			if level == "" {
				level = defaults[one.RuleID]
			}
			severity, ok := severityOf(level)
			if !ok {
				return nil, unreadable("SARIF: result of the unknown level %.40q", level)
			}
			path, line := "", 0
			if len(one.Locations) > 0 {
				path, line = one.Locations[0].Physical.Artifact.URI, one.Locations[0].Physical.Region.Line
			}
			r.add(severity, one.RuleID, path, line, one.Message.Text)
		}
	}
	return r, nil
}

func severityOf(level string) (verifierv1.Severity, bool) {
	switch level {
	case "error":
		return severityError, true
	case "", "warning":
		return severityWarning, true
	case "note", "none":
		return severityInfo, true
	}
	return 0, false
}
