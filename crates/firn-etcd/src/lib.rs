//! Tokens as keys in etcd.
//!
//! ```text
//! firn/GROUP/lane-0/694d…01   first of the queue: has the token    value: name of its host
//! firn/GROUP/lane-0/694d…07   second of the queue: watches the key before its own
//! ```
//!
//! A host that wants the token creates its own key under the lane, attached to a lease of etcd. Keys are ordered by
//! their creation. If a host dies, its lease ends, and etcd removes its key.
//!
//! Promises
//! * Each call answers or fails within a bounded time, so a long queue can be distinguished from a dead service. (A
//!   single `/v3/lock/lock` call would be answered only at the head of the queue, and its timeout would lose the
//!   place.)
//! * A lane that has nothing to write sends no requests and renews no lease.
//! * No answer is trusted beyond its size limit. An answer that etcd would not send is an error.

mod client;
mod messages;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use client::{Client, EtcdError};
use firn_hosts::tokens::{LockService, QueuePosition, ServiceError, TokenReply};
use messages::{Deleted, Granted, KeptAlive, Queue, Ranged, Text, Txn};
use serde_json::json;

/// Lifetime in seconds of a lease that this host requests. If the holder is killed, the next host waits this long. etcd
/// grants at least one and a half of its election timeouts, 2 s by default.
const LEASE_SECONDS: u64 = 3;
/// Maximum lifetime in seconds of a lease. A longer lifetime in etcd's answer is cut to this value.
const LEASE_SECONDS_MAX: u64 = 60;
/// Number of renewals within the lifetime of a lease.
const RENEWALS_PER_LEASE: u32 = 3;
/// Maximum number of hosts of a queue that one request reads.
const QUEUE_MAX: usize = 1000;
/// Pause before the next request of a host that is not among the first [`QUEUE_MAX`] of the queue.
const REST_FAR_BEHIND: Duration = Duration::from_millis(500);
/// Pause before the next request of a host whose key is gone because its lease ended.
const REST_LOST_PLACE: Duration = Duration::from_millis(50);

/// The token of one lane in etcd.
pub struct EtcdService {
    client: Arc<Client>,
    /// Prefix of the keys of the lane's queue.
    prefix: String,
    host: String,
    /// Maximum duration of one watch.
    watch_for: Duration,
    lease: Option<Lease>,
    /// Key of this host in the queue. `None` if etcd certainly has no such key, or only until a lease ends.
    key: Option<String>,
}

struct Lease {
    id: i64,
    ttl: Duration,
    /// Time before the request that granted or last renewed the lease.
    confirmed: Instant,
}

impl EtcdService {
    /// Creates the service for the token of lane `lane` among the hosts of `group`. `host` is the name of this host;
    /// `wait` is how long a host waits for a token that does not come.
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

    /// Returns the id of a live lease: the present one, renewed if that is due, or a new one.
    fn ensure_lease(&mut self) -> Result<i64, EtcdError> {
        if let Some(lease) = &self.lease {
            let age = lease.confirmed.elapsed();
            if age < lease.ttl / RENEWALS_PER_LEASE {
                return Ok(lease.id);
            }
            if age < lease.ttl && self.keep_alive()? {
                return Ok(lease_id(&self.lease));
            }
            // The lease has ended or is about to end, and etcd removes its keys.
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

    /// Renews the lease. Returns false if etcd no longer has the lease.
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

    /// Adds this host at the end of the queue unless it is in the queue already. Returns the queue.
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
            .ok_or_else(|| self.client.garbled("the answer has no queue"))
    }

    fn read_queue(&self) -> Result<Queue, EtcdError> {
        let ranged: Ranged = self.client.call("kv/range", &self.range_of_queue())?;
        Ok(ranged.into_queue())
    }

    /// Returns the index of this host in the queue. Returns `None` if the host is not among the keys that were read.
    fn place_in(&self, queue: &Queue) -> Option<usize> {
        let key = self.key.as_ref()?;
        queue.members.iter().position(|member| member.key == *key)
    }

    /// Waits until a key is removed, at most [`Self::watch_for`]. May return earlier, so the caller must read the queue
    /// again.
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

/// Returns the first key that sorts after all keys that begin with `prefix`. `prefix` ends in a slash.
fn after_prefix(prefix: &str) -> String {
    debug_assert!(prefix.ends_with('/'));
    let mut end = prefix.to_owned();
    end.pop();
    // `0` is the character after the slash.
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
                // The lease ended between the two requests. The next request gets a new lease.
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
                // etcd may still have the key until its lease ends, so this lease must not be used again.
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
            Ok(false) => "its lease in etcd has ended".to_owned(),
            Err(error) => {
                let is_over = |lease: &Lease| lease.confirmed.elapsed() >= lease.ttl;
                if !self.lease.as_ref().is_none_or(is_over) {
                    return Err(error.into());
                }
                format!("its lease in etcd could not be renewed: {error}")
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
