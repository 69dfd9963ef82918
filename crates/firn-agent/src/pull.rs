//! The *puller*: copies a tree of another host's mount, completely or not at all.
//!
//! A pull connects to the *agent*, which serves the files of the mount, and lists the tree. It checks the list
//! (`plan`), fetches the files (`fetch`) into a staging directory (`staging`), and gives the complete copy its name.
//!
//! Promises
//! * The copy gets its name by one rename, after each block was authenticated, each file was checked and everything was
//!   synced. On a firn mount nothing is synced. If puller or agent die before the rename, no copy has the name.
//! * After a broken connection, a puller connects again. Blocks that are already in the staging directory are compared
//!   by checksums and not sent again. This includes the blocks of an earlier puller that was killed.

mod compare;
mod direct;
mod fetch;
mod plan;
/// Reads of the agent's memory by libfabric (RDMA).
mod remote;
mod staging;
mod state;
mod writers;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;

use firn_backing::backoff::Backoff;
use firn_format::record::Ending;
use firn_protocol::path::BytePath;
use serde::Serialize;

use crate::error::PullError;
use crate::message::{Entry, EntryKind, EntryList, ErrorKind};
use crate::peer::{Peer, Route};
use crate::transport_choice::{DataTransport, TransportChoice};
use crate::units::{Unit, group_by_name};
pub(crate) use compare::is_same_as_remote;
use fetch::{Fetch, FileToFetch};
use plan::{Plan, PlannedFile};
use remote::FabricReader;
use staging::Staging;
pub(crate) use staging::{is_on_firn_mount, local_error, rename_to_new_name, sync_dir};
use state::PullState;
use writers::Writers;

/// Pauses between two attempts to connect.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));

/// The source, the target and the options of a pull.
pub struct PullRequest {
    /// Name of the source host.
    pub host: String,
    /// How to reach the agent of the source host.
    pub route: Route,
    /// The tree or file to pull.
    pub source: PullSource,
    /// Options for the transport of the files' bytes: over the connection, or by RDMA.
    pub carriage: DataTransport,
    /// Path of the copy.
    pub target: PathBuf,
    /// Whether files that their writers have not closed are pulled too. If not, such a file is an error.
    pub cut: bool,
    /// Maximum time without a received block, after which the pull fails (`--patience`).
    pub patience: Duration,
    /// Maximum memory in bytes that the copy may occupy. With a limit, no file may be larger than it was listed. `None`
    /// means no limit.
    pub bytes_max: Option<u64>,
}

/// The tree or file that a pull copies.
#[derive(Clone, Debug)]
pub enum PullSource {
    /// The tree at a path of the source host. An empty path means the mount that the agent serves. A relative path
    /// `HOST/path` means the partner copies of files that HOST held.
    Path(BytePath),
    /// The files that firnd holds at and below a path, which is relative to the mount point.
    Held(BytePath),
}

impl PullSource {
    fn path(&self) -> &BytePath {
        match self {
            Self::Path(path) | Self::Held(path) => path,
        }
    }
}

/// Progress of a pull.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Number of bytes that are not yet received.
    pub left_bytes: u64,
    /// Number of files that are not yet complete.
    pub left_files: u64,
}

/// Result of a complete pull.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    /// Transport of the last connection: `tcp`, `ssh`, or `ofi:` and the name of a provider.
    pub transport: String,
    /// Number of regular files.
    pub files: u64,
    /// Size of all files together.
    pub bytes: u64,
    /// Bytes of files that were received over the network.
    pub received_bytes: u64,
    /// Bytes that were already in the staging directory and were not sent again.
    pub reused_bytes: u64,
    /// Number of blocks that arrived damaged and were requested again.
    pub damaged_blocks: u64,
    /// Number of connections after the first one.
    pub reconnects: u64,
    /// Files that were changed during the pull. The copy of such a file has the state in which the agent opened it.
    pub changed: Vec<BytePath>,
    /// Pipes, sockets and devices, which were not pulled.
    pub left_out: Vec<BytePath>,
    /// The last list of the source.
    #[serde(skip)]
    pub entries: Vec<Entry>,
}

/// A file or directory of another host, with totals of the files in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnitTotals {
    /// Name in the listed directory; empty if the listed path is itself a file.
    pub name: BytePath,
    /// Number of regular files: those in the directory, or 1 for a file.
    pub files: u64,
    /// Size of these files together.
    pub bytes: u64,
    /// `open` if any of the files is open, otherwise `cut` if any was cut off, otherwise `closed`.
    pub ending: Ending,
    /// Seconds of the newest modification time among the entries.
    pub mtime_s: i64,
}

impl UnitTotals {
    /// Makes the totals of an empty unit.
    pub(crate) fn new(name: BytePath) -> Self {
        Self {
            name,
            files: 0,
            bytes: 0,
            ending: Ending::Closed,
            mtime_s: i64::MIN,
        }
    }

