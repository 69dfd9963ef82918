//! Ballots on scopes of names: several hosts write some names of one directory and commit them together.
//!
//! A transaction may cover only some names of a directory, for example `step-7.1` and `step-7.2`, and all below them:
//! this is its *scope of names*. The hosts identify it by a key. They try to commit in numbered attempts; each attempt
//! has a verdict, and the scope has one decision. A [`Ballot`] is a decision of several hosts by put-once files: the
//! first host creates such a file, and none changes it.
//!
//! ```text
//! .firn/names-HASH/        one scope, a [`Ballot`]; HASH stands for its key
//!   key                    the key, put once
//!   in-HOST                the host takes part; written before its first change
//!   event                  written once, JSON: the scope is complete; the content is for the other hosts
//!   state-HOST             JSON: the state of the host's part; replaced by each new state
//!   try-N                  written once, JSON: attempt N to commit, and the hosts in it
//!   list-N-HOST            written once: what the prepared part of the host changes ([`AccessList`])
//!   verdict-N              written once, JSON: whether the parts of attempt N conflict
//!   decision               written once, JSON: commit or abort, and the host that decided
//!   left-HOST              the host has carried the decision out
//! ```
//!
//! The caller chooses the contents of event, states and attempts, and when a host acts. This module maintains the
//! invariants.
//!
//! Invariants, in addition to those of a ballot
//! * A commit is decided only after a clear verdict on the parts of all hosts that take part.
//! * No host joins while an attempt is open.
//! * A prepared part counts as aborted if the directory is gone or the host does not take part in it. After a commit
//!   the directory remains until every host has left.
//!
//! Race: a host may join while another one starts an attempt. Each host looks again after its own write. A host that
//! wrote `in-HOST` and then sees an attempt withdraws. A host that wrote `try-N` and then sees a new host abandons the
//! attempt.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use firn_backing::{Backing, Errno};
use firn_hosts::{Ballot, Joined, Plan, Protocol, VoteDir};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::conflict::{AccessList, find_conflicts};
use crate::error::{StageError, VoteError};
use crate::lower_backing::LowerBacking;
use crate::staging;
use crate::vote::{JointDecision, Verdict};

/// Prefix of the name of a ballot's directory.
const BALLOT_PREFIX: &str = "names-";
/// Names of files; see the head of this file.
const KEY: &str = "key";
const EVENT: &str = "event";
/// Prefixes of the names of files, which a host or a number follows; see the head of this file.
const STATE_PREFIX: &str = "state-";
const ATTEMPT_PREFIX: &str = "try-";
const LIST_PREFIX: &str = "list-";
const VERDICT_PREFIX: &str = "verdict-";
const JOINED_PREFIX: &str = "in-";
const LEFT_PREFIX: &str = "left-";

/// Content of the file `in-HOST`. Only its name says something.
const JOINED_CONTENT: &[u8] = b"";

/// The protocol of a ballot's end: after the decision each host acts alone.
struct NamesEnd;

impl Protocol for NamesEnd {
    type Decision = JointDecision;

    fn plan(&self, _outcome: &JointDecision) -> Plan {
        Plan::default()
    }
}

/// Result of an attempt to take part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamesEntry {
    /// The host takes part.
    Joined,
    /// The host cannot join yet: the listed hosts have not left an earlier scope of the same key, or are in an open
    /// attempt.
    NotYet(Vec<String>),
}

/// The contents of a ballot at the time of one listing.
#[derive(Clone, Debug, Default)]
pub struct NamesView<S, A> {
    /// Hosts that take part.
    pub joined: BTreeSet<String>,
    /// Hosts that have carried the decision out.
    pub left: BTreeSet<String>,
    /// The state of each host's part.
    pub states: BTreeMap<String, S>,
    /// Whether a host has stored the event.
    pub has_event: bool,
    /// The last attempt to commit, if there was one.
    pub attempt: Option<NamesAttempt<A>>,
    /// The decision: `true` for a commit, `false` for an abort, `None` while there is none.
    pub decision: Option<bool>,
}

