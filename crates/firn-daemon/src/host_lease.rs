//! The lease of this host on a backing, `.firn/host-NAME/lease`: a lock and a record that show other hosts that this
//! one is alive.
//!
//! One file and one thread serve all uses that the host shares with others there (transactions, tokens, lanes, logs). A
//! *beat* is one renewal of the record by that thread. The file `terms` beside it says how the host mounts
//! ([`crate::peers`]).
//!
//! Promises
//! * While a [`HostLease`] is taken, no other firnd and no `firn recover --host` acts in the name of this host, on any
//!   host that the file system's locks reach. Each use of the lease checks whether they reach the other hosts.
//! * Other hosts see each use of the backing before it begins.
//! * The beats have a thread of their own, so a backing that hangs delays nothing else.

use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use firn_backing::{Backing as _, DirBacking, Errno, Volume};
use firn_hosts::host_dir::{find_host_dir, host_dir_name, list_hosts, make_host_dir};
use firn_hosts::{
    Beat, Holder, HostWatch, Lease, LeaseError, LeaseUse, OwnError, REPORT_BYTES_MAX, ReachError,
    Report, Terms, check_reach, publish_terms,
};
use firn_protocol::HostReport;
use firn_transact::{StoreError, TOP, TransactionalBacking};
use parking_lot::Mutex;

use crate::error::AttachError;
use crate::keeper::{KeeperLink, Tag};
use crate::lock::ENDING_PROCESS_TIMEOUT;

/// Pause between two attempts to take a lease.
const TAKE_RETRY_EVERY: Duration = Duration::from_millis(50);

/// How long the end of a mount waits for the release of the lease. After that the mount ends anyway, and the next
/// holder must wait until the lease counts as stale.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns whether this use is safe on a file system whose locks exclude processes of the same host only.
///
/// * Logs are safe: each host writes its own log. Without locks, the beats show that a host is alive, and late writes
///   of a host that counts as dead go to the next generation of the log.
/// * Lanes are safe: nothing depends on the lease.
/// * Transactions and tokens need locks that exclude other hosts.
fn allows_local_locks(purpose: LeaseUse) -> bool {
    matches!(purpose, LeaseUse::Logs | LeaseUse::Lanes)
}

/// Returns the error of a mount whose use needs locks that exclude other hosts.
fn reach_error(purpose: LeaseUse, backing: &Path, reason: &ReachError) -> AttachError {
    let backing = backing.into();
    let reason = reason.to_string();
    match purpose {
        LeaseUse::Transactions => AttachError::LocksDoNotReach { backing, reason },
        LeaseUse::Tokens | LeaseUse::Lanes => AttachError::TokensDoNotReach { backing, reason },
        LeaseUse::Logs => AttachError::LogsDoNotReach { backing, reason },
    }
}

/// Returns what the loss of the lease means for this use, as part of a log message.
fn consequence_of_loss(purpose: LeaseUse) -> &'static str {
    match purpose {
        LeaseUse::Transactions => "its transactions are refused",
        LeaseUse::Tokens => "its locks in the backing no longer exclude other hosts",
        LeaseUse::Lanes => "other hosts do not see the options of its mount",
        LeaseUse::Logs => "another process writes logs in its name",
    }
}

/// Opens the backing directory, below all layers.
pub(crate) fn open_backing(backing: &Path) -> Result<DirBacking, AttachError> {
    DirBacking::open(backing).map_err(|source| AttachError::BackingUnusable {
        path: backing.into(),
        source,
    })
}

/// Returns a function that converts an error about Firn's own files and adds the path of the backing.
pub(crate) fn own_error(backing: &Path) -> impl Fn(OwnError) -> AttachError {
    let in_backing = AttachError::in_backing(backing);
    move |error| in_backing(StoreError::from(error).into())
}

/// A callback that returns the report for a beat.
type Reporter = Arc<dyn Fn() -> HostReport + Send + Sync>;

/// What the thread of the beats shares with the mount: whether the lease is lost, and the callback for reports.
#[derive(Default)]
pub(crate) struct LeaseState {
    lost: OnceLock<String>,
    reporter: Mutex<Option<Reporter>>,
}

