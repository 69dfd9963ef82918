//! Examines all hosts that use a backing: which hosts are alive, since when, and what each host reports. The examining
//! process need not be one of them.
//!
//! Terms
//! * A *backing* is the directory, perhaps shared by several hosts, that a mount serves. *firnd* is the process that
//!   serves one mount.
//! * A *lease* is a file in the backing that the firnd of a host keeps locked.
//! * With each *heartbeat*, firnd rewrites its lease with a higher count.
//! * A heartbeat is *young* if it is at most a few seconds old ([`STALE_AFTER`]), and *old* otherwise.
//!
//! | lock of the lease | heartbeat | other evidence | the host is |
//! |---|---|---|---|
//! | held | young | | alive |
//! | held | old | | silent |
//! | free | any | the record says that the lease was released | left |
//! | free | any | the host ran on this kernel, so its lock would be visible | dead |
//! | free | young | | alive: its lock may not be visible here |
//! | free | old | locks of other kernels are visible here | dead |
//! | free | older than the limit for the host's purposes | | dead |
//! | free | old | | silent: dead, stopped or delayed |
//!
//! For a free lock, the first row that fits applies. Locks of other kernels count as visible if this host sees at least
//! one: the survey then trusts the locks of all hosts.
//!
//! Promises
//! * No clock of a host is compared with the clock of another host. The age of a heartbeat is the age of its file, by
//!   the clock that stamps files. The survey reads that clock by creating a probe file. A process that may not create a
//!   file compares with the youngest heartbeat instead, which gives a lower bound of the age.
//! * A heartbeat that changes during the survey proves that its host is alive, whatever the file times say
//!   ([`RECHECK_TIMEOUT`]).
//! * The reports of hosts are only shown to people; no part of Firn acts on a survey.
//! * The survey leaves nothing in the backing.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::time::Duration;

use firn_backing::{Backing, Errno};
use serde::{Deserialize, Serialize};

use crate::host_dir::{find_host_dir, list_hosts};
use crate::lease::{Heartbeat, Holder, LEASE, Lease, LeaseUse, Report, STALE_AFTER};
use crate::own::{self, OwnError, TOP};
use crate::terms::{Terms, read_current_terms};

/// Prefix of the name of the probe file whose time is compared; the process id follows.
const PROBE: &str = "probe-time-";
/// How long the survey watches leases whose heartbeats seem old.
pub const RECHECK_TIMEOUT: Duration = Duration::from_millis(800);
const RECHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum number of attempts to read a record that its holder is writing.
const READ_TRIES: usize = 4;
const READ_RETRY_PAUSE: Duration = Duration::from_millis(5);
/// Maximum number of hosts in a survey. The directory may contain any number of names.
pub const HOSTS_MAX: usize = 4096;

/// State of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Life {
    /// The host sends heartbeats.
    Alive,
    /// The host sends no heartbeats. Its process exists but is stopped, or its backing hangs, or its lock proves
    /// nothing here.
    Silent,
    /// The process of the host ended without releasing the lease.
    Dead,
    /// The host released its lease.
    Left,
}

impl Life {
    /// Returns whether the host may still have the backing mounted.
    pub fn may_live(self) -> bool {
        matches!(self, Self::Alive | Self::Silent)
    }
}

/// The evidence for the state of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Evidence {
    /// The lock of its lease, or the release in its record.
    Lock,
    /// The heartbeat grew during the survey.
    Beat,
    /// The age of the heartbeat, by the clock of the file system.
    ServerClock,
    /// The age of the heartbeat relative to the youngest heartbeat, because this process may not create a probe file.
    YoungestBeat,
}

/// A host that has the backing mounted, or had it mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurveyedHost {
    /// Name of the host.
    pub host: String,
    /// State of the host.
    pub life: Life,
    /// Evidence for the state.
    pub evidence: Evidence,
    /// Whether the host's lease is locked.
    pub is_locked: bool,
    /// Time since the last heartbeat. `None` if it is unknown.
    pub heartbeat_age: Option<Duration>,
    /// The process that holds the lease. `None` if the record could not be read.
    pub holder: Option<Holder>,
    /// The purposes for which the host uses the backing.
    pub uses: BTreeSet<LeaseUse>,
    /// How the host mounts. Empty if the host has not published terms since it acquired its lease.
    pub terms: Terms,
    /// Report of the host's last heartbeat.
    pub report: Option<Report>,
}

