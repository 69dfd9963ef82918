//! Transactions in shadow mode of several hosts: the saved old state and the decision, which all hosts share.
//!
//! In *shadow mode* changes go to the backing (the directory below the mount) at once, and an abort restores the old
//! state. The *scope* is the directory that the transaction covers. A [`Ballot`] is a decision of several hosts by
//! put-once files: the first host creates such a file, and none changes it.
//!
//! ```text
//! .firn/shadow[-SCOPE]/    one transaction, a [`Ballot`]; SCOPE stands for the scope's path, as in a vote's name
//!   scope                  the path itself
//!   saved/, kept/          as in the directory of a transaction of one host
//!   decision               JSON: commit or abort, and the host that decided
//! ```
//!
//! * A host that has joined may change the scope.
//! * After an abort all hosts stop first. Then one host undoes the changes of all hosts (the unit of work `undo`), and
//!   each host leaves.
//! * After a commit each host leaves when it has applied its part.
//!
//! Invariant, in addition to those of a ballot: changes are undone only by the host that claimed the unit `undo`. If
//! that host fails, another host may continue for it after it has locked the directory of the failed host.

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Backing, Errno, RenameFlags, is_below};
use firn_hosts::{Ballot, Joined, Members, Plan, Progress, Protocol, Unit, VoteDir};

use super::{KEPT, SAVED, SHARED, Shadow};
use crate::change_log::ChangeLog;
use crate::error::{AbortError, BeginError, OpenError, StageError, StoreError, VoteError};
use crate::lower_backing::LowerBacking;
use crate::recovery::Recovery;
use crate::scope::{Scope, Stage};
use crate::scopes::Scopes;
use crate::staging;
use crate::transactional::TransactionalBacking;
use crate::vote::{JointDecision, Proposal, scoped_name};

/// Name of the directory of a shared transaction. For a transaction that does not cover the whole backing, `-` and a
/// string for the path of its scope follow ([`scoped_name`]).
const DIR: &str = "shadow";
/// Name of the file with the path of the scope.
const SCOPE: &str = "scope";
/// Content of the file by which a host joins. Only its name says something.
const JOINED_CONTENT: &[u8] = b"";
/// Name of the unit of work that undoes an aborted transaction.
const UNDO: &str = "undo";

/// What the hosts do after the decision. After a commit they share no work. After an abort all hosts stop, and then one
/// host undoes the changes of all: the plan has one stage with one unit of work.
pub(crate) struct ShadowEnd;

impl Protocol for ShadowEnd {
    type Decision = JointDecision;

    /// Returns the work that the hosts share after this outcome.
    fn plan(&self, outcome: &JointDecision) -> Plan {
        if outcome.commit {
            return Plan::default();
        }
        // One unit of work, which one host does.
        let undo = Unit::Part(UNDO.to_owned());
        Plan {
            stops_first: true,
            stages: vec![vec![undo]],
        }
    }
}

/// The directory that the hosts of one shadow transaction share.
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

    /// Returns the decision; `None` if there is none yet.
    pub(crate) fn decision(&self) -> Result<Option<JointDecision>, Errno> {
        self.ballot.decision()
    }

    fn is_committed(&self) -> Result<bool, Errno> {
        Ok(self.decision()?.is_some_and(|outcome| outcome.commit))
    }

    /// Returns the hosts that have joined.
    pub(crate) fn joined_hosts(&self) -> Result<Vec<String>, Errno> {
        self.ballot.joined()
    }

    /// Stores this host's proposal as the decision unless there is a decision already, and returns the decision that
    /// counts.
    pub(crate) fn decide(&self, proposal: Proposal) -> Result<JointDecision, Errno> {
        self.ballot
            .decide(&proposal.into_decision(self.ballot.dir().host()))?
            .ok_or(Errno::IO)
    }

    /// Marks this host as stopped after an abort. Calls `undo` if this host claims the undo.
    ///
    /// Returns `Ok` once the changes of all hosts are undone. Returns `Stopping` while other hosts must act first.
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

    /// Empties `kept/` after an undo. Otherwise objects that have their old names back would count one link too many.
    fn clear_kept(&self) -> Result<(), StoreError> {
        if let Some((kept, _)) = staging::find_dir(self.base, self.dir(), KEPT)? {
            staging::remove_contents(self.base, &kept)?;
            self.base.sync_dir(&kept)?;
        }
        Ok(())
    }
}

