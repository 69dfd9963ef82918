//! `firn recover`: writes the data that a killed firnd held to its backing, without a mount.
//!
//! firnd is the daemon of a mount. Its data in memory lies in the *arena*, a file in shared memory, which outlives the
//! daemon. Flags select one of three other procedures: to discard that data, to end the transactions of a dead host, or
//! to prepare a transaction from its backup.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use firn_client::RuntimeFiles;
use firn_config::Options;
use firn_daemon::{FromBackup, LostPolicy, RecoverError, RecoverReport, RecoverRequest};
use firn_format::quote::printable;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::mount::{options_list_arg, resolve_options};
use super::umount::confirm_discard;
use crate::failure::{DONE, FAILED, Failure, INTERRUPTED, PARTLY, USAGE};
use crate::output;
use crate::progress::ProgressMeter;
use crate::text::{self, bytes, count};
use crate::verb::Verb;

pub const VERB: Verb = Verb {
    name: "recover",
    about: "Write the data that a killed firnd held to its directory, without mounting",
    long: "Writes the data of the arena to the backing until all of it is durable, then removes the arena. `firn mount` \
           of the same backing does this, too. `firn recover` can be interrupted and started again at any time.",
    examples: &[
        (
            "firn recover /scratch/run42",
            "after a crash, for example in an epilog script",
        ),
        (
            "firn recover --save-lost /home/me/rescued /scratch/run42",
            "keep data whose files were removed from the backing before it was drained",
        ),
        (
            "firn recover --host n7 /scratch/run42",
            "when host n7 is lost: finish or undo its transactions, and remove it from the list of `firn hosts`",
        ),
        (
            "firn recover --from-backup /pfs/backup --id 17 /scratch/run42",
            "when the host is lost: finish commit 17 on a copy of the backing from before the transaction",
        ),
        (
            "firn recover --discard --yes /scratch/run42",
            "when the backing is lost: delete the data that is held for it, without access to the backing",
        ),
        ("firn recover --json /scratch/run42", "for scripts"),
    ],
    exits: &[
        (
            0,
            "everything is durable in the backing, or there was nothing to recover; with --discard: the data is deleted",
        ),
        (
            1,
            "failed, and nothing was recovered; the data is still in the arena",
        ),
        (
            2,
            "an invalid option or argument, or --discard without --yes and without a terminal to ask at",
        ),
        (
            3,
            "partly recovered, and the other data is still in the arena; or there is no arena, and a commit waits for the next \
            mount; with --discard: a file could not be removed",
        ),
        (
            10,
            "not an arena, or not one that this version of firn can use",
        ),
        (11, "a running firnd uses it: use its mount"),
        (130, "interrupted; the remaining data is still in the arena"),
    ],
    args,
    run,
};

/// Options that have an effect without a mount.
const OPTIONS: [&str; 2] = ["arena-dir", "io-threads"];

/// Adds the arguments of `firn recover` to its clap command, and returns the command.
fn args(command: Command) -> Command {
    let rows = OPTIONS
        .iter()
        .filter_map(|name| firn_config::table::row(name));
    command
        .arg(
            Arg::new("backing")
                .value_name("BACKING")
                .help("Backing directory, or mount point of a dead mount; with --discard also an arena file")
                .required(true)
                .value_hint(ValueHint::DirPath)
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("save-lost")
                .long("save-lost")
                .value_name("DIR")
                .help("Save held data whose file is gone from the backing to DIR, and remove the data from the arena")
                .value_hint(ValueHint::DirPath)
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("discard-lost")
                .long("discard-lost")
                .action(ArgAction::SetTrue)
                .conflicts_with("save-lost")
                .help("Discard held data whose file is gone from the backing; it cannot be recovered later"),
        )
        .arg(
            Arg::new("discard")
                .long("discard")
                .action(ArgAction::SetTrue)
                .conflicts_with_all(["save-lost", "discard-lost"])
                .help("Discard all data that is held for BACKING, which need not exist; asks first on a terminal"),
        )
        .arg(
            Arg::new("yes")
                .long("yes")
                .action(ArgAction::SetTrue)
                .requires("discard")
                .help("With --discard: discard the data without asking"),
        )
        .arg(
            Arg::new("dead-host")
                .long("host")
                .value_name("NAME")
                .conflicts_with_all(["save-lost", "discard-lost", "discard"])
                .help(
                    "Finish or undo the transactions of this lost host, and no longer list the host as dead",
                ),
        )
        .arg(
            Arg::new("from-backup")
                .long("from-backup")
                .value_name("DIR")
                .conflicts_with_all(["save-lost", "discard-lost", "discard", "dead-host"])
                .help("Restore the prepared transaction of a lost host that had backup=DIR, in a copy of BACKING from before the transaction")
                .value_hint(ValueHint::DirPath)
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("id")
                .long("id")
                .value_name("N")
                .requires("from-backup")
                .help("Commit the transaction; without this, mount and run firn commit or firn abort")
                .value_parser(value_parser!(u64)),
        )
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("Print the outcome as JSON"))
        .arg(options_list_arg())
        .args(rows.map(firn_config::arg))
}

