package hostservice

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/host/bridge"
)

type spawnStream = grpc.BidiStreamingServer[pluginv1.SpawnRequest, pluginv1.SpawnResponse]

// Spawn implements HostService. The process lives at most as long as the call:
// when the plugin goes away, so does what it started.
func (s *Service) Spawn(stream spawnStream) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	start := first.GetStart()
	if start == nil {
		return status.Error(codes.InvalidArgument, "spawn: the first message is the start")
	}
	if err := s.check(first); err != nil {
		return err
	}
	ctx := stream.Context()
	uid, err := s.spawnUID(ctx, start)
	if err != nil {
		return err
	}
	timeout := start.GetTimeout().AsDuration()
	if !start.GetTimeout().IsValid() || timeout <= 0 || timeout > s.c.MaxProcess {
		return status.Errorf(codes.InvalidArgument, "spawn: the timeout is %s, it must be above 0 and at most %s", timeout, s.c.MaxProcess)
	}
	command, err := digest.OfCanonical(map[string]any{"argv": start.GetArgv()})
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "spawn: %v", err)
	}
	one := Process{
		Plugin: s.c.Plugin, Change: s.c.Change, Run: s.c.Run, Decision: start.GetDecisionId(),
		User:    strings.ToLower(strings.TrimPrefix(start.GetUser().String(), "PROCESS_USER_")),
		Program: start.GetArgv()[0], Command: command,
	}
	if err := s.c.Processes.Process(ctx, one); err != nil {
		return status.Errorf(codes.Unavailable, "spawn: %v", err)
	}
	one.Ended = true
	exit, out, err := s.carryOut(stream, start, uid, timeout, &one)
	if err != nil {
		one.Failure = status.Convert(err).Message()
	}
	if rerr := s.c.Processes.Process(context.WithoutCancel(ctx), one); rerr != nil && err == nil {
		err = status.Errorf(codes.Unavailable, "spawn: %v", rerr)
	}
	if err != nil {
		return err
	}
	return out.send(&pluginv1.SpawnResponse{Step: &pluginv1.SpawnResponse_Exit{Exit: exit}})
}

// carryOut starts the process and stays with it to its end, which it notes in one.
func (s *Service) carryOut(stream spawnStream, start *pluginv1.SpawnStart, uid int, timeout time.Duration, one *Process) (*pluginv1.SpawnExit, *outputs, error) {
	ctx := stream.Context()
	live, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	env := make([]string, 0, len(start.GetEnvironment()))
	for k, v := range start.GetEnvironment() {
		env = append(env, k+"="+v)
	}
	p, err := s.c.Spawn(live, bridge.Command{Argv: start.GetArgv(), Env: env, Dir: start.GetWorkingDirectory(), UID: uid, Limits: s.c.Limits})
	if err != nil {
		if errors.Is(err, bridge.ErrOver) {
			return nil, nil, status.Error(codes.Unavailable, "spawn: the run is over")
		}
		return nil, nil, status.Errorf(codes.FailedPrecondition, "spawn: %v", err)
	}
	one.PID = p.PID
	out := &outputs{stream: stream}
	if err := out.send(&pluginv1.SpawnResponse{Step: &pluginv1.SpawnResponse_Started{Started: uint32(p.PID)}}); err != nil {
		cancel()
		// The output must be read for Wait to return.
		go drain(p)
		_, _ = p.Wait()
		return nil, nil, err
	}
	go s.feed(stream, p)
	var wg sync.WaitGroup
	wg.Go(func() {
		out.copy(p.Stdout, func(b []byte) *pluginv1.SpawnResponse {
			return &pluginv1.SpawnResponse{Step: &pluginv1.SpawnResponse_Stdout{Stdout: b}}
		})
	})
	wg.Go(func() {
		out.copy(p.Stderr, func(b []byte) *pluginv1.SpawnResponse {
			return &pluginv1.SpawnResponse{Step: &pluginv1.SpawnResponse_Stderr{Stderr: b}}
		})
	})
	wg.Wait()
	e, err := p.Wait()
	if err != nil {
		return nil, nil, status.Errorf(codes.Unavailable, "spawn: the end of the process was not seen: %v", err)
	}
	exit := &pluginv1.SpawnExit{ExitCode: int32(e.Code), Signal: uint32(e.Signal)}
	if e.Signal != 0 {
		exit.ExitCode = -1
	}
	if live.Err() == context.DeadlineExceeded && ctx.Err() == nil {
		exit.Limit = "wall-clock"
	}
	one.Exit, one.Signal, one.Limit = int(exit.GetExitCode()), int(exit.GetSignal()), exit.GetLimit()
	return exit, out, nil
}

// spawnUID says whether and as whom a process may start.
func (s *Service) spawnUID(ctx context.Context, start *pluginv1.SpawnStart) (int, error) {
	if s.c.Spawn == nil || s.c.Processes == nil {
		return 0, s.refuse(ctx, codes.PermissionDenied, "spawn", start.GetDecisionId(), "this plugin has no sandbox")
	}
	switch start.GetUser() {
	case pluginv1.ProcessUser_PROCESS_USER_AGENT:
		if s.c.AgentSpawn == nil {
			return 0, s.refuse(ctx, codes.PermissionDenied, "spawn", start.GetDecisionId(), "only the adapter of a run starts processes of the agent")
		}
		if err := s.c.AgentSpawn(identity.DecisionID(start.GetDecisionId()), start.GetArgv()); err != nil {
			return 0, s.refuse(ctx, codes.PermissionDenied, "spawn", start.GetDecisionId(), "%v", err)
		}
		return bridge.UIDAgent, nil
	case pluginv1.ProcessUser_PROCESS_USER_CANDIDATE:
		if !s.c.CandidateSpawn {
			return 0, s.refuse(ctx, codes.PermissionDenied, "spawn", start.GetDecisionId(), "only a verifier starts processes of the candidate")
		}
		return bridge.UIDCandidate, nil
	}
	return 0, status.Error(codes.InvalidArgument, "spawn: no user")
}

// feed carries input and signals until the call ends.
func (s *Service) feed(stream spawnStream, p *bridge.Process) {
	defer p.Stdin.Close()
	for {
		m, err := stream.Recv()
		if err != nil || s.check(m) != nil {
			return
		}
		switch step := m.GetStep().(type) {
		case *pluginv1.SpawnRequest_Stdin:
			if _, err := p.Stdin.Write(step.Stdin); err != nil {
				// The process no longer reads; signals must still get through.
				continue
			}
		case *pluginv1.SpawnRequest_CloseStdin:
			p.Stdin.Close()
		case *pluginv1.SpawnRequest_Signal:
			// A process that is gone has no use for a signal.
			_ = p.Signal(syscall.Signal(step.Signal))
		default:
			return
		}
	}
}

// outputs serialises what two streams send on one call.
type outputs struct {
	mu     sync.Mutex
	stream spawnStream
}

func (o *outputs) send(m *pluginv1.SpawnResponse) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.stream.Send(m)
}

// copy sends what r yields, and goes on reading after the plugin is gone so that
// the process's end is seen.
func (o *outputs) copy(r io.Reader, wrap func([]byte) *pluginv1.SpawnResponse) {
	gone := false
	for {
		buf := make([]byte, 32<<10)
		n, err := r.Read(buf)
		if n > 0 && !gone {
			gone = o.send(wrap(buf[:n])) != nil
		}
		if err != nil {
			return
		}
	}
}

func drain(p *bridge.Process) {
	go func() { _, _ = io.Copy(io.Discard, p.Stdout) }()
	_, _ = io.Copy(io.Discard, p.Stderr)
}
