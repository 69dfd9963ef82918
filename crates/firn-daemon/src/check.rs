//! `firn check`: reads an arena, or the logs in a backing, and reports what they hold and what is damaged.
//!
//! Promise: a check changes nothing.

use std::path::{Path, PathBuf};

use firn_arena::SpillFault;
use firn_backing::DirBacking;
use firn_protocol::path::BytePath;
use serde::Serialize;

use crate::error::CheckError;
use crate::lock;
use crate::placement;

/// What a check of an arena found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CheckReport {
    /// Path of the arena file.
    #[serde(with = "firn_protocol::path::exact")]
    pub arena: PathBuf,
    /// A running firnd has the arena, so counts may change during the check, and damage of the journal is not reported.
    pub in_use: bool,
    /// The backing that the arena was made for, if the arena names one.
    pub backing: Option<BytePath>,
    /// Number of times that a firnd has opened the arena.
    pub epoch: u64,
    /// Bytes of all chunks.
    pub arena_bytes: u64,
    /// Bytes of one chunk.
    pub chunk_bytes: u64,
    /// Path of the spill file, if the arena has one.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub spill: Option<PathBuf>,
    /// Bytes of the spill file.
    pub spill_bytes: u64,
    /// Why the spill file cannot be used, if it cannot.
    #[serde(skip)]
    pub(crate) spill_fault: Option<SpillFault>,
    /// Number of records in the journal.
    pub journal_records: u64,
    /// Number of files that the journal knows.
    pub files: u64,
    /// Number of pieces (recorded appends) that wait to be drained.
    pub pieces: u64,
    /// Bytes of these pieces.
    pub held_bytes: u64,
    /// Each damage that was found; empty if the arena is sound.
    pub damage: Vec<Damage>,
}

/// One damage of an arena.
#[derive(Clone, Debug, Serialize)]
pub struct Damage {
    /// The damaged part: superblock, journal, piece table, spill file or memory file.
    pub part: String,
    /// The position in that part, such as chunk and slab.
    pub place: String,
    /// A sentence that says what is wrong.
    pub message: String,
}

impl CheckReport {
    /// Returns why the spill file was not read, if another user could have made it.
    pub fn spill_distrust(&self) -> Option<String> {
        let fault = self.spill_fault.as_ref();
        let distrusted = fault.filter(|fault| matches!(fault, SpillFault::Distrusted { .. }));
        distrusted.map(ToString::to_string)
    }
}

/// What a check found in the logs of a backing with layout=log.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LogsReport {
    /// The backing whose `.firn/log` was read.
    #[serde(with = "firn_protocol::path::exact")]
    pub backing: PathBuf,
    /// Number of containers: one holds the logs of one generation of a file.
    pub containers: usize,
    /// Each fault that was found; empty if the logs are sound.
    pub findings: Vec<LogFinding>,
}

/// One fault in the logs.
#[derive(Clone, Debug, Serialize)]
pub struct LogFinding {
    /// Name of the container in `.firn/log`.
    pub container: String,
    /// The file in the container, if the fault is in one.
    pub file: Option<String>,
    /// The host that wrote the file.
    pub host: Option<String>,
    /// Bytes from the start of the file to the fault.
    pub offset: Option<u64>,
    /// All bytes that were synced can still be read.
    pub is_harmless: bool,
    /// The fault in one line of text.
    pub message: String,
}

