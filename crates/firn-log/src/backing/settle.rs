//! Brings the bytes of logged files from the logs to the plain files, after programs have closed the files.
//!
//! Terms
//! * To *flatten* a file is to copy the bytes in its containers to the plain file, and to remove the containers.
//! * To *publish* this host's logs of a file is to make its writes visible to other hosts, and to end its registration
//!   as a writer. A file is flattened only when no host is registered.
//! * To *settle* a file is to publish this host's logs, and then to flatten the file, or to remove its containers if
//!   the file was removed.
//!
//! Files are queued in [`SettleQueue`] when their last writer on this host closes them. [`LogBacking::settle`] settles
//! the queued files as far as other hosts allow. Files that are not flat afterwards stay in the queue.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use firn_backing::backoff::Backoff;
use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno, Kind, Result, Time, parallel};
use firn_hosts::host_dir::{find_host_dir, list_hosts};
use firn_hosts::own::{self, TOP};
use parking_lot::Condvar;

use super::{LogBacking, LogInode, LoggedDescriptor, WhenClosed};
use crate::file::{FlattenOutcome, LoggedFile, LossTarget};
use crate::file_dir;
use crate::file_id::FileId;
use crate::orphans::{OrphanSearch, Orphans, SearchScope, holds_program_files};
use crate::salvage::{Report, may_be_damage};

/// Waits between two attempts of a close to settle a file, while other hosts flatten their parts of it.
const RETRY_WAITS: Backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(100));

/// Number of files that are settled at the same time. For a small file most of the time is spent in waits: settling it
/// takes a dozen syncs and copies little.
const SETTLE_THREADS_MAX: usize = 4;

/// Number of files that a walk collects before they are flattened. The number is small because an inode may hold a
/// descriptor.
const FLATTEN_BATCH: usize = 64;

/// Dead hosts, with the time at which each last changed its host directory. A new time shows a later life of the host.
pub(super) type DeadHosts = BTreeMap<String, Time>;

/// Maximum number of salvages of one file. More than one may be needed: a salvage may rely on a table that is found
/// damaged only by the next attempt to flatten the file.
const SALVAGES_MAX: usize = 3;

/// Maximum number of walks through the directories for files in logs. A walk is repeated if it missed a file.
const WALKS_MAX: usize = 5;

/// The queue of files to settle.
pub(super) struct SettleQueue<B: Backing> {
    state: Mutex<QueueState<B>>,
    /// Wakes the settling thread.
    work_added: Condvar,
}

/// The queued files, and whether the settling thread should run.
struct QueueState<B: Backing> {
    files: HashMap<FileId, QueuedFile<B>>,
    /// Whether a file was added, or another thread woke the settling thread, since the last call of
    /// [`LogBacking::settle`].
    has_new_work: bool,
}

/// A queued file. It was closed by its last writer on this host, or the mount flattens files that are read.
struct QueuedFile<B: Backing> {
    file: Arc<LoggedFile<B>>,
    inode: B::Inode,
}

impl<B: Backing> SettleQueue<B> {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(QueueState {
                files: HashMap::new(),
                has_new_work: false,
            }),
            work_added: Condvar::new(),
        }
    }

    /// Queues a file and wakes the settling thread.
    pub(super) fn add(&self, file: &Arc<LoggedFile<B>>, inode: &B::Inode) {
        let queued_file = QueuedFile {
            file: Arc::clone(file),
            inode: inode.clone(),
        };
        let replaced_entry = {
            let mut state = self.state.lock();
            state.has_new_work = true;
            state.files.insert(file.id, queued_file)
        };
        // Dropped after the lock is released: the last reference may close files.
        drop(replaced_entry);
        self.work_added.notify_all();
    }

    /// Removes and returns all queued files.
    fn remove_all(&self) -> Vec<QueuedFile<B>> {
        let files = {
            let mut state = self.state.lock();
            state.has_new_work = false;
            std::mem::take(&mut state.files)
        };
        files.into_values().collect()
    }

    /// Queues a file again without waking the settling thread, unless the file was queued meanwhile.
    fn return_unsettled(&self, queued_file: QueuedFile<B>) {
        let mut state = self.state.lock();
        state
            .files
            .entry(queued_file.file.id)
            .or_insert(queued_file);
    }
}

