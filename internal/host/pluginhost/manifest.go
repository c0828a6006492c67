package pluginhost

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	pluginv1 "github.com/numinance/numinance/gen/numinance/plugin/v1"
	"github.com/numinance/numinance/internal/core/digest"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/host/dispatch"
)

// SpecVersion is the newest spec version that this host speaks.
const SpecVersion = "1.2.0"

// Expectation is what the caller knows of a plugin before it runs, from the
// lockfile. A plugin that differs is refused.
type Expectation struct {
	Port      string
	Extension string
	Origin    string
	// Manifest pins the manifest's digest. It may be empty only if Unpinned.
	Manifest digest.Digest
	// Unpinned accepts any manifest of Port, for conformance runs and for an
	// author's plugin under a debugger; such a plugin gets no real authority.
	Unpinned bool
}

// ManifestDigest is the digest that a lockfile pins: over the canonical form of
// the manifest, with its lists in order, so that only a change of meaning
// changes it.
func ManifestDigest(m *pluginv1.Manifest) (digest.Digest, error) {
	sorted := func(in []string) []string {
		out := append([]string{}, in...)
		slices.Sort(out)
		return out
	}
	d, err := digest.OfCanonical(map[string]any{
		"extension_id":       m.GetExtensionId(),
		"version":            m.GetVersion(),
		"port":               m.GetPort(),
		"spec_version":       m.GetSpecVersion(),
		"verbs":              sorted(m.GetVerbs()),
		"capabilities":       sorted(m.GetCapabilities()),
		"egress_hosts":       sorted(m.GetEgressHosts()),
		"credential_intents": sorted(m.GetCredentialIntents()),
		"description":        m.GetDescription(),
	})
	if err != nil {
		return "", fmt.Errorf("digest of the manifest of %q: %w", m.GetExtensionId(), err)
	}
	return d, nil
}

// Capabilities are those that this host knows for a port.
func Capabilities(port string) []string {
	var out []string
	for _, v := range ports.Of(port) {
		if v.Capability != "" && !slices.Contains(out, v.Capability) {
			out = append(out, v.Capability)
		}
	}
	slices.Sort(out)
	return out
}

// version is a spec version of this host's major.
type version [3]int

func parseVersion(s string) (v version, err error) {
	parts := strings.Split(s, ".")
	if len(parts) != 3 {
		return v, fmt.Errorf("spec version %q is not of the form 1.2.3", s)
	}
	for i, p := range parts {
		if v[i], err = strconv.Atoi(p); err != nil || v[i] < 0 || strconv.Itoa(v[i]) != p {
			return v, fmt.Errorf("spec version %q is not of the form 1.2.3", s)
		}
	}
	return v, nil
}

func (v version) String() string { return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2]) }

// agree checks a handshake's answer against what is expected, by the host's own
// descriptors, and returns what both sides may use. Every verb that can have an
// effect must be declared, so that no provider leaves out the one that policy
// forbids (P-028); a capability counts only if the host knows it, the manifest
// names it and the answer offers it (P-026, P-027).
func agree(want Expectation, r *pluginv1.HandshakeResponse) (dispatch.Negotiated, error) {
	var none dispatch.Negotiated
	m := r.GetManifest()
	if err := pinned(want, m); err != nil {
		return none, err
	}
	if ports.Of(m.GetPort()) == nil {
		return none, fmt.Errorf("%q is no port", m.GetPort())
	}
	host, err := parseVersion(SpecVersion)
	if err != nil {
		return none, err
	}
	theirs, err := parseVersion(m.GetSpecVersion())
	if err != nil {
		return none, fmt.Errorf("manifest: %w", err)
	}
	if theirs[0] != host[0] {
		return none, fmt.Errorf("the plugin speaks spec version %s and this host %s: another major is refused", theirs, host)
	}
	lower := host
	if slices.Compare(theirs[:], host[:]) < 0 {
		lower = theirs
	}
	if r.GetSpecVersion() != lower.String() {
		return none, fmt.Errorf("the plugin answered spec version %s; between %s and %s it is %s", r.GetSpecVersion(), host, theirs, lower)
	}
	known := Capabilities(m.GetPort())
	capabilities := []string{}
	for _, c := range r.GetCapabilities() {
		switch {
		case !slices.Contains(known, c):
			return none, fmt.Errorf("the plugin answered capability %q, which was not offered", c)
		case !slices.Contains(m.GetCapabilities(), c):
			return none, fmt.Errorf("the plugin answered capability %q, which its manifest does not name", c)
		}
		capabilities = append(capabilities, c)
	}
	slices.Sort(capabilities)
	return verbs(m, lower, host, capabilities)
}

