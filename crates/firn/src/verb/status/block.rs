//! The status of one mount as text, line by line: first problems, then the main figures, then the details.
//!
//! Terms
//! * *Held* data is only in the *arena*, the shared memory of the mount. *Drained* data is in the backing.
//! * A *lane* is one I/O server. Its *token* is the lock that makes one host its only writer.
//! * firnd is the daemon of a mount.

use std::collections::BTreeMap;
use std::fmt::Write;

use firn_config::Options;
use firn_format::quote::printable;
use firn_protocol::figures::{self, Figures, Sample};
use firn_protocol::{
    ErrorStatus, FileStatus, HistogramStatus, LaneState, LaneStatus, NumaNodeStatus, PartnerStatus,
    PlacedStatus, SpillStatus, Status, TokenState, TokenStatus, TransactionStage,
    TransactionStatus,
};

use super::FoundMount;
use super::list::arena_fill;
use crate::output::Paint;
use crate::text::{bytes, count, figure, rate, seconds};

/// Width of the arena's bar in characters.
const BAR_WIDTH: usize = 10;
/// Share of the arena in use from which writers may soon have to wait.
const NEARLY_FULL: f64 = 0.9;

/// How much of a mount's status is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusDetail {
    /// Problems, and the main figures.
    Short,
    /// All figures and options.
    All,
}

/// Returns the text for a mount. If its daemon does not answer, or only its arena (a file in memory) is left, the text
/// has the path of the mount point or arena, and advice.
pub fn format_mount(mount: &FoundMount, detail: StatusDetail, paint: Paint) -> String {
    match mount {
        FoundMount::Alive { status, files } => {
            let mut text = format_status(status, detail, paint);
            if let Some(files) = files {
                text += &format_undrained_files(files);
            }
            text
        }
        FoundMount::Silent {
            mount_point: path, ..
        }
        | FoundMount::Left { arena: path, .. } => {
            let advice = mount.advice().unwrap_or_default();
            format!("{}\n  {advice}\n", paint.error(&path.to_string()))
        }
    }
}

/// When a line of a mount is shown. The order of the variants is that of the lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineRank {
    /// The line comes first, because it reports a problem.
    Trouble,
    /// The line is always shown.
    Main,
    /// The line is shown with full detail only.
    Detail,
}

/// A line of a mount.
struct BlockLine {
    rank: LineRank,
    /// The whole line, with its label and its end.
    text: String,
}

/// The lines of a mount, in the order in which they were added.
struct BlockLines(Vec<BlockLine>);

impl BlockLines {
    /// Adds a line with a label.
    fn add(&mut self, rank: LineRank, label: &str, text: &str) {
        let text = format!("  {label:<13} {text}\n");
        self.0.push(BlockLine { rank, text });
    }

    /// Returns the lines of this rank, in the order in which they were added.
    fn with_rank(&self, rank: LineRank) -> impl Iterator<Item = &str> {
        self.0
            .iter()
            .filter(move |line| line.rank == rank)
            .map(|line| line.text.as_str())
    }
}

/// Returns the lines of a mount from the status that its firnd (the daemon) sent: problems first, then the main
/// figures, and with `detail` all others.
fn format_status(status: &Status, detail: StatusDetail, paint: Paint) -> String {
    let mut lines = BlockLines(Vec::new());
    add_trouble_lines(status, paint, &mut lines);
    add_main_lines(status, paint, &mut lines);
    add_detail_lines(status, paint, &mut lines);
    let is_healthy = lines.with_rank(LineRank::Trouble).next().is_none();
    let head = paint.head(&status.mount_point.to_string());
    let health = if is_healthy {
        format!("  {}", paint.healthy("healthy"))
    } else {
        String::new()
    };
    let mut text = format!("{head}  on  {}{health}\n", status.backing);
    text.extend(lines.with_rank(LineRank::Trouble));
    text.extend(lines.with_rank(LineRank::Main));
    if detail == StatusDetail::All {
        text.extend(lines.with_rank(LineRank::Detail));
    }
    text
}

