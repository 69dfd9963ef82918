//! Tokens as locks of files (flock(2)) in the backing, the directory that several hosts share.
//!
//! A *lane* is one I/O server. Its *token* is a lock that lets one host at a time write there.
//!
//! ```text
//! .firn/tokens/
//!   lane-0        locked by the host that writes to lane 0; the record in it names that host
//!   lane-0.next   locked by the next host
//! ```
//!
//! A host that wants the token locks `lane-0.next`, then `lane-0`, and then releases `lane-0.next`. A host that gave
//! the token back therefore queues behind the next host. The holder detects waiting hosts by one attempt to lock
//! `lane-0.next`.
//!
//! Promises
//! * A token ends with its process, as soon as the file system notices that the process is gone.
//! * Only the next host checks often whether the token is free; all other hosts check seldom.
//!
//! The service tries locks and never blocks in a lock call, because a blocking call could not be cut short. An NFS
//! client that blocks for a lock only polls itself, every second at first and finally every 30 seconds.
//!
//! Relies on [`crate::check_reach`]: that check must have found that locks reach other hosts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{OwnError, own};
use firn_backing::{Access, Backing, LockMode};

use super::service::{LockService, QueuePosition, ServiceError, TokenReply};

/// Size of a holder's record in bytes: the name of its host (at most 64), its process id and how often it has had the
/// token.
const RECORD_BYTES: usize = 128;
/// Pause between two attempts, as a multiple of the duration of one attempt. So a slow server gets fewer attempts.
const RETRY_PAUSE_FACTOR: u32 = 20;
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(2);
const RETRY_PAUSE_MAX: Duration = Duration::from_millis(100);
/// Factor by which the pause is longer for a host that is not next in the queue.
const QUEUED_PAUSE_FACTOR: u32 = 4;
/// Minimum time between two reads of the holder's record.
const READ_RECORD_EVERY: Duration = Duration::from_millis(200);

/// The token of one lane as a file in a backing.
pub struct FlockService<B: Backing> {
    base: Arc<B>,
    dir: B::Inode,
    lane: usize,
    host: String,
    /// Open file `lane-N.next`. It is locked once this host is the next one.
    next_in_line: Option<LockedFile<B::File>>,
    /// Open file `lane-N`. It is locked once this host has the token.
    token: Option<LockedFile<B::File>>,
    /// How often this host has had the token so far.
    grant_count: u64,
    /// The holder's record as it was last read.
    last_record: Option<ReadRecord>,
}

/// A lock file that is open.
struct LockedFile<F> {
    file: F,
    /// Whether this host has the lock.
    is_ours: bool,
}

/// The holder's record, and when it was read.
struct ReadRecord {
    record: String,
    read_at: Instant,
}

impl<B: Backing> FlockService<B> {
    /// Creates the service for the token of lane `lane`. `dir` is a directory that Firn owns; `host` is the name of
    /// this host.
    pub fn new(base: Arc<B>, dir: B::Inode, lane: usize, host: &str) -> Self {
        Self {
            base,
            dir,
            lane,
            host: host.to_owned(),
            next_in_line: None,
            token: None,
            grant_count: 0,
            last_record: None,
        }
    }

    /// Returns the name of the file whose lock is the token.
    fn token_name(&self) -> String {
        format!("lane-{}", self.lane)
    }

    /// Returns the name of the file that the next holder has locked.
    fn next_in_line_name(&self) -> String {
        format!("lane-{}.next", self.lane)
    }

    /// Tries once to lock the file `name`, unless this host holds the lock already. Opens the file into `lock_file`
    /// first if it is not open. Returns whether this host holds the lock now.
    fn try_lock(
        base: &B,
        dir: &B::Inode,
        lock_file: &mut Option<LockedFile<B::File>>,
        name: &str,
    ) -> Result<bool, OwnError> {
        let lock = match lock_file {
            Some(lock) => lock,
            None => lock_file.insert(LockedFile {
                file: own::open_or_create(base, dir, name)?,
                is_ours: false,
            }),
        };
        if !lock.is_ours {
            lock.is_ours = base.try_lock(&lock.file, LockMode::Exclusive)?;
        }
        Ok(lock.is_ours)
    }

