//! `firn umount`: drains what a mount holds (writes the data that is only in memory to the backing), and unmounts.
//!
//! firnd, the daemon of the mount, does both on request. If it was killed, the verb removes the dead mount, and the
//! data stays in the arena (a file in shared memory).

use std::io::{self, BufRead, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};
use firn_client::{ClientError, Connection, Mount, MountLocation, Process, Progress};
use firn_process::{ExcessOutput, Limits, RunError};
use firn_protocol::{HeldPolicy, Status};
use rustix::mount::UnmountFlags;

use crate::failure::{DONE, FAILED, Failure, PARTLY, USAGE};
use crate::output;
use crate::progress::{ProgressMeter, WaitSummary};
use crate::text;
use crate::verb::{NO_CONNECTION, Verb, find_mount};

/// Timeout of a forced unmount for the end of firnd.
const FORCED_END_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of fuse3's helper for a lazy unmount.
const HELPER_TIMEOUT: Duration = Duration::from_secs(10);

pub const VERB: Verb = Verb {
    name: "umount",
    about: "Write all held data to the directory, then unmount",
    long: "Returns when firnd has ended and no longer uses the backing. If files of the mount are open, or the backing \
           refuses the data, it fails and the mount remains. If the kernel reports that firnd was killed, the dead \
           mount is removed and its data remains in the arena.",
    examples: &[
        ("firn umount /ckpt", "drain everything first"),
        (
            "firn umount --force /ckpt",
            "at once; data that cannot be drained remains in the arena for `firn recover`",
        ),
        (
            "firn umount --discard --yes /ckpt",
            "at the end of a job whose mount was a scratch cache",
        ),
    ],
    exits: &[
        (0, "unmounted, everything is drained"),
        (1, "failed; the mount remains"),
        (
            2,
            "an invalid option or argument, or --discard without --yes and without a terminal to ask at",
        ),
        (
            3,
            "unmounted, but data is left in the arena: mount again, or run `firn recover BACKING`; or files that could not be \
            flattened remain in logs",
        ),
        (10, "not a firn mount"),
        (11, "files below the mount point are in use"),
        NO_CONNECTION,
    ],
    args: UmountArgs::augment_args,
    run,
};

/// What to unmount and how.
#[derive(Debug, Args)]
pub struct UmountArgs {
    /// The mount point, or the backing.
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub path: PathBuf,
    /// Unmount even if files are open or data cannot be drained; undrained data remains in the arena.
    #[arg(short, long)]
    pub force: bool,
    /// Do not drain; the held data remains in the arena for the next mount of the same backing.
    #[arg(long)]
    pub keep_held: bool,
    /// Do not drain; drop the held data. On a terminal firn asks first; elsewhere --yes is required.
    #[arg(long, conflicts_with = "keep_held")]
    pub discard: bool,
    /// With --discard: drop the data without asking.
    #[arg(long, requires = "discard")]
    pub yes: bool,
    /// Print neither a summary nor progress.
    #[arg(short, long)]
    pub quiet: bool,
}

impl UmountArgs {
    /// Returns what firnd does with the held data.
    fn held_policy(&self) -> HeldPolicy {
        if self.discard {
            HeldPolicy::Discard
        } else if self.keep_held {
            HeldPolicy::Keep
        } else {
            HeldPolicy::Drain
        }
    }
}

/// Unmounts according to the flags.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    umount(&UmountArgs::from_arg_matches(matches)?)
}

/// Unmounts according to `args`, and returns the exit status. firnd, the daemon of the mount, does so on request. If it
/// was killed, this process removes the dead mount. The path of `args` must be the mount point itself.
pub fn umount(args: &UmountArgs) -> Result<u8, Failure> {
    let MountLocation { mount, relative } = find_mount(&args.path)?;
    if !relative.is_empty() {
        let path = text::path(&args.path);
        let point = text::path(&mount.mount_point);
        return Err(Failure::new(
            USAGE,
            format!("{path} is inside the mount at {point}: run `firn umount {point}`"),
        ));
    }
    match Connection::open(&mount) {
        Ok(mut connection) => unmount_by_firnd(&mount, &mut connection, args),
        Err(ClientError::Dead { .. }) if args.discard => Err(dead_mount_failure(&mount)),
        Err(ClientError::Dead { .. }) => remove_dead_mount(&mount),
        Err(error) => Err(error.into()),
    }
}

