//! Work after the last close: files become flat, and what is left of containers goes.

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

/// How long a close waits before it looks again whether other hosts have flattened their parts.
const LOOK_AGAIN: Backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(100));

/// Files that are settled at a time. A small file waits for a dozen syncs and copies little.
const SETTLE_THREADS: usize = 4;

/// Files that a walk finds before they are flattened: an inode may be a descriptor.
const FLATTEN_BATCH: usize = 64;

/// Hosts that do not write to logs any more, and when each said last how it mounts.
pub(super) type HostsGone = BTreeMap<String, Time>;

/// How often damage is looked for: a sorted index that counts instead of a damaged one may be found to be damaged when it is
/// read.
const GIVE_UP_MAX: usize = 3;

/// A walk for files in logs is repeated where it misses one, but no more often than this.
const WALKS_MAX: usize = 5;

/// Files with something left to do.
pub(super) struct Ended<B: Backing> {
    state: Mutex<EndedState<B>>,
    came: Condvar,
}

struct EndedState<B: Backing> {
    files: HashMap<FileId, EndedFile<B>>,
    /// A file was added, or a caller asked for attention, since the last round.
    has_news: bool,
}

/// A file that no caller on this host has open for writing any more, or that is to be flattened.
struct EndedFile<B: Backing> {
    file: Arc<LoggedFile<B>>,
    inode: B::Inode,
}

impl<B: Backing> Ended<B> {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(EndedState {
                files: HashMap::new(),
                has_news: false,
            }),
            came: Condvar::new(),
        }
    }

    pub(super) fn add(&self, file: &Arc<LoggedFile<B>>, inode: &B::Inode) {
        let ended = EndedFile {
            file: Arc::clone(file),
            inode: inode.clone(),
        };
        let old = {
            let mut state = self.state.lock();
            state.has_news = true;
            state.files.insert(file.id, ended)
        };
        drop(old);
        self.came.notify_all();
    }
}

/// What is in logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Logged {
    /// Files of which bytes are.
    pub files: u64,
    /// Bytes of them that this host has written to logs.
    pub own_bytes: u64,
}

/// Files that are not flat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Other hosts have parts of them to write.
    pub under_way: usize,
    /// Files that are being written.
    pub written: usize,
    /// Files that are not found.
    pub lost: usize,
    /// Something failed.
    pub failed: usize,
    /// The first failure.
    pub error: Option<Errno>,
}

