// Package demo carries the small repository, ticket and scripts that `numi demo`
// runs one governed Change on. It holds data only; the run itself is the same
// as any other.
package demo

import (
	_ "embed"
	"fmt"
	"strings"

	"github.com/rogpeppe/go-internal/txtar"
)

//go:embed testdata/relpick.txtar
var archive []byte

// Files is what the demo consists of.
type Files struct {
	// Repository holds the files to commit, by path.
	Repository map[string][]byte
	// Ticket is the Markdown ticket with its front matter.
	Ticket []byte
	// Author is the script of the author run.
	Author []byte
}

// Name is the demo's name as a repository; Check is the command that verifies it.
const (
	Name  = "relpick"
	Check = "go test ./..."
)

// Load returns the demo's files, or an error if the archive lacks one.
func Load() (Files, error) {
	f := Files{Repository: map[string][]byte{}}
	for _, file := range txtar.Parse(archive).Files {
		if path, ok := strings.CutPrefix(file.Name, "repo/"); ok {
			f.Repository[path] = file.Data
			continue
		}
		switch file.Name {
		case "ticket.md":
			f.Ticket = file.Data
		case "author.yaml":
			f.Author = file.Data
		default:
			return Files{}, fmt.Errorf("demo archive: unknown file %q", file.Name)
		}
	}
	if len(f.Repository) == 0 || f.Ticket == nil || f.Author == nil {
		return Files{}, fmt.Errorf("demo archive: repository, ticket or script is missing")
	}
	return f, nil
}