/// Recovers the data that a killed firnd (the daemon of a mount) held in memory: writes it to the backing.
///
/// One of three flags selects another task, in this order: `--discard` drops the data, `--host` ends the transactions
/// of a dead host, and `--from-backup` prepares a transaction from its backup.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let path = matches
        .get_one::<PathBuf>("backing")
        .expect("clap demands it");
    let options = resolve_options(matches)?.options;
    if matches.get_flag("discard") {
        let is_confirmed = matches.get_flag("yes");
        let as_json = matches.get_flag("json");
        return discard_arena(path, &options, is_confirmed, as_json);
    }
    let backing = find_backing(path);
    if let Some(host) = matches.get_one::<String>("dead-host") {
        return recover_host(&backing, host, matches.get_flag("json"));
    }
    if let Some(dir) = matches.get_one::<PathBuf>("from-backup") {
        let request = FromBackup {
            dir: dir.clone(),
            backing,
            id: matches.get_one::<u64>("id").copied(),
            options,
        };
        return recover_from_backup_dir(request, matches.get_flag("json"));
    }
    warn_of_damage(&backing, &options);
    let lost_policy = match matches.get_one::<PathBuf>("save-lost") {
        Some(dir) => LostPolicy::Save(create_dir_outside(dir, &backing)?),
        None if matches.get_flag("discard-lost") => LostPolicy::Discard,
        None => LostPolicy::Keep,
    };
    recover_arena(
        RecoverRequest {
            backing,
            options,
            lost: lost_policy,
        },
        matches.get_flag("json"),
    )
}

/// Writes the data in the arena (the file in memory that a killed firnd left) to the backing. Ends when all of it is
/// durable there, or when a signal interrupts the recovery.
fn recover_arena(request: RecoverRequest, as_json: bool) -> Result<u8, Failure> {
    let backing = request.backing.clone();
    let is_interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&is_interrupted))
            .map_err(|error| Failure::new(FAILED, format!("cannot watch for signals: {error}")))?;
    }
    let mut meter = ProgressMeter::new();
    let result = firn_daemon::recover(request, &mut |bytes, files, phase| {
        meter.show(bytes, files, phase);
        // False stops the recovery.
        !is_interrupted.load(Ordering::Relaxed)
    });
    // The bar disappears before a message is printed.
    drop(meter);
    let report = result?;
    if as_json {
        output::print_json(&report)?;
    } else {
        output::print(&summarize(&backing, &report))?;
    }
    print_file_errors(&report);
    recovery_result(&backing, &report, is_interrupted.load(Ordering::Relaxed))
}

/// Drops the data that is held for a backing: removes its arena (the file in memory with that data). The backing itself
/// may no longer exist, so `path` is resolved only if no arena has it as its backing.
///
/// Asks the user first, unless `is_confirmed`. Returns [`PARTLY`] if a file remains.
fn discard_arena(
    path: &Path,
    options: &Options,
    is_confirmed: bool,
    as_json: bool,
) -> Result<u8, Failure> {
    let found_arena = match firn_daemon::find_arena(path, options) {
        Ok(found_arena) => found_arena,
        // The path may be the mount point of a dead mount.
        Err(RecoverError::NoArena { .. }) => firn_daemon::find_arena(&find_backing(path), options)?,
        Err(error) => return Err(error.into()),
    };
    let arena = text::path(&found_arena.arena);
    let describe_data = |held_bytes| {
        let backing = found_arena.backing.clone().unwrap_or_default();
        format!("{} that {backing} does not have", bytes(held_bytes))
    };
    if !is_confirmed {
        confirm_discard(
            &describe_data(found_arena.held_bytes),
            &format!("{arena} is kept"),
        )?;
    }
    let report = firn_daemon::discard(&found_arena.arena)?;
    if as_json {
        output::print_json(&report)?;
    } else {
        let dropped = describe_data(report.held_bytes);
        output::print(&format!("dropped {dropped}, and removed {arena}\n"))?;
    }
    for remaining_file in &report.left {
        output::print_message(&format!("not removed: {}", printable(remaining_file)));
    }
    Ok(if report.left.is_empty() { DONE } else { PARTLY })
}

