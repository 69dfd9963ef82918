//! The arena of a backing as it is found, or made: its file, its spill file, and what an earlier firnd left in it.

use std::path::PathBuf;

use firn_arena::{Arena, ArenaError, Damage, Identity, SpillFault, Stored, Topology};
use firn_engine::StoredArena;
use firn_format::quote::quoted_path;
use firn_transact::ArenaId;

use crate::error::AttachError;
use crate::ground::{Purpose, Target};
use crate::runtime_files::exists;
use crate::spill;

/// An arena, before the engine has it.
pub(crate) enum Found {
    Fresh(Box<Arena>),
    Used {
        stored: Box<StoredArena>,
        damaged: bool,
    },
}

impl Found {
    fn used(arena: Arena, stored: Vec<Stored>, damaged: bool) -> Self {
        Self::Used {
            stored: Box::new(StoredArena::open(arena, stored)),
            damaged,
        }
    }

    /// What tells it from other arenas.
    pub(crate) fn id(&self) -> ArenaId {
        match self {
            Self::Fresh(arena) => arena.superblock().uuid,
            Self::Used { stored, .. } => stored.arena().superblock().uuid,
        }
    }

    pub(crate) fn drop_below(&mut self, scopes: &[Vec<u8>]) -> Result<(), AttachError> {
        match self {
            Self::Fresh(_) => Ok(()),
            Self::Used { stored, .. } => Ok(stored.drop_below(scopes)?),
        }
    }
}

/// The files of an arena that was made just now. They go where the mount comes to nothing: an arena that is there
/// would be said to hold data.
pub(crate) struct NewArena {
    files: Vec<PathBuf>,
}

impl NewArena {
    pub(crate) fn of(found: &Found) -> Self {
        let Found::Fresh(arena) = found else {
            return Self { files: Vec::new() };
        };
        let spill = arena.spill_file().map(|file| file.path().to_owned());
        // In this order: without the arena the spill file means nothing.
        Self {
            files: std::iter::once(arena.path().to_owned())
                .chain(spill)
                .collect(),
        }
    }

    pub(crate) fn keep(mut self) {
        self.files.clear();
    }
}

impl Drop for NewArena {
    fn drop(&mut self) {
        for file in &self.files {
            if let Err(error) = std::fs::remove_file(file) {
                tracing::warn!(%error, file = %quoted_path(file), "cannot remove the arena of a mount that failed");
            }
        }
    }
}

/// Finds the arena of a backing, or makes one. One that holds data stays as it is, whatever the options say now; an
/// empty one of another shape is made anew.
pub(crate) fn find(
    target: &Target<'_>,
    identity: &Identity,
    notice: &mut dyn FnMut(String),
) -> Result<Found, AttachError> {
    let &Target {
        files,
        options,
        purpose,
        ..
    } = target;
    let path = &files.arena;
    let (geometry, spill_path) = spill::wanted(files, options)?;
    let topology = options
        .numa_topology
        .as_deref()
        .map_or_else(Topology::one, Topology::read);
    let create = || Arena::create_on(path, geometry, identity, &spill_path, &topology);
    if !exists(path) {
        return Ok(Found::Fresh(Box::new(create()?)));
    }
    let (arena, stored, damage) = Arena::attach_on(path, &topology)?;
    let made_for = PathBuf::from(text(&arena.superblock().backing_path));
    if made_for != identity.backing {
        return Err(AttachError::ArenaForeign {
            path: path.clone(),
            found: quoted_path(&made_for),
        });
    }
    if let Some(fault @ SpillFault::Distrusted { .. }) = arena.spill_fault() {
        return Err(ArenaError::Spill(fault.clone()).into());
    }
    for damage in &damage {
        notice(format!("arena {}: {damage}", quoted_path(path)));
    }
    let damaged = !damage.is_empty();
    let fault = arena.spill_fault().map(ToString::to_string);
    if let Some(fault) = &fault {
        let lost = damage
            .iter()
            .any(|damage| matches!(damage, Damage::Spill { .. }));
        if lost && purpose == Purpose::Mount {
            let arena = path.clone();
            let backing = identity.backing.clone();
            return Err(AttachError::SpillGone {
                arena,
                fault: fault.clone(),
                backing,
            });
        }
        notice(format!("{fault}: nothing moves to it"));
    }
    if *arena.geometry() == geometry && spill::is_at(&arena, &spill_path) && fault.is_none() {
        return Ok(Found::used(arena, stored, damaged));
    }
    if stored.is_empty() && !damaged && !journal_has_work(&arena) {
        remove_empty(arena)?;
        return Ok(Found::Fresh(Box::new(create()?)));
    }
    let has = arena.geometry();
    notice(format!(
        "the arena holds data and keeps its arena-size={}, chunk-size={} and spill-size={} until it was empty once",
        has.data_bytes(),
        has.chunk_bytes,
        has.spill_bytes()
    ));
    Ok(Found::used(arena, stored, damaged))
}

/// Removes an arena that holds nothing, to make one of another size.
fn remove_empty(arena: Arena) -> Result<(), AttachError> {
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

fn text(path: &[u8]) -> std::ffi::OsString {
    std::os::unix::ffi::OsStringExt::from_vec(path.to_vec())
}

/// A truncation that was journaled and perhaps not done, with no piece left that tells of it.
fn journal_has_work(arena: &Arena) -> bool {
    let replay = firn_arena::journal::replay(&arena.journal_region());
    !replay.damage.is_empty()
        || replay
            .ledger
            .files()
            .any(|(_, bound)| !bound.truncating.is_empty())
}
