package journal

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
)

// The spill file is written in full when it is made, so that a full disk can
// still take a denial: one header slot, one slot that counts what no longer
// fitted, then the denials. A slot belongs to a generation; draining a
// generation into the database makes its slots void without touching the file.
const (
	slotSize   = 8 << 10
	slotHead   = 8 + 4 + 4 // generation, length, checksum
	spillSlots = 512
	spillMagic = "numinance spill 1\n"
)

// SpillKind is the kind of the entry that reports what a drained spill file
// held: denials drained, damaged slots, denials that found no slot, and
// denials whose body was cut to its digest.
const SpillKind = "JOURNAL_SPILL"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type spill struct {
	mu         sync.Mutex // guards what follows
	f          *os.File
	generation uint64
	next       int    // index of the next free slot
	overflow   uint64 // denials of this generation that found no slot

	draining sync.Mutex
}

// openSpill opens the file and makes it first if it is absent.
func openSpill(path string) (*spill, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		if err := makeSpill(path); err != nil {
			return nil, fmt.Errorf("make the spill file: %w", err)
		}
		f, err = os.OpenFile(path, os.O_RDWR, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("open the spill file: %w", err)
	}
	head := make([]byte, len(spillMagic))
	if _, err := f.ReadAt(head, 0); err != nil || string(head) != spillMagic {
		return nil, errors.Join(fmt.Errorf("spill file %s is damaged: keep it for an auditor under another name and start again", path), err, f.Close())
	}
	return &spill{f: f}, nil
}

