//! What several hosts in one shadow transaction share: what is saved, and how it ends.
//!
//! ```text
//! .firn/shadow[-SCOPE]/    one transaction; SCOPE stands for the path of the scope, as in the name of a vote
//!   scope                  the path itself
//!   saved/, kept/          as in the directory of a transaction of one host
//!   in-HOST                the host has begun; it may change things from now on
//!   outcome                JSON: commit or abort, and who said so; put once
//!   out-HOST               aborted: the host changes nothing any more
//!   undoer                 JSON: the host that undoes, after all are out; put once
//!   undone                 all is as it was
//!   left-HOST              the host has ended its part
//!   remover                JSON: the host that takes the directory away, after all have left; put once
//! ```
//!
//! Invariants
//! * Only the undoer, or a host that replaces it and has locked its directory, undoes anything: after every `in-HOST` has an
//!   `out-HOST`, not after `undone`, and never if the outcome is a commit.
//! * A host leaves after a commit or after `undone`, and none begins before all have left.
//! * A host that writes `in-HOST` and then finds no outcome is found by any host that puts one.

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Backing, Errno, RenameFlags, is_below};
use firn_hosts::{Members, VoteDir};

use super::{KEPT, SAVED, SHARED, Shadow};
use crate::change_log::ChangeLog;
use crate::error::{AbortError, BeginError, OpenError, StageError, StoreError, VoteError};
use crate::scope::{Scope, Stage};
use crate::staging;
use crate::transactional::TransactionalBacking;
use crate::vote::{Outcome, scoped_name};

const DIR: &str = "shadow";
const SCOPE: &str = "scope";
const IN: &str = "in-";
const OUT: &str = "out-";
const LEFT: &str = "left-";
const OUTCOME: &str = "outcome";
const UNDOER: &str = "undoer";
const UNDONE: &str = "undone";
const REMOVER: &str = "remover";

/// The directory that the hosts of a shadow transaction share.
pub(crate) struct SharedDir<'a, B: Backing> {
    base: &'a B,
    vote: VoteDir<'a, B>,
}

impl<B: Backing> SharedDir<'_, B> {
    pub(crate) fn outcome(&self) -> Result<Option<Outcome>, Errno> {
        self.vote.read_json(OUTCOME)
    }

    /// Hosts that have begun.
    pub(crate) fn joined(&self) -> Result<Vec<String>, Errno> {
        self.vote.hosts(IN)
    }

    /// Hosts that have begun and have no file of the kind `prefix`.
    fn joined_without(&self, prefix: &str) -> Result<Vec<String>, Errno> {
        self.vote.hosts_without(IN, prefix)
    }

    /// Whether this host has begun and not ended its part.
    fn has_joined(&self) -> Result<bool, Errno> {
        let names = self.vote.names()?;
        let has = |prefix| names.contains(&self.vote.own_file(prefix));
        Ok(has(IN) && !has(LEFT))
    }

    /// The outcome, which is this one if there is none.
    pub(crate) fn settle(&self, commit: bool) -> Result<Outcome, Errno> {
        let by = self.vote.host().to_owned();
        self.vote.put_json(OUTCOME, &Outcome { commit, by })?;
        self.outcome()?.ok_or(Errno::IO)
    }

    /// Declares that this host changes nothing any more. When it returns everything is undone, if need be by `undo`.
    fn stop(&self, undo: impl FnOnce() -> Result<(), StoreError>) -> Result<(), AbortError> {
        self.vote.put_once(&self.vote.own_file(OUT), b"")?;
        if self.vote.names()?.contains(UNDONE) {
            return Ok(());
        }
        let hosts = self.joined_without(OUT)?;
        if !hosts.is_empty() {
            return Err(AbortError::Stopping { hosts });
        }
        let undoer = self.claim(UNDOER)?.ok_or(Errno::IO)?;
        if undoer != self.vote.host() {
            return Err(AbortError::Stopping {
                hosts: vec![undoer],
            });
        }
        undo()?;
        // Objects that are back in place have one link too many there. A repeated undo does not need it.
        if let Some((kept, _)) = staging::find_dir(self.base, self.vote.dir(), KEPT)? {
            staging::clear(self.base, &kept)?;
            self.base.sync_dir(&kept)?;
        }
        self.vote.put_once(UNDONE, b"")?;
        Ok(())
    }

    /// Claims a task that one host does; returns the host that has it.
    fn claim(&self, task: &str) -> Result<Option<String>, Errno> {
        self.vote.put_json(task, &self.vote.host())?;
        self.vote.read_json(task)
    }

    /// Records that this host has ended its part. The last host removes the directory.
    fn leave(&self) -> Result<(), Errno> {
        self.vote.put_once(&self.vote.own_file(LEFT), b"")?;
        self.remove_if_over()
    }

    fn is_over(&self) -> Result<bool, Errno> {
        let is_decided = match self.outcome()? {
            None => return Ok(false),
            Some(outcome) => outcome.commit || self.vote.names()?.contains(UNDONE),
        };
        // A host that joined and then found an outcome withdraws by itself.
        Ok(is_decided && self.joined_without(LEFT)?.is_empty())
    }

    fn remove_if_over(&self) -> Result<(), Errno> {
        let remove = || {
            if !self.is_over()? {
                return Ok(());
            }
            let remover = self.claim(REMOVER)?;
            // Removed by name: the next transaction may have made its directory already.
            if remover.as_deref() != Some(self.vote.host()) || !self.vote.is_current()? {
                return Ok(());
            }
            self.vote.retire()
        };
        match remove() {
            // Another host is removing it, too.
            Err(Errno::NOENT | Errno::STALE) => Ok(()),
            other => other,
        }
    }
}

