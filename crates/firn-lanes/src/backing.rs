//! The backing that the users of this crate see: all lanes and the primary as one file system.
//!
//! Terms
//! * The *primary* is the directory with all names.
//! * A *lane* is another directory, on its own server, with the data of some files.
//! * A *placed* file has its data in a lane. Its name in the primary is a symbolic link, the file's *link*.
//!
//! Calls about names go to the primary. Calls about data go to the *data backing* of the file: the lane of a placed
//! file, and the primary for every other file.

use std::os::fd::OwnedFd;
use std::thread::Builder;

use firn_backing::{
    Access, AdoptedBy, AttrChange, Attributes, Created, DataPart, DescriptorUse, DirEntry, Facts,
    Features, Files, Freshness, LaneIndex, Names, NewKind, Placement, PlacementHint, Remove,
    Sharing, StatFs, SyncScope, Target, TargetOf, Volume, copy_through_memory, forward,
};

use super::*;
use crate::create::{FinalName, NewFile};

/// Calls the data backing of an object: the primary, or a lane for the data of a placed file. A macro, because the two
/// kinds of inodes and files in `$call` have different types.
///
/// For example, `forward!(data_backing: seek)` defines `seek` by such a call: of the lane or of the primary, with the
/// file that was opened there.
macro_rules! data_backing {
    ($self:ident, |$backing:ident| $call:expr) => {{
        let $backing = &$self.primary;
        $call
    }};
    ($self:ident, inode $inode:ident, |$backing:ident| $call:expr) => {{
        let ($backing, $inode) = $self.data_object($inode);
        $call
    }};
    ($self:ident, file $file:ident, |$backing:ident| $call:expr) => {{
        let ($backing, $file) = ($self.data_backing($file), &$file.file);
        $call
    }};
}

/// Calls the data backing of a file as `data_backing!` does, and records the time of the call for the lane.
macro_rules! recorded {
    ($self:ident, file $file:ident, |$backing:ident| $call:expr) => {
        $self.call_data_backing($file, CallKind::Data, |$backing| {
            let $file = &$file.file;
            $call
        })
    };
}

impl<B: Backing> Volume for Lanes<B> {
    type Inode = LanesInode<B>;
    type File = LanesFile<B>;
    type Dir = B::Dir;

    fn root(&self) -> LanesInode<B> {
        LanesInode::Primary(self.primary.root(), Position::TOP)
    }

    /// Returns the features of the primary, but with the number of lanes plus 1. The additional lane stands for the
    /// primary, whose own files are in no lane.
    fn features(&self) -> Features {
        Features {
            lane_count: self.setup.lanes.len() as u16 + 1,
            ..self.primary.features()
        }
    }

    /// Returns the space of all lanes together, and the inodes of the primary (the directory with all names). Lanes on
    /// one file system count once.
    fn statfs(&self) -> Result<StatFs> {
        let mut total = self.primary.statfs()?;
        let block_size = total.block_size.max(1);
        total.blocks = 0;
        total.blocks_free = 0;
        total.blocks_available = 0;
        let mut counted_devices = Vec::new();
        for lane in &self.setup.lanes {
            let device = lane.backing.attr(&lane.backing.root())?.dev;
            if counted_devices.contains(&device) {
                continue;
            }
            counted_devices.push(device);
            let statfs = lane.backing.statfs()?;
            // Lanes may have blocks of another size than the primary.
            let in_own_blocks = |count: u64| count.saturating_mul(statfs.block_size) / block_size;
            total.blocks += in_own_blocks(statfs.blocks);
            total.blocks_free += in_own_blocks(statfs.blocks_free);
            total.blocks_available += in_own_blocks(statfs.blocks_available);
        }
        Ok(total)
    }

