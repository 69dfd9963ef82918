//! Crash-safe removal of files whose data is on a lane.
//!
//! Terms
//! * The *primary* is the directory with all names. A *lane* is another directory, which has the data of some files.
//! * A *placed* file has its data on a lane. Its names in the primary are hard links of one symbolic link, the file's
//!   *link*.
//! * The *staging directory* of the primary has links of files that are being created or removed.
//!
//! A removal has four steps
//! 1. If the name is the file's last one, the link gets a further name in the staging directory.
//! 2. The name is removed from the primary.
//! 3. The primary is synced. Otherwise, a power loss could bring back the name of a file that is already removed.
//! 4. The file is removed from its lane, and then the link from the staging directory.
//!
//! A sync for each removal would be slow. After step 2, removed files therefore wait for a common sync. After a crash,
//! the next mount finds these files by their links in the staging directory.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;

use firn_backing::SyncScope;
use firn_backing::lock::Mutex;

use super::*;

/// Number of waiting files at which a removal performs the common sync and removes all of them.
const WAITING_MAX: usize = 64;

/// The files that have lost their last name and are still on their lanes.
pub(crate) struct PendingRemovals<B: Backing> {
    /// The files, by the inode number of their link.
    waiting: Mutex<HashMap<u64, PendingRemoval<B>>>,
}

/// A file that must be removed from its lane.
pub(crate) struct PendingRemoval<B: Backing> {
    /// The file's link, whose only name is in the staging directory.
    pub(crate) link: B::Inode,
    /// Index of the lane.
    pub(crate) lane: usize,
    /// Name of the file on the lane, and of its link in the staging directory.
    pub(crate) entry: OsString,
    /// Whether the call that creates the file on the lane has returned.
    ///
    /// A creation on a hanging lane is abandoned, and its file is removed by this entry. The call may create the file
    /// as long as it has not returned, so the removal waits for the return.
    pub(crate) is_creation_finished: Arc<AtomicBool>,
}

impl<B: Backing> Clone for PendingRemoval<B> {
    fn clone(&self) -> Self {
        Self {
            link: self.link.clone(),
            lane: self.lane,
            entry: self.entry.clone(),
            is_creation_finished: Arc::clone(&self.is_creation_finished),
        }
    }
}

impl<B: Backing> Default for PendingRemovals<B> {
    fn default() -> Self {
        Self {
            waiting: Mutex::new(HashMap::new()),
        }
    }
}

/// A placed file of which a call is about to remove a name.
pub(crate) struct PendingUnlink<B: Backing> {
    placed: Arc<PlacedFile<B>>,
    /// Inode number of the file's link.
    link_ino: u64,
    /// Whether the name is the file's last one. The link then has a further name in the staging directory.
    is_staged: bool,
}

impl<B: Backing> PendingRemovals<B> {
    /// Returns whether the file of the link with this inode number waits for its removal.
    pub(crate) fn contains(&self, link_ino: u64) -> bool {
        self.waiting.lock().contains_key(&link_ino)
    }

    /// Adds the file of the link with this inode number.
    pub(crate) fn insert(&self, link_ino: u64, removal: PendingRemoval<B>) {
        self.waiting.lock().insert(link_ino, removal);
    }

    /// Returns the number of waiting files for which `is_ready` returns true.
    fn count_ready(&self, is_ready: impl Fn(&PendingRemoval<B>) -> bool) -> usize {
        let waiting = self.waiting.lock();
        waiting.values().filter(|removal| is_ready(removal)).count()
    }

    /// Returns the waiting files for which `is_ready` returns true, with the inode numbers of their links.
    fn list_ready(
        &self,
        is_ready: impl Fn(&PendingRemoval<B>) -> bool,
    ) -> Vec<(u64, PendingRemoval<B>)> {
        let waiting = self.waiting.lock();
        waiting
            .iter()
            .filter(|(_, removal)| is_ready(removal))
            .map(|(link_ino, removal)| (*link_ino, removal.clone()))
            .collect()
    }

    /// Removes the file of the link with this inode number from the list.
    fn remove(&self, link_ino: u64) {
        self.waiting.lock().remove(&link_ino);
    }
}

