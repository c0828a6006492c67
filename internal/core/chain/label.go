package chain

import (
	"errors"
	"fmt"
)

// Label names one way in which evidence fails to verify. Labels are part of
// the evidence format: tools and people branch on them, so a label is never
// renamed or given a second meaning.
type Label string

// The labels of chains, heads, logs and bundles.
const (
	// NotCanonical: the bytes are not the RFC 8785 form of one JSON object
	// (white space, key order, duplicate keys, floats, integers beyond 2^53).
	NotCanonical Label = "not_canonical"
	// MalformedRecord: canonical, but a member is missing, unknown or ill-formed.
	MalformedRecord Label = "malformed_record"
	// WrongChange: the record or head belongs to another Change.
	WrongChange Label = "wrong_change"
	// ReceiptChainGap: the sequence jumps ahead, so records are missing.
	ReceiptChainGap Label = "receipt_chain_gap"
	// SequenceRepeated: the sequence stands still or goes back.
	SequenceRepeated Label = "sequence_repeated"
	// Fork: two different records or heads claim the same place.
	Fork Label = "fork"
	// BindingFailed: the record does not name the digest of the record before
	// it, so one of the two was changed.
	BindingFailed Label = "binding_failed"
	// RecordAfterTerminal: something follows the terminal record.
	RecordAfterTerminal Label = "record_after_terminal"
	// TerminalLength: the terminal record states another length than its own place.
	TerminalLength Label = "terminal_length"
	// TerminalMissing: a closed chain was required and no terminal record ends it.
	TerminalMissing Label = "terminal_missing"
	// TailTruncated: a signed head covers more records than there are.
	TailTruncated Label = "tail_truncated"
	// ChainMissing: there is no record at all.
	ChainMissing Label = "chain_missing"
	// HeadMissing: no signed head covers the last record.
	HeadMissing Label = "head_missing"
	// HeadMalformed: a signed head is not a well-formed head statement.
	HeadMalformed Label = "head_malformed"
	// HeadMismatch: a trusted key signed another history than the one shown.
	HeadMismatch Label = "head_mismatch"
	// VerifierKeyUntrusted: no trusted key signed it.
	VerifierKeyUntrusted Label = "verifier_key_untrusted"
	// SignatureInvalid: it names a trusted key, whose signature does not verify.
	SignatureInvalid Label = "signature_invalid"
	// LeafMalformed: a log entry is not 33 bytes with a known kind byte.
	LeafMalformed Label = "leaf_malformed"
	// LeafMismatch: the log entry is well formed but names something else.
	LeafMismatch Label = "leaf_mismatch"
	// AnchorMissing: the last head has no entry in the log.
	AnchorMissing Label = "anchor_missing"
	// AnchorLate: no head was in the log by the time of a checkpoint that the
	// Change itself left elsewhere.
	AnchorLate Label = "anchor_late"
	// LogForeign: the checkpoint is not one of a trusted log.
	LogForeign Label = "log_foreign"
	// CheckpointMalformed: the checkpoint has not the C2SP form.
	CheckpointMalformed Label = "checkpoint_malformed"
	// CheckpointRollback: the checkpoint is older than one already known, and
	// nothing shows that the newer tree contains it.
	CheckpointRollback Label = "checkpoint_rollback"
	// CheckpointInconsistent: two checkpoints of one log contradict each other.
	CheckpointInconsistent Label = "checkpoint_inconsistent"
	// ConsistencyMissing: a newer checkpoint comes without the proof that it
	// extends the one already known.
	ConsistencyMissing Label = "consistency_missing"
	// InclusionFailed: the inclusion proof does not lead to the checkpoint's root.
	InclusionFailed Label = "inclusion_failed"
	// WitnessMissing: fewer trusted witnesses signed the checkpoint than demanded.
	WitnessMissing Label = "witness_missing"
	// BundleMalformed: a file of the bundle is absent or cannot be read.
	BundleMalformed Label = "bundle_malformed"
)

// Failure is evidence that does not verify, with its label. It is the only
// error type verification returns for bad evidence; any other error means that
// verification could not be carried out.
type Failure struct {
	Label Label
	// Sequence is the place in the chain, 0 when the failure is not at a record.
	Sequence uint64
	Detail   string
}

// Error says the label, the place and what was found.
func (f *Failure) Error() string {
	if f.Sequence > 0 {
		return fmt.Sprintf("%s at record %d: %s", f.Label, f.Sequence, f.Detail)
	}
	return fmt.Sprintf("%s: %s", f.Label, f.Detail)
}

// Fail returns a failure that is not at one record.
func Fail(l Label, format string, args ...any) error {
	return &Failure{Label: l, Detail: fmt.Sprintf(format, args...)}
}

// FailAt returns a failure at the record with the given sequence.
func FailAt(l Label, sequence uint64, format string, args ...any) error {
	return &Failure{Label: l, Sequence: sequence, Detail: fmt.Sprintf(format, args...)}
}

// LabelOf returns the label of err, "" if err is nil or no failure of evidence.
func LabelOf(err error) Label {
	var f *Failure
	if errors.As(err, &f) {
		return f.Label
	}
	return ""
}

// Labels returns every label there is.
func Labels() []Label {
	return []Label{
		NotCanonical,
		MalformedRecord,
		WrongChange,
		ReceiptChainGap,
		SequenceRepeated,
		Fork,
		BindingFailed,
		RecordAfterTerminal,
		TerminalLength,
		TerminalMissing,
		TailTruncated,
		ChainMissing,
		HeadMissing,
		HeadMalformed,
		HeadMismatch,
		VerifierKeyUntrusted,
		SignatureInvalid,
		LeafMalformed,
		LeafMismatch,
		AnchorMissing,
		AnchorLate,
		LogForeign,
		CheckpointMalformed,
		CheckpointRollback,
		CheckpointInconsistent,
		ConsistencyMissing,
		InclusionFailed,
		WitnessMissing,
		BundleMalformed,
	}
}