    /// Sums up the entries of a unit.
    pub(crate) fn from_unit(unit: &Unit) -> Self {
        let mut totals = Self::new(unit.name.clone());
        for entry in &unit.entries {
            if let EntryKind::File { bytes, ending } = entry.kind {
                totals.files += 1;
                totals.bytes += bytes;
                totals.ending = combine_endings(totals.ending, ending);
            }
            totals.mtime_s = totals.mtime_s.max(entry.mtime_s);
        }
        totals
    }
}

/// Checks whether a list of an agent is safe to pull. The error names the first entry that is not.
pub fn check_list(entries: Vec<Entry>) -> Result<(), String> {
    check_entries(entries).map(drop)
}

/// Returns the list of an agent if it is safe to pull. The error names the first entry that is not.
pub(crate) fn check_entries(entries: Vec<Entry>) -> Result<Vec<Entry>, String> {
    Plan::from_entries(entries).map(Plan::into_entries)
}

/// Copies a tree from another host (a pull). Connects again as often as necessary, until no block (1 MiB of a file) has
/// arrived for `request.patience`. Returns when the complete copy has its name.
///
/// `report_progress` is called whenever the number of remaining bytes or files changes. After an error, the received
/// blocks remain in the staging directory, where the copy is built. A later pull with the same target uses them.
pub fn pull(
    request: &PullRequest,
    report_progress: &mut dyn FnMut(Progress),
) -> Result<Outcome, PullError> {
    let staging = Staging::open(&request.target)?;
    let writers = Writers::start(staging.is_synced()).map_err(local_error(&request.target))?;
    let mut state = PullState::new(request, report_progress);
    // Each iteration of the loop is one connection.
    let mut retry_backoff = RETRY.start();
    let mut data_transport = request.carriage.clone();
    let plan = loop {
        let last_progress_at = state.last_progress_at;
        let attempt = PullAttempt {
            request,
            data_transport: &data_transport,
            staging: &staging,
            writers: &writers,
        };
        let error = match attempt.run(&mut state) {
            Ok(plan) => break plan,
            Err(error) => error,
        };
        // The next connection compares the staged files, so all writes of this connection must have ended.
        writers.wait()?;
        check_retry(error, request, &state, &mut data_transport)?;
        // The pauses grow only while connections bring nothing.
        if state.last_progress_at > last_progress_at {
            retry_backoff.reset();
        }
        retry_backoff.sleep();
        state.outcome.reconnects += 1;
    };
    writers.wait()?;
    staging.finish(&plan)?;
    let mut outcome = state.into_outcome(plan.entries());
    outcome.left_out = plan.left_out();
    outcome.entries = plan.into_entries();
    Ok(outcome)
}

/// Returns the error of a connection if the pull must not connect again: because another connection would fail too, or
/// because no block has arrived for `request.patience`.
///
/// If another connection may succeed and only libfabric has failed, which was not required, sets `data_transport` to
/// the connection itself. The pull then connects again, however long ago the last block arrived.
fn check_retry(
    error: PullError,
    request: &PullRequest,
    state: &PullState<'_>,
    data_transport: &mut DataTransport,
) -> Result<(), PullError> {
    if !may_succeed_later(&error, request, state) {
        return Err(error);
    }
    let is_fabric_error = matches!(error, PullError::Fabric { .. });
    if is_fabric_error && data_transport.transport == TransportChoice::Auto {
        data_transport.transport = TransportChoice::Tcp;
    } else if state.is_stalled() {
        return Err(error);
    }
    Ok(())
}

/// Whether another connection may succeed after an error.
fn may_succeed_later(error: &PullError, request: &PullRequest, state: &PullState<'_>) -> bool {
    // If this pull never reached the agent, a missing agent is more likely a mistake of the user than a temporary
    // failure. If ssh failed, it has already reported the reason to the user.
    let is_likely_mistake = error.is_absence() || matches!(request.route, Route::Ssh { .. });
    error.is_transient() && (state.was_listed || !is_likely_mistake)
}

/// One connection of a pull.
struct PullAttempt<'a> {
    request: &'a PullRequest,
    data_transport: &'a DataTransport,
    staging: &'a Staging,
    writers: &'a Writers,
}

