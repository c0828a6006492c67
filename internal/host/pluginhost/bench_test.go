package pluginhost_test

import (
	"context"
	"net"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	ticketingv1 "github.com/numinance/numinance/gen/numinance/ports/ticketing/v1"
	"github.com/numinance/numinance/internal/host/pluginhost"
)

// BenchmarkReadInvoke measures a read through a jailed process's Invoke against a
// bare unary call on the same kind of socket to the same process, alternating, and
// reports the ratio of their medians.
func BenchmarkReadInvoke(b *testing.B) {
	p, err := pluginhost.Start(b.Context(), pluginhost.Config{Launcher: process(b, "normal"), Expect: expect(b, manifest())})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	link, err := process(b, "normal").Launch(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	defer link.Close()
	conn, err := grpc.NewClient("passthrough:///bare", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return link.Dial(ctx) }))
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	bare := pluginv1.NewPluginServiceClient(conn)
	hello := &pluginv1.HandshakeRequest{SpecVersion: "1.2.0"}
	req := request(b, getIssue, &ticketingv1.GetIssueRequest{Key: "ABC-1"}, "1.2.0")
	var invoke, unary []time.Duration
	one := func() {
		begin := time.Now()
		if err := p.Invoke(b.Context(), req, func(*pluginv1.InvokeResponse) error { return nil }); err != nil {
			b.Fatal(err)
		}
		invoke = append(invoke, time.Since(begin))
		begin = time.Now()
		if _, err := bare.Handshake(b.Context(), hello); err != nil {
			b.Fatal(err)
		}
		unary = append(unary, time.Since(begin))
	}
	for range 50 {
		one()
	}
	invoke, unary = invoke[:0], unary[:0]
	for b.Loop() {
		// The deadline of the request is 20 s after the start of the benchmark.
		req.Context.Deadline.Seconds = time.Now().Unix() + 20
		one()
	}
	slices.Sort(invoke)
	slices.Sort(unary)
	b.ReportMetric(float64(invoke[len(invoke)/2].Microseconds()), "invoke-us")
	b.ReportMetric(float64(unary[len(unary)/2].Microseconds()), "unary-us")
	b.ReportMetric(float64(invoke[len(invoke)/2])/float64(unary[len(unary)/2]), "ratio")
}

// BenchmarkStart measures from nothing to an answered handshake in a jail.
func BenchmarkStart(b *testing.B) {
	for b.Loop() {
		p, err := pluginhost.Start(b.Context(), pluginhost.Config{Launcher: process(b, "normal"), Expect: expect(b, manifest())})
		if err != nil {
			b.Fatal(err)
		}
		if err := p.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
