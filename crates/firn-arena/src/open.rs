//! Opens and maps the file of an existing arena.
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
use firn_trust::{Distrust, Expected, Facts};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::ArenaError;
use crate::map::Map;

/// Opens and maps the arena at `path`, for writes too if `writable`. Returns the mapping and the superblock.
pub(crate) fn open_arena(
    path: &Path,
    writable: bool,
) -> Result<(Arc<Map>, Superblock), ArenaError> {
    let name = || quoted_path(path);
    let io = |what| {
        move |source| ArenaError::Io {
            path: quoted_path(path),
            what,
            source,
        }
    };
    let access = if writable {
        OFlags::RDWR
    } else {
        OFlags::RDONLY
    };
    // O_NONBLOCK: if the path names a pipe without a writer, the open must not wait for one.
    let flags = access | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
        // O_NOFOLLOW reports a symbolic link with ELOOP.
        Errno::LOOP => {
            let reason = Distrust::Kind {
                found: "a symbolic link",
                expected: "a regular file",
            };
            ArenaError::Distrusted {
                path: name(),
                reason,
            }
        }
        errno => io("open it")(errno),
    })?;
    let stat = rustix::fs::fstat(&file).map_err(io("stat it"))?;
    let size = stat.st_size as u64;
    let trust = Facts::of(&stat).check(Expected::File, rustix::process::geteuid().as_raw());
    let distrusted = |reason| ArenaError::Distrusted {
        path: name(),
        reason,
    };
    if let Err(reason @ Distrust::Kind { .. }) = trust {
        return Err(distrusted(reason));
    }
    let mut superblock_bytes = vec![0u8; SUPERBLOCK_BYTES.min(size as usize)];
    rustix::io::pread(&file, &mut superblock_bytes[..], 0).map_err(io("read it"))?;
    // Checked before the owner and the mode: to a user, "not an arena" is the more useful message.
    let superblock =
        Superblock::decode(&superblock_bytes).map_err(|source| ArenaError::Format {
            path: name(),
            source,
        })?;
    trust.map_err(distrusted)?;
    let file_bytes = superblock.geometry.file_bytes();
    if size < file_bytes {
        let source = FormatError::Truncated {
            what: "arena",
            found: size,
            expected: file_bytes,
        };
        return Err(ArenaError::Format {
            path: name(),
            source,
        });
    }
    Ok((
        Arc::new(Map::new(path, file, file_bytes, writable)?),
        superblock,
    ))
}
