//! One mount, in full.

use std::fmt::Write;

use firn_format::quote::printable;
use firn_protocol::figures::Figures;
use firn_protocol::{
    ErrorStatus, FileStatus, LaneState, LaneStatus, PartnerStatus, PlacedStatus, SpillStatus,
    Status, TokenState, TokenStatus, TransactionStage, TransactionStatus,
};

use super::Seen;
use super::list::fill;
use crate::output::Paint;
use crate::text::{bytes, count, figure, rate, seconds};

/// Characters of the bar that shows the arena.
const BAR_WIDTH: usize = 30;
/// Above this the arena is nearly full and writers will soon wait.
const NEARLY_FULL: f64 = 0.9;

/// What is known of the mount.
pub fn text(seen: &Seen, paint: Paint) -> String {
    match seen {
        Seen::Alive { status, files } => {
            let mut text = mount(status, paint);
            if let Some(files) = files {
                text += &pending(files);
            }
            text
        }
        Seen::Silent {
            mount_point: name, ..
        }
        | Seen::Left { arena: name, .. } => {
            let advice = seen.advice().unwrap_or_default();
            format!("{}\n  {advice}\n", paint.bad(&name.to_string()))
        }
    }
}

fn mount(s: &Status, paint: Paint) -> String {
    let mut text = format!(
        "{}  on  {}\n",
        paint.head(&s.mount_point.to_string()),
        s.backing
    );
    let mut line = |label: &str, what: String| {
        let _ = writeln!(text, "  {label:<13} {what}");
    };
    line("held", held(s));
    if s.logged_files > 0 {
        line(
            "logged",
            format!("{} in logs", count(s.logged_files, "file")),
        );
    }
    line("arena", arena(s, paint));
    if let Some(spill) = &s.spill {
        line("spill", spilled(spill, paint));
    }
    for numa_node in s.numa_nodes.iter().filter(|_| s.numa_nodes.len() > 1) {
        let used = bytes(numa_node.used_bytes);
        let all = bytes(numa_node.bytes);
        let foreign = count(numa_node.foreign_slabs, "slab");
        line(
            "NUMA node",
            format!(
                "{}: {used} of {all} in use, {foreign} used from other NUMA nodes",
                numa_node.numa_node
            ),
        );
    }
    if s.waiting_writers > 0 {
        line(
            "waiting",
            paint.odd(&format!(
                "{} for space in the arena",
                count(s.waiting_writers, "writer")
            )),
        );
    }
    let taken = bytes(s.ingest_bytes);
    let writes = count(s.ingest_writes, "write");
    line(
        "ingest",
        format!(
            "{:<14} {taken} in {writes}",
            rate(s.ingest_bytes_per_second)
        ),
    );
    line("drain", drained(s));
    for one in &s.transactions {
        line("open", transaction(one, paint));
    }
    if let Some(partner) = &s.partner {
        line("partner", partnered(partner, paint));
    }
    if s.pulls + s.pulled_bytes > 0 {
        line(
            "pulled",
            format!(
                "{:<14} {} in {}, {} under way",
                rate(s.pulled_bytes_per_second),
                bytes(s.pulled_bytes),
                count(s.pulled_files, "file"),
                count(s.pulls, "pull"),
            ),
        );
    }
    if s.recovered_bytes > 0 {
        line(
            "recovered",
            format!("{} held by an earlier firnd", bytes(s.recovered_bytes)),
        );
    }
    if s.lost_file_bytes > 0 {
        let what = format!(
            "{} whose file is gone from the backing, kept in {}",
            bytes(s.lost_file_bytes),
            s.arena
        );
        line("orphaned", paint.bad(&what));
    }
    if s.misplaced_files > 0 {
        let what = format!(
            "{} not put by the file system where it was asked to: see the log",
            count(s.misplaced_files, "file")
        );
        line("placement", paint.odd(&what));
    }
    if let Some(hint) = s.close_hint() {
        line("hint", paint.odd(&hint));
    }
    if s.log_lines_lost > 0 {
        let lines = count(s.log_lines_lost, "line");
        let what = format!(
            "{lines} could not be written: is the file system of the runtime directory full?"
        );
        line("log", paint.odd(&what));
    }
    if let Some(limit) = s.file_size_limit_bytes {
        let what = format!(
            "files larger than {} cannot be drained (ulimit -f when it was mounted)",
            bytes(limit)
        );
        line("limit", paint.odd(&what));
    }
    for (label, counts) in [
        ("failed", &s.failed_requests),
        ("decided", &s.drain_decisions),
        ("steps", &s.transaction_steps),
    ] {
        if !counts.is_empty() {
            line(
                label,
                counts
                    .iter()
                    .map(|(what, count)| format!("{what} {count}"))
                    .collect::<Vec<_>>()
                    .join(", "),
            );
        }
    }
    let others = other_figures(s);
    if !others.is_empty() {
        line("figures", others.join(", "));
    }
    let up = seconds(s.uptime_seconds);
    let open = count(s.open_files, "open file");
    line(
        "firnd",
        format!(
            "{}, process {}, up {up}, epoch {}, {open}",
            s.version, s.pid, s.epoch
        ),
    );
    line("options", s.options.join(" "));
    for lane in &s.lanes {
        line("lane", lane_line(lane, paint));
    }
    for advice in &s.placement_advice {
        line("placement", paint.odd(advice));
    }
    for difference in &s.host_differences {
        line("hosts", paint.odd(difference));
    }
    for (index, lane) in s.lanes.iter().enumerate() {
        if let Some(token) = &lane.token {
            line(&format!("token {index}"), token_line(token, paint));
        }
        if let Some(wait) = lane.retry_seconds {
            let what = format!("{} is retried in {}", lane.path, seconds(wait));
            line("retry", paint.odd(&what));
        }
    }
    line(
        "errors",
        if s.errors.is_empty() {
            paint.good("none")
        } else {
            s.errors.len().to_string()
        },
    );
    for error in &s.errors {
        line("", paint.bad(&error_line(error)));
    }
    text
}

