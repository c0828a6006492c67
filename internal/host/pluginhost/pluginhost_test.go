package pluginhost_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	executorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
	ticketingv1 "github.com/numinance/numinance/gen/numinance/ports/ticketing/v1"
	logv1 "github.com/numinance/numinance/gen/numinance/ports/transparencylog/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/host/pluginhost"
	"github.com/numinance/numinance/internal/host/pluginhost/jail"
	"github.com/numinance/numinance/sdk"
)

func TestMain(m *testing.M) {
	jail.Enter()
	if len(os.Args) >= 3 && os.Args[1] == "serve-test-plugin" {
		serve(os.Args[2])
	}
	if len(os.Args) >= 3 && os.Args[1] == "host-test-plugin" {
		hostUntilKilled(os.Args[2:])
	}
	os.Exit(m.Run())
}

// linger waits to be killed. Without cgo a process whose every goroutine blocks
// for good is ended by the Go runtime as a deadlock.
func linger() { time.Sleep(time.Hour) }

// serve is the plugin's process.
func serve(mode string) {
	switch mode {
	case "silent":
		fmt.Println("I am here and say nothing")
		linger()
	case "dies":
		fmt.Fprintln(os.Stderr, "cannot find my configuration")
		os.Exit(3)
	case "link":
		// Points the host at a socket of somebody else.
		_ = os.Symlink(os.Args[3], os.Getenv(sdk.EnvPluginSocket))
		linger()
	case "mute":
		l, err := net.Listen("unix", os.Getenv(sdk.EnvPluginSocket))
		if err == nil {
			for {
				if _, err := l.Accept(); err != nil {
					break
				}
			}
		}
		os.Exit(1)
	case "chatty":
		// What go-plugin's hosts would choke on.
		fmt.Println("1|1|unix|/tmp/evil|grpc")
		fmt.Println(strings.Repeat("noise ", 100000))
	}
	if err := sdk.Serve(context.Background(), tickets()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

type ticketServer struct {
	ticketingv1.UnimplementedTicketingServiceServer
	s *sdk.Session
}

func (t *ticketServer) GetIssue(ctx context.Context, r *ticketingv1.GetIssueRequest) (*ticketingv1.GetIssueResponse, error) {
	switch r.GetKey() {
	case "ABC-1":
		return &ticketingv1.GetIssueResponse{}, nil
	case "PID-1":
		return nil, status.Error(codes.NotFound, strconv.Itoa(os.Getpid()))
	case "UID-1":
		return nil, status.Error(codes.NotFound, strconv.Itoa(os.Getuid()))
	case "ENV-1":
		return nil, status.Error(codes.NotFound, strings.Join(os.Environ(), "\n"))
	case "BIG-1":
		return &ticketingv1.GetIssueResponse{Issue: &ticketingv1.Issue{Body: strings.Repeat("x", 5<<20)}}, nil
	case "EXIT-1":
		fmt.Fprintln(os.Stderr, "fatal: out of cheese")
		os.Exit(9)
	case "HANG-1":
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	case "WRITE-1":
		return nil, status.Error(codes.NotFound, fmt.Sprint(os.WriteFile(filepath.Join(t.s.DataDir, "f"), []byte("x"), 0o600)))
	case "CHILD-1":
		c := exec.Command("/bin/sleep", "1000")
		c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		c.Stdout = os.Stdout
		return nil, status.Error(codes.NotFound, fmt.Sprint(c.Start()))
	case "HOST-1":
		_, err := t.s.Host.PutBytes(ctx, []byte("x"), "")
		return nil, status.Error(codes.NotFound, status.Code(err).String())
	}
	return nil, status.Error(codes.NotFound, "no such issue")
}

func manifest() *pluginv1.Manifest {
	return &pluginv1.Manifest{
		ExtensionId: "dev.numinance.test/tickets", Version: "1.0.0", Port: "ticketing", SpecVersion: "1.2.0",
		Verbs: []string{"GetIssue", "CommentOnIssue", "TransitionIssue", "LinkIssue"},
	}
}

func tickets() sdk.Plugin {
	t := &ticketServer{}
	return sdk.Plugin{Manifest: manifest(), Open: func(_ context.Context, s *sdk.Session) (sdk.Register, error) {
		t.s = s
		return func(r grpc.ServiceRegistrar) { ticketingv1.RegisterTicketingServiceServer(r, t) }, nil
	}}
}

func expect(t testing.TB, m *pluginv1.Manifest) pluginhost.Expectation {
	t.Helper()
	d, err := pluginhost.ManifestDigest(m)
	if err != nil {
		t.Fatal(err)
	}
	return pluginhost.Expectation{Port: m.Port, Extension: m.ExtensionId, Origin: "bundled", Manifest: d}
}

func memory(p sdk.Plugin) pluginhost.Memory {
	return pluginhost.Memory{New: func(host grpc.ClientConnInterface) (pluginv1.PluginServiceServer, error) {
		return sdk.NewService(p, host)
	}}
}

func process(t testing.TB, mode ...string) pluginhost.Process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	return pluginhost.Process{
		Argv: append([]string{exe, "serve-test-plugin"}, mode...), DataDir: filepath.Join(dir, "data"), RunDir: dir, Log: filepath.Join(dir, "log"),
		UID: pluginhost.UIDBase + 990, Profile: pluginhost.Profile{Tools: true},
	}
}

func start(t testing.TB, l pluginhost.Launcher) *pluginhost.Plugin {
	t.Helper()
	p, err := pluginhost.Start(t.Context(), pluginhost.Config{Launcher: l, Expect: expect(t, manifest())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return p
}

func request(t testing.TB, target string, m proto.Message, version string) *pluginv1.InvokeRequest {
	t.Helper()
	a, err := anypb.New(m)
	if err != nil {
		t.Fatal(err)
	}
	return &pluginv1.InvokeRequest{Target: target, Request: a, Context: &pluginv1.ActionContext{
		ActionId: "act-1", ChangeId: "chg-1", RunId: "run-1", DecisionId: "dec-1", GrantId: "grt-1",
		IdempotencyKey: "key-1", SpecVersion: version, Deadline: timestamppb.New(time.Now().Add(20 * time.Second)),
	}}
}

const getIssue = "numinance.ports.ticketing.v1.TicketingService/GetIssue"

// ask invokes GetIssue and returns the result.
func ask(t testing.TB, p *pluginhost.Plugin, key string) (*pluginv1.ActionResult, error) {
	t.Helper()
	var r *pluginv1.ActionResult
	err := p.Invoke(t.Context(), request(t, getIssue, &ticketingv1.GetIssueRequest{Key: key}, "1.2.0"), func(m *pluginv1.InvokeResponse) error {
		r = m.GetResult()
		return nil
	})
	return r, err
}

// P-023: a verb is reached through Invoke, in memory and in a jailed process.
func TestInvokeReachesAVerb(t *testing.T) {
	for _, c := range []struct {
		name string
		l    pluginhost.Launcher
	}{{"memory", memory(tickets())}, {"process", process(t, "normal")}, {"chatty process", process(t, "chatty")}} {
		t.Run(c.name, func(t *testing.T) {
			p := start(t, c.l)
			r, err := ask(t, p, "ABC-1")
			if err != nil || r.GetStatus() != pluginv1.ActionStatus_ACTION_STATUS_SUCCEEDED {
				t.Fatalf("got %v, %v, want success", r, err)
			}
			r, err = ask(t, p, "NONE-1")
			if err != nil || codes.Code(r.GetCode()) != codes.NotFound {
				t.Fatalf("got %v, %v, want NOT_FOUND", r, err)
			}
			if p.Negotiated().SpecVersion != "1.2.0" || slices.Contains(p.Negotiated().Verbs, "SearchIssues") || p.Facts().Extension != "dev.numinance.test/tickets" {
				t.Fatalf("negotiated %+v, facts %+v", p.Negotiated(), p.Facts())
			}
		})
	}
}

// P-024, P-032: what is no verb of the port is refused before the plugin sees
// it, and an answer above the limit is refused with its size and the limit.
func TestInvokeRefuses(t *testing.T) {
	p := start(t, process(t, "normal"))
	for target, want := range map[string]codes.Code{
		"numinance.plugin.v1.PluginService/Invoke":  codes.InvalidArgument,
		"numinance.ports.scm.v1.ScmService/GetFile": codes.InvalidArgument,
		"/" + getIssue:       codes.InvalidArgument,
		"ticketing.GetIssue": codes.InvalidArgument,
		"numinance.ports.ticketing.v1.TicketingService/SearchIssues":   codes.Unimplemented,
		"numinance.ports.ticketing.v1.TicketingService/DeleteProjects": codes.InvalidArgument,
	} {
		err := p.Invoke(t.Context(), request(t, target, &ticketingv1.GetIssueRequest{Key: "ABC-1"}, "1.2.0"), func(*pluginv1.InvokeResponse) error { return nil })
		if status.Code(err) != want {
			t.Errorf("%s: got %v, want %v", target, err, want)
		}
	}
	r, err := ask(t, p, "BIG-1")
	text := fmt.Sprint(r, err)
	if r.GetStatus() == pluginv1.ActionStatus_ACTION_STATUS_SUCCEEDED || !strings.Contains(text, "5242") || !strings.Contains(text, "4194304") {
		t.Errorf("a big answer: got %.300s, want a refusal with size and limit", text)
	}
}

// The jail: empty environment, own uid, data directory writable, host reachable.
func TestProcessIsJailed(t *testing.T) {
	p := start(t, process(t, "normal"))
	t.Log(p.Jail())
	if os.Getuid() == 0 {
		if r, _ := ask(t, p, "UID-1"); r.GetMessage() != "48990" {
			t.Errorf("uid %q, want 48990", r.GetMessage())
		}
	} else if !strings.Contains(p.Jail(), "weaker jail") {
		t.Errorf("an ordinary user's jail must say that it is the weaker one: %s", p.Jail())
	}
	if r, _ := ask(t, p, "WRITE-1"); r.GetMessage() != "<nil>" {
		t.Errorf("write to the data directory: %s", r.GetMessage())
	}
	r, _ := ask(t, p, "ENV-1")
	var names []string
	for _, e := range strings.Split(r.GetMessage(), "\n") {
		names = append(names, strings.SplitN(e, "=", 2)[0])
	}
	slices.Sort(names)
	if got := strings.Join(names, " "); got != "HOME NUMI_HOST_SOCKET NUMI_PLUGIN_SOCKET PATH TMPDIR" {
		t.Errorf("environment: %s", got)
	}
	// No host service was given: the answer is a refusal by the host, which
	// shows that the plugin reaches it.
	if r, _ := ask(t, p, "HOST-1"); r.GetMessage() != "Unimplemented" {
		t.Errorf("host call: %s, want Unimplemented", r.GetMessage())
	}
}

// Plugins that fail at the start say why, and leave nothing behind.
func TestStartSaysWhyNot(t *testing.T) {
	victim := filepath.Join(t.TempDir(), "victim")
	l, err := net.Listen("unix", victim)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	reached := make(chan struct{}, 1)
	go func() {
		if c, err := l.Accept(); err == nil {
			c.Close()
			reached <- struct{}{}
		}
	}()
	for _, c := range []struct {
		mode   []string
		within time.Duration
		want   []string
	}{
		{[]string{"silent"}, 3 * time.Second, []string{"does not listen", "I am here and say nothing"}},
		{[]string{"dies"}, 20 * time.Second, []string{"exit status 3", "cannot find my configuration"}},
		{[]string{"mute"}, 3 * time.Second, []string{"did not answer the handshake within 3s"}},
		{[]string{"link", victim}, 20 * time.Second, []string{"is no socket"}},
	} {
		t.Run(c.mode[0], func(t *testing.T) {
			l := process(t, c.mode...)
			_, err := pluginhost.Start(t.Context(), pluginhost.Config{Launcher: l, Expect: expect(t, manifest()), StartTimeout: c.within})
			for _, w := range c.want {
				if err == nil || !strings.Contains(err.Error(), w) {
					t.Errorf("got %v, want %q in it", err, w)
				}
			}
			left, _ := filepath.Glob(filepath.Join(l.RunDir, "numi-plugin-*"))
			if len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
	select {
	case <-reached:
		t.Error("the host followed the plugin's link to another socket")
	default:
	}
}

// A call in flight and every later one end UNAVAILABLE when the plugin dies.
func TestDeathIsUnavailable(t *testing.T) {
	p := start(t, process(t, "normal"))
	hung := make(chan error, 1)
	go func() { _, err := ask(t, p, "HANG-1"); hung <- err }()
	_, err := ask(t, p, "EXIT-1")
	if status.Code(err) != codes.Unavailable {
		t.Errorf("the deadly call: %v, want UNAVAILABLE", err)
	}
	if err := <-hung; status.Code(err) != codes.Unavailable {
		t.Errorf("the call beside it: %v, want UNAVAILABLE", err)
	}
	<-p.Ended()
	begin := time.Now()
	_, err = ask(t, p, "ABC-1")
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "out of cheese") || time.Since(begin) > time.Second {
		t.Errorf("a later call: %v after %s, want UNAVAILABLE at once with the plugin's last words", err, time.Since(begin))
	}
}

func TestDeadlineAndClose(t *testing.T) {
	p := start(t, process(t, "normal"))
	req := request(t, getIssue, &ticketingv1.GetIssueRequest{Key: "HANG-1"}, "1.2.0")
	req.Context.Deadline = timestamppb.New(time.Now().Add(100 * time.Millisecond))
	var result *pluginv1.ActionResult
	err := p.Invoke(t.Context(), req, func(m *pluginv1.InvokeResponse) error { result = m.GetResult(); return nil })
	// Whichever of the two sides gives up first says so.
	if status.Code(err) != codes.DeadlineExceeded && codes.Code(result.GetCode()) != codes.DeadlineExceeded {
		t.Errorf("after the deadline: %v, %v, want DEADLINE_EXCEEDED", result, err)
	}
	hung := make(chan error, 1)
	go func() { _, err := ask(t, p, "HANG-1"); hung <- err }()
	if r, _ := ask(t, p, "CHILD-1"); r.GetMessage() != "<nil>" {
		t.Fatalf("start a child: %s", r.GetMessage())
	}
	begin := time.Now()
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if d := time.Since(begin); d > 4*time.Second {
		t.Errorf("closing took %s", d)
	}
	if err := <-hung; status.Code(err) != codes.Unavailable {
		t.Errorf("the call in flight: %v, want UNAVAILABLE", err)
	}
}

// Everything about processes also holds for an ordinary user, whom root starts
// these tests again as.
func TestAsAnOrdinaryUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("the other tests run as an ordinary user already")
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "numi-user-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	exe = filepath.Join(dir, "pluginhost.test")
	if err := errors.Join(os.WriteFile(exe, b, 0o755), os.Chmod(dir, 0o777)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.v", "-test.run=TestInvokeReachesAVerb|TestProcessIsJailed|TestStartSaysWhyNot|TestDeathIsUnavailable|TestDeadlineAndClose|TestKilledHostLeavesNoOrphan")
	cmd.Dir = dir
	cmd.Env = []string{"TMPDIR=" + dir, "HOME=" + dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 48997, Gid: 48997}}
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("weaker jail")) {
		t.Fatalf("as an ordinary user: %v\n%s", err, out)
	}
}

// A plugin that its author starts by hand is found by the two variables.
func TestAttach(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var byHand *exec.Cmd
	p := start(t, pluginhost.Attach{Dir: t.TempDir(), Announce: func(env []string) {
		byHand = exec.Command(exe, "serve-test-plugin", "normal")
		byHand.Env = env
		if err := byHand.Start(); err != nil {
			t.Error(err)
		}
	}})
	if r, err := ask(t, p, "ABC-1"); err != nil || r.GetStatus() != pluginv1.ActionStatus_ACTION_STATUS_SUCCEEDED {
		t.Errorf("got %v, %v, want success", r, err)
	}
	if err := byHand.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = byHand.Wait()
	if _, err := ask(t, p, "ABC-1"); status.Code(err) != codes.Unavailable {
		t.Errorf("after its end: %v, want UNAVAILABLE", err)
	}
}

// running returns the pids of processes whose arguments contain s.
func running(s string) (pids []int) {
	dirs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, d := range dirs {
		if b, err := os.ReadFile(d); err == nil && bytes.Contains(b, []byte(s)) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(d)))
			pids = append(pids, pid)
		}
	}
	return pids
}

