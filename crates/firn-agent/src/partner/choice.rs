//! A host looks for its partner, and for another one when that is not there any more.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_client::OpenMount;
use firn_protocol::PartnerStatus;

use crate::error::PullError;
use crate::key_file::KeyFile;
use crate::partner::desk::Desk;
use crate::partner::ring::{Candidate, Domains};
use crate::peer::Peer;
use crate::server::Level;

/// How often it is looked whether the partner is there.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long a partner that was chosen has to come.
const COMING_LIMIT: Duration = Duration::from_secs(10);
/// Between two searches that found nobody: the first, and the longest.
const SEARCH_FIRST: Duration = Duration::from_millis(500);
const SEARCH_MAX: Duration = Duration::from_secs(15);

/// Looks for partners until the process ends.
pub(crate) fn choose_partners(
    desk: &Arc<Desk>,
    key_file: &KeyFile,
    wanted: &PartnerStatus,
    domains: &Domains,
) -> ! {
    let mut chooser = Chooser {
        desk,
        key_file,
        wanted,
        domains,
        told: String::new(),
        distrusted: BTreeSet::new(),
        mount: None,
    };
    let mut pause = SEARCH_FIRST;
    loop {
        if desk.last_heard().is_some() {
            chooser.note("");
            pause = SEARCH_FIRST;
            std::thread::sleep(LOOK_EVERY);
            continue;
        }
        if chooser.search() {
            pause = SEARCH_FIRST;
        } else {
            std::thread::sleep(pause);
            pause = (2 * pause).min(SEARCH_MAX);
        }
    }
}

struct Chooser<'a> {
    desk: &'a Arc<Desk>,
    key_file: &'a KeyFile,
    wanted: &'a PartnerStatus,
    domains: &'a Domains,
    /// The note that firnd has.
    told: String,
    /// Hosts whose record is not believed, told once.
    distrusted: BTreeSet<String>,
    /// For notes.
    mount: Option<OpenMount>,
}

impl Chooser<'_> {
    /// Asks one host after the other; true: one of them is the partner now.
    fn search(&mut self) -> bool {
        let candidates = self.candidates();
        let mut failure = match candidates.is_empty() {
            true => "no other host has an agent for this backing".to_owned(),
            false => String::new(),
        };
        for candidate in candidates {
            match self.ask(&candidate) {
                Ok(true) => return true,
                Ok(false) => failure = format!("{} does not come", candidate.host),
                Err(error) => failure = error,
            }
        }
        self.desk.choose(None);
        self.note(&failure);
        false
    }

    fn candidates(&mut self) -> Vec<Candidate> {
        if self.wanted.wanted != "next" {
            return vec![Candidate {
                host: self.wanted.wanted.clone(),
                is_near: false,
            }];
        }
        match KeyFile::list_hosts(&self.desk.backing) {
            Ok(hosts) => self.domains.order(&self.desk.host, hosts),
            Err(error) => {
                self.note(&error.to_string());
                Vec::new()
            }
        }
    }

    /// Whether the host is the partner now; an error says why it cannot be.
    fn ask(&mut self, candidate: &Candidate) -> Result<bool, String> {
        let Candidate { host, is_near } = candidate;
        let mut peer =
            Peer::connect(host, &self.desk.route()).map_err(|error| self.describe(host, &error))?;
        let note = match is_near {
            true => format!("{host} is in the same failure domain: no other one has an agent"),
            false => String::new(),
        };
        // It comes before the answer to this does.
        self.desk.choose(Some((host.clone(), note)));
        peer.adopt(&self.desk.host)
            .map_err(|error| error.to_string())?;
        let begun = Instant::now();
        while self.desk.last_heard().is_none() {
            if begun.elapsed() > COMING_LIMIT {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // Where a restart looks for the copies.
        let record = KeyFile {
            partner: Some(host.clone()),
            ..self.key_file.clone()
        };
        if let Err(error) = record.store(&self.desk.backing, &self.desk.host) {
            self.desk.log.say(Level::Event, || error.to_string());
        }
        self.desk.log.say(Level::Event, || {
            format!("the partner of this host is {host}")
        });
        Ok(true)
    }

    fn describe(&mut self, host: &str, error: &PullError) -> String {
        let text = error.to_string();
        if matches!(error, PullError::KeyFile(error) if !error.is_missing())
            && self.distrusted.insert(host.to_owned())
        {
            self.desk
                .log
                .say(Level::Event, || format!("{host} is passed over: {text}"));
        }
        text
    }

    /// Tells firnd, which may be another one than it was told before. Best effort: there may be none.
    fn note(&mut self, text: &str) {
        if self.told != text && !text.is_empty() {
            self.desk
                .log
                .say(Level::Event, || format!("there is no partner: {text}"));
        }
        text.clone_into(&mut self.told);
        self.mount = tell(self.mount.take(), &self.desk.mount_point, text);
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
