package command

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strconv"
	"sync"

	"github.com/gowebpki/jcs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	verifierv1 "github.com/numinance/numinance/gen/numinance/ports/verifier/v1"
	"github.com/numinance/numinance/sdk"
)

// Settings is the provider's configuration in the handshake. It says where the
// candidate lies and in which environment commands run, never what is checked.
type Settings struct {
	WorkRoot    string            `json:"work_root,omitempty"`   // absolute; empty is /workspace
	Environment map[string]string `json:"environment,omitempty"` // of each command, over the defaults
}

// Evidence is the type of the receipt that each successful run leaves.
const Evidence = "VerifierReport"

// Plugin is the verifier as the host starts it.
func Plugin() sdk.Plugin {
	return sdk.Plugin{
		Manifest: &pluginv1.Manifest{
			ExtensionId: "dev.numinance.embedded/verifier-command",
			Version:     "1.0.0",
			Port:        "verifier",
			SpecVersion: "1.0.0",
			Verbs:       []string{"Run"},
			Description: "Runs the checks of a profile on a candidate and reads exit codes, go test -json, JUnit and SARIF.",
		},
		Open: func(ctx context.Context, s *sdk.Session) (sdk.Register, error) {
			v := &verifier{host: s.Host, answers: map[string]*answer{}}
			if len(bytes.TrimSpace(s.Config)) > 0 {
				dec := json.NewDecoder(bytes.NewReader(s.Config))
				dec.DisallowUnknownFields()
				if err := dec.Decode(&v.settings); err != nil {
					return nil, fmt.Errorf("settings: %w", err)
				}
			}
			if v.settings.WorkRoot == "" {
				v.settings.WorkRoot = "/workspace"
			}
			if !path.IsAbs(v.settings.WorkRoot) {
				return nil, fmt.Errorf("settings: work_root %q is not absolute", v.settings.WorkRoot)
			}
			return func(r grpc.ServiceRegistrar) { verifierv1.RegisterVerifierServiceServer(r, v) }, nil
		},
	}
}

type verifier struct {
	verifierv1.UnimplementedVerifierServiceServer
	settings Settings
	host     *sdk.Host

	mu      sync.Mutex // guards answers
	answers map[string]*answer
	running sync.Mutex // one run at a time: there is one work tree
}

// answer is what a run with one key was answered.
type answer struct {
	request  *verifierv1.RunRequest
	response *verifierv1.RunResponse
}

// Run runs every check in order. INVALID_ARGUMENT: the configuration or the
// baseline cannot be used. FAILED_PRECONDITION: a program is missing or a report
// cannot be read. ABORTED: a check crashed. DEADLINE_EXCEEDED: one took too long.
func (v *verifier) Run(ctx context.Context, r *verifierv1.RunRequest) (*verifierv1.RunResponse, error) {
	v.running.Lock()
	defer v.running.Unlock()
	key := sdk.Action(ctx).GetIdempotencyKey()
	v.mu.Lock()
	known := v.answers[key]
	v.mu.Unlock()
	if known != nil {
		if !proto.Equal(known.request, r) {
			return nil, status.Errorf(codes.InvalidArgument, "idempotency key %s was used for another request", key)
		}
		return proto.CloneOf(known.response), attach(ctx, known.response.GetReport())
	}
	response, err := v.run(ctx, r)
	if err != nil {
		return nil, err
	}
	if err := attach(ctx, response.GetReport()); err != nil {
		return nil, err
	}
	v.mu.Lock()
	v.answers[key] = &answer{proto.CloneOf(r), proto.CloneOf(response)}
	v.mu.Unlock()
	return response, nil
}