/// An attempt to commit.
#[derive(Clone, Debug)]
pub struct NamesAttempt<A> {
    /// Number of the attempt, counted from 1.
    pub number: u64,
    /// Content of `try-N`.
    pub content: A,
    /// Hosts that have published their part.
    pub published: BTreeSet<String>,
    /// The verdict on the published parts; `None` while there is none.
    pub verdict: Option<Verdict>,
}

/// The ballot on one scope of names.
pub struct NamesBallot<'a, B: Backing> {
    ballot: Ballot<'a, B, NamesEnd>,
    base: &'a B,
}

/// All ballots on scopes of names, as one of the hosts uses them.
pub struct NamesBallots<B: Backing> {
    lower: Arc<LowerBacking<B>>,
}

/// Returns the name of the ballot's directory: two checksums and the length of the key.
fn ballot_dir_name(key: &[u8]) -> String {
    let reversed_key: Vec<u8> = key.iter().rev().copied().collect();
    let len = key.len();
    format!(
        "{BALLOT_PREFIX}{:08x}{:08x}{len:x}",
        crc32c::crc32c(key),
        crc32c::crc32c(&reversed_key)
    )
}

/// Returns whether the error means that another host has removed the directory of the ballot.
fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::STALE)
}

impl<B: Backing> NamesBallots<B> {
    pub(crate) fn new(lower: &Arc<LowerBacking<B>>) -> Self {
        Self {
            lower: Arc::clone(lower),
        }
    }

    fn ballot_in_dir<'a>(&'a self, dir: VoteDir<'a, B>) -> NamesBallot<'a, B> {
        NamesBallot {
            ballot: Ballot::in_dir(dir, NamesEnd),
            base: &self.lower.base,
        }
    }

    /// Joins the scope with this key, before this host changes anything in it.
    ///
    /// Returns `Joined` at once on a mount of one host, and `NotYet` if the caller must try again later.
    pub(crate) fn join(&self, key: &[u8]) -> Result<NamesEntry, Errno> {
        match self.try_join(key) {
            // Another host is removing the directory of an earlier scope, so a later try succeeds.
            Err(errno) if is_gone(errno) => Ok(NamesEntry::NotYet(Vec::new())),
            joined => joined,
        }
    }

    /// Joins the ballot, by which several hosts commit some names of one directory together. `key` identifies it. Fails
    /// with ENOENT or ESTALE if another host removes the ballot's directory in the backing meanwhile.
    ///
    /// Returns `NotYet` with the hosts to wait for if an attempt to commit is open or the ballot is over.
    fn try_join(&self, key: &[u8]) -> Result<NamesEntry, Errno> {
        let Some(members) = &self.lower.members else {
            return Ok(NamesEntry::Joined);
        };
        let base = &self.lower.base;
        let firn_dir = staging::make_dir(base, &base.root(), staging::FIRN_DIR)?;
        let dir = VoteDir::make(base, &firn_dir, &ballot_dir_name(key), &members.host)?;
        // Only the first host's key is stored.
        dir.put_once(KEY, key)?;
        // Another key has the same directory name. Both cannot be in use at the same time.
        if dir.read(KEY)?.as_deref() != Some(key) {
            return Err(Errno::BUSY);
        }
        let names_ballot = self.ballot_in_dir(dir);
        let ballot = &names_ballot.ballot;
        // All hosts of the open attempt must end it first.
        if names_ballot.has_open_attempt()? {
            return Ok(NamesEntry::NotYet(ballot.joined()?));
        }
        // The hosts that have not carried out the last decision must do so first.
        if ballot.join(JOINED_CONTENT)? == Joined::Over {
            ballot.remove_if_over()?;
            let view = ballot.view()?;
            return Ok(NamesEntry::NotYet(view.remaining()));
        }
        // An attempt may have started between the first check and the join. The host that starts one looks for new
        // hosts afterwards, so at least one of the two hosts sees the other.
        if names_ballot.has_open_attempt()? {
            ballot.withdraw()?;
            return Ok(NamesEntry::NotYet(ballot.joined()?));
        }
        Ok(NamesEntry::Joined)
    }

