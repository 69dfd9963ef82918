//! Removes files whose data is on a lane.
//!
//! Terms
//! * The *primary* is the directory with all names. A *lane* is another directory that has the data of some files.
//! * A *placed* file has its data on a lane. Its names in the primary are hard links of one symbolic link, the file's *link*.
//!
//! A removal has three steps
//! * the last name is removed from the primary. Before that, the link gets a name in the staging directory;
//! * the primary is synced. Without the sync, a power loss could bring back the name of a file that is gone;
//! * the file is removed from its lane, and then the name from the staging directory.
//!
//! A sync for each removal would be slow, so removed files wait for a common sync. After a crash the next mount finds them
//! by their names in the staging directory.

use firn_backing::SyncScope;
use std::collections::HashMap;
use std::sync::atomic::AtomicBool;

use firn_backing::lock::Mutex;

use super::*;

/// Maximum number of files that wait for a sync.
const WAITING_MAX: usize = 64;

/// Files that lost their last name and are still on their lanes. The key is the inode number of the file's link.
pub(crate) struct PendingRemovals<B: Backing> {
    waiting: Mutex<HashMap<u64, PendingRemoval<B>>>,
}

/// A file that must be removed from its lane.
pub(crate) struct PendingRemoval<B: Backing> {
    /// The file's link, which has a name in the staging directory only.
    pub(crate) link: B::Inode,
    /// Index of the lane.
    pub(crate) lane: usize,
    /// Name of the file on the lane, and of its link in the staging directory.
    pub(crate) entry: OsString,
    /// Whether the call that creates the file on the lane has returned. A creation that was given up because the lane hangs
    /// leaves its file to the removals. Until that call returns, it may still create the file.
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
    ino: u64,
    /// Whether the name is the file's last one. Then the link has a name in the staging directory, too.
    is_staged: bool,
}

impl<B: Backing> PendingRemovals<B> {
    /// Returns whether the file of a link waits for its removal.
    pub(crate) fn contains(&self, link: u64) -> bool {
        self.waiting.lock().contains_key(&link)
    }

    pub(crate) fn insert(&self, link: u64, removal: PendingRemoval<B>) {
        self.waiting.lock().insert(link, removal);
    }

    fn count(&self, is_counted: impl Fn(&PendingRemoval<B>) -> bool) -> usize {
        let waiting = self.waiting.lock();
        waiting
            .values()
            .filter(|removal| is_counted(removal))
            .count()
    }

    fn find(&self, is_found: impl Fn(&PendingRemoval<B>) -> bool) -> Vec<(u64, PendingRemoval<B>)> {
        let waiting = self.waiting.lock();
        let matching = waiting.iter().filter(|(_, removal)| is_found(removal));
        matching
            .map(|(ino, removal)| (*ino, removal.clone()))
            .collect()
    }

    fn forget(&self, link: u64) {
        self.waiting.lock().remove(&link);
    }
}

