//! `firn check`.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use firn_client::{Connection, RuntimeFiles};
use firn_daemon::{CheckReport, Damage};
use firn_protocol::path::BytePath;

use super::mount::{minus_o, resolve};
use crate::failure::{DONE, FAILED, Failure, NOT_FIRN};
use crate::output::{self, Paint};
use crate::text::{bytes, count, name, path as path_text};
use crate::verb::Verb;

pub const VERB: Verb = Verb {
    name: "check",
    about: "Check an arena for damage",
    long: "Only reads the arena. `firn recover` and `firn mount` never interpret damaged records, and recover \
               everything else.",
    examples: &[
        ("firn check /scratch/run42", "the arena of this backing"),
        (
            "firn check /dev/shm/firn-1000/3e2925ad41a9d919.arena",
            "this file",
        ),
    ],
    exits: &[
        (0, "sound"),
        (1, "damaged; each damaged place is listed"),
        (10, "not an arena, or none for this directory"),
    ],
    args,
    run,
};

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
        .arg(minus_o())
        .args(arena_dir)
}

fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let path = matches.get_one::<PathBuf>("path").expect("clap demands it");
    let report = firn_daemon::check(&arena_of(path, matches)?)?;
    if matches.get_flag("json") {
        output::print_json(&report)?;
    } else {
        output::print(&text(&report, Paint::stdout()))?;
    }
    if report.damage.is_empty() {
        return Ok(DONE);
    }
    let places = count(report.damage.len() as u64, "damaged place");
    let backing = report
        .backing
        .as_ref()
        .map_or("BACKING".to_owned(), BytePath::to_string);
    let advice = format!("`firn recover {}` recovers the rest", backing);
    Err(Failure::new(
        FAILED,
        format!("{}: {places}; {advice}", path_text(&report.arena)),
    ))
}

fn arena_of(path: &Path, matches: &ArgMatches) -> Result<PathBuf, Failure> {
    if path.is_file() {
        return Ok(path.to_owned());
    }
    let arena = match firn_client::find(path) {
        Ok(place) => {
            // Only its firnd knows where an arena outside the runtime directory is.
            let told =
                Connection::open(&place.mount).and_then(|mut connection| connection.status());
            told.map_or_else(|_| place.mount.files().arena, |status| status.arena.into())
        }
        Err(_) => {
            let failed = |error| {
                Failure::new(
                    NOT_FIRN,
                    format!(
                        "{}: {error}; give an arena, a backing or a mount point",
                        path_text(path)
                    ),
                )
            };
            let backing = path.canonicalize().map_err(failed)?;
            RuntimeFiles::of(&backing, resolve(matches)?.options.arena_dir.as_deref())?.arena
        }
    };
    if arena.exists() {
        return Ok(arena);
    }
    let path = path_text(path);
    let arena = path_text(&arena);
    Err(Failure::new(
        NOT_FIRN,
        format!(
            "{path} has no arena (looked for {arena}), so nothing is held for it; if it was mounted with --arena-dir, give the same"
        ),
    ))
}

/// One damage in a line.
pub fn damage_line(damage: &Damage) -> String {
    let place = if damage.place.is_empty() {
        String::new()
    } else {
        format!(", {}", damage.place)
    };
    format!("{}{place}: {}", damage.part, name(&damage.message))
}

fn text(report: &CheckReport, paint: Paint) -> String {
    let verdict = if report.damage.is_empty() {
        paint.good("sound")
    } else {
        paint.bad("damaged")
    };
    let mut text = format!("{}: {verdict}\n", path_text(&report.arena));
    let mut line = |label: &str, what: String| {
        let _ = writeln!(text, "  {label:<8} {what}");
    };
    if let Some(backing) = &report.backing {
        line("backing", backing.to_string());
    }
    let size = format!(
        "{} in chunks of {}",
        bytes(report.arena_bytes),
        bytes(report.chunk_bytes)
    );
    line("arena", format!("{size}, epoch {}", report.epoch));
    line(
        "held",
        format!(
            "{} in {}",
            bytes(report.held_bytes),
            count(report.pieces, "piece")
        ),
    );
    line(
        "journal",
        format!(
            "{}, {}",
            count(report.journal_records, "record"),
            count(report.files, "file")
        ),
    );
    if report.in_use {
        line(
            "in use",
            "by a running firnd: counts may change, and the journal is not checked".to_owned(),
        );
    }
    for damage in &report.damage {
        line("damage", damage_line(damage));
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
            damage_line(&damage),
            "piece table, chunk 3, record 7: checksum"
        );
        damage.place.clear();
        assert_eq!(damage_line(&damage), "piece table: checksum");
    }
}
