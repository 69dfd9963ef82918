//! [`PlainBacking`]: the layer of a mount without transactions. It passes every call to the *backing* below, the file
//! system that the mount shows.
//!
//! Promises
//! * Programs do not see the reserved directory `.firn` at the top, and cannot make it.
//! * A call takes no lock and uses no table of transactions.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;

use firn_backing::{
    AdoptedBy, Attr, Attributes, Backing, Caller, Created, DirEntry, Errno, Files, Freshness, Kind,
    Names, NewKind, Placement, PlacementHint, Remove, RenameFlags, Result, Sharing, Target,
    TargetOf, Volume, forward,
};

use crate::staging;

/// A backing without transactions.
pub struct PlainBacking<B: Backing> {
    base: B,
    root: PlainInode<B>,
    /// Number of hidden directories in the top, by which its link count is reduced: 1 or 0.
    hidden_links: u32,
}

/// An object of a [`PlainBacking`].
pub struct PlainInode<B: Backing> {
    inode: B::Inode,
    /// Whether the object is the top of a backing whose `.firn` is hidden.
    hides_firn_dir: bool,
}

impl<B: Backing> Clone for PlainInode<B> {
    fn clone(&self) -> Self {
        Self {
            inode: self.inode.clone(),
            hides_firn_dir: self.hides_firn_dir,
        }
    }
}

impl<B: Backing> PlainInode<B> {
    /// Returns an object other than the top.
    fn below_top(inode: B::Inode) -> Self {
        Self {
            inode,
            hides_firn_dir: false,
        }
    }

    /// Returns whether a name in this directory is hidden.
    fn hides(&self, name: &OsStr) -> bool {
        self.hides_firn_dir && name == staging::FIRN_DIR
    }

    /// Fails with EPERM if a name that is to be made in this directory is reserved.
    fn check_new_name(&self, name: &OsStr) -> Result<()> {
        if self.hides(name) {
            Err(Errno::PERM)
        } else {
            Ok(())
        }
    }

    /// Fails with ENOENT if a name in this directory is hidden.
    fn check_old_name(&self, name: &OsStr) -> Result<()> {
        if self.hides(name) {
            Err(Errno::NOENT)
        } else {
            Ok(())
        }
    }
}

/// An open directory of a [`PlainBacking`].
pub struct PlainDir<B: Backing> {
    dir: B::Dir,
    hides_firn_dir: bool,
}

impl<B: Backing> PlainBacking<B> {
    /// Makes a layer over `base` that hides `.firn`.
    pub fn new(base: B) -> Self {
        let firn_dir = base.lookup(&base.root(), OsStr::new(staging::FIRN_DIR));
        let has_firn_dir = firn_dir.is_ok_and(|(_, attr)| attr.kind == Kind::Dir);
        Self {
            root: PlainInode {
                inode: base.root(),
                hides_firn_dir: true,
            },
            base,
            hidden_links: u32::from(has_firn_dir),
        }
    }

    /// Makes the layer for a stub tree, which shows `.firn` because it has files of its own there.
    pub fn with_firn_dir_shown(base: B) -> Self {
        Self {
            root: PlainInode::below_top(base.root()),
            base,
            hidden_links: 0,
        }
    }

    /// Returns the backing below.
    pub fn base(&self) -> &B {
        &self.base
    }

    /// Returns the attributes of an object, without the links of hidden directories.
    fn without_hidden_links(&self, inode: &PlainInode<B>, attr: Attr) -> Attr {
        // Some file systems do not count subdirectories and say 1.
        let counts_subdirectories = attr.nlink > 1;
        if !inode.hides_firn_dir || !counts_subdirectories {
            return attr;
        }
        Attr {
            nlink: attr.nlink - self.hidden_links,
            ..attr
        }
    }
}

/// Returns an object that was found or made below the top, with its attributes.
fn below_top<B: Backing>((inode, attr): (B::Inode, Attr)) -> (PlainInode<B>, Attr) {
    (PlainInode::below_top(inode), attr)
}

/// Calls the backing below with its own object in place of this layer's; for [`forward!`].
macro_rules! base {
    ($self:ident, |$base:ident| $call:expr) => {{
        let $base = &$self.base;
        $call
    }};
    ($self:ident, inode $inode:ident, |$base:ident| $call:expr) => {{
        let ($base, $inode) = (&$self.base, &$inode.inode);
        $call
    }};
    ($self:ident, $kind:ident $file:ident $($other:ident)?, |$base:ident| $call:expr) => {{
        let $base = &$self.base;
        $call
    }};
}

