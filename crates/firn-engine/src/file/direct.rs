//! Direct access to one file: the grant of a client that writes it, and the lists of readers.
//!
//! Invariants
//! * A file with a grant is open once, for writing, by the process that has the grant.
//! * A list that readers have is valid until [`DirectState::invalidate_list`]. That comes before the file's bytes
//!   change or their slabs can be used again.

use firn_arena::{Arena, ClientLease};

use super::FileId;
use crate::{ClientId, HandleId};

/// A client's right to write a file directly.
pub(crate) struct Grant {
    /// The handle of the client.
    pub handle: HandleId,
    pub client: ClientId,
    pub file_id: FileId,
    /// Slabs that the client may fill, in the order in which it fills them.
    pub leases: Vec<ClientLease>,
    /// Bytes that were ingested, which decide the class of the next slab.
    pub bytes: u64,
}

/// What the lists of readers depend on.
struct Told {
    /// Number of the file's word in the arena. It is raised when the lists become invalid.
    word: u32,
    /// Count of changes by other hosts that the lists are of ([`Facts::changes_by_others`](firn_backing::Facts)).
    /// `None`: no list names the backing.
    changes_by_others: Option<u64>,
}

/// The direct access part of a file's state.
#[derive(Default)]
pub(crate) struct DirectState {
    grant: Option<Box<Grant>>,
    /// Present if some process has a list of where the file's bytes lie.
    listed: Option<Box<Told>>,
    /// Number of lists of chunks of the file.
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

    /// Restores the grant that [`DirectState::take_grant`] took.
    pub(crate) fn put_back(&mut self, grant: Box<Grant>) {
        self.grant = Some(grant);
    }

    /// Records that readers get a list, which depends on this word.
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

    /// Records that readers get a list that names the backing, as of a count of changes by other hosts. Returns false
    /// if they have a list of an earlier count, which is invalid now.
    pub(crate) fn set_listed_in_backing(&mut self, change: u64) -> bool {
        let told = self.listed.as_mut();
        told.is_some_and(|told| *told.changes_by_others.get_or_insert(change) == change)
    }

    /// Whether readers have a list that names the backing as of another count of changes by other hosts.
    pub(crate) fn is_listed_before(&self, change: u64) -> bool {
        let told = self.listed.as_ref();
        let known = told.and_then(|told| told.changes_by_others);
        known.is_some_and(|known| known != change)
    }

    /// Makes the lists of readers invalid, by raising the file's word.
    pub(crate) fn invalidate_list(&mut self, arena: &Arena) {
        if let Some(told) = self.listed.take() {
            arena.raise_file_word(told.word);
        }
    }

    /// Counts a list of chunks of the file. While there is one, bytes are not overwritten in place.
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
