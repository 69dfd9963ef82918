//! A logged file as one host sees it: the plain file, and a stack of containers with newer bytes on top of it.
//!
//! Terms
//! * The *plain file* is the ordinary file of the backing, which has the name, the inode and the attributes.
//! * A *generation* is one container, which is a directory with logs and indexes of all hosts. A log has the bytes that
//!   a host wrote, and its index says where they belong. A file gets the next generation when a host writes to it while
//!   other hosts flatten the newest one.
//! * A generation is *flat* when all its bytes are in the plain file.
//! * To *refresh* a file is to list its generations in the backing, and to read what other hosts added to their
//!   indexes.
//!
//! The newest generation is on top of the stack. A read goes down from it to the plain file. Flattening goes up from
//! the lowest generation.
//!
//! Race: another host may flatten and remove a generation at any moment. So an operation that fails first checks
//! whether the generation is flat or removed. If it is, the operation refreshes the file and begins again, at most
//! [`ATTEMPTS_MAX`] times.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::container::{ChangeError, ChangeResult, Container, Memory, Walk, next_change};
use crate::file_dir::{self, ListedContainer};
use crate::file_id::FileId;
use crate::frame::Change;
use crate::head::{self, HEAD, Head, HeadState};
use crate::lag::{LagRetry, is_gone, read_whole};
use crate::locate::{DataFile, ListStatus, LocatedList};
use crate::orphans::{ContainerLookup, DEAD, DYING, unmark};
use crate::resolve::Source;
use crate::run::Piece;
use crate::salvage::{LossReporter, Report};
use crate::seal::{FlattenProgress, Lifecycle, WRITING};
use crate::tag::{self, ContainersDirId};
use firn_backing::lock::Mutex;
use firn_backing::{Access, Attr, Backing, DataPart, Errno, LocateLimits, Result, Seek, Time};
use firn_hosts::{OwnError, VoteDir, own};
use parking_lot::Condvar;
use xxhash_rust::xxh3::xxh3_64;

/// Maximum number of attempts of one operation while other hosts flatten or remove generations of the file.
const ATTEMPTS_MAX: usize = 100;

/// A file that has containers or may get one, as this host sees it.
pub(crate) struct LoggedFile<B: Backing> {
    pub(crate) id: FileId,
    /// The generations found by the last refresh, the lowest first.
    generations: Mutex<Vec<Arc<Generation<B>>>>,
    /// Number of the last refresh that changed the list of generations ([`next_change`]), or 0 before the first change.
    pub(crate) changes: AtomicU64,
    refreshes: Mutex<RefreshState>,
    /// Wakes threads that wait for the end of a refresh by another thread.
    refresh_ended: Condvar,
    /// Number of open descriptors of this host that may write to the file.
    pub(crate) writers: AtomicU64,
    /// Number of open descriptors of this host, for reading and for writing.
    pub(crate) opens: AtomicU64,
    /// Whether this host has begun to write and has not yet published that it ended.
    pub(crate) has_local_writer: AtomicBool,
    /// Whether there are containers without bytes that count: a dead host did not complete or remove them.
    has_unfinished_containers: AtomicBool,
    /// When this host last updated the plain file's modification time; `None` after a program set the file's times
    /// through this host.
    pub(crate) last_mtime_update: Mutex<Option<Instant>>,
    /// Whether this host is removing the file's last name, or has removed it.
    pub(crate) is_dying: AtomicBool,
    /// Whether this host has removed the file's last name.
    pub(crate) is_removed: AtomicBool,
    /// The plain file's inode, set by the first open on this host.
    pub(crate) inode: OnceLock<B::Inode>,
    /// Whether another host has removed the file while it had bytes in logs.
    is_removed_elsewhere: AtomicBool,
    /// The error of the last refresh, if it failed.
    read_error: Mutex<Option<Errno>>,
    /// Retries operations while the backing may not show the latest changes of other hosts yet.
    lag: LagRetry,
}

/// When this host refreshed the file, and whether a refresh is due or under way.
#[derive(Default)]
struct RefreshState {
    is_under_way: bool,
    /// Time of this host's last sync, if the file was not used since. The next use refreshes the file and clears this.
    last_sync: Option<Instant>,
    /// When the last successful refresh began.
    last_success: Option<Instant>,
    /// When the last refresh began, also if it failed.
    last_attempt: Option<Instant>,
}

/// Returns the length of the plain file in bytes.
pub(crate) type PlainLen<'a> = dyn Fn() -> Result<u64> + 'a;

/// Returns whether a host is alive.
pub(crate) type IsAlive<'a> = dyn Fn(&str) -> Result<bool> + 'a;

/// Result of an attempt to flatten a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlattenOutcome {
    /// All bytes are in the plain file, and no containers are left.
    Flat,
    /// Other hosts are copying parts of the file.
    BeingCopied,
    /// A host is writing to the file, so the file cannot be flattened yet.
    BeingWritten,
    /// This host has nothing to do for the file now. A later close or request flattens it.
    NotDue,
}

/// Receives the losses of one file, which is reported under `path`.
pub(crate) struct LossTarget<'a> {
    pub(crate) path: &'a Path,
    pub(crate) report: &'a mut dyn Report,
}

/// One container of a file, opened by this host.
struct Generation<B: Backing> {
    id: FileId,
    number: u32,
    /// Inode number of the container's directory. A later container may have the same name but not this number, because
    /// the directory is held open.
    dir: u64,
    name: String,
    /// Whether the head says how many bytes of the plain file count. Otherwise the file below has its present length.
    stores_plain_bytes: bool,
    container: Container<B>,
    /// Whether this host is registered in the container as a writer.
    is_registered: AtomicBool,
    /// Whether this host knows that the container's bytes are in the plain file.
    was_flat: AtomicBool,
    /// Whether this host has synced the directory that contains the container.
    is_name_durable: AtomicBool,
    /// Whether this host has tagged the plain file with the container's name.
    is_tagged: AtomicBool,
}

/// The directory of all containers, and what an operation needs to know of this host.
pub(crate) struct LayoutContext<'a, B: Backing> {
    pub(crate) backing: &'a B,
    pub(crate) containers_dir: &'a B::Inode,
    /// Identity of `containers_dir`, as stored in tags of plain files.
    pub(crate) containers_dir_id: ContainersDirId,
    pub(crate) host: &'a str,
    /// This host's turn: the lane of its logs ([`crate::turn`]).
    pub(crate) turn: u64,
    pub(crate) memory: &'a Arc<Memory>,
    /// Maximum time for which the backing hides changes of other hosts.
    pub(crate) lag_max: Duration,
    pub(crate) is_alive: &'a IsAlive<'a>,
}

impl<'a, B: Backing> LayoutContext<'a, B> {
    /// Returns the turn of this host's logs for one file. The inode number is added, so that a host spreads its files
    /// over the lanes.
    pub(crate) fn turn_of(&self, id: FileId) -> u64 {
        self.turn.wrapping_add(xxh3_64(&id.ino.to_le_bytes()))
    }

