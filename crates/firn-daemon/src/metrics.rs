//! Rates over the last seconds, and all counters as Prometheus text.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::time::{Duration, Instant};

use firn_protocol::Status;

/// How far back a rate looks.
const WINDOW: Duration = Duration::from_secs(5);
/// How often firnd takes a sample.
pub(crate) const SAMPLE_EVERY: Duration = Duration::from_secs(1);

#[derive(Clone, Copy)]
struct Sample {
    at: Instant,
    ingest_bytes: u64,
    drain_bytes: u64,
    spill_bytes: u64,
}

/// Samples of the last [`WINDOW`], oldest first, and the one before.
#[derive(Default)]
pub(crate) struct Window {
    samples: VecDeque<Sample>,
}

/// Bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    pub(crate) ingest: f64,
    pub(crate) drain: f64,
    pub(crate) spill: f64,
}

impl Window {
    /// Takes the counters of `now`; a sample for as long as it lasts.
    pub(crate) fn add(
        &mut self,
        now: Instant,
        ingest_bytes: u64,
        drain_bytes: u64,
        spill_bytes: u64,
    ) {
        self.samples.push_back(Sample {
            at: now,
            ingest_bytes,
            drain_bytes,
            spill_bytes,
        });
        // One sample that is older than the window stays, as its left edge.
        while self
            .samples
            .get(1)
            .is_some_and(|next| now.duration_since(next.at) >= WINDOW)
        {
            self.samples.pop_front();
        }
    }

    /// From the left edge to the counters of `now`.
    pub(crate) fn rates(
        &self,
        now: Instant,
        ingest_bytes: u64,
        drain_bytes: u64,
        spill_bytes: u64,
    ) -> Rates {
        let Some(first) = self.samples.front() else {
            return Rates::default();
        };
        let seconds = now.duration_since(first.at).as_secs_f64();
        if seconds <= 0.0 {
            return Rates::default();
        }
        let rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
        Rates {
            ingest: rate(ingest_bytes, first.ingest_bytes),
            drain: rate(drain_bytes, first.drain_bytes),
            spill: rate(spill_bytes, first.spill_bytes),
        }
    }
}

