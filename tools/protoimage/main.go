// Command protoimage compiles every .proto file under a directory into one
// image: a FileDescriptorSet in dependency order with source information, in
// which imported files are marked as imports. buf lints, generates from and
// compares such images without a registry; imports that are not in the
// directory come from the Go modules that carry them.
//
//	protoimage -proto proto -o image.binpb           for buf
//	protoimage -proto proto -strip -o gen/descriptors.binpb   to embed
package main

import (
	"context"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"

	validatepb "buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go/buf/validate"
	"github.com/bufbuild/protocompile"
	"github.com/bufbuild/protocompile/protoutil"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

func main() {
	dir := flag.String("proto", "proto", "directory with the .proto files")
	out := flag.String("o", "", "file to write")
	strip := flag.Bool("strip", false, "leave out source information and import marks")
	flag.Parse()
	if err := run(*dir, *out, *strip); err != nil {
		fmt.Fprintln(os.Stderr, "protoimage:", err)
		os.Exit(1)
	}
}

func run(dir, out string, strip bool) error {
	if out == "" {
		return fmt.Errorf("-o is missing: name the file to write")
	}
	names, err := protoFiles(dir)
	if err != nil {
		return err
	}
	own := map[string]bool{}
	for _, n := range names {
		own[n] = true
	}
	compiler := protocompile.Compiler{
		Resolver: protocompile.WithStandardImports(protocompile.CompositeResolver{
			&protocompile.SourceResolver{ImportPaths: []string{dir}},
			protocompile.ResolverFunc(func(path string) (protocompile.SearchResult, error) {
				if path == validatepb.File_buf_validate_validate_proto.Path() {
					return protocompile.SearchResult{Desc: validatepb.File_buf_validate_validate_proto}, nil
				}
				return protocompile.SearchResult{}, fs.ErrNotExist
			}),
		}),
		SourceInfoMode: protocompile.SourceInfoStandard,
	}
	files, err := compiler.Compile(context.Background(), names...)
	if err != nil {
		return err
	}
	set := &descriptorpb.FileDescriptorSet{}
	seen := map[string]bool{}
	var add func(fd protoreflect.FileDescriptor)
	add = func(fd protoreflect.FileDescriptor) {
		if seen[fd.Path()] {
			return
		}
		seen[fd.Path()] = true
		for i := 0; i < fd.Imports().Len(); i++ {
			add(fd.Imports().Get(i).FileDescriptor)
		}
		p := proto.Clone(protoutil.ProtoFromFileDescriptor(fd)).(*descriptorpb.FileDescriptorProto)
		if strip {
			p.SourceCodeInfo = nil
		} else if !own[fd.Path()] {
			markImport(p)
		}
		set.File = append(set.File, p)
	}
	for _, f := range files {
		add(f)
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(set)
	if err != nil {
		return fmt.Errorf("encode the image: %w", err)
	}
	return os.WriteFile(out, raw, 0o644)
}

// markImport sets buf's image extension (field 8042, is_import = 1), by which
// buf knows that a file is there only because another one imports it.
func markImport(p *descriptorpb.FileDescriptorProto) {
	var ext []byte
	ext = protowire.AppendTag(ext, 1, protowire.VarintType)
	ext = protowire.AppendVarint(ext, 1)
	raw := p.ProtoReflect().GetUnknown()
	raw = protowire.AppendTag(raw, 8042, protowire.BytesType)
	raw = protowire.AppendBytes(raw, ext)
	p.ProtoReflect().SetUnknown(raw)
}

func protoFiles(dir string) ([]string, error) {
	var names []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".proto") {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		names = append(names, filepath.ToSlash(rel))
		return err
	})
	sort.Strings(names)
	return names, err
}