// hostUntilKilled is a host process: it starts a plugin and waits to be killed.
func hostUntilKilled(args []string) {
	exe, _ := os.Executable()
	d, _ := pluginhost.ManifestDigest(manifest())
	_, err := pluginhost.Start(context.Background(), pluginhost.Config{
		Launcher: pluginhost.Process{
			Argv: []string{exe, "serve-test-plugin", "normal", args[0]}, RunDir: args[1],
			UID: pluginhost.UIDBase + 991, Profile: pluginhost.Profile{Tools: true},
		},
		Expect: pluginhost.Expectation{Port: "ticketing", Extension: "dev.numinance.test/tickets", Origin: "bundled", Manifest: d},
	})
	fmt.Println("started", err)
	linger()
}

// A host that is killed leaves no orphan.
func TestKilledHostLeavesNoOrphan(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	mark := fmt.Sprintf("orphan-%d-%d", os.Getpid(), time.Now().UnixNano())
	host := exec.Command(exe, "host-test-plugin", mark, t.TempDir())
	out, err := host.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := host.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 200)
	n, _ := out.Read(line)
	if string(line[:n]) != "started <nil>\n" {
		t.Fatalf("the host says %q", line[:n])
	}
	if len(running(mark)) < 2 {
		t.Fatalf("%d processes carry the mark, want host and plugin", len(running(mark)))
	}
	if err := host.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = host.Wait()
	for deadline := time.Now().Add(5 * time.Second); len(running(mark)) > 0; {
		if time.Now().After(deadline) {
			t.Fatalf("still running: %v", running(mark))
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// P-026, P-027, P-028 and the lockfile: what the handshake refuses.
func TestHandshakeRefuses(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*pluginv1.Manifest, *pluginhost.Expectation)
		want   string
	}{
		{"side effect left out", func(m *pluginv1.Manifest, e *pluginhost.Expectation) {
			m.Verbs = []string{"GetIssue", "CommentOnIssue", "LinkIssue"}
			e.Unpinned = true
		}, "does not declare TransitionIssue"},
		{"another manifest", func(m *pluginv1.Manifest, _ *pluginhost.Expectation) { m.EgressHosts = []string{"evil.example"} }, "numi lock"},
		{"no digest locked", func(_ *pluginv1.Manifest, e *pluginhost.Expectation) { e.Manifest = "" }, "numi lock"},
		{"another extension", func(_ *pluginv1.Manifest, e *pluginhost.Expectation) { e.Extension = "com.example/other" }, "locked is"},
		{"another port", func(_ *pluginv1.Manifest, e *pluginhost.Expectation) { e.Port = "scm" }, "expected is \"scm\""},
		{"another major", func(m *pluginv1.Manifest, e *pluginhost.Expectation) { m.SpecVersion = "2.0.0"; e.Unpinned = true }, "another major is refused"},
		{"ticketing before 1.2.0", func(m *pluginv1.Manifest, e *pluginhost.Expectation) { m.SpecVersion = "1.1.0"; e.Unpinned = true }, "needs a newer spec version"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := tickets()
			e := expect(t, p.Manifest)
			c.change(p.Manifest, &e)
			_, err := pluginhost.Start(t.Context(), pluginhost.Config{Launcher: memory(p), Expect: e})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want %q", err, c.want)
			}
		})
	}
}

