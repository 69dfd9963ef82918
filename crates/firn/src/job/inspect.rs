//! Collects the state of the hosts of a job, for `firn hosts` and `firn status --job`.
//!
//! * There are two sources, which are asked at the same time. One is the backing, the directory that all hosts mount:
//!   each host has a lease there, a file that shows that the host is alive. The other is firnd, the daemon of this
//!   host's own mount.
//! * Each source may hang, so a child process asks it and is abandoned at the timeout.
//! * [`Job::inspect`] runs in the parent. [`inspect_backing`] and [`inspect_own_mount`] run in the children.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Display;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_backing::{DirBacking, Kind, Volume};
use firn_client::{ClientError, Connection, Mount};
use firn_format::quote::quoted_path;
use firn_hosts::ballot::JOINED;
use firn_hosts::own::{self, LOGS, OwnError, TOP};
use firn_hosts::{Evidence, Holder, Life, Report, SurveyedHost, survey};
use firn_protocol::HostReport;
use firn_protocol::path::BytePath;
use serde::{Deserialize, Serialize};

use super::{Host, Job, JobTotals, rows};
use crate::ask::{ChildFailure, ask_child, parallel_map};
use crate::failure::{FAILED, Failure, NO_MOUNT, USAGE};
use crate::text;

/// Bounds of the search for files in logs: number of files, and time. Each file costs the listing of two directories.
const LOGGED_FILES_MAX: usize = 2_000;
const SEARCH_TIME_MAX: Duration = Duration::from_millis(300);

/// The lease of one host, and the report beside it, as read from the backing.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostLease {
    /// Name of the host.
    pub host: String,
    /// Whether the host is alive, silent, dead, or has left.
    pub life: Life,
    /// What `life` is based on.
    pub evidence: Evidence,
    /// Whether the lease is locked.
    pub is_locked: bool,
    /// Seconds since the last heartbeat. `None` means that the time is unknown.
    pub heartbeat_age_seconds: Option<f64>,
    /// The process that holds the lease.
    pub holder: Option<Holder>,
    /// What the host uses the backing for.
    pub uses: Vec<String>,
    /// Values of the options that hosts have to agree on.
    #[serde(rename = "terms")]
    pub options: BTreeMap<String, String>,
    /// The report beside the lease, as the host wrote it.
    pub report: Option<Report>,
}

/// What the leases and logs in a backing say.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BackingState {
    /// Canonical path of the backing.
    pub backing: BytePath,
    /// Boot id of this host's running kernel.
    #[serde(rename = "boot")]
    pub boot_id: String,
    /// The leases of all hosts.
    pub leases: Vec<HostLease>,
    /// For each host, the number of files in logs that it keeps from being flattened.
    #[serde(rename = "keepers")]
    pub flattening_delays: BTreeMap<String, u64>,
    /// Sentences about what could not be read.
    pub notes: Vec<String>,
}

/// What the firnd of this host says of its own mount.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OwnMountState {
    /// Name of this host.
    pub host: String,
    /// Process id of firnd.
    pub pid: u32,
    /// The status of the mount, in the form of a report.
    pub report: HostReport,
    /// Options in force, each as `key=value`.
    pub options: Vec<String>,
}

impl Job {
    /// Returns the job of the backing (the directory that its hosts share), or of the mount, at `path`. Without a path,
    /// returns that of this user's only mount.
    ///
    /// Asks two sources at the same time: the backing, and the mount on this host. Returns at `timeout` at the latest.
    /// Fails if neither of them answers.
    pub fn inspect(path: Option<&Path>, timeout: Duration) -> Result<Self, Failure> {
        let sources = [JobSource::Backing, JobSource::Mount];
        // The loop replaces both values, because each source gives an answer.
        let mut backing_answer = Err(ChildFailure::TimedOut);
        let mut mount_answer = Ok(None);
        for answer in parallel_map(&sources, |source| source.ask(path, timeout)) {
            match answer {
                SourceAnswer::Backing(answer) => backing_answer = *answer,
                SourceAnswer::Mount(answer) => mount_answer = *answer,
            }
        }
        let mut notes = Vec::new();
        let own_mount = match mount_answer {
            Ok(own_mount) => own_mount,
            Err(error) => {
                notes.extend(describe_mount_failure(&error, timeout));
                None
            }
        };
        let backing = match backing_answer {
            Ok(backing) => Some(backing),
            Err(error) => {
                let failure = backing_failure(error, path, timeout);
                if own_mount.is_none() {
                    return Err(failure);
                }
                notes.extend(failure.text());
                None
            }
        };
        let is_partial = !notes.is_empty();
        Ok(Self {
            is_partial,
            ..Self::join_answers(backing, own_mount, notes)
        })
    }

