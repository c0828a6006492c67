// Package verification is the named context that has a candidate checked: it
// runs one layer of checks by a verifier, in a fresh sandbox that holds exactly
// the candidate's tree and reaches nothing, and turns the receipt into a
// verdict. Orchestration calls it; it alone calls the verifier port, for a
// reviewer-agent that is no author of the Change (P-162..P-166).
//
// The verdict is a pure function of the VerifierReport; raw findings are for
// people and settle nothing (P-176).
package verification
