package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
)

// Spec says what of this host goes into an image. Whatever it names is packed
// by content: the image never refers back to the host.
type Spec struct {
	Store    string       // directory of the images
	Go       bool         // the Go toolchain; an error if the host has none
	Node     bool         // Node.js, if the host has it
	Python   bool         // Python 3 with its standard library, if the host has it
	Programs []string     // further programs by name; an error if the host lacks one
	Progress func(string) // told what is being done, in plain words; may be nil
}

// required is what agents, verifiers and git itself cannot do without; optional
// programs are taken where the host has them.
var (
	required = []string{
		"sh", "git", "sed", "grep", "awk", "find", "tar", "diff", "env",
		"basename", "cat", "chmod", "cp", "cut", "date", "dirname", "echo", "expr", "false", "head", "id", "install",
		"ln", "ls", "mkdir", "mktemp", "mv", "printf", "pwd", "readlink", "rm", "rmdir", "sha256sum", "sleep", "sort",
		"stat", "tail", "tee", "test", "touch", "tr", "true", "uname", "uniq", "wc", "xargs",
	}
	optional = []string{
		"bash", "busybox", "cmp", "comm", "curl", "df", "du", "fmt", "fold", "gunzip", "gzip", "hostname", "jq", "kill", "less",
		"make", "nl", "nohup", "od", "paste", "patch", "ps", "realpath", "rg", "seq", "split", "sync", "tac", "timeout",
		"truncate", "unzip", "which", "whoami", "xz", "yes", "zip", "[",
	}
)

const passwd = `root:x:0:0:root:/root:/bin/sh
agent:x:1000:1000:agent:/home/agent:/bin/sh
candidate:x:1001:1001:candidate:/home/candidate:/bin/sh
adapter:x:10001:10001:adapter:/home/adapter:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/false
`

const group = `root:x:0:
agent:x:1000:
candidate:x:1001:
adapter:x:10001:
nogroup:x:65534:
`

// gitconfig lets git work in a tree whose root belongs to another uid, which
// is how path scope is held inside, and keeps it from asking questions.
const gitconfig = `[safe]
	directory = *
[user]
	name = agent
	email = agent@sandbox.invalid
[init]
	defaultBranch = main
[advice]
	detachedHead = false
[core]
	pager = cat
`

