//! Finds the arena of a backing directory or makes one: its file, its spill file, and the data of an earlier firnd in
//! it.
//!
//! Terms
//! * The *arena* is shared memory with the bytes that are not in the backing yet.
//! * *firnd* is the process that serves a mount. If it is killed, its arena remains.
//! * The *spill file* holds chunks of the arena on a disk of the host.
//!
//! Promises
//! * An arena that holds data is never changed in shape and never removed here.
//! * An arena that belongs to another backing, or has a spill file that another user could have made, is an error.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use firn_arena::{Arena, ArenaError, Damage, Identity, SpillFault, StoredPiece, Topology};
use firn_engine::StoredArena;
use firn_format::quote::quoted_path;
use firn_transact::ArenaId;

use crate::error::AttachError;
use crate::lower_store::{AttachPurpose, AttachTarget};
use crate::runtime_files::exists;
use crate::spill::{self, WantedGeometry};

/// An arena that the engine does not have yet.
pub(crate) enum FoundArena {
    /// The arena was made just now and holds nothing.
    Fresh(Box<Arena>),
    /// The arena holds what an earlier firnd left; `damaged` says whether part of it could not be read.
    Used {
        stored: Box<StoredArena>,
        damaged: bool,
    },
}

impl FoundArena {
    fn used(arena: Arena, stored: Vec<StoredPiece>, damaged: bool) -> Self {
        Self::Used {
            stored: Box::new(StoredArena::open(arena, stored)),
            damaged,
        }
    }

    /// Returns the id that distinguishes this arena from all others.
    pub(crate) fn id(&self) -> ArenaId {
        match self {
            Self::Fresh(arena) => arena.superblock().uuid,
            Self::Used { stored, .. } => stored.arena().superblock().uuid,
        }
    }

    /// Drops the bytes that only the arena has of files below `scopes`, which are directories of transactions that were
    /// undone.
    pub(crate) fn drop_below(&mut self, scopes: &[Vec<u8>]) -> Result<(), AttachError> {
        match self {
            Self::Fresh(_) => Ok(()),
            Self::Used { stored, .. } => Ok(stored.drop_files_below(scopes)?),
        }
    }
}

/// The files of an arena that was made just now. They are removed if the mount fails; otherwise a later command would
/// report an arena with data.
pub(crate) struct NewArenaFiles {
    files: Vec<PathBuf>,
}

impl NewArenaFiles {
    /// Returns the files of an arena that was made just now; none for an arena that existed before.
    pub(crate) fn from_found(found: &FoundArena) -> Self {
        let FoundArena::Fresh(arena) = found else {
            return Self { files: Vec::new() };
        };
        // The arena is removed first, because the spill file is useless without it.
        let mut files = vec![arena.path().to_owned()];
        files.extend(arena.spill_file().map(|file| file.path().to_owned()));
        Self { files }
    }

    /// Keeps the files, because the mount has succeeded.
    pub(crate) fn keep(mut self) {
        self.files.clear();
    }
}

impl Drop for NewArenaFiles {
    fn drop(&mut self) {
        for file in &self.files {
            if let Err(error) = std::fs::remove_file(file) {
                tracing::warn!(%error, file = %quoted_path(file), "cannot remove the arena of a mount that failed");
            }
        }
    }
}