/// Adds lines about problems, each with the command or the option that helps.
fn add_trouble_lines(status: &Status, paint: Paint, lines: &mut BlockLines) {
    add_error_lines(status, paint, lines);
    add_wait_lines(status, paint, lines);
    add_data_trouble_lines(status, paint, lines);
    add_placement_trouble_lines(status, paint, lines);
    let mut add_line = |label: &str, text: &str| {
        lines.add(LineRank::Trouble, label, &paint.warning(text));
    };
    for difference in &status.host_differences {
        add_line("hosts", difference);
    }
    if status.log_lines_lost > 0 {
        let lost_lines = count(status.log_lines_lost, "line");
        add_line(
            "log",
            &format!(
                "{lost_lines} could not be written: is the file system of the runtime directory full?"
            ),
        );
    }
    if let Some(limit) = status.file_size_limit_bytes {
        add_line(
            "limit",
            &format!(
                "files larger than {} cannot be drained (ulimit -f when it was mounted): unmount, and mount from a shell \
                 without that limit",
                bytes(limit)
            ),
        );
    }
}

/// Adds lines about errors, and about lanes (I/O servers) that are tried again after an error.
fn add_error_lines(status: &Status, paint: Paint, lines: &mut BlockLines) {
    let mut add_line = |label: &str, text: String| lines.add(LineRank::Trouble, label, &text);
    let point = &status.mount_point;
    // An error has no lane, so the earliest retry of all lanes is shown with each error.
    let next_retry_seconds = status
        .lanes
        .iter()
        .filter_map(|lane| lane.retry_seconds)
        .reduce(f64::min);
    for error in &status.errors {
        add_line("error", paint.error(&error_text(error, next_retry_seconds)));
    }
    if !status.errors.is_empty() {
        let help = if status.errors.iter().any(|error| error.pending) {
            format!("mend the cause, then `firn drain {point}` retries at once")
        } else {
            format!(
                "the data of these errors is drained by now: `firn status --clear-errors {point}` clears the list"
            )
        };
        // Without a label, the line continues those of the errors.
        add_line("", help);
    }
    for lane in &status.lanes {
        if let Some(retry_seconds) = lane.retry_seconds {
            let text = format!("{} is tried again in {}", lane.path, seconds(retry_seconds));
            add_line("retry", paint.warning(&text));
        }
    }
}

/// Adds lines about programs that wait: for space in the arena (the mount's memory), or in other calls.
fn add_wait_lines(status: &Status, paint: Paint, lines: &mut BlockLines) {
    let mut add_line = |label: &str, text: &str| {
        lines.add(LineRank::Trouble, label, &paint.warning(text));
    };
    if status.waiting_writers > 0 {
        let writers = count(status.waiting_writers, "writer");
        add_line(
            "waiting",
            &format!(
                "{writers} for space in memory: the backing is slower than the writers; a larger arena-size holds more"
            ),
        );
    }
    for program in &status.waiting_programs {
        add_line("waits", &crate::job::describe_program_wait(program));
    }
}

/// Adds lines about data that is at risk, or that waits for a decision of the user: a failing spill file (memory's
/// extension on disk), data of removed files, data without copies on a partner host, and transactions in trouble.
fn add_data_trouble_lines(status: &Status, paint: Paint, lines: &mut BlockLines) {
    let mut add_line = |label: &str, text: String| lines.add(LineRank::Trouble, label, &text);
    if status.spill.as_ref().is_some_and(|spill| spill.failing) {
        add_line(
            "spill",
            paint.error("the spill file cannot be used, nothing moves to it: check its disk"),
        );
    }
    if status.lost_file_bytes > 0 {
        let text = format!(
            "{} whose file is gone from the backing, kept in {}: put the file back and mount again, or unmount and run \
             `firn recover --save-lost DIR {}`",
            bytes(status.lost_file_bytes),
            status.arena,
            status.backing
        );
        add_line("orphaned", paint.error(&text));
    }
    if let Some(partner) = &status.partner
        && !partner.present
    {
        add_line("partner", partner_text(partner, paint));
    }
    for transaction in &status.transactions {
        if is_transaction_in_trouble(transaction) {
            add_line("open", transaction_text(transaction, paint));
        }
    }
}

