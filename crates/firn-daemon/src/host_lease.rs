//! The lease of this host on a backing, `.firn/host-NAME/lease`: a lock and a record that show other hosts that this
//! one is alive.
//!
//! One file and one thread serve all uses of the backing that concern other hosts too: transactions of several hosts,
//! tokens (locks of I/O servers), lanes (I/O servers) and logs of files. A *heartbeat* is one renewal of the record by
//! that thread. The file `terms` beside it says how the host mounts ([`crate::peers`]).
//!
//! Locks *reach* other hosts if a lock of one host excludes all hosts that use the file system.
//!
//! Promises
//! * While a [`HostLease`] is taken, no other firnd (process that serves a mount) and no `firn recover --host` acts in
//!   the name of this host. That holds on any host that the file system's locks reach. Each use of the lease checks
//!   whether they reach the other hosts.
//! * Other hosts see each use of the backing before it begins.
//! * The heartbeats have a thread of their own, so a backing that hangs delays nothing else.

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
    Heartbeat, Holder, HostWatch, Lease, LeaseError, LeaseUse, OwnError, REPORT_BYTES_MAX,
    ReachError, Report, Terms, check_reach, publish_terms,
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

/// Returns whether this use is safe on a file system with locks that exclude processes of the same host only.
///
/// * Logs are safe: each host writes its own log. Without locks, the heartbeats show that a host is alive, and late
///   writes of a host that counts as dead go to the next generation of the log.
/// * Lanes are safe: the lease only shows other hosts how this one mounts.
/// * Transactions and tokens need locks that exclude other hosts.
fn is_safe_with_local_locks(purpose: LeaseUse) -> bool {
    matches!(purpose, LeaseUse::Logs | LeaseUse::Lanes)
}

/// Returns the error of a mount with a use that needs locks which exclude other hosts. A use for lanes has no error of
/// its own, and gets that of tokens.
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
fn describe_consequence_of_loss(purpose: LeaseUse) -> &'static str {
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

/// A callback that returns the report for a heartbeat.
type ReportCallback = Arc<dyn Fn() -> HostReport + Send + Sync>;

/// What the thread of the heartbeats shares with the mount: whether the lease is lost, and the callback for reports.
#[derive(Default)]
pub(crate) struct LeaseState {
    lost: OnceLock<String>,
    reporter: Mutex<Option<ReportCallback>>,
}

