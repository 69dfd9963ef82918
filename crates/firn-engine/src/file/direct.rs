//! What processes with direct access have of a file.
//!
//! Invariants
//! * A file with a grant is open once, for writing, by the process that has the grant.
//! * A list that was told to readers is valid until [`DirectState::invalidate_list`], which comes before the file's
//!   bytes change or their room can be used again.

use firn_arena::{Arena, ClientLease};

use super::FileId;
use crate::{ClientId, HandleId};

/// One client's right to write a file.
pub(crate) struct Grant {
    pub handle: HandleId,
    pub client: ClientId,
    pub file_id: FileId,
    /// In the order in which they are filled.
    pub leases: Vec<ClientLease>,
    /// Bytes that were ingested: decides the class of the next slab.
    pub bytes: u64,
}

/// What readers were told.
struct Told {
    /// The word of the arena that ends to be what it was when this does not hold any more.
    word: u32,
    /// The last change by other hosts that is in it ([`Facts::changes_by_others`](firn_backing::Facts)); none:
    /// nothing was told of the backing.
    changes_by_others: Option<u64>,
}

/// The direct access part of a file's state.
#[derive(Default)]
pub(crate) struct DirectState {
    grant: Option<Box<Grant>>,
    /// What processes that read the file themselves were told of where its bytes lie.
    listed: Option<Box<Told>>,
    chunk_lists: u32,
}

impl DirectState {
    pub(crate) fn grant(&self) -> Option<&Grant> {
        self.grant.as_deref()
    }

    pub(crate) fn grant_mut(&mut self) -> Option<&mut Grant> {
        self.grant.as_deref_mut()
    }

    pub(crate) fn has_grant(&self) -> bool {
        self.grant.is_some()
    }

    pub(crate) fn set_grant(&mut self, grant: Grant) {
        debug_assert!(self.grant.is_none(), "a file gets a second grant");
        self.grant = Some(Box::new(grant));
    }

    pub(crate) fn take_grant(&mut self) -> Option<Box<Grant>> {
        self.grant.take()
    }

    /// Gives back what [`DirectState::take_grant`] took.
    pub(crate) fn put_back(&mut self, grant: Box<Grant>) {
        self.grant = Some(grant);
    }

    /// Readers are told where the bytes lie, under this word.
    pub(crate) fn set_listed(&mut self, word: u32) {
        let new = || {
            Box::new(Told {
                word,
                changes_by_others: None,
            })
        };
        self.listed.get_or_insert_with(new);
    }

    pub(crate) fn is_listed(&self) -> bool {
        self.listed.is_some()
    }

    /// Readers are told where bytes lie in the backing, as of a change by other hosts. False if they were told of an
    /// earlier one before, which does not hold any more.
    pub(crate) fn set_listed_in_backing(&mut self, change: u64) -> bool {
        let told = self.listed.as_mut();
        told.is_some_and(|told| *told.changes_by_others.get_or_insert(change) == change)
    }

    /// Whether readers were told where bytes lie in the backing before this change by other hosts.
    pub(crate) fn is_listed_before(&self, change: u64) -> bool {
        let told = self.listed.as_ref();
        let known = told.and_then(|told| told.changes_by_others);
        known.is_some_and(|known| known != change)
    }

    /// What readers were told does not hold any more.
    pub(crate) fn invalidate_list(&mut self, arena: &Arena) {
        if let Some(told) = self.listed.take() {
            arena.raise_file_word(told.word);
        }
    }

    /// A chunk list of the file is made: what it names is not changed in place.
    pub(crate) fn add_chunk_list(&mut self) {
        self.chunk_lists += 1;
    }

    pub(crate) fn remove_chunk_list(&mut self) {
        self.chunk_lists -= 1;
    }

    pub(crate) fn has_chunk_lists(&self) -> bool {
        self.chunk_lists > 0
    }
}
