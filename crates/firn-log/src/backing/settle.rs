//! Brings the bytes of logged files from the logs to the plain files, after programs have closed the files.
//!
//! Terms
//! * To *flatten* a file is to copy the bytes in its containers to the plain file, and to remove the containers.
//! * To *publish* this host's logs of a file is to make its writes visible to other hosts, and to end its registration as
//!   a writer. A file is flattened only when no host is registered.
//! * To *settle* a file is to publish this host's logs, and then to flatten the file, or to remove its containers if the
//!   file was removed.
//!
//! Files are queued in [`EndedFiles`] when their last writer on this host closes them. [`LogBacking::settle`] settles the
//! queued files as far as other hosts allow. Files that are not flat afterwards stay in the queue.

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

use super::{LogBacking, LogInode, Opened, WhenClosed};
use crate::file::{Flattened, LoggedFile, LossTarget};
use crate::file_dir;
use crate::file_id::FileId;
use crate::orphans::{Orphans, Scope, Search, has_files_of_programs};
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

/// Maximum number of salvages of one file. More than one may be needed: a salvage may rely on a table that is found damaged
/// only by the next attempt to flatten the file.
const SALVAGES_MAX: usize = 3;

/// Maximum number of walks through the directories for files in logs. A walk is repeated if it missed a file.
const WALKS_MAX: usize = 5;

/// The queue of files to settle.
pub(super) struct EndedFiles<B: Backing> {
    state: Mutex<EndedState<B>>,
    /// Wakes the settling thread.
    work_added: Condvar,
}

/// The queued files, and whether the settling thread should run.
struct EndedState<B: Backing> {
    files: HashMap<FileId, EndedFile<B>>,
    /// Whether a file was added, or another thread woke the settling thread, since the last call of
    /// [`LogBacking::settle`].
    has_new_work: bool,
}

/// A queued file. It was closed by its last writer on this host, or the mount flattens files that are read.
struct EndedFile<B: Backing> {
    file: Arc<LoggedFile<B>>,
    inode: B::Inode,
}

impl<B: Backing> EndedFiles<B> {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(EndedState {
                files: HashMap::new(),
                has_new_work: false,
            }),
            work_added: Condvar::new(),
        }
    }

    /// Queues a file and wakes the settling thread.
    pub(super) fn add(&self, file: &Arc<LoggedFile<B>>, inode: &B::Inode) {
        let ended = EndedFile {
            file: Arc::clone(file),
            inode: inode.clone(),
        };
        let old = {
            let mut state = self.state.lock();
            state.has_new_work = true;
            state.files.insert(file.id, ended)
        };
        drop(old);
        self.work_added.notify_all();
    }
}

/// How many files and bytes are in logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Logged {
    /// Number of files with bytes in logs.
    pub files: u64,
    /// Bytes of these files that this host has written to logs.
    pub own_bytes: u64,
}

/// Numbers of the files that an attempt to flatten has left in logs, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
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

