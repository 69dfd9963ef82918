//! Creates files whose data goes to one of several directories, each on its own server.
//!
//! Terms
//! * The *primary* is the directory with all names. A *lane* is another directory, on its own server, with the data of
//!   some files.
//! * A *placed* file has its data in a lane. Its name in the primary is a symbolic link.
//!
//! A creation has three steps
//! 1. A symbolic link to the new file is created in the staging directory of the primary. By this link, the next mount
//!    finds the file if a crash interrupts the creation.
//! 2. The file is created in its lane, with a mark: an attribute that names the link.
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
use crate::state::CallKind;

/// Maximum number of bytes of a file's name that its entry in the lane repeats, so that a listing of the lane is
/// readable.
const NAME_BYTES: usize = 200;
/// Number of hexadecimal digits at the end of an entry.
const ID_DIGITS: usize = 16;
/// Maximum number of links that are counted when this host creates its first file in a directory.
const COUNTED_MAX: usize = 256;
/// Time within which a lane must create a file. A slower lane counts as hanging, and another lane is tried.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Number of the kind of object on which calls of this crate may hang, for the worker threads: a lane. There is no
/// other kind.
const TOPIC_KIND_LANE: u8 = 0;

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
pub(crate) struct FinalName<'a, B: Backing> {
    pub(crate) parent: &'a B::Inode,
    /// Sum of the numbers in the path of the directory.
    pub(crate) number_sum: u64,
    pub(crate) name: &'a OsStr,
}

/// The owner of a new file.
struct NewFileOwner {
    /// Inode number of the directory in which the file is created.
    dir_ino: u64,
    owner: Caller,
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
    /// The lane was full, and still has less space than a new file must have: this number of bytes.
    TooLittleSpace(u64),
    /// The error concerns the name, the primary or the caller.
    Other(Errno),
}

type CreateResult<B> = std::result::Result<FileInLane<B>, CreateError>;

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

/// An attempt that has created its file.
struct SuccessfulAttempt<B: Backing> {
    attempt: Attempt<B>,
    file: FileInLane<B>,
}

/// The result of an attempt, as its thread sends it.
struct AttemptResult<B: Backing> {
    /// Index of the lane.
    lane: usize,
    result: CreateResult<B>,
}

/// A full lane with less space than a new file must have.
struct FullLane {
    /// Index of the lane.
    lane: usize,
    free_bytes: u64,
}

/// The attempts to create one file.
struct Attempts<B: Backing> {
    /// Attempts whose results have not been received.
    in_progress: Vec<Attempt<B>>,
    sender: mpsc::Sender<AttemptResult<B>>,
    receiver: mpsc::Receiver<AttemptResult<B>>,
    full_lanes: Vec<FullLane>,
    /// The first error of a lane.
    first_error: Option<Errno>,
}

impl<B: Backing> Default for Attempts<B> {
    fn default() -> Self {
        let (sender, receiver) = mpsc::channel();
        Self {
            in_progress: Vec::new(),
            sender,
            receiver,
            full_lanes: Vec::new(),
            first_error: None,
        }
    }
}

