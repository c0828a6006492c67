package e2e_test

import (
	"bytes"
	"database/sql"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	_ "modernc.org/sqlite" // reads the journal after the last process
)

// defaultKills is how often TestKill kills where NUMI_KILLS does not say.
const defaultKills = 5

// perChange is how many kills one Change sees before it is let finish.
const perChange = 4

const killTicket = "---\ntitle: Finish it\n---\nWrite the file.\n"

const killScript = `steps:
- write: {path: done-%d.txt, content: "x\n"}
- checkpoint: {}
- run: {argv: [sh, -c, "echo y > more-%d.txt"]}
`

// TestKill kills the runtime with SIGKILL at random moments of one Change after
// the other, on one state directory. At the end no effect at the code host lacks
// an earlier durable decision, none is there twice, every Change is released
// with evidence that verifies, and nothing is left behind.
func TestKill(t *testing.T) {
	if testing.Short() {
		t.Skip("builds binaries and runs sandboxes")
	}
	kills := defaultKills
	if v := os.Getenv("NUMI_KILLS"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 0 {
			t.Fatalf("NUMI_KILLS is %q, want a number", v)
		}
		kills = n
	}
	w := build(t)
	home := w.home
	source := filepath.Join(t.TempDir(), "widget")
	if err := os.Mkdir(source, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := makeRepository(source); err != nil {
		t.Fatal(err)
	}
	if out, err := w.numi(home, "change", "list").CombinedOutput(); err != nil {
		t.Fatalf("open the state directory: %v\n%s", err, out)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	dice := rand.New(rand.NewPCG(seed, 0))
	done, changes := 0, 0
	for done < kills {
		changes++
		done += killOne(t, w, source, changes, min(perChange, kills-done), dice)
		t.Logf("%d of %d kills, %d Changes released", done, kills, changes)
	}
	holdAgainstForge(t, home, changes)
	if err := nothingLeft(home); err != nil {
		t.Error(err)
	}
}

// killOne runs one Change that is killed at most n times and then let finish.
// It returns how often it was killed.
func killOne(t *testing.T, w world, source string, nth, n int, dice *rand.Rand) (killed int) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"t.md": killTicket, "s.yaml": fmt.Sprintf(killScript, nth, nth)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	id := ""
	for {
		args := []string{
			"change", "run", "--repo", source, "--ticket", filepath.Join(dir, "t.md"), "--script", filepath.Join(dir, "s.yaml"),
			"--check", fmt.Sprintf("test -f done-%d.txt", nth), "--json",
		}
		if id != "" {
			args = []string{"change", "resume", id, "--json"}
		}
		cmd := w.numi(w.home, args...)
		cmd.Dir = dir
		var out bytes.Buffer
		story := filepath.Join(dir, "story.txt")
		errs, err := os.Create(story)
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stdout, cmd.Stderr = &out, errs
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		timer := time.Duration(1<<62 - 1)
		if killed < n {
			timer = time.Duration(dice.Int64N(int64(7 * time.Second)))
		}
		select {
		case <-time.After(timer):
			_ = syscall.Kill(cmd.Process.Pid, syscall.SIGKILL)
			err = <-ended
		case err = <-ended:
		}
		errs.Close()
		text, rerr := os.ReadFile(story)
		if rerr != nil {
			t.Fatal(rerr)
		}
		if id == "" {
			id = string(idPattern.Find(text))
		}
		if cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled() {
			killed++
			if id != "" && !known(t, w, id) {
				id = "" // killed before it was proposed durably: nothing was promised
			}
			continue
		}
		if err != nil {
			events, _ := w.numi(w.home, "change", "events", id).CombinedOutput()
			t.Fatalf("after %d kills %s: %v\n%s\n%s\n%s", killed, strings.Join(args[:3], " "), err, out.Bytes(), text, events)
		}
		var got struct{ State, Evidence string }
		if err := json.Unmarshal(out.Bytes(), &got); err != nil {
			t.Fatalf("%v in %q", err, out.String())
		}
		if got.State != "Released" || got.Evidence != "verified" {
			t.Fatalf("after %d kills %s is %s and its evidence is %s\n%s", killed, id, got.State, got.Evidence, text)
		}
		if killed < n {
			return killed // it was faster than its killer; the next Change is killed
		}
		if out, err := w.numi(w.home, "evidence", "verify", id).CombinedOutput(); err != nil {
			t.Fatalf("verify %s: %v\n%s", id, err, out)
		}
		return killed
	}
}

// known reports whether the runtime has the Change on record. Asking starts a
// runtime, which goes on with every open Change while it answers.
func known(t *testing.T, w world, id string) bool {
	t.Helper()
	out, err := w.numi(w.home, "change", "show", id).CombinedOutput()
	var exit *exec.ExitError
	if err == nil {
		return true
	}
	if !asExit(err, &exit) || exit.ExitCode() != 2 {
		t.Fatalf("show %s: %v\n%s", id, err, out)
	}
	return false
}

func asExit(err error, to **exec.ExitError) bool {
	e, ok := err.(*exec.ExitError)
	*to = e
	return ok
}

// holdAgainstForge compares the far side with the ledger.
func holdAgainstForge(t *testing.T, home string, changes int) {
	t.Helper()
	got, err := countAtForge(home)
	if err != nil {
		t.Fatal(err)
	}
	if got.pulls != changes || got.merges != changes || got.branches != changes {
		t.Errorf("the forge has %d pull requests, %d merges and %d branches of %d Changes", got.pulls, got.merges, got.branches, changes)
	}
	db, err := sql.Open("sqlite", "file:"+filepath.Join(home, "state", "numi.db")+"?mode=ro")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	effects, err := filepath.Glob(filepath.Join(home, "providers", "scm-git", "effects", "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	if len(effects) < 3*changes {
		t.Errorf("the forge recorded %d effects of %d Changes", len(effects), changes)
	}
	for _, path := range effects {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var e struct{ Key, Target string }
		if err := json.Unmarshal(raw, &e); err != nil {
			t.Fatal(err)
		}
		var decision string
		if err := db.QueryRow(`SELECT decision FROM ledger WHERE key = ?`, e.Key).Scan(&decision); err != nil || decision == "" {
			t.Errorf("effect %s of %s has no durable decision: %v", e.Key, e.Target, err)
		}
	}
	for _, verb := range []string{"scm.CreateBranch", "scm.OpenPullRequest", "scm.MergePullRequest"} {
		var n int
		if err := db.QueryRow(`SELECT count(*) FROM ledger WHERE verb = ? AND state = 'finished' AND status = 'SUCCEEDED'`, verb).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n != changes {
			t.Errorf("%s succeeded %d times in %d Changes", verb, n, changes)
		}
	}
	t.Logf("%d effects, each with its decision; %d pull requests, %d merges", len(effects), got.pulls, got.merges)
}
