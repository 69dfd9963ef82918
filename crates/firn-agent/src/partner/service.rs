//! Records which hosts keep copies of this host's files, and of which hosts this host keeps copies. All connections of
//! an *agent*, which serves the files of this host's mount, share this state.
//!
//! Terms
//! * *held file*: a file that a host has in memory only.
//! * *partner*: another host that this host has chosen to keep copies of its held files.
//! * *follow*: to be connected to a host's agent and to copy its held files. That host is the *source*.
//! * *mark*: to report to the source that the copy of a file is complete.
//!
//! A follower has one of these roles:
//!
//! | role | which follower | what it does |
//! |---|---|---|
//! | partner | the chosen one | copies held files and marks them |
//! | former partner | an earlier partner, while the partner still copies | keeps its copies |
//! | dismissed | an earlier partner, once the partner has marked all files | drops its copies |
//!
//! Invariants
//! * Each follower has one connection, the last one that it made. Requests on earlier ones are refused.
//! * A former partner drops no copy before the partner has marked all files that are held and closed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firn_client::Mount;
use firn_format::quote::quoted_path;

use crate::encryption::Encrypt;
use crate::message::ErrorKind;
use crate::partner::copies::CopyStore;
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
    pub(crate) copies: Arc<CopyStore>,
    /// Whether bytes between partners are encrypted.
    encrypt: Encrypt,
    pub(crate) log: Log,
    state: Mutex<ServiceState>,
}

#[derive(Default)]
struct ServiceState {
    chosen: Option<ChosenPartner>,
    /// Whether the partner had marked all held files at some time since it was chosen.
    has_marked_all: bool,
    /// Hosts that follow this one, each with the number of its current registration.
    followers: BTreeMap<String, u64>,
    /// Former partners that were notified to drop their copies.
    dismissed: BTreeSet<String>,
    /// Number of the last registration.
    last_registration: u64,
    /// Hosts that this one follows as their partner.
    sources: BTreeSet<String>,
}

/// The host that this host has chosen as its partner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChosenPartner {
    pub(crate) host: String,
    /// Note about the partner for the status of this host.
    pub(crate) note: String,
}

/// The registration of one connection as that of a follower. Dropping it ends the registration.
pub(crate) struct Registration {
    service: Arc<PartnerService>,
    host: String,
    number: u64,
}

/// Result of a successful registration.
pub(crate) struct RegisteredFollower {
    pub(crate) registration: Registration,
    /// This host's note about the partner for the status. `None` if the follower is a former partner.
    pub(crate) default_note: Option<String>,
}

/// The role of a follower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The follower copies held files and marks them.
    Partner,
    /// The follower keeps its copies.
    Former,
    /// The follower must drop its copies, because the partner has copies of all held files. It is notified of this
    /// once.
    Dismissed,
    /// The follower was dismissed before. Its requests are refused.
    Removed,
}

