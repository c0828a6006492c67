package chain_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/numinance/numinance/internal/core/chain"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/identity"
)

var epoch = time.Date(2026, 11, 30, 12, 0, 0, 5, time.UTC)

// build returns n records of change, closed if asked.
func build(t interface{ Fatal(...any) }, change identity.ChangeID, n int, closed bool) ([][]byte, chain.Head) {
	h := chain.Start(change)
	var out [][]byte
	for i := range n {
		b, next, err := chain.Append(h, chain.Entry{
			At: epoch.Add(time.Duration(i) * time.Second), Kind: "action.finished",
			Body: json.RawMessage(fmt.Sprintf(`{"journal_seq":"%d","verb":"scm.GetRepository"}`, i+1)),
		})
		if err != nil {
			t.Fatal(err)
		}
		out, h = append(out, b), next
	}
	if closed {
		b, next, err := chain.Close(h, epoch.Add(time.Hour), map[string]any{"journal_through": "99"})
		if err != nil {
			t.Fatal(err)
		}
		out, h = append(out, b), next
	}
	return out, h
}

func TestVerifySaysHowFarAChainGoes(t *testing.T) {
	open, _ := build(t, "chg-one", 3, false)
	r, err := chain.Verify("chg-one", open)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := r.String(), "open through 3"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	closed, head := build(t, "chg-one", 3, true)
	r, err = chain.Verify("chg-one", closed)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := r.String(), "closed 4"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if r.Head != head {
		t.Errorf("head %v, want %v", r.Head, head)
	}
}

// P-205: a record is its canonical form, keyed by change id and sequence.
func TestP205RecordIsKeyedByChangeAndSequence(t *testing.T) {
	a, _ := build(t, "chg-a", 2, false)
	b, _ := build(t, "chg-b", 2, false)
	if string(a[1]) == string(b[1]) {
		t.Error("the same sequence in two Changes gave one record")
	}
	r, err := chain.Parse(a[1])
	if err != nil {
		t.Fatal(err)
	}
	if r.Change != "chg-a" || r.Sequence != 2 || r.Previous != digest.Of(a[0]) {
		t.Errorf("got %s/%d after %s", r.Change, r.Sequence, r.Previous)
	}
	if err := digest.CheckCanonical(a[1]); err != nil {
		t.Errorf("record is not canonical: %v", err)
	}
}

func TestNothingFollowsTheTerminalRecord(t *testing.T) {
	_, h := build(t, "chg-one", 1, true)
	if _, _, err := chain.Append(h, chain.Entry{At: epoch, Kind: "x", Body: json.RawMessage(`{}`)}); !errors.Is(err, chain.ErrClosed) {
		t.Errorf("append after the end: %v", err)
	}
	if _, _, err := chain.Close(h, epoch, nil); !errors.Is(err, chain.ErrClosed) {
		t.Errorf("close after the end: %v", err)
	}
}

func TestAppendRefuses(t *testing.T) {
	h := chain.Start("chg-one")
	for name, e := range map[string]chain.Entry{
		"the terminal kind":      {At: epoch, Kind: chain.TerminalKind, Body: json.RawMessage(`{"length":"1"}`)},
		"a kind with a blank":    {At: epoch, Kind: "a b", Body: json.RawMessage(`{}`)},
		"no body":                {At: epoch, Kind: "a"},
		"a list as body":         {At: epoch, Kind: "a", Body: json.RawMessage(`[]`)},
		"a float":                {At: epoch, Kind: "a", Body: json.RawMessage(`{"x":1.5}`)},
		"an integer beyond 2^53": {At: epoch, Kind: "a", Body: json.RawMessage(`{"x":9007199254740993}`)},
		"a duplicate member":     {At: epoch, Kind: "a", Body: json.RawMessage(`{"x":1,"x":2}`)},
		"invalid UTF-8":          {At: epoch, Kind: "a", Body: json.RawMessage("{\"x\":\"\xff\"}")},
		"a lone surrogate":       {At: epoch, Kind: "a", Body: json.RawMessage(`{"x":"\ud800"}`)},
		"no time":                {Kind: "a", Body: json.RawMessage(`{}`)},
		"too large a body":       {At: epoch, Kind: "a", Body: json.RawMessage(`{"x":"` + strings.Repeat("y", chain.MaxRecord) + `"}`)},
		"a bottomless body":      {At: epoch, Kind: "a", Body: json.RawMessage(strings.Repeat(`{"x":`, 5000) + `1` + strings.Repeat(`}`, 5000))},
	} {
		if b, _, err := chain.Append(h, e); err == nil {
			t.Errorf("%s: accepted as %.100s", name, b)
		}
	}
	if _, _, err := chain.Append(chain.Start("Not An Id"), chain.Entry{At: epoch, Kind: "a", Body: json.RawMessage(`{}`)}); err == nil {
		t.Error("a malformed change id: accepted")
	}
	if _, _, err := chain.Close(h, epoch, nil); err == nil {
		t.Error("closing an empty chain: accepted")
	}
}

// Any single edit of any record, any loss but of the tail, any change of order
// is found.
func TestEveryTamperingOfRecordsIsFound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 8).Draw(t, "n")
		records, head := build(t, "chg-one", n, rapid.Bool().Draw(t, "closed"))
		i := rapid.IntRange(0, len(records)-1).Draw(t, "i")
		switch rapid.SampledFrom([]string{"flip", "delete", "swap", "repeat"}).Draw(t, "how") {
		case "flip":
			b := []byte(string(records[i]))
			at := rapid.IntRange(0, len(b)-1).Draw(t, "at")
			b[at] ^= byte(rapid.IntRange(1, 255).Draw(t, "bits"))
			records[i] = b
		case "delete":
			if i == len(records)-1 {
				return // the tail is what signed heads are for
			}
			records = append(records[:i:i], records[i+1:]...)
		case "swap":
			j := (i + 1) % len(records)
			records[i], records[j] = records[j], records[i]
		case "repeat":
			records = append(records[:i+1:i+1], records[i:]...)
		}
		r, err := chain.Verify("chg-one", records)
		if err == nil && r.Head == head {
			t.Fatal("tampered records lead to the same head")
		}
		if err != nil && chain.LabelOf(err) == "" {
			t.Fatalf("no label: %v", err)
		}
		if err == nil && i != len(records)-1 {
			t.Fatalf("tampering with record %d of %d verifies", i+1, len(records))
		}
	})
}

func TestResumeContinuesAChain(t *testing.T) {
	records, head := build(t, "chg-one", 4, false)
	h, r, err := chain.Resume(records[3])
	if err != nil {
		t.Fatal(err)
	}
	if h != head || r.Sequence != 4 {
		t.Errorf("got %v at %d, want %v", h, r.Sequence, head)
	}
}

func FuzzParse(f *testing.F) {
	records, _ := build(f, "chg-one", 2, true)
	for _, b := range records {
		f.Add(b)
	}
	f.Add([]byte(`{}`))
	f.Add([]byte(`{"Kind":"x"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := chain.Parse(b)
		if err != nil {
			if chain.LabelOf(err) == "" {
				t.Fatalf("no label: %v", err)
			}
			return
		}
		if digest.CheckCanonical(b) != nil || r.Sequence == 0 || !r.Previous.Valid() {
			t.Fatalf("accepted %q", b)
		}
	})
}
