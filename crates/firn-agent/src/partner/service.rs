//! What all connections of an agent share about partners: which host is the partner of this one, and which hosts it is the
//! partner of.
//!
//! ```text
//!   the chosen follower     the partner: copies held files and marks them
//!   all other followers     former partners: keep their copies until the partner has marked all, then drop them
//! ```
//!
//! Invariants
//! * A host follows by one connection: the last that it made.
//! * A former partner drops nothing before the partner has marked all that is held and closed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use firn_client::Mount;
use firn_format::quote::quoted_path;

use crate::encryption::Encrypt;
use crate::message::ErrorKind;
use crate::partner::copies::Copies;
use crate::partner::held::follow_source;
use crate::peer::Route;
use crate::server::{Level, Log};
use crate::source::SourceError;

/// The partners of the host of one agent.
pub(crate) struct PartnerService {
    /// What this host is called.
    pub(crate) host: String,
    pub(crate) backing: PathBuf,
    pub(crate) mount_point: PathBuf,
    pub(crate) copies: Arc<Copies>,
    /// Whether bytes of partners are encrypted on their way.
    encrypt: Encrypt,
    pub(crate) log: Log,
    state: Mutex<ServiceState>,
}

#[derive(Default)]
struct ServiceState {
    /// The partner of this host, and what a person should know of it.
    chosen: Option<(String, String)>,
    /// It has had all that was held at one moment since it was chosen.
    is_settled: bool,
    /// The followers.
    followers: BTreeMap<String, Follower>,
    /// Formers that were told to drop what they have.
    dismissed: BTreeSet<String>,
    last_registration: u64,
    /// Hosts that this one is the partner of.
    sources: BTreeSet<String>,
}

/// The connection of a host that follows.
struct Follower {
    number: u64,
    heard_at: Instant,
}

/// A connection that follows this host. Dropping it ends that.
pub(crate) struct Registration {
    service: Arc<PartnerService>,
    host: String,
    number: u64,
}

/// What a host that follows is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// It copies what is held.
    Partner,
    /// It keeps what it has.
    Former,
    /// Nothing is left for it: it drops what it has.
    Dismissed,
    /// It has been told so.
    Over,
}

impl PartnerService {
    /// Of an agent that knows of no other yet.
    pub(crate) fn new(
        host: String,
        mount: &Mount,
        copies: Copies,
        encrypt: Encrypt,
        log: Log,
    ) -> Arc<Self> {
        Arc::new(Self {
            host,
            backing: mount.backing.clone(),
            mount_point: mount.mount_point.clone(),
            copies: Arc::new(copies),
            encrypt,
            log,
            state: Mutex::default(),
        })
    }

    /// How other agents are reached.
    pub(crate) fn route(&self) -> Route {
        Route::Backing {
            dir: self.backing.clone(),
            encrypt: self.encrypt,
        }
    }

    fn lock(&self) -> MutexGuard<'_, ServiceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- of this host --------------------------------------------------------------------------

    /// Chooses the partner, with what a person should know of it. An earlier one is a former from now on.
    pub(crate) fn choose(&self, host: Option<(String, String)>) {
        let mut state = self.lock();
        if state.chosen != host {
            state.is_settled = false;
            state.dismissed.clear();
            state.chosen = host;
        }
    }

    /// The partner that is chosen, and what a person should know of it.
    pub(crate) fn chosen(&self) -> Option<(String, String)> {
        self.lock().chosen.clone()
    }

    /// When the partner was heard last.
    pub(crate) fn last_heard(&self) -> Option<Instant> {
        let state = self.lock();
        let (chosen, _) = state.chosen.as_ref()?;
        state
            .followers
            .get(chosen)
            .map(|follower| follower.heard_at)
    }

    /// Whether no former is needed any more.
    pub(crate) fn is_settled(&self) -> bool {
        self.lock().is_settled
    }

