//! Placement of files over several directories (`placement=dirs`): a backing on top of several backings.
//!
//! All names are in the *primary* backing. A new regular file goes completely to one *lane*, which is a directory on
//! its own server. The primary has a symbolic link to the file, so that everything is readable without Firn. Users of
//! this backing do not see the link; the file appears to them as a regular file in every respect.
//!
//! | property of a placed file | taken from |
//! |---|---|
//! | inode number, device, number of names | the link in the primary |
//! | all other attributes, and data | the file in the lane |
//! | a further name | a further name of the link |
//!
//! A link is Firn's own if the file that it names has the matching mark ([`Mark`]). Every other link is an ordinary
//! link. To change a mark, a user needs permission to write to the file. A link that a user copied or made by hand
//! therefore harms no other user's file.
//!
//! Promises
//! * A name leads to a complete file or to none. The link gets its name after the file exists and is marked. The file
//!   is removed only after the removal of its last name is durable (module `removal`).
//! * After a crash of this process, the next [`Lanes::open`] finishes the interrupted creations and removals. A power
//!   loss may leave two kinds of unsynced remains: a file that no link names, and a link to a missing file.
//!   [`Lanes::find_orphans`] finds both.
//! * After [`Backing::sync_dir`] of a directory, the names in it lead to their files after a power loss too.
//!
//! The module [`rule`] chooses the lane.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_backing::{Attr, Backing, Caller, Errno, Kind, RenameFlags, Result};
use firn_hosts::own::{LOGS, TOP};
use firn_workers::Workers;

mod backing;
mod create;
mod mark;
mod orphans;
pub mod record;
mod removal;
pub mod rule;
mod state;
pub mod steering;

pub use mark::{Mark, XATTR};
pub use orphans::{Orphan, OrphanError, count_files};
pub use record::{Record, RecordError};
pub use rule::Rule;
pub use state::{LaneFigures, LaneState};

use removal::PendingRemovals;
use state::{CallKind, LaneHealth};

/// A directory for placed files, on one server.
pub struct Lane<B: Backing> {
    backing: B,
    /// Absolute path of the lane's top directory, as it appears in links.
    path: OsString,
    /// Number of names that were created or removed so far.
    changes: AtomicU64,
    /// Number of these changes that are durable.
    synced: AtomicU64,
    health: LaneHealth,
}

impl<B: Backing> Lane<B> {
    /// Creates a lane. `path` is the absolute path of the top directory of `backing`, without a slash at its end.
    pub fn new(backing: B, path: OsString) -> Arc<Self> {
        debug_assert!(path.as_bytes().starts_with(b"/") && !path.as_bytes().ends_with(b"/"));
        Arc::new(Self {
            backing,
            path,
            changes: AtomicU64::new(0),
            synced: AtomicU64::new(0),
            health: LaneHealth::default(),
        })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &OsStr {
        &self.path
    }

    /// Returns the name in this lane to which a link with the text `target` leads, or `None` if the link leads
    /// elsewhere.
    fn entry_of<'a>(&self, target: &'a [u8]) -> Option<&'a OsStr> {
        entry_below(&self.path, target)
    }

    /// Returns the text of a link to the file `entry` of this lane.
    fn target_of(&self, entry: &OsStr) -> OsString {
        let mut target = self.path.clone();
        target.push("/");
        target.push(entry);
        target
    }

    /// Counts a name that was created or removed.
    fn record_change(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// Syncs the names of the lane's files, if any name has changed.
    fn sync_names(&self) -> Result<()> {
        let changes = self.changes.load(Ordering::Acquire);
        if changes > self.synced.load(Ordering::Acquire) {
            self.call(CallKind::Sync, |backing| backing.sync_dir(&backing.root()))?;
            self.synced.fetch_max(changes, Ordering::AcqRel);
        }
        Ok(())
    }
}

/// The parts of a backing over lanes.
pub struct Setup<B: Backing> {
    /// Id of the primary in the marks of its files: a random number that the primary stores.
    pub id: u128,
    /// Staging directory of the primary, for links that have no name yet. `None` if the backing is read-only.
    pub staging: Option<B::Inode>,
    /// The lanes. New files go to the first ones, as many as `rule` has.
    pub lanes: Vec<Arc<Lane<B>>>,
    /// Paths of lanes that have files but cannot be reached.
    pub absent: Vec<OsString>,
    /// Chooses the lane of a new file. `None`: new files stay in the primary.
    pub rule: Option<Rule>,
}

