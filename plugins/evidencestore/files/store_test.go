package files_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	evidencestorev1 "github.com/numinance/numinance/gen/numinance/ports/evidencestore/v1"
	"github.com/numinance/numinance/plugins/evidencestore/files"
)

// childEnv makes the test binary a writer that a test kills or starves.
const childEnv = "NUMINANCE_TEST_STORE_CHILD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		child(dir)
	}
	os.Exit(m.Run())
}

// child appends batches to eight chains until it dies, and says what was
// acknowledged. With a limit in the environment no file may grow beyond it.
func child(dir string) {
	if n, err := strconv.ParseUint(os.Getenv(childEnv+"_LIMIT"), 10, 64); err == nil {
		signal.Ignore(unix.SIGXFSZ)
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: n, Max: n}); err != nil {
			fmt.Println("setrlimit", err)
			os.Exit(1)
		}
	}
	store, err := files.Open(dir)
	if err != nil {
		fmt.Println("open", err)
		os.Exit(1)
	}
	srv := files.NewServer(store)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			change := fmt.Sprintf("chg-%d", w)
			head, err := srv.Head(context.Background(), &evidencestorev1.HeadRequest{ChangeId: change})
			if err != nil {
				fmt.Println("error", err)
				return
			}
			next := head.GetLength() + 1
			for {
				n := 1 + rand.IntN(5)
				var records [][]byte
				for i := range n {
					records = append(records, record(change, next+uint64(i)))
				}
				if _, err := srv.AppendLocked(context.Background(), &evidencestorev1.AppendLockedRequest{ChangeId: change, FirstSequence: next, Records: records}); err != nil {
					fmt.Println("error", status.Code(err), err)
					return
				}
				next += uint64(n)
				fmt.Println("ack", change, next-1)
			}
		})
	}
	wg.Wait()
	os.Exit(0)
}

func record(change string, sequence uint64) []byte {
	sum := sha256.Sum256([]byte(fmt.Sprint(change, sequence)))
	return bytes.Repeat(append([]byte("\n\x00{"), sum[:]...), 1+int(sum[0])%40)
}

func open(t testing.TB, dir string) *files.Server {
	t.Helper()
	store, err := files.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	return files.NewServer(store)
}

func appendTo(srv *files.Server, change string, first uint64, records ...string) (*evidencestorev1.AppendLockedResponse, error) {
	raw := make([][]byte, len(records))
	for i, r := range records {
		raw[i] = []byte(r)
	}
	return srv.AppendLocked(context.Background(), &evidencestorev1.AppendLockedRequest{ChangeId: change, FirstSequence: first, Records: raw})
}

func list(t testing.TB, srv *files.Server, change string) []string {
	t.Helper()
	var out []string
	for {
		r, err := srv.ListRange(context.Background(), &evidencestorev1.ListRangeRequest{ChangeId: change, FirstSequence: uint64(len(out) + 1), MaxRecords: 7})
		if err != nil {
			t.Fatal(err)
		}
		if len(r.GetRecords()) == 0 {
			if r.GetLength() != uint64(len(out)) {
				t.Fatalf("list of %s ends at %d, length %d", change, len(out), r.GetLength())
			}
			return out
		}
		for _, b := range r.GetRecords() {
			out = append(out, string(b))
		}
	}
}

