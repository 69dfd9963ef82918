//! Lets several hosts take one decision, which is the same for all of them, and share the work that follows from it.
//! The hosts have only a directory in common, and any of them may die at any time.
//!
//! Example: hosts A and B change files in one transaction. A creates `in-A` and B creates `in-B`. The first host that
//! creates `decision` decides for both, here to abort. A and B create `out-A` and `out-B`, and make no changes after
//! that. B creates `claim-undo`, undoes the changes, and creates `done-undo`. Both leave (`left-A`, `left-B`), and one
//! of them removes the directory.
//!
//! Terms
//! * A *ballot* is one such decision, from the first host that joins to the removal of its directory.
//! * A *participant* is a host that takes part in the decision. There are two kinds of ballots: the participants count
//!   until they leave, even if they die before that (*Kept*), or only while they are alive (*Living*).
//! * A *unit* is a part of the work, which one host does. Units are in *stages*, one after the other.
//! * A *claim* gives a unit to one host.
//! * A file is *put once* if the first host creates it and no host changes it.
//!
//! The hosts decide by creating these files in the directory:
//!
//! ```text
//! in-HOST        the host takes part; the file holds data of that host for the decision
//! closing        new participants are refused; put once
//! decision       what was decided; put once
//! out-HOST       the host makes no more changes
//! claim-UNIT     Kept: JSON with the host that does this unit, put once; Living: locked by that host
//! done-UNIT      the unit is done, durably; put once
//! left-HOST      the host has ended its part
//! whole          locked by the host that does a unit that excludes all other work, or removes the directory
//! ```
//!
//! ```text
//! Open ──join──► Open ──close──► Closing ──decide──► Decided ──stop──► work, unit by unit ──leave──► all left ──► retired
//! ```
//!
//! The next action of a host is a pure function of the files that the host sees ([`next`], [`next_join`],
//! [`next_decision`]). [`Ballot`] reads the directory, does one action, and reads again. A crash, a faster host or an
//! outdated listing changes only what the next read returns. Recovery is therefore the same loop.
//!
//! | [`Participation`] | `Kept` | `Living` |
//! |---|---|---|
//! | a host takes part | until it records that it has left, even after its death | while it is alive |
//! | a decision may be taken | at any time | when there are no participants, and new ones are refused |
//! | work is done by | a participant; its claim outlives it | any living host; a claim is a lock |
//! | the directory is removed, by the host that has locked `whole` | when all participants have left | when all work is done |
//!
//! Invariants (`ballot/model.rs` checks them in all interleavings of three hosts)
//! * There is one decision, and it never changes. No unit of work begins before the decision.
//! * `Kept`: if one host joins while another decides, the joining host then sees the decision, or the deciding host
//!   then sees the new participant.
//! * `Living`: if one host joins while another puts `closing`, the joining host then sees `closing`, or the other host
//!   then sees the new participant. A decision is therefore taken only without living participants.
//! * With [`Plan::stops_first`], no participant changes anything once a unit of work has begun.
//! * Two hosts never do the same unit at the same time. A unit is never begun again after it is done. A unit begins
//!   only after all units of earlier stages are done. A [`Unit::Whole`] and the removal exclude all other work.
//! * The directory is removed only when every participant has left and every unit is done.
//!
//! Relies on [`VoteDir`]. A host that has changed the directory must then list it anew: the new listing includes
//! every change that other hosts made before that.

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
    Action, Claimant, DecisionStep, JoinStep, Participation, Plan, Protocol, Unit, View, Waiting,
    next, next_decision, next_join,
};

/// Version of the names and contents of a ballot's files. Hosts with different versions cannot work together.
pub const BALLOT_VERSION: u32 = 3;

/// Prefix of the file of a participant; the host's name follows.
pub const JOINED: &str = "in-";
/// Name of the file that tells hosts that new participants are refused.
pub const CLOSING: &str = "closing";
/// Name of the file with the decision.
pub const DECISION: &str = "decision";
/// Prefix of the file of a unit that is done; the unit's name follows.
pub const DONE: &str = "done-";
const OUT: &str = "out-";
const CLAIM: &str = "claim-";
const LEFT: &str = "left-";
const WHOLE: &str = "whole";

/// Encodes a decision as the content of its file: a line with the CRC32C of the rest in hexadecimal, then JSON.
pub fn encode_decision(decision: &impl Serialize) -> Result<Vec<u8>, Errno> {
    let json = serde_json::to_string_pretty(decision).map_err(|_| Errno::INVAL)?;
    let checksum = crc32c::crc32c(json.as_bytes());
    Ok(format!("{checksum:08x}\n{json}").into_bytes())
}

