//! A model of a server that keeps its clients' caches true with locks on extents of files, as Lustre's and GPFS's do.
//!
//! A client that writes to a part of a file that another client wrote last waits until that one has given its lock
//! back. Clients that write side by side to one file pass the locks around and do little else. The model says how long
//! that takes; the bytes pass through FUSE mounts, one for each client, and are stored in a directory. It is a model:
//! no figure that was taken with it is one of a server.
//!
//! | assumption | value | source |
//! |---|---|---|
//! | the holder of a lock | a client, here a mount, whichever of its processes asks | "locks are held by nodes and not processes" (A. Dilger, lustre-discuss, 25 November 2009) |
//! | what a lock is on | aligned units of 1 MiB of a file | Lustre's default stripe; its locks grow to the next conflict, GPFS's tokens to the next block |
//! | a change of owner | 2 ms, one after the other in a unit, side by side in others | call-back to the owner, its write-back of up to 1 MiB (1 ms at 1 GB/s), cancellation, grant |
//! | a unit without a lock | costs nothing | the first grant comes with the open or is large |
//! | readers | share a unit; the first one after a writer, and a writer after readers, costs a change | modes PR and PW of Lustre's lock manager |
//! | close | gives nothing back | locks are kept until they are asked for |
//!
//! Not modelled: disk and network, locks on names and attributes, growth of locks, lock-ahead and group locks.
//!
//! Invariants
//! * A write returns when its client has all units of it, or had them last.
//! * Changes of the owner of one unit do not overlap in time.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firn_backing::Backing;
use fuser::Errno;
use parking_lot::Mutex;

use firn_testfs::{Policy, Transfer};

/// How slow locks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockModel {
    /// Bytes of a file that have one lock.
    pub unit_bytes: u64,
    /// Until a lock has its next owner.
    pub change: Duration,
}

impl LockModel {
    /// See the module.
    pub const EXTENTS: Self = Self {
        unit_bytes: 1 << 20,
        change: Duration::from_millis(2),
    };

    /// The same server for files of a `divisor`-th: times and sizes are divided.
    pub fn scaled(self, divisor: u32) -> Self {
        Self {
            unit_bytes: self.unit_bytes / u64::from(divisor),
            change: self.change / divisor,
        }
    }
}

/// The locks of a server. Its clones are the same.
#[derive(Clone)]
pub struct LockServer(Arc<Shared>);

struct Shared {
    model: LockModel,
    /// By file, and number of the unit in it.
    units: Mutex<HashMap<(u64, u64), Unit>>,
    changes: AtomicU64,
}

/// The policy of one client's mount.
#[derive(Clone)]
pub struct LockClient {
    server: LockServer,
    client: u32,
}

struct Unit {
    owner: Owner,
    /// When the owner has it.
    from: Instant,
}

enum Owner {
    Writer(u32),
    Readers(HashSet<u32>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Read,
    Write,
}

impl LockServer {
    /// All locks are free.
    pub fn new(model: LockModel) -> Self {
        Self(Arc::new(Shared {
            model,
            units: Mutex::default(),
            changes: AtomicU64::new(0),
        }))
    }

    /// The policy of the mount of a client.
    pub fn client(&self, client: u32) -> LockClient {
        LockClient {
            server: self.clone(),
            client,
        }
    }

    /// Changes of owners so far.
    pub fn changes(&self) -> u64 {
        self.0.changes.load(Ordering::Relaxed)
    }

    /// When `client` has the locks of a range for which it asks at `now`.
    fn take(
        &self,
        client: u32,
        file: u64,
        range: Range<u64>,
        wanted: Use,
        now: Instant,
    ) -> Instant {
        let model = &self.0.model;
        let mut units = self.0.units.lock();
        let numbers = range.start / model.unit_bytes..range.end.div_ceil(model.unit_bytes);
        let times = numbers.map(|number| {
            let unit = units
                .entry((file, number))
                .or_insert_with(|| Unit::first(client, wanted, now));
            if !unit.admit(client, wanted) {
                unit.owner = Owner::first(client, wanted);
                unit.from = unit.from.max(now) + model.change;
                self.0.changes.fetch_add(1, Ordering::Relaxed);
            }
            unit.from
        });
        times.max().unwrap_or(now)
    }
}

impl Owner {
    fn first(client: u32, wanted: Use) -> Self {
        match wanted {
            Use::Write => Self::Writer(client),
            Use::Read => Self::Readers(HashSet::from([client])),
        }
    }
}

impl Unit {
    fn first(client: u32, wanted: Use, now: Instant) -> Self {
        Self {
            owner: Owner::first(client, wanted),
            from: now,
        }
    }