impl LeaseState {
    /// Returns why this host has lost its lease; `None` while the host has it. After the loss another process may act
    /// in the name of this host.
    pub(crate) fn loss_reason(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Sets the callback for the report of each later beat. The callback must not wait for the backing.
    pub(crate) fn set_reporter(&self, reporter: impl Fn() -> HostReport + Send + Sync + 'static) {
        let before = self.reporter.lock().replace(Arc::new(reporter));
        // The old callback is dropped without the lock, because it may hold the last reference to the engine.
        drop(before);
    }

    /// Returns the report for a beat, shortened to fit; `None` before a callback is set.
    fn report(&self) -> Option<Report> {
        let reporter = self.reporter.lock().clone()?;
        let fits = |report: &HostReport| {
            serde_json::to_vec(report).is_ok_and(|json| json.len() <= REPORT_BYTES_MAX)
        };
        serde_json::to_value(reporter().fit(fits)).ok()
    }
}

impl fmt::Debug for LeaseState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("LeaseState");
        shown.field("lost", &self.lost).finish_non_exhaustive()
    }
}

/// The lease of this host on one backing. The first use takes it, and the drop releases it.
#[derive(Debug)]
pub(crate) struct HostLease {
    backing: PathBuf,
    lease: Option<AcquiredLease>,
    /// The keeper of the mount, which has a copy of the lease file's descriptor: the lease outlives firnd.
    link: Option<Arc<KeeperLink>>,
}

/// What a dead host has left behind, by its last beat and by its transactions in the backing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeadHostState {
    /// The host may have transactions in the backing.
    pub(crate) has_transactions: bool,
    /// Bytes that the host held in memory at its last beat.
    pub(crate) held_bytes: u64,
}

/// A lease that this process has, and the thread that renews it.
#[derive(Debug)]
struct AcquiredLease {
    me: Holder,
    /// The uses that other hosts can see in the record.
    uses: BTreeSet<LeaseUse>,
    /// Whether locks reach other hosts; `None` until this is checked.
    reach: Option<Result<(), ReachError>>,
    state: Arc<LeaseState>,
    /// Sends uses to the thread, which alone writes the record. The drop of the sender ends the thread.
    requests: Option<Sender<UseRequest>>,
    /// Receives a message when the thread has released the lease.
    released: Receiver<()>,
}

/// A request to the thread to add a use to the lease, with the terms of the mount.
struct UseRequest {
    purpose: LeaseUse,
    terms: Terms,
    done: Sender<Result<(), LeaseError>>,
}

impl HostLease {
    /// Returns the lease on a backing (a canonical path). It is not taken yet.
    pub(crate) fn new(backing: &Path, link: Option<&Arc<KeeperLink>>) -> Self {
        Self {
            backing: backing.into(),
            lease: None,
            link: link.cloned(),
        }
    }

    /// Begins a use of the backing that is shared with other hosts, and takes the lease of `host` if it is not taken
    /// yet.
    ///
    /// Other hosts see the use when this returns. Fails if another process has the lease, or if locks do not reach
    /// other hosts and this use needs that. A lease that this call took is released after a failure.
    pub(crate) fn begin_use(
        &mut self,
        purpose: LeaseUse,
        host: &str,
        terms: &Terms,
    ) -> Result<(), AttachError> {
        let is_first = self.lease.is_none();
        let used = self.acquire_and_add_use(purpose, host, terms);
        if used.is_err() && is_first {
            self.lease = None;
        }
        used
    }

