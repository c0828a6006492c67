package egress

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"
)

// maxHello bounds a TLS ClientHello with its framing in bytes.
const maxHello = 32 << 10

var errSeen = errors.New("hello seen")

// readHello reads the client's TLS hello, checks that it names host, and returns
// the bytes read, for the destination. A tunnel that is no TLS, or that names
// another server than the one it was allowed for, would reach somebody else
// behind the same address.
func (p *Proxy) readHello(c net.Conn, host string) ([]byte, error) {
	if err := c.SetReadDeadline(time.Now().Add(helloTimeout)); err != nil {
		return nil, err
	}
	defer c.SetReadDeadline(time.Time{})
	tape := &tape{from: c}
	var name string
	seen := false
	// crypto/tls parses the hello; the handshake ends before it answers.
	err := tls.Server(tape, &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			name, seen = h.ServerName, true
			return nil, errSeen
		},
	}).HandshakeContext(p.ctx)
	if !seen {
		return nil, fmt.Errorf("the tunnel does not begin with a TLS hello: %w", err)
	}
	want := host
	if _, err := netip.ParseAddr(host); err == nil {
		want = "" // an address is never a server name
	}
	if name != want {
		return nil, fmt.Errorf("the TLS hello names %q, the tunnel is for %q", clean(name), host)
	}
	return tape.read.Bytes(), nil
}

// tape is a connection that keeps what is read from it and writes nowhere.
type tape struct {
	from net.Conn
	read bytes.Buffer
}

func (t *tape) Read(b []byte) (int, error) {
	if left := maxHello - t.read.Len(); left <= 0 {
		return 0, errors.New("the TLS hello is too long")
	} else if len(b) > left {
		b = b[:left]
	}
	n, err := t.from.Read(b)
	t.read.Write(b[:n])
	return n, err
}

func (t *tape) Write(b []byte) (int, error)        { return len(b), nil }
func (t *tape) Close() error                       { return nil }
func (t *tape) LocalAddr() net.Addr                { return t.from.LocalAddr() }
func (t *tape) RemoteAddr() net.Addr               { return t.from.RemoteAddr() }
func (t *tape) SetDeadline(d time.Time) error      { return t.from.SetDeadline(d) }
func (t *tape) SetReadDeadline(d time.Time) error  { return t.from.SetReadDeadline(d) }
func (t *tape) SetWriteDeadline(d time.Time) error { return nil }

var _ net.Conn = (*tape)(nil)
