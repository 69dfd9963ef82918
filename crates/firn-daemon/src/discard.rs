//! `firn recover --discard`: removes the arena of a killed firnd with the data that it holds, without using the
//! backing.
//!
//! Promises
//! * No call is made on the backing, which may be missing or may never answer.
//! * An arena is removed only if it is this user's, and no firnd and no other `firn recover` uses it.
//! * Its spill file and its stub tree are removed too, if only this user could have made them; otherwise they are
//!   reported.

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
    /// One sentence for each thing that could not be removed.
    pub left: Vec<String>,
}

/// Returns a check of each arena of this user in the runtime directory and in `arena-dir`. Unreadable arenas are left
/// out.
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

/// Adds a check of each readable arena in a directory to `reports`.
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

/// Returns a check of the arena of a backing, or of the arena file that `path` names.
///
/// `path` is first compared with the backing paths in the arenas. The backing is only accessed if no arena has that
/// path, to resolve it.
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
    match index {
        Some(index) => Ok(arenas.swap_remove(index)),
        None => Err(RecoverError::NoArena {
            path: path.to_owned(),
            others: arenas.iter().map(describe_other).collect(),
        }),
    }
}

/// Returns the text `; there is ARENA of BACKING`.
fn describe_other(report: &CheckReport) -> String {
    let arena = quoted_path(&report.arena);
    let backing = report.backing.clone().unwrap_or_default();
    format!("; there is {arena} of {backing}")
}

/// Removes an arena with all that it holds, its spill file and its stub tree, and returns what was removed.
///
/// Fails if a process uses the arena, or if another user could replace it.
pub fn discard(arena: &Path) -> Result<DiscardReport, RecoverError> {
    let arena = std::path::absolute(arena).map_err(AttachError::io("read the path"))?;
    check_parent(&arena)?;
    let backing = check(&arena)?.backing.unwrap_or_default();
    let runtime = runtime_dir()?;
    let files = RuntimeFiles::in_dir(&runtime, backing.as_path(), arena.parent());
    let lock = lock_arena(&arena, backing.as_path(), &files, None)?;
    if !is_file_at(&lock, &arena) {
        return Err(RecoverError::NoArena {
            path: arena,
            others: String::new(),
        });
    }
    let report = check(&arena)?;
    let mut left = Vec::new();
    if let Err(error) = frontend::discard_tree(&files) {
        left.push(error.to_string());
    }
    // The arena goes before its other files, which are useless without it.
    std::fs::remove_file(&arena).map_err(AttachError::io("remove the arena"))?;
    firn_arena::remove_memory_files(&arena);
    let spill = report.spill.clone().filter(|spill| {
        let removed = match &report.spill_fault {
            None | Some(SpillFault::Truncated { .. }) => {
                let describe_failure =
                    |error| format!("spill file {}: {error}", quoted_path(spill));
                std::fs::remove_file(spill).map_err(describe_failure)
            }
            Some(fault) => Err(fault.to_string()),
        };
        let is_removed = removed.is_ok();
        left.extend(removed.err());
        is_removed
    });
    Ok(DiscardReport {
        arena,
        held_bytes: report.held_bytes,
        spill,
        left,
    })
}

/// Fails if other users may write to the arena's directory, because they could replace the arena after it was checked.
fn check_parent(arena: &Path) -> Result<(), AttachError> {
    let dir = arena.parent().unwrap_or(Path::new("/"));
    open_arena_dir(dir).map(drop)
}

/// Returns whether the locked file still has this name. A firnd that had the lock before may have removed it.
fn is_file_at(locked: impl AsFd, arena: &Path) -> bool {
    let named = arena.symlink_metadata();
    fstat(locked).is_ok_and(|locked| {
        named.is_ok_and(|named| (named.dev(), named.ino()) == (locked.st_dev, locked.st_ino))
    })
}
