// Command figures runs the benchmarks behind the project's figures and prints
// them side by side with what each is measured against and with the goal.
// `make bench` calls it. A goal that is missed is printed as such and is no
// failure: figures depend on the machine, and a busy one misses more of them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

func main() {
	rounds := flag.Int("rounds", 3, "how often each benchmark runs; the median of the rounds is printed")
	each := flag.Duration("time", 2*time.Second, "how long each benchmark runs in a round")
	verbose := flag.Bool("v", false, "print what the benchmarks print as well")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, *rounds, *each, *verbose); err != nil {
		fmt.Fprintln(os.Stderr, "figures:", err)
		os.Exit(1)
	}
}

// set is one package's benchmarks.
type set struct{ pkg, bench string }

var sets = []set{
	{"./internal/host/dispatch", "^BenchmarkRead$"},
	{"./internal/host/journal", "^BenchmarkAppend"},
	{"./internal/core/policy", "^BenchmarkDecide$"},
}

func run(ctx context.Context, out io.Writer, rounds int, each time.Duration, verbose bool) error {
	all := results{}
	for round := range max(rounds, 1) {
		for _, s := range sets {
			fmt.Fprintf(os.Stderr, "round %d of %d: %s\n", round+1, rounds, s.pkg)
			cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", s.bench, "-benchtime", each.String(), s.pkg)
			cmd.Stderr = os.Stderr
			b, err := cmd.Output()
			if verbose || err != nil {
				_, _ = os.Stderr.Write(b)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", s.pkg, err)
			}
			all.read(string(b))
		}
	}
	starts, err := measureStart(ctx, "bin/numi", "--version")
	switch {
	case errors.Is(err, os.ErrNotExist):
		fmt.Fprintln(os.Stderr, "no bin/numi: run `make build` to measure its start")
	case err != nil:
		return err
	}
	return all.print(out, starts)
}

// results are the values of every metric, by benchmark and unit, one of each
// round.
type results map[string][]float64

// read takes the lines of `go test -bench`: a name, a count, then values each
// with its unit.
func (r results) read(text string) {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 4 || !strings.HasPrefix(f[0], "Benchmark") {
			continue
		}
		name := strings.TrimPrefix(f[0], "Benchmark")
		if i := strings.LastIndexByte(name, '-'); i > 0 {
			name = name[:i] // how many processors
		}
		for i := 2; i+1 < len(f); i += 2 {
			if v, err := strconv.ParseFloat(f[i], 64); err == nil {
				r[name+" "+f[i+1]] = append(r[name+" "+f[i+1]], v)
			}
		}
	}
}

func (r results) median(name string) (float64, error) {
	v := slices.Sorted(slices.Values(r[name]))
	if len(v) == 0 {
		return 0, fmt.Errorf("no benchmark reported %q", name)
	}
	return v[len(v)/2], nil
}

// figure is one line of the table. A goal of zero is none.
type figure struct {
	name, metric string
	atLeast      bool
	goal         float64
	unit         string
	against      string // what stands beside it, as a metric or empty
	beside       string
}

var figures = []figure{
	{name: "dispatched SYNC READ, median", metric: "Read dispatched-p50-us", unit: "us", against: "Read bare-p50-us", beside: "us, bare call"},
	{name: "  as a multiple of the bare call", metric: "Read ratio", goal: 2, unit: "x"},
	{name: "dispatched SYNC READ, p99", metric: "Read dispatched-p99-us", unit: "us", against: "Read bare-p99-us", beside: "us, bare call"},
	{name: "journal, 64 writers", metric: "Append64Writers entries/s", atLeast: true, goal: 5000, unit: "entries/s", against: "AppendLoneWriter flushes/s", beside: "flushes/s"},
	{name: "journal, 64 writers, p99", metric: "Append64Writers p99-ms", goal: 25, unit: "ms"},
	{name: "journal, lone writer, median", metric: "AppendLoneWriter median-ms", unit: "ms", against: "AppendLoneWriter flush-ms", beside: "ms, one flush"},
	{name: "  beyond one flush", metric: "AppendLoneWriter beyond-ms", goal: 1.5, unit: "ms"},
	{name: "Decide, 20 policies, median", metric: "Decide/20-match p50-us", unit: "us"},
	{name: "Decide, 100 policies, median", metric: "Decide/100-match p50-us", goal: 15, unit: "us"},
	{name: "Decide, 100 policies, p99", metric: "Decide/100-match p99-us", goal: 100, unit: "us"},
	{name: "Decide, 100 policies, same question again", metric: "Decide/100-again p50-us", unit: "us"},
	{name: "Decide, 10,000 policies, median", metric: "Decide/10000-sliced p50-us", goal: 50, unit: "us"},
	{name: "Decide, 10,000 policies, p99", metric: "Decide/10000-sliced p99-us", unit: "us"},
}

func (r results) print(out io.Writer, s *starts) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintf(w, "%s, %d processors, %s\n\n", runtime.GOARCH, runtime.NumCPU(), runtime.Version())
	fmt.Fprint(w, "FIGURE\tMEASURED\tBESIDE\tRATIO\tGOAL\t\n")
	for _, f := range figures {
		v, err := r.median(f.metric)
		if err != nil {
			return err
		}
		beside, ratio := "", ""
		if f.against != "" {
			b, err := r.median(f.against)
			if err != nil {
				return err
			}
			beside, ratio = number(b)+" "+f.beside, number(v/b)
		}
		line(w, f.name, v, f.unit, beside, ratio, f.goal, f.atLeast)
	}
	if s != nil {
		line(w, "numi --version, median", s.numi, "ms", number(s.bare)+" ms, `true`", number(s.numi/s.bare), 50, false)
	}
	return w.Flush()
}

func line(w io.Writer, name string, v float64, unit, beside, ratio string, goal float64, atLeast bool) {
	aim, verdict := "", ""
	if goal != 0 {
		sign, held := "<= ", v <= goal
		if atLeast {
			sign, held = ">= ", v >= goal
		}
		if aim, verdict = sign+number(goal), "held"; !held {
			verdict = "missed"
		}
	}
	fmt.Fprintf(w, "%s\t%s %s\t%s\t%s\t%s\t%s\n", name, number(v), unit, beside, ratio, aim, verdict)
}

func number(v float64) string {
	switch {
	case v >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}

// starts are the median times in milliseconds from start to end of two programs.
type starts struct{ numi, bare float64 }

func measureStart(ctx context.Context, program string, args ...string) (*starts, error) {
	if _, err := os.Stat(program); err != nil {
		return nil, err
	}
	var took [2][]float64
	for range 31 {
		for i, argv := range [][]string{append([]string{program}, args...), {"true"}} {
			begin := time.Now()
			if err := exec.CommandContext(ctx, argv[0], argv[1:]...).Run(); err != nil {
				return nil, fmt.Errorf("%s: %w", strings.Join(argv, " "), err)
			}
			took[i] = append(took[i], float64(time.Since(begin).Microseconds())/1000)
		}
	}
	for i := range took {
		slices.Sort(took[i])
	}
	return &starts{numi: took[0][len(took[0])/2], bare: took[1][len(took[1])/2]}, nil
}
