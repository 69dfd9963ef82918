//! The choice of a host's *partner*: another host that keeps copies of the files that this host has in memory only
//! (*held* files).
//!
//! A partner *follows* this host: it stays connected and copies held files. While no partner follows, this host
//! searches for one: it asks other hosts in an order that the *ring* of all hosts gives. While a partner follows, this
//! host occasionally searches for a better one, which comes earlier in this order.
//!
//! Another host is in one of these states:
//! * *chosen*: this host asks it to become the partner. One host at most is chosen.
//! * *partner*: the chosen host has connected to this host and follows it.
//! * *former partner*: another host is the partner now, and does not yet have copies of all held files.
//!
//! Promise: the record of this host, a file in the shared backing, names every host that may have the only copy of a
//! file. These are the partner and the former partners.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::backoff::{Backoff, Waits};
use firn_client::OpenMount;
use firn_protocol::PartnerStatus;

use crate::auth::Key;
use crate::error::PullError;
use crate::key_file::KeyFile;
use crate::partner::ring::{Domains, PartnerCandidate};
use crate::partner::service::{ChosenPartner, PartnerService};
use crate::peer::Peer;
use crate::server::Level;

/// Time between two checks whether the partner still follows.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum time until a chosen host begins to follow.
const FOLLOW_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two checks whether a chosen host has begun to follow.
const FOLLOW_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Pauses between two searches that found no partner.
const SEARCH_PAUSES: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(15));
/// Pauses between two searches for a better partner. Each lists one directory of the backing.
const BETTER_SEARCH_PAUSES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
/// Time after which a better host that did not follow is asked again. If it has a new record, it is asked at once.
const BETTER_RETRY_AFTER: Duration = Duration::from_secs(120);
/// Maximum number of former partners that the record names.
const FORMER_PARTNERS_MAX: usize = 8;
/// Value of the option `partner` that leaves the choice to the ring.
const WANTED_NEXT: &str = "next";

/// Searches for a partner, a host that keeps copies of this host's files in memory, and searches again when it leaves.
/// This is the body of a thread, which runs until the process ends.
///
/// `key_file` is this host's record in the backing, where other hosts find its partners. `options` and `domains` (hosts
/// that fail together) restrict the choice.
pub(crate) fn run_partner_search(
    service: &Arc<PartnerService>,
    key_file: &KeyFile,
    options: &PartnerStatus,
    domains: &Domains,
) -> ! {
    let mut chooser = Chooser::new(service, key_file, options, domains);
    // The pauses between searches grow while no host becomes the partner, or no better host is found.
    let mut search_pauses = SEARCH_PAUSES.start();
    let mut better_search = BetterSearchSchedule::new();
    loop {
        // The partner is connected, so it copies files.
        if service.is_followed_by_partner() {
            // The note in the status of the mount said why there was no partner.
            chooser.clear_note();
            chooser.drop_unneeded_former_partners();
            if better_search.is_due() {
                let search_again_soon = chooser.search_better_partner();
                better_search.schedule_next(search_again_soon);
            }
            // If this partner leaves, the next search comes at once and its pauses begin with the shortest.
            search_pauses.reset();
            std::thread::sleep(CHECK_INTERVAL);
        } else if chooser.find_partner() {
            // A new partner was found. Better ones are searched after the shortest pause again.
            search_pauses.reset();
            better_search = BetterSearchSchedule::new();
        } else {
            search_pauses.sleep();
        }
    }
}

/// The time of the next search for a better partner. The pauses grow while nothing changes.
struct BetterSearchSchedule {
    pauses: Waits,
    due_at: Instant,
}

impl BetterSearchSchedule {
    fn new() -> Self {
        let mut pauses = BETTER_SEARCH_PAUSES.start();
        let due_at = Instant::now() + pauses.next_wait();
        Self { pauses, due_at }
    }

    fn is_due(&self) -> bool {
        Instant::now() >= self.due_at
    }

    /// Schedules the next search, soon or after a longer pause than the last one.
    fn schedule_next(&mut self, soon: bool) {
        if soon {
            self.pauses.reset();
        }
        self.due_at = Instant::now() + self.pauses.next_wait();
    }
}

/// A failed attempt to get a better partner.
struct FailedAttempt {
    /// Key in the record that the asked host had at that time; `None` if it had no record.
    agent_key: Option<Key>,
    asked_at: Instant,
}

impl FailedAttempt {
    /// Whether the attempt was made a short time ago, and the host has had no new agent since.
    fn is_recent(&self, agent_key: Option<&Key>) -> bool {
        self.agent_key.as_ref() == agent_key && self.asked_at.elapsed() < BETTER_RETRY_AFTER
    }
}

