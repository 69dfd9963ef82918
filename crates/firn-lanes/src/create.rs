//! Creates placed files.
//!
//! A creation has three steps
//! 1. A symbolic link to the new file is created in the staging directory of the primary. By this link, the next mount
//!    finds the file if a crash interrupts the creation.
//! 2. The file is created in its lane, with the mark of the link.
//! 3. The link is renamed to the file's name in the primary.
//!
//! The kernel locks a directory while a name is created in it. If another lane is allowed, a creation must therefore
//! not wait for a hanging lane. Step 2 runs on a thread of the lane. If the lane does not answer in time, another lane
//! is tried, and the file that the first lane creates late is removed ([`crate::removal`]).

use std::cmp::Reverse;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::Duration;

use firn_backing::DirEntry;
use firn_workers::{Class, Topic};

use super::*;
use crate::removal::PendingRemoval;
use crate::rule::Reason;
use crate::state::Call;

/// Maximum number of bytes of a file's name that its entry in the lane repeats, so that a listing of the lane is
/// readable.
const NAME_BYTES: usize = 200;
/// Number of hexadecimal digits at the end of an entry.
const ID_DIGITS: usize = 16;
/// Maximum number of links that are counted when this host creates its first file in a directory.
const COUNTED_MAX: usize = 256;
/// Time within which a lane must create a file. A slower lane counts as hanging, and another lane is tried.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A created file as [`Backing::create`] returns it: the object, the open file, and its attributes.
type Created<B> = (LanesInode<B>, LanesFile<B>, Attr);

/// The parameters of a file to create.
pub(crate) struct NewFile<'a, B: Backing> {
    pub(crate) caller: &'a Caller,
    pub(crate) parent: &'a B::Inode,
    pub(crate) name: &'a OsStr,
    pub(crate) mode: u32,
}

/// The directory and the name by which the rule chooses a lane. They are the final ones: a transaction creates a file
/// elsewhere and renames it to them.
pub(crate) struct PlaceByName<'a, B: Backing> {
    pub(crate) parent: &'a B::Inode,
    /// Sum of the numbers in the path of the directory.
    pub(crate) numbers: u64,
    pub(crate) name: &'a OsStr,
}

/// The lanes that are allowed for a file.
#[derive(Clone, Copy)]
enum AllowedLanes {
    /// The file goes to this lane or is not created.
    Fixed(usize),
    /// The file goes to `first`, or to the next usable lane in the order of their numbers.
    From { first: usize, lane_count: usize },
}

/// A new file in a lane that has no name in the primary yet.
struct FileInLane<B: Backing> {
    inode: B::Inode,
    file: B::File,
    attr: Attr,
}

/// The reason why a file was not created in a lane.
enum CreateError {
    /// The lane failed. Another lane may succeed.
    Lane(Errno),
    /// The lane was full, and still has less room than a new file must have: this number of bytes.
    Short(u64),
    /// The error concerns the name, the primary or the caller.
    Other(Errno),
}

type MakeResult<B> = std::result::Result<FileInLane<B>, CreateError>;

/// The creation of a file in one lane. It may continue while another lane is tried.
struct Attempt<B: Backing> {
    /// Index of the lane.
    lane: usize,
    /// Name of the file in the lane, and of its link in the staging directory.
    entry: OsString,
    /// The link in the staging directory.
    link: B::Inode,
    link_attr: Attr,
    /// Whether the call that creates the file has returned.
    is_creation_finished: Arc<AtomicBool>,
}

/// The attempts to create one file. Each attempt sends its result with the index of its lane.
struct Attempts<B: Backing> {
    /// Attempts whose results have not been received.
    under_way: Vec<Attempt<B>>,
    sender: mpsc::Sender<(usize, MakeResult<B>)>,
    receiver: mpsc::Receiver<(usize, MakeResult<B>)>,
    /// Lanes with less room than a new file must have, and that room in bytes.
    short: Vec<(usize, u64)>,
    /// The first error of a lane.
    failed: Option<Errno>,
}

impl<B: Backing> Default for Attempts<B> {
    fn default() -> Self {
        let (sender, receiver) = mpsc::channel();
        Self {
            under_way: Vec::new(),
            sender,
            receiver,
            short: Vec::new(),
            failed: None,
        }
    }
}

