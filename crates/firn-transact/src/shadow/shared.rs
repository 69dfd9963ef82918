//! What several hosts in one shadow transaction share: what is saved, and how it ends.
//!
//! ```text
//! .firn/shadow[-SCOPE]/    one transaction; SCOPE stands for the path of the scope, as in the name of a meeting
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
//! * Nothing is undone before all that are in are out, by none but the undoer or who stands in for it (the lock of
//!   its directory is held), not after `undone`, and never where the outcome is a commit.
//! * A host leaves after a commit, or after `undone`; nobody begins before all have left.
//! * Who comes in and sees no outcome then is seen by whoever puts one.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Backing, Errno, RenameFlags, is_below};

use super::{KEPT, SAVED, Shadow};
use crate::meeting::{MeetingPlace, Outcome, Participants, scoped_name};
use crate::record::Record;
use crate::scope::{Held, HeldError, Scope, Stage};
use crate::staging;

const DIR: &str = "shadow";
/// On its way out.
const OVER: &str = "over-";
const SCOPE: &str = "scope";
const IN: &str = "in-";
const OUT: &str = "out-";
const LEFT: &str = "left-";
const OUTCOME: &str = "outcome";
const UNDOER: &str = "undoer";
const UNDONE: &str = "undone";
const REMOVER: &str = "remover";
/// In the directory of a host's transaction: it is part of a shared one.
pub(super) const SHARED: &str = "shared";

type Place<'a, B> = MeetingPlace<'a, B>;

impl<B: Backing> Place<'_, B> {
    pub(crate) fn outcome(&self) -> Result<Option<Outcome>, Errno> {
        self.get(OUTCOME)
    }

    pub(crate) fn members(&self) -> Result<Vec<String>, Errno> {
        self.hosts(IN)
    }

    /// Hosts that are in and have not come as far as `what`.
    fn without(&self, what: &str) -> Result<Vec<String>, Errno> {
        self.hosts_without(IN, what)
    }

    /// Still the directory that its name leads to.
    fn is_current(&self) -> Result<bool, Errno> {
        let found = staging::find(self.base, &self.top, OsStr::new(&self.name))?;
        let ino = self.base.attr(&self.dir)?.ino;
        Ok(found.is_some_and(|(_, attr)| attr.ino == ino))
    }

    /// A host that has not changed anything is not in any more.
    fn come_out(&self) -> Result<(), Errno> {
        match self.base.unlink(&self.dir, OsStr::new(&self.mine(IN))) {
            Ok(()) | Err(Errno::NOENT | Errno::STALE) => {}
            Err(errno) => return Err(errno),
        }
        self.base.sync_dir(&self.dir)
    }

    /// The outcome, which is this one if there is none.
    pub(crate) fn settle(&self, commit: bool) -> Result<Outcome, Errno> {
        self.put_json(
            OUTCOME,
            &Outcome {
                commit,
                by: self.group.host.clone(),
            },
        )?;
        self.outcome()?.ok_or(Errno::IO)
    }

    /// This host changes nothing any more. When it returns all is undone, if need be by `undo`.
    fn stop(&self, undo: impl FnOnce() -> Result<(), HeldError>) -> Result<(), HeldError> {
        self.put(&self.mine(OUT), b"")?;
        if self.names()?.contains(UNDONE) {
            return Ok(());
        }
        let hosts = self.without(OUT)?;
        if !hosts.is_empty() {
            return Err(HeldError::Stopping { hosts });
        }
        self.put_json(UNDOER, &self.group.host)?;
        let undoer: String = self.get(UNDOER)?.ok_or(Errno::IO)?;
        if undoer != self.group.host {
            return Err(HeldError::Stopping {
                hosts: vec![undoer],
            });
        }
        undo()?;
        // Objects that are back have one link too many there. Should all of this be done again, nothing is missing.
        if let Some((kept, _)) = staging::find_dir(self.base, &self.dir, KEPT)? {
            staging::clear(self.base, &kept)?;
            self.base.sync_dir(&kept)?;
        }
        self.put(UNDONE, b"")?;
        Ok(())
    }

    /// This host has ended its part. The directory goes with the last one.
    fn leave_shared(&self) -> Result<(), Errno> {
        self.put(&self.mine(LEFT), b"")?;
        self.remove_shared()
    }

    fn is_over(&self) -> Result<bool, Errno> {
        let decided = match self.outcome()? {
            None => return Ok(false),
            Some(outcome) => outcome.commit || self.names()?.contains(UNDONE),
        };
        // Who only came in to find an outcome goes by itself.
        Ok(decided && self.without(LEFT)?.is_empty())
    }

    fn remove_shared(&self) -> Result<(), Errno> {
        let remove = || {
            if !self.is_over()? {
                return Ok(());
            }
            self.put_json(REMOVER, &self.group.host)?;
            let is_mine = self
                .get::<String>(REMOVER)?
                .is_some_and(|host| host == self.group.host);
            // By name: the next transaction may have a directory already.
            if !is_mine || !self.is_current()? {
                return Ok(());
            }
            let over = format!("{OVER}{}.{}", self.name, self.group.host);
            remove_dir(self.base, &self.top, &over)?;
            self.base.rename(
                &self.top,
                OsStr::new(&self.name),
                &self.top,
                OsStr::new(&over),
                RenameFlags::empty(),
            )?;
            self.base.sync_dir(&self.top)?;
            remove_dir(self.base, &self.top, &over)
        };
        match remove() {
            // Another one does the same.
            Err(Errno::NOENT | Errno::STALE) => Ok(()),
            other => other,
        }
    }
}

