//! A new file: first in its lane, then under a name.
//!
//! The kernel locks a directory while a name is made in it. So the making of a name does not wait for a lane that hangs
//! if another one will do. Each lane has a thread of its own for the calls, and what it makes too late is removed.

use std::cmp::Reverse;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::Duration;

use firn_backing::DirEntry;
use firn_workers::{Class, Topic};

use super::*;
use crate::removal::Removal;
use crate::rule::Reason;
use crate::state::Call;

/// Bytes of a file's name that its entry in the lane repeats, so that a listing of the lane is readable.
const NAME_BYTES: usize = 200;
/// Links of a directory that are looked at when it gets its first file from this host.
const COUNTED_MAX: usize = 256;
/// A lane that does not make a file so soon hangs, or is so slow that another one is better.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// What [`Backing::create`] returns.
type Created<B> = (LanesInode<B>, LanesFile<B>, Attr);

/// A file that is to be made.
pub(crate) struct NewFile<'a, B: Backing> {
    pub(crate) caller: &'a Caller,
    pub(crate) parent: &'a B::Inode,
    pub(crate) name: &'a OsStr,
    pub(crate) mode: u32,
}

/// What the rule chooses a lane by: where a file is going to have its name.
pub(crate) struct PlaceByName<'a, B: Backing> {
    pub(crate) parent: &'a B::Inode,
    /// Sum of the numbers in the directory's path.
    pub(crate) numbers: u64,
    pub(crate) name: &'a OsStr,
}

/// Lanes that a file may go to.
#[derive(Clone, Copy)]
enum Wanted {
    /// This one, and no other.
    Fixed(usize),
    /// This lane, or one of those after it; and the number of lanes.
    First(usize, usize),
}

/// A file in a lane that has no name above yet.
struct MadeFile<B: Backing> {
    inode: B::Inode,
    file: B::File,
    attr: Attr,
}

/// Why a file was not made in a lane.
enum CreateError {
    /// The lane failed: another one may do.
    Lane(Errno),
    /// The lane, which had no room, has less than files take: only this many bytes.
    Short(u64),
    /// The name, the primary or the caller.
    Other(Errno),
}

type MakeResult<B> = std::result::Result<MadeFile<B>, CreateError>;

/// The making of a file in one lane. It may go on while another lane is tried.
struct Attempt<B: Backing> {
    lane: usize,
    entry: OsString,
    /// In the staging directory.
    link: B::Inode,
    link_attr: Attr,
    has_ended: Arc<AtomicBool>,
}

/// The lanes that were asked for one file.
struct Attempts<B: Backing> {
    under_way: Vec<Attempt<B>>,
    sender: mpsc::Sender<(usize, MakeResult<B>)>,
    receiver: mpsc::Receiver<(usize, MakeResult<B>)>,
    /// Lanes that have less room than files take, and how much.
    short: Vec<(usize, u64)>,
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

/// Says that a task has ended, also when it panics or never begins.
struct EndOfTask(Arc<AtomicBool>);

impl Drop for EndOfTask {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl<B: Backing> Lanes<B> {
    /// [`Backing::create`], in the lane that the rule chooses.
    pub(crate) fn create_by_name(
        &self,
        rule: &Rule,
        place: &PlaceByName<'_, B>,
        new: &NewFile<'_, B>,
    ) -> Result<Created<B>> {
        let (made_in, owner) = self.owner_in(new.parent, new.caller)?;
        // Outside of transactions the file is made where it has its name.
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
        let wanted = match reason {
            Reason::Line(_) => Wanted::Fixed(lane),
            Reason::Number(_) | Reason::Balance => Wanted::First(lane, rule.lane_count()),
        };
        let (lane, created) = self.create_wanted(wanted, &owner, new)?;
        self.setup.lanes[lane].progress.count_file();
        rule.note_file(dir, lane);
        Ok(created)
    }

    /// Creates a file of Firn's own in the lane of its turn. The lane's figures do not count it.
    pub(crate) fn create_by_turn(
        &self,
        rule: &Rule,
        turn: u64,
        new: &NewFile<'_, B>,
    ) -> Result<Created<B>> {
        let (_, owner) = self.owner_in(new.parent, new.caller)?;
        let wanted = Wanted::First(rule.lane_of_turn(turn), rule.lane_count());
        let (_, created) = self.create_wanted(wanted, &owner, new)?;
        Ok(created)
    }

    /// Creates a file in the lane of another file.
    pub(crate) fn create_in_lane(&self, lane: usize, new: &NewFile<'_, B>) -> Result<Created<B>> {
        let (_, owner) = self.owner_in(new.parent, new.caller)?;
        let (_, created) = self.create_wanted(Wanted::Fixed(lane), &owner, new)?;
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
        Ok((parent.child(new.name, inode), file, attr))
    }

