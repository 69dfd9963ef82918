//! Looks at the hosts of a job. It asks two sources at the same time: the leases in the backing, and this host's own
//! mount.
//!
//! Each source may hang, so a child process asks it and is abandoned at the timeout.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_backing::{DirBacking, Kind, Volume};
use firn_client::{ClientError, Connection, Mount};
use firn_format::quote::quoted_path;
use firn_hosts::ballot::JOINED;
use firn_hosts::own::{self, LOGS, OwnError, TOP};
use firn_hosts::{Evidence, Holder, Life, Report, survey};
use firn_protocol::HostReport;
use firn_protocol::path::BytePath;
use serde::{Deserialize, Serialize};

use super::{Host, Job, JobTotals, rows};
use crate::ask::{ChildFailure, ask_child, ask_each};
use crate::failure::{FAILED, Failure, NOT_FIRN, USAGE};
use crate::text;

/// Bounds of the search for files in logs: number of files, and time. Each file costs the listing of two directories.
const LOGGED_FILES_MAX: usize = 2_000;
const CONTAINERS_FOR: Duration = Duration::from_millis(300);

/// The lease of one host, and the report beside it, as the backing's files say.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LeaseSeen {
    /// Name of the host.
    pub host: String,
    /// Whether the host is alive, silent, dead, or has left.
    pub life: Life,
    /// What `life` is based on.
    pub evidence: Evidence,
    /// Whether the lease is locked.
    pub is_locked: bool,
    /// Seconds since the last beat. `None` means that the time is unknown.
    pub beat_age_seconds: Option<f64>,
    /// The process that holds the lease.
    pub holder: Option<Holder>,
    /// What the host uses the backing for.
    pub uses: Vec<String>,
    /// Values of the options that hosts have to agree on.
    pub terms: BTreeMap<String, String>,
    /// The report beside the lease, as the host wrote it.
    pub report: Option<Report>,
}

/// What the leases and logs in a backing say.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BackingSeen {
    /// Canonical path of the backing.
    pub backing: BytePath,
    /// Boot id of this host's running kernel.
    pub boot: String,
    /// The leases of all hosts.
    pub leases: Vec<LeaseSeen>,
    /// For each host, the number of files in logs that it keeps from being flattened.
    pub keepers: BTreeMap<String, u64>,
    /// Sentences about what could not be read.
    pub notes: Vec<String>,
}

/// What the firnd of this host says of its own mount.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MountSeen {
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
    /// Looks at the hosts of the backing, or of the mount, at `path`. Without a path, looks at this user's only mount.
    ///
    /// Returns at `timeout` at the latest. Fails if neither the backing nor a mount of this host answers.
    pub fn look(path: Option<&Path>, timeout: Duration) -> Result<Self, Failure> {
        let questions = [LookSource::Backing, LookSource::Mount];
        let mut backing = None;
        let mut mount = None;
        for answer in ask_each(&questions, |source| source.ask(path, timeout)) {
            match answer {
                SourceAnswer::Backing(answer) => backing = Some(*answer),
                SourceAnswer::Mount(answer) => mount = Some(*answer),
            }
        }
        let mut notes = Vec::new();
        let mount = match mount.unwrap_or(Ok(None)) {
            Ok(mount) => mount,
            Err(error) => {
                notes.extend(describe_mount_failure(&error, timeout));
                None
            }
        };
        let backing = match backing.unwrap_or(Err(ChildFailure::Late)) {
            Ok(backing) => Some(backing),
            Err(error) => {
                let failure = failure_of_backing(error, path, timeout);
                if mount.is_none() {
                    return Err(failure);
                }
                notes.extend(failure.text());
                None
            }
        };
        let is_partial = !notes.is_empty();
        Ok(Self {
            is_partial,
            ..Self::of(backing, mount, notes)
        })
    }

    /// Joins the two answers, of which each may be missing.
    fn of(backing: Option<BackingSeen>, mount: Option<MountSeen>, mut notes: Vec<String>) -> Self {
        let name = match (&backing, &mount) {
            (Some(seen), _) => seen.backing.clone(),
            (None, Some(mount)) => mount.report.backing.clone(),
            (None, None) => BytePath::default(),
        };
        notes.extend(backing.iter().flat_map(|seen| seen.notes.iter().cloned()));
        let hosts: Vec<Host> = rows::rows(backing, mount, &name);
        let says_nothing = |host: &&Host| host.state == Life::Alive && host.report.is_none();
        match hosts.iter().filter(says_nothing).count() {
            0 => {}
            silent => notes.push(format!(
                "the sums do not include {} without a report",
                text::count(silent as u64, "host")
            )),
        }
        if hosts.iter().all(Host::is_gone) && notes.is_empty() {
            notes.push(
                "no host has it mounted, as far as can be seen: hosts show themselves with participants, tokens, \
                 placement, partner or layout=log"
                    .to_owned(),
            );
        }
        Self {
            total: JobTotals::of(&hosts),
            backing: name,
            hosts,
            notes,
            is_partial: false,
        }
    }
}