/// Decodes the content of a decision file. Returns `None` if the content is damaged.
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
    /// The ballot was closed or decided already, or its directory was being removed.
    Over,
}

/// Progress of a host with the work after a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All work is done. The host may end its own part and leave.
    Done,
    /// The host waits for other hosts.
    Waits(Waiting<String>),
    /// The directory has been removed, or has no name any more.
    Gone,
}

/// Result of an attempt to do work under the lock of the whole ballot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExclusiveWork {
    /// The work was done.
    Done,
    /// Another host holds the lock.
    Busy,
    /// The directory has been removed, or has no name any more.
    Gone,
}

/// The claim that this process has locked, and the claims that it found locked by other hosts.
struct Locks<B: Backing> {
    /// The claim that this process has locked. The lock ends when the unit is done.
    own_claim: Option<LockedClaim<B>>,
    /// Claims that other hosts had locked at the last attempt. The locks may be free by now. They are tried again with
    /// the next listing.
    locked_by_others: BTreeSet<String>,
}

/// A claim that this process has locked. The lock ends when the value is dropped.
struct LockedClaim<B: Backing> {
    name: String,
    /// The open file that holds the lock.
    _file: B::File,
}

impl<B: Backing> Locks<B> {
    fn none() -> Self {
        Self {
            own_claim: None,
            locked_by_others: BTreeSet::new(),
        }
    }
}

/// One ballot, as one of the hosts uses it.
pub struct Ballot<'a, B: Backing, P: Protocol> {
    dir: VoteDir<'a, B>,
    protocol: P,
}

impl<'a, B: Backing, P: Protocol> Ballot<'a, B, P> {
    /// Creates the ballot whose files are in `dir`.
    pub fn in_dir(dir: VoteDir<'a, B>, protocol: P) -> Self {
        Self { dir, protocol }
    }