/// Returns the arena of a backing, the shared memory with the bytes that are not in the backing yet; makes one if there
/// is none.
///
/// An arena that holds data keeps its shape (the sizes of arena, chunks and spill file), even if the options differ. An
/// empty arena of another shape is replaced. Fails as [`refuse_foreign_arena`] and [`report_damage`] say.
///
/// The caller has locked the arena file if it exists. `notice` is called with each message for the user.
pub(crate) fn find_or_create_arena(
    target: &AttachTarget<'_>,
    identity: &Identity,
    notice: &mut dyn FnMut(String),
) -> Result<FoundArena, AttachError> {
    let &AttachTarget { files, options, .. } = target;
    let path = &files.arena;
    let WantedGeometry {
        geometry,
        spill_path,
    } = spill::wanted_geometry(files, options)?;
    let topology = match &options.numa_topology {
        Some(dir) => Topology::read(dir),
        None => Topology::one(),
    };
    let create_arena = || Arena::create_on(path, geometry, identity, &spill_path, &topology);
    if !exists(path) {
        return Ok(FoundArena::Fresh(Box::new(create_arena()?)));
    }
    let (arena, stored, damage) = Arena::attach_on(path, &topology)?;
    refuse_foreign_arena(path, identity, &arena)?;
    report_damage(target, identity, &arena, &damage, notice)?;
    let is_damaged = !damage.is_empty();
    let has_wanted_shape = *arena.geometry() == geometry && spill::is_at(&arena, &spill_path);
    if has_wanted_shape && arena.spill_fault().is_none() {
        return Ok(FoundArena::used(arena, stored, is_damaged));
    }
    let is_empty = stored.is_empty() && !is_damaged && !journal_has_work(&arena);
    if is_empty {
        remove_empty_arena(arena)?;
        return Ok(FoundArena::Fresh(Box::new(create_arena()?)));
    }
    let present = arena.geometry();
    notice(format!(
        "the arena holds data, so it keeps arena-size={}, chunk-size={} and spill-size={}; new values count at a mount \
         that finds it empty",
        present.data_bytes(),
        present.chunk_bytes,
        present.spill_bytes()
    ));
    Ok(FoundArena::used(arena, stored, is_damaged))
}

/// Fails if an existing arena was made for another backing.
fn refuse_foreign_arena(
    path: &Path,
    identity: &Identity,
    arena: &Arena,
) -> Result<(), AttachError> {
    let superblock = arena.superblock();
    if !superblock.is_for_backing(identity.backing.as_os_str().as_bytes()) {
        return Err(AttachError::ArenaForeign {
            path: path.to_owned(),
            found: quoted_path(&PathBuf::from(os_string(&superblock.backing_path))),
        });
    }
    Ok(())
}

/// Reports each damaged part of an existing arena to the user. The arena is shared memory with the bytes that the
/// backing lacks; the spill file on a disk has those bytes that did not fit in memory.
///
/// Fails if another user could have made the spill file, or if a mount would lose data with that file. A recovery may
/// continue without that data.
fn report_damage(
    target: &AttachTarget<'_>,
    identity: &Identity,
    arena: &Arena,
    damage: &[Damage],
    notice: &mut dyn FnMut(String),
) -> Result<(), AttachError> {
    let path = &target.files.arena;
    if let Some(fault @ SpillFault::Distrusted { .. }) = arena.spill_fault() {
        return Err(ArenaError::Spill(fault.clone()).into());
    }
    for damaged_part in damage {
        notice(format!("arena {}: {damaged_part}", quoted_path(path)));
    }
    let Some(spill_fault) = arena.spill_fault() else {
        return Ok(());
    };
    let fault = spill_fault.to_string();
    let has_lost_data = damage
        .iter()
        .any(|damaged_part| matches!(damaged_part, Damage::Spill { .. }));
    if has_lost_data && target.purpose == AttachPurpose::Mount {
        return Err(AttachError::SpillGone {
            arena: path.clone(),
            fault,
            backing: identity.backing.clone(),
        });
    }
    notice(format!("{fault}: no data moves to the spill file"));
    Ok(())
}

/// Removes an arena that holds nothing, so that one of another shape can be made.
fn remove_empty_arena(arena: Arena) -> Result<(), AttachError> {
    let path = arena.path().to_owned();
    let spill = arena.spill_file().map(|file| file.path().to_owned());
    drop(arena);
    std::fs::remove_file(&path)
        .map_err(AttachError::io("remove the empty arena of another size"))?;
    firn_arena::remove_memory_files(&path);
    if let Some(spill) = spill {
        std::fs::remove_file(spill).map_err(AttachError::io("remove the empty spill file"))?;
    }
    Ok(())
}

/// Converts the bytes of a path that the arena has stored.
fn os_string(path: &[u8]) -> std::ffi::OsString {
    std::os::unix::ffi::OsStringExt::from_vec(path.to_vec())
}

/// Returns whether the journal has damage, or a truncation that may not be done yet. Both can be there even if no piece
/// is left.
fn journal_has_work(arena: &Arena) -> bool {
    let replay = firn_arena::journal::replay(&arena.journal_region());
    !replay.damage.is_empty()
        || replay
            .ledger
            .files()
            .any(|(_, bound)| !bound.truncating.is_empty())
}