/// Reads the logs of a backing and returns each fault; nothing is changed. `notice` is called with a message for each
/// lane that cannot be reached.
pub fn check_logs(
    backing: &Path,
    notice: &mut dyn FnMut(String),
) -> Result<LogsReport, CheckError> {
    let failed = |source: std::io::Error| CheckError::Logs {
        backing: backing.into(),
        source,
    };
    let directory = DirBacking::open(backing).map_err(failed)?;
    let verified = match placement::open_to_read(backing, directory, notice)? {
        Ok(lanes) => firn_log::verify(&lanes),
        Err(directory) => firn_log::verify(&directory),
    };
    let verified = verified.map_err(|errno| failed(errno.into()))?;
    let findings = verified.findings.into_iter().map(|finding| LogFinding {
        message: finding.to_string(),
        is_harmless: finding.fault.is_harmless(),
        container: finding.container,
        file: finding.file,
        host: finding.host,
        offset: finding.offset,
    });
    Ok(LogsReport {
        backing: backing.into(),
        containers: verified.containers,
        findings: findings.collect(),
    })
}

/// Reads the arena file `arena` and returns what it holds and each damage; nothing is changed.
pub fn check(arena: &Path) -> Result<CheckReport, CheckError> {
    let in_use = lock::is_held(arena);
    let found = firn_arena::check(arena)?;
    let replay = firn_arena::journal::replay(&found.journal);
    let mut damage: Vec<Damage> = found.damage.iter().map(table_damage).collect();
    if !in_use {
        damage.extend(replay.damage.iter().map(|damage| Damage {
            part: "journal".into(),
            place: String::new(),
            message: damage.to_string(),
        }));
    }
    // No piece lies in the spill file, so the piece table did not report its fault, but the user should still see it.
    let named = found
        .damage
        .iter()
        .any(|damage| matches!(damage, firn_arena::Damage::Spill { .. }));
    if let Some(fault) = found.spill_fault.as_ref().filter(|_| !named) {
        let part = "spill file".into();
        let message = fault.to_string();
        damage.push(Damage {
            part,
            place: String::new(),
            message,
        });
    }
    let superblock = &found.superblock;
    let backing = BytePath::from(superblock.backing_path.as_slice());
    Ok(CheckReport {
        arena: arena.into(),
        in_use,
        backing: (!backing.is_empty()).then_some(backing),
        epoch: found.epoch,
        arena_bytes: superblock.geometry.data_bytes(),
        chunk_bytes: superblock.geometry.chunk_bytes,
        spill: (superblock.geometry.spill_count > 0).then(|| spill_path(superblock)),
        spill_bytes: superblock.geometry.spill_bytes(),
        spill_fault: found.spill_fault.clone(),
        journal_records: replay.records,
        files: replay.ledger.len() as u64,
        pieces: found.pieces.len() as u64,
        held_bytes: found
            .pieces
            .iter()
            .map(|stored| u64::from(stored.piece.len))
            .sum(),
        damage,
    })
}

/// Returns the path of the spill file of an arena, from the superblock.
pub(crate) fn spill_path(superblock: &firn_format::superblock::Superblock) -> PathBuf {
    let bytes = superblock.spill_path.clone();
    PathBuf::from(<std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(bytes))
}

/// Describes one damage of the piece table, the spill file or a memory file for the report.
fn table_damage(damage: &firn_arena::Damage) -> Damage {
    use firn_arena::Damage as Found;
    let place = match damage {
        Found::Chunk { chunk, .. } | Found::Home { chunk, .. } => format!("chunk {chunk}"),
        Found::Spill { chunk, slot, .. } => {
            let place = format!("chunk {chunk}, slot {slot}");
            let message = damage.to_string();
            return Damage {
                part: "spill file".into(),
                place,
                message,
            };
        }
        Found::MemoryFile { chunk, slot, .. } => {
            let place = format!("chunk {chunk}, slot {slot}");
            let message = damage.to_string();
            return Damage {
                part: "memory file".into(),
                place,
                message,
            };
        }
        Found::Slab { slab, .. } | Found::Count { slab, .. } => {
            format!("chunk {}, slab {}", slab.chunk, slab.slab)
        }
        Found::Piece { piece, .. } => {
            format!("chunk {}, record {}", piece.slab.chunk, piece.record)
        }
    };
    Damage {
        part: "piece table".into(),
        place,
        message: damage.to_string(),
    }
}
