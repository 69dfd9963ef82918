//! The answer to INIT, the first message of the kernel: which capabilities of the kernel a mount uses.
//!
//! Capabilities that Firn does not use
//! * The writeback cache: it halved the measured throughput.
//! * Locks, except on mounts that share locks with other hosts. Without this capability the kernel keeps locks itself.
//! * O_TRUNC as a part of open: the kernel would truncate a file before it checks whether a program runs from it, and
//!   the program would get ETXTBSY only after the truncation.

use std::io;

use crate::dispatcher::Negotiated;
use crate::transport::dev_fuse::abi::{self, InitIn, InitOut, init_flags as flag};

/// Maximum number of bytes of one write request. Larger requests were not faster on two cores, and the kernel splits
/// them anyway unless `fs.fuse.max_pages_limit` is raised.
pub(super) const WRITE_BYTES_MAX: u32 = 1 << 20;
/// Maximum number of background requests (readahead, closes, io_uring) that the kernel sends at a time. While this
/// number of them hang, the kernel delays all other background requests, even for other files. So Firn asks for the
/// largest number. For a mount of a user other than root the kernel's limit is `max_user_bgreq` of the module fuse.
const BACKGROUND_MAX: u16 = u16::MAX;
/// How many stacked file systems the kernel allows below a passthrough file. With 1, passthrough is impossible for a
/// backing that is itself stacked (overlayfs).
const STACK_DEPTH: u32 = 1;

/// Capabilities that every mount uses if the kernel offers them.
const WANTED: [(u64, &str); 10] = [
    (flag::ASYNC_READ, "async_read"),
    (flag::DONT_MASK, "dont_mask"),
    (flag::POSIX_ACL, "posix_acl"),
    (flag::DO_READDIRPLUS, "readdirplus"),
    (flag::READDIRPLUS_AUTO, "readdirplus_auto"),
    (flag::ASYNC_DIO, "async_dio"),
    (flag::PARALLEL_DIROPS, "parallel_dirops"),
    (flag::DIRECT_IO_ALLOW_MMAP, "direct_io_allow_mmap"),
    // The kernel drops pages of a mapped file when the file's times show that another host has changed the file.
    (flag::AUTO_INVAL_DATA, "auto_inval_data"),
    // Id-mapped mounts (Linux 6.12). The capability needs `default_permissions`, with which Firn always mounts. With
    // it, only requests that make an object contain the caller's uid and gid.
    (flag::ALLOW_IDMAP, "allow_idmap"),
];

/// Capabilities that only some mounts ask for.
#[derive(Clone, Copy)]
pub(super) struct RequestedFeatures {
    /// The kernel reads drained files itself: those of which all bytes are in the backing directory.
    pub(super) passthrough: bool,
    /// The kernel sends requests for locks to firnd, the process that serves the mount.
    pub(super) locks: bool,
}

/// Returns the answer to an INIT, and the capabilities that both sides use from then on. Fails if the kernel is too
/// old, or if the mount needs locks and the kernel cannot send them.
pub(super) fn negotiate(
    asked: &InitIn,
    RequestedFeatures { passthrough, locks }: RequestedFeatures,
    page_bytes: u32,
) -> io::Result<(InitOut, Negotiated)> {
    if asked.major != abi::MAJOR || asked.minor < abi::MINOR_MIN {
        let message = format!(
            "the kernel speaks version {}.{} of the FUSE protocol; Firn needs {}.{} or a later 7.x",
            asked.major,
            asked.minor,
            abi::MAJOR,
            abi::MINOR_MIN
        );
        return Err(io::Error::new(io::ErrorKind::Unsupported, message));
    }
    let offered = offered_flags(asked);
    for (_, name) in WANTED.iter().filter(|(flag, _)| offered & flag == 0) {
        tracing::info!(capability = name, "the kernel does not offer a capability");
    }
    let mut accepted = flag::BIG_WRITES | flag::MAX_PAGES | flag::INIT_EXT;
    accepted |= WANTED.iter().map(|(flag, _)| flag).sum::<u64>();
    if passthrough {
        accepted |= flag::PASSTHROUGH;
    }
    if locks {
        let needed = flag::POSIX_LOCKS | flag::FLOCK_LOCKS;
        if offered & needed != needed {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel does not send requests for file locks, which this mount needs",
            ));
        }
        accepted |= needed;
    }
    accepted &= offered;
    let has = |flag: u64| accepted & flag != 0;
    let answer = InitOut {
        major: abi::MAJOR,
        minor: abi::MINOR.min(asked.minor),
        readahead_bytes_max: asked.readahead_bytes_max.min(WRITE_BYTES_MAX),
        flags: accepted as u32,
        flags2: (accepted >> 32) as u32,
        background_max: BACKGROUND_MAX,
        congestion_threshold: BACKGROUND_MAX / 4 * 3,
        write_bytes_max: WRITE_BYTES_MAX,
        time_granularity_ns: 1,
        pages_max: WRITE_BYTES_MAX.div_ceil(page_bytes) as u16,
        stack_depth_max: if has(flag::PASSTHROUGH) {
            STACK_DEPTH
        } else {
            0
        },
        ..InitOut::default()
    };
    let negotiated = Negotiated {
        passthrough: has(flag::PASSTHROUGH),
        applies_umask: has(flag::DONT_MASK),
        resends: offers_resend(asked),
    };
    Ok((answer, negotiated))
}

