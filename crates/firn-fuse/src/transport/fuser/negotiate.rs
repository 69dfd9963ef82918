//! What the mount asks of the kernel at init.
//!
//! Not asked: the writeback cache (halves throughput, design measurement); remote POSIX and BSD locks (programs of
//! one host lock in the kernel; locks between hosts are not promised); and O_TRUNC as a part of open. With it the
//! kernel has a file truncated before it looks whether a program runs from it: ETXTBSY came too late for the program.

use std::io;

use fuser::{InitFlags, KernelConfig};

use crate::dispatcher::Negotiated;

/// Larger requests gained nothing on two cores and are clamped unless `fs.fuse.max_pages_limit` is
/// raised.
const MAX_WRITE_BYTES: u32 = 1 << 20;
/// Requests of asynchronous callers (pages that are read ahead for mappings, closes, io_uring) that the kernel hands to
/// firnd at a time. While so many hang, it keeps back all others, also those for other files; so there is no limit of
/// Firn's own. The kernel's for a mount of another user than root is `max_user_bgreq` of the module fuse.
const MAX_BACKGROUND: u16 = u16::MAX;
/// A backing that is itself stacked cannot be passed through, and that is the depth that says so.
const STACK_DEPTH: u32 = 1;

/// Capabilities that serve every mount, each taken only where the kernel has it.
const WANTED: [InitFlags; 9] = [
    InitFlags::FUSE_ASYNC_READ,
    InitFlags::FUSE_DONT_MASK,
    InitFlags::FUSE_POSIX_ACL,
    InitFlags::FUSE_DO_READDIRPLUS,
    InitFlags::FUSE_READDIRPLUS_AUTO,
    InitFlags::FUSE_ASYNC_DIO,
    InitFlags::FUSE_PARALLEL_DIROPS,
    InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
    // Pages of a mapped file are dropped when its times say that another host changed it.
    InitFlags::FUSE_AUTO_INVAL_DATA,
];

/// Configures the connection.
pub(crate) fn negotiate(config: &mut KernelConfig, passthrough: bool) -> io::Result<Negotiated> {
    for flag in WANTED {
        if config.add_capabilities(flag).is_err() {
            tracing::info!(?flag, "the kernel does not offer it");
        }
    }
    let _ = config.set_max_write(MAX_WRITE_BYTES);
    let _ = config.set_max_background(MAX_BACKGROUND);
    if let Err(most) = config.set_max_readahead(MAX_WRITE_BYTES) {
        let _ = config.set_max_readahead(most);
    }
    let passthrough = passthrough
        && config.set_max_stack_depth(STACK_DEPTH).is_ok()
        && config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok();
    Ok(Negotiated {
        passthrough,
        applies_umask: config.capabilities().contains(InitFlags::FUSE_DONT_MASK),
    })
}
