package egress_test

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/numinance/numinance/internal/core/grant"
	"github.com/numinance/numinance/internal/host/egress"
)

type recorder struct {
	mu  sync.Mutex
	all []egress.Attempt
	err error
}

func (r *recorder) Record(_ context.Context, a egress.Attempt) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, a)
	return r.err
}

func (r *recorder) last() (a egress.Attempt, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.all) == 0 {
		return a, 0
	}
	return r.all[len(r.all)-1], len(r.all)
}

// zone answers names with fixed addresses, as a DNS server would.
type zone map[string][]string

func (z zone) LookupNetIP(_ context.Context, _, host string) (out []netip.Addr, err error) {
	all, ok := z[host]
	if !ok {
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	for _, s := range all {
		out = append(out, netip.MustParseAddr(s))
	}
	return out, nil
}

// serve serves a proxy on a unix socket and returns its path.
func serve(t *testing.T, c egress.Config) string {
	t.Helper()
	p, err := egress.New(c)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "e")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- p.Serve(l) }()
	t.Cleanup(func() {
		p.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return path
}

// send writes raw bytes and returns the answer's status and body.
func send(t *testing.T, path, raw string) (int, string) {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, raw); err != nil {
		t.Fatal(err)
	}
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0, err.Error()
	}
	defer r.Body.Close()
	b, _ := io.ReadAll(r.Body)
	return r.StatusCode, string(b)
}

// H-063, K-028, K-030, K-031: every spelling of an address that is not simply a
// public host is refused with a record, although the grant names it.
func TestProbesAreRefused(t *testing.T) {
	names := zone{
		"v4.example": {"10.1.2.3"}, "v6.example": {"fd12::1"}, "loop.example": {"127.0.0.1"}, "meta.example": {"169.254.169.254"},
		"mixed.example": {"1.1.1.1", "192.168.0.1"}, "empty.example": {}, "mapped.example": {"::ffff:10.0.0.1"}, "compat.example": {"::10.0.0.1"},
	}
	hosts := []string{
		"127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:a9fe:a9fe]",
		"[::127.0.0.1]", "[::7f00:1]", "[64:ff9b::a9fe:a9fe]", "[64:ff9b:1::1]", "[2002:7f00:1::]", "[2001:0:1::1]", "[2001::1]", "[fe80::1%lo]", "[fe80::1]", "[fd00:ec2::254]", "[fd12::1]",
		"169.254.169.254", "100.64.0.1", "100.100.100.200", "168.63.129.16", "192.0.0.192", "192.0.0.1", "198.18.0.1", "240.0.0.1", "255.255.255.255", "224.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1",
		"[ff02::1]", "[100::1]", "[2001:db8::1]", "[4000::1]", "[3fff::1]",
		"１２７.0.0.1", "①②⑦.0.0.1", "127。0。0。1",
		"ok.example.", "OK.example", "[ok.example]", "ok.example\x00.evil", "ok\t.example", "user@ok.example", "evil#@ok.example", "evil\\@ok.example", "ok.example@evil.example",
		"оk.example", "xn--k-0tb.example", "ok.example.evil.example", "evilok.example", "00127.0.0.1", "1.1.1", "1.1.1.1.", "0x7f.1", "a.0x1", "-a.example", "a..example", "",
		"v4.example", "v6.example", "loop.example", "meta.example", "mixed.example", "empty.example", "mapped.example", "compat.example", "unknown.example",
	}
	r := &recorder{}
	c := egress.Config{Run: "run-1", Change: "chg-1", Recorder: r, Resolver: names}
	for _, h := range hosts {
		c.Allow = append(c.Allow, grant.Destination{Host: h, Port: 443}, grant.Destination{Host: strings.Trim(h, "[]"), Port: 443})
	}
	// These are what a grant may name; the probes around them are not.
	for i, d := range c.Allow {
		if d.Host == "ok.example" || d.Host == "evilok.example" || d.Host == "ok.example.evil.example" || strings.HasPrefix(d.Host, "xn--") {
			c.Allow[i] = grant.Destination{Host: "ok.example", Port: 443}
		}
	}
	path := serve(t, c)
	for _, h := range hosts {
		_, before := r.last()
		code, body := send(t, path, "CONNECT "+h+":443 HTTP/1.1\r\n\r\n")
		a, n := r.last()
		if code != 400 && code != 403 || n != before+1 || a.Allowed || a.Reason == "" || a.Run != "run-1" {
			t.Errorf("%q: got %d %q, record %+v (%d new), want a refusal with one record", h, code, body, a, n-before)
		}
	}
	if a, _ := r.last(); a.Host != "unknown.example" {
		t.Errorf("the record names %q", a.Host)
	}
	send(t, path, "CONNECT meta.example:443 HTTP/1.1\r\n\r\n")
	if a, _ := r.last(); a.Address.String() != "169.254.169.254" {
		t.Errorf("the record has address %v, want the resolved one", a.Address)
	}
}

