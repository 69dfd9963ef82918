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
use firn_client::paths::RuntimeFiles;
use firn_client::{ClientError, Mount};
use serde_json::Value;

use crate::failure::{DONE, FAILED, Failure, NO_MOUNT};
use crate::output;
use crate::text;
use crate::verb::Verb;

/// Interval at which `--follow` looks for new events.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(500);
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
        Some(path) => vec![reader_for_path(path)?],
        None => firn_client::mounts()?
            .iter()
            .map(EventReader::for_mount)
            .collect(),
    };
    let mut events = Vec::new();
    for reader in &mut readers {
        events.extend(reader.read_all()?);
    }
    print_by_time(events)?;
    if !args.follow {
        return Ok(DONE);
    }
    loop {
        sleep(FOLLOW_INTERVAL);
        let mut new_events = Vec::new();
        for reader in &mut readers {
            new_events.extend(reader.read_new()?);
        }
        print_by_time(new_events)?;
    }
}

/// Prints events in the order of time. All times are in UTC and equally long, so their texts can be compared.
fn print_by_time(mut events: Vec<Value>) -> Result<(), Failure> {
    events.sort_by(|a, b| a["time"].as_str().cmp(&b["time"].as_str()));
    events.iter().try_for_each(output::print_json_line)
}

/// Returns the reader of a mount's events. If `path` is on a mount, it is that mount. Otherwise `path` is a backing,
/// and the mount is its last one on this host. Fails if that has left no events.
fn reader_for_path(path: &Path) -> Result<EventReader, Failure> {
    match firn_client::find(path) {
        Ok(location) => return Ok(EventReader::for_mount(&location.mount)),
        Err(ClientError::NoMount { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let shown_path = text::path(path);
    let backing = path
        .canonicalize()
        .map_err(|error| Failure::new(FAILED, format!("{shown_path}: {error}")))?;
    let event_file = RuntimeFiles::for_backing(&backing, None)?.events;
    if !event_file.exists() {
        let text = format!(
            "{shown_path} is not mounted, and no events of an earlier mount are kept on this host"
        );
        return Err(Failure::new(NO_MOUNT, text));
    }
    let own_uid = rustix::process::geteuid().as_raw();
    Ok(EventReader::new(event_file, own_uid))
}

/// Reads the event file of one mount.
struct EventReader {
    /// Path of the event file.
    path: PathBuf,
    /// The user id that must own the file.
    uid: u32,
    /// The open file. `None` means that it is not open yet, or does not exist.
    file: Option<BufReader<File>>,
    /// The beginning of a line whose end is not written yet.
    partial_line: Vec<u8>,
}

impl EventReader {
    /// Returns a reader for the event file at `path`, which it opens at the first read.
    fn new(path: PathBuf, uid: u32) -> Self {
        Self {
            path,
            uid,
            file: None,
            partial_line: Vec::new(),
        }
    }

    fn for_mount(mount: &Mount) -> Self {
        Self::new(mount.files().events, mount.user_id)
    }

    /// Returns all events: those of the previous file, and those of the present one.
    fn read_all(&mut self) -> Result<Vec<Value>, Failure> {
        let previous_path = self.path.with_extension("events.old");
        let mut previous_reader = Self::new(previous_path, self.uid);
        let mut events = previous_reader.read_new()?;
        events.extend(self.read_new()?);
        Ok(events)
    }

    /// Returns the events that were appended since the last call. A new file is read from its beginning, after the rest
    /// of the previous one.
    fn read_new(&mut self) -> Result<Vec<Value>, Failure> {
        let mut events = Vec::new();
        self.read_lines(&mut events)?;
        if self.is_replaced() {
            self.file = None;
            self.partial_line.clear();
            self.read_lines(&mut events)?;
        }
        Ok(events)
    }

    /// Returns whether the path leads to another file than the open one, because firnd has begun a new file.
    fn is_replaced(&self) -> bool {
        let Some(open_file) = &self.file else {
            return false;
        };
        let Ok(metadata_at_path) = self.path.symlink_metadata() else {
            return false;
        };
        let Ok(open_metadata) = open_file.get_ref().metadata() else {
            return true;
        };
        (open_metadata.dev(), open_metadata.ino())
            != (metadata_at_path.dev(), metadata_at_path.ino())
    }

    /// Reads the complete lines up to the end of the open file, and adds their events to `events`. An incomplete line
    /// is stored until its end is written.
    ///
    /// A line that is not a JSON object is skipped: a full file system cut it off, or another program wrote it.
    fn read_lines(&mut self, events: &mut Vec<Value>) -> Result<(), Failure> {
        let failed = |error: std::io::Error| {
            let file = text::path(&self.path);
            Failure::new(FAILED, format!("cannot read {file}: {error}"))
        };
        if self.file.is_none() {
            let file = open_event_file(&self.path, self.uid).map_err(failed)?;
            self.file = file.map(BufReader::new);
        }
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        loop {
            let remaining_bytes = LINE_BYTES_MAX.saturating_sub(self.partial_line.len() as u64);
            // If the line is too long, the read below gets no byte, and the line is dropped, so that it does not fill
            // the memory. The rest of the line is then read as a line of its own.
            let is_too_long = remaining_bytes == 0;
            let read_len = file
                .by_ref()
                .take(remaining_bytes)
                .read_until(b'\n', &mut self.partial_line)
                .map_err(failed)?;
            if read_len == 0 && !is_too_long {
                // This is the end of the file.
                return Ok(());
            }
            if self.partial_line.ends_with(b"\n") || is_too_long {
                if let Ok(event @ Value::Object(_)) = serde_json::from_slice(&self.partial_line) {
                    events.push(event);
                }
                self.partial_line.clear();
            }
        }
    }
}

/// Opens an event file. Returns `None` if it does not exist, and an error if `uid` does not own it.
fn open_event_file(path: &Path, uid: u32) -> std::io::Result<Option<File>> {
    // Another user may have put a symbolic link or a FIFO there: neither is followed or waited for.
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
        let text = "it is not a file of the user that mounted: check what it is, and remove it";
        return Err(std::io::Error::other(text));
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
        assert_eq!(kinds(reader.read_new().unwrap()), ["\"b\"", "\"c\""]);
        assert!(reader.read_new().unwrap().is_empty());
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
        assert!(reader.partial_line.len() as u64 <= LINE_BYTES_MAX);
    }
}
