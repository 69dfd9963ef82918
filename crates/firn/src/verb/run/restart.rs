//! `firn run --restart`: restores the files of a lost host from the memory of its partner.
//!
//! The partner of a host is another host, which has copies of the first host's held files (files in memory only). An
//! agent, a process on the partner, serves these copies.
//!
//! Promises
//! * A file that exists here with the same size and time is not fetched. A file that was written later is not replaced.
//! * All files at or below one entry of the mount's root directory are fetched before any of them gets its final name.
//!   After an interruption, the same command continues.
//! * Files are fetched into a directory with mode 0700. From there they are moved by the descriptor of the mount's root
//!   directory, and no symbolic link is followed: other users may create names in the backing.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_agent::message::{Entry, EntryKind, ErrorKind};
use firn_agent::{DataTransport, Encrypt, KeyFile, PullError, PullRequest, PullSource, Route};
use firn_protocol::path::BytePath;
use firn_trust::{open_dir_beneath, open_parent_beneath, remove_beneath};
use rustix::fs::{AtFlags, Mode, OFlags, Stat, fchmod, mkdirat, renameat, statat};
use rustix::io::Errno;

use crate::failure::{FAILED, Failure};
use crate::progress::ProgressMeter;
use crate::{output, text};

/// Private directory in which fetched files are staged until all files below their name are complete.
const STAGING_DIR: &str = ".firn-restart";
/// Name of the staged tree in that directory.
const STAGED_TREE: &str = "tree";
/// The bits of a file's mode that chmod(2) sets.
const PERMISSION_BITS: u32 = 0o7777;
/// Timeout for an agent that does not answer.
const RESTART_TIMEOUT: Duration = Duration::from_secs(60);

/// The restart of one lost host.
struct Restart<'a> {
    /// The lost host.
    host: &'a str,
    /// The partner that has the copies.
    partner: String,
    /// How the agent on the partner is reached.
    route: Route,
    /// The mount point on this host.
    prefix: &'a Path,
    /// Descriptor of the directory `prefix`.
    top: OwnedFd,
    /// Files that were restored.
    restored_files: u64,
    /// Bytes that were restored.
    restored_bytes: u64,
    /// Files that were here already.
    present_files: u64,
}

/// What this mount has of a file that a partner has a copy of.
#[derive(PartialEq)]
enum LocalState {
    /// The copy may replace it: the file does not exist here, cannot be examined, is empty, or is not newer than the
    /// copy.
    Replaceable,
    /// The file has the same size and time here.
    Same,
    /// The file was written here after the copy was made.
    Newer,
}

/// Restores the files that the lost `host` had in memory to the mount at `prefix`, from the copies of its partners (the
/// hosts that kept copies). Files that are here already are not fetched.
///
/// The record that the agent of `host` (the process that served its files) left in the backing names the partners: the
/// last one, and earlier ones. If the host had no partner, or the partner has no copies, prints a notice and returns
/// without an error. Fails if the last partner cannot be reached, or if a file cannot be restored.
pub(super) fn restore_files(host: &str, prefix: &Path, backing: &Path) -> Result<(), Failure> {
    let print_backing_only = |reason: &str| {
        output::print_message(&format!(
            "{reason}: {host} restarts from the data in the backing"
        ));
    };
    let record = match KeyFile::load(backing, host) {
        Ok(record) => record,
        Err(error) if error.is_missing() => {
            print_backing_only(&format!(
                "no agent of {host} has left a record in the backing"
            ));
            return Ok(());
        }
        Err(error) => return Err(restart_failure(error)),
    };
    if record.partner.is_none() {
        print_backing_only(&format!("{host} had no partner"));
        return Ok(());
    }
    let has_former_partners = !record.formers.is_empty();
    // The last partner comes first.
    for (index, partner) in record.holders().enumerate() {
        let is_former = index > 0;
        match restore_from_partner(partner, host, prefix, backing) {
            Ok(PartnerCopies::Restored) => {}
            // With several partners, one without copies is normal: it has not taken them over yet, or no longer has
            // them.
            Ok(PartnerCopies::Missing) if has_former_partners => {}
            Ok(PartnerCopies::Missing) => {
                print_backing_only(&format!("{partner} has no copies of {host}"))
            }
            // The last partner was taking over the copies of this earlier partner. The copies of the last partner are
            // already restored, so this failure is only reported.
            Err(Failure::Message { text, .. }) if is_former => output::print_message(&format!(
                "{partner}, an earlier partner of {host}, may have further copies: {text}"
            )),
            Err(failure) => return Err(failure),
        }
    }
    Ok(())
}

/// What became of the copies on one partner.
enum PartnerCopies {
    /// They are restored, as far as they are missing here.
    Restored,
    /// The partner has none.
    Missing,
}