/// A backing whose files lie in lanes.
pub struct Lanes<B: Backing> {
    primary: B,
    setup: Setup<B>,
    removals: PendingRemovals<B>,
    /// Threads for calls of lanes that may hang.
    workers: Workers,
    /// Size in bytes of the longest file that was written.
    longest_file_bytes: AtomicU64,
}

/// Free space that a full lane must have before it gets new files again, as a multiple of the longest file: space for
/// the new file, and for a second one that already waits for the same lane.
const FILES_IN_FREE_SPACE: u64 = 2;
/// Minimum of this required space in bytes. It applies until a longer file is written.
const FREE_BYTES_MIN: u64 = 1 << 20;

/// An object of [`Lanes`].
pub enum LanesInode<B: Backing> {
    /// The object is in the primary.
    Primary(B::Inode, Position),
    /// A placed file.
    Placed(Arc<PlacedFile<B>>),
}

/// Position of an object in the primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    region: Region,
    /// Sum of the numbers in the object's name and in the names of the directories above, at the time of the lookup
    /// ([`rule::Parent::sum`]).
    number_sum: u64,
}

impl Position {
    const TOP: Self = Self {
        region: Region::Top,
        number_sum: 0,
    };

    /// Returns the position of the object `name` in a directory with this position.
    fn child(self, name: &OsStr) -> Self {
        Self {
            region: self.region.child(name),
            number_sum: rule::add_numbers(self.number_sum, name),
        }
    }
}

/// A part of the primary with its own rules for placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// The top directory.
    Top,
    /// `.firn`.
    Firn,
    /// Objects below `.firn`. Firn's own files remain in the primary. Files that a transaction will rename later remain
    /// in the lanes in which they are placed.
    Own,
    /// `.firn/log` and everything below it. A file there goes to a lane only if it has a turn. A link to a missing file
    /// counts as missing.
    Logs,
    /// All other objects.
    Files,
}

impl Region {
    /// Returns the region of the object `name` in a directory of this region.
    fn child(self, name: &OsStr) -> Self {
        match self {
            Self::Top if name == TOP => Self::Firn,
            Self::Firn if name == LOGS => Self::Logs,
            Self::Logs => Self::Logs,
            Self::Firn | Self::Own => Self::Own,
            Self::Top | Self::Files => Self::Files,
        }
    }

    /// Returns whether the name of a new file in this region determines its lane.
    fn takes_placed_files(self) -> bool {
        matches!(self, Self::Top | Self::Files)
    }
}

/// A file in a lane, and the link that leads to it.
pub struct PlacedFile<B: Backing> {
    /// The link in the primary.
    link: B::Inode,
    /// Index of the lane.
    lane: usize,
    /// Name of the file in the lane.
    entry: OsString,
    /// The file in the lane.
    file: B::Inode,
}

/// The lane to which the text of a link leads, and the name in that lane.
struct LinkTarget<'a, B: Backing> {
    /// Index of the lane.
    number: usize,
    lane: &'a Lane<B>,
    /// Name in the lane.
    entry: &'a OsStr,
}

/// An open file of [`Lanes`].
pub struct LanesFile<B: Backing> {
    file: B::File,
    /// The placed file. `None` if the file is in the primary.
    placed: Option<Arc<PlacedFile<B>>>,
}

impl<B: Backing> Clone for LanesInode<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Primary(inode, position) => Self::Primary(inode.clone(), *position),
            Self::Placed(placed) => Self::Placed(Arc::clone(placed)),
        }
    }
}

impl<B: Backing> LanesInode<B> {
    /// Returns the object in the primary. For a placed file this is its link, so the result is never a directory then.
    fn in_primary(&self) -> &B::Inode {
        match self {
            Self::Primary(inode, _) => inode,
            Self::Placed(placed) => &placed.link,
        }
    }

    /// Returns the object `name` of this directory. The object must not be a placed file.
    fn child_inode(&self, name: &OsStr, inode: B::Inode) -> Self {
        Self::Primary(inode, self.position().child(name))
    }

    /// Returns the position of the object.
    fn position(&self) -> Position {
        match self {
            Self::Primary(_, position) => *position,
            Self::Placed(_) => Position {
                region: Region::Files,
                number_sum: 0,
            },
        }
    }
}

