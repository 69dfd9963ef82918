//! What a host says of a mount to the other hosts of the backing, in few bytes: it is written with each beat of its lease.
//!
//! It is a digest of the [`Status`]. Lists have the first of many and how many there are, so that the report of a host
//! in trouble is not the one that has no room.

use serde::{Deserialize, Serialize};

use crate::path::BytePath;
use crate::status::{LaneState, LaneStatus, PartnerStatus, Status, TokenState, WaitingProgram};

/// Lanes that a report names, those in trouble first.
const LANES_MAX: usize = 8;
/// Names of files that a report has.
pub const NAMES_MAX: usize = 3;
/// Programs that a report names.
const PROGRAMS_MAX: usize = 3;
/// Characters of a sentence in a report.
const TEXT_CHARS_MAX: usize = 160;
/// Bytes of a path in a report; a longer one is left out.
const PATH_BYTES_MAX: usize = 400;

/// How a mount is, in short.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostReport {
    /// Version of firnd.
    pub version: String,
    /// The user that mounted.
    pub user_id: u32,
    /// The backing, as the host has it.
    pub backing: BytePath,
    /// The mount point; empty: its path is too long for a report.
    pub mount_point: BytePath,
    /// The arena, which `firn recover` drains; empty: its path is too long for a report.
    pub arena: BytePath,
    /// Time since firnd attached.
    pub uptime_seconds: f64,
    /// Bytes of the arena.
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
    /// Programs that have waited longest for an answer; the first of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waiting_programs: Vec<WaitingProgram>,
    /// Errors not yet dealt with.
    pub errors: u64,
    /// The newest of them, with the path that it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Lanes of which something is to be told: where there are several, or tokens; the first of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lanes: Vec<LaneReport>,
    /// Lanes that are not among them.
    pub other_lanes: u64,
    /// Where copies are kept, if they are asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partner: Option<PartnerReport>,
    /// Transactions that are not over.
    pub transactions: u64,
    /// Files that programs of the host have open for writing; the names of the first of them.
    pub written_files: u64,
    /// Their names.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub written_names: Vec<BytePath>,
}

/// A lane of a host, in short.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LaneReport {
    /// Its number.
    pub lane: u64,
    /// Bytes that are not in it yet.
    pub held_bytes: u64,
    /// Files in line.
    pub queued_files: u64,
    /// Threads that write to it.
    pub writers: u32,
    /// Whether it takes files and bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<LaneState>,
    /// What its token does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<TokenState>,
    /// For how long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_seconds: Option<f64>,
    /// The host that has it instead, as far as this one was told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_holder: Option<String>,
    /// Time until it is tried again after an error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_seconds: Option<f64>,
}

/// The partner of a host, in short.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PartnerReport {
    /// The option.
    pub wanted: String,
    /// The host that has the copies; none: no host has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Held bytes that the partner lacks.
    pub left_bytes: u64,
    /// What a person should know.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub note: String,
}

impl HostReport {
    /// Report of a mount of user `user_id`.
    pub fn of(status: &Status, user_id: u32) -> Self {
        let last = status.errors.last();
        let (lanes, other_lanes) = lanes_of(status);
        Self {
            version: status.version.clone(),
            user_id,
            backing: short_path(&status.backing),
            mount_point: short_path(&status.mount_point),
            arena: short_path(&status.arena),
            uptime_seconds: whole(status.uptime_seconds),
            arena_bytes: status.arena_bytes,
            arena_used_bytes: status.arena_used_bytes,
            held_bytes: status.held_bytes,
            held_files: status.held_files,
            oldest_held_seconds: status.oldest_held_seconds.map(whole),
            logged_files: status.logged_files,
            logged_bytes: status.logged_bytes,
            durable_files: status.durable_files,
            durable_bytes: status.durable_bytes,
            ingest_bytes: status.ingest_bytes,
            ingest_bytes_per_second: whole(status.ingest_bytes_per_second),
            drain_bytes: status.drain_bytes,
            drain_bytes_per_second: whole(status.drain_bytes_per_second),
            open_files: status.open_files,
            waiting_writers: status.waiting_writers,
            waiting_programs: status
                .waiting_programs
                .iter()
                .take(PROGRAMS_MAX)
                .map(|program| WaitingProgram {
                    seconds: whole(program.seconds),
                    ..program.clone()
                })
                .collect(),
            errors: status.errors.len() as u64,
            last_error: last.map(|error| short_text(&format!("{}: {}", error.path, error.message))),
            lanes,
            other_lanes,
            partner: status.partner.as_ref().map(PartnerReport::of),
            transactions: status.transactions.len() as u64,
            written_files: 0,
            written_names: Vec::new(),
        }
    }