/// Sets the flag "creation finished" on drop, and therefore also if the creation panics.
struct FinishedOnDrop(Arc<AtomicBool>);

impl Drop for FinishedOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl<B: Backing> Lanes<B> {
    /// Creates a file in the lane that the rule chooses ([`Backing::create`]).
    pub(crate) fn create_by_name(
        &self,
        rule: &Rule,
        place: &PlaceByName<'_, B>,
        new: &NewFile<'_, B>,
    ) -> Result<Created<B>> {
        let (made_in, owner) = self.owner_in(new.parent, new.caller)?;
        // Outside transactions the file is created in the directory of its name.
        let dir = if std::ptr::eq(place.parent, new.parent) {
            made_in
        } else {
            self.primary.attr(place.parent)?.ino
        };
        let parent = rule::Parent {
            ino: dir,
            sum: place.numbers,
        };
        let count_files = || self.count_files_in(place.parent, rule.lane_count());
        let (lane, reason) = rule.choose(parent, place.name, count_files);
        let allowed = match reason {
            Reason::Line(_) => AllowedLanes::Fixed(lane),
            Reason::Number(_) | Reason::Balance => AllowedLanes::From {
                first: lane,
                lane_count: rule.lane_count(),
            },
        };
        let (lane, created) = self.create_in_allowed(allowed, &owner, new)?;
        self.setup.lanes[lane].progress.count_file();
        rule.note_file(dir, lane);
        Ok(created)
    }

    /// Creates a file that Firn owns, in the lane that its turn determines. The lane's counts do not include the file.
    pub(crate) fn create_by_turn(
        &self,
        rule: &Rule,
        turn: u64,
        new: &NewFile<'_, B>,
    ) -> Result<Created<B>> {
        let (_, owner) = self.owner_in(new.parent, new.caller)?;
        let allowed = AllowedLanes::From {
            first: rule.lane_of_turn(turn),
            lane_count: rule.lane_count(),
        };
        let (_, created) = self.create_in_allowed(allowed, &owner, new)?;
        Ok(created)
    }

    /// Creates a file in the lane of another file.
    pub(crate) fn create_in_lane(&self, lane: usize, new: &NewFile<'_, B>) -> Result<Created<B>> {
        let (_, owner) = self.owner_in(new.parent, new.caller)?;
        let (_, created) = self.create_in_allowed(AllowedLanes::Fixed(lane), &owner, new)?;
        Ok(created)
    }

    /// Creates a file in the primary.
    pub(crate) fn create_in_primary(
        &self,
        parent: &LanesInode<B>,
        new: &NewFile<'_, B>,
    ) -> Result<Created<B>> {
        let made = self
            .primary
            .create(new.caller, new.parent, new.name, new.mode)?;
        let (inode, file, attr) = made;
        let file = LanesFile { file, placed: None };
        Ok((parent.child_inode(new.name, inode), file, attr))
    }

