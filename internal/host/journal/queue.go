package journal

import "sync"

// queue is what waits for the writing goroutine, in the order in which it came.
// A write that somebody waits for wakes it at once; a lazy one wakes it only to
// start its clock, so that READs do not cost two changes of threads each.
type queue struct {
	wake chan struct{} // holds one

	mu     sync.Mutex
	ops    []*op
	urgent bool // one of ops has somebody waiting, or they are many
	timed  bool // the clock runs for the oldest of ops
	closed bool
}

// add reports whether the queue still takes writes.
func (q *queue) add(o *op) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.ops = append(q.ops, o)
	q.urgent = q.urgent || !o.lazy || len(q.ops) >= maxBatch
	if q.urgent || !q.timed {
		q.timed = true
		select {
		case q.wake <- struct{}{}:
		default:
		}
	}
	return true
}

// look reports what there is to do: to write at once, or to wait a while.
func (q *queue) look() (urgent, waiting bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.urgent, len(q.ops) > 0
}

// take returns all that is queued. A closed queue takes nothing more.
func (q *queue) take(last bool) []*op {
	q.mu.Lock()
	defer q.mu.Unlock()
	out := q.ops
	q.ops, q.urgent, q.timed, q.closed = nil, false, false, q.closed || last
	return out
}