/// The source that a child process asks.
#[derive(Clone, Copy)]
enum LookSource {
    /// The leases and reports in the backing.
    Backing,
    /// This host's own mount.
    Mount,
}

type ChildAnswer<T> = Box<Result<T, ChildFailure>>;

/// The answer for one source.
enum SourceAnswer {
    Backing(ChildAnswer<BackingSeen>),
    Mount(ChildAnswer<Option<MountSeen>>),
}

impl LookSource {
    /// Asks the source in a child process (`firn hosts --only`).
    fn ask(self, path: Option<&Path>, timeout: Duration) -> SourceAnswer {
        let arguments = |source: &str| {
            let mut arguments: Vec<OsString> =
                vec!["hosts".into(), format!("--only={source}").into()];
            if let Some(path) = path {
                arguments.extend(["--".into(), path.into()]);
            }
            arguments
        };
        match self {
            Self::Backing => {
                SourceAnswer::Backing(Box::new(ask_child(arguments("backing"), timeout)))
            }
            Self::Mount => SourceAnswer::Mount(Box::new(ask_child(arguments("mount"), timeout))),
        }
    }
}

/// Returns a note about this host's mount that did not answer, or `None` if the user need not know.
fn describe_mount_failure(error: &ChildFailure, timeout: Duration) -> Option<String> {
    let seconds = text::seconds(timeout.as_secs_f64());
    match error {
        ChildFailure::Late => Some(format!(
            "the firnd of this host's mount did not answer within {seconds}: its row shows the state at its last \
            beat. A mount that shares nothing with other hosts has no row"
        )),
        // A wrong path concerns both sources. The failure of the backing reports it once.
        ChildFailure::Refused { code, .. } if *code == Some(NOT_FIRN) || *code == Some(USAGE) => {
            None
        }
        ChildFailure::Refused { text, .. } => Some(format!("this host's own mount: {text}")),
        ChildFailure::NotRun(text) => Some(format!("this host's own mount was not asked: {text}")),
    }
}

/// Returns the failure for a backing that did not answer, with what the user should do.
fn failure_of_backing(error: ChildFailure, path: Option<&Path>, timeout: Duration) -> Failure {
    let what = path.map_or_else(|| "the backing".to_owned(), text::path);
    match error {
        ChildFailure::Late => Failure::new(
            FAILED,
            format!(
                "{what} did not answer within {}: check whether its server can be reached (`dmesg`, `firn doctor`). \
                If it is only slow, use a longer --timeout",
                text::seconds(timeout.as_secs_f64())
            ),
        ),
        ChildFailure::Refused { text, code } => {
            let code = if code == Some(USAGE) { USAGE } else { FAILED };
            Failure::new(code, text)
        }
        ChildFailure::NotRun(text) => Failure::new(
            FAILED,
            format!(
                "{what} cannot be examined: {text}; check the limits on processes and memory (`ulimit -a`)"
            ),
        ),
    }
}