/// Adds lines about lanes (I/O servers) that take no files, and about files on another lane than wanted.
fn add_placement_trouble_lines(status: &Status, paint: Paint, lines: &mut BlockLines) {
    let mut add_line = |label: &str, text: String| lines.add(LineRank::Trouble, label, &text);
    for lane in &status.lanes {
        if is_lane_in_trouble(lane) {
            add_line("lane", lane_text(lane, paint));
        }
    }
    if status.misplaced_files > 0 {
        let text = format!(
            "{} that the file system put on another server than requested: see the log",
            count(status.misplaced_files, "file")
        );
        add_line("placement", paint.warning(&text));
    }
    for advice in &status.placement_advice {
        add_line("placement", paint.warning(advice));
    }
}

/// Returns whether a transaction waits for the user's decision, or has failed.
fn is_transaction_in_trouble(transaction: &TransactionStatus) -> bool {
    let has_backup_failed = transaction
        .backup
        .as_ref()
        .is_some_and(|backup| backup.error.is_some());
    let waits_for_decision = transaction.stage == TransactionStage::Prepared;
    waits_for_decision || transaction.error.is_some() || has_backup_failed
}

/// Returns whether a lane does not take files, or is written to without its token.
fn is_lane_in_trouble(lane: &LaneStatus) -> bool {
    let is_bad = |placed: &PlacedStatus| placed.state != LaneState::Ok;
    let writes_without_token = |token: &TokenStatus| token.state == TokenState::Without;
    lane.placed.as_ref().is_some_and(is_bad)
        || lane.token.as_ref().is_some_and(writes_without_token)
}

/// Adds the figures that a user of the mount needs: data in memory, received and written, and the options. Lines about
/// features that are not used are left out.
fn add_main_lines(status: &Status, paint: Paint, lines: &mut BlockLines) {
    let mut add_line = |label: &str, text: String| lines.add(LineRank::Main, label, &text);
    add_line(
        "in memory",
        format!("{}; {}", held_text(status), arena_text(status, paint)),
    );
    add_line(
        "received",
        format!(
            "{} in {}{}",
            bytes(status.ingest_bytes),
            count(status.ingest_writes, "write"),
            recent_rate_clause(status.ingest_bytes_per_second)
        ),
    );
    add_line("written", drained_text(status));
    add_line("options", options_text(status));
    if let Some(hint) = status.close_hint() {
        add_line("hint", paint.warning(&hint));
    }
    if status.logged_files > 0 || status.logged_bytes > 0 {
        add_line(
            "logged",
            format!(
                "{} of this host are in logs of {}",
                bytes(status.logged_bytes),
                count(status.logged_files, "file")
            ),
        );
    }
    if let Some(spill) = &status.spill {
        add_line("spilled", spilled_text(spill));
    }
    for transaction in &status.transactions {
        if !is_transaction_in_trouble(transaction) {
            add_line("open", transaction_text(transaction, paint));
        }
    }
    if let Some(partner) = &status.partner
        && partner.present
    {
        add_line("partner", partner_text(partner, paint));
    }
    if status.pulls > 0 {
        add_line("pulled", pulled_text(status));
    }
    if status.recovered_bytes > 0 {
        add_line(
            "recovered",
            format!("{} held by an earlier firnd", bytes(status.recovered_bytes)),
        );
    }
}

