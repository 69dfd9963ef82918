//! Transactions: begun, prepared, committed or aborted; and what a crash left of them.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use firn_backing::{Backing, Errno, Kind, RenameFlags};
use firn_conflict::Used;
use firn_format::quote::quoted;
use firn_protocol::path::BytePath;
use firn_rendezvous::Members;
use firn_trust::Distrust;
use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::apply::Apply;
use crate::backing::Inode;
use crate::backup::{Mirror, Progress};
use crate::change_log::{ChangeLog, Direction, LogError};
use crate::hidden::HiddenLinks;
use crate::object::{Change, Inner, Key, Object};
use crate::own::{FILE_BYTES_MAX, OwnError};
use crate::shadow::{Mode, Shadow};
use crate::staging;
use crate::state::State;

mod arenas;
mod carry;
mod handle;

pub use arenas::ArenaId;
pub use handle::TransactionHandle;

/// Number of the state before the first commit: [`Held::committed`] has none.
pub(crate) const NO_ID: u64 = u64::MAX;

/// Why a transaction could not be begun, prepared, committed or aborted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeldError {
    /// The backing is one without transactions.
    #[error("this mount has no transactions: mount it with drain=commit")]
    NotTransactional,
    /// There is nothing where a transaction was to begin or end.
    #[error("no such directory in this mount")]
    ScopeMissing,
    /// There is something else.
    #[error("a transaction covers a directory, and this is none")]
    ScopeNotDirectory,
    /// There is no transaction where one is needed.
    #[error("no transaction is open there: begin one first")]
    None,
    /// One is open that covers the same objects.
    #[error("a transaction is open in {scope:?}: commit or abort it first")]
    Open {
        /// Its scope.
        scope: BytePath,
    },
    /// Its outcome is decided.
    #[error(
        "the transaction is committed with id {id} and not yet carried out: firn commit goes on with it"
    )]
    Decided {
        /// Its number.
        id: u64,
    },
    /// It is prepared with another number.
    #[error("the transaction is prepared with id {found}, not {wanted}")]
    OtherId {
        /// What it was prepared with.
        found: u64,
        /// What was asked for.
        wanted: u64,
    },
    /// An abort came half way.
    #[error("the transaction is being undone: firn abort goes on with it")]
    Undoing,
    /// Several hosts abort together, and these have not stopped changing things, or not undone them.
    #[error(
        "the transaction of all hosts is aborted, and undone when {} stopped: it goes on when that host's firnd runs, \
         or firn recover --inode ends its part",
        match &hosts[..] { [one] => format!("{one} has"), hosts => format!("{} have", hosts.join(", ")) }
    )]
    Stopping {
        /// Which.
        hosts: Vec<String>,
    },
    /// The last transaction of several hosts is not over.
    #[error("the last transaction of these hosts is not over{}", on(hosts))]
    NotOver {
        /// Where.
        hosts: Vec<String>,
    },
    /// Shadow mode does not work on this file system.
    #[error(
        "directories of the backing name other inode numbers than stat(2) tells: only mode=buffer works there"
    )]
    Inodes,
    /// The checkpoint is not kept.
    #[error("the files of checkpoint {wanted} are not kept; {}", told(kept))]
    NotKept {
        /// What was asked for.
        wanted: u64,
        /// Those that are, newest first.
        kept: Vec<u64>,
    },
    /// The hosts do not go together.
    #[error("{} with other hosts", match .0.total { 1 => "1 conflict".to_owned(), n => format!("{n} conflicts") })]
    Conflict(Box<firn_conflict::Report>),
    /// There is no commit because of one of the hosts.
    #[error("{by} gave the commit up: {why}")]
    GivenUp {
        /// Which.
        by: String,
        /// What it said.
        why: String,
    },
    /// Several hosts commit together, and this one has not voted with the others.
    #[error("the hosts have not voted on {id}: firn prepare comes first, on each of them")]
    NotMet {
        /// The number.
        id: u64,
    },
    /// The last vote on the same number is not over.
    #[error("other hosts have not ended the last transaction with id {id}")]
    Leaving {
        /// The number.
        id: u64,
    },
    /// A host's list cannot be read.
    #[error("{host}: {source}")]
    List {
        /// Whose.
        host: String,
        /// What is wrong.
        source: firn_conflict::ListError,
    },
    /// The backup refused something.
    #[error("the backup failed: {source}")]
    Backup {
        /// What it said.
        source: Errno,
    },
    /// What is over could not be taken back from the backup. Until it can, nothing new is decided.
    #[error("what is over cannot be removed from the backup: {source}")]
    BackupStays {
        /// What it said.
        source: Errno,
    },
    /// An object has no name by which it could be found elsewhere.
    #[error(
        "object {number} of the transaction has no name in the backing, and cannot be in the backup"
    )]
    BackupPath {
        /// Its number.
        number: u64,
    },
    /// The backing does not know a transaction that is in the backup.
    #[error(
        "the backup has a transaction prepared with id {id} that the backing does not know ({name})"
    )]
    BackupWaits {
        /// The number.
        id: u64,
        /// Its directory in the backup.
        name: String,
    },
    /// The transaction of the backup was committed and carried out.
    #[error("commit {id} was carried out before")]
    BackupDone {
        /// The number.
        id: u64,
    },
    /// The tree is not the one before the transaction of a backup.
    #[error(
        "{}: {what}: the backup goes with the tree as it was before the transaction",
        quoted(path)
    )]
    BackupTree {
        /// Where, from the top of the backing.
        path: Vec<u8>,
        /// What is wrong.
        what: String,
    },
    /// A piece of a backup is missing or changed.
    #[error("{file} in the backup is missing or damaged")]
    BackupDamaged {
        /// Which.
        file: String,
    },
    /// Something in the place of what is Firn's own is not as that must be.
    #[error(
        "{name} {why}; nothing in it is believed: mount as the user whose it is, or look at what it is and move it away"
    )]
    Distrusted {
        /// Its name, with the directories above it as far as they are known.
        name: String,
        /// What is wrong with it.
        why: Distrust,
    },
    /// A file in the place of one of Firn's own is longer than those are.
    #[error(
        "{name} has {bytes} bytes, and Firn writes no more than {FILE_BYTES_MAX}: look at what it is and move it away"
    )]
    TooLong {
        /// Its name, as above.
        name: String,
        /// Its size.
        bytes: u64,
    },
    /// The backing refused something. Whatever it said, it is nothing that is known of the transaction.
    #[error("the backing failed: {0}")]
    Backing(#[from] Errno),
    /// A record cannot be read.
    #[error("{path}: {source}; move it away to give that transaction up")]
    Record {
        /// Where it is in the backing.
        path: String,
        /// What is wrong.
        source: LogError,
    },
}