impl LeaseState {
    /// Returns why this host has lost its lease; `None` while the host has it. After the loss another process may act
    /// in the name of this host.
    pub(crate) fn loss_reason(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Sets the callback for the report of each later heartbeat. The callback must not wait for the backing.
    pub(crate) fn set_reporter(&self, reporter: impl Fn() -> HostReport + Send + Sync + 'static) {
        let old_reporter = self.reporter.lock().replace(Arc::new(reporter));
        // The old callback is dropped without the lock, because it may hold the last reference to the engine.
        drop(old_reporter);
    }

    /// Returns the report for a heartbeat, shortened to fit; `None` before a callback is set.
    fn report(&self) -> Option<Report> {
        let reporter = self.reporter.lock().clone()?;
        let fits = |report: &HostReport| {
            serde_json::to_vec(report).is_ok_and(|json| json.len() <= REPORT_BYTES_MAX)
        };
        let report = reporter().fit(fits);
        serde_json::to_value(report).ok()
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
    keeper_link: Option<Arc<KeeperLink>>,
}

/// What a dead host has left behind, by its last heartbeat and by its transactions in the backing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeadHostState {
    /// The host may have transactions in the backing.
    pub(crate) has_transactions: bool,
    /// Bytes that the host held in memory at its last heartbeat.
    pub(crate) held_bytes: u64,
}

/// A lease that this process has, and the thread that renews it.
#[derive(Debug)]
struct AcquiredLease {
    holder: Holder,
    /// The uses that other hosts can see in the record.
    uses: BTreeSet<LeaseUse>,
    /// Whether locks reach other hosts, or why not; `None` until this is checked.
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
    result_sender: Sender<Result<(), LeaseError>>,
}

impl HostLease {
    /// Returns the lease on a backing (a canonical path). It is not taken yet.
    pub(crate) fn new(backing: &Path, link: Option<&Arc<KeeperLink>>) -> Self {
        Self {
            backing: backing.into(),
            lease: None,
            keeper_link: link.cloned(),
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
        let result = self.acquire_and_add_use(purpose, host, terms);
        if result.is_err() && is_first {
            self.lease = None;
        }
        result
    }

    /// Shows other hosts that this host uses the backing for `purpose`, and how it mounts the backing (`terms`). Both
    /// are stored with this host's lease, a locked file in the backing that shows that the host is alive. The lease is
    /// taken first if the host does not have it yet.
    ///
    /// Fails if another process has the lease, or if the use needs locks that reach other hosts and they do not. The
    /// caller then releases a lease that this call took.
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
                let link = self.keeper_link.as_ref();
                AcquiredLease::acquire(base, dir, purpose, host, &self.backing, link)?
            }
        };
        let lease = self.lease.insert(lease);
        debug_assert_eq!(
            lease.holder.host, host,
            "a process acts in the name of one host"
        );
        // The use is published before this host reads what others have published. So of two hosts that mount at once,
        // at least one sees the other.
        lease.add_use(purpose, terms, &self.backing)?;
        // `?` returns if the backing cannot be asked at all.
        let locks_reach_hosts = lease.find_reach(&self.backing)?;
        match locks_reach_hosts {
            Ok(()) => Ok(()),
            Err(ReachError::StaysOnHost { .. }) if is_safe_with_local_locks(purpose) => Ok(()),
            Err(ReachError::Own(error)) => Err(own_error(&self.backing)(error.clone())),
            Err(reason) => Err(reach_error(purpose, &self.backing, reason)),
        }
    }

    /// Takes the lease of a dead host, so that this process may finish the host's transactions. The lease is a locked
    /// file in the backing, with a record that a living host renews (the heartbeat).
    ///
    /// `None` if there is nothing to finish: the host has no lease, or it has released its lease and has no
    /// transactions. Fails if the host is alive.
    pub(crate) fn take_over_dead_host(
        &mut self,
        host: &str,
    ) -> Result<Option<DeadHostState>, AttachError> {
        let base = open_backing(&self.backing)?;
        let to_error = own_error(&self.backing);
        let Some(dir) = find_host_dir(&base, host).map_err(&to_error)? else {
            return Ok(None);
        };
        let stored_heartbeat = Heartbeat::read(&base, &dir).map_err(&to_error)?;
        let last_heartbeat = stored_heartbeat.as_ref();
        let may_have_transactions =
            last_heartbeat.is_some_and(|heartbeat| heartbeat.may_have_use(LeaseUse::Transactions));
        let has_transactions = may_have_transactions
            || TransactionalBacking::has_transactions_in(&base, &dir)
                .map_err(AttachError::transactions(&self.backing))?;
        // A host without a heartbeat has no lease to release.
        let is_lease_released = last_heartbeat.is_none_or(Heartbeat::is_released);
        if !has_transactions && is_lease_released {
            return Ok(None);
        }
        let purpose = if has_transactions {
            LeaseUse::Transactions
        } else {
            // `Tokens` stands for a use that the record does not name, or that this version cannot read.
            last_heartbeat
                .and_then(first_use)
                .unwrap_or(LeaseUse::Tokens)
        };
        let report = last_heartbeat.and_then(report_in_heartbeat);
        // The keeper has no descriptor of another host's lease.
        let keeper_link = None;
        let lease = AcquiredLease::acquire(base, dir, purpose, host, &self.backing, keeper_link)?;
        self.lease = Some(lease);
        Ok(Some(DeadHostState {
            has_transactions,
            held_bytes: report.map_or(0, |report| report.held_bytes),
        }))
    }

    /// Returns the state of the lease if transactions depend on it; `None` otherwise.
    pub(crate) fn transaction_lease_state(&self) -> Option<Arc<LeaseState>> {
        let lease = self.lease.as_ref()?;
        if !lease.uses.contains(&LeaseUse::Transactions) {
            return None;
        }
        Some(Arc::clone(&lease.state))
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
    /// Takes the lease in `dir`, a locked file that shows other hosts that this one lives, and starts the thread that
    /// renews its record (the heartbeats).
    ///
    /// If this process continues the mount of one that died, the lease is resumed: the keeper, the process at the other
    /// end of `link`, has kept the locked file open.
    fn acquire(
        base: DirBacking,
        dir: <DirBacking as Volume>::Inode,
        purpose: LeaseUse,
        host: &str,
        backing: &Path,
        link: Option<&Arc<KeeperLink>>,
    ) -> Result<Self, AttachError> {
        let holder = this_process_as_holder(host)?;
        let resumed = link.and_then(|link| resume_kept_lease(link, &base, &dir, purpose, &holder));
        let lease = match resumed {
            Some(lease) => lease,
            None => acquire_lease(&base, &dir, purpose, &holder, backing)?,
        };
        if let Some(link) = link {
            give_lease_to_keeper(link, &lease, &base);
        }
        let uses = BTreeSet::from([purpose]);
        let state = Arc::new(LeaseState::default());
        let (request_sender, requests) = mpsc::channel();
        let (released_sender, released) = mpsc::channel();
        let thread_link = link.cloned();
        let thread_state = Arc::clone(&state);
        std::thread::Builder::new()
            .name("firn-lease".into())
            .spawn(move || {
                renew_until_stopped(&base, &dir, lease, &thread_state, &requests);
                if let Some(link) = thread_link {
                    link.drop_descriptor(Tag::Lease.into());
                }
                // The end of the mount waits for this message only for some time.
                let _ = released_sender.send(());
            })
            .map_err(AttachError::io("start the thread of the host's lease"))?;
        Ok(Self {
            holder,
            uses,
            reach: None,
            state,
            requests: Some(request_sender),
            released,
        })
    }

    /// Shows other hosts one more use of the backing (such as transactions), and how this host mounts it (`terms`).
    /// Both are stored with this host's lease, the locked file that shows that it is alive. Waits until the thread that
    /// renews the lease has stored them.
    ///
    /// Fails if another process has taken the lease.
    fn add_use(
        &mut self,
        purpose: LeaseUse,
        terms: &Terms,
        backing: &Path,
    ) -> Result<(), AttachError> {
        let (result_sender, results) = mpsc::channel();
        let request = UseRequest {
            purpose,
            terms: terms.clone(),
            result_sender,
        };
        let is_sent = match &self.requests {
            Some(requests) => requests.send(request).is_ok(),
            None => false,
        };
        let result = if is_sent { results.recv().ok() } else { None };
        match result {
            Some(Ok(())) => {
                self.uses.insert(purpose);
                Ok(())
            }
            Some(Err(LeaseError::Own(error))) => {
                let dir = host_dir_name(&self.holder.host);
                Err(own_error(backing)(error.below(&dir).below(TOP)))
            }
            // Without a result, the thread has ended, because another process has the lease.
            Some(Err(_)) | None => Err(AttachError::HostHeld {
                host: self.holder.host.clone(),
                backing: backing.into(),
            }),
        }
    }

    /// Returns whether locks exclude other hosts: the inner result has the reason if they do not. The first call checks
    /// this, which may take [`firn_hosts::STALE_AFTER`]; later calls return the same answer. The outer result fails if
    /// the backing cannot be opened.
    fn find_reach(&mut self, backing: &Path) -> Result<&Result<(), ReachError>, AttachError> {
        let reach = match self.reach.take() {
            Some(reach) => reach,
            None => check_reach(
                &open_backing(backing)?,
                &self.holder,
                &mut std::thread::sleep,
            ),
        };
        Ok(self.reach.insert(reach))
    }
}