    /// Returns the [`Lifecycle`] of the container with this name, or `None` if the container is removed.
    fn lifecycle<'c>(
        &self,
        id: FileId,
        container: &'c Container<B>,
        name: &str,
    ) -> Result<Option<Lifecycle<'c, B>>>
    where
        'a: 'c,
    {
        match file_dir::find(self.backing, self.containers_dir, id)? {
            Some(dir) => Lifecycle::open(self.backing, container, &dir, name),
            None => Ok(None),
        }
    }
}

impl<B: Backing> LoggedFile<B> {
    /// Creates the state of a file before its first refresh: without generations, and not open.
    pub(crate) fn new(id: FileId) -> Self {
        Self {
            id,
            generations: Mutex::default(),
            changes: AtomicU64::new(0),
            last_mtime_update: Mutex::default(),
            refreshes: Mutex::default(),
            refresh_ended: Condvar::new(),
            writers: AtomicU64::new(0),
            opens: AtomicU64::new(0),
            has_local_writer: AtomicBool::new(false),
            has_unfinished_containers: AtomicBool::new(false),
            is_dying: AtomicBool::new(false),
            is_removed: AtomicBool::new(false),
            inode: OnceLock::new(),
            is_removed_elsewhere: AtomicBool::new(false),
            read_error: Mutex::default(),
            lag: LagRetry::default(),
        }
    }

    /// Notes that no program of this host has the file open for writing any more.
    pub(crate) fn clear_local_writer(&self) {
        self.has_local_writer.store(false, Ordering::Release);
    }

    /// Runs `work`, and repeats it while its error may come from a backing that lags behind other hosts
    /// ([`crate::lag`]). Returns the last result. The file is refreshed (changes of other hosts are read) before each
    /// repetition.
    pub(crate) fn retry_while_lagging<T>(
        &self,
        context: &LayoutContext<'_, B>,
        work: &mut dyn FnMut() -> Result<T>,
    ) -> Result<T> {
        let mut refresh = || {
            // The error is not lost: the next attempt finds it again.
            if let Err(error) = self.refresh(context) {
                tracing::debug!(ino = self.id.ino, %error, "containers cannot be read yet");
            }
        };
        let mut attempt = || {
            let error = match work() {
                Ok(value) => return Ok(Ok(value)),
                Err(error) => error,
            };
            // The description of a damage is logged only if the last attempt fails too.
            for generation in self.snapshot() {
                if let Some(fault) = generation.container.take_fault() {
                    self.lag.record_fault(fault);
                }
            }
            match self.check_exists() {
                Ok(()) => Err(error),
                // The file was removed, so a repetition would fail too. For `LagRetry`, `Ok` means that no repetition
                // follows; the inner result is that of `work`.
                Err(_) => Ok(Err(error)),
            }
        };
        self.lag
            .retry(context.lag_max, &mut refresh, &mut attempt)?
    }

    /// Returns the generations found by the last refresh, the lowest first.
    fn snapshot(&self) -> Vec<Arc<Generation<B>>> {
        self.generations.lock().clone()
    }

    /// Returns whether bytes of the file are in logs, as of the last refresh. True if the last refresh failed.
    pub(crate) fn is_logged(&self) -> bool {
        !self.generations.lock().is_empty() || self.check_readable().is_err()
    }

    /// Returns how many bytes this host has written to the logs of the present generations.
    pub(crate) fn own_bytes(&self) -> u64 {
        let generations = self.generations.lock();
        generations
            .iter()
            .map(|generation| generation.container.own_bytes())
            .sum()
    }

    /// Returns whether the file has containers that must be flattened or removed.
    pub(crate) fn has_containers(&self) -> bool {
        self.is_logged() || self.has_unfinished_containers.load(Ordering::Acquire)
    }

    /// Fails with ESTALE if another host has removed the file while it had bytes in logs.
    pub(crate) fn check_exists(&self) -> Result<()> {
        if self.is_removed_elsewhere.load(Ordering::Acquire) {
            Err(Errno::STALE)
        } else {
            Ok(())
        }
    }

    /// Returns a number that grows each time this host learns that other hosts have changed the file.
    pub(crate) fn changes_by_others(&self) -> u64 {
        let generations = self.generations.lock();
        let last_container_change = generations
            .iter()
            .map(|generation| generation.container.changes_by_others())
            .max()
            .unwrap_or(0);
        self.changes
            .load(Ordering::Acquire)
            .max(last_container_change)
    }

    /// Fails with the error of the last refresh, if it failed.
    fn check_readable(&self) -> Result<()> {
        self.read_error.lock().map_or(Ok(()), Err)
    }

    /// Returns whether this host has tried to refresh the file at least once.
    pub(crate) fn was_refreshed(&self) -> bool {
        self.refreshes.lock().last_attempt.is_some()
    }

    /// Refreshes the file: finds its generations and reads what other hosts added to their indexes.
    ///
    /// Does nothing if another thread's refresh began after this call and succeeded. After a failure all reads of the
    /// file fail until a refresh succeeds.
    pub(crate) fn refresh(&self, context: &LayoutContext<'_, B>) -> Result<()> {
        let began = Instant::now();
        let is_fresh =
            |refreshes: &RefreshState| refreshes.last_success.is_some_and(|last| last > began);
        self.refresh_unless(&is_fresh, context, began)
    }

    /// Refreshes the file (reads what other hosts changed) if this host has synced it since the last refresh. Then
    /// raises this host's epoch, so that its next writes are newer than all that it has read.
    ///
    /// The refresh is postponed to the next use of the file: a writer that syncs and closes never needs to read the
    /// indexes of other hosts.
    pub(crate) fn refresh_after_sync(&self, context: &LayoutContext<'_, B>) -> Result<()> {
        let (last_sync, last_refresh) = {
            let refreshes = self.refreshes.lock();
            (refreshes.last_sync, refreshes.last_success)
        };
        if last_sync.is_none() {
            return Ok(());
        }
        if last_refresh < last_sync {
            self.refresh(context)?;
        }
        self.raise_epoch();
        let mut refreshes = self.refreshes.lock();
        // Another thread may have synced the file in the meantime. Its refresh is still due.
        if refreshes.last_sync == last_sync {
            refreshes.last_sync = None;
        }
        Ok(())
    }

    /// Orders this host's later writes after all changes that this host has read from indexes.
    pub(crate) fn raise_epoch(&self) {
        if let Some(newest) = self.snapshot().last() {
            newest.container.raise_epoch();
        }
    }

    /// Makes the next use of the file refresh it ([`LoggedFile::refresh_after_sync`]), so that this host sees what
    /// others have synced.
    ///
    /// Ends the validity of bytes that readers hold now: only the refresh shows which of those bytes are old.
    fn require_refresh(&self) {
        self.refreshes.lock().last_sync = Some(Instant::now());
        if self.is_logged() {
            self.changes.fetch_max(next_change(), Ordering::AcqRel);
        }
    }

