//! Tells clients of the control socket where bytes of files lie in the arena, the shared memory with the bytes that are
//! not in the backing yet.
//!
//! A *chunk* is a unit of the arena's memory. A *chunk list* says where each byte of a file is. While a connection
//! holds a list, the listed bytes stay in place.
//!
//! Promise: a connection holds at most [`LISTS_MAX`] lists.

use std::collections::BTreeMap;
use std::sync::Arc;

use firn_arena::Arena;
use firn_backing::Errno;
use firn_engine::{Engine, HeldChunks};
use firn_format::geometry::PAGE;
use firn_format::spill::SPILL_DATA_OFFSET;
use firn_protocol::path::BytePath;
use firn_protocol::{ChunkList, DataRegion, Reply, SpillRegion};

use crate::status::chunk_piece;
use crate::store::Store;

/// Limit of lists of one connection. An agent, which copies files to other hosts, needs one for each file that it reads
/// at the same time.
const LISTS_MAX: usize = 1024;

/// The chunk lists of one connection. Its drop releases all of them.
#[derive(Default)]
pub(crate) struct ChunkLists {
    held: BTreeMap<u64, HeldChunks<Store>>,
    last_number: u64,
}

impl ChunkLists {
    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Makes a chunk list for the file at `path`, which says where each byte is, and returns it as the reply. Until the
    /// list is released, the listed bytes stay in place. The reply is EMFILE if the connection has too many lists.
    pub(crate) fn create_list(&mut self, engine: &Arc<Engine<Store>>, path: &BytePath) -> Reply {
        if self.held.len() >= LISTS_MAX {
            let message =
                format!("this connection holds {LISTS_MAX} chunk lists already: release some");
            return Reply::Error {
                errno: libc::EMFILE,
                message,
            };
        }
        let (held, list_parts) = match HeldChunks::list_file(engine, path.as_bytes()) {
            Ok(listed) => listed,
            Err(errno) => {
                return Reply::Error {
                    errno: errno.raw_os_error(),
                    message: describe_list_error(errno, path),
                };
            }
        };
        self.last_number += 1;
        let reply = ChunkList {
            list: self.last_number,
            bytes: held.bytes(),
            changes: held.changes(),
            pieces: list_parts.into_iter().map(chunk_piece).collect(),
        };
        self.held.insert(self.last_number, held);
        Reply::Chunks(reply)
    }

    /// Returns whether the file has changed since list `list` was made.
    pub(crate) fn check(&self, list: u64) -> Reply {
        match self.held.get(&list) {
            Some(held) => Reply::ChunksChecked {
                changed: held.changed(),
            },
            None => unknown_list_reply(list),
        }
    }

    /// Releases list `list`, so that its bytes may move or be freed.
    pub(crate) fn release(&mut self, list: u64) -> Reply {
        match self.held.remove(&list) {
            Some(_) => Reply::Done,
            None => unknown_list_reply(list),
        }
    }
}

/// Returns the error for a list number that this connection does not hold.
fn unknown_list_reply(list: u64) -> Reply {
    let message = format!("this connection holds no chunk list {list}");
    Reply::Error {
        errno: libc::EBADF,
        message,
    }
}

/// Describes why no chunk list (the places of its bytes) can be made for the file at `path`.
fn describe_list_error(errno: Errno, path: &BytePath) -> String {
    let shown = if path.is_empty() {
        "the mount point".to_owned()
    } else {
        path.to_string()
    };
    match errno {
        Errno::NOENT | Errno::NOTDIR => format!("{shown}: no such file in this mount"),
        Errno::ISDIR => format!("{shown} is a directory: name a file in it"),
        Errno::INVAL => format!("{shown} is not a regular file"),
        Errno::IO => format!(
            "{shown}: its spilled bytes cannot be read, or the backing fails; `firn status` has the details"
        ),
        errno => format!("{shown}: the backing reports: {errno}"),
    }
}

/// Returns where the bytes of the arena (the shared memory of the mount) are: in its file, and in its spill file on a
/// disk if there is one.
pub(crate) fn data_region(arena: &Arena) -> DataRegion {
    let geometry = arena.geometry();
    let spill = arena.spill_file().map(|file| SpillRegion {
        path: file.path().into(),
        offset: SPILL_DATA_OFFSET,
        bytes: geometry.spill_bytes(),
    });
    DataRegion {
        path: arena.path().into(),
        uuid: base16ct::lower::encode_string(&arena.superblock().uuid),
        offset: geometry.data_offset(),
        bytes: geometry.data_bytes(),
        page_bytes: PAGE,
        chunk_bytes: geometry.chunk_bytes,
        spill,
    }
}
