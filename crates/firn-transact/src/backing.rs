//! The file system calls of a mount with transactions, such as lookup, create, read and rename.
//!
//! A *backing* is a file system that a mount shows to programs. [`TransactionalBacking`] is a layer over another
//! backing that adds transactions. Here each call goes to the part of the layer that implements it (names, data,
//! attributes). Calls that transactions do not change go to the backing below.

use std::ffi::OsStr;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use firn_backing::{
    Access, Adopted, AdoptedBy, Attr, AttrChange, Attributes, Backing, Caller, Created, DataPart,
    DescriptorUse, DirEntry, DurabilityLevel, Errno, Facts, FileUse, Files, Freshness, KernelReads,
    LocateLimits, Located, LockRequest, Names, NewKind, PageAdvice, Placement, PlacementHint,
    Remove, RenameFlags, Resize, Result, Seek, SetTime, Sharing, SyncScope, Target, TargetOf,
    Volume, forward, resize_by_set_len,
};

use crate::data::TrackedFile;
use crate::listing::TrackedDir;
use crate::namespace::NameAt;
use crate::object::{Object, ObjectKey};
use crate::transactional::TransactionalBacking;

/// How [`forward`] passes a call to the backing below. For example, `forward!(base: features statfs)` defines both
/// methods as calls of `self.lower.base`.
///
/// An object stands for its inode there: the staged copy, which is in the directory of its transaction, or else the
/// object's own inode.
macro_rules! base {
    ($self:ident, |$base:ident| $call:expr) => {{
        let $base = &$self.lower.base;
        $call
    }};
    ($self:ident, inode $object:ident, |$base:ident| $call:expr) => {{
        let $base = &$self.lower.base;
        let $object = &$object.inode($base)?;
        $call
    }};
}

impl<B: Backing> Volume for TransactionalBacking<B> {
    type Inode = Arc<Object<B>>;
    type File = TrackedFile<B>;
    type Dir = TrackedDir<B>;

    fn root(&self) -> Arc<Object<B>> {
        Arc::clone(self.tree.top())
    }

    forward!(base: features statfs);

    fn sync_scope(&self, scope: SyncScope<'_, Arc<Object<B>>>) -> Result<()> {
        match scope {
            SyncScope::All => self.lower.base.sync_scope(SyncScope::All),
            SyncScope::Changes => self.lower.base.sync_scope(SyncScope::Changes),
            SyncScope::Tree(object) => {
                // Staged objects are outside of the tree. This process made them, so they are among its changes.
                self.lower.base.sync_scope(SyncScope::Changes)?;
                match object.base() {
                    Some(inode) => self.lower.base.sync_scope(SyncScope::Tree(&inode)),
                    None => Ok(()),
                }
            }
            SyncScope::Dir(object) => self.dir_listings.sync_tracked_dir(object),
        }
    }
}

impl<B: Backing> Names for TransactionalBacking<B> {
    forward!(base: readlink);

    fn lookup(&self, parent: &Arc<Object<B>>, name: &OsStr) -> Result<(Arc<Object<B>>, Attr)> {
        self.namespace.look_up(parent, name)
    }

    /// Creates a file and opens it. The lane (I/O server) of the file follows from its name: the hint of the caller is
    /// ignored, because no layer above this one chooses a lane.
    fn create_placed(
        &self,
        caller: &Caller,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        mode: u32,
        _placing: PlacementHint<'_, Arc<Object<B>>>,
    ) -> Result<Created<Self>> {
        let (object, attr) = self.namespace.make_object(parent, name, |new| {
            let (inode, _, attr) =
                self.lower
                    .base
                    .create_placed(caller, new.dir, new.name, mode, new.placing)?;
            Ok((inode, attr))
        })?;
        let file = TrackedFile::new(&object, Access::ReadWrite);
        Ok((object, file, attr))
    }

    fn make(
        &self,
        caller: &Caller,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        kind: NewKind<'_>,
    ) -> Result<(Arc<Object<B>>, Attr)> {
        self.namespace.make_object(parent, name, |new| {
            self.lower.base.make(caller, new.dir, new.name, kind)
        })
    }

    fn link(&self, object: &Arc<Object<B>>, parent: &Arc<Object<B>>, name: &OsStr) -> Result<Attr> {
        self.namespace.add_link(object, parent, name)
    }