    /// Refreshes the file after a listing of all files. Several threads may use one listing: the first of them
    /// refreshes the file, and the others wait for that.
    ///
    /// `began` is when the listing began, `is_listed` whether the file has a directory in it.
    pub(crate) fn refresh_after_listing(
        &self,
        context: &LayoutContext<'_, B>,
        began: Instant,
        is_listed: bool,
    ) -> Result<()> {
        if !is_listed && !self.has_containers() {
            return Ok(());
        }
        let is_fresh =
            |refreshes: &RefreshState| refreshes.last_attempt.is_some_and(|last| last >= began);
        self.refresh_unless(&is_fresh, context, began)
    }

    /// Refreshes the file (reads what other hosts changed), unless `is_fresh` says that a refresh by another thread is
    /// recent enough. One thread refreshes at a time; others wait for it. What other hosts made visible before `began`
    /// is seen afterwards.
    fn refresh_unless(
        &self,
        is_fresh: &dyn Fn(&RefreshState) -> bool,
        context: &LayoutContext<'_, B>,
        began: Instant,
    ) -> Result<()> {
        {
            let mut refreshes = self.refreshes.lock();
            while refreshes.is_under_way {
                refreshes.wait(&self.refresh_ended);
            }
            if is_fresh(&refreshes) {
                return Ok(());
            }
            refreshes.is_under_way = true;
            refreshes.last_attempt = refreshes.last_attempt.max(Some(began));
        }
        let outcome = self.refresh_exclusively(context);
        *self.read_error.lock() = outcome.err();
        let mut refreshes = self.refreshes.lock();
        refreshes.is_under_way = false;
        if outcome.is_ok() {
            refreshes.last_success = Some(began);
        }
        self.refresh_ended.notify_all();
        outcome
    }

    /// Refreshes the list of generations (containers with logs of the file): opens new ones, reads all indexes, and
    /// drops those that are flat or removed. Also notices that another host has removed the file.
    ///
    /// Runs in one thread at a time. Two threads would both open a new container. One of the two objects would be
    /// dropped, together with its state of this host's own logs.
    fn refresh_exclusively(&self, context: &LayoutContext<'_, B>) -> Result<()> {
        let mut containers = self.list(context)?;
        containers.sort_unstable();
        let old_generations = self.snapshot();
        let has_vanished = |generation: &Arc<Generation<B>>| {
            !generation.was_flat.load(Ordering::Acquire)
                && !containers
                    .iter()
                    .any(|container| generation.has_container(container))
        };
        // Another host removes a generation only after it is flat, or together with the file. So if one that was not
        // flat has vanished, the file may be removed.
        if old_generations.iter().any(has_vanished) && self.has_lost_last_name(context)? {
            self.is_removed_elsewhere.store(true, Ordering::Release);
        }
        let mut generations = Vec::new();
        for container in &containers {
            let known_generation = old_generations
                .iter()
                .find(|generation| generation.has_container(container));
            let opened_generation = match known_generation {
                Some(known) => Some(Arc::clone(known)),
                None => self.open_generation(context, container.number)?,
            };
            let Some(generation) = opened_generation else {
                continue;
            };
            if generation.refresh_unless_flat(context)? {
                generations.push(generation);
            }
        }
        self.has_unfinished_containers
            .store(generations.len() < containers.len(), Ordering::Release);
        self.replace_generations(&old_generations, generations);
        Ok(())
    }

    /// Replaces the list of generations (containers with logs of the file) after a refresh. `old_generations` is the
    /// list before the refresh.
    fn replace_generations(
        &self,
        old_generations: &[Arc<Generation<B>>],
        new_generations: Vec<Arc<Generation<B>>>,
    ) {
        let is_unchanged = old_generations.len() == new_generations.len()
            && old_generations
                .iter()
                .zip(&new_generations)
                .all(|(old, new)| Arc::ptr_eq(old, new));
        // The number grows before the list changes: a reader that took the plain file's length before the
        // generation was flat sees the new number and reads the length again.
        if !is_unchanged {
            self.changes.fetch_max(next_change(), Ordering::AcqRel);
        }
        let replaced = std::mem::replace(&mut *self.generations.lock(), new_generations);
        // The old generations are dropped after the lock is released, because that closes files.
        drop(replaced);
    }

