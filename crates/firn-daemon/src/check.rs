//! `firn check`: what an arena or the logs in a backing hold and what is damaged in them, without changing it.

use std::path::{Path, PathBuf};

use firn_arena::SpillFault;
use firn_backing::DirBacking;
use firn_protocol::path::BytePath;
use serde::Serialize;

use crate::error::CheckError;
use crate::lock;
use crate::placement;

/// What a check found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CheckReport {
    /// The file.
    #[serde(with = "firn_protocol::path::exact")]
    pub arena: PathBuf,
    /// A living firnd has it: counts may be moving and the journal's tail is not judged.
    pub in_use: bool,
    /// What it was made for, if it says so.
    pub backing: Option<BytePath>,
    /// Lifetimes of firnd that it has seen.
    pub epoch: u64,
    /// Bytes of chunks.
    pub arena_bytes: u64,
    /// Bytes of one chunk.
    pub chunk_bytes: u64,
    /// The spill file, if it has one.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub spill: Option<PathBuf>,
    /// Its bytes.
    pub spill_bytes: u64,
    /// What is wrong with it.
    #[serde(skip)]
    pub(crate) spill_fault: Option<SpillFault>,
    /// Records in the journal.
    pub journal_records: u64,
    /// Files that the journal knows.
    pub files: u64,
    /// Pieces that wait to be drained.
    pub pieces: u64,
    /// Their bytes.
    pub held_bytes: u64,
    /// Empty: sound.
    pub damage: Vec<Damage>,
}

/// One thing that is not as it should be.
#[derive(Clone, Debug, Serialize)]
pub struct Damage {
    /// superblock, journal, piece table or spill file.
    pub part: String,
    /// Where in it.
    pub place: String,
    /// What is wrong.
    pub message: String,
}

impl CheckReport {
    /// Why nothing of the spill file was read, where another user could have made it.
    pub fn spill_distrust(&self) -> Option<String> {
        let fault = self.spill_fault.as_ref();
        let distrusted = fault.filter(|fault| matches!(fault, SpillFault::Distrusted { .. }));
        distrusted.map(ToString::to_string)
    }
}

/// What a check found in the logs of files (layout=log).
#[derive(Clone, Debug, Default, Serialize)]
pub struct LogsReport {
    /// In whose `.firn/log` they are.
    #[serde(with = "firn_protocol::path::exact")]
    pub backing: PathBuf,
    /// Generations of files that lie in logs.
    pub containers: usize,
    /// Empty: sound.
    pub findings: Vec<LogFinding>,
}

/// One thing in logs that is not as it should be.
#[derive(Clone, Debug, Serialize)]
pub struct LogFinding {
    /// The container in `.firn/log`.
    pub container: String,
    /// The file in it, if it is one.
    pub file: Option<String>,
    /// The host that wrote it.
    pub host: Option<String>,
    /// Where in the file.
    pub offset: Option<u64>,
    /// Everything that was synced can still be read.
    pub is_harmless: bool,
    /// All of it in one line.
    pub message: String,
}

/// Reads the logs of a backing and changes nothing. `notice` is told of lanes that cannot be reached.
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

/// Reads the arena file `arena` and changes nothing.
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
    // Where no piece is in it, its state is still worth knowing.
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

/// Where the spill file of an arena is.
pub(crate) fn spill_path(superblock: &firn_format::superblock::Superblock) -> PathBuf {
    let bytes = superblock.spill_path.clone();
    PathBuf::from(<std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(bytes))
}

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
