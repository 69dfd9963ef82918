//! What several hosts in one shadow transaction share: what is saved, and how it ends.
//!
//! ```text
//! .firn/shadow[-SCOPE]/    one transaction, a [`Ballot`]; SCOPE stands for the path of the scope, as in the name of a vote
//!   scope                  the path itself
//!   saved/, kept/          as in the directory of a transaction of one host
//!   decision               JSON: commit or abort, and which host said so
//! ```
//!
//! A host that takes part may change things. After an abort all hosts stop, one of them undoes (the unit of work `undo`),
//! and then each leaves. After a commit each host leaves when it has applied its part.
//!
//! Invariants, beside those of a ballot
//! * Only the host that claimed `undo`, or one that replaces it and has locked its directory, undoes anything.

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Backing, Errno, RenameFlags, is_below};
use firn_hosts::{Ballot, Joined, Members, Plan, Progress, Protocol, Unit, VoteDir};

use super::{KEPT, SAVED, SHARED, Shadow};
use crate::change_log::ChangeLog;
use crate::error::{AbortError, BeginError, OpenError, StageError, StoreError, VoteError};
use crate::recovery::Recovery;
use crate::scope::{Scope, Stage};
use crate::scopes::Scopes;
use crate::staging;
use crate::staging_dir::Home;
use crate::transactional::TransactionalBacking;
use crate::vote::{Outcome, scoped_name};

const DIR: &str = "shadow";
const SCOPE: &str = "scope";
/// The unit of work after an abort.
const UNDO: &str = "undo";

/// How a shadow transaction ends.
pub(crate) struct ShadowEnd;

impl Protocol for ShadowEnd {
    type Decision = Outcome;

    fn plan(&self, outcome: &Outcome) -> Plan {
        if outcome.commit {
            return Plan::default();
        }
        Plan {
            stops_first: true,
            stages: vec![vec![Unit::Part(UNDO.to_owned())]],
        }
    }
}

/// The directory that the hosts of a shadow transaction share.
pub(crate) struct SharedDir<'a, B: Backing> {
    base: &'a B,
    ballot: Ballot<'a, B, ShadowEnd>,
}

