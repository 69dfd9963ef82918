//! Tokens as locks of files in the backing (flock(2)).
//!
//! ```text
//! .firn/tokens/
//!   lane-0        locked by the host that writes to lane 0; its record says which host that is
//!   lane-0.next   locked by the one that is next
//! ```
//!
//! A host that wants the token locks `lane-0.next`, then `lane-0`, then lets go of the first. So a host that gave the
//! token back comes behind the host that is next, and the holder sees by one try whether another host waits.
//!
//! Promises
//! * A token ends with its process, as soon as the file system sees that it is gone.
//! * Only the host that is next looks often whether the token is free; the others look seldom.
//!
//! Locks are tried and not waited for, because a wait in the call could not be cut short. A client of NFS that waits
//! for a lock only looks itself, every second at first and every 30 seconds in the end.
//!
//! Relies on [`crate::check_reach`] having found that locks reach other hosts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{OwnError, own};
use firn_backing::{Access, Backing, LockMode};

use super::service::{Asked, Behind, LockService, ServiceError};

/// Bytes of a holder's record: its host's name, which has 64 at most, its process and the number of the holding.
const RECORD_BYTES: usize = 128;
/// A look at the token takes a part of the time between two looks, so that servers are not kept busy by them.
const REST_PER_LOOK: u32 = 20;
const REST_MIN: Duration = Duration::from_millis(2);
const REST_MAX: Duration = Duration::from_millis(100);
/// How much more seldom a host that is not next looks.
const REST_BEHIND: u32 = 4;
/// How often the holder's record is read meanwhile.
const READ_RECORD_EVERY: Duration = Duration::from_millis(200);

/// The token of one lane as a file in a backing.
pub struct FlockService<B: Backing> {
    base: Arc<B>,
    dir: B::Inode,
    lane: usize,
    host: String,
    /// Open, and locked once this host is next.
    next: Option<Lock<B::File>>,
    /// Open, and locked once this host has the token.
    token: Option<Lock<B::File>>,
    /// Holdings so far.
    holdings: u64,
    seen: Option<Seen>,
}

struct Lock<F> {
    file: F,
    is_ours: bool,
}

/// The record that was read last.
struct Seen {
    record: String,
    at: Instant,
}

impl<B: Backing> FlockService<B> {
    /// The token of lane `lane` in `dir`, a directory of Firn's own, for the host of this name.
    pub fn new(base: Arc<B>, dir: B::Inode, lane: usize, host: &str) -> Self {
        Self {
            base,
            dir,
            lane,
            host: host.to_owned(),
            next: None,
            token: None,
            holdings: 0,
            seen: None,
        }
    }

    fn token_name(&self) -> String {
        format!("lane-{}", self.lane)
    }

    fn next_name(&self) -> String {
        format!("lane-{}.next", self.lane)
    }

    /// Whether the lock in `slot` is ours now.
    fn try_lock(
        base: &B,
        dir: &B::Inode,
        slot: &mut Option<Lock<B::File>>,
        name: &str,
    ) -> Result<bool, OwnError> {
        let lock = match slot {
            Some(lock) => lock,
            None => slot.insert(Lock {
                file: own::open_or_create(base, dir, name)?,
                is_ours: false,
            }),
        };
        if !lock.is_ours {
            lock.is_ours = base.try_lock(&lock.file, LockMode::Exclusive)?;
        }
        Ok(lock.is_ours)
    }

    fn try_both(&mut self) -> Result<bool, OwnError> {
        let (base, dir) = (Arc::clone(&self.base), self.dir.clone());
        let (next, token) = (self.next_name(), self.token_name());
        Ok(Self::try_lock(&base, &dir, &mut self.next, &next)?
            && Self::try_lock(&base, &dir, &mut self.token, &token)?)
    }

    /// Writes which host has the token. Not synced: others see it when this host gives the token back at the latest.
    fn write_record(&mut self) -> Result<(), OwnError> {
        let Some(token) = &self.token else {
            return Ok(());
        };
        self.holdings += 1;
        let pid = std::process::id();
        let mut record = format!("{} {pid} {}", self.host, self.holdings).into_bytes();
        record.resize(RECORD_BYTES - 1, b' ');
        record.push(b'\n');
        Ok(own::write_all(&*self.base, &token.file, &record, 0)?)
    }

    /// The record of the holder, which is looked at now and then.
    fn holding(&mut self) -> Result<String, OwnError> {
        let now = Instant::now();
        let is_fresh = |seen: &Seen| now - seen.at < READ_RECORD_EVERY;
        if !self.seen.as_ref().is_some_and(is_fresh) {
            let record = self.read_record()?;
            self.seen = Some(Seen { record, at: now });
        }
        Ok(self
            .seen
            .as_ref()
            .map_or_else(String::new, |seen| seen.record.clone()))
    }

    fn read_record(&self) -> Result<String, OwnError> {
        // Opened anew: a client of a network file system asks the server then.
        let Some(inode) = own::find_file(&*self.base, &self.dir, &self.token_name())? else {
            return Ok(String::new());
        };
        let file = self.base.open(&inode, Access::Read)?;
        let mut record = [0; RECORD_BYTES];
        let count = self.base.read_at(&file, &mut record, 0)?;
        Ok(String::from_utf8_lossy(&record[..count])
            .trim_end()
            .to_owned())
    }
}

/// The name of the host in a record, if it is one that a host may have.
fn host_of(record: &str) -> Option<String> {
    let host = record.split(' ').next()?;
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    (!host.is_empty() && host.bytes().all(is_allowed)).then(|| host.to_owned())
}

impl<B: Backing> LockService for FlockService<B>
where
    B::Inode: Send,
    B::File: Send,
{
    fn ask(&mut self) -> Result<Asked, ServiceError> {
        let began = Instant::now();
        if self.try_both()? {
            let written = self.write_record();
            self.next = None;
            self.seen = None;
            written?;
            return Ok(Asked::Granted);
        }
        let is_next = self.next.as_ref().is_some_and(|next| next.is_ours);
        let rest = (began.elapsed() * REST_PER_LOOK).clamp(REST_MIN, REST_MAX);
        let holding = self.holding()?;
        Ok(Asked::Behind(Behind {
            holder: host_of(&holding),
            holding,
            rest: if is_next {
                rest
            } else {
                (rest * REST_BEHIND).min(REST_MAX)
            },
        }))
    }

    fn give_back(&mut self) -> Result<(), ServiceError> {
        // In this order: the next host finds the token free at once.
        self.token = None;
        self.next = None;
        self.seen = None;
        Ok(())
    }

    fn others_wait(&mut self) -> Result<bool, ServiceError> {
        let file = own::open_or_create(&*self.base, &self.dir, &self.next_name())?;
        let is_free = self.base.try_lock(&file, LockMode::Exclusive);
        Ok(!is_free.map_err(OwnError::from)?)
    }

    fn renew(&mut self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn renew_every(&self) -> Option<Duration> {
        None
    }
}
