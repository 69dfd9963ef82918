//! The caller of a request, how it ends, and the mode of a new object.

mod fate;
mod io_uring;

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;

use firn_backing::{Backing, Caller, Errno};
use firn_engine::{Closing, Engine, InodeId, Principal};

pub(crate) use fate::{Fate, fate};
pub(crate) use io_uring::IoUringUsers;

use crate::unanswered::StillWaits;

const DEFAULT_ACL: &str = "system.posix_acl_default";

/// The process that waits for an answer, and with it may tell more of itself in /proc: until the answer its thread
/// stays in the kernel. That is read only where something depends on it, which is a file with set-id bits.
///
/// What cannot be read (of a process in a PID namespace that firnd does not see) counts as no right: what a process
/// without it may not keep goes.
#[derive(Clone)]
pub(crate) struct Process {
    caller: Caller,
    has_cap_fsetid: Option<bool>,
    still_waits: Option<StillWaits>,
}

impl Process {
    pub(crate) fn of(caller: Caller) -> Self {
        Self {
            caller,
            has_cap_fsetid: None,
            still_waits: None,
        }
    }

    /// It can be asked whether the process still waits for the answer.
    pub(crate) fn waiting(self, still_waits: StillWaits) -> Self {
        Self {
            still_waits: Some(still_waits),
            ..self
        }
    }

    /// The kernel told with the request.
    pub(crate) fn known_to_have_cap_fsetid(self, has: bool) -> Self {
        Self {
            has_cap_fsetid: Some(has),
            ..self
        }
    }

    /// The value of a line of /proc/PID/status (proc(5)).
    fn status(&self, field: &str) -> Option<String> {
        let pid = self.caller.pid;
        let status = (pid != 0)
            .then(|| std::fs::read_to_string(format!("/proc/{pid}/status")))?
            .ok()?;
        let value = |line: &str| {
            line.strip_prefix(field)?
                .strip_prefix(':')
                .map(|value| value.trim().to_owned())
        };
        status.lines().find_map(value)
    }

    /// The user as whom it uses files; `None` where that cannot be told. Where mounts can be id-mapped, the kernel tells
    /// only for what makes something.
    pub(crate) fn file_system_uid(&self) -> Option<u32> {
        if self.caller.uid != UNKNOWN_ID {
            return Some(self.caller.uid);
        }
        file_system_id(&self.status("Uid")?)
    }

    /// Capabilities count in the user namespace that they are of.
    fn is_in_own_user_namespace(&self) -> bool {
        let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/user")).ok();
        of("self").is_some_and(|ours| of(&self.caller.pid.to_string()) == Some(ours))
    }
}

/// What the kernel says of a user or group that it cannot tell (FUSE_INVALID_UIDGID).
const UNKNOWN_ID: u32 = u32::MAX;

/// Of the real, effective, saved and file system id, as proc(5) shows them.
fn file_system_id(ids: &str) -> Option<u32> {
    ids.split_ascii_whitespace().nth(3)?.parse().ok()
}

/// Its bit in a set of capabilities (capabilities(7)).
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
        let is_one_of = |groups: String| {
            groups
                .split_ascii_whitespace()
                .any(|group| group.parse() == Ok(gid))
        };
        let own = if self.caller.gid != UNKNOWN_ID {
            Some(self.caller.gid)
        } else {
            self.status("Gid").and_then(|ids| file_system_id(&ids))
        };
        own == Some(gid) || self.status("Groups").is_some_and(is_one_of)
    }

    fn has_left(&self) -> bool {
        let still_waits = self.still_waits.as_ref();
        still_waits.is_some_and(|still_waits| !still_waits.get())
    }
}

/// How the process came to close a descriptor. To be asked before its FLUSH is answered: until then the thread that
/// sent it waits in the kernel, and its number is not reused.
///
/// A thread that ends gives its memory back before it closes its descriptors (do_exit in the kernel). One that calls
/// close(2) still has its memory, which `statm` tells without a lock that a sleeping thread may hold. Only of a thread
/// without memory more is asked: most of /proc/PID waits for an exec to end, and the exec waits for this very answer.
///
/// What cannot be asked counts as a close (a process of a namespace that firnd does not see) or as an exit by itself
/// (how a process of another user ends).
pub(crate) fn closing(caller: Caller) -> Closing {
    let pid = caller.pid;
    if pid == 0 || has_memory(pid) {
        return Closing::Called;
    }
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    match stat.as_deref().and_then(exit_code) {
        Some(code) if code & SIGNAL_BITS != 0 => Closing::Killed,
        _ => Closing::Exited,
    }
}

/// Whether two threads are of one process; not if the first has ended. Like [`closing`] it asks nothing that waits for
/// an exec.
pub(crate) fn is_same_process(one: u32, other: u32) -> bool {
    one == other || std::fs::metadata(format!("/proc/{one}/task/{other}")).is_ok()
}

/// Whether a thread has not given its memory back; also where that cannot be asked.
fn has_memory(pid: u32) -> bool {
    // Every close asks, so with as few calls as can be: the first two bytes of the number of pages tell.
    let mut pages = [0; 2];
    let statm = File::open(format!("/proc/{pid}/statm"));
    let read = statm.and_then(|mut statm| statm.read(&mut pages));
    read.is_err() || &pages != b"0 "
}

/// The signal in an exit code as wait(2) gives it.
const SIGNAL_BITS: u32 = 0x7f;

/// The last field of /proc/PID/stat (proc(5)).
fn exit_code(stat: &str) -> Option<u32> {
    stat.split_ascii_whitespace().next_back()?.parse().ok()
}

/// The mode of a new object: the umask counts unless the parent has a default ACL (acl(5)), which
/// the backing applies by itself. Without a umask the kernel saw to it.
pub(crate) fn masked<B: Backing>(
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

fn has_default_acl<B: Backing>(engine: &Engine<B>, parent: InodeId) -> bool {
    match engine.namespace.get_xattr(parent, OsStr::new(DEFAULT_ACL)) {
        Ok(value) => !value.is_empty(),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => false,
        Err(error) => {
            tracing::debug!(%error, "cannot tell whether a directory has a default ACL");
            false
        }
    }
}