/// Restores what `host` had in memory only from the copies on one partner, another host. Its agent serves them. Returns
/// [`PartnerCopies::Missing`] if it has none.
fn restore_from_partner(
    partner: &str,
    host: &str,
    prefix: &Path,
    backing: &Path,
) -> Result<PartnerCopies, Failure> {
    let route = Route::Backing {
        dir: backing.to_owned(),
        encrypt: Encrypt::Auto,
    };
    let entries = match firn_agent::list_entries(partner, &route, &BytePath::from(host)) {
        Ok(entries) => entries,
        Err(PullError::Remote {
            kind: ErrorKind::Missing,
            ..
        }) => return Ok(PartnerCopies::Missing),
        Err(error) => return Err(restart_failure(error)),
    };
    let dir_flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top = rustix::fs::open(prefix, dir_flags, Mode::empty())
        .map_err(|errno| path_failure(prefix, errno))?;
    let mut restart = Restart {
        host,
        partner: partner.to_owned(),
        route,
        prefix,
        top,
        restored_files: 0,
        restored_bytes: 0,
        present_files: 0,
    };
    for (name, entries) in group_by_first_name(&entries) {
        restart.restore_tree(&name, &entries)?;
    }
    restart.print_restored();
    Ok(PartnerCopies::Restored)
}

