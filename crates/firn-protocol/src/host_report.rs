//! Short reports of a mount, which each host writes for the other hosts that use the same *backing*, the directory that
//! the mounts serve. A host writes one with each *heartbeat*: the renewal of the file that shows that it is alive.
//!
//! A *lane* is one I/O server of the backing. Its *token* is a lock that lets one host at a time write there. A
//! *partner* is a host that keeps copies of bytes that are not in the backing yet. A report is a digest of the
//! [`Status`] and must fit into few bytes. So a list in it has only some entries, those with problems first, and the
//! number of entries left out.

use serde::{Deserialize, Serialize};

use crate::path::BytePath;
use crate::status::{LaneState, LaneStatus, PartnerStatus, Status, TokenState, WaitingProgram};

/// Largest number of lanes in a report, those with problems first.
const LANES_MAX: usize = 8;
/// Number of lanes that remain when the list of lanes is shortened.
const LANES_MIN: usize = 2;
/// Largest number of file names in a report.
pub const NAMES_MAX: usize = 3;
/// Largest number of programs in a report.
const PROGRAMS_MAX: usize = 3;
/// Length of the longest sentence in a report.
const TEXT_CHARS_MAX: usize = 160;
/// Length of the longest path in a report. A longer path is left out.
const PATH_BYTES_MAX: usize = 400;

/// A summary of the state of a mount.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostReport {
    /// Version of firnd.
    pub version: String,
    /// User id of the mount's owner.
    pub user_id: u32,
    /// Path of the backing on the host.
    pub backing: BytePath,
    /// Path of the mount point; empty if it is too long for a report.
    pub mount_point: BytePath,
    /// Path of the arena, which `firn recover` drains; empty if it is too long for a report.
    pub arena: BytePath,
    /// Time since firnd attached.
    pub uptime_seconds: f64,
    /// Size of the arena's data.
    pub arena_bytes: u64,
    /// Bytes of the arena in use.
    pub arena_used_bytes: u64,
    /// See [`Status::held_bytes`].
    pub held_bytes: u64,
    /// See [`Status::held_files`].
    pub held_files: u64,
    /// See [`Status::oldest_held_seconds`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_held_seconds: Option<f64>,
    /// See [`Status::logged_files`].
    pub logged_files: u64,
    /// See [`Status::logged_bytes`].
    pub logged_bytes: u64,
    /// See [`Status::durable_files`].
    pub durable_files: u64,
    /// See [`Status::durable_bytes`].
    pub durable_bytes: u64,
    /// See [`Status::ingest_bytes`].
    pub ingest_bytes: u64,
    /// See [`Status::ingest_bytes_per_second`].
    pub ingest_bytes_per_second: f64,
    /// See [`Status::drain_bytes`].
    pub drain_bytes: u64,
    /// See [`Status::drain_bytes_per_second`].
    pub drain_bytes_per_second: f64,
    /// See [`Status::open_files`].
    pub open_files: u64,
    /// See [`Status::waiting_writers`].
    pub waiting_writers: u64,
    /// The programs that have waited longest for an answer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waiting_programs: Vec<WaitingProgram>,
    /// Number of errors that firnd remembers.
    pub errors: u64,
    /// The newest error, with its path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Lanes. Empty if the mount has only one lane, without token and not in trouble.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lanes: Vec<LaneReport>,
    /// Number of lanes that are not listed.
    pub other_lanes: u64,
    /// The partner host, if the option `partner` asks for one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partner: Option<PartnerReport>,
    /// Number of unfinished transactions.
    pub transactions: u64,
    /// Number of files that programs of the host have open for writing.
    pub written_files: u64,
    /// Names of some of these files.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub written_names: Vec<BytePath>,
}

/// A summary of a lane of a host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LaneReport {
    /// Number of the lane.
    pub lane: u64,
    /// Held bytes that will be written to the lane.
    pub held_bytes: u64,
    /// Number of files in the lane's queue.
    pub queued_files: u64,
    /// Number of threads that write to the lane.
    pub writers: u32,
    /// Whether the lane takes files and bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<LaneState>,
    /// State of the lane's token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<TokenState>,
    /// Time since the token has this state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_seconds: Option<f64>,
    /// The other host that has the token, as far as this host knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_holder: Option<String>,
    /// Time until the lane is tried again after an error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_seconds: Option<f64>,
}

