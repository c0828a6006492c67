package bridge

import "sync"

// Credit is the sender's side of a stream's window: Take waits until bytes may
// be sent, Give returns what the receiver acknowledged. The zero Credit has
// nothing; NewCredit has a full window.
type Credit struct {
	mu   sync.Mutex
	cond sync.Cond
	left int
	over bool
}

// NewCredit returns a Credit with one full Window.
func NewCredit() *Credit {
	c := &Credit{left: Window}
	c.cond.L = &c.mu
	return c
}

// Take waits for credit and takes up to want bytes of it, at least one. It
// returns 0 only once End was called.
func (c *Credit) Take(want int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.left == 0 && !c.over {
		c.cond.Wait()
	}
	if c.over {
		return 0
	}
	n := min(want, c.left)
	c.left -= n
	return n
}

// Give returns n bytes of credit, never beyond one window.
func (c *Credit) Give(n int) {
	c.mu.Lock()
	c.left = min(c.left+n, Window)
	c.mu.Unlock()
	c.cond.Broadcast()
}

// End wakes every waiter for good.
func (c *Credit) End() {
	c.mu.Lock()
	c.over = true
	c.mu.Unlock()
	c.cond.Broadcast()
}
