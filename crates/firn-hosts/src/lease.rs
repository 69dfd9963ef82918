//! The lease of a host: it lets one process at a time act in the name of the host in a backing, and shows other hosts
//! that this process is alive.
//!
//! A *backing* is the directory, perhaps shared by several hosts, that a mount serves. A *heartbeat* is one write
//! of the record by the holder of the lease.
//!
//! A lease is a file named `lease` in the host's directory ([`crate::host_dir`]). The holder keeps the file locked
//! ([`Backing::try_lock`]) and rewrites a record in it at intervals ([`Lease::heartbeat_interval`]). The lock shows
//! that the lease is held. The record names the holder and the purposes for which the holder uses the backing. The
//! record also has a counter, which reveals locks that do not reach other hosts. If a host gets the lock while the
//! counter of another host still grows, the locks of this file system exclude no other host.
//!
//! ```text
//! held:      lock + count grows         free:    no lock, record says released
//! orphaned:  no lock, count unchanged   broken:  no lock for us, and count grows: LeaseError::Unreached
//! ```
//!
//! Invariants
//! * Only the holder writes the record, and always completely: [`RECORD_BYTES`] bytes in one write.
//! * The record lists a purpose before the host begins to use the backing for it. The purpose stays listed as long as
//!   the host has the lease.
//! * A lease that was not released is taken at once if its last holder ran on this kernel (same boot, same device):
//!   this kernel frees the lock only when the holder's process ends. Otherwise the lease is taken after its counter has
//!   not changed for [`STALE_AFTER`].

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::time::Duration;

use firn_backing::{Access, Backing, DescriptorUse, Errno, LockMode, LockRequest};
use serde::{Deserialize, Serialize};

use crate::own::{self, OwnError};

/// Version of a lease's place and record. Hosts with different versions do not see each other.
pub const LEASE_VERSION: u32 = 3;

/// Name of the lease file in the directory of a host.
pub(crate) const LEASE: &str = "lease";
/// Time between two heartbeats of a holder that shares transactions with other hosts.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Time between two heartbeats of all other holders. It is longer because the hosts share a disk, and each heartbeat is
/// a sync.
const SLOW_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);
/// If the counter of a lease has not changed for this long and the lock is free, the holder is dead.
pub const STALE_AFTER: Duration = Duration::from_secs(5);
/// The same limit, longer, for a host that writes its files to logs, if a free lock does not prove its death. Other
/// hosts may merge the logs of a dead host into the plain file. If the host was only slow, its later writes go to new
/// logs.
const LOGS_STALE_AFTER: Duration = Duration::from_secs(30);
const _: () = assert!(SLOW_HEARTBEAT_INTERVAL.as_millis() * 2 < STALE_AFTER.as_millis());
/// Time between two reads of the counter while a host waits for [`STALE_AFTER`].
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Size of the record in bytes: checksum, JSON, spaces, newline. The size is one block of most file systems, so a
/// heartbeat writes one block.
const RECORD_BYTES: usize = 4096;
/// Maximum size of a lease file of any version, in bytes.
const LEASE_BYTES_MAX: u64 = 64 << 10;
/// Maximum size in bytes of a report as JSON that always fits. The rest of the record has at most 512 bytes, because
/// the name of a host has at most 64.
pub const REPORT_BYTES_MAX: usize = RECORD_BYTES - 512;

/// The process that holds a lease, or held it last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Name of the host.
    pub host: String,
    /// Process id of the holder, shown to people.
    pub pid: u32,
    /// Boot id of the host (`/proc/sys/kernel/random/boot_id`). Each boot of a kernel has its own.
    pub boot: String,
}

impl Holder {
    /// Describes this process as a holder for the host of this name.
    pub fn this_process(host: &str) -> std::io::Result<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        Ok(Self {
            host: host.to_owned(),
            pid: std::process::id(),
            boot: boot.trim().to_owned(),
        })
    }
}

/// A purpose for which a host uses a backing and on which other hosts rely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaseUse {
    /// The host commits together with other hosts.
    Transactions,
    /// The host shares tokens that are file locks in the backing.
    Tokens,
    /// The host shares lanes, or tokens of a service outside the backing. Nothing depends on the lease; it only shows
    /// that the host is alive.
    Lanes,
    /// The host writes to logs.
    Logs,
}

