package main

import (
	"strings"
	"testing"
)

func TestTable(t *testing.T) {
	r := results{}
	for _, value := range []string{"3", "1", "2"} {
		for _, f := range figures {
			for _, m := range []string{f.metric, f.against} {
				if name, unit, ok := strings.Cut(m, " "); ok {
					r.read("goos: linux\nBenchmark" + name + "-2  \t 100\t  5.5 ns/op\t " + value + " " + unit + "\nPASS\n")
				}
			}
		}
	}
	if v, err := r.median("Read ratio"); err != nil || v != 2 {
		t.Errorf("median %v, %v", v, err)
	}
	if _, err := r.median("Read nothing"); err == nil {
		t.Error("a metric that nobody reported has a median")
	}
	var out strings.Builder
	if err := r.print(&out, &starts{numi: 60, bare: 1}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"as a multiple of the bare call", "<= 2.00", "held", ">= 5000", "missed", "numi --version"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	delete(r, "Read ratio")
	if err := r.print(&out, nil); err == nil {
		t.Error("a missing figure is no error")
	}
}