/// Adds all figures and options that the other lines do not show. They are about the memory (the arena), the counts of
/// each kind of step, and the lanes (I/O servers) with their locks (tokens).
fn add_detail_lines(status: &Status, paint: Paint, lines: &mut BlockLines) {
    let mut add_line = |label: &str, text: String| lines.add(LineRank::Detail, label, &text);
    let chunk_size = bytes(status.chunk_bytes);
    let used = bytes(status.arena_used_bytes);
    add_line("arena", format!("{used} in use, chunks of {chunk_size}"));
    if status.numa_nodes.len() > 1 {
        for numa_node in &status.numa_nodes {
            add_line("NUMA node", numa_node_text(numa_node));
        }
    }
    if status.pulls == 0 && status.pulled_bytes > 0 {
        add_line("pulled", pulled_text(status));
    }
    for (label, counts) in [
        ("not done", &status.failed_requests),
        ("drain steps", &status.drain_decisions),
        ("commit steps", &status.transaction_steps),
        ("rules commit", &status.rule_commits),
        ("rules drop", &status.rule_aborts),
        ("rules fail", &status.rule_failures),
        ("rules remove", &status.rule_removals),
        ("rules wait", &status.rule_waits),
    ] {
        if !counts.is_empty() {
            add_line(label, counts_text(counts));
        }
    }
    let other_figures = other_figures(status);
    if !other_figures.is_empty() {
        add_line("figures", other_figures.join(", "));
    }
    add_line("firnd", firnd_text(status));
    add_line("all options", status.options.join(" "));
    for lane in &status.lanes {
        if !is_lane_in_trouble(lane) {
            add_line("lane", lane_text(lane, paint));
        }
    }
    for (index, lane) in status.lanes.iter().enumerate() {
        if let Some(token) = &lane.token {
            add_line(&format!("token {index}"), token_text(token, paint));
        }
    }
}

/// Returns how much of a NUMA node's part of the arena is in use, and how much is used from other nodes.
fn numa_node_text(numa_node: &NumaNodeStatus) -> String {
    format!(
        "{}: {} of {} in use, {} used from other NUMA nodes",
        numa_node.numa_node,
        bytes(numa_node.used_bytes),
        bytes(numa_node.bytes),
        count(numa_node.foreign_slabs, "slab")
    )
}

/// Returns counts with their names, separated by commas.
fn counts_text(counts: &BTreeMap<String, u64>) -> String {
    let texts: Vec<String> = counts
        .iter()
        .map(|(name, count)| match name.as_str() {
            "lookup" => format!("lookup (names not found) {count}"),
            name => format!("{name} {count}"),
        })
        .collect();
    texts.join(", ")
}

/// Returns the version, the process and the age of firnd, and how often it was restarted with data in memory.
fn firnd_text(status: &Status) -> String {
    let uptime = seconds(status.uptime_seconds);
    // The epoch is 1 at the first mount, and each restart with data increases it.
    let restarts = match status.epoch.saturating_sub(1) {
        0 => String::new(),
        1 => ", restarted once with data".to_owned(),
        times => format!(", restarted {times} times with data"),
    };
    let open_files = count(status.open_files, "open file");
    format!(
        "{}, process {}, up {uptime}{restarts}, {open_files}",
        status.version, status.pid
    )
}

/// Returns the options that differ from their defaults. If the option `close` is set to `drain` or `held`, says first
/// what a close of a file waits for, because that determines its speed.
fn options_text(status: &Status) -> String {
    let defaults = Options::default().in_force();
    let mut close_text = None;
    let mut changed_options = Vec::new();
    for option in &status.options {
        match option.as_str() {
            "close=drain" => close_text = Some("close waits for the backing (close=held: at once)"),
            "close=held" => {
                close_text = Some("close=held: close returns when its data is in memory")
            }
            option if defaults.iter().any(|default| default == option) => {}
            option => changed_options.push(option),
        }
    }
    let words: Vec<&str> = close_text.into_iter().chain(changed_options).collect();
    if words.is_empty() {
        "as by default".to_owned()
    } else {
        words.join(", ")
    }
}

/// Returns the rate over the last seconds, or an empty text if nothing was moved.
fn recent_rate_clause(bytes_per_second: f64) -> String {
    if bytes_per_second < 1.0 {
        return String::new();
    }
    format!(", {} in the last seconds", rate(bytes_per_second))
}

/// Returns how much other hosts have pulled from this mount.
fn pulled_text(status: &Status) -> String {
    format!(
        "{} in {}, {} under way{}",
        bytes(status.pulled_bytes),
        count(status.pulled_files, "file"),
        count(status.pulls, "pull"),
        recent_rate_clause(status.pulled_bytes_per_second)
    )
}

