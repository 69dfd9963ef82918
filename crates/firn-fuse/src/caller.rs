//! Who asks, how it ends, and with which mode a new object is made.

use std::ffi::OsStr;

use firn_backing::{Backing, Caller, Errno};
use firn_engine::{Closing, Engine, NodeId};
use fuser::Request;

const DEFAULT_ACL: &str = "system.posix_acl_default";

/// The calling process as the engine knows it.
pub(crate) fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid(), pid: request.pid() }
}

/// How the process came to close a descriptor. To be asked before its FLUSH is answered: until then the
/// thread that sent it waits in the kernel, and its number is nobody else's.
///
/// A thread that ends gives its memory back before it closes its descriptors (do_exit in the kernel), and
/// one that calls close(2) still has it, which `statm` tells without a lock that anybody sleeps with. Only of
/// a thread without memory more is asked: most of /proc/PID waits for an exec to end, and the exec waits for
/// this very answer.
///
/// What cannot be asked (a process of another user, or of a namespace that firnd does not see) counts as a
/// close.
pub(crate) fn closing(request: &Request) -> Closing {
    let pid = request.pid();
    let of = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
    let lives = || of("statm").is_none_or(|pages| !pages.starts_with("0 "));
    if pid == 0 || lives() {
        return Closing::Called;
    }
    match of("stat").as_deref().and_then(exit_code) {
        Some(code) if code & SIGNAL_BITS != 0 => Closing::Killed,
        _ => Closing::Called,
    }
}

/// The signal in an exit code as wait(2) gives it.
const SIGNAL_BITS: u32 = 0x7f;

/// The last field of /proc/PID/stat (proc(5)).
fn exit_code(stat: &str) -> Option<u32> {
    stat.split_ascii_whitespace().next_back()?.parse().ok()
}

/// The mode of a new object: the umask counts unless the parent has a default ACL (acl(5)), which
/// the backing applies by itself. Without a umask the kernel saw to it.
pub(crate) fn masked<B: Backing>(engine: &Engine<B>, parent: NodeId, mode: u32, umask: Option<u32>) -> u32 {
    let Some(umask) = umask else { return mode };
    if mode & umask == 0 || has_default_acl(engine, parent) { mode } else { mode & !umask }
}

fn has_default_acl<B: Backing>(engine: &Engine<B>, parent: NodeId) -> bool {
    match engine.get_xattr(parent, OsStr::new(DEFAULT_ACL)) {
        Ok(value) => !value.is_empty(),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => false,
        Err(error) => {
            tracing::debug!(%error, "cannot tell whether a directory has a default ACL");
            false
        }
    }
}
