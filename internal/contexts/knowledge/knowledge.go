package knowledge

import (
	"context"
	"fmt"
	"io"
	"strings"

	"google.golang.org/grpc"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/untrusted"
	"github.com/numinance/numinance/internal/host/blob"

	knowledgev1 "github.com/numinance/numinance/gen/numinance/ports/knowledge/v1"
)

// Bounds of a bundle.
const (
	MaxQuery   = 1024
	MaxItems   = 20
	MaxPerItem = 64 << 10
	maxBundle  = MaxItems * 4 * MaxPerItem
)

// Blobs keeps content under its digest; host/blob's store is one.
type Blobs interface {
	Put(ctx context.Context, r io.Reader, limit int64) (blob.Ref, error)
}

// Connection is one approved KnowledgeConnection.
type Connection struct {
	Name  string
	Scope []string
	// MaxItems and MaxBytes bound what is taken; zero is the package's bound,
	// and more than that is cut down to it.
	MaxItems, MaxBytes int
}

// Context gathers bundles. conn carries the authority of the knowledge context
// under the runner identity.
type Context struct {
	port  knowledgev1.KnowledgeServiceClient
	blobs Blobs
}

// New returns the context for one Change.
func New(conn grpc.ClientConnInterface, blobs Blobs) *Context {
	return &Context{port: knowledgev1.NewKnowledgeServiceClient(conn), blobs: blobs}
}

// In is what to look for and where. Without a connection the bundle is empty.
type In struct {
	Connections []Connection
	About       untrusted.Text
}

// Gather searches every connection in order and keeps what it fetches as one
// document: each item between marks that name it as data, with its canonical
// ref and version. It fails as a whole if any source fails.
func (c *Context) Gather(ctx context.Context, in In) (change.Bundle, error) {
	if len(in.Connections) == 0 {
		return change.Bundle{}, nil
	}
	query := cutBytes(in.About.Line(MaxQuery), MaxQuery)
	if query == "" {
		return change.Bundle{}, fmt.Errorf("gather context: the task has no title to search for")
	}
	var doc strings.Builder
	items := 0
	for _, conn := range in.Connections {
		n, err := c.gather(ctx, conn, query, &doc)
		if err != nil {
			return change.Bundle{}, fmt.Errorf("gather context from %s: %w", conn.Name, err)
		}
		items += n
	}
	ref, err := c.blobs.Put(ctx, strings.NewReader(doc.String()), int64(maxBundle*len(in.Connections)))
	if err != nil {
		return change.Bundle{}, fmt.Errorf("keep the context bundle: %w", err)
	}
	return change.Bundle{Ref: ref.Digest, Items: items}, nil
}

func (c *Context) gather(ctx context.Context, conn Connection, query string, doc *strings.Builder) (int, error) {
	limit, size := bound(conn.MaxItems, MaxItems), bound(conn.MaxBytes, MaxPerItem)
	found, err := c.port.Search(ctx, &knowledgev1.SearchRequest{
		Connection: conn.Name, Query: query, Scope: conn.Scope, MaxResults: uint32(limit),
	})
	if err != nil {
		return 0, fmt.Errorf("search: %w", err)
	}
	if len(found.GetResults()) > limit {
		return 0, fmt.Errorf("search: %d results, asked for %d at most", len(found.GetResults()), limit)
	}
	for i, r := range found.GetResults() {
		got, err := c.port.Fetch(ctx, &knowledgev1.FetchRequest{
			Connection: conn.Name, Ref: r.GetRef(), Version: r.GetVersion(), Scope: conn.Scope, MaxBytes: uint32(size),
		})
		if err != nil {
			return 0, fmt.Errorf("fetch result %d: %w", i+1, err)
		}
		if len(got.GetContent()) > size {
			return 0, fmt.Errorf("fetch result %d: %d bytes, asked for %d at most", i+1, len(got.GetContent()), size)
		}
		head := fmt.Sprintf("ref: %s\nversion: %s\ntitle: %s\ncut: %v\n\n", got.GetRef(), got.GetVersion(), got.GetTitle(), got.GetTruncated())
		doc.WriteString(untrusted.New("knowledge "+conn.Name, []byte(head+got.GetContent()), len(head)+size).Quoted())
	}
	return len(found.GetResults()), nil
}

func bound(asked, most int) int {
	if asked <= 0 || asked > most {
		return most
	}
	return asked
}

// cutBytes keeps whole characters of s up to max bytes.
func cutBytes(s string, max int) string {
	if len(s) <= max {
		return s
	}
	end := 0
	for i := range s {
		if i > max {
			break
		}
		end = i
	}
	return s[:end]
}
