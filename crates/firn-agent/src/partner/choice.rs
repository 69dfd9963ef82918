//! A host looks for its partner: for another one when that is not there any more, and for the one that comes before it in
//! the order of hosts when that has come.
//!
//! Promise: the record of this host names each host that may have the only copy of something, so the earlier partner until
//! the new one has all.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::backoff::{Backoff, Waits};
use firn_client::OpenMount;
use firn_protocol::PartnerStatus;

use crate::error::PullError;
use crate::key_file::KeyFile;
use crate::partner::ring::{Domains, PartnerCandidate};
use crate::partner::service::PartnerService;
use crate::peer::Peer;
use crate::server::Level;

/// How often it is looked whether the partner is there.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long a partner that was chosen has to come.
const COMING_LIMIT: Duration = Duration::from_secs(10);
/// Between two searches that found no partner.
const SEARCH: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(15));
/// Between two looks for a better partner. A look lists one directory of the backing.
const BETTER: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
/// Until a better host that did not come is asked again; one with a new record is asked at once.
const BETTER_AGAIN: Duration = Duration::from_secs(120);
/// Earlier partners that the record names.
const FORMERS_MAX: usize = 8;

/// Looks for partners until the process ends.
pub(crate) fn choose_partners(
    service: &Arc<PartnerService>,
    key_file: &KeyFile,
    wanted: &PartnerStatus,
    domains: &Domains,
) -> ! {
    let mut chooser = Chooser {
        service,
        record: key_file.clone(),
        wanted,
        domains,
        told: String::new(),
        distrusted: BTreeSet::new(),
        unreached: BTreeMap::new(),
        seen: Vec::new(),
        mount: None,
    };
    let mut waits = SEARCH.start();
    let mut better = NextLook::new();
    loop {
        if service.last_heard().is_some() {
            chooser.note("");
            chooser.forget_formers();
            if better.is_due() {
                better.put_off(chooser.seek_better());
            }
            waits.reset();
            std::thread::sleep(LOOK_EVERY);
            continue;
        }
        if chooser.search() {
            waits.reset();
            better = NextLook::new();
        } else {
            waits.sleep();
        }
    }
}

/// When a better partner is looked for.
struct NextLook {
    waits: Waits,
    at: Instant,
}

impl NextLook {
    fn new() -> Self {
        let mut waits = BETTER.start();
        let at = Instant::now() + waits.next_wait();
        Self { waits, at }
    }

    fn is_due(&self) -> bool {
        Instant::now() >= self.at
    }

    /// After a look that found something new, or not.
    fn put_off(&mut self, has_changed: bool) {
        if has_changed {
            self.waits.reset();
        }
        self.at = Instant::now() + self.waits.next_wait();
    }
}

struct Chooser<'a> {
    service: &'a Arc<PartnerService>,
    /// As it is in the backing.
    record: KeyFile,
    wanted: &'a PartnerStatus,
    domains: &'a Domains,
    /// The note that firnd has.
    told: String,
    /// Hosts whose record is not believed, told once.
    distrusted: BTreeSet<String>,
    /// Better hosts that did not come: the record that they had, and when they were asked.
    unreached: BTreeMap<String, (Option<KeyFile>, Instant)>,
    /// Hosts that had a record at the last look.
    seen: Vec<String>,
    /// For notes.
    mount: Option<OpenMount>,
}

