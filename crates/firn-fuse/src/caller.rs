//! Who asks, and with which mode a new object is made.

use std::ffi::OsStr;

use firn_backing::{Backing, Caller, Errno};
use firn_engine::{Engine, NodeId};
use fuser::Request;

const DEFAULT_ACL: &str = "system.posix_acl_default";

/// The calling process as the engine knows it.
pub(crate) fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid(), pid: request.pid() }
}

/// The mode of a new object: the umask counts unless the parent has a default ACL (acl(5)), which
/// the backing applies by itself.
pub(crate) fn masked<B: Backing>(engine: &Engine<B>, parent: NodeId, mode: u32, umask: u32) -> u32 {
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
