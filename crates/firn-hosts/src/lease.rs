//! The lease of a host: one process at a time acts in the name of the host in a backing, and others see that it lives.
//!
//! A lease is a file, `lease` in the host's directory ([`crate::host_dir`]). The holder keeps it locked
//! ([`Backing::try_lock`]) and rewrites a record in it ([`Lease::beat_every`]). The lock says that the lease is held.
//! The record names the holder and what the backing is used for. The record's count betrays locks that do not reach
//! other hosts: where a host gets the lock while another host's count grows, the lock is worth nothing.
//!
//! ```text
//! held:      lock + count grows       free:    no lock, record says released
//! orphaned:  no lock, count stands    broken:  no lock for us, and count grows: LeaseError::Unreached
//! ```
//!
//! Invariants
//! * The record is written by the holder only, and whole: [`RECORD_BYTES`] bytes, in one write.
//! * A use is in the record before the host begins with it, and stays there as long as the host has the lease.
//! * A lease whose last holder did not release it is taken at once where this kernel kept the lock of that holder too
//!   (same boot, same device). Elsewhere it is taken after its count has stood still for [`STALE_AFTER`].

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::time::Duration;

use firn_backing::{Access, Backing, Errno, LockMode};
use serde::{Deserialize, Serialize};

use crate::own::{self, OwnError};

/// Version of a lease's place and record: hosts with different ones do not see each other.
pub const LEASE_VERSION: u32 = 3;

/// Name of the file in the directory of a host.
pub(crate) const LEASE: &str = "lease";
/// How often a holder rewrites its record for those that share transactions with it.
const BEAT_EVERY: Duration = Duration::from_secs(1);
/// How often other holders rewrite their record: the hosts share a disk, and each rewrite is a sync.
const BEAT_SELDOM_EVERY: Duration = Duration::from_secs(2);
/// A count that stands still for this long is of a holder that is gone, if its lock is free, too.
pub const STALE_AFTER: Duration = Duration::from_secs(5);
/// A host that writes to logs is treated as living for longer, where its lock says nothing. Late writes of such a host
/// land in the next generation.
const LOGS_STALE_AFTER: Duration = Duration::from_secs(30);
const _: () = assert!(BEAT_SELDOM_EVERY.as_millis() * 2 < STALE_AFTER.as_millis());
/// How often the count is read meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Bytes of the record: checksum, JSON, spaces, newline. One block of most file systems, so a beat is one write of one block.
const RECORD_BYTES: usize = 4096;
/// No lease of any version has more bytes.
const LEASE_BYTES_MAX: u64 = 64 << 10;
/// Bytes of a report as JSON that always find room: the rest of the record has 512 at most, as a host's name has 64.
pub const REPORT_BYTES_MAX: usize = RECORD_BYTES - 512;

/// The host that has a lease, or had it last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Name of the host.
    pub host: String,
    /// Its process, for people.
    pub pid: u32,
    /// Tells a run of a kernel from all others (`/proc/sys/kernel/random/boot_id`).
    pub boot: String,
}

impl Holder {
    /// This process, under this name.
    pub fn this_process(host: &str) -> std::io::Result<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        Ok(Self {
            host: host.to_owned(),
            pid: std::process::id(),
            boot: boot.trim().to_owned(),
        })
    }
}

/// What a host uses a backing for, as far as other hosts rely on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaseUse {
    /// It commits together with others.
    Transactions,
    /// It shares tokens that are locks of files in the backing.
    Tokens,
    /// It shares lanes, or tokens of a service elsewhere: nothing depends on the lease, which only shows that it lives.
    Lanes,
    /// It writes to logs.
    Logs,
}

impl LeaseUse {
    /// How often those that look at the lease for this use have to see it beat.
    fn beat_every(self) -> Duration {
        match self {
            Self::Transactions => BEAT_EVERY,
            Self::Tokens | Self::Lanes | Self::Logs => BEAT_SELDOM_EVERY,
        }
    }