    fn acquire_and_add_use(
        &mut self,
        purpose: LeaseUse,
        host: &str,
        terms: &Terms,
    ) -> Result<(), AttachError> {
        let lease = match self.lease.take() {
            Some(lease) => lease,
            None => {
                let base = open_backing(&self.backing)?;
                let dir = make_host_dir(&base, host).map_err(own_error(&self.backing))?;
                let link = self.link.as_ref();
                AcquiredLease::acquire(base, dir, purpose, host, &self.backing, link)?
            }
        };
        let lease = self.lease.insert(lease);
        debug_assert_eq!(
            lease.me.host, host,
            "a process acts in the name of one host"
        );
        // The use is published before this host reads what others have published. So of two hosts that mount at once,
        // at least one sees the other.
        lease.add_use(purpose, terms, &self.backing)?;
        match lease.find_reach(&self.backing)? {
            Ok(()) => Ok(()),
            Err(ReachError::StaysOnHost { .. }) if allows_local_locks(purpose) => Ok(()),
            Err(ReachError::Own(error)) => Err(own_error(&self.backing)(error.clone())),
            Err(reason) => Err(reach_error(purpose, &self.backing, reason)),
        }
    }

    /// Takes the lease of a dead host, so that this process may finish the host's transactions.
    ///
    /// `None` if there is nothing to finish: the host has no lease, or it has released its lease and has no
    /// transactions. Fails if the host is alive.
    pub(crate) fn take_over_dead_host(
        &mut self,
        host: &str,
    ) -> Result<Option<DeadHostState>, AttachError> {
        let base = open_backing(&self.backing)?;
        let refused = own_error(&self.backing);
        let Some(dir) = find_host_dir(&base, host).map_err(&refused)? else {
            return Ok(None);
        };
        let last = Beat::read(&base, &dir).map_err(&refused)?;
        let has_transactions = last
            .as_ref()
            .is_some_and(|beat| beat.may_be_for(LeaseUse::Transactions))
            || TransactionalBacking::has_transactions_in(&base, &dir)
                .map_err(AttachError::transactions(&self.backing))?;
        let is_listed = last.as_ref().is_some_and(|beat| !beat.is_released());
        if !has_transactions && !is_listed {
            return Ok(None);
        }
        let uses = last.as_ref().and_then(Beat::uses).unwrap_or_default();
        let purpose = if has_transactions {
            LeaseUse::Transactions
        } else {
            uses.first().copied().unwrap_or(LeaseUse::Tokens)
        };
        let report = last.as_ref().and_then(report_of_beat);
        let lease = AcquiredLease::acquire(base, dir, purpose, host, &self.backing, None)?;
        self.lease = Some(lease);
        Ok(Some(DeadHostState {
            has_transactions,
            held_bytes: report.map_or(0, |report| report.held_bytes),
        }))
    }

    /// Returns the state of the lease if transactions depend on it; `None` otherwise.
    pub(crate) fn transaction_lease_state(&self) -> Option<Arc<LeaseState>> {
        let lease = self.lease.as_ref()?;
        let is_needed = lease.uses.contains(&LeaseUse::Transactions);
        is_needed.then(|| Arc::clone(&lease.state))
    }

    /// Returns the state of the lease; `None` if it is not taken.
    pub(crate) fn state(&self) -> Option<Arc<LeaseState>> {
        self.lease.as_ref().map(|lease| Arc::clone(&lease.state))
    }

    /// Releases the lease. The caller ensures that nothing acts in the name of this host any more.
    pub(crate) fn release(&mut self) {
        self.lease = None;
    }
}

impl AcquiredLease {
    /// Takes the lease in `dir` and starts the thread of the beats. If the keeper behind `link` has the lease of an earlier
    /// firnd, resumes that.
    fn acquire(
        base: DirBacking,
        dir: <DirBacking as Volume>::Inode,
        purpose: LeaseUse,
        host: &str,
        backing: &Path,
        link: Option<&Arc<KeeperLink>>,
    ) -> Result<Self, AttachError> {
        let me = this_process_as_holder(host)?;
        let resumed = link.and_then(|link| resume_kept_lease(link, &base, &dir, purpose, &me));
        let lease = match resumed {
            Some(lease) => lease,
            None => acquire_lease(&base, &dir, purpose, &me, backing)?,
        };
        let link = link.cloned();
        if let (Some(link), Some(descriptor)) = (&link, lease.descriptor(&base))
            && let Err(error) = link.keep_descriptor(Tag::Lease, descriptor.as_fd())
        {
            tracing::warn!(%error, "if firnd dies, other hosts count this one as dead until the next firnd goes on");
        }
        let uses = BTreeSet::from([purpose]);
        let state = Arc::new(LeaseState::default());
        let (requests, asked) = mpsc::channel();
        let (release, released) = mpsc::channel();
        let seen = Arc::clone(&state);
        std::thread::Builder::new()
            .name("firn-lease".into())
            .spawn(move || {
                renew_until_stopped(&base, &dir, lease, &seen, &asked);
                if let Some(link) = link {
                    link.drop_descriptor(Tag::Lease.into());
                }
                let _ = release.send(());
            })
            .map_err(AttachError::io("start the thread of the host's lease"))?;
        Ok(Self {
            me,
            uses,
            reach: None,
            state,
            requests: Some(requests),
            released,
        })
    }

