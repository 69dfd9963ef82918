//! The log of firnd, the process that serves a mount: each event is a line on standard error, which is a log file if
//! firnd runs in the background.
//!
//! A firnd in the background also sends events of level `info` and above to the host's system log, because the log file
//! is lost with the host's memory.
//!
//! Promises
//! * A line that cannot be written (a full file system, a limit on file sizes, a closed pipe) is lost and counted. The
//!   next line that can be written says how many lines are missing. Nothing else fails.
//! * An event is one write of one complete line.

pub(crate) mod events;
mod system;

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_config::{LogLevel, Options};
use firn_format::quote::{is_printable, printable, quoted_path};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use system::SystemLog;

/// A log longer than this, in bytes, is truncated by the next mount.
const LOG_BYTES_MAX: u64 = 8 << 20;

/// The counts for standard error, of which a process has one.
static STDERR_COUNTS: LineCounts = LineCounts::new();

/// Returns the number of lines that could not be written since the start of this process.
pub(crate) fn lines_lost() -> u64 {
    STDERR_COUNTS.lost.load(Ordering::Relaxed)
}

/// Redirects stdout and stderr to the log file, and stdin to /dev/null, for a process in the background. A log that is
/// longer than [`LOG_BYTES_MAX`] is truncated first.
pub(crate) fn detach_stdio(log: &Path) -> io::Result<()> {
    let null = File::open("/dev/null")?;
    let is_too_long = log
        .metadata()
        .is_ok_and(|metadata| metadata.len() > LOG_BYTES_MAX);
    let flags = libc::O_NOFOLLOW | if is_too_long { libc::O_TRUNC } else { 0 };
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .custom_flags(flags)
        .open(log)?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&log)?;
    rustix::stdio::dup2_stderr(&log)?;
    Ok(())
}

/// Sends events to stderr.
pub(crate) fn start(options: &Options) {
    let lines = tracing_subscriber::registry().with(stderr_layer(options.log_level));
    install_subscriber(lines.with(events::layer()));
}

/// Sends events to stderr, and events of `info` and above to the system log if `options` name one.
pub(crate) fn start_in_background(options: &Options, mount_point: &Path) {
    let lines = tracing_subscriber::registry()
        .with(stderr_layer(options.log_level))
        .with(events::layer());
    let Some(socket) = options.system_log.clone() else {
        return install_subscriber(lines);
    };
    match SystemLog::new(socket, quoted_path(mount_point)) {
        Ok(log) => install_subscriber(lines.with(system_layer(log, options.log_level))),
        Err(error) => {
            install_subscriber(lines);
            tracing::warn!(%error, "cannot use the system log: events are only in the log file");
        }
    }
}

fn install_subscriber(subscriber: impl SubscriberInitExt) {
    // A second mount in one process, as in tests, uses the log of the first.
    let _ = subscriber.try_init();
}

fn stderr_layer<S>(level: LogLevel) -> impl Layer<S>
where
    S: tracing::Subscriber + for<'span> tracing_subscriber::registry::LookupSpan<'span>,
{
    let terminal = rustix::termios::isatty(rustix::stdio::stderr());
    tracing_subscriber::fmt::layer()
        .with_ansi(terminal)
        // The library reports such errors with `eprintln!`, which panics if stderr cannot be written.
        .log_internal_errors(false)
        .with_writer(StderrLines { terminal })
        .with_filter(filter(level))
}

/// Returns the layer for the system log; its lines have no time, because the system log adds it.
fn system_layer<S>(log: SystemLog, level: LogLevel) -> impl Layer<S>
where
    S: tracing::Subscriber + for<'span> tracing_subscriber::registry::LookupSpan<'span>,
{
    // Lower levels have a line for each request, which would fill the host's disk.
    let level = level.min(LogLevel::Info);
    tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .log_internal_errors(false)
        .with_writer(log)
        .with_filter(filter(level))
}

