//! One look at all hosts that have a lease in a backing, by a process that need not have one: which hosts live, since
//! when, and what each says of itself.
//!
//! ```text
//!   lock held, beat young   alive         lock free, given back                        left
//!   lock held, beat old     silent        lock free, same kernel, or beat very old     dead
//!                                         lock free, beat young                        alive: the lock may not reach
//!                                         lock free, beat old, locks reach             dead
//!                                         lock free, beat old                          silent: dead, stopped, or behind
//! ```
//!
//! Locks are seen to reach where the lease of a host with another kernel is locked here: then the lock of each host is
//! believed.
//!
//! Promises
//! * No clock of a host is compared with another one's. A beat is as old as its file, by the clock that stamps files:
//!   the time of a probe file that is made for it. A process that may not make one compares with the youngest beat,
//!   which is a lower bound.
//! * A beat that grows while it is looked at proves life, whatever times say ([`LOOK_AGAIN_FOR`]).
//! * What a host says of itself is only shown to people: no part of Firn acts on a survey.
//! * Nothing stays in the backing.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::time::Duration;

use firn_backing::{Backing, Errno};
use serde::{Deserialize, Serialize};

use crate::host_dir::{find_host_dir, list_hosts};
use crate::lease::{Beat, Holder, LEASE, Lease, LeaseUse, Report, STALE_AFTER};
use crate::own::{self, OwnError, TOP};
use crate::terms::{Terms, terms_of_holding};

/// The file whose time is compared, before the number of the process.
const PROBE: &str = "probe-time-";
/// How long beats that seem old are looked at again.
pub const LOOK_AGAIN_FOR: Duration = Duration::from_millis(800);
const LOOK_AGAIN_EVERY: Duration = Duration::from_millis(100);
/// Looks at a record that is just being written.
const READ_TRIES: usize = 4;
const READ_AGAIN_AFTER: Duration = Duration::from_millis(5);
/// Hosts that are looked at; a directory of Firn's own may have any number of names.
pub const HOSTS_MAX: usize = 4096;

/// Whether a host lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Life {
    /// It beats.
    Alive,
    /// It does not beat. Its process is there, and stopped, or its backing hangs; or its lock says nothing here.
    Silent,
    /// Its process is gone, and did not say so.
    Dead,
    /// It gave its lease back.
    Left,
}

impl Life {
    /// Whether the host may still have the backing mounted.
    pub fn may_live(self) -> bool {
        matches!(self, Self::Alive | Self::Silent)
    }
}

/// What the answer whether a host lives rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Evidence {
    /// The lock of its lease, which this kernel keeps, or its word that it left.
    Lock,
    /// Its beat grew meanwhile.
    Beat,
    /// The age of its beat, by the clock of the file system.
    ServerClock,
    /// How much older its beat is than the youngest one, as this process may make no file there.
    YoungestBeat,
}

/// A host that has, or had, the backing mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSeen {
    /// Its name.
    pub host: String,
    /// Whether it lives.
    pub life: Life,
    /// What that rests on.
    pub evidence: Evidence,
    /// Whether its lease is locked.
    pub is_locked: bool,
    /// Time since its last beat; none: it cannot be told.
    pub beat_age: Option<Duration>,
    /// Its process; none: its record could not be read.
    pub holder: Option<Holder>,
    /// What it uses the backing for.
    pub uses: BTreeSet<LeaseUse>,
    /// How it mounts; empty: it has not said so in this holding.
    pub terms: Terms,
    /// How it was at its last beat.
    pub report: Option<Report>,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Hosts by name.
    pub hosts: Vec<HostSeen>,
    /// Hosts that could not be looked at, and why.
    pub failed: BTreeMap<String, OwnError>,
    /// There are more than `HOSTS_MAX`.
    pub is_cut: bool,
}

