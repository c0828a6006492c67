package ports_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	annotationsv1 "github.com/numinance/numinance/gen/numinance/annotations/v1"
	scmv1 "github.com/numinance/numinance/gen/numinance/ports/scm/v1"
	ticketingv1 "github.com/numinance/numinance/gen/numinance/ports/ticketing/v1"
	"github.com/numinance/numinance/internal/core/ports"
)

// spec holds the contract's nine tables as they are published: RPC, request,
// response, risk, execution mode, idempotent, dry run, compensating action, and
// evidence, capability or scopes.
var spec = []struct{ port, service, table string }{
	{"scm", "ScmService", `
GetRepository | GetRepositoryRequest | GetRepositoryResponse | READ | SYNC | true | false | - | -
GetTree | GetTreeRequest | GetTreeResponse | READ | SYNC | true | false | - | -
GetFile | GetFileRequest | GetFileResponse | READ | SYNC | true | false | - | -
ListBranches | ListBranchesRequest | ListBranchesResponse | READ | SYNC | true | false | - | -
CreateBranch | CreateBranchRequest | CreateBranchResponse | LOW | SYNC | true | false | - | -
GetBranchProtection | GetBranchProtectionRequest | GetBranchProtectionResponse | READ | SYNC | true | false | - | -
OpenPullRequest | OpenPullRequestRequest | OpenPullRequestResponse | MEDIUM | SYNC | true | true | ScmService.UpdatePullRequest | evidence pr-ref
UpdatePullRequest | UpdatePullRequestRequest | UpdatePullRequestResponse | LOW | SYNC | true | false | - | -
CommentOnPullRequest | CommentOnPullRequestRequest | CommentOnPullRequestResponse | LOW | SYNC | true | false | - | -
GetPullRequestStatus | GetPullRequestStatusRequest | GetPullRequestStatusResponse | READ | SYNC | true | false | - | -
MergePullRequest | MergePullRequestRequest | MergePullRequestResponse | PRIVILEGED | SYNC | true | true | ScmService.CommentOnPullRequest | -
SearchCode | SearchCodeRequest | SearchCodeResponse | READ | SYNC | true | false | - | -
`},
	{"ticketing", "TicketingService", `
GetIssue | GetIssueRequest | GetIssueResponse | READ | SYNC | true | false | - | -
SearchIssues | SearchIssuesRequest | SearchIssuesResponse | READ | SYNC | true | false | - | -
CommentOnIssue | CommentOnIssueRequest | CommentOnIssueResponse | LOW | SYNC | true | false | - | evidence ticketing-action
TransitionIssue | TransitionIssueRequest | TransitionIssueResponse | MEDIUM | SYNC | true | true | TicketingService.TransitionIssue | evidence ticketing-action
LinkIssue | LinkIssueRequest | LinkIssueResponse | LOW | SYNC | true | false | - | evidence ticketing-action
`},
	{"ciexecutor", "CiExecutorService", `
StartOperation | StartOperationRequest | StartOperationResponse | HIGH | OPERATION | true | true | CiExecutorService.CancelOperation | evidence ci-run-ref
GetOperation | GetOperationRequest | GetOperationResponse | READ | SYNC | true | false | - | -
CancelOperation | CancelOperationRequest | CancelOperationResponse | MEDIUM | SYNC | true | false | - | -
ListArtifacts | ListArtifactsRequest | ListArtifactsResponse | READ | SYNC | true | false | - | -
GetLogReference | GetLogReferenceRequest | GetLogReferenceResponse | READ | SYNC | true | false | - | -
`},
	{"authorexecutor", "AuthorExecutorService", `
Capabilities | CapabilitiesRequest | CapabilitiesResponse | READ | SYNC | true | false | - | -
Execute | ExecuteRequest | stream ExecuteResponse | MEDIUM | OPERATION | false | false | - | -
Plan | PlanRequest | stream PlanResponse | READ | OPERATION | false | false | - | -
`},
	{"sandboxprovider", "SandboxProviderService", `
Create | CreateRequest | CreateResponse | LOW | SYNC | true | true | SandboxProviderService.Destroy | -
Exec | ExecRequest | ExecResponse | MEDIUM | OPERATION | true | false | - | -
Wait | WaitRequest | WaitResponse | READ | SYNC | true | false | - | -
Snapshot | SnapshotRequest | SnapshotResponse | LOW | SYNC | false | false | - | -
Destroy | DestroyRequest | DestroyResponse | LOW | SYNC | true | false | - | -
`},
	{"verifier", "VerifierService", `
Run | RunRequest | RunResponse | LOW | OPERATION | true | false | - | evidence VerifierReport
`},
	{"knowledge", "KnowledgeService", `
Search | SearchRequest | SearchResponse | READ | SYNC | true | false | - | -
Fetch | FetchRequest | FetchResponse | READ | SYNC | true | false | - | -
Resolve | ResolveRequest | ResolveResponse | READ | SYNC | true | false | - | -
`},
	{"evidencestore", "EvidenceStoreService", `
AppendLocked | AppendLockedRequest | AppendLockedResponse | HIGH | SYNC | true | false | - | scope evidence.write
GetRecord | GetRecordRequest | GetRecordResponse | READ | SYNC | true | false | - | scope evidence.read
ListRange | ListRangeRequest | ListRangeResponse | READ | SYNC | true | false | - | scope evidence.read
Head | HeadRequest | HeadResponse | READ | SYNC | true | false | - | scope evidence.read
`},
	{"transparencylog", "TransparencyLogService", `
Append | AppendRequest | AppendResponse | HIGH | SYNC | true | false | - | scope transparencylog.append
Checkpoint | CheckpointRequest | CheckpointResponse | READ | SYNC | true | false | - | scope evidence.read
Prove | ProveRequest | ProveResponse | READ | SYNC | true | false | - | scope evidence.read
Lookup | LookupRequest | LookupResponse | READ | SYNC | true | false | - | capability transparencylog.lookup; scope evidence.read
`},
}