impl Drop for AcquiredLease {
    fn drop(&mut self) {
        // The end of the channel makes the thread release the lease and end.
        drop(self.requests.take());
        let _ = self.released.recv_timeout(RELEASE_TIMEOUT);
    }
}

/// Renews the record of the lease, which shows other hosts that this one lives, and adds uses to it. When the mount
/// ends (the sender of `requests` is dropped) it releases the lease. If the lease is lost it returns at once, because
/// another process has it. This is the main function of the lease thread.
fn renew_until_stopped(
    base: &DirBacking,
    dir: &<DirBacking as Volume>::Inode,
    mut lease: Lease<DirBacking>,
    state: &LeaseState,
    requests: &Receiver<UseRequest>,
) {
    loop {
        let renewed = match requests.recv_timeout(lease.heartbeat_interval()) {
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => lease.write_heartbeat(base, state.report()),
            Ok(request) => {
                let added = add_use(base, dir, &mut lease, &request);
                // The requesting thread waits for this message.
                let _ = request.result_sender.send(added.clone());
                added
            }
        };
        match renewed {
            Ok(()) => {}
            Err(error @ LeaseError::Lost { .. }) => {
                let uses = lease.uses().iter().copied();
                let consequences: Vec<&str> = uses.map(describe_consequence_of_loss).collect();
                tracing::error!(%error, "this host has lost its lease, by which other hosts see that it is alive: \
                    {}", consequences.join("; "));
                // The first reason stays, if there is one already.
                let _ = state.lost.set(error.to_string());
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot renew the lease of this host, by which other hosts see that it is \
                    alive; firnd tries again");
            }
        }
    }
    if let Err(error) = lease.release(base, state.report()) {
        tracing::warn!(%error, "cannot release the lease of this host: its next mount waits some seconds for the \
            lease");
    }
}