    /// Makes a job from the answers of two sources: the backing that the hosts share, and this host's own mount. One
    /// answer may be missing, and `notes` say why.
    fn join_answers(
        backing: Option<BackingState>,
        own_mount: Option<OwnMountState>,
        mut notes: Vec<String>,
    ) -> Self {
        let backing_path = match (&backing, &own_mount) {
            (Some(backing), _) => backing.backing.clone(),
            (None, Some(own_mount)) => own_mount.report.backing.clone(),
            (None, None) => BytePath::default(),
        };
        if let Some(backing) = &backing {
            notes.extend(backing.notes.iter().cloned());
        }
        let hosts = rows::build_host_rows(backing, own_mount, &backing_path);
        let is_unreported = |host: &&Host| host.state == Life::Alive && host.report.is_none();
        let unreported_hosts = hosts.iter().filter(is_unreported).count();
        if unreported_hosts > 0 {
            notes.push(format!(
                "the sums leave out {} without a report",
                text::count(unreported_hosts as u64, "host")
            ));
        }
        if hosts.iter().all(Host::is_gone) && notes.is_empty() {
            notes.push(
                "no host has it mounted, as far as can be seen: hosts show themselves with participants, tokens, \
                 placement, partner or layout=log"
                    .to_owned(),
            );
        }
        Self {
            total: JobTotals::sum_of(&hosts),
            backing: backing_path,
            hosts,
            notes,
            is_partial: false,
        }
    }
}

/// The source that a child process asks.
#[derive(Clone, Copy)]
enum JobSource {
    /// The leases and reports in the backing.
    Backing,
    /// This host's own mount.
    Mount,
}

type ChildAnswer<T> = Box<Result<T, ChildFailure>>;

/// The answer for one source.
enum SourceAnswer {
    Backing(ChildAnswer<BackingState>),
    Mount(ChildAnswer<Option<OwnMountState>>),
}

impl JobSource {
    /// Asks the source in a child process (`firn hosts --only`).
    fn ask(self, path: Option<&Path>, timeout: Duration) -> SourceAnswer {
        let source_name = match self {
            Self::Backing => "backing",
            Self::Mount => "mount",
        };
        let mut arguments: Vec<OsString> =
            vec!["hosts".into(), format!("--only={source_name}").into()];
        if let Some(path) = path {
            arguments.extend(["--".into(), path.into()]);
        }
        match self {
            Self::Backing => SourceAnswer::Backing(Box::new(ask_child(arguments, timeout))),
            Self::Mount => SourceAnswer::Mount(Box::new(ask_child(arguments, timeout))),
        }
    }
}

/// Returns a note about this host's mount that did not answer, or `None` if the failure to ask the backing tells the
/// user the same.
fn describe_mount_failure(error: &ChildFailure, timeout: Duration) -> Option<String> {
    let seconds = text::seconds(timeout.as_secs_f64());
    match error {
        ChildFailure::TimedOut => Some(format!(
            "the firnd of this host's mount did not answer within {seconds}: its row shows the state at its last \
            heartbeat. A mount that shares nothing with other hosts has no row"
        )),
        // A wrong path concerns both sources. The failure of the backing reports it once.
        ChildFailure::Refused {
            exit_status: Some(NO_MOUNT | USAGE),
            ..
        } => None,
        ChildFailure::Refused { text, .. } => Some(format!("this host's own mount: {text}")),
        ChildFailure::NotRun(text) => Some(format!("this host's own mount was not asked: {text}")),
    }
}

/// Returns the failure for a backing (the directory that the hosts share) that did not answer, with what the user
/// should do. A child process asked the backing.
fn backing_failure(error: ChildFailure, path: Option<&Path>, timeout: Duration) -> Failure {
    let shown_path = path.map_or_else(|| "the backing".to_owned(), text::path);
    match error {
        ChildFailure::TimedOut => Failure::new(
            FAILED,
            format!(
                "{shown_path} did not answer within {}: check whether its server can be reached (`dmesg`, `firn doctor`). \
                If it is only slow, use a longer --timeout",
                text::seconds(timeout.as_secs_f64())
            ),
        ),
        ChildFailure::Refused { text, exit_status } => match exit_status {
            Some(USAGE) => Failure::new(USAGE, text),
            _ => Failure::new(FAILED, text),
        },
        ChildFailure::NotRun(text) => Failure::new(
            FAILED,
            format!(
                "{shown_path} cannot be examined: {text}; check the limits on processes and memory (`ulimit -a`)"
            ),
        ),
    }
}

/// Returns the backing that a path means: that of the mount on which the path lies, or else the directory itself.
fn find_backing(path: Option<&Path>) -> Result<PathBuf, Failure> {
    let Some(path) = path else {
        return Ok(find_only_mount()?.backing);
    };
    match firn_client::find(path) {
        Ok(location) => Ok(location.mount.backing),
        Err(ClientError::NoMount { .. } | ClientError::NotYours { .. }) => canonical_dir(path),
        Err(error) => Err(error.into()),
    }
}

