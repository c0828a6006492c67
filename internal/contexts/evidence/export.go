package evidence

import (
	"archive/zip"
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"slices"

	evidencestorev1 "github.com/numinance/numinance/gen/numinance/ports/evidencestore/v1"
	transparencylogv1 "github.com/numinance/numinance/gen/numinance/ports/transparencylog/v1"
	"github.com/numinance/numinance/internal/core/bundle"
	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/identity"
	"github.com/numinance/numinance/internal/core/tlog"
)

// records yields the stored records of change from first to last. The store may
// answer with fewer than asked for, never with a hole.
func (e *Evidence) records(ctx context.Context, change identity.ChangeID, first, last uint64) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		for first <= last {
			client, calling, cancel, err := e.store(ctx, change)
			if err != nil {
				yield(nil, err)
				return
			}
			r, err := client.ListRange(calling, &evidencestorev1.ListRangeRequest{
				ChangeId: string(change), FirstSequence: first, MaxRecords: uint32(min(page, last-first+1)),
			})
			cancel()
			if err == nil && len(r.GetRecords()) == 0 {
				err = chain.FailAt(chain.TailTruncated, first, "the store of %s ends before record %d", change, last)
			}
			if err != nil {
				yield(nil, fmt.Errorf("list records of %s from %d: %w", change, first, err))
				return
			}
			for _, b := range r.GetRecords() {
				if !yield(b, nil) {
					return
				}
				first++
			}
		}
	}
}

// Records yields the records of change as they are stored, for a person to
// read; nothing is verified.
func (e *Evidence) Records(ctx context.Context, change identity.ChangeID) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		head, err := e.headNow(ctx, change)
		if err != nil {
			yield(nil, err)
			return
		}
		for b, err := range e.records(ctx, change, 1, head.Length) {
			if !yield(b, err) {
				return
			}
		}
	}
}

// Bundle writes the evidence of change as a zip archive that verifies with the
// network off. The head is anchored first if it is not yet; the log must be
// reachable in any case, for the proofs.
// Consistency proofs lead from the checkpoint of every anchored head, and from
// the remembered ones, to the newest.
func (e *Evidence) Bundle(ctx context.Context, change identity.ChangeID, w io.Writer, remembered ...tlog.Checkpoint) error {
	head, anchors, err := e.anchoredHead(ctx, change)
	if err != nil {
		return fmt.Errorf("export %s: %w", change, err)
	}
	client, calling, cancel, err := e.log(ctx, change)
	if err != nil {
		return fmt.Errorf("export %s: %w", change, err)
	}
	defer cancel()
	now, err := client.Checkpoint(calling, &transparencylogv1.CheckpointRequest{})
	if err != nil {
		return fmt.Errorf("export %s: read the log's checkpoint: %w", change, err)
	}
	newest, err := e.openCheckpoint(now.GetCheckpoint())
	if err != nil {
		return fmt.Errorf("export %s: %w", change, err)
	}
	c := bundle.Contents{Change: change, Records: e.records(ctx, change, 1, head.Length), Keys: e.c.Keys}
	older := slices.Clone(remembered)
	seen := map[uint64]bool{}
	for _, a := range anchors {
		// Nothing that was recorded after the head we export, and each once.
		if a.Head.Length > head.Length || seen[a.Head.Length] {
			continue
		}
		seen[a.Head.Length] = true
		h, err := e.prove(calling, client, a, newest, now.GetCheckpoint())
		if err != nil {
			return fmt.Errorf("export %s: %w", change, err)
		}
		c.Heads = append(c.Heads, h)
		older = append(older, a.Parsed)
	}
	if c.Consistency, err = e.proveAll(calling, client, older, newest); err != nil {
		return fmt.Errorf("export %s: %w", change, err)
	}
	return bundle.Write(w, c)
}

// anchoredHead returns the head of change and the anchors recorded for it, the
// last of which covers the head. What is anchored already is not anchored again,
// so that looking at a Change leaves no record.
func (e *Evidence) anchoredHead(ctx context.Context, change identity.ChangeID) (chain.Head, []Anchored, error) {
	head, err := e.headNow(ctx, change)
	if err != nil {
		return chain.Head{}, nil, err
	}
	anchors, err := e.anchors(ctx, change)
	if err != nil {
		return chain.Head{}, nil, err
	}
	for _, a := range anchors {
		if a.Head.Length == head.Length && a.Head.Digest == head.Digest {
			return head, anchors, nil
		}
	}
	last, err := e.Anchor(ctx, change)
	if err != nil {
		return chain.Head{}, nil, err
	}
	anchors, err = e.anchors(ctx, change)
	return last.Head, anchors, err
}

// prove returns the anchored head with its proof in the newest tree.
func (e *Evidence) prove(ctx context.Context, client transparencylogv1.TransparencyLogServiceClient, a Anchored, newest tlog.Checkpoint, raw []byte) (bundle.Head, error) {
	leaf, err := tlog.HeadLeaf(a.Head.Digest)
	if err != nil {
		return bundle.Head{}, err
	}
	r, err := client.Prove(ctx, &transparencylogv1.ProveRequest{Proof: &transparencylogv1.ProveRequest_Inclusion{
		Inclusion: &transparencylogv1.InclusionQuery{Index: uint64(a.Index), TreeSize: uint64(newest.Size)},
	}})
	if err != nil {
		return bundle.Head{}, fmt.Errorf("prove entry %d: %w", a.Index, err)
	}
	if _, err := e.checkInclusion(raw, leaf, r.GetEntry(), r.GetInclusion()); err != nil {
		return bundle.Head{}, err
	}
	if got := r.GetInclusion().GetIndex(); got != uint64(a.Index) {
		return bundle.Head{}, chain.Fail(chain.InclusionFailed, "asked for entry %d, proved is %d", a.Index, got)
	}
	proof, err := tlog.Hashes(r.GetInclusion().GetHashes())
	if err != nil {
		return bundle.Head{}, err
	}
	return bundle.Head{Signed: a.Signed, Anchor: &bundle.Anchor{Entry: r.GetEntry(), Index: a.Index, Proof: proof, Checkpoint: raw}}, nil
}

// proveAll returns the proofs that the newest tree extends each of the older.
func (e *Evidence) proveAll(ctx context.Context, client transparencylogv1.TransparencyLogServiceClient, older []tlog.Checkpoint, newest tlog.Checkpoint) ([]bundle.Consistency, error) {
	var out []bundle.Consistency
	seen := map[int64]bool{}
	for _, c := range older {
		if seen[c.Size] {
			continue
		}
		seen[c.Size] = true
		proof, err := e.consistency(ctx, client, c, newest)
		if err != nil {
			return nil, err
		}
		if len(proof) > 0 {
			out = append(out, bundle.Consistency{First: c.Size, Second: newest.Size, Proof: proof})
		}
	}
	return out, nil
}

// Verify exports the evidence of change and verifies it as an outsider would,
// with the keys of this deployment.
func (e *Evidence) Verify(ctx context.Context, change identity.ChangeID, o bundle.Options) (bundle.Report, error) {
	var b bytes.Buffer
	if err := e.Bundle(ctx, change, &b, slices.Concat(o.Remembered, o.Trailers)...); err != nil {
		return bundle.Report{}, err
	}
	files, err := zip.NewReader(bytes.NewReader(b.Bytes()), int64(b.Len()))
	if err != nil {
		return bundle.Report{}, fmt.Errorf("verify %s: %w", change, err)
	}
	o.Change = change
	return bundle.Verify(files, e.c.Keys, o)
}
