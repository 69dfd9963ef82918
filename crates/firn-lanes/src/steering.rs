//! Placement on a file system with several servers that lets its user choose the server of a new file
//! (`placement=lustre` and others).
//!
//! Here a *lane* is one such server. The [`Rule`] chooses the lane of a file by its name and directory; a [`Driver`]
//! creates the file there. All other calls are those of an ordinary backing.
//!
//! | file system | a lane is | the lane is chosen by |
//! |---|---|---|
//! | Lustre | an OST, by its index | an extended attribute of the new file, before its objects are allocated |
//! | MooseFS | a storage class, by its name | the tool `mfssetsclass`, for a staging directory for each lane |
//! | others | a text that the program understands | a program of the site, which creates the file |
//!
//! Promise: if the file system refuses a server, the file is still created, on a server that the file system chooses.
//! Such files are counted, and the first one is logged.

use std::ffi::{OsStr, OsString};
use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use firn_backing::dir::steering::{NewFile, Steering};
use firn_backing::{Errno, LaneIndex, Result};
use rustix::fs::{Mode, OFlags, Stat, fstat, openat};

use crate::Rule;
use crate::rule::{Parent, add_numbers};

mod command;
mod lustre;
mod staged;

pub use command::ProgramOfSite;
pub use lustre::Lustre;
pub use staged::{Finder, Staged, find_in_moosefs, open_dirs, tell_moosefs};

/// Creates files on a chosen server, for one kind of file system.
pub trait Driver: Debug + Send + Sync {
    /// Checks whether the driver can choose the server of files in this directory. The error says why not.
    fn check(&self, dir: BorrowedFd<'_>) -> std::result::Result<(), String>;
    /// Creates `new` in this lane, or anywhere if the file system refuses the lane.
    fn create(&self, new: &NewFile<'_>, lane: usize) -> Result<Created>;
    /// Returns the server of a file as the file system reports it, by the name that it has in the list of lanes.
    fn find_server(&self, file: BorrowedFd<'_>) -> Location;
}

/// A new file.
#[derive(Debug)]
pub struct Created {
    /// The file, open for reading and writing.
    pub file: OwnedFd,
    /// `Ok` if the file is on the server of the lane. Otherwise the reason why it is not: the file system has then
    /// chosen a server itself.
    pub acceptance: std::result::Result<(), Refusal>,
}

impl Created {
    fn from_acceptance(file: OwnedFd, acceptance: Result<()>) -> Self {
        let acceptance = acceptance.map_err(Refusal::from);
        Self { file, acceptance }
    }
}

/// Reason why a file system refused a lane.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(String);

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        Self(errno.to_string())
    }
}

/// Servers of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// The whole file is on this server.
    Server(String),
    /// The file is in stripes on this number of servers.
    Striped(u32),
    /// The file system does not report the server.
    Unknown,
}

/// Chooses the servers of the new files of one mount.
#[derive(Debug)]
pub struct SteeredPlacement {
    driver: Box<dyn Driver>,
    rule: Rule,
    /// The server of each lane, as the option names it.
    servers: Vec<OsString>,
    /// Number of files for which each lane was chosen, including refused ones.
    files: Vec<AtomicU64>,
    /// Number of bytes written to files of each lane.
    bytes: Vec<AtomicU64>,
    /// Number of files for which the file system refused the lane.
    refused: AtomicU64,
}

/// Counts of a lane since the mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerFigures {
    /// Number of files for which the lane was chosen.
    pub files: u64,
    /// Number of bytes written to files of the lane.
    pub bytes: u64,
}

impl SteeredPlacement {
    /// Returns the placement for these servers, one for each lane. `rule` must have as many lanes.
    pub fn new(driver: Box<dyn Driver>, servers: Vec<OsString>, rule: Rule) -> Self {
        assert!(!servers.is_empty(), "there is a lane to go to");
        let zero_counts = || servers.iter().map(|_| AtomicU64::new(0)).collect();
        Self {
            driver,
            rule,
            files: zero_counts(),
            bytes: zero_counts(),
            servers,
            refused: AtomicU64::new(0),
        }
    }

    /// Returns the servers of the lanes, with their names in the option.
    pub fn servers(&self) -> &[OsString] {
        &self.servers
    }

    /// Returns the rule that chooses the lane of a file.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// Returns the counts of each lane.
    pub fn figures(&self) -> Vec<ServerFigures> {
        self.files
            .iter()
            .zip(&self.bytes)
            .map(|(files, bytes)| ServerFigures {
                files: files.load(Ordering::Relaxed),
                bytes: bytes.load(Ordering::Relaxed),
            })
            .collect()
    }

    /// Returns the number of files for which the file system refused the lane.
    pub fn refused_files(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns the server of a file.
    pub fn find_server(&self, file: BorrowedFd<'_>) -> Location {
        self.driver.find_server(file)
    }

    /// Counts a refused lane. Logs the first one.
    fn count_refusal(&self, lane: usize, refusal: &Refusal) {
        if self.refused.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                lane,
                server = ?self.servers[lane],
                error = %refusal,
                "the file system refuses the requested server and chooses another; firn status counts such files"
            );
        }
    }
}

