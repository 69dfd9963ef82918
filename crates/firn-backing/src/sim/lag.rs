//! Listings of directories that lag, as over a network file system whose client keeps them for a while.
//!
//! * A listing is the directory as it was at some moment, and no earlier one than the process has seen before.
//! * What a process has changed in a directory is in its next listing, with all that others changed before: the answer to
//!   a change says what the directory was like, and a client that knew another one reads it anew.
//! * Lookups of one name do not lag.

use std::collections::HashMap;
use std::ffi::OsString;
use std::sync::Arc;

use crate::Kind;

/// Of so many listings one is read anew.
const FRESH_EVERY: u64 = 4;

/// A name in a directory.
pub(super) struct Entry {
    /// Where it is in the listing.
    pub(super) cookie: i64,
    pub(super) name: OsString,
    pub(super) ino: u64,
    pub(super) kind: Option<Kind>,
}

pub(super) type Listing = Arc<Vec<Entry>>;

/// What one process has of listings.
#[derive(Default)]
pub(super) struct Lag {
    /// Decides which listings are read anew; none where all are.
    random: Option<u64>,
    kept: HashMap<u64, Listing>,
}

impl Lag {
    /// Begins anew with this seed, or ends.
    pub(super) fn set(&mut self, seed: Option<u64>) {
        self.random = seed;
        self.kept.clear();
    }

    /// The listing that is given once more.
    pub(super) fn find(&mut self, dir: u64) -> Option<Listing> {
        let random = self.random.as_mut()?;
        // Knuth's MMIX generator, of which the high bits are good.
        *random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        match (*random >> 33) % FRESH_EVERY {
            0 => None,
            _ => self.kept.get(&dir).map(Arc::clone),
        }
    }

    pub(super) fn keep(&mut self, dir: u64, listing: &Listing) {
        if self.random.is_some() {
            self.kept.insert(dir, Arc::clone(listing));
        }
    }

    /// The process has changed the directory.
    pub(super) fn note_changed(&mut self, dir: u64) {
        self.kept.remove(&dir);
    }
}
