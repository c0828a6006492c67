package sdk

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	annotationsv1 "github.com/numinance/numinance/gen/numinance/annotations/v1"
	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
)

// verb is one served method. Exactly one of unary and stream is set.
type verb struct {
	impl    any
	input   protoreflect.FullName
	dryRun  bool
	unary   *grpc.MethodDesc
	stream  *grpc.StreamDesc
	refused string // why it may not be called, or empty
}

// registrar collects what generated Register functions register.
type registrar struct {
	descs []*grpc.ServiceDesc
	impls []any
	err   error
}

// RegisterService implements grpc.ServiceRegistrar.
func (r *registrar) RegisterService(d *grpc.ServiceDesc, impl any) {
	if d.HandlerType != nil {
		want := reflect.TypeOf(d.HandlerType).Elem()
		if impl == nil || !reflect.TypeOf(impl).Implements(want) {
			r.err = errors.Join(r.err, fmt.Errorf("register %s: %T does not implement %v", d.ServiceName, impl, want))
			return
		}
	}
	r.descs = append(r.descs, d)
	r.impls = append(r.impls, impl)
}

// verbs turns the one registered service into a table keyed by Invoke target.
// A method is in the table but refused if the manifest does not name it, the
// agreed version is older than it, or its capability was not agreed on (P-027).
func (r *registrar) verbs(m *pluginv1.Manifest, agreed version, capabilities []string) (map[string]*verb, error) {
	if r.err != nil {
		return nil, r.err
	}
	if len(r.descs) != 1 {
		return nil, fmt.Errorf("a plugin registers exactly one service, that of its port; %d were registered", len(r.descs))
	}
	d, impl := r.descs[0], r.impls[0]
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(d.ServiceName))
	if err != nil {
		return nil, fmt.Errorf("find the descriptor of %s: %w", d.ServiceName, err)
	}
	sd, ok := found.(protoreflect.ServiceDescriptor)
	if !ok {
		return nil, fmt.Errorf("%s is no service", d.ServiceName)
	}
	if want := "numinance.ports." + m.GetPort() + ".v1"; string(sd.ParentFile().Package()) != want {
		return nil, fmt.Errorf("the manifest names port %s, but %s is not of package %s", m.GetPort(), d.ServiceName, want)
	}
	table := map[string]*verb{}
	add := func(name string, v *verb) error {
		md := sd.Methods().ByName(protoreflect.Name(name))
		if md == nil {
			return fmt.Errorf("%s has no method %s", d.ServiceName, name)
		}
		v.impl, v.input = impl, md.Input().FullName()
		opts, _ := md.Options().(*descriptorpb.MethodOptions)
		a, _ := proto.GetExtension(opts, annotationsv1.E_Action).(*annotationsv1.ActionOptions)
		since, err := parseVersion(a.GetSince())
		if err != nil {
			return fmt.Errorf("%s/%s: annotation since: %w", d.ServiceName, name, err)
		}
		v.dryRun = a.GetDryRun()
		switch c := a.GetCapability(); {
		case !slices.Contains(m.GetVerbs(), name):
			v.refused = fmt.Sprintf("the manifest does not name %s", name)
		case c != "" && !slices.Contains(capabilities, c):
			v.refused = fmt.Sprintf("%s needs capability %s, which was not negotiated", name, c)
		case c == "" && agreed.less(since):
			v.refused = fmt.Sprintf("%s is since spec version %s, the negotiated version is %s", name, since, agreed)
		}
		table[d.ServiceName+"/"+name] = v
		return nil
	}
	for i := range d.Methods {
		if err := add(d.Methods[i].MethodName, &verb{unary: &d.Methods[i]}); err != nil {
			return nil, err
		}
	}
	for i := range d.Streams {
		s := &d.Streams[i]
		if s.ClientStreams || !s.ServerStreams {
			return nil, fmt.Errorf("%s/%s: no port has client streams", d.ServiceName, s.StreamName)
		}
		if err := add(s.StreamName, &verb{stream: s}); err != nil {
			return nil, err
		}
	}
	for _, name := range m.GetVerbs() {
		if table[d.ServiceName+"/"+name] == nil {
			return nil, fmt.Errorf("the manifest names %s, which %s does not have", name, d.ServiceName)
		}
	}
	return table, nil
}
