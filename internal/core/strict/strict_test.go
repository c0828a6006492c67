package strict_test

import (
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	authorexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/authorexecutor/v1"
	ciexecutorv1 "github.com/numinance/numinance/gen/numinance/ports/ciexecutor/v1"
	scmv1 "github.com/numinance/numinance/gen/numinance/ports/scm/v1"
	ticketingv1 "github.com/numinance/numinance/gen/numinance/ports/ticketing/v1"
	transparencylogv1 "github.com/numinance/numinance/gen/numinance/ports/transparencylog/v1"
	"github.com/numinance/numinance/internal/core/strict"
)

var agreed = strict.Rules{Version: "1.2.0"}

func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func field(num protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, num, protowire.BytesType), value)
}

func varint(num protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(nil, num, protowire.VarintType), v)
}

func cat(parts ...[]byte) (out []byte) {
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

func samples() []proto.Message {
	return []proto.Message{
		&scmv1.GetRepositoryRequest{Repository: "forge/widget"},
		&scmv1.GetTreeResponse{Entries: []*scmv1.TreeEntry{{Path: "a", SizeBytes: 1}, {Path: "b/ü", RawPath: []byte{0xff}}}, NextPageToken: "n"},
		&ciexecutorv1.StartOperationRequest{Pipeline: "p", Parameters: map[string]string{"": "x", "a": "", "b": "y"}},
		&transparencylogv1.ProveRequest{Proof: &transparencylogv1.ProveRequest_Inclusion{Inclusion: &transparencylogv1.InclusionQuery{}}},
		&authorexecutorv1.CapabilitiesResponse{},
		&ticketingv1.SearchIssuesRequest{Project: "P"},
		&authorexecutorv1.ChangeExecutionRequest{AllowedCapabilities: []authorexecutorv1.ExecutorCapability{1, 2, 3}, AllowedPaths: []string{"a/", "b"}},
	}
}

func TestWalkAcceptsWhatTheContractSays(t *testing.T) {
	for _, m := range samples() {
		if err := strict.Walk(marshal(t, m), m.ProtoReflect().Descriptor(), agreed); err != nil {
			t.Errorf("%T: %v", m, err)
		}
	}
}

// TestWalkRefuses shows P-030 and the other forms that a decoder would drop,
// merge or cut.
func TestWalkRefuses(t *testing.T) {
	repo := marshal(t, &scmv1.GetRepositoryRequest{Repository: "forge/widget"})
	entry := marshal(t, &scmv1.TreeEntry{Path: "a"})
	bad := cat(entry, varint(4000, 1))
	deep := []byte{}
	for range 100 {
		deep = field(1, deep)
	}
	for _, c := range []struct {
		name string
		m    proto.Message
		b    []byte
		want string
	}{
		{"unknown field at the top", &scmv1.GetRepositoryRequest{}, cat(repo, varint(4000, 1)), "unknown field 4000"},
		{"unknown field in a repeated message", &scmv1.GetTreeResponse{}, field(1, bad), "GetTreeResponse.entries: unknown field 4000"},
		{"unknown field in a oneof member", &transparencylogv1.ProveRequest{}, field(1, varint(4000, 1)), "unknown field 4000"},
		{"unknown field in a map entry", &ciexecutorv1.StartOperationRequest{}, field(4, cat(field(1, []byte("k")), varint(3, 1))), "unknown field 3"},
		{"unknown group", &scmv1.GetRepositoryRequest{}, []byte{0xa3, 0xf4, 0x01, 0xa4, 0xf4, 0x01}, "unknown field 3908"},
		{"group for a text", &scmv1.GetRepositoryRequest{}, []byte{0x0b, 0x0c}, "wire type 3, want 2"},
		{"stray end of a group", &scmv1.GetRepositoryRequest{}, []byte{0x0c}, "wire type 4, want 2"},
		{"wrong wire type", &scmv1.GetRepositoryRequest{}, varint(1, 7), "wire type 0, want 2"},
		{"text that is not UTF-8", &scmv1.GetRepositoryRequest{}, field(1, []byte{0xff, 0xfe}), "not UTF-8"},
		{"field given twice", &scmv1.GetRepositoryRequest{}, cat(repo, repo), "given twice"},
		{"second member of a oneof", &transparencylogv1.ProveRequest{}, cat(field(1, nil), field(2, nil)), "second member of oneof proof"},
		{"map key given twice", &ciexecutorv1.StartOperationRequest{}, cat(field(4, field(1, []byte("k"))), field(4, field(1, []byte("k")))), "key is given twice"},
		{"empty and absent map key", &ciexecutorv1.StartOperationRequest{}, cat(field(4, nil), field(4, field(1, nil))), "key is given twice"},
		{"unknown enum number", &authorexecutorv1.ChangeExecutionRequest{}, varint(18, 4000), "has no value 4000"},
		{"unknown enum number, packed", &authorexecutorv1.ChangeExecutionRequest{}, field(18, protowire.AppendVarint(nil, 4000)), "has no value 4000"},
		{"enum number beyond 32 bits", &authorexecutorv1.ChangeExecutionRequest{}, varint(18, 1<<40|1), "does not fit"},
		{"bool beyond 1", &scmv1.GetFileResponse{}, varint(3, 2), "does not fit"},
		{"number longer than need be", &scmv1.GetFileResponse{}, []byte{0x10, 0x81, 0x00}, "longer than need be"},
		{"tag longer than need be", &scmv1.GetRepositoryRequest{}, append([]byte{0x8a, 0x00}, repo[1:]...), "longer than need be"},
		{"length longer than need be", &scmv1.GetRepositoryRequest{}, []byte{0x0a, 0x81, 0x00, 'x'}, "longer than need be"},
		{"cut off", &scmv1.GetRepositoryRequest{}, repo[:len(repo)-1], "unexpected EOF"},
		{"number that never ends", &scmv1.GetFileResponse{}, cat([]byte{0x10}, []byte(strings.Repeat("\xff", 11))), "variable length"},
		{"an Any inside a payload", &pluginv1.InvokeRequest{}, field(3, nil), "Any inside a payload"},
		{"capability field without the capability", &ticketingv1.SearchIssuesRequest{}, field(6, []byte("q")), "needs capability ticketing.query_language"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := strict.Walk(c.b, c.m.ProtoReflect().Descriptor(), agreed)
			if !errors.Is(err, strict.ErrRefused) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want a refusal with %q", err, c.want)
			}
		})
	}
	if err := strict.Walk(deep, (&scmv1.GetRepositoryRequest{}).ProtoReflect().Descriptor(), agreed); err != nil && !errors.Is(err, strict.ErrRefused) {
		t.Errorf("deep nesting: %v", err)
	}
}