impl Left {
    /// Counts the result for one file.
    fn count(&mut self, flattened: Result<Flattened>) {
        match flattened {
            Ok(Flattened::Flat | Flattened::NotDue) => {}
            Ok(Flattened::UnderWay) => self.under_way += 1,
            Ok(Flattened::Written) => self.written += 1,
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
struct ListedFile<B: Backing> {
    id: FileId,
    inode: B::Inode,
}

/// A file with containers, as a walk found it.
struct FoundFile<'a, B: Backing> {
    id: FileId,
    inode: &'a B::Inode,
    /// Path relative to the top of the walk.
    path: PathBuf,
}

impl<B: Backing> LogBacking<B> {
    /// Settles the queued files as far as other hosts allow. Returns the numbers of files that are left in logs. They stay
    /// in the queue.
    pub fn settle(&self) -> Left {
        let ended = {
            let mut state = self.ended.state.lock();
            state.has_new_work = false;
            std::mem::take(&mut state.files)
        };
        let mut ended: Vec<_> = ended.into_values().collect();
        ended.sort_by_key(|ended| self.is_in_other_lane(&ended.inode));
        let settle = |ended: &EndedFile<B>| self.settle_file(&ended.file, &ended.inode);
        let settled = parallel::map("firn-settle", SETTLE_THREADS_MAX, &ended, &settle);
        let mut left = Left::default();
        for (ended, settled) in ended.into_iter().zip(settled) {
            left.count(settled);
            if !matches!(settled, Ok(Flattened::Flat | Flattened::NotDue)) {
                let mut state = self.ended.state.lock();
                state.files.entry(ended.file.id).or_insert(ended);
            }
        }
        left
    }

    /// Finishes this host's writing of a file at its last close.
    ///
    /// With [`WhenClosed::FlattenBehind`] the logs are published, and the file is queued. Otherwise the file is settled
    /// now: the close waits for other hosts that copy parts of the file, but not for writers on other hosts.
    pub(super) fn finish_last_close(&self, opened: &Opened<B>) -> Result<()> {
        if self.setup.when_closed == WhenClosed::FlattenBehind {
            self.publish_own_logs(&opened.file)?;
            self.ended.add(&opened.file, &opened.inode);
            return Ok(());
        }
        let mut waits = RETRY_WAITS.start();
        while opened.file.has_containers() {
            match self.settle_file(&opened.file, &opened.inode)? {
                Flattened::Flat | Flattened::NotDue => break,
                Flattened::Written => {
                    self.ended.add(&opened.file, &opened.inode);
                    break;
                }
                Flattened::UnderWay => waits.sleep(),
            }
        }
        Ok(())
    }

    /// Waits until a file is queued or another thread calls [`LogBacking::wake`], for at most `time`.
    pub fn wait_for_ended(&self, time: Duration) {
        let mut state = self.ended.state.lock();
        if !state.has_new_work {
            state.wait_for(&self.ended.work_added, time);
        }
    }

    /// Wakes the settling thread. If no thread is waiting, the next wait returns at once.
    pub fn wake(&self) {
        self.ended.state.lock().has_new_work = true;
        self.ended.work_added.notify_all();
    }

    /// Flattens the files at or below `top`, as far as other hosts allow. Files that this host never opened are
    /// included.
    ///
    /// Files in this host's own lane come first. Hosts that flatten files of one lane at the same time wait for each
    /// other's syncs.
    pub fn flatten_below(&self, top: &LogInode<B>) -> Result<Left> {
        for _ in 1..WALKS_MAX {
            let (left, unseen) = self.flatten_in_one_walk(top)?;
            if left.lost >= unseen {
                return Ok(left);
            }
            // The walk missed a file: it was renamed meanwhile, or a commit has just given it its name.
        }
        Ok(self.flatten_in_one_walk(top)?.0)
    }

    /// Flattens the files at or below `top` that one walk finds. Returns the numbers of files that are left in logs, and how
    /// many files in logs the walk did not see.
    fn flatten_in_one_walk(&self, top: &LogInode<B>) -> Result<(Left, usize)> {
        let mut left = Left::default();
        let mut in_own_lane = Vec::new();
        let mut in_other_lanes = Vec::new();
        let unseen = self.visit_logged(top, &mut |found| {
            let listed = ListedFile {
                id: found.id,
                inode: found.inode.clone(),
            };
            if self.is_in_other_lane(found.inode) {
                in_other_lanes.push(listed);
                return;
            }
            in_own_lane.push(listed);
            if in_own_lane.len() >= FLATTEN_BATCH {
                self.flatten_batch(&std::mem::take(&mut in_own_lane), &mut left);
            }
        })?;
        self.flatten_batch(&in_own_lane, &mut left);
        self.flatten_batch(&in_other_lanes, &mut left);
        left.lost = self.remove_orphans(unseen)?;
        Ok((left, unseen))
    }

    /// Flattens several files at the same time, and counts the results in `left`.
    fn flatten_batch(&self, files: &[ListedFile<B>], left: &mut Left) {
        let flatten = |file: &ListedFile<B>| self.publish_and_flatten(file.id, &file.inode);
        let flattened = parallel::map("firn-settle", SETTLE_THREADS_MAX, files, &flatten);
        flattened.into_iter().for_each(|result| left.count(result));
    }

    /// Handles the files in logs that a walk did not see. Removes the containers of files that a dead host was
    /// removing. Returns how many of the files are left.
    fn remove_orphans(&self, unseen: usize) -> Result<usize> {
        if unseen == 0 {
            return Ok(0);
        }
        Ok(self.find_orphans()?.lost.len())
    }

    /// Returns whether a plain file lies in another lane than this host's own.
    fn is_in_other_lane(&self, inode: &B::Inode) -> bool {
        let own = self.below.lane_of_turn(self.turn);
        own.is_some_and(|own| self.below.facts(inode).lane != own)
    }

    /// Flattens the files at or below `top`, and gives up parts of logs that are damaged. The losses are reported to
    /// `report`.
    pub fn flatten_with_loss(&self, top: &LogInode<B>, report: &mut dyn Report) -> Result<Left> {
        let mut left = Left::default();
        let unseen = self.visit_logged(top, &mut |found| {
            left.count(self.flatten_damaged(&found, report));
        })?;
        left.lost = self.remove_orphans(unseen)?;
        Ok(left)
    }

    /// Flattens a file. After an error that damage may have caused, it salvages the file, which gives up the damaged parts,
    /// and tries again.
    fn flatten_damaged(
        &self,
        found: &FoundFile<'_, B>,
        report: &mut dyn Report,
    ) -> Result<Flattened> {
        for _ in 0..SALVAGES_MAX {
            match self.publish_and_flatten(found.id, found.inode) {
                Err(error) if may_be_damage(error) => {}
                flattened => return flattened,
            }
            let plain = self.below.attr_now(found.inode)?;
            let mut target = LossTarget {
                path: &found.path,
                report,
            };
            let file = self.find_or_add(found.id)?;
            let site = self.site();
            let unit_bytes = self.setup.unit_bytes;
            let is_alive = &self.setup.is_alive;
            if !file.give_up(&site, &plain, unit_bytes, is_alive, &mut target)? {
                return Ok(Flattened::Written);
            }
        }
        self.publish_and_flatten(found.id, found.inode)
    }

    /// Counts the files at or below `top` that have containers.
    pub fn count_logged_below(&self, top: &LogInode<B>) -> Result<usize> {
        let mut count = 0;
        self.visit_logged(top, &mut |_| count += 1)?;
        Ok(count)
    }

    /// Visits the files at or below `top` that have containers. Returns the number of files with containers that it has
    /// not found. If `top` is not the top of the backing, that number is unknown, and the result is 0.
    fn visit_logged(
        &self,
        top: &LogInode<B>,
        visit: &mut dyn FnMut(FoundFile<'_, B>),
    ) -> Result<usize> {
        let mut unseen = self.list_files()?;
        if let Some(id) = top.id {
            if unseen.contains(&id) {
                visit(FoundFile {
                    id,
                    inode: &top.below,
                    path: PathBuf::new(),
                });
            }
            return Ok(0);
        }
        let root = self.below.attr(&self.below.root())?.ino;
        let is_top_of_backing = self.below.attr(&top.below)?.ino == root;
        let mut dirs = vec![(top.below.clone(), PathBuf::new())];
        while let Some((dir, path)) = dirs.pop().filter(|_| !unseen.is_empty()) {
            // `.firn` is skipped, except where a transaction keeps new files of programs.
            let is_own_top = is_top_of_backing && path.as_os_str() == TOP;
            for (name, ino, kind) in own::list(&self.below, &dir)? {
                let name = OsStr::from_bytes(&name);
                let may_be_dir = kind.is_none_or(|kind| kind == Kind::Dir);
                if (is_own_top && !has_files_of_programs(name.as_bytes()))
                    || !(may_be_dir || contains_ino(&unseen, ino))
                {
                    continue;
                }
                let (inode, attr) = match self.below.lookup(&dir, name) {
                    Err(Errno::NOENT) => continue,
                    found => found?,
                };
                let id = FileId::of(&self.below, &inode, &attr)?;
                match id.filter(|id| unseen.remove(id)) {
                    Some(id) => visit(FoundFile {
                        id,
                        inode: &inode,
                        path: path.join(name),
                    }),
                    None if attr.kind == Kind::Dir => dirs.push((inode, path.join(name))),
                    None => {}
                }
            }
        }
        Ok(if is_top_of_backing { unseen.len() } else { 0 })
    }

    /// Returns how many files and bytes are in logs, as far as this host knows. It makes no call of the backing.
    pub fn count_logged(&self) -> Logged {
        let files = self.files.lock();
        let listed = &files.listing.files;
        let is_logged = |file: &&Arc<LoggedFile<B>>| {
            let is_unread = !file.was_refreshed();
            // A listed file whose containers were never read has bytes in logs.
            (listed.contains(&file.id) && is_unread) || file.is_logged()
        };
        let mut total = Logged::default();
        for file in files.by_id.values().filter(is_logged) {
            total.files += 1;
            total.own_bytes += file.own_bytes();
        }
        total
    }

    /// Walks all files to find the file of each container. Removes the containers of removed files, and returns the
    /// names of containers whose file is gone without a removal.
    pub fn find_orphans(&self) -> Result<Orphans> {
        self.search_orphans(Scope::All)
    }

    /// Finishes removals that dead hosts began: removes the containers of removed files, and half-removed containers.
    /// Searches only if a host has died since the last call.
    pub fn end_removals(&self) -> Result<()> {
        let dead_hosts = self.find_dead_hosts()?;
        if self.dead_hosts.lock().as_ref() == Some(&dead_hosts) {
            return Ok(());
        }
        let orphans = self.search_orphans(Scope::Removals)?;
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

    /// Searches for containers without a file.
    fn search_orphans(&self, scope: Scope) -> Result<Orphans> {
        let search = Search {
            base: &self.below,
            top: &self.top,
            host: &self.setup.host,
            is_alive: &self.setup.is_alive,
            marked: &self.marked,
        };
        let orphans = search.run(scope)?;
        let is_waiting = |name: &String| orphans.waiting.contains(name);
        self.marked.lock().retain(is_waiting);
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
        let listed = file_dir::list_files(&self.below, &self.top)?;
        Ok(listed.into_iter().collect())
    }

    /// Publishes this host's writes to a file, and flattens the file.
    fn publish_and_flatten(&self, id: FileId, inode: &B::Inode) -> Result<Flattened> {
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
        let site = self.site();
        file.retry_while_lagging(&site, &mut || file.end_writing(&site))
    }

    /// Settles a file: publishes this host's logs, and then removes the containers if the file was removed, or flattens the
    /// file if the mount does so when a file is closed.
    ///
    /// Returns [`Flattened::NotDue`] if a program of this host still uses the file, or if the mount keeps files in logs.
    fn settle_file(&self, file: &Arc<LoggedFile<B>>, inode: &B::Inode) -> Result<Flattened> {
        let site = self.site();
        if file.has_local_writer.load(Ordering::Acquire) {
            return Ok(Flattened::NotDue);
        }
        self.publish_own_logs(file)?;
        if file.is_removed.load(Ordering::Acquire) {
            if file.opens.load(Ordering::Acquire) > 0 {
                return Ok(Flattened::NotDue);
            }
            if file.has_other_writers(&site, &self.setup.is_alive)? {
                return Ok(Flattened::Written);
            }
            file.retry_while_lagging(&site, &mut || file.remove(&site))?;
            let removed = self.files.lock().by_id.remove(&file.id);
            // Dropped after the lock is released: the last reference may close files.
            drop(removed);
            return Ok(Flattened::Flat);
        }
        match self.setup.when_closed {
            WhenClosed::Flatten | WhenClosed::FlattenBehind => self.flatten_file(file, inode),
            WhenClosed::Keep => Ok(Flattened::NotDue),
        }
    }

    /// Flattens a file if no host is writing to it. This host's logs of it are published already.
    fn flatten_file(&self, file: &Arc<LoggedFile<B>>, inode: &B::Inode) -> Result<Flattened> {
        let unit_bytes = self.setup.unit_bytes;
        let site = self.site();
        let flattened = file.retry_while_lagging(&site, &mut || {
            file.flatten(&site, inode, unit_bytes, &self.setup.is_alive)
        })?;
        if flattened == Flattened::Flat {
            self.forget_if_unused(file);
        }
        Ok(flattened)
    }

    /// Drops a file from the known files if it has no containers, is not open, and no other thread uses it.
    ///
    /// Two objects for one file must never exist, because neither would see the writes through the other. A file with
    /// any container stays known, so that a removal of its last name marks the container.
    pub(super) fn forget_if_unused(&self, file: &Arc<LoggedFile<B>>) {
        /// Number of references to a file that no other thread uses: the caller's, and the one in `by_id`.
        const UNUSED_REFERENCES: usize = 2;
        let removed = {
            let mut files = self.files.lock();
            let is_unused = file.opens.load(Ordering::Acquire) == 0
                && Arc::strong_count(file) <= UNUSED_REFERENCES
                && !file.has_containers();
            if is_unused {
                self.forget_count.fetch_add(1, Ordering::AcqRel);
            }
            is_unused.then(|| files.by_id.remove(&file.id))
        };
        // Dropped after the lock is released: the last reference may close files.
        drop(removed);
    }
}

/// Returns whether one of the files has this inode number.
fn contains_ino(files: &BTreeSet<FileId>, ino: u64) -> bool {
    let with_birth = |birth| FileId { ino, birth };
    files
        .range(with_birth(0)..=with_birth(u64::MAX))
        .next()
        .is_some()
}
