//! All counters of a mount as Prometheus text.

use std::collections::BTreeMap;
use std::fmt::Write;

use firn_protocol::{LaneStatus, PartnerStatus, SpillStatus, Status, TokenStatus};

/// The Prometheus text exposition format, version 0.0.4.
pub(crate) fn prometheus(status: &Status) -> String {
    let mut out = Exposition::new(status);
    put_transfers(&mut out, status);
    put_memory(&mut out, status);
    if let Some(spill) = &status.spill {
        put_spill(&mut out, spill);
    }
    put_tokens(&mut out, &status.lanes);
    if let Some(partner) = &status.partner {
        put_partner(&mut out, partner);
    }
    put_users(&mut out, status);
    put_health(&mut out, status);
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
}

/// The arena, and what it holds.
fn put_memory(out: &mut Exposition, status: &Status) {
    out.gauge(
        "arena_bytes",
        "Bytes of chunks in the arena.",
        status.arena_bytes as f64,
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
    let oldest_ms = status.oldest_held_ms.unwrap_or(0);
    out.gauge(
        "oldest_held_seconds",
        "Age of the oldest byte not yet in the backing.",
        oldest_ms as f64 / 1e3,
    );
    out.gauge(
        "kernel_copies_bytes",
        "Bytes of held files that the kernel may have cached as well.",
        status.kernel_copies_bytes as f64,
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
        "spill_failing",
        "Whether the spill file cannot be used.",
        f64::from(spill.failing),
    );
}

/// The tokens of the lanes; nothing on a mount without.
fn put_tokens(out: &mut Exposition, lanes: &[LaneStatus]) {
    let of_lanes = |count: fn(&TokenStatus) -> u64| {
        let counted = |(index, lane): (usize, &LaneStatus)| {
            let token = lane.token.as_ref()?;
            Some((index.to_string(), count(token)))
        };
        lanes.iter().enumerate().filter_map(counted).collect()
    };
    out.counters(
        "tokens_granted_total",
        "lane",
        "Times that this host got the token of a lane.",
        &of_lanes(|token| token.granted),
    );
    out.counters(
        "tokens_went_without_total",
        "lane",
        "Times that the drain of a lane went on without its token.",
        &of_lanes(|token| token.went_without),
    );
    out.counters(
        "tokens_errors_total",
        "lane",
        "Questions about a token that failed.",
        &of_lanes(|token| token.errors),
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
}

/// Errors, limits, and how long firnd has been up.
fn put_health(out: &mut Exposition, status: &Status) {
    out.gauge(
        "errors",
        "Errors not yet dealt with.",
        status.errors.len() as f64,
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
        self.begin(name, "counter", help);
        self.line(name, "", value);
    }

    /// A figure that goes up and down.
    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.begin(name, "gauge", help);
        self.line(name, "", value);
    }

    /// A counter for each value of `label`; nothing where there is none.
    fn counters(&mut self, name: &str, label: &str, help: &str, counts: &BTreeMap<String, u64>) {
        if counts.is_empty() {
            return;
        }
        self.begin(name, "counter", help);
        for (kind, count) in counts {
            let more = format!(",{label}=\"{}\"", escaped(kind));
            self.line(name, &more, *count as f64);
        }
    }

    fn begin(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(
            self.text,
            "# HELP firn_{name} {help}\n# TYPE firn_{name} {kind}"
        );
    }

    fn line(&mut self, name: &str, more_labels: &str, value: f64) {
        let labels = &self.labels;
        let _ = writeln!(self.text, "firn_{name}{{{labels}{more_labels}}} {value}");
    }
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
    use super::*;

    #[test]
    fn label_values_are_escaped_and_every_line_is_well_formed() {
        let counts = BTreeMap::from([("lookup".to_owned(), 3)]);
        let status = Status {
            mount_point: "/a\"b\\c\nd".into(),
            failed_requests: counts.clone(),
            transaction_steps: counts,
            ..Status::default()
        };
        let text = prometheus(&status);
        assert!(text.contains(r#"mount_point="/a\"b\\\\c\\nd""#), "{text}");
        let failed = r#"firn_failed_requests_total{mount_point="/a\"b\\\\c\\nd",backing="",operation="lookup"} 3"#;
        assert!(text.lines().any(|line| line == failed), "{text}");
        assert!(
            text.lines()
                .all(|line| line.starts_with("# ") || line.starts_with("firn_"))
        );
    }
}
