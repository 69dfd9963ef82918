//! [`ArenaNotes`]: ensures that written data of an aborted transaction never appears in a later mount.
//!
//! Terms
//! * The *arena* of a mount is shared memory with *pending* data: programs have written it, and it is not *drained*
//!   (written to the backing, the directory below the mount) yet. It survives the end of the mount.
//! * The *scope* of a transaction is what it covers.
//! * The *attached* arena is the one of this mount. Other arenas may exist: with another `arena-dir`, on another host.
//! * A *drop note* names an arena and a scope: the pending data of the arena in the scope belongs to an aborted
//!   transaction and must be dropped.
//!
//! Before an aborted transaction ends, the attached arena drops the transaction's pending data. An example with another
//! arena:
//! 1. Host A begins a transaction with arena 1 and crashes. Arena 1 still has written data.
//! 2. The mount is started again with arena 2. It aborts the transaction and removes its records, but cannot reach
//!    arena 1. So it stores a drop note for arena 1.
//! 3. Later arena 1 is attached. It drops the data that the note says, and the note is removed.
//!
//! ```text
//! tx-N/arena   id of the arena that was attached at the begin; written before `tx-N/open`
//! dropped      the drop notes, one in a line; a line is removed once its arena was attached and has dropped the data
//! ```
//!
//! Promises
//! * An arena drops only data that was written in transactions that were begun with this arena.
//! * Before a transaction of another arena ends, its drop notes are durable.
//!
//! Relies on the drain of all pending data in a scope before a transaction begins there. So pending data in the scope
//! was either written in the transaction or is later data that waits for its outcome.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::sync::Arc;

use base16ct::lower as hex;
use firn_backing::{Backing, Errno};

use crate::change_log::LogError;
use crate::error::StoreError;
use crate::lower_backing::LowerBacking;
use crate::names_ballot::NamesBallots;
use crate::own::is_path;
use crate::recovery::{LivingTransactions, Opening};
use crate::scope::ArenaId;
use crate::shadow::shared::SharedTransactions;
use crate::staging;
use crate::transactional::TransactionalBacking;
use crate::vote::Votes;
use firn_hosts::host_dir::list_hosts;
use firn_hosts::{Expected, Members};

/// Says that an arena must drop its pending data in a scope.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct DropNote {
    arena: ArenaId,
    /// Path of the scope, relative to the backing.
    path: Vec<u8>,
}

impl DropNote {
    /// Returns the note in a line of the file `dropped`, without the line break; `None` if the line is damaged.
    fn parse_line(line: &[u8]) -> Option<Self> {
        let (arena, path) = std::str::from_utf8(line).ok()?.split_once(' ')?;
        let note = Self {
            arena: parse_arena_id(arena.as_bytes())?,
            path: hex::decode_vec(path).ok()?,
        };
        is_path(&note.path).then_some(note)
    }

    /// Returns the line of the note in the file `dropped`.
    fn format_line(&self) -> String {
        let arena = hex::encode_string(&self.arena);
        let path = hex::encode_string(&self.path);
        format!("{arena} {path}\n")
    }
}

/// Returns the arena id with these hexadecimal digits; `None` if they are damaged.
fn parse_arena_id(digits: &[u8]) -> Option<ArenaId> {
    hex::decode_vec(digits).ok()?.try_into().ok()
}

/// Stores and finds notes on arenas and their transactions.
pub(crate) struct ArenaNotes<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) shared: Arc<SharedTransactions<B>>,
    pub(crate) votes: Arc<Votes<B>>,
    pub(crate) names_ballots: Arc<NamesBallots<B>>,
    /// [`crate::Opening::arena`].
    pub(crate) arena: Option<ArenaId>,
    /// [`crate::Opening::living`].
    pub(crate) living: LivingTransactions,
}