    /// Adds a use and the terms of the mount to the lease, and waits until both are stored in the backing.
    fn add_use(
        &mut self,
        purpose: LeaseUse,
        terms: &Terms,
        backing: &Path,
    ) -> Result<(), AttachError> {
        let (done, answer) = mpsc::channel();
        let request = UseRequest {
            purpose,
            terms: terms.clone(),
            done,
        };
        let asked = self.requests.as_ref().map(|asked| asked.send(request));
        let answer = match asked {
            Some(Ok(())) => answer.recv().ok(),
            Some(Err(_)) | None => None,
        };
        match answer {
            Some(Ok(())) => {
                self.uses.insert(purpose);
                Ok(())
            }
            Some(Err(LeaseError::Own(error))) => {
                let dir = host_dir_name(&self.me.host);
                Err(own_error(backing)(error.below(&dir).below(TOP)))
            }
            // The thread has ended, because another process has the lease.
            Some(Err(_)) | None => Err(AttachError::HostHeld {
                host: self.me.host.clone(),
                backing: backing.into(),
            }),
        }
    }

    /// Returns whether locks exclude other hosts. The first call checks this, which may take
    /// [`firn_hosts::STALE_AFTER`]; later calls return the same answer.
    fn find_reach(&mut self, backing: &Path) -> Result<&Result<(), ReachError>, AttachError> {
        let reach = match self.reach.take() {
            Some(reach) => reach,
            None => check_reach(&open_backing(backing)?, &self.me, &mut std::thread::sleep),
        };
        Ok(self.reach.insert(reach))
    }
}

impl Drop for AcquiredLease {
    fn drop(&mut self) {
        drop(self.requests.take());
        let _ = self.released.recv_timeout(RELEASE_TIMEOUT);
    }
}

/// Renews the lease and adds uses to it until the mount ends or the lease is lost; then it releases the lease.
fn renew_until_stopped(
    base: &DirBacking,
    dir: &<DirBacking as Volume>::Inode,
    mut lease: Lease<DirBacking>,
    state: &LeaseState,
    requests: &Receiver<UseRequest>,
) {
    loop {
        let beaten = match requests.recv_timeout(lease.beat_every()) {
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => lease.beat(base, state.report()),
            Ok(request) => {
                let added = add_use(base, dir, &mut lease, &request);
                // The requesting thread waits for this message.
                let _ = request.done.send(added.clone());
                added
            }
        };
        match beaten {
            Ok(()) => {}
            Err(error @ LeaseError::Lost { .. }) => {
                let consequences: Vec<_> = lease
                    .uses()
                    .iter()
                    .copied()
                    .map(consequence_of_loss)
                    .collect();
                tracing::error!(%error, "this host has lost its lease: {}", consequences.join("; "));
                let _ = state.lost.set(error.to_string());
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot renew the lease of this host; firnd tries again");
            }
        }
    }
    if let Err(error) = lease.release(base, state.report()) {
        tracing::warn!(%error, "cannot release the lease of this host: its next holder waits some seconds");
    }
}

fn add_use(
    base: &DirBacking,
    dir: &<DirBacking as Volume>::Inode,
    lease: &mut Lease<DirBacking>,
    request: &UseRequest,
) -> Result<(), LeaseError> {
    lease.add_use(base, request.purpose)?;
    publish_terms(base, dir, lease, &request.terms).map_err(LeaseError::from)
}

