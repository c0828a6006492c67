// Package files is a knowledge source of Markdown and text files, one directory
// per connection, served as a provider of the knowledge port. It only reads the
// directory; see README.md.
package files
