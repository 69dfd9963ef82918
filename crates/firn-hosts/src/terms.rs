//! Publishes and reads the *terms* of each living host: the options with which it mounts the backing. A *backing* is
//! the directory, perhaps shared by several hosts, that a mount serves. A *lease* is a file that a living host keeps
//! locked and rewrites with a growing count. Each host writes its terms to a file beside its lease, and reads those of
//! the others.
//!
//! ```text
//! host-A/  lease    A is alive; has the acquisition id
//!          terms    the same acquisition id, and the mount options {"layout":"log","tokens":"flock",…}
//! ```
//!
//! Promises
//! * If two hosts start at the same time, at least one of them sees the other, because each host publishes its terms
//!   before it reads.
//! * The terms of a dead host do not count. The *acquisition id* is a random number that a host draws when it acquires
//!   the lease. Terms count only while the lease has the same id, and is held or its count grows.

use std::collections::{BTreeMap, HashMap};

use firn_backing::{Backing, Errno};
use serde::{Deserialize, Serialize};

use crate::host_dir::{find_host_dir, list_hosts};
use crate::lease::{Heartbeat, Holder, Lease};
use crate::own::{self, OwnError};

/// Name of the file in the host's directory.
const TERMS: &str = "terms";
/// Maximum size of the file in bytes. The terms list up to 256 lanes, each with a long path.
const TERMS_BYTES_MAX: u64 = 4 << 20;

/// The terms of a host: values by the names of options and formats.
pub type Terms = BTreeMap<String, String>;

/// Content of a host's file [`TERMS`].
#[derive(Debug, Serialize, Deserialize)]
struct StoredTerms {
    /// The holder's [`Lease::acquisition_id`]. In the file the id has an older name, `holding`.
    #[serde(rename = "holding")]
    acquisition_id: u64,
    terms: Terms,
}

/// A living host and its terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Name of the host.
    pub host: String,
    /// Terms of the host.
    pub terms: Terms,
}

/// Writes the terms of the holder of `lease`, durably, to the host directory `dir`.
pub fn publish_terms<B: Backing>(
    base: &B,
    dir: &B::Inode,
    lease: &Lease<B>,
    terms: &Terms,
) -> Result<(), Errno> {
    let stored = StoredTerms {
        acquisition_id: lease.acquisition_id(),
        terms: terms.clone(),
    };
    let bytes = serde_json::to_vec(&stored).map_err(|_| Errno::INVAL)?;
    own::replace_file(base, dir, TERMS, &bytes)
}

/// Returns the terms of a host, the mount options that hosts compare, if the host wrote them under the lease that
/// `heartbeat` belongs to. `dir` is the host's directory.
///
/// Returns `None` if there is no such file, if its content is damaged, or if it was written under an earlier lease.
/// The host then counts as one that has not published its terms yet.
pub(crate) fn read_current_terms<B: Backing>(
    base: &B,
    dir: &B::Inode,
    heartbeat: &Heartbeat,
) -> Result<Option<Terms>, OwnError> {
    let Some(bytes) = own::read_file_at_most(base, dir, TERMS, TERMS_BYTES_MAX)? else {
        return Ok(None);
    };
    // A damaged file counts as absent.
    let Ok(stored) = serde_json::from_slice::<StoredTerms>(&bytes) else {
        return Ok(None);
    };
    if heartbeat.acquisition_id() != Some(stored.acquisition_id) {
        return Ok(None);
    }
    Ok(Some(stored.terms))
}

/// Finds the living hosts that have leases in a backing, with their terms.
pub struct PeerWatch {
    me: Holder,
    /// The last heartbeat that was read of each host whose lock proves nothing.
    last_heartbeats: HashMap<String, Heartbeat>,
}

/// Whether a host is alive.
enum PeerLife {
    Alive,
    Gone,
    /// The lock is free but proves nothing, and this is the first heartbeat of the host that the watch has read. The
    /// next look shows whether the heartbeat has changed.
    Undecided,
}

/// Result of one look at the other hosts.
#[derive(Debug, Default)]
pub struct Peers {
    /// The hosts that are alive.
    pub living: Vec<Peer>,
    /// Further hosts may be alive: their locks prove nothing here, and this watch has read their heartbeats only once.
    ///
    /// A second [`PeerWatch::find_living`] after [`STALE_AFTER`](crate::STALE_AFTER) decides, because a living host
    /// writes a heartbeat within that time.
    pub has_undecided: bool,
}

impl PeerWatch {
    /// Creates a watch for the process `me`.
    pub fn new(me: Holder) -> Self {
        Self {
            me,
            last_heartbeats: HashMap::new(),
        }
    }

    /// Returns the other living hosts, sorted by name, with their terms: the mount options that hosts compare. A host
    /// without current terms is left out.
    ///
    /// If it is unknown yet whether a host is alive, `has_undecided` is true and the host is left out. The caller then
    /// calls this again after [`STALE_AFTER`](crate::STALE_AFTER), when a living host has written a new heartbeat.
    pub fn find_living<B: Backing>(&mut self, base: &B) -> Result<Peers, OwnError> {
        let mut peers = Peers::default();
        let mut hosts = list_hosts(base)?;
        hosts.retain(|host| *host != self.me.host);
        hosts.sort();
        for host in hosts {
            let Some(dir) = find_host_dir(base, &host)? else {
                continue;
            };
            let Some(heartbeat) = Heartbeat::read(base, &dir)? else {
                continue;
            };
            // A host publishes its terms before it reads those of others. A host without current terms has read none
            // yet, so it will see those of this host.
            let Some(terms) = read_current_terms(base, &dir, &heartbeat)? else {
                continue;
            };
            match self.judge_life(base, &dir, &host)? {
                PeerLife::Alive => peers.living.push(Peer { host, terms }),
                PeerLife::Gone => {}
                PeerLife::Undecided => peers.has_undecided = true,
            }
        }
        Ok(peers)
    }

    /// Returns whether a host is alive, as far as the lock and the heartbeats of its lease show that here. `dir` is the
    /// host's directory.
    ///
    /// A held lock proves life. A free lock may prove death. Otherwise the heartbeat decides: it must have changed
    /// since the last call, so the first call leaves the host undecided.
    fn judge_life<B: Backing>(
        &mut self,
        base: &B,
        dir: &B::Inode,
        host: &str,
    ) -> Result<PeerLife, OwnError> {
        match Lease::is_held(base, dir) {
            Ok(true) => return Ok(PeerLife::Alive),
            Ok(false) | Err(OwnError::Backing(Errno::OPNOTSUPP | Errno::NOLCK)) => {}
            Err(error) => return Err(error),
        }
        let Some(heartbeat) = Heartbeat::read(base, dir)? else {
            return Ok(PeerLife::Gone);
        };
        if heartbeat.does_free_lock_prove_end(&self.me.boot, base.attr(dir)?.dev) {
            return Ok(PeerLife::Gone);
        }
        let last_heartbeat = self
            .last_heartbeats
            .insert(host.to_owned(), heartbeat.clone());
        Ok(match last_heartbeat {
            None => PeerLife::Undecided,
            Some(last_heartbeat) if last_heartbeat == heartbeat => PeerLife::Gone,
            Some(_) => PeerLife::Alive,
        })
    }
}