impl<B: Backing> Attempts<B> {
    /// Returns the error of a creation that has failed on all lanes.
    fn error(&self) -> Errno {
        self.first_error.unwrap_or(Errno::IO)
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
    /// Creates a file in the lane (directory for data) that the rule chooses by the file's final name. A transaction
    /// creates the file under a temporary name; then `new_file` has that name, and `final_name` the one after the
    /// commit.
    pub(crate) fn create_by_name(
        &self,
        rule: &Rule,
        final_name: &FinalName<'_, B>,
        new_file: &NewFile<'_, B>,
    ) -> Result<Created<B>> {
        let NewFileOwner { dir_ino, owner } = self.owner_of_new_file(new_file)?;
        // Outside transactions the file is created in the directory of its final name. The inode number of that
        // directory is known.
        let is_created_in_final_dir = std::ptr::eq(final_name.parent, new_file.parent);
        let final_dir_ino = if is_created_in_final_dir {
            dir_ino
        } else {
            self.primary.attr(final_name.parent)?.ino
        };
        let parent = rule::Parent {
            ino: final_dir_ino,
            sum: final_name.number_sum,
        };
        let count_files = || self.count_files_in(final_name.parent, rule.lane_count());
        let (chosen_lane, reason) = rule.choose(parent, final_name.name, count_files);
        let allowed = match reason {
            // The user wants the file on this lane, so no other one is tried.
            Reason::Line(_) => AllowedLanes::Fixed(chosen_lane),
            Reason::Number(_) | Reason::Balance => AllowedLanes::From {
                first: chosen_lane,
                lane_count: rule.lane_count(),
            },
        };
        let (lane, created) = self.create_in_allowed(allowed, &owner, new_file)?;
        self.setup.lanes[lane].health.count_file();
        rule.record_file(final_dir_ino, lane);
        Ok(created)
    }

    /// Creates a file that Firn owns, in the lane that its turn determines. The lane's counts do not include the file.
    pub(crate) fn create_by_turn(
        &self,
        rule: &Rule,
        turn: u64,
        new_file: &NewFile<'_, B>,
    ) -> Result<Created<B>> {
        let NewFileOwner { owner, .. } = self.owner_of_new_file(new_file)?;
        let allowed = AllowedLanes::From {
            first: rule.lane_of_turn(turn),
            lane_count: rule.lane_count(),
        };
        let (_, created) = self.create_in_allowed(allowed, &owner, new_file)?;
        Ok(created)
    }

    /// Creates a file in the lane of another file.
    pub(crate) fn create_in_lane(
        &self,
        lane: usize,
        new_file: &NewFile<'_, B>,
    ) -> Result<Created<B>> {
        let NewFileOwner { owner, .. } = self.owner_of_new_file(new_file)?;
        let (_, created) = self.create_in_allowed(AllowedLanes::Fixed(lane), &owner, new_file)?;
        Ok(created)
    }

    /// Creates a file in the primary.
    pub(crate) fn create_in_primary(
        &self,
        parent: &LanesInode<B>,
        new_file: &NewFile<'_, B>,
    ) -> Result<Created<B>> {
        let (inode, file, attr) = self.primary.create(
            new_file.caller,
            new_file.parent,
            new_file.name,
            new_file.mode,
        )?;
        let file = LanesFile { file, placed: None };
        Ok((parent.child_inode(new_file.name, inode), file, attr))
    }

    /// Returns the number of files of a directory on each of the first `count` lanes. A file on a lane is a symbolic
    /// link in the directory.
    ///
    /// The numbers are only a hint: at most [`COUNTED_MAX`] entries are counted, and entries that cannot be read are
    /// skipped.
    fn count_files_in(&self, dir: &B::Inode, count: usize) -> Vec<u64> {
        let mut possible_links = Vec::new();
        let mut add_entry = |entry: DirEntry<'_>| {
            if matches!(entry.kind, None | Some(Kind::Symlink)) {
                possible_links.push(entry.name.to_owned());
            }
            possible_links.len() < COUNTED_MAX
        };
        if let Ok(stream) = self.primary.open_dir(dir) {
            // After an error, the entries that were read are counted.
            let _ = self.primary.read_dir(&stream, 0, &mut add_entry);
        }
        let mut counts = vec![0; count];
        for name in possible_links {
            let Ok((link, _)) = self.primary.lookup(dir, &name) else {
                continue;
            };
            let Ok(target) = self.primary.readlink(&link) else {
                continue;
            };
            if let Some(LinkTarget { number, .. }) = self.parse_target(&target)
                && let Some(count) = counts.get_mut(number)
            {
                *count += 1;
            }
        }
        counts
    }

    /// Creates a file in one of the allowed lanes (directories on servers), and returns the index of the lane. If the
    /// first lane is full, gone or hanging, the next usable lane is taken.
    fn create_in_allowed(
        &self,
        allowed: AllowedLanes,
        owner: &Caller,
        new_file: &NewFile<'_, B>,
    ) -> Result<(usize, Created<B>)> {
        let mut attempts = Attempts::default();
        let outcome = match allowed {
            AllowedLanes::Fixed(lane)
            | AllowedLanes::From {
                first: lane,
                lane_count: 1,
            } => self.create_in_fixed_lane(&mut attempts, lane, owner, new_file),
            AllowedLanes::From { first, lane_count } => {
                let order = (0..lane_count)
                    .map(|step| (first + step) % lane_count)
                    .collect();
                self.create_in_usable_lane(&mut attempts, order, owner, new_file)
            }
        };
        // Lanes that have not answered yet may still create the file; it is removed there later.
        self.abandon_attempts(attempts);
        let SuccessfulAttempt { attempt, file } = outcome?;
        let lane = attempt.lane;
        let created = self.finish_creation(attempt, file, new_file)?;
        Ok((lane, created))
    }