/// How many files and bytes are in logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoggedTotals {
    /// Number of files with bytes in logs.
    pub files: u64,
    /// Bytes of these files that this host has written to logs.
    pub own_bytes: u64,
}

/// Numbers of the files that an attempt to flatten has left in logs, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnflattenedFiles {
    /// Other hosts are copying parts of the file.
    pub under_way: usize,
    /// A host is writing the file.
    pub written: usize,
    /// The file to which the containers belong was not found.
    pub lost: usize,
    /// The attempt failed.
    pub failed: usize,
    /// The error of the first failed attempt.
    pub error: Option<Errno>,
}

impl UnflattenedFiles {
    /// Counts the result for one file.
    fn count(&mut self, flattened: Result<FlattenOutcome>) {
        match flattened {
            Ok(FlattenOutcome::Flat | FlattenOutcome::NotDue) => {}
            Ok(FlattenOutcome::BeingCopied) => self.under_way += 1,
            Ok(FlattenOutcome::BeingWritten) => self.written += 1,
            Err(error) => {
                self.failed += 1;
                self.error = self.error.or(Some(error));
            }
        }
    }

    /// Returns whether no file was left in logs.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A file that is flattened together with others.
struct FileToFlatten<B: Backing> {
    id: FileId,
    inode: B::Inode,
}

/// Result of one walk that flattens the files that it finds.
struct WalkOutcome {
    /// The numbers of files that are left in logs.
    unflattened: UnflattenedFiles,
    /// Number of files with containers that the walk did not find.
    unseen_files: usize,
}

/// A directory that a walk has still to list.
struct DirToWalk<B: Backing> {
    inode: B::Inode,
    /// Path relative to the top of the walk.
    path: PathBuf,
}

/// A file with containers, as a walk found it.
struct WalkedFile<'a, B: Backing> {
    id: FileId,
    inode: &'a B::Inode,
    /// Path relative to the top of the walk.
    path: PathBuf,
}

impl<B: Backing> LogBacking<B> {
    /// Settles the queued files as far as other hosts allow. Returns the numbers of files that are left in logs. They
    /// stay in the queue.
    pub fn settle(&self) -> UnflattenedFiles {
        let mut queued_files = self.settle_queue.remove_all();
        // Hosts that flatten files of one lane at the same time wait for each other's syncs.
        queued_files.sort_by_key(|queued| self.is_in_other_lane(&queued.inode));
        let settle = |queued: &QueuedFile<B>| self.settle_file(&queued.file, &queued.inode);
        let outcomes = parallel::map("firn-settle", SETTLE_THREADS_MAX, &queued_files, &settle);
        let mut unflattened = UnflattenedFiles::default();
        for (queued, outcome) in queued_files.into_iter().zip(outcomes) {
            unflattened.count(outcome);
            if !matches!(outcome, Ok(FlattenOutcome::Flat | FlattenOutcome::NotDue)) {
                self.settle_queue.return_unsettled(queued);
            }
        }
        unflattened
    }

    /// Finishes this host's writing of a file at its last close.
    ///
    /// With [`WhenClosed::FlattenBehind`] the logs are published (visible to other hosts), and the file is queued.
    /// Otherwise the logs are also copied to the plain file now, if that is due: the close waits for other hosts that
    /// copy parts of the file, but not for writers on other hosts.
    pub(super) fn finish_last_close(&self, descriptor: &LoggedDescriptor<B>) -> Result<()> {
        if self.setup.when_closed == WhenClosed::FlattenBehind {
            self.publish_own_logs(&descriptor.file)?;
            self.settle_queue.add(&descriptor.file, &descriptor.inode);
            return Ok(());
        }
        let mut waits = RETRY_WAITS.start();
        while descriptor.file.has_containers() {
            match self.settle_file(&descriptor.file, &descriptor.inode)? {
                FlattenOutcome::Flat | FlattenOutcome::NotDue => break,
                FlattenOutcome::BeingWritten => {
                    self.settle_queue.add(&descriptor.file, &descriptor.inode);
                    break;
                }
                FlattenOutcome::BeingCopied => waits.sleep(),
            }
        }
        Ok(())
    }

