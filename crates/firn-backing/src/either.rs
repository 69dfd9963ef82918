//! A backing with an optional layer. A *layer* wraps another backing, changes some calls, and passes the others on.
//! Whether the layer is present is decided when a mount begins.
//!
//! ```text
//!   Either::Lower(directory)            without the layer: the directory alone
//!   Either::Upper(Lanes<directory>)     with the layer, here one that spreads files over several I/O servers
//! ```
//!
//! `Lower` and `Upper` are the two *sides*. Several optional layers are nested: what is "directory" here is then an
//! `Either` too.
//!
//! Invariant: an [`Either`] never changes its side, and all inodes, files and directories that it returns are of that
//! side. A call with an argument of the other side is a bug of the caller, and panics.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;

use crate::{
    Access, AdoptedBy, Attr, Attributes, Backing, Caller, Created, Files, Names, NewKind,
    Placement, PlacementHint, Result, Sharing, Volume, forward,
};

/// A backing without a layer, or with one.
pub enum Either<L, U> {
    /// The backing without the layer.
    Lower(L),
    /// The backing with the layer.
    Upper(U),
}

impl<L: Clone, U: Clone> Clone for Either<L, U> {
    fn clone(&self) -> Self {
        match self {
            Self::Lower(lower) => Self::Lower(lower.clone()),
            Self::Upper(upper) => Self::Upper(upper.clone()),
        }
    }
}

impl<L, U> Either<L, U> {
    /// Returns the layer, if there is one.
    pub fn upper(&self) -> Option<&U> {
        match self {
            Self::Lower(_) => None,
            Self::Upper(upper) => Some(upper),
        }
    }

    /// Returns the backing, if there is no layer.
    pub fn lower(&self) -> Option<&L> {
        match self {
            Self::Lower(lower) => Some(lower),
            Self::Upper(_) => None,
        }
    }
}

/// Panics, because an argument of a call is of the other side: a bug of the caller.
fn panic_on_mixed_sides() -> ! {
    unreachable!("the argument belongs to the other side of this backing")
}

/// Calls the backing of this side with the arguments of this side.
macro_rules! side {
    ($self:ident, |$side:ident| $call:expr) => {
        match $self {
            Either::Lower($side) => $call,
            Either::Upper($side) => $call,
        }
    };
    ($self:ident, inodes $one:ident $other:ident, |$side:ident| $call:expr) => {
        match ($self, $one, $other) {
            (Either::Lower($side), Either::Lower($one), Either::Lower($other)) => $call,
            (Either::Upper($side), Either::Upper($one), Either::Upper($other)) => $call,
            _ => panic_on_mixed_sides(),
        }
    };
    ($self:ident, files $one:ident $other:ident, |$side:ident| $call:expr) => {
        side!($self, inodes $one $other, |$side| $call)
    };
    ($self:ident, $kind:ident $of:ident, |$side:ident| $call:expr) => {
        match ($self, $of) {
            (Either::Lower($side), Either::Lower($of)) => $call,
            (Either::Upper($side), Either::Upper($of)) => $call,
            _ => panic_on_mixed_sides(),
        }
    };
}

/// Does the same as `side!` for a call that returns something of one side. `$wrap` names the macro that turns the
/// result into a type of both sides: `handle` for an inode, file or directory, `object` for an inode with its
/// attributes.
macro_rules! give {
    ($self:ident, $of:ident, |$side:ident| $call:expr, $wrap:ident) => {
        match ($self, $of) {
            (Self::Lower($side), Either::Lower($of)) => $call.map($wrap!(Lower)),
            (Self::Upper($side), Either::Upper($of)) => $call.map($wrap!(Upper)),
            _ => panic_on_mixed_sides(),
        }
    };
}

// Each of these macros wraps the result of a call in the variant of its side.

macro_rules! handle {
    ($side:ident) => {
        Either::$side
    };
}

macro_rules! object {
    ($side:ident) => {
        |(inode, attr)| (Either::$side(inode), attr)
    };
}