impl<B: Backing> Volume for PlainBacking<B> {
    type Inode = PlainInode<B>;
    type File = B::File;
    type Dir = PlainDir<B>;

    fn root(&self) -> PlainInode<B> {
        self.root.clone()
    }

    forward!(base: features statfs sync_scope);
}

impl<B: Backing> Names for PlainBacking<B> {
    forward!(base: readlink);

    fn lookup(&self, parent: &PlainInode<B>, name: &OsStr) -> Result<(PlainInode<B>, Attr)> {
        parent.check_old_name(name)?;
        self.base.lookup(&parent.inode, name).map(below_top)
    }

    fn create_placed(
        &self,
        caller: &Caller,
        parent: &PlainInode<B>,
        name: &OsStr,
        mode: u32,
        placing: PlacementHint<'_, PlainInode<B>>,
    ) -> Result<Created<Self>> {
        parent.check_new_name(name)?;
        let placing = placing.map(|inode| &inode.inode);
        let (inode, file, attr) =
            self.base
                .create_placed(caller, &parent.inode, name, mode, placing)?;
        Ok((PlainInode::below_top(inode), file, attr))
    }

    fn make(
        &self,
        caller: &Caller,
        parent: &PlainInode<B>,
        name: &OsStr,
        kind: NewKind<'_>,
    ) -> Result<(PlainInode<B>, Attr)> {
        parent.check_new_name(name)?;
        self.base
            .make(caller, &parent.inode, name, kind)
            .map(below_top)
    }

    fn link(&self, inode: &PlainInode<B>, parent: &PlainInode<B>, name: &OsStr) -> Result<Attr> {
        parent.check_new_name(name)?;
        self.base.link(&inode.inode, &parent.inode, name)
    }

    fn remove(&self, parent: &PlainInode<B>, name: &OsStr, what: Remove) -> Result<()> {
        parent.check_old_name(name)?;
        self.base.remove(&parent.inode, name, what)
    }

    fn rename(
        &self,
        parent: &PlainInode<B>,
        name: &OsStr,
        new_parent: &PlainInode<B>,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        parent.check_old_name(name)?;
        new_parent.check_new_name(new_name)?;
        self.base
            .rename(&parent.inode, name, &new_parent.inode, new_name, flags)
    }

    fn moved_to(
        &self,
        inode: &PlainInode<B>,
        parent: &PlainInode<B>,
        name: &OsStr,
    ) -> PlainInode<B> {
        PlainInode {
            inode: self.base.moved_to(&inode.inode, &parent.inode, name),
            hides_firn_dir: inode.hides_firn_dir,
        }
    }

    fn open_dir(&self, inode: &PlainInode<B>) -> Result<PlainDir<B>> {
        let dir = self.base.open_dir(&inode.inode)?;
        let hides_firn_dir = inode.hides_firn_dir;
        Ok(PlainDir {
            dir,
            hides_firn_dir,
        })
    }

    fn read_dir(
        &self,
        dir: &PlainDir<B>,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        if !dir.hides_firn_dir {
            return self.base.read_dir(&dir.dir, cookie, sink);
        }
        let mut shown = |entry: DirEntry<'_>| entry.name == staging::FIRN_DIR || sink(entry);
        self.base.read_dir(&dir.dir, cookie, &mut shown)
    }
}

impl<B: Backing> Attributes for PlainBacking<B> {
    forward!(base: set_attr get_xattr list_xattr);

    fn stat(&self, target: TargetOf<'_, Self>, freshness: Freshness) -> Result<Attr> {
        match target {
            Target::Inode(inode) => {
                let attr = self.base.stat(Target::Inode(&inode.inode), freshness)?;
                Ok(self.without_hidden_links(inode, attr))
            }
            Target::File(file) => self.base.stat(Target::File(file), freshness),
        }
    }
}

impl<B: Backing> Files for PlainBacking<B> {
    forward!(base: open read_at write_parts resize allocate seek copy_range);
    forward!(base: sync advise lock descriptor);

    fn adopt(&self, descriptor: OwnedFd) -> Result<AdoptedBy<Self>> {
        let adopted = self.base.adopt(descriptor)?;
        Ok(adopted.map(PlainInode::below_top, |file| file))
    }
}

impl<B: Backing> Sharing for PlainBacking<B> {
    forward!(base: kernel_reads locate report_use level_max);
}

impl<B: Backing> Placement for PlainBacking<B> {
    forward!(base: facts lane_of_turn);
}
