package pluginhost

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/numinance/numinance/internal/host/bridge"
	"github.com/numinance/numinance/internal/host/pluginhost/jail"
)

const (
	pluginSocket = "plugin.sock"
	hostSocket   = "host.sock"

	defaultTmp = 64 << 20
	// A plugin that is asked to end has this long before it is killed.
	grace = 2 * time.Second
	// How long the kernel may take to end what was killed.
	killWait = 5 * time.Second
)

// Process launches a plugin as a jailed process of its own. As root the plugin
// runs as a reserved uid; as an ordinary user it runs as that user in a user
// namespace, which is the weaker jail and is reported as such.
type Process struct {
	// Exe is a binary whose main calls jail.Enter first; empty is this one.
	Exe string
	// Argv is the plugin's program by absolute path, with its arguments.
	Argv []string
	// DataDir is the plugin's directory on the host; it is made if it is not
	// there, and belongs to the plugin. Empty if it keeps nothing.
	DataDir string
	// RunDir is where the sockets of the process are made; empty is the
	// directory for temporary files.
	RunDir string
	// Log is the file that takes what the plugin prints; empty keeps only the
	// last lines.
	Log string
	// UID is the reserved uid, within UIDBase and UIDBase+UIDs, where the runtime
	// is root. It is not used otherwise.
	UID     int
	Profile Profile
}

// process is one launched Process.
type process struct {
	work    string // holds the sockets and the root's place
	sockets *socketDir
	out     *output
	host    net.Listener
	kill    func()
	term    func()
	ended   chan struct{}
	state   string // how it ended; set before ended is closed
	jail    string
}

// Launch implements Launcher.
func (l Process) Launch(ctx context.Context) (link *Link, err error) {
	uid, gid, mapped, err := l.identity()
	if err != nil {
		return nil, err
	}
	p := &process{ended: make(chan struct{})}
	// The error is the reason; that cleaning up fails as well adds nothing.
	defer func() {
		if err != nil {
			_ = p.close()
		}
	}()
	if p.out, err = newOutput(l.Log); err != nil {
		close(p.ended)
		return nil, err
	}
	if err := p.prepare(l, uid, gid); err != nil {
		close(p.ended)
		return nil, err
	}
	if err := p.start(ctx, l, uid, gid, mapped); err != nil {
		return nil, err
	}
	if err := p.await(ctx); err != nil {
		return nil, err
	}
	return &Link{
		Dial:    func(ctx context.Context) (net.Conn, error) { return p.sockets.dial(ctx, pluginSocket) },
		Host:    p.host,
		Ended:   p.ended,
		Why:     p.why,
		DataDir: l.DataDir,
		Jail:    p.jail,
		Close:   sync.OnceValue(p.close),
	}, nil
}

// identity returns what the plugin runs as.
func (l Process) identity() (uid, gid int, mapped bool, err error) {
	if len(l.Argv) == 0 {
		return 0, 0, false, errors.New("no program")
	}
	switch {
	case l.Profile.Trusted:
		return os.Getuid(), os.Getgid(), false, nil
	case os.Getuid() != 0:
		return os.Getuid(), os.Getgid(), true, nil
	case l.UID < UIDBase || l.UID >= UIDBase+UIDs:
		return 0, 0, false, fmt.Errorf("uid %d is not one of those reserved for plugins, %d to %d", l.UID, UIDBase, UIDBase+UIDs-1)
	}
	return l.UID, l.UID, false, nil
}

// prepare makes the directories and the host's socket.
func (p *process) prepare(l Process, uid, gid int) (err error) {
	if p.work, err = os.MkdirTemp(l.RunDir, "numi-plugin-"); err != nil {
		return fmt.Errorf("make a directory for sockets: %w", err)
	}
	if p.work, err = filepath.Abs(p.work); err != nil {
		return fmt.Errorf("make a directory for sockets: %w", err)
	}
	dir := filepath.Join(p.work, "s")
	for _, d := range []string{dir, filepath.Join(p.work, "root")} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return fmt.Errorf("make a directory for sockets: %w", err)
		}
	}
	if p.sockets, err = openSocketDir(dir, uid); err != nil {
		return err
	}
	listener, err := bridge.ListenIn(dir, hostSocket)
	if err != nil {
		return fmt.Errorf("listen for the plugin: %w", err)
	}
	p.host = peerListener{Listener: listener, sockets: p.sockets}
	for _, name := range []string{filepath.Join(dir, hostSocket), dir} {
		if err := os.Lchown(name, uid, gid); err != nil {
			return fmt.Errorf("give the sockets to the plugin: %w", err)
		}
	}
	if l.DataDir == "" {
		return nil
	}
	if err := os.MkdirAll(l.DataDir, 0o700); err != nil {
		return fmt.Errorf("make the plugin's directory: %w", err)
	}
	return own(l.DataDir, uid, gid)
}

// own gives a plugin's directory to its uid. Only the plugin writes there, and
// links are not followed.
func own(dir string, uid, gid int) error {
	st, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("look at the plugin's directory: %w", err)
	}
	if s, ok := st.Sys().(*syscall.Stat_t); ok && int(s.Uid) == uid {
		return nil
	}
	err = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, uid, gid)
	})
	if err != nil {
		return fmt.Errorf("give the plugin's directory to uid %d: %w", uid, err)
	}
	return nil
}

// start starts the process from a thread of its own, which lives as long as it
// does: the kernel kills the process when that thread ends.
func (p *process) start(ctx context.Context, l Process, uid, gid int, mapped bool) error {
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		cmd, err := p.command(ctx, l, uid, gid, mapped)
		if err != nil {
			close(p.ended)
			started <- err
			return
		}
		started <- nil
		// A program that left a child holding its output is no error.
		if err := cmd.Wait(); err != nil && cmd.ProcessState == nil {
			p.state = err.Error()
		} else {
			p.state = cmd.ProcessState.String()
		}
		close(p.ended)
	}()
	return <-started
}