    /// Makes everything in `scope` durable, first in the lanes (the directories with data), and then in the primary,
    /// the directory with all names.
    fn sync_scope(&self, scope: SyncScope<'_, LanesInode<B>>) -> Result<()> {
        match scope {
            SyncScope::All => {
                self.finish_removals()?;
                self.sync_lanes(|lane| lane.sync_scope(SyncScope::All))?;
                self.primary.sync_scope(SyncScope::All)
            }
            SyncScope::Changes => {
                self.finish_removals()?;
                self.sync_lanes(|lane| lane.sync_scope(SyncScope::Changes))?;
                self.primary.sync_scope(SyncScope::Changes)
            }
            SyncScope::Tree(inode) => {
                // The files of a directory may be in any lane, so all lanes are synced.
                self.sync_lanes(|lane| lane.sync_scope(SyncScope::All))?;
                match inode {
                    LanesInode::Primary(inode, _) => {
                        self.primary.sync_scope(SyncScope::Tree(inode))
                    }
                    LanesInode::Placed(_) => Ok(()),
                }
            }
            SyncScope::Dir(inode) => {
                // The lanes are synced first: after a power loss, a durable link must not lead to a file whose name in
                // the lane is lost.
                for lane in &self.setup.lanes {
                    lane.sync_names()?;
                }
                self.primary.sync_scope(SyncScope::Dir(inode.in_primary()))
            }
        }
    }
}

impl<B: Backing> Names for Lanes<B> {
    fn lookup(&self, parent: &LanesInode<B>, name: &OsStr) -> Result<(LanesInode<B>, Attr)> {
        let (inode, attr) = self.primary.lookup(parent.in_primary(), name)?;
        self.resolve(parent, name, inode, attr)
    }

    /// Creates a file and opens it. The rule chooses the file's lane, a directory on a server of its own that gets the
    /// data. A file without a lane has its data in the primary, the directory with all names.
    ///
    /// Usually the file's final name decides. `placing` has that name if the file is created under a temporary one, or
    /// another hint by which the lane is chosen.
    fn create_placed(
        &self,
        caller: &Caller,
        parent: &LanesInode<B>,
        name: &OsStr,
        mode: u32,
        placing: PlacementHint<'_, LanesInode<B>>,
    ) -> Result<Created<Self>> {
        let dir = parent.in_primary();
        let new_file = NewFile {
            caller,
            parent: dir,
            name,
            mode,
        };
        // Without a rule, new files go to no lane.
        let Some(rule) = &self.setup.rule else {
            return self.create_in_primary(parent, &new_file);
        };
        let (final_parent, final_name) = match placing {
            PlacementHint::ByName if parent.position().region.takes_placed_files() => {
                (parent, name)
            }
            PlacementHint::Named { parent, name } => (parent, name),
            PlacementHint::Turn(turn) => return self.create_by_turn(rule, turn, &new_file),
            PlacementHint::Beside(LanesInode::Placed(placed))
                if placed.lane < rule.lane_count() =>
            {
                return self.create_in_lane(placed.lane, &new_file);
            }
            PlacementHint::ByName | PlacementHint::Beside(_) => {
                return self.create_in_primary(parent, &new_file);
            }
        };
        // Only the kernel can apply a default ACL to a new file, and only in the directory in which the file is
        // created.
        if self.primary.has_default_acl(dir) {
            return self.create_in_primary(parent, &new_file);
        }
        let final_name = FinalName {
            parent: final_parent.in_primary(),
            number_sum: final_parent.position().number_sum,
            name: final_name,
        };
        self.create_by_name(rule, &final_name, &new_file)
    }

    /// Makes a directory, a symbolic link or a node in the primary, the directory with all names. A node that is a
    /// regular file is created as any other file, because its data may belong in a lane.
    fn make(
        &self,
        caller: &Caller,
        parent: &LanesInode<B>,
        name: &OsStr,
        kind: NewKind<'_>,
    ) -> Result<(LanesInode<B>, Attr)> {
        if let NewKind::Node { mode, .. } = kind
            && Kind::from_mode(mode) == Some(Kind::File)
        {
            let (inode, _, attr) = self.create(caller, parent, name, mode & !libc::S_IFMT)?;
            return Ok((inode, attr));
        }
        let (inode, attr) = self.primary.make(caller, parent.in_primary(), name, kind)?;
        if let NewKind::Dir { .. } = kind
            && let Some(rule) = &self.setup.rule
        {
            // The counts of an earlier directory with this inode number do not apply.
            rule.record_new_dir(attr.ino);
        }
        Ok((parent.child_inode(name, inode), attr))
    }

