//! Keeps, copies or discards data of files that are missing in the backing directory. Their data is only in the arena,
//! the host's shared memory.
//!
//! Promise: data leaves the arena only after its copy is durable, or if the user discards it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use firn_engine::{Engine, LostFile};
use firn_protocol::path::BytePath;
use serde::Serialize;

use crate::error::RecoverError;
use crate::store::Store;

/// What to do with held data if its file is missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LostPolicy {
    /// Keep the data in the arena.
    #[default]
    Keep,
    /// Copy the data below this directory, make the copies durable, and remove the data from the arena.
    Save(PathBuf),
    /// Give the data up.
    Discard,
}

/// A file that is missing in the backing, and what was done with its data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LostReport {
    /// Path of the file in the backing.
    pub path: BytePath,
    /// Bytes that the arena holds or held for the file.
    pub bytes: u64,
    /// Why the file cannot be found.
    pub reason: String,
    /// Path of the copy, if one was made.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub saved_to: Option<PathBuf>,
    /// The data was given up.
    pub discarded: bool,
}

/// Applies `policy` to each file that is missing in the backing and has data in the arena, the host's shared memory.
/// Returns what was done. If it is not certain that the file is missing, because the backing gave an error, its data
/// stays under each policy.
pub(crate) fn apply_policy(
    engine: &Engine<Store>,
    policy: &LostPolicy,
) -> Result<Vec<LostReport>, RecoverError> {
    let mut reports = Vec::new();
    for lost in engine.lost.list() {
        let mut report = LostReport {
            path: lost.known_path(),
            bytes: lost.bytes,
            reason: lost.reason.clone(),
            saved_to: None,
            discarded: false,
        };
        match policy {
            _ if !lost.is_certain => {}
            LostPolicy::Keep => {}
            LostPolicy::Save(dir) => {
                let copy = dir.join(path_of_copy(&lost));
                if let Err(source) = save_copy(engine, &lost, dir, &copy) {
                    return Err(RecoverError::SaveLost { to: copy, source });
                }
                engine.lost.discard(lost.file);
                report.saved_to = Some(copy);
            }
            LostPolicy::Discard => {
                engine.lost.discard(lost.file);
                report.discarded = true;
            }
        }
        reports.push(report);
    }
    Ok(reports)
}

/// Returns the path of the copy below its directory. The path in the journal may lead out of that directory; then the
/// file's number is used.
fn path_of_copy(lost: &LostFile) -> PathBuf {
    let path = Path::new(std::ffi::OsStr::from_bytes(&lost.path));
    let stays_inside = path
        .components()
        .all(|component| matches!(component, Component::Normal(_)));
    if stays_inside && !lost.path.is_empty() {
        path.to_owned()
    } else {
        format!("file-{}", lost.file).into()
    }
}

/// Copies the data of a file that is missing in the backing to the new file `copy` below `dir`. The copy and its name
/// are durable when this returns. An existing file is an error. After a failure no copy remains.
fn save_copy(engine: &Engine<Store>, lost: &LostFile, dir: &Path, copy: &Path) -> io::Result<()> {
    fs::create_dir_all(copy.parent().unwrap_or(dir))?;
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(copy)?;
    let copy_and_sync = || {
        engine
            .lost
            .read(lost.file, |offset, bytes| file.write_all_at(bytes, offset))?;
        file.sync_all()?;
        sync_parents(copy, dir)
    };
    let copied = copy_and_sync();
    if copied.is_err() {
        // A partial copy would look like a complete one, and the next attempt would fail because it exists.
        let _ = fs::remove_file(copy);
    }
    copied
}

/// Syncs the directories above `path`, up to `dir`.
fn sync_parents(path: &Path, dir: &Path) -> io::Result<()> {
    for parent in path.ancestors().skip(1) {
        if !parent.starts_with(dir) {
            break;
        }
        File::open(parent)?.sync_all()?;
    }
    Ok(())
}