    /// Waits until a file is queued or another thread calls [`LogBacking::wake`], for at most `time`.
    pub fn wait_for_ended(&self, time: Duration) {
        let mut state = self.settle_queue.state.lock();
        if !state.has_new_work {
            state.wait_for(&self.settle_queue.work_added, time);
        }
    }

    /// Wakes the settling thread. If no thread is waiting, the next wait returns at once.
    pub fn wake(&self) {
        self.settle_queue.state.lock().has_new_work = true;
        self.settle_queue.work_added.notify_all();
    }

    /// Flattens the files at or below `search_root`, as far as other hosts allow. Files that this host never opened are
    /// included.
    ///
    /// Files in this host's own lane come first. Hosts that flatten files of one lane at the same time wait for each
    /// other's syncs.
    pub fn flatten_below(&self, search_root: &LogInode<B>) -> Result<UnflattenedFiles> {
        for _ in 1..WALKS_MAX {
            let outcome = self.flatten_in_one_walk(search_root)?;
            if outcome.unflattened.lost >= outcome.unseen_files {
                return Ok(outcome.unflattened);
            }
            // The walk missed a file: it was renamed meanwhile, or a commit has just given it its name.
        }
        Ok(self.flatten_in_one_walk(search_root)?.unflattened)
    }

    /// Flattens the files at or below `search_root` that one walk finds: copies their logs to the plain files. Files in
    /// another lane (server) than this host's own come last.
    fn flatten_in_one_walk(&self, search_root: &LogInode<B>) -> Result<WalkOutcome> {
        let mut unflattened = UnflattenedFiles::default();
        let mut files_in_own_lane = Vec::new();
        let mut files_in_other_lanes = Vec::new();
        let unseen_files = self.visit_logged(search_root, &mut |walked| {
            let file = FileToFlatten {
                id: walked.id,
                inode: walked.inode.clone(),
            };
            if self.is_in_other_lane(walked.inode) {
                files_in_other_lanes.push(file);
                return;
            }
            files_in_own_lane.push(file);
            // An inode may hold a descriptor, so only a few are collected.
            if files_in_own_lane.len() >= FLATTEN_BATCH {
                let batch = std::mem::take(&mut files_in_own_lane);
                self.flatten_batch(&batch, &mut unflattened);
            }
        })?;
        let unseen_files = unseen_files.unwrap_or(0);
        self.flatten_batch(&files_in_own_lane, &mut unflattened);
        self.flatten_batch(&files_in_other_lanes, &mut unflattened);
        unflattened.lost = self.remove_orphans(unseen_files)?;
        Ok(WalkOutcome {
            unflattened,
            unseen_files,
        })
    }

    /// Flattens several files at the same time, and counts the results in `unflattened`.
    fn flatten_batch(&self, files: &[FileToFlatten<B>], unflattened: &mut UnflattenedFiles) {
        let flatten = |file: &FileToFlatten<B>| self.publish_and_flatten(file.id, &file.inode);
        let outcomes = parallel::map("firn-settle", SETTLE_THREADS_MAX, files, &flatten);
        for outcome in outcomes {
            unflattened.count(outcome);
        }
    }

    /// Handles the files in logs that a walk did not see. Removes the containers of files that a dead host was
    /// removing. Returns how many of the files are left.
    fn remove_orphans(&self, unseen_files: usize) -> Result<usize> {
        if unseen_files == 0 {
            return Ok(0);
        }
        Ok(self.find_orphans()?.lost.len())
    }

    /// Returns whether a plain file lies in another lane than this host's own.
    fn is_in_other_lane(&self, inode: &B::Inode) -> bool {
        let Some(own_lane) = self.below.lane_of_turn(self.turn) else {
            return false;
        };
        self.below.facts(inode).lane != own_lane
    }

