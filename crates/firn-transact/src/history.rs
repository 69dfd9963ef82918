//! What undoes a commit: a record the other way round, made before the commit is decided.
//!
//! `.firn/undo-N/` is like a transaction that was prepared: `new/u/` has what the commit took away, and copies of
//! the old attributes and of the old bytes in the ranges that it changed; `record` says how to get from the new
//! tree to the old one. Its number is that of the commit before. It is `.firn/undo-N.new` until the commit
//! was carried out.
//!
//! Undoing renames it to a transaction that is decided, so a crash in it is one in a commit.

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Access, Backing, Errno, RenameFlags, SetTime};

use crate::apply::Apply;
use crate::object::Object;
use crate::record::{Data, Item, Record, RecordError};
use crate::scope::{Held, HeldError, NO_ID, Scope};
use crate::staging;

/// The one directory below `new/`.
const NEST: &str = "u";

fn name(serial: u64) -> String {
    format!("undo-{serial}")
}

impl<B: Backing> Held<B> {
    /// Stages what undoes `record`, which is told where to keep what it would remove.
    pub(crate) fn write_undo(&self, scope: &Scope<B>, record: &mut Record) -> Result<(), Errno> {
        if self.history == 0 {
            return Ok(());
        }
        let firn = self.staging_dir()?;
        let before = staging::load_numbers(&self.base, &firn)?
            .remove(&scope.path)
            .unwrap_or(NO_ID);
        let unfinished = staging::new_name(&name(scope.serial));
        let dir = staging::dir(&self.base, &firn, &unfinished)?;
        // What an attempt before this one left.
        staging::clear(&self.base, &dir)?;
        let new = staging::dir(&self.base, &dir, staging::NEW)?;
        let nest = staging::dir(&self.base, &new, NEST)?;
        staging::dir(&self.base, &dir, staging::AWAY)?;
        let mut items = Vec::new();
        let changed = scope.changed.lock().clone();
        for item in &mut record.items {
            let is_here = !item.identity.elsewhere;
            let known = || {
                self.known((self.device(), item.identity.ino))
                    .filter(|_| is_here)
            };
            let object = changed.get(&item.number).cloned().or_else(known);
            items.push(self.reverse(item, object.as_ref(), &nest)?);
        }
        let undo = Record {
            id: before,
            scope: scope.path.clone(),
            shared: false,
            items,
        };
        staging::store(&self.base, &dir, staging::RECORD, &undo.encode())
    }

    fn reverse(
        &self,
        item: &mut Item,
        object: Option<&Arc<Object<B>>>,
        nest: &B::Inode,
    ) -> Result<Item, Errno> {
        let mut back = Item::new(item.number, item.identity, item.is_dir);
        (back.leaves, back.comes, back.stays) =
            (item.comes.clone(), item.leaves.clone(), item.stays.clone());
        if item.new_at.is_some() {
            return Ok(back);
        }
        let staged = |name: String| Some((NEST.to_owned(), name));
        if item.comes.is_empty() && !item.leaves.is_empty() {
            item.kept_at = staged(format!("k{}", item.number));
            back.new_at = item.kept_at.clone();
        }
        let below = object.and_then(|object| object.inner.read().base.clone());
        if item.is_dir
            && let Some(inode) = &below
        {
            let attr = self.base.attr(inode)?;
            back.times = Some([attr.atime, attr.mtime].map(|time| (time.sec, time.nsec)));
        }
        let (Some(object), Some(inode), true) = (object, &below, item.changes_in_place()) else {
            return Ok(back);
        };
        let text = item.number.to_string();
        let old = self.copy_object(object.kind, inode, nest, OsStr::new(&text))?;
        back.twin_at = staged(text.clone());
        if let Some(data) = &item.data {
            back.data = Some(self.old_data(inode, nest, &text, data, old.size)?);
            // The copy has changed them, and the restored file gets those of its copy.
            let copy = self.base.lookup(nest, OsStr::new(&text))?.0;
            self.base
                .set_times(&copy, SetTime::At(old.atime), SetTime::At(old.mtime))?;
        }
        if item.anchor_at.is_some() && item.comes.is_empty() {
            let link = format!("l{}", item.number);
            match self.base.link(inode, nest, OsStr::new(&link)) {
                Ok(_) | Err(Errno::EXIST) => back.anchor_at = staged(link),
                Err(errno) => return Err(errno),
            }
        }
        Ok(back)
    }

