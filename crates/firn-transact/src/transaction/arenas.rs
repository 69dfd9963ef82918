//! Notes on which arena has pending data of which transaction.
//!
//! An *arena* is the memory of a mount that has data which is not drained to the backing yet.
//!
//! Data that programs wrote and that was not drained is in the arena of the mount that they used. When a transaction
//! ends, the arena drops its data of it first. But a mount with another arena (`arena-dir`, another host) may end it,
//! and the first arena may come back: its data must not count then, although no record of the transaction is left.
//!
//! Promises
//! * A transaction is known by the arena of the mount that began it: `tx-N/arena`, written before `tx-N/open`.
//! * Of an arena that is at hand only what was written in its own transactions is dropped. Data in it that is older
//!   counts, whatever was begun since with another one.
//! * Before a transaction of another arena ends, `dropped` says durably what that has to drop. A line goes when the
//!   arena was there and has dropped it.
//!
//! Before a transaction begins, pending data in its scope is drained. So all data that its arena has there when its
//! firnd is killed was written in the transaction or waited for its outcome.

use std::collections::BTreeSet;
use std::sync::Arc;

use base16ct::lower;
use firn_backing::{Backing, Errno};

use crate::change_log::LogError;
use crate::error::StoreError;
use crate::names_ballot::NamesBallots;
use crate::own::is_path;
use crate::recovery::{LivingTransactions, Opening};
use crate::scope::ArenaId;
use crate::shadow::shared::SharedTransactions;
use crate::staging;
use crate::staging_dir::Home;
use crate::transactional::TransactionalBacking;
use crate::vote::Votes;
use firn_hosts::host_dir::list_hosts;
use firn_hosts::{Expected, Members};

/// An arena, and the path of a scope of which it has nothing that counts.
type Line = (ArenaId, Vec<u8>);