/// Figures that the lines of a mount show in words of their own.
const IN_LINES: &[&str] = &[
    "arena_bytes",
    "arena_used_bytes",
    "chunk_bytes",
    "drain_bytes",
    "drain_bytes_per_second",
    "drain_decisions",
    "drain_errors",
    "drain_writes",
    "epoch",
    "error_age_seconds",
    "error_pending",
    "error_repeats",
    "errors",
    "failed_requests",
    "file_size_limit_bytes",
    "held_bytes",
    "held_files",
    "host_differences",
    "ingest_bytes",
    "ingest_bytes_per_second",
    "ingest_writes",
    "lane_held_bytes",
    "lane_held_files",
    "lane_max_writers",
    "lane_placed_bytes",
    "lane_placed_files",
    "lane_placed_state",
    "lane_placed_takes_files",
    "lane_queued_files",
    "lane_retry_seconds",
    "lane_token_errors",
    "lane_token_granted",
    "lane_token_state",
    "lane_token_state_seconds",
    "lane_token_waited_seconds",
    "lane_token_went_without",
    "lane_writers",
    "lanes",
    "log_lines_lost",
    "logged_files",
    "lost_file_bytes",
    "misplaced_files",
    "numa_node_bytes",
    "numa_node_foreign_slabs",
    "numa_node_used_bytes",
    "numa_nodes",
    "oldest_held_seconds",
    "open_files",
    "partner_copied_bytes",
    "partner_lag_seconds",
    "partner_left_bytes",
    "partner_present",
    "placement_advice",
    "pulled_bytes",
    "pulled_bytes_per_second",
    "pulled_files",
    "pulls",
    "recovered_bytes",
    "spill_bytes",
    "spill_failing",
    "spill_moved_bytes",
    "spill_moved_bytes_per_second",
    "spill_used_bytes",
    "transaction_age_seconds",
    "transaction_backup_age_seconds",
    "transaction_backup_copied_bytes",
    "transaction_backup_left_bytes",
    "transaction_backup_whole",
    "transaction_bytes",
    "transaction_objects",
    "transaction_stage",
    "transaction_steps",
    "transactions",
    "uptime_seconds",
    "waiting_writers",
];

