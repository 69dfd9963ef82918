//! Directory entries for readdir and readdirplus.
//!
//! Entries are taken from the engine in batches and looked up between two batches, so that no lookup
//! happens while the directory stream is held.

use std::ffi::{OsStr, OsString};
use std::time::Duration;

use firn_backing::{Backing, Errno, Kind};
use firn_engine::{Engine, HandleId, InodeId};
use fuser::{FileType, Generation, INodeNo, ReplyDirectory, ReplyDirectoryPlus};

use crate::convert;
use crate::failures::Answer;

/// Entries looked up at a time; what does not fit the kernel's buffer was taken in vain.
const BATCH: usize = 32;

/// Answers readdir. Inode numbers are the backing's here: an entry that was never looked up has no
/// inode id yet.
pub(crate) fn readdir<B: Backing>(
    engine: &Engine<B>,
    dir: HandleId,
    from: u64,
    mut reply: Answer<B, ReplyDirectory>,
) {
    let listed = engine.read_dir(dir, from as i64, &mut |entry| {
        let kind = entry.kind.map_or(FileType::RegularFile, convert::file_type);
        !reply.add(INodeNo(entry.ino), entry.cookie as u64, kind, entry.name)
    });
    match listed {
        Ok(()) => reply.success().ok(),
        Err(error) => reply.error(error),
    }
}

struct Found {
    name: OsString,
    ino: u64,
    kind: Option<Kind>,
    cookie: i64,
}

/// Answers readdirplus. An entry that vanishes between reading and looking it up is left out.
pub(crate) fn readdirplus<B: Backing>(
    engine: &Engine<B>,
    inode: InodeId,
    dir: HandleId,
    from: u64,
    ttl: &Duration,
    mut reply: Answer<B, ReplyDirectoryPlus>,
) {
    let mut cookie = from as i64;
    loop {
        let batch = match batch(engine, dir, cookie) {
            Ok(batch) => batch,
            // What is already in the reply must reach the kernel: its lookups are counted.
            Err(_) if cookie != from as i64 => return reply.success().ok(),
            Err(error) => return reply.error(error),
        };
        let more = batch.len() == BATCH;
        for found in batch {
            cookie = found.cookie;
            if add(engine, inode, &found, ttl, &mut reply) {
                return reply.success().ok();
            }
        }
        if !more {
            return reply.success().ok();
        }
    }
}

fn batch<B: Backing>(engine: &Engine<B>, dir: HandleId, cookie: i64) -> Result<Vec<Found>, Errno> {
    let mut batch = Vec::with_capacity(BATCH);
    engine.read_dir(dir, cookie, &mut |entry| {
        if batch.len() == BATCH {
            return false;
        }
        let ino = entry.ino;
        let kind = entry.kind;
        let cookie = entry.cookie;
        batch.push(Found {
            name: entry.name.to_owned(),
            ino,
            kind,
            cookie,
        });
        batch.len() < BATCH
    })?;
    Ok(batch)
}

/// Adds one entry; true if the reply was full and the entry is not in it.
fn add<B: Backing>(
    engine: &Engine<B>,
    inode: InodeId,
    found: &Found,
    ttl: &Duration,
    reply: &mut ReplyDirectoryPlus,
) -> bool {
    let cookie = found.cookie as u64;
    let name: &OsStr = &found.name;
    if name == "." || name == ".." {
        // The kernel takes the name and inode number of these two and does not count a lookup.
        let ino = if name == "." {
            inode.0
        } else {
            found.ino.max(1)
        };
        return reply.add(
            INodeNo(ino),
            cookie,
            name,
            ttl,
            &bare(ino, Some(Kind::Dir)),
            Generation(0),
        );
    }
    match engine.lookup(inode, name) {
        Ok(entry) => {
            let attr = convert::attr(entry.inode, &entry.attr);
            let none = Duration::ZERO;
            let ttl = if engine.is_written_past_the_kernel(entry.inode) {
                &none
            } else {
                ttl
            };
            let full = reply.add(attr.ino, cookie, name, ttl, &attr, Generation(0));
            if full {
                engine.forget(entry.inode, 1);
            }
            full
        }
        Err(Errno::NOENT | Errno::STALE) => false,
        // The name is there although its object cannot be looked at: inode 0 tells the kernel to list
        // it and to ask again when somebody wants it.
        Err(_) => reply.add(
            INodeNo(0),
            cookie,
            name,
            &Duration::ZERO,
            &bare(0, found.kind),
            Generation(0),
        ),
    }
}

/// Attributes of which the kernel uses only number and kind.
fn bare(ino: u64, kind: Option<Kind>) -> fuser::FileAttr {
    let epoch = std::time::UNIX_EPOCH;
    fuser::FileAttr {
        ino: INodeNo(ino),
        size: 0,
        blocks: 0,
        atime: epoch,
        mtime: epoch,
        ctime: epoch,
        crtime: epoch,
        kind: kind.map_or(FileType::RegularFile, convert::file_type),
        perm: 0,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}