/// A lease that the process of an earlier mount has not released before it died.
struct DeadLease {
    host: String,
    dir: <DirBacking as Volume>::Inode,
    purpose: LeaseUse,
}

/// Returns the unreleased leases of dead mounts that had this arena. A lease counts only if its free lock proves that
/// the process is dead.
fn find_leases_of_arena(
    base: &DirBacking,
    backing: &Path,
    arena: &Path,
) -> Result<Vec<DeadLease>, AttachError> {
    let refused = own_error(backing);
    let mut found = Vec::new();
    for host in list_hosts(base).map_err(&refused)? {
        let Some(dir) = find_host_dir(base, &host).map_err(&refused)? else {
            continue;
        };
        let Some(beat) = Beat::read(base, &dir).map_err(&refused)? else {
            continue;
        };
        let me = this_process_as_holder(&host)?;
        let device = base.attr(&dir).map_err(|errno| refused(errno.into()))?.dev;
        let had_arena = report_of_beat(&beat).is_some_and(|report| report.arena.as_path() == arena);
        let is_dead = !beat.is_released() && beat.is_settled_by_lock(&me.boot, device);
        let purpose = beat.uses().and_then(|uses| uses.first().copied());
        if let Some(purpose) = purpose.filter(|_| had_arena && is_dead) {
            found.push(DeadLease { host, dir, purpose });
        }
    }
    Ok(found)
}

/// Returns whether the dead mount that had an arena shared its backing with other hosts: it has left a lease.
pub(crate) fn was_backing_shared(backing: &Path, arena: &Path) -> Result<bool, AttachError> {
    let base = open_backing(backing)?;
    Ok(!find_leases_of_arena(&base, backing, arena)?.is_empty())
}

/// Releases the leases of dead mounts that had this arena. Call this after the arena is removed, when its data is in
/// the backing.
pub(crate) fn release_leases_of_arena(backing: &Path, arena: &Path) -> Result<(), AttachError> {
    let base = open_backing(backing)?;
    for dead in find_leases_of_arena(&base, backing, arena)? {
        let me = this_process_as_holder(&dead.host)?;
        if let Ok(lease) = Lease::take(&base, &dead.dir, dead.purpose, &me, &mut |_| ()) {
            // The released lease names no uses. Logs and transactions that remain in the backing are found without it.
            let _ = lease.release(&base, None);
        }
    }
    Ok(())
}

/// Releases the lease that this host had before its last boot. Returns the bytes that the host held then, lost with
/// the memory; `None` if there is no such lease.
///
/// Call this only if there is no arena.
pub(crate) fn release_lease_of_last_boot(
    backing: &Path,
    host: &str,
    arena: &Path,
) -> Result<Option<u64>, AttachError> {
    let base = open_backing(backing)?;
    let refused = own_error(backing);
    let Some(dir) = find_host_dir(&base, host).map_err(&refused)? else {
        return Ok(None);
    };
    let Some(beat) = Beat::read(&base, &dir).map_err(&refused)? else {
        return Ok(None);
    };
    let me = this_process_as_holder(host)?;
    let is_of_last_boot = beat.holder().is_some_and(|holder| holder.boot != me.boot);
    // A mount of another user of this host may have had the lease; its arena has another path.
    let is_ours = |report: &HostReport| report.arena.as_path() == arena;
    let Some(report) = report_of_beat(&beat).filter(is_ours) else {
        return Ok(None);
    };
    let purpose = beat.uses().and_then(|uses| uses.first().copied());
    let Some(purpose) = purpose.filter(|_| is_of_last_boot && !beat.is_released()) else {
        return Ok(None);
    };
    let lease = match Lease::take(&base, &dir, purpose, &me, &mut std::thread::sleep) {
        Ok(lease) => lease,
        // Another host has the same name.
        Err(LeaseError::Held { .. } | LeaseError::Unreached { .. }) => return Ok(None),
        Err(LeaseError::Own(error)) => return Err(refused(error)),
        Err(_) => return Ok(None),
    };
    // Logs and transactions that other hosts have seen stay in the backing.
    let _ = lease.release(&base, None);
    Ok(Some(report.held_bytes))
}