impl<B: Backing> SharedDir<'_, B> {
    fn dir(&self) -> &B::Inode {
        self.ballot.dir().dir()
    }

    fn name(&self) -> &str {
        self.ballot.dir().name()
    }

    pub(crate) fn outcome(&self) -> Result<Option<Outcome>, Errno> {
        self.ballot.decision()
    }

    /// Hosts that have begun.
    pub(crate) fn joined(&self) -> Result<Vec<String>, Errno> {
        self.ballot.joined()
    }

    /// The outcome, which is this one if there is none.
    pub(crate) fn settle(&self, commit: bool) -> Result<Outcome, Errno> {
        let by = self.ballot.dir().host().to_owned();
        self.ballot
            .decide(&Outcome { commit, by })?
            .ok_or(Errno::IO)
    }

    /// Marks this host as stopped. Returns when the changes are undone, by `undo` if this host must.
    fn stop(&self, mut undo: impl FnMut() -> Result<(), StoreError>) -> Result<(), AbortError> {
        let progress = self.ballot.carry_out(|_| {
            undo()?;
            self.clear_kept().map_err(AbortError::from)
        })?;
        match progress {
            Progress::Done | Progress::Gone => Ok(()),
            Progress::Waits(waiting) => Err(AbortError::Stopping {
                hosts: waiting.hosts(),
            }),
        }
    }

    /// Objects that are back in place have one link too many in `kept`. A repeated undo does not need it.
    fn clear_kept(&self) -> Result<(), StoreError> {
        if let Some((kept, _)) = staging::find_dir(self.base, self.dir(), KEPT)? {
            staging::clear(self.base, &kept)?;
            self.base.sync_dir(&kept)?;
        }
        Ok(())
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

/// What several hosts in one transaction in shadow mode share.
pub struct SharedTransactions<B: Backing> {
    pub(crate) home: Arc<Home<B>>,
}

impl<B: Backing> SharedTransactions<B> {
    pub(crate) fn new(home: &Arc<Home<B>>) -> Self {
        Self {
            home: Arc::clone(home),
        }
    }

    fn find_shared_dir(&self, name: &str) -> Result<Option<SharedDir<'_, B>>, Errno> {
        let Some(members) = &self.home.members else {
            return Ok(None);
        };
        let Some(top) = self.home.find_top()? else {
            return Ok(None);
        };
        let found = VoteDir::find(&self.home.base, &top, name, &members.host)?;
        Ok(found.map(|vote| self.shared_dir(vote)))
    }

    fn shared_dir<'a>(&'a self, vote: VoteDir<'a, B>) -> SharedDir<'a, B> {
        SharedDir {
            base: &self.home.base,
            ballot: Ballot::in_dir(vote, ShadowEnd),
        }
    }

    /// The shared directory of a scope; `None` if this host takes no part in a shared transaction there.
    pub(crate) fn find_shared(&self, scope: &[u8]) -> Result<Option<SharedDir<'_, B>>, Errno> {
        let Some(shared) = self.find_shared_dir(&scoped_name(DIR, scope))? else {
            return Ok(None);
        };
        match shared.ballot.is_taking_part() {
            Ok(has_joined) => Ok(has_joined.then_some(shared)),
            Err(Errno::NOENT | Errno::STALE) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// The shared directories of all scopes.
    fn all_shared(&self) -> Result<Vec<SharedDir<'_, B>>, Errno> {
        let Some(top) = self.home.find_top()? else {
            return Ok(Vec::new());
        };
        let mut places = Vec::new();
        for (name, ..) in staging::list(&self.home.base, &top)? {
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
        staging::store(&self.home.base, dir, SHARED, b"")?;
        match self.join_shared(scope) {
            // Another host removed the directory meanwhile.
            Err(BeginError::Store(error)) if is_gone(&error) => {
                Err(BeginError::NotOver { hosts: Vec::new() })
            }
            other => other,
        }
    }

    fn join_shared(&self, scope: &[u8]) -> Result<(), BeginError> {
        let Some(members) = &self.home.members else {
            return Ok(());
        };
        let top = staging::dir(&self.home.base, &self.home.base.root(), staging::TOP)?;
        let name = scoped_name(DIR, scope);
        let shared = self.shared_dir(VoteDir::make(&self.home.base, &top, &name, &members.host)?);
        if shared.outcome()?.is_some() {
            return self.not_over(&shared);
        }
        shared.ballot.dir().put_once(SCOPE, scope)?;
        for name in [SAVED, KEPT] {
            staging::dir(&self.home.base, shared.dir(), name)?;
        }
        if shared.ballot.join(b"")? == Joined::Over {
            return self.not_over(&shared);
        }
        self.must_fit(members, &shared, scope)
            .inspect_err(|_| self.withdraw_from_hosts(scope))
    }

    fn not_over(&self, shared: &SharedDir<'_, B>) -> Result<(), BeginError> {
        shared.ballot.remove_if_over()?;
        let view = shared.ballot.view()?;
        let hosts = view.remaining();
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
            .filter(|other| other.name() != shared.name())
        {
            let path = match staging::load_scope(&self.home.base, other.dir(), SCOPE) {
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
            Some(shared) => shared.ballot.withdraw(),
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
        if staging::find(&self.home.base, dir, OsStr::new(SHARED))?.is_none() {
            return Shadow::find(&self.home.base, dir);
        }
        match self.find_shared(scope)? {
            Some(shared) => {
                Ok(Shadow::find(&self.home.base, shared.dir())?.map(Shadow::of_several))
            }
            None => Ok(None),
        }
    }

    /// This host has ended its part after a commit.
    pub(crate) fn leave_commit(&self, scope: &[u8]) -> Result<(), Errno> {
        match self.find_shared(scope)? {
            Some(shared) if shared.outcome()?.is_some_and(|outcome| outcome.commit) => {
                shared.ballot.leave()
            }
            _ => Ok(()),
        }
    }

    // ---- after a crash -----------------------------------------------------------------------

    /// Whether the transaction that `dir` is a part of was committed for all hosts.
    pub(crate) fn is_shared_commit(&self, dir: &B::Inode, scope: &[u8]) -> Result<bool, Errno> {
        if staging::find(&self.home.base, dir, OsStr::new(SHARED))?.is_none() {
            return Ok(false);
        }
        let Some(shared) = self.find_shared(scope)? else {
            return Ok(false);
        };
        Ok(shared.outcome()?.is_some_and(|outcome| outcome.commit))
    }

    /// After that: shared transactions in which this host has nothing to do any more are left.
    pub(crate) fn leave_shared_ones(&self, waiting: &[(u64, Vec<u8>)]) -> Result<(), OpenError> {
        for shared in self.all_shared()? {
            if waiting
                .iter()
                .any(|(_, scope)| scoped_name(DIR, scope) == shared.name())
            {
                continue;
            }
            match (shared.ballot.is_taking_part()?, shared.outcome()?) {
                (true, None) => shared.ballot.withdraw()?,
                // The host joined, and its firnd was killed before the transaction began.
                (true, Some(_)) => shared.ballot.leave_unchanged()?,
                (false, _) => shared.ballot.remove_if_over()?,
            }
        }
        if self.home.members.is_some()
            && let Some(top) = self.home.find_top()?
        {
            VoteDir::remove_retired(&self.home.base, &top)?;
        }
        Ok(())
    }
}

impl<B: Backing> Recovery<B> {
    /// Before anything else is recovered: shared transactions of this host that are not prepared are aborted, for
    /// all hosts, and what was decided about the others is noted. Nothing is done to what is not shared.
    pub(crate) fn recover_shared(&self, home: &B::Inode) -> Result<(), OpenError> {
        for (name, ..) in staging::list(&self.home.base, home)? {
            let text = String::from_utf8_lossy(&name).into_owned();
            if !text.starts_with("tx-") {
                continue;
            }
            let found = staging::must_find_dir(&self.home.base, home, &text);
            let dir = found.map_err(|error| error.below(&self.home.staging_path()))?;
            let has = |file| {
                Ok::<_, Errno>(staging::find(&self.home.base, &dir, OsStr::new(file))?.is_some())
            };
            if !has(SHARED)? || has(staging::COMMIT)? {
                continue;
            }
            let record = self.home.load_record(&dir, &text, staging::RECORD)?;
            let open = staging::load_scope(&self.home.base, &dir, staging::OPEN)?;
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
        let shared = self.shared.find_shared(scope)?;
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
                match record.map_or(Ok(()), |record| {
                    self.votes.decide_vote(record.id, scope, true)
                }) {
                    Ok(()) | Err(VoteError::NotVoted { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
                let from = OsStr::new(staging::RECORD);
                let to = OsStr::new(staging::COMMIT);
                self.home
                    .base
                    .rename(dir, from, dir, to, RenameFlags::empty())?;
                return Ok(self.home.base.sync_dir(dir)?);
            }
            // It was being opened again after the others had agreed.
            Fate::Committed => return Ok(self.home.base.unlink(dir, OsStr::new(staging::OPEN))?),
            Fate::Over => {}
            Fate::Aborted => {
                let shared = shared.as_ref().ok_or(Errno::IO)?;
                if shared.settle(false)?.commit {
                    return self.recover_part(dir, record, scope);
                }
                match &record {
                    None => self.votes.withdraw_from_votes(scope)?,
                    Some(record) => self.votes.decide_vote(record.id, scope, false)?,
                }
                shared.stop(|| {
                    self.shadow_undo
                        .undo_stored(shared.dir(), shared.name(), scope)
                })?;
            }
        }
        // From here on it counts as one that was open and is undone: there is nothing left to put back.
        if record.is_some() {
            self.home.base.unlink(dir, OsStr::new(staging::RECORD))?;
            self.home.base.sync_dir(dir)?;
        }
        Ok(())
    }
}

impl<B: Backing> Scopes<B> {
    /// Whether there may be something in [`TransactionalBacking::to_be_stopped`]; asks the backing nothing.
    pub fn shares(&self) -> bool {
        !self
            .paths_where(|scope| scope.shadow.as_ref().is_some_and(Shadow::is_of_several))
            .is_empty()
    }
}

impl<B: Backing> TransactionalBacking<B> {
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
        if let Some(shared) = self.shared.find_shared(&scope.path)? {
            let outcome = shared.settle(false)?;
            if outcome.commit {
                let id = id.unwrap_or_default();
                return Err(StageError::Decided { id }.into());
            }
            scope.stop_for_good();
            shadow.begin_undo();
            if outcome.by != shared.ballot.dir().host() {
                self.stopped_by
                    .lock()
                    .insert(scope.path.clone(), outcome.by);
            }
            // Hosts that wait for this one to publish need not wait any longer.
            match id {
                None => self.votes.withdraw_from_votes(&scope.path)?,
                Some(id) => self.votes.decide_vote(id, &scope.path, false)?,
            }
            let mut undone = false;
            shared.stop(|| {
                undone = true;
                self.shadow_undo.undo_shadow(scope, shadow)
            })?;
            if !undone {
                self.shadow_undo.see_undone(scope, shadow)?;
            }
        }
        self.home.forget_records(&scope.dir)?;
        if let Some(shared) = self.shared.find_shared(&scope.path)? {
            shared.ballot.leave()?;
        }
        Ok(())
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
                .shared
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
}