type logServer struct {
	logv1.UnimplementedTransparencyLogServiceServer
}

// P-015, P-026, P-027: a capability's verb is callable only if both sides agreed
// on it; naming the verb alone is not enough, and core verbs are never negotiated.
func TestCapabilityIsNegotiated(t *testing.T) {
	for _, c := range []struct {
		name         string
		capabilities []string
		want         bool
	}{{"verb alone", nil, false}, {"both", pluginhost.Capabilities("transparencylog"), true}} {
		t.Run(c.name, func(t *testing.T) {
			m := &pluginv1.Manifest{ExtensionId: "dev.numinance.test/log", Version: "1", Port: "transparencylog", SpecVersion: "1.0.0",
				Verbs: []string{"Append", "Checkpoint", "Prove", "Lookup"}, Capabilities: c.capabilities}
			p, err := pluginhost.Start(t.Context(), pluginhost.Config{Expect: expect(t, m), Launcher: memory(sdk.Plugin{Manifest: m,
				Open: func(context.Context, *sdk.Session) (sdk.Register, error) {
					return func(r grpc.ServiceRegistrar) { logv1.RegisterTransparencyLogServiceServer(r, logServer{}) }, nil
				}})})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			if got := slices.Contains(p.Negotiated().Verbs, "Lookup"); got != c.want || !slices.Contains(p.Negotiated().Verbs, "Append") {
				t.Fatalf("allowed: %v, want Lookup %v", p.Negotiated().Verbs, c.want)
			}
			err = p.Invoke(t.Context(), request(t, "numinance.ports.transparencylog.v1.TransparencyLogService/Lookup", &logv1.LookupRequest{}, "1.0.0"),
				func(*pluginv1.InvokeResponse) error { return nil })
			if !c.want && (status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), "capability")) {
				t.Fatalf("got %v, want a refusal that names the capability", err)
			}
		})
	}
}

