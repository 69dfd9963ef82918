//! Requests that list a directory: readdir and readdirplus.
//!
//! The engine, which holds the files, keeps the directory stream locked while it hands out entries, and a look-up may
//! hang. So readdirplus takes a batch of entries, releases the stream, and then looks the entries up.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use firn_backing::{Attr, Backing, DirEntry, Errno, Kind, Time};
use firn_engine::{Engine, HandleId, InodeId};

use crate::dispatcher::{AdapterOptions, Dispatcher, attributes_for_kernel};
use crate::reply::{Answer, Attributes, ListedEntry, Reply, Responder};
use crate::topic::Topic;

/// Number of entries that readdirplus takes and looks up at a time. Entries that do not fit into the kernel's buffer
/// are read again.
const BATCH: usize = 32;
/// Inode number by which the kernel knows that an entry was not looked up.
const NO_INODE: u64 = 0;

impl<B: Backing, R: Responder> Dispatcher<B, R> {
    /// Answers a readdir. The answer has inode numbers of the backing, because an entry that was never looked up has no
    /// inode id.
    pub(super) fn readdir(&self, inode: InodeId, dir: HandleId, cookie: i64, mut reply: Reply<R>) {
        self.run_call(Topic::Inode(inode), move |engine| {
            let listed = engine.namespace.read_dir(dir, cookie, &mut |entry| {
                reply.add_entry(&ListedEntry {
                    ino: entry.ino,
                    cookie: entry.cookie,
                    kind: entry.kind,
                    name: entry.name,
                })
            });
            reply.answer(listed.map(|()| Answer::Listed));
        });
    }

    /// Answers a readdirplus, with the entries after the one that `cookie` stands for. Leaves out an entry that
    /// vanishes between its read and its look-up.
    pub(super) fn readdirplus(
        &self,
        inode: InodeId,
        dir: HandleId,
        cookie: i64,
        mut reply: Reply<R>,
    ) {
        let options = self.options;
        self.run_call(Topic::Inode(inode), move |engine| {
            let listing = Listing {
                engine,
                options,
                inode,
                dir,
            };
            let listed = listing.add_entries(cookie, &mut reply);
            reply.answer(listed.map(|()| Answer::Listed));
        });
    }
}

/// An entry that was read but not looked up yet.
struct UnresolvedEntry {
    name: OsString,
    ino: u64,
    kind: Option<Kind>,
    cookie: i64,
}

/// The answer to one readdirplus.
struct Listing<'a, B: Backing> {
    engine: &'a Engine<B>,
    options: AdapterOptions,
    inode: InodeId,
    dir: HandleId,
}

impl<B: Backing> Listing<'_, B> {
    /// Adds the entries after the cookie `start`, until the answer is full or the directory ends.
    fn add_entries<R: Responder>(&self, start: i64, reply: &mut Reply<R>) -> Result<(), Errno> {
        let mut cookie = start;
        loop {
            let batch = match self.read_batch(cookie) {
                Ok(batch) => batch,
                // The answer already contains entries, whose look-ups the kernel must get. So this error is not
                // returned.
                Err(_) if cookie != start => return Ok(()),
                Err(error) => return Err(error),
            };
            let is_last = batch.len() < BATCH;
            for entry in batch {
                cookie = entry.cookie;
                if !self.add_entry(&entry, reply) {
                    return Ok(());
                }
            }
            if is_last {
                return Ok(());
            }
        }
    }

    /// Reads up to [`BATCH`] entries after the one that `cookie` (a position in the directory) stands for. Fewer mean
    /// that the directory ends.
    fn read_batch(&self, cookie: i64) -> Result<Vec<UnresolvedEntry>, Errno> {
        let mut batch = Vec::with_capacity(BATCH);
        // Returns whether the engine is to read a further entry.
        let mut add_to_batch = |entry: DirEntry<'_>| {
            // A safeguard: a backing that asks again after `false` cannot make the batch longer.
            if batch.len() == BATCH {
                return false;
            }
            batch.push(UnresolvedEntry {
                name: entry.name.to_owned(),
                ino: entry.ino,
                kind: entry.kind,
                cookie: entry.cookie,
            });
            // Said with the last entry that fits, so that no further one is read in vain.
            batch.len() < BATCH
        };
        self.engine
            .namespace
            .read_dir(self.dir, cookie, &mut add_to_batch)?;
        Ok(batch)
    }

    /// Looks up an entry and adds it, with its attributes, to the answer. The kernel then counts one look-up of the
    /// inode, as the engine does. Returns false, without adding the entry, if the answer is full.
    fn add_entry<R: Responder>(&self, entry: &UnresolvedEntry, reply: &mut Reply<R>) -> bool {
        let name: &OsStr = &entry.name;
        let listed_entry = ListedEntry {
            ino: entry.ino,
            cookie: entry.cookie,
            kind: entry.kind,
            name,
        };
        // The kernel uses only the name and the inode number of these two, and counts no look-up.
        let number_without_lookup = match name.as_bytes() {
            b"." => Some(self.inode.0),
            b".." => Some(entry.ino.max(1)),
            _ => None,
        };
        if let Some(number) = number_without_lookup {
            let attributes = bare_attributes(number, Some(Kind::Dir), self.options.attr_timeout);
            return reply.add_entry_plus(&listed_entry, &attributes);
        }
        match self.engine.namespace.lookup(self.inode, name) {
            Ok(child) => {
                let attributes =
                    attributes_for_kernel(self.engine, self.options, child.inode, child.attr);
                let is_added = reply.add_entry_plus(&listed_entry, &attributes);
                if !is_added {
                    // The kernel does not learn of this look-up, so it will not take it back.
                    self.engine.namespace.forget(child.inode, 1);
                }
                is_added
            }
            // The entry has vanished, so it is left out.
            Err(Errno::NOENT | Errno::STALE) => true,
            // The name exists, but its object cannot be read now. Without an inode, the kernel lists the name and looks
            // it up when a program uses it.
            Err(_) => {
                let attributes = bare_attributes(NO_INODE, entry.kind, Duration::ZERO);
                reply.add_entry_plus(&listed_entry, &attributes)
            }
        }
    }
}

/// Attributes for an entry of which the kernel uses only the inode number and the kind.
pub(crate) fn bare_attributes(number: u64, kind: Option<Kind>, ttl: Duration) -> Attributes {
    let epoch = Time { sec: 0, nsec: 0 };
    let attr = Attr {
        dev: 0,
        ino: number,
        kind: kind.unwrap_or(Kind::File),
        mode: 0,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        size: 0,
        blocks: 0,
        blksize: 4096,
        atime: epoch,
        mtime: epoch,
        ctime: epoch,
        btime: None,
    };
    Attributes {
        inode: InodeId(number),
        attr,
        ttl,
        name_ttl: ttl,
    }
}
