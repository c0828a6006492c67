// Package catalog finds the running provider of a port: it starts each when it is
// first needed, after checking it against the lockfile, and starts it anew when
// it died. The dispatcher asks it for the deployment's providers; the daemon fills
// it from the control documents.
package catalog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/numinance/numinance/internal/core/lockfile"
	"github.com/numinance/numinance/internal/core/ports"
	"github.com/numinance/numinance/internal/host/dispatch"
	"github.com/numinance/numinance/internal/host/pluginhost"
)

// A provider that ends more often than this is left alone for the rest of the
// window, so that a broken one does not eat the machine.
const (
	maxStarts   = 5
	startWindow = time.Minute
)

// Lock says whether something that is about to run is locked exactly as it is;
// lockfile.File implements it.
type Lock interface {
	Check(lockfile.Entry) error
}

// Binding is the provider of one port in this deployment.
type Binding struct {
	// Plugin is what to start and what is expected of it.
	Plugin pluginhost.Config
	// Locked is what the lockfile has to say about it before it starts.
	Locked lockfile.Entry
}

// Config is what a Catalog works with.
type Config struct {
	// Lock is required.
	Lock     Lock
	Bindings []Binding
	// Now is the clock; nil is the system's.
	Now func() time.Time
}

// Catalog holds one provider a port. It is safe for concurrent use and implements
// dispatch.Providers.
type Catalog struct {
	lock Lock
	now  func() time.Time

	byPort map[string]*slot
	closed chan struct{}
	once   sync.Once
}

// slot is one port's provider.
type slot struct {
	binding Binding

	mu     sync.Mutex // guards what follows; held while the provider starts
	plugin *pluginhost.Plugin
	starts []time.Time
	over   bool
}

// New returns a catalog that has started nothing yet.
func New(c Config) (*Catalog, error) {
	if c.Lock == nil {
		return nil, errors.New("catalog: without a lockfile nothing may run")
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	k := &Catalog{lock: c.Lock, now: c.Now, byPort: map[string]*slot{}, closed: make(chan struct{})}
	for _, b := range c.Bindings {
		port := b.Plugin.Expect.Port
		switch {
		case !slices.Contains(ports.Names(), port):
			return nil, fmt.Errorf("catalog: %q is no port", port)
		case k.byPort[port] != nil:
			return nil, fmt.Errorf("catalog: port %s has two providers, %s and %s", port, k.byPort[port].binding.Plugin.Expect.Extension, b.Plugin.Expect.Extension)
		}
		k.byPort[port] = &slot{binding: b}
	}
	return k, nil
}

// Provider implements dispatch.Providers. The first call for a port starts its
// provider, which may take as long as the provider's start timeout; calls for
// other ports do not wait for it.
func (k *Catalog) Provider(port string) (dispatch.Provider, error) {
	s := k.byPort[port]
	if s == nil {
		return nil, status.Errorf(codes.Unavailable, "this deployment has no provider of port %s", port)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return nil, status.Errorf(codes.Unavailable, "the runtime is stopping; port %s has no provider any more", port)
	}
	if s.plugin != nil {
		select {
		case <-s.plugin.Ended():
			// Its remains go before the next one comes; that they do not go
			// quietly is no reason to refuse the next one.
			_ = s.plugin.Close()
			s.plugin = nil
		default:
			return s.plugin, nil
		}
	}
	now := k.now()
	s.starts = slices.DeleteFunc(s.starts, func(t time.Time) bool { return now.Sub(t) >= startWindow })
	if len(s.starts) >= maxStarts {
		return nil, status.Errorf(codes.Unavailable, "%s ended %d times within %s and is left alone until %s; its log says why",
			s.binding.Plugin.Expect.Extension, len(s.starts), startWindow, s.starts[0].Add(startWindow).Format(time.TimeOnly))
	}
	if err := k.lock.Check(s.binding.Locked); err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "%s is not started: %v", s.binding.Plugin.Expect.Extension, err)
	}
	s.starts = append(s.starts, now)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan struct{})
	defer close(done)
	go func() { // Close must not wait for a provider that does not come up
		select {
		case <-k.closed:
			cancel()
		case <-done:
		}
	}()
	p, err := pluginhost.Start(ctx, s.binding.Plugin)
	if err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	s.plugin = p
	return p, nil
}

// Running returns the jails of the providers that run now, by port, for people.
func (k *Catalog) Running() map[string]string {
	out := map[string]string{}
	for port, s := range k.byPort {
		s.mu.Lock()
		if s.plugin != nil {
			out[port] = s.plugin.Jail()
		}
		s.mu.Unlock()
	}
	return out
}

// Close ends every provider; none is started after it.
func (k *Catalog) Close() error {
	k.once.Do(func() { close(k.closed) })
	var errs []error
	for _, s := range k.byPort {
		s.mu.Lock()
		s.over = true
		if s.plugin != nil {
			errs = append(errs, s.plugin.Close())
			s.plugin = nil
		}
		s.mu.Unlock()
	}
	return errors.Join(errs...)
}

var _ dispatch.Providers = (*Catalog)(nil)
