//! Detects which hosts are alive, among the hosts that use a backing for one purpose. A *backing* is the directory,
//! perhaps shared by several hosts, that a mount serves.
//!
//! A *lease* is a file in the backing that a living host keeps locked and rewrites at intervals, with each *heartbeat*.
//! Its record lists the purposes for which the host uses the backing, such as transactions or logs ([`LeaseUse`]).
//!
//! A held lock proves that the host is alive. A free lock may belong to a living host, because not every file system
//! shows locks to other hosts. The host then counts as alive as long as its heartbeat changes.

use std::collections::HashMap;
use std::time::Instant;

use firn_backing::{Backing, Errno};
use parking_lot::Mutex;

use crate::host_dir::{find_host_dir, list_hosts};
use crate::lease::{Heartbeat, Lease, LeaseUse};
use crate::own::OwnError;

/// Detects whether hosts that use a backing for one purpose are alive.
pub struct HostWatch {
    purpose: LeaseUse,
    /// Boot id of this host ([`crate::Holder::boot`]).
    boot: String,
    /// The last heartbeat of each host whose lock proves nothing.
    last_heartbeats: Mutex<HashMap<String, ObservedHeartbeat>>,
}

/// A heartbeat that this process has read.
struct ObservedHeartbeat {
    heartbeat: Heartbeat,
    /// Time at which this process read the heartbeat first.
    first_seen: Instant,
}

impl HostWatch {
    /// Creates a watch for hosts whose leases record the use `purpose`.
    pub fn new(purpose: LeaseUse, boot: String) -> Self {
        Self {
            purpose,
            boot,
            last_heartbeats: Mutex::default(),
        }
    }

    /// Returns whether `host` is alive and uses the backing for this purpose, as far as its lease shows that here. A
    /// held lock of the lease proves life; otherwise the heartbeat must have changed lately. Returns false if the host
    /// has no lease.
    pub fn is_living<B: Backing>(&self, base: &B, host: &str) -> Result<bool, OwnError> {
        let Some(dir) = find_host_dir(base, host)? else {
            return Ok(false);
        };
        let Some(heartbeat) = Heartbeat::read(base, &dir)? else {
            return Ok(false);
        };
        if !heartbeat.may_have_use(self.purpose) {
            return Ok(false);
        }
        match Lease::is_held(base, &dir) {
            Ok(true) => return Ok(true),
            // A free lock, or a file system without locks: the heartbeat decides.
            Ok(false) | Err(OwnError::Backing(Errno::OPNOTSUPP | Errno::NOLCK)) => {}
            Err(error) => return Err(error),
        }
        if heartbeat.does_free_lock_prove_end(&self.boot, base.attr(&dir)?.dev) {
            return Ok(false);
        }
        Ok(self.record_and_check_fresh(host, heartbeat))
    }

    /// Remembers `heartbeat`, which was just read, if it differs from the host's last one. Returns whether the host's
    /// heartbeat has changed within the time after which the host counts as dead
    /// ([`LeaseUse::stale_after`]).
    ///
    /// The first heartbeat that this process reads counts as a change.
    fn record_and_check_fresh(&self, host: &str, heartbeat: Heartbeat) -> bool {
        let mut last_heartbeats = self.last_heartbeats.lock();
        if let Some(last) = last_heartbeats.get(host)
            && last.heartbeat == heartbeat
        {
            return last.first_seen.elapsed() < self.purpose.stale_after();
        }
        let first_seen = Instant::now();
        last_heartbeats.insert(
            host.to_owned(),
            ObservedHeartbeat {
                heartbeat,
                first_seen,
            },
        );
        first_seen.elapsed() < self.purpose.stale_after()
    }

    /// Returns the names of the living hosts, without `me`.
    pub fn others_living<B: Backing>(&self, base: &B, me: &str) -> Result<Vec<String>, OwnError> {
        let mut living = Vec::new();
        for host in list_hosts(base)? {
            if host != me && self.is_living(base, &host)? {
                living.push(host);
            }
        }
        Ok(living)
    }
}
