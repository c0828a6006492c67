package egress

import (
	"net/netip"
	"strings"
	"testing"
)

// FuzzParse holds what the parsers accept to one spelling: writing it again gives
// the same bytes, and nothing accepted could be another address to anybody.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"a.example:443", "[2606:4700::1]:443", "1.2.3.4:1", "0x7f.1:80", "a.example.:443", "[a]:1", "１.example:443", "a:b:443", "x\x00.example:443"} {
		f.Add([]byte("CONNECT " + s + " HTTP/1.1\r\nHost: " + s + "\r\n\r\n"))
	}
	f.Fuzz(func(t *testing.T, head []byte) {
		target, err := parseHead(head)
		if err != nil {
			return
		}
		host, port, err := parseTarget(target)
		if err != nil {
			return
		}
		if port < 1 || port > 65535 || host == "" || host != strings.ToLower(host) || strings.ContainsAny(host, " \t\r\n\x00@/\\#%[]") {
			t.Fatalf("accepted %q and %d from %q", host, port, head)
		}
		for i := range len(host) {
			if host[i] >= 0x80 {
				t.Fatalf("accepted %q", host)
			}
		}
		if a, err := netip.ParseAddr(host); err == nil {
			if a.String() != host {
				t.Fatalf("%q is another spelling of %s", host, a)
			}
			return
		}
		if strings.Contains(host, ":") || strings.HasSuffix(host, ".") {
			t.Fatalf("accepted %q", host)
		}
	})
}