impl PartnerService {
    /// Makes the state of an agent, which serves the files of this host's mount to other hosts. No host keeps copies of
    /// this host's files yet (partner, followers), and this host keeps none of others (sources).
    pub(crate) fn new(
        host: String,
        mount: &Mount,
        copies: CopyStore,
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

    /// Chooses the partner, or none. An earlier partner becomes a former partner.
    pub(crate) fn choose(&self, partner: Option<ChosenPartner>) {
        let mut state = self.lock();
        if state.chosen == partner {
            return;
        }
        state.has_marked_all = false;
        state.dismissed.clear();
        state.chosen = partner;
    }

    /// Returns the chosen partner.
    pub(crate) fn chosen(&self) -> Option<ChosenPartner> {
        self.lock().chosen.clone()
    }

    /// Whether the chosen partner follows this host now.
    pub(crate) fn is_followed_by_partner(&self) -> bool {
        let state = self.lock();
        match &state.chosen {
            Some(chosen) => state.followers.contains_key(&chosen.host),
            None => false,
        }
    }

    /// Whether the partner had copies of all held files at some time since it was chosen. If so, no former partner is
    /// needed.
    pub(crate) fn has_partner_copied_all(&self) -> bool {
        self.lock().has_marked_all
    }

    /// Registers a new connection of `host`, which keeps copies of this host's files, as that of the chosen partner or
    /// of a former partner. It replaces an earlier connection of that host. Dropping the result ends the registration.
    ///
    /// Refuses a dismissed host, one that was notified to drop its copies. If no partner is chosen, the error is
    /// [`ErrorKind::Stale`]: the host may try again.
    pub(crate) fn register_follower(
        self: &Arc<Self>,
        host: &str,
    ) -> Result<RegisteredFollower, SourceError> {
        let mut state = self.lock();
        let Some(chosen) = &state.chosen else {
            return Err(SourceError {
                kind: ErrorKind::Stale,
                message: format!("{} has no partner", self.host),
            });
        };
        let is_partner = chosen.host == host;
        if !is_partner && state.dismissed.contains(host) {
            return Err(SourceError {
                kind: ErrorKind::Refused,
                message: format!("the partner of {} is {}", self.host, chosen.host),
            });
        }
        let default_note = is_partner.then(|| chosen.note.clone());
        state.last_registration += 1;
        let number = state.last_registration;
        state.followers.insert(host.to_owned(), number);
        let registration = Registration {
            service: Arc::clone(self),
            host: host.to_owned(),
            number,
        };
        Ok(RegisteredFollower {
            registration,
            default_note,
        })
    }

    // ---- the sources of this host --------------------------------------------------------------

    /// Makes this host the partner of the host `source`: starts a thread that connects to it and keeps copies of the
    /// files that it has in memory. Does nothing if there already is such a thread.
    ///
    /// The error is a text, which is sent to the source. The thread ends by itself if the source refuses this host, or
    /// cannot be reached for long; it cannot be stopped otherwise.
    pub(crate) fn start_following(self: &Arc<Self>, source: &str) -> Result<(), String> {
        crate::key_file::check_host(source).map_err(|error| error.to_string())?;
        if source == self.host {
            return Err(format!("{source} cannot be its own partner"));
        }
        if !self.lock().sources.insert(source.to_owned()) {
            return Ok(());
        }
        let service = Arc::clone(self);
        let source_name = source.to_owned();
        let started = std::thread::Builder::new()
            .name("agent-partner".into())
            .spawn(move || {
                follow_source(&service, &source_name);
                service.lock().sources.remove(&source_name);
            });
        if let Err(error) = started {
            self.lock().sources.remove(source);
            return Err(format!(
                "cannot start a thread that copies the files of {source}: {error}"
            ));
        }
        self.log.say(Level::Event, || {
            format!("this host is the partner of {source}")
        });
        Ok(())
    }

    // ---- the end of the agent ------------------------------------------------------------------

    /// Called when the agent ends: closes the store of copies, and then removes each copy with no byte that is missing
    /// in the backing, the directory that the mount serves (*drained* copies).
    ///
    /// The other copies remain for the next agent, and the log says how many bytes they have. Errors are logged.
    pub(crate) fn remove_drained_copies(&self) {
        self.copies.close();
        for host in self.copies.hosts() {
            match self.copies.remove_drained(&host, &self.mount_point) {
                Ok(0) => {}
                Ok(remaining_bytes) => self.log.say(Level::Event, || {
                    let dir = quoted_path(self.copies.dir());
                    let remaining = firn_format::quantity::bytes(remaining_bytes);
                    format!(
                        "{dir} still has copies of files of {host}: {remaining} of them are not in the backing"
                    )
                }),
                Err(error) => self.log.say(Level::Event, || error.to_string()),
            }
        }
    }
}

impl ServiceState {
    fn role(&self, host: &str) -> Role {
        match &self.chosen {
            Some(chosen) if chosen.host == host => Role::Partner,
            Some(_) if self.has_marked_all => Role::Dismissed,
            _ => Role::Former,
        }
    }
}

impl Registration {
    /// Whether this is still the connection of the follower. If not, the follower has a newer one.
    pub(crate) fn is_current(&self) -> bool {
        let state = self.service.lock();
        state.followers.get(&self.host) == Some(&self.number)
    }

    /// Returns the role of the follower, which has requested a list. [`Role::Dismissed`] is returned once. At its next
    /// request the follower has dropped its copies, and its role is [`Role::Removed`].
    pub(crate) fn role(&self) -> Role {
        let mut state = self.service.lock();
        let role = state.role(&self.host);
        if role != Role::Dismissed {
            return role;
        }
        if state.dismissed.insert(self.host.clone()) {
            Role::Dismissed
        } else {
            Role::Removed
        }
    }

    /// Records that the follower has marked all held files. Has an effect only if the follower is the partner.
    pub(crate) fn record_all_marked(&self) {
        let mut state = self.service.lock();
        if state.role(&self.host) == Role::Partner {
            state.has_marked_all = true;
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut state = self.service.lock();
        // A newer connection of the follower must keep its registration.
        if state.followers.get(&self.host) == Some(&self.number) {
            state.followers.remove(&self.host);
        }
    }
}