/// The Prometheus text exposition format, version 0.0.4.
pub(crate) fn prometheus(status: &Status) -> String {
    let mut text = String::new();
    let labels = format!(
        "{{mount_point=\"{}\",backing=\"{}\"}}",
        // Labels are text: a path is told as people are shown it, so that no two are told alike.
        escaped(&status.mount_point.to_string()),
        escaped(&status.backing.to_string())
    );
    let mut put = |name: &str, kind: &str, help: &str, value: f64| {
        let _ = writeln!(
            text,
            "# HELP firn_{name} {help}\n# TYPE firn_{name} {kind}\nfirn_{name}{labels} {value}"
        );
    };
    let s = status;
    put(
        "ingest_bytes_total",
        "counter",
        "Bytes taken from programs.",
        s.ingest_bytes as f64,
    );
    put(
        "ingest_writes_total",
        "counter",
        "Write requests taken from programs.",
        s.ingest_writes as f64,
    );
    put(
        "drain_bytes_total",
        "counter",
        "Bytes written to the backing.",
        s.drain_bytes as f64,
    );
    put(
        "drain_writes_total",
        "counter",
        "Writes to the backing that succeeded.",
        s.drain_writes as f64,
    );
    put(
        "drain_errors_total",
        "counter",
        "Writes to the backing that failed.",
        s.drain_errors as f64,
    );
    put(
        "cancelled_bytes_total",
        "counter",
        "Bytes overwritten before they were drained.",
        s.cancelled_bytes as f64,
    );
    put(
        "read_bytes_total",
        "counter",
        "Bytes read through firnd.",
        s.read_bytes as f64,
    );
    put(
        "arena_bytes",
        "gauge",
        "Bytes of chunks in the arena.",
        s.arena_bytes as f64,
    );
    put(
        "arena_used_bytes",
        "gauge",
        "Bytes of slabs in use.",
        s.arena_used_bytes as f64,
    );
    let foreign: u64 = s
        .numa_nodes
        .iter()
        .map(|numa_node| numa_node.foreign_slabs)
        .sum();
    put(
        "foreign_slabs_total",
        "counter",
        "Slabs given to writers nearer to other memory.",
        foreign as f64,
    );
    if let Some(spill) = &s.spill {
        put(
            "spill_bytes",
            "gauge",
            "Bytes that the spill file may hold.",
            spill.bytes as f64,
        );
        put(
            "spill_used_bytes",
            "gauge",
            "Bytes of its slots in use.",
            spill.used_bytes as f64,
        );
        put(
            "spill_moved_bytes_total",
            "counter",
            "Bytes moved to the spill file.",
            spill.moved_bytes as f64,
        );
        put(
            "spill_failing",
            "gauge",
            "Whether the spill file cannot be used.",
            f64::from(spill.failing),
        );
    }
    put(
        "held_bytes",
        "gauge",
        "Bytes not yet in the backing.",
        s.held_bytes as f64,
    );
    put(
        "held_files",
        "gauge",
        "Files with bytes not yet in the backing.",
        s.held_files as f64,
    );
    let oldest = s.oldest_held_ms.unwrap_or(0) as f64 / 1e3;
    put(
        "oldest_held_seconds",
        "gauge",
        "Age of the oldest byte not yet in the backing.",
        oldest,
    );
    put(
        "recovered_bytes",
        "gauge",
        "Bytes recovered from an earlier firnd.",
        s.recovered_bytes as f64,
    );
    put(
        "lost_file_bytes",
        "gauge",
        "Held bytes whose file is not in the backing.",
        s.lost_file_bytes as f64,
    );
    put(
        "open_files",
        "gauge",
        "Files open through the mount.",
        s.open_files as f64,
    );
    put(
        "waiting_writers",
        "gauge",
        "Writers that wait for room.",
        s.waiting_writers as f64,
    );
    put(
        "direct_clients",
        "gauge",
        "Processes connected to the data socket for direct access.",
        s.direct_clients as f64,
    );
    put(
        "direct_files",
        "gauge",
        "Files that they write by direct access.",
        s.direct_files as f64,
    );
    put(
        "direct_leases",
        "gauge",
        "Slabs leased to them.",
        s.direct_leases as f64,
    );
    put(
        "chunk_lists",
        "gauge",
        "Lists of chunks that programs hold.",
        s.chunk_lists as f64,
    );
    put(
        "errors",
        "gauge",
        "Errors not yet dealt with.",
        s.errors.len() as f64,
    );
    put(
        "log_lines_lost_total",
        "counter",
        "Log lines that could not be written.",
        s.log_lines_lost as f64,
    );
    if let Some(limit) = s.file_size_limit_bytes {
        put(
            "file_size_limit_bytes",
            "gauge",
            "Bytes of the largest file that firnd may write.",
            limit as f64,
        );
    }
    put(
        "epoch",
        "gauge",
        "Lifetimes of firnd that the arena has seen.",
        s.epoch as f64,
    );
    put(
        "uptime_seconds",
        "gauge",
        "Seconds since firnd attached.",
        s.uptime_s,
    );
    let mut put_each = |name: &str, label: &str, help: &str, counts: &BTreeMap<String, u64>| {
        if counts.is_empty() {
            return;
        }
        let _ = writeln!(
            text,
            "# HELP firn_{name} {help}\n# TYPE firn_{name} counter"
        );
        for (which, count) in counts {
            let labels = labels.trim_end_matches('}');
            let _ = writeln!(
                text,
                "firn_{name}{labels},{label}=\"{}\"}} {count}",
                escaped(which)
            );
        }
    };
    let failed = "Requests of the kernel that failed.";
    put_each(
        "failed_requests_total",
        "operation",
        failed,
        &s.failed_requests,
    );
    put_each(
        "drain_decisions_total",
        "decision",
        "Decisions of the drain.",
        &s.drain_decisions,
    );
    put_each(
        "transaction_steps_total",
        "step",
        "Steps of transactions on this host.",
        &s.transaction_steps,
    );
    text
}

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
    fn a_rate_is_over_the_window_and_not_since_the_start() {
        let start = Instant::now();
        let mut window = Window::default();
        for second in 0..20 {
            // 100 bytes a second for ten seconds, then nothing.
            window.add(
                start + Duration::from_secs(second),
                second.min(10) * 100,
                second,
                2 * second,
            );
        }
        let rates = window.rates(start + Duration::from_secs(20), 1000, 20, 40);
        assert_eq!(
            rates,
            Rates {
                ingest: 0.0,
                drain: 1.0,
                spill: 2.0
            }
        );
        assert!(window.samples.len() <= 7, "{}", window.samples.len());
    }

    #[test]
    fn without_samples_or_time_there_is_no_rate() {
        let now = Instant::now();
        let mut window = Window::default();
        assert_eq!(window.rates(now, 5, 5, 5), Rates::default());
        window.add(now, 0, 0, 0);
        assert_eq!(window.rates(now, 5, 5, 5), Rates::default());
    }

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
