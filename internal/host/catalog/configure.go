package catalog

import (
	"bytes"
	"fmt"

	"github.com/numinance/numinance/internal/host/pluginhost"
)

// Configure gives a port's provider other settings and another jail. One that
// runs with other settings is ended, and is started again when it is next asked
// for; the same settings change nothing.
func (k *Catalog) Configure(port string, settings []byte, launcher pluginhost.Launcher) error {
	s := k.byPort[port]
	if s == nil {
		return fmt.Errorf("configure port %s: this deployment has no provider of it", port)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if bytes.Equal(s.binding.Plugin.Settings, settings) {
		return nil
	}
	s.binding.Plugin.Settings, s.binding.Plugin.Launcher = settings, launcher
	if s.plugin == nil {
		return nil
	}
	ended := s.plugin
	s.plugin = nil
	return ended.Close()
}
