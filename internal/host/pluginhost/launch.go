package pluginhost

import (
	"context"
	"net"
)

// Launcher starts one plugin, or reaches one that somebody else started.
type Launcher interface {
	// Launch returns when the plugin can be dialled, or with an error that says
	// why not. What it started is gone after an error and after Link.Close.
	Launch(ctx context.Context) (*Link, error)
}

// Link is a launched plugin.
type Link struct {
	// Dial opens a connection to the plugin.
	Dial func(ctx context.Context) (net.Conn, error)
	// Host yields the plugin's connections to the host. Who can connect to it is
	// the plugin: this is the only identity there is.
	Host net.Listener
	// Ended is closed when the plugin is gone for good.
	Ended <-chan struct{}
	// Why says after Ended, or while the plugin is silent, what is known of its
	// end, for a person: foreign text in it is quoted.
	Why func() string
	// DataDir is the plugin's directory as it sees it; empty if it has none.
	DataDir string
	// Jail says in plain words what confines the plugin.
	Jail string
	// Close ends the plugin with everything it started and removes its sockets.
	// It is safe to call more than once.
	Close func() error
}
