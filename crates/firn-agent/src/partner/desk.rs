//! What the connections of an agent know of partners.
//!
//! Invariant: at most one connection follows this host, the last that the chosen partner made.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use firn_client::Mount;
use firn_format::quote::quoted_path;

use crate::encryption::Encrypt;
use crate::partner::follower::follow_source;
use crate::partner::shelf::Shelf;
use crate::peer::Route;
use crate::server::{Level, Log};

/// Of one agent.
pub(crate) struct Desk {
    /// What this host is called.
    pub(crate) host: String,
    pub(crate) backing: PathBuf,
    pub(crate) mount_point: PathBuf,
    pub(crate) shelf: Arc<Shelf>,
    /// Whether bytes of partners are encrypted on their way.
    encrypt: Encrypt,
    pub(crate) log: Log,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The partner of this host, and what a person should know of it.
    chosen: Option<(String, String)>,
    /// The number of the connection by which it follows, and when it was heard last.
    seat: Option<(u64, Instant)>,
    last_seat: u64,
    /// Hosts that this one is the partner of.
    sources: BTreeSet<String>,
}

/// The right of a connection to follow this host. Dropped, nobody follows it.
pub(crate) struct Seat {
    desk: Arc<Desk>,
    number: u64,
}

impl Desk {
    /// Of an agent that knows of no other yet.
    pub(crate) fn new(
        host: String,
        mount: &Mount,
        shelf: Shelf,
        encrypt: Encrypt,
        log: Log,
    ) -> Arc<Self> {
        Arc::new(Self {
            host,
            backing: mount.backing.clone(),
            mount_point: mount.mount_point.clone(),
            shelf: Arc::new(shelf),
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- of this host --------------------------------------------------------------------------

    /// Chooses the partner, with what a person should know of it; an earlier one may not follow any more.
    pub(crate) fn choose(&self, host: Option<(String, String)>) {
        let mut state = self.lock();
        if state.chosen != host {
            state.seat = None;
            state.chosen = host;
        }
    }

    /// When the partner was heard last.
    pub(crate) fn last_heard(&self) -> Option<Instant> {
        self.lock().seat.map(|(_, heard)| heard)
    }

    /// Lets the partner follow; the other one is told who the partner is instead.
    pub(crate) fn seat(self: &Arc<Self>, host: &str) -> Result<(Seat, String), String> {
        let mut state = self.lock();
        match &state.chosen {
            Some((chosen, note)) if chosen == host => {
                let note = note.clone();
                state.last_seat += 1;
                let number = state.last_seat;
                state.seat = Some((number, Instant::now()));
                let desk = Arc::clone(self);
                Ok((Seat { desk, number }, note))
            }
            Some((chosen, _)) => Err(format!("the partner of {} is {chosen}", self.host)),
            None => Err(format!("{} has no partner", self.host)),
        }
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
        let desk = Arc::clone(self);
        let name = source.to_owned();
        let started = std::thread::Builder::new()
            .name("agent-partner".into())
            .spawn(move || {
                follow_source(&desk, &name);
                desk.lock().sources.remove(&name);
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

impl Desk {
    /// This agent ends: copies of what is in the backing by now are removed, others stay for who starts it again.
    pub(crate) fn leave(&self) {
        for host in self.shelf.hosts() {
            match self.shelf.remove_drained(&host, &self.mount_point) {
                Ok(0) => {}
                Ok(bytes) => self.log.say(Level::Event, || {
                    let dir = quoted_path(self.shelf.dir());
                    format!("{bytes} bytes of {host} that are not in the backing stay in {dir}")
                }),
                Err(error) => self.log.say(Level::Event, || error.to_string()),
            }
        }
    }
}

impl Seat {
    /// The partner is there. False: another one is the partner now, or has another connection.
    pub(crate) fn hear(&self) -> bool {
        let mut state = self.desk.lock();
        match &mut state.seat {
            Some((number, heard)) if *number == self.number => {
                *heard = Instant::now();
                true
            }
            _ => false,
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.desk.lock();
        if state.seat.is_some_and(|(number, _)| number == self.number) {
            state.seat = None;
        }
    }
}