func (s Spec) collect(ctx context.Context, say func(string)) (*collector, error) {
	c := newCollector(say)
	for name, text := range map[string]string{
		"etc/passwd": passwd, "etc/group": group, "etc/gitconfig": gitconfig,
		"etc/hosts":         "127.0.0.1 localhost\n::1 localhost\n",
		"etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
		"etc/os-release":    "ID=numinance\nPRETTY_NAME=\"Numinance sandbox, packed from the runner's host\"\n",
	} {
		c.entries[name] = entry{content: []byte(text)}
	}
	// Mount points and homes; their owners are set by the tree each run brings.
	for _, d := range []string{"workspace", "home/agent", "home/candidate", "home/adapter", "root", "tmp", "run/numi", "run/numi-plugin", "opt/numi/init", "opt/numi/bin", "opt/numi/goproxy", "opt/numi/prepared", "proc", "dev", "sys", "var/tmp"} {
		c.entries[d] = entry{dir: true}
	}

	say("collecting programs")
	for _, p := range append(append([]string{}, required...), s.Programs...) {
		found, err := c.program(p)
		if err != nil {
			return nil, err
		}
		if !found {
			return nil, fmt.Errorf("this host has no program %q: install it and build the image again", p)
		}
	}
	for _, p := range optional {
		if _, err := c.program(p); err != nil {
			return nil, err
		}
	}
	if err := c.git(ctx); err != nil {
		return nil, err
	}
	if err := c.systemFiles(ctx); err != nil {
		return nil, err
	}
	if s.Go {
		say("collecting the Go toolchain")
		if err := c.goToolchain(ctx); err != nil {
			return nil, err
		}
	}
	if s.Node {
		if err := c.node(ctx); err != nil {
			return nil, err
		}
	}
	if s.Python {
		say("collecting Python")
		if err := c.python(ctx); err != nil {
			return nil, err
		}
	}
	say("following shared libraries")
	if err := c.needs(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// git adds git's own programs, leaving out those in languages the image may
// not have.
func (c *collector) git(ctx context.Context) error {
	dir, err := output(ctx, "git", "--exec-path")
	if err != nil {
		return fmt.Errorf("find git's programs: %w", err)
	}
	err = c.tree(ctx, dir, dir, func(rel string, isDir bool) bool {
		return !isDir && foreignScript(filepath.Join(dir, rel))
	})
	if err != nil {
		return fmt.Errorf("collect git's programs: %w", err)
	}
	templates := "/usr/share/git-core/templates"
	if _, err := os.Stat(templates); err != nil {
		return nil
	}
	return c.tree(ctx, templates, templates, func(rel string, isDir bool) bool {
		return !isDir && strings.HasSuffix(rel, ".sample")
	})
}

// foreignScript reports whether p is a script for anything but the shell.
func foreignScript(p string) bool {
	f, err := os.Open(p)
	if err != nil {
		return true
	}
	defer f.Close()
	head := make([]byte, 64)
	n, _ := f.Read(head)
	line, _, _ := strings.Cut(string(head[:n]), "\n")
	return strings.HasPrefix(line, "#!") && !strings.HasPrefix(line, "#!/bin/sh") && !strings.HasPrefix(line, "#! /bin/sh")
}

// systemFiles adds what programs look for by fixed names: certificates, the
// loader's cache, name service modules and a UTF-8 locale.
func (c *collector) systemFiles(ctx context.Context) error {
	certs := ""
	for _, p := range []string{"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"} {
		if _, err := os.Stat(p); err == nil {
			certs = p
			break
		}
	}
	if certs == "" {
		return errors.New("this host has no bundle of certificate authorities: install ca-certificates and build the image again")
	}
	if err := c.file(certs, "/etc/ssl/certs/ca-certificates.crt"); err != nil {
		return err
	}
	if st, err := os.Stat("/etc/ld.so.cache"); err == nil && st.Mode().IsRegular() {
		if err := c.file("/etc/ld.so.cache", "/etc/ld.so.cache"); err != nil {
			return err
		}
	}
	for _, dir := range c.libDirs {
		for _, lib := range []string{"libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2"} {
			p := filepath.Join(dir, lib)
			if _, err := os.Stat(p); err == nil {
				if err := c.file(p, p); err != nil {
					return err
				}
			}
		}
	}
	for _, locale := range []string{"/usr/lib/locale/C.utf8", "/usr/lib/locale/C.UTF-8"} {
		if _, err := os.Stat(locale); err == nil {
			return c.tree(ctx, locale, locale, nil)
		}
	}
	return nil
}

// goToolchain adds the host's Go without its tests and documents, which no build
// or test of a module reads. The sources of its commands stay: some tools, such
// as nm, are built from them when they are first asked for.
func (c *collector) goToolchain(ctx context.Context) error {
	root, err := output(ctx, "go", "env", "GOROOT")
	if err != nil {
		return fmt.Errorf("find the Go toolchain: %w", err)
	}
	const target = "/usr/local/go"
	err = c.tree(ctx, root, target, func(rel string, isDir bool) bool {
		top, _, _ := strings.Cut(rel, "/")
		switch {
		case isDir && (rel == "test" || rel == "api" || rel == "doc" || rel == "misc" || rel == "pkg/obj"):
			return true
		case isDir && path.Base(rel) == "testdata" && top == "src":
			return true
		case isDir && strings.HasPrefix(path.Base(rel), ".git"):
			return true
		case !isDir && top == "src" && strings.HasSuffix(rel, "_test.go"):
			return true
		}
		return false
	})
	if err != nil {
		return fmt.Errorf("collect the Go toolchain: %w", err)
	}
	for _, p := range []string{"go", "gofmt"} {
		c.entries["usr/local/bin/"+p] = entry{link: target + "/bin/" + p}
	}
	return nil
}

// node adds Node.js, and npm under its own path if the host has it.
func (c *collector) node(ctx context.Context) error {
	found, err := c.program("node")
	if err != nil || !found {
		return err
	}
	for _, dir := range programDirs {
		cli, err := filepath.EvalSymlinks(filepath.Join(dir, "npm"))
		if err != nil || filepath.Base(cli) != "npm-cli.js" {
			continue
		}
		root := filepath.Dir(filepath.Dir(cli))
		err = c.tree(ctx, root, root, func(rel string, isDir bool) bool {
			return isDir && (rel == "docs" || rel == "man")
		})
		if err != nil {
			return fmt.Errorf("collect npm: %w", err)
		}
		c.entries["usr/local/bin/npm"] = entry{link: cli}
		c.entries["usr/local/bin/npx"] = entry{link: filepath.Join(filepath.Dir(cli), "npx-cli.js")}
		return nil
	}
	c.progress("no npm on this host: left out")
	return nil
}

// python adds the interpreter that the host calls python3, under its own
// prefix, without tests and compiled files.
func (c *collector) python(ctx context.Context) error {
	facts, err := output(ctx, "python3", "-c", "import sys,os,sysconfig;print(os.path.realpath(sys.executable));print(sysconfig.get_path('stdlib'))")
	if err != nil {
		c.progress("no python3 on this host: left out")
		return nil
	}
	exe, lib, ok := strings.Cut(facts, "\n")
	if !ok {
		return fmt.Errorf("python3 answered %q", facts)
	}
	if err := c.file(exe, exe); err != nil {
		return err
	}
	c.entries["usr/local/bin/python3"] = entry{link: "/" + inImage(exe)}
	return c.tree(ctx, lib, lib, func(rel string, isDir bool) bool {
		switch path.Base(rel) {
		case "__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "site-packages", "dist-packages":
			return isDir
		}
		return !isDir && (strings.HasSuffix(rel, ".a") || strings.HasPrefix(path.Base(rel), "_tkinter"))
	})
}

// output runs a host program in the root directory, so that no project's
// settings change its answer.
func output(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = "/"
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("run %s: %w", name, err)
	}
	return strings.TrimSpace(string(out)), nil
}