impl PullAttempt<'_> {
    /// Makes one connection: lists the tree, checks the list, prepares the copy, and fetches all files that are not
    /// complete yet. Returns the plan: the other host's list of files, after the check.
    ///
    /// When it returns, the threads that write files may still be writing. After an error the received bytes remain.
    fn run(&self, state: &mut PullState<'_>) -> Result<Plan, PullError> {
        let mut peer = Peer::connect(&self.request.host, &self.request.route)?;
        let EntryList { top, entries } = self.list_source(&mut peer, state)?;
        let plan = Plan::from_entries(entries).map_err(|what| peer.implausible(what))?;
        let allows_unclosed_files = self.request.cut;
        if !allows_unclosed_files {
            check_all_closed(&plan, peer.host(), self.request)?;
        }
        state.check_total(plan.entries())?;
        self.staging.prepare(&plan)?;
        let files_to_fetch = files_to_fetch(&plan, state);
        let sizes = files_to_fetch.iter().map(|file| file.bytes);
        let total_bytes = sizes.fold(0, u64::saturating_add);
        state.set_remaining(files_to_fetch.len() as u64, total_bytes);
        let fabric = FabricReader::negotiate(&mut peer, self.data_transport, self.writers)?;
        state.outcome.transport = transport_name(&peer, fabric.as_ref());
        let fetch = Fetch::new(
            &mut peer,
            self.staging,
            self.writers,
            fabric,
            state,
            top,
            files_to_fetch,
        );
        fetch.run()?;
        Ok(plan)
    }

    /// Requests the list of the tree to copy from the other host. The source of a pull is a path, or those files at a
    /// path that the host holds in memory.
    fn list_source(
        &self,
        peer: &mut Peer,
        state: &mut PullState<'_>,
    ) -> Result<EntryList, PullError> {
        let listed = match &self.request.source {
            PullSource::Path(path) => peer.list(path),
            PullSource::Held(path) => peer.list_held(path),
        };
        match listed {
            Ok(list) => {
                state.was_listed = true;
                Ok(list)
            }
            // An earlier connection has listed the path, so its mount is probably missing only temporarily. The pull
            // tries again.
            Err(PullError::Remote { host, message, .. }) if state.was_listed => {
                Err(PullError::Remote {
                    host,
                    kind: ErrorKind::Stale,
                    message,
                })
            }
            Err(error) => Err(error),
        }
    }
}

/// Returns the name of a connection's transport as in [`Outcome::transport`].
fn transport_name(peer: &Peer, fabric: Option<&FabricReader>) -> String {
    match fabric {
        Some(fabric) => format!("ofi:{}", fabric.provider()),
        None if peer.local_ip().is_some() => "tcp".into(),
        None => "ssh".into(),
    }
}

/// Returns the files of a plan that are not complete yet.
fn files_to_fetch(plan: &Plan, state: &PullState<'_>) -> VecDeque<FileToFetch> {
    plan.files()
        .filter(|file| !state.is_complete(file.entry))
        .map(|file| FileToFetch {
            entry: file.entry.clone(),
            bytes: file.bytes,
            tries: 0,
        })
        .collect()
}

/// Fails if the writers of a file of the plan (the list of files to copy) have not closed it. The error names the first
/// such file and counts the others.
fn check_all_closed(plan: &Plan, host: &str, request: &PullRequest) -> Result<(), PullError> {
    let is_unclosed = |file: &PlannedFile<'_>| file.ending != Ending::Closed;
    let mut unclosed_files = plan.files().filter(is_unclosed);
    let Some(PlannedFile { entry, ending, .. }) = unclosed_files.next() else {
        return Ok(());
    };
    let name = if entry.path.is_empty() {
        "it".to_owned()
    } else {
        entry.path.to_string()
    };
    let reason = match ending {
        Ending::Cut => "was cut off: its writer, or firnd, was killed before it closed the file",
        Ending::Open | Ending::Closed => "is still open for writing",
    };
    Err(PullError::Incomplete {
        host: host.into(),
        path: request.source.path().clone(),
        example: format!("{name} {reason}"),
        more: unclosed_files.count(),
    })
}

/// Lists everything at and below a path of another host, parents first.
pub fn list_entries(host: &str, route: &Route, path: &BytePath) -> Result<Vec<Entry>, PullError> {
    let mut peer = Peer::connect(host, route)?;
    let list = peer.list(path)?;
    check_entries(list.entries).map_err(|what| peer.implausible(what))
}

/// Lists a directory of another host: one item for each name in the directory. For a file, the list has one item with
/// an empty name.
pub fn list(host: &str, route: &Route, path: &BytePath) -> Result<Vec<UnitTotals>, PullError> {
    let entries = list_entries(host, route, path)?;
    let is_directory = entries[0].kind == EntryKind::Directory;
    if !is_directory {
        let name = BytePath::default();
        return Ok(vec![UnitTotals::from_unit(&Unit { name, entries })]);
    }
    let units = group_by_name(&entries);
    let mut items: Vec<_> = units.iter().map(UnitTotals::from_unit).collect();
    items.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(items)
}

/// Combines the endings of two files of a checkpoint. `Open` takes precedence, because an open checkpoint can still
/// change.
fn combine_endings(a: Ending, b: Ending) -> Ending {
    match (a, b) {
        (Ending::Open, _) | (_, Ending::Open) => Ending::Open,
        (Ending::Cut, _) | (_, Ending::Cut) => Ending::Cut,
        _ => Ending::Closed,
    }
}