    /// Returns whether the file is open on this host while another host has removed its last name.
    fn has_lost_last_name(&self, context: &LayoutContext<'_, B>) -> Result<bool> {
        let Some(inode) = self.inode.get() else {
            return Ok(false);
        };
        if self.is_removed.load(Ordering::Acquire) {
            return Ok(false);
        }
        match context.backing.attr_now(inode) {
            Ok(attr) => Ok(attr.nlink == 0),
            Err(error) if is_gone(error) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Opens a generation, which is one container of the file, and reads its indexes. Returns `None` if it is removed
    /// or not made completely.
    fn open_generation(
        &self,
        context: &LayoutContext<'_, B>,
        number: u32,
    ) -> Result<Option<Arc<Generation<B>>>> {
        let Some(generation) = self.find_generation(context, number)? else {
            return Ok(None);
        };
        match generation
            .container
            .refresh_and_raise_epoch(context.backing)
        {
            // Another host has flattened and removed the generation since it was found.
            Err(_) if !generation.is_current(context)? => Ok(None),
            Err(error) => {
                if let Some(fault) = generation.container.take_fault() {
                    self.lag.record_fault(fault);
                }
                Err(error)
            }
            Ok(()) => Ok(Some(Arc::new(generation))),
        }
    }

    /// Opens a generation, which is one container of the file, without reading its indexes.
    ///
    /// Returns `None` if the container is removed, or is still being made: its head, the link that makes it valid, does
    /// not exist yet. Fails with EIO if the head is damaged or lost.
    fn find_generation(
        &self,
        context: &LayoutContext<'_, B>,
        number: u32,
    ) -> Result<Option<Generation<B>>> {
        let name = self.id.container_name(number);
        let find_dir =
            || file_dir::find_container(context.backing, context.containers_dir, self.id, number);
        let Some((dir, attr)) = find_dir()? else {
            return Ok(None);
        };
        let head = match head::load(context.backing, &dir, self.id, number)? {
            HeadState::Valid(head) => head,
            // No host can have written to the container.
            HeadState::BeingMade => return Ok(None),
            // Another host has removed the container since it was found.
            HeadState::Unusable(_) if find_dir()?.is_none() => return Ok(None),
            HeadState::Unusable(error) => {
                tracing::error!(
                    container = name,
                    file = HEAD,
                    "cannot read the head of the logs of a file: {error}"
                );
                return Err(Errno::IO);
            }
        };
        let plain_bytes = head.plain_bytes.unwrap_or(0);
        let container =
            Container::open_unread(dir, &name, context.host, plain_bytes, context.memory)
                .with_turn(context.turn_of(self.id));
        Ok(Some(Generation::new(
            self.id, &head, attr.ino, name, container,
        )))
    }

    /// Sets, for each generation, the length of the file below it, on which changes of the length depend. `plain_bytes`
    /// is the length of the plain file.
    fn update_lengths_below(&self, plain_bytes: u64) {
        // The computation of the length has this effect.
        self.len(plain_bytes);
    }

    /// Returns the length of the file in bytes. `plain_bytes` is the length of the plain file.
    pub(crate) fn len(&self, plain_bytes: u64) -> u64 {
        let generations = self.snapshot();
        Self::set_lengths_below(&generations, plain_bytes);
        match generations.last() {
            Some(newest) => newest.container.len(),
            None => plain_bytes,
        }
    }

    /// Returns the file's modification time, if the plain file has another one because the file is being flattened.
    pub(crate) fn modified_time(&self) -> Option<Time> {
        let generations = self.generations.lock();
        let lowest_not_flat = generations
            .iter()
            .find(|generation| !generation.was_flat.load(Ordering::Acquire))?;
        lowest_not_flat.container.modified()
    }

    /// Sets the modification time to `new_time`. `set_plain_time` sets it on the plain file.
    ///
    /// Race: a host that flattens the file sets the last recorded time on the plain file. So the time is also recorded
    /// in each container (directory with logs) that is ending, and then set once more.
    pub(crate) fn set_modified(
        &self,
        context: &LayoutContext<'_, B>,
        new_time: Time,
        set_plain_time: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let generations = self.snapshot();
        set_plain_time()?;
        let mut is_any_ending = false;
        for generation in &generations {
            // While this host is registered as a writer, no other host ends the container.
            if !generation.is_registered.load(Ordering::Acquire) {
                is_any_ending |= generation.record_time_if_ending(context, new_time)?;
            }
        }
        if is_any_ending {
            set_plain_time()?;
            self.refresh(context)?;
        }
        Ok(())
    }

    /// Sets, for each generation, the length of the file below it.
    fn set_lengths_below(generations: &[Arc<Generation<B>>], plain_bytes: u64) {
        let mut bytes_below = plain_bytes;
        for generation in generations {
            if !generation.stores_plain_bytes {
                generation.container.set_plain_bytes(bytes_below);
            }
            bytes_below = generation.container.len();
        }
    }

    /// Reads from `offset` until `buf` is full or the file ends, and returns the number of bytes read. The bytes are in
    /// generations (directories with logs, the newest on top) and in the plain file below them.
    ///
    /// Other hosts may move the bytes of a generation to the plain file at any moment. The read is then tried again. It
    /// fails with EIO if they do so during each attempt.
    pub(crate) fn read(
        &self,
        context: &LayoutContext<'_, B>,
        plain_file: &B::File,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<usize> {
        self.refresh_after_sync(context)?;
        for _ in 0..ATTEMPTS_MAX {
            self.check_readable()?;
            self.check_exists()?;
            let generations = self.snapshot();
            // The plain file's length is needed only if the lowest generation does not store it.
            let plain_bytes = match generations.first() {
                Some(lowest) if lowest.stores_plain_bytes => 0,
                _ => context.backing.attr_of_file_now(plain_file)?.size,
            };
            // Each generation needs the length of the file below it.
            Self::set_lengths_below(&generations, plain_bytes);
            match read_stack(context.backing, &generations, plain_file, buf, offset) {
                // The logs are removed: the bytes are in a lower generation or in the plain file now.
                Err(_) if is_any_flat_or_removed(context, &generations) => self.refresh(context)?,
                outcome => return outcome,
            }
        }
        Err(Errno::IO)
    }

    /// Finds where the bytes of `range` lie in logs and in the plain file, until `limits` are reached. Fails with EIO
    /// if other hosts move the bytes during each attempt.
    pub(crate) fn locate(
        &self,
        context: &LayoutContext<'_, B>,
        plain_file: &B::File,
        range: Range<u64>,
        limits: LocateLimits,
    ) -> Result<LocatedList> {
        self.refresh_after_sync(context)?;
        for _ in 0..ATTEMPTS_MAX {
            self.check_readable()?;
            self.check_exists()?;
            let plain_bytes = context.backing.attr_of_file_now(plain_file)?.size;
            let generations = self.snapshot();
            Self::set_lengths_below(&generations, plain_bytes);
            let len = match generations.last() {
                Some(newest) => newest.container.len(),
                None => plain_bytes,
            };
            let mut located = LocatedList::new(range.start, limits);
            let outcome = locate_up_to(
                context.backing,
                &generations,
                plain_file,
                range.clone(),
                len,
                &mut located,
            );
            match outcome {
                Ok(()) => return Ok(located),
                // The logs are removed: the bytes are in a lower generation or in the plain file now.
                Err(_) if is_any_flat_or_removed(context, &generations) => self.refresh(context)?,
                Err(error) => return Err(error),
            }
        }
        Err(Errno::IO)
    }

    /// Answers SEEK_DATA and SEEK_HOLE of lseek(2). Each byte in a log or in the plain file is data. Fails with ENXIO
    /// if `offset` is beyond the end, or if no data follows it.
    pub(crate) fn seek(
        &self,
        context: &LayoutContext<'_, B>,
        plain_bytes: u64,
        offset: u64,
        what: Seek,
    ) -> Result<u64> {
        self.refresh_after_sync(context)?;
        let len = self.len(plain_bytes);
        if offset >= len {
            return Err(Errno::NXIO);
        }
        let generations = self.snapshot();
        let newest = generations.last().ok_or(Errno::NXIO)?;
        let wants_data = what == Seek::Data;
        let mut walk = Walk::new(offset..len);
        loop {
            let segments = newest.container.next_segments(context.backing, &mut walk)?;
            if segments.is_empty() {
                // The search has reached the end of the file, which counts as a hole.
                return if wants_data {
                    Err(Errno::NXIO)
                } else {
                    Ok(len)
                };
            }
            for segment in &segments {
                let is_data = !matches!(segment.source, Source::Hole | Source::Zeros);
                if is_data == wants_data {
                    return Ok(segment.file.start);
                }
            }
        }
    }

    /// Lists the containers of the file.
    fn list(&self, context: &LayoutContext<'_, B>) -> Result<Vec<ListedContainer>> {
        Ok(file_dir::list(
            context.backing,
            context.containers_dir,
            self.id,
        )?)
    }

    /// Puts the mark `DYING` or `DEAD` into each container: the last name is about to be removed, or is removed.
    pub(crate) fn mark(&self, context: &LayoutContext<'_, B>, mark: &str) -> Result<()> {
        self.visit_containers(context, &mut |container| {
            container.put_once(mark, context.host.as_bytes()).map(drop)
        })
    }

    /// Removes the marks from all containers, because the file still has a name.
    pub(crate) fn unmark(&self, context: &LayoutContext<'_, B>) -> Result<()> {
        self.visit_containers(context, &mut |container| unmark(context.backing, container))
    }

    /// Calls `visit` for each container (directory with logs) of the file that is trusted: no other user can have
    /// written it. A container that another host removes during the call is skipped: it is flat, or its file is
    /// removed.
    fn visit_containers(
        &self,
        context: &LayoutContext<'_, B>,
        visit: &mut dyn FnMut(&VoteDir<'_, B>) -> Result<()>,
    ) -> Result<()> {
        let containers = match file_dir::list(context.backing, context.containers_dir, self.id) {
            Ok(containers) => containers,
            Err(OwnError::Backing(error)) => return Err(error),
            Err(error) => {
                tracing::warn!("the logs of a file are left as they are: {error}");
                return Ok(());
            }
        };
        for container in containers {
            let name = self.id.container_name(container.number);
            let find = || {
                ContainerLookup::find(context.backing, context.containers_dir, &name, context.host)
            };
            let ContainerLookup::Trusted(dir) = find()? else {
                continue;
            };
            match visit(&dir) {
                Ok(()) => {}
                Err(Errno::NOENT) if matches!(find()?, ContainerLookup::Gone) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Registers this host as a writer of the file.
    pub(crate) fn begin_writing(
        &self,
        context: &LayoutContext<'_, B>,
        plain_len: &PlainLen<'_>,
    ) -> Result<()> {
        self.has_local_writer.store(true, Ordering::Release);
        self.register_writer(context, plain_len).map(drop)
    }

    /// Writes `parts`, which do not overlap, to this host's log.
    pub(crate) fn write(
        &self,
        context: &LayoutContext<'_, B>,
        plain_len: &PlainLen<'_>,
        parts: &[DataPart<'_>],
    ) -> Result<()> {
        self.change(context, plain_len, &|container| {
            container.write(context.backing, parts)
        })
    }

    /// Sets the length of the file to `len`. `plain_len` returns the length of the plain file.
    ///
    /// If this shortens the file, it hides only writes that this host has seen: a write of another host that comes
    /// between this refresh and the change remains visible.
    pub(crate) fn set_len(
        &self,
        context: &LayoutContext<'_, B>,
        plain_len: &PlainLen<'_>,
        len: u64,
    ) -> Result<()> {
        self.refresh(context)?;
        // Without logs, a file of this length needs no change.
        if !self.is_logged() && plain_len()? == len {
            return Ok(());
        }
        self.change(context, plain_len, &|container| {
            self.update_lengths_below(plain_len()?);
            container.set_len(context.backing, len)
        })
    }

    /// Extends the file to at least `len` bytes.
    pub(crate) fn grow(
        &self,
        context: &LayoutContext<'_, B>,
        plain_len: &PlainLen<'_>,
        len: u64,
    ) -> Result<()> {
        self.refresh(context)?;
        if !self.is_logged() && plain_len()? >= len {
            return Ok(());
        }
        self.change(context, plain_len, &|container| {
            self.update_lengths_below(plain_len()?);
            container.grow(context.backing, len)
        })
    }

    /// Returns whether this host's last change of the file set the length to `len`. After the death of firnd, this
    /// shows whether a change of the length that was under way has taken effect.
    pub(crate) fn was_set_to(&self, context: &LayoutContext<'_, B>, len: u64) -> Result<bool> {
        self.refresh(context)?;
        for generation in self.snapshot().iter().rev() {
            let last_change = generation
                .container
                .last_change_of_own_index(context.backing)?;
            match last_change {
                // This host has changed nothing in this generation (container with logs), so the one below decides.
                None => {}
                Some(Change::Cut(cut)) => return Ok(cut.len == len),
                Some(Change::Grown(grown_len)) => return Ok(grown_len == len),
                Some(_) => return Ok(false),
            }
        }
        Ok(false)
    }

    /// Makes the bytes of `piece` zero. The length of the file stays the same.
    pub(crate) fn zero(
        &self,
        context: &LayoutContext<'_, B>,
        plain_len: &PlainLen<'_>,
        piece: Piece,
    ) -> Result<()> {
        self.change(context, plain_len, &|container| {
            container.zero(context.backing, piece)
        })
    }

    /// Applies a change to the generation that this host writes to: the newest container of the file.
    ///
    /// Race: another host may seal that generation (decide which of its bytes count) while `apply` runs. Then the
    /// change may not count, so it is applied to the next generation too.
    fn change(
        &self,
        context: &LayoutContext<'_, B>,
        plain_len: &PlainLen<'_>,
        apply: &dyn Fn(&Container<B>) -> ChangeResult,
    ) -> Result<()> {
        self.has_local_writer.store(true, Ordering::Release);
        self.refresh_after_sync(context)?;
        for _ in 0..ATTEMPTS_MAX {
            self.check_readable()?;
            let newest = self.register_writer(context, plain_len)?;
            match apply(&newest.container) {
                Ok(()) if newest.is_current(context)? => return Ok(()),
                // The seal may not include the change, or the generation is removed.
                Ok(()) | Err(ChangeError::Sealed) => newest.end_writing(context)?,
                Err(ChangeError::Failed(_)) if !newest.is_current(context)? => {
                    newest.end_writing(context)?
                }
                Err(ChangeError::Failed(errno)) => return Err(errno),
            }
        }
        Err(Errno::IO)
    }

    /// Registers this host as a writer of the newest generation (container), so that no other host ends it, and returns
    /// it. Makes a new one if there is none that accepts writers.
    fn register_writer(
        &self,
        context: &LayoutContext<'_, B>,
        plain_len: &PlainLen<'_>,
    ) -> Result<Arc<Generation<B>>> {
        for _ in 0..ATTEMPTS_MAX {
            if let Some(newest) = self.snapshot().pop() {
                match newest.register_writer(context) {
                    Ok(true) => return Ok(newest),
                    Ok(false) => {}
                    // Another host has flattened and removed the generation since the last refresh.
                    Err(_) if !newest.is_current(context)? => {}
                    Err(error) => return Err(error),
                }
            }
            self.create_generation(context, plain_len)?;
            self.refresh(context)?;
        }
        Err(Errno::IO)
    }

    /// Makes the next generation (container), unless the newest one still accepts writers.
    ///
    /// Other hosts may make or remove the same generation at the same time. In that case this returns `Ok` although the
    /// generation may not exist; the caller refreshes the file and tries again.
    fn create_generation(
        &self,
        context: &LayoutContext<'_, B>,
        plain_len: &PlainLen<'_>,
    ) -> Result<()> {
        self.refresh(context)?;
        let last_number = self.snapshot().last().map(|newest| newest.number);
        if let Some(newest) = self.snapshot().last()
            && let Some(lifecycle) = newest.lifecycle(context)?
            && !lifecycle.is_closing()?
        {
            return Ok(());
        }
        let number = last_number.map_or(0, |last| last + 1);
        // Step 1: create the container's directory.
        let dir = match file_dir::create_container(
            context.backing,
            context.containers_dir,
            self.id,
            number,
        ) {
            Ok(dir) => dir,
            // Another host has just removed the file's directory. The caller tries again, which makes a new one.
            Err(OwnError::Backing(error)) if is_gone(error) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        // Step 2: mark the container if this host has removed the last name of the file (DEAD) or is removing it
        // (DYING). This check follows the creation, because the removal marks only containers that exist by then.
        if self.is_removed.load(Ordering::Acquire) {
            own::replace_file(context.backing, &dir, DEAD, context.host.as_bytes())?;
        } else if self.is_dying.load(Ordering::Acquire) {
            own::replace_file(context.backing, &dir, DYING, context.host.as_bytes())?;
        }
        // Step 3: put the head, after which hosts may write to the container.
        let published = self.publish_head_or_remove(context, number, plain_len);
        if published.is_err() && self.find_container(context, number)?.is_none() {
            // Another host had made the container, and has flattened and removed it since.
            return Ok(());
        }
        published
    }

    /// Opens the directory of a generation's container, with its attributes. Returns `None` if it is removed.
    fn find_container(
        &self,
        context: &LayoutContext<'_, B>,
        number: u32,
    ) -> Result<Option<(B::Inode, Attr)>> {
        let (backing, containers_dir) = (context.backing, context.containers_dir);
        Ok(file_dir::find_container(
            backing,
            containers_dir,
            self.id,
            number,
        )?)
    }

    /// Removes a container that must not get a head (the link that makes it valid). Does nothing if it has a head by
    /// now (`has_no_head` returns false), if a live writer is registered in it, or if another host has it locked.
    fn remove_container_without_head(
        &self,
        context: &LayoutContext<'_, B>,
        dir: B::Inode,
        number: u32,
        has_no_head: &dyn Fn() -> Result<bool>,
    ) -> Result<()> {
        let name = self.id.container_name(number);
        let container = Container::open_unread(dir, &name, context.host, 0, context.memory);
        let Some(lifecycle) = context.lifecycle(self.id, &container, &name)? else {
            return Ok(());
        };
        // A registered writer has found a head that this host does not see yet.
        if lifecycle.has_writer(context.is_alive)? {
            return Ok(());
        }
        let mut remove_if_headless = || {
            if has_no_head()? {
                lifecycle.vote_dir().retire()
            } else {
                Ok(())
            }
        };
        // If another host holds the lock, that host removes the container or puts its head.
        lifecycle.run_exclusively(&mut remove_if_headless)?;
        Ok(())
    }

    /// Puts the head (the link that says what lies below a container) into a container that has none, so that hosts may
    /// write to it; or removes the container. Does nothing if the container has a head or is gone.
    ///
    /// The container is removed in two cases:
    /// * It is generation 0, and a later generation exists. The first generation 0 was flattened and removed, and this
    ///   host made another one too late. No host has read or written it.
    /// * It has an index but no head: the head was lost at a power failure. Nothing in the container was durable.
    fn publish_head_or_remove(
        &self,
        context: &LayoutContext<'_, B>,
        number: u32,
        plain_len: &PlainLen<'_>,
    ) -> Result<()> {
        let containers = self.list(context)?;
        let Some((dir, _)) = self.find_container(context, number)? else {
            return Ok(());
        };
        let has_no_head = || -> Result<bool> {
            let head = head::load(context.backing, &dir, self.id, number)?;
            // A damaged head counts as a head: opening the container reports the damage.
            Ok(matches!(head, HeadState::BeingMade))
        };
        if !has_no_head()? {
            return Ok(());
        }
        let is_below_newer_generation =
            number == 0 && containers.iter().any(|container| container.number > 0);
        if is_below_newer_generation || head::has_index(context.backing, &dir)? {
            return self.remove_container_without_head(context, dir.clone(), number, &has_no_head);
        }
        // The head of generation 0 says how many bytes of the plain file count below it. Later generations do not lie
        // over the plain file.
        let plain_bytes = if number == 0 { plain_len()? } else { 0 };
        Head::new(self.id, number, plain_bytes).publish(context.backing, &dir)
    }

    /// Makes this host's writes durable and visible to other hosts. This host's next use of the file sees what other
    /// hosts have synced.
    pub(crate) fn sync(&self, context: &LayoutContext<'_, B>) -> Result<()> {
        self.sync_own(context)?;
        self.require_refresh();
        Ok(())
    }

    /// Makes this host's writes durable and visible to other hosts.
    fn sync_own(&self, context: &LayoutContext<'_, B>) -> Result<()> {
        for generation in self.snapshot() {
            if !generation.is_registered.load(Ordering::Acquire) {
                continue;
            }
            match generation.sync(context) {
                Ok(()) => self.tag(context, &generation),
                // The generation's bytes are durably in the plain file, or the file is removed.
                Err(_) if !generation.is_current(context)? => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Tags the plain file with the container's name, once this host has a log in the container.
    fn tag(&self, context: &LayoutContext<'_, B>, generation: &Generation<B>) {
        if let Some(inode) = self.inode.get()
            && generation.container.has_own_log()
            && !self.is_removed.load(Ordering::Acquire)
            && !generation.is_tagged.swap(true, Ordering::AcqRel)
        {
            tag::set(
                context.backing,
                inode,
                context.containers_dir_id,
                &generation.name,
            );
        }
    }

    /// Publishes this host's writes and removes its registration as a writer.
    pub(crate) fn end_writing(&self, context: &LayoutContext<'_, B>) -> Result<()> {
        self.sync_own(context)?;
        for generation in self.snapshot() {
            generation.end_writing(context)?;
        }
        Ok(())
    }

    /// Returns whether a live host other than this one is registered as a writer.
    pub(crate) fn has_other_writers(
        &self,
        context: &LayoutContext<'_, B>,
        is_alive: &IsAlive<'_>,
    ) -> Result<bool> {
        let mut has_writers = false;
        self.visit_containers(context, &mut |container| {
            for host in container.hosts(WRITING)? {
                has_writers |= host != context.host && is_alive(&host)?;
            }
            Ok(())
        })?;
        Ok(has_writers)
    }

    /// Copies the bytes of the generations (containers) to the plain file `inode`, the lowest first, as far as other
    /// hosts allow. Hosts share the work in parts of `unit_bytes` bytes.
    ///
    /// A generation that another host removes meanwhile, or a damaged table, makes an attempt fail; it is repeated.
    pub(crate) fn flatten(
        &self,
        context: &LayoutContext<'_, B>,
        inode: &B::Inode,
        unit_bytes: u64,
        is_alive: &IsAlive<'_>,
    ) -> Result<FlattenOutcome> {
        for _ in 0..ATTEMPTS_MAX {
            self.refresh(context)?;
            let generations = self.snapshot();
            let Some(lowest) = generations.first() else {
                if !self.has_unfinished_containers.load(Ordering::Acquire) {
                    file_dir::remove_empty(context.backing, context.containers_dir, self.id)?;
                    return Ok(FlattenOutcome::Flat);
                }
                self.finish_unfinished_containers(context, &|| {
                    Ok(context.backing.attr_now(inode)?.size)
                })?;
                continue;
            };
            let plain_bytes = context.backing.attr_now(inode)?.size;
            Self::set_lengths_below(&generations, plain_bytes);
            // If the attempt fails and this number has grown, a damaged table was the cause.
            let rejected_tables = lowest.container.rejected_table_count();
            match lowest.flatten(context, inode, unit_bytes, is_alive) {
                // The next attempt flattens the generation above.
                Ok(FlattenOutcome::Flat) => {}
                Ok(outcome) => return Ok(outcome),
                Err(error) => match lowest.find_failure_cause(context, rejected_tables)? {
                    // Try again: without the generation, or without the table, which is rejected by now.
                    FailureCause::Removed | FailureCause::TableDamaged => {}
                    FailureCause::Other | FailureCause::Flat => return Err(error),
                },
            }
        }
        Err(Errno::IO)
    }

    /// Gives up the parts of the file's containers (directories with logs) that cannot be read, and reports them to
    /// `target`. Returns false if a host is writing to the file.
    pub(crate) fn salvage(
        &self,
        context: &LayoutContext<'_, B>,
        plain_attr: &Attr,
        unit_bytes: u64,
        is_alive: &IsAlive<'_>,
        target: &mut LossTarget<'_>,
    ) -> Result<bool> {
        let mut containers = self.list(context)?;
        // The lowest comes first, because each one gives the length of the file below the next.
        containers.sort_unstable();
        let mut bytes_below = plain_attr.size;
        for container in containers {
            let name = self.id.container_name(container.number);
            let mut reporter = LossReporter {
                path: target.path,
                container: &name,
                report: target.report,
            };
            let number = container.number;
            if !self.renew_head(context, number, plain_attr, is_alive, &mut reporter)? {
                return Ok(false);
            }
            let Some(generation) = self.find_generation(context, number)? else {
                continue;
            };
            if !generation.stores_plain_bytes {
                generation.container.set_plain_bytes(bytes_below);
            }
            let Some(lifecycle) = generation.lifecycle(context)? else {
                continue;
            };
            let is_written_by = |host: &str| generation.is_written_by(host, context, is_alive);
            if !lifecycle.salvage(unit_bytes, &is_written_by, &mut reporter)? {
                return Ok(false);
            }
            bytes_below = generation.container.len();
        }
        Ok(true)
    }

    /// Replaces the head of a container (the link that says what lies below it) if it is damaged or missing.
    ///
    /// Returns true if no further work is needed: the head is replaced or was usable, or the container is gone. Returns
    /// false, and leaves the head as it is, if a host is writing to the container or is copying its bytes.
    fn renew_head(
        &self,
        context: &LayoutContext<'_, B>,
        number: u32,
        plain_attr: &Attr,
        is_alive: &IsAlive<'_>,
        reporter: &mut LossReporter<'_>,
    ) -> Result<bool> {
        let name = self.id.container_name(number);
        let Some((dir, _)) = self.find_container(context, number)? else {
            return Ok(true);
        };
        let (host, memory) = (context.host, context.memory);
        let container = Container::open_unread(dir, &name, host, plain_attr.size, memory);
        let Some(lifecycle) = context.lifecycle(self.id, &container, &name)? else {
            return Ok(true);
        };
        let is_other_alive = |writer: &str| Ok(writer != host && is_alive(writer)?);
        let head = Head::new(self.id, number, plain_attr.size);
        lifecycle.renew_head(head, &is_other_alive, reporter)
    }

    /// Finishes what dead hosts left. A container (directory with logs) is removed if all its bytes are in the plain
    /// file. One without a head, the link that makes it valid, gets its head or is removed.
    fn finish_unfinished_containers(
        &self,
        context: &LayoutContext<'_, B>,
        plain_len: &PlainLen<'_>,
    ) -> Result<()> {
        for container in self.list(context)? {
            let Some(generation) = self.open_generation(context, container.number)? else {
                self.publish_head_or_remove(context, container.number, plain_len)?;
                continue;
            };
            if let Some(lifecycle) = generation.lifecycle(context)?
                && lifecycle.is_flat()?
            {
                lifecycle.remove()?;
            }
        }
        Ok(())
    }

    /// Removes all containers of a file that has no name and is not open.
    pub(crate) fn remove(&self, context: &LayoutContext<'_, B>) -> Result<()> {
        self.visit_containers(context, &mut |container| container.retire())?;
        file_dir::remove_empty(context.backing, context.containers_dir, self.id)?;
        let removed_generations = std::mem::take(&mut *self.generations.lock());
        // Dropped after the lock is released, because that closes files.
        drop(removed_generations);
        Ok(())
    }
}

impl<B: Backing> Generation<B> {
    /// Makes a generation that this host has just opened. `dir` is the inode number of the container's directory.
    fn new(id: FileId, head: &Head, dir: u64, name: String, container: Container<B>) -> Self {
        Self {
            id,
            number: head.generation,
            dir,
            name,
            stores_plain_bytes: head.plain_bytes.is_some(),
            container,
            is_registered: AtomicBool::new(false),
            was_flat: AtomicBool::new(false),
            is_name_durable: AtomicBool::new(false),
            is_tagged: AtomicBool::new(false),
        }
    }

    /// Returns the [`Lifecycle`] of this generation, or `None` if it is removed. A later container may have the same
    /// name.
    fn lifecycle<'a>(&'a self, context: &LayoutContext<'a, B>) -> Result<Option<Lifecycle<'a, B>>> {
        let lifecycle = context.lifecycle(self.id, &self.container, &self.name)?;
        Ok(lifecycle.filter(|lifecycle| lifecycle.vote_dir().ino() == self.dir))
    }

    /// Registers this host as a writer. Returns false if the container accepts no new writers.
    fn register_writer(&self, context: &LayoutContext<'_, B>) -> Result<bool> {
        if self.is_registered.load(Ordering::Acquire) && self.container.seal().is_none() {
            return Ok(true);
        }
        let may_write = match self.lifecycle(context)? {
            Some(lifecycle) => lifecycle.begin_writing()?,
            None => false,
        };
        if may_write {
            self.container.refresh_and_raise_epoch(context.backing)?;
            self.is_registered.store(true, Ordering::Release);
        }
        Ok(may_write)
    }

    /// Makes this host's writes durable and visible to other hosts.
    fn sync(&self, context: &LayoutContext<'_, B>) -> Result<()> {
        self.container.sync_own(context.backing)?;
        if self.container.has_own_log() {
            self.sync_name(context)
        } else {
            Ok(())
        }
    }

    /// Makes the container's name durable, once.
    fn sync_name(&self, context: &LayoutContext<'_, B>) -> Result<()> {
        if !self.is_name_durable.load(Ordering::Acquire) {
            file_dir::sync(context.backing, context.containers_dir, self.id)?;
            self.is_name_durable.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Returns whether this generation is the container of a listing, and not an earlier one with the same name.
    fn has_container(&self, container: &ListedContainer) -> bool {
        (self.number, self.dir) == (container.number, container.dir)
    }

    /// Reads what other hosts added to the indexes. Returns false if the generation is flat or removed.
    fn refresh_unless_flat(&self, context: &LayoutContext<'_, B>) -> Result<bool> {
        let refreshed = self.container.refresh(context.backing);
        if self.container.was_seen_flat() {
            return Ok(false);
        }
        match refreshed {
            Ok(()) => Ok(true),
            // Another host has flattened the generation and is removing it.
            Err(_) if self.is_flat(context)? => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Records that the file's modification time was set, if this generation (a container with logs) is ending or
    /// removed. Returns whether it is.
    fn record_time_if_ending(
        &self,
        context: &LayoutContext<'_, B>,
        new_time: Time,
    ) -> Result<bool> {
        let Some(lifecycle) = self.lifecycle(context)? else {
            self.container.use_plain_time();
            return Ok(true);
        };
        if !lifecycle.is_closing()? {
            return Ok(false);
        }
        match self.container.add_time(context.backing, new_time) {
            Ok(()) => Ok(true),
            // Another host has flattened and removed the generation since it was checked.
            Err(_) if !self.is_current(context)? => {
                self.container.use_plain_time();
                Ok(true)
            }
            Err(error) => Err(error),
        }
    }

    /// Removes this host's registration as a writer.
    fn end_writing(&self, context: &LayoutContext<'_, B>) -> Result<()> {
        if self.is_registered.swap(false, Ordering::AcqRel)
            && let Some(lifecycle) = self.lifecycle(context)?
        {
            self.container.finish_own_index(context.backing);
            lifecycle.end_writing()?;
        }
        Ok(())
    }

    /// Copies the bytes of this generation (a container with logs) to the plain file `inode` and removes the container,
    /// as far as other hosts allow. Before that it is sealed: no host may write to it any more. Hosts share the copy in
    /// parts of `unit_bytes` bytes.
    fn flatten(
        &self,
        context: &LayoutContext<'_, B>,
        inode: &B::Inode,
        unit_bytes: u64,
        is_alive: &IsAlive<'_>,
    ) -> Result<FlattenOutcome> {
        // Another host has flattened and removed the generation, or has removed the file.
        let Some(lifecycle) = self.lifecycle(context)? else {
            return Ok(FlattenOutcome::Flat);
        };
        let is_written_by = |host: &str| self.is_written_by(host, context, is_alive);
        // The name is durable before the plain file changes. A power loss could otherwise remove the container of a
        // half-flattened file.
        self.sync_name(context)?;
        if !lifecycle.seal(inode, unit_bytes, &is_written_by)? {
            return Ok(FlattenOutcome::BeingWritten);
        }
        let plain_file = context.backing.open(inode, Access::ReadWrite)?;
        if lifecycle.flatten(inode, &plain_file)? == FlattenProgress::Waits {
            return Ok(FlattenOutcome::BeingCopied);
        }
        self.was_flat.store(true, Ordering::Release);
        lifecycle.remove()?;
        Ok(FlattenOutcome::Flat)
    }

    /// Returns whether the container's name still leads to this container.
    fn is_current(&self, context: &LayoutContext<'_, B>) -> Result<bool> {
        let container = file_dir::find_container(
            context.backing,
            context.containers_dir,
            self.id,
            self.number,
        )?;
        Ok(container.is_some_and(|(_, attr)| attr.ino == self.dir))
    }

    /// Returns whether a registered writer still writes. A registration of this host may be from its earlier life. So
    /// for this host, the state of this process decides.
    fn is_written_by(
        &self,
        host: &str,
        context: &LayoutContext<'_, B>,
        is_alive: &IsAlive<'_>,
    ) -> Result<bool> {
        if host == context.host {
            Ok(self.is_registered.load(Ordering::Acquire))
        } else {
            is_alive(host)
        }
    }

    /// Returns whether the generation is flat or removed. A generation is removed only after it is flat, or with its
    /// file.
    fn is_flat(&self, context: &LayoutContext<'_, B>) -> Result<bool> {
        match self.lifecycle(context)? {
            Some(lifecycle) => lifecycle.is_flat(),
            None => Ok(true),
        }
    }

    /// Finds why an operation on the generation failed, so that the caller can decide whether to try it again: another
    /// host may have ended the generation meanwhile, or a table (a sorted part of an index) is damaged and the index is
    /// read instead. `rejected_tables` is the number of tables that were found damaged before the operation.
    fn find_failure_cause(
        &self,
        context: &LayoutContext<'_, B>,
        rejected_tables: usize,
    ) -> Result<FailureCause> {
        let Some(lifecycle) = self.lifecycle(context)? else {
            return Ok(FailureCause::Removed);
        };
        if self.container.rejected_table_count() > rejected_tables {
            return Ok(FailureCause::TableDamaged);
        }
        if lifecycle.is_flat()? {
            return Ok(FailureCause::Flat);
        }
        Ok(FailureCause::Other)
    }
}

/// What happened to a generation while an operation on it failed.
///
/// An errno is not enough to decide: network file systems return the same ones for other reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FailureCause {
    /// Nothing happened to the generation, so the error of the operation is returned.
    Other,
    /// All bytes of the generation are in the plain file.
    Flat,
    /// Another host has removed the generation.
    Removed,
    /// A table (a sorted part of an index) was damaged, and all indexes were read again without it.
    TableDamaged,
}

/// Returns whether one of the generations is flat or removed, as far as this host can see.
fn is_any_flat_or_removed<B: Backing>(
    context: &LayoutContext<'_, B>,
    generations: &[Arc<Generation<B>>],
) -> bool {
    generations
        .iter()
        .any(|generation| generation.is_flat(context).unwrap_or(false))
}

/// Reads from a stack of generations. Bytes that the newest generation does not have come from those below it.
fn read_stack<B: Backing>(
    backing: &B,
    generations: &[Arc<Generation<B>>],
    plain_file: &B::File,
    buf: &mut [u8],
    offset: u64,
) -> Result<usize> {
    let Some((newest, older)) = generations.split_last() else {
        return read_whole(backing, plain_file, buf, offset);
    };
    let read_older = |buf: &mut [u8], offset| read_stack(backing, older, plain_file, buf, offset);
    newest.container.read(backing, &read_older, buf, offset)
}

/// Lists where the bytes of `range` lie, in a file of `len` bytes with these generations (containers with newer bytes).
/// Bytes beyond its end need no part of the list.
fn locate_up_to<B: Backing>(
    backing: &B,
    generations: &[Arc<Generation<B>>],
    plain_file: &B::File,
    range: Range<u64>,
    len: u64,
    located: &mut LocatedList,
) -> Result<()> {
    let existing = range.start..range.end.min(len);
    if !existing.is_empty() {
        let status = locate_in_stack(backing, generations, plain_file, existing, located)?;
        if status == ListStatus::Full {
            return Ok(());
        }
    }
    located.end = range.end;
    Ok(())
}

/// Lists where the bytes of `range` lie in a stack of generations (containers). Looks in the newest generation first,
/// which calls this function again for bytes that it does not have, with the older generations. The plain file is the
/// lowest.
fn locate_in_stack<B: Backing>(
    backing: &B,
    generations: &[Arc<Generation<B>>],
    plain_file: &B::File,
    range: Range<u64>,
    located: &mut LocatedList,
) -> Result<ListStatus> {
    let Some((newest, older)) = generations.split_last() else {
        // In the plain file, bytes lie at the same offset as in the logged file.
        let position = range.start;
        return Ok(
            match located.find_or_add_file(backing, DataFile::Plain, plain_file) {
                Some(file_index) => located.add(range, file_index, position),
                // There is no descriptor of the plain file for the list: programs read these bytes through the mount.
                None => located.skip(range),
            },
        );
    };
    let locate_older = |range: Range<u64>, located: &mut LocatedList| {
        let end = range.end;
        let status = locate_in_stack(backing, older, plain_file, range, located)?;
        if status == ListStatus::Full {
            return Ok(status);
        }
        // The file below may be shorter than the range. Bytes beyond its end are zeros, which are not listed.
        Ok(located.skip(located.end..end))
    };
    newest
        .container
        .locate(backing, &locate_older, range, located)
}