/// Returns the report in a beat; `None` if there is none, or if this version cannot read it.
fn report_of_beat(beat: &Beat) -> Option<HostReport> {
    beat.report()
        .and_then(|report| serde_json::from_value(report).ok())
}

fn this_process_as_holder(host: &str) -> Result<Holder, AttachError> {
    Holder::this_process(host).map_err(AttachError::io("read the boot id of this host"))
}

/// Resumes the lease of an earlier firnd from the descriptor that the keeper has. `None` if there is none, or if it is not
/// this lease any more; the keeper drops it then.
fn resume_kept_lease(
    link: &KeeperLink,
    base: &DirBacking,
    dir: &<DirBacking as Volume>::Inode,
    purpose: LeaseUse,
    me: &Holder,
) -> Option<Lease<DirBacking>> {
    let kept = link.copy_kept_descriptor(Tag::Lease).transpose()?;
    let resumed = kept.map_err(|error| error.to_string()).and_then(|kept| {
        Lease::resume(base, dir, purpose, me, kept).map_err(|error| error.to_string())
    });
    match resumed {
        Ok(Some(lease)) => return Some(lease),
        Ok(None) => {}
        Err(error) => tracing::warn!(error, "the lease of the earlier firnd is not resumed"),
    }
    link.drop_descriptor(Tag::Lease.into());
    None
}

/// Takes a lease. Waits up to [`ENDING_PROCESS_TIMEOUT`] if another process has it, because that process may be ending.
fn acquire_lease(
    base: &DirBacking,
    dir: &<DirBacking as Volume>::Inode,
    purpose: LeaseUse,
    me: &Holder,
    backing: &Path,
) -> Result<Lease<DirBacking>, AttachError> {
    let deadline = Instant::now() + ENDING_PROCESS_TIMEOUT;
    loop {
        match Lease::take(base, dir, purpose, me, &mut std::thread::sleep) {
            Ok(lease) => return Ok(lease),
            Err(LeaseError::Held { .. }) if Instant::now() < deadline => {
                std::thread::sleep(TAKE_RETRY_EVERY)
            }
            Err(LeaseError::Held { .. } | LeaseError::Lost { .. }) => {
                return Err(AttachError::HostHeld {
                    host: me.host.clone(),
                    backing: backing.into(),
                });
            }
            Err(LeaseError::Unreached { .. }) => {
                let host = me.host.clone();
                let reason = ReachError::StaysOnHost { host };
                return Err(reach_error(purpose, backing, &reason));
            }
            Err(LeaseError::NoLock(errno)) => {
                let reason = ReachError::Refused(errno);
                return Err(reach_error(purpose, backing, &reason));
            }
            Err(LeaseError::Own(error)) => {
                let dir = host_dir_name(&me.host);
                return Err(own_error(backing)(error.below(&dir).below(TOP)));
            }
        }
    }
}

/// Reports which of the hosts that use a backing for one purpose are alive.
pub(crate) struct LivingHosts {
    base: DirBacking,
    watch: HostWatch,
    /// The name of this host.
    host: String,
}

impl LivingHosts {
    /// Returns the watch over the hosts of `backing`; `host` is this host.
    pub(crate) fn open(backing: &Path, purpose: LeaseUse, host: &str) -> Result<Self, AttachError> {
        Ok(Self {
            base: open_backing(backing)?,
            watch: HostWatch::new(purpose, this_process_as_holder(host)?.boot),
            host: host.to_owned(),
        })
    }

    /// Returns the other hosts that are alive.
    pub(crate) fn others_living(&self) -> Result<Vec<String>, Errno> {
        Ok(self.watch.others_living(&self.base, &self.host)?)
    }

    /// Returns whether a host is alive, by what this host can see of that host's lease.
    pub(crate) fn is_living(&self, host: &str) -> Result<bool, Errno> {
        Ok(self.watch.is_living(&self.base, host)?)
    }
}
