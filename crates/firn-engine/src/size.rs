//! How long a file is: what the backing has, or what is pending beyond its end.

use std::sync::Arc;

use firn_backing::{Attr, Backing};

use crate::Result;
use crate::engine::Engine;
use crate::file::File;
use crate::names::Inode;

/// The length of a file that has pending bytes up to `pending_end`, 0 where it has none. `attr` is of the backing, asked
/// for *after* `pending_end` was read: a drain between the two must not make the file look short.
pub(crate) fn whole_size(attr: &Attr, pending_end: u64) -> u64 {
    attr.size.max(pending_end)
}

impl<B: Backing> Engine<B> {
    /// Length of a file with pending data counted in.
    pub(crate) fn size_of(&self, file: &Arc<File<B>>) -> Result<u64> {
        let pending_end = {
            let mut state = file.lock();
            self.ingest_published(file, &mut state);
            state.pending.end()
        };
        self.size_beside(&file.inode, pending_end)
    }

    /// The same for one whose pending bytes are known to end at `pending_end`.
    pub(crate) fn size_beside(&self, inode: &Inode<B>, pending_end: u64) -> Result<u64> {
        let attr = self.backing.attr(&self.object(inode)?)?;
        Ok(whole_size(&attr, pending_end))
    }
}