/// Result of a survey.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Hosts by name.
    pub hosts: Vec<SurveyedHost>,
    /// Hosts whose examination failed, with the error.
    pub failed: BTreeMap<String, OwnError>,
    /// More than `HOSTS_MAX` hosts exist, and the list is incomplete.
    pub is_cut: bool,
}

/// A lease as the survey found it at first.
struct ExaminedLease<B: Backing> {
    host: String,
    dir: B::Inode,
    heartbeat: Heartbeat,
    is_locked: bool,
    /// Whether the holder is certainly gone if the lease is not locked ([`Heartbeat::does_free_lock_prove_end`]).
    is_gone_if_unlocked: bool,
    /// Modification time of the lease file in nanoseconds, by the clock that stamps files.
    heartbeat_time_ns: i128,
    /// The mount options that the host published under this lease.
    terms: Terms,
}

/// Examines all hosts that have a lease in a backing, and returns the state of each. A lease is a file that a living
/// host keeps locked and rewrites with each heartbeat. A lease that cannot be read is listed in `failed`, and the
/// survey goes on.
///
/// `boot` is the boot id of this host ([`Holder::boot`]). `sleep` must wait for the given time. The waits while old
/// heartbeats are watched add up to at most `RECHECK_TIMEOUT`; each record that is being written adds up to 15 ms.
pub fn survey<B: Backing>(
    base: &B,
    boot: &str,
    sleep: &mut dyn FnMut(Duration),
) -> Result<Survey, OwnError> {
    let mut survey = Survey::default();
    let mut names = list_hosts(base)?;
    names.sort();
    survey.is_cut = names.len() > HOSTS_MAX;
    names.truncate(HOSTS_MAX);
    let mut leases: Vec<ExaminedLease<B>> = Vec::new();
    for host in names {
        match examine_lease(base, &host, boot, sleep) {
            Ok(Some(lease)) => leases.push(lease),
            Ok(None) => {}
            Err(error) => {
                survey.failed.insert(host, error);
            }
        }
    }
    if leases.is_empty() {
        return Ok(survey);
    }
    let clock = Clock::read(base, &leases)?;
    let has_young_heartbeat =
        |lease: &ExaminedLease<B>| clock.age(lease).is_some_and(|age| age < STALE_AFTER);
    // A host is doubtful if neither its lock nor the age of its heartbeat shows whether it lives. Doubtful hosts are
    // watched for a while: a heartbeat that changes meanwhile proves life.
    let doubtful: Vec<&ExaminedLease<B>> = leases
        .iter()
        .filter(|lease| {
            !lease.heartbeat.is_released()
                && !lease.lock_proves_death()
                && !has_young_heartbeat(lease)
        })
        .collect();
    let hosts_with_heartbeat = find_hosts_with_heartbeat(base, &doubtful, sleep);
    let are_locks_visible = are_remote_locks_visible(&leases, boot);
    survey.hosts = leases
        .into_iter()
        .map(|lease| lease.into_surveyed_host(&clock, &hosts_with_heartbeat, are_locks_visible))
        .collect();
    Ok(survey)
}

/// Examines the lease of one host, a file that the host keeps locked while it is alive. Returns `None` if the host has
/// none, or removed it meanwhile.
///
/// `boot` is the boot id of the kernel on which the survey runs. If the lease's record has the same id, this kernel
/// would show the host's lock, so a free lock proves that the host is gone.
fn examine_lease<B: Backing>(
    base: &B,
    host: &str,
    boot: &str,
    sleep: &mut dyn FnMut(Duration),
) -> Result<Option<ExaminedLease<B>>, OwnError> {
    let Some(dir) = find_host_dir(base, host)? else {
        return Ok(None);
    };
    let is_locked = match Lease::is_held(base, &dir) {
        Ok(is_held) => is_held,
        Err(OwnError::Backing(Errno::OPNOTSUPP | Errno::NOLCK)) => false,
        Err(error) => return Err(error),
    };
    let Some(heartbeat) = read_complete_heartbeat(base, &dir, sleep)? else {
        return Ok(None);
    };
    // The heartbeat was read through an open file, and at that open a network file system asks its server. So the
    // attributes that are read now are not older than the open.
    let Some((_, attr)) = own::find(base, &dir, OsStr::new(LEASE))? else {
        return Ok(None);
    };
    let is_gone_if_unlocked = heartbeat.does_free_lock_prove_end(boot, base.attr(&dir)?.dev);
    // Terms are the mount options that the holder published. Those of an earlier lease do not count.
    let terms = read_current_terms(base, &dir, &heartbeat)?.unwrap_or_default();
    Ok(Some(ExaminedLease {
        host: host.to_owned(),
        dir,
        is_locked,
        is_gone_if_unlocked,
        heartbeat_time_ns: nanoseconds(attr.mtime),
        terms,
        heartbeat,
    }))
}