/// Prepares the transaction of a lost host from its backup, and commits it if the request has its id. A prepared
/// transaction waits for a commit or an abort. Its scope is the path at or below which it changes files.
fn recover_from_backup_dir(request: FromBackup, as_json: bool) -> Result<u8, Failure> {
    let report = firn_daemon::recover_from_backup(&request)?;
    if as_json {
        output::print_json(&report)?;
        return Ok(DONE);
    }
    let id = report.id;
    let objects = count(report.objects, "object");
    let scope = if report.scope.is_empty() {
        "the whole mount".to_owned()
    } else {
        report.scope.to_string()
    };
    output::print_message(&if report.before {
        format!("{scope}: commit {id} was applied earlier; nothing is left to do")
    } else if report.committed {
        format!("{scope}: applied commit {id}, {objects}")
    } else {
        format!(
            "{scope}: prepared with id {id}, {objects}; mount with drain=commit, then run `firn commit` or `firn abort`"
        )
    });
    Ok(DONE)
}

/// Ends the transactions of a host that does not come back. Fails with [`PARTLY`] if one of them is prepared: it waits
/// for the user to commit or abort it.
fn recover_host(backing: &Path, host: &str, as_json: bool) -> Result<u8, Failure> {
    let report = firn_daemon::recover_host(backing, host.to_owned())?;
    if as_json {
        output::print_json(&report)?;
    } else {
        print_host_report(host, &report);
    }
    match report.waiting.first() {
        None => Ok(DONE),
        Some(id) => Err(Failure::new(
            PARTLY,
            format!(
                "{host}: transaction {id} is prepared but not decided: run `firn commit` or `firn abort` on another host, then this command again"
            ),
        )),
    }
}

/// Prints which transactions of a lost host were applied or undone, and how much data was lost with its memory.
fn print_host_report(host: &str, report: &firn_daemon::HostReport) {
    for id in &report.finished {
        output::print_message(&format!("{host}: applied commit {id}"));
    }
    if report.undone > 0 {
        output::print_message(&format!(
            "{host}: undid {}",
            count(report.undone, "transaction")
        ));
    }
    if !report.waiting.is_empty() {
        // Until the other hosts decide its prepared transactions, the host stays in the list of dead hosts.
        return;
    }
    if report.finished.is_empty() && report.undone == 0 {
        output::print_message(&format!("{host}: there is no transaction to finish"));
    }
    let loss = match report.held_bytes {
        0 => String::new(),
        held_bytes => format!(
            "; {} that it held at its last heartbeat are lost",
            bytes(held_bytes)
        ),
    };
    output::print_message(&format!("{host} is no longer listed as dead{loss}"));
}

/// Returns the backing that a path means: that of this user's own mount, or else the path itself.
///
/// Another user may write any path as the source of a mount, so only this user's own mounts count.
fn find_backing(path: &Path) -> PathBuf {
    match firn_client::find(path) {
        Ok(location) if location.relative.is_empty() && !location.mount.is_of_another_user() => {
            location.mount.backing
        }
        _ => path.to_owned(),
    }
}

/// Creates the directory for saved files if it does not exist, and returns its canonical path. Refuses a directory
/// inside the backing: its files would be mixed with those of the backing, which may have the same names.
fn create_dir_outside(dir: &Path, backing: &Path) -> Result<PathBuf, Failure> {
    let unusable = |error| Failure::new(FAILED, format!("cannot use {}: {error}", text::path(dir)));
    std::fs::create_dir_all(dir).map_err(unusable)?;
    let dir = dir.canonicalize().map_err(unusable)?;
    if backing
        .canonicalize()
        .is_ok_and(|backing| dir.starts_with(backing))
    {
        let text = format!(
            "{} is inside the backing directory: name a directory outside of it",
            text::path(&dir)
        );
        return Err(Failure::new(USAGE, text));
    }
    Ok(dir)
}

/// Warns of damaged records in the arena, the file in memory with the data to be recovered. The recovery skips them
/// without a message.
fn warn_of_damage(backing: &Path, options: &Options) {
    // Without an arena that can be checked there is nothing to warn of. The recovery reports any error.
    let Ok(canonical_backing) = backing.canonicalize() else {
        return;
    };
    let Ok(files) = RuntimeFiles::for_backing(&canonical_backing, options.arena_dir.as_deref())
    else {
        return;
    };
    let Ok(report) = firn_daemon::check(&files.arena) else {
        return;
    };
    // A running firnd changes the arena during the check, so its damage is not certain.
    if report.in_use {
        return;
    }
    for damage in &report.damage {
        output::print_message(&format!(
            "skipped a damaged record: {}",
            super::check::format_damage(damage)
        ));
    }
}

