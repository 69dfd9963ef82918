//! A lock for several hosts, made of a queue of keys in etcd.
//!
//! The lock is a *token*: it lets one host at a time write to a *lane*, which is one I/O server of the shared file
//! system. Each lane has one token, and one queue of keys. Each key is a host that has the token or wants it:
//!
//! ```text
//! firn/GROUP/lane-0/694d…01   first of the queue: has the token    value: name of its host
//! firn/GROUP/lane-0/694d…07   second of the queue: watches the key before its own
//! ```
//!
//! A host that wants the token creates its own key under the lane, attached to a lease of etcd. Keys are ordered by
//! their creation. A host that does not need the token any more removes its key, and the next host has the token. If a
//! host dies, its lease ends after a few seconds, and etcd removes its key.
//!
//! Promises
//! * Each call answers or fails within a bounded time, so a long queue can be distinguished from a dead service. (A
//!   single `/v3/lock/lock` call would be answered only at the head of the queue, and its timeout would lose the
//!   place.)
//! * A host that has nothing to write to a lane gives the token back. It then sends no requests and renews no lease.
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
/// Number of watches for which there is time while a host waits for a token.
const WATCHES_PER_WAIT: u32 = 4;
/// Maximum number of hosts of a queue that one request reads.
const QUEUE_MAX: usize = 1000;
/// Pause before the next request of a host that is not among the first [`QUEUE_MAX`] of the queue.
const FAR_BEHIND_PAUSE: Duration = Duration::from_millis(500);
/// Pause before the next request of a host whose key is gone because its lease ended.
const LOST_PLACE_PAUSE: Duration = Duration::from_millis(50);

/// The token of one lane in etcd.
pub struct EtcdService {
    client: Arc<Client>,
    /// Prefix of the keys of the lane's queue.
    prefix: String,
    host: String,
    /// Maximum duration of one watch.
    watch_timeout: Duration,
    lease: Option<Lease>,
    /// Key of this host in the queue. `None` if etcd certainly has no such key, or only until a lease ends.
    key: Option<String>,
}

/// A lease of etcd, which its holder must renew in time. When it ends, etcd removes the keys that are attached to it.
struct Lease {
    id: i64,
    ttl: Duration,
    /// Time before the request that granted or last renewed the lease.
    confirmed_at: Instant,
}

impl EtcdService {
    /// Creates the service for the token of lane `lane` among the hosts of `group`. `host` is the name of this host;
    /// `wait` is how long a host waits for a token that does not come.
    pub fn new(client: Arc<Client>, group: &str, lane: usize, host: &str, wait: Duration) -> Self {
        let renewal_interval = Duration::from_secs(LEASE_SECONDS) / RENEWALS_PER_LEASE;
        Self {
            client,
            prefix: format!("firn/{group}/lane-{lane}/"),
            host: host.to_owned(),
            // A watch ends in time for the next renewal of the lease.
            watch_timeout: (wait / WATCHES_PER_WAIT).min(renewal_interval),
            lease: None,
            key: None,
        }
    }

    /// Returns the id of a live lease of etcd, which removes this host's keys when it ends. This is the present lease,
    /// renewed if that is due, or a new one.
    fn ensure_lease(&mut self) -> Result<i64, EtcdError> {
        if let Some(lease) = &self.lease {
            let id = lease.id;
            let age = lease.confirmed_at.elapsed();
            let is_renewal_due = age >= lease.ttl / RENEWALS_PER_LEASE;
            if !is_renewal_due {
                return Ok(id);
            }
            let has_ended = age >= lease.ttl;
            if !has_ended && self.keep_alive()? {
                return Ok(id);
            }
            // The lease has ended or is about to end. etcd then removes its keys, and this host loses its place.
            self.forget_lease();
        }
        self.request_lease()
    }

    /// Forgets the lease, and this host's key in the queue, which etcd removes when the lease ends.
    fn forget_lease(&mut self) {
        self.lease = None;
        self.key = None;
    }

    /// Requests a new lease. Returns its id.
    fn request_lease(&mut self) -> Result<i64, EtcdError> {
        let requested_at = Instant::now();
        let request = json!({ "TTL": LEASE_SECONDS });
        let granted: Granted = self.client.call("lease/grant", &request)?;
        let ttl_seconds = granted.ttl.clamp(1, LEASE_SECONDS_MAX);
        self.lease = Some(Lease {
            id: granted.id,
            ttl: Duration::from_secs(ttl_seconds),
            confirmed_at: requested_at,
        });
        Ok(granted.id)
    }

    /// Renews the lease. Returns false if etcd no longer has the lease.
    fn keep_alive(&mut self) -> Result<bool, EtcdError> {
        let Some(lease) = &mut self.lease else {
            return Ok(false);
        };
        let requested_at = Instant::now();
        let request = json!({ "ID": lease.id.to_string() });
        let kept_alive: KeptAlive = self.client.call("lease/keepalive", &request)?;
        let is_alive = kept_alive.result.ttl > 0;
        if is_alive {
            lease.confirmed_at = requested_at;
        }
        Ok(is_alive)
    }

    /// Returns the request for the keys of the queue, in the order of their creation.
    fn queue_request(&self) -> serde_json::Value {
        json!({
            "key": Text(&self.prefix),
            "range_end": Text(&after_prefix(&self.prefix)),
            "sort_order": "ASCEND",
            "sort_target": "CREATE",
            "limit": QUEUE_MAX.to_string(),
        })
    }