/// All other figures that are not 0, by name: one that is new in the table is shown here.
fn other_figures(s: &Status) -> Vec<String> {
    let mut shown = Vec::new();
    let figures = Figures::of([s]);
    let others = figures.iter().filter(|one| !IN_LINES.contains(&&*one.name));
    for other in others {
        for sample in other.samples.iter().filter(|sample| sample.value != 0.0) {
            let labels: Vec<String> = sample
                .labels
                .iter()
                .filter(|(key, _)| !["mount_point", "backing"].contains(key))
                .map(|(key, value)| format!(" {key}={value}"))
                .collect();
            let value = figure(&other.name, sample.value);
            shown.push(format!("{}{} {value}", other.name, labels.concat()));
        }
    }
    shown
}

fn lane_line(lane: &LaneStatus, paint: Paint) -> String {
    let placed = lane
        .placed
        .as_ref()
        .map_or_else(String::new, |placed| placed_text(placed, paint));
    let held = bytes(lane.held_bytes);
    let files = count(lane.held_files, "file");
    let file = lane
        .file
        .as_ref()
        .map_or_else(String::new, |file| format!(", at {file}"));
    format!(
        "{}: {placed}{held} held in {files}, {} in line, {} of {} writers busy{file}",
        lane.path, lane.queued_files, lane.writers, lane.max_writers
    )
}

fn placed_text(placed: &PlacedStatus, paint: Paint) -> String {
    let files = count(placed.files, "file");
    let written = bytes(placed.bytes);
    let state = match placed.state {
        LaneState::Ok => paint.good("ok"),
        LaneState::Full => paint.bad("full"),
        LaneState::Gone => paint.bad("gone"),
        LaneState::Hung => paint.bad("hung"),
    };
    let role = if placed.takes_files {
        ""
    } else {
        "takes no new files, "
    };
    format!("{state}, {role}{files} placed, {written} written, ")
}

/// What gives a lane one writer among several hosts.
fn token_line(token: &TokenStatus, paint: Paint) -> String {
    let time = seconds(token.state_seconds);
    let state = match (token.state, &token.holder) {
        (TokenState::Idle, _) => "not asked for".to_owned(),
        (TokenState::Held, _) => format!("held for {time}"),
        (TokenState::Waiting, Some(holder)) => format!("waiting for {time}, {holder} has it"),
        (TokenState::Waiting, None) => format!("waiting for {time}"),
        (TokenState::Without, _) => paint.odd(&format!("going without for {time}")),
    };
    let mut text = format!(
        "{state}; granted {} times, waited {} in all, {} times without",
        token.granted,
        seconds(token.waited_seconds),
        token.went_without
    );
    if token.errors > 0 {
        let why = printable(token.last_error.as_deref().unwrap_or_default());
        text += &format!("; {}, the last: {why}", count(token.errors, "error"));
    }
    text
}

fn held(s: &Status) -> String {
    let oldest = s.oldest_held_seconds.map_or_else(String::new, |age| {
        format!(", the oldest for {}", seconds(age))
    });
    format!(
        "{} in {}{oldest}",
        bytes(s.held_bytes),
        count(s.held_files, "file")
    )
}

fn arena(s: &Status, paint: Paint) -> String {
    let fill = fill(s);
    let full = (fill * BAR_WIDTH as f64).round() as usize;
    let bar = format!("{}{}", "#".repeat(full), "-".repeat(BAR_WIDTH - full));
    let bar = if fill > NEARLY_FULL {
        paint.odd(&bar)
    } else {
        bar
    };
    format!(
        "[{bar}] {:.0}% of {}, chunks of {}",
        fill * 100.0,
        bytes(s.arena_bytes),
        bytes(s.chunk_bytes)
    )
}

