// Package engine drives durable flows behind an interface narrow enough that
// another engine could stand in: a flow is a function whose steps and received
// messages are recorded, so that after a crash it runs again to the point it
// had reached without repeating what is done. The orchestration package is its
// only caller.
package engine

import (
	"context"
	"errors"
	"time"
)

// ErrStopped is what a flow's calls return once the engine is being closed.
// The flow returns it at once; it goes on after the next Open.
var ErrStopped = errors.New("engine is stopping")

// Flow is what a Body may call. The order of its calls must follow from their
// results alone: no clock, no random choice and no map order outside a step.
type Flow interface {
	// ID names the flow and Input is what Start was given.
	ID() string
	Input() []byte
	// Steps runs every step at the same time and waits for all. A step that
	// completed is never run again; one cut off by a crash is, so it has to be
	// idempotent.
	Steps(steps ...Step) ([][]byte, error)
	// Receive takes the oldest message that was sent to the flow, waiting at
	// most wait for one; ok is false if none came.
	Receive(wait time.Duration) (message []byte, ok bool, err error)
}

// Step is one thing with an effect. Its result is recorded, so it is small and
// holds references, never content. Name is part of the recorded history.
type Step struct {
	Name string
	Run  func(ctx context.Context) []byte
}

// Body is the code of a flow. It is run once from the beginning after every
// start of the process until it has returned without an error.
type Body func(f Flow) error
