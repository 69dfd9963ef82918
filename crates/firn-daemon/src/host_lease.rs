//! The lease of a host among several that share a backing: `.firn/host-NAME/lease` of those that commit together,
//! `.firn/tokens/host-NAME/lease` of those that share tokens or lanes, `.firn/log/host-NAME/lease` of those that log. The
//! file `terms` beside it says how the host mounts ([`crate::peers`]).
//!
//! Promises
//! * While a [`HostLease`] lives, no other firnd and no `firn recover --host` works in the name of this host, on any
//!   host that the file system's locks reach. Whether they reach the others is looked at when it is taken.
//! * A thread of its own shows that this host lives, so that a backing that hangs holds up nothing else.

use std::collections::HashMap;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use firn_backing::{Backing, DirBacking, Errno, Volume};
use firn_hosts::{
    BEAT_EVERY, Beat, Expected, Holder, Lease, LeaseError, OwnError, ReachError, STALE_AFTER,
    Terms, check_reach, own, publish_terms,
};
use firn_log::CONTAINERS;
use firn_transact::{Members, StoreError, TOP, other_staging_dirs, staging_dir_name};
use parking_lot::Mutex;

use crate::error::AttachError;

/// Name of the lease in a host's staging directory.
pub(crate) const LEASE: &str = "lease";
const PAUSE: Duration = Duration::from_millis(50);
/// How long the end of a mount waits until the lease is given back. Else the next holder waits.
const RELEASE_PATIENCE: Duration = Duration::from_secs(2);

/// Hosts that share tokens or logs show less often that they live: they share a disk, and each time is a sync.
const TOKEN_BEAT_EVERY: Duration = Duration::from_secs(2);
/// A host whose beat stands still for so long, and whose lock is free, writes to no logs. Should it go on after all, what
/// it writes goes to the next generation.
const LOG_STALE_AFTER: Duration = Duration::from_secs(30);
const _: () = assert!(TOKEN_BEAT_EVERY.as_millis() * 2 < STALE_AFTER.as_millis());

/// What hosts share, beside the backing.
#[derive(Clone, Copy)]
enum Sharing {
    Transactions,
    Tokens,
    /// Lanes, or tokens of a service elsewhere: nothing depends on the lease, and it only says that the host lives.
    Lanes,
    Logs,
}

impl Sharing {
    fn beat_every(self) -> Duration {
        match self {
            Self::Transactions => BEAT_EVERY,
            Self::Tokens | Self::Lanes | Self::Logs => TOKEN_BEAT_EVERY,
        }
    }

    /// Whether hosts believe each other's beats where locks do not reach.
    fn believes_beats(self) -> bool {
        matches!(self, Self::Logs | Self::Lanes)
    }

    fn no_reach(self, backing: &Path, reason: &ReachError) -> AttachError {
        let backing = backing.into();
        let reason = reason.to_string();
        match self {
            Self::Transactions => AttachError::LocksDoNotReach { backing, reason },
            Self::Tokens | Self::Lanes => AttachError::TokensDoNotReach { backing, reason },
            Self::Logs => AttachError::LogsDoNotReach { backing, reason },
        }
    }
}

/// The directory of one host, and that of all hosts above it.
struct StagingDir {
    base: DirBacking,
    top: <DirBacking as Volume>::Inode,
    dir: <DirBacking as Volume>::Inode,
    /// Relative to the backing.
    path: String,
    sharing: Sharing,
}

impl StagingDir {
    fn make_for_tokens(
        backing: &Path,
        members: &Members,
        sharing: Sharing,
    ) -> Result<Self, AttachError> {
        let make_parent = firn_hosts::tokens::make_dir;
        Self::make_below(backing, members, sharing, "tokens", make_parent)
    }

    fn make_for_logs(backing: &Path, members: &Members) -> Result<Self, AttachError> {
        let make_parent = firn_log::make_dir;
        Self::make_below(backing, members, Sharing::Logs, CONTAINERS, make_parent)
    }

    /// In the directory `parent` of `.firn/`.
    fn make_below(
        backing: &Path,
        members: &Members,
        sharing: Sharing,
        parent: &str,
        make_parent: fn(&DirBacking) -> Result<<DirBacking as Volume>::Inode, OwnError>,
    ) -> Result<Self, AttachError> {
        let base = open_backing(backing)?;
        let refused = own_error(backing);
        let top = make_parent(&base).map_err(&refused)?;
        let name = staging_dir_name(members);
        let path = format!("{TOP}/{parent}/{name}");
        let dir = own::dir(&base, &top, &name);
        let dir = dir.map_err(|error| refused(error.below(parent).below(TOP)))?;
        Ok(Self {
            base,
            top,
            dir,
            path,
            sharing,
        })
    }

