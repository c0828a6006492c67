package command

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	verifierv1 "github.com/numinance/numinance/gen/numinance/ports/verifier/v1"
)

// maxLog bounds what is kept of each output stream.
const maxLog = 1 << 20

// ended is how a command ended, and what it printed.
type ended struct {
	exit     int
	duration time.Duration
	stdout   *tail // of standard output when it is the report, all of it
	stderr   *tail
	goTest   *goTest
}

// check runs one check and reads what it says. An error means that it could not
// complete.
func (v *verifier) check(ctx context.Context, c Check, base *verifierv1.CheckReport, inputs string) (*verifierv1.CheckReport, []*verifierv1.Finding, error) {
	if c.Report != "" {
		if err := v.removeReport(ctx, c); err != nil {
			return nil, nil, err
		}
	}
	e, err := v.command(ctx, c)
	if err != nil {
		return nil, nil, err
	}
	found, err := v.read(c, e)
	if err != nil {
		return nil, nil, status.Errorf(codes.FailedPrecondition, "check %q did not complete: %v", c.Name, err)
	}
	if e.exit != 0 && found.errors() == 0 {
		found.add(severityError, "exit-status", "", 0, fmt.Sprintf("exit status %d: %s", e.exit, e.last()))
	}
	if base != nil && found.run < int(base.GetTestsRun()) {
		found.add(severityError, "tests-removed", "", 0, fmt.Sprintf("%d tests ran, %d did on the base revision", found.run, base.GetTestsRun()))
	}
	if base != nil && inputs != base.GetInputsDigest() {
		found.add(severityError, "check-redefined", strings.Split(c.Inputs[0], "#")[0], 0, "the files that define this check are not those of the base revision: "+strings.Join(c.Inputs, ", "))
	}
	if found.dropped > 0 {
		found.add(severityError, "too-many-findings", "", 0, fmt.Sprintf("%d more findings were dropped", found.dropped))
	}
	report := &verifierv1.CheckReport{
		Name:         c.Name,
		Outcome:      verifierv1.CheckOutcome_CHECK_OUTCOME_PASSED,
		TestsRun:     uint32(found.run),
		TestsFailed:  uint32(found.failed),
		TestsSkipped: uint32(found.skipped),
		Findings:     uint32(len(found.findings)),
		Duration:     durationpb.New(e.duration.Truncate(time.Millisecond)),
		InputsDigest: inputs,
	}
	// A warning is a finding and no violation.
	if found.errors() > 0 {
		report.Outcome = verifierv1.CheckOutcome_CHECK_OUTCOME_FINDINGS
	}
	for _, f := range found.findings {
		f.Check = c.Name
	}
	report.OutputDigest = v.keepLog(ctx, e)
	return report, found.findings, nil
}

// removeReport makes sure that the report read later is the one that this run
// of the check wrote.
func (v *verifier) removeReport(ctx context.Context, c Check) error {
	rm := Check{Name: c.Name, argv: []string{"rm", "-rf", "--", c.Report}, Directory: c.Directory, timeout: time.Minute, Format: formatExit}
	if _, err := v.command(ctx, rm); err != nil {
		return err
	}
	if _, err := v.readFile(joinPath(c.Directory, c.Report), maxReport); !errors.Is(err, os.ErrNotExist) {
		return status.Errorf(codes.FailedPrecondition, "check %q: an old report %s is in the candidate and cannot be removed", c.Name, c.Report)
	}
	return nil
}

func (v *verifier) read(c Check, e *ended) (*results, error) {
	switch c.Format {
	case formatExit:
		return &results{}, nil
	case formatGoTest:
		if e.goTest.events == 0 && e.exit == 0 {
			return nil, unreadable("no event of go test -json in its output")
		}
		return &e.goTest.results, nil
	}
	raw := e.stdout.bytes()
	if c.Report != "" {
		var err error
		raw, err = v.readFile(joinPath(c.Directory, c.Report), maxReport)
		if errors.Is(err, os.ErrNotExist) {
			return nil, unreadable("it wrote no report %s (exit status %d: %s)", c.Report, e.exit, e.last())
		}
		if err != nil {
			return nil, unreadable("%v", err)
		}
	} else if e.stdout.cut() {
		return nil, unreadable("its output is longer than %d bytes", maxReport)
	}
	if c.Format == formatJUnit {
		return readJUnit(raw)
	}
	return readSARIF(raw)
}