// pinned checks that the manifest is the locked one.
func pinned(want Expectation, m *pluginv1.Manifest) error {
	if want.Port == "" || m.GetPort() != want.Port {
		return fmt.Errorf("the plugin implements port %q, expected is %q", m.GetPort(), want.Port)
	}
	if want.Unpinned {
		return nil
	}
	if m.GetExtensionId() != want.Extension {
		return fmt.Errorf("the plugin is %q, locked is %q", m.GetExtensionId(), want.Extension)
	}
	d, err := ManifestDigest(m)
	if err != nil {
		return err
	}
	if !want.Manifest.Valid() || d != want.Manifest {
		return fmt.Errorf("the manifest of %s has digest %s, locked is %q: run `numi lock` if the change is wanted", m.GetExtensionId(), d, want.Manifest)
	}
	return nil
}

func verbs(m *pluginv1.Manifest, lower, host version, capabilities []string) (dispatch.Negotiated, error) {
	n := dispatch.Negotiated{SpecVersion: lower.String(), Capabilities: capabilities, Verbs: []string{}}
	var missing, tooNew []string
	known := map[string]bool{}
	core := 0
	for _, v := range ports.Of(m.GetPort()) {
		known[v.Method] = true
		since, err := parseVersion(v.Since)
		if err != nil {
			return n, fmt.Errorf("%s: %w", v.Name(), err)
		}
		named := slices.Contains(m.GetVerbs(), v.Method)
		newer := slices.Compare(since[:], lower[:]) > 0
		switch {
		case v.Capability != "" && !slices.Contains(capabilities, v.Capability):
			continue // not callable, whatever the manifest names
		case v.Capability == "" && newer:
			tooNew = append(tooNew, v.Method+" (since "+v.Since+")")
			continue
		case v.Capability == "" && v.SideEffecting() && !named:
			missing = append(missing, v.Method)
		}
		if named {
			n.Verbs = append(n.Verbs, v.Method)
			core++
		}
	}
	if len(missing) > 0 {
		return n, fmt.Errorf("the manifest of %s does not declare %s: a provider declares every side-effecting RPC of port %s", m.GetExtensionId(), strings.Join(missing, ", "), m.GetPort())
	}
	if core == 0 {
		if len(tooNew) > 0 {
			return n, fmt.Errorf("port %s needs a newer spec version than %s: %s", m.GetPort(), lower, strings.Join(tooNew, ", "))
		}
		return n, fmt.Errorf("the manifest of %s names no verb of port %s that may be called", m.GetExtensionId(), m.GetPort())
	}
	for _, name := range m.GetVerbs() {
		// A plugin of a later minor may serve verbs that this host has not heard
		// of; they are never called. Any other unknown name is a mistake.
		theirs, err := parseVersion(m.GetSpecVersion())
		if err != nil {
			return n, err
		}
		if !known[name] && slices.Compare(theirs[:], host[:]) <= 0 {
			return n, fmt.Errorf("the manifest of %s names %s, which is no RPC of port %s", m.GetExtensionId(), name, m.GetPort())
		}
	}
	slices.Sort(n.Verbs)
	return n, nil
}