func (v *verifier) run(ctx context.Context, r *verifierv1.RunRequest) (*verifierv1.RunResponse, error) {
	config, err := v.host.ReadBlob(ctx, r.GetConfigRef(), maxConfig)
	if err != nil {
		return nil, status.Errorf(status.Code(err), "read the configuration: %s", status.Convert(err).Message())
	}
	checks, err := parseConfig(config)
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	baseline, err := v.baseline(ctx, r)
	if err != nil {
		return nil, err
	}
	// What defines the checks is read before any candidate code runs.
	inputs := make([]string, len(checks))
	for i, c := range checks {
		if inputs[i], err = v.inputsDigest(c); err != nil {
			return nil, status.Errorf(codes.FailedPrecondition, "check %q: %v", c.Name, err)
		}
	}
	report := &verifierv1.VerifierReport{
		Layer: r.GetLayer(), CandidateTree: r.GetCandidateTree(), ConfigDigest: r.GetConfigRef().GetDigest(),
	}
	var all []*verifierv1.Finding
	for i, c := range checks {
		one, found, err := v.check(ctx, c, baseline[c.Name], inputs[i])
		if err != nil {
			return nil, err
		}
		report.Checks = append(report.Checks, one)
		all = append(all, found...)
	}
	for i, c := range checks {
		after, err := v.inputsDigest(c)
		if err != nil || after != inputs[i] {
			return nil, status.Errorf(codes.Aborted, "check %q: the files that define it changed while checks ran", c.Name)
		}
	}
	return v.answer(ctx, report, all)
}

// baseline returns the base revision's reports by check.
func (v *verifier) baseline(ctx context.Context, r *verifierv1.RunRequest) (map[string]*verifierv1.CheckReport, error) {
	if r.GetBaselineRef() == nil {
		return nil, nil
	}
	b, err := v.host.ReadBlob(ctx, r.GetBaselineRef(), maxConfig)
	if err != nil {
		return nil, status.Errorf(status.Code(err), "read the baseline: %s", status.Convert(err).Message())
	}
	var report verifierv1.VerifierReport
	if err := protojson.Unmarshal(b, &report); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "read the baseline: %v", err)
	}
	if report.GetConfigDigest() != r.GetConfigRef().GetDigest() || report.GetLayer() != r.GetLayer() {
		return nil, status.Error(codes.InvalidArgument, "the baseline was taken with another configuration or layer")
	}
	out := map[string]*verifierv1.CheckReport{}
	for _, c := range report.GetChecks() {
		out[c.GetName()] = c
	}
	return out, nil
}

// firstFindings bounds the findings that travel in the answer.
const firstFindings = 100

func (v *verifier) answer(ctx context.Context, report *verifierv1.VerifierReport, all []*verifierv1.Finding) (*verifierv1.RunResponse, error) {
	slices.SortStableFunc(all, func(a, b *verifierv1.Finding) int { return int(b.GetSeverity()) - int(a.GetSeverity()) })
	var lines bytes.Buffer
	for _, f := range all {
		switch f.GetSeverity() {
		case severityError:
			report.Errors++
		case severityWarning:
			report.Warnings++
		}
		b, err := canonical(f)
		if err != nil {
			return nil, status.Errorf(codes.Internal, "encode a finding: %v", err)
		}
		lines.Write(append(b, '\n'))
	}
	response := &verifierv1.RunResponse{Report: report, Findings: all[:min(len(all), firstFindings)]}
	if len(all) > 0 {
		sum := sha256.Sum256(lines.Bytes())
		report.FindingsDigest = "sha256:" + hex.EncodeToString(sum[:])
	}
	if len(all) > firstFindings {
		ref, err := v.host.PutBytes(ctx, lines.Bytes(), "application/x-ndjson")
		if err != nil {
			return nil, status.Errorf(status.Code(err), "keep the findings: %s", status.Convert(err).Message())
		}
		response.AllFindings = ref
	}
	return response, nil
}

// attach leaves the receipt: the report without any finding (P-175).
func attach(ctx context.Context, report *verifierv1.VerifierReport) error {
	payload, err := canonical(report)
	if err != nil {
		return status.Errorf(codes.Internal, "encode the report: %v", err)
	}
	sum := sha256.Sum256(payload)
	sdk.Attach(ctx, &pluginv1.Evidence{
		Type:      Evidence,
		Reference: report.GetLayer() + " " + report.GetCandidateTree() + " errors " + strconv.Itoa(int(report.GetErrors())),
		Digest:    "sha256:" + hex.EncodeToString(sum[:]),
		Payload:   payload,
	})
	return nil
}

// canonical is the RFC 8785 form of a message's JSON.
func canonical(m proto.Message) ([]byte, error) {
	b, err := protojson.Marshal(m)
	if err != nil {
		return nil, err
	}
	return jcs.Transform(b)
}
