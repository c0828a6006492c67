package change

import (
	"context"
	"fmt"
	"io"
	"strings"

	"google.golang.org/grpc"

	"github.com/numinance/numinance/internal/core/change"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/untrusted"
	"github.com/numinance/numinance/internal/host/blob"

	ticketingv1 "github.com/numinance/numinance/gen/numinance/ports/ticketing/v1"
)

// Bounds of what is taken from a ticket and sent to one.
const (
	MaxTitle   = 1024
	MaxBody    = 256 << 10
	MaxComment = 32 << 10
)

// Blobs keeps content under its digest; host/blob's store is one.
type Blobs interface {
	Put(ctx context.Context, r io.Reader, limit int64) (blob.Ref, error)
}

// Context reads and answers tickets. conn carries the authority of the change
// context under the runner identity.
type Context struct {
	tickets ticketingv1.TicketingServiceClient
	blobs   Blobs
}

// New returns the context for one Change.
func New(conn grpc.ClientConnInterface, blobs Blobs) *Context {
	return &Context{tickets: ticketingv1.NewTicketingServiceClient(conn), blobs: blobs}
}

// Ticket names an issue.
type Ticket struct{ Project, Key string }

// Out is the task that came of a ticket.
type Out struct {
	Task  change.Task
	Title untrusted.Text
}

// Intake reads the ticket and keeps the task: the title and the text between
// marks that name them as data. A ticket without a text, or without a title,
// asks for nothing anybody could do, and is refused; a text that is too long
// is cut and says so.
func (c *Context) Intake(ctx context.Context, t Ticket) (Out, error) {
	resp, err := c.tickets.GetIssue(ctx, &ticketingv1.GetIssueRequest{Project: t.Project, Key: t.Key})
	if err != nil {
		return Out{}, fmt.Errorf("read ticket %s: %w", t.Key, err)
	}
	issue := resp.GetIssue()
	if issue.GetProject() != t.Project || issue.GetKey() != t.Key {
		return Out{}, fmt.Errorf("read ticket %s: the tracker answered with another one", t.Key)
	}
	title := untrusted.New("ticket title", []byte(issue.GetTitle()), MaxTitle)
	body := untrusted.New("ticket", []byte(issue.GetBody()), MaxBody)
	if blank(issue.GetTitle()) || blank(issue.GetBody()) {
		return Out{}, &change.Fault{Class: change.Denied, Reason: fmt.Sprintf("ticket %s has no title or no text: write down what should change", t.Key)}
	}
	cut := ""
	if issue.GetBodyTruncated() {
		cut = "The tracker cut the text of this ticket.\n"
	}
	task, err := c.keep(ctx, title.Quoted()+cut+body.Quoted())
	if err != nil {
		return Out{}, fmt.Errorf("keep the task of ticket %s: %w", t.Key, err)
	}
	kept, err := c.keep(ctx, issue.GetTitle())
	if err != nil {
		return Out{}, fmt.Errorf("keep the title of ticket %s: %w", t.Key, err)
	}
	return Out{Task: change.Task{Ref: task, Key: t.Key, Title: kept}, Title: title}, nil
}

func (c *Context) keep(ctx context.Context, text string) (digest.Digest, error) {
	ref, err := c.blobs.Put(ctx, strings.NewReader(text), MaxTitle+2*MaxBody)
	return ref.Digest, err
}

// blank reports whether s shows nothing: spaces, controls and format
// characters only.
func blank(s string) bool {
	line := untrusted.New("", []byte(s), len(s)).Line(len(s) + 1)
	return strings.Trim(line, " \uFFFD…") == ""
}

// Report leaves one comment. Redaction and the size cap are the host's
// (P-094, P-095); a text above the cap is refused here already.
func (c *Context) Report(ctx context.Context, t Ticket, text string) error {
	if text == "" || len(text) > MaxComment {
		return fmt.Errorf("comment on ticket %s: %d bytes, want 1 to %d", t.Key, len(text), MaxComment)
	}
	_, err := c.tickets.CommentOnIssue(ctx, &ticketingv1.CommentOnIssueRequest{Project: t.Project, Key: t.Key, Body: text})
	if err != nil {
		return fmt.Errorf("comment on ticket %s: %w", t.Key, err)
	}
	return nil
}
