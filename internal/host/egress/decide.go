package egress

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/core/identity"
)

// Private lets a run reach one private host: the name and port must be granted
// as well, and the name must resolve into Range. Metadata, link-local and
// loopback addresses are never reached, whatever Range says.
type Private struct {
	Destination grant.Destination
	Range       netip.Prefix
}

// Attempt is one try to reach a destination, as it is recorded.
type Attempt struct {
	Change  identity.ChangeID
	Run     identity.RunID
	Host    string // as asked for; from the sandbox
	Port    int
	Address netip.Addr // the address that decided, if one did
	Allowed bool
	Reason  string
}

// Recorder keeps an attempt durably before it is answered. An attempt that
// cannot be recorded is refused.
type Recorder interface {
	Record(context.Context, Attempt) error
}

// Resolver finds the addresses of a name; net.Resolver implements it.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// decision is where a tunnel may go. The zero decision is nowhere.
type decision struct {
	allowed   bool
	addresses []netip.Addr
	address   netip.Addr // that decided
	reason    string
}

// decide looks a destination up in the grant and every address of it in the
// table. One special address among several refuses all: which one is dialled is
// not the sandbox's to influence.
func (p *Proxy) decide(ctx context.Context, host string, port int) decision {
	want := grant.Destination{Host: host, Port: port}
	granted := false
	for _, d := range p.c.Allow {
		granted = granted || d == want
	}
	if !granted {
		return decision{reason: fmt.Sprintf("%s is not among the destinations of this run's grant", want)}
	}
	var addresses []netip.Addr
	if a, err := netip.ParseAddr(host); err == nil {
		addresses = []netip.Addr{a}
	} else if addresses, err = p.c.Resolver.LookupNetIP(ctx, "ip", host); err != nil {
		return decision{reason: fmt.Sprintf("%s does not resolve: %v", host, err)}
	}
	if len(addresses) == 0 {
		return decision{reason: fmt.Sprintf("%s has no address", host)}
	}
	for i, a := range addresses {
		addresses[i] = a.Unmap()
		if reason := p.checkAddress(want, a); reason != "" {
			return decision{address: a, reason: reason}
		}
	}
	return decision{allowed: true, addresses: addresses, address: addresses[0], reason: "granted"}
}

// checkAddress returns why an address may not be dialled for a destination, or "".
func (p *Proxy) checkAddress(d grant.Destination, a netip.Addr) string {
	what, grantable := classify(a)
	if what == "" {
		return ""
	}
	if grantable {
		for _, g := range p.c.Private {
			if g.Destination == d && g.Range.Contains(a.Unmap()) {
				return ""
			}
		}
	}
	return fmt.Sprintf("%s is at %s, which is %s", d.Host, a, what)
}

// dial connects to the first address that answers. The check in Control sees the
// address that the socket is about to connect to: nothing between decision and
// connection can put another one there.
func (p *Proxy) dial(ctx context.Context, d grant.Destination, addresses []netip.Addr) (net.Conn, error) {
	dialer := net.Dialer{
		Timeout: dialTimeout,
		Control: func(_, address string, _ syscall.RawConn) error {
			ap, err := netip.ParseAddrPort(address)
			if err != nil {
				return fmt.Errorf("dial %q: %w", address, err)
			}
			if reason := p.checkAddress(d, ap.Addr()); reason != "" || int(ap.Port()) != d.Port {
				return fmt.Errorf("dial %s: %s", ap, reason)
			}
			return nil
		},
	}
	var err error
	for _, a := range addresses {
		var c net.Conn
		if c, err = dialer.DialContext(ctx, "tcp", netip.AddrPortFrom(a, uint16(d.Port)).String()); err == nil {
			return c, nil
		}
	}
	return nil, err
}
