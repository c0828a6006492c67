// Package ports is the contract's nine ports as data: every verb with its risk,
// mode, flags, evidence and scopes, read from the host's own copy of the
// descriptors, and the table of who may call which. Policy, strict decoding and
// dispatch are governed by it, never by what a plugin presents (P-025).
package ports

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/numinance/numinance/gen"
	annotationsv1 "github.com/numinance/numinance/gen/numinance/annotations/v1"
)

// Risk says how much harm a verb can do when it is called wrongly. The zero
// value is no class and is refused.
type Risk uint8

// The five classes.
const (
	RiskUnknown Risk = iota
	RiskRead
	RiskLow
	RiskMedium
	RiskHigh
	RiskPrivileged
)

var riskNames = [...]string{"UNKNOWN", "READ", "LOW", "MEDIUM", "HIGH", "PRIVILEGED"}

// String returns the class as it stands in records and policies.
func (r Risk) String() string {
	if int(r) < len(riskNames) {
		return riskNames[r]
	}
	return riskNames[0]
}

// ExecMode says whether the answer ends the action. The zero value is refused.
type ExecMode uint8

// The two modes.
const (
	ExecUnknown ExecMode = iota
	ExecSync
	ExecOperation
)

var execNames = [...]string{"UNKNOWN", "SYNC", "OPERATION"}

// String returns the mode as it stands in records and policies.
func (e ExecMode) String() string {
	if int(e) < len(execNames) {
		return execNames[e]
	}
	return execNames[0]
}

// Verb is one RPC of a port with the law that governs it.
type Verb struct {
	Port    string // "scm"
	Service string // "numinance.ports.scm.v1.ScmService"
	Method  string // "GetRepository"
	Full    string // "numinance.ports.scm.v1.ScmService/GetRepository"

	Risk            Risk
	Exec            ExecMode
	Idempotent      bool
	DryRun          bool
	ServerStreaming bool
	Compensating    string // "ScmService.UpdatePullRequest", or empty
	Capability      string // empty for a core verb
	Since           string // "1.0.0"
	Evidence        []string
	Scopes          []string

	Input, Output protoreflect.MessageDescriptor
}

// Name is the verb as policies and records write it, such as
// "scm.GetRepository".
func (v Verb) Name() string { return v.Port + "." + v.Method }

// SideEffecting reports whether the verb can change anything: a provider must
// declare every such verb of its port (P-028).
func (v Verb) SideEffecting() bool { return v.Risk != RiskRead }

const packagePrefix = "numinance.ports."

type table struct {
	all   []Verb
	index map[string]int
	files *protoregistry.Files
	names map[protoreflect.FullName]bool // the fields of files that name a resource
}

// load parses the embedded descriptors once. They are part of the binary, so a
// fault in them is a fault of the build and stops it at its first use.
var load = sync.OnceValue(func() *table {
	t, err := parse(gen.Descriptors)
	if err != nil {
		panic(fmt.Sprintf("the embedded contract is broken: %v", err))
	}
	return &t
})

func parse(set []byte) (table, error) {
	var fds descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(set, &fds); err != nil {
		return table{}, fmt.Errorf("read the descriptor set: %w", err)
	}
	files, err := protodesc.NewFiles(&fds)
	if err != nil {
		return table{}, fmt.Errorf("link the descriptor set: %w", err)
	}
	t := table{index: map[string]int{}, files: files, names: map[protoreflect.FullName]bool{}}
	files.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		t.resourceNames(f.Messages())
		if !strings.HasPrefix(string(f.Package()), packagePrefix) {
			return true
		}
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for k := range s.Methods().Len() {
				t.all = append(t.all, verbOf(f, s, s.Methods().Get(k)))
			}
		}
		return true
	})
	slices.SortStableFunc(t.all, func(a, b Verb) int { return cmp.Compare(a.Port, b.Port) })
	for i, v := range t.all {
		for _, key := range []string{v.Full, v.Name()} {
			if _, taken := t.index[key]; taken {
				return table{}, fmt.Errorf("verb %s is defined twice", key)
			}
			t.index[key] = i
		}
	}
	return t, nil
}

// resourceNames notes the fields of messages that name a resource.
func (t *table) resourceNames(messages protoreflect.MessageDescriptors) {
	for i := range messages.Len() {
		m := messages.Get(i)
		for k := range m.Fields().Len() {
			if f := m.Fields().Get(k); Field(f).GetResourceName() {
				t.names[f.FullName()] = true
			}
		}
		t.resourceNames(m.Messages())
	}
}

