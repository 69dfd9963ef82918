//! `firn run --restart`: the files of a host that is lost, from the memory of its partner.
//!
//! Promises
//! * A file that is here already, in this host's memory or in the backing, with the same length and time, is not
//!   fetched; one that was written since is not replaced.
//! * What lies under one name of the mount is fetched as a whole before any file of it takes its place. Interrupted in
//!   between, the same command goes on.
//! * Files are fetched into a directory of the user's alone, and placed below the top of the mount by its descriptor,
//!   through no link: others may make names in the backing.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_agent::message::{Entry, EntryKind, ErrorKind};
use firn_agent::{Carriage, Encrypt, KeyFile, PullError, PullRequest, PullSource, Route};
use firn_protocol::path::BytePath;
use firn_trust::{open_dir_beneath, open_parent_beneath, remove_beneath};
use rustix::fs::{AtFlags, Mode, OFlags, Stat, fchmod, mkdirat, renameat, statat};
use rustix::io::Errno;

use crate::failure::{FAILED, Failure};
use crate::progress::Meter;
use crate::{output, text};

/// A directory of the user's alone, in which files are until all of a name are there.
const STAGED: &str = ".firn-restart";
/// Their tree in it.
const TREE: &str = "tree";
/// How long an agent that does not answer is tried.
const PATIENCE: Duration = Duration::from_secs(60);

/// A restart of what one host held.
struct Restart<'a> {
    host: &'a str,
    partner: String,
    route: Route,
    prefix: &'a Path,
    /// The directory `prefix`, open.
    top: OwnedFd,
    restored_files: u64,
    restored_bytes: u64,
    near_files: u64,
}

/// State on this mount of a file that a partner has a copy of.
#[derive(PartialEq)]
enum Here {
    /// The file is missing, has no bytes yet, or older ones.
    Missing,
    /// The file is the same here.
    Same,
    /// The file was written since.
    Newer,
}

/// Brings what `host` held to the mount at `prefix`, where it is nowhere nearer.
pub(super) fn restore(host: &str, prefix: &Path, backing: &Path) -> Result<(), Failure> {
    let without = |why: &str| {
        output::say(&format!("{why}: {host} restarts from what the backing has"));
    };
    let record = match KeyFile::load(backing, host) {
        Err(error) if error.is_missing() => {
            without(&format!(
                "no agent of {host} has left a record in the backing"
            ));
            return Ok(());
        }
        record => record.map_err(failed)?,
    };
    if record.partner.is_none() {
        without(&format!("{host} had no partner"));
        return Ok(());
    }
    let formers = record.formers.len();
    for (at, partner) in record.holders().enumerate() {
        match restore_from(partner, host, prefix, backing) {
            Ok(true) => {}
            Ok(false) if formers == 0 => without(&format!("{partner} has no copies of {host}")),
            Ok(false) => {}
            // The partner was taking over from this one, and has what it came to.
            Err(Failure::Told { text, .. }) if at > 0 => output::say(&format!(
                "{partner}, an earlier partner of {host}, may have more: {text}"
            )),
            Err(failure) => return Err(failure),
        }
    }
    Ok(())
}

/// Brings what `host` held from one host that has copies; false: that host has none.
fn restore_from(partner: &str, host: &str, prefix: &Path, backing: &Path) -> Result<bool, Failure> {
    let route = Route::Backing {
        dir: backing.to_owned(),
        encrypt: Encrypt::Auto,
    };
    let entries = match firn_agent::list_entries(partner, &route, &BytePath::from(host)) {
        Err(PullError::Remote {
            kind: ErrorKind::Missing,
            ..
        }) => return Ok(false),
        entries => entries.map_err(failed)?,
    };
    let dir = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top = rustix::fs::open(prefix, dir, Mode::empty());
    let mut restart = Restart {
        host,
        partner: partner.to_owned(),
        route,
        prefix,
        top: top.map_err(|errno| broken(prefix, errno))?,
        restored_files: 0,
        restored_bytes: 0,
        near_files: 0,
    };
    for (name, entries) in group(&entries) {
        restart.restore_name(&name, &entries)?;
    }
    restart.tell();
    Ok(true)
}