/// Figures that have their own wording in a line of the text.
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
    "logged_bytes",
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
    "rule_aborts",
    "rule_commits",
    "rule_failures",
    "rule_removals",
    "rule_waits",
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
    "waiting_program_seconds",
    "waiting_writers",
];

/// Returns all other figures that are not 0, by name. A new figure of the table appears here without a change of code.
fn other_figures(status: &Status) -> Vec<String> {
    let mut texts = Vec::new();
    for figure in Figures::from_statuses([status]).iter() {
        if IN_LINES.contains(&&*figure.name) {
            continue;
        }
        for sample in &figure.samples {
            if !sample.value.is_zero() {
                texts.push(sample_text(&figure.name, sample));
            }
        }
    }
    texts
}

/// Returns a sample of a figure as `NAME LABEL=VALUE... VALUE`. Labels that all samples of a mount have in common are
/// left out.
fn sample_text(name: &str, sample: &Sample) -> String {
    let mut text = name.to_owned();
    for (key, value) in &sample.labels {
        if !["mount_point", "backing", "host"].contains(key) {
            text += &format!(" {key}={value}");
        }
    }
    let value = match &sample.value {
        figures::Value::Number(number) => figure(name, *number),
        figures::Value::Histogram(histogram) => histogram_text(name, histogram),
    };
    format!("{text} {value}")
}

/// Returns a histogram as a few quantiles in words.
fn histogram_text(name: &str, histogram: &HistogramStatus) -> String {
    let quantile_text = |share| match histogram.quantile(share) {
        Some(bound) if bound.is_finite() => format!("<={}", figure(name, bound)),
        _ => "more".to_owned(),
    };
    format!(
        "{} of {} on average, half {}, 99 % {}",
        histogram.count(),
        figure(name, histogram.mean().unwrap_or(0.0)),
        quantile_text(0.5),
        quantile_text(0.99)
    )
}

/// Returns a line about a lane (an I/O server): its path, its placement, its bytes that are in memory only, its queue
/// of files, and its busy writers.
fn lane_text(lane: &LaneStatus, paint: Paint) -> String {
    let placement = match &lane.placed {
        Some(placed) => placed_text(placed, paint),
        None => String::new(),
    };
    let held = bytes(lane.held_bytes);
    let held_files = count(lane.held_files, "file");
    let mut text = format!(
        "{}: {placement}{held} held in {held_files}, {} queued, {} of {} writers busy",
        lane.path, lane.queued_files, lane.writers, lane.max_writers
    );
    // With order=sequential, the lane writes one file at a time.
    if let Some(file_in_progress) = &lane.file {
        text += &format!(", at {file_in_progress}");
    }
    text
}

/// Returns the state of a lane (an I/O server) on which the mount places files, and how much was placed on it.
fn placed_text(placed: &PlacedStatus, paint: Paint) -> String {
    let files = count(placed.files, "file");
    let written = bytes(placed.bytes);
    let state = match placed.state {
        LaneState::Ok => paint.healthy("ok"),
        LaneState::Full => paint.error("full"),
        LaneState::Gone => paint.error("gone"),
        LaneState::Hung => paint.error("hung"),
    };
    let role = if placed.takes_files {
        ""
    } else {
        "takes no new files, "
    };
    format!("{state}, {role}{files} placed, {written} written, ")
}

/// Returns the state of a lane's token: the lock that makes one host at a time the writer of the lane.
///
/// `Without` means that the host writes to the lane without the lock, because it did not get the lock in time.
fn token_text(token: &TokenStatus, paint: Paint) -> String {
    let time = seconds(token.state_seconds);
    let state = match (token.state, &token.holder) {
        (TokenState::Idle, _) => "not asked for".to_owned(),
        (TokenState::Held, _) => format!("held for {time}"),
        (TokenState::Waiting, Some(holder)) => format!("waiting for {time}, {holder} has it"),
        (TokenState::Waiting, None) => format!("waiting for {time}"),
        (TokenState::Without, _) => paint.warning(&format!("writing without it for {time}")),
    };
    let mut text = format!(
        "{state}; granted {} times, waited {} in all, {} times written without",
        token.granted,
        seconds(token.waited_seconds),
        token.went_without
    );
    if token.errors > 0 {
        let last_error = printable(token.last_error.as_deref().unwrap_or_default());
        text += &format!("; {}, the last: {last_error}", count(token.errors, "error"));
    }
    text
}