impl LeaseUse {
    /// Returns the time between two heartbeats that this use requires.
    fn heartbeat_interval(self) -> Duration {
        match self {
            Self::Transactions => HEARTBEAT_INTERVAL,
            Self::Tokens | Self::Lanes | Self::Logs => SLOW_HEARTBEAT_INTERVAL,
        }
    }

    /// Returns how long a heartbeat counts as a sign of life for this use, if the lock proves nothing.
    pub(crate) fn stale_after(self) -> Duration {
        match self {
            Self::Transactions | Self::Tokens | Self::Lanes => STALE_AFTER,
            Self::Logs => LOGS_STALE_AFTER,
        }
    }
}

/// State of a holder as JSON, for people on other hosts. No action of a host depends on it.
pub type Report = serde_json::Value;

/// Content of a lease file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    holder: Holder,
    /// Device number of the backing on the holder's host.
    device: u64,
    /// Random number, drawn when the lease was acquired. It differs each time that a process acquires the lease.
    #[serde(rename = "holding")]
    acquisition_id: u64,
    /// The purposes for which the holder uses the backing.
    uses: BTreeSet<LeaseUse>,
    /// Number of heartbeats so far.
    count: u64,
    /// Whether the holder has released the lease.
    released: bool,
    /// Report of the last heartbeat. `None` if the holder has not reported yet, or the report did not fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    report: Option<Report>,
}

impl Record {
    /// Returns the first record of a holder that has just acquired the lease.
    fn new(me: &Holder, device: u64, purpose: LeaseUse) -> Result<Self, LeaseError> {
        Ok(Self {
            holder: me.clone(),
            device,
            acquisition_id: random_number()?,
            uses: BTreeSet::from([purpose]),
            count: 0,
            released: false,
            report: None,
        })
    }

    /// Returns whether both records are the same heartbeat of the same holder.
    ///
    /// The report is not compared, because a floating-point number may change slightly when it is written as JSON and
    /// read again.
    fn is_same_heartbeat(&self, other: &Self) -> bool {
        let without_report = |record: &Self| Self {
            report: None,
            ..record.clone()
        };
        without_report(self) == without_report(other)
    }
}

/// Why a lease could not be taken or kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// Another process holds the lease.
    #[error("{} holds the lease", describe_holder(holder))]
    Held {
        /// The holder. `None` if the holder has not written its record yet.
        holder: Option<Holder>,
    },
    /// The lock is free on this host, although the holder is alive.
    #[error(
        "{} holds the lease and is alive, but its lock does not exclude this host",
        describe_holder(holder)
    )]
    Unreached {
        /// The holder.
        holder: Option<Holder>,
    },
    /// Another process took the lease from this holder.
    #[error("{} took the lease", describe_holder(by))]
    Lost {
        /// The new holder. `None` if its record cannot be read.
        by: Option<Holder>,
    },
    /// The file system cannot lock the lease file.
    #[error("the lease file cannot be locked: {0}")]
    NoLock(#[source] Errno),
    /// The lease file is not in the state that Firn requires of its files, or the backing failed.
    #[error(transparent)]
    Own(#[from] OwnError),
}

impl From<Errno> for LeaseError {
    fn from(errno: Errno) -> Self {
        Self::Own(OwnError::Backing(errno))
    }
}

fn describe_holder(holder: &Option<Holder>) -> String {
    match holder {
        Some(Holder { host, pid, .. }) => format!("{host} (process {pid})"),
        None => "another host".into(),
    }
}

/// One heartbeat of a lease as another host reads it. If two reads return equal heartbeats, the holder has written none
/// between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    bytes: Vec<u8>,
}

impl Heartbeat {
    /// Reads the heartbeat of the lease in the directory of a host. Returns `None` if there is no lease file.
    pub fn read<B: Backing>(base: &B, dir: &B::Inode) -> Result<Option<Self>, OwnError> {
        let bytes = own::read_file_at_most(base, dir, LEASE, LEASE_BYTES_MAX)?;
        Ok(bytes.map(|bytes| Self { bytes }))
    }

