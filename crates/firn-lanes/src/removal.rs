//! The end of a placed file: its last name first, the file last.
//!
//! The file may go only when the removal of its name is durable in the primary; else a power loss could bring the name
//! back and not the file. One sync for each removal would be slow, so files wait for it together, and each has a link
//! in the staging directory meanwhile, from which the next mount goes on after a crash.

use std::collections::HashMap;

use firn_backing::lock::Mutex;

use super::*;

/// As many files as this wait for a sync at most.
const WAITING_MAX: usize = 64;

/// Files without a name that are still in their lanes, by the inode number of their link.
pub(crate) struct Removals<B: Backing> {
    waiting: Mutex<HashMap<u64, Arc<PlacedFile<B>>>>,
}

impl<B: Backing> Default for Removals<B> {
    fn default() -> Self {
        Self {
            waiting: Mutex::new(HashMap::new()),
        }
    }
}

/// A placed file that a call is about to take a name from.
pub(crate) struct Doomed<B: Backing> {
    placed: Arc<PlacedFile<B>>,
    ino: u64,
    /// The name is its last, and a link in the staging directory stands for it.
    is_staged: bool,
}

impl<B: Backing> Removals<B> {
    /// Whether a link has no name but the one in the staging directory.
    pub(crate) fn contains(&self, link: u64) -> bool {
        self.waiting.lock().contains_key(&link)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.lock().is_empty()
    }

    fn len(&self) -> usize {
        self.waiting.lock().len()
    }

    fn insert(&self, link: u64, placed: Arc<PlacedFile<B>>) {
        self.waiting.lock().insert(link, placed);
    }

    fn all(&self) -> Vec<(u64, Arc<PlacedFile<B>>)> {
        let waiting = self.waiting.lock();
        waiting
            .iter()
            .map(|(ino, placed)| (*ino, Arc::clone(placed)))
            .collect()
    }

    fn forget(&self, link: u64) {
        self.waiting.lock().remove(&link);
    }
}

impl<B: Backing> Lanes<B> {
    /// Prepares that `name` is removed or replaced: none where it leads to no placed file. A link in the staging
    /// directory keeps the file known if it is the last name.
    pub(crate) fn doom(&self, parent: &B::Inode, name: &OsStr) -> Result<Option<Doomed<B>>> {
        let (link, attr) = match self.primary.lookup(parent, name) {
            Ok(found) if found.1.kind == Kind::Symlink => found,
            // The call that removes the name reports what is wrong with it.
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

    /// Takes names with `call`, of which `doomed` loses one in `parent` if it succeeds.
    pub(crate) fn end_names(
        &self,
        doomed: Option<Doomed<B>>,
        parent: &B::Inode,
        call: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let done = call();
        match (done, doomed) {
            (Ok(()), Some(doomed)) => self.remove(doomed, parent),
            (Err(error), Some(doomed)) => {
                self.spare(doomed);
                Err(error)
            }
            (done, None) => done,
        }
    }

    /// The name is still there.
    fn spare(&self, doomed: Doomed<B>) {
        if doomed.is_staged {
            // What stays is a further name of a link that has one, and the next mount removes it.
            let staging = self.staging();
            let _ = staging.and_then(|dir| self.primary.unlink(dir, &doomed.placed.entry));
        }
    }

    /// The call has succeeded.
    fn remove(&self, doomed: Doomed<B>, parent: &B::Inode) -> Result<()> {
        let names = self.primary.attr(&doomed.placed.link)?.nlink;
        if doomed.is_staged {
            if names > 1 {
                // A rename onto itself, or another host has made one.
                self.spare(doomed);
                return Ok(());
            }
            self.removals.insert(doomed.ino, doomed.placed);
            if self.removals.len() >= WAITING_MAX {
                self.finish_removals()?;
            }
            return Ok(());
        }
        // Another host may have taken the other name at the same time.
        if names == 0 {
            self.primary.sync_dir(parent)?;
            self.remove_from_lane(&doomed.placed)?;
        }
        Ok(())
    }

    /// Whether files wait to be removed from their lanes.
    pub fn has_removals(&self) -> bool {
        !self.removals.is_empty()
    }

    /// Removes the files that wait, after one sync of the primary for all.
    pub fn finish_removals(&self) -> Result<()> {
        let waiting = self.removals.all();
        if waiting.is_empty() {
            return Ok(());
        }
        self.primary.sync_changes()?;
        for (link, placed) in waiting {
            self.end_staged(&placed.link, &placed.entry, || {
                self.remove_from_lane(&placed)
            })?;
            self.removals.forget(link);
        }
        Ok(())
    }

    /// Goes on after a crash: what is in the staging directory was being made or being removed.
    pub(crate) fn clear_staging(&self) -> Result<()> {
        let Some(staging) = &self.setup.staging else {
            return Ok(());
        };
        let staged = names_in(&self.primary, staging)?;
        if staged.is_empty() {
            return Ok(());
        }
        self.primary.sync_changes()?;
        for entry in staged {
            let (link, _) = self.primary.lookup(staging, &entry)?;
            let target = self.primary.readlink(&link)?;
            if self.refuse_absent(&target).is_err() {
                // Its file goes when the lane is back.
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

    /// Ends a link in the staging directory, and before it, with `remove_file`, its file if it has no other name.
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
        let removed = lane.backing.unlink(&lane.backing.root(), entry);
        lane.note_change();
        match removed {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