/// Unmounts through firnd, the daemon of the mount, and prints the result. The data is first drained (written to the
/// backing), unless the flags say otherwise. With `--discard` the user is asked first.
fn unmount_by_firnd(
    mount: &Mount,
    connection: &mut Connection,
    args: &UmountArgs,
) -> Result<u8, Failure> {
    let status = connection.status()?;
    if args.discard && !args.yes {
        confirm_discard(&describe_undrained(&status), "it is still mounted")?;
    }
    // Once firnd has ended, it can no longer be asked for the path.
    let arena = PathBuf::from(status.arena.clone());
    let mut meter = ProgressMeter::with_quiet(args.quiet);
    let show = &mut |progress: Progress| {
        meter.show(progress.bytes_left, progress.files_left, &progress.phase);
    };
    let (firnd, result) = connection.unmount(args.force, args.held_policy(), show)?;
    let waited = meter.summary();
    // The bar disappears before a message is printed.
    drop(meter);
    // After a refused unmount firnd goes on, so there is no end to wait for.
    if result.is_ok() || !is_mounted(mount) {
        wait_for_end(&firnd, args.force);
    }
    let files_in_logs = match result {
        Ok(files_in_logs) => files_in_logs,
        // A signal to firnd may have ended the mount during the request. firnd removes its arena if all data is
        // drained.
        Err(ClientError::Gone { .. }) if !is_mounted(mount) => {
            return report_remaining_arena(&arena, mount);
        }
        Err(error) => return Err(unmount_failure(error, mount)),
    };
    if files_in_logs > 0 {
        let files = text::count(files_in_logs, "file");
        output::print_message(&format!(
            "{files} in logs: other hosts write to these files, and the last close makes them plain"
        ));
    }
    if args.discard {
        output::print_message(&format!("dropped {}", describe_undrained(&status)));
    } else if !args.quiet {
        let kept_bytes = args.keep_held.then_some(status.held_bytes);
        output::print_message(&summarize(mount, &waited, kept_bytes));
    }
    Ok(DONE)
}

/// Returns the failure of an unmount, with the message of firnd. If the mount is gone, the unmount is partly done, and
/// data is left. If the mount still exists, firnd refused.
pub(super) fn unmount_failure(error: ClientError, mount: &Mount) -> Failure {
    match error {
        ClientError::Refused { message, .. } if !is_mounted(mount) => Failure::new(PARTLY, message),
        error => error.into(),
    }
}

/// Returns a sentence about an unmount. `kept_bytes` is how much remains in memory at the user's request. `None` means
/// that everything was drained, that is, written to the backing.
fn summarize(mount: &Mount, waited: &WaitSummary, kept_bytes: Option<u64>) -> String {
    let point = text::path(&mount.mount_point);
    let backing = text::path(&mount.backing);
    match kept_bytes {
        Some(0) => format!("unmounted {point}; {backing} already had all its data"),
        Some(kept_bytes) => {
            let kept = text::bytes(kept_bytes);
            format!(
                "unmounted {point}; {kept} stay in memory for {backing}: mount it again, or run `firn recover {backing}`"
            )
        }
        None if waited.files > 0 => format!(
            "unmounted {point}; everything is drained to {backing}: {} were left to write, {}",
            waited.amount_text(),
            waited.time_text()
        ),
        None => format!("unmounted {point}; everything is drained to {backing}"),
    }
}

/// Asks the user whether the data that `data` describes may be dropped. Fails if the user declines, or if there is no
/// terminal. If the user declines, the failure contains `kept_state`, which says where the data still is.
pub(super) fn confirm_discard(data: &str, kept_state: &str) -> Result<(), Failure> {
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        let message = format!("--discard would drop {data}: add --yes to confirm");
        return Err(Failure::new(USAGE, message));
    }
    output::print_message(&format!(
        "this drops {data} for good. Type yes to continue:"
    ));
    let mut answer = String::new();
    let read_result = io::stdin().lock().read_line(&mut answer);
    if read_result.is_ok() && answer.trim() == "yes" {
        return Ok(());
    }
    let message = format!("nothing was dropped, and {kept_state}");
    Err(Failure::new(FAILED, message))
}

/// Returns words for the data that a mount holds and its backing lacks.
fn describe_undrained(status: &Status) -> String {
    let bytes = text::bytes(status.held_bytes + status.lost_file_bytes);
    let file_count = status.held_files;
    let plural = if file_count == 1 { "" } else { "s" };
    let backing = text::path(status.backing.as_path());
    format!("{bytes} in {file_count} file{plural} that {backing} does not have")
}

/// Returns the failure of `--discard` for a mount whose firnd was killed, with the commands that discard its data.
fn dead_mount_failure(mount: &Mount) -> Failure {
    let point = text::path(&mount.mount_point);
    let backing = text::path(&mount.backing);
    let message = format!(
        "the firnd of {point} was killed; nothing that it held was dropped: run `firn umount {point}`, then `firn recover --discard {backing}`"
    );
    Failure::new(FAILED, message)
}

