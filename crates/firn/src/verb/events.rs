//! `firn events`: prints what happened to mounts, as lines of JSON.
//!
//! firnd appends events to a file in the runtime directory. When the file is full, firnd renames it to `*.events.old`
//! and begins a new one.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read as _};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};
use firn_client::ClientError;
use firn_client::paths::RuntimeFiles;
use serde_json::Value;

use crate::failure::{DONE, FAILED, Failure, NOT_FIRN};
use crate::output;
use crate::text;
use crate::verb::Verb;

/// Interval at which `--follow` looks for new events.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Maximum size of a line in bytes. firnd writes shorter lines.
const LINE_BYTES_MAX: u64 = 256 << 10;

pub const VERB: Verb = Verb {
    name: "events",
    about: "Print what happened to a mount, as lines of JSON",
    long: "Each line is an object with `time` (UTC), `host`, `mount_point`, `kind` and the fields of its kind, whose \
           names end with the unit. There are events when a mount is made, taken over or ends, when the arena is full, \
           when the backing fails and works again, and at commits and aborts. docs/features/watching.md lists all \
           kinds. firnd stores the newest events, 8 MiB at most, in the runtime directory beside its log. They remain \
           after the mount has ended, until the host reboots.",
    examples: &[
        (
            "firn events /ckpt",
            "what happened to this mount, and to earlier mounts of its backing",
        ),
        (
            "firn events --follow /ckpt | jq -r 'select(.kind == \"backing_failed\")'",
            "print failures of the backing as they happen",
        ),
        ("firn events", "of all mounts, in the order of time"),
    ],
    exits: &[
        (0, "printed"),
        (1, "failed"),
        (10, "PATH is neither a mount nor a backing that was mounted"),
        (128, "plus the number of the signal that ended --follow"),
    ],
    args: EventsArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct EventsArgs {
    /// A mount point, anything below it, or a backing; without it, all mounts.
    #[arg(value_hint = ValueHint::AnyPath)]
    path: Option<PathBuf>,
    /// Also print new events as they happen, until Ctrl-C.
    #[arg(short, long)]
    follow: bool,
}

/// Prints all events so far, and with `--follow` also later ones until it is interrupted.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = EventsArgs::from_arg_matches(matches)?;
    let mut readers = match &args.path {
        Some(path) => vec![find(path)?],
        None => {
            let mounts = firn_client::mounts()?;
            let of_mount =
                |mount: &firn_client::Mount| EventReader::new(mount.files().events, mount.user_id);
            mounts.iter().map(of_mount).collect()
        }
    };
    let mut lines = Vec::new();
    for reader in &mut readers {
        lines.extend(reader.read_all()?);
    }
    print(lines)?;
    if !args.follow {
        return Ok(DONE);
    }
    loop {
        sleep(LOOK_EVERY);
        let mut lines = Vec::new();
        for reader in &mut readers {
            lines.extend(reader.read_more()?);
        }
        print(lines)?;
    }
}

/// Prints events in the order of time. All times are in UTC and equally long, so their texts can be compared.
fn print(mut lines: Vec<Value>) -> Result<(), Failure> {
    lines.sort_by(|a, b| a["time"].as_str().cmp(&b["time"].as_str()));
    lines.iter().try_for_each(output::print_json_line)
}

/// Returns the reader for the mount or the backing that `path` means.
fn find(path: &Path) -> Result<EventReader, Failure> {
    match firn_client::find(path) {
        Ok(place) => Ok(EventReader::new(
            place.mount.files().events,
            place.mount.user_id,
        )),
        Err(ClientError::NoMount { .. }) => {
            let backing = path
                .canonicalize()
                .map_err(|error| Failure::new(FAILED, format!("{}: {error}", text::path(path))))?;
            let events = RuntimeFiles::of(&backing, None)?.events;
            if !events.exists() {
                let why = format!(
                    "{} is not mounted, and no events of an earlier mount are kept on this host",
                    text::path(path)
                );
                return Err(Failure::new(NOT_FIRN, why));
            }
            let own = rustix::process::geteuid().as_raw();
            Ok(EventReader::new(events, own))
        }
        Err(error) => Err(error.into()),
    }
}

/// Reads the event file of one mount.
struct EventReader {
    /// Path of the event file.
    path: PathBuf,
    /// The user id that must own the file.
    uid: u32,
    /// The open file. `None` means that it is not open yet, or does not exist.
    open: Option<BufReader<File>>,
    /// The beginning of a line whose end is not written yet.
    begun: Vec<u8>,
}