impl Left {
    fn count(&mut self, flattened: Result<Flattened>) {
        match flattened {
            Ok(Flattened::Flat) => {}
            Ok(Flattened::UnderWay) => self.under_way += 1,
            Ok(Flattened::Written) => self.written += 1,
            Err(error) => {
                self.failed += 1;
                self.error = self.error.or(Some(error));
            }
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A file that has containers, and that is flattened together with others.
struct ListedFile<B: Backing> {
    id: FileId,
    inode: B::Inode,
}

/// A file that has containers.
struct Found<'a, B: Backing> {
    id: FileId,
    inode: &'a B::Inode,
    /// From where it was looked for.
    path: PathBuf,
}

impl<B: Backing> LogBacking<B> {
    /// Ends and flattens files without writers, as far as other hosts let it.
    pub fn settle(&self) -> Left {
        let ended = {
            let mut state = self.ended.state.lock();
            state.has_news = false;
            std::mem::take(&mut state.files)
        };
        let mut ended: Vec<_> = ended.into_values().collect();
        ended.sort_by_key(|ended| self.is_in_other_lane(&ended.inode));
        let settle = |ended: &EndedFile<B>| self.settle_one(&ended.file, &ended.inode);
        let settled = parallel::map("firn-settle", SETTLE_THREADS, &ended, &settle);
        let mut left = Left::default();
        for (ended, settled) in ended.into_iter().zip(settled) {
            left.count(settled);
            if settled != Ok(Flattened::Flat) {
                let mut state = self.ended.state.lock();
                state.files.entry(ended.file.id).or_insert(ended);
            }
        }
        left
    }

    /// Publishes what this host wrote to a file that it writes no more. Where the close flattens, this makes the file flat unless
    /// another host writes to it, and waits for the parts of other hosts.
    pub(super) fn finish(&self, opened: &Opened<B>) -> Result<()> {
        if self.setup.when_closed == WhenClosed::FlattenBehind {
            self.publish(&opened.file)?;
            self.ended.add(&opened.file, &opened.inode);
            return Ok(());
        }
        let mut waits = LOOK_AGAIN.start();
        while opened.file.has_containers() {
            match self.settle_one(&opened.file, &opened.inode)? {
                Flattened::Flat => break,
                Flattened::Written => {
                    self.ended.add(&opened.file, &opened.inode);
                    break;
                }
                Flattened::UnderWay => waits.sleep(),
            }
        }
        Ok(())
    }

    /// Waits until files have ended, at most `time`.
    pub fn wait_for_ended(&self, time: Duration) {
        let mut state = self.ended.state.lock();
        if !state.has_news {
            state.wait_for(&self.ended.came, time);
        }
    }

    /// Ends the wait of another thread, or its next one.
    pub fn wake(&self) {
        self.ended.state.lock().has_news = true;
        self.ended.came.notify_all();
    }

    /// Flattens the files without writers at or below `top`, whether this host has ever opened them or not.
    ///
    /// Where hosts have lanes of their own, each begins with the files there: hosts that flatten files of one lane
    /// together wait for each other's syncs.
    pub fn flatten_below(&self, top: &LogInode<B>) -> Result<Left> {
        for _ in 1..WALKS_MAX {
            let (left, missed) = self.flatten_seen_below(top)?;
            if left.lost >= missed {
                return Ok(left);
            }
            // A walk misses a file that is renamed meanwhile, or that a commit gives its name.
        }
        Ok(self.flatten_seen_below(top)?.0)
    }

    /// The same in one walk; and how many files in logs it did not see.
    fn flatten_seen_below(&self, top: &LogInode<B>) -> Result<(Left, usize)> {
        let mut left = Left::default();
        let mut now = Vec::new();
        let mut later = Vec::new();
        let missed = self.visit_logged(top, &mut |found| {
            let listed = ListedFile {
                id: found.id,
                inode: found.inode.clone(),
            };
            if self.is_in_other_lane(found.inode) {
                later.push(listed);
                return;
            }
            now.push(listed);
            if now.len() >= FLATTEN_BATCH {
                self.flatten_listed(&std::mem::take(&mut now), &mut left);
            }
        })?;
        self.flatten_listed(&now, &mut left);
        self.flatten_listed(&later, &mut left);
        left.lost = self.end_lost(missed)?;
        Ok((left, missed))
    }

    fn flatten_listed(&self, files: &[ListedFile<B>], left: &mut Left) {
        let flatten = |file: &ListedFile<B>| self.flatten_found(file.id, &file.inode);
        let flattened = parallel::map("firn-settle", SETTLE_THREADS, files, &flatten);
        flattened.into_iter().for_each(|one| left.count(one));
    }

    /// `lost` files in logs were not found. Removes the containers of those that hosts were removing when they died.
    /// Returns how many are left.
    fn end_lost(&self, lost: usize) -> Result<usize> {
        match lost {
            0 => Ok(0),
            _ => Ok(self.find_orphans()?.lost.len()),
        }
    }

    /// Whether a plain file lies in another lane than what this host writes to logs by its turn.
    fn is_in_other_lane(&self, inode: &B::Inode) -> bool {
        let own = self.below.lane_of_turn(self.turn);
        own.is_some_and(|own| self.below.facts(inode).lane != own)
    }

    /// The same; what cannot be read of logs is told, and given up.
    pub fn flatten_with_loss(&self, top: &LogInode<B>, report: &mut dyn Report) -> Result<Left> {
        let mut left = Left::default();
        let lost = self.visit_logged(top, &mut |found| {
            left.count(self.flatten_damaged(&found, report));
        })?;
        left.lost = self.end_lost(lost)?;
        Ok(left)
    }

    fn flatten_damaged(&self, found: &Found<'_, B>, report: &mut dyn Report) -> Result<Flattened> {
        for _ in 0..GIVE_UP_MAX {
            match self.flatten_found(found.id, found.inode) {
                Err(error) if may_be_damage(error) => {}
                flattened => return flattened,
            }
            let plain = self.below.attr_now(found.inode)?;
            let mut told = LossTarget {
                path: &found.path,
                report,
            };
            let file = self.find_or_add(found.id)?;
            let place = self.place();
            let unit_bytes = self.setup.unit_bytes;
            let is_alive = &self.setup.is_alive;
            if !file.give_up(&place, &plain, unit_bytes, is_alive, &mut told)? {
                return Ok(Flattened::Written);
            }
        }
        self.flatten_found(found.id, found.inode)
    }

    /// How many files at or below `top` have containers.
    pub fn count_logged_below(&self, top: &LogInode<B>) -> Result<usize> {
        let mut count = 0;
        self.visit_logged(top, &mut |_| count += 1)?;
        Ok(count)
    }

    /// Goes through the files at or below `top` that have containers. Those of which no file is found are counted, where
    /// `top` is all of the backing.
    fn visit_logged(
        &self,
        top: &LogInode<B>,
        visit: &mut dyn FnMut(Found<'_, B>),
    ) -> Result<usize> {
        let mut wanted = self.list_files()?;
        if let Some(id) = top.id {
            if wanted.contains(&id) {
                visit(Found {
                    id,
                    inode: &top.below,
                    path: PathBuf::new(),
                });
            }
            return Ok(0);
        }
        let root = self.below.attr(&self.below.root())?.ino;
        let is_whole = self.below.attr(&top.below)?.ino == root;
        let mut dirs = vec![(top.below.clone(), PathBuf::new())];
        while let Some((dir, path)) = dirs.pop().filter(|_| !wanted.is_empty()) {
            // A transaction keeps new files in `.firn`.
            let is_own_top = is_whole && path.as_os_str() == TOP;
            for (name, ino, kind) in own::list(&self.below, &dir)? {
                let name = OsStr::from_bytes(&name);
                let may_be_dir = kind.is_none_or(|kind| kind == Kind::Dir);
                if (is_own_top && !has_files_of_programs(name.as_bytes()))
                    || !(may_be_dir || has_number(&wanted, ino))
                {
                    continue;
                }
                let (inode, attr) = match self.below.lookup(&dir, name) {
                    Err(Errno::NOENT) => continue,
                    found => found?,
                };
                let id = FileId::of(&self.below, &inode, &attr)?;
                match id.filter(|id| wanted.remove(id)) {
                    Some(id) => visit(Found {
                        id,
                        inode: &inode,
                        path: path.join(name),
                    }),
                    None if attr.kind == Kind::Dir => dirs.push((inode, path.join(name))),
                    None => {}
                }
            }
        }
        Ok(if is_whole { wanted.len() } else { 0 })
    }

    /// What is in logs, as far as this host knows; without a call of the backing.
    pub fn count_logged(&self) -> Logged {
        let files = self.files.lock();
        let listed = &files.listing.files;
        let is_logged = |file: &&Arc<LoggedFile<B>>| match listed.contains(&file.id) {
            // It was not used since it was listed.
            true if !file.was_refreshed() => true,
            _ => file.is_logged(),
        };
        let mut all = Logged::default();
        for file in files.known.values().filter(is_logged) {
            all.files += 1;
            all.own_bytes += file.own_bytes();
        }
        all
    }

    /// Walks all files to find the owner of each container. Removes containers of files that were removed, and names
    /// those whose file is gone without a removal.
    pub fn find_orphans(&self) -> Result<Orphans> {
        self.search_orphans(Scope::All)
    }

    /// Ends what hosts have left that died in a removal: containers of removed files, and half-removed containers. Looks only
    /// where a host has died since the last time.
    pub fn end_removals(&self) -> Result<()> {
        let gone = self.find_hosts_gone()?;
        let is_known = self.hosts_gone.lock().as_ref() == Some(&gone);
        if !is_known {
            let orphans = self.search_orphans(Scope::Removals)?;
            if !orphans.removed.is_empty() {
                tracing::info!(
                    containers = orphans.removed.len(),
                    "removed logs of removed files that a host has left which died"
                );
            }
            // Else it is looked again the next time.
            if orphans.waiting.is_empty() {
                *self.hosts_gone.lock() = Some(gone);
            }
        }
        Ok(())
    }

    fn search_orphans(&self, scope: Scope) -> Result<Orphans> {
        let marked = self.marked.lock().clone();
        let search = Search {
            base: &self.below,
            top: &self.top,
            host: &self.setup.host,
            is_alive: &self.setup.is_alive,
            marked: &marked,
        };
        let orphans = search.run(scope)?;
        let is_waiting = |name: &String| orphans.waiting.contains(name);
        self.marked.lock().retain(is_waiting);
        Ok(orphans)
    }

    /// The hosts that were there, and of which none that lives writes to logs.
    fn find_hosts_gone(&self) -> Result<HostsGone> {
        let mut gone = HostsGone::new();
        for host in list_hosts(&self.below)? {
            if host == self.setup.host || (self.setup.is_alive)(&host)? {
                continue;
            }
            if let Some(dir) = find_host_dir(&self.below, &host)? {
                gone.insert(host, self.below.attr(&dir)?.mtime);
            }
        }
        Ok(gone)
    }

    /// The files that have containers. Of two with one inode number the older one was removed.
    fn list_files(&self) -> Result<BTreeSet<FileId>> {
        let listed = file_dir::list_files(&self.below, &self.top)?;
        Ok(listed.into_iter().collect())
    }

    fn flatten_found(&self, id: FileId, inode: &B::Inode) -> Result<Flattened> {
        let file = self.find_or_add(id)?;
        self.publish(&file)?;
        self.flatten_one(&file, inode)
    }

    /// Makes what this host wrote durable and known, and says that it writes no more, unless a program here still has the file
    /// open for writing.
    fn publish(&self, file: &LoggedFile<B>) -> Result<()> {
        if file.is_written.load(Ordering::Acquire) {
            return Ok(());
        }
        let place = self.place();
        file.wait_for(&place, &mut || file.end_writing(&place))
    }

    /// Next step for a file that this host has written; [`Flattened::Flat`] too if that step comes later, at a close or
    /// on request.
    fn settle_one(&self, file: &Arc<LoggedFile<B>>, inode: &B::Inode) -> Result<Flattened> {
        let place = self.place();
        if file.is_written.load(Ordering::Acquire) {
            return Ok(Flattened::Flat);
        }
        self.publish(file)?;
        if file.is_removed.load(Ordering::Acquire) {
            if file.opens.load(Ordering::Acquire) > 0 {
                return Ok(Flattened::Flat);
            }
            if file.has_other_writers(&place, &self.setup.is_alive)? {
                return Ok(Flattened::Written);
            }
            file.wait_for(&place, &mut || file.remove(&place))?;
            let known = self.files.lock().known.remove(&file.id);
            drop(known);
            return Ok(Flattened::Flat);
        }
        match self.setup.when_closed {
            WhenClosed::Flatten | WhenClosed::FlattenBehind => self.flatten_one(file, inode),
            WhenClosed::Keep => Ok(Flattened::Flat),
        }
    }

    /// Moves what is in logs to the plain file, as far as the file has no writers.
    fn flatten_one(&self, file: &Arc<LoggedFile<B>>, inode: &B::Inode) -> Result<Flattened> {
        let unit_bytes = self.setup.unit_bytes;
        let place = self.place();
        let flattened = file.wait_for(&place, &mut || {
            file.flatten(&place, inode, unit_bytes, &self.setup.is_alive)
        })?;
        if flattened == Flattened::Flat {
            self.forget(file);
        }
        Ok(flattened)
    }

    /// Forgets a file without containers, unless it is open or still has something left to do. Otherwise there would be
    /// two values for one file, and one of them would not know that the other is written to. A file is known as long as
    /// something of a container is left, so that a removal of its last name marks that.
    pub(super) fn forget(&self, file: &Arc<LoggedFile<B>>) {
        /// The caller's, and that of `known`.
        const UNUSED_REFERENCES: usize = 2;
        let known = {
            let mut files = self.files.lock();
            let is_unused = file.opens.load(Ordering::Acquire) == 0
                && Arc::strong_count(file) <= UNUSED_REFERENCES
                && !file.has_containers();
            if is_unused {
                self.forgotten.fetch_add(1, Ordering::AcqRel);
            }
            is_unused.then(|| files.known.remove(&file.id))
        };
        drop(known);
    }
}

/// Whether a file with this inode number is among these.
fn has_number(files: &BTreeSet<FileId>, ino: u64) -> bool {
    let of = |birth| FileId { ino, birth };
    files.range(of(0)..=of(u64::MAX)).next().is_some()
}
