// Package plugintest serves a plugin in memory for tests, over the same Invoke
// wire as the real host: stock generated clients work on the connection it
// returns. Plugin authors' tests and the conformance kits use it.
//
//	conn := plugintest.Serve(t, wiki.Plugin(), plugintest.Options{Config: []byte(`{}`)})
//	client := knowledgev1.NewKnowledgeServiceClient(conn)
package plugintest
