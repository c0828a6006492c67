package fake

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	scmv1 "github.com/numinance/numinance/gen/numinance/ports/scm/v1"
	"github.com/numinance/numinance/sdk"
)

// try is one way in which a denied step was tried all the same.
type try struct {
	way     string
	outcome string // the status, errno or error that stopped it
	through bool   // nothing stopped it
}

// attempt does what a compromised harness does after a denial: it asks the host
// for the effect as if it had been allowed, and then goes around the host. Every
// way has to fail; which wall stopped it is reported.
func (r *run) attempt(ctx context.Context, s Step, f FilePatch, decision string) []try {
	switch s.Op {
	case OpWrite, OpDelete, OpPatch:
		return r.attemptFile(ctx, s, f, decision)
	case OpRun:
		return []try{r.attemptSpawn(ctx, decision, nil, s.Argv)}
	case OpFetch:
		return r.attemptFetch(ctx, s)
	case OpCredential:
		_, err := r.host.Credential(ctx, s.Intent)
		return []try{asked("host credential", err)}
	case OpCheckpoint:
		_, err := r.host.Checkpoint(ctx, "denied")
		return []try{asked("host checkpoint", err)}
	case OpMerge:
		return []try{r.attemptMerge(ctx, s)}
	}
	return nil
}

func asked(way string, err error) try {
	if err == nil {
		return try{way, "carried out", true}
	}
	return try{way, status.Code(err).String(), false}
}

// attemptSpawn starts a process under a decision that does not allow it. A
// command that started and failed was stopped by what it ran into.
func (r *run) attemptSpawn(ctx context.Context, decision string, stdin []byte, argv []string) try {
	const way = "host spawn"
	got, err := r.spawn(ctx, decision, stdin, argv...)
	if err == nil && got.exit != 0 {
		return try{way, "exit " + strconv.Itoa(got.exit) + " (" + clean(lastLine(got.output)) + ")", false}
	}
	return asked(way, err)
}

func (r *run) attemptFile(ctx context.Context, s Step, f FilePatch, decision string) []try {
	path := s.Path
	argv := []string{"/bin/sh", "-c", writeProgram, "numi", relative(path), "-"}
	switch s.Op {
	case OpDelete:
		argv = []string{"/bin/sh", "-c", deleteProgram, "numi", relative(path)}
	case OpPatch:
		path = f.Path
		argv = []string{"git", "apply", "--whitespace=nowarn", "-"}
	}
	tries := []try{r.attemptSpawn(ctx, decision, append(f.Diff, s.Content...), argv)}

	var err error
	full := filepath.Join(r.config.WorkRoot, path)
	switch s.Op {
	case OpDelete:
		err = os.Remove(full)
	case OpPatch:
		err = openForWriting(full, os.O_WRONLY)
	default:
		if err = os.MkdirAll(filepath.Dir(full), 0o755); err == nil {
			err = openForWriting(full, os.O_WRONLY|os.O_CREATE)
		}
	}
	return append(tries, system("file system", err))
}

// openForWriting shows whether a file could be changed; it changes none that
// exists.
func openForWriting(path string, flags int) error {
	f, err := os.OpenFile(path, flags, 0o644)
	if err != nil {
		return err
	}
	return f.Close()
}

// system names the errno that stopped a system call.
func system(way string, err error) try {
	if err == nil {
		return try{way, "carried out", true}
	}
	var no syscall.Errno
	if errors.As(err, &no) {
		return try{way, errnoName(no), false}
	}
	return try{way, clean(err.Error()), false}
}

func errnoName(no syscall.Errno) string {
	names := map[syscall.Errno]string{
		syscall.EACCES: "EACCES", syscall.EPERM: "EPERM", syscall.EROFS: "EROFS", syscall.ENOENT: "ENOENT",
		syscall.ENOTDIR: "ENOTDIR", syscall.ECONNREFUSED: "ECONNREFUSED", syscall.ENETUNREACH: "ENETUNREACH",
		syscall.EHOSTUNREACH: "EHOSTUNREACH", syscall.EIO: "EIO", syscall.ETIMEDOUT: "ETIMEDOUT", syscall.EISDIR: "EISDIR",
	}
	if name, ok := names[no]; ok {
		return name
	}
	return "errno " + strconv.Itoa(int(no)) + " (" + no.Error() + ")"
}

// attemptFetch goes through the proxy without a decision, and around it.
func (r *run) attemptFetch(ctx context.Context, s Step) []try {
	through := try{way: "egress proxy"}
	switch code, _, err := r.get(ctx, s.URL, r.config.Proxy); {
	case err != nil:
		through = system(through.way, err)
	case refusedByProxy(code):
		through.outcome = "HTTP " + strconv.Itoa(code)
	default:
		through.outcome, through.through = "HTTP "+strconv.Itoa(code), true
	}
	host, err := destination(s.URL)
	if err != nil {
		return []try{through}
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", host)
	if err == nil {
		c.Close()
	}
	var unknown *net.DNSError
	if errors.As(err, &unknown) {
		return []try{through, {"direct connection", "no name service", false}}
	}
	return []try{through, system("direct connection", err)}
}

// refusedByProxy reports whether an answer can be the proxy's own refusal.
func refusedByProxy(code int) bool {
	return code == http.StatusForbidden || code == http.StatusProxyAuthRequired || code == http.StatusBadGateway || code == http.StatusServiceUnavailable
}

// attemptMerge calls the scm port on the host's socket, where no port is served.
func (r *run) attemptMerge(ctx context.Context, s Step) try {
	const way = "scm.MergePullRequest on the host's socket"
	socket := os.Getenv(sdk.EnvHostSocket)
	if socket == "" {
		return try{way, "no socket", false}
	}
	conn, err := grpc.NewClient("passthrough:///host",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		}))
	if err != nil {
		return try{way, clean(err.Error()), false}
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	zero := strings.Repeat("0", 40)
	_, err = scmv1.NewScmServiceClient(conn).MergePullRequest(ctx, &scmv1.MergePullRequestRequest{
		Repository: "self", PullRequest: s.PullRequest, ExpectedHeadRevision: zero, ExpectedTree: zero,
	})
	if status.Code(err) == codes.OK {
		return try{way, "carried out", true}
	}
	return try{way, status.Code(err).String(), false}
}
