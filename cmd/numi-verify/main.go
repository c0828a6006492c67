// Command numi-verify checks the evidence of a Change without a network, a
// daemon or a state directory: a bundle and the public keys one trusts are all
// it reads.
package main

import (
	"archive/zip"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/numinance/numinance/internal/core/bundle"
	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/identity"
)

// Exit codes.
const (
	exitVerified = 0
	exitUsage    = 2
	exitFailed   = 4
)

const usage = `usage: numi-verify BUNDLE --key FILE [flags]

BUNDLE is an exported zip file or a directory with its files. FILE holds the
public keys you trust, one a line: "head KEY", "log KEY", "witness KEY".

  --change ID          the bundle must be of this Change
  --closed             the chain must have ended
  --witnesses N        at least N trusted witnesses must have signed
  --remembered FILE    a checkpoint from an earlier verification
  --commit FILE        the message of the Change's merge commit, for its
                       Numinance-Checkpoint trailer
  --json               print one JSON object

Exit codes: 0 verified, 2 usage or unreadable input, 4 verification failed.
`

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// invocation is what the command line asks for.
type invocation struct {
	bundle, key, remembered, commit string
	change                          string
	closed, json                    bool
	witnesses                       int
}

func run(args []string, stdout, stderr io.Writer) int {
	in, err := parse(args)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(stdout, usage)
		return exitVerified
	}
	if err != nil {
		fmt.Fprintf(stderr, "numi-verify: %v\n\n%s", err, usage)
		return exitUsage
	}
	report, err := verify(in)
	var failure *chain.Failure
	switch {
	case err == nil && in.json:
		return print(stdout, stderr, struct {
			Verified bool `json:"verified"`
			bundle.Report
		}{true, report}, exitVerified)
	case err == nil:
		fmt.Fprint(stdout, report.Text())
		return exitVerified
	case errors.As(err, &failure) && in.json:
		return print(stdout, stderr, struct {
			Verified bool        `json:"verified"`
			Label    chain.Label `json:"label"`
			Sequence uint64      `json:"sequence,string,omitempty"`
			Detail   string      `json:"detail"`
		}{false, failure.Label, failure.Sequence, failure.Detail}, exitFailed)
	case errors.As(err, &failure):
		fmt.Fprintf(stdout, "failed: %v\n", failure)
		return exitFailed
	default:
		fmt.Fprintf(stderr, "numi-verify: %v\n", err)
		return exitUsage
	}
}

func print(stdout, stderr io.Writer, v any, code int) int {
	enc := json.NewEncoder(stdout)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		fmt.Fprintf(stderr, "numi-verify: %v\n", err)
		return exitUsage
	}
	return code
}

// parse reads flags before and after BUNDLE.
func parse(args []string) (invocation, error) {
	var in invocation
	f := flag.NewFlagSet("numi-verify", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.StringVar(&in.key, "key", "", "")
	f.StringVar(&in.change, "change", "", "")
	f.StringVar(&in.remembered, "remembered", "", "")
	f.StringVar(&in.commit, "commit", "", "")
	f.BoolVar(&in.closed, "closed", false, "")
	f.BoolVar(&in.json, "json", false, "")
	f.IntVar(&in.witnesses, "witnesses", 0, "")
	for {
		if err := f.Parse(args); err != nil {
			return in, err
		}
		if f.NArg() == 0 {
			break
		}
		if in.bundle != "" {
			return in, fmt.Errorf("one bundle at a time, %q is a second", f.Arg(0))
		}
		in.bundle, args = f.Arg(0), f.Args()[1:]
	}
	switch {
	case in.bundle == "":
		return in, errors.New("which bundle?")
	case in.key == "":
		return in, errors.New("which keys do you trust? name them with --key; never take them from the bundle itself")
	case in.change != "" && !identity.ValidID(in.change):
		return in, fmt.Errorf("change id %q is malformed", in.change)
	case in.witnesses < 0:
		return in, fmt.Errorf("%d witnesses", in.witnesses)
	}
	return in, nil
}

func verify(in invocation) (bundle.Report, error) {
	raw, err := os.ReadFile(in.key)
	if err != nil {
		return bundle.Report{}, err
	}
	trust, err := bundle.ParseTrust(raw)
	if err != nil {
		return bundle.Report{}, err
	}
	options := bundle.Options{Change: identity.ChangeID(in.change), Closed: in.closed, Witnesses: in.witnesses}
	// What cannot be read as a checkpoint is the caller's mistake, not a failure
	// of the evidence: %v keeps the label out of the error.
	if in.remembered != "" {
		if raw, err = os.ReadFile(in.remembered); err != nil {
			return bundle.Report{}, err
		}
		if options.Remembered, err = bundle.ParseRemembered(raw, trust); err != nil {
			return bundle.Report{}, fmt.Errorf("%s: %v", in.remembered, err)
		}
	}
	if in.commit != "" {
		if raw, err = os.ReadFile(in.commit); err != nil {
			return bundle.Report{}, err
		}
		if options.Trailers, err = bundle.ParseCommit(raw); err != nil {
			return bundle.Report{}, fmt.Errorf("%s: %v", in.commit, err)
		}
	}
	files, done, err := open(in.bundle)
	if err != nil {
		return bundle.Report{}, err
	}
	defer done()
	return bundle.Verify(files, trust, options)
}

// open returns the files of a zip archive or a directory.
func open(name string) (fs.FS, func(), error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, nil, err
	}
	if info.IsDir() {
		root, err := os.OpenRoot(name)
		if err != nil {
			return nil, nil, err
		}
		return root.FS(), func() { root.Close() }, nil
	}
	z, err := zip.OpenReader(name)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", name, err)
	}
	return z, func() { z.Close() }, nil
}
