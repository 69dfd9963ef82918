//! A new file: first in its lane, then under a name.

use super::*;
use crate::rule::Reason;

/// Bytes of a file's name that its entry in the lane repeats, for people who look there.
const NAME_BYTES: usize = 200;

/// What [`Backing::create`] returns.
type Created<B> = (LanesInode<B>, LanesFile<B>, Attr);

/// A file in a lane that has no name above yet.
struct MadeFile<B: Backing> {
    inode: B::Inode,
    file: B::File,
    attr: Attr,
}

/// The lane that a new file is to go to.
pub(crate) struct WantedLane {
    number: usize,
    /// How many lanes take new files.
    count: usize,
    /// It goes to no other one.
    is_fixed: bool,
    /// The lane's figures count it.
    is_counted: bool,
}

impl WantedLane {
    pub(crate) fn by_name(rule: &Rule, name: &OsStr) -> Self {
        let (number, reason) = rule.choose(name);
        Self {
            number,
            count: rule.lane_count(),
            is_fixed: matches!(reason, Reason::Line(_)),
            is_counted: true,
        }
    }

    pub(crate) fn by_turn(rule: &Rule, turn: u64) -> Self {
        Self {
            number: rule.lane_of_turn(turn),
            count: rule.lane_count(),
            is_fixed: false,
            is_counted: false,
        }
    }
}

/// Why a file was not made in a lane.
enum CreateError {
    /// The lane failed: another one may do.
    Lane(Errno),
    /// The name, the primary or the caller.
    Other(Errno),
}

impl<B: Backing> Lanes<B> {
    /// [`Backing::create`], in a lane. Where the one that is wanted is full or gone, in the next one that is not, unless
    /// it is fixed.
    pub(crate) fn create_placed(
        &self,
        wanted: WantedLane,
        caller: &Caller,
        parent: &B::Inode,
        name: &OsStr,
        mode: u32,
    ) -> Result<Created<B>> {
        let owner = self.owner_in(parent, caller)?;
        let WantedLane {
            number: first,
            count,
            is_fixed,
            is_counted,
        } = wanted;
        let mut failed = None;
        for number in (0..count).map(|step| (first + step) % count) {
            if !is_fixed && self.is_still_full(&self.setup.lanes[number]) {
                failed.get_or_insert(Errno::NOSPC);
                continue;
            }
            match self.create_in(number, &owner, parent, name, mode) {
                Ok(created) => {
                    if is_counted {
                        self.setup.lanes[number].progress.count_file();
                    }
                    return Ok(created);
                }
                Err(CreateError::Other(error)) => return Err(error),
                Err(CreateError::Lane(error)) if is_fixed => return Err(error),
                Err(CreateError::Lane(error)) => failed = failed.or(Some(error)),
            }
        }
        Err(failed.unwrap_or(Errno::IO))
    }

    /// Whether a lane that had no room has none now. A file would be made there, and its bytes not be taken.
    fn is_still_full(&self, lane: &Lane<B>) -> bool {
        if lane.progress.state() != LaneState::Full {
            return false;
        }
        // Files that are gone above may still take room.
        let _ = self.finish_removals();
        let room = lane.backing.statfs();
        let is_full = room.is_ok_and(|room| room.blocks_available == 0);
        if !is_full {
            lane.progress.set_state(LaneState::Ok);
        }
        is_full
    }

