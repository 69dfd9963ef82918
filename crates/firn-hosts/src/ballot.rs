//! One decision of several hosts, from the first that takes part to the removal of its directory.
//!
//! ```text
//! in-HOST        the host takes part; what it brings
//! closing        new participants are refused; put once
//! decision       what was decided; put once
//! out-HOST       the host changes nothing any more
//! claim-UNIT     JSON: the host that does this unit of work, put once; `Living`: locked by it
//! done-UNIT      the unit is done, durably; put once
//! left-HOST      the host has ended its part
//! whole          locked by the host that does a unit that concerns the whole, or removes the directory
//! ```
//!
//! ```text
//! Open ──join──► Open ──close──► Closing ──decide──► Decided ──stop──► work, unit by unit ──leave──► all left ──► retired
//! ```
//!
//! What a host does next is a pure function of what it sees ([`next`], [`next_join`], [`next_decision`]). [`Ballot`] looks,
//! does one such action, and looks again. A crash, a faster host or an old listing only changes what the next look says, so
//! recovery is the same loop.
//!
//! | [`Presence`] | `Kept` | `Living` |
//! |---|---|---|
//! | a host takes part | until it says that it has left, also after its death | while it lives |
//! | a decision | at any time | when there are no participants, and new ones are refused |
//! | work is done by | a host that takes part; its claim outlives it | any host that lives; a claim is a lock |
//! | the directory goes, by the host that has `whole` locked | when all have left | when all is done |
//!
//! Invariants (`ballot/model.rs` checks them in all interleavings of three hosts)
//! * There is one decision, for ever; no unit of work begins before it.
//! * `Kept`: a host that takes part and then looks is seen by each host that decides and then looks, or sees the decision.
//! * `Living`: a host that takes part and then looks is seen by each host that puts `closing` and then looks, or sees
//!   `closing`. So no living host takes part in what is decided.
//! * With [`Plan::stops_first`], no host that takes part changes anything once a unit of work has begun.
//! * Two hosts never do the same unit at the same time, no unit is begun again after it is done, and none before those
//!   of earlier stages are done. A [`Unit::Whole`] and the removal exclude all other work.
//! * The directory goes when every host that took part has left and every unit is done.
//!
//! Relies on [`VoteDir`], and on a host that has changed the directory listing it anew: what another host did before
//! that change is in the listing.

use std::collections::{BTreeMap, BTreeSet};

use firn_backing::{Backing, Errno, LockMode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::own::{self, OwnError};
use crate::vote::VoteDir;

mod decisions;
#[cfg(test)]
mod model;

pub use self::decisions::{
    Action, Claimant, DecisionStep, JoinStep, Plan, Presence, Protocol, Unit, View, Waiting, next,
    next_decision, next_join,
};

/// Version of the names and contents of its files: hosts with different ones do not understand each other.
pub const BALLOT_VERSION: u32 = 3;

/// Before the name of a host that takes part.
pub const JOINED: &str = "in-";
/// Name of the file that refuses new participants.
pub const CLOSING: &str = "closing";
/// What was decided.
pub const DECISION: &str = "decision";
/// Before the name of a unit that is done.
pub const DONE: &str = "done-";
const OUT: &str = "out-";
const CLAIM: &str = "claim-";
const LEFT: &str = "left-";
const WHOLE: &str = "whole";

/// What the file of a decision has: a line with the CRC32C of what follows, in hexadecimal, and JSON.
pub fn encode_decision(decision: &impl Serialize) -> Result<Vec<u8>, Errno> {
    let json = serde_json::to_string_pretty(decision).map_err(|_| Errno::INVAL)?;
    let checksum = crc32c::crc32c(json.as_bytes());
    Ok(format!("{checksum:08x}\n{json}").into_bytes())
}

/// What such a file says; `None`: it is damaged.
pub fn decode_decision<D: DeserializeOwned>(bytes: &[u8]) -> Option<D> {
    let (checksum, json) = std::str::from_utf8(bytes).ok()?.split_once('\n')?;
    let checksum = u32::from_str_radix(checksum, 16).ok()?;
    if checksum != crc32c::crc32c(json.as_bytes()) {
        return None;
    }
    serde_json::from_str(json).ok()
}

/// Result of an attempt to take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// The host takes part.
    Yes,
    /// The ballot was over.
    Over,
}

