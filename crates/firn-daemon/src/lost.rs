//! Keeps, copies or discards held data whose file is missing in the backing.
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

/// What to do with held data whose file is missing.
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

/// Applies `policy` to each missing file and returns what was done. If the backing gave an error, a later attempt may
/// find the file, so its data stays in the arena under each policy.
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
        if lost.is_certain {
            match policy {
                LostPolicy::Keep => {}
                LostPolicy::Save(dir) => {
                    let to = dir.join(path_of_copy(&lost));
                    save_copy(engine, &lost, dir, &to).map_err(|source| {
                        RecoverError::SaveLost {
                            to: to.clone(),
                            source,
                        }
                    })?;
                    engine.lost.discard(lost.file);
                    report.saved_to = Some(to);
                }
                LostPolicy::Discard => {
                    engine.lost.discard(lost.file);
                    report.discarded = true;
                }
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
    let inside = path
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    if inside && !lost.path.is_empty() {
        path.to_owned()
    } else {
        format!("file-{}", lost.file).into()
    }
}

/// Copies the data to a new file. The copy and its name are durable when this returns. An existing file is an error.
fn save_copy(engine: &Engine<Store>, lost: &LostFile, dir: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to.parent().unwrap_or(dir))?;
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(to)?;
    let copied = engine
        .lost
        .read(lost.file, |offset, bytes| file.write_all_at(bytes, offset))
        .and_then(|()| file.sync_all())
        .and_then(|()| {
            to.ancestors()
                .skip(1)
                .take_while(|a| a.starts_with(dir))
                .try_for_each(|a| File::open(a)?.sync_all())
        });
    if copied.is_err() {
        // A partial copy would look like a complete one, and the next attempt would fail because it exists.
        let _ = fs::remove_file(to);
    }
    copied
}
