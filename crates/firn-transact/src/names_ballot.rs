//! What hosts share that write one scope of names: the hosts that take part, their states, and the decision.
//!
//! ```text
//! .firn/names-HASH/        one scope, a [`Ballot`]; HASH stands for its key
//!   key                    the key, put once
//!   in-HOST                the host takes part, from before its first change
//!   event                  put once, JSON: a host has seen what makes the scope complete; what the others must know of it
//!   state-HOST             what the host says of its part; rewritten
//!   try-N                  put once: attempt N to commit, and the hosts in it
//!   list-N-HOST            put once: what the prepared part of the host has ([`Published`])
//!   verdict-N              put once, JSON: whether these parts go together
//!   decision               put once: commit or abort, and which host said so
//!   left-HOST              the host has carried the decision out
//! ```
//!
//! The caller says what the hosts do with it. This module keeps what holds in any case:
//!
//! Invariants, beside those of a ballot
//! * No decision is a commit without a clear verdict on the parts of all hosts that take part.
//! * No host begins to take part while an attempt is open. A host that puts `in-HOST` and then finds an attempt
//!   withdraws; a host that puts `try-N` and then finds another host gives the attempt up.
//! * A prepared part whose directory is gone, or in which its host takes no part, was aborted: after a commit the directory
//!   stays until each host has left.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use firn_backing::{Backing, Errno};
use firn_hosts::{Ballot, Joined, Plan, Protocol, VoteDir};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::conflict::Published;
use crate::error::{StageError, VoteError};
use crate::staging;
use crate::staging_dir::Home;
use crate::vote::{Outcome, Verdict};

const NAMES: &str = "names-";
const KEY: &str = "key";
const EVENT: &str = "event";
const STATE: &str = "state-";
const TRY: &str = "try-";
const LIST: &str = "list-";
const VERDICT: &str = "verdict-";

/// Each host carries the decision out by itself.
struct NamesEnd;

impl Protocol for NamesEnd {
    type Decision = Outcome;

    fn plan(&self, _outcome: &Outcome) -> Plan {
        Plan::default()
    }
}

/// Result of an attempt to take part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamesEntry {
    /// The host takes part.
    Joined,
    /// It cannot yet: hosts that have not ended their part of the scope before, or commit just now.
    NotYet(Vec<String>),
}

/// What a listing says.
#[derive(Clone, Debug, Default)]
pub struct NamesView<S, A> {
    /// Hosts that take part.
    pub joined: BTreeSet<String>,
    /// Those that have carried the decision out.
    pub left: BTreeSet<String>,
    /// What each host says of its part.
    pub states: BTreeMap<String, S>,
    /// A host has seen the event.
    pub has_event: bool,
    /// The last attempt.
    pub attempt: Option<NamesAttempt<A>>,
    /// Whether it is committed.
    pub decision: Option<bool>,
}

/// An attempt to commit.
#[derive(Clone, Debug)]
pub struct NamesAttempt<A> {
    /// From 1.
    pub number: u64,
    /// What `try-N` says.
    pub content: A,
    /// Hosts that have published their part.
    pub published: BTreeSet<String>,
    /// Whether the parts go together.
    pub verdict: Option<Verdict>,
}

/// One scope of names of several hosts.
pub struct NamesBallot<'a, B: Backing> {
    ballot: Ballot<'a, B, NamesEnd>,
    base: &'a B,
}

/// The ballots on scopes of names, of a host among others.
pub struct NamesBallots<B: Backing> {
    home: Arc<Home<B>>,
}

fn dir_name(key: &[u8]) -> String {
    let reversed: Vec<u8> = key.iter().rev().copied().collect();
    let len = key.len();
    format!(
        "{NAMES}{:08x}{:08x}{len:x}",
        crc32c::crc32c(key),
        crc32c::crc32c(&reversed)
    )
}

fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::STALE)
}

impl<B: Backing> NamesBallots<B> {
    pub(crate) fn new(home: &Arc<Home<B>>) -> Self {
        Self {
            home: Arc::clone(home),
        }
    }

