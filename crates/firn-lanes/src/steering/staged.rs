//! The driver for file systems where a new file gets the layout of its directory, such as MooseFS. The layout names the
//! servers of the file's data. A *lane* is one such layout.
//!
//! Each lane has a staging directory, whose layout is set when the directory is opened. A file is created there, and
//! gets its name by a rename. After a crash, files may remain in a staging directory. Their creation was never reported
//! to a program, so the next mount removes them before it creates files.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use firn_backing::dir::steering::NewFile;
use firn_backing::{DirBacking, Errno, Result};
use firn_hosts::own::{self, OwnError, TOP};
use rustix::fs::{self, AtFlags, Gid, Mode, RenameFlags, unlinkat};

use crate::record::open_dir_of_host;

use super::command::{ProgramError, run_program};
use super::{Created, Driver, Location, create_plain, reopen_dir};

/// Name of the directory in `.firn/` that has one subdirectory for each host.
const STAGING: &str = "steering";

/// Placement by staging directories: each file is first created in the directory of its lane.
#[derive(Debug)]
pub struct Staged {
    /// The staging directories of this host, one for each lane, open for reading. Their layouts are set.
    dirs: Vec<OwnedFd>,
    finder: Finder,
}

/// Function that requests the lane of a file from the file system.
pub type Finder = fn(BorrowedFd<'_>) -> Location;

impl Staged {
    /// Creates the placement. Removes all files that a crash left in the directories.
    pub fn new(dirs: Vec<OwnedFd>, finder: Finder) -> Result<Self> {
        for dir in &dirs {
            for entry in fs::Dir::read_from(dir)? {
                let entry = entry?;
                let name = entry.file_name();
                if name != c"." && name != c".." {
                    unlinkat(dir, name, AtFlags::empty())?;
                }
            }
        }
        Ok(Self { dirs, finder })
    }
}

impl Driver for Staged {
    /// Always succeeds, because the file system has already accepted the layouts of the staging directories.
    fn check(&self, _: BorrowedFd<'_>) -> std::result::Result<(), String> {
        Ok(())
    }

    /// Creates a file in the staging directory of the lane, so that it gets that directory's servers, and then moves it
    /// to its name. If that is not possible, the file is created at its name, on servers that the file system chooses.
    fn create(&self, new: &NewFile<'_>, lane: usize) -> Result<Created> {
        // Only the kernel can apply a default ACL to a new file, and only in the directory in which the file is
        // created.
        if has_default_acl(new.parent) {
            let file = create_plain(new)?;
            return Ok(Created::from_acceptance(file, Err(Errno::OPNOTSUPP)));
        }
        let staging = self.dirs[lane].as_fd();
        let entry = format!("{:016x}", getrandom::u64().map_err(|_| Errno::IO)?);
        let entry = OsStr::new(&entry);
        let staged = NewFile {
            parent: staging,
            name: entry,
            ..*new
        };
        let file = create_plain(&staged)?;
        let outcome = inherit_group(&file, new).and_then(|()| link_into_place(staging, entry, new));
        let Err(error) = outcome else {
            return Ok(Created::from_acceptance(file, Ok(())));
        };
        // After an error here the next mount removes the file.
        let _ = unlinkat(staging, entry, AtFlags::empty());
        if error != Errno::XDEV {
            return Err(error);
        }
        // The directory is on another file system, so the file cannot be moved there from the lane.
        let file = create_plain(new)?;
        Ok(Created::from_acceptance(file, Err(error)))
    }

    fn find_server(&self, file: BorrowedFd<'_>) -> Location {
        (self.finder)(file)
    }
}

/// Returns whether a directory has a default ACL.
fn has_default_acl(dir: BorrowedFd<'_>) -> bool {
    let path = format!("/proc/self/fd/{}", dir.as_raw_fd());
    let no_value: &mut [u8] = &mut [];
    fs::getxattr(path, c"system.posix_acl_default", no_value).is_ok()
}

/// Sets the group that the kernel would have set in a directory with the set-group-id bit.
fn inherit_group(file: &OwnedFd, new: &NewFile<'_>) -> Result<()> {
    let parent = fstat_path(new.parent)?;
    if parent.st_mode & libc::S_ISGID == 0 {
        return Ok(());
    }
    fs::fchown(file, None, Some(Gid::from_raw(parent.st_gid)))?;
    // The change of the group cleared the set-id bits.
    fs::fchmod(file, Mode::from_raw_mode(new.mode))
}

fn fstat_path(fd: BorrowedFd<'_>) -> Result<fs::Stat> {
    fs::statat(fd, c"", AtFlags::EMPTY_PATH)
}

/// Renames the staged file `entry` in `dir` to its name. Fails with EEXIST if the name exists. A failure leaves the
/// staged file.
fn link_into_place(dir: BorrowedFd<'_>, entry: &OsStr, new: &NewFile<'_>) -> Result<()> {
    let (parent, name) = (new.parent, new.name);
    match fs::renameat_with(dir, entry, parent, name, RenameFlags::NOREPLACE) {
        // A file system without RENAME_NOREPLACE may support links, or neither.
        Err(Errno::INVAL | Errno::NOSYS) => {}
        outcome => return outcome,
    }
    match fs::linkat(dir, entry, parent, name, AtFlags::empty()) {
        Ok(()) => return unlinkat(dir, entry, AtFlags::empty()),
        Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS) => {}
        Err(error) => return Err(error),
    }
    // Without links, an empty file first reserves the name, and the rename replaces that file.
    drop(create_plain(new)?);
    fs::renameat(dir, entry, parent, name).inspect_err(|_| {
        // The error of the rename counts.
        let _ = unlinkat(parent, name, AtFlags::empty());
    })
}

/// Opens a private staging directory of `host` for each of `lanes` lanes.
pub fn open_dirs(
    primary: &DirBacking,
    host: &str,
    lanes: usize,
) -> std::result::Result<Vec<OwnedFd>, OwnError> {
    let host_dir = open_dir_of_host(primary, STAGING, host)?;
    let mut dirs = Vec::new();
    for lane in 0..lanes {
        let dir = own::make_dir(primary, &host_dir, &format!("lane-{lane}"))
            .map_err(|error| error.below(host).below(STAGING).below(TOP))?;
        dirs.push(reopen_dir(dir.as_fd())?);
    }
    Ok(dirs)
}

/// Sets the storage class of a directory in MooseFS, with the tool of MooseFS.
pub fn tell_moosefs(dir: BorrowedFd<'_>, class: &OsStr) -> std::result::Result<(), ProgramError> {
    let arguments = [class.to_owned(), path_for_tool(dir)];
    run_program(OsStr::new("mfssetsclass"), &arguments, |_| {}).map(drop)
}

/// Returns the lane of a file in MooseFS by its storage class.
pub fn find_in_moosefs(file: BorrowedFd<'_>) -> Location {
    let arguments = [path_for_tool(file)];
    let Ok(line) = run_program(OsStr::new("mfsgetsclass"), &arguments, |_| {}) else {
        return Location::Unknown;
    };
    // The tool writes the path, a colon and the class.
    match line.rsplit_once(": ") {
        Some((_, class)) => Location::Server(class.trim().trim_matches('\'').to_owned()),
        None => Location::Unknown,
    }
}

/// Returns a path that leads the tool through this process's descriptor to the open object.
fn path_for_tool(fd: BorrowedFd<'_>) -> OsString {
    format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()).into()
}