/// Returns the canonical path of a directory that may be a backing. Fails if it is not a directory.
fn canonical_dir(path: &Path) -> Result<PathBuf, Failure> {
    let shown_path = text::path(path);
    let dir = match path.canonicalize() {
        Ok(dir) => dir,
        Err(error) => return Err(Failure::new(FAILED, format!("{shown_path}: {error}"))),
    };
    if !dir.is_dir() {
        let text = format!("{shown_path} is not a directory: name a mount point or a backing");
        return Err(Failure::new(FAILED, text));
    }
    Ok(dir)
}

/// Returns this user's only mount. Fails if there is none, or more than one.
fn find_only_mount() -> Result<Mount, Failure> {
    let mut mounts = firn_client::mounts()?;
    mounts.retain(|mount| !mount.is_of_another_user());
    let Some(mount) = mounts.pop() else {
        return Err(Failure::new(
            USAGE,
            "you have no mounts on this host: name the backing",
        ));
    };
    if !mounts.is_empty() {
        return Err(Failure::new(
            USAGE,
            "several backings are mounted on this host: name a mount point or a backing",
        ));
    }
    Ok(mount)
}

/// Reads what the hosts have written to their common backing: leases (which show that hosts are alive), reports of
/// their status, and logs. Fails if the backing cannot be opened, or if its files do not belong to this user.
///
/// Must be called in a separate process, for two reasons: the calls may hang in the kernel, and a process of root
/// changes its user id for good to that of the owner of Firn's files there.
pub fn inspect_backing(path: Option<&Path>) -> Result<BackingState, Failure> {
    let backing = find_backing(path)?;
    let failure = |step: &str, error: &dyn Display| {
        let backing = quoted_path(&backing);
        Failure::new(FAILED, format!("{backing}: {step}: {error}"))
    };
    change_user_to_owner(&backing)?;
    let this_process = Holder::this_process("").map_err(|error| failure("boot id", &error))?;
    let boot_id = this_process.boot;
    let backing_dir =
        DirBacking::open(&backing).map_err(|error| failure("cannot be opened", &error))?;
    let survey_result = survey(&backing_dir, &boot_id, &mut std::thread::sleep)
        .map_err(|error| own_files_failure(&backing, &error))?;
    let mut notes = Vec::new();
    for (host, error) in &survey_result.failed {
        notes.push(format!("host {host} cannot be examined: {error}"));
    }
    if survey_result.is_cut {
        notes.push("there are more hosts than are shown".to_owned());
    }
    let flattening_delays = count_flattening_delays(&backing_dir, &mut notes)
        .map_err(|error| own_files_failure(&backing, &error))?;
    Ok(BackingState {
        leases: survey_result
            .hosts
            .into_iter()
            .map(HostLease::from)
            .collect(),
        backing: backing.as_path().into(),
        boot_id,
        flattening_delays,
        notes,
    })
}

impl From<SurveyedHost> for HostLease {
    fn from(surveyed: SurveyedHost) -> Self {
        Self {
            host: surveyed.host,
            life: surveyed.life,
            evidence: surveyed.evidence,
            is_locked: surveyed.is_locked,
            heartbeat_age_seconds: surveyed.heartbeat_age.map(|age| age.as_secs_f64()),
            holder: surveyed.holder,
            uses: surveyed.uses.into_iter().map(use_word).collect(),
            options: surveyed.terms,
            report: surveyed.report,
        }
    }
}

/// Returns the word for one use of the backing by a host, as JSON has it.
fn use_word(lease_use: firn_hosts::LeaseUse) -> String {
    match serde_json::to_value(lease_use) {
        Ok(serde_json::Value::String(word)) => word,
        _ => String::new(),
    }
}

/// Returns the failure for a backing whose files of Firn cannot be read or trusted.
fn own_files_failure(backing: &Path, error: &OwnError) -> Failure {
    let backing = quoted_path(backing);
    let text = match error {
        OwnError::Backing(errno) if *errno == firn_backing::Errno::ACCESS => format!(
            "{backing}: the reports of hosts are in {TOP}, which only its owner and root may read: run this as that user"
        ),
        OwnError::Distrusted { name, why } => format!(
            "{backing}: {name} {why}: only the user that mounted, and root, may read the reports of hosts there"
        ),
        error => format!("{backing}: {error}"),
    };
    Failure::new(FAILED, text)
}