    /// Flattens the files at or below `search_root`, and gives up parts of logs that are damaged. The losses are
    /// reported to `report`.
    pub fn flatten_with_loss(
        &self,
        search_root: &LogInode<B>,
        report: &mut dyn Report,
    ) -> Result<UnflattenedFiles> {
        let mut unflattened = UnflattenedFiles::default();
        let unseen_files = self.visit_logged(search_root, &mut |walked| {
            unflattened.count(self.flatten_damaged(&walked, report));
        })?;
        unflattened.lost = self.remove_orphans(unseen_files.unwrap_or(0))?;
        Ok(unflattened)
    }

    /// Flattens a file: copies its logs to the plain file. After an error that damage may have caused, it salvages the
    /// file, which gives up the damaged parts, and tries again.
    fn flatten_damaged(
        &self,
        walked: &WalkedFile<'_, B>,
        report: &mut dyn Report,
    ) -> Result<FlattenOutcome> {
        for _ in 0..SALVAGES_MAX {
            match self.publish_and_flatten(walked.id, walked.inode) {
                Err(error) if may_be_damage(error) => {}
                outcome => return outcome,
            }
            let plain_attr = self.below.attr_now(walked.inode)?;
            let mut target = LossTarget {
                path: &walked.path,
                report,
            };
            let file = self.find_or_add(walked.id)?;
            let context = self.context();
            let unit_bytes = self.setup.unit_bytes;
            let is_alive = &self.setup.is_alive;
            let is_salvaged =
                file.salvage(&context, &plain_attr, unit_bytes, is_alive, &mut target)?;
            if !is_salvaged {
                return Ok(FlattenOutcome::BeingWritten);
            }
        }
        self.publish_and_flatten(walked.id, walked.inode)
    }

    /// Counts the files at or below `search_root` that have containers.
    pub fn count_logged_below(&self, search_root: &LogInode<B>) -> Result<usize> {
        let mut count = 0;
        self.visit_logged(search_root, &mut |_| count += 1)?;
        Ok(count)
    }

