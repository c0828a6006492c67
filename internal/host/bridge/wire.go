package bridge

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Kind is the one letter in a connection's first line, which says what the
// connection is for. The zero Kind is none and is refused.
type Kind byte

// The three kinds of connection. All are dialled from inside the sandbox,
// because nothing outside can dial in.
const (
	KindPlugin  Kind = 'P' // the host is the gRPC client of the plugin inside
	KindHost    Kind = 'H' // the plugin inside is the client of the host
	KindControl Kind = 'I' // the host orders PID 1 to start or end processes
)

// PreambleLen is the exact length in bytes of the first line of a connection.
const PreambleLen = 9

// Preamble returns the first line of a connection of kind k.
func Preamble(k Kind) []byte { return []byte("NUMI/1 " + string(rune(k)) + "\n") }

// ParsePreamble returns the kind that a first line names, or an error for
// anything that is not one of the three lines byte for byte.
func ParsePreamble(line []byte) (Kind, error) {
	for _, k := range []Kind{KindPlugin, KindHost, KindControl} {
		if string(line) == string(Preamble(k)) {
			return k, nil
		}
	}
	return 0, fmt.Errorf("first line %q is not NUMI/1 P, H or I", line)
}

// Paths inside a sandbox. The link directory is a read-only bind of the host's
// directory for this run, closed to all but PID 1; the socket directory is
// open to the adapter's uid alone.
const (
	LinkDir      = "/run/numi"
	HostLink     = LinkDir + "/host.sock"
	EgressLink   = LinkDir + "/egress.sock"
	SocketDir    = "/run/numi-plugin"
	PluginSocket = SocketDir + "/plugin.sock"
	HostSocket   = SocketDir + "/host.sock"
	ToolsDir     = "/opt/numi"
	InitPath     = ToolsDir + "/init/numi-init"
	ProxyAddress = "127.0.0.1:3128"
	ProxyURL     = "http://" + ProxyAddress
	WorkRoot     = "/workspace"
)

// The uids and, equal to them, gids of a sandbox. 0 is PID 1 alone.
const (
	UIDAgent     = 1000  // a harness and its tools
	UIDCandidate = 1001  // candidate code under a verifier
	UIDAdapter   = 10001 // the plugin itself
)

// MaySpawn reports whether processes may be started as uid. PID 1's own uid
// is never among them.
func MaySpawn(uid int) bool {
	return uid == UIDAgent || uid == UIDCandidate || uid == UIDAdapter
}

// Op says what an Order asks for. The empty Op is refused.
type Op string

// The orders PID 1 carries out.
const (
	OpSpawn   Op = "spawn"    // start Command, then exchange frames
	OpKillAll Op = "kill-all" // end every process of Command.UID, answer one exit frame
)

// Order is the one JSON line that opens a control exchange, at most MaxOrder
// bytes with its newline.
type Order struct {
	Op      Op      `json:"op"`
	Command Command `json:"command"`
}

// MaxOrder bounds the order line, which carries arguments and environment.
const MaxOrder = 1 << 20

// Command is a process to start inside the sandbox.
type Command struct {
	Argv   []string `json:"argv"`          // Argv[0] is looked up in PATH of Env if it has no slash
	Env    []string `json:"env,omitempty"` // complete: nothing is inherited
	Dir    string   `json:"dir,omitempty"` // "" is the work root
	UID    int      `json:"uid"`           // one of the three uids; its gid is the same number
	Limits Limits   `json:"limits"`
}

// Limits are resource limits of one process and those it starts; 0 keeps the
// sandbox's own limit. None can be raised above it.
type Limits struct {
	Processes uint64 `json:"processes,omitempty"`  // RLIMIT_NPROC, counted per uid
	FileBytes uint64 `json:"file_bytes,omitempty"` // RLIMIT_FSIZE
	OpenFiles uint64 `json:"open_files,omitempty"` // RLIMIT_NOFILE
	CPU       uint64 `json:"cpu,omitempty"`        // RLIMIT_CPU, seconds per process
}