// wild is a plugin that breaks the rules of the envelope.
type wild struct {
	pluginv1.UnimplementedPluginServiceServer
	manifest *pluginv1.Manifest
	version  string
	invoke   func(grpc.ServerStreamingServer[pluginv1.InvokeResponse]) error
}

func (w *wild) Handshake(context.Context, *pluginv1.HandshakeRequest) (*pluginv1.HandshakeResponse, error) {
	return &pluginv1.HandshakeResponse{SpecVersion: w.version, Manifest: w.manifest}, nil
}

func (w *wild) Invoke(_ *pluginv1.InvokeRequest, s grpc.ServerStreamingServer[pluginv1.InvokeResponse]) error {
	return w.invoke(s)
}

func TestEnvelopeIsChecked(t *testing.T) {
	ok := &pluginv1.InvokeResponse{Step: &pluginv1.InvokeResponse_Result{Result: &pluginv1.ActionResult{Status: pluginv1.ActionStatus_ACTION_STATUS_SUCCEEDED}}}
	event := &pluginv1.InvokeResponse{Step: &pluginv1.InvokeResponse_Running{Running: &pluginv1.Running{Event: &anypb.Any{TypeUrl: "x"}}}}
	const execute = "numinance.ports.authorexecutor.v1.AuthorExecutorService/Execute"
	for _, c := range []struct {
		name, target string
		send         func(grpc.ServerStreamingServer[pluginv1.InvokeResponse]) error
		want         codes.Code
		text         string
	}{
		{"nothing", execute, func(grpc.ServerStreamingServer[pluginv1.InvokeResponse]) error { return nil }, codes.Internal, "without a result"},
		{"two results", execute, func(s grpc.ServerStreamingServer[pluginv1.InvokeResponse]) error {
			return errors.Join(s.Send(ok), s.Send(ok))
		}, codes.Internal, "went on after"},
		{"no status", execute, func(s grpc.ServerStreamingServer[pluginv1.InvokeResponse]) error {
			return s.Send(&pluginv1.InvokeResponse{Step: &pluginv1.InvokeResponse_Result{Result: &pluginv1.ActionResult{}}})
		}, codes.Internal, "status"},
		{"empty step", execute, func(s grpc.ServerStreamingServer[pluginv1.InvokeResponse]) error {
			return s.Send(&pluginv1.InvokeResponse{})
		}, codes.Internal, "neither"},
		{"unknown field", execute, func(s grpc.ServerStreamingServer[pluginv1.InvokeResponse]) error {
			m := proto.CloneOf(ok)
			m.GetResult().ProtoReflect().SetUnknown([]byte("\xa2\x06\x01x"))
			return s.Send(m)
		}, codes.Internal, "does not know"},
		{"event of a unary verb", "numinance.ports.authorexecutor.v1.AuthorExecutorService/Capabilities", func(s grpc.ServerStreamingServer[pluginv1.InvokeResponse]) error {
			return s.Send(event)
		}, codes.Internal, "unary"},
		{"a flood of events", execute, func(s grpc.ServerStreamingServer[pluginv1.InvokeResponse]) error {
			for {
				if err := s.Send(event); err != nil {
					return err
				}
			}
		}, codes.ResourceExhausted, "1024"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := &pluginv1.Manifest{ExtensionId: "dev.numinance.test/wild", Version: "1", Port: "authorexecutor", SpecVersion: "1.0.0", Verbs: []string{"Capabilities", "Execute", "Plan"}}
			p, err := pluginhost.Start(t.Context(), pluginhost.Config{Expect: expect(t, m), Launcher: pluginhost.Memory{New: func(grpc.ClientConnInterface) (pluginv1.PluginServiceServer, error) {
				return &wild{manifest: m, version: "1.0.0", invoke: c.send}, nil
			}}})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			var req proto.Message = &executorv1.ExecuteRequest{}
			if strings.HasSuffix(c.target, "Capabilities") {
				req = &executorv1.CapabilitiesRequest{}
			}
			err = p.Invoke(t.Context(), request(t, c.target, req, "1.0.0"), func(*pluginv1.InvokeResponse) error { return nil })
			if status.Code(err) != c.want || !strings.Contains(err.Error(), c.text) {
				t.Fatalf("got %v, want %v with %q", err, c.want, c.text)
			}
		})
	}
}