// command runs a check's program at the candidate's uid. What ends it before it
// can say anything is an error.
func (v *verifier) command(ctx context.Context, c Check) (*ended, error) {
	env := map[string]string{
		"PATH": "/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME": "/tmp", "LANG": "C.UTF-8", "CI": "true",
	}
	maps.Copy(env, v.settings.Environment)
	maps.Copy(env, c.env)
	began := time.Now()
	p, err := v.host.Spawn(ctx, &pluginv1.SpawnStart{
		Argv: c.argv, Environment: env, WorkingDirectory: path.Join(v.settings.WorkRoot, c.Directory),
		User: pluginv1.ProcessUser_PROCESS_USER_CANDIDATE, Timeout: durationpb.New(c.timeout),
	})
	if err != nil {
		code := status.Code(err)
		if code == codes.Unknown || code == codes.Internal || code == codes.NotFound {
			code = codes.FailedPrecondition
		}
		return nil, status.Errorf(code, "check %q: start %s: %s", c.Name, c.argv[0], status.Convert(err).Message())
	}
	_ = p.Stdin.Close()
	e := &ended{stdout: &tail{limit: maxReport}, stderr: &tail{limit: maxLog}}
	drained := make(chan error, 1)
	go func() {
		_, err := io.Copy(e.stderr, p.Stderr)
		drained <- err
	}()
	out := io.TeeReader(io.LimitReader(p.Stdout, maxStdout+1), e.stdout)
	counted := &counter{r: out}
	var readErr error
	if c.Format == formatGoTest {
		e.goTest, readErr = readGoTest(counted)
	}
	// Whatever the reader left is drained, or the command would never end.
	_, copyErr := io.Copy(io.Discard, counted)
	if counted.n > maxStdout {
		_ = p.Signal(9)
		_, _ = io.Copy(io.Discard, p.Stdout)
		copyErr = nil
		readErr = unreadable("more than %d bytes of output", maxStdout)
	}
	drainErr := <-drained
	exit, waitErr := p.Wait()
	e.duration = time.Since(began)
	switch {
	case ctx.Err() != nil:
		return nil, status.FromContextError(ctx.Err()).Err()
	case waitErr != nil:
		return nil, status.Errorf(status.Code(waitErr), "check %q: %s", c.Name, status.Convert(waitErr).Message())
	case exit.GetLimit() != "" && exit.GetLimit() != "wall-clock":
		return nil, status.Errorf(codes.Aborted, "check %q: ended by the limit %s", c.Name, exit.GetLimit())
	case exit.GetLimit() != "":
		return nil, status.Errorf(codes.DeadlineExceeded, "check %q: not done after %v", c.Name, c.timeout)
	case readErr != nil:
		return nil, status.Errorf(codes.FailedPrecondition, "check %q did not complete: %v", c.Name, readErr)
	case errors.Join(copyErr, drainErr) != nil:
		return nil, status.Errorf(codes.Aborted, "check %q: read its output: %v", c.Name, errors.Join(copyErr, drainErr))
	case exit.GetSignal() != 0 || exit.GetExitCode() < 0:
		return nil, status.Errorf(codes.Aborted, "check %q: ended by signal %d: %s", c.Name, exit.GetSignal(), e.last())
	case exit.GetExitCode() == 126 || exit.GetExitCode() == 127:
		return nil, status.Errorf(codes.FailedPrecondition, "check %q: a program is missing or cannot be run: %s", c.Name, e.last())
	case exit.GetExitCode() > 128 && exit.GetExitCode() < 128+32:
		// What a shell says of a child that a signal ended.
		return nil, status.Errorf(codes.Aborted, "check %q: ended by signal %d: %s", c.Name, exit.GetExitCode()-128, e.last())
	}
	e.exit = int(exit.GetExitCode())
	return e, nil
}

// last is the end of what the command printed, for a person.
func (e *ended) last() string {
	b := e.stderr.end()
	if len(bytes.TrimSpace(b)) == 0 {
		b = e.stdout.end()
	}
	lines := strings.Split(strings.TrimSpace(strings.ToValidUTF8(string(b), "")), "\n")
	return clip(strings.Join(lines[max(0, len(lines)-8):], "\n"), 800)
}

// keepLog stores what the command printed and returns its digest; where the
// quota is used up only the digest is left.
func (v *verifier) keepLog(ctx context.Context, e *ended) string {
	log := append(e.stdout.head(maxLog), e.stderr.head(maxLog)...)
	if len(log) == 0 {
		return ""
	}
	if ref, err := v.host.PutBytes(ctx, log, "text/plain"); err == nil {
		return ref.GetDigest()
	}
	sum := sha256.Sum256(log)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// counter counts what is read through it.
type counter struct {
	r io.Reader
	n int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

// tail keeps the first bytes written to it, up to a limit, and the last few.
type tail struct {
	limit int
	first []byte
	lastB []byte
	total int64
}

const tailBytes = 4 << 10

// Write never fails.
func (t *tail) Write(p []byte) (int, error) {
	t.total += int64(len(p))
	t.first = append(t.first, p[:min(len(p), t.limit-len(t.first))]...)
	t.lastB = append(t.lastB, p[max(0, len(p)-tailBytes):]...)
	if len(t.lastB) > 2*tailBytes {
		t.lastB = bytes.Clone(t.lastB[len(t.lastB)-tailBytes:])
	}
	return len(p), nil
}

func (t *tail) bytes() []byte     { return t.first }
func (t *tail) head(n int) []byte { return bytes.Clone(t.first[:min(n, len(t.first))]) }
func (t *tail) end() []byte       { return t.lastB[max(0, len(t.lastB)-tailBytes):] }
func (t *tail) cut() bool         { return t.total > int64(len(t.first)) }
