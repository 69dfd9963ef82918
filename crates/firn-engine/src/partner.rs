//! Durability level `partnered`: which files a partner host has copies of.
//!
//! Invariant: a file has the level while it is not open for writing and its bytes and length are those that the
//! partner has. [`Durability::forget_partner`] takes the level from all files.

use std::time::Duration;

use firn_backing::Backing;
use firn_format::durability::DurabilityLevel;

use crate::Result;
use crate::durability::Durability;

/// Held files and bytes, with a copy at the partner and without.
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
    /// Records that a partner has the file at `path` as it was at `changes` ([`crate::FileFigures::changes`]).
    /// Returns whether the file has the level now. It does not if the file has changed since, nothing of it is held,
    /// a writer has it open, or `counts` says that the partner was replaced.
    ///
    /// `counts` is called under the file's lock. So a thread that replaces the partner and then calls
    /// [`Durability::forget_partner`] leaves no record of the old one.
    pub fn mark_partnered(
        &self,
        path: &[u8],
        changes: u64,
        counts: impl FnOnce() -> bool,
    ) -> Result<bool> {
        let inode = self.tree.find(path)?;
        let Some(file) = self.open_files.known_file(&inode) else {
            return Ok(false);
        };
        let mut state = file.lock();
        self.intake.ingest_published(&file, &mut state);
        let is_that = state.changes == changes && !state.pending.is_empty() && counts();
        if is_that {
            state.partnered_changes = changes;
        }
        Ok(is_that && state.is_partnered())
    }

    /// Takes the level from all files, because the partner is gone or was replaced.
    pub fn forget_partner(&self) {
        for file in self.open_files.files.all() {
            file.lock().partnered_changes = 0;
        }
    }

    /// Returns the figures of the held files at or below `path`. Fails with ENOENT if the path does not exist.
    pub fn partner_figures(&self, path: &[u8]) -> Result<PartnerFigures> {
        if !path.is_empty() {
            self.tree.find(path)?;
        }
        let mut figures = PartnerFigures::default();
        for file in self.pending_below(path) {
            let mut state = file.lock();
            self.intake.ingest_published(&file, &mut state);
            let bytes = state.pending.bytes();
            if state.level_of_pending(&self.base.arena) >= DurabilityLevel::Partnered {
                figures.copied_files += 1;
                figures.copied_bytes += bytes;
                continue;
            }
            figures.left_files += 1;
            figures.left_bytes += bytes;
            let age = state.drain.oldest().map(|at| at.elapsed());
            figures.oldest_left = figures.oldest_left.max(age);
        }
        Ok(figures)
    }
}