/// How far a host has come with what was decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All work is done: the host may end its own part, and leave.
    Done,
    /// Other hosts come first.
    Waits(Waiting<String>),
    /// The directory has been removed, or has no name any more.
    Gone,
}

/// Result of an attempt to do something alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alone {
    /// It was done.
    Done,
    /// Another host holds it.
    Busy,
    /// The directory has been removed, or has no name any more.
    Gone,
}

/// What a process has claimed by a lock, and what it found that others have locked.
struct Locks<B: Backing> {
    /// At most one; it ends when its unit is done.
    own: Option<LockedClaim<B>>,
    /// Claims of others. They may be free by now: the next look at the ballot asks again.
    busy: BTreeSet<String>,
}

struct LockedClaim<B: Backing> {
    name: String,
    /// Locked.
    _file: B::File,
}

impl<B: Backing> Locks<B> {
    fn none() -> Self {
        Self {
            own: None,
            busy: BTreeSet::new(),
        }
    }
}

/// One ballot, as one of the hosts sees it.
pub struct Ballot<'a, B: Backing, P: Protocol> {
    dir: VoteDir<'a, B>,
    protocol: P,
}

impl<'a, B: Backing, P: Protocol> Ballot<'a, B, P> {
    /// The ballot that has this directory.
    pub fn in_dir(dir: VoteDir<'a, B>, protocol: P) -> Self {
        Self { dir, protocol }
    }

