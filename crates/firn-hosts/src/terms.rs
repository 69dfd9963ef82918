//! How the hosts that live use a backing: each says so in a file beside its lease, and looks at what the others say.
//!
//! ```text
//! host-A/  lease    A lives
//!          terms    holding of that lease, and {"layout":"log","tokens":"flock",…}
//! ```
//!
//! Promises
//! * Of two hosts that come at the same time at least one sees the other: each says its own before it looks.
//! * What a host that is gone said does not count: it names the holding of the lease that it was said in, and that lease
//!   is held, or its count grows.

use std::collections::{BTreeMap, HashMap};

use firn_backing::{Backing, Errno};
use serde::{Deserialize, Serialize};

use crate::lease::{Beat, Holder, Lease};
use crate::own::{self, OwnError};

/// Name of the file.
const TERMS: &str = "terms";
/// Before the name of a host, in the names of directories.
const HOST: &str = "host-";

/// What a host says, by names of options and formats.
pub type Terms = BTreeMap<String, String>;

/// The file.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    holding: u64,
    terms: Terms,
}

/// A host that lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name.
    pub host: String,
    /// What it says.
    pub terms: Terms,
}

/// Says how the holder of `lease`, which is in `dir`, uses the backing.
pub fn publish_terms<B: Backing>(
    base: &B,
    dir: &B::Inode,
    lease: &Lease<B>,
    terms: &Terms,
) -> Result<(), Errno> {
    let stored = Stored {
        holding: lease.holding(),
        terms: terms.clone(),
    };
    let bytes = serde_json::to_vec(&stored).map_err(|_| Errno::INVAL)?;
    own::store(base, dir, TERMS, &bytes)
}

/// Looks at the hosts that have leases of one name in a backing.
pub struct PeerWatch {
    /// Names of directories, from the top of the backing, that have directories of hosts.
    places: Vec<Vec<String>>,
    lease: String,
    me: Holder,
    /// The last beat of each host whose lock says nothing, by its place and directory.
    seen: HashMap<(usize, String), Beat>,
}

/// Whether a host lives.
enum Life {
    Lives,
    Gone,
    /// Its lock is free, and its beat was not there, or another one, the last time. It is looked at again.
    Unknown,
}

/// What a look has found.
#[derive(Debug, Default)]
pub struct Peers {
    /// Hosts that live.
    pub living: Vec<Peer>,
    /// There may be more: the next look, after a time in which each living host beats, tells.
    pub is_unsure: bool,
}

impl PeerWatch {
    /// For this process. Where a host has leases in several places, what it says in the later ones goes before.
    pub fn new(places: &[&[&str]], lease: &str, me: Holder) -> Self {
        let place = |names: &&[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Self {
            places: places.iter().map(place).collect(),
            lease: lease.to_owned(),
            me,
            seen: HashMap::new(),
        }
    }

    /// The other hosts that live, by their names.
    pub fn look<B: Backing>(&mut self, base: &B) -> Result<Peers, OwnError> {
        let mut living: BTreeMap<String, Terms> = BTreeMap::new();
        let mut is_unsure = false;
        for (number, place) in self.places.clone().iter().enumerate() {
            let Some(top) = find_place(base, place)? else {
                continue;
            };
            for (name, host) in self.hosts_in(base, &top)? {
                let Some((dir, _)) = own::find_dir(base, &top, &name)? else {
                    continue;
                };
                let Some(terms) = self.read(base, &dir)? else {
                    continue;
                };
                match self.judge(base, &dir, (number, name))? {
                    Life::Lives => living.entry(host).or_default().extend(terms),
                    Life::Gone => {}
                    Life::Unknown => is_unsure = true,
                }
            }
        }
        let peers = living.into_iter();
        Ok(Peers {
            living: peers.map(|(host, terms)| Peer { host, terms }).collect(),
            is_unsure,
        })
    }

    /// Names of the directories of other hosts, and of the hosts.
    fn hosts_in<B: Backing>(
        &self,
        base: &B,
        top: &B::Inode,
    ) -> Result<Vec<(String, String)>, Errno> {
        let names = own::list(base, top)?.into_iter();
        let names = names.filter_map(|(name, ..)| String::from_utf8(name).ok());
        let hosts = names.filter_map(|name| {
            let host = name.strip_prefix(HOST)?.to_owned();
            (host != self.me.host).then_some((name, host))
        });
        Ok(hosts.collect())
    }

    /// What is said in the holding that the lease tells of.
    fn read<B: Backing>(&self, base: &B, dir: &B::Inode) -> Result<Option<Terms>, OwnError> {
        let Some(bytes) = own::load(base, dir, TERMS)? else {
            return Ok(None);
        };
        let beat = Beat::read(base, dir, &self.lease)?;
        let holding = beat.and_then(|beat| beat.holding());
        let stored: Option<Stored> = serde_json::from_slice(&bytes).ok();
        let current = stored.filter(|stored| Some(stored.holding) == holding);
        Ok(current.map(|stored| stored.terms))
    }

    fn judge<B: Backing>(
        &mut self,
        base: &B,
        dir: &B::Inode,
        key: (usize, String),
    ) -> Result<Life, OwnError> {
        match Lease::is_held(base, dir, &self.lease) {
            Ok(true) => return Ok(Life::Lives),
            Ok(false) | Err(OwnError::Backing(Errno::OPNOTSUPP | Errno::NOLCK)) => {}
            Err(error) => return Err(error),
        }
        let Some(beat) = Beat::read(base, dir, &self.lease)? else {
            return Ok(Life::Gone);
        };
        if beat.is_settled_by_lock(&self.me.boot, base.attr(dir)?.dev) {
            return Ok(Life::Gone);
        }
        Ok(match self.seen.insert(key, beat.clone()) {
            None => Life::Unknown,
            Some(before) if before == beat => Life::Gone,
            Some(_) => Life::Lives,
        })
    }
}

fn find_place<B: Backing>(base: &B, place: &[String]) -> Result<Option<B::Inode>, OwnError> {
    let mut dir = base.root();
    for name in place {
        match own::find_dir(base, &dir, name)? {
            Some((found, _)) => dir = found,
            None => return Ok(None),
        }
    }
    Ok(Some(dir))
}