/// Result of asking a host to become the partner.
enum Answer {
    /// The host follows this host, and is now its partner.
    Follows,
    /// The host agreed, but did not begin to follow in time.
    DoesNotFollow,
    /// The host cannot become the partner, for this reason.
    Refuses(String),
}

/// State of the thread that chooses partners.
struct Chooser<'a> {
    service: &'a Arc<PartnerService>,
    /// This host's record as it is in the backing.
    record: KeyFile,
    /// The mount's options for partners.
    options: &'a PartnerStatus,
    domains: &'a Domains,
    /// The last note that was sent to firnd.
    note: String,
    /// Hosts whose record was refused. Each of them is logged once.
    refused_records: BTreeSet<String>,
    /// Better hosts that were asked and did not begin to follow.
    failed_attempts: BTreeMap<String, FailedAttempt>,
    /// Hosts that had a record at the last search for a better partner, sorted.
    last_hosts: Vec<String>,
    /// Connection to firnd for notes.
    mount: Option<OpenMount>,
}

impl<'a> Chooser<'a> {
    /// Makes the state of a thread that has not searched yet.
    fn new(
        service: &'a Arc<PartnerService>,
        key_file: &KeyFile,
        options: &'a PartnerStatus,
        domains: &'a Domains,
    ) -> Self {
        Self {
            service,
            record: key_file.clone(),
            options,
            domains,
            note: String::new(),
            refused_records: BTreeSet::new(),
            failed_attempts: BTreeMap::new(),
            last_hosts: Vec::new(),
            mount: None,
        }
    }

    /// Asks one host after the other to keep copies of this host's files. Returns whether one of them has become this
    /// host's partner. If none has, the status of the mount shows the reason of the last one asked.
    fn find_partner(&mut self) -> bool {
        let candidates = self.candidates();
        let mut failure = if candidates.is_empty() {
            "no other host has an agent for this backing".to_owned()
        } else {
            String::new()
        };
        for candidate in candidates {
            match self.choose_and_ask(&candidate) {
                Answer::Follows => return true,
                Answer::DoesNotFollow => {
                    failure = format!(
                        "{} did not begin in time to copy the files of this host",
                        candidate.host
                    )
                }
                Answer::Refuses(reason) => failure = reason,
            }
        }
        // A host that was asked may still be chosen. None must be, because a late one would become the partner now.
        self.service.choose(None);
        self.set_note(&failure);
        false
    }

    /// Replaces the partner, which keeps copies of this host's files, by a better host if one agrees. A host is better
    /// if it comes earlier in the order of [`Self::candidates`].
    ///
    /// Asks no host while the partner does not yet have copies of all files, or if an option names the partner.
    ///
    /// Returns whether the next search should come soon: the partner is still copying, hosts have appeared or
    /// disappeared, or a host was asked.
    fn search_better_partner(&mut self) -> bool {
        let Some(partner) = self.service.chosen() else {
            return false;
        };
        if !self.service.has_partner_copied_all() {
            return true;
        }
        let is_named_by_option = self.options.wanted != WANTED_NEXT;
        if is_named_by_option {
            return false;
        }
        let candidates = self.candidates();
        let have_hosts_changed = self.record_hosts(&candidates);
        let mut search_again_soon = have_hosts_changed;
        for candidate in candidates {
            if candidate.host == partner.host {
                // The later candidates are worse than the partner.
                break;
            }
            // A host with a new key has a new agent, so it is asked again even if an attempt failed recently.
            let agent_key = KeyFile::load(&self.service.backing, &candidate.host)
                .ok()
                .map(|record| record.key);
            if let Some(attempt) = self.failed_attempts.get(&candidate.host)
                && attempt.is_recent(agent_key.as_ref())
            {
                continue;
            }
            let current_partner = self.service.chosen();
            if matches!(self.choose_and_ask(&candidate), Answer::Follows) {
                self.failed_attempts.remove(&candidate.host);
                return true;
            }
            // The candidate did not follow, so the previous partner is chosen again.
            self.service.choose(current_partner);
            search_again_soon = true;
            let attempt = FailedAttempt {
                agent_key,
                asked_at: Instant::now(),
            };
            self.failed_attempts.insert(candidate.host, attempt);
        }
        search_again_soon
    }

    /// Records the hosts that have a record. Returns whether they are other hosts than at the last call.
    fn record_hosts(&mut self, candidates: &[PartnerCandidate]) -> bool {
        let hosts = candidates.iter().map(|candidate| candidate.host.clone());
        let mut hosts: Vec<String> = hosts.collect();
        hosts.sort();
        let have_changed = hosts != self.last_hosts;
        self.last_hosts = hosts;
        have_changed
    }

