package sdk

import (
	"fmt"
	"strconv"
	"strings"
)

// version is a spec version.
type version struct{ major, minor, patch int }

func parseVersion(s string) (version, error) {
	var v version
	parts := strings.Split(s, ".")
	if len(parts) != 3 {
		return v, fmt.Errorf("spec version %q is not of the form 1.2.3", s)
	}
	for i, p := range []*int{&v.major, &v.minor, &v.patch} {
		n, err := strconv.Atoi(parts[i])
		if err != nil || n < 0 || n > 9999 || strconv.Itoa(n) != parts[i] {
			return v, fmt.Errorf("spec version %q is not of the form 1.2.3", s)
		}
		*p = n
	}
	return v, nil
}

func (v version) less(w version) bool {
	if v.major != w.major {
		return v.major < w.major
	}
	if v.minor != w.minor {
		return v.minor < w.minor
	}
	return v.patch < w.patch
}

func (v version) String() string { return fmt.Sprintf("%d.%d.%d", v.major, v.minor, v.patch) }

// negotiate picks the older of two versions of one major.
func negotiate(host, plugin string) (version, error) {
	h, err := parseVersion(host)
	if err != nil {
		return version{}, fmt.Errorf("host: %w", err)
	}
	p, err := parseVersion(plugin)
	if err != nil {
		return version{}, fmt.Errorf("manifest: %w", err)
	}
	if h.major != p.major {
		return version{}, fmt.Errorf("the host speaks spec version %s and this plugin %s: another major is refused", h, p)
	}
	if h.less(p) {
		return h, nil
	}
	return p, nil
}
