//! Tokens as keys in etcd.
//!
//! ```text
//! firn/GROUP/lane-0/694d…01   first of the queue: has the token    value: name of its host
//! firn/GROUP/lane-0/694d…07   next: watches the key before it
//! ```
//!
//! A host that wants the token puts a key of its own under the lane, attached to a lease; keys stand in the order in
//! which they were made. A host that dies loses its lease, and etcd removes its key.
//!
//! Promises
//! * Each call answers or fails within a bounded time: a queue and a dead service look different. (`/v3/lock/lock`
//!   would be one call that is answered at the end of the queue, whose end loses the place.)
//! * A lane that has nothing to write asks nothing and renews nothing.
//! * No answer is believed for its length; what is no answer of etcd is an error.

mod client;
mod messages;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use client::{Client, EtcdError};
use firn_hosts::tokens::{LockService, QueuePosition, ServiceError, TokenReply};
use messages::{Deleted, Granted, KeptAlive, Queue, Ranged, Text, Txn};
use serde_json::json;

/// Seconds after which etcd forgets a host that does not renew its lease: what a holder that was killed costs. etcd
/// takes no less than one and a half of its election timeouts, 2 s by default.
const LEASE_SECONDS: u64 = 3;
/// A lease that etcd makes longer is believed up to here.
const LEASE_SECONDS_MAX: u64 = 60;
/// Renewals of a lease before it would end.
const RENEWALS_PER_LEASE: u32 = 3;
/// Hosts of a queue that are read at a time.
const QUEUE_MAX: usize = 1000;
/// Pause of a host that is so far behind that it does not see itself.
const REST_FAR_BEHIND: Duration = Duration::from_millis(500);
/// Pause of a host whose key is gone, with its lease.
const REST_LOST_PLACE: Duration = Duration::from_millis(50);

/// The token of one lane in etcd.
pub struct EtcdService {
    client: Arc<Client>,
    /// Before the keys of the lane's queue.
    prefix: String,
    host: String,
    /// How long a watch lasts.
    watch_for: Duration,
    lease: Option<Lease>,
    /// Key of this host that etcd may have.
    key: Option<String>,
}

struct Lease {
    id: i64,
    ttl: Duration,
    /// etcd said so then.
    confirmed: Instant,
}

impl EtcdService {
    /// The token of lane `lane` among the hosts of `group`, for the host of this name. `wait`: how long a host waits
    /// for a token that does not come.
    pub fn new(client: Arc<Client>, group: &str, lane: usize, host: &str, wait: Duration) -> Self {
        let renew_every = Duration::from_secs(LEASE_SECONDS) / RENEWALS_PER_LEASE;
        Self {
            client,
            prefix: format!("firn/{group}/lane-{lane}/"),
            host: host.to_owned(),
            watch_for: (wait / 4).min(renew_every),
            lease: None,
            key: None,
        }
    }

    /// A lease that lives: the one of before, renewed where it is due, or a new one.
    fn ensure_lease(&mut self) -> Result<i64, EtcdError> {
        if let Some(lease) = &self.lease {
            let age = lease.confirmed.elapsed();
            if age < lease.ttl / RENEWALS_PER_LEASE {
                return Ok(lease.id);
            }
            if age < lease.ttl && self.keep_alive()? {
                return Ok(lease_id(&self.lease));
            }
            // Its keys are gone, or will be.
            self.lease = None;
            self.key = None;
        }
        let asked = Instant::now();
        let granted: Granted = self
            .client
            .call("lease/grant", &json!({ "TTL": LEASE_SECONDS }))?;
        self.lease = Some(Lease {
            id: granted.id,
            ttl: Duration::from_secs(granted.ttl.clamp(1, LEASE_SECONDS_MAX)),
            confirmed: asked,
        });
        Ok(granted.id)
    }

    /// Renews the lease; false: etcd has it no more.
    fn keep_alive(&mut self) -> Result<bool, EtcdError> {
        let Some(lease) = &mut self.lease else {
            return Ok(false);
        };
        let asked = Instant::now();
        let kept: KeptAlive = self
            .client
            .call("lease/keepalive", &json!({ "ID": lease.id.to_string() }))?;
        let is_alive = kept.result.ttl > 0;
        if is_alive {
            lease.confirmed = asked;
        }
        Ok(is_alive)
    }

    fn range_of_queue(&self) -> serde_json::Value {
        json!({
            "key": Text(&self.prefix),
            "range_end": Text(&after_prefix(&self.prefix)),
            "sort_order": "ASCEND",
            "sort_target": "CREATE",
            "limit": QUEUE_MAX.to_string(),
        })
    }