impl Chooser<'_> {
    /// Asks one host after the other; true if one of them became the partner.
    fn search(&mut self) -> bool {
        let candidates = self.candidates();
        let mut failure = if candidates.is_empty() {
            "no other host has an agent for this backing".to_owned()
        } else {
            String::new()
        };
        for candidate in candidates {
            match self.ask(&candidate) {
                Ok(true) => return true,
                Ok(false) => failure = format!("{} does not come", candidate.host),
                Err(error) => failure = error,
            }
        }
        self.service.choose(None);
        self.note(&failure);
        false
    }

    /// Asks the hosts that come before the partner, where all that is held has a copy: a partner that is still at it is not
    /// exchanged. True: hosts have come or gone, or the partner is another one.
    fn seek_better(&mut self) -> bool {
        let Some((partner, _)) = self.service.chosen() else {
            return false;
        };
        if self.wanted.wanted != "next" || !self.service.is_settled() {
            return !self.service.is_settled();
        }
        let candidates = self.candidates();
        let mut hosts: Vec<String> = candidates.iter().map(|found| found.host.clone()).collect();
        hosts.sort();
        let mut has_changed = hosts != self.seen;
        self.seen = hosts;
        let better = candidates
            .into_iter()
            .take_while(|candidate| candidate.host != partner);
        for candidate in better.collect::<Vec<_>>() {
            let record = KeyFile::load(&self.service.backing, &candidate.host).ok();
            let is_known = |(known, asked_at): &(Option<KeyFile>, Instant)| {
                let key = |record: &Option<KeyFile>| record.as_ref().map(|own| own.key.clone());
                key(known) == key(&record) && asked_at.elapsed() < BETTER_AGAIN
            };
            if self.unreached.get(&candidate.host).is_some_and(is_known) {
                continue;
            }
            let before = self.service.chosen();
            if self.ask(&candidate) == Ok(true) {
                self.unreached.remove(&candidate.host);
                return true;
            }
            // The one that was there stays the partner.
            self.service.choose(before);
            has_changed = true;
            self.unreached
                .insert(candidate.host, (record, Instant::now()));
        }
        has_changed
    }

    fn candidates(&mut self) -> Vec<PartnerCandidate> {
        if self.wanted.wanted != "next" {
            return vec![PartnerCandidate {
                host: self.wanted.wanted.clone(),
                is_near: false,
            }];
        }
        match KeyFile::list_hosts(&self.service.backing) {
            Ok(hosts) => self.domains.order(&self.service.host, hosts),
            Err(error) => {
                self.note(&error.to_string());
                Vec::new()
            }
        }
    }

    /// Whether the host is the partner now; an error says why it cannot be.
    fn ask(&mut self, candidate: &PartnerCandidate) -> Result<bool, String> {
        let PartnerCandidate { host, is_near } = candidate;
        let mut peer = Peer::connect(host, &self.service.route())
            .map_err(|error| self.describe(host, &error))?;
        let note = if *is_near {
            format!("{host} is in the same failure domain: no other one has an agent")
        } else {
            String::new()
        };
        // It comes before the answer to this does.
        self.service.choose(Some((host.clone(), note)));
        peer.adopt(&self.service.host)
            .map_err(|error| error.to_string())?;
        let begun = Instant::now();
        while self.service.last_heard().is_none() {
            if begun.elapsed() > COMING_LIMIT {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.name_partner(host);
        self.service.log.say(Level::Event, || {
            format!("the partner of this host is {host}")
        });
        Ok(true)
    }

    /// Names a new partner where a restart looks for the copies, and those that have them meanwhile.
    fn name_partner(&mut self, host: &str) {
        let mut formers: Vec<String> = self.record.holders().cloned().collect();
        formers.retain(|former| former != host);
        formers.truncate(FORMERS_MAX);
        self.store_record(KeyFile {
            partner: Some(host.to_owned()),
            formers,
            ..self.record.clone()
        });
    }

    /// Names the earlier partners no more, once the partner has all that they have.
    fn forget_formers(&mut self) {
        if !self.record.formers.is_empty() && self.service.is_settled() {
            self.store_record(KeyFile {
                formers: Vec::new(),
                ..self.record.clone()
            });
        }
    }

    fn store_record(&mut self, record: KeyFile) {
        if record == self.record {
            return;
        }
        match record.store(&self.service.backing, &self.service.host) {
            Ok(()) => self.record = record,
            Err(error) => self.service.log.say(Level::Event, || error.to_string()),
        }
    }

    fn describe(&mut self, host: &str, error: &PullError) -> String {
        let text = error.to_string();
        if matches!(error, PullError::KeyFile(error) if !error.is_missing())
            && self.distrusted.insert(host.to_owned())
        {
            self.service
                .log
                .say(Level::Event, || format!("{host} is passed over: {text}"));
        }
        text
    }

    /// Tells firnd, which may be another one than it was told before. Best effort: there may be none.
    fn note(&mut self, text: &str) {
        if self.told != text && !text.is_empty() {
            self.service
                .log
                .say(Level::Event, || format!("there is no partner: {text}"));
        }
        text.clone_into(&mut self.told);
        self.mount = tell(self.mount.take(), &self.service.mount_point, text);
    }
}

fn tell(mount: Option<OpenMount>, mount_point: &Path, note: &str) -> Option<OpenMount> {
    let told = |mount: &OpenMount| mount.speak_of_partner(None, note).is_ok();
    if mount.as_ref().is_some_and(told) {
        return mount;
    }
    let mount = OpenMount::open(mount_point).ok()?;
    told(&mount).then_some(mount)
}
