//! All figures of a mount as Prometheus text: each number and each yes or no of the status, which a test compares. Words
//! are labels, or left to the status.

use std::collections::BTreeMap;
use std::fmt::Write;

use firn_protocol::{
    BackupStatus, LaneState, LaneStatus, NumaNodeStatus, PartnerStatus, PlacedStatus, SpillStatus,
    Status, TokenState, TokenStatus, TransactionStatus,
};

/// The Prometheus text exposition format, version 0.0.4.
pub(crate) fn prometheus(status: &Status) -> String {
    let mut out = Exposition::new(status);
    put_transfers(&mut out, status);
    put_memory(&mut out, status);
    if let Some(spill) = &status.spill {
        put_spill(&mut out, spill);
    }
    put_numa_nodes(&mut out, &status.numa_nodes);
    put_lanes(&mut out, &status.lanes);
    put_placed(&mut out, &status.lanes);
    put_tokens(&mut out, &status.lanes);
    put_transactions(&mut out, &status.transactions);
    put_backups(&mut out, &status.transactions);
    if let Some(partner) = &status.partner {
        put_partner(&mut out, partner);
    }
    put_users(&mut out, status);
    put_health(&mut out, status);
    put_errors(&mut out, status);
    put_counts(&mut out, status);
    out.text
}

/// What was taken from programs, drained and read.
fn put_transfers(out: &mut Exposition, status: &Status) {
    out.counter(
        "ingest_bytes_total",
        "Bytes taken from programs.",
        status.ingest_bytes as f64,
    );
    out.counter(
        "ingest_writes_total",
        "Write requests taken from programs.",
        status.ingest_writes as f64,
    );
    out.counter(
        "drain_bytes_total",
        "Bytes written to the backing.",
        status.drain_bytes as f64,
    );
    out.counter(
        "drain_writes_total",
        "Writes to the backing that succeeded.",
        status.drain_writes as f64,
    );
    out.counter(
        "drain_errors_total",
        "Writes to the backing that failed.",
        status.drain_errors as f64,
    );
    out.counter(
        "cancelled_bytes_total",
        "Bytes overwritten before they were drained.",
        status.cancelled_bytes as f64,
    );
    out.counter(
        "read_bytes_total",
        "Bytes read through firnd.",
        status.read_bytes as f64,
    );
    out.gauge(
        "ingest_bytes_per_second",
        "Bytes taken from programs over the last seconds.",
        status.ingest_bytes_per_s,
    );
    out.gauge(
        "drain_bytes_per_second",
        "Bytes written to the backing over the last seconds.",
        status.drain_bytes_per_s,
    );
    out.counter(
        "misplaced_files_total",
        "Files that did not get the server that placement asked for.",
        status.misplaced_files as f64,
    );
}

/// The arena, and what it holds.
fn put_memory(out: &mut Exposition, status: &Status) {
    out.gauge(
        "arena_bytes",
        "Bytes of chunks in the arena.",
        status.arena_bytes as f64,
    );
    out.gauge(
        "chunk_bytes",
        "Bytes of one chunk.",
        status.chunk_bytes as f64,
    );
    out.gauge(
        "arena_used_bytes",
        "Bytes of slabs in use.",
        status.arena_used_bytes as f64,
    );
    let foreign = status.numa_nodes.iter().map(|node| node.foreign_slabs);
    out.counter(
        "foreign_slabs_total",
        "Slabs given to writers nearer to other memory.",
        foreign.sum::<u64>() as f64,
    );
    out.gauge(
        "held_bytes",
        "Bytes not yet in the backing.",
        status.held_bytes as f64,
    );
    out.gauge(
        "held_files",
        "Files with bytes not yet in the backing.",
        status.held_files as f64,
    );
    out.gauge(
        "logged_files",
        "Files with bytes in logs, as far as this host knows.",
        status.logged_files as f64,
    );
    let oldest_ms = status.oldest_held_ms.unwrap_or(0);
    out.gauge(
        "oldest_held_seconds",
        "Age of the oldest byte not yet in the backing.",
        seconds(oldest_ms),
    );
    out.gauge(
        "kernel_copies_bytes",
        "Bytes of held files that the kernel may have cached as well.",
        status.kernel_copies_bytes as f64,
    );
    out.gauge(
        "kernel_copies_max_bytes",
        "The most that they may be.",
        status.kernel_copies_bytes_max as f64,
    );
    out.gauge(
        "cached_bytes",
        "Drained bytes that are still in the arena to be read again.",
        status.cached_bytes as f64,
    );
    out.counter(
        "evicted_bytes_total",
        "Drained bytes that left the arena.",
        status.evicted_bytes as f64,
    );
    out.gauge(
        "recovered_bytes",
        "Bytes recovered from an earlier firnd.",
        status.recovered_bytes as f64,
    );
    out.gauge(
        "lost_file_bytes",
        "Held bytes whose file is not in the backing.",
        status.lost_file_bytes as f64,
    );
}