impl From<OwnError> for HeldError {
    fn from(error: OwnError) -> Self {
        match error {
            OwnError::Distrusted { name, why } => Self::Distrusted { name, why },
            OwnError::TooLong { name, bytes } => Self::TooLong { name, bytes },
            OwnError::Backing(errno) => Self::Backing(errno),
        }
    }
}

fn on(hosts: &[String]) -> String {
    if hosts.is_empty() {
        String::new()
    } else {
        format!(" on {}", hosts.join(", "))
    }
}

fn told(kept: &[u64]) -> String {
    match kept {
        [] => "none are".into(),
        kept => format!(
            "those are: {}",
            kept.iter()
                .map(u64::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        ),
    }
}

/// How far a transaction is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Programs change things.
    Open,
    /// Durable; changes wait until it is decided.
    Prepared(u64),
    /// Committed; not all of it is carried out.
    Decided(u64),
    /// Over.
    Ended,
}

/// What an open transaction has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transaction {
    /// Path of its scope, relative to the backing.
    pub scope: Vec<u8>,
    /// How far it is.
    pub stage: Stage,
    /// Bytes written in it since it began, overwritten ones too.
    pub written_bytes: u64,
    /// Objects that it changes.
    pub objects: u64,
    /// How many names of files are in each state.
    pub states: BTreeMap<State, u64>,
    /// An earlier firnd prepared it.
    pub is_recovered: bool,
    /// Why it could not be carried out when that was tried last.
    pub trouble: Option<String>,
    /// Where there is a backup: how far it is.
    pub backup: Option<Progress>,
}

/// What [`Held::open`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Committed ones that were carried out to the end: their numbers.
    pub finished: Vec<u64>,
    /// Scopes of those that were undone because nobody had prepared them.
    pub undone: Vec<Vec<u8>>,
    /// Those that are prepared and wait for a decision: numbers and scopes.
    pub waiting: Vec<(u64, Vec<u8>)>,
}

/// How [`Held::open_with`] opens a backing.
#[derive(Clone, Debug, Default)]
pub struct Opening {
    /// Commits of each scope that can be undone.
    pub history: u32,
    /// Of one of several hosts that commit together.
    pub members: Option<Members>,
    /// The arena that is at hand. Others may come back, and are then to be told what they must drop.
    pub arena: Option<ArenaId>,
}

/// A directory and all below it, while a transaction is open there.
pub(crate) struct Scope<B: Backing> {
    pub(crate) serial: u64,
    pub(crate) root: Arc<Object<B>>,
    pub(crate) path: Vec<u8>,
    pub(crate) dir: B::Inode,
    pub(crate) new: B::Inode,
    away: B::Inode,
    /// Directories below `new`, by what objects made in them inherit.
    nests: Mutex<HashMap<Inherited, (String, B::Inode)>>,
    /// The one for objects that inherit nothing.
    plain_nest: Mutex<Option<(String, B::Inode)>>,
    last_number: AtomicU64,
    /// Bytes of small changes.
    pub(crate) small_bytes: AtomicU64,
    /// Bytes written since it began, overwritten ones too.
    pub(crate) written_bytes: AtomicU64,
    pub(crate) changed: Mutex<BTreeMap<u64, Arc<Object<B>>>>,
    stage: Mutex<Stage>,
    turned: Condvar,
    /// It is going to be aborted: who changes something is told ECANCELED.
    refusing: AtomicBool,
    /// Prepared by an earlier firnd: its changes are in this record only.
    pub(crate) recovered: Option<ChangeLog>,
    /// It is a commit of before that is being undone.
    pub(crate) is_undo: bool,
    /// Prepared to commit with other hosts: what processes here used before.
    pub(crate) used: Mutex<Option<Vec<Used>>>,
    /// How it is carried out.
    carried: carry::Carried<B>,
    /// Where it does not hold changes: what undoes them.
    pub(crate) shadow: Option<Shadow<B>>,
}

/// What a new object takes from its directory: group and default ACL.
type Inherited = (Option<u32>, Option<Vec<u8>>);

impl<B: Backing> Scope<B> {
    pub(crate) fn next_number(&self) -> u64 {
        self.last_number.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Waits until changes are allowed again; EBUSY where that may never be.
    fn wait(&self) -> Result<(), Errno> {
        let mut stage = self.stage.lock();
        while let Stage::Prepared(_) | Stage::Decided(_) = *stage {
            if self.refusing.load(Ordering::Acquire) {
                return Err(Errno::CANCELED);
            }
            if self.recovered.is_some() {
                return Err(Errno::BUSY);
            }
            self.turned.wait(&mut stage);
        }
        if self.refusing.load(Ordering::Acquire) {
            Err(Errno::CANCELED)
        } else {
            Ok(())
        }
    }

    fn must_be_whole(&self) -> Result<(), HeldError> {
        let is_undoing = self.shadow.as_ref().is_some_and(Shadow::is_undoing);
        // An abort that failed had dropped what was pending: what is left is not what programs wrote.
        let is_given_up = self.stage() == Stage::Open && self.refusing.load(Ordering::Acquire);
        if is_undoing || is_given_up {
            Err(HeldError::Undoing)
        } else {
            Ok(())
        }
    }

    /// Every change fails with ECANCELED from now on.
    pub(crate) fn stop_for_good(&self) {
        self.refusing.store(true, Ordering::Release);
    }

    pub(crate) fn is_open(&self) -> bool {
        *self.stage.lock() == Stage::Open && !self.refusing.load(Ordering::Acquire)
    }

    pub(crate) fn stage(&self) -> Stage {
        *self.stage.lock()
    }

    pub(crate) fn turn(&self, stage: Stage) {
        *self.stage.lock() = stage;
        self.turned.notify_all();
    }

    /// The change of an object, made if there is none.
    pub(crate) fn change<'a>(
        &self,
        object: &Arc<Object<B>>,
        inner: &'a mut Inner<B>,
    ) -> &'a mut Change<B> {
        inner.change.get_or_insert_with(|| {
            let number = self.next_number();
            self.changed.lock().insert(number, Arc::clone(object));
            let origin = object.seat.lock().clone();
            Box::new(Change::new(number, origin))
        })
    }

    /// Where to stage an object that is made in `parent`: with the group and the ACL that the kernel would
    /// give it there.
    pub(crate) fn nest(&self, base: &B, parent: &B::Inode) -> Result<(String, B::Inode), Errno> {
        let attr = base.attr(parent)?;
        let group = (attr.mode & libc::S_ISGID != 0).then_some(attr.gid);
        let acl_name = OsStr::new("system.posix_acl_default");
        let acl = match base.has_default_acl(parent) {
            true => Some(base.get_xattr(parent, acl_name)?),
            false => None,
        };
        let mut nests = self.nests.lock();
        if let Some((name, inode)) = nests.get(&(group, acl.clone())) {
            return Ok((name.clone(), inode.clone()));
        }
        let name = format!("d{}", nests.len());
        let inode = staging::dir(base, &self.new, &name)?;
        if let Some(acl) = &acl {
            base.set_xattr(&inode, acl_name, acl, 0)?;
        }
        if let Some(gid) = group {
            base.set_owner(&inode, None, Some(gid))?;
            base.set_mode(&inode, 0o2700)?;
        }
        nests.insert((group, acl), (name.clone(), inode.clone()));
        Ok((name, inode))
    }

    /// Where twins are staged, which inherit nothing.
    pub(crate) fn plain_nest(&self, base: &B) -> Result<(String, B::Inode), Errno> {
        let mut plain = self.plain_nest.lock();
        if plain.is_none() {
            *plain = Some(self.nest(base, &self.dir)?);
        }
        Ok(plain.clone().expect("just made"))
    }
}