/// If this process runs as root, changes its user id to that of the owner of Firn's files in the backing.
///
/// The process then has only that user's permissions: a symbolic link of that user cannot lead it to files that only
/// root may read.
fn change_user_to_owner(backing: &Path) -> Result<(), Failure> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let Ok(metadata) = backing.join(TOP).symlink_metadata() else {
        return Ok(());
    };
    // Files of root need no other user id. Without a directory of Firn there is nothing to read.
    if metadata.uid() == 0 || !metadata.is_dir() {
        return Ok(());
    }
    let uid = rustix::process::Uid::from_raw(metadata.uid());
    let gid = rustix::process::Gid::from_raw(metadata.gid());
    // The user id comes last: without root's, the process may not change its groups any more.
    let change_ids = || {
        rustix::thread::set_thread_groups(&[])?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)
    };
    change_ids().map_err(|errno| {
        let backing = quoted_path(backing);
        Failure::new(
            FAILED,
            format!("cannot read {backing} as user {}: {errno}", metadata.uid()),
        )
    })
}

/// Returns for each host how many containers it keeps from being flattened (copied from logs into the plain file),
/// because it may still write to them. A container has logs of one file. A file can have several. If there are too many
/// files or the time is over, a note says that some are not counted.
fn count_flattening_delays(
    backing_dir: &DirBacking,
    notes: &mut Vec<String>,
) -> Result<BTreeMap<String, u64>, OwnError> {
    let mut delays_by_host = BTreeMap::new();
    let Some((top_dir, _)) = own::find_dir(backing_dir, &backing_dir.root(), TOP)? else {
        return Ok(delays_by_host);
    };
    let Some((logs_dir, _)) = own::find_dir(backing_dir, &top_dir, LOGS)? else {
        return Ok(delays_by_host);
    };
    let deadline = Instant::now() + SEARCH_TIME_MAX;
    for (index, file_dir) in open_own_dirs(backing_dir, &logs_dir)?.enumerate() {
        if index >= LOGGED_FILES_MAX || Instant::now() > deadline {
            notes.push("there are more files in logs than were looked at".to_owned());
            break;
        }
        // The container may be removed during the search, which is no error.
        let Ok(containers) = open_own_dirs(backing_dir, &file_dir) else {
            continue;
        };
        for container in containers {
            count_joined_hosts(backing_dir, &container, &mut delays_by_host);
        }
    }
    Ok(delays_by_host)
}

/// Adds 1 for each host that may write to a container (a directory with logs of one file). Such a host has a file with
/// its name there.
fn count_joined_hosts(
    backing_dir: &DirBacking,
    container: &<DirBacking as Volume>::Inode,
    delays_by_host: &mut BTreeMap<String, u64>,
) {
    for (name, ..) in own::list(backing_dir, container).unwrap_or_default() {
        let name = String::from_utf8(name).unwrap_or_default();
        if let Some(host) = name.strip_prefix(JOINED) {
            *delays_by_host.entry(host.to_owned()).or_default() += 1;
        }
    }
}

/// Returns the subdirectories of a directory that are valid as Firn's own. Each is opened when the iterator reaches it.
fn open_own_dirs<'a>(
    backing_dir: &'a DirBacking,
    dir: &'a <DirBacking as Volume>::Inode,
) -> Result<impl Iterator<Item = <DirBacking as Volume>::Inode> + 'a, OwnError> {
    let entries = own::list(backing_dir, dir)?;
    Ok(entries.into_iter().filter_map(move |(name, _, kind)| {
        // Some file systems list no kind, so an entry without one may be a directory.
        if !matches!(kind, Some(Kind::Dir) | None) {
            return None;
        }
        let name = String::from_utf8(name).ok()?;
        let (subdir, _) = own::find_dir(backing_dir, dir, &name).ok()??;
        Some(subdir)
    }))
}

/// Asks firnd, the daemon of this host's own mount of the backing at `path`, for its status. Without a path, asks this
/// user's only mount. Returns `None` if the path is on no mount, or if this process cannot reach firnd's socket.
pub fn inspect_own_mount(path: Option<&Path>) -> Result<Option<OwnMountState>, Failure> {
    let mount = match path {
        None => find_only_mount()?,
        Some(path) => match firn_client::find(path) {
            Ok(location) => location.mount,
            Err(ClientError::NoMount { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        },
    };
    let mut connection = match Connection::open(&mount) {
        Ok(connection) => connection,
        // The mount uses another runtime directory. Then its report in the backing is the only source.
        Err(ClientError::NoSocket { .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let status = connection.status()?;
    let host_option = status
        .options
        .iter()
        .find_map(|option| option.strip_prefix("host="));
    let host = match host_option {
        Some(host) => host.to_owned(),
        None => text::own_host_name(),
    };
    Ok(Some(OwnMountState {
        host,
        pid: status.pid,
        report: HostReport::from_status(&status, mount.user_id),
        options: status.options,
    }))
}