/// The spill file.
fn put_spill(out: &mut Exposition, spill: &SpillStatus) {
    out.gauge(
        "spill_bytes",
        "Bytes that the spill file may hold.",
        spill.bytes as f64,
    );
    out.gauge(
        "spill_used_bytes",
        "Bytes of its slots in use.",
        spill.used_bytes as f64,
    );
    out.counter(
        "spill_moved_bytes_total",
        "Bytes moved to the spill file.",
        spill.moved_bytes as f64,
    );
    out.gauge(
        "spill_moved_bytes_per_second",
        "The same over the last seconds.",
        spill.moved_bytes_per_s,
    );
    out.gauge(
        "spill_failing",
        "Whether the spill file cannot be used.",
        f64::from(spill.failing),
    );
}

/// The parts of the arena.
fn put_numa_nodes(out: &mut Exposition, nodes: &[NumaNodeStatus]) {
    let mut of_nodes = |name, help, figure: fn(&NumaNodeStatus) -> u64| {
        let sample = |node: &NumaNodeStatus| {
            let label = label("numa_node", &node.numa_node.to_string());
            (label, figure(node) as f64)
        };
        out.family(name, Kind::Gauge, help, nodes.iter().map(sample));
    };
    of_nodes("numa_node_bytes", "Bytes of its chunks.", |node| node.bytes);
    of_nodes(
        "numa_node_used_bytes",
        "Bytes of its chunks in use.",
        |node| node.used_bytes,
    );
}

/// A figure of lanes, where it is there, with the lane's number as its label.
type Samples = Vec<(String, f64)>;

fn of_lanes(lanes: &[LaneStatus], figure: impl Fn(&LaneStatus) -> Option<f64>) -> Samples {
    let sample = |(index, lane)| Some((lane_label(index), figure(lane)?));
    lanes.iter().enumerate().filter_map(sample).collect()
}

fn lane_label(index: usize) -> String {
    label("lane", &index.to_string())
}

/// A state of lanes: a sample for each state that there is, 1 for the one that is.
fn states_of_lanes<S: Copy + PartialEq>(
    lanes: &[LaneStatus],
    all: &[(S, &str)],
    state: impl Fn(&LaneStatus) -> Option<S>,
) -> Samples {
    let mut samples = Samples::new();
    for (index, lane) in lanes.iter().enumerate() {
        let Some(now) = state(lane) else { continue };
        for (possible, name) in all {
            let labels = lane_label(index) + &label("state", name);
            samples.push((labels, f64::from(now == *possible)));
        }
    }
    samples
}

/// What the lanes do.
fn put_lanes(out: &mut Exposition, lanes: &[LaneStatus]) {
    use Kind::Gauge;
    let info = |(index, lane): (usize, &LaneStatus)| {
        let path = label("path", &lane.path.to_string());
        (lane_label(index) + &path, 1.0)
    };
    let infos = lanes.iter().enumerate().map(info);
    out.family("lane_info", Gauge, "The directory of a lane.", infos);
    let mut gauge = |name, help, figure: fn(&LaneStatus) -> Option<f64>| {
        out.family(name, Gauge, help, of_lanes(lanes, figure));
    };
    gauge(
        "lane_max_writers",
        "IO threads that may write to the lane at once.",
        |lane| Some(f64::from(lane.writers_max)),
    );
    gauge("lane_writers", "IO threads that do.", |lane| {
        Some(f64::from(lane.writers))
    });
    gauge(
        "lane_retry_seconds",
        "Seconds until the lane is tried again after an error.",
        |lane| lane.retry_in_ms.map(seconds),
    );
    gauge("lane_queued_files", "Files in line for a write.", |lane| {
        Some(lane.queued_files as f64)
    });
    gauge(
        "lane_held_files",
        "Files with bytes that are not in the lane yet.",
        |lane| Some(lane.held_files as f64),
    );
    gauge("lane_held_bytes", "Those bytes.", |lane| {
        Some(lane.held_bytes as f64)
    });
}