// TestNegotiation shows P-020: a newer field needs the version or a capability.
func TestNegotiation(t *testing.T) {
	plain := &ticketingv1.SearchIssuesRequest{Project: "P"}
	query := &ticketingv1.SearchIssuesRequest{QueryLanguage: "project = P"}
	for _, c := range []struct {
		name string
		m    proto.Message
		r    strict.Rules
		ok   bool
	}{
		{"same minor", plain, strict.Rules{Version: "1.2.0"}, true},
		{"later minor", plain, strict.Rules{Version: "1.3.1"}, true},
		{"earlier minor", plain, strict.Rules{Version: "1.1.9"}, false},
		{"other major", plain, strict.Rules{Version: "2.2.0"}, false},
		{"no version", plain, strict.Rules{}, false},
		{"malformed version", plain, strict.Rules{Version: "1.02.0"}, false},
		{"capability", query, strict.Rules{Version: "1.0.0", Capabilities: []string{"ticketing.query_language"}}, true},
		{"other capability", query, strict.Rules{Version: "1.2.0", Capabilities: []string{"x"}}, false},
	} {
		if err := strict.Walk(marshal(t, c.m), c.m.ProtoReflect().Descriptor(), c.r); (err == nil) != c.ok {
			t.Errorf("%s: %v, want ok %v", c.name, err, c.ok)
		}
	}
}