    /// How long those that look at the lease for this use believe in a beat, where its lock says nothing.
    pub(crate) fn stale_after(self) -> Duration {
        match self {
            Self::Transactions | Self::Tokens | Self::Lanes => STALE_AFTER,
            Self::Logs => LOGS_STALE_AFTER,
        }
    }
}

/// How the holder of a lease is, in JSON, for people on other hosts. Nothing of what hosts do depends on it.
pub type Report = serde_json::Value;

/// What the file of a lease says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    holder: Holder,
    /// Device number of the backing as the holder's kernel has it.
    device: u64,
    /// Tells this holding from any other of the same host.
    holding: u64,
    /// What the backing is used for.
    uses: BTreeSet<LeaseUse>,
    /// Beats so far.
    count: u64,
    /// The holder gave the lease back.
    released: bool,
    /// As of the last beat; none: the holder has said nothing yet, or it had no room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    report: Option<Report>,
}

impl Record {
    /// Whether this is the same beat of the same holding. What is reported does not count: a number may come back from
    /// JSON as its neighbour.
    fn is_same_beat(&self, other: &Self) -> bool {
        let of = |record: &Self| {
            let Self {
                holder,
                device,
                holding,
                uses,
                count,
                released,
                report: _,
            } = record;
            (
                holder.clone(),
                *device,
                *holding,
                uses.clone(),
                *count,
                *released,
            )
        };
        of(self) == of(other)
    }
}

/// Why a lease could not be taken or kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// Another host has it.
    #[error("{} has it", named(holder))]
    Held {
        /// The holder; `None`: it has not written its record yet.
        holder: Option<Holder>,
    },
    /// Its lock is free here, and its holder lives.
    #[error(
        "{} has it and goes on, and its lock does not keep this host out",
        named(holder)
    )]
    Unreached {
        /// The holder.
        holder: Option<Holder>,
    },
    /// Another host took it from this holder.
    #[error("{} took it", named(by))]
    Lost {
        /// The holder; `None`: its record cannot be read.
        by: Option<Holder>,
    },
    /// The file system does not lock its file.
    #[error("its file cannot be locked: {0}")]
    NoLock(#[source] Errno),
    /// Its file is not as a file of Firn's own must be, or the backing failed.
    #[error(transparent)]
    Own(#[from] OwnError),
}

impl From<Errno> for LeaseError {
    fn from(errno: Errno) -> Self {
        Self::Own(OwnError::Backing(errno))
    }
}

fn named(holder: &Option<Holder>) -> String {
    match holder {
        Some(Holder { host, pid, .. }) => format!("{host} (process {pid})"),
        None => "another host".into(),
    }
}

/// The beat of a lease as another host sees it: two equal ones are of a lease whose beat stands still.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beat {
    bytes: Vec<u8>,
}

impl Beat {
    /// Reads the beat of the lease in the directory of a host; `None`: there is none.
    pub fn read<B: Backing>(base: &B, dir: &B::Inode) -> Result<Option<Self>, OwnError> {
        let bytes = own::load_at_most(base, dir, LEASE, LEASE_BYTES_MAX)?;
        Ok(bytes.map(|bytes| Self { bytes }))
    }

    fn record(&self) -> Option<Record> {
        // Its line: a file of another version may be longer.
        let line = self.bytes.split(|byte| *byte == b'\n').next()?;
        let text = std::str::from_utf8(line).ok()?.trim_end();
        let (sum, json) = text.split_once(' ')?;
        let sum = u32::from_str_radix(sum, 16).ok()?;
        if sum != crc32c::crc32c(json.as_bytes()) {
            return None;
        }
        serde_json::from_str(json).ok()
    }

    /// The host that wrote it.
    pub fn holder(&self) -> Option<Holder> {
        self.record().map(|record| record.holder)
    }

    /// Whether its holder may use the backing for this. True for a record that cannot be read, as it may just be
    /// written.
    pub fn may_be_for(&self, purpose: LeaseUse) -> bool {
        self.record()
            .is_none_or(|record| record.uses.contains(&purpose))
    }