    /// Returns the number of files of a directory on each of the first `count` lanes.
    ///
    /// The numbers are only a hint: at most [`COUNTED_MAX`] entries are counted, and entries that cannot be read are
    /// skipped.
    fn count_files_in(&self, dir: &B::Inode, count: usize) -> Vec<u64> {
        let mut links = Vec::new();
        let mut add = |entry: DirEntry<'_>| {
            if matches!(entry.kind, None | Some(Kind::Symlink)) {
                links.push(entry.name.to_owned());
            }
            links.len() < COUNTED_MAX
        };
        let opened = self.primary.open_dir(dir);
        let _ = opened.and_then(|stream| self.primary.read_dir(&stream, 0, &mut add));
        let mut counts = vec![0; count];
        for name in links {
            let target = self.primary.lookup(dir, &name);
            let target = target.and_then(|(link, _)| self.primary.readlink(&link));
            let lane = target
                .ok()
                .and_then(|target| Some(self.parse_target(&target)?.number));
            if let Some(counted) = lane.and_then(|lane| counts.get_mut(lane)) {
                *counted += 1;
            }
        }
        counts
    }

    /// Creates a file in one of the allowed lanes, and returns the index of the lane. If the first lane is full, gone or
    /// hanging, the next usable lane is taken.
    fn create_in_allowed(
        &self,
        allowed: AllowedLanes,
        owner: &Caller,
        new: &NewFile<'_, B>,
    ) -> Result<(usize, Created<B>)> {
        let mut attempts = Attempts::default();
        let made = match allowed {
            AllowedLanes::Fixed(lane) => self.create_in_one(&mut attempts, lane, owner, new),
            AllowedLanes::From {
                first: lane,
                lane_count: 1,
            } => self.create_in_one(&mut attempts, lane, owner, new),
            AllowedLanes::From { first, lane_count } => {
                let order = (0..lane_count)
                    .map(|step| (first + step) % lane_count)
                    .collect();
                self.create_in_any(&mut attempts, order, owner, new)
            }
        };
        self.abandon_attempts(attempts);
        let (attempt, made) = made?;
        let lane = attempt.lane;
        self.finish_creation(attempt, made, new)
            .map(|created| (lane, created))
    }

    /// Creates a file in this lane. Waits for the lane without a timeout.
    fn create_in_one(
        &self,
        attempts: &mut Attempts<B>,
        lane: usize,
        owner: &Caller,
        new: &NewFile<'_, B>,
    ) -> Result<(Attempt<B>, FileInLane<B>)> {
        self.begin_attempt(attempts, lane, None, owner, new)?;
        match self.await_attempt(attempts, None)? {
            Some(made) => Ok(made),
            None => Err(attempts.failed.unwrap_or(Errno::IO)),
        }
    }

    /// Creates a file in one of the lanes of `order`. A lane that does not answer in time is abandoned for the next one.
    ///
    /// 1. Lanes that answer are tried in order. A full lane is used only if it has room again.
    /// 2. If none of these lanes has room, the lane with the most room is tried first, then the next ones.
    /// 3. If all these lanes fail, all hanging lanes are tried at the same time. The first one that answers is used.
    fn create_in_any(
        &self,
        attempts: &mut Attempts<B>,
        order: Vec<usize>,
        owner: &Caller,
        new: &NewFile<'_, B>,
    ) -> Result<(Attempt<B>, FileInLane<B>)> {
        let lane_hangs = |lane: &usize| self.setup.lanes[*lane].names_hang();
        let (hung, others): (Vec<usize>, Vec<usize>) = order.into_iter().partition(lane_hangs);
        for lane in others {
            self.begin_attempt(attempts, lane, self.required_room(lane), owner, new)?;
            if let Some(made) = self.await_attempt(attempts, Some(ANSWER_TIMEOUT))? {
                return Ok(made);
            }
        }
        // No lane has the required room, so lanes are tried with less room, the one with the most room first.
        attempts.short.sort_by_key(|(_, room)| Reverse(*room));
        for (lane, room) in std::mem::take(&mut attempts.short) {
            attempts.failed.get_or_insert(Errno::NOSPC);
            if room > 0 {
                self.begin_attempt(attempts, lane, None, owner, new)?;
                if let Some(made) = self.await_attempt(attempts, Some(ANSWER_TIMEOUT))? {
                    return Ok(made);
                }
            }
        }
        // All lanes that do not hang have failed, so the first hanging lane that answers is used.
        for lane in hung {
            self.begin_attempt(attempts, lane, None, owner, new)?;
        }
        while !attempts.under_way.is_empty() {
            if let Some(made) = self.await_attempt(attempts, None)? {
                return Ok(made);
            }
        }
        Err(attempts.failed.unwrap_or(Errno::IO))
    }

    /// Returns the free bytes that a lane must have for a new file, or `None` if the lane is not known to be full.
    fn required_room(&self, lane: usize) -> Option<u64> {
        let lane = &self.setup.lanes[lane];
        if lane.progress.state() != LaneState::Full {
            return None;
        }
        // Removed files that are not yet removed from the lane may occupy its room.
        let _ = self.finish_removals();
        Some(self.usual_room())
    }

    /// Creates the link in the staging directory, and starts the creation of the file on a thread of the lane, which may
    /// hang there. `room` is the number of free bytes that the lane must have.
    fn begin_attempt(
        &self,
        attempts: &mut Attempts<B>,
        lane: usize,
        room: Option<u64>,
        owner: &Caller,
        new: &NewFile<'_, B>,
    ) -> Result<()> {
        let staging = self.staging()?;
        let entry = new_entry(new.name)?;
        let lane_of_file = Arc::clone(&self.setup.lanes[lane]);
        let target = lane_of_file.target_of(&entry);
        // Create the link first. If the creation is interrupted, the next mount finds the file by this link.
        let (link, link_attr) = self.primary.symlink(owner, staging, &entry, &target)?;
        let mark = self.mark_of(&link_attr);
        let is_creation_finished = Arc::new(AtomicBool::new(false));
        attempts.under_way.push(Attempt {
            lane,
            entry: entry.clone(),
            link,
            link_attr,
            is_creation_finished: Arc::clone(&is_creation_finished),
        });
        let sender = attempts.sender.clone();
        let (owner, mode) = (*owner, new.mode);
        let topic = Topic {
            kind: 0,
            id: lane as u64,
            part: 0,
        };
        self.workers.run_about(Class::Call, topic, move || {
            // Dropped before the result is sent, so that the caller sees the flag set. Also dropped if the creation
            // panics.
            let end = FinishedOnDrop(is_creation_finished);
            let result = lane_of_file.make_file(&entry, &owner, mode, mark, room);
            drop(end);
            // The caller may already use another lane's file. The removals then remove this file later.
            let _ = sender.send((lane, result));
        });
        Ok(())
    }

    /// Waits until one of the attempts ends, at most for `timeout`. Returns the attempt and the file.
    ///
    /// Returns `None` if no attempt has ended, or if one failed because of its lane; `attempts` then has the reason.
    /// Fails if an attempt failed for any other reason.
    fn await_attempt(
        &self,
        attempts: &mut Attempts<B>,
        timeout: Option<Duration>,
    ) -> Result<Option<(Attempt<B>, FileInLane<B>)>> {
        let answer = match timeout {
            Some(timeout) => attempts.receiver.recv_timeout(timeout).ok(),
            None => attempts.receiver.recv().ok(),
        };
        let Some((lane, result)) = answer else {
            return Ok(None);
        };
        let index = attempts
            .under_way
            .iter()
            .position(|attempt| attempt.lane == lane);
        let attempt = attempts
            .under_way
            .swap_remove(index.expect("one attempt in a lane at a time"));
        let error = match result {
            Ok(made) => return Ok(Some((attempt, made))),
            Err(error) => error,
        };
        self.remove_attempt(&attempt);
        match error {
            CreateError::Lane(errno) => attempts.failed = attempts.failed.or(Some(errno)),
            CreateError::Short(room) => attempts.short.push((lane, room)),
            CreateError::Other(errno) => return Err(errno),
        }
        Ok(None)
    }

    /// Renames the link to the file's name (step 3 of a creation). This is the last step: a failure after it would
    /// leave a name that the caller does not know of.
    fn finish_creation(
        &self,
        attempt: Attempt<B>,
        made: FileInLane<B>,
        new: &NewFile<'_, B>,
    ) -> Result<Created<B>> {
        let staging = self.staging()?;
        let named = self.give_name(staging, &attempt.link, &attempt.entry, new.parent, new.name);
        if let Err(error) = named {
            self.remove_attempt(&attempt);
            return Err(error);
        }
        let link_attr = self.primary.attr(&attempt.link);
        let link_attr = link_attr.unwrap_or(attempt.link_attr);
        let placed = Arc::new(PlacedFile {
            link: attempt.link,
            lane: attempt.lane,
            entry: attempt.entry,
            file: made.inode,
        });
        let opened = LanesFile {
            file: made.file,
            placed: Some(Arc::clone(&placed)),
        };
        let attr = placed_attr(&link_attr, &made.attr);
        Ok((LanesInode::Placed(placed), opened, attr))
    }

    /// Removes the file and the link of an attempt that has ended. If this fails, the next mount removes them.
    fn remove_attempt(&self, attempt: &Attempt<B>) {
        let _ = self.remove_entry(attempt.lane, &attempt.entry);
        let staging = self.staging();
        let _ = staging.and_then(|dir| self.primary.unlink(dir, &attempt.entry));
    }

    /// Hands attempts that are under way over to the pending removals. They remove the files once the lanes have
    /// answered.
    fn abandon_attempts(&self, attempts: Attempts<B>) {
        for attempt in attempts.under_way {
            self.setup.lanes[attempt.lane].note_hang();
            let removal = PendingRemoval {
                link: attempt.link,
                lane: attempt.lane,
                entry: attempt.entry,
                is_creation_finished: attempt.is_creation_finished,
            };
            self.removals.insert(attempt.link_attr.ino, removal);
        }
    }

    /// Renames a link from the staging directory to its name.
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
            // A file system such as NFS does not support RENAME_NOREPLACE.
            Err(Errno::INVAL) => {
                self.primary.link(link, parent, name)?;
                self.primary.unlink(staging, entry)
            }
            result => result,
        }
    }

    /// Returns the inode number of `parent`, and the owner of a file that `caller` creates there. The file in the lane
    /// is created in another directory, so the kernel cannot apply the set-group-id bit of `parent`.
    fn owner_in(&self, parent: &B::Inode, caller: &Caller) -> Result<(u64, Caller)> {
        let attr = self.primary.attr(parent)?;
        if attr.kind != Kind::Dir {
            return Err(Errno::NOTDIR);
        }
        let takes_group = attr.mode & libc::S_ISGID != 0;
        let owner = Caller {
            gid: if takes_group { attr.gid } else { caller.gid },
            ..*caller
        };
        Ok((attr.ino, owner))
    }
}