fn transaction(one: &TransactionStatus, paint: Paint) -> String {
    let text = stage(one, paint);
    let Some(backup) = &one.backup else {
        return text;
    };
    let is_open = one.stage == TransactionStage::Open;
    let state = match (&backup.error, backup.whole, backup.age_seconds) {
        (Some(error), ..) => paint.bad(&format!("not in the backup: {error}")),
        (None, true, _) => format!("backup of {} is complete", bytes(backup.copied_bytes)),
        (None, false, Some(age)) if is_open => format!(
            "backup {} old, {} copied, {} left to copy",
            seconds(age),
            bytes(backup.copied_bytes),
            bytes(backup.left_bytes)
        ),
        (None, false, _) if is_open => "backup not started".into(),
        (None, false, _) => "backup removed".into(),
    };
    format!("{text}; {state}")
}

fn stage(one: &TransactionStatus, paint: Paint) -> String {
    let scope = if one.scope.is_empty() {
        "the whole mount".to_owned()
    } else {
        one.scope.to_string()
    };
    let number = one.id.map_or_else(String::new, |id| format!(" as {id}"));
    let objects = count(one.objects, "object");
    match one.stage {
        TransactionStage::Open => format!(
            "transaction in {scope}, {objects} changed, {}{}{}",
            bytes(one.bytes),
            one.age_seconds.map_or_else(String::new, |age| format!(", {} old", seconds(age))),
            owner(one)
        ),
        TransactionStage::Prepared => {
            let here =
                if one.here.is_empty() { String::new() } else { format!(" on {}", one.here.join(", ")) };
            paint.odd(&format!("transaction in {scope}, prepared{number}{here}: firn commit or firn abort"))
        }
        TransactionStage::Decided => match &one.error {
            None => paint.odd(&format!("transaction in {scope}, decided{number}, {objects} are being applied")),
            Some(error) => paint.bad(&format!(
                "transaction in {scope}, decided{number}: {error}; it is retried automatically, and at once by firn commit"
            )),
        },
    }
}

fn owner(one: &TransactionStatus) -> String {
    match one.owner {
        None => ", no owner".into(),
        Some(owner) if owner.connection => {
            format!(", owner: a connection of process {}", owner.pid)
        }
        Some(owner) => format!(", owner: process {}", owner.pid),
    }
}

/// Copies in the memory of another host.
fn partnered(partner: &PartnerStatus, paint: Paint) -> String {
    let copied = bytes(partner.copied_bytes);
    let mut text = if partner.present {
        let host = partner.host.as_deref().unwrap_or_default();
        format!("{host} has copies of {copied}")
    } else {
        paint.odd("none: what is held is lost if this host is")
    };
    if partner.present && partner.left_files > 0 {
        let left = bytes(partner.left_bytes);
        let lag = seconds(partner.lag_seconds);
        text += &format!(", and not of {left}, the oldest written {lag} ago");
    }
    if !partner.note.is_empty() {
        text += &format!("; {}", paint.odd(&printable(&partner.note)));
    }
    text
}

fn spilled(spill: &SpillStatus, paint: Paint) -> String {
    let used = bytes(spill.used_bytes);
    let all = bytes(spill.bytes);
    let moved = bytes(spill.moved_bytes);
    let state = if spill.failing {
        paint.bad(", failing")
    } else {
        String::new()
    };
    let rate = rate(spill.moved_bytes_per_second);
    format!(
        "{rate:<14} {used} of {all} in {}, {moved} moved{state}",
        spill.path
    )
}

