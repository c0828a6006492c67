package egress

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Bounds of a CONNECT head in bytes.
const (
	maxHead    = 8 << 10
	maxHeaders = 64
)

var errHead = errors.New("malformed request")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errHead, fmt.Sprintf(format, args...))
}

// parseHead reads a whole CONNECT head, up to and including the empty line, and
// returns its target. There is one spelling: CRLF line ends, one blank between
// the words, no folded lines, no body, at most one Host and that equal to the
// target. What two parsers could read in two ways is refused.
func parseHead(head []byte) (target string, err error) {
	if !bytes.HasSuffix(head, []byte("\r\n\r\n")) {
		return "", malformed("the head does not end")
	}
	lines := strings.Split(string(head[:len(head)-4]), "\r\n")
	if len(lines) > maxHeaders {
		return "", malformed("more than %d lines", maxHeaders)
	}
	for _, l := range lines {
		for i := range len(l) {
			if c := l[i]; (c < 0x20 && c != '\t') || c == 0x7f {
				return "", malformed("a control character")
			}
		}
	}
	words := strings.Split(lines[0], " ")
	if len(words) != 3 || words[2] != "HTTP/1.1" && words[2] != "HTTP/1.0" {
		return "", malformed("the first line is not CONNECT host:port HTTP/1.1")
	}
	if words[0] != "CONNECT" {
		return "", malformed("method %.16q: only CONNECT is carried; use https", words[0])
	}
	hosts := 0
	for _, l := range lines[1:] {
		name, value, ok := strings.Cut(l, ":")
		if !ok || name == "" || strings.Trim(name, tokenChars) != "" {
			return "", malformed("a header that is none")
		}
		value = strings.Trim(value, " \t")
		switch strings.ToLower(name) {
		case "host":
			if hosts++; hosts > 1 || value != words[1] {
				return "", malformed("the Host header is not the target")
			}
		case "content-length", "transfer-encoding", "expect", "upgrade", "trailer":
			return "", malformed("CONNECT has no body and no %s", strings.ToLower(name))
		}
	}
	return words[1], nil
}

const tokenChars = "!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

// parseTarget takes host:port apart. The host is a lowercase DNS name or an IP
// literal in its one canonical spelling; everything that some resolver might
// take for another address (decimal, octal, hex and short forms, a trailing dot,
// brackets around a name, a zone, full-width digits) is refused.
func parseTarget(target string) (host string, port int, err error) {
	i := strings.LastIndexByte(target, ':')
	if i < 0 {
		return "", 0, malformed("the target has no port")
	}
	host, digits := target[:i], target[i+1:]
	port, err = strconv.Atoi(digits)
	if err != nil || port < 1 || port > 65535 || strconv.Itoa(port) != digits {
		return "", 0, malformed("port %.8q", digits)
	}
	if strings.HasPrefix(host, "[") {
		if !strings.HasSuffix(host, "]") {
			return "", 0, malformed("an open bracket")
		}
		host = host[1 : len(host)-1]
		a, err := netip.ParseAddr(host)
		if err != nil || !a.Is6() || a.Zone() != "" || a.String() != host {
			return "", 0, malformed("%.64q is no canonical IPv6 address", host)
		}
		return host, port, nil
	}
	if a, err := netip.ParseAddr(host); err == nil {
		if !a.Is4() || a.String() != host {
			return "", 0, malformed("%.64q is no canonical address", host)
		}
		return host, port, nil
	}
	if err := checkName(host); err != nil {
		return "", 0, err
	}
	return host, port, nil
}

// checkName accepts a lowercase DNS name whose last label is no number.
func checkName(name string) error {
	if len(name) == 0 || len(name) > 253 {
		return malformed("a host of %d bytes", len(name))
	}
	labels := strings.Split(name, ".")
	for _, l := range labels {
		if len(l) == 0 || len(l) > 63 || l[0] == '-' || l[len(l)-1] == '-' {
			return malformed("%.64q is no host name", name)
		}
		for i := range len(l) {
			if c := l[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
				return malformed("%.64q is no lowercase host name", name)
			}
		}
	}
	// A last label of digits, or in hex, makes the name a number to some.
	last := labels[len(labels)-1]
	if strings.Trim(last, "0123456789") == "" || strings.HasPrefix(last, "0x") {
		return malformed("%.64q is a number in disguise", name)
	}
	return nil
}
