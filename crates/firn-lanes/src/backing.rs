//! The trait: names go to the primary, data to where the file lies.

use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::thread::Builder;

use firn_backing::{
    Access, DataPart, DirEntry, KernelReads, LaneIndex, LocateLimits, Located, LockMode, LockRange,
    Placing, Seek, SetTime, StatFs, SyncWay, copy_through_memory,
};

use super::*;
use crate::create::{NewFile, PlaceByName};

#[deny(clippy::missing_trait_methods)]
impl<B: Backing> Backing for Lanes<B> {
    type Inode = LanesInode<B>;
    type File = LanesFile<B>;
    type Dir = B::Dir;

    fn root(&self) -> LanesInode<B> {
        LanesInode::Primary(self.primary.root(), Position::TOP)
    }

    fn lookup(&self, parent: &LanesInode<B>, name: &OsStr) -> Result<(LanesInode<B>, Attr)> {
        let (inode, attr) = self.primary.lookup(parent.in_primary(), name)?;
        self.resolve(parent, name, inode, attr)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: &LanesInode<B>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(LanesInode<B>, LanesFile<B>, Attr)> {
        let dir = parent.in_primary();
        let position = parent.position();
        let new = NewFile {
            caller,
            parent: dir,
            name,
            mode,
        };
        match &self.setup.rule {
            // What a default ACL gives to a new file, only the kernel can give, where the name is.
            Some(rule)
                if position.region.takes_placed_files() && !self.primary.has_default_acl(dir) =>
            {
                let place = PlaceByName {
                    parent: dir,
                    numbers: position.numbers,
                    name,
                };
                self.create_by_name(rule, &place, &new)
            }
            _ => self.create_in_primary(parent, &new),
        }
    }

    fn create_placed(
        &self,
        caller: &Caller,
        parent: &LanesInode<B>,
        name: &OsStr,
        mode: u32,
        placing: Placing<'_, LanesInode<B>>,
    ) -> Result<(LanesInode<B>, LanesFile<B>, Attr)> {
        let dir = parent.in_primary();
        let new = NewFile {
            caller,
            parent: dir,
            name,
            mode,
        };
        let Some(rule) = &self.setup.rule else {
            return self.create_in_primary(parent, &new);
        };
        match placing {
            Placing::Turn(turn) => self.create_by_turn(rule, turn, &new),
            Placing::Named { .. } if self.primary.has_default_acl(dir) => {
                self.create_in_primary(parent, &new)
            }
            Placing::Named { parent, name } => {
                let place = PlaceByName {
                    parent: parent.in_primary(),
                    numbers: parent.position().numbers,
                    name,
                };
                self.create_by_name(rule, &place, &new)
            }
            Placing::Beside(LanesInode::Placed(placed)) if placed.lane < rule.lane_count() => {
                self.create_in_lane(placed.lane, &new)
            }
            Placing::Beside(_) => self.create_in_primary(parent, &new),
        }
    }

    fn mkdir(
        &self,
        caller: &Caller,
        parent: &LanesInode<B>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(LanesInode<B>, Attr)> {
        let (inode, attr) = self
            .primary
            .mkdir(caller, parent.in_primary(), name, mode)?;
        if let Some(rule) = &self.setup.rule {
            rule.note_new_dir(attr.ino);
        }
        Ok((parent.child(name, inode), attr))
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: &LanesInode<B>,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(LanesInode<B>, Attr)> {
        if Kind::from_mode(mode) == Some(Kind::File) {
            let (inode, _, attr) = self.create(caller, parent, name, mode & !libc::S_IFMT)?;
            return Ok((inode, attr));
        }
        let (inode, attr) = self
            .primary
            .mknod(caller, parent.in_primary(), name, mode, rdev)?;
        Ok((parent.child(name, inode), attr))
    }

    fn symlink(
        &self,
        caller: &Caller,
        parent: &LanesInode<B>,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(LanesInode<B>, Attr)> {
        let (inode, attr) = self
            .primary
            .symlink(caller, parent.in_primary(), name, target)?;
        Ok((parent.child(name, inode), attr))
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

    fn unlink(&self, parent: &LanesInode<B>, name: &OsStr) -> Result<()> {
        let parent = parent.in_primary();
        let doomed = self.doom(parent, name)?;
        self.end_names(doomed, parent, || self.primary.unlink(parent, name))
    }

    fn rmdir(&self, parent: &LanesInode<B>, name: &OsStr) -> Result<()> {
        self.primary.rmdir(parent.in_primary(), name)
    }

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
        let replaced = match may_replace {
            true => self.doom(new_parent, new_name)?,
            false => None,
        };
        self.end_names(replaced, new_parent, || {
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
            LanesInode::Primary(inode, _) => parent.child(name, inode.clone()),
            LanesInode::Placed(placed) => LanesInode::Placed(Arc::clone(placed)),
        }
    }

    fn readlink(&self, inode: &LanesInode<B>) -> Result<Vec<u8>> {
        match inode {
            LanesInode::Primary(inode, _) => self.primary.readlink(inode),
            LanesInode::Placed(_) => Err(Errno::INVAL),
        }
    }

    fn attr(&self, inode: &LanesInode<B>) -> Result<Attr> {
        match inode {
            LanesInode::Primary(inode, _) => self.primary.attr(inode),
            LanesInode::Placed(placed) => self.attr_of_placed(placed),
        }
    }

    fn attr_of_file(&self, file: &LanesFile<B>) -> Result<Attr> {
        let attr = self.call_home(file, Call::Name, |home| home.attr_of_file(&file.file))?;
        match &file.placed {
            None => Ok(attr),
            Some(placed) => Ok(placed_attr(&self.attr_of_link(placed)?, &attr)),
        }
    }

    fn attr_now(&self, inode: &LanesInode<B>) -> Result<Attr> {
        let (home, object) = self.home(inode);
        home.attr_now(object)?;
        self.attr(inode)
    }

    fn attr_of_file_now(&self, file: &LanesFile<B>) -> Result<Attr> {
        self.home_of_file(file).attr_of_file_now(&file.file)?;
        self.attr_of_file(file)
    }

    fn set_mode(&self, inode: &LanesInode<B>, mode: u32) -> Result<()> {
        let (home, inode) = self.home(inode);
        home.set_mode(inode, mode)
    }

    fn set_owner(&self, inode: &LanesInode<B>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        let (home, object) = self.home(inode);
        home.set_owner(object, uid, gid)?;
        match inode {
            LanesInode::Primary(..) => Ok(()),
            // For who looks at the primary.
            LanesInode::Placed(placed) => self.primary.set_owner(&placed.link, uid, gid),
        }
    }

    fn set_times(&self, inode: &LanesInode<B>, atime: SetTime, mtime: SetTime) -> Result<()> {
        let (home, inode) = self.home(inode);
        home.set_times(inode, atime, mtime)
    }

    fn get_xattr(&self, inode: &LanesInode<B>, name: &OsStr) -> Result<Vec<u8>> {
        if is_hidden(inode, name) {
            return Err(Errno::NODATA);
        }
        let (home, inode) = self.home(inode);
        home.get_xattr(inode, name)
    }

    fn set_xattr(
        &self,
        inode: &LanesInode<B>,
        name: &OsStr,
        value: &[u8],
        flags: i32,
    ) -> Result<()> {
        if is_hidden(inode, name) {
            return Err(Errno::PERM);
        }
        let (home, inode) = self.home(inode);
        home.set_xattr(inode, name, value, flags)
    }

    fn list_xattr(&self, inode: &LanesInode<B>) -> Result<Vec<u8>> {
        let (home, object) = self.home(inode);
        let names = home.list_xattr(object)?;
        if !matches!(inode, LanesInode::Placed(_)) {
            return Ok(names);
        }
        let shown = names
            .split_inclusive(|&byte| byte == 0)
            .filter(|name| name.strip_suffix(b"\0") != Some(XATTR.as_bytes()));
        Ok(shown.collect::<Vec<_>>().concat())
    }

    fn remove_xattr(&self, inode: &LanesInode<B>, name: &OsStr) -> Result<()> {
        if is_hidden(inode, name) {
            return Err(Errno::NODATA);
        }
        let (home, inode) = self.home(inode);
        home.remove_xattr(inode, name)
    }

    fn has_default_acl(&self, inode: &LanesInode<B>) -> bool {
        match inode {
            LanesInode::Primary(inode, _) => self.primary.has_default_acl(inode),
            LanesInode::Placed(_) => false,
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
        // A link may be a placed file; who wants to know looks it up.
        let mut shown = |entry: DirEntry<'_>| {
            let kind = entry.kind.filter(|kind| *kind != Kind::Symlink);
            sink(DirEntry { kind, ..entry })
        };
        self.primary.read_dir(dir, cookie, &mut shown)
    }

    fn sync_dir(&self, inode: &LanesInode<B>) -> Result<()> {
        // A durable link must not lead to a file whose name is lost.
        for lane in &self.setup.lanes {
            lane.sync_names()?;
        }
        self.primary.sync_dir(inode.in_primary())
    }

    fn open(&self, inode: &LanesInode<B>, access: Access) -> Result<LanesFile<B>> {
        let (home, object) = self.home(inode);
        let placed = match inode {
            LanesInode::Primary(..) => None,
            LanesInode::Placed(placed) => Some(Arc::clone(placed)),
        };
        let file = match &placed {
            None => home.open(object, access)?,
            Some(placed) => self
                .lane(placed)
                .call(Call::Name, |lane| lane.open(object, access))?,
        };
        Ok(LanesFile { file, placed })
    }

    fn read_at(&self, file: &LanesFile<B>, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.call_home(file, Call::Data, |home| {
            home.read_at(&file.file, buf, offset)
        })
    }

    fn write_at(&self, file: &LanesFile<B>, data: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        let part = DataPart { offset, data };
        Ok(self.write_parts(file, &[part])? as usize)
    }

    fn write_parts(&self, file: &LanesFile<B>, parts: &[DataPart<'_>]) -> Result<u64> {
        if file.placed.is_some() {
            // Counted before it is refused: that is when it has to be known.
            let end = parts.iter().map(|part| part.offset + part.len()).max();
            self.longest.fetch_max(end.unwrap_or(0), Ordering::Relaxed);
        }
        let write = || self.call_home(file, Call::Data, |home| home.write_parts(&file.file, parts));
        let written = match write() {
            // Files that are gone above may still take room.
            Err(Errno::NOSPC) if self.has_removals() => {
                self.finish_removals()?;
                write()
            }
            done => done,
        };
        let count = written?;
        if let Some(placed) = &file.placed {
            let lane = self.lane(placed);
            lane.progress.count_bytes(count);
            lane.note_written(self.usual_room());
        }
        Ok(count)
    }

    fn gathers(&self, inode: &LanesInode<B>) -> bool {
        let (home, object) = self.home(inode);
        home.gathers(object)
    }

    fn set_len(&self, file: &LanesFile<B>, len: u64) -> Result<()> {
        self.call_home(file, Call::Data, |home| home.set_len(&file.file, len))
    }

    fn grow(&self, file: &LanesFile<B>, len: u64) -> Result<()> {
        self.call_home(file, Call::Data, |home| home.grow(&file.file, len))
    }

    fn finish_set_len(&self, file: &LanesFile<B>, len: u64) -> Result<bool> {
        self.call_home(file, Call::Data, |home| {
            home.finish_set_len(&file.file, len)
        })
    }

    fn rewrite_nothing(&self, file: &LanesFile<B>) -> Result<()> {
        self.call_home(file, Call::Data, |home| home.rewrite_nothing(&file.file))
    }

    fn allocate(&self, file: &LanesFile<B>, mode: i32, offset: u64, len: u64) -> Result<()> {
        self.call_home(file, Call::Data, |home| {
            home.allocate(&file.file, mode, offset, len)
        })
    }

    fn seek(&self, file: &LanesFile<B>, offset: u64, what: Seek) -> Result<u64> {
        self.home_of_file(file).seek(&file.file, offset, what)
    }

    fn copy_range(
        &self,
        from: &LanesFile<B>,
        from_offset: u64,
        to: &LanesFile<B>,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        let lane = |file: &LanesFile<B>| file.placed.as_ref().map(|placed| placed.lane);
        if lane(from) == lane(to) {
            return self.call_home(from, Call::Data, |home| {
                home.copy_range(&from.file, from_offset, &to.file, to_offset, len)
            });
        }
        copy_through_memory(self, from, from_offset, to, to_offset, len)
    }

    fn sync(&self, file: &LanesFile<B>, data_only: bool) -> Result<()> {
        self.call_home(file, Call::Sync, |home| home.sync(&file.file, data_only))
    }

    fn begin_sync(&self, file: &LanesFile<B>, offset: u64, len: u64) {
        self.home_of_file(file).begin_sync(&file.file, offset, len);
    }

    fn forget_pages(&self, file: &LanesFile<B>, offset: u64, len: u64) {
        self.home_of_file(file)
            .forget_pages(&file.file, offset, len);
    }

    /// Each file has one home, so its lock is the same for all.
    fn try_lock(&self, file: &LanesFile<B>, mode: LockMode) -> Result<bool> {
        self.home_of_file(file).try_lock(&file.file, mode)
    }

    fn lock_range(
        &self,
        file: &LanesFile<B>,
        range: LockRange,
        mode: Option<LockMode>,
    ) -> Result<bool> {
        self.home_of_file(file).lock_range(&file.file, range, mode)
    }

    fn is_range_locked(
        &self,
        file: &LanesFile<B>,
        range: LockRange,
        mode: LockMode,
    ) -> Result<bool> {
        let home = self.home_of_file(file);
        home.is_range_locked(&file.file, range, mode)
    }

    fn fd<'a>(&self, file: &'a LanesFile<B>) -> Option<BorrowedFd<'a>> {
        self.home_of_file(file).fd(&file.file)
    }

    fn reading_fd(&self, file: &LanesFile<B>) -> Option<OwnedFd> {
        self.home_of_file(file).reading_fd(&file.file)
    }

    fn locate(
        &self,
        file: &LanesFile<B>,
        range: Range<u64>,
        limits: LocateLimits,
    ) -> Result<Option<Located>> {
        self.home_of_file(file).locate(&file.file, range, limits)
    }

    fn kernel_reads(&self, file: &LanesFile<B>) -> KernelReads {
        self.home_of_file(file).kernel_reads(&file.file)
    }

    fn note_opened(&self, file: &LanesFile<B>, writes: bool) -> Result<()> {
        self.home_of_file(file).note_opened(&file.file, writes)
    }

    fn changes_by_others(&self, inode: &LanesInode<B>) -> u64 {
        let (home, inode) = self.home(inode);
        home.changes_by_others(inode)
    }

    fn finishes_files(&self) -> bool {
        self.primary.finishes_files()
    }

    fn note_written(&self, file: &LanesFile<B>) {
        self.home_of_file(file).note_written(&file.file);
    }

    fn finish_file(&self, file: &LanesFile<B>) -> Result<()> {
        self.home_of_file(file).finish_file(&file.file)
    }

    fn is_logged(&self, inode: &LanesInode<B>) -> bool {
        let (home, inode) = self.home(inode);
        home.is_logged(inode)
    }

    /// The primary, whose own files are not placed, is one more, the last.
    fn lane_count(&self) -> u16 {
        self.setup.lanes.len() as u16 + 1
    }

    fn lane_of(&self, inode: &LanesInode<B>) -> LaneIndex {
        let lane = match inode {
            LanesInode::Primary(..) => self.setup.lanes.len(),
            LanesInode::Placed(placed) => placed.lane,
        };
        LaneIndex::new(lane as u16)
    }

    fn lane_of_turn(&self, turn: u64) -> Option<LaneIndex> {
        let rule = self.setup.rule.as_ref()?;
        Some(LaneIndex::new(rule.lane_of_turn(turn) as u16))
    }

    /// Room is the sum of the lanes', inodes are the primary's. Lanes of one file system count once.
    fn statfs(&self) -> Result<StatFs> {
        let mut sum = self.primary.statfs()?;
        let mut devices = Vec::new();
        let unit = sum.block_size.max(1);
        (sum.blocks, sum.blocks_free, sum.blocks_available) = (0, 0, 0);
        for lane in &self.setup.lanes {
            let device = lane.backing.attr(&lane.backing.root())?.dev;
            if devices.contains(&device) {
                continue;
            }
            devices.push(device);
            let one = lane.backing.statfs()?;
            let blocks = |count: u64| count.saturating_mul(one.block_size) / unit;
            sum.blocks += blocks(one.blocks);
            sum.blocks_free += blocks(one.blocks_free);
            sum.blocks_available += blocks(one.blocks_available);
        }
        Ok(sum)
    }

    fn sync_all(&self) -> Result<()> {
        self.finish_removals()?;
        self.sync_lanes(B::sync_all)?;
        self.primary.sync_all()
    }

    fn sync_changes(&self) -> Result<()> {
        self.finish_removals()?;
        self.sync_lanes(B::sync_changes)?;
        self.primary.sync_changes()
    }

    fn sync_tree(&self, inode: &LanesInode<B>) -> Result<()> {
        // The files of a directory are anywhere in the lanes.
        self.sync_lanes(B::sync_all)?;
        match inode {
            LanesInode::Primary(inode, _) => self.primary.sync_tree(inode),
            LanesInode::Placed(_) => Ok(()),
        }
    }

    fn sync_way(&self) -> SyncWay {
        let mut all = self.setup.lanes.iter().map(|lane| lane.backing.sync_way());
        match all.find(|way| *way == SyncWay::EachFile) {
            Some(way) => way,
            None => self.primary.sync_way(),
        }
    }
}

impl<B: Backing> Lanes<B> {
    /// Syncs all lanes at the same time: each is a server of its own, and one after the other would add their times up.
    /// EAGAIN where the system has no threads left.
    fn sync_lanes(&self, sync: fn(&B) -> Result<()>) -> Result<()> {
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for lane in &self.setup.lanes {
                let thread =
                    Builder::new().spawn_scoped(scope, move || lane.call(Call::Sync, sync));
                threads.push(thread.map_err(|_| Errno::AGAIN)?);
            }
            let mut done = threads.into_iter().map(|thread| thread.join());
            done.try_for_each(|done| done.expect("a sync does not panic"))
        })
    }
}

/// Whether an extended attribute is Firn's own.
fn is_hidden<B: Backing>(inode: &LanesInode<B>, name: &OsStr) -> bool {
    matches!(inode, LanesInode::Placed(_)) && name == XATTR
}
