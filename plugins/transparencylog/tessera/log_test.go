package tessera_test

import (
	"bufio"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	transparencylogv1 "github.com/numinance/numinance/gen/numinance/ports/transparencylog/v1"
	"github.com/numinance/numinance/plugins/transparencylog/tessera"
)

const origin = "example.org/log"

// host signs like the real one: only a checkpoint of this log that does not
// take it back. Its key is derived from a fixed seed, so that it survives the
// process.
type host struct {
	key  ed25519.PrivateKey
	name string

	mu     sync.Mutex // guards the fields below
	size   uint64
	root   string
	down   bool
	forge  bool
	signed int
}

func newHost() *host {
	return &host{key: ed25519.NewKeyFromSeed([]byte(strings.Repeat("k", ed25519.SeedSize))), name: origin}
}

func (h *host) Sign(_ context.Context, text []byte) (tessera.Signature, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.down {
		return tessera.Signature{}, errors.New("the host is down")
	}
	lines := strings.Split(string(text), "\n")
	if len(lines) != 4 || lines[0] != origin || lines[3] != "" {
		return tessera.Signature{}, fmt.Errorf("not a checkpoint of this log: %q", text)
	}
	size, err := strconv.ParseUint(lines[1], 10, 64)
	if err != nil || size < h.size || size == h.size && h.signed > 0 && lines[2] != h.root {
		return tessera.Signature{}, fmt.Errorf("the log goes back: %q after %d %s", text, h.size, h.root)
	}
	h.size, h.root = size, lines[2]
	h.signed++
	sig := ed25519.Sign(h.key, text)
	if h.forge {
		sig[0] ^= 1
	}
	return tessera.Signature{Signature: sig, PublicKey: h.key.Public().(ed25519.PublicKey), KeyName: h.name}, nil
}

func (h *host) verifier(t testing.TB) note.Verifier {
	t.Helper()
	vkey, err := note.NewEd25519VerifierKey(origin, h.key.Public().(ed25519.PublicKey))
	if err != nil {
		t.Fatal(err)
	}
	v, err := note.NewVerifier(vkey)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func leaf(n uint64) []byte {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64(nil, n))
	kind := byte(0x48)
	if n%3 == 0 {
		kind = 0x41
	}
	return append([]byte{kind}, sum[:]...)
}

func open(t testing.TB, dir string, h *host) (*tessera.Log, *tessera.Server) {
	t.Helper()
	l, err := tessera.Open(context.Background(), tessera.Config{Directory: dir, Origin: origin}, h)
	if err != nil {
		t.Fatal(err)
	}
	return l, tessera.NewServer(l)
}