/// A summary of the partner of a host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PartnerReport {
    /// Value of the option `partner`.
    pub wanted: String,
    /// The host that has the copies; `None`: no host has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Held bytes that the partner lacks.
    pub left_bytes: u64,
    /// Remark for users; empty: there is none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub note: String,
}

impl HostReport {
    /// Makes the report of a mount of user `user_id` from its status. Paths and texts that are too long are left out or
    /// cut. The written files are not in the status, so their list stays empty.
    pub fn from_status(status: &Status, user_id: u32) -> Self {
        let LanesInReport { lanes, other_lanes } = choose_lanes(status);
        Self {
            version: status.version.clone(),
            user_id,
            backing: short_path(&status.backing),
            mount_point: short_path(&status.mount_point),
            arena: short_path(&status.arena),
            uptime_seconds: round_to_tenth(status.uptime_seconds),
            arena_bytes: status.arena_bytes,
            arena_used_bytes: status.arena_used_bytes,
            held_bytes: status.held_bytes,
            held_files: status.held_files,
            oldest_held_seconds: status.oldest_held_seconds.map(round_to_tenth),
            logged_files: status.logged_files,
            logged_bytes: status.logged_bytes,
            durable_files: status.durable_files,
            durable_bytes: status.durable_bytes,
            ingest_bytes: status.ingest_bytes,
            ingest_bytes_per_second: round_to_tenth(status.ingest_bytes_per_second),
            drain_bytes: status.drain_bytes,
            drain_bytes_per_second: round_to_tenth(status.drain_bytes_per_second),
            open_files: status.open_files,
            waiting_writers: status.waiting_writers,
            waiting_programs: choose_programs(&status.waiting_programs),
            errors: status.errors.len() as u64,
            last_error: status
                .errors
                .last()
                .map(|error| short_text(&format!("{}: {}", error.path, error.message))),
            lanes,
            other_lanes,
            partner: status.partner.as_ref().map(PartnerReport::from_status),
            transactions: status.transactions.len() as u64,
            written_files: 0,
            written_names: Vec::new(),
        }
    }

    /// Adds the number of files that programs have open for writing, and some of their names.
    #[must_use]
    pub fn with_written(mut self, count: u64, names: Vec<Vec<u8>>) -> Self {
        self.written_files = count;
        self.written_names = names
            .into_iter()
            .filter(|name| name.len() <= PATH_BYTES_MAX)
            .take(NAMES_MAX)
            .map(BytePath::from)
            .collect();
        self
    }

    /// Removes lists and texts, the least important first, until `fits` accepts the report. The numbers always remain,
    /// so the report may still not fit at the end.
    #[must_use]
    pub fn fit(mut self, fits: impl Fn(&Self) -> bool) -> Self {
        let removals: [fn(&mut Self); 6] = [
            |report| report.written_names.clear(),
            |report| report.waiting_programs.clear(),
            |report| {
                report.other_lanes += report.lanes.len().saturating_sub(LANES_MIN) as u64;
                report.lanes.truncate(LANES_MIN);
            },
            |report| report.last_error = None,
            |report| {
                report.other_lanes += report.lanes.len() as u64;
                report.lanes.clear();
            },
            |report| {
                report.mount_point = BytePath::default();
                report.arena = BytePath::default();
                report.backing = BytePath::default();
            },
        ];
        for remove in removals {
            if fits(&self) {
                break;
            }
            remove(&mut self);
        }
        self
    }
}

/// The lanes of a mount in a report.
#[derive(Default)]
struct LanesInReport {
    /// The lanes that are listed.
    lanes: Vec<LaneReport>,
    /// Number of lanes that are not listed.
    other_lanes: u64,
}

/// Chooses the lanes (I/O servers) to list: those with problems first, and then those with the most bytes that are not
/// in the backing yet. A single lane without token or error is not listed: it has the figures of the mount itself.
fn choose_lanes(status: &Status) -> LanesInReport {
    if let [lane] = &status.lanes[..]
        && lane.token.is_none()
        && lane.retry_seconds.is_none()
    {
        return LanesInReport::default();
    }
    let mut lanes: Vec<LaneReport> = status
        .lanes
        .iter()
        .enumerate()
        .map(|(number, lane)| LaneReport::from_lane(number as u64, lane))
        .collect();
    // The sort is stable, so lanes that compare as equal remain in the order of their numbers.
    lanes.sort_by_key(|lane| (!lane.is_in_trouble(), std::cmp::Reverse(lane.held_bytes)));
    let other_lanes = lanes.len().saturating_sub(LANES_MAX) as u64;
    lanes.truncate(LANES_MAX);
    LanesInReport { lanes, other_lanes }
}

