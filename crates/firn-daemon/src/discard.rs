//! `firn recover --discard`: finds the arenas of this user, and removes one that a killed firnd has left, with the data
//! in it, without using the backing. The arena is shared memory with the bytes that are not in the backing directory
//! yet.
//!
//! Promises
//! * No call is made on the backing, which may be missing or may never answer.
//! * An arena is removed only if it is this user's, and no firnd and no other `firn recover` uses it.
//! * Its spill file (the arena's extension on a disk) and its stub tree (empty files on tmpfs) are removed too, if only
//!   this user could have made them; otherwise they are reported.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use firn_arena::SpillFault;
use firn_client::paths::{RuntimeFiles, open_runtime_dir, runtime_dir};
use firn_config::Options;
use firn_format::quote::quoted_path;
use rustix::fs::{Dir, fstat};
use serde::Serialize;

use crate::check::{CheckReport, check};
use crate::error::{AttachError, RecoverError};
use crate::frontend;
use crate::lock::lock_arena;
use crate::runtime_files::open_arena_dir;

/// What `discard` removed.
#[derive(Clone, Debug, Serialize)]
pub struct DiscardReport {
    /// The arena that was removed.
    #[serde(with = "firn_protocol::path::exact")]
    pub arena: PathBuf,
    /// Bytes that the arena held.
    pub held_bytes: u64,
    /// The spill file that was removed with the arena, if there was one.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub spill: Option<PathBuf>,
    /// One sentence for each file or directory that could not be removed.
    pub left: Vec<String>,
}

/// Checks each arena of this user in the runtime directory and in `arena-dir`, and returns the reports. Arenas that
/// cannot be read are left out.
pub fn list_arenas(options: &Options) -> Result<Vec<CheckReport>, RecoverError> {
    let uid = rustix::process::geteuid().as_raw();
    let runtime = runtime_dir()?;
    let mut reports = Vec::new();
    if let Some(dir) = open_runtime_dir(&runtime, uid)? {
        check_arenas_in(&dir, &runtime, &mut reports);
    }
    if let Some(path) = options.arena_dir.as_deref().filter(|path| *path != runtime) {
        check_arenas_in(&open_arena_dir(path)?, path, &mut reports);
    }
    Ok(reports)
}

/// Checks each arena in a directory that can be read, and adds the reports to `reports`.
fn check_arenas_in(dir: &OwnedFd, path: &Path, reports: &mut Vec<CheckReport>) {
    for entry in Dir::read_from(dir).into_iter().flatten().flatten() {
        let name = Path::new(OsStr::from_bytes(entry.file_name().to_bytes()));
        if name.extension() == Some(OsStr::new("arena"))
            && let Ok(report) = check(&path.join(name))
        {
            reports.push(report);
        }
    }
}

/// Finds and checks the arena of a backing, the shared memory with the bytes that the backing lacks, and returns the
/// report. `path` is the backing, or an arena file, which ends in `.arena`. Fails if no arena of this user has that
/// backing.
///
/// `path` is first compared with the backing paths in the arenas. The backing is only accessed if no arena has that
/// path, to resolve its symbolic links.
pub fn find_arena(path: &Path, options: &Options) -> Result<CheckReport, RecoverError> {
    let absolute = std::path::absolute(path).map_err(AttachError::io("read the path"))?;
    if absolute.extension() == Some(OsStr::new("arena")) {
        return Ok(check(&absolute)?);
    }
    let mut arenas = list_arenas(options)?;
    let index_of_backing = |backing: &Path| {
        arenas.iter().position(|report| {
            let recorded = report.backing.as_ref();
            recorded.is_some_and(|recorded| recorded.as_path() == backing)
        })
    };
    let index = index_of_backing(&absolute)
        .or_else(|| index_of_backing(&firn_client::find::resolve(path).ok()?));
    let Some(index) = index else {
        return Err(RecoverError::NoArena {
            path: path.to_owned(),
            others: arenas.iter().map(describe_other_arena).collect(),
        });
    };
    Ok(arenas.swap_remove(index))
}

/// Returns the text `; there is ARENA of BACKING`.
fn describe_other_arena(report: &CheckReport) -> String {
    let arena = quoted_path(&report.arena);
    let backing = report.backing.clone().unwrap_or_default();
    format!("; there is {arena} of {backing}")
}

/// Removes an arena (memory with data that its backing lacks), its spill file (the arena's extension on a disk) and its
/// stub tree (empty files on tmpfs), and returns what was removed. Only the removal of the arena itself must succeed.
///
/// Fails if a process uses the arena, or if another user could replace it.
pub fn discard(arena: &Path) -> Result<DiscardReport, RecoverError> {
    let arena = std::path::absolute(arena).map_err(AttachError::io("read the path"))?;
    check_parent(&arena)?;
    let backing = check(&arena)?.backing.unwrap_or_default();
    let runtime = runtime_dir()?;
    let files = RuntimeFiles::in_dir(&runtime, backing.as_path(), arena.parent());
    let lock = lock_arena(&arena, backing.as_path(), &files, None)?;
    // Another process may have removed the arena before it was locked.
    if !is_file_at(&lock, &arena) {
        return Err(RecoverError::NoArena {
            path: arena,
            others: String::new(),
        });
    }
    // The check is made under the lock, so it describes what is removed.
    let report = check(&arena)?;
    let mut not_removed = Vec::new();
    if let Err(error) = frontend::discard_tree(&files) {
        not_removed.push(error.to_string());
    }
    // The arena goes before its other files, which are useless without it.
    std::fs::remove_file(&arena).map_err(AttachError::io("remove the arena"))?;
    firn_arena::remove_memory_files(&arena);
    let mut removed_spill = None;
    if let Some(spill) = report.spill {
        match remove_spill_file(&spill, report.spill_fault.as_ref()) {
            Ok(()) => removed_spill = Some(spill),
            Err(reason) => not_removed.push(reason),
        }
    }
    Ok(DiscardReport {
        arena,
        held_bytes: report.held_bytes,
        spill: removed_spill,
        left: not_removed,
    })
}

/// Removes the spill file of an arena, unless its fault shows that another user could have made it. The error is a
/// sentence.
fn remove_spill_file(spill: &Path, fault: Option<&SpillFault>) -> Result<(), String> {
    match fault {
        None | Some(SpillFault::Truncated { .. }) => std::fs::remove_file(spill)
            .map_err(|error| format!("spill file {}: {error}", quoted_path(spill))),
        Some(fault) => Err(fault.to_string()),
    }
}

/// Fails if other users may write to the arena's directory, because they could replace the arena after it was checked.
fn check_parent(arena: &Path) -> Result<(), AttachError> {
    let dir = arena.parent().unwrap_or(Path::new("/"));
    open_arena_dir(dir).map(drop)
}

/// Returns whether the locked file still has this name. A firnd that had the lock before may have removed it.
fn is_file_at(locked: impl AsFd, arena: &Path) -> bool {
    let (Ok(named), Ok(locked)) = (arena.symlink_metadata(), fstat(locked)) else {
        return false;
    };
    (named.dev(), named.ino()) == (locked.st_dev, locked.st_ino)
}
