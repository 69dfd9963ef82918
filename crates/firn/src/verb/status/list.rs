//! The list of all mounts: a row for each.

use firn_protocol::Status;

use super::{FoundMount, describe_elsewhere};
use crate::output::Paint;
use crate::text::{bytes, pad_columns, rate, seconds};

const HEAD: [&str; 8] = [
    "MOUNT", "BACKING", "HELD", "OLDEST", "ARENA", "INGEST", "DRAIN", "ERRORS",
];

/// Returns the table, and below it the advice for mounts that do not answer.
pub fn text(all: &[FoundMount], paint: Paint) -> String {
    if all.is_empty() {
        return "no firn mounts\n".to_owned();
    }
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(all.iter().map(row));
    pad_columns(&mut rows, &[]);
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let line = row.join("  ");
        let line = line.trim_end();
        text += &match index.checked_sub(1).map(|at| &all[at]) {
            None => paint.head(line),
            Some(FoundMount::Silent { .. } | FoundMount::Left { .. }) => paint.error(line),
            Some(FoundMount::Alive { status, .. }) if !status.errors.is_empty() => {
                paint.warning(line)
            }
            Some(FoundMount::Alive { .. }) => line.to_owned(),
        };
        text.push('\n');
    }
    let is_elsewhere = |seen: &&FoundMount| {
        matches!(
            seen,
            FoundMount::Silent {
                is_elsewhere: true,
                ..
            }
        )
    };
    for seen in all.iter().filter(|seen| !is_elsewhere(seen)) {
        if let Some(advice) = seen.advice() {
            text += &format!("\n{}\n", paint.error(&advice));
        }
    }
    if let Some(advice) = describe_elsewhere(all.iter().filter(is_elsewhere).count()) {
        text += &format!("\n{}\n", paint.warning(&advice));
    }
    text
}

/// Returns the row of a mount.
fn row(seen: &FoundMount) -> [String; 8] {
    let dash = || "-".to_owned();
    match seen {
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
        FoundMount::Alive { status, .. } => alive(status),
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

/// Returns the row of a mount whose firnd answered.
fn alive(status: &Status) -> [String; 8] {
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
            fill(status) * 100.0,
            bytes(status.arena_bytes)
        ),
        rate(status.ingest_bytes_per_second),
        rate(status.drain_bytes_per_second),
        status.errors.len().to_string(),
    ]
}

/// Returns the share of the arena that is in use, from 0 to 1.
pub fn fill(status: &Status) -> f64 {
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
            is_elsewhere: true,
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
                is_elsewhere: false,
            },
            elsewhere("/a"),
            elsewhere("/b"),
            FoundMount::Left {
                arena: "/dev/shm/firn-0/1.arena".into(),
                backing: "/gone".into(),
                held_bytes: 2048,
            },
        ];
        let shown = text(&all, plain());
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
        assert_eq!(text(&[], plain()), "no firn mounts\n");
    }
}
