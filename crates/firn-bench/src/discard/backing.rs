//! A backing that discards the data that is written to it. Everything else, such as names and attributes, is that of a
//! directory.

use std::ffi::OsStr;

use firn_backing::{
    Attr, Attributes, Caller, Created, DataPart, DirBacking, Files, Names, NewKind, Placement,
    PlacementHint, Result, Sharing, Volume, forward,
};

/// A directory in which writes to files succeed and have no effect.
pub struct DiscardBacking(pub DirBacking);

type Inode = <DirBacking as Volume>::Inode;

/// The macro through which [`forward!`] makes its calls: in the wrapped directory, with the same arguments. `$kind $of`
/// are the arguments that other layers have to translate.
macro_rules! dir {
    ($self:ident, $($kind:ident $of:ident $($other:ident)?,)? |$dir:ident| $call:expr) => {{
        let $dir = &$self.0;
        $call
    }};
}

impl Volume for DiscardBacking {
    type Inode = Inode;
    type File = <DirBacking as Volume>::File;
    type Dir = <DirBacking as Volume>::Dir;

    fn root(&self) -> Inode {
        self.0.root()
    }

    forward!(dir: features statfs sync_scope);
}

impl Names for DiscardBacking {
    fn lookup(&self, parent: &Inode, name: &OsStr) -> Result<(Inode, Attr)> {
        self.0.lookup(parent, name)
    }

    fn create_placed(
        &self,
        caller: &Caller,
        parent: &Inode,
        name: &OsStr,
        mode: u32,
        placing: PlacementHint<'_, Inode>,
    ) -> Result<Created<Self>> {
        self.0.create_placed(caller, parent, name, mode, placing)
    }

    fn make(
        &self,
        caller: &Caller,
        parent: &Inode,
        name: &OsStr,
        kind: NewKind<'_>,
    ) -> Result<(Inode, Attr)> {
        self.0.make(caller, parent, name, kind)
    }

    fn moved_to(&self, inode: &Inode, parent: &Inode, name: &OsStr) -> Inode {
        self.0.moved_to(inode, parent, name)
    }

    forward!(dir: link remove rename readlink open_dir read_dir);
}

impl Attributes for DiscardBacking {
    forward!(dir: stat set_attr get_xattr list_xattr);
}

impl Files for DiscardBacking {
    /// Discards the data and reports that all of it was written.
    fn write_parts(&self, _: &Self::File, parts: &[DataPart<'_>]) -> Result<u64> {
        Ok(parts.iter().map(DataPart::len).sum())
    }

    forward!(dir: open read_at resize allocate seek copy_range sync advise lock descriptor adopt);
}

impl Sharing for DiscardBacking {
    forward!(dir: kernel_reads locate report_use level_max);
}

impl Placement for DiscardBacking {
    forward!(dir: facts lane_of_turn);
}
