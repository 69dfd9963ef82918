//! Examines all hosts that have a lease in a backing: which hosts are alive, since when, and what each host reports.
//! The examining process need not have a lease itself.
//!
//! ```text
//!   lock held, beat young   alive         lock free, lease released                    left
//!   lock held, beat old     silent        lock free, same kernel, or beat very old     dead
//!                                         lock free, beat young                        alive: the lock may not reach
//!                                         lock free, beat old, locks reach             dead
//!                                         lock free, beat old                          silent: dead, stopped, or delayed
//! ```
//!
//! Locks reach this host if it sees the lock of a host that runs another kernel. In that case the survey trusts the
//! locks of all hosts.
//!
//! Promises
//! * No clock of a host is compared with the clock of another host. The age of a beat is the age of its file, by the
//!   clock that stamps files. The survey reads that clock by creating a probe file. A process that may not create a
//!   file compares with the youngest beat instead, which gives a lower bound of the age.
//! * A beat that grows during the survey proves that its host is alive, whatever the file times say
//!   ([`LOOK_AGAIN_FOR`]).
//! * The reports of hosts are only shown to people; no part of Firn acts on a survey.
//! * The survey leaves nothing in the backing.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::time::Duration;

use firn_backing::{Backing, Errno};
use serde::{Deserialize, Serialize};

use crate::host_dir::{find_host_dir, list_hosts};
use crate::lease::{Beat, Holder, LEASE, Lease, LeaseUse, Report, STALE_AFTER};
use crate::own::{self, OwnError, TOP};
use crate::terms::{Terms, terms_of_holding};

/// Prefix of the name of the probe file whose time is compared; the process id follows.
const PROBE: &str = "probe-time-";
/// How long the survey watches leases whose beats seem old.
pub const LOOK_AGAIN_FOR: Duration = Duration::from_millis(800);
const WATCH_EVERY: Duration = Duration::from_millis(100);
/// Maximum number of attempts to read a record that its holder is writing.
const READ_TRIES: usize = 4;
const READ_RETRY_PAUSE: Duration = Duration::from_millis(5);
/// Maximum number of hosts in a survey. The directory may contain any number of names.
pub const HOSTS_MAX: usize = 4096;

/// State of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Life {
    /// The host beats.
    Alive,
    /// The host does not beat. Its process exists but is stopped, or its backing hangs, or its lock proves nothing
    /// here.
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
    /// The beat grew during the survey.
    Beat,
    /// The age of the beat, by the clock of the file system.
    ServerClock,
    /// The age of the beat relative to the youngest beat, because this process may not create a probe file.
    YoungestBeat,
}

/// A host that has the backing mounted, or had it mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSeen {
    /// Name of the host.
    pub host: String,
    /// State of the host.
    pub life: Life,
    /// Evidence for the state.
    pub evidence: Evidence,
    /// Whether the host's lease is locked.
    pub is_locked: bool,
    /// Time since the last beat. `None` if it is unknown.
    pub beat_age: Option<Duration>,
    /// The process that holds the lease. `None` if the record could not be read.
    pub holder: Option<Holder>,
    /// The purposes for which the host uses the backing.
    pub uses: BTreeSet<LeaseUse>,
    /// How the host mounts. Empty if the host has not published terms in this holding.
    pub terms: Terms,
    /// Report of the host's last beat.
    pub report: Option<Report>,
}

/// Result of a survey.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Hosts by name.
    pub hosts: Vec<HostSeen>,
    /// Hosts whose examination failed, with the error.
    pub failed: BTreeMap<String, OwnError>,
    /// More than `HOSTS_MAX` hosts exist, and the list is incomplete.
    pub is_cut: bool,
}

/// A lease as the survey found it at first.
struct ExaminedLease<B: Backing> {
    host: String,
    dir: B::Inode,
    beat: Beat,
    is_locked: bool,
    /// A free lock proves that the holder is gone ([`Beat::is_settled_by_lock`]).
    is_settled: bool,
    /// Modification time of the lease file in nanoseconds, by the clock that stamps files.
    beaten_ns: i128,
    terms: Terms,
}

