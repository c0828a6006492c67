package egress

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
)

const (
	headTimeout  = 10 * time.Second
	dialTimeout  = 15 * time.Second
	helloTimeout = 10 * time.Second
	defaultIdle  = 5 * time.Minute
	maxTunnels   = 128
	// patience is how many refusals of one run are answered at once.
	patience = 100
)

// Config is what one run may reach. The zero Config, given a Recorder, refuses
// everything.
type Config struct {
	Change identity.ChangeID
	Run    identity.RunID
	// Allow are the destinations of the run's grant, exactly.
	Allow []grant.Destination
	// Private are the private hosts that the Organization grants exactly.
	Private []Private
	// Expires ends every tunnel; zero leaves that to Close.
	Expires time.Time
	// Recorder is required.
	Recorder Recorder
	// Resolver is Go's own resolver if nil: that of the C library takes numbers
	// in disguise for addresses.
	Resolver Resolver
	// Idle ends a tunnel that carries nothing; 0 is five minutes.
	Idle time.Duration
}

// Proxy serves one run, from New to Close. It is safe for concurrent use.
type Proxy struct {
	c      Config
	ctx    context.Context
	cancel context.CancelFunc
	slots  chan struct{}
	wg     sync.WaitGroup
	denied atomic.Int64
}

// New returns the proxy of a run.
func New(c Config) (*Proxy, error) {
	if c.Recorder == nil {
		return nil, errors.New("egress proxy: without a recorder nothing may leave")
	}
	if c.Resolver == nil {
		c.Resolver = &net.Resolver{PreferGo: true}
	}
	if c.Idle <= 0 {
		c.Idle = defaultIdle
	}
	p := &Proxy{c: c, slots: make(chan struct{}, maxTunnels)}
	if c.Expires.IsZero() {
		p.ctx, p.cancel = context.WithCancel(context.Background())
	} else {
		p.ctx, p.cancel = context.WithDeadline(context.Background(), c.Expires)
	}
	return p, nil
}

// Serve takes connections from l until Close or until the grant expires, and
// then closes l.
func (p *Proxy) Serve(l net.Listener) error {
	stop := context.AfterFunc(p.ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	for {
		c, err := l.Accept()
		if err != nil {
			if p.ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("egress proxy of %s: %w", p.c.Run, err)
		}
		select {
		case p.slots <- struct{}{}:
		default:
			c.Close() // more tunnels than any run needs
			continue
		}
		p.wg.Go(func() {
			defer func() { <-p.slots }()
			p.serve(c)
		})
	}
}

// Close cuts every tunnel and waits until none is left.
func (p *Proxy) Close() error {
	p.cancel()
	p.wg.Wait()
	return nil
}

// serve carries one connection.
func (p *Proxy) serve(c net.Conn) {
	defer c.Close()
	ctx, cancel := context.WithCancel(p.ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { c.Close() })()

	a := Attempt{Change: p.c.Change, Run: p.c.Run}
	head, err := readHead(c)
	var target string
	if err == nil {
		target, err = parseHead(head)
	}
	if err == nil {
		a.Host, a.Port, err = parseTarget(target)
	}
	if err != nil {
		if errors.Is(err, errHead) {
			a.Host, a.Reason = clean(target), err.Error()
			p.refuse(ctx, c, a, "400 Bad Request")
		}
		return
	}
	d := p.decide(ctx, a.Host, a.Port)
	a.Allowed, a.Address, a.Reason = d.allowed, d.address, d.reason
	if !d.allowed {
		p.refuse(ctx, c, a, "403 Forbidden")
		return
	}
	if err := p.c.Recorder.Record(ctx, a); err != nil {
		answer(c, "503 Service Unavailable", "the attempt could not be recorded, so it is refused")
		return
	}
	want := grant.Destination{Host: a.Host, Port: a.Port}
	up, err := p.dial(ctx, want, d.addresses)
	if err != nil {
		answer(c, "502 Bad Gateway", fmt.Sprintf("%s was allowed and does not answer: %v", want, err))
		return
	}
	defer up.Close()
	defer context.AfterFunc(ctx, func() { up.Close() })()
	if _, err := io.WriteString(c, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return
	}
	hello, err := p.readHello(c, a.Host)
	if err != nil {
		a.Allowed, a.Reason = false, err.Error()
		// The connection is cut in any case; the record is all that can be done.
		_ = p.c.Recorder.Record(context.WithoutCancel(ctx), a)
		return
	}
	if _, err := up.Write(hello); err != nil {
		return
	}
	p.carry(c, up)
}

// refuse records a refusal and answers with it. It is one whether or not the
// record could be written.
// Each refusal is a record, and a client that asks again and again would write
// thousands: after the first few each answer takes a second.
func (p *Proxy) refuse(ctx context.Context, c net.Conn, a Attempt, status string) {
	if p.denied.Add(1) > patience {
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
	reason := a.Reason
	if err := p.c.Recorder.Record(context.WithoutCancel(ctx), a); err != nil {
		reason += " (the refusal could not be recorded)"
	}
	answer(c, status, reason+"; to reach it, have the host and port added to the grant's destinations")
}

func answer(c net.Conn, status, reason string) {
	body := "numinance egress: " + clean(reason) + "\n"
	_ = c.SetWriteDeadline(time.Now().Add(headTimeout))
	// The client may be gone; there is nobody to tell.
	_, _ = fmt.Fprintf(c, "HTTP/1.1 %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", status, len(body), body)
}

// clean makes foreign text safe for a header, a record and a terminal.
func clean(s string) string {
	s = strings.ToValidUTF8(s, "?")
	s = strings.Map(func(r rune) rune {
		if r < 0x20 || r > 0x7e {
			return '?'
		}
		return r
	}, s)
	return s[:min(len(s), 512)]
}

// readHead reads up to the empty line and nothing after it: bytes that a client
// sends before it has the answer are refused, because nobody could say which of
// two parsers they were meant for.
func readHead(c net.Conn) ([]byte, error) {
	if err := c.SetReadDeadline(time.Now().Add(headTimeout)); err != nil {
		return nil, err
	}
	defer c.SetReadDeadline(time.Time{})
	head := make([]byte, 0, 1024)
	buf := make([]byte, 1024)
	for {
		n, err := c.Read(buf)
		head = append(head, buf[:n]...)
		if len(head) > maxHead {
			return nil, malformed("the head is longer than %d bytes", maxHead)
		}
		if i := bytes.Index(head, []byte("\r\n\r\n")); i >= 0 {
			if i+4 != len(head) {
				return nil, malformed("data before the answer")
			}
			return head, nil
		}
		if err != nil {
			if len(head) > 0 {
				return nil, malformed("the head does not end")
			}
			return nil, err
		}
	}
}

// carry copies both ways until either side ends or nothing moves for too long.
func (p *Proxy) carry(a, b net.Conn) {
	var wg sync.WaitGroup
	pipe := func(dst, src net.Conn) {
		buf := make([]byte, 32<<10)
		for {
			_ = src.SetReadDeadline(time.Now().Add(p.c.Idle))
			n, err := src.Read(buf)
			if n > 0 {
				_ = dst.SetWriteDeadline(time.Now().Add(p.c.Idle))
				if _, werr := dst.Write(buf[:n]); werr != nil {
					break
				}
			}
			if err != nil {
				break
			}
		}
		// A half-closed tunnel has no use here; both sides end.
		dst.Close()
		src.Close()
	}
	wg.Go(func() { pipe(a, b) })
	wg.Go(func() { pipe(b, a) })
	wg.Wait()
}