    /// Lets a host follow; with what a person should know of it, where it is the partner.
    pub(crate) fn register_follower(
        self: &Arc<Self>,
        host: &str,
    ) -> Result<(Registration, Option<String>), SourceError> {
        let refused = |kind, message| Err(SourceError { kind, message });
        let mut state = self.lock();
        let note = match &state.chosen {
            Some((chosen, note)) if chosen == host => Some(note.clone()),
            Some((chosen, _)) if state.dismissed.contains(host) => {
                let message = format!("the partner of {} is {chosen}", self.host);
                return refused(ErrorKind::Refused, message);
            }
            Some(_) => None,
            // It looks for one.
            None => return refused(ErrorKind::Stale, format!("{} has no partner", self.host)),
        };
        state.last_registration += 1;
        let number = state.last_registration;
        let follower = Follower {
            number,
            heard_at: Instant::now(),
        };
        state.followers.insert(host.to_owned(), follower);
        let registration = Registration {
            service: Arc::clone(self),
            host: host.to_owned(),
            number,
        };
        Ok((registration, note))
    }

    // ---- of other hosts ------------------------------------------------------------------------

    /// Makes this host the partner of another one, which has an agent over the same backing.
    pub(crate) fn adopt(self: &Arc<Self>, source: &str) -> Result<(), String> {
        crate::key_file::check_host(source).map_err(|error| error.to_string())?;
        if source == self.host {
            return Err(format!("{source} cannot be its own partner"));
        }
        if !self.lock().sources.insert(source.to_owned()) {
            return Ok(());
        }
        let service = Arc::clone(self);
        let name = source.to_owned();
        let started = std::thread::Builder::new()
            .name("agent-partner".into())
            .spawn(move || {
                follow_source(&service, &name);
                service.lock().sources.remove(&name);
            });
        if let Err(error) = started {
            self.lock().sources.remove(source);
            return Err(format!("no thread for it: {error}"));
        }
        self.log.say(Level::Event, || {
            format!("this host is the partner of {source}")
        });
        Ok(())
    }
}

impl PartnerService {
    /// This agent ends: copies of what is in the backing by now are removed, others stay for its next start.
    pub(crate) fn leave(&self) {
        self.copies.close();
        for host in self.copies.hosts() {
            match self.copies.remove_drained(&host, &self.mount_point) {
                Ok(0) => {}
                Ok(bytes) => self.log.say(Level::Event, || {
                    let dir = quoted_path(self.copies.dir());
                    let bytes = firn_format::quantity::bytes(bytes);
                    format!("{bytes} of {host} that are not in the backing stay in {dir}")
                }),
                Err(error) => self.log.say(Level::Event, || error.to_string()),
            }
        }
    }
}

impl ServiceState {
    fn role(&self, host: &str) -> Role {
        match &self.chosen {
            Some((chosen, _)) if chosen == host => Role::Partner,
            Some(_) if self.is_settled => Role::Dismissed,
            _ => Role::Former,
        }
    }
}

impl Registration {
    /// The host is there. False: it has another connection, or is not needed any more.
    pub(crate) fn hear(&self) -> bool {
        let mut state = self.service.lock();
        match state.followers.get_mut(&self.host) {
            Some(place) if place.number == self.number => {
                place.heard_at = Instant::now();
                true
            }
            _ => false,
        }
    }

    /// What it is when it asks for a list. One that is dismissed hears so in one list, and by its next question it has
    /// dropped what it had.
    pub(crate) fn role(&self) -> Role {
        let mut state = self.service.lock();
        let role = state.role(&self.host);
        if role != Role::Dismissed {
            return role;
        }
        if state.dismissed.insert(self.host.clone()) {
            Role::Dismissed
        } else {
            Role::Over
        }
    }

    /// It has all that is held.
    pub(crate) fn settle(&self) {
        let mut state = self.service.lock();
        if state.role(&self.host) == Role::Partner {
            state.is_settled = true;
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut state = self.service.lock();
        let is_own = |follower: &Follower| follower.number == self.number;
        if state.followers.get(&self.host).is_some_and(is_own) {
            state.followers.remove(&self.host);
        }
    }
}