fn remove_dir<B: Backing>(base: &B, top: &B::Inode, name: &str) -> Result<(), Errno> {
    let Some((dir, _)) = staging::find_dir(base, top, name)? else {
        return Ok(());
    };
    staging::clear(base, &dir)?;
    base.rmdir(top, OsStr::new(name))
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

impl<B: Backing> Held<B> {
    fn shared_place(&self, name: &str) -> Result<Option<Place<'_, B>>, Errno> {
        let Some(group) = &self.group else {
            return Ok(None);
        };
        let Some(top) = self.find_top()? else {
            return Ok(None);
        };
        let found = staging::find_dir(&self.base, &top, name)?;
        Ok(found.map(|(dir, _)| MeetingPlace {
            base: &self.base,
            top,
            name: name.into(),
            dir,
            group,
        }))
    }

    /// What this host shares with others in a scope; `None` where it is not in a transaction like that.
    pub(crate) fn shared(&self, scope: &[u8]) -> Result<Option<Place<'_, B>>, Errno> {
        let Some(place) = self.shared_place(&scoped_name(DIR, scope))? else {
            return Ok(None);
        };
        match place.names() {
            Ok(names) => {
                let is_in = names.contains(&place.mine(IN)) && !names.contains(&place.mine(LEFT));
                Ok(is_in.then_some(place))
            }
            Err(Errno::NOENT | Errno::STALE) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// All that are there.
    fn all_shared(&self) -> Result<Vec<Place<'_, B>>, Errno> {
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
                places.extend(self.shared_place(&name)?);
            }
        }
        Ok(places)
    }

    /// The host takes part from now on in the transaction of a scope, which is made if it is the first. `dir` is its
    /// own part.
    pub(crate) fn join(&self, dir: &B::Inode, scope: &[u8]) -> Result<(), HeldError> {
        staging::store(&self.base, dir, SHARED, b"")?;
        match self.come_in(scope) {
            // The directory went meanwhile.
            Err(HeldError::Backing(Errno::NOENT | Errno::STALE)) => {
                Err(HeldError::NotOver { hosts: Vec::new() })
            }
            other => other,
        }
    }

    fn come_in(&self, scope: &[u8]) -> Result<(), HeldError> {
        let Some(group) = &self.group else {
            return Ok(());
        };
        let name = scoped_name(DIR, scope);
        let top = staging::dir(&self.base, &self.base.root(), staging::TOP)?;
        let dir = staging::dir(&self.base, &top, &name)?;
        self.base.sync_dir(&top)?;
        let place = MeetingPlace {
            base: &self.base,
            top,
            name,
            dir,
            group,
        };
        if place.outcome()?.is_some() {
            return self.not_over(&place);
        }
        place.put(SCOPE, scope)?;
        for name in [SAVED, KEPT] {
            staging::dir(&self.base, &place.dir, name)?;
        }
        place.put(&place.mine(IN), b"")?;
        if place.outcome()?.is_some() || !place.is_current()? {
            place.come_out()?;
            return self.not_over(&place);
        }
        self.must_fit(&place, scope)
            .inspect_err(|_| self.unjoin(scope))
    }

    fn not_over(&self, place: &Place<'_, B>) -> Result<(), HeldError> {
        place.remove_shared()?;
        let mut hosts = place.without(LEFT)?;
        if hosts.is_empty() {
            hosts.extend(place.get::<String>(REMOVER)?);
        }
        Err(HeldError::NotOver { hosts })
    }

    /// There are not too many, and no other transaction overlaps this one.
    fn must_fit(&self, place: &Place<'_, B>, scope: &[u8]) -> Result<(), HeldError> {
        let members = place.members()?;
        if let Participants::Count(count) = place.group.participants
            && members.len() > count
        {
            let why = format!(
                "{} take part already, and participants={count}",
                members.join(", ")
            );
            return Err(HeldError::GivenUp {
                by: place.group.host.clone(),
                why,
            });
        }
        for other in self
            .all_shared()?
            .iter()
            .filter(|other| other.name != place.name)
        {
            let path = match staging::load_scope(&self.base, &other.dir, SCOPE) {
                Ok(Some(path)) => path,
                Ok(None) | Err(HeldError::Backing(Errno::NOENT | Errno::STALE)) => continue,
                Err(error) => return Err(error),
            };
            match other.members() {
                Ok(members) if !members.is_empty() => {}
                Ok(_) | Err(Errno::NOENT | Errno::STALE) => continue,
                Err(errno) => return Err(errno.into()),
            }
            if overlap(&path, scope) {
                return Err(HeldError::Open {
                    scope: path.as_slice().into(),
                });
            }
        }
        Ok(())
    }

    /// A begin that failed: nothing was changed.
    pub(crate) fn unjoin(&self, scope: &[u8]) {
        match self
            .shared(scope)
            .and_then(|place| place.map_or(Ok(()), |place| place.come_out()))
        {
            Ok(()) => {}
            Err(errno) => {
                tracing::warn!(%errno, "other hosts wait for this one until its next start")
            }
        }
    }

    /// What is saved for a transaction: in its own directory, or where all hosts save.
    pub(crate) fn shadow_of(
        &self,
        dir: &B::Inode,
        scope: &[u8],
    ) -> Result<Option<Shadow<B>>, Errno> {
        if staging::find(&self.base, dir, OsStr::new(SHARED))?.is_none() {
            return Shadow::find(&self.base, dir);
        }
        match self.shared(scope)? {
            Some(place) => Ok(Shadow::find(&self.base, &place.dir)?.map(Shadow::of_several)),
            None => Ok(None),
        }
    }

    /// For [`Held::abort`]: the transaction of all hosts. Fails with [`HeldError::Stopping`] until all have stopped
    /// and it is undone. The caller holds names and data.
    pub(crate) fn abort_shared(
        &self,
        scope: &Arc<Scope<B>>,
        shadow: &Shadow<B>,
        stage: Stage,
    ) -> Result<(), HeldError> {
        let id = match stage {
            Stage::Prepared(id) => Some(id),
            Stage::Open => None,
            Stage::Decided(id) => return Err(HeldError::Decided { id }),
            Stage::Ended => return Err(HeldError::None),
        };
        if let Some(place) = self.shared(&scope.path)? {
            let outcome = place.settle(false)?;
            if outcome.commit {
                return Err(HeldError::Decided {
                    id: id.unwrap_or_default(),
                });
            }
            scope.stop_for_good();
            shadow.begin_undo();
            if outcome.by != place.group.host {
                self.stopped_by
                    .lock()
                    .insert(scope.path.clone(), outcome.by);
            }
            // Those that wait for this host's part do so in vain.
            match id {
                None => self.withdraw(&scope.path)?,
                Some(id) => self.decide(id, &scope.path, false)?,
            }
            let mut undone = false;
            place.stop(|| {
                undone = true;
                self.undo_shadow(scope, shadow)
            })?;
            if !undone {
                self.see_undone(scope, shadow)?;
            }
        }
        self.forget(&scope.dir)?;
        if let Some(place) = self.shared(&scope.path)? {
            place.leave_shared()?;
        }
        Ok(())
    }

    /// This host has ended its part after a commit.
    pub(crate) fn leave_commit(&self, scope: &[u8]) -> Result<(), Errno> {
        match self.shared(scope)? {
            Some(place) if place.outcome()?.is_some_and(|outcome| outcome.commit) => {
                place.leave_shared()
            }
            _ => Ok(()),
        }
    }

    /// Whether there may be something in [`Held::to_be_stopped`]; asks the backing nothing.
    pub fn shares(&self) -> bool {
        !self
            .scopes_where(|scope| scope.shadow.as_ref().is_some_and(Shadow::is_of_several))
            .is_empty()
    }

    /// Scopes whose transactions a host has aborted and this one has not ended: [`Held::abort`] is to be called.
    pub fn to_be_stopped(&self) -> Vec<Vec<u8>> {
        let is_shared = |shadow: &Shadow<B>| shadow.is_of_several();
        let scopes = self.scopes_where(|scope| {
            scope.shadow.as_ref().is_some_and(is_shared)
                && !matches!(scope.stage(), Stage::Decided(_))
        });
        let is_aborted = |scope: &Vec<u8>| {
            let outcome = self
                .shared(scope)
                .and_then(|place| place.map_or(Ok(None), |place| place.outcome()));
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
        let Some(place) = self.shared(scope)? else {
            return Ok(false);
        };
        Ok(place.outcome()?.is_some_and(|outcome| outcome.commit))
    }

    /// Before anything else is recovered: shared transactions of this host that are not prepared are aborted, for
    /// all hosts, and what was decided about the others is noted. Nothing is done to what is not shared.
    pub(crate) fn recover_shared(&self, home: &B::Inode) -> Result<(), HeldError> {
        for (name, ..) in staging::list(&self.base, home)? {
            let text = String::from_utf8_lossy(&name).into_owned();
            if !text.starts_with("tx-") {
                continue;
            }
            let found = staging::must_find_dir(&self.base, home, &text);
            let dir = found.map_err(|error| error.below(&self.home_path()))?;
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
        record: Option<Record>,
        scope: &[u8],
    ) -> Result<(), HeldError> {
        let place = self.shared(scope)?;
        let fate = match &place {
            None => Fate::Over,
            Some(place) => match (place.outcome()?, &record) {
                (None, Some(_)) => Fate::Undecided,
                (Some(outcome), _) if outcome.commit => Fate::Committed,
                _ => Fate::Aborted,
            },
        };
        match fate {
            Fate::Undecided => return Ok(()),
            Fate::Committed if record.is_some() => {
                // The meeting may not have heard of it.
                match record.map_or(Ok(()), |record| self.decide(record.id, scope, true)) {
                    Ok(()) | Err(HeldError::NotMet { .. }) => {}
                    Err(error) => return Err(error),
                }
                let from = OsStr::new(staging::RECORD);
                let to = OsStr::new(staging::COMMIT);
                self.base.rename(dir, from, dir, to, RenameFlags::empty())?;
                return Ok(self.base.sync_dir(dir)?);
            }
            // It was to be open again when the others had agreed already.
            Fate::Committed => return Ok(self.base.unlink(dir, OsStr::new(staging::OPEN))?),
            Fate::Over => {}
            Fate::Aborted => {
                let place = place.as_ref().ok_or(Errno::IO)?;
                if place.settle(false)?.commit {
                    return self.recover_part(dir, record, scope);
                }
                match &record {
                    None => self.withdraw(scope)?,
                    Some(record) => self.decide(record.id, scope, false)?,
                }
                place.stop(|| self.undo_stored(&place.dir, &place.name, scope))?;
            }
        }
        // From here on it is one that was open and is undone: nothing more is to be put back.
        if record.is_some() {
            self.base.unlink(dir, OsStr::new(staging::RECORD))?;
            self.base.sync_dir(dir)?;
        }
        Ok(())
    }

    /// After that: shared transactions in which this host has nothing to do any more are left.
    pub(crate) fn leave_shared_ones(&self, waiting: &[(u64, Vec<u8>)]) -> Result<(), HeldError> {
        for place in self.all_shared()? {
            let names = place.names()?;
            let is_in = names.contains(&place.mine(IN)) && !names.contains(&place.mine(LEFT));
            if waiting
                .iter()
                .any(|(_, scope)| scoped_name(DIR, scope) == place.name)
            {
                continue;
            }
            match place.outcome()?.filter(|_| is_in) {
                None if is_in => place.come_out()?,
                None => {}
                // It came in, and its firnd died before it began.
                Some(outcome) => {
                    if !outcome.commit {
                        place.put(&place.mine(OUT), b"")?;
                    }
                    place.put(&place.mine(LEFT), b"")?;
                }
            }
            place.remove_shared()?;
        }
        let Some(group) = &self.group else {
            return Ok(());
        };
        let Some(top) = self.find_top()? else {
            return Ok(());
        };
        let names: BTreeSet<_> = staging::list(&self.base, &top)?
            .into_iter()
            .map(|(name, ..)| name)
            .collect();
        for name in names {
            let name = String::from_utf8_lossy(&name).into_owned();
            if name
                .strip_prefix(OVER)
                .is_some_and(|rest| rest.ends_with(&format!(".{}", group.host)))
            {
                remove_dir(&self.base, &top, &name)?;
            }
        }
        Ok(())
    }
}
