//! The process that made the call behind a FUSE request: its rights, why it closes a file, and the mode of an object
//! that it makes.
//!
//! firnd, the process that serves the mount, reads most of this from /proc. That is safe because the calling thread
//! remains in the kernel until it has its answer, so its number is not reused meanwhile. If a right cannot be read, the
//! process counts as one without that right.

mod io_uring;
mod signal_effect;

use std::ffi::OsStr;

use firn_backing::{Backing, Caller, Errno};
use firn_engine::{Closing, Engine, InodeId, Principal};
use firn_process::{has_memory, read_status};

pub(crate) use io_uring::IoUringUsers;
pub(crate) use signal_effect::{SignalEffect, signal_effect};

use crate::unanswered::CallerStatus;

const DEFAULT_ACL: &str = "system.posix_acl_default";

/// The process that waits for an answer. Its rights are read from /proc, and only if a file with set-id bits depends on
/// them.
///
/// firnd cannot read the rights of a process in a PID namespace that firnd does not see. Such a process counts as one
/// without rights, so the set-id bits are cleared.
#[derive(Clone)]
pub(crate) struct Process {
    caller: Caller,
    has_cap_fsetid: Option<bool>,
    caller_status: Option<CallerStatus>,
}

impl Process {
    pub(crate) fn from_caller(caller: Caller) -> Self {
        Self {
            caller,
            has_cap_fsetid: None,
            caller_status: None,
        }
    }

    /// Adds `caller_status`, which tells whether the process still waits for the answer.
    pub(crate) fn with_caller_status(self, caller_status: CallerStatus) -> Self {
        Self {
            caller_status: Some(caller_status),
            ..self
        }
    }

    /// Sets whether the process has CAP_FSETID, as the request of the kernel says.
    pub(crate) fn with_cap_fsetid(self, has_cap_fsetid: bool) -> Self {
        Self {
            has_cap_fsetid: Some(has_cap_fsetid),
            ..self
        }
    }

    /// Returns the value of a line of /proc/PID/status (proc(5)).
    fn status(&self, field: &str) -> Option<String> {
        let pid = self.caller.pid;
        (pid != 0).then(|| read_status(pid, field))?
    }

    /// Returns the user id with which the process accesses files, or `None` if it cannot be read. If mounts can be
    /// id-mapped, only requests that make an object contain the id; for other requests it is read from /proc.
    pub(crate) fn file_system_uid(&self) -> Option<u32> {
        if self.caller.uid != UNKNOWN_ID {
            return Some(self.caller.uid);
        }
        file_system_id(&self.status("Uid")?)
    }

    /// Whether the process is in firnd's user namespace. A capability counts only in the namespace of the process.
    fn is_in_own_user_namespace(&self) -> bool {
        let namespace_of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/user")).ok();
        namespace_of("self")
            .is_some_and(|ours| namespace_of(&self.caller.pid.to_string()) == Some(ours))
    }
}

/// User or group id in a request for which the kernel gives none (FUSE_INVALID_UIDGID).
const UNKNOWN_ID: u32 = u32::MAX;

/// Returns the file system id: the last of the real, effective, saved and file system ids, as proc(5) shows them.
fn file_system_id(ids: &str) -> Option<u32> {
    ids.split_ascii_whitespace().nth(3)?.parse().ok()
}

/// Bit of CAP_FSETID in a set of capabilities (capabilities(7)).
const CAP_FSETID: u64 = 1 << 4;

impl Principal for Process {
    fn has_cap_fsetid(&self) -> bool {
        self.has_cap_fsetid.unwrap_or_else(|| {
            let effective = self
                .status("CapEff")
                .and_then(|set| u64::from_str_radix(&set, 16).ok());
            effective.is_some_and(|set| set & CAP_FSETID != 0) && self.is_in_own_user_namespace()
        })
    }

    fn is_in_group(&self, gid: u32) -> bool {
        let contains_gid = |groups: String| {
            groups
                .split_ascii_whitespace()
                .any(|group| group.parse() == Ok(gid))
        };
        let file_system_gid = if self.caller.gid != UNKNOWN_ID {
            Some(self.caller.gid)
        } else {
            self.status("Gid").and_then(|ids| file_system_id(&ids))
        };
        file_system_gid == Some(gid) || self.status("Groups").is_some_and(contains_gid)
    }

    fn has_left(&self) -> bool {
        let caller_status = self.caller_status.as_ref();
        caller_status.is_some_and(|caller_status| !caller_status.is_waiting())
    }
}

/// Returns why the process closes a descriptor: it calls close(2), exits, or was killed. Called before its FLUSH is
/// answered, while its thread waits in the kernel and the thread's number is not reused.
///
/// A thread that ends releases its memory before it closes its descriptors (do_exit in the kernel). One that calls
/// close(2) or execve(2) still has its memory, and [`has_memory`] does not wait for the exec.
///
/// If firnd cannot see the process (in another PID namespace), the close counts as a call of close(2). If firnd cannot
/// read the exit code of an ended process (of another user), the close counts as an exit.
pub(crate) fn closing(caller: Caller) -> Closing {
    let pid = caller.pid;
    if pid == 0 || has_memory(pid) != Some(false) {
        return Closing::Called;
    }
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    match stat.as_deref().and_then(exit_code) {
        Some(code) if code & SIGNAL_BITS != 0 => Closing::Killed,
        _ => Closing::Exited,
    }
}

/// Whether two threads belong to one process. False if the first thread has ended. Like [`closing`], this reads nothing
/// that waits for an exec.
pub(crate) fn is_same_process(first: u32, second: u32) -> bool {
    first == second || std::fs::metadata(format!("/proc/{first}/task/{second}")).is_ok()
}

/// Bits of an exit code that hold the signal, as for wait(2).
const SIGNAL_BITS: u32 = 0x7f;

/// Returns the exit code: the last field of /proc/PID/stat (proc(5)).
fn exit_code(stat: &str) -> Option<u32> {
    stat.split_ascii_whitespace().next_back()?.parse().ok()
}

/// Returns the mode of a new object. The umask is applied unless the parent has a default ACL (acl(5)); then the
/// backing applies the ACL. `umask` is `None` if the kernel has applied it already.
pub(crate) fn apply_umask<B: Backing>(
    engine: &Engine<B>,
    parent: InodeId,
    mode: u32,
    umask: Option<u32>,
) -> u32 {
    let Some(umask) = umask else { return mode };
    if mode & umask == 0 || has_default_acl(engine, parent) {
        mode
    } else {
        mode & !umask
    }
}

/// Whether a directory has a default ACL. False, with a line in the log, if that cannot be read.
fn has_default_acl<B: Backing>(engine: &Engine<B>, parent: InodeId) -> bool {
    match engine.namespace.get_xattr(parent, OsStr::new(DEFAULT_ACL)) {
        Ok(value) => !value.is_empty(),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => false,
        Err(error) => {
            tracing::debug!(%error, "cannot read whether a directory has a default ACL; the umask is applied");
            false
        }
    }
}