impl<B: Backing> Lanes<B> {
    /// Opens a backing over `primary`. First finishes the creations and removals whose links a crash left in the
    /// staging directory.
    pub fn open(primary: B, setup: Setup<B>) -> Result<Self> {
        let opened = Self {
            primary,
            setup,
            removals: PendingRemovals::default(),
            workers: Workers::default(),
            longest_file_bytes: AtomicU64::new(0),
        };
        opened.clear_staging()?;
        Ok(opened)
    }

    /// Returns the lanes in their order.
    pub fn lanes(&self) -> &[Arc<Lane<B>>] {
        &self.setup.lanes
    }

    /// Returns the paths of lanes that have files but cannot be reached.
    pub fn absent(&self) -> &[OsString] {
        &self.setup.absent
    }

    /// Returns the rule that chooses the lane of a new file. Returns `None` if new files stay in the primary.
    pub fn rule(&self) -> Option<&Rule> {
        self.setup.rule.as_ref()
    }

    /// Returns the path of a file in its lane. Returns `None` if the file is in the primary.
    pub fn path_in_lane(&self, inode: &LanesInode<B>) -> Option<OsString> {
        match inode {
            LanesInode::Primary(..) => None,
            LanesInode::Placed(placed) => Some(self.lane(placed).target_of(&placed.entry)),
        }
    }

    /// Returns the staging directory; EROFS if the backing is read-only.
    fn staging(&self) -> Result<&B::Inode> {
        self.setup.staging.as_ref().ok_or(Errno::ROFS)
    }

    /// Returns the lane that has a placed file.
    fn lane(&self, placed: &PlacedFile<B>) -> &Lane<B> {
        &self.setup.lanes[placed.lane]
    }