/// Reads a heartbeat, the record that the holder of a lease rewrites at intervals. Repeats the read if the holder is
/// writing the record at that moment.
///
/// Returns `None` if there is no lease file. The record may still be incomplete after the last repetition; then its
/// holder is unknown.
fn read_complete_heartbeat<B: Backing>(
    base: &B,
    dir: &B::Inode,
    sleep: &mut dyn FnMut(Duration),
) -> Result<Option<Heartbeat>, OwnError> {
    let mut heartbeat = Heartbeat::read(base, dir)?;
    for _ in 1..READ_TRIES {
        let is_complete = heartbeat
            .as_ref()
            .is_none_or(|heartbeat| heartbeat.holder().is_some());
        if is_complete {
            break;
        }
        sleep(READ_RETRY_PAUSE);
        heartbeat = Heartbeat::read(base, dir)?;
    }
    Ok(heartbeat)
}

/// Returns whether the lock of a host that runs another kernel is visible on this host.
fn are_remote_locks_visible<B: Backing>(leases: &[ExaminedLease<B>], boot: &str) -> bool {
    let has_other_kernel = |lease: &ExaminedLease<B>| {
        let holder = lease.heartbeat.holder();
        holder.is_some_and(|holder| holder.boot != boot)
    };
    leases
        .iter()
        .any(|lease| lease.is_locked && has_other_kernel(lease))
}

/// Watches leases whose heartbeats seem old, for [`RECHECK_TIMEOUT`], and returns the hosts whose heartbeats change.
/// Such a host is alive, whatever the file times say. Ends early when all have changed.
fn find_hosts_with_heartbeat<B: Backing>(
    base: &B,
    doubtful: &[&ExaminedLease<B>],
    sleep: &mut dyn FnMut(Duration),
) -> BTreeSet<String> {
    let mut hosts_with_heartbeat = BTreeSet::new();
    let read_count = RECHECK_TIMEOUT.as_millis() / RECHECK_INTERVAL.as_millis();
    for _ in 0..read_count {
        if hosts_with_heartbeat.len() == doubtful.len() {
            break;
        }
        sleep(RECHECK_INTERVAL);
        for lease in doubtful {
            // A lease that cannot be read proves nothing, so the error is ignored.
            let present_heartbeat = Heartbeat::read(base, &lease.dir).ok().flatten();
            if present_heartbeat.is_some_and(|heartbeat| heartbeat != lease.heartbeat) {
                hosts_with_heartbeat.insert(lease.host.clone());
            }
        }
    }
    hosts_with_heartbeat
}

/// The state of a host, and the evidence for it.
struct Verdict {
    life: Life,
    evidence: Evidence,
}

impl<B: Backing> ExaminedLease<B> {
    /// Returns whether the free lock alone proves that the holder died without releasing the lease.
    fn lock_proves_death(&self) -> bool {
        !self.is_locked && self.is_gone_if_unlocked && !self.heartbeat.is_released()
    }

    /// Returns how long the heartbeat counts as a sign of life if the lock proves nothing: the longest time of all its
    /// uses.
    fn stale_after(&self) -> Duration {
        self.heartbeat
            .uses()
            .unwrap_or_default()
            .iter()
            .map(|purpose| purpose.stale_after())
            .max()
            .unwrap_or(STALE_AFTER)
    }

    /// Decides whether the host of this lease lives, from its lock and from the age of its last heartbeat. The table in
    /// the head of this file has all cases.
    ///
    /// `hosts_with_heartbeat` are the hosts whose heartbeats changed while they were watched.
    /// `are_remote_locks_visible` says whether locks of other kernels are visible on this host.
    fn decide_life(
        &self,
        clock: &Clock,
        hosts_with_heartbeat: &BTreeSet<String>,
        are_remote_locks_visible: bool,
    ) -> Verdict {
        let verdict = |life, evidence| Verdict { life, evidence };
        if self.heartbeat.is_released() && !self.is_locked {
            return verdict(Life::Left, Evidence::Lock);
        }
        if hosts_with_heartbeat.contains(&self.host) {
            return verdict(Life::Alive, Evidence::Beat);
        }
        if self.lock_proves_death() {
            return verdict(Life::Dead, Evidence::Lock);
        }
        let Some(age) = clock.age(self) else {
            // The age is unknown: the heartbeat may be young, but nothing proves it.
            return verdict(Life::Silent, clock.evidence);
        };
        if age < STALE_AFTER {
            verdict(Life::Alive, clock.evidence)
        } else if self.is_locked {
            // The process exists, because it holds the lock, but it is stopped or its backing hangs.
            verdict(Life::Silent, clock.evidence)
        } else if are_remote_locks_visible {
            // This host would see the lock of a living one.
            verdict(Life::Dead, Evidence::Lock)
        } else if age < self.stale_after() {
            verdict(Life::Silent, clock.evidence)
        } else {
            verdict(Life::Dead, clock.evidence)
        }
    }