    /// Tries to become the next holder, and then to get the token. Returns whether this host has the token now.
    fn try_lock_both(&mut self) -> Result<bool, OwnError> {
        let next_in_line_name = self.next_in_line_name();
        let token_name = self.token_name();
        if !Self::try_lock(
            &self.base,
            &self.dir,
            &mut self.next_in_line,
            &next_in_line_name,
        )? {
            return Ok(false);
        }
        Self::try_lock(&self.base, &self.dir, &mut self.token, &token_name)
    }

    /// Writes the record that names this host as the holder.
    ///
    /// The record is not synced. Other hosts see it at the latest when this host gives the token back.
    fn write_record(&mut self) -> Result<(), OwnError> {
        let Some(token) = &self.token else {
            return Ok(());
        };
        self.grant_count += 1;
        let pid = std::process::id();
        let mut record = format!("{} {pid} {}", self.host, self.grant_count).into_bytes();
        record.resize(RECORD_BYTES - 1, b' ');
        record.push(b'\n');
        Ok(own::write_all(&*self.base, &token.file, &record, 0)?)
    }

    /// Returns the holder's record, which differs each time that a host gets the token. The file is read again only
    /// after [`READ_RECORD_EVERY`].
    fn holder_record(&mut self) -> Result<String, OwnError> {
        let now = Instant::now();
        if let Some(last) = &self.last_record
            && now - last.read_at < READ_RECORD_EVERY
        {
            return Ok(last.record.clone());
        }
        let record = self.read_record()?;
        self.last_record = Some(ReadRecord {
            record: record.clone(),
            read_at: now,
        });
        Ok(record)
    }

    /// Reads the holder's record from the server. Returns an empty text if there is no record.
    fn read_record(&self) -> Result<String, OwnError> {
        // Open the file again, because the client of a network file system then asks the server.
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

/// Returns the name of the host in a record. Returns `None` if the record has no valid host name.
fn host_of(record: &str) -> Option<String> {
    let host = record.split(' ').next()?;
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    if host.is_empty() || !host.bytes().all(is_allowed) {
        return None;
    }
    Some(host.to_owned())
}

impl<B: Backing> LockService for FlockService<B>
where
    B::Inode: Send,
    B::File: Send,
{
    /// Tries once to get the token, which is the lock of a file. If the token is not free, returns its holder and when
    /// to ask again.
    ///
    /// A host first locks another file; that lock marks the host that is next in line. It keeps the lock between its
    /// attempts.
    fn ask(&mut self) -> Result<TokenReply, ServiceError> {
        let started_at = Instant::now();
        if self.try_lock_both()? {
            let written = self.write_record();
            // The close frees the place of the next host, also if the record could not be written.
            self.next_in_line = None;
            self.last_record = None;
            written?;
            return Ok(TokenReply::Granted);
        }
        let is_next = self.next_in_line.as_ref().is_some_and(|next| next.is_ours);
        // The pause grows with the duration of this attempt, so a slow server gets fewer attempts. The host that is
        // next in line asks often, and all others seldom.
        let pause =
            (started_at.elapsed() * RETRY_PAUSE_FACTOR).clamp(RETRY_PAUSE_MIN, RETRY_PAUSE_MAX);
        let ask_again_after = if is_next {
            pause
        } else {
            (pause * QUEUED_PAUSE_FACTOR).min(RETRY_PAUSE_MAX)
        };
        let record = self.holder_record()?;
        Ok(TokenReply::Queued(QueuePosition {
            holder: host_of(&record),
            holding: record,
            ask_again_after,
        }))
    }

    fn give_back(&mut self) -> Result<(), ServiceError> {
        // Release in this order, so that the next host finds the token free at once.
        self.token = None;
        self.next_in_line = None;
        self.last_record = None;
        Ok(())
    }

    fn others_wait(&mut self) -> Result<bool, ServiceError> {
        let file = own::open_or_create(&*self.base, &self.dir, &self.next_in_line_name())?;
        let is_free = self
            .base
            .try_lock(&file, LockMode::Exclusive)
            .map_err(OwnError::from)?;
        Ok(!is_free)
    }

    fn renew(&mut self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn renew_every(&self) -> Option<Duration> {
        None
    }
}
