package command

import (
	"bytes"
	"testing"
)

// The parsers read what candidate code wrote: they have to end with a result or
// an error, within their bounds, whatever comes.

func FuzzJUnit(f *testing.F) {
	f.Add([]byte(`<testsuites><testsuite errors="1"><testcase name="a"><failure message="m">x</failure></testcase></testsuite></testsuites>`))
	f.Add([]byte(`<testsuite><testcase><skipped/></testcase></testsuite>`))
	f.Add([]byte(`<!DOCTYPE x [<!ENTITY a "b">]><testsuite>&a;</testsuite>`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := readJUnit(b)
		if err == nil && r.failed > r.run {
			t.Errorf("%d failed of %d", r.failed, r.run)
		}
		if err == nil && r.failed > 0 && r.errors() == 0 {
			t.Error("failures without a finding")
		}
	})
}

func FuzzGoTest(f *testing.F) {
	f.Add([]byte("{\"Action\":\"run\",\"Package\":\"p\",\"Test\":\"A\"}\n{\"Action\":\"fail\",\"Package\":\"p\",\"Test\":\"A\"}\n"))
	f.Add([]byte("noise\n{\"Action\":\"run\",\"Package\":\"p\",\"Test\":\"A\"}\n"))
	f.Add([]byte("{\"Action\":\"build-output\",\"ImportPath\":\"p\",\"Output\":\"x\"}\n{\"Action\":\"fail\",\"Package\":\"p\",\"FailedBuild\":\"p\"}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := readGoTest(bytes.NewReader(b))
		if err == nil && r.results.failed > 0 && r.errors() == 0 {
			t.Error("failures without a finding")
		}
	})
}

func FuzzSARIF(f *testing.F) {
	f.Add([]byte(`{"version":"2.1.0","runs":[{"results":[{"ruleId":"r","level":"error","message":{"text":"m"},"locations":[{"physicalLocation":{"artifactLocation":{"uri":"a"},"region":{"startLine":3}}}]}]}]}`))
	f.Add([]byte(`{"version":"2.1.0","runs":[{"invocations":[{"executionSuccessful":false}]}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := readSARIF(b)
		if (r == nil) == (err == nil) {
			t.Errorf("result %v and error %v", r, err)
		}
	})
}

func FuzzConfig(f *testing.F) {
	f.Add([]byte(`{"checks":[{"name":"t","command":"CGO_ENABLED=0 go test ./..."}]}`))
	f.Add([]byte(`{"checks":[{"name":"t","argv":["make","x"],"timeout":"3m"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		checks, err := parseConfig(b)
		for _, c := range checks {
			if err == nil && (len(c.argv) == 0 || c.timeout <= 0) {
				t.Errorf("accepted %+v", c)
			}
		}
	})
}
