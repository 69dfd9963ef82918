//! `firn check`: reads an arena, logs or lanes (I/O servers), and reports damage and orphaned files.
//!
//! Terms
//! * The *arena* of a mount is a file in shared memory with data that the backing lacks.
//! * With layout=log, the backing has *logs* of the writes to a file, until they are flattened into a plain file.
//! * An *orphan* is one of three: a file on a lane without a name in the backing, a name without its file, or a log
//!   without its file.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use firn_client::{Connection, Mount, RuntimeFiles};
use firn_daemon::{CheckReport, Damage, FoundOrphan, LogsReport};
use firn_protocol::path::BytePath;
use serde::Serialize;

use super::mount::{options_list_arg, resolve_options};
use crate::failure::{DONE, FAILED, Failure, NO_MOUNT};
use crate::output::{self, Paint};
use crate::text::{bytes, count, escaped, path as path_text};
use crate::verb::Verb;

pub const VERB: Verb = Verb {
    name: "check",
    about: "Check an arena and logs for damage, and lanes for lost files",
    long: "Only reads. Checks the arena and, for a backing or a mount point, all logs of files (layout=log). `firn \
           recover` and `firn mount` never interpret damaged records, and recover everything else. With --orphans, \
           walks a backing that no host has mounted, and its lanes (placement=dirs), and looks for logs whose file is \
           missing. After a power loss, changes that were not synced may leave files without a name, and names without \
           a file.",
    examples: &[
        (
            "firn check /scratch/run42",
            "the arena of this backing, and its logs",
        ),
        (
            "firn check /dev/shm/firn-1000/3e2925ad41a9d919.arena",
            "this file",
        ),
        (
            "firn check --orphans /scratch/run42",
            "files in its lanes that no name leads to",
        ),
    ],
    exits: &[
        (0, "sound"),
        (1, "damaged, or orphans are left; each place is listed"),
        (
            10,
            "not an arena, or neither an arena nor logs for this directory",
        ),
        (11, "with --orphans: the backing is mounted"),
    ],
    args,
    run,
};

/// Adds the arguments of `firn check` to its clap command, and returns the command.
fn args(command: Command) -> Command {
    let arena_dir = firn_config::table::row("arena-dir").map(firn_config::arg);
    command
        .arg(
            Arg::new("path")
                .value_name("ARENA|BACKING|DIR")
                .help("An arena file, a backing directory, or a mount point")
                .required(true)
                .value_hint(ValueHint::AnyPath)
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("Print the findings as JSON"),
        )
        .arg(
            Arg::new("orphans")
                .long("orphans")
                .action(ArgAction::SetTrue)
                .help("In a backing and its lanes, look for files without a name, and names without a file"),
        )
        .arg(
            Arg::new("repair")
                .long("repair")
                .action(ArgAction::SetTrue)
                .requires("orphans")
                .help("Remove files without a name; names without a file remain, because their lane may return"),
        )
        .arg(options_list_arg())
        .args(arena_dir)
}

/// Checks the arena and the logs that a path means. A missing arena is an error only if there are no logs either.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let path = matches.get_one::<PathBuf>("path").expect("clap demands it");
    if matches.get_flag("orphans") {
        return check_orphans(path, matches);
    }
    let arena = find_arena(path, matches);
    let logs = check_logs(path)?;
    let arena = if arena.is_err() && logs.is_some() {
        // Without an arena no data is held, so a result for the logs alone is complete.
        None
    } else {
        Some(firn_daemon::check(&arena?)?)
    };
    print_reports(&Reports { arena, logs }, matches.get_flag("json"))
}

/// Checks the logs of the backing that a path means. Returns `None` if there is no backing, or no file lies in logs.
fn check_logs(path: &Path) -> Result<Option<LogsReport>, Failure> {
    let Some(backing) = find_backing(path) else {
        return Ok(None);
    };
    let mut print_notice = |text: String| output::print_message(&text);
    let logs = firn_daemon::check_logs(&backing, &mut print_notice)?;
    if logs.containers == 0 && logs.findings.is_empty() {
        return Ok(None);
    }
    Ok(Some(logs))
}

/// The results of the checks.
#[derive(Serialize)]
struct Reports {
    /// The result for the arena. `None` means that only logs were checked.
    #[serde(flatten)]
    arena: Option<CheckReport>,
    /// The result for the logs. `None` means that no file lies in logs.
    #[serde(skip_serializing_if = "Option::is_none")]
    logs: Option<LogsReport>,
}