impl<B: Backing> Lanes<B> {
    /// Prepares a call that removes or replaces `name` in `parent` (step 1 of a removal). If that is the last name of a
    /// placed file, its symbolic link gets a second name in the staging directory. Returns `None` if the name does not
    /// lead to a placed file, or cannot be looked up.
    ///
    /// [`Lanes::run_unlink`] then makes the call. If this function fails, the caller must not make the call.
    pub(crate) fn prepare_unlink(
        &self,
        parent: &B::Inode,
        name: &OsStr,
    ) -> Result<Option<PendingUnlink<B>>> {
        // If this lookup fails, the call that follows fails too, and reports the error.
        let Ok((link, attr)) = self.primary.lookup(parent, name) else {
            return Ok(None);
        };
        if attr.kind != Kind::Symlink {
            return Ok(None);
        }
        let Some((placed, _)) = self.follow(&link, &attr)? else {
            return Ok(None);
        };
        // The only name of the link is the last name of the file.
        let is_staged = attr.nlink == 1;
        if is_staged {
            // If a crash interrupts the removal, the next mount finds the file by this name and finishes the removal.
            match self.primary.link(&link, self.staging()?, &placed.entry) {
                Ok(_) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Some(PendingUnlink {
            placed: Arc::new(placed),
            link_ino: attr.ino,
            is_staged,
        }))
    }

    /// Runs `call`, which removes a name (step 2 of a removal), after [`Lanes::prepare_unlink`] has returned `pending`.
    /// Undoes the preparation if the call fails, and returns its error.
    pub(crate) fn run_unlink(
        &self,
        pending: Option<PendingUnlink<B>>,
        call: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let Some(pending) = pending else {
            return call();
        };
        if let Err(error) = call() {
            self.undo_unlink(pending);
            return Err(error);
        }
        self.complete_unlink(pending)
    }

    /// Undoes [`Lanes::prepare_unlink`], because the name still exists.
    fn undo_unlink(&self, pending: PendingUnlink<B>) {
        if pending.is_staged {
            // If this fails, the link retains its name in the staging directory until the next mount removes that name.
            if let Ok(staging) = self.staging() {
                let _ = self.primary.unlink(staging, &pending.placed.entry);
            }
        }
    }

    /// Completes the removal of a name of a placed file (one with its data in a lane), after the call has removed the
    /// name.
    ///
    /// If that was the last name, the link is *staged*: it has a further name in the staging directory. The file then
    /// waits for a sync that serves several removals, and is removed from its lane after that.
    fn complete_unlink(&self, pending: PendingUnlink<B>) -> Result<()> {
        let name_count = self.primary.attr(&pending.placed.link)?.nlink;
        if !pending.is_staged {
            // The name was not the last one before the call. Another host or thread may have removed the other names
            // since; then the file must be removed now, because no staged name leads to it.
            if name_count == 0 {
                // Sync the whole primary, because the directories of the other names are not known. Otherwise, a power
                // loss could bring back a name whose file is already removed. Where syncfs(2) has no effect,
                // directories that only another host has changed may remain unsynced.
                self.primary.sync_scope(SyncScope::All)?;
                self.remove_entry(pending.placed.lane, &pending.placed.entry)?;
            }
            return Ok(());
        }
        // One of the names is that in the staging directory.
        let has_other_name = name_count > 1;
        if has_other_name {
            // The call renamed the name onto itself, or another host created a further name.
            self.undo_unlink(pending);
            return Ok(());
        }
        let removal = PendingRemoval {
            link: pending.placed.link.clone(),
            lane: pending.placed.lane,
            entry: pending.placed.entry.clone(),
            is_creation_finished: Arc::new(AtomicBool::new(true)),
        };
        self.removals.insert(pending.link_ino, removal);
        if self.removals.count_ready(|removal| self.is_ready(removal)) >= WAITING_MAX {
            self.finish_removals()?;
        }
        Ok(())
    }

    /// Returns whether there are waiting files that [`Lanes::finish_removals`] would remove now.
    pub fn has_removals(&self) -> bool {
        self.removals.count_ready(|removal| self.is_ready(removal)) > 0
    }

    /// Returns whether a waiting file can be removed now. The files of a hanging lane cannot be removed, because the
    /// removing thread would hang too.
    fn is_ready(&self, removal: &PendingRemoval<B>) -> bool {
        removal.is_creation_finished.load(Ordering::Acquire)
            && !self.setup.lanes[removal.lane].names_hang()
    }

    /// Syncs the primary once, and removes the waiting files from lanes that answer (steps 3 and 4 of a removal).
    ///
    /// Stops at the first failure. The remaining files wait for the next call.
    pub fn finish_removals(&self) -> Result<()> {
        let ready = self.removals.list_ready(|removal| self.is_ready(removal));
        if ready.is_empty() {
            return Ok(());
        }
        self.primary.sync_scope(SyncScope::Changes)?;
        for (link_ino, removal) in ready {
            self.remove_staged_link(&removal.link, &removal.entry, || {
                self.remove_entry(removal.lane, &removal.entry)
            })?;
            self.removals.remove(link_ino);
        }
        Ok(())
    }

    /// Finishes the creations and removals that a crash has interrupted. Each of them left a symbolic link to its file
    /// in the staging directory. The file is removed unless the link has another name.
    pub(crate) fn clear_staging(&self) -> Result<()> {
        let Some(staging) = &self.setup.staging else {
            return Ok(());
        };
        let entries = names_in(&self.primary, staging)?;
        if entries.is_empty() {
            return Ok(());
        }
        // A power loss must not bring back the name of a file that is removed below.
        self.primary.sync_scope(SyncScope::Changes)?;
        for entry in entries {
            let (link, _) = self.primary.lookup(staging, &entry)?;
            let target = self.primary.readlink(&link)?;
            if self.refuse_absent(&target).is_err() {
                // A later mount removes the file, when the lane is reachable again.
                continue;
            }
            let lane = self.parse_target(&target).map(|target| target.number);
            self.remove_staged_link(&link, &entry, || match lane {
                Some(lane) => self.remove_entry(lane, &entry),
                None => Ok(()),
            })?;
        }
        Ok(())
    }

    /// Removes the name `entry` of a link from the staging directory, which has the links of unfinished work. If the
    /// link has no other name, `remove_file` first removes the link's file from the lane.
    fn remove_staged_link(
        &self,
        link: &B::Inode,
        entry: &OsStr,
        remove_file: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if self.primary.attr(link)?.nlink == 1 {
            remove_file()?;
        }
        match self.primary.unlink(self.staging()?, entry) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Removes the file `entry` from a lane. Succeeds if the file is already missing.
    pub(crate) fn remove_entry(&self, lane: usize, entry: &OsStr) -> Result<()> {
        let lane = &self.setup.lanes[lane];
        let outcome = lane.call(CallKind::Name, |backing| {
            backing.unlink(&backing.root(), entry)
        });
        lane.record_change();
        match outcome {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