// row prints a verb as the published tables do.
func row(v ports.Verb) string {
	dash := func(s string) string {
		if s == "" {
			return "-"
		}
		return s
	}
	response := string(v.Output.Name())
	if v.ServerStreaming {
		response = "stream " + response
	}
	var rest []string
	if len(v.Evidence) > 0 {
		rest = append(rest, "evidence "+strings.Join(v.Evidence, ", "))
	}
	if v.Capability != "" {
		rest = append(rest, "capability "+v.Capability)
	}
	if len(v.Scopes) > 0 {
		rest = append(rest, "scope "+strings.Join(v.Scopes, ", "))
	}
	return fmt.Sprintf("%s | %s | %s | %s | %s | %t | %t | %s | %s", v.Method, v.Input.Name(), response, v.Risk, v.Exec,
		v.Idempotent, v.DryRun, dash(v.Compensating), dash(strings.Join(rest, "; ")))
}

// TestTablesAreThoseOfTheSpec shows P-001, P-002, P-004, P-010 and P-012.
func TestTablesAreThoseOfTheSpec(t *testing.T) {
	var names []string
	for _, s := range spec {
		names = append(names, s.port)
		t.Run(s.port, func(t *testing.T) {
			var got []string
			for _, v := range ports.Of(s.port) {
				got = append(got, row(v))
				if want := "numinance.ports." + s.port + ".v1." + s.service; v.Service != want {
					t.Errorf("%s is a method of %s, want %s", v.Method, v.Service, want)
				}
			}
			want := strings.Split(strings.TrimSpace(s.table), "\n")
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("the contract is not the published table (-published +contract):\n%s", diff)
			}
		})
	}
	slices.Sort(names)
	if diff := cmp.Diff(names, ports.Names()); diff != "" {
		t.Errorf("ports (-published +contract):\n%s", diff)
	}
}

func contract(yield func(protoreflect.FileDescriptor) bool) {
	ports.Files().RangeFiles(func(f protoreflect.FileDescriptor) bool {
		if !strings.HasPrefix(string(f.Package()), "numinance.") {
			return true
		}
		return yield(f)
	})
}

func messages(in protoreflect.MessageDescriptors, yield func(protoreflect.MessageDescriptor)) {
	for i := range in.Len() {
		if m := in.Get(i); !m.IsMapEntry() {
			yield(m)
			messages(m.Messages(), yield)
		}
	}
}