    fn link(&self, inode: &LanesInode<B>, parent: &LanesInode<B>, name: &OsStr) -> Result<Attr> {
        if let LanesInode::Placed(placed) = inode {
            if self.attr_of_link(placed)?.nlink == 0 {
                return Err(Errno::NOENT);
            }
            self.primary.link(&placed.link, parent.in_primary(), name)?;
            return self.attr_of_placed(placed);
        }
        self.primary
            .link(inode.in_primary(), parent.in_primary(), name)
    }

    fn remove(&self, parent: &LanesInode<B>, name: &OsStr, what: Remove) -> Result<()> {
        let parent = parent.in_primary();
        if what == Remove::Dir {
            return self.primary.remove(parent, name, what);
        }
        let pending_unlink = self.prepare_unlink(parent, name)?;
        self.run_unlink(pending_unlink, || self.primary.remove(parent, name, what))
    }

    /// Renames an object in the primary, the directory with all names. The data of a file stays in its lane. If the
    /// rename replaces a file and that name was its last one, the replaced file is also removed from its lane.
    fn rename(
        &self,
        parent: &LanesInode<B>,
        name: &OsStr,
        new_parent: &LanesInode<B>,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        let parent = parent.in_primary();
        let new_parent = new_parent.in_primary();
        let may_replace = !flags.intersects(RenameFlags::NOREPLACE | RenameFlags::EXCHANGE);
        // If the replaced file loses its last name, it is also removed from its lane.
        let replaced = if may_replace {
            self.prepare_unlink(new_parent, new_name)?
        } else {
            None
        };
        self.run_unlink(replaced, || {
            self.primary
                .rename(parent, name, new_parent, new_name, flags)
        })
    }

    fn moved_to(
        &self,
        inode: &LanesInode<B>,
        parent: &LanesInode<B>,
        name: &OsStr,
    ) -> LanesInode<B> {
        match inode {
            LanesInode::Primary(inode, _) => parent.child_inode(name, inode.clone()),
            LanesInode::Placed(placed) => LanesInode::Placed(Arc::clone(placed)),
        }
    }

    fn readlink(&self, inode: &LanesInode<B>) -> Result<Vec<u8>> {
        match inode {
            LanesInode::Primary(inode, _) => self.primary.readlink(inode),
            LanesInode::Placed(_) => Err(Errno::INVAL),
        }
    }

    fn open_dir(&self, inode: &LanesInode<B>) -> Result<B::Dir> {
        self.primary.open_dir(inode.in_primary())
    }

    fn read_dir(
        &self,
        dir: &B::Dir,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        // A link may be the link of a placed file, so the listing returns no kind for links. A caller that needs the
        // kind looks up the name.
        let mut hide_links = |entry: DirEntry<'_>| {
            let kind = entry.kind.filter(|kind| *kind != Kind::Symlink);
            sink(DirEntry { kind, ..entry })
        };
        self.primary.read_dir(dir, cookie, &mut hide_links)
    }
}

impl<B: Backing> Attributes for Lanes<B> {
    /// Returns the attributes of an object as programs see them. Those of a file with its data in a lane come from two
    /// places: the identity from its link in the primary, and all others from the file in the lane.
    fn stat(&self, target: TargetOf<'_, Self>, freshness: Freshness) -> Result<Attr> {
        match target {
            Target::Inode(inode) => {
                if freshness == Freshness::Current {
                    // Makes the client ask the server, so that the calls below return its attributes.
                    let (backing, object) = self.data_object(inode);
                    backing.stat(Target::Inode(object), freshness)?;
                }
                match inode {
                    LanesInode::Primary(inode, _) => self.primary.attr(inode),
                    LanesInode::Placed(placed) => self.attr_of_placed(placed),
                }
            }
            Target::File(file) => {
                if freshness == Freshness::Current {
                    let backing = self.data_backing(file);
                    backing.stat(Target::File(&file.file), freshness)?;
                }
                let file_attr = self.call_data_backing(file, CallKind::Name, |backing| {
                    backing.attr_of_file(&file.file)
                })?;
                match &file.placed {
                    None => Ok(file_attr),
                    Some(placed) => Ok(placed_attr(&self.attr_of_link(placed)?, &file_attr)),
                }
            }
        }
    }