// P-195, P-199: write once; the same bytes again are no second record, other
// bytes are refused, and so is a gap.
func TestP195P199AppendIsWriteOnce(t *testing.T) {
	srv := open(t, t.TempDir())
	for _, c := range []struct {
		name    string
		first   uint64
		records []string
		code    codes.Code
		length  uint64
		written uint32
	}{
		{"a gap in an empty chain", 2, []string{"b"}, codes.FailedPrecondition, 0, 0},
		{"the first two", 1, []string{"a", "b"}, codes.OK, 2, 2},
		{"the same again", 1, []string{"a", "b"}, codes.OK, 2, 0},
		{"one of them again", 2, []string{"b"}, codes.OK, 2, 0},
		{"other bytes", 2, []string{"B"}, codes.AlreadyExists, 0, 0},
		{"other bytes before new ones", 2, []string{"B", "c"}, codes.AlreadyExists, 0, 0},
		{"overlap with new ones", 2, []string{"b", "c"}, codes.OK, 3, 1},
		{"a gap", 5, []string{"e"}, codes.FailedPrecondition, 0, 0},
		{"overlap over two segments", 1, []string{"a", "b", "c", "d"}, codes.OK, 4, 1},
		{"other bytes in the second segment", 1, []string{"a", "b", "C"}, codes.AlreadyExists, 0, 0},
		{"no record", 5, nil, codes.InvalidArgument, 0, 0},
		{"an empty record", 5, []string{""}, codes.InvalidArgument, 0, 0},
		{"an empty record behind a good one", 5, []string{"e", ""}, codes.InvalidArgument, 0, 0},
		{"sequence 0", 0, []string{"z"}, codes.InvalidArgument, 0, 0},
		{"a sequence that overflows", 1<<64 - 1, []string{"y", "z"}, codes.InvalidArgument, 0, 0},
		{"a record too large", 5, []string{strings.Repeat("x", 1<<16+1)}, codes.InvalidArgument, 0, 0},
		{"257 records", 5, make([]string, 257), codes.InvalidArgument, 0, 0},
	} {
		r, err := appendTo(srv, "chg-one", c.first, c.records...)
		if status.Code(err) != c.code || r.GetLength() != c.length || r.GetWritten() != c.written {
			t.Errorf("%s: got %v, %v; want %s, length %d, written %d", c.name, r, err, c.code, c.length, c.written)
		}
	}
	if got := strings.Join(list(t, srv, "chg-one"), ""); got != "abcd" {
		t.Errorf("stored %q, want abcd", got)
	}
}

func TestChangeIDsAreNames(t *testing.T) {
	dir := t.TempDir()
	srv := open(t, dir)
	for _, id := range []string{"", ".", "..", "../x", "a/b", "A", "-a", "a\x00b", strings.Repeat("a", 64)} {
		if _, err := appendTo(srv, id, 1, "x"); status.Code(err) != codes.InvalidArgument {
			t.Errorf("append to %q: %v", id, err)
		}
		if _, err := srv.Head(context.Background(), &evidencestorev1.HeadRequest{ChangeId: id}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("head of %q: %v", id, err)
		}
	}
}

// P-196 to P-198, P-204, P-206: opaque bytes come back as they are, in order.
func TestP204P206OpaqueBytesComeBack(t *testing.T) {
	dir := t.TempDir()
	srv := open(t, dir)
	rapid.Check(t, func(t *rapid.T) {
		change := "chg-" + rapid.StringMatching(`[a-z0-9]{12}`).Draw(t, "change")
		batches := rapid.SliceOfN(rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 1, 300), 1, 9), 1, 5).Draw(t, "batches")
		var all [][]byte
		for _, b := range batches {
			r, err := srv.AppendLocked(context.Background(), &evidencestorev1.AppendLockedRequest{ChangeId: change, FirstSequence: uint64(len(all) + 1), Records: b})
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, b...)
			if r.GetLength() != uint64(len(all)) {
				t.Fatalf("length %d, want %d", r.GetLength(), len(all))
			}
		}
		sum := sha256.Sum256(all[len(all)-1])
		head, err := srv.Head(context.Background(), &evidencestorev1.HeadRequest{ChangeId: change})
		if err != nil || head.GetLength() != uint64(len(all)) || head.GetLastDigest() != "sha256:"+hex.EncodeToString(sum[:]) {
			t.Fatalf("head %v, %v", head, err)
		}
		i := rapid.IntRange(1, len(all)).Draw(t, "i")
		got, err := srv.GetRecord(context.Background(), &evidencestorev1.GetRecordRequest{ChangeId: change, Sequence: uint64(i)})
		if err != nil || !bytes.Equal(got.GetRecord(), all[i-1]) {
			t.Fatalf("record %d: %v", i, err)
		}
		listed, err := srv.ListRange(context.Background(), &evidencestorev1.ListRangeRequest{ChangeId: change, FirstSequence: uint64(i), MaxRecords: 256})
		if err != nil || len(listed.GetRecords()) != len(all)-i+1 {
			t.Fatalf("list from %d: %d records, %v", i, len(listed.GetRecords()), err)
		}
		for j, b := range listed.GetRecords() {
			if !bytes.Equal(b, all[i-1+j]) {
				t.Fatalf("record %d differs", i+j)
			}
		}
	})
}