/// Returns whether a name in `.firn/` is that of a shared directory ([`scoped_name`]).
fn is_shared_dir_name(name: &str) -> bool {
    name.strip_prefix(DIR)
        .is_some_and(|suffix| suffix.is_empty() || suffix.starts_with('-'))
}

/// Returns whether the error means that another host has removed the directory.
fn is_gone(error: &StoreError) -> bool {
    matches!(error.errno(), Some(Errno::NOENT | Errno::STALE))
}

/// Returns whether one of two scopes contains the other.
fn do_scopes_overlap(first: &[u8], second: &[u8]) -> bool {
    is_below(first, second) || is_below(second, first)
}

/// The shadow transactions that this host shares with others.
pub struct SharedTransactions<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
}

impl<B: Backing> SharedTransactions<B> {
    pub(crate) fn new(lower: &Arc<LowerBacking<B>>) -> Self {
        Self {
            lower: Arc::clone(lower),
        }
    }

    /// Returns the shared directory with this name. Returns `None` if there is none, or if the mount has one host.
    fn find_shared_dir(&self, name: &str) -> Result<Option<SharedDir<'_, B>>, Errno> {
        let Some(members) = &self.lower.members else {
            return Ok(None);
        };
        let Some(firn_dir) = self.lower.find_firn_dir()? else {
            return Ok(None);
        };
        let found = VoteDir::find(&self.lower.base, &firn_dir, name, &members.host)?;
        Ok(found.map(|vote| self.shared_dir(vote)))
    }

    fn shared_dir<'a>(&'a self, vote: VoteDir<'a, B>) -> SharedDir<'a, B> {
        SharedDir {
            base: &self.lower.base,
            ballot: Ballot::in_dir(vote, ShadowEnd),
        }
    }

    /// Returns the shared directory of a scope; `None` if this host has not joined a shared transaction there.
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

    /// Returns the shared directories of all scopes.
    fn all_shared(&self) -> Result<Vec<SharedDir<'_, B>>, Errno> {
        let Some(firn_dir) = self.lower.find_firn_dir()? else {
            return Ok(Vec::new());
        };
        let mut shared_dirs = Vec::new();
        for (name, ..) in staging::list(&self.lower.base, &firn_dir)? {
            let name = String::from_utf8_lossy(&name).into_owned();
            if is_shared_dir_name(&name) {
                shared_dirs.extend(self.find_shared_dir(&name)?);
            }
        }
        Ok(shared_dirs)
    }

    /// Joins the shared transaction of a scope; the first host makes it. `dir` is the directory of this host's part.
    ///
    /// Returns `NotOver` while hosts have not left an earlier transaction of the scope; the caller may then try again.
    pub(crate) fn join_hosts(&self, dir: &B::Inode, scope: &[u8]) -> Result<(), BeginError> {
        staging::replace_file(&self.lower.base, dir, SHARED, b"")?;
        match self.join_shared(scope) {
            // Another host has removed the directory of an earlier transaction meanwhile, so a later try succeeds.
            Err(BeginError::Store(error)) if is_gone(&error) => {
                Err(BeginError::NotOver { hosts: Vec::new() })
            }
            other => other,
        }
    }

    /// Joins the transaction of several hosts in shadow mode that covers the directory at path `scope`; makes its
    /// shared directory in the backing if there is none. From then on this host may change the scope.
    ///
    /// Fails with ENOENT or ESTALE if another host removes the shared directory meanwhile. Fails if an earlier
    /// transaction there is not over.
    fn join_shared(&self, scope: &[u8]) -> Result<(), BeginError> {
        let Some(members) = &self.lower.members else {
            return Ok(());
        };
        let base = &self.lower.base;
        let firn_dir = staging::make_dir(base, &base.root(), staging::FIRN_DIR)?;
        let name = scoped_name(DIR, scope);
        let vote_dir = VoteDir::make(base, &firn_dir, &name, &members.host)?;
        let shared = self.shared_dir(vote_dir);
        if shared.decision()?.is_some() {
            return Err(self.not_over_error(&shared)?);
        }
        shared.ballot.dir().put_once(SCOPE, scope)?;
        for subdir in [SAVED, KEPT] {
            staging::make_dir(&self.lower.base, shared.dir(), subdir)?;
        }
        // The ballot, by which the hosts decide the outcome, lists the hosts that take part.
        if shared.ballot.join(JOINED_CONTENT)? == Joined::Over {
            return Err(self.not_over_error(&shared)?);
        }
        self.check_join(members, &shared, scope)
            .inspect_err(|_| self.withdraw_from_hosts(scope))
    }

    /// Returns the error of a begin while hosts have not left an earlier transaction. If all have left, removes it.
    fn not_over_error(&self, shared: &SharedDir<'_, B>) -> Result<BeginError, Errno> {
        shared.ballot.remove_if_over()?;
        let view = shared.ballot.view()?;
        let hosts = view.remaining();
        Ok(BeginError::NotOver { hosts })
    }

    /// Checks, after this host has joined a transaction of several hosts, that it may take part. Fails if more hosts
    /// than expected have joined, or if another shared transaction overlaps this one. `scope` is the path of the
    /// directory that the transaction covers. The caller withdraws after an error.
    fn check_join(
        &self,
        members: &Members,
        shared: &SharedDir<'_, B>,
        scope: &[u8],
    ) -> Result<(), BeginError> {
        let joined = shared.joined_hosts()?;
        if members.are_too_many(joined.len()) {
            return Err(BeginError::TooManyHosts { hosts: joined });
        }
        for other in self.all_shared()? {
            if other.name() == shared.name() {
                continue;
            }
            let Some(other_scope) = self.scope_if_joined(&other)? else {
                continue;
            };
            if do_scopes_overlap(&other_scope, scope) {
                return Err(BeginError::Overlaps {
                    scope: other_scope.as_slice().into(),
                });
            }
        }
        Ok(())
    }

    /// Returns the path of the directory that another shared transaction covers. Returns `None` if no host has joined
    /// it, or if its hosts have removed its directory meanwhile.
    fn scope_if_joined(&self, other: &SharedDir<'_, B>) -> Result<Option<Vec<u8>>, BeginError> {
        let scope = match staging::load_scope(&self.lower.base, other.dir(), SCOPE) {
            Ok(Some(path)) => path,
            Ok(None) => return Ok(None),
            Err(error) if is_gone(&error) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        match other.joined_hosts() {
            Ok(joined) if !joined.is_empty() => Ok(Some(scope)),
            Ok(_) | Err(Errno::NOENT | Errno::STALE) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Withdraws from the shared transaction of a scope after a failed begin, in which this host has changed nothing.
    pub(crate) fn withdraw_from_hosts(&self, scope: &[u8]) {
        let withdrawn = self.find_shared(scope).and_then(|shared| match shared {
            Some(shared) => shared.ballot.withdraw(),
            None => Ok(()),
        });
        if let Err(errno) = withdrawn {
            tracing::warn!(%errno, "cannot withdraw this host from a transaction: other hosts wait for it until firnd \
                starts here again");
        }
    }

    /// Returns the saved state of a transaction, from its own directory or from the shared one. `None` in buffer mode.
    pub(crate) fn shadow_of(
        &self,
        dir: &B::Inode,
        scope: &[u8],
    ) -> Result<Option<Shadow<B>>, Errno> {
        if staging::find(&self.lower.base, dir, OsStr::new(SHARED))?.is_none() {
            return Shadow::find_in_dir(&self.lower.base, dir);
        }
        let Some(shared) = self.find_shared(scope)? else {
            return Ok(None);
        };
        let shadow = Shadow::find_in_dir(&self.lower.base, shared.dir())?;
        Ok(shadow.map(Shadow::into_shared))
    }

    /// Leaves the shared transaction of a scope after this host has applied the commit. Does nothing without a commit.
    pub(crate) fn leave_commit(&self, scope: &[u8]) -> Result<(), Errno> {
        let Some(shared) = self.find_shared(scope)? else {
            return Ok(());
        };
        if shared.is_committed()? {
            shared.ballot.leave()?;
        }
        Ok(())
    }

    // ---- after a crash -----------------------------------------------------------------------

    /// Returns whether the shared transaction that has `dir` as this host's part is committed.
    pub(crate) fn is_shared_commit(&self, dir: &B::Inode, scope: &[u8]) -> Result<bool, Errno> {
        if staging::find(&self.lower.base, dir, OsStr::new(SHARED))?.is_none() {
            return Ok(false);
        }
        match self.find_shared(scope)? {
            Some(shared) => shared.is_committed(),
            None => Ok(false),
        }
    }

    /// After a crash, leaves the transactions of several hosts of which this host has no part any more, so that the
    /// other hosts do not wait for it. Also completes interrupted removals of such transactions' directories.
    ///
    /// `waiting` has number and path of each transaction that this host still has. The caller has recovered all of this
    /// host's transactions.
    pub(crate) fn leave_finished_shared(
        &self,
        waiting: &[(u64, Vec<u8>)],
    ) -> Result<(), OpenError> {
        for shared in self.all_shared()? {
            let is_waiting = waiting
                .iter()
                .any(|(_, scope)| scoped_name(DIR, scope) == shared.name());
            if is_waiting {
                continue;
            }
            // The firnd of this host was killed after it joined the ballot and before its transaction began, so it
            // changed nothing.
            match (shared.ballot.is_taking_part()?, shared.decision()?) {
                // The hosts have not decided, so they can go on as if this host had never joined.
                (true, None) => shared.ballot.withdraw()?,
                // The hosts have decided, and this host has nothing to carry out.
                (true, Some(_)) => shared.ballot.leave_unchanged()?,
                // This host has left already.
                (false, _) => shared.ballot.remove_if_over()?,
            }
        }
        if self.lower.members.is_some()
            && let Some(firn_dir) = self.lower.find_firn_dir()?
        {
            VoteDir::remove_retired(&self.lower.base, &firn_dir)?;
        }
        Ok(())
    }
}

impl<B: Backing> Recovery<B> {
    /// Recovers, after a crash, this host's parts of the transactions that several hosts share, before all others.
    ///
    /// An unprepared transaction is aborted for all hosts. If the hosts have decided a prepared one, the decision is
    /// copied to the record of this host. Transactions that are not shared are left alone.
    pub(crate) fn recover_shared(&self, transactions_dir: &B::Inode) -> Result<(), OpenError> {
        for (name, ..) in staging::list(&self.lower.base, transactions_dir)? {
            let name = String::from_utf8_lossy(&name).into_owned();
            if !name.starts_with("tx-") {
                continue;
            }
            let dir = staging::must_find_dir(&self.lower.base, transactions_dir, &name)
                .map_err(|error| error.below(&self.lower.transactions_path()))?;
            let find_file = |file| staging::find(&self.lower.base, &dir, OsStr::new(file));
            // The transaction is not shared, or its commit is recorded in this directory already.
            if find_file(SHARED)?.is_none() || find_file(staging::COMMIT)?.is_some() {
                continue;
            }
            let record = self.lower.load_record(&dir, &name, staging::RECORD)?;
            let open_scope = staging::load_scope(&self.lower.base, &dir, staging::OPEN)?;
            let scope = match &record {
                Some(record) => Some(record.scope.clone()),
                None => open_scope,
            };
            if let Some(scope) = scope {
                self.recover_part(&dir, record, &scope)?;
            }
        }
        Ok(())
    }

    /// Recovers, after a crash, this host's part of a transaction that several hosts share. The changes are in the
    /// backing already; an abort restores the saved old state.
    ///
    /// `dir` is the part's own directory, `record` its change log if it is prepared, and `scope` the path of the
    /// directory that the transaction covers.
    fn recover_part(
        &self,
        dir: &B::Inode,
        record: Option<ChangeLog>,
        scope: &[u8],
    ) -> Result<(), OpenError> {
        // If the shared directory is gone, the hosts have undone the transaction, and only this host's part is left.
        if let Some(shared) = self.shared.find_shared(scope)? {
            let is_prepared = record.is_some();
            match shared.decision()? {
                // The part waits for the decision.
                None if is_prepared => return Ok(()),
                Some(decision) if decision.commit => {
                    return match record {
                        Some(record) => self.recover_committed_part(dir, &record, scope),
                        // This host was killed while it reopened its part, but the hosts had agreed on the commit. All
                        // changes are in the backing, so only the mark is removed.
                        None => Ok(self.lower.base.unlink(dir, OsStr::new(staging::OPEN))?),
                    };
                }
                // The hosts have decided an abort, or this host was not prepared and so aborts for all hosts.
                None | Some(_) => {
                    // Another host may have decided the commit meanwhile.
                    if shared.decide(Proposal::Abort)?.commit {
                        return self.recover_part(dir, record, scope);
                    }
                    self.undo_aborted_part(&shared, record.as_ref(), scope)?;
                }
            }
        }
        // Without its change log, the part counts as open, and the recovery then removes it. The changes are undone
        // already.
        if record.is_some() {
            self.lower.base.unlink(dir, OsStr::new(staging::RECORD))?;
            self.lower.base.sync_dir(dir)?;
        }
        Ok(())
    }

    /// Marks this host's prepared part as decided, because the hosts have decided the commit: renames its change log to
    /// `commit`. `dir` is the part's directory.
    fn recover_committed_part(
        &self,
        dir: &B::Inode,
        record: &ChangeLog,
        scope: &[u8],
    ) -> Result<(), OpenError> {
        // The host that decided may have been killed before it stored the decision in the vote as well.
        match self.votes.decide_vote(record.id, scope, Proposal::Commit) {
            Ok(()) | Err(VoteError::NotVoted { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let old_name = OsStr::new(staging::RECORD);
        let new_name = OsStr::new(staging::COMMIT);
        self.lower
            .base
            .rename(dir, old_name, dir, new_name, RenameFlags::empty())?;
        Ok(self.lower.base.sync_dir(dir)?)
    }

    /// Ends this host's vote on a transaction of several hosts that is aborted. Then undoes the changes of all hosts,
    /// unless another host does that. `record` is the change log if this host's part is prepared.
    fn undo_aborted_part(
        &self,
        shared: &SharedDir<'_, B>,
        record: Option<&ChangeLog>,
        scope: &[u8],
    ) -> Result<(), OpenError> {
        match record {
            None => self.votes.withdraw_from_votes(scope)?,
            Some(record) => self.votes.decide_vote(record.id, scope, Proposal::Abort)?,
        }
        shared.stop(|| {
            self.shadow_undo
                .undo_stored(shared.dir(), shared.name(), scope)
        })?;
        Ok(())
    }
}

impl<B: Backing> Scopes<B> {
    /// Returns whether [`TransactionalBacking::scopes_to_stop`] may return something. Does not call the backing.
    pub fn shares(&self) -> bool {
        !self
            .paths_where(|scope| scope.shadow.as_ref().is_some_and(Shadow::is_shared))
            .is_empty()
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Aborts a transaction of several hosts in shadow mode for all hosts, as a part of
    /// [`TransactionHandle::abort`](crate::TransactionHandle::abort). `shadow` is the saved old state, which one host
    /// restores.
    ///
    /// Fails with [`AbortError::Stopping`] until all hosts have stopped and the changes are undone; the caller then
    /// tries again. The caller has quiesced names and data.
    pub(crate) fn abort_shared(
        &self,
        scope: &Arc<Scope<B>>,
        shadow: &Shadow<B>,
        stage: Stage,
    ) -> Result<(), AbortError> {
        let prepared_id = match stage {
            Stage::Prepared(id) => Some(id),
            Stage::Open => None,
            Stage::Decided(id) => return Err(StageError::Decided { id }.into()),
            Stage::Ended => return Err(StageError::NoTransaction.into()),
        };
        if let Some(shared) = self.shared.find_shared(&scope.path)? {
            self.abort_for_all_hosts(&shared, scope, shadow, prepared_id)?;
        }
        self.lower.remove_records(&scope.dir)?;
        // This part is over, so the other hosts need not wait for it. The last host removes the shared directory.
        if let Some(shared) = self.shared.find_shared(&scope.path)? {
            shared.ballot.leave()?;
        }
        Ok(())
    }

    /// Decides the abort of a shared transaction with the other hosts, stops them, and undoes the changes of all unless
    /// another host does that. `prepared_id` is the number of this host's part if it is prepared.
    fn abort_for_all_hosts(
        &self,
        shared: &SharedDir<'_, B>,
        scope: &Arc<Scope<B>>,
        shadow: &Shadow<B>,
        prepared_id: Option<u64>,
    ) -> Result<(), AbortError> {
        let decision = shared.decide(Proposal::Abort)?;
        if decision.commit {
            // A commit needs all parts prepared. The number of an open part is not known, so 0 is reported.
            let id = prepared_id.unwrap_or_default();
            return Err(StageError::Decided { id }.into());
        }
        scope.refuse_changes_for_good();
        shadow.begin_undo();
        if decision.host != shared.ballot.dir().host() {
            self.stopped_by
                .lock()
                .insert(scope.path.clone(), decision.host);
        }
        // A prepared part is voted on, and other hosts may wait for this host's list, so the vote is aborted too.
        match prepared_id {
            None => self.votes.withdraw_from_votes(&scope.path)?,
            Some(id) => self.votes.decide_vote(id, &scope.path, Proposal::Abort)?,
        }
        // One host undoes the changes of all hosts, after all have stopped; it may be this one.
        let mut is_undone_here = false;
        shared.stop(|| {
            is_undone_here = true;
            self.shadow_undo.undo_shadow(scope, shadow)
        })?;
        if !is_undone_here {
            self.shadow_undo.update_after_remote_undo(scope, shadow)?;
        }
        Ok(())
    }

    /// Returns the scopes of shared transactions that another host has aborted and this host must still abort.
    pub fn scopes_to_stop(&self) -> Vec<Vec<u8>> {
        let mut undecided_scopes = self.scopes.paths_where(|scope| {
            let is_shared = scope.shadow.as_ref().is_some_and(Shadow::is_shared);
            is_shared && !matches!(scope.stage(), Stage::Decided(_))
        });
        undecided_scopes.retain(|scope| match self.shared_decision(scope) {
            Ok(decision) => decision.is_some_and(|decision| !decision.commit),
            Err(errno) => {
                tracing::warn!(%errno, "cannot read the decision of the other hosts");
                false
            }
        });
        undecided_scopes
    }

    /// Returns the decision on the shared transaction of a scope; `None` if there is no transaction or no decision.
    fn shared_decision(&self, scope: &[u8]) -> Result<Option<JointDecision>, Errno> {
        match self.shared.find_shared(scope)? {
            Some(shared) => shared.decision(),
            None => Ok(None),
        }
    }

    /// Returns the name of the other host that aborted the last transaction of a scope, if one did.
    pub fn stopped_by(&self, scope: &[u8]) -> Option<String> {
        self.stopped_by.lock().get(scope).cloned()
    }
}