impl<B: Backing> Lane<B> {
    /// Creates a file in the lane, with the mark of its link. `room` is the number of free bytes that the lane must
    /// have; `None` for no check.
    fn make_file(
        &self,
        entry: &OsStr,
        owner: &Caller,
        mode: u32,
        mark: Mark,
        room: Option<u64>,
    ) -> MakeResult<B> {
        if let Some(room_needed) = room {
            let room_found = self.free_bytes().map_err(CreateError::Lane)?;
            if room_found < room_needed {
                return Err(CreateError::Short(room_found));
            }
        }
        let made = self.call(Call::Name, |backing| {
            let made = backing.create(owner, &backing.root(), entry, mode);
            self.note_change();
            let (inode, file, _) = made?;
            mark::write_mark(backing, &inode, mark)?;
            if let Some(room) = room {
                self.prove_room(backing, &file, room)?;
            }
            let attr = backing.attr_of_file(&file)?;
            Ok(FileInLane { inode, file, attr })
        });
        made.map_err(|error| match error {
            // The lane's directory is missing, or this process may not use it.
            Errno::NOENT | Errno::ACCESS => {
                self.note_state(LaneState::Gone, error);
                CreateError::Lane(error)
            }
            error if state::state_of_error(error).is_some() => CreateError::Lane(error),
            error => CreateError::Other(error),
        })
    }

