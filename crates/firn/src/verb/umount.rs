//! `firn umount`.

use std::path::{Path, PathBuf};
use std::process::Command as Process;

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};
use firn_client::{ClientError, Connection, Mount, Place};
use firn_format::protocol::Request;
use rustix::mount::UnmountFlags;

use crate::failure::{DONE, FAILED, Failure, PARTLY, USAGE};
use crate::output;
use crate::progress::Meter;
use crate::text;
use crate::verb::Verb;

pub const VERB: Verb = Verb {
    name: "umount",
    about: "Drain a mount and unmount it",
    long: "Fails, and leaves the mount as it is, while files are open below it or the backing does not take the \
           data. A mount whose firnd was killed is taken away; its data stays in the arena.",
    examples: &[
        ("firn umount /ckpt", "when all of it is in the backing"),
        ("firn umount --force /ckpt", "now: what cannot be drained stays in the arena for `firn recover`"),
    ],
    exits: &[
        (0, "unmounted, everything is in the backing"),
        (1, "failed; the mount still stands"),
        (3, "unmounted, but data is left in the arena: mount again or `firn recover BACKING`"),
        (10, "not a firn mount"),
        (11, "files below the mount point are in use"),
    ],
    args: UmountArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct UmountArgs {
    /// The mount point (or the backing).
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    path: PathBuf,
    /// Unmount even if files are open or data cannot be drained; it stays in the arena.
    #[arg(short, long)]
    force: bool,
    /// Do not drain: what is held stays in the arena, and the next mount of the same backing has it.
    #[arg(long)]
    keep_held: bool,
}

fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = UmountArgs::from_arg_matches(matches)?;
    let Place { mount, relative } = firn_client::find(&args.path)?;
    if !relative.is_empty() {
        let (path, top) = (text::path(&args.path), mount.mount_point.display());
        return Err(Failure::new(
            USAGE,
            format!("{path} is inside the mount at {top}: say `firn umount {top}`"),
        ));
    }
    match Connection::open(&mount) {
        Ok(mut connection) => end(&mount, &mut connection, &args),
        Err(ClientError::Dead { .. }) => detach(&mount),
        Err(error) => Err(error.into()),
    }
}

fn end(mount: &Mount, connection: &mut Connection, args: &UmountArgs) -> Result<u8, Failure> {
    let arena = PathBuf::from(connection.status()?.arena);
    let mut meter = Meter::new();
    let request = Request::Unmount { force: args.force, keep_held: args.keep_held };
    let result = connection.wait(&request, &mut |p| meter.show(p.bytes_left, p.files_left, &p.phase));
    drop(meter);
    match result {
        Ok(()) => Ok(DONE),
        // firnd has the last word; whether the mount still stands tells a refusal from an end with data left.
        Err(ClientError::Refused { message, .. }) if !stands(mount) => Err(Failure::new(PARTLY, message)),
        // A signal may have ended it meanwhile. It removes an arena in which nothing is left.
        Err(ClientError::Gone { .. }) if !stands(mount) => left_in(&arena, mount),
        Err(error) => Err(error.into()),
    }
}

fn stands(mount: &Mount) -> bool {
    firn_client::mounts().map_or(true, |mounts| mounts.contains(mount))
}

/// Takes a dead mount out of the tree.
fn detach(mount: &Mount) -> Result<u8, Failure> {
    if mount.is_tree {
        let (prefix, backing) = (mount.mount_point.display(), mount.backing.display());
        let why = format!(
            "the firnd of the stub tree at {prefix} was killed, and the tree holds names that are not in the backing: mount it again (`firn mount --door=preload {backing} {prefix}`), or carry them over with `firn recover {backing}`"
        );
        return Err(Failure::new(PARTLY, why));
    }
    let point = mount.mount_point.as_path();
    if rustix::mount::unmount(point, UnmountFlags::DETACH).is_err() {
        fusermount(point)?;
    }
    let arena = mount.files().arena;
    output::say(&format!("the mount at {} was dead (firnd was killed) and is taken away", point.display()));
    left_in(&arena, mount)
}

/// How it ended, by what is left.
fn left_in(arena: &Path, mount: &Mount) -> Result<u8, Failure> {
    if !arena.exists() {
        return Ok(DONE);
    }
    let held =
        firn_daemon::check(arena).map_or_else(|_| "data".to_owned(), |report| text::bytes(report.held_bytes));
    let backing = mount.backing.display();
    let hint = format!("run `firn recover {backing}`, or mount it again, to drain it");
    Err(Failure::new(PARTLY, format!("{held} is left in {}: {hint}", arena.display())))
}

/// Users other than root unmount through fuse3's helper.
fn fusermount(point: &Path) -> Result<(), Failure> {
    let failed = |why: String| Failure::new(FAILED, format!("cannot take {} away: {why}", point.display()));
    let output = Process::new("fusermount3").arg("-uz").arg(point).output();
    let output =
        output.map_err(|error| failed(format!("fusermount3: {error} (install the package fuse3)")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}