    fn of_dir<'a>(&'a self, dir: VoteDir<'a, B>) -> NamesBallot<'a, B> {
        NamesBallot {
            ballot: Ballot::in_dir(dir, NamesEnd),
            base: &self.home.base,
        }
    }

    /// Takes part in the scope that hosts know by a key, before it is changed.
    pub(crate) fn join(&self, key: &[u8]) -> Result<NamesEntry, Errno> {
        match self.try_join(key) {
            // Another host removes what is left of an earlier scope.
            Err(errno) if is_gone(errno) => Ok(NamesEntry::NotYet(Vec::new())),
            joined => joined,
        }
    }

    fn try_join(&self, key: &[u8]) -> Result<NamesEntry, Errno> {
        let Some(members) = &self.home.members else {
            return Ok(NamesEntry::Joined);
        };
        let top = staging::dir(&self.home.base, &self.home.base.root(), staging::TOP)?;
        let dir = VoteDir::make(&self.home.base, &top, &dir_name(key), &members.host)?;
        dir.put_once(KEY, key)?;
        if dir.read(KEY)?.as_deref() != Some(key) {
            return Err(Errno::BUSY);
        }
        let ballot = self.of_dir(dir);
        if ballot.has_open_attempt()? {
            return Ok(NamesEntry::NotYet(ballot.ballot.joined()?));
        }
        if ballot.ballot.join(b"")? == Joined::Over {
            ballot.ballot.remove_if_over()?;
            let view = ballot.ballot.view()?;
            return Ok(NamesEntry::NotYet(view.remaining()));
        }
        if ballot.has_open_attempt()? {
            ballot.ballot.withdraw()?;
            return Ok(NamesEntry::NotYet(ballot.ballot.joined()?));
        }
        Ok(NamesEntry::Joined)
    }

    /// The ballot on a scope; none where this host takes no part in one.
    pub fn find(&self, key: &[u8]) -> Result<Option<NamesBallot<'_, B>>, Errno> {
        self.find_named(&dir_name(key))
    }

    fn find_named(&self, name: &str) -> Result<Option<NamesBallot<'_, B>>, Errno> {
        let Some(members) = &self.home.members else {
            return Ok(None);
        };
        let Some(top) = self.home.find_top()? else {
            return Ok(None);
        };
        let found = VoteDir::find(&self.home.base, &top, name, &members.host)?;
        let Some(found) = found.map(|dir| self.of_dir(dir)) else {
            return Ok(None);
        };
        match found.ballot.is_taking_part() {
            Ok(takes_part) => Ok(takes_part.then_some(found)),
            Err(errno) if is_gone(errno) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Removes what is left of a scope that was aborted, where all hosts that have not left are gone.
    pub fn remove_aborted(&self, key: &[u8], gone: &BTreeSet<String>) -> Result<(), Errno> {
        let (Some(members), Some(top)) = (&self.home.members, self.home.find_top()?) else {
            return Ok(());
        };
        let found = VoteDir::find(&self.home.base, &top, &dir_name(key), &members.host)?;
        match found.map(|dir| self.of_dir(dir).remove_aborted(gone)) {
            Some(Err(errno)) if !is_gone(errno) => Err(errno),
            _ => Ok(()),
        }
    }

    /// Whether a scope was committed. An open scope is decided here: it is aborted. A scope in which this host takes no
    /// part was aborted.
    pub(crate) fn settle_or_abort(&self, key: &[u8]) -> Result<bool, Errno> {
        match self.find(key)? {
            Some(ballot) => ballot.settle(false),
            None => Ok(false),
        }
    }

    /// Fails unless the scope is committed.
    pub(crate) fn must_be_committed(&self, key: &[u8]) -> Result<(), VoteError> {
        let is_committed = match self.find(key)? {
            Some(ballot) => ballot.decision()? == Some(true),
            None => false,
        };
        if is_committed {
            Ok(())
        } else {
            Err(StageError::NoTransaction.into())
        }
    }

    /// This host, which has changed nothing, takes part no more.
    pub(crate) fn withdraw(&self, key: &[u8]) {
        let withdrawn = match self.find(key) {
            Ok(Some(ballot)) => ballot.ballot.withdraw(),
            found => found.map(drop),
        };
        if let Err(errno) = withdrawn {
            tracing::warn!(%errno, "other hosts wait for this one until its next start");
        }
    }

    /// This host has carried the decision out. Repeated, it ends what is left of a removal.
    pub(crate) fn leave(&self, key: &[u8]) -> Result<(), Errno> {
        let (Some(members), Some(top)) = (&self.home.members, self.home.find_top()?) else {
            return Ok(());
        };
        let found = VoteDir::find(&self.home.base, &top, &dir_name(key), &members.host)?;
        let Some(ballot) = found.map(|dir| self.of_dir(dir).ballot) else {
            return Ok(());
        };
        let left = match ballot.is_taking_part() {
            Ok(true) => ballot.leave(),
            Ok(false) => ballot.remove_if_over(),
            Err(errno) => Err(errno),
        };
        match left {
            Err(errno) if is_gone(errno) => Ok(()),
            left => left,
        }
    }

    /// After a crash, when this host has no transaction of before any more: ends its part in all of them.
    pub(crate) fn leave_all(&self) -> Result<(), Errno> {
        let (Some(members), Some(top)) = (&self.home.members, self.home.find_top()?) else {
            return Ok(());
        };
        for (name, ..) in staging::list(&self.home.base, &top)? {
            let name = String::from_utf8_lossy(&name).into_owned();
            if !name.starts_with(NAMES) {
                continue;
            }
            let found = VoteDir::find(&self.home.base, &top, &name, &members.host)?;
            let Some(ballot) = found.map(|dir| self.of_dir(dir)) else {
                continue;
            };
            match ballot.end_part() {
                Err(errno) if !is_gone(errno) => return Err(errno),
                _ => {}
            }
        }
        Ok(())
    }
}