// Ports that the grant does not name, and every malformed head, are refused.
func TestHeadsAreRefused(t *testing.T) {
	r := &recorder{}
	path := serve(t, egress.Config{Recorder: r, Resolver: zone{"ok.example": {"1.1.1.1"}}, Allow: []grant.Destination{{Host: "ok.example", Port: 443}}})
	for name, raw := range map[string]string{
		"port 22": "CONNECT ok.example:22 HTTP/1.1\r\n\r\n", "port 0": "CONNECT ok.example:0 HTTP/1.1\r\n\r\n", "port +443": "CONNECT ok.example:+443 HTTP/1.1\r\n\r\n",
		"port 0443": "CONNECT ok.example:0443 HTTP/1.1\r\n\r\n", "no port": "CONNECT ok.example HTTP/1.1\r\n\r\n", "big port": "CONNECT ok.example:65979 HTTP/1.1\r\n\r\n",
		"plain http":       "GET http://ok.example/ HTTP/1.1\r\nHost: ok.example\r\n\r\n",
		"bare LF":          "CONNECT ok.example:443 HTTP/1.1\nHost: ok.example:443\r\n\r\n",
		"bare CR":          "CONNECT ok.example:443 HTTP/1.1\r\nX: a\rb\r\n\r\n",
		"obs-fold":         "CONNECT ok.example:443 HTTP/1.1\r\nX: a\r\n b\r\n\r\n",
		"other host":       "CONNECT ok.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
		"two hosts":        "CONNECT ok.example:443 HTTP/1.1\r\nHost: ok.example:443\r\nhost: ok.example:443\r\n\r\n",
		"content-length":   "CONNECT ok.example:443 HTTP/1.1\r\nContent-Length: 3\r\n\r\n",
		"chunked":          "CONNECT ok.example:443 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
		"space in header":  "CONNECT ok.example:443 HTTP/1.1\r\nHost : ok.example:443\r\n\r\n",
		"two blanks":       "CONNECT  ok.example:443 HTTP/1.1\r\n\r\n",
		"http/2":           "PRI * HTTP/2.0\r\n\r\n",
		"early data":       "CONNECT ok.example:443 HTTP/1.1\r\n\r\n\x16\x03\x01",
		"a long head":      "CONNECT ok.example:443 HTTP/1.1\r\nX: " + strings.Repeat("a", 9000) + "\r\n\r\n",
		"NUL":              "CONNECT ok.example:443 HTTP/1.1\r\nX: a\x00b\r\n\r\n",
		"bytes for no one": "\x16\x03\x01\x00\x05hello\r\n\r\n",
	} {
		_, before := r.last()
		code, body := send(t, path, raw)
		a, n := r.last()
		if code != 400 && code != 403 || n != before+1 || a.Allowed {
			t.Errorf("%s: got %d %q, %d new records", name, code, body, n-before)
		}
	}
}

// An attempt that cannot be recorded is refused, and without a recorder there is
// no proxy.
func TestUnrecordedIsRefused(t *testing.T) {
	r := &recorder{err: errors.New("disk full")}
	path := serve(t, egress.Config{Recorder: r, Resolver: zone{"ok.example": {"1.1.1.1"}}, Allow: []grant.Destination{{Host: "ok.example", Port: 443}}})
	if code, body := send(t, path, "CONNECT ok.example:443 HTTP/1.1\r\n\r\n"); code != 503 {
		t.Errorf("got %d %q, want 503", code, body)
	}
	if _, err := egress.New(egress.Config{}); err == nil {
		t.Error("a proxy without a recorder")
	}
}