/// A transaction as it is found in the backing.
pub(super) struct StoredTransaction<B: Backing> {
    serial: u64,
    name: String,
    pub(super) dir: B::Inode,
}

/// A backing whose directories can be in a transaction.
pub struct Held<B: Backing> {
    pub(crate) base: B,
    top: Inode<B>,
    pub(crate) objects: Mutex<HashMap<Key, Weak<Object<B>>>>,
    /// Commits of a scope that can be undone.
    pub(crate) history: u32,
    /// Where several hosts commit together.
    pub(crate) members: Option<Members>,
    /// [`Opening::arena`].
    pub(crate) arena: Option<ArenaId>,
    /// Of transactions that begin.
    pub(crate) mode: Mode,
    /// The host that aborted the last transaction of a scope, where that was another one.
    pub(crate) stopped_by: Mutex<BTreeMap<Vec<u8>, String>>,
    /// Held by whoever leaves a vote, and by whoever says something in one without the lock of the names: made
    /// anew for that after the last host has left, it would stay for ever. Nothing else is locked meanwhile.
    pub(crate) leaving: Mutex<()>,
    /// Names of objects that are not shown.
    pub(crate) hidden: HiddenLinks<B>,
    pub(crate) scopes: RwLock<Vec<Arc<Scope<B>>>>,
    /// The second place for what is prepared.
    pub(crate) mirror: Option<Mirror<B>>,
    /// Without transactions: there is a directory `.firn`.
    hides_own: bool,
    /// Directories of transactions that are over and could not be removed: they mean nothing.
    leftovers: Mutex<Vec<(u64, B::Inode)>>,
    /// Held by who changes the list of committed numbers.
    finishing: Mutex<()>,
    pub(crate) scope_count: AtomicUsize,
    pub(crate) last_serial: AtomicU64,
    /// Held for reading while names are looked up, for writing while a transaction changes them.
    pub(crate) tree: RwLock<()>,
    /// Held for reading while data is changed, for writing while a transaction begins, is prepared or ends.
    pub(crate) data: RwLock<()>,
}

impl<B: Backing> Drop for Held<B> {
    fn drop(&mut self) {
        // Names of a transaction that is still open lead to objects that lead to their directory.
        for scope in self.scopes.get_mut().drain(..) {
            for object in std::mem::take(&mut *scope.changed.lock()).into_values() {
                object.inner.write().change = None;
            }
        }
    }
}

/// That something may be changed, as long as the guard is held, and the transaction that it belongs to.
pub(crate) type Allowed<G, B> = (G, Option<Arc<Scope<B>>>);

