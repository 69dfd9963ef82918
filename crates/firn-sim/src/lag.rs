//! Listings of directories that lag, as over a network file system whose client keeps them for a while; and attributes, and
//! names of directories.
//!
//! * A listing is the directory as it was at some moment, and no earlier one than the process has seen before.
//! * What a process has changed in a directory is in its next listing, with all that others changed before. The answer
//!   to a change says what the directory was like, and a client that knew another one reads it anew.
//! * Lookups of one name do not lag, unless attributes do: then the name of a directory may lead to the one that it led to
//!   before.
//! * Attributes that lag are those of the object at some moment, and it is read as far as it was long then. They are new
//!   where they are asked of the server, by a lookup too, and where the process has changed the object.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use firn_backing::{Attr, Kind};

/// One of this many listings is read anew.
const FRESH_EVERY: u64 = 4;
/// Attributes and names of directories are kept for at most this many answers.
const ANSWERS_MAX: u32 = 3;

/// Something that is kept, and how often it was given.
struct Kept<T> {
    value: T,
    answers: u32,
}

impl<T: Copy> Kept<T> {
    fn new(value: T) -> Self {
        Self { value, answers: 0 }
    }

    /// Gives it once more.
    fn give(&mut self) -> Option<T> {
        self.answers += 1;
        (self.answers <= ANSWERS_MAX).then_some(self.value)
    }
}

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
    /// Attributes and names of directories lag, and not listings.
    keeps_attributes: bool,
    attributes: HashMap<u64, Kept<Attr>>,
    /// What names of directories led to, by the directory that they are in.
    dirs: HashMap<u64, HashMap<OsString, Kept<u64>>>,
}

impl Lag {
    /// Begins anew with this seed, or ends.
    pub(super) fn set(&mut self, seed: Option<u64>, keeps_attributes: bool) {
        *self = Self {
            random: seed,
            keeps_attributes,
            ..Self::default()
        };
    }

    /// The listing that is given once more.
    pub(super) fn find(&mut self, dir: u64) -> Option<Listing> {
        if self.keeps_attributes {
            return None;
        }
        if self.is_fresh()? {
            None
        } else {
            self.kept.get(&dir).map(Arc::clone)
        }
    }

    /// Whether something is asked of the server now; none where everything is.
    fn is_fresh(&mut self) -> Option<bool> {
        let random = self.random.as_mut()?;
        // Knuth's MMIX generator, of which the high bits are good.
        *random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        Some((*random >> 33).is_multiple_of(FRESH_EVERY))
    }

    /// What the process is told of an object of which this is so.
    pub(super) fn attr(&mut self, attr: Attr) -> Attr {
        if self.keeps_attributes
            && self.is_fresh() == Some(false)
            && let Some(kept) = self.attributes.get_mut(&attr.ino)
            && let Some(kept) = kept.give()
        {
            return kept;
        }
        self.attr_now(attr)
    }

    /// The same, asked of the server.
    pub(super) fn attr_now(&mut self, attr: Attr) -> Attr {
        if self.keeps_attributes {
            self.attributes.insert(attr.ino, Kept::new(attr));
        }
        attr
    }

    /// The process has changed the object.
    pub(super) fn note_object_changed(&mut self, ino: u64) {
        self.attributes.remove(&ino);
    }

    /// What the name of a directory leads to once more.
    pub(super) fn find_dir(&mut self, parent: u64, name: &OsStr) -> Option<u64> {
        if !self.keeps_attributes || self.is_fresh()? {
            return None;
        }
        self.dirs.get_mut(&parent)?.get_mut(name)?.give()
    }

    /// A lookup found this.
    pub(super) fn note_found(&mut self, parent: u64, name: &OsStr, attr: &Attr) {
        if !self.keeps_attributes {
            return;
        }
        let names = self.dirs.entry(parent).or_default();
        match attr.kind {
            Kind::Dir => names.insert(name.to_owned(), Kept::new(attr.ino)),
            _ => names.remove(name),
        };
        self.attributes.insert(attr.ino, Kept::new(*attr));
    }

    pub(super) fn keep(&mut self, dir: u64, listing: &Listing) {
        if self.random.is_some() {
            self.kept.insert(dir, Arc::clone(listing));
        }
    }

    /// The process has changed the directory.
    pub(super) fn note_changed(&mut self, dir: u64) {
        self.kept.remove(&dir);
        self.dirs.remove(&dir);
        self.attributes.remove(&dir);
    }
}