/// Examines all hosts that have a lease in a backing.
///
/// `boot` is the boot id of this host ([`Holder::boot`]). `sleep` must wait for the given time. The waits while old
/// beats are watched add up to at most `LOOK_AGAIN_FOR`; each record that is being written adds up to 15 ms.
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
    let beats = |lease: &ExaminedLease<B>| clock.age(lease).is_some_and(|age| age < STALE_AFTER);
    let doubtful: Vec<&ExaminedLease<B>> = leases
        .iter()
        .filter(|lease| !lease.beat.is_released() && !lease.is_dead() && !beats(lease))
        .collect();
    let beating = find_beating(base, &doubtful, sleep);
    let reaches = locks_reach(&leases, boot);
    survey.hosts = leases
        .into_iter()
        .map(|lease| lease.into_host_seen(&clock, &beating, reaches))
        .collect();
    Ok(survey)
}

/// Examines the lease of one host. Returns `None` if the host has none.
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
    let Some(beat) = read_complete_beat(base, &dir, sleep)? else {
        return Ok(None);
    };
    // Read the time after the file was opened. At the open, the client of a network file system has asked its server.
    let Some((_, attr)) = own::find(base, &dir, OsStr::new(LEASE))? else {
        return Ok(None);
    };
    let is_settled = beat.is_settled_by_lock(boot, base.attr(&dir)?.dev);
    let terms = terms_of_holding(base, &dir, &beat)?.unwrap_or_default();
    Ok(Some(ExaminedLease {
        host: host.to_owned(),
        dir,
        is_locked,
        is_settled,
        beaten_ns: nanoseconds(attr.mtime),
        terms,
        beat,
    }))
}

/// Reads a beat, and repeats the read if the holder is writing the record at that moment.
fn read_complete_beat<B: Backing>(
    base: &B,
    dir: &B::Inode,
    sleep: &mut dyn FnMut(Duration),
) -> Result<Option<Beat>, OwnError> {
    let mut read = Beat::read(base, dir)?;
    for _ in 1..READ_TRIES {
        if read.as_ref().is_none_or(|beat| beat.holder().is_some()) {
            break;
        }
        sleep(READ_RETRY_PAUSE);
        read = Beat::read(base, dir)?;
    }
    Ok(read)
}

/// Returns whether the lock of a host that runs another kernel is visible on this host.
fn locks_reach<B: Backing>(leases: &[ExaminedLease<B>], boot: &str) -> bool {
    let is_other = |lease: &ExaminedLease<B>| {
        let holder = lease.beat.holder();
        holder.is_some_and(|holder| holder.boot != boot)
    };
    leases
        .iter()
        .any(|lease| lease.is_locked && is_other(lease))
}

/// Watches leases whose beats seem old, for [`LOOK_AGAIN_FOR`], and returns the hosts whose beats change.
fn find_beating<B: Backing>(
    base: &B,
    doubtful: &[&ExaminedLease<B>],
    sleep: &mut dyn FnMut(Duration),
) -> BTreeSet<String> {
    let mut beating = BTreeSet::new();
    let looks = LOOK_AGAIN_FOR.as_millis() / WATCH_EVERY.as_millis();
    for _ in 0..looks {
        if beating.len() == doubtful.len() {
            break;
        }
        sleep(WATCH_EVERY);
        for lease in doubtful {
            let present_beat = Beat::read(base, &lease.dir).ok().flatten();
            if present_beat.is_some_and(|beat| beat != lease.beat) {
                beating.insert(lease.host.clone());
            }
        }
    }
    beating
}

impl<B: Backing> ExaminedLease<B> {
    /// Returns whether the free lock alone proves that the holder died.
    fn is_dead(&self) -> bool {
        !self.is_locked && self.is_settled && !self.beat.is_released()
    }

