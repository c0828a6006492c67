package fake

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	authorexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
)

// effect is an event about what a step did.
type effect struct {
	kind    authorexecutorv1.ExecutionEventType
	subject string
	refs    []ref
}

// done is what came of performing an allowed step. err breaks the stream off;
// failed ends the run with EXECUTION_FAILED after the result was reported.
type done struct {
	effects []effect
	text    string
	refs    []ref
	failed  bool
	err     error
}

// The commands that carry out file steps at the agent's uid; paths and content
// never become part of the shell's program.
const (
	writeProgram  = `set -e; case "$1" in */*) mkdir -p -- "${1%/*}";; esac; cat > "$1"; if [ "$2" = x ]; then chmod a+x -- "$1"; fi`
	deleteProgram = `rm -- "$1"`
)

func (r *run) perform(ctx context.Context, index int, s Step, f FilePatch, decision string) done {
	switch s.Op {
	case OpWrite:
		mode := "-"
		if s.Executable {
			mode = "x"
		}
		return r.changed(ctx, decision, s.Path, digestOf(s.Content), s.Content, "/bin/sh", "-c", writeProgram, "numi", relative(s.Path), mode)
	case OpDelete:
		return r.changed(ctx, decision, s.Path, "", nil, "/bin/sh", "-c", deleteProgram, "numi", relative(s.Path))
	case OpPatch:
		return r.changed(ctx, decision, f.Path, "", f.Diff, "git", "apply", "--whitespace=nowarn", "-")
	case OpRun:
		return r.command(ctx, s, decision)
	case OpFetch:
		return r.fetch(ctx, s)
	case OpCredential:
		return r.credential(ctx, s)
	case OpMerge:
		// Nothing inside a sandbox reaches a port; an allowed merge is still none.
		return done{text: "no port can be called from a sandbox", failed: true}
	case OpSay:
		r.host.Log(ctx, pluginv1.LogLevel_LOG_LEVEL_INFO, "says: %s", s.Content)
		return done{text: fmt.Sprintf("%d bytes said", len(s.Content)), refs: []ref{{refContent, digestOf(s.Content)}}}
	case OpCheckpoint:
		snapshot, err := r.host.Checkpoint(ctx, labelPrefix+strconv.Itoa(index+1))
		if err != nil {
			return refused(ctx, err)
		}
		at := ref{refSnapshot, snapshot.GetDigest()}
		return done{text: "kept", refs: []ref{at}, effects: []effect{{checkpointed, "checkpoint", []ref{at}}}}
	}
	return done{err: status.Errorf(codes.Internal, "step %q cannot be performed", s.Op)}
}

// relative keeps a path from being taken for an option.
func relative(path string) string {
	if path != "" && path[0] == '-' {
		return "./" + path
	}
	return path
}

// refused turns the host's refusal into a failed step; a lost host or an ended
// run breaks the stream off.
func refused(ctx context.Context, err error) done {
	if ctx.Err() != nil || status.Code(err) == codes.Unavailable {
		return done{err: err}
	}
	return done{text: "refused by the host: " + status.Convert(err).Message(), failed: true}
}

func (r *run) changed(ctx context.Context, decision, path, content string, stdin []byte, argv ...string) done {
	got, err := r.spawn(ctx, decision, stdin, argv...)
	if err != nil {
		return refused(ctx, err)
	}
	d := done{refs: []ref{{refExit, strconv.Itoa(got.exit)}}}
	if got.exit != 0 {
		d.text, d.failed = "failed: "+lastLine(got.output), true
		return d
	}
	d.text = "done"
	d.effects = []effect{{fileChanged, path, []ref{{refPath, path}, {refContent, content}}}}
	return d
}

func (r *run) command(ctx context.Context, s Step, decision string) done {
	got, err := r.spawn(ctx, decision, nil, s.Argv...)
	if err != nil {
		return refused(ctx, err)
	}
	refs := []ref{{refExit, strconv.Itoa(got.exit)}}
	if len(got.output) > 0 {
		// The log is kept if the quota allows; the digest stands in any case.
		refs = append(refs, ref{refOutput, digestOf(got.output)})
		if _, err := r.host.PutBytes(ctx, got.output, "text/plain"); err != nil && ctx.Err() != nil {
			return done{err: err}
		}
	}
	d := done{refs: refs, text: "exit " + strconv.Itoa(got.exit)}
	switch {
	case got.limit != "":
		d.text, d.failed = "ended by the limit "+got.limit, true
	case got.signal != 0:
		d.text = "ended by signal " + strconv.Itoa(int(got.signal))
		d.failed = !s.Exit.NonZero
	case s.Exit.NonZero:
		d.failed = got.exit == 0
	default:
		d.failed = got.exit != s.Exit.Code
	}
	if got.exit != 0 {
		d.text += " (" + clean(lastLine(got.output)) + ")"
	}
	if d.failed && got.limit == "" {
		d.text += ", the script expects " + s.Exit.String()
	}
	d.effects = []effect{{commandRan, "run " + clean(s.Argv[0]), refs}}
	return d
}

// String says which exit code is expected.
func (e Exit) String() string {
	if e.NonZero {
		return "any but 0"
	}
	return strconv.Itoa(e.Code)
}

// maxFetch bounds what is read of an answer.
const maxFetch = 1 << 20

func (r *run) fetch(ctx context.Context, s Step) done {
	host, err := destination(s.URL)
	if err != nil {
		return done{text: err.Error(), failed: true}
	}
	code, body, err := r.get(ctx, s.URL, r.config.Proxy)
	if err != nil && ctx.Err() != nil {
		return done{err: status.FromContextError(ctx.Err()).Err()}
	}
	d := done{effects: []effect{{networkAsked, "fetch " + host, []ref{{refHost, host}}}}}
	if err != nil {
		d.text, d.failed = "failed: "+err.Error(), true
		return d
	}
	d.text = "status " + strconv.Itoa(code)
	d.refs = []ref{{refStatus, strconv.Itoa(code)}, {refContent, digestOf(body)}}
	return d
}

// get fetches url through a proxy, or directly if proxy is empty. Redirects are
// not followed: each host is an intent of its own.
func (r *run) get(ctx context.Context, target, proxy string) (code int, body []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true}
	if proxy != "" {
		u, err := url.Parse(proxy)
		if err != nil {
			return 0, nil, fmt.Errorf("proxy %q: %w", proxy, err)
		}
		transport.Proxy = http.ProxyURL(u)
	}
	client := &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return 0, nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err
		}
		return 0, nil, err
	}
	defer response.Body.Close()
	body, err = io.ReadAll(io.LimitReader(response.Body, maxFetch))
	return response.StatusCode, body, err
}

func (r *run) credential(ctx context.Context, s Step) done {
	handle, err := r.host.Credential(ctx, s.Intent)
	if err != nil {
		return refused(ctx, err)
	}
	// The handle stands for a credential; it does not belong in an event.
	return done{
		text:    "handle until " + handle.GetExpires().AsTime().UTC().Format(time.RFC3339),
		effects: []effect{{credentialAsk, "credential " + s.Intent, []ref{{refIntent, s.Intent}}}},
	}
}