impl Steering for SteeredPlacement {
    fn lanes(&self) -> u16 {
        u16::try_from(self.servers.len()).expect("as many as an option lists")
    }

    fn lane_of(&self, parent: LaneIndex, name: &OsStr) -> LaneIndex {
        match self.rule.explain(sum_of_dir(parent), name) {
            Some((lane, _)) => lane_index(lane),
            // The rule chooses another lane only when the file is created.
            None => lane_index(0),
        }
    }

    fn lane_of_dir(&self, parent: LaneIndex, name: &OsStr) -> LaneIndex {
        let sum = add_numbers(sum_of_dir(parent), name);
        lane_index(self.rule.lane_of_turn(sum))
    }

    fn lane_of_turn(&self, turn: u64) -> LaneIndex {
        lane_index(self.rule.lane_of_turn(turn))
    }

    fn count_bytes(&self, lane: LaneIndex, bytes: u64) {
        self.bytes[lane.index()].fetch_add(bytes, Ordering::Relaxed);
    }

    fn create(&self, new: &NewFile<'_>) -> Result<(OwnedFd, LaneIndex)> {
        let Some(turn) = new.turn else {
            return self.create_counted(new);
        };
        // A file with a turn belongs to Firn and is not included in the counts.
        let lane = self.rule.lane_of_turn(turn);
        let created = self.driver.create(new, lane)?;
        Ok(self.finish_creation(created, lane))
    }
}

impl SteeredPlacement {
    /// Creates a file in the lane that the rule chooses, and counts it.
    fn create_counted(&self, new: &NewFile<'_>) -> Result<(OwnedFd, LaneIndex)> {
        let dir = fstat(new.parent)?.st_ino;
        let parent = Parent {
            ino: dir,
            sum: sum_of_dir(new.parent_lane),
        };
        let count_files = || vec![0; self.servers.len()];
        let (lane, _) = self.rule.choose(parent, new.name, count_files);
        let created = self.driver.create(new, lane)?;
        self.files[lane].fetch_add(1, Ordering::Relaxed);
        self.rule.record_file(dir, lane);
        Ok(self.finish_creation(created, lane))
    }

    /// Counts the refusal if the file system refused the lane of a new file. Returns the open file.
    fn finish_creation(&self, created: Created, lane: usize) -> (OwnedFd, LaneIndex) {
        if let Err(refusal) = &created.acceptance {
            self.count_refusal(lane, refusal);
        }
        (created.file, lane_index(lane))
    }
}

/// Returns the sum of the numbers in a directory's path, modulo the number of lanes.
fn sum_of_dir(lane: LaneIndex) -> u64 {
    lane.index() as u64
}

/// Returns the index of a lane for the backing.
fn lane_index(lane: usize) -> LaneIndex {
    LaneIndex::new(u16::try_from(lane).expect("as many as an option lists"))
}

/// Creates a file without choosing a server.
fn create_plain(new: &NewFile<'_>) -> Result<OwnedFd> {
    new.open(OFlags::empty())
}

/// Opens a file that another program has created for this process. If the object is not an empty regular file, a third
/// process has taken the name: fails with ESTALE.
fn open_foreign_file(new: &NewFile<'_>) -> Result<(OwnedFd, Stat)> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = openat(new.parent, new.name, flags, Mode::empty())?;
    let stat = fstat(&file)?;
    if stat.st_mode & libc::S_IFMT != libc::S_IFREG || stat.st_size != 0 {
        return Err(Errno::STALE);
    }
    Ok((file, stat))
}

/// Parses the names of servers, which are numbers on this file system. Fails at the first name that is no number, with
/// a message that has the name and `expected`, a description of a valid name.
fn parse_numbers<N: TryFrom<u64>>(
    servers: &[OsString],
    expected: &str,
) -> std::result::Result<Vec<N>, String> {
    let mut numbers = Vec::new();
    for server in servers {
        let number = server
            .to_str()
            .and_then(|text| text.parse::<u64>().ok())
            .and_then(|number| N::try_from(number).ok());
        let Some(number) = number else {
            return Err(format!("`{}` is not {expected}", server.to_string_lossy()));
        };
        numbers.push(number);
    }
    Ok(numbers)
}

/// Opens a directory for reading, from an `O_PATH` descriptor.
fn reopen_dir(dir: BorrowedFd<'_>) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(dir, c".", flags, Mode::empty())
}

/// Checks that a directory is on the file system with this number. The error says what to do if it is not.
fn check_magic(
    dir: BorrowedFd<'_>,
    magic: u64,
    file_system: &str,
) -> std::result::Result<(), String> {
    let statfs = rustix::fs::fstatfs(dir).map_err(|error| wrong_file_system(file_system, error))?;
    if statfs.f_type.cast_unsigned() == magic {
        Ok(())
    } else {
        Err(wrong_file_system(file_system, Errno::OPNOTSUPP))
    }
}

/// Error for a backing on another file system.
fn wrong_file_system(file_system: &str, error: Errno) -> String {
    format!(
        "the backing is not on {file_system} ({error}): choose the placement that fits its file system"
    )
}