/// Returns how much data is held, and for how long.
fn held_text(status: &Status) -> String {
    let is_data_held = status.held_bytes > 0 || status.held_files > 0;
    if !is_data_held && status.oldest_held_seconds.is_none() {
        return "everything is drained".to_owned();
    }
    let mut text = format!(
        "{} in {} (held, not drained yet)",
        bytes(status.held_bytes),
        count(status.held_files, "file")
    );
    if let Some(oldest_seconds) = status.oldest_held_seconds {
        text += &format!(", the oldest for {}", seconds(oldest_seconds));
    }
    text
}

/// Returns a bar of the arena's use. It has the colour of a warning if the arena is nearly full.
fn arena_text(status: &Status, paint: Paint) -> String {
    let used_share = arena_fill(status);
    let filled_width = (used_share * BAR_WIDTH as f64).round() as usize;
    let mut bar = "#".repeat(filled_width) + &"-".repeat(BAR_WIDTH - filled_width);
    if used_share > NEARLY_FULL {
        bar = paint.warning(&bar);
    }
    format!(
        "[{bar}] {:.0}% of {} in use",
        used_share * 100.0,
        bytes(status.arena_bytes)
    )
}

/// Returns a line about a transaction (changes that take effect together): its stage, and the state of its backup (a
/// copy of the changes in another directory) if there is one.
fn transaction_text(transaction: &TransactionStatus, paint: Paint) -> String {
    let stage = stage_text(transaction, paint);
    let Some(backup) = &transaction.backup else {
        return stage;
    };
    let is_open = transaction.stage == TransactionStage::Open;
    // The first case that fits counts.
    let backup_state = if let Some(error) = &backup.error {
        paint.error(&format!("not in the backup: {error}"))
    } else if backup.whole {
        format!("backup of {} is complete", bytes(backup.copied_bytes))
    } else if !is_open {
        "backup removed".into()
    } else if let Some(age_seconds) = backup.age_seconds {
        format!(
            "backup {} old, {} copied, {} left to copy",
            seconds(age_seconds),
            bytes(backup.copied_bytes),
            bytes(backup.left_bytes)
        )
    } else {
        "backup not started".into()
    };
    format!("{stage}; {backup_state}")
}

/// Returns which commit rule began the transaction, and what it waits for. Returns an empty text without a rule.
fn rule_text(transaction: &TransactionStatus) -> String {
    match (&transaction.rule, &transaction.waits_for) {
        (Some(rule), Some(waits_for)) => format!("; rule {rule} waits for {waits_for}"),
        (Some(rule), None) => format!("; rule {rule}"),
        (None, _) => String::new(),
    }
}

/// Returns the stage of a transaction in words, with the command that continues it.
///
/// It is first open: programs change files at or below one path, its scope. Once prepared, the changes are durable, and
/// wait for a commit or an abort. Once decided, the commit is certain, and the changes are being applied.
fn stage_text(transaction: &TransactionStatus, paint: Paint) -> String {
    let scope = if transaction.scope.is_empty() {
        "the whole mount".to_owned()
    } else {
        transaction.scope.to_string()
    };
    let id_clause = match transaction.id {
        Some(id) => format!(" as {id}"),
        None => String::new(),
    };
    let objects = count(transaction.objects, "object");
    match transaction.stage {
        TransactionStage::Open => {
            let age_clause = match transaction.age_seconds {
                Some(age_seconds) => format!(", {} old", seconds(age_seconds)),
                None => String::new(),
            };
            format!(
                "transaction in {scope}, {objects} changed, {}{age_clause}{}{}",
                bytes(transaction.bytes),
                owner_text(transaction),
                rule_text(transaction)
            )
        }
        TransactionStage::Prepared => {
            let hosts_clause = if transaction.here.is_empty() {
                String::new()
            } else {
                format!(" on {}", transaction.here.join(", "))
            };
            paint.warning(&format!(
                "transaction in {scope}, prepared{id_clause}{hosts_clause}: firn commit or firn abort"
            ))
        }
        TransactionStage::Decided => match &transaction.error {
            None => paint.warning(&format!(
                "transaction in {scope}, decided{id_clause}, {objects} are being applied"
            )),
            Some(error) => paint.error(&format!(
                "transaction in {scope}, decided{id_clause}: {error}; it is retried automatically, and at once by firn commit"
            )),
        },
    }
}