// TestTunnel runs in a network namespace of its own, where a private address is
// at hand, so that an allowed destination is really reached.
func TestTunnel(t *testing.T) {
	if os.Getenv("NUMI_TEST_NETNS") == "" {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestTunnel$", "-test.v")
		cmd.Env = append(os.Environ(), "NUMI_TEST_NETNS=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		}
		out, err := cmd.CombinedOutput()
		if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSYS) {
			t.Skipf("this kernel gives no namespaces to this user: %v", err)
		}
		t.Logf("%s", out)
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	if err := addressOfLoopback("10.77.0.1"); err != nil {
		t.Fatal(err)
	}
	addr := netip.MustParseAddr("10.77.0.1")
	cert := certificate(t)
	srv, err := tls.Listen("tcp", "10.77.0.1:443", &tls.Config{Certificates: []tls.Certificate{cert}})
	if err != nil {
		t.Fatal(err)
	}
	defer srv.Close()
	go func() {
		for {
			c, err := srv.Accept()
			if err != nil {
				return
			}
			go func() { defer c.Close(); _, _ = io.Copy(c, c) }()
		}
	}()

	names := zone{"git.corp": {"10.77.0.1"}, "db.corp": {"10.77.0.1"}}
	dest := grant.Destination{Host: "git.corp", Port: 443}
	r := &recorder{}
	c := egress.Config{Recorder: r, Resolver: names, Allow: []grant.Destination{dest, {Host: "db.corp", Port: 443}},
		Private: []egress.Private{{Destination: dest, Range: netip.PrefixFrom(addr, 24)}}, Expires: time.Now().Add(3 * time.Second)}
	path := serve(t, c)

	c1, err := connect(path, "git.corp:443")
	if err != nil {
		t.Fatal(err)
	}
	tc := tls.Client(c1, &tls.Config{ServerName: "git.corp", InsecureSkipVerify: true})
	if _, err := io.WriteString(tc, "echo"); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4)
	if _, err := io.ReadFull(tc, b); err != nil || string(b) != "echo" {
		t.Fatalf("got %q, %v", b, err)
	}
	if a, _ := r.last(); !a.Allowed || a.Address != addr {
		t.Fatalf("record %+v, want the allowed address", a)
	}
	// Another name at the same address has no private grant.
	if _, err := connect(path, "db.corp:443"); err == nil || !strings.Contains(err.Error(), "403") {
		t.Fatalf("db.corp: got %v, want 403", err)
	}
	// An allowed tunnel that asks for another server, for none, or speaks no TLS.
	for name, speak := range map[string]func(net.Conn) error{
		"another server": func(c net.Conn) error {
			return tls.Client(c, &tls.Config{ServerName: "db.corp", InsecureSkipVerify: true}).Handshake()
		},
		"no server": func(c net.Conn) error { return tls.Client(c, &tls.Config{InsecureSkipVerify: true}).Handshake() },
		"no TLS": func(c net.Conn) error {
			if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: git.corp\r\n\r\n"); err != nil {
				return err
			}
			_, err := c.Read(make([]byte, 1))
			return err
		},
	} {
		c, err := connect(path, "git.corp:443")
		if err != nil {
			t.Fatal(err)
		}
		if err := speak(c); err == nil {
			t.Errorf("%s: got through", name)
		}
		if a, _ := r.last(); a.Allowed {
			t.Errorf("%s: no record of the refusal: %+v", name, a)
		}
		c.Close()
	}
	// The grant's end ends a tunnel that is open.
	if err := c1.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := tc.Read(b); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the grant expired: %v, want a cut connection", err)
	}
	if _, err := connect(path, "git.corp:443"); err == nil {
		t.Error("a new tunnel after the grant expired")
	}
}

func connect(path, target string) (net.Conn, error) {
	c, err := net.Dial("unix", path)
	if err != nil {
		return nil, err
	}
	if _, err := fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target); err != nil {
		return nil, err
	}
	const ok = "HTTP/1.1 200 Connection established\r\n\r\n"
	b := make([]byte, len(ok))
	if _, err := io.ReadFull(c, b); err != nil || string(b) != ok {
		c.Close()
		return nil, fmt.Errorf("answer %q: %w", b, err)
	}
	return c, nil
}

// addressOfLoopback gives lo an address and brings it up.
func addressOfLoopback(addr string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	a, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if err := a.SetInet4Addr(netip.MustParseAddr(addr).AsSlice()); err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFADDR, a); err != nil {
		return err
	}
	f, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	f.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, f)
}

func certificate(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"git.corp"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