    fn create_in(
        &self,
        number: usize,
        owner: &Caller,
        parent: &B::Inode,
        name: &OsStr,
        mode: u32,
    ) -> std::result::Result<Created<B>, CreateError> {
        let lane = &self.setup.lanes[number];
        let staging = self.staging().map_err(CreateError::Other)?;
        let entry = new_entry(name).map_err(CreateError::Other)?;
        let target = lane.target_of(&entry);
        // The link first: from it the next mount finds the file, should this be cut off.
        let made = self.primary.symlink(owner, staging, &entry, &target);
        let (link, link_attr) = made.map_err(CreateError::Other)?;
        let mark = self.mark_of(&link_attr);
        let made = self.make_file(lane, &entry, owner, mode, mark);
        // The name last: once the file has it, nothing may fail any more.
        let named = made.and_then(|made| {
            let named = self.give_name(staging, &link, &entry, parent, name);
            named.map_err(CreateError::Other)?;
            Ok(made)
        });
        let made = named.inspect_err(|_| {
            let _ = self.remove_entry(number, &entry);
            let _ = self.primary.unlink(staging, &entry);
        })?;
        let link_attr = self.primary.attr(&link).unwrap_or(link_attr);
        let placed = Arc::new(PlacedFile {
            link,
            lane: number,
            entry,
            file: made.inode,
        });
        let opened = LanesFile {
            file: made.file,
            placed: Some(Arc::clone(&placed)),
        };
        let attr = placed_attr(&link_attr, &made.attr);
        Ok((LanesInode::Placed(placed), opened, attr))
    }

    /// The file in its lane, marked as that of its link.
    fn make_file(
        &self,
        lane: &Lane<B>,
        entry: &OsStr,
        owner: &Caller,
        mode: u32,
        mark: Mark,
    ) -> std::result::Result<MadeFile<B>, CreateError> {
        let root = lane.backing.root();
        let made = lane.backing.create(owner, &root, entry, mode);
        lane.note_change();
        let marked = made.and_then(|(inode, file, _)| {
            mark::write(&lane.backing, &inode, mark)?;
            let attr = lane.backing.attr_of_file(&file)?;
            Ok(MadeFile { inode, file, attr })
        });
        lane.note(marked).map_err(|error| match error {
            // Its directory is not there, or closed to this process.
            Errno::NOENT | Errno::ACCESS => {
                lane.note_state(LaneState::Gone, error);
                CreateError::Lane(error)
            }
            error if state::state_behind(error).is_some() => CreateError::Lane(error),
            error => CreateError::Other(error),
        })
    }

    fn give_name(
        &self,
        staging: &B::Inode,
        link: &B::Inode,
        entry: &OsStr,
        parent: &B::Inode,
        name: &OsStr,
    ) -> Result<()> {
        let flags = RenameFlags::NOREPLACE;
        match self.primary.rename(staging, entry, parent, name, flags) {
            // A file system, such as NFS, that cannot rename like this.
            Err(Errno::INVAL) => {
                self.primary.link(link, parent, name)?;
                self.primary.unlink(staging, entry)
            }
            done => done,
        }
    }

    /// Owner of what `caller` makes in `parent`: the link is made elsewhere, where the kernel cannot know of it.
    fn owner_in(&self, parent: &B::Inode, caller: &Caller) -> Result<Caller> {
        let attr = self.primary.attr(parent)?;
        if attr.kind != Kind::Dir {
            return Err(Errno::NOTDIR);
        }
        let takes_group = attr.mode & libc::S_ISGID != 0;
        Ok(Caller {
            gid: if takes_group { attr.gid } else { caller.gid },
            ..*caller
        })
    }
}

/// A name for a new file in a lane: unlike any other, and told from its name above.
fn new_entry(name: &OsStr) -> Result<OsString> {
    let bytes = name.as_bytes();
    let mut entry = OsStr::from_bytes(&bytes[..bytes.len().min(NAME_BYTES)]).to_owned();
    let id = getrandom::u64().map_err(|_| Errno::IO)?;
    entry.push(format!(".{id:016x}"));
    Ok(entry)
}

/// Whether an entry of a lane has the form that [`new_entry`] gives it.
pub(crate) fn is_entry(entry: &OsStr) -> bool {
    let id = entry.as_bytes().rsplit(|&byte| byte == b'.').next();
    entry.as_bytes().contains(&b'.')
        && id.is_some_and(|id| id.len() == 16 && id.iter().all(u8::is_ascii_hexdigit))
}