    /// Makes a full lane usable again. If a quota was exceeded, the free room of the file system is no proof: the
    /// function first tries to allocate `room` bytes, and fails if that fails.
    fn prove_room(&self, backing: &B, file: &B::File, room: u64) -> Result<()> {
        if self.progress.is_over_quota() {
            match backing.allocate(file, 0, 0, room) {
                Ok(()) => backing.set_len(file, 0)?,
                // The file system does not support allocation, so the room is assumed.
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
                Err(error) => return Err(error),
            }
        }
        self.progress.set_state(LaneState::Ok);
        Ok(())
    }
}

/// Returns a new entry in a lane: the beginning of the file's name, which makes listings readable, and a random number.
fn new_entry(name: &OsStr) -> Result<OsString> {
    let bytes = name.as_bytes();
    let mut entry = OsStr::from_bytes(&bytes[..bytes.len().min(NAME_BYTES)]).to_owned();
    let id = getrandom::u64().map_err(|_| Errno::IO)?;
    entry.push(format!(".{id:016x}"));
    Ok(entry)
}

/// Returns whether an entry of a lane has the form of [`new_entry`].
pub(crate) fn is_entry(entry: &OsStr) -> bool {
    let id = entry.as_bytes().rsplit(|&byte| byte == b'.').next();
    entry.as_bytes().contains(&b'.')
        && id.is_some_and(|id| id.len() == ID_DIGITS && id.iter().all(u8::is_ascii_hexdigit))
}
