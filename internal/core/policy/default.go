package policy

import _ "embed"

// DefaultFile is the name under which the shipped policy is loaded.
const DefaultFile = "default.cedar"

//go:embed default.cedar
var defaultCedar string

// Default returns the shipped policy text: what the life of a Change needs and
// nothing else. An organisation may replace it; the floors stay.
func Default() string { return defaultCedar }

// LoadDefault loads the shipped policy alone.
func LoadDefault() (*Engine, error) {
	return Load(map[string][]byte{DefaultFile: []byte(defaultCedar)})
}