    /// How many files of a directory each of the first `count` lanes has. It is a hint: a part of a large directory says
    /// as much as all of it, and what cannot be read is not counted.
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
                .and_then(|target| Some(self.lane_of_target(&target)?.0));
            if let Some(counted) = lane.and_then(|lane| counts.get_mut(lane)) {
                *counted += 1;
            }
        }
        counts
    }

    /// A new file in the lane that is wanted. Where that one is full, gone or hangs, in the next one that is not, unless it
    /// is fixed.
    fn create_wanted(
        &self,
        wanted: Wanted,
        owner: &Caller,
        new: &NewFile<'_, B>,
    ) -> Result<(usize, Created<B>)> {
        let mut attempts = Attempts::default();
        let made = match wanted {
            Wanted::Fixed(lane) => self.create_in_one(&mut attempts, lane, owner, new),
            Wanted::First(lane, 1) => self.create_in_one(&mut attempts, lane, owner, new),
            Wanted::First(first, count) => {
                let order = (0..count).map(|step| (first + step) % count).collect();
                self.create_in_any(&mut attempts, order, owner, new)
            }
        };
        self.abandon(attempts);
        let (attempt, made) = made?;
        let lane = attempt.lane;
        self.finish(attempt, made, new)
            .map(|created| (lane, created))
    }

    /// In this lane, however long it takes.
    fn create_in_one(
        &self,
        attempts: &mut Attempts<B>,
        lane: usize,
        owner: &Caller,
        new: &NewFile<'_, B>,
    ) -> Result<(Attempt<B>, MadeFile<B>)> {
        self.begin(attempts, lane, None, owner, new)?;
        match self.await_attempt(attempts, None)? {
            Some(made) => Ok(made),
            None => Err(attempts.failed.unwrap_or(Errno::IO)),
        }
    }

    /// In one of these lanes. One that does not answer in a moment is not waited for as long as there is another.
    fn create_in_any(
        &self,
        attempts: &mut Attempts<B>,
        order: Vec<usize>,
        owner: &Caller,
        new: &NewFile<'_, B>,
    ) -> Result<(Attempt<B>, MadeFile<B>)> {
        let lane_hangs = |lane: &usize| self.setup.lanes[*lane].names_hang();
        let (hung, others): (Vec<usize>, Vec<usize>) = order.into_iter().partition(lane_hangs);
        for lane in others {
            self.begin(attempts, lane, self.room_wanted(lane), owner, new)?;
            if let Some(made) = self.await_attempt(attempts, Some(ANSWERS_WITHIN))? {
                return Ok(made);
            }
        }
        // No lane has room for a file as they are; the one that has most is better than none.
        attempts.short.sort_by_key(|(_, room)| Reverse(*room));
        for (lane, room) in std::mem::take(&mut attempts.short) {
            attempts.failed.get_or_insert(Errno::NOSPC);
            if room > 0 {
                self.begin(attempts, lane, None, owner, new)?;
                if let Some(made) = self.await_attempt(attempts, Some(ANSWERS_WITHIN))? {
                    return Ok(made);
                }
            }
        }
        // All that do not fail hang: the first that answers has it.
        for lane in hung {
            self.begin(attempts, lane, None, owner, new)?;
        }
        while !attempts.under_way.is_empty() {
            if let Some(made) = self.await_attempt(attempts, None)? {
                return Ok(made);
            }
        }
        Err(attempts.failed.unwrap_or(Errno::IO))
    }

    /// The room that a lane must have for a new file, if it had none before.
    fn room_wanted(&self, lane: usize) -> Option<u64> {
        let lane = &self.setup.lanes[lane];
        if lane.progress.state() != LaneState::Full {
            return None;
        }
        // Files that are gone above may still take room.
        let _ = self.finish_removals();
        Some(self.usual_room())
    }

    /// Begins to make a file in a lane, by a thread that may hang there. `room`: bytes that the lane must have free.
    fn begin(
        &self,
        attempts: &mut Attempts<B>,
        lane: usize,
        room: Option<u64>,
        owner: &Caller,
        new: &NewFile<'_, B>,
    ) -> Result<()> {
        let staging = self.staging()?;
        let entry = new_entry(new.name)?;
        let place = Arc::clone(&self.setup.lanes[lane]);
        let target = place.target_of(&entry);
        // The link first: from it the next mount finds the file, should this be cut off.
        let (link, link_attr) = self.primary.symlink(owner, staging, &entry, &target)?;
        let mark = self.mark_of(&link_attr);
        let has_ended = Arc::new(AtomicBool::new(false));
        attempts.under_way.push(Attempt {
            lane,
            entry: entry.clone(),
            link,
            link_attr,
            has_ended: Arc::clone(&has_ended),
        });
        let sender = attempts.sender.clone();
        let (owner, mode) = (*owner, new.mode);
        let topic = Topic {
            kind: 0,
            id: lane as u64,
            part: 0,
        };
        self.workers.run_about(Class::Call, topic, move || {
            let end = EndOfTask(has_ended);
            let made = place.make_file(&entry, &owner, mode, mark, room);
            drop(end);
            // The caller may have another one by now, and removes this one later.
            let _ = sender.send((lane, made));
        });
        Ok(())
    }