func closeLog(t testing.TB, l *tessera.Log) {
	t.Helper()
	if err := l.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

// tree opens a checkpoint under the log's key.
func tree(t testing.TB, h *host, raw []byte) tlog.Tree {
	t.Helper()
	n, err := note.Open(raw, note.VerifierList(h.verifier(t)))
	if err != nil {
		t.Fatalf("checkpoint does not verify under the log's key: %v\n%s", err, raw)
	}
	lines := strings.Split(n.Text, "\n")
	size, err := strconv.ParseInt(lines[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	root, err := base64.StdEncoding.DecodeString(lines[2])
	if err != nil {
		t.Fatal(err)
	}
	return tlog.Tree{N: size, Hash: tlog.Hash(root)}
}

func hashes(raw [][]byte) []tlog.Hash {
	out := make([]tlog.Hash, len(raw))
	for i, h := range raw {
		out[i] = tlog.Hash(h)
	}
	return out
}

func add(t testing.TB, h *host, srv *tessera.Server, b []byte) (*transparencylogv1.AppendResponse, tlog.Tree) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r, err := srv.Append(ctx, &transparencylogv1.AppendRequest{Leaf: b})
	if err != nil {
		t.Fatal(err)
	}
	if string(r.GetEntry()) != string(b) {
		t.Fatalf("entry %x, want the leaf %x", r.GetEntry(), b)
	}
	at := tree(t, h, r.GetCheckpoint())
	if r.GetProof().GetTreeSize() != uint64(at.N) || r.GetProof().GetIndex() != r.GetIndex() {
		t.Fatalf("proof %v does not fit the checkpoint of size %d", r.GetProof(), at.N)
	}
	if err := tlog.CheckRecord(hashes(r.GetProof().GetHashes()), at.N, at.Hash, int64(r.GetIndex()), tlog.RecordHash(b)); err != nil {
		t.Fatalf("inclusion of entry %d: %v", r.GetIndex(), err)
	}
	return r, at
}

// P-212: the same leaf twice is one entry with one index, also at once and
// after a restart.
func TestP212AppendIsIdempotent(t *testing.T) {
	dir, h := t.TempDir(), newHost()
	l, srv := open(t, dir, h)
	first, _ := add(t, h, srv, leaf(1))
	again, _ := add(t, h, srv, leaf(1))
	if first.GetIndex() != again.GetIndex() {
		t.Errorf("indexes %d and %d", first.GetIndex(), again.GetIndex())
	}
	var wg sync.WaitGroup
	got := make([]uint64, 16)
	for i := range got {
		wg.Go(func() {
			r, _ := add(t, h, srv, leaf(2))
			got[i] = r.GetIndex()
		})
	}
	wg.Wait()
	for _, i := range got {
		if i != got[0] || i == first.GetIndex() {
			t.Fatalf("indexes %v", got)
		}
	}
	closeLog(t, l)
	l, srv = open(t, dir, h)
	defer closeLog(t, l)
	after, at := add(t, h, srv, leaf(2))
	if after.GetIndex() != got[0] || at.N != 2 {
		t.Errorf("after a restart: index %d, size %d; want %d and 2", after.GetIndex(), at.N, got[0])
	}
}

// P-224, P-225.
func TestP224P225Leaves(t *testing.T) {
	h := newHost()
	l, srv := open(t, t.TempDir(), h)
	defer closeLog(t, l)
	for _, kind := range []byte{0x48, 0x41} {
		b := leaf(9)
		b[0] = kind
		add(t, h, srv, b)
	}
	bad := [][]byte{nil, leaf(1)[:32], append(leaf(1), 0)}
	for _, kind := range []byte{0x00, 0x42, 0xff} {
		b := leaf(1)
		b[0] = kind
		bad = append(bad, b)
	}
	for _, b := range bad {
		if _, err := srv.Append(context.Background(), &transparencylogv1.AppendRequest{Leaf: b}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("append %x: %v", b, err)
		}
		if _, err := srv.Lookup(context.Background(), &transparencylogv1.LookupRequest{Leaf: b}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("lookup %x: %v", b, err)
		}
	}
}

// P-213, P-214, P-215, P-217: checkpoints, proofs for every entry in every
// tree, and lookups.
func TestP214P217ProofsForEveryTree(t *testing.T) {
	ctx, h, dir := context.Background(), newHost(), t.TempDir()
	l, srv := open(t, dir, h)
	trees := map[int64]tlog.Tree{}
	var wg sync.WaitGroup
	var mu sync.Mutex
	const leaves = 40
	index := make([]uint64, leaves)
	for n := range leaves {
		wg.Go(func() {
			r, at := add(t, h, srv, leaf(uint64(n)))
			mu.Lock()
			defer mu.Unlock()
			index[n], trees[at.N] = r.GetIndex(), at
		})
	}
	wg.Wait()
	closeLog(t, l)
	l, srv = open(t, dir, h)
	defer closeLog(t, l)
	cp, err := srv.Checkpoint(ctx, &transparencylogv1.CheckpointRequest{})
	if err != nil {
		t.Fatal(err)
	}
	now := tree(t, h, cp.GetCheckpoint())
	if now.N != leaves {
		t.Fatalf("size %d, want %d", now.N, leaves)
	}
	trees[now.N] = now
	for n := range leaves {
		found, err := srv.Lookup(ctx, &transparencylogv1.LookupRequest{Leaf: leaf(uint64(n))})
		if err != nil || found.GetIndex() != index[n] {
			t.Fatalf("lookup %d: %v, %v; want %d", n, found, err, index[n])
		}
		for _, at := range trees {
			if int64(index[n]) >= at.N {
				continue
			}
			r, err := srv.Prove(ctx, &transparencylogv1.ProveRequest{Proof: &transparencylogv1.ProveRequest_Inclusion{Inclusion: &transparencylogv1.InclusionQuery{Index: index[n], TreeSize: uint64(at.N)}}})
			if err != nil {
				t.Fatal(err)
			}
			if err := tlog.CheckRecord(hashes(r.GetInclusion().GetHashes()), at.N, at.Hash, int64(index[n]), tlog.RecordHash(r.GetEntry())); err != nil {
				t.Fatalf("entry %d at size %d: %v", index[n], at.N, err)
			}
		}
	}
	for _, a := range trees {
		for _, b := range trees {
			if a.N > b.N || a.N == 0 {
				continue
			}
			r, err := srv.Prove(ctx, &transparencylogv1.ProveRequest{Proof: &transparencylogv1.ProveRequest_Consistency{Consistency: &transparencylogv1.ConsistencyQuery{FirstSize: uint64(a.N), SecondSize: uint64(b.N)}}})
			if err != nil {
				t.Fatal(err)
			}
			if err := tlog.CheckTree(hashes(r.GetConsistency().GetHashes()), b.N, b.Hash, a.N, a.Hash); err != nil && a.N != b.N {
				t.Fatalf("size %d to %d: %v", a.N, b.N, err)
			}
		}
	}
	for _, c := range []struct {
		q    *transparencylogv1.ProveRequest
		want codes.Code
	}{
		{&transparencylogv1.ProveRequest{}, codes.InvalidArgument},
		{&transparencylogv1.ProveRequest{Proof: &transparencylogv1.ProveRequest_Inclusion{Inclusion: &transparencylogv1.InclusionQuery{Index: leaves, TreeSize: leaves}}}, codes.NotFound},
		{&transparencylogv1.ProveRequest{Proof: &transparencylogv1.ProveRequest_Inclusion{Inclusion: &transparencylogv1.InclusionQuery{Index: 0, TreeSize: leaves + 1}}}, codes.FailedPrecondition},
		{&transparencylogv1.ProveRequest{Proof: &transparencylogv1.ProveRequest_Consistency{Consistency: &transparencylogv1.ConsistencyQuery{FirstSize: 5, SecondSize: 4}}}, codes.InvalidArgument},
		{&transparencylogv1.ProveRequest{Proof: &transparencylogv1.ProveRequest_Consistency{Consistency: &transparencylogv1.ConsistencyQuery{FirstSize: 5, SecondSize: 1 << 40}}}, codes.FailedPrecondition},
	} {
		if _, err := srv.Prove(ctx, c.q); status.Code(err) != c.want {
			t.Errorf("%v: %v, want %s", c.q, err, c.want)
		}
	}
	if _, err := srv.Lookup(ctx, &transparencylogv1.LookupRequest{Leaf: leaf(99)}); status.Code(err) != codes.NotFound {
		t.Errorf("lookup of no leaf: %v", err)
	}
}

// P-218: the log signs with its own key, through the host, or not at all.
func TestP218HostSigns(t *testing.T) {
	for name, spoil := range map[string]func(*host){
		"the host is down":            func(h *host) { h.down = true },
		"the host forges":             func(h *host) { h.forge = true },
		"the key has another name":    func(h *host) { h.name = "example.org/other" },
		"the host has signed further": func(h *host) { h.size = 5 },
	} {
		h := newHost()
		spoil(h)
		if l, err := tessera.Open(context.Background(), tessera.Config{Directory: t.TempDir(), Origin: origin}, h); err == nil {
			closeLog(t, l)
			t.Errorf("%s: opened", name)
		}
	}
	// While the host is down nothing is acknowledged; afterwards the same
	// append succeeds with the index it had.
	h := newHost()
	l, srv := open(t, t.TempDir(), h)
	defer closeLog(t, l)
	add(t, h, srv, leaf(1))
	h.mu.Lock()
	h.down = true
	h.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if _, err := srv.Append(ctx, &transparencylogv1.AppendRequest{Leaf: leaf(2)}); status.Code(err) != codes.Unavailable {
		t.Errorf("append without a signature: %v", err)
	}
	if _, err := srv.Lookup(context.Background(), &transparencylogv1.LookupRequest{Leaf: leaf(2)}); status.Code(err) != codes.NotFound {
		t.Errorf("lookup of what no checkpoint covers: %v", err)
	}
	h.mu.Lock()
	h.down = false
	h.mu.Unlock()
	if r, _ := add(t, h, srv, leaf(2)); r.GetIndex() != 1 {
		t.Errorf("index %d, want 1", r.GetIndex())
	}
}

func TestOneProcessHasTheLog(t *testing.T) {
	dir, h := t.TempDir(), newHost()
	l, _ := open(t, dir, h)
	defer closeLog(t, l)
	if l, err := tessera.Open(context.Background(), tessera.Config{Directory: dir, Origin: origin}, h); err == nil {
		closeLog(t, l)
		t.Error("opened twice")
	}
}

// A log whose lock was taken away does not write into what comes in its place.
func TestLogWithoutItsLockEnds(t *testing.T) {
	dir, h := t.TempDir(), newHost()
	l, srv := open(t, dir, h)
	add(t, h, srv, leaf(1))
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	time.Sleep(500 * time.Millisecond) // ten times the interval it looks in
	if _, err := srv.Append(context.Background(), &transparencylogv1.AppendRequest{Leaf: leaf(2)}); status.Code(err) != codes.Unavailable {
		t.Errorf("append: %v", err)
	}
	closeLog(t, l)
}

func TestDamagedLogIsNotOpened(t *testing.T) {
	for name, damage := range map[string]func(dir string) error{
		"a checkpoint of another key": func(dir string) error {
			signer, _, err := func() (note.Signer, string, error) {
				skey, vkey, err := note.GenerateKey(nil, origin)
				if err != nil {
					return nil, "", err
				}
				s, err := note.NewSigner(skey)
				return s, vkey, err
			}()
			if err != nil {
				return err
			}
			raw, err := note.Sign(&note.Note{Text: origin + "\n1\n" + base64.StdEncoding.EncodeToString(make([]byte, 32)) + "\n"}, signer)
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, "checkpoint"), raw, 0o600)
		},
		"no tree state but a size": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, ".state", "treeState"), []byte(`{`), 0o600)
		},
		"entries gone": func(dir string) error { return os.RemoveAll(filepath.Join(dir, "tile", "entries")) },
	} {
		dir, h := t.TempDir(), newHost()
		l, srv := open(t, dir, h)
		add(t, h, srv, leaf(1))
		closeLog(t, l)
		if err := damage(dir); err != nil {
			t.Fatal(err)
		}
		if l, err := tessera.Open(context.Background(), tessera.Config{Directory: dir, Origin: origin}, h); err == nil {
			closeLog(t, l)
			t.Errorf("%s: opened", name)
		}
	}
}

