package ports

import "fmt"

// Caller is a named context of the runtime. Only these call ports (P-039); the
// zero value is nobody and may call nothing.
type Caller uint8

// The eight contexts.
const (
	CallerUnknown Caller = iota
	CallerProfile
	CallerChange
	CallerKnowledge
	CallerExecution
	CallerVerification
	CallerRelease
	CallerEvidence
	CallerSandbox
)

var callerNames = [...]string{"unknown", "profile", "change", "knowledge", "execution", "verification", "release", "evidence", "sandbox"}

// String returns the context's name as it stands in records and policies.
func (c Caller) String() string {
	if int(c) < len(callerNames) {
		return callerNames[c]
	}
	return callerNames[0]
}

// ParseCaller is the inverse of String; "unknown" and any other text are errors.
func ParseCaller(s string) (Caller, error) {
	for i, name := range callerNames {
		if i > 0 && name == s {
			return Caller(i), nil
		}
	}
	return CallerUnknown, fmt.Errorf("caller %q is no context of the runtime", s)
}

// callers is the whole table of who may call what. A verb that is not in it is
// called by nobody.
var callers = map[string][]Caller{
	// scm: the release context manages pull requests; profile and policy read
	// the base revision through GetRepository alone; knowledge reads files,
	// trees and searches code.
	"scm.GetRepository":        {CallerRelease, CallerProfile},
	"scm.GetTree":              {CallerRelease, CallerKnowledge},
	"scm.GetFile":              {CallerRelease, CallerKnowledge},
	"scm.SearchCode":           {CallerRelease, CallerKnowledge},
	"scm.ListBranches":         {CallerRelease},
	"scm.CreateBranch":         {CallerRelease},
	"scm.GetBranchProtection":  {CallerRelease},
	"scm.OpenPullRequest":      {CallerRelease},
	"scm.UpdatePullRequest":    {CallerRelease},
	"scm.CommentOnPullRequest": {CallerRelease},
	"scm.GetPullRequestStatus": {CallerRelease},
	"scm.MergePullRequest":     {CallerRelease},

	"ticketing.GetIssue":        {CallerChange},
	"ticketing.SearchIssues":    {CallerChange},
	"ticketing.CommentOnIssue":  {CallerChange},
	"ticketing.TransitionIssue": {CallerChange},
	"ticketing.LinkIssue":       {CallerChange},

	"ciexecutor.StartOperation":  {CallerRelease},
	"ciexecutor.GetOperation":    {CallerRelease},
	"ciexecutor.CancelOperation": {CallerRelease},
	"ciexecutor.ListArtifacts":   {CallerRelease},
	"ciexecutor.GetLogReference": {CallerRelease},

	"authorexecutor.Capabilities": {CallerExecution},
	"authorexecutor.Execute":      {CallerExecution},
	"authorexecutor.Plan":         {CallerExecution},

	"sandboxprovider.Create":   {CallerSandbox},
	"sandboxprovider.Exec":     {CallerSandbox},
	"sandboxprovider.Wait":     {CallerSandbox},
	"sandboxprovider.Snapshot": {CallerSandbox},
	"sandboxprovider.Destroy":  {CallerSandbox},

	"verifier.Run": {CallerVerification},

	"knowledge.Search":  {CallerKnowledge},
	"knowledge.Fetch":   {CallerKnowledge},
	"knowledge.Resolve": {CallerKnowledge},

	"evidencestore.AppendLocked": {CallerEvidence},
	"evidencestore.GetRecord":    {CallerEvidence},
	"evidencestore.ListRange":    {CallerEvidence},
	"evidencestore.Head":         {CallerEvidence},

	"transparencylog.Append":     {CallerEvidence},
	"transparencylog.Checkpoint": {CallerEvidence},
	"transparencylog.Prove":      {CallerEvidence},
	"transparencylog.Lookup":     {CallerEvidence},
}

// Allowed reports whether context c may call v.
func Allowed(c Caller, v Verb) bool {
	if c == CallerUnknown {
		return false
	}
	for _, allowed := range callers[v.Name()] {
		if c == allowed {
			return true
		}
	}
	return false
}