    fn remove(&self, parent: &Arc<Object<B>>, name: &OsStr, what: Remove) -> Result<()> {
        self.namespace.remove_name(parent, name, what)
    }

    fn rename(
        &self,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        new_parent: &Arc<Object<B>>,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        let old = NameAt { dir: parent, name };
        let new = NameAt {
            dir: new_parent,
            name: new_name,
        };
        self.namespace.rename_name(old, new, flags)
    }

    fn moved_to(
        &self,
        object: &Arc<Object<B>>,
        _parent: &Arc<Object<B>>,
        _name: &OsStr,
    ) -> Arc<Object<B>> {
        Arc::clone(object)
    }

    fn open_dir(&self, object: &Arc<Object<B>>) -> Result<TrackedDir<B>> {
        self.dir_listings.open_tracked_dir(object)
    }

    fn read_dir(
        &self,
        dir: &TrackedDir<B>,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        self.dir_listings.read_tracked_dir(dir, cookie, sink)
    }
}

impl<B: Backing> Attributes for TransactionalBacking<B> {
    forward!(base: get_xattr list_xattr);

    fn stat(&self, target: TargetOf<'_, Self>, freshness: Freshness) -> Result<Attr> {
        let object = match target {
            Target::Inode(object) => object,
            Target::File(file) => &file.object,
        };
        if freshness == Freshness::Current
            && let Some(inode) = self.file_data.unchanged_inode(object)
        {
            self.lower.base.stat(Target::Inode(&inode), freshness)?;
        }
        self.objects.read_attr(object)
    }

    fn set_attr(&self, object: &Arc<Object<B>>, change: AttrChange<'_>) -> Result<()> {
        match change {
            AttrChange::Times {
                atime: SetTime::Keep,
                mtime: SetTime::Keep,
            } => Ok(()),
            AttrChange::Times { atime, mtime } => self.objects.set_times_of(object, atime, mtime),
            AttrChange::Mode(_)
            | AttrChange::Owner { .. }
            | AttrChange::SetXattr { .. }
            | AttrChange::RemoveXattr { .. } => self
                .objects
                .change_attributes(object, |inode| self.lower.base.set_attr(inode, change)),
        }
    }
}

impl<B: Backing> Files for TransactionalBacking<B> {
    fn open(&self, object: &Arc<Object<B>>, access: Access) -> Result<TrackedFile<B>> {
        self.file_data.open_tracked(object, access)
    }

    fn read_at(&self, file: &TrackedFile<B>, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.file_data.read_tracked(file, buf, offset)
    }

