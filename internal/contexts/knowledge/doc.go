// Package knowledge is the Context Resolver: it searches the approved
// knowledge connection for a task, fetches what it finds and keeps it as one
// context bundle by reference. What it retrieves is data and never alters a
// policy, a grant or an approval; an outage is an error, never an empty bundle.
package knowledge
