//! Simulates the client cache of a network file system: for a while, a process gets old answers of the server. Either
//! listings of directories lag, or attributes and the names of directories do.
//!
//! * An old listing is the directory as it was at some moment, but never older than one that this process has seen.
//! * After a process has changed a directory, its next listing has this change and all earlier changes of other
//!   processes. A real client learns from the reply to the change that its cached listing is old.
//! * Lookups of one name do not lag, unless attributes do. In that case the name of a directory may lead to the
//!   directory that had the name before.
//! * Old attributes are those of the object at some moment; reads end at the length in them. Attributes are new if the
//!   process requests them from the server, looks up the name, or has changed the object.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use firn_backing::{Attr, Kind};

/// One of this number of answers, on average, is read from the server again.
const FRESH_EVERY: u64 = 4;
/// Maximum number of answers for which cached attributes and names of directories are used.
const ANSWERS_MAX: u32 = 3;

/// A cached value, and the number of answers for which it was used.
struct CachedAnswer<T> {
    value: T,
    answers: u32,
}

impl<T: Copy> CachedAnswer<T> {
    fn new(value: T) -> Self {
        Self { value, answers: 0 }
    }

    /// Returns the value once more, or `None` if it was already used for `ANSWERS_MAX` answers.
    fn use_once(&mut self) -> Option<T> {
        self.answers += 1;
        (self.answers <= ANSWERS_MAX).then_some(self.value)
    }
}

/// A name in a directory.
pub(super) struct Entry {
    /// Position of the name in the listing.
    pub(super) cookie: i64,
    pub(super) name: OsString,
    pub(super) ino: u64,
    pub(super) kind: Option<Kind>,
}

pub(super) type Listing = Arc<Vec<Entry>>;

/// The cached answers of one process.
#[derive(Default)]
pub(super) struct Lag {
    /// State of the generator that decides which answers are read from the server. `None` if all are.
    random: Option<u64>,
    listings: HashMap<u64, Listing>,
    /// Whether attributes and names of directories lag. If not, listings do.
    caches_attributes: bool,
    attributes: HashMap<u64, CachedAnswer<Attr>>,
    /// The objects to which names of directories led, by the directory with these names.
    dirs: HashMap<u64, HashMap<OsString, CachedAnswer<u64>>>,
}

impl Lag {
    /// Clears the cache. Then begins a lag with this seed, or none if `seed` is `None`.
    pub(super) fn set(&mut self, seed: Option<u64>, caches_attributes: bool) {
        *self = Self {
            random: seed,
            caches_attributes,
            ..Self::default()
        };
    }

    /// Returns the cached listing, or `None` if the listing is to be read from the server.
    pub(super) fn find_listing(&mut self, dir: u64) -> Option<Listing> {
        if self.caches_attributes {
            return None;
        }
        if self.is_fresh()? {
            return None;
        }
        self.listings.get(&dir).map(Arc::clone)
    }

    /// Decides whether the next answer is read from the server. Returns `None` if no answers lag.
    fn is_fresh(&mut self) -> Option<bool> {
        let random = self.random.as_mut()?;
        // Knuth's MMIX generator. Its high bits are the most random ones.
        *random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        Some((*random >> 33).is_multiple_of(FRESH_EVERY))
    }

    /// Returns the attributes that the process sees of an object whose present ones are `attr`.
    pub(super) fn attr(&mut self, attr: Attr) -> Attr {
        if self.caches_attributes
            && self.is_fresh() == Some(false)
            && let Some(cached) = self.attributes.get_mut(&attr.ino)
            && let Some(old_attr) = cached.use_once()
        {
            return old_attr;
        }
        self.attr_now(attr)
    }

    /// Returns the attributes as requested from the server, and caches them.
    pub(super) fn attr_now(&mut self, attr: Attr) -> Attr {
        if self.caches_attributes {
            self.attributes.insert(attr.ino, CachedAnswer::new(attr));
        }
        attr
    }

    /// Records that the process has changed the object.
    pub(super) fn forget_object(&mut self, ino: u64) {
        self.attributes.remove(&ino);
    }

    /// Returns the object to which the name of a directory led before, or `None` if the name is to be looked up.
    pub(super) fn find_dir(&mut self, parent: u64, name: &OsStr) -> Option<u64> {
        if !self.caches_attributes || self.is_fresh()? {
            return None;
        }
        self.dirs.get_mut(&parent)?.get_mut(name)?.use_once()
    }

    /// Records what a lookup by the process has found.
    pub(super) fn store_found(&mut self, parent: u64, name: &OsStr, attr: &Attr) {
        if !self.caches_attributes {
            return;
        }
        let names = self.dirs.entry(parent).or_default();
        match attr.kind {
            Kind::Dir => names.insert(name.to_owned(), CachedAnswer::new(attr.ino)),
            _ => names.remove(name),
        };
        self.attributes.insert(attr.ino, CachedAnswer::new(*attr));
    }

    pub(super) fn store_listing(&mut self, dir: u64, listing: &Listing) {
        if self.random.is_some() {
            self.listings.insert(dir, Arc::clone(listing));
        }
    }

    /// Records that the process has changed the directory.
    pub(super) fn forget_dir(&mut self, dir: u64) {
        self.listings.remove(&dir);
        self.dirs.remove(&dir);
        self.attributes.remove(&dir);
    }
}