// Exit is how a process ended. Signal is 0 unless a signal ended it; then Code
// is 128 plus the signal, as a shell would say.
type Exit struct {
	Code   int `json:"code"`
	Signal int `json:"signal,omitempty"`
}

// FrameType is the first byte of a frame. The zero FrameType is refused.
type FrameType byte

// The frames of a control exchange after its order line.
const (
	FrameStdin     FrameType = 'i' // host to init: bytes
	FrameStdinEOF  FrameType = 'I' // host to init
	FrameSignal    FrameType = 's' // host to init: one byte, the signal's number
	FrameStarted   FrameType = 'S' // init to host: the pid inside, 4 bytes
	FrameFailed    FrameType = 'F' // init to host: why the order was not carried out
	FrameStdout    FrameType = 'o' // init to host: bytes
	FrameStdoutEOF FrameType = 'O' // init to host
	FrameStderr    FrameType = 'e' // init to host: bytes
	FrameStderrEOF FrameType = 'E' // init to host
	FrameExit      FrameType = 'X' // init to host: Exit as JSON; the last frame
	FrameAck       FrameType = 'a' // both ways: the data frame's type, then 4 bytes of credit
)

// MaxFrame bounds a frame's payload. Window is how many bytes of one stream
// may be under way without having been acknowledged: a stream nobody reads
// stops at its own window and never holds up the others or a signal.
const (
	MaxFrame = 32 << 10
	Window   = 256 << 10
)

// WriteFrame writes one frame. Callers serialise their calls.
func WriteFrame(w io.Writer, t FrameType, payload []byte) error {
	if len(payload) > MaxFrame {
		return fmt.Errorf("frame %q of %d bytes is larger than %d", t, len(payload), MaxFrame)
	}
	buf := make([]byte, 5, 5+len(payload))
	buf[0] = byte(t)
	binary.BigEndian.PutUint32(buf[1:], uint32(len(payload)))
	_, err := w.Write(append(buf, payload...))
	return err
}

// ReadFrame reads one frame. io.EOF means the other end closed between frames.
func ReadFrame(r io.Reader) (FrameType, []byte, error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > MaxFrame {
		return 0, nil, fmt.Errorf("frame of %d bytes is larger than %d", n, MaxFrame)
	}
	payload := make([]byte, n)
	if _, err := io.ReadFull(r, payload); err != nil {
		return 0, nil, fmt.Errorf("frame payload: %w", noEOF(err))
	}
	return FrameType(head[0]), payload, nil
}

// AckPayload and ParseAck carry credit for the stream of data frame t.
func AckPayload(t FrameType, n int) []byte {
	return binary.BigEndian.AppendUint32([]byte{byte(t)}, uint32(n))
}

// ParseAck is the inverse of AckPayload.
func ParseAck(p []byte) (FrameType, int, error) {
	if len(p) != 5 {
		return 0, 0, errors.New("acknowledgement is not 5 bytes")
	}
	n := binary.BigEndian.Uint32(p[1:])
	if n > Window {
		return 0, 0, fmt.Errorf("acknowledgement of %d bytes is larger than the window", n)
	}
	return FrameType(p[0]), int(n), nil
}

// ReadOrder reads the order line; the frames that follow are read from the same
// reader.
func ReadOrder(r *bufio.Reader) (Order, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return Order{}, err
		}
		line = append(line, part...)
		if len(line) > MaxOrder {
			return Order{}, fmt.Errorf("order is longer than %d bytes", MaxOrder)
		}
		if err == nil {
			break
		}
	}
	var o Order
	if err := json.Unmarshal(line, &o); err != nil {
		return Order{}, fmt.Errorf("order: %w", err)
	}
	return o, nil
}

// Line returns the order as the line that opens the exchange.
func (o Order) Line() ([]byte, error) {
	b, err := json.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("encode order: %w", err)
	}
	if len(b)+1 > MaxOrder {
		return nil, fmt.Errorf("order of %d bytes is larger than %d: shorten arguments or environment", len(b), MaxOrder)
	}
	return append(b, '\n'), nil
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