    /// Decodes the record. Returns `None` if it is damaged or half-written.
    fn record(&self) -> Option<Record> {
        // The record is the first line. A file of another version may be longer.
        let line = self.bytes.split(|byte| *byte == b'\n').next()?;
        let text = std::str::from_utf8(line).ok()?.trim_end();
        let (hex_checksum, json) = text.split_once(' ')?;
        let checksum = u32::from_str_radix(hex_checksum, 16).ok()?;
        if checksum != crc32c::crc32c(json.as_bytes()) {
            return None;
        }
        serde_json::from_str(json).ok()
    }

    /// Returns the holder that wrote the heartbeat. Returns `None` if the record cannot be read.
    pub fn holder(&self) -> Option<Holder> {
        self.record().map(|record| record.holder)
    }

    /// Returns whether the holder may use the backing for this purpose.
    ///
    /// The answer is true for an unreadable record, because the holder may be writing it at this moment.
    pub fn may_have_use(&self, purpose: LeaseUse) -> bool {
        self.record()
            .is_none_or(|record| record.uses.contains(&purpose))
    }

    /// Returns the number that the holder drew when it acquired the lease. Returns `None` if the record cannot be read.
    pub(crate) fn acquisition_id(&self) -> Option<u64> {
        self.record().map(|record| record.acquisition_id)
    }

    /// Returns whether the holder has released the lease.
    pub fn is_released(&self) -> bool {
        self.record().is_some_and(|record| record.released)
    }

    /// Returns the purposes for which the holder uses the backing. Returns `None` if the record cannot be read.
    pub fn uses(&self) -> Option<BTreeSet<LeaseUse>> {
        self.record().map(|record| record.uses)
    }

    /// Returns the report that the holder wrote with this heartbeat.
    pub fn report(&self) -> Option<Report> {
        self.record()?.report
    }

    /// Returns whether a free lock proves that the holder is gone.
    ///
    /// This is so in three cases: the lease was never taken, the holder released it, or the holder's lock was in this
    /// kernel, which frees the lock when the process ends.
    pub fn does_free_lock_prove_end(&self, boot: &str, device: u64) -> bool {
        let Some(record) = self.record() else {
            // An empty file was never written to. An unreadable record may be of a living holder.
            return self.bytes.is_empty();
        };
        let was_lock_in_this_kernel = record.holder.boot == boot && record.device == device;
        record.released || was_lock_in_this_kernel
    }
}

/// A lease that this process holds until the value is dropped or the process ends.
pub struct Lease<B: Backing> {
    /// The open lease file, which holds the lock.
    file: B::File,
    dir: B::Inode,
    record: Record,
}

impl<B: Backing> Lease<B> {
    /// Takes the lease in `dir`, the directory of a host, for one purpose. The lease is a locked file whose record
    /// changes with each heartbeat; it shows that the host is alive.
    ///
    /// Fails with [`LeaseError::Held`] if another process has locked it. Fails with [`LeaseError::Unreached`] if this
    /// host could lock it, and the holder still writes heartbeats: locks then do not exclude other hosts.
    ///
    /// `sleep` must wait for the given time. It is called only if a holder that did not release the lease may still be
    /// alive.
    pub fn acquire(
        base: &B,
        dir: &B::Inode,
        purpose: LeaseUse,
        me: &Holder,
        sleep: &mut dyn FnMut(Duration),
    ) -> Result<Self, LeaseError> {
        let file = loop {
            match try_lock_lease(base, dir)? {
                LockResult::Locked(file) => break file,
                // The locked file has lost its name, so the file that has it now is tried.
                LockResult::Replaced => {}
                LockResult::Held => {
                    let holder =
                        Heartbeat::read(base, dir)?.and_then(|heartbeat| heartbeat.holder());
                    return Err(LeaseError::Held { holder });
                }
            }
        };
        let device = base.attr(dir)?.dev;
        if let Some(last_heartbeat) = Heartbeat::read(base, dir)?
            && !last_heartbeat.does_free_lock_prove_end(&me.boot, device)
        {
            // The holder may be alive although its lock is free here.
            let watched = WatchedLease {
                // There is only one lease to watch, so it needs no name.
                lease: (),
                first_heartbeat: last_heartbeat,
            };
            let living =
                wait_for_heartbeat(&[watched], sleep, &mut |()| Heartbeat::read(base, dir))?;
            if let Some(heartbeat) = living {
                let holder = heartbeat.holder();
                return Err(LeaseError::Unreached { holder });
            }
        }
        let mut lease = Self {
            file,
            dir: dir.clone(),
            record: Record::new(me, device, purpose)?,
        };
        lease.write(base)?;
        base.sync_dir(dir)?;
        Ok(lease)
    }