impl EventReader {
    /// Returns a reader for the event file at `path`, which it opens at the first read.
    fn new(path: PathBuf, uid: u32) -> Self {
        Self {
            path,
            uid,
            open: None,
            begun: Vec::new(),
        }
    }

    /// Returns all events: those of the previous file, and those of the present one.
    fn read_all(&mut self) -> Result<Vec<Value>, Failure> {
        let old = self.path.with_extension("events.old");
        let mut before = Self::new(old, self.uid);
        let mut lines = before.read_more()?;
        lines.extend(self.read_more()?);
        Ok(lines)
    }

    /// Returns the events that were appended since the last call. A new file is read from its beginning, after the rest
    /// of the previous one.
    fn read_more(&mut self) -> Result<Vec<Value>, Failure> {
        let mut lines = Vec::new();
        self.read_lines(&mut lines)?;
        if self.is_begun_anew() {
            self.open = None;
            self.begun.clear();
            self.read_lines(&mut lines)?;
        }
        Ok(lines)
    }

    /// Returns whether firnd has begun a new file under the name.
    fn is_begun_anew(&self) -> bool {
        let Some(open) = &self.open else {
            return false;
        };
        let inode = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        let named = self.path.symlink_metadata().map(inode);
        named.is_ok_and(|named| open.get_ref().metadata().map(inode).ok() != Some(named))
    }

    /// Reads the complete lines up to the end of the open file. An incomplete line is stored until its end is written.
    fn read_lines(&mut self, lines: &mut Vec<Value>) -> Result<(), Failure> {
        let failed = |error: std::io::Error| {
            let file = text::path(&self.path);
            Failure::new(FAILED, format!("cannot read {file}: {error}"))
        };
        if self.open.is_none() {
            self.open = open(&self.path, self.uid)
                .map_err(failed)?
                .map(BufReader::new);
        }
        let Some(reader) = &mut self.open else {
            return Ok(());
        };
        loop {
            let room = LINE_BYTES_MAX.saturating_sub(self.begun.len() as u64);
            let mut bounded = reader.by_ref().take(room);
            let count = bounded.read_until(b'\n', &mut self.begun).map_err(failed)?;
            let is_whole = self.begun.ends_with(b"\n");
            if count == 0 && room > 0 {
                return Ok(());
            }
            if is_whole || room == 0 {
                // A line that is not a JSON object is skipped: a full file system cut it off, or another program
                // wrote it.
                lines.extend(
                    serde_json::from_slice::<Value>(&self.begun)
                        .ok()
                        .filter(Value::is_object),
                );
                self.begun.clear();
            }
        }
    }
}

/// Opens an event file. Returns `None` if it does not exist, and an error if `uid` does not own it.
fn open(path: &Path, uid: u32) -> std::io::Result<Option<File>> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits() as i32)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.uid() != uid {
        let why = "it is not a file of the user that mounted: check what it is, and remove it";
        return Err(std::io::Error::other(why));
    }
    Ok(Some(file))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_follower_sees_each_line_once_also_when_the_file_is_begun_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key.events");
        let mut file = File::create(&path).unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let mut reader = EventReader::new(path.clone(), uid);
        file.write_all(b"{\"kind\":\"a\"}\nnonsense\n{\"kind\":")
            .unwrap();
        let kinds = |lines: Vec<Value>| -> Vec<String> {
            lines.iter().map(|line| line["kind"].to_string()).collect()
        };
        assert_eq!(kinds(reader.read_all().unwrap()), ["\"a\""]);
        file.write_all(b"\"b\"}\n").unwrap();
        std::fs::rename(&path, path.with_extension("events.old")).unwrap();
        std::fs::write(&path, b"{\"kind\":\"c\"}\n").unwrap();
        assert_eq!(kinds(reader.read_more().unwrap()), ["\"b\"", "\"c\""]);
        assert!(reader.read_more().unwrap().is_empty());
        let mut all = EventReader::new(path, uid);
        assert_eq!(all.read_all().unwrap().len(), 3);
    }

    #[test]
    fn a_line_without_an_end_takes_bounded_memory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key.events");
        std::fs::write(&path, vec![b'x'; 3 * LINE_BYTES_MAX as usize]).unwrap();
        let mut reader = EventReader::new(path, rustix::process::geteuid().as_raw());
        assert!(reader.read_all().unwrap().is_empty());
        assert!(reader.begun.len() as u64 <= LINE_BYTES_MAX);
    }
}