/// Chooses the programs to list: the first ones, which have waited longest.
fn choose_programs(waiting: &[WaitingProgram]) -> Vec<WaitingProgram> {
    waiting
        .iter()
        .take(PROGRAMS_MAX)
        .map(|program| WaitingProgram {
            seconds: round_to_tenth(program.seconds),
            ..program.clone()
        })
        .collect()
}

impl LaneReport {
    /// Makes the report of the lane with this number.
    pub fn from_lane(lane: u64, status: &LaneStatus) -> Self {
        let token = status.token.as_ref();
        Self {
            lane,
            held_bytes: status.held_bytes,
            queued_files: status.queued_files,
            writers: status.writers,
            state: status.placed.as_ref().map(|placed| placed.state),
            token: token.map(|token| token.state),
            token_seconds: token.map(|token| round_to_tenth(token.state_seconds)),
            token_holder: token.and_then(|token| token.holder.clone()),
            retry_seconds: status.retry_seconds.map(round_to_tenth),
        }
    }

    /// Returns whether the lane takes no files, is written to without its token, or waits after an error.
    pub fn is_in_trouble(&self) -> bool {
        self.state.is_some_and(|state| state != LaneState::Ok)
            || self.token == Some(TokenState::Without)
            || self.retry_seconds.is_some()
    }
}

impl PartnerReport {
    /// Makes the report of a partner.
    fn from_status(status: &PartnerStatus) -> Self {
        Self {
            wanted: status.wanted.clone(),
            host: status.host.clone(),
            left_bytes: status.left_bytes,
            note: short_text(&status.note),
        }
    }
}

/// Rounds to one digit after the point, so that the report stays short.
fn round_to_tenth(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// Returns the path, or an empty path if it is too long for a report.
fn short_path(path: &BytePath) -> BytePath {
    if path.as_bytes().len() <= PATH_BYTES_MAX {
        path.clone()
    } else {
        BytePath::default()
    }
}

/// Cuts a sentence that is too long for a report.
fn short_text(text: &str) -> String {
    match text.char_indices().nth(TEXT_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::ErrorStatus;

    #[test]
    fn a_report_has_room_whatever_the_status_is() {
        let long = "\u{1}".repeat(PATH_BYTES_MAX);
        let lane = Status::example().lanes[0].clone();
        let error = ErrorStatus {
            path: long.as_str().into(),
            message: long.clone(),
            ..ErrorStatus::default()
        };
        let status = Status {
            backing: long.as_str().into(),
            mount_point: long.as_str().into(),
            arena: "a".repeat(5000).into(),
            lanes: vec![lane; 200],
            errors: vec![error; 64],
            ..Status::example()
        };
        let fits = |report: &HostReport| serde_json::to_vec(report).unwrap().len() <= 3500;
        let names = vec![long.into_bytes(); 20];
        let report = HostReport::from_status(&status, 7)
            .with_written(20, names)
            .fit(fits);
        assert!(fits(&report));
        assert_eq!(report.lanes.len() as u64 + report.other_lanes, 200);
        assert_eq!((report.errors, report.written_files), (64, 20));
        assert!(report.arena.is_empty());
    }

    #[test]
    fn a_report_of_an_older_version_is_read_and_lanes_in_trouble_come_first() {
        let report: HostReport = serde_json::from_str(r#"{"held_bytes":5,"new":[1]}"#).unwrap();
        assert_eq!(report.held_bytes, 5);
        let mut status = Status {
            lanes: vec![LaneStatus::default(); 3],
            ..Status::default()
        };
        status.lanes[1].held_bytes = 9;
        status.lanes[2].retry_seconds = Some(1.0);
        let order = HostReport::from_status(&status, 0).lanes;
        let order: Vec<u64> = order.iter().map(|lane| lane.lane).collect();
        assert_eq!(order, [2, 1, 0]);
        // A single lane without trouble has the figures of the mount itself, so it is not listed.
        status.lanes.truncate(1);
        assert_eq!(HostReport::from_status(&status, 0).lanes, []);
    }
}