// TestLawOfDescriptors shows P-005, P-006, P-007, P-008, P-009, P-011, P-018
// and P-019 on every RPC, field and enum of the contract.
func TestLawOfDescriptors(t *testing.T) {
	services := map[string]int{}
	known := map[string]bool{}
	for _, v := range ports.All() {
		known[v.Service[strings.LastIndex(v.Service, ".")+1:]+"."+v.Method] = true
	}
	for f := range contract {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			if strings.HasPrefix(string(f.Package()), "numinance.ports.") {
				services[string(f.Package())]++
				port := strings.Split(string(f.Package()), ".")[2]
				if want := "numinance/ports/" + port + "/v1/" + port + ".proto"; f.Path() != want {
					t.Errorf("service of port %s is in %s, want %s", port, f.Path(), want)
				}
			}
			for k := range s.Methods().Len() {
				checkMethod(t, s.Methods().Get(k), known)
			}
		}
		messages(f.Messages(), func(m protoreflect.MessageDescriptor) {
			if f.Package() == "numinance.annotations.v1" {
				return // the law itself
			}
			for i := range m.Fields().Len() {
				checkField(t, f, m.Fields().Get(i))
			}
		})
		for i := range f.Enums().Len() {
			if zero := f.Enums().Get(i).Values().Get(0); !strings.HasSuffix(string(zero.Name()), "_UNSPECIFIED") || zero.Number() != 0 {
				t.Errorf("%s: the first value is %s, want an UNSPECIFIED zero", f.Enums().Get(i).FullName(), zero.Name())
			}
		}
	}
	for pkg, n := range services {
		if n != 1 {
			t.Errorf("%s has %d services, want one", pkg, n)
		}
	}
	if len(services) != 9 {
		t.Errorf("%d packages with a service under numinance.ports, want nine", len(services))
	}
	for _, name := range []protoreflect.FullName{
		"numinance.annotations.v1.RiskClass", "numinance.annotations.v1.ExecMode",
		"numinance.annotations.v1.ActionOptions", "numinance.annotations.v1.FieldAnnotations",
	} {
		if _, err := ports.Files().FindDescriptorByName(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func checkMethod(t *testing.T, m protoreflect.MethodDescriptor, known map[string]bool) {
	t.Helper()
	if m.Name() == "VendorCall" {
		t.Errorf("%s: no port has a vendor escape hatch", m.FullName())
	}
	if !proto.HasExtension(m.Options(), annotationsv1.E_Action) {
		t.Errorf("%s carries no action annotation", m.FullName())
		return
	}
	a := proto.GetExtension(m.Options(), annotationsv1.E_Action).(*annotationsv1.ActionOptions)
	if a.GetRisk() == 0 || a.GetExecMode() == 0 || a.GetSince() == "" {
		t.Errorf("%s: risk %v, mode %v, since %q: each must be set", m.FullName(), a.GetRisk(), a.GetExecMode(), a.GetSince())
	}
	if !strings.HasPrefix(string(m.FullName()), "numinance.ports.") {
		return
	}
	if m.IsStreamingClient() {
		t.Errorf("%s streams from the client, which an Invoke cannot carry", m.FullName())
	}
	want := "1.0.0"
	if strings.HasPrefix(string(m.FullName()), "numinance.ports.ticketing.") {
		want = "1.2.0"
	}
	if a.GetSince() != want {
		t.Errorf("%s is since %s, want %s", m.FullName(), a.GetSince(), want)
	}
	if c := a.GetCompensatingAction(); c != "" && !known[c] {
		t.Errorf("%s: compensating action %s is no verb", m.FullName(), c)
	}
	read := a.GetRisk() == annotationsv1.RiskClass_RISK_CLASS_READ
	if read && (a.GetDryRun() || a.GetCompensatingAction() != "" || len(a.GetEvidence()) > 0) {
		t.Errorf("%s is READ and yet has a dry run, a compensating action or evidence", m.FullName())
	}
	if m.Input().Name() != m.Name()+"Request" || m.Output().Name() != m.Name()+"Response" {
		t.Errorf("%s(%s) returns %s: names must follow the RPC", m.FullName(), m.Input().Name(), m.Output().Name())
	}
	if m.IsStreamingServer() && a.GetExecMode() != annotationsv1.ExecMode_EXEC_MODE_OPERATION {
		t.Errorf("%s streams and is not an OPERATION", m.FullName())
	}
}

func checkField(t *testing.T, file protoreflect.FileDescriptor, f protoreflect.FieldDescriptor) {
	t.Helper()
	a := ports.Field(f)
	if a == nil {
		t.Errorf("%s carries no field annotation", f.FullName())
		return
	}
	if a.GetDataClass() == 0 || a.GetSince() == "" {
		t.Errorf("%s: class %v, since %q: each must be set", f.FullName(), a.GetDataClass(), a.GetSince())
	}
	if a.GetResourceName() && f.Kind() != protoreflect.StringKind {
		t.Errorf("%s names a resource and is no string", f.FullName())
	}
	if a.GetResourceName() && a.GetHostOnly() {
		t.Errorf("%s names a resource and never leaves the host", f.FullName())
	}
	if strings.HasPrefix(string(file.Package()), "numinance.ports.") && f.Message() != nil && f.Message().FullName() == "google.protobuf.Any" {
		t.Errorf("%s is an Any: a port's payload is typed", f.FullName())
	}
}

// TestCallerTableIsComplete shows P-039: each verb is in the table, and no
// verb outside the contract is.
func TestCallerTableIsComplete(t *testing.T) {
	all := []ports.Caller{
		ports.CallerUnknown, ports.CallerProfile, ports.CallerChange, ports.CallerKnowledge, ports.CallerExecution,
		ports.CallerVerification, ports.CallerRelease, ports.CallerEvidence, ports.CallerSandbox,
	}
	only := map[string][]ports.Caller{
		"ticketing": {ports.CallerChange}, "ciexecutor": {ports.CallerRelease}, "authorexecutor": {ports.CallerExecution},
		"sandboxprovider": {ports.CallerSandbox}, "verifier": {ports.CallerVerification}, "knowledge": {ports.CallerKnowledge},
		"evidencestore": {ports.CallerEvidence}, "transparencylog": {ports.CallerEvidence},
	}
	for _, v := range ports.All() {
		var got []ports.Caller
		for _, c := range append(all, 200) {
			if ports.Allowed(c, v) {
				got = append(got, c)
			}
		}
		want, ok := only[v.Port]
		if !ok {
			switch v.Method {
			case "GetRepository":
				want = []ports.Caller{ports.CallerProfile, ports.CallerRelease}
			case "GetTree", "GetFile", "SearchCode":
				want = []ports.Caller{ports.CallerKnowledge, ports.CallerRelease}
			default:
				want = []ports.Caller{ports.CallerRelease}
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("callers of %s (-want +got):\n%s", v.Name(), diff)
		}
	}
	if ports.Allowed(ports.CallerRelease, ports.Verb{Port: "scm", Method: "VendorCall"}) {
		t.Error("a verb outside the contract may be called")
	}
	for _, c := range all[1:] {
		if back, err := ports.ParseCaller(c.String()); err != nil || back != c {
			t.Errorf("%v reads back as %v, %v", c, back, err)
		}
	}
	if _, err := ports.ParseCaller("unknown"); err == nil {
		t.Error("the unknown caller can be named")
	}
}

func TestLookup(t *testing.T) {
	for _, name := range []string{
		"scm.GetRepository", "numinance.ports.scm.v1.ScmService/GetRepository", "/numinance.ports.scm.v1.ScmService/GetRepository",
	} {
		if v, ok := ports.Lookup(name); !ok || v.Name() != "scm.GetRepository" {
			t.Errorf("%s: %v, %v", name, v.Name(), ok)
		}
	}
	// P-024: nothing but a port method is a target.
	for _, name := range []string{"", "/", "scm", "scm.VendorCall", "/numinance.plugin.v1.PluginService/Invoke", "//numinance.ports.scm.v1.ScmService/GetRepository"} {
		if v, ok := ports.Lookup(name); ok {
			t.Errorf("%q found %s", name, v.Name())
		}
	}
}

// TestResources shows that every resource_name field counts, two of one
// message and empty ones included.
func TestResources(t *testing.T) {
	for _, c := range []struct {
		verb string
		m    proto.Message
		want []string
	}{
		{"scm.GetRepository", &scmv1.GetRepositoryRequest{Repository: "forge/widget"}, []string{"forge/widget"}},
		{"scm.GetRepository", &scmv1.GetRepositoryRequest{}, []string{""}},
		{"ticketing.LinkIssue", linkIssue("A", "B"), []string{"A", "B"}},
		{"ticketing.LinkIssue", linkIssue("A", ""), []string{"A", ""}},
		{"scm.GetTree", &scmv1.GetRepositoryRequest{Repository: "forge/widget"}, nil},
	} {
		v, ok := ports.Lookup(c.verb)
		if !ok {
			t.Fatalf("no verb %s", c.verb)
		}
		if diff := cmp.Diff(c.want, ports.Resources(v, c.m.ProtoReflect())); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.verb, diff)
		}
	}
	for _, v := range ports.All() {
		if v.Port == "scm" || v.Port == "ticketing" {
			if got := ports.Resources(v, dynamic(v.Input)); len(got) == 0 {
				t.Errorf("%s names no resource: it could reach anything", v.Name())
			}
		}
	}
}

func linkIssue(project, blocked string) proto.Message {
	return &ticketingv1.LinkIssueRequest{Project: project, Key: "K-1", BlockedProject: blocked, BlockedKey: "K-2"}
}

func dynamic(d protoreflect.MessageDescriptor) protoreflect.Message { return dynamicpb.NewMessage(d) }
