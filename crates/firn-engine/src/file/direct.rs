//! Direct access of client processes to one file: the grant of the client that writes the file, and the lists of the
//! clients that read it.
//!
//! Terms
//! * A *grant* is a client's right to write the file directly into the arena (shared memory). A *lease* is its right to
//!   fill one *slab*, a part of the arena.
//! * A *list* tells a reader where the bytes of the file lie.
//!
//! Invariants
//! * A file with a grant is open once, for writing, by the process that has the grant.
//! * A list that readers have is valid until [`DirectState::invalidate_lists`]. That call precedes each change of the
//!   file's bytes, and each new use of their slabs.

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
    /// Number of ingested bytes, which decides the size class of the next slab.
    pub bytes: u64,
}

/// Lists of the places of a file's bytes that readers have, and the conditions under which these lists are valid.
struct ReaderLists {
    /// Index of the file's version counter in the arena, which is raised to make the lists invalid.
    counter_index: u32,
    /// Value of [`Facts::changes_by_others`](firn_backing::Facts) when the lists were made. `None` if no list refers to
    /// files of the backing, so that changes by other hosts do not matter.
    changes_by_others: Option<u64>,
}

/// The direct access part of a file's state.
#[derive(Default)]
pub(crate) struct DirectState {
    grant: Option<Box<Grant>>,
    /// The lists of readers; `None` if no reader has one.
    lists: Option<Box<ReaderLists>>,
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
    pub(crate) fn restore_grant(&mut self, grant: Box<Grant>) {
        self.grant = Some(grant);
    }

    /// Records that a reader gets a list. The list is valid until the file's version counter is raised, which is the
    /// counter `counter_index` of the arena.
    pub(crate) fn record_list(&mut self, counter_index: u32) {
        let new = || {
            Box::new(ReaderLists {
                counter_index,
                changes_by_others: None,
            })
        };
        self.lists.get_or_insert_with(new);
    }

    pub(crate) fn has_lists(&self) -> bool {
        self.lists.is_some()
    }

    /// Records that a reader gets a list that refers to files of the backing. `change`: count of changes by other hosts
    /// when the list was made. Returns false if readers have a list with an earlier count, which is invalid now.
    pub(crate) fn try_record_backing_list(&mut self, change: u64) -> bool {
        let Some(lists) = &mut self.lists else {
            return false;
        };
        *lists.changes_by_others.get_or_insert(change) == change
    }

    /// Returns whether readers have a list that refers to files of the backing and was made when the count of changes
    /// by other hosts was not `change`.
    pub(crate) fn has_outdated_backing_list(&self, change: u64) -> bool {
        let Some(lists) = &self.lists else {
            return false;
        };
        lists
            .changes_by_others
            .is_some_and(|change_of_lists| change_of_lists != change)
    }

    /// Makes all lists of readers invalid by raising the file's version counter.
    pub(crate) fn invalidate_lists(&mut self, arena: &Arena) {
        if let Some(lists) = self.lists.take() {
            arena.raise_file_word(lists.counter_index);
        }
    }

    /// Counts a list of chunks of the file. While such a list exists, bytes are not overwritten in place.
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