    /// The number of the holding that it is of.
    pub(crate) fn holding(&self) -> Option<u64> {
        self.record().map(|record| record.holding)
    }

    /// Whether its holder gave the lease back.
    pub fn is_released(&self) -> bool {
        self.record().is_some_and(|record| record.released)
    }

    /// What its holder uses the backing for; `None`: its record cannot be read now.
    pub fn uses(&self) -> Option<BTreeSet<LeaseUse>> {
        self.record().map(|record| record.uses)
    }

    /// How its holder was when it beat.
    pub fn report(&self) -> Option<Report> {
        self.record()?.report
    }

    /// Whether a free lock proves that its holder is gone: the lease was never taken, it was given back, or this kernel
    /// kept the lock.
    pub fn is_settled_by_lock(&self, boot: &str, device: u64) -> bool {
        match self.record() {
            Some(record) => {
                record.released || (record.holder.boot == boot && record.device == device)
            }
            None => self.bytes.is_empty(),
        }
    }
}

/// A lease that this host has until it is dropped or the process ends.
pub struct Lease<B: Backing> {
    /// Locked.
    file: B::File,
    dir: B::Inode,
    record: Record,
}

impl<B: Backing> Lease<B> {
    /// Takes the lease in `dir`, the directory of a host, for one use. `rest` waits for the given time; it is called only where a
    /// holder that did not release the lease may still live.
    pub fn take(
        base: &B,
        dir: &B::Inode,
        purpose: LeaseUse,
        me: &Holder,
        rest: &mut dyn FnMut(Duration),
    ) -> Result<Self, LeaseError> {
        let file = loop {
            match lock(base, dir)? {
                Locking::Locked(file) => break file,
                Locking::Replaced => {}
                Locking::Held => {
                    let holder = Beat::read(base, dir)?.and_then(|beat| beat.holder());
                    return Err(LeaseError::Held { holder });
                }
            }
        };
        let device = base.attr(dir)?.dev;
        let last = Beat::read(base, dir)?;
        let in_doubt = last.filter(|beat| !beat.is_settled_by_lock(&me.boot, device));
        let watched: Vec<_> = in_doubt.map(|beat| ((), beat)).into_iter().collect();
        if let Some(beat) = find_living(&watched, rest, &mut |()| Beat::read(base, dir))? {
            let holder = beat.holder();
            return Err(LeaseError::Unreached { holder });
        }
        let mut lease = Self {
            file,
            dir: dir.clone(),
            record: Record {
                holder: me.clone(),
                device,
                holding: random_number()?,
                uses: BTreeSet::from([purpose]),
                count: 0,
                released: false,
                report: None,
            },
        };
        lease.write(base)?;
        base.sync_dir(dir)?;
        Ok(lease)
    }

    /// A number that tells this holding from any other.
    pub(crate) fn holding(&self) -> u64 {
        self.record.holding
    }

    /// Shows that the holder lives, and how it is. Fails with [`LeaseError::Lost`] where another host has taken the lease.
    pub fn beat(&mut self, base: &B, report: Option<Report>) -> Result<(), LeaseError> {
        self.must_be_ours(base)?;
        self.record.count += 1;
        self.record.report = report;
        self.write(base)
    }

    /// Says, durably, that the holder uses the backing for this, too.
    pub fn add_use(&mut self, base: &B, purpose: LeaseUse) -> Result<(), LeaseError> {
        self.must_be_ours(base)?;
        self.record.uses.insert(purpose);
        self.record.count += 1;
        self.write(base)
    }

    /// What the holder uses the backing for.
    pub fn uses(&self) -> &BTreeSet<LeaseUse> {
        &self.record.uses
    }

    /// How often the lease has to beat for all that it is used for.
    pub fn beat_every(&self) -> Duration {
        let uses = self.record.uses.iter();
        let every = uses.map(|purpose| purpose.beat_every()).min();
        every.unwrap_or(BEAT_SELDOM_EVERY)
    }