    fn find(backing: &Path, members: &Members) -> Result<Option<Self>, AttachError> {
        let base = open_backing(backing)?;
        let refused = own_error(backing);
        let Some((top, _)) = own::find_dir(&base, &base.root(), TOP).map_err(&refused)? else {
            return Ok(None);
        };
        let found = own::find_dir(&base, &top, &staging_dir_name(members));
        let found = found.map_err(|error| refused(error.below(TOP)))?;
        Ok(found.map(|(dir, _)| Self::of_transactions(base, top, dir, members)))
    }

    fn make(backing: &Path, members: &Members) -> Result<Self, AttachError> {
        let base = open_backing(backing)?;
        let refused = own_error(backing);
        let top = own::dir(&base, &base.root(), TOP).map_err(&refused)?;
        let dir = own::dir(&base, &top, &staging_dir_name(members))
            .map_err(|error| refused(error.below(TOP)))?;
        Ok(Self::of_transactions(base, top, dir, members))
    }

    fn of_transactions(
        base: DirBacking,
        top: <DirBacking as Volume>::Inode,
        dir: <DirBacking as Volume>::Inode,
        members: &Members,
    ) -> Self {
        Self {
            base,
            top,
            dir,
            path: format!("{TOP}/{}", staging_dir_name(members)),
            sharing: Sharing::Transactions,
        }
    }
}

pub(crate) fn open_backing(backing: &Path) -> Result<DirBacking, AttachError> {
    DirBacking::open(backing).map_err(|source| AttachError::BackingUnusable {
        path: backing.into(),
        source,
    })
}

pub(crate) fn own_error(backing: &Path) -> impl Fn(OwnError) -> AttachError {
    let in_backing = AttachError::in_backing(backing);
    move |error| in_backing(StoreError::from(error).into())
}

/// What the thread that beats found out.
#[derive(Debug, Default)]
pub(crate) struct LeaseState {
    lost: OnceLock<String>,
}

impl LeaseState {
    /// Why this host has its lease no more: others may act in its name.
    pub(crate) fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }
}

/// Held until dropped.
#[derive(Debug)]
pub(crate) struct HostLease {
    state: Arc<LeaseState>,
    /// Dropped, it ends the thread.
    stop: Option<Sender<()>>,
    released: Receiver<()>,
}

impl HostLease {
    /// Takes the lease of a host that mounts, and looks whether locks keep the other hosts out. Waits for `patience`
    /// for a process of this name that ends.
    pub(crate) fn take(
        backing: &Path,
        members: &Members,
        terms: &Terms,
        patience: Duration,
    ) -> Result<Self, AttachError> {
        let staging = StagingDir::make(backing, members)?;
        Self::take_in(staging, backing, members, terms, patience)
    }

    /// The same for a host that shares tokens.
    pub(crate) fn take_for_tokens(
        backing: &Path,
        members: &Members,
        terms: &Terms,
        patience: Duration,
    ) -> Result<Self, AttachError> {
        let staging = StagingDir::make_for_tokens(backing, members, Sharing::Tokens)?;
        Self::take_in(staging, backing, members, terms, patience)
    }

    /// The same for a host that shares lanes. `Err`: none is had, for this reason, and nothing depends on it.
    pub(crate) fn take_for_lanes(
        backing: &Path,
        members: &Members,
        terms: &Terms,
        patience: Duration,
    ) -> Result<Result<Self, AttachError>, AttachError> {
        let staging = StagingDir::make_for_tokens(backing, members, Sharing::Lanes)?;
        match Self::take_in(staging, backing, members, terms, patience) {
            Err(reason @ (AttachError::TokensDoNotReach { .. } | AttachError::HostHeld { .. })) => {
                Ok(Err(reason))
            }
            taken => taken.map(Ok),
        }
    }

    /// The same for a host that writes to logs.
    pub(crate) fn take_for_logs(
        backing: &Path,
        members: &Members,
        terms: &Terms,
        patience: Duration,
    ) -> Result<Self, AttachError> {
        let staging = StagingDir::make_for_logs(backing, members)?;
        Self::take_in(staging, backing, members, terms, patience)
    }