    /// Returns the ballot on the scope with this key. Returns `None` if this host does not take part in it.
    pub fn find(&self, key: &[u8]) -> Result<Option<NamesBallot<'_, B>>, Errno> {
        let Some(ballot) = self.find_in_dir(&ballot_dir_name(key))? else {
            return Ok(None);
        };
        match ballot.ballot.is_taking_part() {
            Ok(true) => Ok(Some(ballot)),
            Ok(false) => Ok(None),
            Err(errno) if is_gone(errno) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Returns the ballot whose directory has this name, even if this host does not take part in it. Returns `None` if
    /// there is none, or on a mount of one host.
    fn find_in_dir(&self, dir_name: &str) -> Result<Option<NamesBallot<'_, B>>, Errno> {
        let Some(members) = &self.lower.members else {
            return Ok(None);
        };
        let Some(firn_dir) = self.lower.find_firn_dir()? else {
            return Ok(None);
        };
        let dir = VoteDir::find(&self.lower.base, &firn_dir, dir_name, &members.host)?;
        Ok(dir.map(|dir| self.ballot_in_dir(dir)))
    }

    /// Removes the ballot of an aborted scope if all hosts that have not left are in `gone_hosts`.
    pub fn remove_aborted(&self, key: &[u8], gone_hosts: &BTreeSet<String>) -> Result<(), Errno> {
        let Some(ballot) = self.find_in_dir(&ballot_dir_name(key))? else {
            return Ok(());
        };
        match ballot.remove_aborted(gone_hosts) {
            Err(errno) if !is_gone(errno) => Err(errno),
            _ => Ok(()),
        }
    }

    /// Aborts a scope without a decision, and returns whether the scope is committed.
    ///
    /// A scope in which this host does not take part counts as aborted.
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

    /// Withdraws this host, which has changed nothing yet. A failure is logged.
    pub(crate) fn withdraw(&self, key: &[u8]) {
        let withdrawn = match self.find(key) {
            Ok(Some(ballot)) => ballot.ballot.withdraw(),
            found => found.map(drop),
        };
        if let Err(errno) = withdrawn {
            tracing::warn!(%errno, "cannot withdraw this host from a commit: other hosts wait for it until firnd \
                starts here again");
        }
    }