/// Returns which process owns the transaction.
fn owner_text(transaction: &TransactionStatus) -> String {
    match transaction.owner {
        None => ", no owner".into(),
        Some(owner) if owner.connection => {
            format!(", owner: a connection of process {}", owner.pid)
        }
        Some(owner) => format!(", owner: process {}", owner.pid),
    }
}

/// Returns how much of this host's held data (in memory only) a partner host has copied, and how much it has not.
fn copies_text(partner: &PartnerStatus) -> String {
    let host = partner.host.as_deref().unwrap_or_default();
    let copied = bytes(partner.copied_bytes);
    if partner.left_files == 0 {
        return format!("{host} has copies of {copied}");
    }
    let missing = bytes(partner.left_bytes);
    let lag = seconds(partner.lag_seconds);
    format!("{host} has copies of {copied}, but not of {missing}, the oldest written {lag} ago")
}

/// Returns the state of the copies in the memory of the partner: the host that keeps copies of data that is in this
/// host's memory only.
fn partner_text(partner: &PartnerStatus, paint: Paint) -> String {
    let mut text = if partner.present {
        copies_text(partner)
    } else {
        paint.warning("none: held data is lost if this host is lost")
    };
    if !partner.note.is_empty() {
        text += &format!("; {}", paint.warning(&printable(&partner.note)));
    }
    text
}

/// Returns how much of the spill file is in use, and how much was moved to it.
fn spilled_text(spill: &SpillStatus) -> String {
    format!(
        "{} of {} in use in {}, {} moved there{}",
        bytes(spill.used_bytes),
        bytes(spill.bytes),
        spill.path,
        bytes(spill.moved_bytes),
        recent_rate_clause(spill.moved_bytes_per_second)
    )
}

/// Returns what was drained (written to the backing), and the mean size of these writes, which shows that many small
/// writes became few large ones.
fn drained_text(status: &Status) -> String {
    // Without a write there is no mean.
    let mean_clause = match status.drain_bytes.checked_div(status.drain_writes) {
        Some(mean) => format!(" of {}", bytes(mean)),
        None => String::new(),
    };
    let failures_clause = if status.drain_errors > 0 {
        format!(", {} failed", count(status.drain_errors, "write"))
    } else {
        String::new()
    };
    format!(
        "{} in {}{mean_clause} (drained){failures_clause}{}",
        bytes(status.drain_bytes),
        count(status.drain_writes, "write"),
        recent_rate_clause(status.drain_bytes_per_second)
    )
}

/// Returns a line about an error. `retry_seconds` is the time until the next try of the backing, if one is planned.
fn error_text(error: &ErrorStatus, retry_seconds: Option<f64>) -> String {
    let retry_clause = match (error.pending, retry_seconds) {
        (false, _) => String::new(),
        (true, None) => "; the data is kept and tried again".to_owned(),
        (true, Some(retry_seconds)) => format!(
            "; the data is kept and tried again in {}",
            seconds(retry_seconds)
        ),
    };
    let path = if error.path.is_empty() {
        "(file unknown)".to_owned()
    } else {
        error.path.to_string()
    };
    let times = count(error.repeats, "time");
    format!(
        "{path}: {} ({times}, {} ago){retry_clause}",
        printable(&error.message),
        seconds(error.age_seconds)
    )
}