/// Waits until firnd has closed the backing, which the caller may want to unmount next.
pub(super) fn wait_for_end(firnd: &Process, is_forced: bool) {
    // A forced unmount has a timeout: users force an unmount when a server hangs, and firnd may hang there too.
    let timeout = is_forced.then_some(FORCED_END_TIMEOUT);
    let has_ended = firnd.wait(timeout);
    if !has_ended {
        let pid = firnd.id;
        output::print_message(&format!(
            "firnd (process {pid}) has not ended yet: it may still use the backing"
        ));
    }
}

/// Returns whether the mount is still in the kernel's table. Returns true if the table cannot be read.
fn is_mounted(mount: &Mount) -> bool {
    firn_client::mounts().map_or(true, |mounts| mounts.contains(mount))
}

/// Removes a mount after its firnd (the daemon) was killed. Fails with [`PARTLY`], because the arena (the file in
/// memory) remains, or is not where it is expected.
///
/// A stub tree, a mount without FUSE made of empty files that stand for the real ones, is not removed. That is
/// [`PARTLY`], too.
fn remove_dead_mount(mount: &Mount) -> Result<u8, Failure> {
    // The stub files of a dead tree hold names that the backing may lack, so the tree is not removed.
    if mount.is_tree {
        let prefix = text::path(&mount.mount_point);
        let backing = text::path(&mount.backing);
        let text = format!(
            "the firnd of the stub tree at {prefix} was killed, and the tree holds names that are not in the backing: mount it again (`firn mount --frontend=preload {backing} {prefix}`), or create them there with `firn recover {backing}`"
        );
        return Err(Failure::new(PARTLY, text));
    }
    let point = mount.mount_point.as_path();
    if rustix::mount::unmount(point, UnmountFlags::DETACH).is_err() {
        unmount_by_helper(point)?;
    }
    let arena = mount.files().arena;
    output::print_message(&format!(
        "the mount at {} was dead, because its firnd was killed: it is removed",
        text::path(point)
    ));
    if !arena.exists() {
        return Err(Failure::new(PARTLY, missing_arena_message(mount)));
    }
    report_remaining_arena(&arena, mount)
}

/// Returns a message for a dead mount whose arena is not where it is expected. A killed firnd leaves its arena, so the
/// arena must be in another directory.
fn missing_arena_message(mount: &Mount) -> String {
    let dir = text::path(&mount.runtime_dir);
    let backing = text::path(&mount.backing);
    format!(
        "its arena is not in {dir}, but in the FIRN_RUNTIME_DIR or arena-dir of the mount; to drain its data, run `firn \
        recover {backing}` with the same setting"
    )
}

/// Reports the data that is left in the arena. Returns [`DONE`] if no arena is left, and fails with [`PARTLY`]
/// otherwise.
fn report_remaining_arena(arena: &Path, mount: &Mount) -> Result<u8, Failure> {
    if !arena.exists() {
        return Ok(DONE);
    }
    let remaining = match firn_daemon::check(arena) {
        Ok(report) => text::bytes(report.held_bytes),
        Err(_) => "data".to_owned(),
    };
    let arena = text::path(arena);
    let backing = text::path(&mount.backing);
    let text = format!(
        "{remaining} left in {arena}: to drain them, run `firn recover {backing}`, or mount again"
    );
    Err(Failure::new(PARTLY, text))
}

/// Unmounts with fusermount3, the helper of fuse3, which may do so for users other than root. The mount point is
/// detached at once, even if files are open (`-z`).
fn unmount_by_helper(point: &Path) -> Result<(), Failure> {
    let failure = |reason: String| {
        Failure::new(
            FAILED,
            format!("cannot unmount {}: {reason}", text::path(point)),
        )
    };
    let mut helper = Command::new("fusermount3");
    helper.arg("-uz").arg(point);
    let limits = Limits {
        input: b"",
        output_bytes_max: 4096,
        excess: ExcessOutput::Discard,
        deadline: Instant::now() + HELPER_TIMEOUT,
    };
    match firn_process::run(helper, limits) {
        Ok(ended_helper) if ended_helper.status.success() => Ok(()),
        Ok(ended_helper) => Err(failure(ended_helper.text())),
        Err(error @ RunError::Start(_)) => Err(failure(format!(
            "fusermount3: {error} (install the package fuse3)"
        ))),
        Err(error) => Err(failure(format!("fusermount3: {error}"))),
    }
}