    /// Gives the lease back, and says so: the next holder waits for nothing. `report` stays to be read.
    pub fn release(mut self, base: &B, report: Option<Report>) -> Result<(), LeaseError> {
        self.must_be_ours(base)?;
        self.record.released = true;
        self.record.report = report;
        self.write(base)
    }

    /// Whether a process has the lease in `dir`, as far as locks reach. The answer may be old when it comes.
    pub fn is_held(base: &B, dir: &B::Inode) -> Result<bool, OwnError> {
        let Some(inode) = own::find_file(base, dir, LEASE)? else {
            return Ok(false);
        };
        let file = base.open(&inode, Access::Read)?;
        Ok(!base.try_lock(&file, LockMode::Shared)?)
    }

    fn must_be_ours(&self, base: &B) -> Result<(), LeaseError> {
        let beat = Beat::read(base, &self.dir)?;
        match beat.as_ref().and_then(Beat::record) {
            Some(record) if record.is_same_beat(&self.record) => Ok(()),
            record => Err(LeaseError::Lost {
                by: record.map(|record| record.holder),
            }),
        }
    }

    fn write(&mut self, base: &B) -> Result<(), LeaseError> {
        own::write_all(base, &self.file, &encode(&self.record)?, 0)?;
        Ok(base.sync(&self.file, true)?)
    }
}

/// The report is left out where it is too long: a host that lives must beat whatever it has to say.
fn encode(record: &Record) -> Result<Vec<u8>, Errno> {
    match encode_whole(record) {
        Err(Errno::NAMETOOLONG) if record.report.is_some() => encode_whole(&Record {
            report: None,
            ..record.clone()
        }),
        encoded => encoded,
    }
}

fn encode_whole(record: &Record) -> Result<Vec<u8>, Errno> {
    let json = serde_json::to_string(record).map_err(|_| Errno::INVAL)?;
    let mut bytes = format!("{:08x} {json}", crc32c::crc32c(json.as_bytes())).into_bytes();
    if bytes.len() >= RECORD_BYTES {
        return Err(Errno::NAMETOOLONG);
    }
    bytes.resize(RECORD_BYTES - 1, b' ');
    bytes.push(b'\n');
    Ok(bytes)
}

fn random_number() -> Result<u64, Errno> {
    getrandom::u64().map_err(|_| Errno::IO)
}

enum Locking<F> {
    Locked(F),
    Held,
    /// The file lost its name before it was locked: another one may have it now.
    Replaced,
}

fn lock<B: Backing>(base: &B, dir: &B::Inode) -> Result<Locking<B::File>, LeaseError> {
    let file = own::open_or_create(base, dir, LEASE)?;
    if !base
        .try_lock(&file, LockMode::Exclusive)
        .map_err(LeaseError::NoLock)?
    {
        return Ok(Locking::Held);
    }
    let locked = base.attr_of_file(&file)?.ino;
    match own::find(base, dir, OsStr::new(LEASE))? {
        Some((_, attr)) if attr.ino == locked => Ok(Locking::Locked(file)),
        _ => Ok(Locking::Replaced),
    }
}

/// Watches leases whose locks are free here for [`STALE_AFTER`]. Returns the first one that beats.
pub(crate) fn find_living<K>(
    watched: &[(K, Beat)],
    rest: &mut dyn FnMut(Duration),
    read: &mut dyn FnMut(&K) -> Result<Option<Beat>, OwnError>,
) -> Result<Option<Beat>, OwnError> {
    if watched.is_empty() {
        return Ok(None);
    }
    let looks = STALE_AFTER.as_millis() / LOOK_EVERY.as_millis();
    for _ in 0..looks {
        rest(LOOK_EVERY);
        for (lease, before) in watched {
            match read(lease)? {
                Some(now) if now != *before && !now.is_released() => return Ok(Some(now)),
                _ => {}
            }
        }
    }
    Ok(None)
}