macro_rules! created {
    ($side:ident) => {
        |(inode, file, attr)| (Either::$side(inode), Either::$side(file), attr)
    };
}

macro_rules! adopted {
    ($side:ident) => {
        |adopted| adopted.map(Either::$side, Either::$side)
    };
}

impl<L: Backing, U: Backing> Volume for Either<L, U> {
    type Inode = Either<L::Inode, U::Inode>;
    type File = Either<L::File, U::File>;
    type Dir = Either<L::Dir, U::Dir>;

    fn root(&self) -> Self::Inode {
        match self {
            Self::Lower(lower) => Either::Lower(lower.root()),
            Self::Upper(upper) => Either::Upper(upper.root()),
        }
    }

    forward!(side: features statfs sync_scope);
}

impl<L: Backing, U: Backing> Names for Either<L, U> {
    forward!(side: link remove rename readlink read_dir);

    fn lookup(&self, parent: &Self::Inode, name: &OsStr) -> Result<(Self::Inode, Attr)> {
        give!(self, parent, |side| side.lookup(parent, name), object)
    }

    /// Creates a file in the backing of this side: with the layer, or without it. The inodes in `parent` and `placing`
    /// must be of the same side.
    fn create_placed(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
        placing: PlacementHint<'_, Self::Inode>,
    ) -> Result<Created<Self>> {
        match (self, parent) {
            (Self::Lower(lower), Either::Lower(parent)) => {
                let placing =
                    placing.map(|inode| inode.lower().unwrap_or_else(|| panic_on_mixed_sides()));
                lower
                    .create_placed(caller, parent, name, mode, placing)
                    .map(created!(Lower))
            }
            (Self::Upper(upper), Either::Upper(parent)) => {
                let placing =
                    placing.map(|inode| inode.upper().unwrap_or_else(|| panic_on_mixed_sides()));
                upper
                    .create_placed(caller, parent, name, mode, placing)
                    .map(created!(Upper))
            }
            _ => panic_on_mixed_sides(),
        }
    }

    fn make(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        kind: NewKind<'_>,
    ) -> Result<(Self::Inode, Attr)> {
        give!(
            self,
            parent,
            |side| side.make(caller, parent, name, kind),
            object
        )
    }

    fn moved_to(&self, inode: &Self::Inode, parent: &Self::Inode, name: &OsStr) -> Self::Inode {
        match (self, inode, parent) {
            (Self::Lower(side), Either::Lower(inode), Either::Lower(parent)) => {
                Either::Lower(side.moved_to(inode, parent, name))
            }
            (Self::Upper(side), Either::Upper(inode), Either::Upper(parent)) => {
                Either::Upper(side.moved_to(inode, parent, name))
            }
            _ => panic_on_mixed_sides(),
        }
    }

    fn open_dir(&self, inode: &Self::Inode) -> Result<Self::Dir> {
        give!(self, inode, |side| side.open_dir(inode), handle)
    }
}

impl<L: Backing, U: Backing> Attributes for Either<L, U> {
    forward!(side: stat set_attr get_xattr list_xattr);
}

impl<L: Backing, U: Backing> Files for Either<L, U> {
    forward!(side: read_at write_parts resize allocate seek copy_range sync advise lock descriptor);

    fn open(&self, inode: &Self::Inode, access: Access) -> Result<Self::File> {
        give!(self, inode, |side| side.open(inode, access), handle)
    }

    fn adopt(&self, descriptor: OwnedFd) -> Result<AdoptedBy<Self>> {
        match self {
            Self::Lower(side) => side.adopt(descriptor).map(adopted!(Lower)),
            Self::Upper(side) => side.adopt(descriptor).map(adopted!(Upper)),
        }
    }
}

impl<L: Backing, U: Backing> Sharing for Either<L, U> {
    forward!(side: kernel_reads locate report_use level_max);
}

impl<L: Backing, U: Backing> Placement for Either<L, U> {
    forward!(side: facts lane_of_turn);
}