    /// Records that this host has carried the decision out. The last host removes the directory; a repeated call
    /// completes an interrupted removal.
    pub(crate) fn leave(&self, key: &[u8]) -> Result<(), Errno> {
        let Some(NamesBallot { ballot, .. }) = self.find_in_dir(&ballot_dir_name(key))? else {
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

    /// After a crash, ends this host's part in all ballots, by which hosts commit names together. The caller has
    /// recovered this host's transactions, so it has none left. Does nothing on a mount of one host.
    pub(crate) fn leave_all(&self) -> Result<(), Errno> {
        let (Some(members), Some(firn_dir)) = (&self.lower.members, self.lower.find_firn_dir()?)
        else {
            return Ok(());
        };
        for (name, ..) in staging::list(&self.lower.base, &firn_dir)? {
            let name = String::from_utf8_lossy(&name).into_owned();
            if !name.starts_with(BALLOT_PREFIX) {
                continue;
            }
            let found = VoteDir::find(&self.lower.base, &firn_dir, &name, &members.host)?;
            let Some(dir) = found else {
                continue;
            };
            match self.ballot_in_dir(dir).end_part() {
                // Another host may have removed the ballot meanwhile.
                Err(errno) if !is_gone(errno) => return Err(errno),
                _ => {}
            }
        }
        Ok(())
    }
}

impl<B: Backing> NamesBallot<'_, B> {
    /// After a crash, aborts the scope unless it is decided, and leaves it.
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

    /// Returns whether the last attempt may still lead to a commit: it has no verdict or a clear one.
    fn has_open_attempt(&self) -> Result<bool, Errno> {
        let file_names = self.dir().names()?;
        let Some(number) = last_attempt(&file_names) else {
            return Ok(false);
        };
        let verdict = self.read_verdict(number)?;
        Ok(matches!(verdict, None | Some(Verdict::Clear)))
    }

    /// Returns the decision: `true` for a commit, `false` for an abort, `None` while there is none.
    pub fn decision(&self) -> Result<Option<bool>, Errno> {
        let decision = self.ballot.decision()?;
        Ok(decision.map(|decision| decision.commit))
    }

    /// Stores this decision unless there is one. Returns whether the decision that counts is a commit. Fails with
    /// ESTALE if the ballot was removed.
    pub fn settle(&self, commit: bool) -> Result<bool, Errno> {
        let host = self.dir().host().to_owned();
        let decision = self.ballot.decide(&JointDecision { commit, host })?;
        Ok(decision.ok_or(Errno::STALE)?.commit)
    }

    /// Reads what all hosts have stored in this ballot, by which they commit names together. The state of a host is
    /// decoded from JSON as a `State`, and the content of an attempt to commit as an `Attempt`.
    ///
    /// The files that exist say which hosts have joined or left, and whether the scope is complete (`has_event`).
    pub fn view<State: DeserializeOwned, Attempt: DeserializeOwned>(
        &self,
    ) -> Result<NamesView<State, Attempt>, Errno> {
        let file_names = self.dir().names()?;
        let joined = suffixes_after(JOINED_PREFIX, &file_names);
        let hosts_with_state = suffixes_after(STATE_PREFIX, &file_names);
        let mut states = BTreeMap::new();
        for host in joined.intersection(&hosts_with_state) {
            if let Some(state) = self.dir().read_json(&format!("{STATE_PREFIX}{host}"))? {
                states.insert(host.clone(), state);
            }
        }
        let attempt = match last_attempt(&file_names) {
            Some(number) => self.read_attempt(number, &file_names)?,
            None => None,
        };
        Ok(NamesView {
            joined,
            left: suffixes_after(LEFT_PREFIX, &file_names),
            states,
            has_event: file_names.contains(EVENT),
            attempt,
            decision: self.decision()?,
        })
    }

    /// Reads the attempt with this number. `file_names` are all names in the ballot's directory.
    fn read_attempt<A: DeserializeOwned>(
        &self,
        number: u64,
        file_names: &BTreeSet<String>,
    ) -> Result<Option<NamesAttempt<A>>, Errno> {
        let Some(content) = self.dir().read_json(&format!("{ATTEMPT_PREFIX}{number}"))? else {
            return Ok(None);
        };
        Ok(Some(NamesAttempt {
            number,
            content,
            published: suffixes_after(&format!("{LIST_PREFIX}{number}-"), file_names),
            verdict: self.read_verdict(number)?,
        }))
    }

    /// Reads the verdict on the attempt with this number; `None` while there is none.
    fn read_verdict(&self, number: u64) -> Result<Option<Verdict>, Errno> {
        self.dir().read_json(&format!("{VERDICT_PREFIX}{number}"))
    }

    /// Stores the event unless there is one.
    pub fn put_event(&self, content: &impl Serialize) -> Result<(), Errno> {
        self.dir().put_json(EVENT, content).map(drop)
    }

    /// Returns the stored event; `None` if there is none.
    pub fn event<E: DeserializeOwned>(&self) -> Result<Option<E>, Errno> {
        self.dir().read_json(EVENT)
    }

    /// Replaces the state of this host's part.
    pub fn put_state(&self, state: &impl Serialize) -> Result<(), Errno> {
        let bytes = serde_json::to_vec(state).expect("plain data");
        let name = self.dir().own_file(STATE_PREFIX);
        staging::replace_file(self.base, self.dir().dir(), &name, &bytes)
    }

    /// Starts an attempt with this number, unless there is one.
    pub fn put_attempt(&self, number: u64, content: &impl Serialize) -> Result<(), Errno> {
        self.dir()
            .put_json(&format!("{ATTEMPT_PREFIX}{number}"), content)
            .map(drop)
    }

    /// Publishes the list of what this host's part changes, for the attempt with this number.
    pub(crate) fn publish(&self, number: u64, list: &AccessList) -> Result<(), Errno> {
        let name = self.dir().own_file(&format!("{LIST_PREFIX}{number}-"));
        self.dir().put_once(&name, &list.encode()).map(drop)
    }

    /// Stores `verdict` on an attempt unless there is one, and returns the verdict that counts.
    pub fn judge(&self, number: u64, verdict: &Verdict) -> Result<Option<Verdict>, Errno> {
        self.dir()
            .put_json(&format!("{VERDICT_PREFIX}{number}"), verdict)?;
        self.read_verdict(number)
    }

    /// Ends an attempt without a commit, unless it has a verdict already. `reason` is a text for people.
    pub fn give_up(&self, number: u64, reason: String) -> Result<(), Errno> {
        let by = self.dir().host().to_owned();
        self.judge(number, &Verdict::GivenUp { by, reason })
            .map(drop)
    }

    /// Tests the published parts of these hosts for conflicts, and returns the verdict. Does not store it.
    pub fn test(&self, number: u64, hosts: &BTreeSet<String>) -> Result<Verdict, VoteError> {
        let mut lists = Vec::new();
        for host in hosts {
            let bytes = self
                .dir()
                .read(&format!("{LIST_PREFIX}{number}-{host}"))?
                .unwrap_or_default();
            let list = AccessList::decode(&bytes).map_err(|source| VoteError::AccessList {
                host: host.clone(),
                source,
            })?;
            lists.push(list);
        }
        Ok(Verdict::from_report(find_conflicts(&lists)))
    }

    /// Removes the ballot's directory after an abort if all hosts that have not left it are in `gone_hosts`. Otherwise,
    /// and if another host has removed the directory, does nothing.
    ///
    /// A host that comes back later finds no ballot, which counts as an abort, and undoes its part.
    pub fn remove_aborted(&self, gone_hosts: &BTreeSet<String>) -> Result<(), Errno> {
        let view = match self.ballot.view() {
            Err(errno) if is_gone(errno) => return Ok(()),
            view => view?,
        };
        let is_aborted = view
            .decision
            .as_ref()
            .is_some_and(|decision| !decision.commit);
        let all_are_gone = view
            .remaining()
            .iter()
            .all(|host| gone_hosts.contains(host));
        if !(is_aborted && all_are_gone) {
            return Ok(());
        }
        // Other hosts see either the whole directory or nothing.
        let mut remove_dir = || self.dir().retire();
        match self.ballot.run_exclusively(&mut remove_dir) {
            Err(errno) if !is_gone(errno) => Err(errno),
            // It is removed, here or by another host, or another host holds the ballot's lock.
            _ => Ok(()),
        }
    }
}

/// Returns the number of the last attempt; `None` if there was none. `file_names` are all names in a ballot's
/// directory.
fn last_attempt(file_names: &BTreeSet<String>) -> Option<u64> {
    file_names
        .iter()
        .filter_map(|name| name.strip_prefix(ATTEMPT_PREFIX)?.parse().ok())
        .max()
}

/// Returns what follows the prefix in the names that begin with it, for example the hosts of files `in-HOST`.
fn suffixes_after(prefix: &str, file_names: &BTreeSet<String>) -> BTreeSet<String> {
    file_names
        .iter()
        .filter_map(|name| name.strip_prefix(prefix))
        .map(str::to_owned)
        .collect()
}