func TestReadsOfWhatIsNotThere(t *testing.T) {
	srv := open(t, t.TempDir())
	if _, err := appendTo(srv, "chg-one", 1, "a"); err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	if r, err := srv.Head(ctx, &evidencestorev1.HeadRequest{ChangeId: "chg-none"}); err != nil || r.GetLength() != 0 || r.GetLastDigest() != "" {
		t.Errorf("head of no chain: %v, %v", r, err)
	}
	for _, sequence := range []uint64{2, 1 << 60} {
		if _, err := srv.GetRecord(ctx, &evidencestorev1.GetRecordRequest{ChangeId: "chg-one", Sequence: sequence}); status.Code(err) != codes.NotFound {
			t.Errorf("record %d: %v", sequence, err)
		}
	}
	if _, err := srv.GetRecord(ctx, &evidencestorev1.GetRecordRequest{ChangeId: "chg-one"}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("record 0: %v", err)
	}
	for _, r := range []*evidencestorev1.ListRangeRequest{
		{ChangeId: "chg-one", FirstSequence: 0, MaxRecords: 1}, {ChangeId: "chg-one", FirstSequence: 1}, {ChangeId: "chg-one", FirstSequence: 1, MaxRecords: 257},
	} {
		if _, err := srv.ListRange(ctx, r); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%v: %v", r, err)
		}
	}
	if r, err := srv.ListRange(ctx, &evidencestorev1.ListRangeRequest{ChangeId: "chg-one", FirstSequence: 9, MaxRecords: 5}); err != nil || len(r.GetRecords()) != 0 || r.GetLength() != 1 {
		t.Errorf("list past the end: %v, %v", r, err)
	}
}

func TestAnswersFitIntoAMessage(t *testing.T) {
	srv := open(t, t.TempDir())
	big := strings.Repeat("x", 1<<16)
	for i := range 2 {
		var batch []string
		for range 32 {
			batch = append(batch, big)
		}
		if _, err := appendTo(srv, "chg-one", uint64(i*32+1), batch...); err != nil {
			t.Fatal(err)
		}
	}
	r, err := srv.ListRange(context.Background(), &evidencestorev1.ListRangeRequest{ChangeId: "chg-one", FirstSequence: 1, MaxRecords: 256})
	if err != nil || len(r.GetRecords()) != 32 || r.GetLength() != 64 {
		t.Errorf("%d records of %d, %v", len(r.GetRecords()), r.GetLength(), err)
	}
	if got := len(list(t, srv, "chg-one")); got != 64 {
		t.Errorf("paging finds %d of 64", got)
	}
}

func TestOneProcessHasTheStore(t *testing.T) {
	dir := t.TempDir()
	open(t, dir)
	if s, err := files.Open(dir); err == nil {
		s.Close()
		t.Error("opened twice")
	}
}

// Two callers race for one sequence: one wins, the other is refused.
func TestRacesForOneSequence(t *testing.T) {
	srv := open(t, t.TempDir())
	for round := range 10 {
		var wg sync.WaitGroup
		got := make([]codes.Code, 8)
		for i := range got {
			wg.Go(func() {
				_, err := appendTo(srv, "chg-one", uint64(round+1), fmt.Sprint("writer ", i))
				got[i] = status.Code(err)
			})
		}
		wg.Wait()
		won := 0
		for _, c := range got {
			switch c {
			case codes.OK:
				won++
			case codes.AlreadyExists:
			default:
				t.Fatalf("unexpected %s", c)
			}
		}
		if won != 1 {
			t.Fatalf("round %d: %d winners", round, won)
		}
	}
}

