//! The table of `firn status` without a path: a row for each mount, and for each arena (file in shared memory with
//! data) that a mount left behind.

use firn_protocol::Status;

use super::{FoundMount, describe_unreachable};
use crate::output::Paint;
use crate::text::{bytes, pad_columns, rate, seconds};

const COLUMN_NAMES: [&str; 8] = [
    "MOUNT", "BACKING", "HELD", "OLDEST", "ARENA", "INGEST", "DRAIN", "ERRORS",
];

/// Returns the table, and below it the advice for mounts that do not answer.
pub fn format_table(mounts: &[FoundMount], paint: Paint) -> String {
    if mounts.is_empty() {
        return "no firn mounts\n".to_owned();
    }
    let mut rows = vec![COLUMN_NAMES.map(str::to_owned)];
    rows.extend(mounts.iter().map(mount_row));
    pad_columns(&mut rows, &[]);
    let mut lines = rows.iter().map(|row| row.join("  ").trim_end().to_owned());
    let head_line = lines.next().unwrap_or_default();
    let mut text = paint.head(&head_line) + "\n";
    for (line, mount) in lines.zip(mounts) {
        text += &match mount {
            FoundMount::Silent { .. } | FoundMount::Left { .. } => paint.error(&line),
            FoundMount::Alive { status, .. } if !status.errors.is_empty() => paint.warning(&line),
            FoundMount::Alive { .. } => line,
        };
        text.push('\n');
    }
    text + &format_advice(mounts, paint)
}

/// Returns the advice for mounts that do not answer. The mounts that are unreachable, because they use another runtime
/// directory, share one sentence.
fn format_advice(mounts: &[FoundMount], paint: Paint) -> String {
    let mut text = String::new();
    let mut unreachable_count = 0;
    for mount in mounts {
        if let FoundMount::Silent {
            is_unreachable: true,
            ..
        } = mount
        {
            unreachable_count += 1;
        } else if let Some(advice) = mount.advice() {
            text += &format!("\n{}\n", paint.error(&advice));
        }
    }
    if let Some(advice) = describe_unreachable(unreachable_count) {
        text += &format!("\n{}\n", paint.warning(&advice));
    }
    text
}

/// Returns the row of a mount, or of an arena (a file in memory with data) that a mount left. Figures that are unknown
/// without an answer of firnd, the mount's daemon, are dashes.
fn mount_row(mount: &FoundMount) -> [String; COLUMN_NAMES.len()] {
    let dash = || "-".to_owned();
    match mount {
        FoundMount::Left {
            backing,
            held_bytes,
            ..
        } => [
            dash(),
            backing.to_string(),
            bytes(*held_bytes),
            dash(),
            dash(),
            dash(),
            dash(),
            "not mounted".to_owned(),
        ],
        FoundMount::Alive { status, .. } => alive_row(status),
        FoundMount::Silent {
            mount_point,
            backing,
            ..
        } => [
            mount_point.to_string(),
            backing.to_string(),
            dash(),
            dash(),
            dash(),
            dash(),
            dash(),
            "no answer".to_owned(),
        ],
    }
}

/// Returns the row of a mount from the status that firnd, its daemon, sent.
fn alive_row(status: &Status) -> [String; COLUMN_NAMES.len()] {
    let oldest = status
        .oldest_held_seconds
        .map_or_else(|| "-".to_owned(), seconds);
    [
        status.mount_point.to_string(),
        status.backing.to_string(),
        bytes(status.held_bytes),
        oldest,
        format!(
            "{:.0}% of {}",
            arena_fill(status) * 100.0,
            bytes(status.arena_bytes)
        ),
        rate(status.ingest_bytes_per_second),
        rate(status.drain_bytes_per_second),
        status.errors.len().to_string(),
    ]
}

/// Returns the share of the arena that is in use, from 0 to 1.
pub fn arena_fill(status: &Status) -> f64 {
    (status.arena_used_bytes as f64 / status.arena_bytes.max(1) as f64).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> Paint {
        // cargo gives tests no terminal on stdout, so there are no colours.
        Paint::stdout()
    }

    fn elsewhere(mount_point: &str) -> FoundMount {
        FoundMount::Silent {
            mount_point: mount_point.into(),
            backing: "/b".into(),
            error: "lives, but its socket is not in".into(),
            is_unreachable: true,
        }
    }

    #[test]
    fn what_is_left_of_a_run_is_told_from_what_a_dead_firnd_left() {
        let left = |backing: &str| {
            let seen = FoundMount::Left {
                arena: "/dev/shm/firn-0/1.arena".into(),
                backing: backing.into(),
                held_bytes: 1_000_000,
            };
            seen.advice().unwrap()
        };
        let of_run = left("/dev/shm/firn-0/1.names");
        assert!(
            of_run.contains("holds 976.6 KiB of a run that failed"),
            "{of_run}"
        );
        assert!(left("/scratch/run42").contains("a firnd that was killed"));
    }

    #[test]
    fn a_mount_that_is_silent_has_its_line_and_its_advice() {
        let status = Status {
            mount_point: "/ckpt".into(),
            held_bytes: 4096,
            arena_bytes: 8192,
            ..Status::default()
        };
        let all = [
            FoundMount::Alive {
                status: Box::new(status),
                files: None,
            },
            FoundMount::Silent {
                mount_point: "/dead".into(),
                backing: "/b".into(),
                error: "dead: mount it again".into(),
                is_unreachable: false,
            },
            elsewhere("/a"),
            elsewhere("/b"),
            FoundMount::Left {
                arena: "/dev/shm/firn-0/1.arena".into(),
                backing: "/gone".into(),
                held_bytes: 2048,
            },
        ];
        let shown = format_table(&all, plain());
        for expected in [
            "MOUNT",
            "4.0 KiB",
            "0% of 8.0 KiB",
            "/dead",
            "no answer",
            "dead: mount it again",
            "2.0 KiB",
            "firn recover --discard /gone",
            "\n2 mounts use another FIRN_RUNTIME_DIR: ",
        ] {
            assert!(shown.contains(expected), "{expected} is not in\n{shown}");
        }
        assert!(!shown.contains("lives, but"), "said once for all: {shown}");
        assert_eq!(format_table(&[], plain()), "no firn mounts\n");
    }
}
