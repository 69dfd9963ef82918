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

use crate::host_dir::{find_host_dir, list_hosts};
use crate::lease::{Beat, Holder, Lease};
use crate::own::{self, OwnError};

/// Name of the file.
const TERMS: &str = "terms";
/// Bytes that it has at most: 256 lanes have long paths.
const TERMS_BYTES_MAX: u64 = 4 << 20;

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

/// What the host of a directory has said in the holding that its beat is of.
pub(crate) fn terms_of_holding<B: Backing>(
    base: &B,
    dir: &B::Inode,
    beat: &Beat,
) -> Result<Option<Terms>, OwnError> {
    let Some(bytes) = own::load_at_most(base, dir, TERMS, TERMS_BYTES_MAX)? else {
        return Ok(None);
    };
    let stored: Option<Stored> = serde_json::from_slice(&bytes).ok();
    let current = stored.filter(|stored| Some(stored.holding) == beat.holding());
    Ok(current.map(|stored| stored.terms))
}

/// Looks at the hosts that have leases in a backing.
pub struct PeerWatch {
    me: Holder,
    /// The last beat of each host whose lock says nothing.
    seen: HashMap<String, Beat>,
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
    /// For this process.
    pub fn new(me: Holder) -> Self {
        Self {
            me,
            seen: HashMap::new(),
        }
    }

    /// The other hosts that live, by their names.
    pub fn look<B: Backing>(&mut self, base: &B) -> Result<Peers, OwnError> {
        let mut peers = Peers::default();
        let mut hosts = list_hosts(base)?;
        hosts.retain(|host| *host != self.me.host);
        hosts.sort();
        for host in hosts {
            let Some(dir) = find_host_dir(base, &host)? else {
                continue;
            };
            let beat = Beat::read(base, &dir)?;
            let Some(beat) = beat else { continue };
            let Some(terms) = terms_of_holding(base, &dir, &beat)? else {
                continue;
            };
            match self.judge(base, &dir, &host)? {
                Life::Lives => peers.living.push(Peer { host, terms }),
                Life::Gone => {}
                Life::Unknown => peers.is_unsure = true,
            }
        }
        Ok(peers)
    }

    fn judge<B: Backing>(
        &mut self,
        base: &B,
        dir: &B::Inode,
        host: &str,
    ) -> Result<Life, OwnError> {
        match Lease::is_held(base, dir) {
            Ok(true) => return Ok(Life::Lives),
            Ok(false) | Err(OwnError::Backing(Errno::OPNOTSUPP | Errno::NOLCK)) => {}
            Err(error) => return Err(error),
        }
        let Some(beat) = Beat::read(base, dir)? else {
            return Ok(Life::Gone);
        };
        if beat.is_settled_by_lock(&self.me.boot, base.attr(dir)?.dev) {
            return Ok(Life::Gone);
        }
        Ok(match self.seen.insert(host.to_owned(), beat.clone()) {
            None => Life::Unknown,
            Some(before) if before == beat => Life::Gone,
            Some(_) => Life::Lives,
        })
    }
}
