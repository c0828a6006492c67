package pluginhost

import (
	"context"
	"net"
)

// Inside reaches a plugin that runs inside a run's sandbox, through the link that
// its PID 1 holds; bridge.Bridge has this form. The sandbox is the plugin's jail,
// and whoever made the sandbox starts the plugin and ends both.
type Inside struct {
	Bridge interface {
		DialPlugin(context.Context) (net.Conn, error)
		HostListener() net.Listener
		Done() <-chan struct{}
	}
	// DataDir is the plugin's directory inside the sandbox; empty if none.
	DataDir string
	// Why says what ended the plugin, if its starter knows; it may be nil.
	Why func() string
}

// Launch implements Launcher.
func (s Inside) Launch(context.Context) (*Link, error) {
	why := s.Why
	if why == nil {
		why = func() string { return "its sandbox is gone: the run is over" }
	}
	return &Link{
		Dial:    s.Bridge.DialPlugin,
		Host:    s.Bridge.HostListener(),
		Ended:   s.Bridge.Done(),
		Why:     why,
		DataDir: s.DataDir,
		Jail:    "the run's sandbox",
		Close:   func() error { return nil },
	}, nil
}