/// The capabilities that the kernel offers. The upper half counts only with `INIT_EXT`.
fn offered_flags(asked: &InitIn) -> u64 {
    let flags = u64::from(asked.flags);
    if flags & flag::INIT_EXT == 0 {
        return flags;
    }
    flags | u64::from(asked.flags2) << 32
}

/// Whether the kernel can send requests again that were read and not answered.
pub(super) fn offers_resend(asked: &InitIn) -> bool {
    offered_flags(asked) & flag::HAS_RESEND != 0
}

/// Names the options because of which this firnd's answer to INIT (the kernel's first request) differs from the answer
/// that the kernel got from an earlier firnd, which served the mount before.
pub(super) fn name_differences(previous: &InitOut, answer: &InitOut) -> String {
    let all_flags = |init: &InitOut| u64::from(init.flags) | u64::from(init.flags2) << 32;
    let differing_flags = all_flags(previous) ^ all_flags(answer);
    let options = [
        (flag::PASSTHROUGH, "passthrough"),
        (flag::POSIX_LOCKS | flag::FLOCK_LOCKS, "layout"),
    ];
    let mut names = Vec::new();
    for (option_flags, name) in options {
        if differing_flags & option_flags != 0 {
            names.push(name);
        }
    }
    if names.is_empty() {
        names.push("capabilities that this version of Firn requests");
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: RequestedFeatures = RequestedFeatures {
        passthrough: false,
        locks: false,
    };
    const PASSTHROUGH: RequestedFeatures = RequestedFeatures {
        passthrough: true,
        ..NOTHING
    };

    fn init(minor: u32, flags: u64) -> InitIn {
        InitIn {
            major: 7,
            minor,
            readahead_bytes_max: 128 << 10,
            flags: flags as u32,
            flags2: (flags >> 32) as u32,
        }
    }

    #[test]
    fn nothing_is_taken_that_the_kernel_does_not_offer() {
        let (answer, negotiated) =
            negotiate(&init(31, flag::ASYNC_READ), PASSTHROUGH, 4096).unwrap();
        assert_eq!(
            u64::from(answer.flags) | u64::from(answer.flags2) << 32,
            flag::ASYNC_READ
        );
        assert!(!negotiated.passthrough && !negotiated.applies_umask);
        assert_eq!(answer.stack_depth_max, 0);
        assert_eq!((answer.minor, answer.readahead_bytes_max), (31, 128 << 10));
    }

    #[test]
    fn the_second_word_of_flags_counts_only_where_the_kernel_says_so() {
        let flags = flag::ALLOW_IDMAP | flag::PASSTHROUGH | flag::DONT_MASK;
        let (answer, _) = negotiate(&init(45, flags), PASSTHROUGH, 4096).unwrap();
        assert_eq!(answer.flags2, 0);
        let (answer, negotiated) =
            negotiate(&init(45, flags | flag::INIT_EXT), PASSTHROUGH, 4096).unwrap();
        assert_eq!(
            u64::from(answer.flags2) << 32,
            flag::ALLOW_IDMAP | flag::PASSTHROUGH
        );
        assert!(negotiated.passthrough && negotiated.applies_umask);
        assert_eq!((answer.stack_depth_max, answer.minor), (1, 41));
        let (_, negotiated) = negotiate(&init(45, flags | flag::INIT_EXT), NOTHING, 4096).unwrap();
        assert!(!negotiated.passthrough);
    }

    #[test]
    fn locks_come_only_to_mounts_that_want_them() {
        let features = RequestedFeatures {
            locks: true,
            ..NOTHING
        };
        let both = flag::POSIX_LOCKS | flag::FLOCK_LOCKS;
        let (answer, _) = negotiate(&init(41, both), features, 4096).unwrap();
        assert_eq!(u64::from(answer.flags), both);
        let (answer, _) = negotiate(&init(41, both), NOTHING, 4096).unwrap();
        assert_eq!(answer.flags, 0);
        assert!(negotiate(&init(41, flag::POSIX_LOCKS), features, 4096).is_err());
    }

    #[test]
    fn a_kernel_that_is_too_old_is_named() {
        let error = negotiate(&init(22, 0), NOTHING, 4096).unwrap_err();
        assert!(error.to_string().contains("7.22"), "{error}");
        let (answer, _) = negotiate(&init(45, 0), NOTHING, 64 << 10).unwrap();
        assert_eq!(answer.pages_max, 16);
    }
}