    /// Returns how long the beat counts as a sign of life if the lock proves nothing: the longest time of all its
    /// uses.
    fn stale_after(&self) -> Duration {
        let uses = self.beat.uses().unwrap_or_default();
        let longest = uses.iter().map(|purpose| purpose.stale_after()).max();
        longest.unwrap_or(STALE_AFTER)
    }

    /// Decides whether the host lives, by the table in the head of this file. Returns the evidence too.
    ///
    /// `beating` are the hosts whose beats changed while they were watched. `do_locks_reach` says whether locks of
    /// other hosts are visible on this one.
    fn judge(
        &self,
        clock: &Clock,
        beating: &BTreeSet<String>,
        do_locks_reach: bool,
    ) -> (Life, Evidence) {
        if self.beat.is_released() && !self.is_locked {
            return (Life::Left, Evidence::Lock);
        }
        if beating.contains(&self.host) {
            return (Life::Alive, Evidence::Beat);
        }
        if self.is_dead() {
            return (Life::Dead, Evidence::Lock);
        }
        let age = clock.age(self);
        let is_younger = |than| age.is_some_and(|age| age < than);
        let may_live = age.is_none() || is_younger(self.stale_after());
        if is_younger(STALE_AFTER) {
            (Life::Alive, clock.evidence)
        } else if self.is_locked {
            (Life::Silent, clock.evidence)
        } else if do_locks_reach && age.is_some() {
            (Life::Dead, Evidence::Lock)
        } else if may_live {
            (Life::Silent, clock.evidence)
        } else {
            (Life::Dead, clock.evidence)
        }
    }

    /// Returns what this host reports of the lease's host. The parameters are those of [`Self::judge`].
    fn into_host_seen(
        self,
        clock: &Clock,
        beating: &BTreeSet<String>,
        do_locks_reach: bool,
    ) -> HostSeen {
        let (life, evidence) = self.judge(clock, beating, do_locks_reach);
        let age = clock.age(&self);
        let is_fresh = life == Life::Alive && evidence == Evidence::Beat;
        HostSeen {
            life,
            evidence,
            is_locked: self.is_locked,
            beat_age: if is_fresh { Some(Duration::ZERO) } else { age },
            holder: self.beat.holder(),
            uses: self.beat.uses().unwrap_or_default(),
            report: self.beat.report(),
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
    /// beat takes its place.
    fn read<B: Backing>(base: &B, leases: &[ExaminedLease<B>]) -> Result<Self, OwnError> {
        Ok(match probe(base)? {
            Some(now_ns) => Self {
                now_ns,
                evidence: Evidence::ServerClock,
            },
            None => Self {
                now_ns: leases
                    .iter()
                    .map(|lease| lease.beaten_ns)
                    .max()
                    .unwrap_or(0),
                evidence: Evidence::YoungestBeat,
            },
        })
    }

    /// Returns the age of a beat. Returns `None` if the beat lies in the future by more than [`STALE_AFTER`], because
    /// the times then come from different clocks.
    fn age<B: Backing>(&self, lease: &ExaminedLease<B>) -> Option<Duration> {
        let age_ns = self.now_ns - lease.beaten_ns;
        // The holder may have beaten after the probe.
        if age_ns < -(STALE_AFTER.as_nanos() as i128) {
            return None;
        }
        u64::try_from(age_ns.max(0)).ok().map(Duration::from_nanos)
    }
}

/// Returns the time stamp of a new probe file. Returns `None` if this process cannot create one.
fn probe<B: Backing>(base: &B) -> Result<Option<i128>, OwnError> {
    let Some((top, _)) = own::find_dir(base, &base.root(), TOP)? else {
        return Ok(None);
    };
    let name = format!("{PROBE}{}", std::process::id());
    let name = OsStr::new(&name);
    let made = match base.create(&own::own_caller(), &top, name, 0o600) {
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
    Ok(made?.map(|attr| nanoseconds(attr.mtime)))
}

/// Returns the nanoseconds since 1970, which may be negative.
fn nanoseconds(time: firn_backing::Time) -> i128 {
    i128::from(time.sec) * 1_000_000_000 + i128::from(time.nsec)
}