    /// Creates a file in this lane. Waits for the lane without a timeout.
    fn create_in_fixed_lane(
        &self,
        attempts: &mut Attempts<B>,
        lane: usize,
        owner: &Caller,
        new_file: &NewFile<'_, B>,
    ) -> Result<SuccessfulAttempt<B>> {
        self.start_attempt(attempts, lane, None, owner, new_file)?;
        match self.wait_for_attempt(attempts, None)? {
            Some(created) => Ok(created),
            None => Err(attempts.error()),
        }
    }

    /// Creates a file in one of the lanes (directories on servers) of `order`. A lane that does not answer in time is
    /// abandoned for the next one.
    ///
    /// 1. Lanes that answer are tried in order. A full lane is used only if it has enough space again.
    /// 2. If none of these lanes has enough space, the lane with the most space is tried first, then the next ones.
    /// 3. If all these lanes fail, all hanging lanes are tried at the same time. The first one that answers is used.
    fn create_in_usable_lane(
        &self,
        attempts: &mut Attempts<B>,
        order: Vec<usize>,
        owner: &Caller,
        new_file: &NewFile<'_, B>,
    ) -> Result<SuccessfulAttempt<B>> {
        let is_hanging = |lane: &usize| self.setup.lanes[*lane].names_hang();
        let (hanging, answering): (Vec<usize>, Vec<usize>) =
            order.into_iter().partition(is_hanging);
        for lane in answering {
            let required_bytes = self.required_free_bytes(lane);
            self.start_attempt(attempts, lane, required_bytes, owner, new_file)?;
            if let Some(created) = self.wait_for_attempt(attempts, Some(ANSWER_TIMEOUT))? {
                return Ok(created);
            }
        }
        let full_lanes = std::mem::take(&mut attempts.full_lanes);
        if let Some(created) = self.create_in_full_lane(attempts, full_lanes, owner, new_file)? {
            return Ok(created);
        }
        // All lanes that do not hang have failed, so the first hanging lane that answers is used.
        let no_minimum = None;
        let no_timeout = None;
        for lane in hanging {
            self.start_attempt(attempts, lane, no_minimum, owner, new_file)?;
        }
        while !attempts.in_progress.is_empty() {
            if let Some(created) = self.wait_for_attempt(attempts, no_timeout)? {
                return Ok(created);
            }
        }
        Err(attempts.error())
    }

    /// Creates a file in a lane (a directory on a server) that has less space than a new file should have. Tries the
    /// lane with the most space first. Returns `None` if all of them fail.
    fn create_in_full_lane(
        &self,
        attempts: &mut Attempts<B>,
        mut full_lanes: Vec<FullLane>,
        owner: &Caller,
        new_file: &NewFile<'_, B>,
    ) -> Result<Option<SuccessfulAttempt<B>>> {
        full_lanes.sort_by_key(|full| Reverse(full.free_bytes));
        for FullLane { lane, free_bytes } in full_lanes {
            attempts.first_error.get_or_insert(Errno::NOSPC);
            if free_bytes == 0 {
                continue;
            }
            // The lane has less space than it should have, but the file may still fit.
            let no_minimum = None;
            self.start_attempt(attempts, lane, no_minimum, owner, new_file)?;
            let created = self.wait_for_attempt(attempts, Some(ANSWER_TIMEOUT))?;
            if created.is_some() {
                return Ok(created);
            }
        }
        Ok(None)
    }

    /// Returns the free bytes that a lane must have for a new file, or `None` if the lane is not known to be full.
    fn required_free_bytes(&self, lane: usize) -> Option<u64> {
        let lane = &self.setup.lanes[lane];
        if lane.health.state() != LaneState::Full {
            return None;
        }
        // Removed files that are not yet removed from the lane may occupy its space.
        let _ = self.finish_removals();
        Some(self.min_free_bytes())
    }