impl<B: Backing> ArenaNotes<B> {
    pub(crate) fn new(
        votes: &Arc<Votes<B>>,
        names_ballots: &Arc<NamesBallots<B>>,
        arena: Option<ArenaId>,
        living: LivingTransactions,
    ) -> Self {
        Self {
            lower: Arc::clone(&votes.lower),
            shared: Arc::clone(&votes.shared),
            votes: Arc::clone(votes),
            names_ballots: Arc::clone(names_ballots),
            arena,
            living,
        }
    }

    /// Records the attached arena in the directory of a new transaction. The record is durable after the next sync of
    /// the directory.
    pub(super) fn record_arena(&self, dir: &B::Inode) -> Result<(), Errno> {
        let Some(arena) = self.arena else {
            return Ok(());
        };
        staging::replace_file_unsynced(
            &self.lower.base,
            dir,
            staging::ARENA,
            hex::encode_string(&arena).as_bytes(),
        )
    }

    /// Returns the arena with which the transaction in `dir` was begun; `None` if it was begun without one.
    fn load_arena(&self, dir: &B::Inode) -> Result<Option<ArenaId>, StoreError> {
        let Some(bytes) = staging::read_file(&self.lower.base, dir, staging::ARENA)? else {
            return Ok(None);
        };
        match parse_arena_id(&bytes) {
            Some(arena) => Ok(Some(arena)),
            None => Err(StoreError::Record {
                path: staging::ARENA.into(),
                source: LogError::Damaged,
            }),
        }
    }

    /// Returns drop notes for the stored transactions that are about to be undone. A note says that an arena (memory
    /// with data that is not in the backing yet) must drop its data below a path.
    fn notes_of_undone(
        &self,
        transactions_dir: &B::Inode,
    ) -> Result<BTreeSet<DropNote>, StoreError> {
        let mut notes = BTreeSet::new();
        for stored in self.lower.stored_transactions(transactions_dir)? {
            // A transaction with living programs may continue, so its data counts.
            if self.can_continue(&stored)? {
                continue;
            }
            let paths = self.paths_to_drop_of(&stored)?;
            if paths.is_empty() {
                continue;
            }
            if let Some(arena) = self.load_arena(&stored.dir)? {
                notes.extend(paths.into_iter().map(|path| DropNote { arena, path }));
            }
        }
        Ok(notes)
    }

    /// Reads the stored drop notes: which arena (memory with data that is not in the backing yet) must drop its data
    /// below which path. Empty if there is no file. Fails if a line is damaged.
    fn load_drop_notes(
        &self,
        transactions_dir: &B::Inode,
    ) -> Result<BTreeSet<DropNote>, StoreError> {
        let bytes = staging::read_file(&self.lower.base, transactions_dir, staging::DROPPED)?
            .unwrap_or_default();
        let mut notes = BTreeSet::new();
        for line in bytes.split(|&byte| byte == b'\n') {
            if line.is_empty() {
                continue;
            }
            let Some(note) = DropNote::parse_line(line) else {
                return Err(StoreError::Record {
                    path: format!("{}/{}", self.lower.transactions_path(), staging::DROPPED),
                    source: LogError::Damaged,
                });
            };
            notes.insert(note);
        }
        Ok(notes)
    }

    /// Replaces the file with all drop notes, durably.
    fn store_drop_notes(
        &self,
        transactions_dir: &B::Inode,
        notes: &BTreeSet<DropNote>,
    ) -> Result<(), Errno> {
        let text: String = notes.iter().map(DropNote::format_line).collect();
        staging::replace_file(
            &self.lower.base,
            transactions_dir,
            staging::DROPPED,
            text.as_bytes(),
        )
    }

    /// Returns the paths below which the attached arena must drop its pending data. Changes nothing.
    pub(crate) fn paths_to_drop(&self) -> Result<Vec<Vec<u8>>, StoreError> {
        let (Some(arena), Some(transactions_dir)) =
            (self.arena, self.lower.find_transactions_dir()?)
        else {
            return Ok(Vec::new());
        };
        let mut notes = self.notes_of_undone(&transactions_dir)?;
        notes.append(&mut self.load_drop_notes(&transactions_dir)?);
        let paths: BTreeSet<Vec<u8>> = notes
            .into_iter()
            .filter(|note| note.arena == arena)
            .map(|note| note.path)
            .collect();
        Ok(paths.into_iter().collect())
    }

