//! The durability level `partnered`: another host, the partner, has a copy of a file that is *held* (bytes that are not
//! in the backing yet).
//!
//! Invariant: a file has the level while it is not open for writing and its bytes and length equal the partner's copy.
//! [`Durability::forget_partner`] removes the level from all files.

use std::time::Duration;

use firn_backing::Backing;
use firn_format::durability::DurabilityLevel;

use crate::Result;
use crate::durability::Durability;

/// Numbers of held files and bytes, with and without a copy at the partner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartnerFigures {
    /// Held files of which the partner has a copy.
    pub copied_files: u64,
    /// Held bytes of these files.
    pub copied_bytes: u64,
    /// Held files of which the partner has no copy.
    pub left_files: u64,
    /// Held bytes of those files.
    pub left_bytes: u64,
    /// Age of the oldest held byte without a copy.
    pub oldest_left: Option<Duration>,
}

impl<B: Backing> Durability<B> {
    /// Records that a partner (the host that keeps copies of held files) has a copy of the file at `path`, in version
    /// `changes` ([`crate::FileFigures::changes`]). Returns whether the file has the level `partnered` now.
    ///
    /// The result is false if the file changed since, no byte of it is held, or a writer has it open. It is also false
    /// if `is_partner_current` returns false, because the partner was replaced.
    ///
    /// `is_partner_current` is called under the file's lock. So a thread that replaces the partner and then calls
    /// [`Durability::forget_partner`] leaves no record of the old partner.
    pub fn mark_partnered(
        &self,
        path: &[u8],
        changes: u64,
        is_partner_current: impl FnOnce() -> bool,
    ) -> Result<bool> {
        let inode = self.tree.inode_at(path)?;
        let Some(file) = self.open_files.known_file(&inode) else {
            return Ok(false);
        };
        let mut state = file.lock();
        // Bytes that a client process has stored in the arena, without a request, count as written too.
        self.intake.ingest_published(&file, &mut state);
        if state.changes != changes || state.pending.is_empty() || !is_partner_current() {
            return Ok(false);
        }
        state.partnered_changes = changes;
        Ok(state.is_partnered())
    }

    /// Removes the level from all files, because the partner is gone or was replaced.
    pub fn forget_partner(&self) {
        for file in self.open_files.files.all() {
            file.lock().partnered_changes = 0;
        }
    }

    /// Returns the figures of the held files (with bytes that are not in the backing yet) at or below `path`: how many
    /// of them a partner host has copied. Fails with ENOENT if the path does not exist.
    pub fn partner_figures(&self, path: &[u8]) -> Result<PartnerFigures> {
        if !path.is_empty() {
            self.tree.inode_at(path)?;
        }
        let mut figures = PartnerFigures::default();
        for file in self.pending_below(path) {
            let mut state = file.lock();
            // Bytes that a client process has stored in the arena, without a request, count as written too.
            self.intake.ingest_published(&file, &mut state);
            let bytes = state.pending.bytes();
            if state.durability_of_pending(&self.base.arena) >= DurabilityLevel::Partnered {
                figures.copied_files += 1;
                figures.copied_bytes += bytes;
                continue;
            }
            figures.left_files += 1;
            figures.left_bytes += bytes;
            let age = state.drain.oldest().map(|written| written.elapsed());
            figures.oldest_left = figures.oldest_left.max(age);
        }
        Ok(figures)
    }
}