fn drained(s: &Status) -> String {
    let mean = s
        .drain_bytes
        .checked_div(s.drain_writes)
        .map_or_else(String::new, |mean| format!(" of {}", bytes(mean)));
    let failed = if s.drain_errors > 0 {
        format!(", {} failed", s.drain_errors)
    } else {
        String::new()
    };
    let taken = bytes(s.drain_bytes);
    let writes = count(s.drain_writes, "write");
    format!(
        "{:<14} {taken} in {writes}{mean}{failed}",
        rate(s.drain_bytes_per_second)
    )
}

fn error_line(error: &ErrorStatus) -> String {
    let pending = if error.pending {
        "; its data is kept, and the drain is retried"
    } else {
        ""
    };
    let path = if error.path.is_empty() {
        "(file unknown)".to_owned()
    } else {
        error.path.to_string()
    };
    let times = count(error.repeats, "time");
    format!(
        "{path}: {} ({times}, {} ago){pending}",
        printable(&error.message),
        seconds(error.age_seconds)
    )
}

fn pending(files: &[FileStatus]) -> String {
    if files.is_empty() {
        return "  all files here are drained\n".to_owned();
    }
    let mut text = String::new();
    for file in files {
        let open = if file.open { ", open" } else { "" };
        let state = serde_json::to_string(&file.state).unwrap_or_default();
        let _ = writeln!(
            text,
            "  {:>10}  {}{open}  {}",
            bytes(file.held_bytes),
            state.trim_matches('"'),
            file.path
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn an_error_names_its_file_its_count_and_what_becomes_of_the_data() {
        let error = ErrorStatus {
            path: "step/rank0".into(),
            message: "write: No space left on device".into(),
            repeats: 3,
            age_seconds: 2.0,
            pending: true,
            ..ErrorStatus::default()
        };
        assert_eq!(
            error_line(&error),
            "step/rank0: write: No space left on device (3 times, 2.0 s ago); its data is kept, and the drain is retried"
        );
    }

    /// A figure that is new in the table cannot be forgotten here: [`other_figures`] shows it.
    #[test]
    fn each_figure_changes_what_a_person_is_shown() {
        let mut status = Status::example();
        // What went wrong stands in for figures, and the line of pulls is there if there were some.
        status.pulled_bytes = 1;
        let transaction = &mut status.transactions[0];
        transaction.error = None;
        transaction.backup.as_mut().expect("an example").error = None;
        let before = mount(&status, Paint::stdout());
        let figures = Figures::of([&status]);
        for name in IN_LINES {
            assert!(figures.iter().any(|one| one.name == *name), "{name}");
        }
        for one in figures.iter() {
            let mut json = serde_json::to_value(&status).unwrap();
            change(&mut json, one.json.trim_start_matches('.'));
            let changed: Status = serde_json::from_value(json).unwrap();
            assert_ne!(mount(&changed, Paint::stdout()), before, "{}", one.name);
        }
    }

    /// Another value at a path of JSON.
    fn change(value: &mut Value, path: &str) {
        if let Some((field, rest)) = path.split_once('.') {
            match value[field.trim_end_matches("[]")] {
                Value::Array(ref mut items) => items.iter_mut().for_each(|one| change(one, rest)),
                ref mut part => change(part, rest),
            }
            return;
        }
        match &mut value[path] {
            Value::Number(number) => *number = 77_777.into(),
            Value::Bool(flag) => *flag = !*flag,
            Value::Array(items) => items.push(items[0].clone()),
            Value::Object(counts) => drop(counts.insert("another".to_owned(), 77_777.into())),
            Value::String(state) => {
                let other = match state.as_str() {
                    "ok" => "gone",
                    "idle" | "waiting" => "without",
                    _ => "prepared",
                };
                *state = other.to_owned();
            }
            Value::Null => panic!("the example has no {path}"),
        }
    }

    #[test]
    fn a_mount_without_writes_has_no_mean_write() {
        assert_eq!(
            drained(&Status::default()),
            format!("{:<14} 0 B in 0 writes", "0 B/s")
        );
    }
}