    fn write_parts(&self, file: &TrackedFile<B>, parts: &[DataPart<'_>]) -> Result<u64> {
        self.file_data.write_tracked(file, parts)
    }

    /// Changes the length of a file as `resize` says, in the backing or in the transaction that has the file. Returns
    /// false, without a change, only for a `Finish` of a change that was never made; see [`Files::resize`].
    fn resize(&self, file: &TrackedFile<B>, resize: Resize) -> Result<bool> {
        if let Resize::To(len) = resize {
            return self.file_data.set_len_tracked(file, len).map(|()| true);
        }
        // The bytes from this offset on may change, so their old state may have to be saved.
        let lowest_offset = match resize {
            Resize::To(len) | Resize::AtLeast(len) | Resize::Finish(len) => len,
            Resize::Unchanged => self.objects.read_attr(&file.object)?.size,
        };
        let resized = self
            .file_data
            .change_lower_file(file, lowest_offset, |lower_file| {
                self.lower.base.resize(lower_file, resize)
            })?;
        if let Some(is_done) = resized {
            return Ok(is_done);
        }
        // A transaction keeps changes of the file back until the commit (buffer mode), so its staged copy is resized.
        // The present length is the one that programs see, which the file in the backing need not have.
        let present_len = || Ok(self.objects.read_attr(&file.object)?.size);
        let set_len = |len| self.file_data.set_len_tracked(file, len);
        resize_by_set_len(resize, present_len, set_len)
    }

    fn allocate(&self, file: &TrackedFile<B>, mode: i32, offset: u64, len: u64) -> Result<()> {
        self.file_data.allocate_tracked(file, mode, offset, len)
    }

    fn seek(&self, file: &TrackedFile<B>, offset: u64, what: Seek) -> Result<u64> {
        self.file_data.seek_tracked(file, offset, what)
    }

    fn copy_range(
        &self,
        from: &TrackedFile<B>,
        from_offset: u64,
        to: &TrackedFile<B>,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        self.file_data
            .copy_tracked((from, from_offset), (to, to_offset), len)
    }

    fn sync(&self, file: &TrackedFile<B>, data_only: bool) -> Result<()> {
        self.file_data.sync_tracked(file, data_only)
    }

    fn advise(&self, file: &TrackedFile<B>, range: Range<u64>, advice: PageAdvice) {
        let _ = self.file_data.query_lower_file(file, |lower_file| {
            self.lower.base.advise(lower_file, range, advice)
        });
    }

    /// Locks between hosts are taken in the backing below and not here.
    fn lock(&self, _file: &TrackedFile<B>, _request: LockRequest) -> Result<bool> {
        Err(Errno::OPNOTSUPP)
    }

    /// Returns no descriptor for reads, because the kernel or another process would read past the changes of a later
    /// transaction.
    fn descriptor(&self, file: &TrackedFile<B>, purpose: DescriptorUse) -> Option<OwnedFd> {
        match purpose {
            DescriptorUse::Passthrough | DescriptorUse::Reading => None,
            DescriptorUse::Keeping => self.file_data.descriptor_to_keep(file),
        }
    }

    /// Takes over an open file without a name from the firnd (server of the mount) before this one.
    /// * A file that a transaction in shadow mode removed, and that an abort would restore, belongs to the transaction.
    /// * Any other file belongs to no transaction.
    fn adopt(&self, descriptor: OwnedFd) -> Result<AdoptedBy<Self>> {
        let adopted = self.lower.base.adopt(descriptor)?;
        let base = &self.lower.base;
        let inode = adopted.inode.clone();
        let key = ObjectKey::from_attr(&adopted.attr);
        // A removed file that an abort would restore has a name in `kept/`, a directory of the transaction. In memory
        // its parent is the transaction's uppermost directory, so that the file belongs to the transaction.
        let object = match self.namespace.location_in_kept(key) {
            Some((root, name)) => self.tree.intern(base, inode, &adopted.attr, &root, &name),
            None => self.tree.insert_nameless(base, inode, &adopted.attr),
        };
        let attr = self
            .link_counts
            .attr_without_hidden_links(&object, &adopted.inode)?;
        let file = TrackedFile::new(&object, adopted.access);
        Ok(Adopted {
            inode: object,
            file,
            access: adopted.access,
            attr,
        })
    }
}

impl<B: Backing> Sharing for TransactionalBacking<B> {
    fn kernel_reads(&self, file: &TrackedFile<B>) -> KernelReads {
        self.file_data
            .query_shared_lower_file(file, |lower_file| self.lower.base.kernel_reads(lower_file))
            .unwrap_or(KernelReads::Cached)
    }

    fn locate(
        &self,
        _file: &TrackedFile<B>,
        _range: Range<u64>,
        _limits: LocateLimits,
    ) -> Result<Option<Located>> {
        Ok(None)
    }

    fn report_use(&self, file: &TrackedFile<B>, what: FileUse) -> Result<()> {
        self.file_data
            .query_shared_lower_file(file, |lower_file| {
                self.lower.base.report_use(lower_file, what)
            })
            .unwrap_or(Ok(()))
    }

    /// Data that is synced in a transaction becomes durable only with the commit.
    fn level_max(&self, object: &Arc<Object<B>>) -> DurabilityLevel {
        let level_of_backing = match self.file_data.unchanged_inode(object) {
            Some(inode) => self.lower.base.level_max(&inode),
            None => DurabilityLevel::Durable,
        };
        match self.scopes.scope_of(object) {
            Some(_) => level_of_backing.min(DurabilityLevel::Drained),
            None => level_of_backing,
        }
    }
}

impl<B: Backing> Placement for TransactionalBacking<B> {
    fn facts(&self, object: &Arc<Object<B>>) -> Facts {
        let facts_of_backing = self
            .file_data
            .unchanged_inode(object)
            .map(|inode| self.lower.base.facts(&inode));
        Facts {
            lane: object.lane,
            gathers: facts_of_backing.is_some_and(|facts| facts.gathers),
            changes_by_others: facts_of_backing.map_or(0, |facts| facts.changes_by_others),
        }
    }

    forward!(base: lane_of_turn);
}