// command starts the process in its jail, or without one if it is trusted.
func (p *process) command(ctx context.Context, l Process, uid, gid int, mapped bool) (*exec.Cmd, error) {
	if l.Profile.Trusted {
		return p.trusted(l)
	}
	exe := l.Exe
	if exe == "" {
		exe = "/proc/self/exe"
	}
	argv, err := filepath.EvalSymlinks(l.Argv[0])
	if err != nil {
		return nil, fmt.Errorf("find the plugin's program: %w", err)
	}
	spec := jail.Spec{
		Argv: append([]string{argv}, l.Argv[1:]...),
		UID:  uid, GID: gid, Mapped: mapped,
		Root: filepath.Join(p.work, "root"), Sockets: filepath.Join(p.work, "s"),
		Writable: l.Profile.Writable, Readable: l.Profile.Readable,
		Tools: l.Profile.Tools, TmpBytes: l.Profile.TmpBytes,
		OpenFiles: l.Profile.OpenFiles, Processes: l.Profile.Processes,
	}
	if spec.TmpBytes == 0 {
		spec.TmpBytes = defaultTmp
	}
	if l.DataDir != "" {
		spec.Writable = append([]string{l.DataDir}, spec.Writable...)
	}
	spec.Env = environment(jail.SocketDir, l, "/tmp")
	j, err := jail.Start(exe, spec, p.out)
	if err != nil {
		return nil, err
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(defaultStart)
	}
	r, err := j.Report(deadline)
	if err != nil {
		j.Kill()
		_ = j.Cmd.Wait()
		return nil, err
	}
	p.kill = j.Kill
	p.term = func() { _ = j.Cmd.Process.Signal(syscall.SIGTERM) }
	p.jail = describe(uid, mapped, r)
	return j.Cmd, nil
}

// trusted starts a provider of the trusted base: no jail, but the same empty
// environment, and the same death with the runtime.
func (p *process) trusted(l Process) (*exec.Cmd, error) {
	cmd := exec.Command(l.Argv[0], l.Argv[1:]...)
	cmd.Env = environment(filepath.Join(p.work, "s"), l, os.TempDir())
	cmd.Env = append(cmd.Env, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = p.out, p.out
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the plugin: %w", err)
	}
	// It leads a process group of its own; what it started in the group dies too.
	p.kill = func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	p.term = func() { _ = cmd.Process.Signal(syscall.SIGTERM) }
	p.jail = "none: it is in the trusted base and runs as the runtime's own user"
	return cmd, nil
}

// environment is all that a plugin finds in its environment.
func environment(sockets string, l Process, tmp string) []string {
	home := l.DataDir
	if home == "" {
		home = tmp
	}
	env := []string{
		"NUMI_PLUGIN_SOCKET=" + filepath.Join(sockets, pluginSocket),
		"NUMI_HOST_SOCKET=" + filepath.Join(sockets, hostSocket),
		"HOME=" + home,
		"TMPDIR=" + tmp,
	}
	if l.Profile.Tools {
		env = append(env, "PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/go/bin")
	}
	return env
}

// describe says what confines the plugin.
func describe(uid int, mapped bool, r jail.Report) string {
	s := fmt.Sprintf("jail: own namespaces, no network, uid %d", uid)
	if mapped {
		s = fmt.Sprintf("weaker jail: user namespace of uid %d, no network", uid)
	}
	if r.Seccomp {
		s += ", seccomp"
	} else {
		s += ", without seccomp"
	}
	if r.Landlock > 0 {
		return s + fmt.Sprintf(", landlock %d", r.Landlock)
	}
	return s + ", without landlock, which this kernel lacks"
}

// await waits until the plugin listens.
func (p *process) await(ctx context.Context) error {
	pause := time.Millisecond
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for {
		c, err := p.sockets.dial(ctx, pluginSocket)
		if err == nil {
			return c.Close()
		}
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ECONNREFUSED) && ctx.Err() == nil {
			return err
		}
		select {
		case <-p.ended:
			return fmt.Errorf("it ended before it listened: %s", p.why())
		case <-ctx.Done():
			return fmt.Errorf("it does not listen on NUMI_PLUGIN_SOCKET: %w; %s", ctx.Err(), p.out.last())
		case <-timer.C:
			pause = min(2*pause, 20*time.Millisecond)
			timer.Reset(pause)
		}
	}
}

func (p *process) why() string {
	select {
	case <-p.ended:
		return fmt.Sprintf("its process ended (%s), %s", p.state, p.out.last())
	default:
		return p.out.last()
	}
}

// close ends the process and everything it started, and removes its sockets.
func (p *process) close() error {
	var errs []error
	if p.kill != nil {
		timer := time.NewTimer(grace)
		defer timer.Stop()
		p.term()
		select {
		case <-p.ended:
		case <-timer.C:
		}
		p.kill() // also what a trusted one left in its group
		select {
		case <-p.ended:
		case <-time.After(killWait):
			errs = append(errs, errors.New("the plugin's process does not end"))
		}
	}
	if p.host != nil {
		p.host.Close()
	}
	if p.sockets != nil {
		p.sockets.close()
	}
	if p.out != nil {
		p.out.close()
	}
	if p.work != "" {
		if err := os.RemoveAll(p.work); err != nil {
			errs = append(errs, fmt.Errorf("remove the plugin's sockets: %w", err))
		}
	}
	return errors.Join(errs...)
}
