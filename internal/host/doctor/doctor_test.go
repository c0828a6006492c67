package doctor_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/numinance/numinance/internal/host/doctor"
)

func TestMissingProgramsAreSaidPlainly(t *testing.T) {
	r := doctor.Run(t.Context(), doctor.Config{
		Runtime: "/nowhere/numi-sandbox", Init: "/nowhere/numi-init",
		Image: func(context.Context) (string, error) { return "", errors.New("no image yet") },
	})
	if r.Ready() {
		t.Error("ready without a sandbox program")
	}
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"state":"missing"`, "/nowhere/numi-sandbox", "numi image build --from-host"} {
		if !strings.Contains(string(raw), want) {
			t.Errorf("report lacks %q: %s", want, raw)
		}
	}
	for _, c := range r.Checks {
		if c.State == doctor.Missing && c.Fix == "" {
			t.Errorf("%s: missing without a way out", c.Name)
		}
	}
}

func TestZeroReportIsNotReady(t *testing.T) {
	if (doctor.Report{}).Ready() {
		t.Error("nothing was checked, yet it is ready")
	}
	if (doctor.Report{Checks: []doctor.Check{{Name: "x"}}}).Ready() {
		t.Error("an unknown state is ready")
	}
}