    /// Whether `client` needs no change of the owner.
    fn admit(&mut self, client: u32, wanted: Use) -> bool {
        match (&mut self.owner, wanted) {
            (Owner::Writer(owner), _) => *owner == client,
            (Owner::Readers(readers), Use::Read) => {
                readers.insert(client);
                true
            }
            (Owner::Readers(readers), Use::Write) => {
                let is_alone = readers.len() == 1 && readers.contains(&client);
                if is_alone {
                    self.owner = Owner::Writer(client);
                }
                is_alone
            }
        }
    }
}

impl<B: Backing> Policy<B> for LockClient {
    fn admit(&self, _: &'static str, _: &B::Inode, _: Option<&OsStr>) -> Result<(), Errno> {
        Ok(())
    }

    fn transfer(&self, file: u64, transfer: Transfer) {
        let (range, wanted) = match transfer {
            Transfer::Read(range) => (range, Use::Read),
            Transfer::Write(range) => (range, Use::Write),
            Transfer::Sync | Transfer::Close => return,
        };
        let now = Instant::now();
        let from = self.server.take(self.client, file, range, wanted, now);
        std::thread::sleep(from.saturating_duration_since(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: LockModel = LockModel::EXTENTS;
    const MIB: u64 = 1 << 20;

    /// Milliseconds after the beginning at which each of the requests of file 1, made at the beginning, is served.
    fn served(server: &LockServer, requests: &[(u32, Range<u64>, Use)]) -> Vec<u128> {
        let now = Instant::now();
        let time = |(client, range, wanted): &(u32, Range<u64>, Use)| {
            let from = server.take(*client, 1, range.clone(), *wanted, now);
            from.saturating_duration_since(now).as_millis()
        };
        requests.iter().map(time).collect()
    }

    #[test]
    fn clients_that_write_side_by_side_wait_for_each_other() {
        let server = LockServer::new(MODEL);
        let block = |client: u32, at: u64| (client, at * 4096..(at + 1) * 4096, Use::Write);
        let found = served(
            &server,
            &[block(0, 0), block(1, 1), block(0, 2), block(2, 3)],
        );
        assert_eq!(found, [0, 2, 4, 6]);
        assert_eq!(server.changes(), 3);
    }

    #[test]
    fn clients_with_units_of_their_own_do_not_wait() {
        let server = LockServer::new(MODEL);
        let unit = |client: u32, at: u64| (client, at * MIB..(at + 1) * MIB, Use::Write);
        let found = served(&server, &[unit(0, 0), unit(1, 1), unit(0, 0), unit(1, 1)]);
        assert_eq!(found, [0; 4]);
        // Changes of several units go on side by side.
        let found = served(&server, &[(2, 0..2 * MIB, Use::Write)]);
        assert_eq!((found[0], server.changes()), (2, 2));
    }

    #[test]
    fn readers_share_what_a_writer_gives_back_once() {
        let server = LockServer::new(MODEL);
        let found = served(
            &server,
            &[
                (0, 0..MIB, Use::Write),
                (0, 0..MIB, Use::Read),
                (1, 0..MIB, Use::Read),
                (2, 0..MIB, Use::Read),
                (1, 0..MIB, Use::Read),
                (1, 0..MIB, Use::Write),
                (1, 0..MIB, Use::Write),
            ],
        );
        assert_eq!(found, [0, 0, 2, 2, 2, 4, 4]);
    }

    #[test]
    fn only_a_reader_that_is_alone_begins_to_write_at_once() {
        let server = LockServer::new(MODEL);
        let alone = [(0, 0..MIB, Use::Read), (0, 0..MIB, Use::Write)];
        assert_eq!(served(&server, &alone), [0, 0]);
        assert_eq!(server.changes(), 0);
    }

    #[test]
    fn a_server_for_smaller_files_takes_a_part_of_the_time() {
        let small = MODEL.scaled(4);
        assert_eq!(small.unit_bytes, 256 << 10);
        assert_eq!(small.change, Duration::from_micros(500));
    }
}
