//! What concerns a process as the kernel sees it: prepares a process of Firn before it serves (limits, umask and
//! capabilities), describes errors that such a limit causes, and finds the process of a thread.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use firn_backing::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

/// Returns the process of a thread. If firnd does not see that process, returns the number of the thread itself.
pub(crate) fn process_of_thread(thread: u32) -> u32 {
    firn_process::process_of_thread(thread).unwrap_or(thread)
}

/// Sets limits, umask and capabilities. Call this before any thread is started, because capabilities belong to threads.
pub(crate) fn prepare() {
    // The modes in requests of the kernel have the umask of the program applied already.
    rustix::process::umask(rustix::fs::Mode::empty());
    if let Err(error) = firn_backing::raise_descriptor_limit() {
        tracing::warn!(%error, "cannot raise the limit on open files");
    }
    survive_file_size_limit();
    respect_quotas();
}

/// Raises the limit on file sizes, which the parent process sets, as far as allowed, and catches SIGXFSZ. A write
/// beyond the limit then fails with an errno. Otherwise the signal would end firnd.
fn survive_file_size_limit() {
    // Programs that firnd starts, such as fusermount3, would inherit SIG_IGN, but they do not inherit a handler.
    if let Err(error) = signal_hook::flag::register(libc::SIGXFSZ, Arc::new(AtomicBool::new(false)))
    {
        tracing::warn!(%error, "cannot catch SIGXFSZ; a file over the limit on file sizes ends firnd");
    }
    let limit = getrlimit(Resource::Fsize);
    let raised_limit = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Fsize, raised_limit) {
        tracing::warn!(%error, "cannot raise the limit on file sizes");
    }
}

/// Returns the size in bytes of the largest file that this process may write; `None` means no limit.
pub(crate) fn file_size_limit_bytes() -> Option<u64> {
    getrlimit(Resource::Fsize).current
}

/// Describes an errno of the backing, and the limit of this process that caused it, if one did.
pub(crate) fn describe_errno(errno: Errno) -> String {
    match describe_limit_behind(errno) {
        Some(limit) => format!("{errno}: {limit}"),
        None => errno.to_string(),
    }
}

/// Returns which limit of this process caused an errno of the backing, and what to do; `None` if no limit did.
pub(crate) fn describe_limit_behind(errno: Errno) -> Option<String> {
    let limit = file_size_limit_bytes().filter(|_| errno == Errno::FBIG)?;
    Some(format!(
        "the limit on file sizes (ulimit -f) of this process is {}: run `firn mount` or `firn recover` with a higher limit",
        firn_format::quantity::bytes(limit)
    ))
}

/// Number of descriptors that firnd always needs: arena, sockets, `.firn/` and the calls of its threads.
const DESCRIPTORS_FOR_ITSELF: u64 = 48;

/// Returns the limit of descriptors for known files that no program has open. The limit for open files that are idle is
/// the same. Each is a quarter of all descriptors. The rest is for open files without a name (one or two each), open
/// directories and connections.
pub(crate) fn objects_max() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
    (limit.saturating_sub(DESCRIPTORS_FOR_ITSELF) / 4).clamp(8, 1 << 18) as usize
}

/// Returns whether less than half of this process's descriptors are in use. Returns false before Linux 6.2, because the
/// kernel does not report their number.
pub(crate) fn has_spare_descriptors() -> bool {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let open = std::fs::metadata("/proc/self/fd").map_or(0, |fds| fds.len());
    open > 0 && open < limit / 2
}

/// Drops CAP_SYS_RESOURCE, which a firnd of root has. With it, writes could exceed quotas and use reserved blocks, so
/// firnd would accept data that the program's user may not store.
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

/// Makes a panic end firnd at once, because it means a broken invariant. The data survives in the arena, but a reply
/// after the panic could be wrong.
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