const childEnv = "NUMINANCE_TEST_LOG_CHILD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		child(dir)
	}
	os.Exit(m.Run())
}

// child appends until it dies and says what was acknowledged.
func child(dir string) {
	l, err := tessera.Open(context.Background(), tessera.Config{Directory: dir, Origin: origin}, newHost())
	if err != nil {
		fmt.Println("open", err)
		os.Exit(1)
	}
	srv := tessera.NewServer(l)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for {
				n := rand.Uint64N(500)
				r, err := srv.Append(context.Background(), &transparencylogv1.AppendRequest{Leaf: leaf(n)})
				if err != nil {
					fmt.Println("error", err)
					return
				}
				fmt.Println("ack", n, r.GetIndex(), base64.StdEncoding.EncodeToString(r.GetCheckpoint()))
			}
		})
	}
	wg.Wait()
	os.Exit(1)
}

// A log is killed at random moments: what it acknowledged keeps its index, no
// leaf is there twice, every checkpoint extends the ones before.
func TestKilledLogLosesNothing(t *testing.T) {
	dir, h := t.TempDir(), newHost()
	acked := map[uint64]uint64{}
	var seen []tlog.Tree
	for range 6 {
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
			var number, index uint64
			var cp string
			if _, err := fmt.Sscanf(lines.Text(), "ack %d %d %s", &number, &index, &cp); err != nil {
				if n < wait {
					t.Fatalf("the log says %q", lines.Text())
				}
				continue
			}
			if old, ok := acked[number]; ok && old != index {
				t.Fatalf("leaf %d moved from %d to %d", number, old, index)
			}
			raw, err := base64.StdEncoding.DecodeString(cp)
			if err != nil {
				continue // the last line may be cut
			}
			acked[number] = index
			seen = append(seen, tree(t, h, raw))
		}
		_ = cmd.Wait()
	}
	l, srv := open(t, dir, h)
	defer closeLog(t, l)
	_, now := add(t, h, srv, leaf(1<<40))
	byIndex := map[uint64]uint64{}
	for number, index := range acked {
		found, err := srv.Lookup(context.Background(), &transparencylogv1.LookupRequest{Leaf: leaf(number)})
		if err != nil || found.GetIndex() != index {
			t.Fatalf("leaf %d: %v, %v; acknowledged at %d", number, found, err, index)
		}
		if other, ok := byIndex[index]; ok {
			t.Fatalf("leaves %d and %d both at %d", number, other, index)
		}
		byIndex[index] = number
	}
	for _, old := range seen {
		if old.N == now.N {
			continue
		}
		r, err := srv.Prove(context.Background(), &transparencylogv1.ProveRequest{Proof: &transparencylogv1.ProveRequest_Consistency{Consistency: &transparencylogv1.ConsistencyQuery{FirstSize: uint64(old.N), SecondSize: uint64(now.N)}}})
		if err != nil {
			t.Fatal(err)
		}
		if err := tlog.CheckTree(hashes(r.GetConsistency().GetHashes()), now.N, now.Hash, old.N, old.Hash); err != nil {
			t.Fatalf("size %d to %d: %v", old.N, now.N, err)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".state", "treeState?*")); len(left) > 0 {
		for _, name := range left {
			if !strings.HasSuffix(name, ".lock") {
				t.Errorf("temporary file %s", name)
			}
		}
	}
	if len(acked) == 0 {
		t.Fatal("nothing was acknowledged")
	}
}