func TestWhatIsStoredIsNotWhatWasWritten(t *testing.T) {
	for name, damage := range map[string]func(dir string) error{
		"a byte flipped": func(dir string) error {
			return edit(filepath.Join(dir, "00000000000000000001.seg"), func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
		},
		"a segment cut short": func(dir string) error {
			return edit(filepath.Join(dir, "00000000000000000003.seg"), func(b []byte) []byte { return b[:len(b)/2] })
		},
		"a segment emptied": func(dir string) error {
			return edit(filepath.Join(dir, "00000000000000000003.seg"), func([]byte) []byte { return nil })
		},
		"the first segment gone": func(dir string) error { return os.Remove(filepath.Join(dir, "00000000000000000001.seg")) },
		"a middle segment gone":  func(dir string) error { return os.Remove(filepath.Join(dir, "00000000000000000002.seg")) },
		"a file nobody wrote":    func(dir string) error { return os.WriteFile(filepath.Join(dir, "x"), []byte("x"), 0o600) },
		"a segment under another": func(dir string) error {
			return os.Rename(filepath.Join(dir, "00000000000000000003.seg"), filepath.Join(dir, "00000000000000000004.seg"))
		},
	} {
		dir := t.TempDir()
		store, err := files.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		srv := files.NewServer(store)
		for i := range 3 {
			if _, err := appendTo(srv, "chg-one", uint64(i+1), strings.Repeat("record ", 9)); err != nil {
				t.Fatal(err)
			}
		}
		if err := store.Close(); err != nil {
			t.Fatal(err)
		}
		if err := damage(filepath.Join(dir, "chains", "chg-one")); err != nil {
			t.Fatal(err)
		}
		again := open(t, dir)
		_, err = again.ListRange(context.Background(), &evidencestorev1.ListRangeRequest{ChangeId: "chg-one", FirstSequence: 1, MaxRecords: 9})
		if status.Code(err) != codes.DataLoss {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func edit(name string, f func([]byte) []byte) error {
	b, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	if err := os.Chmod(name, 0o600); err != nil {
		return err
	}
	return os.WriteFile(name, f(b), 0o600)
}

func TestFilesAreReadOnlyAndNothingElseIsWritten(t *testing.T) {
	dir := t.TempDir()
	srv := open(t, dir)
	if _, err := appendTo(srv, "chg-one", 1, "a", "b"); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(dir, "chains", "chg-one", "00000000000000000001.seg"))
	if err != nil || info.Mode().Perm() != 0o444 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	left, err := os.ReadDir(filepath.Join(dir, "tmp"))
	if err != nil || len(left) != 0 {
		t.Errorf("temporary files: %v, %v", left, err)
	}
}

// A writer is killed at random moments: whatever it acknowledged is there, no
// sequence has other bytes, and no temporary file is left.
func TestKilledWriterLosesNothing(t *testing.T) {
	dir := t.TempDir()
	acked := map[string]uint64{}
	for range 8 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		wait := 1 + rand.IntN(60)
		for n := 0; lines.Scan(); n++ {
			if n == wait {
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
			var change string
			var sequence uint64
			if _, err := fmt.Sscanf(lines.Text(), "ack %s %d", &change, &sequence); err != nil {
				if n < wait {
					t.Fatalf("writer says %q", lines.Text())
				}
				continue // the last line may be cut
			}
			acked[change] = max(acked[change], sequence)
		}
		_ = cmd.Wait()
		store, err := files.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		srv := files.NewServer(store)
		for change, length := range acked {
			got := list(t, srv, change)
			if uint64(len(got)) < length {
				t.Fatalf("%s: %d records, acknowledged %d", change, len(got), length)
			}
			for i, b := range got {
				if b != string(record(change, uint64(i+1))) {
					t.Fatalf("%s: record %d has other bytes", change, i+1)
				}
			}
		}
		if left, err := os.ReadDir(filepath.Join(dir, "tmp")); err != nil || len(left) != 0 {
			t.Fatalf("temporary files: %v, %v", left, err)
		}
		if err := store.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(acked) == 0 {
		t.Fatal("nothing was acknowledged")
	}
}

// Where no file can grow, an append is an error and nothing is stored.
func TestNoSpaceIsAnErrorAndStoresNothing(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+dir, childEnv+"_LIMIT=10")
	out, err := cmd.Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if n := strings.Count(string(out), "error ResourceExhausted"); n != 8 {
		t.Fatalf("%d of 8 appends say so:\n%s", n, out)
	}
	srv := open(t, dir)
	for w := range 8 {
		if got := list(t, srv, fmt.Sprintf("chg-%d", w)); len(got) != 0 {
			t.Errorf("chain %d has %d records", w, len(got))
		}
		if _, err := appendTo(srv, fmt.Sprintf("chg-%d", w), 1, "later"); err != nil {
			t.Errorf("append when there is space again: %v", err)
		}
	}
}

// A symbolic link out of the store is not followed.
func TestLinksOutOfTheStoreAreNotFollowed(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	srv := open(t, dir)
	if err := os.Symlink(outside, filepath.Join(dir, "chains", "chg-one")); err != nil {
		t.Fatal(err)
	}
	if _, err := appendTo(srv, "chg-one", 1, "a"); err == nil {
		t.Error("wrote through a link")
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) != 0 {
		t.Errorf("outside: %v, %v", left, err)
	}
}