/// A lease at the first look.
struct Found<B: Backing> {
    host: String,
    dir: B::Inode,
    beat: Beat,
    is_locked: bool,
    is_settled: bool,
    /// Nanoseconds of the file's clock.
    beaten_ns: i128,
    terms: Terms,
}

/// Says of all hosts that have a lease in a backing whether they live. `boot` is the id of this boot of the host
/// ([`Holder::boot`]). `rest` waits for the given time; all its waits together are at most `LOOK_AGAIN_FOR`.
pub fn survey<B: Backing>(
    base: &B,
    boot: &str,
    rest: &mut dyn FnMut(Duration),
) -> Result<Survey, OwnError> {
    let mut survey = Survey::default();
    let mut names = list_hosts(base)?;
    names.sort();
    survey.is_cut = names.len() > HOSTS_MAX;
    names.truncate(HOSTS_MAX);
    let mut found: Vec<Found<B>> = Vec::new();
    for host in names {
        match find(base, &host, boot, rest) {
            Ok(Some(lease)) => found.push(lease),
            Ok(None) => {}
            Err(error) => {
                survey.failed.insert(host, error);
            }
        }
    }
    if found.is_empty() {
        return Ok(survey);
    }
    let clock = Clock::read(base, &found)?;
    let beats = |found: &Found<B>| clock.age(found).is_some_and(|age| age < STALE_AFTER);
    let doubted: Vec<&Found<B>> = found
        .iter()
        .filter(|found| !found.beat.is_released() && !found.is_dead() && !beats(found))
        .collect();
    let beating = look_again(base, &doubted, rest);
    let reaches = locks_reach(&found, boot);
    survey.hosts = found
        .into_iter()
        .map(|found| found.judge(&clock, &beating, reaches))
        .collect();
    Ok(survey)
}

fn find<B: Backing>(
    base: &B,
    host: &str,
    boot: &str,
    rest: &mut dyn FnMut(Duration),
) -> Result<Option<Found<B>>, OwnError> {
    let Some(dir) = find_host_dir(base, host)? else {
        return Ok(None);
    };
    let is_locked = match Lease::is_held(base, &dir) {
        Ok(is_held) => is_held,
        Err(OwnError::Backing(Errno::OPNOTSUPP | Errno::NOLCK)) => false,
        Err(error) => return Err(error),
    };
    let Some(beat) = read_whole(base, &dir, rest)? else {
        return Ok(None);
    };
    // Asked after the file was opened: a client of a network file system has asked its server then.
    let Some((_, attr)) = own::find(base, &dir, OsStr::new(LEASE))? else {
        return Ok(None);
    };
    let is_settled = beat.is_settled_by_lock(boot, base.attr(&dir)?.dev);
    let terms = terms_of_holding(base, &dir, &beat)?.unwrap_or_default();
    Ok(Some(Found {
        host: host.to_owned(),
        dir,
        is_locked,
        is_settled,
        beaten_ns: nanoseconds(attr.mtime),
        terms,
        beat,
    }))
}

/// A record that is being written is read again.
fn read_whole<B: Backing>(
    base: &B,
    dir: &B::Inode,
    rest: &mut dyn FnMut(Duration),
) -> Result<Option<Beat>, OwnError> {
    let mut read = Beat::read(base, dir)?;
    for _ in 1..READ_TRIES {
        if read.as_ref().is_none_or(|beat| beat.holder().is_some()) {
            break;
        }
        rest(READ_AGAIN_AFTER);
        read = Beat::read(base, dir)?;
    }
    Ok(read)
}

/// Whether a host with another kernel keeps this one out.
fn locks_reach<B: Backing>(found: &[Found<B>], boot: &str) -> bool {
    let is_other = |found: &Found<B>| {
        let holder = found.beat.holder();
        holder.is_some_and(|holder| holder.boot != boot)
    };
    found.iter().any(|found| found.is_locked && is_other(found))
}