/// Adds a use to the lease, and publishes the terms (how this host mounts the backing) beside it.
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

/// Finds the leases that dead mounts with the arena file `arena` (the mount's shared memory) have left. A lease is a
/// file in the backing that a living process keeps locked. It counts if it was not released, and if its free lock
/// proves that the process is dead.
fn find_leases_of_arena(
    base: &DirBacking,
    backing: &Path,
    arena: &Path,
) -> Result<Vec<DeadLease>, AttachError> {
    let to_error = own_error(backing);
    let mut dead_leases = Vec::new();
    for host in list_hosts(base).map_err(&to_error)? {
        let Some(dir) = find_host_dir(base, &host).map_err(&to_error)? else {
            continue;
        };
        let Some(heartbeat) = Heartbeat::read(base, &dir).map_err(&to_error)? else {
            continue;
        };
        let boot = this_process_as_holder(&host)?.boot;
        let device = base.attr(&dir).map_err(|errno| to_error(errno.into()))?.dev;
        let had_arena =
            report_in_heartbeat(&heartbeat).is_some_and(|report| report.arena.as_path() == arena);
        // A free lock proves that the process is dead if the lock was in this host's kernel.
        let is_dead = !heartbeat.is_released() && heartbeat.does_free_lock_prove_end(&boot, device);
        if had_arena
            && is_dead
            && let Some(purpose) = first_use(&heartbeat)
        {
            dead_leases.push(DeadLease { host, dir, purpose });
        }
    }
    Ok(dead_leases)
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
        let holder = this_process_as_holder(&dead.host)?;
        if let Ok(lease) = Lease::acquire(&base, &dead.dir, dead.purpose, &holder, &mut |_| ()) {
            // The released lease names no uses. Logs and transactions that remain in the backing are found without it.
            let _ = lease.release(&base, None);
        }
    }
    Ok(())
}

/// Releases the lease (the locked file of a host in the backing) that this host took before its last boot. Returns the
/// bytes that only the host's memory had then, which are lost; `None` if there is no such lease.
///
/// Call this only if there is no arena.
pub(crate) fn release_lease_of_earlier_boot(
    backing: &Path,
    host: &str,
    arena: &Path,
) -> Result<Option<u64>, AttachError> {
    let base = open_backing(backing)?;
    let to_error = own_error(backing);
    let Some(dir) = find_host_dir(&base, host).map_err(&to_error)? else {
        return Ok(None);
    };
    let Some(heartbeat) = Heartbeat::read(&base, &dir).map_err(&to_error)? else {
        return Ok(None);
    };
    let own_holder = this_process_as_holder(host)?;
    let is_of_earlier_boot = heartbeat
        .holder()
        .is_some_and(|last_holder| last_holder.boot != own_holder.boot);
    let (Some(report), Some(purpose)) = (report_in_heartbeat(&heartbeat), first_use(&heartbeat))
    else {
        return Ok(None);
    };
    // A mount of another user of this host may have had the lease; its arena has another path.
    let is_ours = report.arena.as_path() == arena;
    if !is_ours || !is_of_earlier_boot || heartbeat.is_released() {
        return Ok(None);
    }
    let lease = match Lease::acquire(&base, &dir, purpose, &own_holder, &mut std::thread::sleep) {
        Ok(lease) => lease,
        Err(LeaseError::Own(error)) => return Err(to_error(error)),
        // Another process has the lease, perhaps on another host of the same name, or the file cannot be locked.
        Err(_) => return Ok(None),
    };
    // Logs and transactions that other hosts have seen stay in the backing.
    let _ = lease.release(&base, None);
    Ok(Some(report.held_bytes))
}