    /// Copies the bytes that a commit of `data` overwrites or cuts off.
    fn old_data(
        &self,
        inode: &B::Inode,
        nest: &B::Inode,
        twin: &str,
        data: &Data,
        size: u64,
    ) -> Result<Data, Errno> {
        let from = self.base.open(inode, Access::Read)?;
        let to = self.base.open(
            &self.base.lookup(nest, OsStr::new(twin))?.0,
            Access::ReadWrite,
        )?;
        let cut = data.cut.min(data.size).min(size);
        let overwritten = data
            .written
            .iter()
            .map(|&(start, end)| (start, end.min(cut)));
        let mut written: Vec<(u64, u64)> = overwritten.filter(|(start, end)| start < end).collect();
        if cut < size {
            written.push((cut, size));
        }
        for &(start, end) in &written {
            Apply::copy(&self.base, &from, &to, start, end)?;
        }
        Ok(Data {
            cut,
            size,
            written,
            grows: false,
        })
    }

    /// Where the commit `tx-N` keeps what it would remove; `None` where nothing is kept of it.
    pub(crate) fn undo_nest(&self, serial: u64) -> Result<Option<B::Inode>, Errno> {
        let firn = self.staging_dir()?;
        let name = name(serial);
        for name in [staging::new_name(&name), name] {
            if let Some((dir, _)) = staging::find_dir(&self.base, &firn, &name)?
                && let Some((new, _)) = staging::find_dir(&self.base, &dir, staging::NEW)?
            {
                return Ok(staging::find_dir(&self.base, &new, NEST)?.map(|(nest, _)| nest));
            }
        }
        Ok(None)
    }

    /// The commit `tx-N` was carried out: what undoes it counts, and what is too old goes.
    pub(crate) fn keep_undo(
        &self,
        firn: &B::Inode,
        serial: u64,
        scope: &[u8],
    ) -> Result<(), HeldError> {
        let undo = name(serial);
        let unfinished = staging::new_name(&name(serial));
        if staging::find(&self.base, firn, OsStr::new(&unfinished))?.is_some() {
            let flags = RenameFlags::empty();
            self.base.rename(
                firn,
                OsStr::new(&unfinished),
                firn,
                OsStr::new(&undo),
                flags,
            )?;
            self.base.sync_dir(firn)?;
        }
        let kept = self.undos(scope)?;
        for (serial, _) in kept.into_iter().skip(self.history as usize) {
            self.remove_undo(firn, &name(serial))?;
        }
        Ok(())
    }

    fn remove_undo(&self, firn: &B::Inode, undo: &str) -> Result<(), Errno> {
        let dir = staging::must_find_dir(&self.base, firn, undo)?;
        if staging::find(&self.base, &dir, OsStr::new(staging::RECORD))?.is_some() {
            self.base.unlink(&dir, OsStr::new(staging::RECORD))?;
        }
        staging::clear(&self.base, &dir)?;
        self.base.rmdir(firn, OsStr::new(undo))
    }

    /// Of commits that came to nothing.
    pub(crate) fn forget_unfinished_undos(&self, firn: &B::Inode) -> Result<(), Errno> {
        let names: Vec<Vec<u8>> = staging::list(&self.base, firn)?
            .into_iter()
            .map(|(name, ..)| name)
            .collect();
        for undo in &names {
            let text = String::from_utf8_lossy(undo);
            // The next transaction must not take a number whose undo is kept.
            let number = text
                .strip_prefix("undo-")
                .map(|rest| rest.trim_end_matches(".new"));
            if let Some(number) = number.and_then(|number| number.parse().ok()) {
                self.last_serial.fetch_max(number, Ordering::Relaxed);
            }
            let Some(serial) = text
                .strip_prefix("undo-")
                .and_then(|rest| rest.strip_suffix(".new"))
            else {
                continue;
            };
            if !names.contains(&format!("tx-{serial}").into_bytes()) {
                self.remove_undo(firn, &text)?;
            }
        }
        Ok(())
    }