    /// Returns the hosts to ask, in their order: the named host, or all hosts with a record in the order of the ring.
    fn candidates(&mut self) -> Vec<PartnerCandidate> {
        if self.options.wanted != WANTED_NEXT {
            return vec![PartnerCandidate {
                host: self.options.wanted.clone(),
                is_in_same_domain: false,
            }];
        }
        match KeyFile::list_hosts(&self.service.backing) {
            Ok(hosts) => self.domains.order(&self.service.host, hosts),
            Err(error) => {
                self.set_note(&error.to_string());
                Vec::new()
            }
        }
    }

    /// Chooses a host as the partner, which keeps copies of this host's files, and asks it to become that. Waits until
    /// the host *follows*: it has connected to this host to copy files.
    ///
    /// Only after [`Answer::Follows`] is the host the partner. After any other answer the caller must choose another
    /// host or none, because this one may remain chosen.
    fn choose_and_ask(&mut self, candidate: &PartnerCandidate) -> Answer {
        let host = &candidate.host;
        let mut peer = match Peer::connect(host, &self.service.route()) {
            Ok(peer) => peer,
            Err(error) => return Answer::Refuses(self.describe(host, &error)),
        };
        let note = if candidate.is_in_same_domain {
            format!(
                "{host} is in the same failure domain: no host of another domain could become the partner"
            )
        } else {
            String::new()
        };
        // The host is chosen before it is asked, because it may begin to follow before its reply arrives.
        self.service.choose(Some(ChosenPartner {
            host: host.clone(),
            note,
        }));
        if let Err(error) = peer.request_following(&self.service.host) {
            return Answer::Refuses(error.to_string());
        }
        let asked_at = Instant::now();
        while !self.service.is_followed_by_partner() {
            if asked_at.elapsed() > FOLLOW_TIMEOUT {
                return Answer::DoesNotFollow;
            }
            std::thread::sleep(FOLLOW_POLL_INTERVAL);
        }
        self.record_partner(host);
        self.service.log.say(Level::Event, || {
            format!("the partner of this host is {host}")
        });
        Answer::Follows
    }

    /// Writes a new partner to the record, so that a restart finds the copies. The earlier partner becomes a former
    /// partner.
    fn record_partner(&mut self, host: &str) {
        let mut formers: Vec<String> = self.record.holders().cloned().collect();
        formers.retain(|former| former != host);
        formers.truncate(FORMER_PARTNERS_MAX);
        self.store_record(KeyFile {
            partner: Some(host.to_owned()),
            formers,
            ..self.record.clone()
        });
    }

    /// Removes the former partners from the record once the partner has copies of all held files.
    fn drop_unneeded_former_partners(&mut self) {
        if !self.record.formers.is_empty() && self.service.has_partner_copied_all() {
            self.store_record(KeyFile {
                formers: Vec::new(),
                ..self.record.clone()
            });
        }
    }

    /// Writes this host's record if it differs from the stored one. If this fails, logs the error.
    fn store_record(&mut self, record: KeyFile) {
        if record == self.record {
            return;
        }
        match record.store(&self.service.backing, &self.service.host) {
            Ok(()) => self.record = record,
            Err(error) => self.service.log.say(Level::Event, || error.to_string()),
        }
    }

    /// Returns the text of an error of a host. If its record is refused, logs this once for each host.
    fn describe(&mut self, host: &str, error: &PullError) -> String {
        let text = error.to_string();
        let is_record_refused =
            matches!(error, PullError::KeyFile(key_file_error) if !key_file_error.is_missing());
        if is_record_refused && self.refused_records.insert(host.to_owned()) {
            self.service.log.say(Level::Event, || {
                format!("{host} is skipped as partner: {text}")
            });
        }
        text
    }

    /// Removes the note from the status of the mount.
    fn clear_note(&mut self) {
        self.set_note("");
    }

    /// Sends firnd the reason why there is no partner; an empty text if there is one. Logs a new reason.
    ///
    /// The note is sent each time, because firnd may have been restarted. A failure is ignored, because firnd may not
    /// run.
    fn set_note(&mut self, text: &str) {
        if self.note != text && !text.is_empty() {
            self.service
                .log
                .say(Level::Event, || format!("there is no partner: {text}"));
        }
        text.clone_into(&mut self.note);
        self.mount = send_note(self.mount.take(), &self.service.mount_point, text);
    }
}

/// Sends a note to firnd, over the given connection or a new one. Returns the connection that works, if there is one.
fn send_note(mount: Option<OpenMount>, mount_point: &Path, note: &str) -> Option<OpenMount> {
    let send_over = |mount: &OpenMount| mount.announce_partner(None, note);
    if let Some(open_mount) = &mount
        && send_over(open_mount).is_ok()
    {
        return mount;
    }
    let new_mount = OpenMount::open(mount_point).ok()?;
    send_over(&new_mount).ok()?;
    Some(new_mount)
}
