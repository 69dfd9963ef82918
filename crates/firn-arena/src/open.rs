//! Opens and maps the file of an existing arena, the shared memory with bytes that are not in the backing directory
//! yet. The *superblock*, its first page, gives its size.
//!
//! Promise: a file is mapped only if
//! * it is a regular file, and the path's last component is no symbolic link;
//! * it belongs to this user, has one name, and no other user has access to it (`firn_trust`);
//! * its superblock is valid, and the file is at least as long as the superblock says.

use std::path::Path;
use std::sync::Arc;

use firn_format::FormatError;
use firn_format::quote::quoted_path;
use firn_format::superblock::{SUPERBLOCK_BYTES, Superblock};
use firn_trust::{Distrust, Expected, FileMetadata};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::ArenaError;
use crate::map::{FileAccess, Map};

/// Opens and maps the arena at `path`, after checks of its type, owner and superblock (its first page). Returns the
/// mapping and the superblock.
pub(crate) fn open_arena(
    path: &Path,
    access: FileAccess,
) -> Result<(Arc<Map>, Superblock), ArenaError> {
    let io_error = |what, source| ArenaError::Io {
        path: quoted_path(path),
        what,
        source,
    };
    let distrusted = |reason| ArenaError::Distrusted {
        path: quoted_path(path),
        reason,
    };
    let invalid = |source| ArenaError::Format {
        path: quoted_path(path),
        source,
    };
    // O_NONBLOCK: if the path names a pipe without a writer, the open must not wait for one.
    let flags = access.open_flags() | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
        // O_NOFOLLOW reports a symbolic link with ELOOP.
        Errno::LOOP => distrusted(Distrust::Kind {
            found: "a symbolic link",
            expected: "a regular file",
        }),
        errno => io_error("open it", errno),
    })?;
    let stat = rustix::fs::fstat(&file).map_err(|errno| io_error("stat it", errno))?;
    let file_len = stat.st_size as u64;
    let trust =
        FileMetadata::from_stat(&stat).check(Expected::File, rustix::process::geteuid().as_raw());
    // Only the type is refused here, because no superblock is read from a device or pipe. The rest of `trust` follows
    // after the superblock.
    if let Err(reason @ Distrust::Kind { .. }) = trust {
        return Err(distrusted(reason));
    }
    let mut superblock_bytes = vec![0u8; SUPERBLOCK_BYTES.min(file_len as usize)];
    // After a short read the rest is zeros, and the checksum of the superblock does not match.
    rustix::io::pread(&file, &mut superblock_bytes[..], 0)
        .map_err(|errno| io_error("read it", errno))?;
    // Checked before the owner and the mode: to a user, "not an arena" is the more useful message.
    let superblock = Superblock::decode(&superblock_bytes).map_err(invalid)?;
    trust.map_err(distrusted)?;
    let expected_len = superblock.geometry.file_bytes();
    if file_len < expected_len {
        return Err(invalid(FormatError::Truncated {
            what: "arena",
            found: file_len,
            expected: expected_len,
        }));
    }
    let map = Map::new(path, file, expected_len, access)?;
    Ok((Arc::new(map), superblock))
}