    /// Starts to create a file in a lane, on a thread of that lane, because the call may hang. Before that, creates the
    /// file's symbolic link in the staging directory. `required_bytes` is the number of free bytes that the lane must
    /// have.
    fn start_attempt(
        &self,
        attempts: &mut Attempts<B>,
        lane: usize,
        required_bytes: Option<u64>,
        owner: &Caller,
        new_file: &NewFile<'_, B>,
    ) -> Result<()> {
        let staging = self.staging()?;
        let entry = new_entry(new_file.name)?;
        let lane_of_file = Arc::clone(&self.setup.lanes[lane]);
        let target = lane_of_file.target_of(&entry);
        // The link is created first. If the creation is interrupted, the next mount finds the file by this link.
        let (link, link_attr) = self.primary.symlink(owner, staging, &entry, &target)?;
        // The file gets this attribute, which names the link.
        let mark = self.expected_mark(&link_attr);
        let is_creation_finished = Arc::new(AtomicBool::new(false));
        attempts.in_progress.push(Attempt {
            lane,
            entry: entry.clone(),
            link,
            link_attr,
            is_creation_finished: Arc::clone(&is_creation_finished),
        });
        let sender = attempts.sender.clone();
        let (owner, mode) = (*owner, new_file.mode);
        let create_file = move || {
            // Dropped before the result is sent, so that the caller sees the flag set. Also dropped if the creation
            // panics.
            let set_finished = FinishedOnDrop(is_creation_finished);
            let result = lane_of_file.create_file(&entry, &owner, mode, mark, required_bytes);
            drop(set_finished);
            // The caller may already use another lane's file. The removals then remove this file later.
            let _ = sender.send(AttemptResult { lane, result });
        };
        self.workers
            .run_on_topic(Class::Call, topic_of_lane(lane), create_file);
        Ok(())
    }

    /// Waits until one of the attempts to create the file ends, at most for `timeout`. Returns the attempt and its
    /// file.
    ///
    /// Returns `None` if no attempt has ended, or if one failed because of its lane (its directory or server);
    /// `attempts` then has the reason. Fails if an attempt failed for any other reason.
    fn wait_for_attempt(
        &self,
        attempts: &mut Attempts<B>,
        timeout: Option<Duration>,
    ) -> Result<Option<SuccessfulAttempt<B>>> {
        let received = match timeout {
            Some(timeout) => attempts.receiver.recv_timeout(timeout).ok(),
            None => attempts.receiver.recv().ok(),
        };
        let Some(AttemptResult { lane, result }) = received else {
            return Ok(None);
        };
        let index = attempts
            .in_progress
            .iter()
            .position(|attempt| attempt.lane == lane)
            .expect("one attempt in a lane at a time");
        let attempt = attempts.in_progress.swap_remove(index);
        let error = match result {
            Ok(file) => return Ok(Some(SuccessfulAttempt { attempt, file })),
            Err(error) => error,
        };
        // The link and the file, if there is one, are removed before the next attempt.
        self.remove_attempt(&attempt);
        match error {
            CreateError::Lane(errno) => {
                attempts.first_error.get_or_insert(errno);
            }
            CreateError::TooLittleSpace(free_bytes) => {
                attempts.full_lanes.push(FullLane { lane, free_bytes });
            }
            CreateError::Other(errno) => return Err(errno),
        }
        Ok(None)
    }

    /// Renames the symbolic link to the file's name (step 3 of a creation). The link leads to `file_in_lane`, the
    /// created file. This is the last step: a failure after it would leave a name that the caller does not know of.
    fn finish_creation(
        &self,
        attempt: Attempt<B>,
        file_in_lane: FileInLane<B>,
        new_file: &NewFile<'_, B>,
    ) -> Result<Created<B>> {
        let staging = self.staging()?;
        if let Err(error) = self.rename_into_place(staging, &attempt, new_file) {
            self.remove_attempt(&attempt);
            return Err(error);
        }
        // The file has its name, so nothing may fail any more. If need be, the attributes are those from before.
        let link_attr = self
            .primary
            .attr(&attempt.link)
            .unwrap_or(attempt.link_attr);
        let attr = placed_attr(&link_attr, &file_in_lane.attr);
        let placed = Arc::new(PlacedFile {
            link: attempt.link,
            lane: attempt.lane,
            entry: attempt.entry,
            file: file_in_lane.inode,
        });
        let open_file = LanesFile {
            file: file_in_lane.file,
            placed: Some(Arc::clone(&placed)),
        };
        Ok((LanesInode::Placed(placed), open_file, attr))
    }

    /// Removes the file and the link of an attempt that has ended. If this fails, the next mount removes them.
    fn remove_attempt(&self, attempt: &Attempt<B>) {
        let _ = self.remove_entry(attempt.lane, &attempt.entry);
        if let Ok(staging) = self.staging() {
            let _ = self.primary.unlink(staging, &attempt.entry);
        }
    }

    /// Hands attempts that are under way over to the pending removals. They remove the files once the lanes have
    /// answered.
    fn abandon_attempts(&self, attempts: Attempts<B>) {
        for attempt in attempts.in_progress {
            self.setup.lanes[attempt.lane].record_hang();
            let removal = PendingRemoval {
                link: attempt.link,
                lane: attempt.lane,
                entry: attempt.entry,
                is_creation_finished: attempt.is_creation_finished,
            };
            self.removals.insert(attempt.link_attr.ino, removal);
        }
    }