func checker(t testing.TB) *strict.Checker {
	t.Helper()
	c, err := strict.New(&scmv1.GetRepositoryRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestAnyIsExactlyTheDeclaredType shows P-014.
func TestAnyIsExactlyTheDeclaredType(t *testing.T) {
	c := checker(t)
	good, err := anypb.New(&scmv1.GetRepositoryRequest{Repository: "forge/widget", Objects: scmv1.ObjectsMode_OBJECTS_MODE_NONE})
	if err != nil {
		t.Fatal(err)
	}
	into := &scmv1.GetRepositoryRequest{}
	if err := c.Any(good, into, agreed); err != nil || into.GetRepository() != "forge/widget" {
		t.Fatalf("%v, %v", into, err)
	}
	for name, a := range map[string]*anypb.Any{
		"absent":       nil,
		"other type":   {TypeUrl: "type.googleapis.com/numinance.ports.scm.v1.GetTreeRequest", Value: good.GetValue()},
		"other prefix": {TypeUrl: "evil.example/numinance.ports.scm.v1.GetRepositoryRequest", Value: good.GetValue()},
		"no prefix":    {TypeUrl: "numinance.ports.scm.v1.GetRepositoryRequest", Value: good.GetValue()},
		"empty":        {Value: good.GetValue()},
	} {
		if err := c.Any(a, into, agreed); !errors.Is(err, strict.ErrRefused) {
			t.Errorf("%s: %v, want a refusal", name, err)
		}
	}
}

// TestBounds shows that the contract's rules hold, UNSPECIFIED enums included.
func TestBounds(t *testing.T) {
	c := checker(t)
	none := scmv1.ObjectsMode_OBJECTS_MODE_NONE
	for name, sample := range map[string]struct {
		m    proto.Message
		want string
	}{
		"empty name":       {&scmv1.GetRepositoryRequest{Objects: none}, "repository"},
		"unspecified enum": {&scmv1.GetRepositoryRequest{Repository: "forge/widget"}, "objects"},
		"too long":         {&scmv1.GetRepositoryRequest{Repository: strings.Repeat("x", 100_000), Objects: none}, "repository"},
	} {
		err := c.Decode(marshal(t, sample.m), sample.m.ProtoReflect().New().Interface(), agreed)
		if !errors.Is(err, strict.ErrRefused) || !strings.Contains(err.Error(), sample.want) {
			t.Errorf("%s: %v, want a refusal that names %s", name, err, sample.want)
		} else if strings.Contains(err.Error(), "\n") || len(err.Error()) > 500 {
			t.Errorf("%s: the reason is not one line a person reads: %q", name, err)
		}
	}
}

func TestHostOnlyFieldsStayInside(t *testing.T) {
	ref := "sha256:" + strings.Repeat("a", 64)
	m := &authorexecutorv1.ChangeExecutionRequest{WorktreeRef: ref, NetworkPolicyRef: ref, AllowedPaths: []string{"a"}}
	if !strict.Outside(m.ProtoReflect()) {
		t.Error("a host_only field was not seen")
	}
	if m.GetWorktreeRef() != "" || m.GetNetworkPolicyRef() != "" || len(m.GetAllowedPaths()) != 1 {
		t.Errorf("left %v", m)
	}
	if strict.Outside(m.ProtoReflect()) {
		t.Error("reported a host_only field where none is left")
	}
}

// FuzzWalk: what the walk accepts, every decoder reads the same way, with
// nothing unknown in it.
func FuzzWalk(f *testing.F) {
	kinds := samples()
	for i, m := range kinds {
		f.Add(uint8(i), marshal(f, m))
	}
	f.Add(uint8(0), []byte{0x0b, 0x0c})
	f.Add(uint8(1), field(1, varint(4000, 1)))
	f.Add(uint8(2), cat(field(4, nil), field(4, field(1, nil))))
	f.Fuzz(func(t *testing.T, kind uint8, b []byte) {
		m := kinds[int(kind)%len(kinds)].ProtoReflect().New().Interface()
		if strict.Walk(b, m.ProtoReflect().Descriptor(), agreed) != nil {
			return
		}
		if err := proto.Unmarshal(b, m); err != nil {
			t.Fatalf("accepted by the walk and refused by the decoder: %v", err)
		}
		again := marshal(t, m)
		if err := strict.Walk(again, m.ProtoReflect().Descriptor(), agreed); err != nil {
			t.Fatalf("the decoded message encodes into something refused: %v", err)
		}
		other := m.ProtoReflect().New().Interface()
		if err := proto.Unmarshal(again, other); err != nil || !proto.Equal(m, other) {
			t.Fatalf("two readings differ: %v", err)
		}
	})
}

// TestCheckerKnowsTheContract: what a checker remembers of the contract changes
// no answer, and Hides says of no message that it hides nothing when it does.
func TestCheckerKnowsTheContract(t *testing.T) {
	c, err := strict.New()
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for _, m := range samples() {
			for _, r := range []strict.Rules{agreed, {Version: "1.0.0"}, {Version: "2.0.0"}, {}, {Version: "1.0.0", Capabilities: []string{"x"}}} {
				for _, b := range [][]byte{marshal(t, m), cat(marshal(t, m), varint(4000, 1)), cat(marshal(t, m), marshal(t, m))} {
					want, got := strict.Walk(b, m.ProtoReflect().Descriptor(), r), c.Walk(b, m.ProtoReflect().Descriptor(), r)
					if (want == nil) != (got == nil) || want != nil && want.Error() != got.Error() {
						t.Errorf("%T under %v: %v, want %v", m, r, got, want)
					}
				}
			}
		}
	}
	for _, m := range []proto.Message{&authorexecutorv1.ChangeExecutionRequest{}, &authorexecutorv1.ExecuteRequest{}} {
		if !c.Hides(m.ProtoReflect().Descriptor()) {
			t.Errorf("%T has a host_only field", m)
		}
	}
	if d := (&scmv1.GetFileRequest{}).ProtoReflect().Descriptor(); c.Hides(d) {
		t.Error("scm.GetFile hides nothing")
	}
}