    /// Changes an attribute where the data of the file is: in its lane, or in the primary (the directory with all
    /// names). The attribute by which Firn finds the file's link is hidden, and cannot be changed.
    fn set_attr(&self, inode: &LanesInode<B>, change: AttrChange<'_>) -> Result<()> {
        match change {
            // Programs do not see the attribute that ties a file in a lane to its link.
            AttrChange::SetXattr { name, .. } if is_hidden(inode, name) => return Err(Errno::PERM),
            AttrChange::RemoveXattr { name } if is_hidden(inode, name) => {
                return Err(Errno::NODATA);
            }
            _ => {}
        }
        let (backing, object) = self.data_object(inode);
        backing.set_attr(object, change)?;
        match (inode, change) {
            // The symbolic link gets the same owner, for tools that list the primary, the directory with all names.
            (LanesInode::Placed(placed), AttrChange::Owner { .. }) => {
                self.primary.set_attr(&placed.link, change)
            }
            _ => Ok(()),
        }
    }

    fn get_xattr(&self, inode: &LanesInode<B>, name: &OsStr) -> Result<Vec<u8>> {
        if is_hidden(inode, name) {
            return Err(Errno::NODATA);
        }
        let (backing, object) = self.data_object(inode);
        backing.get_xattr(object, name)
    }

    fn list_xattr(&self, inode: &LanesInode<B>) -> Result<Vec<u8>> {
        let (backing, object) = self.data_object(inode);
        let names = backing.list_xattr(object)?;
        let mut shown_names = Vec::new();
        for name in names.split_inclusive(|&byte| byte == 0) {
            let without_end = OsStr::from_bytes(name.strip_suffix(b"\0").unwrap_or(name));
            if !is_hidden(inode, without_end) {
                shown_names.extend_from_slice(name);
            }
        }
        Ok(shown_names)
    }
}

impl<B: Backing> Files for Lanes<B> {
    forward!(recorded: resize allocate);
    // Each file has one data backing, so all hosts use the same locks.
    forward!(data_backing: seek advise lock);

    /// Returns no descriptor for [`DescriptorUse::Keeping`] of a placed file: the file consists of two objects, and one
    /// descriptor does not lead to both.
    fn descriptor(&self, file: &LanesFile<B>, purpose: DescriptorUse) -> Option<OwnedFd> {
        if purpose == DescriptorUse::Keeping && file.placed.is_some() {
            return None;
        }
        self.data_backing(file).descriptor(&file.file, purpose)
    }

    fn adopt(&self, descriptor: OwnedFd) -> Result<AdoptedBy<Self>> {
        let adopted = self.primary.adopt(descriptor)?;
        Ok(adopted.map(
            |inode| LanesInode::Primary(inode, Position::TOP),
            |file| LanesFile { file, placed: None },
        ))
    }

    fn open(&self, inode: &LanesInode<B>, access: Access) -> Result<LanesFile<B>> {
        let (backing, object) = self.data_object(inode);
        let placed = match inode {
            LanesInode::Primary(..) => None,
            LanesInode::Placed(placed) => Some(Arc::clone(placed)),
        };
        let file = match &placed {
            None => backing.open(object, access)?,
            Some(placed) => self
                .lane(placed)
                .call(CallKind::Name, |lane| lane.open(object, access))?,
        };
        Ok(LanesFile { file, placed })
    }

    fn read_at(&self, file: &LanesFile<B>, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.call_data_backing(file, CallKind::Data, |backing| {
            backing.read_at(&file.file, buf, offset)
        })
    }

