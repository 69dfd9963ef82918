//! Which hosts live that use a backing for one thing: by the locks of their leases, and where those say nothing by their
//! beats.

use std::collections::HashMap;
use std::time::Instant;

use firn_backing::{Backing, Errno};
use parking_lot::Mutex;

use crate::host_dir::{find_host_dir, list_hosts};
use crate::lease::{Beat, Lease, LeaseUse};
use crate::own::OwnError;

/// Looks at the hosts that use a backing for one thing.
pub struct HostWatch {
    purpose: LeaseUse,
    /// The run of this kernel ([`crate::Holder::boot`]).
    boot: String,
    /// The last beat of each host whose lock says nothing, and since when it stands still.
    seen: Mutex<HashMap<String, (Beat, Instant)>>,
}

impl HostWatch {
    /// For hosts that have this use in their leases.
    pub fn new(purpose: LeaseUse, boot: String) -> Self {
        Self {
            purpose,
            boot,
            seen: Mutex::default(),
        }
    }

    /// Whether a process uses the backing for this in the name of a host, as far as can be seen from here.
    pub fn is_living<B: Backing>(&self, base: &B, host: &str) -> Result<bool, OwnError> {
        let Some(dir) = find_host_dir(base, host)? else {
            return Ok(false);
        };
        let Some(beat) = Beat::read(base, &dir)? else {
            return Ok(false);
        };
        if !beat.may_be_for(self.purpose) {
            return Ok(false);
        }
        match Lease::is_held(base, &dir) {
            Ok(true) => return Ok(true),
            Ok(false) | Err(OwnError::Backing(Errno::OPNOTSUPP | Errno::NOLCK)) => {}
            Err(error) => return Err(error),
        }
        if beat.is_settled_by_lock(&self.boot, base.attr(&dir)?.dev) {
            return Ok(false);
        }
        Ok(self.is_fresh(host, beat))
    }

    /// Whether a beat has not stood still for too long.
    fn is_fresh(&self, host: &str, beat: Beat) -> bool {
        let mut seen = self.seen.lock();
        let (last, since) = seen
            .entry(host.to_owned())
            .or_insert_with(|| (beat.clone(), Instant::now()));
        if *last != beat {
            (*last, *since) = (beat, Instant::now());
        }
        since.elapsed() < self.purpose.stale_after()
    }

    /// The hosts that live, but `me`.
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