    /// Returns the backing that has an object's data, and the object in that backing.
    fn data_object<'a>(&'a self, inode: &'a LanesInode<B>) -> (&'a B, &'a B::Inode) {
        match inode {
            LanesInode::Primary(inode, _) => (&self.primary, inode),
            LanesInode::Placed(placed) => (&self.lane(placed).backing, &placed.file),
        }
    }

    /// Returns the backing that has an open file.
    fn data_backing(&self, file: &LanesFile<B>) -> &B {
        match &file.placed {
            None => &self.primary,
            Some(placed) => &self.lane(placed).backing,
        }
    }

    /// Makes a call of the backing that has an open file.
    fn call_data_backing<T>(
        &self,
        file: &LanesFile<B>,
        kind: CallKind,
        make: impl FnOnce(&B) -> Result<T>,
    ) -> Result<T> {
        match &file.placed {
            None => make(&self.primary),
            Some(placed) => self.lane(placed).call(kind, make),
        }
    }

    /// Returns the free bytes that a full lane must have before it gets new files again.
    fn min_free_bytes(&self) -> u64 {
        let longest_file_bytes = self.longest_file_bytes.load(Ordering::Relaxed);
        longest_file_bytes
            .saturating_mul(FILES_IN_FREE_SPACE)
            .max(FREE_BYTES_MIN)
    }

    /// Returns the object with this name in the primary, as users of this backing see it. The link of a placed file
    /// (one with its data in a lane) becomes that file.
    fn resolve(
        &self,
        parent: &LanesInode<B>,
        name: &OsStr,
        inode: B::Inode,
        attr: Attr,
    ) -> Result<(LanesInode<B>, Attr)> {
        if attr.kind == Kind::Symlink {
            if let Some((placed, file_attr)) = self.follow(&inode, &attr)? {
                let attr = placed_attr(&attr, &file_attr);
                return Ok((LanesInode::Placed(Arc::new(placed)), attr));
            }
            // A power loss may leave a link to a missing file: another host's sync made the link durable before the
            // file was synced.
            let is_in_logs = parent.position().region == Region::Logs;
            if is_in_logs && self.parse_target(&self.primary.readlink(&inode)?).is_some() {
                return Err(Errno::NOENT);
            }
        }
        Ok((parent.child_inode(name, inode), attr))
    }

    /// Returns the file to which a link leads, with the attributes of the file in the lane. Returns `None` if the file
    /// is missing, or if the link is not Firn's own: then the *mark* of the file, an extended attribute, does not name
    /// this link.
    ///
    /// Fails if the link leads to a lane that cannot be reached now.
    fn follow(&self, link: &B::Inode, attr: &Attr) -> Result<Option<(PlacedFile<B>, Attr)>> {
        let target = self.primary.readlink(link)?;
        let Some(LinkTarget {
            number,
            lane,
            entry,
        }) = self.parse_target(&target)
        else {
            // The text names no lane in use. Fail if it names a known lane that cannot be reached now.
            self.refuse_absent(&target)?;
            return Ok(None);
        };
        let found = lane.call(CallKind::Name, |backing| {
            let (file, attr) = backing.lookup(&backing.root(), entry)?;
            let mark = match attr.kind {
                Kind::File => mark::read_mark(backing, &file)?,
                _ => None,
            };
            Ok((file, attr, mark))
        });
        let (file, file_attr, mark) = match found {
            Ok(entry) => entry,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error),
        };
        if mark != Some(self.expected_mark(attr)) {
            return Ok(None);
        }
        let placed = PlacedFile {
            link: link.clone(),
            lane: number,
            entry: entry.to_owned(),
            file,
        };
        Ok(Some((placed, file_attr)))
    }

    /// Returns the lane and the entry in it that a link with this text names. Returns `None` if the text names no lane.
    fn parse_target<'a>(&'a self, target: &'a [u8]) -> Option<LinkTarget<'a, B>> {
        for (number, lane) in self.setup.lanes.iter().enumerate() {
            if let Some(entry) = lane.entry_of(target) {
                return Some(LinkTarget {
                    number,
                    lane,
                    entry,
                });
            }
        }
        None
    }

    /// Returns EIO for a link into an absent lane. The link may belong to a placed file. If programs saw it as an
    /// ordinary link, they could write to any object that is now at the lane's path.
    fn refuse_absent(&self, target: &[u8]) -> Result<()> {
        for lane in &self.setup.absent {
            if entry_below(lane, target).is_some_and(create::is_entry) {
                return Err(Errno::IO);
            }
        }
        Ok(())
    }

    /// Returns the mark of the file to which a link leads.
    fn expected_mark(&self, link: &Attr) -> Mark {
        Mark {
            primary: self.setup.id,
            link: link.ino,
        }
    }

    /// Returns the attributes of a placed file.
    fn attr_of_placed(&self, placed: &PlacedFile<B>) -> Result<Attr> {
        let link_attr = self.attr_of_link(placed)?;
        let lane = self.lane(placed);
        let file_attr = lane.call(CallKind::Name, |backing| backing.attr(&placed.file))?;
        Ok(placed_attr(&link_attr, &file_attr))
    }

    /// Returns the attributes of a link. A link whose only name is in the staging directory has no names (`nlink` 0)
    /// for programs.
    fn attr_of_link(&self, placed: &PlacedFile<B>) -> Result<Attr> {
        let mut attr = self.primary.attr(&placed.link)?;
        if self.removals.contains(attr.ino) {
            attr.nlink = 0;
        }
        Ok(attr)
    }
}

/// Returns the name in the directory `lane` that a link with this text names. Returns `None` if the text names anything
/// else.
fn entry_below<'a>(lane: &OsStr, target: &'a [u8]) -> Option<&'a OsStr> {
    let entry = target.strip_prefix(lane.as_bytes())?.strip_prefix(b"/")?;
    let is_name = !entry.is_empty() && !entry.contains(&b'/') && entry != b"." && entry != b"..";
    is_name.then(|| OsStr::from_bytes(entry))
}

/// Returns the names in a directory, without `.` and `..`.
fn names_in<B: Backing>(backing: &B, dir: &B::Inode) -> Result<Vec<OsString>> {
    let mut names = Vec::new();
    let stream = backing.open_dir(dir)?;
    backing.read_dir(&stream, 0, &mut |entry| {
        if entry.name != "." && entry.name != ".." {
            names.push(entry.name.to_owned());
        }
        true
    })?;
    Ok(names)
}

/// Returns the attributes of a placed file, from those of its link and of the file in the lane.
fn placed_attr(link: &Attr, file: &Attr) -> Attr {
    Attr {
        dev: link.dev,
        ino: link.ino,
        nlink: link.nlink,
        // A new name changes only the link.
        ctime: file.ctime.max(link.ctime),
        ..*file
    }
}