/// What was placed in the lanes; nothing on a mount without a placement.
fn put_placed(out: &mut Exposition, lanes: &[LaneStatus]) {
    let mut of_placed = |name, kind, help, figure: fn(&PlacedStatus) -> f64| {
        let placed = |lane: &LaneStatus| lane.placed.as_ref().map(figure);
        out.family(name, kind, help, of_lanes(lanes, placed));
    };
    of_placed(
        "lane_placed_files_total",
        Kind::Counter,
        "Files that were made in the lane.",
        |placed| placed.files as f64,
    );
    of_placed(
        "lane_placed_bytes_total",
        Kind::Counter,
        "Bytes that were written there.",
        |placed| placed.bytes as f64,
    );
    of_placed(
        "lane_takes_files",
        Kind::Gauge,
        "Whether new files may go to the lane.",
        |placed| f64::from(placed.takes_files),
    );
    let all = [
        (LaneState::Ok, "ok"),
        (LaneState::Full, "full"),
        (LaneState::Gone, "gone"),
        (LaneState::Hung, "hung"),
    ];
    let state = |lane: &LaneStatus| Some(lane.placed.as_ref()?.state);
    let samples = states_of_lanes(lanes, &all, state);
    let help = "Whether the lane takes files and bytes.";
    out.family("lane_state", Kind::Gauge, help, samples);
}

/// The tokens of the lanes; nothing on a mount without.
fn put_tokens(out: &mut Exposition, lanes: &[LaneStatus]) {
    let mut of_tokens = |name, kind, help, figure: fn(&TokenStatus) -> f64| {
        let token = |lane: &LaneStatus| lane.token.as_ref().map(figure);
        out.family(name, kind, help, of_lanes(lanes, token));
    };
    of_tokens(
        "tokens_granted_total",
        Kind::Counter,
        "Times that this host got the token of a lane.",
        |token| token.granted as f64,
    );
    of_tokens(
        "tokens_went_without_total",
        Kind::Counter,
        "Times that the drain of a lane went on without its token.",
        |token| token.went_without as f64,
    );
    of_tokens(
        "tokens_errors_total",
        Kind::Counter,
        "Questions about a token that failed.",
        |token| token.errors as f64,
    );
    of_tokens(
        "tokens_waited_seconds_total",
        Kind::Counter,
        "Seconds that drains waited for a token.",
        |token| seconds(token.waited_ms),
    );
    of_tokens(
        "tokens_state_seconds",
        Kind::Gauge,
        "Seconds since the token does what it does now.",
        |token| seconds(token.for_ms),
    );
    let all = [
        (TokenState::Idle, "idle"),
        (TokenState::Waiting, "waiting"),
        (TokenState::Held, "held"),
        (TokenState::Without, "without"),
    ];
    let state = |lane: &LaneStatus| Some(lane.token.as_ref()?.state);
    let samples = states_of_lanes(lanes, &all, state);
    let help = "What the token of a lane does.";
    out.family("tokens_state", Kind::Gauge, help, samples);
}

fn scope_label(transaction: &TransactionStatus) -> String {
    label("scope", &transaction.scope.to_string())
}

/// Transactions that are not over.
fn put_transactions(out: &mut Exposition, transactions: &[TransactionStatus]) {
    use Kind::Gauge;
    let info = |transaction: &TransactionStatus| {
        let stage = label("stage", &transaction.stage);
        (scope_label(transaction) + &stage, 1.0)
    };
    let help = "A transaction that is not over.";
    out.family(
        "transaction_info",
        Gauge,
        help,
        transactions.iter().map(info),
    );
    let mut gauge = |name, help, figure: fn(&TransactionStatus) -> Option<f64>| {
        let sample = |of: &TransactionStatus| figure(of).map(|value| (scope_label(of), value));
        out.family(name, Gauge, help, transactions.iter().filter_map(sample));
    };
    gauge(
        "transaction_age_seconds",
        "Seconds since it was begun by this firnd.",
        |of| of.age_s,
    );
    gauge(
        "transaction_bytes",
        "Bytes that programs wrote in it, with what is held.",
        |of| Some(of.bytes as f64),
    );
    gauge("transaction_objects", "Names that it changes.", |of| {
        Some(of.objects as f64)
    });
    gauge(
        "transaction_recovered",
        "Whether an earlier firnd prepared it.",
        |of| Some(f64::from(of.recovered)),
    );
    let files = transactions.iter().flat_map(|of| {
        let sample = |(state, count): (&String, &u64)| {
            (scope_label(of) + &label("state", state), *count as f64)
        };
        of.states.iter().map(sample)
    });
    let help = "Names of files in each state.";
    out.family("transaction_files", Gauge, help, files);
}