/// Proof that names stay, or that they may be changed.
pub(crate) enum Names<'a> {
    Shared(#[allow(dead_code)] RwLockReadGuard<'a, ()>),
    Changing(#[allow(dead_code)] RwLockWriteGuard<'a, ()>),
}

impl<B: Backing> Held<B> {
    /// A backing without transactions: every call goes through, but `.firn` at the top is Firn's there, too, and
    /// neither shown nor made.
    pub fn plain(base: B) -> Self {
        let has_own = base.lookup(&base.root(), OsStr::new(staging::TOP));
        let top = Inode::Top(base.root());
        let mut held = Self::assemble(base, top);
        held.hides_own = has_own.is_ok_and(|(_, attr)| attr.kind == Kind::Dir);
        held
    }

    /// The same for a caller of Firn's own who keeps things in `.firn`: every call goes through. (A stub tree.)
    pub fn plain_with_own(base: B) -> Self {
        let top = Inode::Plain(base.root());
        Self::assemble(base, top)
    }

    /// Whether the top of a backing without transactions has one directory more than it shows.
    pub(crate) fn hides_own(&self) -> bool {
        self.hides_own
    }

    fn assemble(base: B, top: Inode<B>) -> Self {
        Self {
            base,
            top,
            objects: Mutex::default(),
            history: 0,
            members: None,
            arena: None,
            mode: Mode::Buffer,
            stopped_by: Mutex::default(),
            leaving: Mutex::default(),
            hidden: HiddenLinks::default(),
            scopes: RwLock::default(),
            mirror: None,
            hides_own: false,
            leftovers: Mutex::default(),
            finishing: Mutex::new(()),
            scope_count: AtomicUsize::new(0),
            last_serial: AtomicU64::new(0),
            tree: RwLock::new(()),
            data: RwLock::new(()),
        }
    }

    /// Whether there is something in the backing that [`Held::open`] must see to first.
    pub fn has_transactions(base: &B) -> Result<bool, HeldError> {
        let Some((firn, _)) = staging::find_dir(base, &base.root(), staging::TOP)? else {
            return Ok(false);
        };
        Ok(staging::list(base, &firn)?
            .iter()
            .any(|(name, ..)| name.starts_with(b"tx-")))
    }

    /// A backing that can have transactions, after what earlier ones left is finished or undone. For who has no
    /// arena with data of theirs.
    pub fn open(base: B) -> Result<(Self, Outcome), HeldError> {
        Self::open_with_history(base, 0)
    }

    /// The same, keeping what brings back as many commits of each scope.
    pub fn open_with_history(base: B, history: u32) -> Result<(Self, Outcome), HeldError> {
        Self::open_with(
            base,
            Opening {
                history,
                ..Opening::default()
            },
            |_| Ok(()),
        )
    }

    /// The same for one of several hosts that commit together.
    pub fn open_of_members(base: B, members: Members) -> Result<(Self, Outcome), HeldError> {
        Self::open_with(
            base,
            Opening {
                members: Some(members),
                ..Opening::default()
            },
            |_| Ok(()),
        )
    }

    /// The same where an arena has data that was not drained. Before anything is changed `drop_pending` gets the
    /// scopes of which nothing that is pending in it counts: it was written in a transaction that is no more, or after
    /// the state that was prepared. Of transactions that were begun with another arena it is taken down what that one
    /// has to drop. What tells of the transactions is removed after that, so a crash at any instant leaves either the
    /// data dropped or a next time.
    pub fn open_with<E: From<HeldError>>(
        base: B,
        opening: Opening,
        drop_pending: impl FnOnce(&[Vec<u8>]) -> Result<(), E>,
    ) -> Result<(Self, Outcome), E> {
        let mut held = Self::tracking(base)?;
        (held.history, held.members) = (opening.history, opening.members);
        held.arena = opening.arena;
        let scopes = held.scopes_to_drop()?;
        if !scopes.is_empty() {
            drop_pending(&scopes)?;
        }
        held.tell_arenas()?;
        let outcome = held.finish_or_undo()?;
        Ok((held, outcome))
    }

    /// A backing that can have transactions, of which nothing is known yet.
    pub(super) fn tracking(base: B) -> Result<Self, HeldError> {
        let root = base.root();
        let attr = base.attr(&root)?;
        let inner = Inner {
            base: Some(root.clone()),
            change: None,
        };
        let top = Arc::new(Object::new((attr.dev, attr.ino), Kind::Dir, inner, None));
        let has_own = staging::find_dir(&base, &root, staging::TOP)?.is_some();
        let held = Self::assemble(base, Inode::Tracked(Arc::clone(&top)));
        held.objects.lock().insert(top.key, Arc::downgrade(&top));
        if has_own {
            held.hide_own_top();
        }
        Ok(held)
    }

    /// The directories of transactions that are there, by their numbers.
    pub(super) fn stored_transactions(
        &self,
        home: &B::Inode,
    ) -> Result<Vec<StoredTransaction<B>>, OwnError> {
        let mut names = staging::list(&self.base, home)?;
        names.sort_by(|a, b| a.0.cmp(&b.0));
        let mut found = Vec::new();
        for (name, ..) in names {
            let name = String::from_utf8_lossy(&name).into_owned();
            let Some(serial) = name.strip_prefix("tx-").and_then(|n| n.parse::<u64>().ok()) else {
                continue;
            };
            let dir = staging::must_find_dir(&self.base, home, &name)
                .map_err(|error| error.below(&self.staging_path()))?;
            found.push(StoredTransaction { serial, name, dir });
        }
        Ok(found)
    }

    /// The scope of a transaction that is not decided for.
    pub(super) fn scope_to_drop(
        &self,
        stored: &StoredTransaction<B>,
    ) -> Result<Option<Vec<u8>>, HeldError> {
        let StoredTransaction { dir, name, .. } = stored;
        for decided in [staging::COMMIT, staging::UNDO] {
            if staging::find(&self.base, dir, OsStr::new(decided))?.is_some() {
                // What came after the decision counts.
                return Ok(None);
            }
        }
        let record = self.load_record(dir, name, staging::RECORD)?;
        let scope = match &record {
            Some(record) => Some(record.scope.clone()),
            None => staging::load_scope(&self.base, dir, staging::OPEN)?,
        };
        let Some(scope) = scope else { return Ok(None) };
        let is_committed = self.is_shared_commit(dir, &scope)?
            || match &record {
                Some(record) => self.decided(record.id, &scope)? == Some(true),
                None => false,
            };
        Ok((!is_committed).then_some(scope))
    }

    /// Finishes or undoes what earlier transactions left.
    fn finish_or_undo(&self) -> Result<Outcome, HeldError> {
        let mut outcome = Outcome::default();
        if let Some(home) = self.find_staging_dir()? {
            self.recover_shared(&home)?;
            self.recover(&home, &mut outcome)?;
        }
        self.leave_shared_ones(&outcome.waiting)?;
        self.leave_old_votes(&outcome.waiting)?;
        Ok(outcome)
    }

    /// What becomes of changes of transactions that begin.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The same, with transactions that begin in this mode.
    #[must_use]
    pub fn in_mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    fn recover(&self, firn: &B::Inode, outcome: &mut Outcome) -> Result<(), HeldError> {
        for StoredTransaction { serial, name, dir } in self.stored_transactions(firn)? {
            self.last_serial.fetch_max(serial, Ordering::Relaxed);
            let record = |file| self.load_record(&dir, &name, file);
            let mut prepared = record(staging::RECORD)?;
            // What the other hosts decided while this one was away.
            match prepared
                .as_ref()
                .map(|record| self.decided(record.id, &record.scope))
                .transpose()?
                .flatten()
            {
                None => {}
                Some(true) => {
                    let from = OsStr::new(staging::RECORD);
                    let to = OsStr::new(staging::COMMIT);
                    self.base
                        .rename(&dir, from, &dir, to, RenameFlags::empty())?;
                    self.base.sync_dir(&dir)?;
                }
                Some(false) => {
                    prepared = None;
                    self.base.unlink(&dir, OsStr::new(staging::RECORD))?;
                    self.base.sync_dir(&dir)?;
                }
            }
            let decided = match record(staging::UNDO)? {
                Some(log) => Some((log, Direction::Undo)),
                None => record(staging::COMMIT)?.map(|log| (log, Direction::Redo)),
            };
            if let Some((log, direction)) = decided {
                let new = staging::dir(&self.base, &dir, staging::NEW)?;
                let away = staging::dir(&self.base, &dir, staging::AWAY)?;
                let below = (&self.base, self.device());
                Apply::new(below, (&log, direction), &new, &away).run()?;
                self.sync_what_was_carried_out(firn, &log.scope)?;
                self.finish(&dir, (&log, direction), serial)?;
                self.remove_or_keep(firn, serial, &dir)?;
                outcome.finished.push(log.id_after(direction));
            } else if let Some(record) = prepared {
                outcome.waiting.push((record.id, record.scope.clone()));
                self.wait_for_decision(serial, dir, record)?;
            } else {
                // Without the mark it was over, and only its removal was not.
                let scope = staging::load_scope(&self.base, &dir, staging::OPEN)?;
                if let Some(scope) = &scope {
                    self.undo_stored(&dir, &name, scope)?;
                }
                outcome.undone.extend(scope);
                self.remove(firn, &dir, &name)?;
            }
        }
        self.clear_kept_logs(firn)?;
        Ok(())
    }

    /// A transaction that an earlier firnd prepared: its scope is as it was before, and frozen.
    pub(crate) fn wait_for_decision(
        &self,
        serial: u64,
        dir: B::Inode,
        record: ChangeLog,
    ) -> Result<(), HeldError> {
        let mut root = match &self.top {
            Inode::Tracked(top) => Arc::clone(top),
            Inode::Plain(_) | Inode::Top(_) => return Ok(()),
        };
        for name in record
            .scope
            .split(|&b| b == b'/')
            .filter(|name| !name.is_empty())
        {
            let name = OsStr::from_bytes(name);
            let parent = root.inner.read().inode(&self.base)?;
            let (inode, attr) = self.base.lookup(&parent, name)?;
            root = self.intern(inode, &attr, &root, name);
        }
        let anchored: Vec<_> = record
            .entries
            .iter()
            .filter_map(|entry| Some((entry.identity, entry.anchor_at.clone()?)))
            .collect();
        let scope = self.new_scope(serial, root, record.scope.clone(), dir, Some(record))?;
        for (identity, (nest, name)) in anchored {
            if let Some((nest, _)) = staging::find_dir(&self.base, &scope.new, &nest)? {
                self.found_hidden(serial, (self.device(), identity.ino), &nest, name, false);
            }
        }
        if let Some(shadow) = &scope.shadow {
            for (key, name, is_dir) in shadow.kept(&self.base)? {
                self.found_hidden(serial, key, shadow.kept_dir(), name, is_dir);
            }
        }
        self.enter(scope);
        Ok(())
    }

    fn new_scope(
        &self,
        serial: u64,
        root: Arc<Object<B>>,
        path: Vec<u8>,
        dir: B::Inode,
        recovered: Option<ChangeLog>,
    ) -> Result<Scope<B>, Errno> {
        let stage = recovered
            .as_ref()
            .map_or(Stage::Open, |record| Stage::Prepared(record.id));
        let shadow = self.shadow_of(&dir, &path)?;
        Ok(Scope {
            serial,
            root,
            path,
            new: staging::dir(&self.base, &dir, staging::NEW)?,
            shadow,
            away: staging::dir(&self.base, &dir, staging::AWAY)?,
            dir,
            nests: Mutex::default(),
            plain_nest: Mutex::default(),
            last_number: AtomicU64::new(0),
            small_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            changed: Mutex::default(),
            stage: Mutex::new(stage),
            turned: Condvar::new(),
            refusing: AtomicBool::new(false),
            recovered,
            is_undo: false,
            used: Mutex::default(),
            carried: carry::Carried::default(),
        })
    }

    /// What undoes a commit, as the transaction that it is going to be.
    pub(crate) fn undoing_scope(
        &self,
        serial: u64,
        root: &Arc<Object<B>>,
        dir: B::Inode,
        record: ChangeLog,
    ) -> Result<Scope<B>, Errno> {
        let path = record.scope.clone();
        let id = record.id_after(Direction::Undo);
        let scope = self.new_scope(serial, Arc::clone(root), path, dir, Some(record))?;
        scope.turn(Stage::Decided(id));
        Ok(Scope {
            is_undo: true,
            ..scope
        })
    }

    /// The backing below.
    pub fn base(&self) -> &B {
        &self.base
    }

    pub(crate) fn top(&self) -> &Inode<B> {
        &self.top
    }

    /// The device that the top is on.
    pub(crate) fn device(&self) -> u64 {
        match &self.top {
            Inode::Tracked(top) => top.key.0,
            Inode::Plain(_) | Inode::Top(_) => 0,
        }
    }

    /// The object of an inode that was found as `name` in `parent`.
    pub(crate) fn intern(
        &self,
        inode: B::Inode,
        attr: &firn_backing::Attr,
        parent: &Arc<Object<B>>,
        name: &OsStr,
    ) -> Arc<Object<B>> {
        let key = (attr.dev, attr.ino);
        let mut objects = self.objects.lock();
        if let Some(object) = objects.get(&key).and_then(Weak::upgrade) {
            if object.parent().is_some() {
                object.sit(parent, name);
            }
            return object;
        }
        let inner = Inner {
            base: Some(inode),
            change: None,
        };
        let seat = Some((Arc::clone(parent), name.to_owned()));
        let object = Arc::new(Object::new(key, attr.kind, inner, seat));
        self.look_for_hidden(&object);
        self.note(&mut objects, &object);
        object
    }

    fn note(&self, objects: &mut HashMap<Key, Weak<Object<B>>>, object: &Arc<Object<B>>) {
        // Those that nobody refers to any more go when the table would grow.
        if objects.len() == objects.capacity() {
            objects.retain(|_, weak| weak.strong_count() > 0);
        }
        objects.insert(object.key, Arc::downgrade(object));
    }

    /// Takes up a new object of a transaction.
    pub(crate) fn adopt(&self, object: &Arc<Object<B>>) {
        self.note(&mut self.objects.lock(), object);
    }

    /// The transaction that an object is in.
    pub(crate) fn scope_of(&self, object: &Arc<Object<B>>) -> Option<Arc<Scope<B>>> {
        if self.scope_count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let scopes = self.scopes.read();
        let mut at = Some(Arc::clone(object));
        while let Some(object) = at {
            if let Some(scope) = scopes
                .iter()
                .find(|scope| Arc::ptr_eq(&scope.root, &object))
            {
                return Some(Arc::clone(scope));
            }
            at = object.parent();
        }
        None
    }

    /// Whether an object is, or is above, the top of a transaction's scope.
    pub(crate) fn holds_a_scope(&self, object: &Arc<Object<B>>) -> bool {
        self.scopes
            .read()
            .iter()
            .any(|scope| scope.root.is_below(object))
    }

    /// For a change of names in the directory `object`: waits until it is allowed.
    pub(crate) fn changing(&self, object: &Arc<Object<B>>) -> Result<Allowed<Names<'_>, B>, Errno> {
        loop {
            let names = self.tree.read();
            if self.scope_of(object).is_none() {
                return Ok((Names::Shared(names), None));
            }
            drop(names);
            let names = self.tree.write();
            match self.scope_of(object) {
                Some(scope) if scope.is_open() => return Ok((Names::Changing(names), Some(scope))),
                Some(scope) => {
                    drop(names);
                    scope.wait()?;
                }
                None => {}
            }
        }
    }

    /// The same for a change of data or attributes.
    pub(crate) fn writing(
        &self,
        object: &Arc<Object<B>>,
    ) -> Result<Allowed<RwLockReadGuard<'_, ()>, B>, Errno> {
        loop {
            let data = self.data.read();
            // No commit makes anything of it, so it waits for none.
            if object.is_nameless() {
                return Ok((data, None));
            }
            match self.scope_of(object) {
                None => return Ok((data, None)),
                Some(scope) if scope.is_open() => return Ok((data, Some(scope))),
                Some(scope) => {
                    drop(data);
                    scope.wait()?;
                }
            }
        }
    }

    // ---- transactions ------------------------------------------------------------------------

    /// Begins a transaction in a directory and all below it. `path` is its own, relative to the backing.
    pub fn begin(&self, inode: &Inode<B>, path: &[u8]) -> Result<(), HeldError> {
        let Inode::Tracked(root) = inode else {
            return Err(HeldError::NotTransactional);
        };
        if root.kind != Kind::Dir {
            return Err(HeldError::ScopeNotDirectory);
        }
        self.carry_out_around(root)?;
        let _names = self.tree.write();
        let _data = self.data.write();
        let mut before = None;
        for scope in self.scopes.read().iter() {
            if scope.can_be_followed(root) {
                before = Some(Arc::clone(scope));
            } else if root.is_below(&scope.root) || scope.root.is_below(root) {
                return Err(HeldError::Open {
                    scope: scope.path.as_slice().into(),
                });
            }
        }
        let firn = self.hidden_home()?;
        self.remove_leftovers(&firn);
        let serial = self.last_serial.fetch_add(1, Ordering::Relaxed) + 1;
        let name = format!("tx-{serial}");
        let dir = staging::dir(&self.base, &firn, &name)?;
        let started = self
            .start(serial, root, path, &firn, &dir)
            .and_then(|scope| self.mark_open(scope));
        let (scope, result) = match started {
            Ok(started) => started,
            Err(error) => {
                self.remove_or_leave(&firn, serial, &dir);
                return Err(error);
            }
        };
        self.stopped_by.lock().remove(path);
        match before {
            Some(before) => before.follow(scope),
            None => self.enter(scope),
        }
        result
    }

    fn start(
        &self,
        serial: u64,
        root: &Arc<Object<B>>,
        path: &[u8],
        firn: &B::Inode,
        dir: &B::Inode,
    ) -> Result<Scope<B>, HeldError> {
        if self.mode == Mode::Shadow {
            if !Shadow::tells_inodes(&self.base, firn, &format!("tx-{serial}"))? {
                return Err(HeldError::Inodes);
            }
            match &self.members {
                None => Shadow::make(&self.base, dir)?,
                Some(_) => self.join(dir, path)?,
            }
        }
        self.make_scope(serial, root, path, dir)
            .inspect_err(|_| self.unjoin(path))
    }

    fn make_scope(
        &self,
        serial: u64,
        root: &Arc<Object<B>>,
        path: &[u8],
        dir: &B::Inode,
    ) -> Result<Scope<B>, HeldError> {
        if self.mode == Mode::Shadow {
            // What is brought back must have been there.
            match path {
                b"" => self.base.sync_all()?,
                _ => self.base.sync_tree(&root.inner.read().inode(&self.base)?)?,
            }
        }
        let scope = self.new_scope(serial, Arc::clone(root), path.to_vec(), dir.clone(), None)?;
        self.note_arena(dir)?;
        staging::put(&self.base, dir, staging::OPEN, path)?;
        Ok(scope)
    }

    /// From here on a crash undoes what is changed, so where this fails the mark has to go: programs go on as outside of
    /// a transaction. If that fails, too, the transaction is open all the same, and can be aborted.
    fn mark_open(&self, scope: Scope<B>) -> Result<(Scope<B>, Result<(), HeldError>), HeldError> {
        let Err(errno) = self.base.sync_dir(&scope.dir) else {
            return Ok((scope, Ok(())));
        };
        match self.forget(&scope.dir) {
            Ok(()) => {
                self.unjoin(&scope.path);
                Err(errno.into())
            }
            Err(_) => Ok((scope, Err(errno.into()))),
        }
    }

    /// Makes the transaction durable and leaves its outcome open. Changes wait until it is decided. Where this
    /// fails the transaction is as it was.
    pub fn prepare(&self, inode: &Inode<B>, id: u64) -> Result<(), HeldError> {
        let scope = self.newest_at(inode)?;
        let _names = self.tree.write();
        let _data = self.data.write();
        self.check_all(&scope);
        scope.must_be_whole()?;
        match *scope.stage.lock() {
            Stage::Open => {}
            Stage::Prepared(found) if found == id => return Ok(()),
            Stage::Prepared(found) | Stage::Decided(found) => {
                return Err(HeldError::OtherId { found, wanted: id });
            }
            Stage::Ended => return Err(HeldError::None),
        }
        self.write_record(&scope, id)?;
        self.place_record(&scope, staging::RECORD)
            .inspect_err(|_| self.withdraw_backup(&scope))?;
        if let Err(errno) = self.base.sync_dir(&scope.dir) {
            // Nobody was told: it goes back, or it stays and can be decided.
            if self
                .base
                .unlink(&scope.dir, OsStr::new(staging::RECORD))
                .is_err()
            {
                scope.turn(Stage::Prepared(id));
            } else {
                self.withdraw_backup(&scope);
            }
            return Err(errno.into());
        }
        scope.turn(Stage::Prepared(id));
        Ok(())
    }

    /// Makes what is staged durable, and a record that tells of it, which is in force once it is in its place.
    fn write_record(&self, scope: &Scope<B>, id: u64) -> Result<(), HeldError> {
        let mut record = self.record(scope, id)?;
        self.stage_undo(scope, &mut record)?;
        self.base.sync_changes()?;
        staging::write(&self.base, &scope.dir, staging::RECORD, &record.encode())?;
        self.sync_staging_dir()?;
        // Last, so that little can fail after it.
        self.back_up(scope, &record)
    }

    fn place_record(&self, scope: &Scope<B>, name: &str) -> Result<(), Errno> {
        let new = staging::new_name(staging::RECORD);
        let flags = RenameFlags::empty();
        self.base.rename(
            &scope.dir,
            OsStr::new(&new),
            &scope.dir,
            OsStr::new(name),
            flags,
        )
    }

    /// Holds the new objects that anybody refers to, before their staged names go. The others are found by their
    /// new names when they are looked up.
    fn hold_new(&self, scope: &Scope<B>) -> Result<(), Errno> {
        // The status asks for the list, and a look-up may hang.
        let changed: Vec<_> = scope.changed.lock().values().cloned().collect();
        for object in &changed {
            let mut inner = object.inner.write();
            let is_new = inner.base.is_none();
            let Some(change) = inner.change.as_mut().filter(|_| is_new) else {
                continue;
            };
            // The scope's, that of this list, and one for each name.
            let ours = 2 + usize::try_from(change.links).unwrap_or(0);
            let is_used = object.kind == Kind::Dir || Arc::strong_count(object) > ours;
            if let Some(twin) = change
                .twin
                .as_mut()
                .filter(|twin| is_used && twin.held.is_none())
            {
                twin.held = Some(twin.inode(&self.base)?);
            }
        }
        Ok(())
    }

    /// From now on every change in the transaction fails with ECANCELED, also one that waits for the outcome:
    /// the next call ends it.
    pub fn refuse(&self, inode: &Inode<B>) -> Result<(), HeldError> {
        let scope = self.scope_at(inode)?;
        // Under the lock of those who wait, so that none of them misses it.
        let stage = scope.stage.lock();
        scope.refusing.store(true, Ordering::Release);
        drop(stage);
        scope.turned.notify_all();
        Ok(())
    }

    /// Throws the transaction away: the tree is as it was when it began. What was made in it is gone: ESTALE.
    pub fn abort(&self, inode: &Inode<B>) -> Result<(), HeldError> {
        let scope = self.scope_at(inode)?;
        let _names = self.tree.write();
        let _data = self.data.write();
        if self.drop_next(&scope)? {
            return Ok(());
        }
        self.check_all(&scope);
        self.unhide(&scope);
        let stage = *scope.stage.lock();
        let several = scope
            .shadow
            .as_ref()
            .filter(|shadow| shadow.is_of_several());
        match stage {
            _ if several.is_some() => {}
            Stage::Open => {
                self.withdraw_from_votes(&scope.path)?;
                self.withdraw_for_good(scope.serial)?;
                // With the mark the next mount would drop what is written from now on.
                if scope.shadow.is_none() {
                    self.forget(&scope.dir)?;
                }
            }
            Stage::Prepared(id) => {
                self.decide_vote(id, &scope.path, false)?;
                self.withdraw_for_good(scope.serial)?;
                match scope.shadow {
                    // From here on a crash ends in the tree before.
                    Some(_) => self.forget_record(&scope.dir)?,
                    None => self.forget(&scope.dir)?,
                }
            }
            Stage::Decided(id) => return Err(HeldError::Decided { id }),
            Stage::Ended => return Err(HeldError::None),
        }
        if let Some(shadow) = several {
            self.abort_shared(&scope, shadow, stage)?;
        } else if let Some(shadow) = &scope.shadow {
            scope.stop_for_good();
            self.undo_shadow(&scope, shadow)?;
            self.forget(&scope.dir)?;
        }
        let changed = std::mem::take(&mut *scope.changed.lock());
        for (_, object) in changed {
            let mut inner = object.inner.write();
            inner.change = None;
            if inner.base.is_none() {
                self.objects.lock().remove(&object.key);
            }
            object.let_go();
        }
        self.dirs_are_back(&scope);
        self.end(&scope);
        self.clean_up(&scope);
        if let Stage::Prepared(id) = stage {
            self.leave_vote(id, &scope.path)?;
        }
        Ok(())
    }

    /// Removes what a transaction staged. Its outcome is certain, and the next open removes what is left.
    fn clean_up(&self, scope: &Scope<B>) {
        let is_removed = match self.staging_dir() {
            Ok(firn) => self.remove_or_leave(&firn, scope.serial, &scope.dir),
            Err(error) => {
                tracing::warn!(%error, serial = scope.serial, "cannot remove what a transaction staged");
                self.leftovers
                    .lock()
                    .push((scope.serial, scope.dir.clone()));
                false
            }
        };
        // What several hosts share goes with the last of them.
        if is_removed && !scope.shadow.as_ref().is_some_and(Shadow::is_of_several) {
            self.links_are_gone(scope);
        }
    }

    /// Removes the directory of a transaction that is over; whether that is done. What is left goes when the next one
    /// begins, or with the next mount.
    fn remove_or_leave(&self, firn: &B::Inode, serial: u64, dir: &B::Inode) -> bool {
        let removed = self.remove_or_keep(firn, serial, dir);
        if let Err(errno) = removed {
            tracing::warn!(%errno, serial, "cannot remove what a transaction staged; it is tried again");
            self.leftovers.lock().push((serial, dir.clone()));
        }
        removed.is_ok()
    }

    fn remove_leftovers(&self, firn: &B::Inode) {
        let leftovers = std::mem::take(&mut *self.leftovers.lock());
        for (serial, dir) in leftovers {
            self.remove_or_leave(firn, serial, &dir);
        }
    }

    /// A record in the directory `name` of `.firn/`; `None` where there is none.
    pub(crate) fn load_record(
        &self,
        dir: &B::Inode,
        name: &str,
        file: &str,
    ) -> Result<Option<ChangeLog>, HeldError> {
        let path = format!("{}/{name}/{file}", self.staging_path());
        staging::load(&self.base, dir, file)
            .map_err(|error| error.below(&format!("{}/{name}", self.staging_path())))?
            .map(|bytes| {
                ChangeLog::decode(&bytes).map_err(|source| HeldError::Record { path, source })
            })
            .transpose()
    }

    /// From here on what is in the scope is in its transaction.
    pub(crate) fn enter(&self, scope: Scope<B>) {
        self.scopes.write().push(Arc::new(scope));
        self.scope_count.fetch_add(1, Ordering::Release);
    }

    /// Paths of scopes.
    pub(crate) fn scopes_where(&self, which: impl Fn(&Scope<B>) -> bool) -> Vec<Vec<u8>> {
        self.scopes
            .read()
            .iter()
            .filter(|scope| which(scope))
            .map(|scope| scope.path.clone())
            .collect()
    }

    /// The object of an inode, if anybody refers to it.
    pub(crate) fn known(&self, key: Key) -> Option<Arc<Object<B>>> {
        self.objects.lock().get(&key).and_then(Weak::upgrade)
    }

    fn end(&self, scope: &Arc<Scope<B>>) {
        self.unhide(scope);
        let mut scopes = self.scopes.write();
        scopes.retain(|other| !Arc::ptr_eq(other, scope));
        match scope.carried.take_next() {
            Some(next) => scopes.push(next),
            None => drop(self.scope_count.fetch_sub(1, Ordering::Release)),
        }
        drop(scopes);
        scope.turn(Stage::Ended);
    }

    /// The number of the last commit of a scope, or of what was restored since.
    pub fn committed(&self, scope: &[u8]) -> Result<Option<u64>, HeldError> {
        let Some(firn) = self.find_staging_dir()? else {
            return Ok(None);
        };
        Ok(staging::load_numbers(&self.base, &firn)?.remove(scope))
    }

    /// Makes the files those of checkpoint `id`: finishes the transaction that was prepared with it, or throws
    /// away what came after it, commits too, as far as they are kept.
    pub fn restore(&self, inode: &Inode<B>, id: u64) -> Result<(), HeldError> {
        if let Ok(scope) = self.scope_at(inode)
            && scope.is_undo
        {
            // What an attempt before this one began.
            self.carry_out(&scope.path)?;
        }
        let scope = match self.newest_at(inode) {
            Err(HeldError::None) => None,
            found => Some(found?),
        };
        let stage = scope.as_ref().map(|scope| *scope.stage.lock());
        if let Some(Stage::Prepared(found) | Stage::Decided(found)) = stage
            && found == id
        {
            return self.commit(inode, id);
        }
        let path = match &scope {
            Some(scope) => scope.path.clone(),
            None => self.path_of(inode)?,
        };
        let steps = self.steps_back(&path, id)?;
        if scope.is_some() {
            self.abort(inode)?;
        }
        let Inode::Tracked(root) = inode else {
            return Err(HeldError::None);
        };
        self.withdraw_what_is_over()?;
        let _names = self.tree.write();
        let _data = self.data.write();
        steps
            .into_iter()
            .try_for_each(|serial| self.undo(root, serial))
    }

    /// The path of a directory, relative to the backing.
    fn path_of(&self, inode: &Inode<B>) -> Result<Vec<u8>, HeldError> {
        let Inode::Tracked(object) = inode else {
            return Err(HeldError::None);
        };
        let mut path = Vec::new();
        let mut at = object.seat.lock().clone();
        while let Some((parent, name)) = at {
            let below = std::mem::replace(&mut path, name.as_bytes().to_vec());
            if !below.is_empty() {
                path.push(b'/');
                path.extend(below);
            }
            at = parent.seat.lock().clone();
        }
        Ok(path)
    }

    /// The transactions that are not over; a commit comes before the transaction that follows it.
    fn scopes_in_order(&self) -> Vec<Arc<Scope<B>>> {
        let with_next = |scope: &Arc<Scope<B>>| [Some(Arc::clone(scope)), scope.carried.next()];
        // Under the lock: at the end of a commit the one that follows goes from it to the list.
        let scopes = self.scopes.read();
        scopes.iter().flat_map(with_next).flatten().collect()
    }

    /// For reports: the transactions that are not over; one that is to be carried out comes before the next one of its
    /// scope. Whoever acts on one asks for its handle ([`Held::current_transaction`]).
    pub fn transactions(&self) -> Vec<Transaction> {
        let one = |scope: Arc<Scope<B>>| Transaction {
            scope: scope.path.clone(),
            stage: *scope.stage.lock(),
            objects: match &scope.recovered {
                Some(record) => record.entries.len() as u64,
                None => scope
                    .shadow
                    .as_ref()
                    .map_or(scope.changed.lock().len() as u64, Shadow::count),
            },
            written_bytes: scope.written_bytes.load(Ordering::Relaxed),
            states: scope.count_states(),
            is_recovered: scope.recovered.is_some(),
            trouble: scope.carried.trouble(),
            backup: self.backup_progress(&scope),
        };
        let all = self.scopes_in_order().into_iter().map(one);
        // One may have ended meanwhile.
        all.filter(|one| one.stage != Stage::Ended).collect()
    }

    pub(crate) fn scope_at(&self, inode: &Inode<B>) -> Result<Arc<Scope<B>>, HeldError> {
        let Inode::Tracked(object) = inode else {
            return Err(HeldError::None);
        };
        self.scope_of(object)
            .filter(|scope| Arc::ptr_eq(&scope.root, object))
            .ok_or(HeldError::None)
    }

    /// After the last step of a commit: its number is noted, what undoes it is kept, and its record goes.
    pub(crate) fn finish(
        &self,
        dir: &B::Inode,
        (log, direction): (&ChangeLog, Direction),
        serial: u64,
    ) -> Result<(), HeldError> {
        self.base.sync_changes()?;
        // Before the record goes: without one a manifest tells of what is only there.
        self.drop_backup(serial);
        let _one = self.finishing.lock();
        let firn = self.staging_dir()?;
        let mut numbers = staging::load_numbers(&self.base, &firn)?;
        match log.id_after(direction) {
            NO_ID => numbers.remove(&log.scope),
            id => numbers.insert(log.scope.clone(), id),
        };
        staging::store_numbers(&self.base, &firn, &numbers)?;
        if direction == Direction::Redo && self.keep_log(&firn, serial, log)? {
            return Ok(());
        }
        Ok(self.forget(dir)?)
    }

    /// An earlier process may have carried a part out, and did not live to sync it.
    fn sync_what_was_carried_out(&self, firn: &B::Inode, scope: &[u8]) -> Result<(), Errno> {
        self.base.sync_tree(firn)?;
        let mut root = self.base.root();
        for name in scope.split(|&b| b == b'/').filter(|name| !name.is_empty()) {
            root = self.base.lookup(&root, OsStr::from_bytes(name))?.0;
        }
        self.base.sync_tree(&root)
    }

    /// Makes a transaction that was prepared an open one, durably.
    fn forget_record(&self, dir: &B::Inode) -> Result<(), Errno> {
        if staging::find(&self.base, dir, OsStr::new(staging::RECORD))?.is_some() {
            self.base.unlink(dir, OsStr::new(staging::RECORD))?;
        }
        self.base.sync_dir(dir)
    }

    /// Removes a transaction's record, durably: without it the rest means nothing.
    pub(crate) fn forget(&self, dir: &B::Inode) -> Result<(), Errno> {
        let is_shadow = Shadow::is_at(&self.base, dir)?;
        // In this order: a record that is still to be carried out goes last.
        for record in [
            staging::OPEN,
            staging::RECORD,
            staging::COMMIT,
            staging::UNDO,
        ] {
            if staging::find(&self.base, dir, OsStr::new(record))?.is_some() {
                self.base.unlink(dir, OsStr::new(record))?;
                // One that seemed to be open would be undone.
                if is_shadow {
                    self.base.sync_dir(dir)?;
                }
            }
        }
        self.base.sync_dir(dir)
    }

    /// Removes a transaction's directory.
    pub(crate) fn remove(&self, firn: &B::Inode, dir: &B::Inode, name: &str) -> Result<(), Errno> {
        self.forget(dir)?;
        staging::clear(&self.base, dir)?;
        self.base.rmdir(firn, OsStr::new(name))
    }
}
