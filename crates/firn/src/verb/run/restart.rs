//! `firn run --restart`: the files of a host that is lost, from the memory of its partner.
//!
//! Promises
//! * A file that is here already, in this host's memory or in the backing, with the same length and time, is not
//!   fetched; one that somebody has written since is not replaced.
//! * What lies under one name of the mount is fetched as a whole before any file of it takes its place. Interrupted in
//!   between, the same command goes on.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use firn_agent::message::{Entry, EntryKind, ErrorKind};
use firn_agent::{
    Carriage, Encrypt, KeyFile, PullError, PullRequest, PullSource, Route, remove_tree,
};
use firn_protocol::path::BytePath;

use crate::failure::{FAILED, Failure};
use crate::progress::Meter;
use crate::{output, text};

/// Where files are until all of a name are there.
const STAGED: &str = ".firn-restart";
/// How long an agent that does not answer is tried.
const PATIENCE: Duration = Duration::from_secs(60);

/// A restart of what one host held.
struct Restart<'a> {
    host: &'a str,
    partner: String,
    route: Route,
    prefix: &'a Path,
    restored_files: u64,
    restored_bytes: u64,
    near_files: u64,
}

/// What a file that a partner has a copy of is here.
#[derive(PartialEq)]
enum Here {
    /// It is not, or it has no bytes yet, or older ones.
    Missing,
    /// The same.
    Same,
    /// Somebody wrote it since.
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
    let Some(partner) = record.partner else {
        without(&format!("{host} had no partner"));
        return Ok(());
    };
    let route = Route::Backing {
        dir: backing.to_owned(),
        encrypt: Encrypt::Auto,
    };
    let entries = match firn_agent::list_entries(&partner, &route, &BytePath::from(host)) {
        Err(PullError::Remote {
            kind: ErrorKind::Missing,
            ..
        }) => {
            without(&format!("{partner} has no copies of {host}"));
            return Ok(());
        }
        entries => entries.map_err(failed)?,
    };
    let mut restart = Restart {
        host,
        partner,
        route,
        prefix,
        restored_files: 0,
        restored_bytes: 0,
        near_files: 0,
    };
    for (name, entries) in group(&entries) {
        restart.restore_name(&name, &entries)?;
    }
    restart.tell();
    Ok(())
}

impl Restart<'_> {
    fn restore_name(&mut self, name: &BytePath, entries: &[&Entry]) -> Result<(), Failure> {
        let wanted = entries
            .iter()
            .any(|entry| self.find(entry) == Some(Here::Missing));
        if wanted {
            let staged = self.prefix.join(STAGED);
            // What an earlier try left.
            remove_tree(&staged).map_err(failed)?;
            self.fetch(name, &staged)?;
            for entry in entries {
                self.place(name, entry, &staged)?;
            }
            return remove_tree(&staged).map_err(failed);
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
        let Ok(found) = self.prefix.join(&entry.path).symlink_metadata() else {
            return Some(Here::Missing);
        };
        let time = (found.mtime(), found.mtime_nsec() as u32);
        Some(match found.len() {
            len if len == bytes && time == (entry.mtime_s, entry.mtime_ns) => Here::Same,
            0 => Here::Missing,
            _ if time > (entry.mtime_s, entry.mtime_ns) => Here::Newer,
            _ => Here::Missing,
        })
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
        };
        let mut meter = Meter::new();
        let pulled = firn_agent::pull(&request, &mut |progress| {
            meter.show(progress.left_bytes, progress.left_files, "restoring");
        });
        drop(meter);
        pulled.map(drop).map_err(failed)
    }

    /// Gives something that was fetched its place.
    fn place(&mut self, name: &BytePath, entry: &Entry, staged: &Path) -> Result<(), Failure> {
        let below = entry.path.as_path().strip_prefix(name);
        let below = below.expect("it is of that name");
        let from = match below.as_os_str().is_empty() {
            true => staged.to_owned(),
            false => staged.join(below),
        };
        let to = self.prefix.join(&entry.path);
        match entry.kind {
            EntryKind::Directory => make_dir(&to, entry.mode),
            EntryKind::File { bytes, .. } if self.find(entry) == Some(Here::Missing) => {
                std::fs::rename(&from, &to).map_err(|error| broken(&to, &error))?;
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

fn make_dir(path: &Path, mode: u32) -> Result<(), Failure> {
    match std::fs::create_dir(path) {
        Ok(()) => std::fs::set_permissions(path, PermissionsExt::from_mode(mode | 0o700)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
    .map_err(|error| broken(path, &error))
}

fn broken(path: &Path, error: &io::Error) -> Failure {
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