    /// Adds what programs write: the number of files, and names of some.
    #[must_use]
    pub fn with_written(mut self, count: u64, names: Vec<Vec<u8>>) -> Self {
        self.written_files = count;
        let names = names.into_iter().map(BytePath::from);
        let short = names.filter(|name| name.as_bytes().len() <= PATH_BYTES_MAX);
        self.written_names = short.take(NAMES_MAX).collect();
        self
    }

    /// Leaves lists and sentences out until it `fits`.
    #[must_use]
    pub fn fit(mut self, fits: impl Fn(&Self) -> bool) -> Self {
        let cuts: [fn(&mut Self); 6] = [
            |report| report.written_names.clear(),
            |report| report.waiting_programs.clear(),
            |report| {
                report.other_lanes += report.lanes.len().saturating_sub(2) as u64;
                report.lanes.truncate(2);
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
        for cut in cuts {
            if fits(&self) {
                break;
            }
            cut(&mut self);
        }
        self
    }
}

/// Those of which something is to be told, and how many others there are.
fn lanes_of(status: &Status) -> (Vec<LaneReport>, u64) {
    let is_alone = status.lanes.len() == 1
        && status.lanes[0].token.is_none()
        && status.lanes[0].retry_seconds.is_none();
    if is_alone {
        return (Vec::new(), 0);
    }
    let all = status.lanes.iter().enumerate();
    let mut lanes: Vec<LaneReport> = all
        .map(|(lane, of)| LaneReport::of(lane as u64, of))
        .collect();
    // Stable: by number where they are alike.
    lanes.sort_by_key(|lane| (!lane.is_in_trouble(), std::cmp::Reverse(lane.held_bytes)));
    let others = lanes.len().saturating_sub(LANES_MAX) as u64;
    lanes.truncate(LANES_MAX);
    (lanes, others)
}

impl LaneReport {
    /// Report of the lane with this number.
    pub fn of(lane: u64, status: &LaneStatus) -> Self {
        let token = status.token.as_ref();
        Self {
            lane,
            held_bytes: status.held_bytes,
            queued_files: status.queued_files,
            writers: status.writers,
            state: status.placed.as_ref().map(|placed| placed.state),
            token: token.map(|token| token.state),
            token_seconds: token.map(|token| whole(token.state_seconds)),
            token_holder: token.and_then(|token| token.holder.clone()),
            retry_seconds: status.retry_seconds.map(whole),
        }
    }

    /// Whether it takes no files, goes without its token, or waits after an error.
    pub fn is_in_trouble(&self) -> bool {
        self.state.is_some_and(|state| state != LaneState::Ok)
            || self.token == Some(TokenState::Without)
            || self.retry_seconds.is_some()
    }
}

impl PartnerReport {
    fn of(status: &PartnerStatus) -> Self {
        Self {
            wanted: status.wanted.clone(),
            host: status.host.clone(),
            left_bytes: status.left_bytes,
            note: short_text(&status.note),
        }
    }
}

/// Without the digits that only make a report longer.
fn whole(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn short_path(path: &BytePath) -> BytePath {
    match path.as_bytes().len() {
        0..=PATH_BYTES_MAX => path.clone(),
        _ => BytePath::default(),
    }
}

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
        let report = HostReport::of(&status, 7).with_written(20, names).fit(fits);
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
        let order = HostReport::of(&status, 0).lanes;
        let order: Vec<u64> = order.iter().map(|lane| lane.lane).collect();
        assert_eq!(order, [2, 1, 0]);
        // One lane without anything to tell is the mount itself.
        status.lanes.truncate(1);
        assert_eq!(HostReport::of(&status, 0).lanes, []);
    }
}