    /// Returns the ballot's directory.
    pub fn dir(&self) -> &VoteDir<'a, B> {
        &self.dir
    }

    /// Returns the decision. Returns `None` if there is none yet.
    ///
    /// A damaged decision is an error (EIO).
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

    /// Returns the names of the hosts that take part.
    pub fn joined(&self) -> Result<Vec<String>, Errno> {
        self.dir.hosts(JOINED)
    }

    /// Returns whether this host takes part and has not ended its part.
    pub fn is_taking_part(&self) -> Result<bool, Errno> {
        let names = self.dir.names()?;
        let has_own_file = |prefix| names.contains(&self.dir.own_file(prefix));
        Ok(has_own_file(JOINED) && !has_own_file(LEFT))
    }

    /// Returns the protocol, which defines the decision and the work that follows.
    pub fn protocol(&self) -> &P {
        &self.protocol
    }

    /// Reads the state of the ballot from its files, without testing locks.
    pub fn view(&self) -> Result<View<String, P::Decision>, Errno> {
        let names = self.dir.names()?;
        let decision = self.decision()?;
        self.view_of(&names, decision)
    }

    /// Returns the view that follows from the names in the directory and the decision. Reads the claims, unless they
    /// are locks.
    fn view_of<D>(
        &self,
        names: &BTreeSet<String>,
        decision: Option<D>,
    ) -> Result<View<String, D>, Errno> {
        let hosts_with = |prefix: &str| -> BTreeSet<String> {
            names
                .iter()
                .filter_map(|name| name.strip_prefix(prefix))
                .map(Into::into)
                .collect()
        };
        let claimed = match P::PRESENCE {
            Participation::Kept => self.read_claims(names)?,
            Participation::Living => BTreeMap::new(),
        };
        Ok(View {
            joined: hosts_with(JOINED),
            is_closing: names.contains(CLOSING),
            decision,
            stopped: hosts_with(OUT),
            claimed,
            done: hosts_with(DONE),
            left: hosts_with(LEFT),
        })
    }

    /// Reads which host has claimed which unit. A claim that was removed since the listing counts as free.
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

    /// Returns the bytes that a participant brought. Returns `None` if the host has not joined.
    pub fn brought_by(&self, host: &str) -> Result<Option<Vec<u8>>, OwnError> {
        self.dir.read(&format!("{JOINED}{host}"))
    }

    /// Makes this host a participant of the ballot; `bytes` are what it brings for the others to read. Returns
    /// [`Joined::Over`] if it came too late: the ballot is closed or decided, or its directory is being removed.
    ///
    /// The host puts its file first and then looks whether the ballot is still open, so that it is not missed by a host
    /// that closes the ballot or decides at the same time.
    pub fn join(&self, bytes: &[u8]) -> Result<Joined, Errno> {
        // With `Living`, a host brings nothing that other hosts have to see, so it puts its file at once.
        let mut is_open = P::PRESENCE == Participation::Living || self.is_open()?;
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

    /// Puts the file that says that this host takes part.
    fn put_joined(&self, bytes: &[u8]) -> Result<(), Errno> {
        let name = self.dir.own_file(JOINED);
        match P::PRESENCE {
            Participation::Kept => self.dir.put_once(&name, bytes).map(drop),
            Participation::Living => self.dir.put_hint(&name),
        }
    }

    /// Returns whether a host may join: the ballot is neither closed nor decided, and the directory has its name.
    fn is_open(&self) -> Result<bool, Errno> {
        let names = self.dir.names()?;
        Ok(!names.contains(CLOSING) && !names.contains(DECISION) && self.dir.is_current()?)
    }

    /// Withdraws this host from the ballot.
    ///
    /// Only a host that has changed nothing may call this, or any host with `Participation::Living`.
    pub fn withdraw(&self) -> Result<(), Errno> {
        match P::PRESENCE {
            Participation::Kept => self.dir.withdraw(JOINED),
            Participation::Living => self.dir.withdraw_hint(JOINED),
        }
    }

    /// Closes the ballot to new participants, unless a living host takes part. Returns what the caller must do next:
    /// `Wait` for these living hosts, `Decide`, or nothing if there is a decision (`Decided`).
    ///
    /// After a result of `Decide` or `Decided`, no host that `is_living` accepts takes part, and no host can join.
    /// The function accepts a damaged decision file.
    pub fn close(
        &self,
        is_living: &dyn Fn(&str) -> Result<bool, Errno>,
    ) -> Result<DecisionStep<String>, Errno> {
        loop {
            let names = self.dir.names()?;
            // The content of the decision does not matter here, and may be damaged.
            let decision = names.contains(DECISION).then_some(());
            let view = self.view_of(&names, decision)?;
            let mut living = Vec::new();
            for host in &view.joined {
                if is_living(host)? {
                    living.push(host.clone());
                }
            }
            match next_decision(&view, living) {
                // A host may have joined just before `closing` was put, so the directory is read again.
                DecisionStep::Close => self.dir.put_once(CLOSING, b"").map(drop)?,
                step => return Ok(step),
            }
        }
    }

    /// Puts the decision, unless there is one already.
    ///
    /// Returns the decision that counts. Returns `None` if the directory is gone.
    pub fn decide(&self, decision: &P::Decision) -> Result<Option<P::Decision>, Errno> {
        self.dir.put_once(DECISION, &encode_decision(decision)?)?;
        self.decision()
    }

    /// Does this host's share of the work that follows from a decision. Returns `Done` when the work of all hosts is
    /// done, and `Waits` when all that is left must be done by other hosts, or after them.
    ///
    /// The work consists of units. A host claims a unit, so that no other host does it at the same time, and `work`
    /// then does it. The unit may have been begun before, by an earlier process of this host or by another host that
    /// has died.
    pub fn carry_out<E: From<Errno>>(
        &self,
        mut work: impl FnMut(&Unit) -> Result<(), E>,
    ) -> Result<Progress, E> {
        let mut locks = Locks::none();
        let mut decision = None;
        loop {
            let view = self.read_with_locks(&locks, decision.take())?;
            let action = self.next(&view);
            decision = view.decision;
            // Check this after the names were read: when a directory is being removed, its names vanish one by one.
            if P::PRESENCE == Participation::Living && !self.dir.is_current()? {
                return Ok(Progress::Gone);
            }
            match action {
                Action::Stop => self.stop()?,
                Action::Claim(unit) => self.claim(&unit, &mut locks)?,
                Action::Work(unit) => {
                    work(&unit)?;
                    // The unit is marked as done before its claim ends, so no other host does it again.
                    self.dir.put_once(&unit.done_file(), b"")?;
                    locks.own_claim = None;
                }
                // These actions come only after all work. The caller leaves or removes the ballot.
                Action::Leave
                | Action::ClaimRemoval
                | Action::Retire
                | Action::Wait(Waiting::Removal) => return Ok(Progress::Done),
                Action::Wait(waiting) => return Ok(Progress::Waits(waiting)),
            }
        }
    }

    /// Runs `work` under the lock of the whole ballot, if no other host holds that lock and the directory still
    /// exists.
    ///
    /// The check of the directory protects later state: a host that was late would otherwise change a newer
    /// directory.
    pub fn run_exclusively<E: From<Errno>>(
        &self,
        work: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<ExclusiveWork, E> {
        let mut locks = Locks::none();
        match self.lock_claim(WHOLE, &mut locks) {
            Ok(()) => {}
            // Another host has removed the directory.
            Err(Errno::NOENT | Errno::STALE) => return Ok(ExclusiveWork::Gone),
            Err(errno) => return Err(errno.into()),
        }
        if locks.own_claim.is_none() {
            return Ok(ExclusiveWork::Busy);
        }
        // The name may belong to a later directory by now.
        if !self.dir.is_current()? {
            return Ok(ExclusiveWork::Gone);
        }
        work()?;
        Ok(ExclusiveWork::Done)
    }

    /// Records that this host has ended its part. Removes the directory if this host is the last one.
    pub fn leave(&self) -> Result<(), Errno> {
        self.dir.put_once(&self.dir.own_file(LEFT), b"")?;
        self.remove_if_over()
    }

    /// Records that this host has stopped and left, whatever was decided.
    ///
    /// Only a host that has changed nothing may call this. The other hosts do the work.
    pub fn leave_unchanged(&self) -> Result<(), Errno> {
        self.stop()?;
        self.leave()
    }

    /// Removes the directory if the ballot is over, or if the directory is empty.
    ///
    /// Another host may be removing the directory at the same time. If that host dies, the next caller completes the
    /// removal.
    pub fn remove_if_over(&self) -> Result<(), Errno> {
        match self.remove() {
            Err(Errno::NOENT | Errno::STALE) => Ok(()),
            removed => removed,
        }
    }

    /// Takes the actions that lead to the removal of the directory, as far as this host may take them.
    fn remove(&self) -> Result<(), Errno> {
        let mut locks = Locks::none();
        loop {
            let known_decision = None;
            let view = self.read_with_locks(&locks, known_decision)?;
            match self.next(&view) {
                Action::ClaimRemoval => self.lock_claim(WHOLE, &mut locks)?,
                // The name may belong to the next ballot already.
                Action::Retire if self.dir.is_current()? => return self.dir.retire(),
                Action::Wait(Waiting::Decision) => return self.dir.remove_empty(),
                _ => return Ok(()),
            }
        }
    }

    /// Reads the state of the ballot, including the locks in `locks`. A decision that is already known is not read
    /// again.
    fn read_with_locks(
        &self,
        locks: &Locks<B>,
        known_decision: Option<P::Decision>,
    ) -> Result<View<String, P::Decision>, Errno> {
        let names = self.dir.names()?;
        let decision = match known_decision {
            Some(decision) => Some(decision),
            None => self.decision()?,
        };
        let mut view = self.view_of(&names, decision)?;
        for name in &locks.locked_by_others {
            view.claimed.insert(name.clone(), Claimant::Unknown);
        }
        if let Some(own_claim) = &locks.own_claim {
            let claimant = Claimant::Host(self.dir.host().to_owned());
            view.claimed.insert(own_claim.name.clone(), claimant);
        }
        Ok(view)
    }

    /// Returns the next action of this host.
    fn next(&self, view: &View<String, P::Decision>) -> Action<String> {
        next(view, &self.dir.host().to_owned(), &self.protocol)
    }

    /// Records that this host changes nothing any more.
    fn stop(&self) -> Result<(), Errno> {
        self.dir.put_once(&self.dir.own_file(OUT), b"").map(drop)
    }

    /// Tries to claim a unit. Whether the claim succeeded shows in the next listing.
    fn claim(&self, unit: &Unit, locks: &mut Locks<B>) -> Result<(), Errno> {
        let name = unit.claim();
        match P::PRESENCE {
            Participation::Kept => {
                debug_assert!(name != WHOLE, "what is claimed of the whole is locked");
                self.dir.put_json(&name, &self.dir.host()).map(drop)
            }
            Participation::Living => self.lock_claim(&name, locks),
        }
    }

    /// Tries to lock a claim. On file systems without locks several hosts may do the same work.
    fn lock_claim(&self, name: &str, locks: &mut Locks<B>) -> Result<(), Errno> {
        // This host needs only one claim at a time, and the unit of the earlier claim is done.
        locks.own_claim = None;
        let base = self.dir.base();
        let file = own::open_or_create(base, self.dir.dir(), name)?;
        let is_locked = match base.try_lock(&file, LockMode::Exclusive) {
            Ok(is_locked) => is_locked,
            Err(Errno::OPNOTSUPP) => true,
            Err(errno) => return Err(errno),
        };
        if !is_locked {
            locks.locked_by_others.insert(name.to_owned());
            return Ok(());
        }
        locks.own_claim = Some(LockedClaim {
            name: name.to_owned(),
            _file: file,
        });
        // The next listing must include everything that was done before the lock was free.
        own::force_fresh_listing(base, self.dir.dir(), &self.dir.own_file("look-"))
    }
}
