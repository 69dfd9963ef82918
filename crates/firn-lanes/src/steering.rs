//! Placement on one file system whose files can be steered to its servers (`placement=lustre` and its like).
//!
//! Names stay what they are; only the creation of a file differs, by what a [`Driver`] does for it. Which lane a file
//! goes to is decided by the same [`Rule`] as that of directories.
//!
//! | file system | a lane is | told by |
//! |---|---|---|
//! | Lustre | an OST, by its index | an extended attribute of the new file, before its objects are made |
//! | MooseFS | a storage class, by its name | the tool `mfssetsclass`, for a staging directory for each lane |
//! | others | what the program takes | a program, which makes the file |
//!
//! Promise: a file system that does not take the wish gets the file all the same, where it puts files by itself. That
//! is counted, and told once in the log.

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

/// How one kind of file system is told.
pub trait Driver: Debug + Send + Sync {
    /// Whether files in this directory can be steered; if not, why.
    fn check(&self, dir: BorrowedFd<'_>) -> std::result::Result<(), String>;
    /// Creates `new` in this lane, or, if the file system does not take that wish, anywhere.
    fn create(&self, new: &NewFile<'_>, lane: usize) -> Result<Created>;
    /// The server that a file lies on, as the file system says; as it is called in the list of lanes.
    fn find_server(&self, file: BorrowedFd<'_>) -> Location;
}

/// A file that was made.
#[derive(Debug)]
pub struct Created {
    /// Open for reading and writing.
    pub file: OwnedFd,
    /// What became of the wish.
    pub wish: std::result::Result<(), Refusal>,
}

impl Created {
    fn from_wish(file: OwnedFd, wish: Result<()>) -> Self {
        let wish = wish.map_err(Refusal::from);
        Self { file, wish }
    }
}

/// Why a file system did not put a file where it was asked to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(String);

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        Self(errno.to_string())
    }
}

/// Where a file lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// As a whole on this server.
    Server(String),
    /// In stripes on this many servers.
    Striped(u32),
    /// The file system does not tell.
    Unknown,
}

/// Steers the new files of one mount.
#[derive(Debug)]
pub struct Steered {
    driver: Box<dyn Driver>,
    rule: Rule,
    servers: Vec<OsString>,
    /// Files that were made in each lane, wishes that were not taken included.
    files: Vec<AtomicU64>,
    bytes: Vec<AtomicU64>,
    refused: AtomicU64,
}

/// What went to a lane since the mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerFigures {
    /// Files that were to be made there.
    pub files: u64,
    /// Bytes that were written to files of the lane.
    pub bytes: u64,
}

impl Steered {
    /// Files go to `servers`, one for each lane, as `rule` says, which has as many lanes.
    pub fn new(driver: Box<dyn Driver>, servers: Vec<OsString>, rule: Rule) -> Self {
        assert!(!servers.is_empty(), "there is a lane to go to");
        let zeros = || servers.iter().map(|_| AtomicU64::new(0)).collect();
        let (files, bytes) = (zeros(), zeros());
        Self {
            driver,
            rule,
            servers,
            files,
            bytes,
            refused: AtomicU64::new(0),
        }
    }

    /// The lanes' servers, as they are called in the option.
    pub fn servers(&self) -> &[OsString] {
        &self.servers
    }

    /// The rule that gives a name its lane.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// What went to each lane so far.
    pub fn figures(&self) -> Vec<ServerFigures> {
        let lanes = self.files.iter().zip(&self.bytes);
        let figures = lanes.map(|(files, bytes)| ServerFigures {
            files: files.load(Ordering::Relaxed),
            bytes: bytes.load(Ordering::Relaxed),
        });
        figures.collect()
    }

    /// Files that the file system did not put where it was asked to.
    pub fn refused_files(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// The server that a file lies on.
    pub fn find_server(&self, file: BorrowedFd<'_>) -> Location {
        self.driver.find_server(file)
    }

    fn count_refusal(&self, lane: usize, refusal: &Refusal) {
        if self.refused.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                lane,
                server = ?self.servers[lane],
                error = %refusal,
                "the file system does not put files on the server that it is asked for; firn status counts them"
            );
        }
    }
}

impl Steering for Steered {
    fn lanes(&self) -> u16 {
        u16::try_from(self.servers.len()).expect("as many as an option lists")
    }

    fn lane_of(&self, parent: LaneIndex, name: &OsStr) -> LaneIndex {
        let found = self.rule.explain(sum_of_dir(parent), name);
        lane_index(found.map_or(0, |(lane, _)| lane))
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
        let (lane, dir) = match new.turn {
            Some(turn) => (self.rule.lane_of_turn(turn), None),
            None => {
                let ino = fstat(new.parent)?.st_ino;
                let sum = sum_of_dir(new.parent_lane);
                let parent = Parent { ino, sum };
                let count_files = || vec![0; self.servers.len()];
                let (lane, _) = self.rule.choose(parent, new.name, count_files);
                (lane, Some(ino))
            }
        };
        let created = self.driver.create(new, lane)?;
        // A file that has a turn is Firn's own.
        if let Some(dir) = dir {
            self.files[lane].fetch_add(1, Ordering::Relaxed);
            self.rule.note_file(dir, lane);
        }
        if let Err(refusal) = &created.wish {
            self.count_refusal(lane, refusal);
        }
        Ok((created.file, lane_index(lane)))
    }
}

/// Sum of the numbers in a directory's path, modulo the lanes.
fn sum_of_dir(lane: LaneIndex) -> u64 {
    lane.index() as u64
}

fn lane_index(lane: usize) -> LaneIndex {
    LaneIndex::new(u16::try_from(lane).expect("as many as an option lists"))
}

/// Creates a file as any file system does.
fn create_plain(new: &NewFile<'_>) -> Result<OwnedFd> {
    new.open(OFlags::empty())
}

/// Opens what another process made for this one: ESTALE if it is no empty regular file, because another one took the
/// name in between.
fn open_made(new: &NewFile<'_>) -> Result<(OwnedFd, Stat)> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = openat(new.parent, new.name, flags, Mode::empty())?;
    let stat = fstat(&file)?;
    if stat.st_mode & libc::S_IFMT != libc::S_IFREG || stat.st_size != 0 {
        return Err(Errno::STALE);
    }
    Ok((file, stat))
}

/// The numbers that a list of servers has; an error names the first that is not `meaning`.
fn parse_numbers<N: TryFrom<u64>>(
    servers: &[OsString],
    meaning: &str,
) -> std::result::Result<Vec<N>, String> {
    let numbers = servers.iter().map(|server| {
        let number = server.to_str().and_then(|text| text.parse::<u64>().ok());
        number
            .and_then(|number| N::try_from(number).ok())
            .ok_or_else(|| format!("`{}` is not {meaning}", server.to_string_lossy()))
    });
    numbers.collect()
}

/// A directory's descriptor that can be read from and asked, from one that only names it.
fn open_to_ask(dir: BorrowedFd<'_>) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(dir, c".", flags, Mode::empty())
}

/// Whether a directory is on the file system with this number.
fn check_magic(
    dir: BorrowedFd<'_>,
    magic: u64,
    file_system: &str,
) -> std::result::Result<(), String> {
    let statfs = rustix::fs::fstatfs(dir).map_err(|error| not_on(file_system, error))?;
    if statfs.f_type.cast_unsigned() == magic {
        Ok(())
    } else {
        Err(not_on(file_system, Errno::OPNOTSUPP))
    }
}

fn not_on(file_system: &str, error: Errno) -> String {
    format!(
        "the backing is not on {file_system} ({error}): choose the placement that fits its file system"
    )
}