func TestHandshakeRefusesAnotherVersionThanTheLower(t *testing.T) {
	for _, v := range []string{"1.1.0", "1.3.0", "0.9.0"} {
		m := manifest()
		_, err := pluginhost.Start(t.Context(), pluginhost.Config{Expect: expect(t, m), Launcher: pluginhost.Memory{New: func(grpc.ClientConnInterface) (pluginv1.PluginServiceServer, error) {
			return &wild{manifest: m, version: v}, nil
		}}})
		if err == nil || !strings.Contains(err.Error(), "answered spec version "+v) {
			t.Errorf("version %s: got %v, want a refusal", v, err)
		}
	}
}

// P-130: of an execution request's references only the four named ones can be
// resolved, and only while the call runs.
func TestOnlyFourReferencesResolve(t *testing.T) {
	refs := map[string]digest.Digest{}
	for _, n := range []string{"task", "plan", "bundle", "tests", "worktree", "network", "policy"} {
		refs[n] = digest.Of([]byte(n))
	}
	m := &pluginv1.Manifest{ExtensionId: "dev.numinance.test/wild", Version: "1", Port: "authorexecutor", SpecVersion: "1.0.0", Verbs: []string{"Capabilities", "Execute", "Plan"}}
	var p *pluginhost.Plugin
	got := map[string]bool{}
	p, err := pluginhost.Start(t.Context(), pluginhost.Config{Expect: expect(t, m), Launcher: pluginhost.Memory{New: func(grpc.ClientConnInterface) (pluginv1.PluginServiceServer, error) {
		return &wild{manifest: m, version: "1.0.0", invoke: func(s grpc.ServerStreamingServer[pluginv1.InvokeResponse]) error {
			for n, d := range refs {
				got[n] = p.Resolvable(d)
			}
			return io.ErrUnexpectedEOF
		}}, nil
	}}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	_ = p.Invoke(t.Context(), request(t, "numinance.ports.authorexecutor.v1.AuthorExecutorService/Execute", &executorv1.ExecuteRequest{Request: &executorv1.ChangeExecutionRequest{
		TaskRef: string(refs["task"]), PlanRef: string(refs["plan"]), ContextBundleRef: string(refs["bundle"]), TestRequirementsRef: string(refs["tests"]),
		WorktreeRef: string(refs["worktree"]), NetworkPolicyRef: string(refs["network"]), PolicyDigest: string(refs["policy"]),
	}}, "1.0.0"), func(*pluginv1.InvokeResponse) error { return nil })
	for n, want := range map[string]bool{"task": true, "plan": true, "bundle": true, "tests": true, "worktree": false, "network": false, "policy": false} {
		if got[n] != want {
			t.Errorf("%s: resolvable %v during the call, want %v", n, got[n], want)
		}
		if p.Resolvable(refs[n]) {
			t.Errorf("%s: resolvable after the call", n)
		}
	}
}

// A sandbox's plugin is reached through the sandbox's link, and everything ends
// UNAVAILABLE with it.
func TestInsideASandbox(t *testing.T) {
	b := newBridge(t, tickets())
	p, err := pluginhost.Start(t.Context(), pluginhost.Config{Launcher: pluginhost.Inside{Bridge: b}, Expect: expect(t, manifest())})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if r, err := ask(t, p, "ABC-1"); err != nil || r.GetStatus() != pluginv1.ActionStatus_ACTION_STATUS_SUCCEEDED {
		t.Fatalf("got %v, %v, want success", r, err)
	}
	close(b.done)
	if _, err := ask(t, p, "ABC-1"); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "run is over") {
		t.Fatalf("after the run: %v, want UNAVAILABLE", err)
	}
}

// bridgeOver is the host's end of a link over plain unix sockets.
type bridgeOver struct {
	path string
	host net.Listener
	done chan struct{}
}

func (b *bridgeOver) DialPlugin(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", b.path)
}
func (b *bridgeOver) HostListener() net.Listener { return b.host }
func (b *bridgeOver) Done() <-chan struct{}      { return b.done }

func newBridge(t *testing.T, p sdk.Plugin) *bridgeOver {
	t.Helper()
	dir := t.TempDir()
	plugin, err := net.Listen("unix", filepath.Join(dir, "p"))
	if err != nil {
		t.Fatal(err)
	}
	host, err := net.Listen("unix", filepath.Join(dir, "h"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- sdk.ServeListener(ctx, p, plugin, nil) }()
	t.Cleanup(func() { cancel(); <-served })
	return &bridgeOver{path: filepath.Join(dir, "p"), host: host, done: make(chan struct{})}
}