impl<B: Backing> NamesBallot<'_, B> {
    /// After a crash: what this host had not prepared is undone.
    fn end_part(&self) -> Result<(), Errno> {
        if !self.ballot.is_taking_part()? {
            return self.ballot.remove_if_over();
        }
        self.settle(false)?;
        self.ballot.leave()
    }

    fn dir(&self) -> &VoteDir<'_, B> {
        self.ballot.dir()
    }

    fn has_open_attempt(&self) -> Result<bool, Errno> {
        let names = self.dir().names()?;
        let Some(number) = last_attempt(&names) else {
            return Ok(false);
        };
        let verdict: Option<Verdict> = self.dir().read_json(&format!("{VERDICT}{number}"))?;
        Ok(matches!(verdict, None | Some(Verdict::Clear)))
    }

    /// Whether it is committed; none: that is open.
    pub fn decision(&self) -> Result<Option<bool>, Errno> {
        let decision = self.ballot.decision()?;
        Ok(decision.map(|outcome| outcome.commit))
    }

    /// Puts the decision, unless there is one; returns whether it is a commit.
    pub fn settle(&self, commit: bool) -> Result<bool, Errno> {
        let by = self.dir().host().to_owned();
        let outcome = self.ballot.decide(&Outcome { commit, by })?;
        Ok(outcome.ok_or(Errno::STALE)?.commit)
    }

    /// Looks at all of it.
    pub fn view<S: DeserializeOwned, A: DeserializeOwned>(&self) -> Result<NamesView<S, A>, Errno> {
        let names = self.dir().names()?;
        let with = |prefix: &str| -> BTreeSet<String> {
            let found = names.iter().filter_map(|name| name.strip_prefix(prefix));
            found.map(Into::into).collect()
        };
        let has_event = names.contains(EVENT);
        let joined = with("in-");
        let mut states = BTreeMap::new();
        for host in joined.intersection(&with(STATE)).cloned() {
            if let Some(state) = self.dir().read_json(&format!("{STATE}{host}"))? {
                states.insert(host, state);
            }
        }
        let attempt = match last_attempt(&names) {
            Some(number) => self.attempt(number, &names)?,
            None => None,
        };
        Ok(NamesView {
            joined,
            left: with("left-"),
            states,
            has_event,
            attempt,
            decision: self.decision()?,
        })
    }

    fn attempt<A: DeserializeOwned>(
        &self,
        number: u64,
        names: &BTreeSet<String>,
    ) -> Result<Option<NamesAttempt<A>>, Errno> {
        let Some(content) = self.dir().read_json(&format!("{TRY}{number}"))? else {
            return Ok(None);
        };
        let prefix = format!("{LIST}{number}-");
        let published = names.iter().filter_map(|name| name.strip_prefix(&prefix));
        Ok(Some(NamesAttempt {
            number,
            content,
            published: published.map(Into::into).collect(),
            verdict: self.dir().read_json(&format!("{VERDICT}{number}"))?,
        }))
    }

    /// Says that the event has come.
    pub fn put_event(&self, content: &impl Serialize) -> Result<(), Errno> {
        self.dir().put_json(EVENT, content).map(drop)
    }

    /// What the host says that has seen the event.
    pub fn event<E: DeserializeOwned>(&self) -> Result<Option<E>, Errno> {
        self.dir().read_json(EVENT)
    }

    /// Says how this host's part is.
    pub fn put_state(&self, state: &impl Serialize) -> Result<(), Errno> {
        let bytes = serde_json::to_vec(state).expect("plain data");
        let name = self.dir().own_file(STATE);
        staging::store(self.base, self.dir().dir(), &name, &bytes)
    }

    /// Begins an attempt, unless there is one of this number.
    pub fn put_attempt(&self, number: u64, content: &impl Serialize) -> Result<(), Errno> {
        self.dir()
            .put_json(&format!("{TRY}{number}"), content)
            .map(drop)
    }

    /// Publishes this host's part.
    pub(crate) fn publish(&self, number: u64, list: &Published) -> Result<(), Errno> {
        let name = self.dir().own_file(&format!("{LIST}{number}-"));
        self.dir().put_once(&name, &list.encode()).map(drop)
    }

    /// The verdict on an attempt, which is this one if there is none.
    pub fn judge(&self, number: u64, verdict: &Verdict) -> Result<Option<Verdict>, Errno> {
        let name = format!("{VERDICT}{number}");
        self.dir().put_json(&name, verdict)?;
        self.dir().read_json(&name)
    }

    /// Says that an attempt has failed.
    pub fn give_up(&self, number: u64, why: String) -> Result<(), Errno> {
        let by = self.dir().host().to_owned();
        self.judge(number, &Verdict::GivenUp { by, why }).map(drop)
    }

    /// Whether the published parts of hosts go together.
    pub fn test(&self, number: u64, hosts: &BTreeSet<String>) -> Result<Verdict, VoteError> {
        let mut lists = Vec::new();
        for host in hosts {
            let bytes = self.dir().read(&format!("{LIST}{number}-{host}"))?;
            let list = Published::decode(&bytes.unwrap_or_default());
            let list = list.map_err(|source| VoteError::Published {
                host: host.clone(),
                source,
            })?;
            lists.push(list);
        }
        let report = crate::conflict::test(&lists);
        Ok(match report.total {
            0 => Verdict::Clear,
            _ => Verdict::Conflict(report),
        })
    }

    /// After an abort, where all other hosts have left or are gone: removes the directory. A host that comes back finds no
    /// decision, and undoes its part.
    pub fn remove_aborted(&self, gone: &BTreeSet<String>) -> Result<(), Errno> {
        let view = match self.ballot.view() {
            Err(errno) if is_gone(errno) => return Ok(()),
            view => view?,
        };
        let is_aborted = view
            .decision
            .as_ref()
            .is_some_and(|outcome| !outcome.commit);
        let remaining = view.remaining();
        if is_aborted && remaining.iter().all(|host| gone.contains(host)) {
            let mut retire = || self.dir().retire();
            match self.ballot.do_alone(&mut retire) {
                Err(errno) if !is_gone(errno) => return Err(errno),
                _ => {}
            }
        }
        Ok(())
    }
}

fn last_attempt(names: &BTreeSet<String>) -> Option<u64> {
    let numbers = names
        .iter()
        .filter_map(|name| name.strip_prefix(TRY)?.parse().ok());
    numbers.max()
}
