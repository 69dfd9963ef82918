//! The state of partners that all connections of an agent share.
//!
//! The state has the partner of this host, the hosts that follow it, and the *sources* that this host follows. A
//! follower has one of these roles:
//!
//! | role | which follower | what it does |
//! |---|---|---|
//! | partner | the chosen one | copies held files and marks them |
//! | former | an earlier partner, while the partner still copies | keeps its copies |
//! | dismissed | an earlier partner, once the partner has marked all files | drops its copies |
//!
//! Invariants
//! * Each follower has one connection, the last one that it made. Requests on earlier ones are refused.
//! * A former drops no copy before the partner has marked all files that are held and closed.

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

/// State of partners of one agent; see the head of this file.
pub(crate) struct PartnerService {
    /// Name of this host.
    pub(crate) host: String,
    pub(crate) backing: PathBuf,
    pub(crate) mount_point: PathBuf,
    pub(crate) copies: Arc<Copies>,
    /// Whether bytes between partners are encrypted.
    encrypt: Encrypt,
    pub(crate) log: Log,
    state: Mutex<ServiceState>,
}

#[derive(Default)]
struct ServiceState {
    /// The chosen partner of this host, and the note about it for the status.
    chosen: Option<(String, String)>,
    /// Whether the partner has marked all held files at some moment since it was chosen.
    is_settled: bool,
    /// Hosts that follow this one, by name.
    followers: BTreeMap<String, Follower>,
    /// Formers that were told to drop their copies.
    dismissed: BTreeSet<String>,
    /// Number of the last registration.
    last_registration: u64,
    /// Hosts that this one follows as their partner.
    sources: BTreeSet<String>,
}

/// The current connection of a follower.
struct Follower {
    /// Number of its registration.
    number: u64,
    /// When the last request of the follower was received.
    heard_at: Instant,
}

/// The registration of one connection as that of a follower. Dropping it ends the registration.
pub(crate) struct Registration {
    service: Arc<PartnerService>,
    host: String,
    number: u64,
}

/// The role of a follower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The follower copies held files and marks them.
    Partner,
    /// The follower keeps its copies.
    Former,
    /// The follower must drop its copies. This answer says so once.
    Dismissed,
    /// The follower was already told to drop its copies, and is no longer needed.
    Over,
}

impl PartnerService {
    /// Makes the state of an agent without partner, followers and sources.
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

    /// Returns the route to other agents: by their records in the backing.
    pub(crate) fn route(&self) -> Route {
        Route::Backing {
            dir: self.backing.clone(),
            encrypt: self.encrypt,
        }
    }

    fn lock(&self) -> MutexGuard<'_, ServiceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- the partner of this host --------------------------------------------------------------

    /// Chooses the partner, with a note about it for the status. An earlier partner becomes a former.
    pub(crate) fn choose(&self, host: Option<(String, String)>) {
        let mut state = self.lock();
        if state.chosen != host {
            state.is_settled = false;
            state.dismissed.clear();
            state.chosen = host;
        }
    }

    /// Returns the chosen partner and the note about it.
    pub(crate) fn chosen(&self) -> Option<(String, String)> {
        self.lock().chosen.clone()
    }

    /// Returns when the last request of the chosen partner was received; `None` if the partner does not follow.
    pub(crate) fn last_heard(&self) -> Option<Instant> {
        let state = self.lock();
        let (chosen, _) = state.chosen.as_ref()?;
        state
            .followers
            .get(chosen)
            .map(|follower| follower.heard_at)
    }

    /// Whether the partner has had copies of all held files since it was chosen. If so, no former is needed.
    pub(crate) fn is_settled(&self) -> bool {
        self.lock().is_settled
    }

    /// Registers a connection as that of the follower `host`. It replaces an earlier connection of the host. For the
    /// chosen partner, also returns the note about it.
    ///
    /// A host that was dismissed is refused. If no partner is chosen, the error is [`ErrorKind::Stale`]: the host may
    /// try again.
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

    // ---- the sources of this host --------------------------------------------------------------

    /// Makes this host the partner of a source, and starts the thread that follows it. Does nothing if there already is
    /// such a thread.
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
            return Err(format!(
                "cannot start a thread that follows {source}: {error}"
            ));
        }
        self.log.say(Level::Event, || {
            format!("this host is the partner of {source}")
        });
        Ok(())
    }
}

impl PartnerService {
    /// Cleans up at the end of the agent: removes copies whose bytes are in the backing. The other copies remain for
    /// the next agent, and the log says how many bytes they have.
    pub(crate) fn leave(&self) {
        self.copies.close();
        for host in self.copies.hosts() {
            match self.copies.remove_drained(&host, &self.mount_point) {
                Ok(0) => {}
                Ok(bytes) => self.log.say(Level::Event, || {
                    let dir = quoted_path(self.copies.dir());
                    let bytes = firn_format::quantity::bytes(bytes);
                    format!("copies of {host} remain in {dir}: {bytes} that are not in the backing")
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
    /// Records a request of the follower. Returns false if the follower has a newer connection.
    pub(crate) fn record_request(&self) -> bool {
        let mut state = self.service.lock();
        match state.followers.get_mut(&self.host) {
            Some(follower) if follower.number == self.number => {
                follower.heard_at = Instant::now();
                true
            }
            _ => false,
        }
    }

    /// Returns the role of the follower, which has requested a list. [`Role::Dismissed`] is returned once. At its next
    /// request the follower has dropped its copies, and its role is [`Role::Over`].
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

    /// Records that the follower has marked all held files. Has an effect only if the follower is the partner.
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
