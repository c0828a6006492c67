package daemon

import (
	"context"

	"github.com/numinance/numinance/internal/contexts/sandbox"
	"github.com/numinance/numinance/internal/orchestration"
)

// preparation is what an environment adds to every sandbox of a Change.
type preparation struct {
	mounts      []sandbox.Mount
	environment map[string]string
}

func (d *Daemon) prepared(ctx context.Context, j orchestration.Job, docs bound, user sandbox.User) (preparation, error) {
	return preparation{environment: toolEnvironment()}, nil
}

// toolEnvironment lets tools work without a network.
func toolEnvironment() map[string]string {
	return map[string]string{"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=mod", "GOSUMDB": "off", "GOPROXY": "off"}
}