    /// Resumes the lease of an earlier process of the same host, and adds `purpose` to its purposes. To other hosts it
    /// is the same lease: its acquisition id and its earlier purposes remain.
    ///
    /// `kept_file` is the earlier process's open lease file; its lock has outlived that process. Returns `None` if it is
    /// not the lease file in `dir`, or another process has locked the file.
    pub fn resume(
        base: &B,
        dir: &B::Inode,
        purpose: LeaseUse,
        me: &Holder,
        kept_file: OwnedFd,
    ) -> Result<Option<Self>, LeaseError> {
        let device = base.attr(dir)?.dev;
        let adopted = base.adopt(kept_file)?;
        if adopted.attr.dev != device {
            return Ok(None);
        }
        let LockResult::Locked(file) = lock_lease_file(base, dir, adopted.file)? else {
            return Ok(None);
        };
        let last_record = Heartbeat::read(base, dir)?.and_then(|heartbeat| heartbeat.record());
        let mut record = match last_record {
            Some(last) if !last.released && last.holder.host == me.host => Record {
                holder: me.clone(),
                device,
                count: last.count + 1,
                ..last
            },
            // The record is not that of a lease to continue, so a new acquisition begins.
            _ => Record::new(me, device, purpose)?,
        };
        record.uses.insert(purpose);
        let dir = dir.clone();
        let mut lease = Self { file, dir, record };
        lease.write(base)?;
        Ok(Some(lease))
    }

    /// Returns a descriptor of the open lease file, with which a later process can resume the lease. `None` if the
    /// backing has no descriptors.
    pub fn descriptor(&self, base: &B) -> Option<OwnedFd> {
        base.descriptor(&self.file, DescriptorUse::Keeping)
    }

    /// Returns the random number that was drawn when this process acquired the lease.
    pub(crate) fn acquisition_id(&self) -> u64 {
        self.record.acquisition_id
    }

    /// Writes the next heartbeat with `report`, which shows other hosts that the holder is alive.
    ///
    /// Fails with [`LeaseError::Lost`] if another process has taken the lease.
    pub fn write_heartbeat(&mut self, base: &B, report: Option<Report>) -> Result<(), LeaseError> {
        self.check_still_ours(base)?;
        self.record.count += 1;
        self.record.report = report;
        self.write(base)
    }

    /// Adds `purpose` durably to the purposes in the record.
    pub fn add_use(&mut self, base: &B, purpose: LeaseUse) -> Result<(), LeaseError> {
        self.check_still_ours(base)?;
        self.record.uses.insert(purpose);
        self.record.count += 1;
        self.write(base)
    }

    /// Returns the purposes for which the holder uses the backing.
    pub fn uses(&self) -> &BTreeSet<LeaseUse> {
        &self.record.uses
    }

    /// Returns the time between two heartbeats that all purposes together require.
    pub fn heartbeat_interval(&self) -> Duration {
        self.record
            .uses
            .iter()
            .map(|purpose| purpose.heartbeat_interval())
            .min()
            .unwrap_or(SLOW_HEARTBEAT_INTERVAL)
    }

    /// Releases the lease and records that, so that the next holder need not wait. `report` remains in the record.
    pub fn release(mut self, base: &B, report: Option<Report>) -> Result<(), LeaseError> {
        self.check_still_ours(base)?;
        self.record.released = true;
        self.record.report = report;
        self.write(base)?;
        base.lock(&self.file, LockRequest::UnlockFile)?;
        Ok(())
    }

    /// Returns whether a process holds the lease in `dir`, as far as locks reach. The holder may change before the
    /// caller uses the answer.
    pub fn is_held(base: &B, dir: &B::Inode) -> Result<bool, OwnError> {
        let Some(inode) = own::find_file(base, dir, LEASE)? else {
            return Ok(false);
        };
        let file = base.open(&inode, Access::Read)?;
        Ok(!base.try_lock(&file, LockMode::Shared)?)
    }

