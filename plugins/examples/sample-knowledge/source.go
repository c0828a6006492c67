package sampleknowledge

import (
	"errors"
	"slices"
	"strings"
)

// What a source answers when it does not answer with a document.
var (
	errOutage = errors.New("the source cannot be reached")
	errAbsent = errors.New("there is no such document")
	errClosed = errors.New("the source refuses this document")
)

// source stands for the system that keeps the documents.
type source struct {
	outage    bool
	documents []*Document
	byName    map[string]*Document
}

// get finds a document by any of its names, inside scope. What is outside of the
// scope or hidden is answered like what does not exist (K-033).
func (s *source) get(name string, scope []string) (*Document, error) {
	if s.outage {
		return nil, errOutage
	}
	d := s.byName[name]
	if d == nil || d.Hidden || !inScope(d.Ref, scope) {
		return nil, errAbsent
	}
	if d.Closed {
		return nil, errClosed
	}
	return d, nil
}

// search returns the documents inside scope that hold every word of the query,
// those with the most hits first. The query is text: a word like OR or a quote
// only matches itself (K-037).
func (s *source) search(query string, scope []string, limit int) ([]*Document, error) {
	if s.outage {
		return nil, errOutage
	}
	words := strings.Fields(strings.ToLower(query))
	type hit struct {
		d *Document
		n int
	}
	var hits []hit
	for _, d := range s.documents {
		if d.Hidden || d.Closed || !inScope(d.Ref, scope) {
			continue
		}
		text := strings.ToLower(d.Title + "\n" + d.current().Content)
		n := 0
		for _, w := range words {
			c := strings.Count(text, w)
			if c == 0 {
				n = 0
				break
			}
			n += c
		}
		if n > 0 {
			hits = append(hits, hit{d, n})
		}
	}
	slices.SortStableFunc(hits, func(a, b hit) int { return b.n - a.n })
	var out []*Document
	for _, h := range hits[:min(limit, len(hits))] {
		out = append(out, h.d)
	}
	return out, nil
}

func (d *Document) current() Version { return d.Versions[len(d.Versions)-1] }

// version returns the named version, or the current one for an empty name.
func (d *Document) version(name string) (Version, bool) {
	if name == "" {
		return d.current(), true
	}
	i := slices.IndexFunc(d.Versions, func(v Version) bool { return v.Name == name })
	if i < 0 {
		return Version{}, false
	}
	return d.Versions[i], true
}

// inScope compares whole segments: the scope ENG holds ENG/x and not ENGINE/x.
func inScope(ref string, scope []string) bool {
	return slices.ContainsFunc(scope, func(s string) bool {
		return ref == s || strings.HasPrefix(ref, s+"/")
	})
}

// climbs reports whether a ref or scope is anything but plain segments: it could
// lead out of its scope, now or once somebody decodes it (K-026).
func climbs(ref string) bool {
	if strings.ContainsAny(ref, "%\\\x00") {
		return true
	}
	for segment := range strings.SplitSeq(ref, "/") {
		if segment == "" || segment == "." || segment == ".." {
			return true
		}
	}
	return false
}