    /// Waits for one of the attempts, `at_most` that long. None: it failed, as is noted, or none has ended.
    fn await_attempt(
        &self,
        attempts: &mut Attempts<B>,
        at_most: Option<Duration>,
    ) -> Result<Option<(Attempt<B>, MadeFile<B>)>> {
        let ended = match at_most {
            Some(time) => attempts.receiver.recv_timeout(time).ok(),
            None => attempts.receiver.recv().ok(),
        };
        let Some((lane, made)) = ended else {
            return Ok(None);
        };
        let place = attempts
            .under_way
            .iter()
            .position(|attempt| attempt.lane == lane);
        let attempt = attempts
            .under_way
            .swap_remove(place.expect("one attempt in a lane at a time"));
        let error = match made {
            Ok(made) => return Ok(Some((attempt, made))),
            Err(error) => error,
        };
        self.take_back(&attempt);
        match error {
            CreateError::Lane(errno) => attempts.failed = attempts.failed.or(Some(errno)),
            CreateError::Short(room) => attempts.short.push((lane, room)),
            CreateError::Other(errno) => return Err(errno),
        }
        Ok(None)
    }

    /// Gives the file its name, last: once it has it, nothing may fail any more.
    fn finish(
        &self,
        attempt: Attempt<B>,
        made: MadeFile<B>,
        new: &NewFile<'_, B>,
    ) -> Result<Created<B>> {
        let staging = self.staging()?;
        let named = self.give_name(staging, &attempt.link, &attempt.entry, new.parent, new.name);
        if let Err(error) = named {
            self.take_back(&attempt);
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

    /// Removes what an attempt that has ended left.
    fn take_back(&self, attempt: &Attempt<B>) {
        let _ = self.remove_entry(attempt.lane, &attempt.entry);
        let staging = self.staging();
        let _ = staging.and_then(|dir| self.primary.unlink(dir, &attempt.entry));
    }

    /// Leaves attempts that are under way to the removals: the files go once the lane has answered.
    fn abandon(&self, attempts: Attempts<B>) {
        for attempt in attempts.under_way {
            self.setup.lanes[attempt.lane].note_hang();
            let removal = Removal {
                link: attempt.link,
                lane: attempt.lane,
                entry: attempt.entry,
                has_ended: attempt.has_ended,
            };
            self.removals.insert(attempt.link_attr.ino, removal);
        }
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

    /// The inode number of `parent`, and the owner of what `caller` makes there: the link is made elsewhere, where the kernel cannot know of it.
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
    /// A file in the lane, marked as that of its link. `room`: bytes that the lane must have free.
    fn make_file(
        &self,
        entry: &OsStr,
        owner: &Caller,
        mode: u32,
        mark: Mark,
        room: Option<u64>,
    ) -> MakeResult<B> {
        if let Some(wanted) = room {
            let found = self.find_room().map_err(CreateError::Lane)?;
            if found < wanted {
                return Err(CreateError::Short(found));
            }
        }
        let made = self.call(Call::Name, |backing| {
            let made = backing.create(owner, &backing.root(), entry, mode);
            self.note_change();
            let (inode, file, _) = made?;
            mark::write(backing, &inode, mark)?;
            if let Some(room) = room {
                self.prove_room(backing, &file, room)?;
            }
            let attr = backing.attr_of_file(&file)?;
            Ok(MadeFile { inode, file, attr })
        });
        made.map_err(|error| match error {
            // Its directory is not there, or closed to this process.
            Errno::NOENT | Errno::ACCESS => {
                self.note_state(LaneState::Gone, error);
                CreateError::Lane(error)
            }
            error if state::state_behind(error).is_some() => CreateError::Lane(error),
            error => CreateError::Other(error),
        })
    }

    /// A lane that a quota had refused shows room that it does not give: whether it does is tried.
    fn prove_room(&self, backing: &B, file: &B::File, room: u64) -> Result<()> {
        if self.progress.is_over_quota() {
            match backing.allocate(file, 0, 0, room) {
                Ok(()) => backing.set_len(file, 0)?,
                // It cannot be asked.
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
                Err(error) => return Err(error),
            }
        }
        self.progress.set_state(LaneState::Ok);
        Ok(())
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
