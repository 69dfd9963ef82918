//! Opening the file of an arena that is there.
//!
//! Promise: nothing is believed, nor mapped, that another user could have put there, or that is no arena.

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

/// Opens and maps a file of this user whose superblock is good.
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
    // O_NONBLOCK: a named pipe in its place may have no writer.
    let flags = access | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
        // What O_NOFOLLOW says of a link.
        Errno::LOOP => {
            let why = Distrust::Kind {
                found: "a symbolic link",
                expected: "a regular file",
            };
            ArenaError::Distrusted { path: name(), why }
        }
        errno => io("open it")(errno),
    })?;
    let stat = rustix::fs::fstat(&file).map_err(io("stat it"))?;
    let size = stat.st_size as u64;
    let facts = Facts::of(&stat).check(Expected::File, rustix::process::geteuid().as_raw());
    let distrusted = |why| ArenaError::Distrusted { path: name(), why };
    if let Err(why @ Distrust::Kind { .. }) = facts {
        return Err(distrusted(why));
    }
    let mut page = vec![0u8; SUPERBLOCK_BYTES.min(size as usize)];
    rustix::io::pread(&file, &mut page[..], 0).map_err(io("read it"))?;
    // Of a file that is no arena at all this says more than whose it is.
    let superblock = Superblock::decode(&page).map_err(|source| ArenaError::Format {
        path: name(),
        source,
    })?;
    facts.map_err(distrusted)?;
    let expected = superblock.geometry.file_bytes();
    if size < expected {
        let source = FormatError::Truncated {
            what: "arena",
            found: size,
            expected,
        };
        return Err(ArenaError::Format {
            path: name(),
            source,
        });
    }
    Ok((
        Arc::new(Map::new(path, file, expected, writable)?),
        superblock,
    ))
}