    /// Returns what the survey shows of this lease's host: its state, the evidence for the state, and its report.
    /// Decides the state by [`Self::decide_life`], which has the same parameters.
    fn into_surveyed_host(
        self,
        clock: &Clock,
        hosts_with_heartbeat: &BTreeSet<String>,
        are_remote_locks_visible: bool,
    ) -> SurveyedHost {
        let Verdict { life, evidence } =
            self.decide_life(clock, hosts_with_heartbeat, are_remote_locks_visible);
        let heartbeat_age = if evidence == Evidence::Beat {
            // The heartbeat has changed during the survey.
            Some(Duration::ZERO)
        } else {
            clock.age(&self)
        };
        SurveyedHost {
            life,
            evidence,
            is_locked: self.is_locked,
            heartbeat_age,
            holder: self.heartbeat.holder(),
            uses: self.heartbeat.uses().unwrap_or_default(),
            report: self.heartbeat.report(),
            terms: self.terms,
            host: self.host,
        }
    }
}

/// Current time of the clock that stamps files.
struct Clock {
    now_ns: i128,
    evidence: Evidence,
}

impl Clock {
    /// Reads the clock by the time stamp of a new file. If this process cannot create one, the time of the youngest
    /// heartbeat takes its place.
    fn read<B: Backing>(base: &B, leases: &[ExaminedLease<B>]) -> Result<Self, OwnError> {
        if let Some(now_ns) = read_probe_time(base)? {
            return Ok(Self {
                now_ns,
                evidence: Evidence::ServerClock,
            });
        }
        let youngest_ns = leases.iter().map(|lease| lease.heartbeat_time_ns).max();
        Ok(Self {
            now_ns: youngest_ns.unwrap_or(0),
            evidence: Evidence::YoungestBeat,
        })
    }

    /// Returns the age of a heartbeat. Returns `None` if it lies in the future by more than [`STALE_AFTER`], because
    /// the times then come from different clocks.
    fn age<B: Backing>(&self, lease: &ExaminedLease<B>) -> Option<Duration> {
        let age_ns = self.now_ns - lease.heartbeat_time_ns;
        // The holder may have written a heartbeat after the probe.
        if age_ns < -(STALE_AFTER.as_nanos() as i128) {
            return None;
        }
        u64::try_from(age_ns.max(0)).ok().map(Duration::from_nanos)
    }
}

/// Creates and removes a probe file, and returns its time stamp: the present time of the clock that also stamps the
/// leases. Returns `None` if this process cannot create one, or if a probe of that name was there.
fn read_probe_time<B: Backing>(base: &B) -> Result<Option<i128>, OwnError> {
    let Some((top, _)) = own::find_dir(base, &base.root(), TOP)? else {
        return Ok(None);
    };
    let name = format!("{PROBE}{}", std::process::id());
    let name = OsStr::new(&name);
    let probed = match base.create(&own::own_caller(), &top, name, own::FILE_MODE) {
        Ok((_, file, _)) => base.attr_of_file(&file).map(Some),
        // A killed process with the same id left its probe file, or another host has a process with this id.
        Err(Errno::EXIST) => Ok(None),
        Err(Errno::ROFS | Errno::ACCESS | Errno::PERM | Errno::NOSPC | Errno::DQUOT) => {
            return Ok(None);
        }
        Err(errno) => Err(errno),
    };
    match base.unlink(&top, name) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(errno) => return Err(errno.into()),
    }
    Ok(probed?.map(|attr| nanoseconds(attr.mtime)))
}

/// Returns the nanoseconds since 1970, which may be negative.
fn nanoseconds(time: firn_backing::Time) -> i128 {
    i128::from(time.sec) * 1_000_000_000 + i128::from(time.nsec)
}