    /// Stands in line, at the end where this host does not stand there yet.
    fn join_queue(&mut self, lease: i64) -> Result<Queue, EtcdError> {
        let key = self
            .key
            .get_or_insert_with(|| format!("{}{lease:016x}", self.prefix))
            .clone();
        let range = json!({ "request_range": self.range_of_queue() });
        let put = json!({ "request_put": {
            "key": Text(&key), "value": Text(&self.host), "lease": lease.to_string(),
        }});
        let is_new = json!({ "target": "CREATE", "key": Text(&key), "create_revision": "0" });
        let txn = json!({ "compare": [is_new], "success": [put, range], "failure": [range] });
        let answer: Txn = self.client.call("kv/txn", &txn)?;
        answer
            .into_queue()
            .ok_or_else(|| self.client.garbled("it has no queue"))
    }

    fn read_queue(&self) -> Result<Queue, EtcdError> {
        let ranged: Ranged = self.client.call("kv/range", &self.range_of_queue())?;
        Ok(ranged.into_queue())
    }

    /// Where this host stands in a queue.
    fn place_in(&self, queue: &Queue) -> Option<usize> {
        let key = self.key.as_ref()?;
        queue.members.iter().position(|member| member.key == *key)
    }

    /// Waits for a while until a key is removed, or something else happens to it.
    fn watch(&self, key: &str, since_revision: i64) -> Result<(), EtcdError> {
        let request = json!({ "create_request": {
            "key": Text(key),
            "start_revision": (since_revision + 1).to_string(),
            "filters": ["NOPUT"],
        }});
        self.client.watch(&request, self.watch_for)
    }
}

fn lease_id(lease: &Option<Lease>) -> i64 {
    lease.as_ref().map_or(0, |lease| lease.id)
}

/// The first key after all that begin with `prefix`, which ends in a slash.
fn after_prefix(prefix: &str) -> String {
    debug_assert!(prefix.ends_with('/'));
    let mut end = prefix.to_owned();
    end.pop();
    // The character after the slash.
    end.push('0');
    end
}

impl LockService for EtcdService {
    fn ask(&mut self) -> Result<TokenReply, ServiceError> {
        let lease = self.ensure_lease()?;
        let queue = self.join_queue(lease)?;
        let place = self.place_in(&queue);
        let before = match place {
            Some(0) => return Ok(TokenReply::Granted),
            Some(place) => &queue.members[place - 1],
            None if queue.is_cut => return Ok(behind(&queue, REST_FAR_BEHIND)),
            None => {
                // The lease ended on the way: there is another one the next time.
                self.lease = None;
                self.key = None;
                return Ok(behind(&queue, REST_LOST_PLACE));
            }
        };
        self.watch(&before.key, queue.revision)?;
        let queue = self.read_queue()?;
        match self.place_in(&queue) {
            Some(0) => Ok(TokenReply::Granted),
            _ => Ok(behind(&queue, Duration::ZERO)),
        }
    }

    fn give_back(&mut self) -> Result<(), ServiceError> {
        if let Some(key) = self.key.take() {
            let request = json!({ "key": Text(&key) });
            if let Err(error) = self.client.call::<Deleted>("kv/deleterange", &request) {
                // The key ends with its lease, which must not be used again.
                self.lease = None;
                return Err(error.into());
            }
        }
        Ok(())
    }

    fn others_wait(&mut self) -> Result<bool, ServiceError> {
        Ok(self.read_queue()?.members.len() > 1)
    }

    fn renew(&mut self) -> Result<(), ServiceError> {
        let why = match self.keep_alive() {
            Ok(true) => return Ok(()),
            Ok(false) => "its lease has ended".to_owned(),
            Err(error) => {
                let is_over = |lease: &Lease| lease.confirmed.elapsed() >= lease.ttl;
                if !self.lease.as_ref().is_none_or(is_over) {
                    return Err(error.into());
                }
                format!("its lease could not be renewed: {error}")
            }
        };
        self.lease = None;
        Err(ServiceError::Lost { why })
    }

    fn renew_every(&self) -> Option<Duration> {
        Some(Duration::from_secs(LEASE_SECONDS) / RENEWALS_PER_LEASE)
    }
}

fn behind(queue: &Queue, rest: Duration) -> TokenReply {
    let first = queue.members.first();
    TokenReply::Queued(QueuePosition {
        holder: first.and_then(|member| member.host.clone()),
        holding: first.map_or_else(String::new, |member| member.key.clone()),
        ask_again_after: rest,
    })
}