impl<B: Backing> Lanes<B> {
    /// Prepares the removal or replacement of `name`. Returns `None` if the name does not lead to a placed file.
    ///
    /// If it is the last name, the link first gets a name in the staging directory.
    pub(crate) fn prepare_unlink(
        &self,
        parent: &B::Inode,
        name: &OsStr,
    ) -> Result<Option<PendingUnlink<B>>> {
        let (link, attr) = match self.primary.lookup(parent, name) {
            Ok((link, attr)) if attr.kind == Kind::Symlink => (link, attr),
            // The call that removes the name reports any error of the lookup.
            _ => return Ok(None),
        };
        let Some((placed, _)) = self.follow(&link, &attr)? else {
            return Ok(None);
        };
        let is_staged = attr.nlink == 1;
        if is_staged {
            match self.primary.link(&link, self.staging()?, &placed.entry) {
                Ok(_) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Some(PendingUnlink {
            placed: Arc::new(placed),
            ino: attr.ino,
            is_staged,
        }))
    }

    /// Runs `call`, which removes a name in `parent`, and completes or undoes the preparation `pending`.
    pub(crate) fn run_unlink(
        &self,
        pending: Option<PendingUnlink<B>>,
        parent: &B::Inode,
        call: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let result = call();
        match (result, pending) {
            (Ok(()), Some(pending)) => self.complete_unlink(pending, parent),
            (Err(error), Some(pending)) => {
                self.undo_unlink(pending);
                Err(error)
            }
            (result, None) => result,
        }
    }

    /// Undoes [`Lanes::prepare_unlink`], because the name still exists.
    fn undo_unlink(&self, pending: PendingUnlink<B>) {
        if pending.is_staged {
            // If this fails, the link keeps a second name in the staging directory, which the next mount removes.
            let staging = self.staging();
            let _ = staging.and_then(|dir| self.primary.unlink(dir, &pending.placed.entry));
        }
    }

    /// Continues after the call has removed the name. If it was the last one, the file joins those that wait for a sync.
    fn complete_unlink(&self, pending: PendingUnlink<B>, parent: &B::Inode) -> Result<()> {
        let names = self.primary.attr(&pending.placed.link)?.nlink;
        if pending.is_staged {
            if names > 1 {
                // The name still exists: the call renamed it onto itself, or another host created a name.
                self.undo_unlink(pending);
                return Ok(());
            }
            let removal = PendingRemoval {
                link: pending.placed.link.clone(),
                lane: pending.placed.lane,
                entry: pending.placed.entry.clone(),
                is_creation_finished: Arc::new(AtomicBool::new(true)),
            };
            self.removals.insert(pending.ino, removal);
            if self.removals.count(|removal| self.is_ready(removal)) >= WAITING_MAX {
                self.finish_removals()?;
            }
            return Ok(());
        }
        // The name was not the last one before the call. Another host may have removed the others meanwhile.
        if names == 0 {
            self.primary.sync_dir(parent)?;
            self.remove_from_lane(&pending.placed)?;
        }
        Ok(())
    }

    /// Returns whether files wait for their removal from lanes that answer.
    pub fn has_removals(&self) -> bool {
        self.removals.count(|removal| self.is_ready(removal)) > 0
    }

    /// Returns whether a file can be removed now. Files of a hanging lane wait, because a thread that removed them
    /// would hang too.
    fn is_ready(&self, removal: &PendingRemoval<B>) -> bool {
        removal.is_creation_finished.load(Ordering::Acquire)
            && !self.setup.lanes[removal.lane].names_hang()
    }

    /// Removes the waiting files, after one sync of the primary for all of them.
    pub fn finish_removals(&self) -> Result<()> {
        let waiting = self.removals.find(|removal| self.is_ready(removal));
        if waiting.is_empty() {
            return Ok(());
        }
        self.primary.sync_scope(SyncScope::Changes)?;
        for (link, removal) in waiting {
            self.end_staged(&removal.link, &removal.entry, || {
                self.remove_entry(removal.lane, &removal.entry)
            })?;
            self.removals.forget(link);
        }
        Ok(())
    }

    /// Continues after a crash: each link in the staging directory belongs to an interrupted creation or removal.
    pub(crate) fn clear_staging(&self) -> Result<()> {
        let Some(staging) = &self.setup.staging else {
            return Ok(());
        };
        let staged = names_in(&self.primary, staging)?;
        if staged.is_empty() {
            return Ok(());
        }
        self.primary.sync_scope(SyncScope::Changes)?;
        for entry in staged {
            let (link, _) = self.primary.lookup(staging, &entry)?;
            let target = self.primary.readlink(&link)?;
            if self.refuse_absent(&target).is_err() {
                // The file is removed when the lane is reachable again.
                continue;
            }
            let lane = self.lane_of_target(&target).map(|(number, ..)| number);
            self.end_staged(&link, &entry, || match lane {
                Some(number) => self.remove_entry(number, &entry),
                None => Ok(()),
            })?;
        }
        Ok(())
    }

    /// Removes a link from the staging directory. If the link has no other name, `remove_file` first removes its
    /// file.
    fn end_staged(
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

    fn remove_from_lane(&self, placed: &PlacedFile<B>) -> Result<()> {
        self.remove_entry(placed.lane, &placed.entry)
    }

    pub(crate) fn remove_entry(&self, lane: usize, entry: &OsStr) -> Result<()> {
        let lane = &self.setup.lanes[lane];
        let removed = lane.call(Call::Name, |backing| backing.unlink(&backing.root(), entry));
        lane.note_change();
        match removed {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