    /// Stores the drop notes for other arenas, and removes those of the attached arena, which has dropped its data.
    ///
    /// Called before transactions are undone.
    pub(crate) fn record_drops_of_other_arenas(&self) -> Result<(), StoreError> {
        let Some(transactions_dir) = self.lower.find_transactions_dir()? else {
            return Ok(());
        };
        let stored = self.load_drop_notes(&transactions_dir)?;
        let mut notes_of_others = stored.clone();
        notes_of_others.append(&mut self.notes_of_undone(&transactions_dir)?);
        notes_of_others.retain(|note| Some(note.arena) != self.arena);
        if notes_of_others != stored {
            self.store_drop_notes(&transactions_dir, &notes_of_others)?;
        }
        Ok(())
    }

    /// Records that an arena (memory with data that is not in the backing yet) has dropped all its data of this host's
    /// transactions. The transactions remain stored.
    fn forget_arena(&self, arena: ArenaId) -> Result<(), StoreError> {
        let Some(transactions_dir) = self.lower.find_transactions_dir()? else {
            return Ok(());
        };
        for stored in self.lower.stored_transactions(&transactions_dir)? {
            if self.load_arena(&stored.dir)? == Some(arena) {
                self.lower
                    .base
                    .unlink(&stored.dir, OsStr::new(staging::ARENA))?;
                self.lower.base.sync_dir(&stored.dir)?;
            }
        }
        let stored = self.load_drop_notes(&transactions_dir)?;
        let mut notes_of_others = stored.clone();
        notes_of_others.retain(|note| note.arena != arena);
        if notes_of_others != stored {
            self.store_drop_notes(&transactions_dir, &notes_of_others)?;
        }
        Ok(())
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Returns all owners of stored transactions other than this mount. These are the hosts that ever mounted the
    /// backing `base` together, each as `Some`. A mount of one host without others is `None`, and so is `members` if
    /// this mount is one.
    ///
    /// The arena of this mount (memory with data that is not in the backing yet) may have data of an owner. The caller
    /// must call [`TransactionalBacking::drop_of`] for each owner.
    pub fn other_staging_owners(
        base: &B,
        members: Option<&Members>,
    ) -> Result<Vec<Option<Members>>, StoreError> {
        if staging::find_dir(base, &base.root(), staging::FIRN_DIR)?.is_none() {
            return Ok(Vec::new());
        }
        let mut owners = vec![None];
        for host in list_hosts(base)? {
            owners.push(Some(Members {
                host,
                // For `drop_of` only the name of the host matters.
                expected: Expected::Count(0),
            }));
        }
        let own_host = members.map(|members| &members.host);
        owners.retain(|owner| owner.as_ref().map(|owner| &owner.host) != own_host);
        Ok(owners)
    }

    /// Drops from the memory of this mount (its arena) the data of another host's transactions that an abort would
    /// lose. [`TransactionalBacking::open_with`] does this for the transactions of this host.
    ///
    /// `members` says which host it is. `drop_pending` is called with the paths below which data must be dropped,
    /// unless there are none. The transactions remain stored, for a mount of that host.
    pub fn drop_of<E: From<StoreError>>(
        base: B,
        members: Option<Members>,
        arena: ArenaId,
        drop_pending: impl FnOnce(&[Vec<u8>]) -> Result<(), E>,
    ) -> Result<(), E> {
        let opening = Opening {
            members,
            arena: Some(arena),
            ..Opening::default()
        };
        let backing = Self::open_unrecovered(base, opening)?;
        let paths = backing.arena_notes.paths_to_drop()?;
        if paths.is_empty() {
            return Ok(());
        }
        drop_pending(&paths)?;
        Ok(backing.arena_notes.forget_arena(arena)?)
    }
}