    /// Visits the files at or below `search_root` that have containers, directories with their logs.
    ///
    /// Returns how many files with containers the walk has not found. Returns `None` if `search_root` is not the top of
    /// the backing, because such files may lie elsewhere.
    fn visit_logged(
        &self,
        search_root: &LogInode<B>,
        visit: &mut dyn FnMut(WalkedFile<'_, B>),
    ) -> Result<Option<usize>> {
        let mut not_found_yet = self.list_files()?;
        if let Some(id) = search_root.id {
            if not_found_yet.contains(&id) {
                visit(WalkedFile {
                    id,
                    inode: &search_root.below,
                    path: PathBuf::new(),
                });
            }
            return Ok(None);
        }
        let top_ino = self.below.attr(&self.below.root())?.ino;
        let is_top_of_backing = self.below.attr(&search_root.below)?.ino == top_ino;
        let mut dirs = vec![DirToWalk {
            inode: search_root.below.clone(),
            path: PathBuf::new(),
        }];
        while let Some(dir) = dirs.pop() {
            if not_found_yet.is_empty() {
                break;
            }
            let is_firn_dir = is_top_of_backing && dir.path.as_os_str() == TOP;
            self.visit_logged_in(&dir, is_firn_dir, &mut not_found_yet, &mut dirs, visit)?;
        }
        Ok(is_top_of_backing.then_some(not_found_yet.len()))
    }

    /// Visits the files of one directory that have containers (directories with their logs), and removes them from
    /// `not_found_yet`. Adds the directories in it to `dirs`.
    fn visit_logged_in(
        &self,
        dir: &DirToWalk<B>,
        is_firn_dir: bool,
        not_found_yet: &mut BTreeSet<FileId>,
        dirs: &mut Vec<DirToWalk<B>>,
        visit: &mut dyn FnMut(WalkedFile<'_, B>),
    ) -> Result<()> {
        for (name, ino, kind) in own::list(&self.below, &dir.inode)? {
            // `.firn` is skipped, except where a transaction keeps new files of programs.
            if is_firn_dir && !holds_program_files(&name) {
                continue;
            }
            // Only directories and files with containers are looked up.
            let may_be_dir = kind.is_none_or(|kind| kind == Kind::Dir);
            if !may_be_dir && !contains_ino(not_found_yet, ino) {
                continue;
            }
            let name = OsStr::from_bytes(&name);
            let (inode, attr) = match self.below.lookup(&dir.inode, name) {
                Ok(entry) => entry,
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(error),
            };
            let path = dir.path.join(name);
            if let Some(id) = FileId::read(&self.below, &inode, &attr)?
                && not_found_yet.remove(&id)
            {
                visit(WalkedFile {
                    id,
                    inode: &inode,
                    path,
                });
            } else if attr.kind == Kind::Dir {
                dirs.push(DirToWalk { inode, path });
            }
        }
        Ok(())
    }

    /// Returns how many files and bytes are in logs, as far as this host knows. It makes no call of the backing.
    pub fn count_logged(&self) -> LoggedTotals {
        let files = self.files.lock();
        let mut total = LoggedTotals::default();
        for file in files.by_id.values() {
            // A listed file whose containers were never read has bytes in logs.
            let is_listed_only = files.listing.files.contains(&file.id) && !file.was_refreshed();
            if is_listed_only || file.is_logged() {
                total.files += 1;
                total.own_bytes += file.own_bytes();
            }
        }
        total
    }

    /// Walks all files to find the file of each container. Removes the containers of removed files, and returns the
    /// names of containers whose file is gone without a removal.
    pub fn find_orphans(&self) -> Result<Orphans> {
        self.search_orphans(SearchScope::All)
    }

    /// Finishes removals of files that dead hosts began: removes the containers (directories with logs) of the removed
    /// files, and half-removed containers. Searches only if a host has died since the last search, or if that search
    /// left a removal that could not be finished yet.
    pub fn end_removals(&self) -> Result<()> {
        let dead_hosts = self.find_dead_hosts()?;
        if self.dead_hosts.lock().as_ref() == Some(&dead_hosts) {
            return Ok(());
        }
        // The search itself removes containers, and returns their names.
        let orphans = self.search_orphans(SearchScope::Removals)?;
        if !orphans.removed.is_empty() {
            tracing::info!(
                containers = orphans.removed.len(),
                "removed logs that dead hosts left of removed files"
            );
        }
        // A removal that still waits is tried again by the next call.
        if orphans.waiting.is_empty() {
            *self.dead_hosts.lock() = Some(dead_hosts);
        }
        Ok(())
    }

    /// Searches for containers (directories with a file's logs) whose file is gone. Removes those that a host had
    /// marked for removal, unless a live host is at work on them. Returns the names of the removed ones, of those that
    /// still wait, and of those that no host had marked.
    fn search_orphans(&self, scope: SearchScope) -> Result<Orphans> {
        let search = OrphanSearch {
            backing: &self.below,
            containers_dir: &self.containers_dir,
            host: &self.setup.host,
            is_alive: &self.setup.is_alive,
            marked: &self.marked,
        };
        let orphans = search.run(scope)?;
        // The removals of this host's previous run that the search has finished are forgotten.
        let mut marked = self.marked.lock();
        marked.retain(|container| orphans.waiting.contains(container));
        drop(marked);
        Ok(orphans)
    }

    /// Returns the other hosts that have a host directory and are not alive.
    fn find_dead_hosts(&self) -> Result<DeadHosts> {
        let mut dead_hosts = DeadHosts::new();
        for host in list_hosts(&self.below)? {
            if host == self.setup.host || (self.setup.is_alive)(&host)? {
                continue;
            }
            if let Some(dir) = find_host_dir(&self.below, &host)? {
                dead_hosts.insert(host, self.below.attr(&dir)?.mtime);
            }
        }
        Ok(dead_hosts)
    }

    /// Lists the files that have containers.
    fn list_files(&self) -> Result<BTreeSet<FileId>> {
        let listed = file_dir::list_files(&self.below, &self.containers_dir)?;
        Ok(listed.into_iter().collect())
    }

    /// Publishes this host's writes to a file, and flattens the file.
    fn publish_and_flatten(&self, id: FileId, inode: &B::Inode) -> Result<FlattenOutcome> {
        let file = self.find_or_add(id)?;
        self.publish_own_logs(&file)?;
        self.flatten_file(&file, inode)
    }

    /// Publishes this host's writes and removes its registration as a writer. Does nothing while a program on this host
    /// is writing.
    fn publish_own_logs(&self, file: &LoggedFile<B>) -> Result<()> {
        if file.has_local_writer.load(Ordering::Acquire) {
            return Ok(());
        }
        let context = self.context();
        file.retry_while_lagging(&context, &mut || file.end_writing(&context))
    }

    /// Settles a file: publishes this host's logs, and then removes the containers if the file was removed, or flattens
    /// the file if the mount does so when a file is closed.
    ///
    /// Returns [`FlattenOutcome::NotDue`] if a program of this host still uses the file, or if the mount keeps files in
    /// logs.
    fn settle_file(&self, file: &Arc<LoggedFile<B>>, inode: &B::Inode) -> Result<FlattenOutcome> {
        if file.has_local_writer.load(Ordering::Acquire) {
            return Ok(FlattenOutcome::NotDue);
        }
        self.publish_own_logs(file)?;
        if file.is_removed.load(Ordering::Acquire) {
            return self.remove_containers(file);
        }
        match self.setup.when_closed {
            WhenClosed::Flatten | WhenClosed::FlattenBehind => self.flatten_file(file, inode),
            WhenClosed::Keep => Ok(FlattenOutcome::NotDue),
        }
    }

    /// Removes the containers of a file that was removed, unless a program has the file open or another host writes to
    /// it.
    fn remove_containers(&self, file: &Arc<LoggedFile<B>>) -> Result<FlattenOutcome> {
        if file.opens.load(Ordering::Acquire) > 0 {
            return Ok(FlattenOutcome::NotDue);
        }
        let context = self.context();
        if file.has_other_writers(&context, &self.setup.is_alive)? {
            return Ok(FlattenOutcome::BeingWritten);
        }
        file.retry_while_lagging(&context, &mut || file.remove(&context))?;
        let known_file = self.files.lock().by_id.remove(&file.id);
        // Dropped after the lock is released: the last reference may close files.
        drop(known_file);
        Ok(FlattenOutcome::Flat)
    }

    /// Flattens a file if no host is writing to it. This host's logs of it are published already.
    fn flatten_file(&self, file: &Arc<LoggedFile<B>>, inode: &B::Inode) -> Result<FlattenOutcome> {
        let unit_bytes = self.setup.unit_bytes;
        let context = self.context();
        let outcome = file.retry_while_lagging(&context, &mut || {
            file.flatten(&context, inode, unit_bytes, &self.setup.is_alive)
        })?;
        if outcome == FlattenOutcome::Flat {
            self.forget_if_unused(file);
        }
        Ok(outcome)
    }

    /// Drops a file from the known files if it has no containers (directories with its logs), is not open, and no other
    /// thread uses it.
    ///
    /// Two objects for one file must never exist, because neither would see the writes through the other. A file with
    /// any container stays known, so that a removal of its last name marks the container.
    pub(super) fn forget_if_unused(&self, file: &Arc<LoggedFile<B>>) {
        /// Number of references to a file that no other thread uses: the caller's, and the one in `by_id`.
        const UNUSED_REFERENCES: usize = 2;
        let mut files = self.files.lock();
        let is_unused = file.opens.load(Ordering::Acquire) == 0
            && Arc::strong_count(file) <= UNUSED_REFERENCES
            && !file.has_containers();
        if !is_unused {
            return;
        }
        self.forget_count.fetch_add(1, Ordering::AcqRel);
        let forgotten_file = files.by_id.remove(&file.id);
        drop(files);
        // Dropped after the lock is released: the last reference may close files.
        drop(forgotten_file);
    }
}

/// Returns whether one of the files has this inode number.
fn contains_ino(files: &BTreeSet<FileId>, ino: u64) -> bool {
    let lowest_id = FileId { ino, birth: 0 };
    let highest_id = FileId {
        ino,
        birth: u64::MAX,
    };
    files.range(lowest_id..=highest_id).next().is_some()
}