/// Returns the result of a recovery as text: how much was written from the arena (the file in memory) to the backing,
/// and what was done with the data of files that are missing there. The text is empty if [`recovery_result`] says
/// everything.
fn summarize(backing: &Path, report: &RecoverReport) -> String {
    if let Some(bytes_lost_at_reboot) = report.gone_bytes {
        return format!(
            "this host was rebooted after it had {} mounted: {} that it held are lost; the other hosts no longer list it as \
            dead\n",
            text::path(backing),
            bytes(bytes_lost_at_reboot)
        );
    }
    if report.arena.is_none() {
        return if report.decided.is_empty() {
            format!("nothing to recover for {}\n", text::path(backing))
        } else {
            // The failure of `recovery_result` says that a commit is decided.
            String::new()
        };
    }
    let recovered = bytes(report.recovered_bytes);
    let files = count(report.recovered_files, "file");
    let mut text = format!(
        "recovered {recovered} in {files}; {} left\n",
        bytes(report.left_bytes)
    );
    for lost in &report.lost {
        let action = match &lost.saved_to {
            Some(file) => format!("saved to {}", text::path(file)),
            None if lost.discarded => "discarded".into(),
            None => "kept in the arena".into(),
        };
        text += &format!(
            "{}: {}, {action} ({})\n",
            lost.path,
            bytes(lost.bytes),
            lost.reason
        );
    }
    text
}

/// Prints the errors of single files.
fn print_file_errors(report: &RecoverReport) {
    for error in &report.errors {
        let path = if error.path.is_empty() {
            "(file unknown)".to_owned()
        } else {
            error.path.to_string()
        };
        output::print_message(&format!("{path}: {}", printable(&error.message)));
    }
}

/// Returns the exit status of a recovery, or the failure if data is left in the arena (the file in memory) or a decided
/// commit is not applied to the backing yet.
///
/// The failure has the exit status [`PARTLY`] for a commit. For data it is [`INTERRUPTED`] after an interrupt,
/// [`FAILED`] if nothing was recovered, and otherwise [`PARTLY`].
fn recovery_result(
    backing: &Path,
    report: &RecoverReport,
    is_interrupted: bool,
) -> Result<u8, Failure> {
    if let Some(id) = report.decided.first() {
        let backing = text::path(backing);
        let text = format!(
            "commit {id} is decided, but not applied to {backing} yet: the host that has it mounted applies it, or the next `firn mount`"
        );
        return Err(Failure::new(PARTLY, text));
    }
    let Some(arena) = &report.arena else {
        return Ok(DONE);
    };
    if report.left_bytes == 0 && report.lost_file_bytes == 0 {
        return Ok(DONE);
    }
    // An interrupt leaves data on purpose, so it takes precedence over the other results.
    let exit_status = if is_interrupted {
        INTERRUPTED
    } else if report.recovered_bytes == 0 {
        FAILED
    } else {
        PARTLY
    };
    let text = describe_remaining_data(backing, arena, report);
    Err(Failure::new(exit_status, text))
}

/// Returns what remains in the arena (the file in memory with the data) after a recovery, and what the user should do.
fn describe_remaining_data(backing: &Path, arena: &Path, report: &RecoverReport) -> String {
    let arena = text::path(arena);
    let backing = text::path(backing);
    if report.left_bytes > 0 {
        return format!(
            "{} are left in {arena}: repair the backing and run `firn recover {backing}` again",
            bytes(report.left_bytes)
        );
    }
    format!(
        "{} belong to files that are missing in the backing, and are kept in {arena}: put the files back under \
        their names, or save the data with `firn recover --save-lost DIR {backing}`, or discard it with `firn \
        recover --discard-lost {backing}`",
        bytes(report.lost_file_bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(recovered_bytes: u64, left_bytes: u64, stopped: bool) -> u8 {
        let report = RecoverReport {
            arena: Some("/a".into()),
            recovered_bytes,
            left_bytes,
            ..RecoverReport::default()
        };
        match recovery_result(Path::new("/b"), &report, stopped) {
            Ok(code) | Err(Failure::Message { code, .. }) => code,
            Err(Failure::OutputClosed) => panic!("nothing was printed"),
        }
    }

    #[test]
    fn the_exit_status_tells_all_from_part_from_nothing() {
        assert_eq!(
            [
                code(9, 0, false),
                code(9, 1, false),
                code(0, 9, false),
                code(5, 4, true)
            ],
            [0, 3, 1, 130]
        );
        assert_eq!(
            recovery_result(Path::new("/b"), &RecoverReport::default(), false).unwrap(),
            DONE
        );
    }
}