impl Restart<'_> {
    /// Restores all files at or below one name in the root directory of the mount, if one of them is missing or
    /// outdated. They are first fetched into a private staging directory, and get their final names when all of them
    /// are complete.
    fn restore_tree(&mut self, name: &BytePath, entries: &[&Entry]) -> Result<(), Failure> {
        let needs_restore = entries
            .iter()
            .any(|entry| self.local_state(entry) == Some(LocalState::Replaceable));
        if !needs_restore {
            for entry in entries {
                self.record_present_file(entry);
            }
            return Ok(());
        }
        let staging_dir = firn_trust::create_private_dir(&self.top, Path::new(STAGING_DIR))
            .map_err(restart_failure)?;
        let staged_path = self.prefix.join(STAGING_DIR).join(STAGED_TREE);
        // An interrupted restart may have left a staged tree.
        remove_tree(&staging_dir, STAGED_TREE, &staged_path)?;
        self.fetch_tree(name, &staged_path)?;
        for entry in entries {
            self.move_to_final_name(name, entry, &staging_dir)?;
        }
        remove_tree(&self.top, STAGING_DIR, &staged_path)
    }

    /// Compares a file of the partner (the host with the copies) with the file of the same path here. The size and the
    /// modification time decide. Returns `None` if the entry is no regular file.
    fn local_state(&self, entry: &Entry) -> Option<LocalState> {
        let EntryKind::File { bytes, .. } = entry.kind else {
            return None;
        };
        let Ok(local_stat) = self.stat_beneath(&entry.path) else {
            return Some(LocalState::Replaceable);
        };
        // The width of these fields differs between architectures.
        #[allow(clippy::unnecessary_cast)]
        let local_time = (local_stat.st_mtime as i64, local_stat.st_mtime_nsec as u32);
        let copy_time = (entry.mtime_s, entry.mtime_ns);
        let local_bytes = local_stat.st_size as u64;
        Some(if local_bytes == bytes && local_time == copy_time {
            LocalState::Same
        } else if local_bytes == 0 {
            // An empty file is a name without data, so the copy overwrites nothing.
            LocalState::Replaceable
        } else if local_time > copy_time {
            LocalState::Newer
        } else {
            LocalState::Replaceable
        })
    }

    /// Returns the attributes of a file below the top of the mount, without following a symbolic link.
    fn stat_beneath(&self, path: &BytePath) -> Result<Stat, Errno> {
        let dir = open_parent_beneath(&self.top, path.as_path())?;
        statat(dir, last_name(path.as_path()), AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Counts or reports a file that need not be restored: one that is here already, or was written here later.
    fn record_present_file(&mut self, entry: &Entry) {
        match self.local_state(entry) {
            Some(LocalState::Same) => self.present_files += 1,
            Some(LocalState::Newer) => output::print_message(&format!(
                "{} was written after {} was lost: it stays as it is",
                entry.path, self.host
            )),
            Some(LocalState::Replaceable) | None => {}
        }
    }

    /// Fetches everything below `name` from the partner, the host with the copies, into the directory or file `staged`,
    /// where no program looks. Fails if the partner's agent does not serve it.
    fn fetch_tree(&self, name: &BytePath, staged: &Path) -> Result<(), Failure> {
        let request = PullRequest {
            host: self.partner.clone(),
            route: self.route.clone(),
            source: PullSource::Path(Path::new(self.host).join(name).into()),
            carriage: DataTransport::connection_only(),
            target: staged.to_owned(),
            cut: false,
            patience: RESTART_TIMEOUT,
            bytes_max: None,
        };
        let mut meter = ProgressMeter::new();
        let result = firn_agent::pull(&request, &mut |progress| {
            meter.show(progress.left_bytes, progress.left_files, "restoring");
        });
        // The bar disappears before a message is printed.
        drop(meter);
        result.map(drop).map_err(restart_failure)
    }

    /// Moves one fetched file to its final name, or creates the directory of `entry`. A file here that is the same or
    /// newer stays. Links and other objects are not restored.
    ///
    /// `name` is the first component of the entry's path. In the staging directory, the path begins after it.
    fn move_to_final_name(
        &mut self,
        name: &BytePath,
        entry: &Entry,
        staging_dir: &OwnedFd,
    ) -> Result<(), Failure> {
        let final_path = entry.path.as_path();
        let absolute_path = self.prefix.join(final_path);
        let failure = |errno| path_failure(&absolute_path, errno);
        let final_dir = open_parent_beneath(&self.top, final_path).map_err(failure)?;
        let final_name = last_name(final_path);
        match entry.kind {
            EntryKind::Directory => create_dir(&final_dir, final_name, entry.mode).map_err(failure),
            EntryKind::File { bytes, .. }
                if self.local_state(entry) == Some(LocalState::Replaceable) =>
            {
                let path_below_name = final_path
                    .strip_prefix(name)
                    .expect("the path of the entry begins with the name");
                let staged_path = staged_path_of(path_below_name);
                let staged_dir = open_parent_beneath(staging_dir, &staged_path).map_err(failure)?;
                renameat(staged_dir, last_name(&staged_path), &final_dir, final_name)
                    .map_err(failure)?;
                self.restored_files += 1;
                self.restored_bytes += bytes;
                Ok(())
            }
            EntryKind::File { .. } => {
                self.record_present_file(entry);
                Ok(())
            }
            EntryKind::Link { .. } | EntryKind::Other => Ok(()),
        }
    }

    /// Tells the user what was restored.
    fn print_restored(&self) {
        let files = text::count(self.restored_files, "file");
        let bytes = text::bytes(self.restored_bytes);
        let present = match self.present_files {
            0 => String::new(),
            count => format!("; {} were here already", text::count(count, "file")),
        };
        output::print_message(&format!(
            "restored {files}, {bytes}, of {} from the memory of {}{present}",
            self.host, self.partner
        ));
    }
}

/// Returns the path in the staging directory of a file. `path_below_name` is empty if the name itself is the file.
fn staged_path_of(path_below_name: &Path) -> PathBuf {
    if path_below_name.as_os_str().is_empty() {
        // A join with an empty path would add a slash.
        PathBuf::from(STAGED_TREE)
    } else {
        Path::new(STAGED_TREE).join(path_below_name)
    }
}

/// Groups entries by the first component of their paths. The entry of the listed directory itself is left out.
fn group_by_first_name(entries: &[Entry]) -> BTreeMap<BytePath, Vec<&Entry>> {
    let mut entries_by_name: BTreeMap<BytePath, Vec<&Entry>> = BTreeMap::new();
    for entry in entries {
        let Some(first_component) = entry.path.as_path().components().next() else {
            continue;
        };
        let name = BytePath::from(first_component.as_os_str().as_bytes());
        entries_by_name.entry(name).or_default().push(entry);
    }
    entries_by_name
}

fn last_name(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

/// Creates a directory. An existing name is accepted: if it is no directory, the next step below it fails.
fn create_dir(dir: &OwnedFd, name: &OsStr, mode: u32) -> Result<(), Errno> {
    match mkdirat(dir, name, Mode::RWXU) {
        Ok(()) => {
            let created_dir = open_dir_beneath(dir, Path::new(name))?;
            // The owner keeps all permissions, so that files can be moved into the directory.
            fchmod(
                created_dir,
                Mode::from_raw_mode(mode & PERMISSION_BITS) | Mode::RWXU,
            )
        }
        Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// Removes a file or a tree. A missing one is no error.
fn remove_tree(dir: impl AsFd, name: &str, path: &Path) -> Result<(), Failure> {
    match remove_beneath(dir, OsStr::new(name)) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(path_failure(path, errno)),
    }
}

/// Returns the failure to restore one path.
fn path_failure(path: &Path, errno: Errno) -> Failure {
    let error = io::Error::from(errno);
    Failure::new(
        FAILED,
        format!("cannot restore {}: {error}", text::path(path)),
    )
}

/// Returns the failure of the whole restart, with the way to do without it.
fn restart_failure(error: impl std::fmt::Display) -> Failure {
    Failure::new(
        FAILED,
        format!("cannot restart: {error}; without --restart, only the data in the backing is used"),
    )
}