    /// Fails with [`LeaseError::Lost`] unless the lease file still has the record that this process wrote last.
    fn check_still_ours(&self, base: &B) -> Result<(), LeaseError> {
        let present_record =
            Heartbeat::read(base, &self.dir)?.and_then(|heartbeat| heartbeat.record());
        match present_record {
            Some(record) if record.is_same_heartbeat(&self.record) => Ok(()),
            Some(record) => Err(LeaseError::Lost {
                by: Some(record.holder),
            }),
            None => Err(LeaseError::Lost { by: None }),
        }
    }

    /// Writes the record durably to the lease file.
    fn write(&mut self, base: &B) -> Result<(), LeaseError> {
        own::write_all(base, &self.file, &encode(&self.record)?, 0)?;
        let is_data_only = true;
        Ok(base.sync(&self.file, is_data_only)?)
    }
}

/// Encodes a record. A report that is too long is left out, because a living host must be able to write a heartbeat
/// whatever it reports.
fn encode(record: &Record) -> Result<Vec<u8>, Errno> {
    let encoded = encode_whole(record);
    if encoded != Err(Errno::NAMETOOLONG) || record.report.is_none() {
        return encoded;
    }
    encode_whole(&Record {
        report: None,
        ..record.clone()
    })
}

/// Encodes a record with its report: a checksum and JSON, padded to the size of a lease file. Fails with NAMETOOLONG if
/// the record does not fit.
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

/// Returns a random number. Fails with EIO if the system has none.
fn random_number() -> Result<u64, Errno> {
    getrandom::u64().map_err(|_| Errno::IO)
}

/// Result of an attempt to lock a lease file.
enum LockResult<F> {
    /// This process has the lock.
    Locked(F),
    /// Another process has the lock.
    Held,
    /// The file lost its name before it was locked. Another file may have the name now.
    Replaced,
}

/// Tries once to lock the lease file in `dir`, which is created if it does not exist.
fn try_lock_lease<B: Backing>(base: &B, dir: &B::Inode) -> Result<LockResult<B::File>, LeaseError> {
    let file = own::open_or_create(base, dir, LEASE)?;
    lock_lease_file(base, dir, file)
}

/// Tries once to lock an open lease file; the lock shows that a host is alive. Returns `Replaced` if another file has
/// its name by now: a lock of the old file excludes no process.
fn lock_lease_file<B: Backing>(
    base: &B,
    dir: &B::Inode,
    file: B::File,
) -> Result<LockResult<B::File>, LeaseError> {
    let is_locked = base
        .try_lock(&file, LockMode::Exclusive)
        .map_err(LeaseError::NoLock)?;
    if !is_locked {
        return Ok(LockResult::Held);
    }
    let locked_ino = base.attr_of_file(&file)?.ino;
    if own::name_refers_to(base, dir, LEASE, locked_ino)? {
        Ok(LockResult::Locked(file))
    } else {
        Ok(LockResult::Replaced)
    }
}

/// A lease whose lock is free on this host, and that may still have a living holder.
pub(crate) struct WatchedLease<K> {
    /// Identifies the lease for the function that reads its heartbeat.
    pub(crate) lease: K,
    /// The heartbeat when the watch began.
    pub(crate) first_heartbeat: Heartbeat,
}

/// Waits until one of the watched leases gets a new heartbeat, which proves that its holder is alive, and returns it.
/// Returns `None` if no lease got one within [`STALE_AFTER`]. A change that only releases the lease does not count.
///
/// `read` reads the present heartbeat of a lease; `K` is the caller's name for a lease. `sleep` must wait for the
/// given time.
pub(crate) fn wait_for_heartbeat<K>(
    watched: &[WatchedLease<K>],
    sleep: &mut dyn FnMut(Duration),
    read: &mut dyn FnMut(&K) -> Result<Option<Heartbeat>, OwnError>,
) -> Result<Option<Heartbeat>, OwnError> {
    if watched.is_empty() {
        return Ok(None);
    }
    let read_count = STALE_AFTER.as_millis() / POLL_INTERVAL.as_millis();
    for _ in 0..read_count {
        sleep(POLL_INTERVAL);
        for WatchedLease {
            lease,
            first_heartbeat,
        } in watched
        {
            if let Some(heartbeat) = read(lease)?
                && heartbeat != *first_heartbeat
                && !heartbeat.is_released()
            {
                return Ok(Some(heartbeat));
            }
        }
    }
    Ok(None)
}