func verbOf(f protoreflect.FileDescriptor, s protoreflect.ServiceDescriptor, m protoreflect.MethodDescriptor) Verb {
	port, _, _ := strings.Cut(strings.TrimPrefix(string(f.Package()), packagePrefix), ".")
	a := action(m)
	v := Verb{
		Port: port, Service: string(s.FullName()), Method: string(m.Name()), Full: string(s.FullName()) + "/" + string(m.Name()),
		Idempotent: a.GetIdempotent(), DryRun: a.GetDryRun(), ServerStreaming: m.IsStreamingServer(),
		Compensating: a.GetCompensatingAction(), Capability: a.GetCapability(), Since: a.GetSince(),
		Evidence: a.GetEvidence(), Scopes: a.GetScopes(), Input: m.Input(), Output: m.Output(),
	}
	switch a.GetRisk() {
	case annotationsv1.RiskClass_RISK_CLASS_READ:
		v.Risk = RiskRead
	case annotationsv1.RiskClass_RISK_CLASS_LOW:
		v.Risk = RiskLow
	case annotationsv1.RiskClass_RISK_CLASS_MEDIUM:
		v.Risk = RiskMedium
	case annotationsv1.RiskClass_RISK_CLASS_HIGH:
		v.Risk = RiskHigh
	case annotationsv1.RiskClass_RISK_CLASS_PRIVILEGED:
		v.Risk = RiskPrivileged
	}
	switch a.GetExecMode() {
	case annotationsv1.ExecMode_EXEC_MODE_SYNC:
		v.Exec = ExecSync
	case annotationsv1.ExecMode_EXEC_MODE_OPERATION:
		v.Exec = ExecOperation
	}
	return v
}

func action(m protoreflect.MethodDescriptor) *annotationsv1.ActionOptions {
	a, _ := proto.GetExtension(m.Options(), annotationsv1.E_Action).(*annotationsv1.ActionOptions)
	return a
}

// Lookup finds a verb by its full method, with or without the leading slash of
// gRPC, or by its name.
func Lookup(name string) (Verb, bool) {
	t := load()
	i, ok := t.index[strings.TrimPrefix(name, "/")]
	if !ok {
		return Verb{}, false
	}
	return t.all[i], true
}

// All returns every verb, ordered by port and then as the contract lists them.
func All() []Verb { return slices.Clone(load().all) }

// Names returns the nine port names in alphabetical order.
func Names() []string {
	seen := map[string]bool{}
	for _, v := range load().all {
		seen[v.Port] = true
	}
	return slices.Sorted(maps.Keys(seen))
}

// Of returns the verbs of one port, or nil if there is no such port.
func Of(port string) (out []Verb) {
	for _, v := range load().all {
		if v.Port == port {
			out = append(out, v)
		}
	}
	return out
}

// Files is the host's descriptor copy, for those who print or check it.
func Files() *protoregistry.Files { return load().files }

// Field returns the governance annotations of a field, or nil if it has none.
func Field(f protoreflect.FieldDescriptor) *annotationsv1.FieldAnnotations {
	options := f.Options()
	if !proto.HasExtension(options, annotationsv1.E_Field) {
		return nil
	}
	a, _ := proto.GetExtension(options, annotationsv1.E_Field).(*annotationsv1.FieldAnnotations)
	return a
}

// Resources returns the value of every resource_name field of m at any depth,
// in field order. The annotations are those of the verb's input in the host's
// copy; an m of another type yields nil.
func Resources(v Verb, m protoreflect.Message) []string {
	if v.Input == nil || m.Descriptor().FullName() != v.Input.FullName() {
		return nil
	}
	return load().resources(nil, v.Input, m)
}

func (t *table) resources(out []string, law protoreflect.MessageDescriptor, m protoreflect.Message) []string {
	for i := range law.Fields().Len() {
		f := law.Fields().Get(i)
		own := m.Descriptor().Fields().ByNumber(f.Number())
		named := t.names[f.FullName()]
		if own == nil || !m.Has(own) && !(named && f.Kind() == protoreflect.StringKind && !f.IsList() && !f.HasPresence()) {
			continue
		}
		value := m.Get(own)
		switch {
		case named && f.IsList():
			for k := range value.List().Len() {
				out = append(out, value.List().Get(k).String())
			}
		case named:
			// Also when it is empty: an empty name is in no grant.
			out = append(out, value.String())
		case f.IsMap():
			if f.MapValue().Message() != nil {
				value.Map().Range(func(_ protoreflect.MapKey, e protoreflect.Value) bool {
					out = t.resources(out, f.MapValue().Message(), e.Message())
					return true
				})
			}
		case f.Message() == nil:
		case f.IsList():
			for k := range value.List().Len() {
				out = t.resources(out, f.Message(), value.List().Get(k).Message())
			}
		default:
			out = t.resources(out, f.Message(), value.Message())
		}
	}
	return out
}
