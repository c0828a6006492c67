package pluginhost

// UIDBase is the first of the uids that are reserved for plugins where the
// runtime is root: plugin n runs as UIDBase + n, and so does nothing else.
const UIDBase = 48000

// UIDs is how many uids are reserved.
const UIDs = 1000

// Profile says what one provider's jail lets it do beyond its own directory.
type Profile struct {
	// Tools lets it run the host's programs under /usr, such as git. A provider
	// without tools is one static program.
	Tools bool
	// Writable and Readable are absolute directories that it may use besides its
	// data directory, under their own names.
	Writable, Readable []string
	// TmpBytes bounds its /tmp, which is memory; 0 is 64 MiB.
	TmpBytes int64
	// OpenFiles and Processes are limits; 0 is the jail's default.
	OpenFiles, Processes uint64
	// Trusted runs it without a jail, as the runtime's own user. Only the
	// sandbox provider, which makes the jails of others, is in the trusted base.
	Trusted bool
}

// bundled is the table of the providers that come with the runtime. Directories
// depend on their configuration and are added by whoever binds them. A provider
// that is not in it gets the zero Profile. None has a network of its own.
var bundled = map[string]Profile{
	"scm/git":                {Tools: true, TmpBytes: 1 << 30},
	"ciexecutor/local":       {Tools: true, TmpBytes: 4 << 30, Processes: 4096, OpenFiles: 8192},
	"sandboxprovider/gvisor": {Trusted: true},
}

// BundledProfile returns the profile of a bundled provider, such as scm/git.
func BundledProfile(name string) Profile { return bundled[name] }
