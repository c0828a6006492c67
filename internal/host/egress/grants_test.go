package egress

import (
	"net/netip"
	"testing"

	"github.com/numinance/numinance/internal/core/grant"
)

// An Organization's exact grant of host and range reaches a private address, or
// one of a special-purpose range that a network uses for its mirrors; without it
// each is refused, and no grant reaches loopback, link-local or metadata.
func TestExactGrantsOfSpecialRanges(t *testing.T) {
	mirror := grant.Destination{Host: "mirror.example", Port: 443}
	for _, c := range []struct {
		address, granted string
		allowed          bool
	}{
		{"10.1.2.3", "10.1.2.0/24", true},
		{"198.18.0.7", "198.18.0.0/24", true},
		{"203.0.113.9", "203.0.113.9/32", true},
		{"192.0.2.1", "192.0.2.0/24", true},
		{"198.51.100.1", "198.51.100.0/24", true},
		{"203.0.113.9", "203.0.113.10/32", false},
		{"203.0.113.9", "", false},
		{"198.18.0.7", "", false},
		{"127.0.0.1", "127.0.0.0/8", false},
		{"169.254.169.254", "169.254.0.0/16", false},
		{"100.100.100.200", "100.64.0.0/10", false},
		{"::1", "::/0", false},
		{"224.0.0.1", "0.0.0.0/0", false},
	} {
		p := &Proxy{}
		if c.granted != "" {
			p.c.Private = []Private{{Destination: mirror, Range: netip.MustParsePrefix(c.granted)}}
		}
		reason := p.checkAddress(mirror, netip.MustParseAddr(c.address))
		if (reason == "") != c.allowed {
			t.Errorf("%s under a grant of %q: %q, want allowed %v", c.address, c.granted, reason, c.allowed)
		}
		if other := (grant.Destination{Host: "mirror.example", Port: 8443}); p.checkAddress(other, netip.MustParseAddr(c.address)) == "" {
			t.Errorf("%s: another port is reached under the grant of %q", c.address, c.granted)
		}
	}
}
