//! Removes placed files: first the last name, and at the end the file in the lane.
//!
//! The file may be removed only after the removal of its name is durable in the primary. Otherwise a power loss could
//! bring back the name without the file. A sync for each removal would be slow, so files wait for a common sync.
//! Meanwhile each has a link in the staging directory, by which the next mount continues after a crash.

use firn_backing::SyncScope;
use std::collections::HashMap;
use std::sync::atomic::AtomicBool;

use firn_backing::lock::Mutex;

use super::*;

/// Maximum number of files that wait for a sync.
const WAITING_MAX: usize = 64;

/// Files that have no name but are still in their lanes, by the inode number of their link.
pub(crate) struct Removals<B: Backing> {
    waiting: Mutex<HashMap<u64, Removal<B>>>,
}

/// A file that must be removed from its lane, with its link in the staging directory.
pub(crate) struct Removal<B: Backing> {
    pub(crate) link: B::Inode,
    pub(crate) lane: usize,
    pub(crate) entry: OsString,
    /// Whether the attempt to create the file has ended.
    pub(crate) has_ended: Arc<AtomicBool>,
}

impl<B: Backing> Clone for Removal<B> {
    fn clone(&self) -> Self {
        Self {
            link: self.link.clone(),
            lane: self.lane,
            entry: self.entry.clone(),
            has_ended: Arc::clone(&self.has_ended),
        }
    }
}

impl<B: Backing> Default for Removals<B> {
    fn default() -> Self {
        Self {
            waiting: Mutex::new(HashMap::new()),
        }
    }
}

/// A placed file from which a call is about to remove a name.
pub(crate) struct Doomed<B: Backing> {
    placed: Arc<PlacedFile<B>>,
    ino: u64,
    /// The name is the file's last one, and a link in the staging directory stands for it.
    is_staged: bool,
}

impl<B: Backing> Removals<B> {
    /// Returns whether the only name of a link is the one in the staging directory.
    pub(crate) fn contains(&self, link: u64) -> bool {
        self.waiting.lock().contains_key(&link)
    }

    pub(crate) fn insert(&self, link: u64, removal: Removal<B>) {
        self.waiting.lock().insert(link, removal);
    }

    fn count(&self, is_counted: impl Fn(&Removal<B>) -> bool) -> usize {
        let waiting = self.waiting.lock();
        waiting
            .values()
            .filter(|removal| is_counted(removal))
            .count()
    }

    fn find(&self, is_found: impl Fn(&Removal<B>) -> bool) -> Vec<(u64, Removal<B>)> {
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
    /// If it is the last name, a link in the staging directory keeps the file known.
    pub(crate) fn doom(&self, parent: &B::Inode, name: &OsStr) -> Result<Option<Doomed<B>>> {
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
        Ok(Some(Doomed {
            placed: Arc::new(placed),
            ino: attr.ino,
            is_staged,
        }))
    }

    /// Runs `call`, which removes names. If it succeeds, `doomed` has lost a name in `parent`.
    pub(crate) fn end_names(
        &self,
        doomed: Option<Doomed<B>>,
        parent: &B::Inode,
        call: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let result = call();
        match (result, doomed) {
            (Ok(()), Some(doomed)) => self.remove(doomed, parent),
            (Err(error), Some(doomed)) => {
                self.spare(doomed);
                Err(error)
            }
            (result, None) => result,
        }
    }

    /// Undoes the preparation, because the name still exists.
    fn spare(&self, doomed: Doomed<B>) {
        if doomed.is_staged {
            // If this fails, the link keeps a second name in the staging directory, which the next mount removes.
            let staging = self.staging();
            let _ = staging.and_then(|dir| self.primary.unlink(dir, &doomed.placed.entry));
        }
    }

    /// Continues after the call has removed the name.
    fn remove(&self, doomed: Doomed<B>, parent: &B::Inode) -> Result<()> {
        let names = self.primary.attr(&doomed.placed.link)?.nlink;
        if doomed.is_staged {
            if names > 1 {
                // The name still exists: the call renamed it onto itself, or another host created a name.
                self.spare(doomed);
                return Ok(());
            }
            let removal = Removal {
                link: doomed.placed.link.clone(),
                lane: doomed.placed.lane,
                entry: doomed.placed.entry.clone(),
                has_ended: Arc::new(AtomicBool::new(true)),
            };
            self.removals.insert(doomed.ino, removal);
            if self.removals.count(|removal| self.is_ready(removal)) >= WAITING_MAX {
                self.finish_removals()?;
            }
            return Ok(());
        }
        // Another host may have removed the other name at the same time.
        if names == 0 {
            self.primary.sync_dir(parent)?;
            self.remove_from_lane(&doomed.placed)?;
        }
        Ok(())
    }

    /// Returns whether files wait for their removal from lanes that answer.
    pub fn has_removals(&self) -> bool {
        self.removals.count(|removal| self.is_ready(removal)) > 0
    }

    /// Returns whether a file can be removed now. Files of a hanging lane wait, because a thread that removed them
    /// would hang too.
    fn is_ready(&self, removal: &Removal<B>) -> bool {
        removal.has_ended.load(Ordering::Acquire) && !self.setup.lanes[removal.lane].names_hang()
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
