// Package sdk is what a plugin author imports: it serves stock gRPC service
// implementations of one port behind PluginService.Invoke and reaches the host
// for everything a plugin may not do by itself. It is the only package, beside
// the generated ones, that a plugin needs.
//
// A plugin in full:
//
//	func Plugin() sdk.Plugin {
//		return sdk.Plugin{
//			Manifest: &pluginv1.Manifest{ExtensionId: "com.example/wiki", Version: "1.0.0",
//				Port: "knowledge", SpecVersion: "1.0.0", Verbs: []string{"Search", "Fetch", "Resolve"}},
//			Open: func(ctx context.Context, s *sdk.Session) (sdk.Register, error) {
//				w := &wiki{}
//				return func(r grpc.ServiceRegistrar) { knowledgev1.RegisterKnowledgeServiceServer(r, w) }, nil
//			},
//		}
//	}
//
//	func main() {
//		if err := sdk.Serve(context.Background(), Plugin()); err != nil {
//			fmt.Fprintln(os.Stderr, err)
//			os.Exit(1)
//		}
//	}
package sdk