/// Backups of transactions; nothing on a mount without.
fn put_backups(out: &mut Exposition, transactions: &[TransactionStatus]) {
    let mut gauge = |name, help, figure: fn(&BackupStatus) -> Option<f64>| {
        let sample = |of: &TransactionStatus| {
            let value = figure(of.backup.as_ref()?)?;
            Some((scope_label(of), value))
        };
        let samples = transactions.iter().filter_map(sample);
        out.family(name, Kind::Gauge, help, samples);
    };
    gauge(
        "backup_whole",
        "Whether the transaction can be finished from its backup.",
        |backup| Some(f64::from(backup.whole)),
    );
    gauge(
        "backup_age_seconds",
        "Seconds since the backup was written to last.",
        |backup| backup.age_s,
    );
    gauge(
        "backup_copied_bytes",
        "Bytes that are in the backup.",
        |backup| Some(backup.copied_bytes as f64),
    );
    gauge(
        "backup_left_bytes",
        "Bytes that a prepare has to copy.",
        |backup| Some(backup.left_bytes as f64),
    );
}

/// What the partner has, and what it does not have yet.
fn put_partner(out: &mut Exposition, partner: &PartnerStatus) {
    out.gauge(
        "partner_present",
        "Whether a partner host has copies now.",
        f64::from(partner.host.is_some()),
    );
    out.gauge(
        "partnered_bytes",
        "Held bytes of files that the partner has.",
        partner.copied_bytes as f64,
    );
    out.gauge(
        "partnered_files",
        "Held files that the partner has.",
        partner.copied_files as f64,
    );
    out.gauge(
        "partner_lag_files",
        "Held files that the partner does not have.",
        partner.left_files as f64,
    );
    out.gauge(
        "partner_lag_bytes",
        "Held bytes of files that the partner does not have.",
        partner.left_bytes as f64,
    );
    out.gauge(
        "partner_lag_seconds",
        "Age of the oldest byte that the partner does not have.",
        partner.lag_s,
    );
}

/// Who uses the mount.
fn put_users(out: &mut Exposition, status: &Status) {
    out.gauge(
        "open_files",
        "Files open through the mount.",
        status.open_files as f64,
    );
    out.gauge(
        "waiting_writers",
        "Writers that wait for room.",
        status.waiting_writers as f64,
    );
    out.gauge(
        "direct_clients",
        "Processes connected to the data socket for direct access.",
        status.direct_clients as f64,
    );
    out.gauge(
        "direct_files",
        "Files that they write by direct access.",
        status.direct_files as f64,
    );
    out.gauge(
        "direct_leases",
        "Slabs leased to them.",
        status.direct_leases as f64,
    );
    out.counter(
        "direct_errors_total",
        "Leases that ended because their client broke the rules.",
        status.direct_errors as f64,
    );
    out.gauge(
        "chunk_lists",
        "Lists of chunks that programs hold.",
        status.chunk_lists as f64,
    );
    out.gauge(
        "chunk_list_bytes",
        "Bytes in memory that they name.",
        status.chunk_list_bytes as f64,
    );
    out.gauge(
        "pulls",
        "Connections of agents for pullers on other hosts.",
        status.pulls as f64,
    );
    out.counter(
        "pulled_files_total",
        "Files that agents have sent to other hosts.",
        status.pulled_files as f64,
    );
    out.counter(
        "pulled_bytes_total",
        "Bytes that agents have sent to other hosts.",
        status.pulled_bytes as f64,
    );
    out.gauge(
        "pulled_bytes_per_second",
        "The same over the last seconds.",
        status.pulled_bytes_per_s,
    );
}

