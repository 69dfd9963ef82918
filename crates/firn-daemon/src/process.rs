//! What a process of Firn arranges for itself before it serves.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use firn_backing::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

/// Returns the process of a thread, or the thread itself if that cannot be seen.
pub(crate) fn process_of(thread: u32) -> u32 {
    firn_process::process_of_thread(thread).unwrap_or(thread)
}

/// Limits, umask and capabilities. Before any thread is started: capabilities are per thread.
pub(crate) fn prepare() {
    // Modes come complete from the kernel.
    rustix::process::umask(rustix::fs::Mode::empty());
    if let Err(error) = firn_backing::raise_descriptor_limit() {
        tracing::warn!(%error, "cannot raise the limit on open files");
    }
    survive_file_size_limit();
    respect_quotas();
}

/// The limit on file sizes is inherited from the parent process. It must be an errno of the one write that is over it,
/// and not the end of firnd with everything that it holds.
fn survive_file_size_limit() {
    // A handler and not SIG_IGN, which programs that we start (fusermount3) would inherit.
    if let Err(error) = signal_hook::flag::register(libc::SIGXFSZ, Arc::new(AtomicBool::new(false)))
    {
        tracing::warn!(%error, "cannot catch SIGXFSZ; a file over the limit on file sizes ends firnd");
    }
    let limit = getrlimit(Resource::Fsize);
    if let Err(error) = setrlimit(
        Resource::Fsize,
        Rlimit {
            current: limit.maximum,
            ..limit
        },
    ) {
        tracing::warn!(%error, "cannot raise the limit on file sizes");
    }
}

/// Bytes of the largest file that this process may write; `None`: no limit.
pub(crate) fn file_size_limit_bytes() -> Option<u64> {
    getrlimit(Resource::Fsize).current
}

/// An errno of the backing, with the limit of this process where that is the reason.
pub(crate) fn explain(errno: Errno) -> String {
    match limit_behind(errno) {
        Some(limit) => format!("{errno}: {limit}"),
        None => errno.to_string(),
    }
}

/// The limit of this process that an errno of the backing comes from, and what to do.
pub(crate) fn limit_behind(errno: Errno) -> Option<String> {
    let limit = file_size_limit_bytes().filter(|_| errno == Errno::FBIG)?;
    Some(format!(
        "the limit on file sizes (ulimit -f) is {} here; mount, or firn recover, with a higher one",
        firn_format::quantity::bytes(limit)
    ))
}

/// Descriptors that firnd needs however little it does: arena, sockets, `.firn/`, the threads' calls.
const DESCRIPTORS_FOR_ITSELF: u64 = 48;

/// How many descriptors may go to files that are merely known, and as many to files that programs have open and
/// do not use right now: a quarter each. The rest is for those without a name, with one or two each, for open
/// directories and for connections.
pub(crate) fn objects_max() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
    (limit.saturating_sub(DESCRIPTORS_FOR_ITSELF) / 4).clamp(8, 1 << 18) as usize
}

/// Whether less than half of the descriptors that this process may have are in use. No where the kernel does not say how
/// many are (before Linux 6.2).
pub(crate) fn has_spare_descriptors() -> bool {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let open = std::fs::metadata("/proc/self/fd").map_or(0, |fds| fds.len());
    open > 0 && open < limit / 2
}

/// Root's CAP_SYS_RESOURCE would write beyond quotas and into reserved blocks: data would be taken
/// that the user whose program wrote it may not store.
fn respect_quotas() {
    let dropped = capabilities(None).and_then(|mut sets| {
        if !sets.effective.contains(CapabilitySet::SYS_RESOURCE) {
            return Ok(());
        }
        sets.effective.remove(CapabilitySet::SYS_RESOURCE);
        set_capabilities(None, sets)
    });
    if let Err(error) = dropped {
        tracing::warn!(%error, "cannot drop CAP_SYS_RESOURCE; quotas may not hold for this mount");
    }
}

/// A broken invariant ends firnd at once: the arena survives it, half an answer might not be true.
pub(crate) fn abort_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        tracing::error!(
            panic = %info,
            "firnd panicked and ends; acknowledged data is in the arena: mount again to drain it"
        );
        std::process::abort();
    }));
}