/// Returns a line for each file at or below a path with data that is not in the backing yet.
fn format_undrained_files(files: &[FileStatus]) -> String {
    if files.is_empty() {
        return "  all files here are drained\n".to_owned();
    }
    let mut text = String::new();
    for file in files {
        let open = if file.open { ", open" } else { "" };
        // The word for users is the JSON text without its quotes.
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
            error_text(&error, Some(0.4)),
            "step/rank0: write: No space left on device (3 times, 2.0 s ago); the data is kept and tried again in 400 ms"
        );
    }

    fn healthy() -> Status {
        Status {
            mount_point: "/ckpt".into(),
            backing: "/scratch/run42".into(),
            options: Options {
                close: firn_config::Close::Drain,
                ..Options::default()
            }
            .in_force(),
            epoch: 1,
            arena_bytes: 256 << 20,
            arena_used_bytes: 32 << 20,
            held_bytes: 12 << 20,
            held_files: 3,
            oldest_held_seconds: Some(2.0),
            ingest_bytes: 384 << 20,
            ingest_writes: 6144,
            ingest_bytes_per_second: f64::from(1 << 20),
            drain_bytes: 384 << 20,
            drain_writes: 61,
            failed_requests: [("lookup".to_owned(), 23)].into(),
            ..Status::default()
        }
    }

    #[test]
    fn a_healthy_mount_has_five_lines() {
        assert_eq!(
            format_status(&healthy(), StatusDetail::Short, Paint::stdout()),
            "/ckpt  on  /scratch/run42  healthy
  in memory     12.0 MiB in 3 files (held, not drained yet), the oldest for 2.0 s; [#---------] 12% of 256.0 MiB in use
  received      384.0 MiB in 6144 writes, 1.0 MiB/s in the last seconds
  written       384.0 MiB in 61 writes of 6.3 MiB (drained)
  options       close waits for the backing (close=held: at once)
"
        );
        let all = format_status(&healthy(), StatusDetail::All, Paint::stdout());
        for part in ["lookup (names not found) 23", "drain-cpu=100"] {
            assert!(all.contains(part), "{all}");
        }
        let mut other = healthy();
        other.options.push("history=3".into());
        let shown = format_status(&other, StatusDetail::Short, Paint::stdout());
        assert!(shown.contains("at once), history=3\n"), "{shown}");
    }

    #[test]
    fn what_is_wrong_comes_first_with_the_command_that_helps() {
        let mut status = healthy();
        status.errors = vec![ErrorStatus {
            pending: true,
            ..ErrorStatus::default()
        }];
        let shown = format_status(&status, StatusDetail::Short, Paint::stdout());
        let mut lines = shown.lines();
        assert_eq!(lines.next(), Some("/ckpt  on  /scratch/run42"));
        assert!(lines.next().unwrap().trim_start().starts_with("error "));
        assert!(lines.next().unwrap().contains("`firn drain /ckpt`"));
        assert!(lines.next().unwrap().contains("in memory"), "{shown}");
    }

    /// A new figure of the table cannot be forgotten here: [`other_figures`] shows it.
    #[test]
    fn each_figure_changes_what_a_person_is_shown() {
        let mut status = Status::example();
        // A problem hides other figures, so the example has none. The line of pulls appears only where there were some.
        status.pulled_bytes = 1;
        let transaction = &mut status.transactions[0];
        transaction.error = None;
        transaction.backup.as_mut().expect("an example").error = None;
        let before = format_status(&status, StatusDetail::All, Paint::stdout());
        let figures = Figures::from_statuses([&status]);
        for name in IN_LINES {
            assert!(figures.iter().any(|one| one.name == *name), "{name}");
        }
        for one in figures.iter() {
            let mut json = serde_json::to_value(&status).unwrap();
            change(&mut json, one.json.trim_start_matches('.'));
            let changed: Status = serde_json::from_value(json).unwrap();
            assert_ne!(
                format_status(&changed, StatusDetail::All, Paint::stdout()),
                before,
                "{}",
                one.name
            );
        }
    }

    /// Changes the value at a path in the JSON.
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
            Value::Object(histogram) if histogram.contains_key("sum") => {
                histogram["sum"] = 77_777.into();
            }
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
            drained_text(&Status::default()),
            "0 B in 0 writes (drained)"
        );
    }
}