    /// Adds this host at the end of the queue for a lane's token (the lock for writing there) unless it is in the queue
    /// already. Returns the queue; its first host has the token.
    ///
    /// The queue is the keys with a common prefix. This host's key belongs to `lease`, so it vanishes when that ends.
    fn join_queue(&mut self, lease: i64) -> Result<Queue, EtcdError> {
        let key = match &self.key {
            Some(key) => key.clone(),
            None => format!("{}{lease:016x}", self.prefix),
        };
        // The key counts as present from now on, because the answer of etcd may be lost.
        self.key = Some(key.clone());
        let read_queue = json!({ "request_range": self.queue_request() });
        let put_key = json!({ "request_put": {
            "key": Text(&key), "value": Text(&self.host), "lease": lease.to_string(),
        }});
        let key_is_new = json!({ "target": "CREATE", "key": Text(&key), "create_revision": "0" });
        let transaction = json!({
            "compare": [key_is_new],
            "success": [put_key, read_queue],
            "failure": [read_queue],
        });
        let answer: Txn = self.client.call("kv/txn", &transaction)?;
        match answer.into_queue() {
            Some(queue) => Ok(queue),
            None => Err(self.client.invalid_answer_error("the answer has no queue")),
        }
    }

    fn read_queue(&self) -> Result<Queue, EtcdError> {
        let answer: Ranged = self.client.call("kv/range", &self.queue_request())?;
        Ok(answer.into_queue())
    }

    /// Returns the index of this host in the queue. Returns `None` if the host is not among the keys that were read.
    fn index_in(&self, queue: &Queue) -> Option<usize> {
        let key = self.key.as_ref()?;
        queue.members.iter().position(|member| member.key == *key)
    }

    /// Waits until a key is removed after the revision at which the queue was read, for at most
    /// [`Self::watch_timeout`]. May return earlier, so the caller must read the queue again.
    fn wait_for_removal(&self, key: &str, read_revision: i64) -> Result<(), EtcdError> {
        let first_revision = read_revision + 1;
        let request = json!({ "create_request": {
            "key": Text(key),
            "start_revision": first_revision.to_string(),
            "filters": ["NOPUT"],
        }});
        self.client.watch(&request, self.watch_timeout)
    }
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
    /// Requests the token, the lock that lets one host write to a lane (an I/O server). Returns `Granted` if this host
    /// is first in the queue of requests. Otherwise returns `Queued` with the holder and when to ask again.
    ///
    /// Adds this host to the queue if necessary. If another host is before it, waits first for a bounded time until
    /// the key before this host's own key is removed.
    fn ask(&mut self) -> Result<TokenReply, ServiceError> {
        let lease = self.ensure_lease()?;
        let queue = self.join_queue(lease)?;
        let index = match self.index_in(&queue) {
            Some(0) => return Ok(TokenReply::Granted),
            Some(index) => index,
            // This host's key may follow after those that were read.
            None if queue.is_truncated => return Ok(queued_reply(&queue, FAR_BEHIND_PAUSE)),
            None => {
                // The whole queue was read and lacks this host's key: the lease ended between the two requests. The
                // next request gets a new lease.
                self.forget_lease();
                return Ok(queued_reply(&queue, LOST_PLACE_PAUSE));
            }
        };
        let member_before = &queue.members[index - 1];
        self.wait_for_removal(&member_before.key, queue.revision)?;
        let queue_after_wait = self.read_queue()?;
        match self.index_in(&queue_after_wait) {
            Some(0) => Ok(TokenReply::Granted),
            _ => Ok(queued_reply(&queue_after_wait, Duration::ZERO)),
        }
    }

    fn give_back(&mut self) -> Result<(), ServiceError> {
        let Some(key) = self.key.take() else {
            return Ok(());
        };
        let request = json!({ "key": Text(&key) });
        if let Err(error) = self.client.call::<Deleted>("kv/deleterange", &request) {
            // etcd may still have the key until its lease ends, so this lease must not be used again.
            self.lease = None;
            return Err(error.into());
        }
        Ok(())
    }

    fn others_wait(&mut self) -> Result<bool, ServiceError> {
        Ok(self.read_queue()?.members.len() > 1)
    }

    /// Renews the lease of etcd, on which this host's key depends, and thereby the token: the lock for writing to an
    /// I/O server.
    ///
    /// Fails with `Lost` if the lease has ended or may have ended: another host may have the token. After another error
    /// the token is not lost, and the caller tries again.
    fn renew(&mut self) -> Result<(), ServiceError> {
        let why = match self.keep_alive() {
            Ok(true) => return Ok(()),
            Ok(false) => "its lease in etcd has ended".to_owned(),
            Err(error) => {
                if let Some(lease) = &self.lease
                    && lease.confirmed_at.elapsed() < lease.ttl
                {
                    // The lease still lives, so another try may renew it.
                    return Err(error.into());
                }
                format!("its lease in etcd could not be renewed: {error}")
            }
        };
        // The key stays known, so that `give_back` removes it if etcd still has it.
        self.lease = None;
        Err(ServiceError::Lost { why })
    }

    fn renew_every(&self) -> Option<Duration> {
        Some(Duration::from_secs(LEASE_SECONDS) / RENEWALS_PER_LEASE)
    }
}

/// Returns the reply to a host that does not have the token. The first member of the queue has it.
fn queued_reply(queue: &Queue, pause: Duration) -> TokenReply {
    let holder = queue.members.first();
    TokenReply::Queued(QueuePosition {
        holder: holder.and_then(|member| member.host.clone()),
        holding: holder.map_or_else(String::new, |member| member.key.clone()),
        ask_again_after: pause,
    })
}