    fn take_in(
        staging: StagingDir,
        backing: &Path,
        members: &Members,
        terms: &Terms,
        patience: Duration,
    ) -> Result<Self, AttachError> {
        let me = this_process(members)?;
        let lease = take_patiently(&staging, &me, backing, patience)?;
        // Before this host looks at what the others say: of two that come at once one sees the other.
        publish_terms(&staging.base, &staging.dir, &lease, terms)
            .map_err(|errno| own_error(backing)(OwnError::from(errno).below(&staging.path)))?;
        let others = other_staging_dirs(&staging.base, &staging.top, members)
            .map_err(|errno| own_error(backing)(errno.into()))?;
        let reach = check_reach(
            &staging.base,
            &staging.top,
            &me,
            &others,
            LEASE,
            &mut std::thread::sleep,
        );
        match reach {
            Ok(()) => Self::start(staging, lease),
            Err(ReachError::StaysOnHost { .. }) if staging.sharing.believes_beats() => {
                Self::start(staging, lease)
            }
            Err(ReachError::Own(error)) => Err(own_error(backing)(error.below(TOP))),
            Err(reason) => Err(staging.sharing.no_reach(backing, &reason)),
        }
    }

    /// Takes the lease of a host that is gone, to end what it left. `None`: that host was never there.
    pub(crate) fn take_over(
        backing: &Path,
        members: &Members,
        patience: Duration,
    ) -> Result<Option<Self>, AttachError> {
        let Some(staging) = StagingDir::find(backing, members)? else {
            return Ok(None);
        };
        let me = this_process(members)?;
        let lease = take_patiently(&staging, &me, backing, patience)?;
        Self::start(staging, lease).map(Some)
    }

    fn start(staging: StagingDir, lease: Lease<DirBacking>) -> Result<Self, AttachError> {
        let state = Arc::new(LeaseState::default());
        let (stop, stopped) = mpsc::channel();
        let (release, released) = mpsc::channel();
        let seen = Arc::clone(&state);
        std::thread::Builder::new()
            .name("firn-lease".into())
            .spawn(move || {
                beat_until_stopped(&staging, lease, &seen, &stopped);
                let _ = release.send(());
            })
            .map_err(AttachError::io("start the thread of the host's lease"))?;
        Ok(Self {
            state,
            stop: Some(stop),
            released,
        })
    }

    pub(crate) fn state(&self) -> Arc<LeaseState> {
        Arc::clone(&self.state)
    }
}

impl Drop for HostLease {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ = self.released.recv_timeout(RELEASE_PATIENCE);
    }
}

fn beat_until_stopped(
    staging: &StagingDir,
    mut lease: Lease<DirBacking>,
    state: &LeaseState,
    stopped: &Receiver<()>,
) {
    let StagingDir { base, sharing, .. } = staging;
    while stopped.recv_timeout(sharing.beat_every()) == Err(RecvTimeoutError::Timeout) {
        match lease.beat(base) {
            Ok(()) => {}
            Err(error @ LeaseError::Lost { .. }) => {
                match sharing {
                    Sharing::Transactions => {
                        tracing::error!(%error, "this host has lost its lease: its transactions are refused");
                    }
                    Sharing::Tokens | Sharing::Lanes => {
                        tracing::error!(%error, "this host has lost its lease: locks of its backing do not keep hosts apart");
                    }
                    Sharing::Logs => {
                        tracing::error!(%error, "this host has lost its lease: another process writes logs in its name");
                    }
                }
                let _ = state.lost.set(error.to_string());
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot renew the lease of this host; firnd tries again");
            }
        }
    }
    if let Err(error) = lease.release(base) {
        tracing::warn!(%error, "cannot release the lease of this host: its next holder waits some seconds");
    }
}

fn this_process(members: &Members) -> Result<Holder, AttachError> {
    Holder::this_process(&members.host).map_err(AttachError::io("read the boot id of this host"))
}

fn take_patiently(
    staging: &StagingDir,
    me: &Holder,
    backing: &Path,
    patience: Duration,
) -> Result<Lease<DirBacking>, AttachError> {
    let deadline = Instant::now() + patience;
    loop {
        let taken = Lease::take(
            &staging.base,
            &staging.dir,
            LEASE,
            me,
            &mut std::thread::sleep,
        );
        match taken {
            Ok(lease) => return Ok(lease),
            Err(LeaseError::Held { .. }) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            Err(LeaseError::Held { .. } | LeaseError::Lost { .. }) => {
                return Err(AttachError::HostHeld {
                    host: me.host.clone(),
                    backing: backing.into(),
                });
            }
            Err(LeaseError::Unreached { .. }) => {
                let host = me.host.clone();
                let reason = ReachError::StaysOnHost { host };
                return Err(staging.sharing.no_reach(backing, &reason));
            }
            Err(LeaseError::NoLock(errno)) => {
                let reason = ReachError::Refused(errno);
                return Err(staging.sharing.no_reach(backing, &reason));
            }
            Err(LeaseError::Own(error)) => {
                return Err(own_error(backing)(error.below(&staging.path)));
            }
        }
    }
}