/// Errors, limits, and how long firnd has been up.
fn put_health(out: &mut Exposition, status: &Status) {
    out.gauge(
        "errors",
        "Errors not yet dealt with.",
        status.errors.len() as f64,
    );
    out.gauge(
        "host_differences",
        "Differences between the options of this host and of others that mount the backing.",
        status.host_differences.len() as f64,
    );
    out.counter(
        "log_lines_lost_total",
        "Log lines that could not be written.",
        status.log_lines_lost as f64,
    );
    if let Some(limit) = status.file_size_limit_bytes {
        out.gauge(
            "file_size_limit_bytes",
            "Bytes of the largest file that firnd may write.",
            limit as f64,
        );
    }
    out.gauge(
        "epoch",
        "Lifetimes of firnd that the arena has seen.",
        status.epoch as f64,
    );
    out.gauge(
        "uptime_seconds",
        "Seconds since firnd attached.",
        status.uptime_s,
    );
}

/// Each error that was not dealt with.
fn put_errors(out: &mut Exposition, status: &Status) {
    let labels = |at: usize| {
        let error = &status.errors[at];
        label("number", &at.to_string())
            + &label("path", &error.path.to_string())
            + &label("errno", &error.errno.to_string())
    };
    let mut gauge = |name, help, figure: fn(&firn_protocol::ErrorStatus) -> f64| {
        let errors = status.errors.iter().enumerate();
        let samples = errors.map(|(at, error)| (labels(at), figure(error)));
        out.family(name, Kind::Gauge, help, samples);
    };
    gauge(
        "error_repeats",
        "How often in a row it happened.",
        |error| error.count as f64,
    );
    gauge(
        "error_age_seconds",
        "Seconds since it happened last.",
        |error| error.age_s,
    );
    gauge(
        "error_pending",
        "Whether its file has bytes that are not drained.",
        |error| f64::from(error.pending),
    );
}

/// Counters by kind.
fn put_counts(out: &mut Exposition, status: &Status) {
    out.counters(
        "failed_requests_total",
        "operation",
        "Requests of the kernel that failed.",
        &status.failed_requests,
    );
    out.counters(
        "drain_decisions_total",
        "decision",
        "Decisions of the drain.",
        &status.drain_decisions,
    );
    out.counters(
        "transaction_steps_total",
        "step",
        "Steps of transactions on this host.",
        &status.transaction_steps,
    );
}

/// What a figure does.
#[derive(Clone, Copy)]
enum Kind {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
}

/// The text so far, and the labels that each figure has.
struct Exposition {
    text: String,
    labels: String,
}

impl Exposition {
    fn new(status: &Status) -> Self {
        // Labels are text: a path is written as people are shown it, so that no two look alike.
        let labels = format!(
            "mount_point=\"{}\",backing=\"{}\"",
            escaped(&status.mount_point.to_string()),
            escaped(&status.backing.to_string())
        );
        Self {
            text: String::new(),
            labels,
        }
    }

    /// A figure that only grows.
    fn counter(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, Kind::Counter, help, [(String::new(), value)]);
    }

    /// A figure that goes up and down.
    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, Kind::Gauge, help, [(String::new(), value)]);
    }

    /// A counter for each value of `key`; nothing where there is none.
    fn counters(&mut self, name: &str, key: &str, help: &str, counts: &BTreeMap<String, u64>) {
        let sample = |(kind, count): (&String, &u64)| (label(key, kind), *count as f64);
        self.family(name, Kind::Counter, help, counts.iter().map(sample));
    }

    /// A figure with samples that have labels more; nothing where there are none.
    fn family(
        &mut self,
        name: &str,
        kind: Kind,
        help: &str,
        samples: impl IntoIterator<Item = (String, f64)>,
    ) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        let mut samples = samples.into_iter().peekable();
        // Writing to a string cannot fail.
        if samples.peek().is_some() {
            let _ = writeln!(
                self.text,
                "# HELP firn_{name} {help}\n# TYPE firn_{name} {kind}"
            );
        }
        for (labels, value) in samples {
            let common = &self.labels;
            let _ = writeln!(self.text, "firn_{name}{{{common}{labels}}} {value}");
        }
    }
}

fn seconds(ms: u64) -> f64 {
    ms as f64 / 1e3
}

/// One label more, after others.
fn label(key: &str, value: &str) -> String {
    format!(",{key}=\"{}\"", escaped(value))
}