/// Whether another host has removed something meanwhile.
fn is_gone(error: &StoreError) -> bool {
    matches!(error.errno(), Some(Errno::NOENT | Errno::STALE))
}

fn overlap(one: &[u8], other: &[u8]) -> bool {
    is_below(one, other) || is_below(other, one)
}

/// What a host's stored transaction has come to.
enum Fate {
    /// The others do not know of it any more: it was undone.
    Over,
    Undecided,
    Committed,
    Aborted,
}

impl<B: Backing> TransactionalBacking<B> {
    fn find_shared_dir(&self, name: &str) -> Result<Option<SharedDir<'_, B>>, Errno> {
        let Some(members) = &self.members else {
            return Ok(None);
        };
        let Some(top) = self.find_top()? else {
            return Ok(None);
        };
        let found = VoteDir::find(&self.base, &top, name, &members.host)?;
        Ok(found.map(|vote| self.shared_dir(vote)))
    }

    fn shared_dir<'a>(&'a self, vote: VoteDir<'a, B>) -> SharedDir<'a, B> {
        SharedDir {
            base: &self.base,
            vote,
        }
    }

    /// The shared directory of a scope; `None` if this host takes no part in a shared transaction there.
    pub(crate) fn find_shared(&self, scope: &[u8]) -> Result<Option<SharedDir<'_, B>>, Errno> {
        let Some(shared) = self.find_shared_dir(&scoped_name(DIR, scope))? else {
            return Ok(None);
        };
        match shared.has_joined() {
            Ok(has_joined) => Ok(has_joined.then_some(shared)),
            Err(Errno::NOENT | Errno::STALE) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// The shared directories of all scopes.
    fn all_shared(&self) -> Result<Vec<SharedDir<'_, B>>, Errno> {
        let Some(top) = self.find_top()? else {
            return Ok(Vec::new());
        };
        let mut places = Vec::new();
        for (name, ..) in staging::list(&self.base, &top)? {
            let name = String::from_utf8_lossy(&name).into_owned();
            if name == DIR
                || name
                    .strip_prefix(DIR)
                    .is_some_and(|rest| rest.starts_with('-'))
            {
                places.extend(self.find_shared_dir(&name)?);
            }
        }
        Ok(places)
    }

    /// The host takes part from now on in the transaction of a scope, which is made if it is the first. `dir` is its
    /// own part.
    pub(crate) fn join_hosts(&self, dir: &B::Inode, scope: &[u8]) -> Result<(), BeginError> {
        staging::store(&self.base, dir, SHARED, b"")?;
        match self.join_shared(scope) {
            // Another host removed the directory meanwhile.
            Err(BeginError::Store(error)) if is_gone(&error) => {
                Err(BeginError::NotOver { hosts: Vec::new() })
            }
            other => other,
        }
    }

    fn join_shared(&self, scope: &[u8]) -> Result<(), BeginError> {
        let Some(members) = &self.members else {
            return Ok(());
        };
        let top = staging::dir(&self.base, &self.base.root(), staging::TOP)?;
        let name = scoped_name(DIR, scope);
        let shared = self.shared_dir(VoteDir::make(&self.base, &top, &name, &members.host)?);
        if shared.outcome()?.is_some() {
            return self.not_over(&shared);
        }
        shared.vote.put_once(SCOPE, scope)?;
        for name in [SAVED, KEPT] {
            staging::dir(&self.base, shared.vote.dir(), name)?;
        }
        shared.vote.put_once(&shared.vote.own_file(IN), b"")?;
        if shared.outcome()?.is_some() || !shared.vote.is_current()? {
            shared.vote.withdraw(IN)?;
            return self.not_over(&shared);
        }
        self.must_fit(members, &shared, scope)
            .inspect_err(|_| self.withdraw_from_hosts(scope))
    }

    fn not_over(&self, shared: &SharedDir<'_, B>) -> Result<(), BeginError> {
        shared.remove_if_over()?;
        let mut hosts = shared.joined_without(LEFT)?;
        if hosts.is_empty() {
            hosts.extend(shared.vote.read_json::<String>(REMOVER)?);
        }
        Err(BeginError::NotOver { hosts })
    }

    /// Fails if more hosts than expected take part, or another transaction overlaps this one.
    fn must_fit(
        &self,
        members: &Members,
        shared: &SharedDir<'_, B>,
        scope: &[u8],
    ) -> Result<(), BeginError> {
        let joined = shared.joined()?;
        if members.are_too_many(joined.len()) {
            return Err(BeginError::TooManyHosts { hosts: joined });
        }
        for other in self
            .all_shared()?
            .iter()
            .filter(|other| other.vote.name() != shared.vote.name())
        {
            let path = match staging::load_scope(&self.base, other.vote.dir(), SCOPE) {
                Ok(Some(path)) => path,
                Ok(None) => continue,
                Err(error) if is_gone(&error) => continue,
                Err(error) => return Err(error.into()),
            };
            match other.joined() {
                Ok(joined) if !joined.is_empty() => {}
                Ok(_) | Err(Errno::NOENT | Errno::STALE) => continue,
                Err(errno) => return Err(errno.into()),
            }
            if overlap(&path, scope) {
                return Err(BeginError::Overlaps {
                    scope: path.as_slice().into(),
                });
            }
        }
        Ok(())
    }

    /// Withdraws from the transaction of a scope after a begin that failed: this host has changed nothing.
    pub(crate) fn withdraw_from_hosts(&self, scope: &[u8]) {
        let withdrawn = self.find_shared(scope).and_then(|shared| match shared {
            Some(shared) => shared.vote.withdraw(IN),
            None => Ok(()),
        });
        match withdrawn {
            Ok(()) => {}
            Err(errno) => {
                tracing::warn!(%errno, "other hosts wait for this one until its next start")
            }
        }
    }

    /// What a transaction has saved: in its own directory, or in the one that all hosts share.
    pub(crate) fn shadow_of(
        &self,
        dir: &B::Inode,
        scope: &[u8],
    ) -> Result<Option<Shadow<B>>, Errno> {
        if staging::find(&self.base, dir, OsStr::new(SHARED))?.is_none() {
            return Shadow::find(&self.base, dir);
        }
        match self.find_shared(scope)? {
            Some(shared) => {
                Ok(Shadow::find(&self.base, shared.vote.dir())?.map(Shadow::of_several))
            }
            None => Ok(None),
        }
    }

    /// For [`Found::abort`](crate::Found::abort): the transaction of all hosts. Fails with [`AbortError::Stopping`] until all have stopped
    /// and it is undone. The caller holds names and data.
    pub(crate) fn abort_shared(
        &self,
        scope: &Arc<Scope<B>>,
        shadow: &Shadow<B>,
        stage: Stage,
    ) -> Result<(), AbortError> {
        let id = match stage {
            Stage::Prepared(id) => Some(id),
            Stage::Open => None,
            Stage::Decided(id) => return Err(StageError::Decided { id }.into()),
            Stage::Ended => return Err(StageError::NoTransaction.into()),
        };
        if let Some(shared) = self.find_shared(&scope.path)? {
            let outcome = shared.settle(false)?;
            if outcome.commit {
                let id = id.unwrap_or_default();
                return Err(StageError::Decided { id }.into());
            }
            scope.stop_for_good();
            shadow.begin_undo();
            if outcome.by != shared.vote.host() {
                self.stopped_by
                    .lock()
                    .insert(scope.path.clone(), outcome.by);
            }
            // Hosts that wait for this one to publish need not wait any longer.
            match id {
                None => self.withdraw_from_votes(&scope.path)?,
                Some(id) => self.decide_vote(id, &scope.path, false)?,
            }
            let mut undone = false;
            shared.stop(|| {
                undone = true;
                self.undo_shadow(scope, shadow)
            })?;
            if !undone {
                self.see_undone(scope, shadow)?;
            }
        }
        self.forget_records(&scope.dir)?;
        if let Some(shared) = self.find_shared(&scope.path)? {
            shared.leave()?;
        }
        Ok(())
    }

    /// This host has ended its part after a commit.
    pub(crate) fn leave_commit(&self, scope: &[u8]) -> Result<(), Errno> {
        match self.find_shared(scope)? {
            Some(shared) if shared.outcome()?.is_some_and(|outcome| outcome.commit) => {
                shared.leave()
            }
            _ => Ok(()),
        }
    }

    /// Whether there may be something in [`TransactionalBacking::to_be_stopped`]; asks the backing nothing.
    pub fn shares(&self) -> bool {
        !self
            .scopes
            .paths_where(|scope| scope.shadow.as_ref().is_some_and(Shadow::is_of_several))
            .is_empty()
    }

    /// Scopes whose transactions a host has aborted and this one has not ended: they are to be aborted.
    pub fn to_be_stopped(&self) -> Vec<Vec<u8>> {
        let is_shared = |shadow: &Shadow<B>| shadow.is_of_several();
        let scopes = self.scopes.paths_where(|scope| {
            scope.shadow.as_ref().is_some_and(is_shared)
                && !matches!(scope.stage(), Stage::Decided(_))
        });
        let is_aborted = |scope: &Vec<u8>| {
            let outcome = self
                .find_shared(scope)
                .and_then(|shared| shared.map_or(Ok(None), |shared| shared.outcome()));
            outcome
                .inspect_err(|errno| tracing::warn!(%errno, "cannot see what other hosts decided"))
        };
        scopes
            .into_iter()
            .filter(|scope| {
                is_aborted(scope).is_ok_and(|outcome| outcome.is_some_and(|one| !one.commit))
            })
            .collect()
    }

    /// Which other host aborted the last transaction of a scope.
    pub fn stopped_by(&self, scope: &[u8]) -> Option<String> {
        self.stopped_by.lock().get(scope).cloned()
    }

    // ---- after a crash -----------------------------------------------------------------------

    /// Whether the transaction that `dir` is a part of was committed for all hosts.
    pub(crate) fn is_shared_commit(&self, dir: &B::Inode, scope: &[u8]) -> Result<bool, Errno> {
        if staging::find(&self.base, dir, OsStr::new(SHARED))?.is_none() {
            return Ok(false);
        }
        let Some(shared) = self.find_shared(scope)? else {
            return Ok(false);
        };
        Ok(shared.outcome()?.is_some_and(|outcome| outcome.commit))
    }

    /// Before anything else is recovered: shared transactions of this host that are not prepared are aborted, for
    /// all hosts, and what was decided about the others is noted. Nothing is done to what is not shared.
    pub(crate) fn recover_shared(&self, home: &B::Inode) -> Result<(), OpenError> {
        for (name, ..) in staging::list(&self.base, home)? {
            let text = String::from_utf8_lossy(&name).into_owned();
            if !text.starts_with("tx-") {
                continue;
            }
            let found = staging::must_find_dir(&self.base, home, &text);
            let dir = found.map_err(|error| error.below(&self.staging_path()))?;
            let has =
                |file| Ok::<_, Errno>(staging::find(&self.base, &dir, OsStr::new(file))?.is_some());
            if !has(SHARED)? || has(staging::COMMIT)? {
                continue;
            }
            let record = self.load_record(&dir, &text, staging::RECORD)?;
            let open = staging::load_scope(&self.base, &dir, staging::OPEN)?;
            if let Some(scope) = record.as_ref().map(|record| record.scope.clone()).or(open) {
                self.recover_part(&dir, record, &scope)?;
            }
        }
        Ok(())
    }

    fn recover_part(
        &self,
        dir: &B::Inode,
        record: Option<ChangeLog>,
        scope: &[u8],
    ) -> Result<(), OpenError> {
        let shared = self.find_shared(scope)?;
        let fate = match &shared {
            None => Fate::Over,
            Some(shared) => match (shared.outcome()?, &record) {
                (None, Some(_)) => Fate::Undecided,
                (Some(outcome), _) if outcome.commit => Fate::Committed,
                _ => Fate::Aborted,
            },
        };
        match fate {
            Fate::Undecided => return Ok(()),
            Fate::Committed if record.is_some() => {
                // The vote may not have the outcome yet.
                match record.map_or(Ok(()), |record| self.decide_vote(record.id, scope, true)) {
                    Ok(()) | Err(VoteError::NotVoted { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
                let from = OsStr::new(staging::RECORD);
                let to = OsStr::new(staging::COMMIT);
                self.base.rename(dir, from, dir, to, RenameFlags::empty())?;
                return Ok(self.base.sync_dir(dir)?);
            }
            // It was being opened again after the others had agreed.
            Fate::Committed => return Ok(self.base.unlink(dir, OsStr::new(staging::OPEN))?),
            Fate::Over => {}
            Fate::Aborted => {
                let shared = shared.as_ref().ok_or(Errno::IO)?;
                if shared.settle(false)?.commit {
                    return self.recover_part(dir, record, scope);
                }
                match &record {
                    None => self.withdraw_from_votes(scope)?,
                    Some(record) => self.decide_vote(record.id, scope, false)?,
                }
                shared.stop(|| self.undo_stored(shared.vote.dir(), shared.vote.name(), scope))?;
            }
        }
        // From here on it counts as one that was open and is undone: there is nothing left to put back.
        if record.is_some() {
            self.base.unlink(dir, OsStr::new(staging::RECORD))?;
            self.base.sync_dir(dir)?;
        }
        Ok(())
    }

    /// After that: shared transactions in which this host has nothing to do any more are left.
    pub(crate) fn leave_shared_ones(&self, waiting: &[(u64, Vec<u8>)]) -> Result<(), OpenError> {
        for shared in self.all_shared()? {
            if waiting
                .iter()
                .any(|(_, scope)| scoped_name(DIR, scope) == shared.vote.name())
            {
                continue;
            }
            match (shared.has_joined()?, shared.outcome()?) {
                (true, None) => shared.vote.withdraw(IN)?,
                (false, _) => {}
                // It joined, and its firnd was killed before the transaction began.
                (true, Some(outcome)) => {
                    if !outcome.commit {
                        shared.vote.put_once(&shared.vote.own_file(OUT), b"")?;
                    }
                    shared.vote.put_once(&shared.vote.own_file(LEFT), b"")?;
                }
            }
            shared.remove_if_over()?;
        }
        if self.members.is_some()
            && let Some(top) = self.find_top()?
        {
            VoteDir::remove_retired(&self.base, &top)?;
        }
        Ok(())
    }
}
