//! The puller: a tree of another host, whole or not there.
//!
//! Promises
//! * The copy appears under its name by one rename, after all of it was compared, checked and (but on a firn mount)
//!   synced. Whatever ends the puller or the agent before leaves nothing under that name.
//! * A broken connection is made again; blocks that are there are compared and not sent again, also those that an
//!   earlier puller left which was killed.

mod compare;
mod direct;
mod fetch;
mod plan;
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
use crate::message::{Entry, EntryKind, ErrorKind};
use crate::peer::{Peer, Route};
use crate::transport_choice::{Carriage, TransportChoice};
use crate::units::{Unit, group_by_name};
pub(crate) use compare::is_same_file;
use fetch::{Fetch, Wanted};
use plan::Plan;
use remote::Remote;
use staging::Staging;
pub(crate) use staging::{is_on_firn, local, rename_new, sync_dir};
use state::PullState;
use writers::Writers;

/// Between two tries to connect again.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));

/// What is to be pulled.
pub struct PullRequest {
    /// Name of the source host.
    pub host: String,
    /// How its agent is reached.
    pub route: Route,
    /// What is pulled of it.
    pub source: PullSource,
    /// What carries bytes.
    pub carriage: Carriage,
    /// Name of the copy.
    pub target: PathBuf,
    /// Also what its writers have not closed.
    pub cut: bool,
    /// How long it is tried without a byte that comes.
    pub patience: Duration,
    /// Bytes of memory that the copy may take, with no file larger than it is listed; none: as many as it does.
    pub bytes_max: Option<u64>,
}

/// What is to be pulled of a host.
#[derive(Clone, Debug)]
pub enum PullSource {
    /// What is at and below a path there; empty: the mount of the agent; not absolute: `HOST/path`, partner copies of
    /// what that host held.
    Path(BytePath),
    /// What firnd holds at and below a path below the mount point.
    Held(BytePath),
}

impl PullSource {
    fn path(&self) -> &BytePath {
        match self {
            Self::Path(path) | Self::Held(path) => path,
        }
    }
}

/// How far it is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Bytes that are not there yet.
    pub left_bytes: u64,
    /// Files that are not there yet.
    pub left_files: u64,
}

/// What came of it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    /// What carried bytes last: `tcp`, `ssh`, or `ofi:` and a provider.
    pub transport: String,
    /// Regular files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of files that came over the network.
    pub received_bytes: u64,
    /// Bytes that an earlier pull had brought.
    pub reused_bytes: u64,
    /// Blocks that arrived damaged and were sent again.
    pub damaged_blocks: u64,
    /// How often the connection was made again.
    pub reconnects: u64,
    /// Files that were changed while they were pulled: each is as it was when it was opened.
    pub changed: Vec<BytePath>,
    /// Pipes, sockets and devices.
    pub left_out: Vec<BytePath>,
    /// What was pulled, as it was listed.
    #[serde(skip)]
    pub entries: Vec<Entry>,
}

/// Something in a directory that is listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listed {
    /// Its name; of a file that was asked for itself: empty.
    pub name: BytePath,
    /// Regular files in it, or itself.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// `closed` if all of the files are.
    pub ending: Ending,
    /// Seconds of its newest modification time.
    pub mtime_s: i64,
}

impl Listed {
    /// Something of which nothing is known yet.
    pub(crate) fn new(name: BytePath) -> Self {
        Self {
            name,
            files: 0,
            bytes: 0,
            ending: Ending::Closed,
            mtime_s: i64::MIN,
        }
    }

    pub(crate) fn of(unit: &Unit) -> Self {
        let mut listed = Self::new(unit.name.clone());
        for entry in &unit.entries {
            if let EntryKind::File { bytes, ending } = entry.kind {
                listed.files += 1;
                listed.bytes += bytes;
                listed.ending = worse(listed.ending, ending);
            }
            listed.mtime_s = listed.mtime_s.max(entry.mtime_s);
        }
        listed
    }
}

/// Whether a list of an agent can be pulled; an error says what cannot be.
pub fn check_list(entries: Vec<Entry>) -> Result<(), String> {
    check_entries(entries).map(drop)
}

/// Returns the list of an agent if it can be pulled; else an error that says why not.
pub(crate) fn check_entries(entries: Vec<Entry>) -> Result<Vec<Entry>, String> {
    Plan::check(entries).map(Plan::into_entries)
}

