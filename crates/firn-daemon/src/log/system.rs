//! The system log: sends events of firnd (the process that serves a mount) in the background as datagrams to the host's
//! syslog socket.
//!
//! The log file is in the host's memory and lost after a reboot, which is when it is needed. journald and the syslog
//! daemons store on disk what they get at `/dev/log`. All of them accept a line of RFC 3164 (5.4) without a time.
//!
//! Promises
//! * No event waits for the system log. An event that it does not take at once is dropped and counted. Before the next
//!   event that it takes, a message says how many are missing.
//! * If the system log is absent or restarts, the events of that time are lost; nothing else fails.
//! * A line has at most [`LINE_BYTES_MAX`] and only printable characters.

use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_format::quote::printable;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// Limit of a line in bytes: rsyslog cuts at 8 KiB by default, journald at 48 KiB.
const LINE_BYTES_MAX: usize = 8000;
/// The facility for system daemons (RFC 3164, table 1).
const FACILITY_DAEMON: u8 = 3;

/// The host's system log, for the events of one mount.
#[derive(Clone)]
pub(super) struct SystemLog {
    shared: Arc<SyslogSocket>,
}

/// The socket, and what all writers of events share.
struct SyslogSocket {
    /// The socket is not connected, so each send finds the current system log, even after its restart.
    socket: UnixDatagram,
    path: PathBuf,
    /// Begins each message, because many mounts of a host use one system log.
    mount_point: String,
    /// Number of events that were dropped since the last one that was sent.
    dropped: AtomicU64,
}

impl SystemLog {
    /// Returns the log at the socket `path`, which need not exist yet.
    pub(super) fn new(path: PathBuf, mount_point: String) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        let shared = SyslogSocket {
            socket,
            path,
            mount_point,
            dropped: AtomicU64::new(0),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }
}

impl SyslogSocket {
    /// Sends one message, or counts it as dropped.
    fn log(&self, level: Level, message: &str) {
        let dropped_before = self.dropped.swap(0, Ordering::Relaxed);
        let is_count_reported = dropped_before == 0
            || self.send(
                Level::WARN,
                &format!("WARN {dropped_before} messages before this one were dropped"),
            );
        if !is_count_reported || !self.send(level, message) {
            let unreported = if is_count_reported { 0 } else { dropped_before };
            self.dropped.fetch_add(unreported + 1, Ordering::Relaxed);
        }
    }

    /// Returns whether the system log took the message. An absent or full system log is not an error of the mount.
    fn send(&self, level: Level, message: &str) -> bool {
        let priority = FACILITY_DAEMON * 8 + severity(level);
        let pid = std::process::id();
        let mut line = format!("<{priority}>firnd[{pid}]: {}: {message}", self.mount_point);
        line.truncate(line.floor_char_boundary(LINE_BYTES_MAX));
        self.socket.send_to(line.as_bytes(), &self.path).is_ok()
    }
}

/// Returns the severity of a level (RFC 3164, table 2).
fn severity(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// Receives the text of one event and sends it.
pub(super) struct EventWriter {
    shared: Arc<SyslogSocket>,
    level: Level,
}

impl<'a> MakeWriter<'a> for SystemLog {
    type Writer = EventWriter;

    fn make_writer(&'a self) -> EventWriter {
        EventWriter {
            shared: Arc::clone(&self.shared),
            level: Level::INFO,
        }
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> EventWriter {
        EventWriter {
            level: *event.level(),
            ..self.make_writer()
        }
    }
}

impl Write for EventWriter {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let message = String::from_utf8_lossy(text);
        self.shared.log(self.level, &printable(message.trim()));
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receive(socket: &UnixDatagram) -> String {
        let mut buffer = vec![0; 2 * LINE_BYTES_MAX];
        let len = socket.recv(&mut buffer).expect("a message");
        String::from_utf8(buffer[..len].to_vec()).expect("text")
    }

    #[test]
    fn a_message_has_its_priority_process_and_mount_point() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let host = UnixDatagram::bind(&path).unwrap();
        let log = SystemLog::new(path, "/ckpt".to_owned()).unwrap();
        log.shared.log(Level::ERROR, "ERROR no space");
        let pid = std::process::id();
        assert_eq!(
            receive(&host),
            format!("<27>firnd[{pid}]: /ckpt: ERROR no space")
        );
    }

    #[test]
    fn a_message_is_one_bounded_line_of_printable_characters() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let host = UnixDatagram::bind(&path).unwrap();
        let log = SystemLog::new(path, "/ckpt".to_owned()).unwrap();
        let mut writer = log.make_writer();
        writer.write_all(b"a\n<0>forged\x1b[2J\n").unwrap();
        assert!(receive(&host).ends_with(r": a\n<0>forged\x1b[2J"));
        writer
            .write_all("é".repeat(LINE_BYTES_MAX).as_bytes())
            .unwrap();
        assert!(receive(&host).len() <= LINE_BYTES_MAX);
    }

    #[test]
    fn a_full_system_log_costs_messages_and_no_time_and_is_told_how_many() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let host = UnixDatagram::bind(&path).unwrap();
        let log = SystemLog::new(path, "/ckpt".to_owned()).unwrap();
        // Without a reader: a send that waits would hang here.
        let mut sent = 0;
        while log.shared.dropped.load(Ordering::Relaxed) == 0 {
            log.shared.log(Level::INFO, "INFO filler");
            sent += 1;
        }
        log.shared.log(Level::INFO, "INFO dropped too");
        for _ in 1..sent {
            assert!(receive(&host).ends_with("INFO filler"));
        }
        log.shared.log(Level::INFO, "INFO taken");
        assert!(receive(&host).ends_with("WARN 2 messages before this one were dropped"));
        assert!(receive(&host).ends_with("INFO taken"));
    }

    #[test]
    fn a_system_log_that_begins_later_gets_what_comes_then() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = SystemLog::new(path.clone(), "/ckpt".to_owned()).unwrap();
        log.shared.log(Level::INFO, "INFO before");
        let host = UnixDatagram::bind(&path).unwrap();
        log.shared.log(Level::INFO, "INFO after");
        assert!(receive(&host).ends_with("WARN 1 messages before this one were dropped"));
        assert!(receive(&host).ends_with("INFO after"));
    }
}