impl Restart<'_> {
    fn restore_name(&mut self, name: &BytePath, entries: &[&Entry]) -> Result<(), Failure> {
        let wanted = entries
            .iter()
            .any(|entry| self.find(entry) == Some(Here::Missing));
        if wanted {
            let staged = firn_trust::create_private_dir(&self.top, Path::new(STAGED));
            let staged = staged.map_err(failed)?;
            let path = self.prefix.join(STAGED).join(TREE);
            // What an earlier try left.
            remove(&staged, TREE, &path)?;
            self.fetch(name, &path)?;
            for entry in entries {
                self.place(name, entry, &staged)?;
            }
            return remove(&self.top, STAGED, &path);
        }
        for entry in entries {
            self.tell_near(entry);
        }
        Ok(())
    }

    /// What a file is here; none: it is no file.
    fn find(&self, entry: &Entry) -> Option<Here> {
        let EntryKind::File { bytes, .. } = entry.kind else {
            return None;
        };
        let Ok(found) = self.look_at(&entry.path) else {
            return Some(Here::Missing);
        };
        // The width of these fields differs between architectures.
        #[allow(clippy::unnecessary_cast)]
        let time = (found.st_mtime as i64, found.st_mtime_nsec as u32);
        Some(match found.st_size as u64 {
            len if len == bytes && time == (entry.mtime_s, entry.mtime_ns) => Here::Same,
            0 => Here::Missing,
            _ if time > (entry.mtime_s, entry.mtime_ns) => Here::Newer,
            _ => Here::Missing,
        })
    }

    fn look_at(&self, path: &BytePath) -> Result<Stat, Errno> {
        let dir = open_parent_beneath(&self.top, path.as_path())?;
        statat(dir, last_name(path.as_path()), AtFlags::SYMLINK_NOFOLLOW)
    }

    fn tell_near(&mut self, entry: &Entry) {
        match self.find(entry) {
            Some(Here::Same) => self.near_files += 1,
            Some(Here::Newer) => output::say(&format!(
                "{} was written since {} was lost: it stays as it is",
                entry.path, self.host
            )),
            Some(Here::Missing) | None => {}
        }
    }

    fn fetch(&self, name: &BytePath, staged: &Path) -> Result<(), Failure> {
        let request = PullRequest {
            host: self.partner.clone(),
            route: self.route.clone(),
            source: PullSource::Path(Path::new(self.host).join(name).into()),
            carriage: Carriage::connection(),
            target: staged.to_owned(),
            cut: false,
            patience: PATIENCE,
            bytes_max: None,
        };
        let mut meter = Meter::new();
        let pulled = firn_agent::pull(&request, &mut |progress| {
            meter.show(progress.left_bytes, progress.left_files, "restoring");
        });
        drop(meter);
        pulled.map(drop).map_err(failed)
    }

    /// Gives something that was fetched its place.
    fn place(&mut self, name: &BytePath, entry: &Entry, staged: &OwnedFd) -> Result<(), Failure> {
        let to = entry.path.as_path();
        let shown = self.prefix.join(to);
        let dir = open_parent_beneath(&self.top, to).map_err(|errno| broken(&shown, errno))?;
        match entry.kind {
            EntryKind::Directory => {
                make_dir(&dir, last_name(to), entry.mode).map_err(|errno| broken(&shown, errno))
            }
            EntryKind::File { bytes, .. } if self.find(entry) == Some(Here::Missing) => {
                let below = to.strip_prefix(name).expect("it is of that name");
                let from = if below.as_os_str().is_empty() {
                    PathBuf::from(TREE)
                } else {
                    Path::new(TREE).join(below)
                };
                open_parent_beneath(staged, &from)
                    .and_then(|from_dir| renameat(from_dir, last_name(&from), &dir, last_name(to)))
                    .map_err(|errno| broken(&shown, errno))?;
                self.restored_files += 1;
                self.restored_bytes += bytes;
                Ok(())
            }
            EntryKind::File { .. } => {
                self.tell_near(entry);
                Ok(())
            }
            EntryKind::Link { .. } | EntryKind::Other => Ok(()),
        }
    }

    fn tell(&self) {
        let files = text::count(self.restored_files, "file");
        let bytes = text::bytes(self.restored_bytes);
        let near = match self.near_files {
            0 => String::new(),
            count => format!("; {} were here already", text::count(count, "file")),
        };
        output::say(&format!(
            "restored {files}, {bytes}, of {} from the memory of {}{near}",
            self.host, self.partner
        ));
    }
}

/// What is copied, by the first names of its paths; without what is listed itself.
fn group(entries: &[Entry]) -> BTreeMap<BytePath, Vec<&Entry>> {
    let mut names: BTreeMap<BytePath, Vec<&Entry>> = BTreeMap::new();
    for entry in entries {
        if let Some(first) = entry.path.as_path().components().next() {
            let name = BytePath::from(first.as_os_str().as_bytes());
            names.entry(name).or_default().push(entry);
        }
    }
    names
}

fn last_name(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

/// What is there already is a directory, or what comes below it fails.
fn make_dir(dir: &OwnedFd, name: &OsStr, mode: u32) -> Result<(), Errno> {
    match mkdirat(dir, name, Mode::RWXU) {
        Ok(()) => {
            let made = open_dir_beneath(dir, Path::new(name))?;
            fchmod(made, Mode::from_raw_mode(mode & 0o7777) | Mode::RWXU)
        }
        Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// Removes a file or a tree; nothing may be there.
fn remove(dir: impl AsFd, name: &str, path: &Path) -> Result<(), Failure> {
    match remove_beneath(dir, OsStr::new(name)) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(broken(path, errno)),
    }
}

fn broken(path: &Path, errno: Errno) -> Failure {
    let error = io::Error::from(errno);
    Failure::new(
        FAILED,
        format!("cannot restore {}: {error}", text::path(path)),
    )
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::new(
        FAILED,
        format!("cannot restart: {error}; without --restart the backing alone counts"),
    )
}
