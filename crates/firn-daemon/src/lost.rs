//! What becomes of held data whose file is gone from the backing.

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

/// What to do with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LostPolicy {
    /// It stays in the arena.
    #[default]
    Keep,
    /// It is copied below this directory, made durable there, and leaves the arena.
    Save(PathBuf),
    /// It is given up.
    Discard,
}

/// One such file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LostReport {
    /// Where it was in the backing.
    pub path: BytePath,
    /// Held bytes.
    pub bytes: u64,
    /// Why it has no file to go to.
    pub reason: String,
    /// The copy, if one was made.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub saved_to: Option<PathBuf>,
    /// The bytes were given up.
    pub discarded: bool,
}

/// Deals with every lost file. Those that another try may find (the backing gave an error) stay in the
/// arena under each policy.
pub(crate) fn settle(
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
        if lost.gone {
            match policy {
                LostPolicy::Keep => {}
                LostPolicy::Save(dir) => {
                    let to = dir.join(relative(&lost));
                    save(engine, &lost, dir, &to).map_err(|source| RecoverError::SaveLost {
                        to: to.clone(),
                        source,
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

/// Its path below the directory of copies. The journal's bytes are not trusted to stay below it.
fn relative(lost: &LostFile) -> PathBuf {
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

/// The copy is durable, with its name, before this returns. An existing file is left alone.
fn save(engine: &Engine<Store>, lost: &LostFile, dir: &Path, to: &Path) -> io::Result<()> {
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
        // Half a copy would pass for one, and refuse the next try.
        let _ = fs::remove_file(to);
    }
    copied
}
