// Package floors holds the denials that nothing lifts: one table, each row
// with the sentence of the specification it comes from. Package policy applies
// it before grants and policies; no document, grant, approval or policy is
// consulted here that could allow anything.
package floors

import "sync"

// Row is one floor. Denies is pure; its detail is a sentence for the person
// who asked. Ask says what a person could do instead.
type Row struct {
	ID       string
	Sentence string
	Clauses  []string
	Denies   func(Request) (denied bool, detail string)
	Ask      string
}

// Finding is one floor that denies a request.
type Finding struct {
	ID       string
	Detail   string
	Sentence string
	Clauses  []string
	Ask      string
}

// Check returns every floor that denies r, in table order; none means only
// that no floor denies it.
func Check(r Request) []Finding {
	var found []Finding
	rows := table()
	for i := range rows {
		row := &rows[i]
		if denied, detail := row.Denies(r); denied {
			found = append(found, Finding{ID: row.ID, Detail: detail, Sentence: row.Sentence, Clauses: row.Clauses, Ask: row.Ask})
		}
	}
	return found
}

// table is Table, made once; it is only read.
var table = sync.OnceValue(Table)
