//! What a process of Firn arranges for itself before it serves.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

/// A log that grew past this is begun anew at the next mount.
const LOG_BYTES_MAX: u64 = 8 << 20;

/// Limits, umask and capabilities. Before any thread is started: capabilities are per thread.
pub(crate) fn prepare() {
    // Modes come complete from the kernel.
    rustix::process::umask(rustix::fs::Mode::empty());
    raise_file_limit();
    respect_quotas();
}

fn raise_file_limit() {
    // Each file in use takes a descriptor; root may have as many as the kernel allows, others what
    // their hard limit says.
    let most = std::fs::read_to_string("/proc/sys/fs/nr_open").ok().and_then(|text| text.trim().parse().ok());
    if most.is_some() && setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).is_ok() {
        return;
    }
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, "cannot raise the number of open files");
    }
}

/// How many descriptors may go to files that are merely known: a quarter. The rest is for those in use,
/// each with one or two.
pub(crate) fn objects_max() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
    (limit / 4).clamp(64, 1 << 18) as usize
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

/// Sends stdout and stderr to the log and cuts stdin off.
pub(crate) fn detach_stdio(log: &Path) -> io::Result<()> {
    let null = File::open("/dev/null")?;
    let long = log.metadata().is_ok_and(|m| m.len() > LOG_BYTES_MAX);
    let flags = libc::O_NOFOLLOW | if long { libc::O_TRUNC } else { 0 };
    let log = OpenOptions::new().create(true).append(true).mode(0o600).custom_flags(flags).open(log)?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&log)?;
    rustix::stdio::dup2_stderr(&log)?;
    Ok(())
}

/// Sends events to stderr. The FUSE crate's own are of use only where everything is asked for.
pub(crate) fn start_log(level: &str) {
    let fuser = if matches!(level, "debug" | "trace") { level } else { "warn" };
    let filter = tracing_subscriber::EnvFilter::new(format!("{level},fuser={fuser}"));
    let terminal = rustix::termios::isatty(rustix::stdio::stderr());
    // A second mount in one process (tests) keeps the first one's log.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(terminal)
        .with_writer(io::stderr)
        .try_init();
}

/// A broken invariant ends firnd at once: the arena survives it, half an answer might not be true.
pub(crate) fn abort_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        tracing::error!(
            "firnd panicked and ends; acknowledged data is in the arena, mount again to drain it"
        );
        std::process::abort();
    }));
}