func makeSpill(path string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".spill-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	slot := make([]byte, slotSize)
	copy(slot, spillMagic)
	for range spillSlots + 2 {
		if _, err := f.Write(slot); err != nil {
			return errors.Join(err, f.Close())
		}
		clear(slot)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

func (s *spill) close() error { return s.f.Close() }

func (s *spill) writeSlot(index int, payload []byte) error {
	slot := make([]byte, slotHead, slotHead+len(payload))
	binary.BigEndian.PutUint64(slot, s.generation)
	binary.BigEndian.PutUint32(slot[8:], uint32(len(payload)))
	slot = append(slot, payload...)
	binary.BigEndian.PutUint32(slot[12:], checksum(slot))
	if _, err := s.f.WriteAt(slot, int64(index)*slotSize); err != nil {
		return err
	}
	return s.f.Sync()
}

// checksum is taken over the whole slot but the checksum itself.
func checksum(slot []byte) uint32 {
	return crc32.Update(crc32.Checksum(slot[:12], castagnoli), castagnoli, slot[slotHead:])
}

// readSlot returns the payload and generation; generation 0 means never used,
// ok false means damaged.
func (s *spill) readSlot(index int) (generation uint64, payload []byte, ok bool, err error) {
	slot := make([]byte, slotSize)
	if _, err := s.f.ReadAt(slot, int64(index)*slotSize); err != nil && err != io.EOF {
		return 0, nil, false, err
	}
	generation = binary.BigEndian.Uint64(slot)
	n := binary.BigEndian.Uint32(slot[8:])
	if generation == 0 && n == 0 {
		return 0, nil, true, nil
	}
	if n > slotSize-slotHead {
		return generation, nil, false, nil
	}
	slot = slot[:slotHead+n]
	ok = checksum(slot) == binary.BigEndian.Uint32(slot[12:])
	return generation, slot[slotHead:], ok, nil
}

// spilled is an entry in a slot. Times are unix nanoseconds.
type spilled struct {
	At      int64             `json:"at"`
	Change  identity.ChangeID `json:"change"`
	Kind    string            `json:"kind"`
	Action  identity.ActionID `json:"action"`
	Key     string            `json:"key"`
	Request digest.Digest     `json:"request"`
	Body    []byte            `json:"body"`
	Cut     bool              `json:"cut"`
}

func encodeSpilled(e Entry) ([]byte, error) {
	s := spilled{At: e.At.UnixNano(), Change: e.Change, Kind: e.Kind, Action: e.Action, Key: e.Key, Request: e.Request, Body: e.Body}
	b, err := json.Marshal(s)
	if err != nil || len(b) <= slotSize-slotHead {
		return b, err
	}
	s.Cut = true
	s.Body, err = digest.Canonical(map[string]any{
		"cut": true, "body_digest": string(digest.Of(e.Body)), "body_bytes": strconv.Itoa(len(e.Body)),
	})
	if err != nil {
		return nil, err
	}
	return json.Marshal(s)
}

// put stores one entry, or counts it if every slot is taken.
func (s *spill) put(e Entry) error {
	payload, err := encodeSpilled(e)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next < spillSlots && len(payload) <= slotSize-slotHead {
		if err := s.writeSlot(2+s.next, payload); err != nil {
			return err
		}
		s.next++
		return nil
	}
	var count [8]byte
	binary.BigEndian.PutUint64(count[:], s.overflow+1)
	if err := s.writeSlot(1, count[:]); err != nil {
		return err
	}
	s.overflow++
	return nil
}

func (s *spill) empty() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.next == 0 && s.overflow == 0
}

// Deny records a denial to a run, which must be possible even when nothing else is: in
// the journal, or, when that cannot be written, in the spill file, from which
// it gets into the journal later. spilled tells which. A fenced journal records
// nothing and returns ErrFenced.
func (j *Journal) Deny(ctx context.Context, run identity.RunID, entries ...Entry) (spilled bool, err error) {
	w := &Write{Entries: entries}
	if run != "" {
		w.Run = &RunFact{Run: run, Denials: 1}
	}
	_, err = j.write(context.WithoutCancel(ctx), w)
	if !errors.Is(err, ErrUnavailable) || errors.Is(err, ErrFenced) {
		return false, err
	}
	for _, e := range entries {
		if spillErr := j.spill.put(e); spillErr != nil {
			return false, errors.Join(err, fmt.Errorf("spill the denial: %w", spillErr))
		}
	}
	return true, nil
}

// drainSpill moves what the spill file holds into the journal, with one entry
// that reports it, in one commit that also voids the file's generation.
func (j *Journal) drainSpill(ctx context.Context) error {
	if !j.spill.draining.TryLock() {
		return nil
	}
	defer j.spill.draining.Unlock()
	var drained int64
	if err := j.db.QueryRowContext(ctx, `SELECT coalesce(max(generation), 0) FROM spill_drained`).Scan(&drained); err != nil {
		return fmt.Errorf("drain the spill file: %w", err)
	}
	s := j.spill
	// Held to the end, so that no denial lands in a generation being voided.
	s.mu.Lock()
	defer s.mu.Unlock()
	newest := uint64(drained)
	var entries []Entry
	var damaged []int
	var cut int
	var overflow uint64
	for i := 1; i < spillSlots+2; i++ {
		generation, payload, ok, err := s.readSlot(i)
		if err != nil {
			return fmt.Errorf("drain the spill file: %w", err)
		}
		if ok && generation <= uint64(drained) {
			continue
		}
		if !ok {
			// A torn write; its generation cannot be trusted either.
			if s.generation == 0 || generation == s.generation {
				damaged = append(damaged, i)
			}
			continue
		}
		newest = max(newest, generation)
		if i == 1 {
			if len(payload) == 8 {
				overflow = binary.BigEndian.Uint64(payload)
			}
			continue
		}
		var e spilled
		dec := json.NewDecoder(bytes.NewReader(payload))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&e); err != nil {
			damaged = append(damaged, i)
			continue
		}
		if e.Cut {
			cut++
		}
		entries = append(entries, Entry{At: time.Unix(0, e.At).UTC(), Change: e.Change, Kind: e.Kind, Action: e.Action, Key: e.Key, Request: e.Request, Body: e.Body})
	}
	if len(entries) == 0 && overflow == 0 && len(damaged) == 0 {
		s.generation, s.next, s.overflow = newest+1, 0, 0
		return nil
	}
	newest = max(newest, uint64(drained)+1)
	report, err := digest.Canonical(map[string]any{
		"drained": len(entries), "damaged": len(damaged), "cut": cut, "overflow": strconv.FormatUint(overflow, 10),
	})
	if err != nil {
		return fmt.Errorf("drain the spill file: %w", err)
	}
	entries = append(entries, Entry{Change: identity.SystemChange, Kind: SpillKind, Body: report})
	if _, err := j.write(ctx, &Write{Entries: entries, drained: int64(newest)}); err != nil {
		return fmt.Errorf("drain the spill file: %w", err)
	}
	// A damaged slot would be reported at every start: void it by name.
	s.generation = newest
	for _, i := range damaged {
		if err := s.writeSlot(i, nil); err != nil {
			return fmt.Errorf("drain the spill file: %w", err)
		}
	}
	s.generation, s.next, s.overflow = newest+1, 0, 0
	return nil
}