/// A label's value in quotes.
fn escaped(label: &str) -> String {
    label
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use firn_protocol::{ErrorStatus, OwnerStatus};
    use serde_json::Value;

    use super::*;

    /// A status in which everything is there that may be.
    fn full() -> Status {
        let counts = BTreeMap::from([("lookup".to_owned(), 3)]);
        let backup = BackupStatus {
            age_s: Some(1.0),
            error: Some("no".into()),
            ..BackupStatus::default()
        };
        let transaction = TransactionStatus {
            id: Some(1),
            owner: Some(OwnerStatus::default()),
            age_s: Some(1.0),
            states: counts.clone(),
            here: vec!["n1".into()],
            error: Some("no".into()),
            backup: Some(backup),
            ..TransactionStatus::default()
        };
        let token = TokenStatus {
            holder: Some("n2".into()),
            last_error: Some("no".into()),
            ..TokenStatus::default()
        };
        let lane = LaneStatus {
            retry_in_ms: Some(1),
            file: Some("file".into()),
            placed: Some(PlacedStatus::default()),
            token: Some(token),
            ..LaneStatus::default()
        };
        Status {
            mount_point: "/a\"b\\c\nd".into(),
            options: vec!["a=b".into()],
            oldest_held_ms: Some(1),
            spill: Some(SpillStatus::default()),
            numa_nodes: vec![NumaNodeStatus::default()],
            transactions: vec![transaction],
            partner: Some(PartnerStatus {
                domains: Some("file".into()),
                host: Some("n2".into()),
                ..PartnerStatus::default()
            }),
            lanes: vec![lane],
            placement_advice: vec!["none".into()],
            host_differences: vec!["none".into()],
            file_size_limit_bytes: Some(1),
            failed_requests: counts.clone(),
            drain_decisions: counts.clone(),
            transaction_steps: counts,
            errors: vec![ErrorStatus::default()],
            ..Status::default()
        }
    }

    /// Gives each number of a status a value that no other has, and calls `found` with its path. Nothing may be left out
    /// of [`full`].
    fn mark_numbers(value: &mut Value, path: &str, next: &mut u64, found: &mut Vec<(String, u64)>) {
        match value {
            Value::Object(fields) => {
                assert!(!fields.is_empty(), "full() has nothing in {path}");
                for (name, field) in fields {
                    mark_numbers(field, &format!("{path}.{name}"), next, found);
                }
            }
            Value::Array(items) => {
                assert!(!items.is_empty(), "full() has nothing in {path}");
                for item in items {
                    mark_numbers(item, path, next, found);
                }
            }
            Value::Number(_) => {
                *next += 1;
                *value = (*next).into();
                found.push((path.to_owned(), *next));
            }
            Value::Null => panic!("full() leaves {path} out"),
            Value::Bool(_) | Value::String(_) => {}
        }
    }

    /// Numbers that name something, and tell nothing that could be drawn.
    const NAMES: [&str; 5] = [
        ".pid",
        ".numa_nodes.numa_node",
        ".transactions.id",
        ".transactions.owner.pid",
        ".errors.errno",
    ];

    /// Proves S-seen-5: a figure that is new in the status cannot be forgotten here.
    #[test]
    fn every_number_of_the_status_is_a_figure() {
        let mut json = serde_json::to_value(full()).unwrap();
        let mut numbers = Vec::new();
        mark_numbers(&mut json, "", &mut 1_000_000, &mut numbers);
        let status: Status = serde_json::from_value(json).unwrap();
        let text = prometheus(&status);
        let values: BTreeSet<&str> = text
            .lines()
            .filter_map(|line| line.rsplit_once(' '))
            .map(|(_, value)| value)
            .collect();
        assert!(numbers.len() > 80, "{numbers:?}");
        for (path, number) in numbers {
            let plain = (number as f64).to_string();
            let from_ms = seconds(number).to_string();
            let is_there = [plain, from_ms]
                .iter()
                .any(|value| values.contains(value.as_str()));
            assert!(
                is_there || NAMES.contains(&path.as_str()),
                "{path} of `firn status --json` is not in `--prometheus`: {text}"
            );
        }
    }

    /// Proves S-seen-5.
    #[test]
    fn every_yes_or_no_and_every_state_is_a_figure() {
        let mut status = full();
        let before = prometheus(&status);
        let mut json = serde_json::to_value(&status).unwrap();
        let mut flags = Vec::new();
        each_flag(&mut json, "", &mut |path, flag| {
            flags.push(path.to_owned());
            *flag = !*flag;
        });
        assert!(flags.len() > 5, "{flags:?}");
        for flag in flags
            .iter()
            .filter(|flag| *flag != ".transactions.owner.connection")
        {
            let mut json = serde_json::to_value(&status).unwrap();
            each_flag(&mut json, "", &mut |path, value| {
                *value ^= path == flag;
            });
            let changed = prometheus(&serde_json::from_value(json).unwrap());
            assert_ne!(changed, before, "{flag}");
        }
        status.lanes[0].placed.as_mut().unwrap().state = LaneState::Gone;
        status.lanes[0].token.as_mut().unwrap().state = TokenState::Without;
        let text = prometheus(&status);
        let common = r#"mount_point="/a\"b\\\\c\\nd",backing="""#;
        for line in [
            format!("firn_lane_state{{{common},lane=\"0\",state=\"gone\"}} 1"),
            format!("firn_lane_state{{{common},lane=\"0\",state=\"ok\"}} 0"),
            format!("firn_tokens_state{{{common},lane=\"0\",state=\"without\"}} 1"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }

    fn each_flag(value: &mut Value, path: &str, visit: &mut dyn FnMut(&str, &mut bool)) {
        match value {
            Value::Object(fields) => {
                for (name, field) in fields {
                    each_flag(field, &format!("{path}.{name}"), visit);
                }
            }
            Value::Array(items) => items
                .iter_mut()
                .for_each(|item| each_flag(item, path, visit)),
            Value::Bool(flag) => visit(path, flag),
            _ => {}
        }
    }

    #[test]
    fn label_values_are_escaped() {
        let text = prometheus(&full());
        assert!(text.contains(r#"mount_point="/a\"b\\\\c\\nd""#), "{text}");
        let failed = r#"firn_failed_requests_total{mount_point="/a\"b\\\\c\\nd",backing="",operation="lookup"} 3"#;
        assert!(text.lines().any(|line| line == failed), "{text}");
    }

    /// What `promtool check metrics` looks at: each family has one head, before all of its samples, names and labels are
    /// of the right characters, no sample comes twice, and what only grows is called so.
    #[test]
    fn the_text_is_as_collectors_read_it() {
        let text = prometheus(&full());
        let is_name = |name: &str| {
            name.bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
        };
        let mut families = BTreeSet::new();
        let mut samples = BTreeSet::new();
        let mut lines = text.lines().peekable();
        while let Some(line) = lines.next() {
            let (name, help) = line
                .strip_prefix("# HELP ")
                .and_then(|rest| rest.split_once(' '))
                .unwrap_or_else(|| panic!("no head: {line}"));
            assert!(name.starts_with("firn_") && is_name(name), "{line}");
            assert!(help.ends_with('.') && !help.contains('\\'), "{line}");
            assert!(families.insert(name), "{name} twice");
            let kind = lines.next().and_then(|line| line.strip_prefix("# TYPE "));
            let (typed, kind) = kind.and_then(|rest| rest.split_once(' ')).expect("a type");
            assert_eq!(typed, name);
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            assert!(["counter", "gauge"].contains(&kind), "{kind}");
            let mut count = 0;
            while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
                let rest = line.strip_prefix(name).expect("a sample of its family");
                let (labels, value) = rest.rsplit_once(' ').expect("a value");
                assert!(value.parse::<f64>().is_ok(), "{line}");
                assert!(samples.insert((name, labels)), "{line} twice");
                let labels = labels
                    .strip_prefix('{')
                    .and_then(|rest| rest.strip_suffix('}'));
                let mut left = labels.expect("labels in braces");
                while !left.is_empty() {
                    let (key, rest) = left.split_once("=\"").expect("a value in quotes");
                    assert!(is_name(key), "{line}");
                    let end = end_of_label(rest).expect("its end");
                    left = rest[end + 1..].trim_start_matches(',');
                }
                count += 1;
            }
            assert!(count > 0, "{name} has no samples");
        }
        assert!(families.len() > 80, "{}", families.len());
    }

    /// Where the quote is that ends the value of a label.
    fn end_of_label(text: &str) -> Option<usize> {
        let mut is_escaped = false;
        text.bytes().position(|byte| {
            let is_end = byte == b'"' && !is_escaped;
            is_escaped = byte == b'\\' && !is_escaped;
            is_end
        })
    }
}