/// Returns the report in a heartbeat; `None` if there is none, or if this version cannot read it.
fn report_in_heartbeat(heartbeat: &Heartbeat) -> Option<HostReport> {
    heartbeat
        .report()
        .and_then(|report| serde_json::from_value(report).ok())
}

/// Returns the use that a record names first; `None` if it names none, or if this version cannot read it.
fn first_use(heartbeat: &Heartbeat) -> Option<LeaseUse> {
    heartbeat.uses()?.first().copied()
}

/// Returns this process as the holder of a lease in the name of `host`.
fn this_process_as_holder(host: &str) -> Result<Holder, AttachError> {
    Holder::this_process(host).map_err(AttachError::io("read the boot id of this host"))
}

/// Gives the keeper a copy of the descriptor of the locked file, so that the lease outlives this process. A failure is
/// only logged.
fn give_lease_to_keeper(link: &KeeperLink, lease: &Lease<DirBacking>, base: &DirBacking) {
    if let Some(descriptor) = lease.descriptor(base)
        && let Err(error) = link.keep_descriptor(Tag::Lease, descriptor.as_fd())
    {
        tracing::warn!(%error, "the lease of this host does not outlive firnd: if firnd dies, other hosts count \
            this host as dead until the next firnd runs");
    }
}

/// Resumes the lease of a serving process that died: the locked file that shows other hosts that this one is alive. The
/// keeper, the process that started this one, has kept its locked descriptor open.
///
/// `None` if there is no such descriptor, or if it is not of this lease any more; the keeper drops it then. The caller
/// takes the lease anew in that case.
fn resume_kept_lease(
    link: &KeeperLink,
    base: &DirBacking,
    dir: &<DirBacking as Volume>::Inode,
    purpose: LeaseUse,
    holder: &Holder,
) -> Option<Lease<DirBacking>> {
    let resumed = match link.copy_kept_descriptor(Tag::Lease) {
        // The keeper has no descriptor of a lease.
        Ok(None) => return None,
        Ok(Some(descriptor)) => {
            Lease::resume(base, dir, purpose, holder, descriptor).map_err(|error| error.to_string())
        }
        Err(error) => Err(error.to_string()),
    };
    match resumed {
        Ok(Some(lease)) => return Some(lease),
        // The descriptor is not of this lease any more.
        Ok(None) => {}
        Err(error) => tracing::warn!(error, "cannot continue the lease of the earlier firnd"),
    }
    link.drop_descriptor(Tag::Lease.into());
    None
}

/// Takes the lease in `dir`, the locked file that shows other hosts that this one lives, for `holder`. If another
/// process has it, waits up to [`ENDING_PROCESS_TIMEOUT`], because that process may be ending, and then fails. Also
/// fails if the file system has no locks that reach other hosts.
fn acquire_lease(
    base: &DirBacking,
    dir: &<DirBacking as Volume>::Inode,
    purpose: LeaseUse,
    holder: &Holder,
    backing: &Path,
) -> Result<Lease<DirBacking>, AttachError> {
    let deadline = Instant::now() + ENDING_PROCESS_TIMEOUT;
    loop {
        match Lease::acquire(base, dir, purpose, holder, &mut std::thread::sleep) {
            Ok(lease) => return Ok(lease),
            Err(LeaseError::Held { .. }) if Instant::now() < deadline => {
                std::thread::sleep(TAKE_RETRY_EVERY)
            }
            Err(LeaseError::Held { .. } | LeaseError::Lost { .. }) => {
                return Err(AttachError::HostHeld {
                    host: holder.host.clone(),
                    backing: backing.into(),
                });
            }
            Err(LeaseError::Unreached { .. }) => {
                let host = holder.host.clone();
                let reason = ReachError::StaysOnHost { host };
                return Err(reach_error(purpose, backing, &reason));
            }
            Err(LeaseError::NoLock(errno)) => {
                let reason = ReachError::Refused(errno);
                return Err(reach_error(purpose, backing, &reason));
            }
            Err(LeaseError::Own(error)) => {
                let dir = host_dir_name(&holder.host);
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