/// Returns the backing that a path means: that of the mount on which the path lies, or else the directory itself.
fn find_backing(path: Option<&Path>) -> Result<PathBuf, Failure> {
    let Some(path) = path else {
        return Ok(only_mount()?.backing);
    };
    match firn_client::find(path) {
        Ok(place) => Ok(place.mount.backing),
        Err(ClientError::NoMount { .. } | ClientError::NotYours { .. }) => {
            let canonical = path.canonicalize();
            let canonical = canonical
                .map_err(|error| Failure::new(FAILED, format!("{}: {error}", text::path(path))))?;
            if canonical.is_dir() {
                return Ok(canonical);
            }
            let text = format!(
                "{} is not a directory: name a mount point or a backing",
                text::path(path)
            );
            Err(Failure::new(FAILED, text))
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns this user's only mount. Fails if there is none, or more than one.
fn only_mount() -> Result<Mount, Failure> {
    let mut mounts = firn_client::mounts()?;
    mounts.retain(|mount| !mount.is_of_another_user());
    match (mounts.pop(), &mounts[..]) {
        (Some(mount), []) => Ok(mount),
        (None, _) => Err(Failure::new(
            USAGE,
            "you have no mounts on this host: name the backing",
        )),
        (Some(_), _) => Err(Failure::new(
            USAGE,
            "several backings are mounted on this host: name a mount point or a backing",
        )),
    }
}

/// Reads the leases, the reports and the logs of a backing.
///
/// The caller runs in a separate process, because the calls may hang in the kernel. Fails if the backing cannot be
/// opened, or if its files do not belong to this user.
pub fn look_at_backing(path: Option<&Path>) -> Result<BackingSeen, Failure> {
    let backing = find_backing(path)?;
    let failed = |what: &str| {
        let backing = quoted_path(&backing);
        let what = what.to_owned();
        move |error: String| Failure::new(FAILED, format!("{backing}: {what}: {error}"))
    };
    become_owner(&backing)?;
    let boot = Holder::this_process("").map_err(|error| failed("boot id")(error.to_string()))?;
    let boot = boot.boot;
    let base = DirBacking::open(&backing)
        .map_err(|error| failed("cannot be opened")(error.to_string()))?;
    let surveyed = survey(&base, &boot, &mut std::thread::sleep);
    let surveyed = surveyed.map_err(|error| own_files_failure(&backing, &error))?;
    let mut notes: Vec<String> = surveyed
        .failed
        .iter()
        .map(|(host, error)| format!("host {host} cannot be examined: {error}"))
        .collect();
    if surveyed.is_cut {
        notes.push("there are more hosts than are shown".to_owned());
    }
    let keepers =
        find_keepers(&base, &mut notes).map_err(|error| own_files_failure(&backing, &error))?;
    let leases = surveyed.hosts.into_iter().map(|seen| LeaseSeen {
        host: seen.host,
        life: seen.life,
        evidence: seen.evidence,
        is_locked: seen.is_locked,
        beat_age_seconds: seen.beat_age.map(|age| age.as_secs_f64()),
        holder: seen.holder,
        uses: seen.uses.iter().map(|one| use_word(*one)).collect(),
        terms: seen.terms,
        report: seen.report,
    });
    Ok(BackingSeen {
        leases: leases.collect(),
        backing: backing.as_path().into(),
        boot,
        keepers,
        notes,
    })
}

/// Returns the word that the protocol has for what a host uses the backing for.
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
fn become_owner(backing: &Path) -> Result<(), Failure> {
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
    let become_it = || {
        rustix::thread::set_thread_groups(&[])?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)
    };
    become_it().map_err(|errno| {
        let backing = quoted_path(backing);
        Failure::new(
            FAILED,
            format!("cannot read {backing} as user {}: {errno}", metadata.uid()),
        )
    })
}

/// Counts for each host the containers (logs of one shared file) to which the host says that it may write. The count
/// stops at its bounds, and a note then says so.
fn find_keepers(
    base: &DirBacking,
    notes: &mut Vec<String>,
) -> Result<BTreeMap<String, u64>, OwnError> {
    let mut keepers = BTreeMap::new();
    let Some((top, _)) = own::find_dir(base, &base.root(), TOP)? else {
        return Ok(keepers);
    };
    let Some((logs, _)) = own::find_dir(base, &top, LOGS)? else {
        return Ok(keepers);
    };
    let end = Instant::now() + CONTAINERS_FOR;
    for (index, file) in own_dirs_in(base, &logs)?.enumerate() {
        if index >= LOGGED_FILES_MAX || Instant::now() > end {
            notes.push("there are more files in logs than were looked at".to_owned());
            break;
        }
        // The container may be removed during the search, which is no error.
        let Ok(containers) = own_dirs_in(base, &file) else {
            continue;
        };
        for container in containers {
            for (name, ..) in own::list(base, &container).unwrap_or_default() {
                let name = String::from_utf8(name).unwrap_or_default();
                if let Some(host) = name.strip_prefix(JOINED) {
                    *keepers.entry(host.to_owned()).or_default() += 1;
                }
            }
        }
    }
    Ok(keepers)
}

/// Returns the subdirectories of a directory that are valid as Firn's own. Each is opened when the iterator reaches it.
fn own_dirs_in<'a>(
    base: &'a DirBacking,
    dir: &'a <DirBacking as Volume>::Inode,
) -> Result<impl Iterator<Item = <DirBacking as Volume>::Inode> + 'a, OwnError> {
    let names = own::list(base, dir)?.into_iter();
    let dirs = names.filter(|(_, _, kind)| matches!(kind, Some(Kind::Dir) | None));
    Ok(dirs.filter_map(move |(name, ..)| {
        let name = String::from_utf8(name).ok()?;
        let found = own::find_dir(base, dir, &name).ok()?;
        found.map(|(dir, _)| dir)
    }))
}

/// Asks this host's own mount of the backing at `path`. Returns `None` if the path is on no mount, or if this
/// process cannot reach the firnd.
pub fn look_at_mount(path: Option<&Path>) -> Result<Option<MountSeen>, Failure> {
    let mount = match path {
        None => only_mount()?,
        Some(path) => match firn_client::find(path) {
            Ok(place) => place.mount,
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
    let named = status
        .options
        .iter()
        .find_map(|option| option.strip_prefix("host="));
    let host = named.map_or_else(
        || {
            rustix::system::uname()
                .nodename()
                .to_string_lossy()
                .into_owned()
        },
        str::to_owned,
    );
    Ok(Some(MountSeen {
        host,
        pid: status.pid,
        report: HostReport::of(&status, mount.user_id),
        options: status.options,
    }))
}
