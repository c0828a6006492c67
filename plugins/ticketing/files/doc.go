// Package files is a tracker of Markdown files, one directory per project,
// served as a provider of the ticketing port. It is what a Change uses where no
// other tracker is configured; see README.md.
package files