/// Whoever comes: nobody is waited for.
pub(crate) fn whoever_comes(host: &str) -> Members {
    Members {
        host: host.to_owned(),
        expected: Expected::Hosts(Vec::new()),
    }
}

/// Looks whether hosts that write to logs live: by their locks, and where those do not reach, by their beats.
pub(crate) struct LogHosts {
    base: DirBacking,
    /// This one.
    host: String,
    boot: String,
    /// The last beat of each host whose lock says nothing, and since when it stands still.
    seen: Mutex<HashMap<String, (Beat, Instant)>>,
}

impl LogHosts {
    pub(crate) fn over(backing: &Path, host: &str) -> Result<Self, AttachError> {
        Ok(Self {
            base: open_backing(backing)?,
            host: host.to_owned(),
            boot: this_process(&whoever_comes(host))?.boot,
            seen: Mutex::default(),
        })
    }

    /// The other hosts that live.
    pub(crate) fn others_living(&self) -> Result<Vec<String>, Errno> {
        let base = &self.base;
        let mut dir = base.root();
        for name in [TOP, CONTAINERS] {
            match own::find_dir(base, &dir, name)? {
                Some((found, _)) => dir = found,
                None => return Ok(Vec::new()),
            }
        }
        let me = whoever_comes(&self.host);
        let prefix = staging_dir_name(&whoever_comes(""));
        let mut living = Vec::new();
        for name in other_staging_dirs(base, &dir, &me)? {
            let host = name.strip_prefix(&prefix).unwrap_or(&name);
            if self.is_living(host)? {
                living.push(host.to_owned());
            }
        }
        Ok(living)
    }

    /// Whether a firnd serves this host, as far as can be seen from here.
    pub(crate) fn is_living(&self, host: &str) -> Result<bool, Errno> {
        let base = &self.base;
        let mut dir = base.root();
        let name = staging_dir_name(&whoever_comes(host));
        for name in [TOP, CONTAINERS, &name] {
            match own::find_dir(base, &dir, name)? {
                Some((found, _)) => dir = found,
                None => return Ok(false),
            }
        }
        match Lease::is_held(base, &dir, LEASE) {
            Ok(true) => return Ok(true),
            Ok(false) | Err(OwnError::Backing(Errno::OPNOTSUPP | Errno::NOLCK)) => {}
            Err(error) => return Err(error.into()),
        }
        let Some(beat) = Beat::read(base, &dir, LEASE)? else {
            return Ok(false);
        };
        if beat.is_settled_by_lock(&self.boot, base.attr(&dir)?.dev) {
            return Ok(false);
        }
        let mut seen = self.seen.lock();
        let (last, since) = seen
            .entry(host.to_owned())
            .or_insert_with(|| (beat.clone(), Instant::now()));
        if *last != beat {
            (*last, *since) = (beat, Instant::now());
        }
        Ok(since.elapsed() < LOG_STALE_AFTER)
    }
}

/// Looks whether firnd serve hosts of a group.
pub(crate) struct Liveness {
    base: DirBacking,
    members: Members,
}

impl Liveness {
    /// Of hosts over `backing`.
    pub(crate) fn over(backing: &Path, members: &Members) -> Result<Self, Errno> {
        let base = DirBacking::open(backing)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        Ok(Self {
            base,
            members: members.clone(),
        })
    }

    /// Whether a firnd serves this host. One that cannot be asked for counts as gone.
    pub(crate) fn is_living(&self, host: &str) -> bool {
        let members = Members {
            host: host.to_owned(),
            ..self.members.clone()
        };
        let asked = || {
            let Some((top, _)) = own::find_dir(&self.base, &self.base.root(), TOP)? else {
                return Ok(false);
            };
            match own::find_dir(&self.base, &top, &staging_dir_name(&members))? {
                Some((dir, _)) => Lease::is_held(&self.base, &dir, LEASE),
                None => Ok(false),
            }
        };
        asked().unwrap_or_else(|error: OwnError| {
            tracing::warn!(%error, host, "cannot see whether this host is alive");
            false
        })
    }
}