/// Which arenas have data of which transactions.
pub(crate) struct ArenaNotes<B: Backing> {
    pub(crate) home: Arc<Home<B>>,
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
            home: Arc::clone(&votes.home),
            shared: Arc::clone(&votes.shared),
            votes: Arc::clone(votes),
            names_ballots: Arc::clone(names_ballots),
            arena,
            living,
        }
    }

    /// Notes with which arena a transaction begins; durable with the next sync of its directory.
    pub(super) fn note_arena(&self, dir: &B::Inode) -> Result<(), Errno> {
        let Some(arena) = self.arena else {
            return Ok(());
        };
        staging::replace_file_unsynced(
            &self.home.base,
            dir,
            staging::ARENA,
            lower::encode_string(&arena).as_bytes(),
        )
    }

    fn arena_of(&self, dir: &B::Inode) -> Result<Option<ArenaId>, StoreError> {
        let Some(bytes) = staging::read_file(&self.home.base, dir, staging::ARENA)? else {
            return Ok(None);
        };
        let found = lower::decode_vec(&bytes).ok();
        let damaged = || StoreError::Record {
            path: staging::ARENA.into(),
            source: LogError::Damaged,
        };
        found
            .and_then(|id| id.try_into().ok())
            .map(Some)
            .ok_or_else(damaged)
    }

    /// Arenas and scopes of transactions that are not decided.
    fn undecided(&self, home: &B::Inode) -> Result<BTreeSet<Line>, StoreError> {
        let mut found = BTreeSet::new();
        for stored in self.home.stored_transactions(home)? {
            if self.goes_on(&stored)? {
                continue;
            }
            let scopes = self.scopes_to_drop_of(&stored)?;
            if scopes.is_empty() {
                continue;
            }
            if let Some(arena) = self.arena_of(&stored.dir)? {
                found.extend(scopes.into_iter().map(|scope| (arena, scope)));
            }
        }
        Ok(found)
    }

    fn load_dropped(&self, home: &B::Inode) -> Result<BTreeSet<Line>, StoreError> {
        let bytes =
            staging::read_file(&self.home.base, home, staging::DROPPED)?.unwrap_or_default();
        let line = |line: &[u8]| {
            let (arena, scope) = std::str::from_utf8(line).ok()?.split_once(' ')?;
            let line = (
                lower::decode_vec(arena).ok()?.try_into().ok()?,
                lower::decode_vec(scope).ok()?,
            );
            is_path(&line.1).then_some(line)
        };
        let path = format!("{}/{}", self.home.staging_path(), staging::DROPPED);
        let lines = bytes
            .split(|&byte| byte == b'\n')
            .filter(|line| !line.is_empty());
        lines
            .map(line)
            .collect::<Option<_>>()
            .ok_or(StoreError::Record {
                path,
                source: LogError::Damaged,
            })
    }

    fn store_dropped(&self, home: &B::Inode, lines: &BTreeSet<Line>) -> Result<(), Errno> {
        let line = |(arena, scope): &Line| {
            format!(
                "{} {}\n",
                lower::encode_string(arena),
                lower::encode_string(scope)
            )
        };
        let text: String = lines.iter().map(line).collect();
        staging::replace_file(&self.home.base, home, staging::DROPPED, text.as_bytes())
    }

    /// Scopes of which nothing counts that the arena at hand has. Changes nothing.
    pub(crate) fn scopes_to_drop(&self) -> Result<Vec<Vec<u8>>, StoreError> {
        let (Some(arena), Some(home)) = (self.arena, self.home.find_staging_dir()?) else {
            return Ok(Vec::new());
        };
        let mut all = self.undecided(&home)?;
        all.append(&mut self.load_dropped(&home)?);
        let mine: BTreeSet<Vec<u8>> = all
            .into_iter()
            .filter(|(of, _)| *of == arena)
            .map(|(_, scope)| scope)
            .collect();
        Ok(mine.into_iter().collect())
    }

    /// The arena at hand has dropped what it must: notes what other arenas must drop, before the transactions end.
    pub(crate) fn tell_arenas(&self) -> Result<(), StoreError> {
        let Some(home) = self.home.find_staging_dir()? else {
            return Ok(());
        };
        let told = self.load_dropped(&home)?;
        let mut all = told.clone();
        all.append(&mut self.undecided(&home)?);
        all.retain(|(arena, _)| Some(*arena) != self.arena);
        if all == told {
            Ok(())
        } else {
            Ok(self.store_dropped(&home, &all)?)
        }
    }

    /// The arena at hand has nothing any more of the transactions of this home, which stay.
    fn forget_arena(&self, arena: ArenaId) -> Result<(), StoreError> {
        let Some(home) = self.home.find_staging_dir()? else {
            return Ok(());
        };
        for stored in self.home.stored_transactions(&home)? {
            if self.arena_of(&stored.dir)? == Some(arena) {
                self.home
                    .base
                    .unlink(&stored.dir, std::ffi::OsStr::new(staging::ARENA))?;
                self.home.base.sync_dir(&stored.dir)?;
            }
        }
        let told = self.load_dropped(&home)?;
        let others: BTreeSet<Line> = told
            .iter()
            .filter(|(of, _)| *of != arena)
            .cloned()
            .collect();
        if others == told {
            Ok(())
        } else {
            Ok(self.store_dropped(&home, &others)?)
        }
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Homes of transactions for which [`TransactionalBacking::drop_of`] is to be called: the backing without hosts,
    /// and each host that was ever there, except the home of `members`.
    pub fn other_homes(
        base: &B,
        members: Option<&Members>,
    ) -> Result<Vec<Option<Members>>, StoreError> {
        if staging::find_dir(base, &base.root(), staging::TOP)?.is_none() {
            return Ok(Vec::new());
        }
        let mut homes = vec![None];
        for host in list_hosts(base)? {
            homes.push(Some(Members {
                host,
                expected: Expected::Count(0),
            }));
        }
        homes.retain(|home| {
            home.as_ref().map(|home| &home.host) != members.map(|members| &members.host)
        });
        Ok(homes)
    }

    /// What [`TransactionalBacking::open_with`] says of an arena, for transactions in another home than that of the
    /// mount. They stay as they are, for a mount with their home, and have nothing in this arena any more.
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
        let scopes = backing.arena_notes.scopes_to_drop()?;
        if scopes.is_empty() {
            return Ok(());
        }
        drop_pending(&scopes)?;
        Ok(backing.arena_notes.forget_arena(arena)?)
    }
}