    /// What undoes commits of a scope, newest first.
    fn undos(&self, scope: &[u8]) -> Result<Vec<(u64, Record)>, HeldError> {
        let Some(firn) = self.find_staging_dir()? else {
            return Ok(Vec::new());
        };
        let mut found = Vec::new();
        for (undo, ..) in staging::list(&self.base, &firn)? {
            let text = String::from_utf8_lossy(&undo).into_owned();
            let Some(serial) = text
                .strip_prefix("undo-")
                .and_then(|n| n.parse::<u64>().ok())
            else {
                continue;
            };
            self.last_serial.fetch_max(serial, Ordering::Relaxed);
            let dir = staging::must_find_dir(&self.base, &firn, &text)
                .map_err(|error| error.below(&self.staging_path()))?;
            for file in [staging::RECORD, staging::COMMIT] {
                found.extend(
                    self.load_record(&dir, &text, file)?
                        .map(|record| (serial, record)),
                );
            }
        }
        found.retain(|(_, record)| record.scope == scope);
        found.sort_by_key(|(serial, _)| std::cmp::Reverse(*serial));
        Ok(found)
    }

    /// The checkpoints of a scope that can be restored, newest first.
    pub fn kept(&self, scope: &[u8]) -> Result<Vec<u64>, HeldError> {
        let undone = self
            .undos(scope)?
            .into_iter()
            .map(|(_, record)| record.id)
            .filter(|&id| id != NO_ID);
        Ok(self.committed(scope)?.into_iter().chain(undone).collect())
    }

    /// Whether the files of checkpoint `id` can be restored.
    pub fn can_restore(&self, scope: &[u8], id: u64) -> Result<(), HeldError> {
        self.steps_back(scope, id).map(drop)
    }

    /// Which undos lead back to checkpoint `id`, in order.
    pub(crate) fn steps_back(&self, scope: &[u8], id: u64) -> Result<Vec<u64>, HeldError> {
        if self.committed(scope)? == Some(id) {
            return Ok(Vec::new());
        }
        let undos = self.undos(scope)?;
        match undos
            .iter()
            .position(|(_, record)| record.id == id && id != NO_ID)
        {
            Some(last) => Ok(undos[..=last].iter().map(|(serial, _)| *serial).collect()),
            None => Err(HeldError::NotKept {
                wanted: id,
                kept: self.kept(scope)?,
            }),
        }
    }

    /// Undoes a commit, the newest of the scope at `root`. From the rename on it is a transaction that is decided: where
    /// this fails later it is carried out by [`Held::commit`] with its number, the next [`Held::restore`], or the next
    /// mount. The caller holds names and data.
    pub(crate) fn undo(&self, root: &Arc<Object<B>>, serial: u64) -> Result<(), HeldError> {
        let firn = self.staging_dir()?;
        let flags = RenameFlags::empty();
        let undo = name(serial);
        let dir = staging::must_find_dir(&self.base, &firn, &undo)?;
        let from = OsStr::new(staging::RECORD);
        let to = OsStr::new(staging::COMMIT);
        if staging::find(&self.base, &dir, from)?.is_some() {
            self.base.rename(&dir, from, &dir, to, flags)?;
            self.base.sync_dir(&dir)?;
        }
        let gone = || HeldError::Record {
            path: format!("{}/{undo}/{}", self.staging_path(), staging::COMMIT),
            source: RecordError::Damaged,
        };
        let record = self
            .load_record(&dir, &undo, staging::COMMIT)?
            .ok_or_else(gone)?;
        let serial = self.last_serial.fetch_add(1, Ordering::Relaxed) + 1;
        let scope = self.undoing_scope(serial, root, dir, record)?;
        let transaction = format!("tx-{serial}");
        self.base.rename(
            &firn,
            OsStr::new(&undo),
            &firn,
            OsStr::new(&transaction),
            flags,
        )?;
        self.enter(scope);
        self.carry_out_undo(serial)
    }
}