    /// Writes parts to a file, in its lane (the directory with its data) if it has one, and returns the number of bytes
    /// written. If the lane is full, pending removals of files are finished, and the write is tried once more.
    fn write_parts(&self, file: &LanesFile<B>, parts: &[DataPart<'_>]) -> Result<u64> {
        if file.placed.is_some() {
            // Record the length of the longest file before the write, which may fill the lane. A full lane gets new
            // files again only when it has space for two files of that length.
            let end = parts.iter().map(|part| part.offset + part.len()).max();
            self.longest_file_bytes
                .fetch_max(end.unwrap_or(0), Ordering::Relaxed);
        }
        let write = || {
            self.call_data_backing(file, CallKind::Data, |backing| {
                backing.write_parts(&file.file, parts)
            })
        };
        let outcome = match write() {
            // Removed files wait for a common sync, and still occupy space in the lane.
            Err(Errno::NOSPC) if self.has_removals() => {
                self.finish_removals()?;
                write()
            }
            outcome => outcome,
        };
        let written_bytes = outcome?;
        if let Some(placed) = &file.placed {
            let lane = self.lane(placed);
            lane.health.count_bytes(written_bytes);
            lane.check_space_after_write(self.min_free_bytes());
        }
        Ok(written_bytes)
    }

    /// Copies bytes between files, and returns their number. The file system copies if both files are in one lane
    /// (directory for data); otherwise the bytes are read and written here.
    fn copy_range(
        &self,
        from: &LanesFile<B>,
        from_offset: u64,
        to: &LanesFile<B>,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        // Files of one lane are copied there by its file system. `None` stands for the primary.
        let lane_of = |file: &LanesFile<B>| file.placed.as_ref().map(|placed| placed.lane);
        if lane_of(from) == lane_of(to) {
            return self.call_data_backing(from, CallKind::Data, |backing| {
                backing.copy_range(&from.file, from_offset, &to.file, to_offset, len)
            });
        }
        copy_through_memory(self, from, from_offset, to, to_offset, len)
    }

    fn sync(&self, file: &LanesFile<B>, data_only: bool) -> Result<()> {
        self.call_data_backing(file, CallKind::Sync, |backing| {
            backing.sync(&file.file, data_only)
        })
    }
}

impl<B: Backing> Sharing for Lanes<B> {
    forward!(data_backing: kernel_reads locate report_use level_max);
}

impl<B: Backing> Placement for Lanes<B> {
    fn facts(&self, inode: &LanesInode<B>) -> Facts {
        // The number after those of all lanes stands for the primary.
        let lane = match inode {
            LanesInode::Primary(..) => self.setup.lanes.len(),
            LanesInode::Placed(placed) => placed.lane,
        };
        let (backing, object) = self.data_object(inode);
        Facts {
            lane: LaneIndex::new(lane as u16),
            ..backing.facts(object)
        }
    }

    fn lane_of_turn(&self, turn: u64) -> Option<LaneIndex> {
        let rule = self.setup.rule.as_ref()?;
        Some(LaneIndex::new(rule.lane_of_turn(turn) as u16))
    }
}

impl<B: Backing> Lanes<B> {
    /// Syncs all lanes at the same time, because their servers are independent. Fails with EAGAIN if no thread can be
    /// started.
    fn sync_lanes(&self, sync: fn(&B) -> Result<()>) -> Result<()> {
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for lane in &self.setup.lanes {
                let thread =
                    Builder::new().spawn_scoped(scope, move || lane.call(CallKind::Sync, sync));
                threads.push(thread.map_err(|_| Errno::AGAIN)?);
            }
            for thread in threads {
                thread.join().expect("a sync does not panic")?;
            }
            Ok(())
        })
    }
}

/// Returns whether an extended attribute is the mark of a placed file, which users do not see.
fn is_hidden<B: Backing>(inode: &LanesInode<B>, name: &OsStr) -> bool {
    matches!(inode, LanesInode::Placed(_)) && name == XATTR
}