    /// Its directory.
    pub fn dir(&self) -> &VoteDir<'a, B> {
        &self.dir
    }

    /// What was decided, if anything was.
    pub fn decision(&self) -> Result<Option<P::Decision>, Errno> {
        let Some(stored) = self.dir.read(DECISION)? else {
            return Ok(None);
        };
        match decode_decision(&stored) {
            Some(decision) => Ok(Some(decision)),
            None => {
                tracing::error!(dir = self.dir.name(), "`{DECISION}` is damaged");
                Err(Errno::IO)
            }
        }
    }

    /// Hosts that take part.
    pub fn joined(&self) -> Result<Vec<String>, Errno> {
        self.dir.hosts(JOINED)
    }

    /// Whether this host takes part and has not ended its part.
    pub fn is_taking_part(&self) -> Result<bool, Errno> {
        let names = self.dir.names()?;
        let has = |prefix| names.contains(&self.dir.own_file(prefix));
        Ok(has(JOINED) && !has(LEFT))
    }

    /// What it is about.
    pub fn protocol(&self) -> &P {
        &self.protocol
    }

    /// Looks at all of it, but at what is locked.
    pub fn view(&self) -> Result<View<String, P::Decision>, Errno> {
        let names = self.dir.names()?;
        let decision = self.decision()?;
        self.view_of(&names, decision)
    }

    fn view_of<D>(
        &self,
        names: &BTreeSet<String>,
        decision: Option<D>,
    ) -> Result<View<String, D>, Errno> {
        let with = |prefix: &str| -> BTreeSet<String> {
            let found = names.iter().filter_map(|name| name.strip_prefix(prefix));
            found.map(Into::into).collect()
        };
        let claimed = match P::PRESENCE {
            Presence::Kept => self.read_claims(names)?,
            Presence::Living => BTreeMap::new(),
        };
        Ok(View {
            joined: with(JOINED),
            is_closing: names.contains(CLOSING),
            decision,
            stopped: with(OUT),
            claimed,
            done: with(DONE),
            left: with(LEFT),
        })
    }

    fn read_claims(
        &self,
        names: &BTreeSet<String>,
    ) -> Result<BTreeMap<String, Claimant<String>>, Errno> {
        let mut claimed = BTreeMap::new();
        for name in names.iter().filter(|name| name.starts_with(CLAIM)) {
            if let Some(host) = self.dir.read_json(name)? {
                claimed.insert(name.clone(), Claimant::Host(host));
            }
        }
        Ok(claimed)
    }

    /// What a host brought that takes part.
    pub fn brought_by(&self, host: &str) -> Result<Option<Vec<u8>>, OwnError> {
        self.dir.read(&format!("{JOINED}{host}"))
    }

    /// Takes part and brings `bytes`, unless the ballot is over or is removed meanwhile.
    pub fn join(&self, bytes: &[u8]) -> Result<Joined, Errno> {
        // A host that takes part only while it lives brings nothing that others would have to see: it puts its file at
        // once.
        let mut is_open = P::PRESENCE == Presence::Living || self.is_open()?;
        let mut has_put = false;
        loop {
            match next_join(is_open, has_put) {
                JoinStep::Put => {
                    self.put_joined(bytes)?;
                    has_put = true;
                }
                JoinStep::Withdraw => {
                    self.withdraw()?;
                    return Ok(Joined::Over);
                }
                JoinStep::Joined => return Ok(Joined::Yes),
                JoinStep::Refused => return Ok(Joined::Over),
            }
            is_open = self.is_open()?;
        }
    }

    fn put_joined(&self, bytes: &[u8]) -> Result<(), Errno> {
        let name = self.dir.own_file(JOINED);
        match P::PRESENCE {
            Presence::Kept => self.dir.put_once(&name, bytes).map(drop),
            Presence::Living => self.dir.put_hint(&name),
        }
    }

    fn is_open(&self) -> Result<bool, Errno> {
        let names = self.dir.names()?;
        Ok(!names.contains(CLOSING) && !names.contains(DECISION) && self.dir.is_current()?)
    }

    /// Takes part no more. Only for a host that has changed nothing, or takes part while it lives.
    pub fn withdraw(&self) -> Result<(), Errno> {
        match P::PRESENCE {
            Presence::Kept => self.dir.withdraw(JOINED),
            Presence::Living => self.dir.withdraw_hint(JOINED),
        }
    }

    /// Closes the ballot: afterwards no host that `is_living` takes part, and none can begin to. A decision may be
    /// damaged.
    pub fn close(
        &self,
        is_living: &dyn Fn(&str) -> Result<bool, Errno>,
    ) -> Result<DecisionStep<String>, Errno> {
        loop {
            let names = self.dir.names()?;
            let is_decided = names.contains(DECISION).then_some(());
            let view = self.view_of(&names, is_decided)?;
            let mut living = Vec::new();
            for host in &view.joined {
                if is_living(host)? {
                    living.push(host.clone());
                }
            }
            match next_decision(&view, living) {
                DecisionStep::Close => self.dir.put_once(CLOSING, b"").map(drop)?,
                step => return Ok(step),
            }
        }
    }

    /// Decides, if nothing was decided yet. Returns the decision that counts; None if the directory is gone.
    pub fn decide(&self, decision: &P::Decision) -> Result<Option<P::Decision>, Errno> {
        self.dir.put_once(DECISION, &encode_decision(decision)?)?;
        self.decision()
    }

    /// Carries a decision out as far as other hosts let this one. `work` does a unit, and may be asked for one that an
    /// earlier life of this host, or another host that is dead, has begun.
    pub fn carry_out<E: From<Errno>>(
        &self,
        mut work: impl FnMut(&Unit) -> Result<(), E>,
    ) -> Result<Progress, E> {
        let mut locks = Locks::none();
        let mut decision = None;
        loop {
            let view = self.look(&locks, decision.take())?;
            let action = self.next(&view);
            decision = view.decision;
            // Asked after the names: those of a directory that is being removed are gone one by one.
            if P::PRESENCE == Presence::Living && !self.dir.is_current()? {
                return Ok(Progress::Gone);
            }
            match action {
                Action::Stop => self.stop()?,
                Action::Claim(unit) => self.claim(&unit, &mut locks)?,
                Action::Work(unit) => {
                    work(&unit)?;
                    self.dir.put_once(&unit.done_file(), b"")?;
                    locks.own = None;
                }
                Action::Leave
                | Action::ClaimRemoval
                | Action::Retire
                | Action::Wait(Waiting::Removal) => return Ok(Progress::Done),
                Action::Wait(waiting) => return Ok(Progress::Waits(waiting)),
            }
        }
    }

    /// Does something with the whole, or removes the directory, if no other host is at it and the directory is still
    /// there. A host that was late would else change what came since then.
    pub fn do_alone<E: From<Errno>>(
        &self,
        work: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<Alone, E> {
        let mut locks = Locks::none();
        match self.lock_claim(WHOLE, &mut locks) {
            Err(Errno::NOENT | Errno::STALE) => return Ok(Alone::Gone),
            claimed => claimed?,
        }
        if locks.own.is_none() {
            return Ok(Alone::Busy);
        }
        // A later directory may have its name.
        if !self.dir.is_current()? {
            return Ok(Alone::Gone);
        }
        work()?;
        Ok(Alone::Done)
    }

    /// Says that this host has ended its part, and removes the directory if it is the last one.
    pub fn leave(&self) -> Result<(), Errno> {
        self.dir.put_once(&self.dir.own_file(LEFT), b"")?;
        self.remove_if_over()
    }

    /// Says that this host, which has changed nothing, leaves whatever was decided. Others do the work.
    pub fn leave_unchanged(&self) -> Result<(), Errno> {
        self.stop()?;
        self.leave()
    }

    /// Removes the directory if all is over, or if it is empty. Another host may be removing it; if that host dies, the
    /// next caller completes the removal.
    pub fn remove_if_over(&self) -> Result<(), Errno> {
        match self.remove() {
            Err(Errno::NOENT | Errno::STALE) => Ok(()),
            removed => removed,
        }
    }

    fn remove(&self) -> Result<(), Errno> {
        let mut locks = Locks::none();
        loop {
            match self.next(&self.look(&locks, None)?) {
                Action::ClaimRemoval => self.lock_claim(WHOLE, &mut locks)?,
                // The next ballot may have the name already.
                Action::Retire if self.dir.is_current()? => return self.dir.retire(),
                Action::Wait(Waiting::Decision) => return self.dir.remove_empty(),
                _ => return Ok(()),
            }
        }
    }

    /// Looks at all of it. A decision that is known is not read again.
    fn look(
        &self,
        locks: &Locks<B>,
        known: Option<P::Decision>,
    ) -> Result<View<String, P::Decision>, Errno> {
        let names = self.dir.names()?;
        let decision = match known {
            Some(decision) => Some(decision),
            None => self.decision()?,
        };
        let mut view = self.view_of(&names, decision)?;
        for name in &locks.busy {
            view.claimed.insert(name.clone(), Claimant::Unknown);
        }
        if let Some(own) = &locks.own {
            let claimant = Claimant::Host(self.dir.host().to_owned());
            view.claimed.insert(own.name.clone(), claimant);
        }
        Ok(view)
    }

    fn next(&self, view: &View<String, P::Decision>) -> Action<String> {
        next(view, &self.dir.host().to_owned(), &self.protocol)
    }

    fn stop(&self) -> Result<(), Errno> {
        self.dir.put_once(&self.dir.own_file(OUT), b"").map(drop)
    }

    fn claim(&self, unit: &Unit, locks: &mut Locks<B>) -> Result<(), Errno> {
        let name = unit.claim();
        match P::PRESENCE {
            Presence::Kept => {
                debug_assert!(name != WHOLE, "what is claimed of the whole is locked");
                self.dir.put_json(&name, &self.dir.host()).map(drop)
            }
            Presence::Living => self.lock_claim(&name, locks),
        }
    }

    /// Locks a claim. Where files cannot be locked several hosts do the same work.
    fn lock_claim(&self, name: &str, locks: &mut Locks<B>) -> Result<(), Errno> {
        // What it had locked is done, by another host that had it before.
        locks.own = None;
        let base = self.dir.base();
        let file = own::open_or_create(base, self.dir.dir(), name)?;
        let is_locked = match base.try_lock(&file, LockMode::Exclusive) {
            Err(Errno::OPNOTSUPP) => true,
            locked => locked?,
        };
        if !is_locked {
            locks.busy.insert(name.to_owned());
            return Ok(());
        }
        locks.own = Some(LockedClaim {
            name: name.to_owned(),
            _file: file,
        });
        // What was done before the lock was free is to be in the next listing.
        own::touch(base, self.dir.dir(), &self.dir.own_file("look-"))
    }
}