    /// Renames the symbolic link of an attempt from the staging directory to the file's name. Fails with EEXIST if the
    /// name exists.
    fn rename_into_place(
        &self,
        staging: &B::Inode,
        attempt: &Attempt<B>,
        new_file: &NewFile<'_, B>,
    ) -> Result<()> {
        let (parent, name) = (new_file.parent, new_file.name);
        let flags = RenameFlags::NOREPLACE;
        match self
            .primary
            .rename(staging, &attempt.entry, parent, name, flags)
        {
            // A file system such as NFS does not support RENAME_NOREPLACE.
            Err(Errno::INVAL) => {
                // A hard link also fails if the name exists.
                self.primary.link(&attempt.link, parent, name)?;
                self.primary.unlink(staging, &attempt.entry)
            }
            outcome => outcome,
        }
    }

    /// Returns the owner of a new file, and the directory in which it is created. The file in the lane is created in
    /// another directory, so the kernel cannot apply the set-group-id bit.
    fn owner_of_new_file(&self, new_file: &NewFile<'_, B>) -> Result<NewFileOwner> {
        let dir_attr = self.primary.attr(new_file.parent)?;
        if dir_attr.kind != Kind::Dir {
            return Err(Errno::NOTDIR);
        }
        let mut owner = *new_file.caller;
        if dir_attr.mode & libc::S_ISGID != 0 {
            owner.gid = dir_attr.gid;
        }
        Ok(NewFileOwner {
            dir_ino: dir_attr.ino,
            owner,
        })
    }
}

impl<B: Backing> Lane<B> {
    /// Creates a file in the lane, under the name `entry`, with a mark: an attribute that names the link in the
    /// primary. `required_bytes` is the number of free bytes that the lane must have; `None` for no check.
    fn create_file(
        &self,
        entry: &OsStr,
        owner: &Caller,
        mode: u32,
        mark: Mark,
        required_bytes: Option<u64>,
    ) -> CreateResult<B> {
        if let Some(required_bytes) = required_bytes {
            let free_bytes = self.free_bytes().map_err(CreateError::Lane)?;
            if free_bytes < required_bytes {
                return Err(CreateError::TooLittleSpace(free_bytes));
            }
        }
        let outcome = self.call(CallKind::Name, |backing| {
            let created = backing.create(owner, &backing.root(), entry, mode);
            // Recorded even after an error, because the name may exist nevertheless.
            self.record_change();
            let (inode, file, _) = created?;
            mark::write_mark(backing, &inode, mark)?;
            if let Some(required_bytes) = required_bytes {
                self.leave_full_state(backing, &file, required_bytes)?;
            }
            let attr = backing.attr_of_file(&file)?;
            Ok(FileInLane { inode, file, attr })
        });
        outcome.map_err(|error| self.explain_failure(error))
    }

    /// Returns whether the lane is the reason why a file was not created.
    fn explain_failure(&self, error: Errno) -> CreateError {
        // The lane's directory is missing, or this process may not use it.
        if matches!(error, Errno::NOENT | Errno::ACCESS) {
            self.record_state(LaneState::Gone, error);
            return CreateError::Lane(error);
        }
        if state::state_of_error(error).is_some() {
            return CreateError::Lane(error);
        }
        CreateError::Other(error)
    }

    /// Makes a full lane usable again. If a quota was exceeded, the free space of the file system is no proof: the
    /// function first tries to allocate `required_bytes` bytes, and fails if that fails.
    fn leave_full_state(&self, backing: &B, file: &B::File, required_bytes: u64) -> Result<()> {
        if self.health.is_over_quota() {
            match backing.allocate(file, 0, 0, required_bytes) {
                Ok(()) => backing.set_len(file, 0)?,
                // The file system does not support allocation, so the space is assumed.
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
                Err(error) => return Err(error),
            }
        }
        self.health.set_state(LaneState::Ok);
        Ok(())
    }
}

/// Returns the topic of the calls of a lane, which hang together.
fn topic_of_lane(lane: usize) -> Topic {
    Topic {
        kind: TOPIC_KIND_LANE,
        id: lane as u64,
        part: 0,
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
    let Some(last_dot) = entry.as_bytes().iter().rposition(|&byte| byte == b'.') else {
        return false;
    };
    let id = &entry.as_bytes()[last_dot + 1..];
    id.len() == ID_DIGITS && id.iter().all(u8::is_ascii_hexdigit)
}
