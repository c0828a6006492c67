package egress

import "net/netip"

// special is a range of addresses that is not simply a public host.
type special struct {
	prefix netip.Prefix
	what   string
	// grantable ranges can be reached under an explicit private grant; the others
	// never.
	grantable bool
}

// specials is the explicit table: the registries of special-purpose addresses
// for IPv4 and IPv6, and the addresses of cloud metadata services outside of
// them. The first match decides, so exceptions come before their range. Methods
// such as IsGlobalUnicast are no substitute: they are true for several of these.
var specials = []special{
	// Metadata and platform services.
	{netip.MustParsePrefix("168.63.129.16/32"), "cloud platform service", false},
	{netip.MustParsePrefix("100.100.100.200/32"), "cloud metadata", false},
	{netip.MustParsePrefix("192.0.0.192/32"), "cloud metadata", false},
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local and cloud metadata", false},
	{netip.MustParsePrefix("fd00:ec2::/32"), "cloud metadata", false},
	{netip.MustParsePrefix("fd20:ce::/32"), "cloud metadata", false},

	{netip.MustParsePrefix("0.0.0.0/8"), "this network", false},
	{netip.MustParsePrefix("10.0.0.0/8"), "private", true},
	{netip.MustParsePrefix("100.64.0.0/10"), "shared by a carrier", true},
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback", false},
	{netip.MustParsePrefix("172.16.0.0/12"), "private", true},
	{netip.MustParsePrefix("192.0.0.0/24"), "protocol assignments", false},
	{netip.MustParsePrefix("192.0.2.0/24"), "documentation", true},
	{netip.MustParsePrefix("192.31.196.0/24"), "AS112", false},
	{netip.MustParsePrefix("192.52.193.0/24"), "AMT", false},
	{netip.MustParsePrefix("192.88.99.0/24"), "6to4 relay", false},
	{netip.MustParsePrefix("192.168.0.0/16"), "private", true},
	{netip.MustParsePrefix("192.175.48.0/24"), "AS112", false},
	{netip.MustParsePrefix("198.18.0.0/15"), "benchmarking", true},
	{netip.MustParsePrefix("198.51.100.0/24"), "documentation", true},
	{netip.MustParsePrefix("203.0.113.0/24"), "documentation", true},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast", false},
	{netip.MustParsePrefix("240.0.0.0/4"), "reserved and broadcast", false},

	{netip.MustParsePrefix("::/96"), "unspecified, loopback or IPv4-compatible", false},
	{netip.MustParsePrefix("::ffff:0:0/96"), "IPv4-mapped", false},
	{netip.MustParsePrefix("64:ff9b::/96"), "translated IPv4", false},
	{netip.MustParsePrefix("64:ff9b:1::/48"), "translated IPv4", false},
	{netip.MustParsePrefix("100::/64"), "discard", false},
	{netip.MustParsePrefix("100:0:0:1::/64"), "dummy", false},
	{netip.MustParsePrefix("2001::/23"), "protocol assignments, Teredo among them", false},
	{netip.MustParsePrefix("2001:db8::/32"), "documentation", false},
	{netip.MustParsePrefix("2002::/16"), "6to4", false},
	{netip.MustParsePrefix("2620:4f:8000::/48"), "AS112", false},
	{netip.MustParsePrefix("3fff::/20"), "documentation", false},
	{netip.MustParsePrefix("5f00::/16"), "segment routing", false},
	{netip.MustParsePrefix("fc00::/7"), "private", true},
	{netip.MustParsePrefix("fe80::/10"), "link-local", false},
	{netip.MustParsePrefix("fec0::/10"), "site-local", false},
	{netip.MustParsePrefix("ff00::/8"), "multicast", false},
}

// global6 is all that is assigned as global unicast; outside of it and the table
// nothing is reachable.
var global6 = netip.MustParsePrefix("2000::/3")

// classify says what is special about an address, or returns "" for a public
// one. The zero address, a zone and anything unknown are special.
func classify(a netip.Addr) (what string, grantable bool) {
	if !a.IsValid() || a.Zone() != "" {
		return "no address that can be checked", false
	}
	a = a.Unmap()
	for _, s := range specials {
		if s.prefix.Contains(a) {
			return s.what, s.grantable
		}
	}
	if a.Is6() && !global6.Contains(a) {
		return "not assigned", false
	}
	return "", false
}