/// Prints the results. Fails if the arena (the file in memory with a mount's data) or a log in the backing is damaged.
fn print_reports(reports: &Reports, as_json: bool) -> Result<u8, Failure> {
    if as_json {
        output::print_json(reports)?;
    } else {
        if let Some(report) = &reports.arena {
            output::print(&format_arena_report(report, Paint::stdout()))?;
        }
        if let Some(logs) = &reports.logs {
            output::print(&format_logs_report(logs, Paint::stdout()))?;
        }
    }
    if let Some(report) = &reports.arena
        && !report.damage.is_empty()
    {
        return Err(damaged_arena_failure(report));
    }
    let damaged_places = reports.logs.as_ref().map_or(0, count_damaged_places);
    if damaged_places > 0 {
        let places = count(damaged_places, "damaged place");
        return Err(Failure::new(
            FAILED,
            format!(
                "in logs: {places}; undamaged data is read as before, and reads of damaged files fail with EIO: write these files again, copy their undamaged part, or drop the damaged part with `firn flatten --accept-loss`"
            ),
        ));
    }
    Ok(DONE)
}

/// Returns the failure for a damaged arena (the file in memory with a mount's data), with advice.
///
/// If another user could have made its spill file (the arena's extension on disk), the exit status is [`NO_MOUNT`],
/// because the file then need not be Firn's.
fn damaged_arena_failure(report: &CheckReport) -> Failure {
    let places = count(report.damage.len() as u64, "damaged place");
    let backing = report
        .backing
        .as_ref()
        .map_or("BACKING".to_owned(), BytePath::to_string);
    let (exit_status, advice) = match report.spill_distrust() {
        Some(distrust_reason) => (NO_MOUNT, distrust_reason),
        None => (
            FAILED,
            format!("`firn recover {backing}` recovers the rest"),
        ),
    };
    Failure::new(
        exit_status,
        format!("{}: {places}; {advice}", path_text(&report.arena)),
    )
}

/// Returns the number of places in logs that cannot be read.
fn count_damaged_places(logs: &LogsReport) -> u64 {
    let damaged_places = logs.findings.iter().filter(|found| !found.is_harmless);
    damaged_places.count() as u64
}

/// Returns the result for the logs of a backing as text. A container is a directory with logs of one file. It exists
/// until the logs are copied into the plain file.
fn format_logs_report(logs: &LogsReport, paint: Paint) -> String {
    let verdict = match count_damaged_places(logs) {
        0 => paint.healthy("sound"),
        _ => paint.error("damaged"),
    };
    let containers = count(logs.containers as u64, "container");
    let mut text = format!(
        "{}: {containers} of logs: {verdict}\n",
        path_text(&logs.backing)
    );
    for finding in &logs.findings {
        let label = if finding.is_harmless {
            "harmless"
        } else {
            "damage"
        };
        let _ = writeln!(text, "  {label:<8} {}", escaped(&finding.message));
    }
    text
}

/// Returns the backing that a path means, or `None` if the path is an arena.
fn find_backing(path: &Path) -> Option<PathBuf> {
    if path.is_file() {
        return None;
    }
    match firn_client::find(path) {
        Ok(location) => Some(location.mount.backing),
        Err(_) => path.canonicalize().ok().filter(|path| path.is_dir()),
    }
}

/// Reports orphans, and with `--repair` removes those that are safe to remove. Fails if any remains.
///
/// An orphan is a file on a lane (an I/O server) without a name in the backing, a name without its file, or a log
/// without its file.
fn check_orphans(backing: &Path, matches: &ArgMatches) -> Result<u8, Failure> {
    let options = resolve_options(matches)?.options;
    let repair = matches.get_flag("repair");
    let mut print_notice = |text: String| output::print_message(&text);
    let orphans = firn_daemon::find_orphans(backing, &options, repair, &mut print_notice)?;
    if matches.get_flag("json") {
        output::print_json(&orphans)?;
    } else {
        for orphan in &orphans {
            output::print(&format_orphan(orphan))?;
        }
    }
    let remaining_orphans = orphans.iter().filter(|orphan| !orphan.is_removed).count();
    if remaining_orphans == 0 {
        return Ok(DONE);
    }
    let backing = path_text(backing);
    let orphan_count = count(remaining_orphans as u64, "orphan");
    let advice = "`--repair` removes files without a name, and logs of removed files; use rm for names without a file, and for other logs without a file";
    Err(Failure::new(
        FAILED,
        format!("{backing}: {orphan_count}; {advice}"),
    ))
}

