//! `firn check`: reads an arena, or the logs of files in a backing, and reports their contents and damaged parts. The
//! arena is shared memory with the bytes that are not in the backing yet; a log is one host's writes to a file.
//!
//! Promise: a check changes nothing, so it may run beside a firnd, the process that serves a mount.
//!
//! Relies on `firn_arena` and `firn_log`, which read and verify the stored bytes. This file only turns their results
//! into reports.

use std::path::{Path, PathBuf};

use firn_arena::{Damage as ArenaDamage, SpillFault};
use firn_backing::DirBacking;
use firn_protocol::path::BytePath;
use serde::Serialize;

use crate::error::CheckError;
use crate::lock;
use crate::placement;
use crate::store::PlaceableStore;

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
    /// Number of times that a firnd has opened the arena; each opening starts a new epoch.
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
    /// The fault that makes the spill file unusable; `None` if there is no spill file, or it can be used. A
    /// fault is also described in `damage`.
    #[serde(skip)]
    pub(crate) spill_fault: Option<SpillFault>,
    /// Number of records in the journal.
    pub journal_records: u64,
    /// Number of files in the journal. Each has or had data that only the arena held.
    pub files: u64,
    /// Number of pieces (recorded appends) that wait to be drained.
    pub pieces: u64,
    /// Bytes of these pieces.
    pub held_bytes: u64,
    /// The damaged parts of the arena; empty if it is undamaged.
    pub damage: Vec<Damage>,
}

/// One damaged part of an arena.
#[derive(Clone, Debug, Serialize)]
pub struct Damage {
    /// The damaged part: superblock, journal, piece table, spill file or memory file.
    pub part: String,
    /// The position in that part, such as chunk and slab; empty for the whole part.
    pub place: String,
    /// A sentence that says what is wrong.
    pub message: String,
}

impl CheckReport {
    /// Returns why the spill file was not read, if the reason is that another user could have made the file.
    pub fn spill_distrust(&self) -> Option<String> {
        match &self.spill_fault {
            Some(fault @ SpillFault::Distrusted { .. }) => Some(fault.to_string()),
            _ => None,
        }
    }
}

/// What a check found in the logs of a backing with layout=log.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LogsReport {
    /// The backing of which `.firn/log` was read.
    #[serde(with = "firn_protocol::path::exact")]
    pub backing: PathBuf,
    /// Number of containers: one holds the logs of one generation of a file.
    pub containers: usize,
    /// The faults, one entry each; empty if the logs are undamaged.
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
    /// Whether all synced bytes can still be read despite the fault.
    pub is_harmless: bool,
    /// The fault in one line of text.
    pub message: String,
}

/// Reads the logs of a backing (each has one host's writes to a file) and returns each fault. `notice` is called with a
/// message for each lane, a directory with data of files, that cannot be reached.
///
/// Fails if the backing, the list of its lanes or its directory of logs cannot be read.
pub fn check_logs(
    backing: &Path,
    notice: &mut dyn FnMut(String),
) -> Result<LogsReport, CheckError> {
    let unreadable = |source: std::io::Error| CheckError::Logs {
        backing: backing.into(),
        source,
    };
    let directory = DirBacking::open(backing).map_err(unreadable)?;
    // The logs lie in the lanes if the backing has some, and otherwise in the backing itself.
    let verify_result = match placement::open_to_read(backing, directory, notice)? {
        PlaceableStore::Upper(lanes) => firn_log::verify(&lanes),
        PlaceableStore::Lower(directory) => firn_log::verify(&directory),
    };
    let verified = verify_result.map_err(|errno| unreadable(errno.into()))?;
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

/// Reads the arena file `arena`, the memory with bytes that the backing lacks, and returns a report of its contents and
/// damaged parts. It changes nothing, and a firnd may use the arena meanwhile.
///
/// Fails if the file is no arena, or cannot be read.
pub fn check(arena: &Path) -> Result<CheckReport, CheckError> {
    let in_use = lock::is_arena_in_use(arena);
    let checked = firn_arena::check(arena)?;
    let replay = firn_arena::journal::replay(&checked.journal);
    let mut damage: Vec<Damage> = checked.damage.iter().map(describe_damage).collect();
    // The journal of an arena in use changes during the check, so a record may look damaged.
    if !in_use {
        for journal_damage in &replay.damage {
            damage.push(damage_of_whole_part("journal", journal_damage));
        }
    }
    // The spill file extends the arena on a disk. Its fault is in the list already if pieces (recorded appends) lie in
    // that file. Without such pieces it is added here.
    let has_lost_pieces = checked
        .damage
        .iter()
        .any(|damage| matches!(damage, ArenaDamage::Spill { .. }));
    if let Some(fault) = &checked.spill_fault
        && !has_lost_pieces
    {
        damage.push(damage_of_whole_part("spill file", fault));
    }
    let held_bytes = checked
        .pieces
        .iter()
        .map(|stored| u64::from(stored.piece.len))
        .sum();
    let superblock = &checked.superblock;
    let backing = BytePath::from(superblock.backing_path.as_slice());
    Ok(CheckReport {
        arena: arena.into(),
        in_use,
        backing: (!backing.is_empty()).then_some(backing),
        epoch: checked.epoch,
        arena_bytes: superblock.geometry.data_bytes(),
        chunk_bytes: superblock.geometry.chunk_bytes,
        spill: (superblock.geometry.spill_count > 0).then(|| spill_path(superblock)),
        spill_bytes: superblock.geometry.spill_bytes(),
        spill_fault: checked.spill_fault.clone(),
        journal_records: replay.records,
        files: replay.ledger.len() as u64,
        pieces: checked.pieces.len() as u64,
        held_bytes,
        damage,
    })
}

/// Returns the path of the spill file of an arena, from the superblock.
pub(crate) fn spill_path(superblock: &firn_format::superblock::Superblock) -> PathBuf {
    let bytes = superblock.spill_path.clone();
    PathBuf::from(<std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(bytes))
}

/// Describes damage that has no position in its part of the arena.
fn damage_of_whole_part(part: &str, damage: &impl ToString) -> Damage {
    Damage {
        part: part.into(),
        place: String::new(),
        message: damage.to_string(),
    }
}

/// Describes one damaged part for the report.
///
/// The arena has chunks, each divided into slabs. The piece table has a record of each append in a slab, and words that
/// say how a chunk and its slabs are used. The spill file is the arena's extension on a disk, and a memory file has all
/// bytes of one large file; a slot is the place of a chunk in such a file.
fn describe_damage(damage: &ArenaDamage) -> Damage {
    let (part, place) = match damage {
        ArenaDamage::ClassWord { chunk, .. } | ArenaDamage::HomeWord { chunk, .. } => {
            ("piece table", format!("chunk {chunk}"))
        }
        ArenaDamage::SlabState { slab, .. } | ArenaDamage::PublishCounter { slab, .. } => {
            let place = format!("chunk {}, slab {}", slab.chunk, slab.slab);
            ("piece table", place)
        }
        ArenaDamage::Piece { piece, .. } => {
            let place = format!("chunk {}, record {}", piece.slab.chunk, piece.record);
            ("piece table", place)
        }
        ArenaDamage::Spill { chunk, slot, .. } => {
            ("spill file", format!("chunk {chunk}, slot {slot}"))
        }
        ArenaDamage::MemoryFile { chunk, slot, .. } => {
            ("memory file", format!("chunk {chunk}, slot {slot}"))
        }
    };
    Damage {
        part: part.into(),
        place,
        message: damage.to_string(),
    }
}