/// Pulls.
pub fn pull(request: &PullRequest, tell: &mut dyn FnMut(Progress)) -> Result<Outcome, PullError> {
    let staging = Staging::open(&request.target)?;
    let writers = Writers::start(staging.is_synced()).map_err(local(&request.target))?;
    let mut state = PullState::new(request, tell);
    let mut waits = RETRY.start();
    let mut carriage = request.carriage.clone();
    let plan = loop {
        let moved_at = state.moved_at;
        let error = match attempt(request, &carriage, &staging, &writers, &mut state) {
            Ok(plan) => break plan,
            Err(error) => error,
        };
        // Nothing may land in a file that the next connection compares.
        writers.wait()?;
        let is_late = state.is_late();
        let is_fabric = matches!(error, PullError::Fabric { .. });
        // Before anything was heard, a host without an agent is more likely a mistake than a break. ssh has said why.
        let is_hopeless = error.is_absence() || matches!(request.route, Route::Ssh { .. });
        if !error.may_pass() || (!state.was_listed && is_hopeless) {
            return Err(error);
        } else if is_fabric && carriage.transport == TransportChoice::Auto {
            // The connection is there all the same.
            carriage.transport = TransportChoice::Tcp;
        } else if is_late {
            return Err(error);
        }
        if state.moved_at > moved_at {
            waits.reset();
        }
        waits.sleep();
        state.outcome.reconnects += 1;
    };
    writers.wait()?;
    staging.finish(&plan)?;
    let mut outcome = state.into_outcome(plan.entries());
    outcome.left_out = plan.left_out();
    outcome.entries = plan.into_entries();
    Ok(outcome)
}

/// All that is not there yet, over one connection.
fn attempt(
    request: &PullRequest,
    carriage: &Carriage,
    staging: &Staging,
    writers: &Writers,
    state: &mut PullState<'_>,
) -> Result<Plan, PullError> {
    let mut peer = Peer::connect(&request.host, &request.route)?;
    let listed = match &request.source {
        PullSource::Path(path) => peer.list(path),
        PullSource::Held(path) => peer.list_held(path),
    };
    let (top, entries) = listed.map_err(|error| match error {
        // It was there: its mount is gone, and may come back.
        PullError::Remote { host, message, .. } if state.was_listed => PullError::Remote {
            host,
            kind: ErrorKind::Stale,
            message,
        },
        error => error,
    })?;
    state.was_listed = true;
    let plan = Plan::check(entries).map_err(|what| peer.implausible(what))?;
    if !request.cut {
        check_complete(peer.host(), request, &plan)?;
    }
    state.check_total(plan.entries())?;
    staging.prepare(&plan)?;
    let wanted: VecDeque<Wanted> = plan
        .files()
        .filter(|(entry, ..)| !state.is_done(entry))
        .map(|(entry, bytes, _)| Wanted {
            entry: entry.clone(),
            bytes,
            tries: 0,
        })
        .collect();
    let bytes = wanted
        .iter()
        .fold(0_u64, |sum, wanted| sum.saturating_add(wanted.bytes));
    state.begin(wanted.len() as u64, bytes);
    let remote = Remote::agree(&mut peer, carriage, writers)?;
    state.outcome.transport = match &remote {
        Some(remote) => format!("ofi:{}", remote.provider()),
        None if peer.near().is_some() => "tcp".into(),
        None => "ssh".into(),
    };
    Fetch::new(&mut peer, staging, writers, remote, state, top, wanted).run()?;
    Ok(plan)
}

fn check_complete(host: &str, request: &PullRequest, plan: &Plan) -> Result<(), PullError> {
    let mut unfinished = plan
        .files()
        .filter(|(.., ending)| *ending != Ending::Closed);
    let Some((entry, _, ending)) = unfinished.next() else {
        return Ok(());
    };
    let what = match ending {
        Ending::Cut => "was cut off: its writer, or firnd, was killed before it closed the file",
        Ending::Open | Ending::Closed => "is still open for writing",
    };
    let name = if entry.path.is_empty() {
        "it".to_owned()
    } else {
        entry.path.to_string()
    };
    Err(PullError::Incomplete {
        host: host.into(),
        path: request.source.path().clone(),
        example: format!("{name} {what}"),
        more: unfinished.count(),
    })
}

/// What is at and below a path of another host, parents first.
pub fn list_entries(host: &str, route: &Route, path: &BytePath) -> Result<Vec<Entry>, PullError> {
    let mut peer = Peer::connect(host, route)?;
    let (_, entries) = peer.list(path)?;
    check_entries(entries).map_err(|what| peer.implausible(what))
}

/// What is in a directory of another host, or a file itself.
pub fn list(host: &str, route: &Route, path: &BytePath) -> Result<Vec<Listed>, PullError> {
    let entries = list_entries(host, route, path)?;
    if entries[0].kind != EntryKind::Directory {
        let name = BytePath::default();
        return Ok(vec![Listed::of(&Unit { name, entries })]);
    }
    let mut listed: Vec<_> = group_by_name(&entries).iter().map(Listed::of).collect();
    listed.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(listed)
}

/// A checkpoint that is still written is not over yet, one that was cut never will be.
fn worse(a: Ending, b: Ending) -> Ending {
    match (a, b) {
        (Ending::Open, _) | (_, Ending::Open) => Ending::Open,
        (Ending::Cut, _) | (_, Ending::Cut) => Ending::Cut,
        _ => Ending::Closed,
    }
}