/// The hosts whose beats grow.
fn look_again<B: Backing>(
    base: &B,
    doubted: &[&Found<B>],
    rest: &mut dyn FnMut(Duration),
) -> BTreeSet<String> {
    let mut beating = BTreeSet::new();
    let looks = LOOK_AGAIN_FOR.as_millis() / LOOK_AGAIN_EVERY.as_millis();
    for _ in 0..looks {
        if beating.len() == doubted.len() {
            break;
        }
        rest(LOOK_AGAIN_EVERY);
        for found in doubted {
            let now = Beat::read(base, &found.dir).ok().flatten();
            if now.is_some_and(|now| now != found.beat) {
                beating.insert(found.host.clone());
            }
        }
    }
    beating
}

impl<B: Backing> Found<B> {
    /// Whether its lock alone says that its holder died.
    fn is_dead(&self) -> bool {
        !self.is_locked && self.is_settled && !self.beat.is_released()
    }

    /// How long its beat is believed where its lock says nothing: as long as for the most patient use.
    fn stale_after(&self) -> Duration {
        let uses = self.beat.uses().unwrap_or_default();
        let longest = uses.iter().map(|purpose| purpose.stale_after()).max();
        longest.unwrap_or(STALE_AFTER)
    }

    fn judge(self, clock: &Clock, beating: &BTreeSet<String>, reaches: bool) -> HostSeen {
        let age = clock.age(&self);
        let (life, evidence) = if self.beat.is_released() && !self.is_locked {
            (Life::Left, Evidence::Lock)
        } else if beating.contains(&self.host) {
            (Life::Alive, Evidence::Beat)
        } else if self.is_dead() {
            (Life::Dead, Evidence::Lock)
        } else {
            let is_younger = |than| age.is_some_and(|age| age < than);
            let may_live = age.is_none() || is_younger(self.stale_after());
            if is_younger(STALE_AFTER) {
                (Life::Alive, clock.evidence)
            } else if self.is_locked {
                (Life::Silent, clock.evidence)
            } else if reaches && age.is_some() {
                (Life::Dead, Evidence::Lock)
            } else if may_live {
                (Life::Silent, clock.evidence)
            } else {
                (Life::Dead, clock.evidence)
            }
        };
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

/// What the clock that stamps files says now.
struct Clock {
    now_ns: i128,
    evidence: Evidence,
}

impl Clock {
    fn read<B: Backing>(base: &B, found: &[Found<B>]) -> Result<Self, OwnError> {
        Ok(match probe(base)? {
            Some(now_ns) => Self {
                now_ns,
                evidence: Evidence::ServerClock,
            },
            None => Self {
                now_ns: found.iter().map(|found| found.beaten_ns).max().unwrap_or(0),
                evidence: Evidence::YoungestBeat,
            },
        })
    }

    /// The age of a beat. None where it is from the future: then times are not those of one clock.
    fn age<B: Backing>(&self, found: &Found<B>) -> Option<Duration> {
        let age_ns = self.now_ns - found.beaten_ns;
        // A beat may have come since the probe.
        if age_ns < -(STALE_AFTER.as_nanos() as i128) {
            return None;
        }
        u64::try_from(age_ns.max(0)).ok().map(Duration::from_nanos)
    }
}

/// The time of a file that is made now; `None`: this process may make none.
fn probe<B: Backing>(base: &B) -> Result<Option<i128>, OwnError> {
    let Some((top, _)) = own::find_dir(base, &base.root(), TOP)? else {
        return Ok(None);
    };
    let name = format!("{PROBE}{}", std::process::id());
    let name = OsStr::new(&name);
    let made = match base.create(&own::own_caller(), &top, name, 0o600) {
        Ok((_, file, _)) => base.attr_of_file(&file).map(Some),
        // A process of this number that was killed at it left its own, or another host has one of this number.
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

fn nanoseconds(time: firn_backing::Time) -> i128 {
    i128::from(time.sec) * 1_000_000_000 + i128::from(time.nsec)
}