/// Returns the line about an orphan.
fn format_orphan(orphan: &FoundOrphan) -> String {
    let description = match orphan.kind {
        "file" => format!("{} without a name", bytes(orphan.bytes)),
        "link" => "a name that was being made".to_owned(),
        "logs" => "their file is not in the backing: kept, because the file may return".to_owned(),
        "removed-logs" => "their file was removed, and a host had begun to remove them".to_owned(),
        _ => "its file is not in the lane".to_owned(),
    };
    let removal = if orphan.is_removed { ", removed" } else { "" };
    format!("{}: {description}{removal}\n", path_text(&orphan.path))
}

/// Returns the path of the arena (the file in memory with a mount's data) that `path` means. `path` is an arena, a
/// backing or a mount point. Fails if there is no such arena.
fn find_arena(path: &Path, matches: &ArgMatches) -> Result<PathBuf, Failure> {
    if path.is_file() {
        return Ok(path.to_owned());
    }
    let arena = match firn_client::find(path) {
        Ok(location) => arena_of_mount(&location.mount),
        Err(_) => {
            let backing = path.canonicalize().map_err(|error| {
                Failure::new(
                    NO_MOUNT,
                    format!(
                        "{}: {error}; name an arena, a backing or a mount point",
                        path_text(path)
                    ),
                )
            })?;
            let options = resolve_options(matches)?.options;
            RuntimeFiles::for_backing(&backing, options.arena_dir.as_deref())?.arena
        }
    };
    if arena.exists() {
        return Ok(arena);
    }
    let path = path_text(path);
    let arena = path_text(&arena);
    Err(Failure::new(
        NO_MOUNT,
        format!(
            "{path} has no arena (looked for {arena}), so no data is held for it; if it was mounted with --arena-dir, use the same --arena-dir"
        ),
    ))
}

/// Returns the arena of a mount. firnd may use another arena directory than this command line, so its answer is
/// preferred to the default path.
fn arena_of_mount(mount: &Mount) -> PathBuf {
    let status = Connection::open(mount).and_then(|mut connection| connection.status());
    match status {
        Ok(status) => status.arena.into(),
        Err(_) => mount.files().arena,
    }
}

/// Returns one damage as a line of text.
pub fn format_damage(damage: &Damage) -> String {
    let place = if damage.place.is_empty() {
        String::new()
    } else {
        format!(", {}", damage.place)
    };
    format!("{}{place}: {}", damage.part, escaped(&damage.message))
}

/// Returns the result for an arena (the file in memory with a mount's data) as text: its size, its held bytes (not in
/// the backing), its journal (the record of names) and its damage. The epoch is how often a firnd has opened it.
fn format_arena_report(report: &CheckReport, paint: Paint) -> String {
    let verdict = if report.damage.is_empty() {
        paint.healthy("sound")
    } else {
        paint.error("damaged")
    };
    let mut text = format!("{}: {verdict}\n", path_text(&report.arena));
    let mut add_line = |label: &str, value: String| {
        let _ = writeln!(text, "  {label:<8} {value}");
    };
    if let Some(backing) = &report.backing {
        add_line("backing", backing.to_string());
    }
    let size = format!(
        "{} in chunks of {}",
        bytes(report.arena_bytes),
        bytes(report.chunk_bytes)
    );
    add_line("arena", format!("{size}, epoch {}", report.epoch));
    add_line(
        "held",
        format!(
            "{} in {}",
            bytes(report.held_bytes),
            count(report.pieces, "piece")
        ),
    );
    add_line(
        "journal",
        format!(
            "{}, {}",
            count(report.journal_records, "record"),
            count(report.files, "file")
        ),
    );
    if report.in_use {
        add_line(
            "in use",
            "by a running firnd: counts may change, and the journal is not checked".to_owned(),
        );
    }
    for damage in &report.damage {
        add_line("damage", format_damage(damage));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_names_part_place_and_fault() {
        let mut damage = Damage {
            part: "piece table".into(),
            place: "chunk 3, record 7".into(),
            message: "checksum".into(),
        };
        assert_eq!(
            format_damage(&damage),
            "piece table, chunk 3, record 7: checksum"
        );
        damage.place.clear();
        assert_eq!(format_damage(&damage), "piece table: checksum");
    }
}