/// Returns the filter of a level. The FUSE crate has an event for each request, which only `trace` shows.
fn filter(level: LogLevel) -> EnvFilter {
    let fuser = if level == LogLevel::Trace {
        "debug"
    } else {
        "warn"
    };
    EnvFilter::new(format!("{},fuser={fuser}", level.as_str()))
}

/// Numbers of lines that could not be written.
struct LineCounts {
    /// Lost lines since the start of the process.
    lost: AtomicU64,
    /// Lost lines since the last line that was written.
    lost_since_written: AtomicU64,
}

impl LineCounts {
    const fn new() -> Self {
        Self {
            lost: AtomicU64::new(0),
            lost_since_written: AtomicU64::new(0),
        }
    }

    /// Writes all of `line`, or counts it as lost.
    fn write(&self, to: &mut impl Write, line: &[u8]) {
        let missing = self.lost_since_written.swap(0, Ordering::Relaxed);
        let written = if missing == 0 {
            to.write_all(line)
        } else {
            // Part of a lost line may be in the log, so the note begins on a new line.
            let note = format!("\n({missing} lines before this one could not be written)\n");
            to.write_all(&[note.as_bytes(), line].concat())
        };
        if written.is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
            self.lost_since_written
                .fetch_add(missing + 1, Ordering::Relaxed);
        }
    }
}

/// Standard error as a writer of whole events.
#[derive(Clone, Copy)]
struct StderrLines {
    /// Standard error is a terminal, so events have colours.
    terminal: bool,
}

impl<'a> MakeWriter<'a> for StderrLines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        *self
    }
}

/// Returns the line with control characters escaped, so that a file's name can neither break it nor control a terminal.
fn escape_control_characters(line: &[u8]) -> Cow<'_, [u8]> {
    let text = String::from_utf8_lossy(line.strip_suffix(b"\n").unwrap_or(line));
    if is_printable(&text) {
        return Cow::Borrowed(line);
    }
    Cow::Owned((printable(&text) + "\n").into_bytes())
}

impl Write for StderrLines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // Colours are control characters themselves; with them, tracing-subscriber escapes the fields.
        let escaped = if self.terminal {
            Cow::Borrowed(line)
        } else {
            escape_control_characters(line)
        };
        STDERR_COUNTS.write(&mut io::stderr().lock(), &escaped);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes `room` bytes, then fails as a full file system does.
    struct FullFile {
        taken: Vec<u8>,
        room: usize,
    }

    impl Write for FullFile {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            if self.room == 0 {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            let len = data.len().min(self.room);
            self.room -= len;
            self.taken.extend_from_slice(&data[..len]);
            Ok(len)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_of_the_log_is_one_line_of_printable_characters() {
        assert_eq!(
            *escape_control_characters(b"INFO path=a\n"),
            *b"INFO path=a\n"
        );
        let escaped = escape_control_characters(b"INFO path=a\nINFO forged\x1b[2J\n");
        assert_eq!(
            *escaped,
            *br"INFO path=a\nINFO forged\x1b[2J"
                .iter()
                .chain(b"\n")
                .copied()
                .collect::<Vec<u8>>()
        );
    }

    #[test]
    fn regression_a_line_that_cannot_be_written_is_counted_and_the_next_one_tells() {
        let lines = LineCounts::new();
        let mut file = FullFile {
            taken: Vec::new(),
            room: 10,
        };
        lines.write(&mut file, b"first\n");
        assert_eq!(lines.lost.load(Ordering::Relaxed), 0);
        lines.write(&mut file, b"second\n");
        lines.write(&mut file, b"third\n");
        assert_eq!(lines.lost.load(Ordering::Relaxed), 2);
        file.room = 1000;
        lines.write(&mut file, b"fourth\n");
        lines.write(&mut file, b"fifth\n");
        let text = String::from_utf8(file.taken).unwrap();
        assert_eq!(
            text,
            "first\nseco\n(2 lines before this one could not be written)\nfourth\nfifth\n"
        );
        assert_eq!(lines.lost.load(Ordering::Relaxed), 2);
    }
}
