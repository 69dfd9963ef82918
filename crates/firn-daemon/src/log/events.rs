//! Stores the events of a mount, such as a commit, a full arena or a failure of the backing. An event is a message of
//! the log with the target [`TARGET`].
//!
//! Each event is a line of JSON in a file beside the log. The newest events are also in memory, for the record of the
//! run, a summary of the mount's life.
//!
//! Promises
//! * An event is one line and one write; it waits only for this host's memory.
//! * A file that is longer than [`FILE_BYTES_MAX`] gets the ending `.old` before the next event, and replaces the older
//!   file of that name.
//! * A line that cannot be written is lost; nothing else fails.

use std::collections::VecDeque;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use firn_format::quote::quoted_path;
use firn_protocol::events::{self, TARGET};
use firn_protocol::path::BytePath;
use firn_protocol::record::{EVENTS_MAX, EventRecord};
use parking_lot::Mutex;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// Limit of the file in bytes, which is about ten thousand events.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// The events of this process, which serves one mount.
static EVENT_STORE: Mutex<Option<EventStore>> = Mutex::new(None);

/// The events of a mount: their file, and the newest ones in memory.
struct EventStore {
    file: Option<File>,
    path: PathBuf,
    host: String,
    mount_point: BytePath,
    newest: VecDeque<EventRecord>,
    forgotten: u64,
}

/// Starts to store the events of a mount (such as a full arena) in the file `path`, and the newest ones in memory. If
/// the file cannot be opened, events are in memory only. Events before this call are not stored.
pub(crate) fn start(path: PathBuf, host: String, mount_point: BytePath) {
    let file = match open_event_file(&path) {
        Ok(file) => Some(file),
        Err(error) => {
            tracing::warn!(%error, file = %quoted_path(&path), "cannot keep events in a file");
            None
        }
    };
    *EVENT_STORE.lock() = Some(EventStore {
        file,
        path,
        host,
        mount_point,
        newest: VecDeque::new(),
        forgotten: 0,
    });
}

/// The events of the mount that are still in memory.
#[derive(Default)]
pub(crate) struct NewestEvents {
    pub(crate) events: Vec<EventRecord>,
    /// Number of older events that were dropped from memory.
    pub(crate) forgotten: u64,
}

/// Returns the newest events; none if events are not recorded.
pub(crate) fn newest() -> NewestEvents {
    match EVENT_STORE.lock().as_ref() {
        Some(store) => NewestEvents {
            events: store.newest.iter().cloned().collect(),
            forgotten: store.forgotten,
        },
        None => NewestEvents::default(),
    }
}

/// Opens the file of events to append to it. Only this user can read the file.
fn open_event_file(path: &PathBuf) -> io::Result<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

/// Returns the layer that receives the events of [`TARGET`].
pub(super) fn layer<S>() -> impl Layer<S>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
{
    EventLayer.with_filter(filter_fn(|metadata| metadata.target() == TARGET))
}

struct EventLayer;

impl<S: Subscriber> Layer<S> for EventLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields(Map::new());
        event.record(&mut fields);
        if let Some(store) = &mut *EVENT_STORE.lock() {
            store.store_event(fields.0);
        }
    }
}

impl EventStore {
    /// Stores one event, such as a commit or a full arena: appends it to the file of events, and to the newest events
    /// in memory. Beyond [`EVENTS_MAX`] events in memory, the oldest is dropped and counted in `forgotten`.
    ///
    /// `fields` are those of the log message. Without the text field `kind`, the message is no event.
    fn store_event(&mut self, mut fields: Map<String, Value>) {
        let Some(Value::String(kind)) = fields.remove("kind") else {
            return;
        };
        // Each event and its fields are documented in one table, which this check keeps complete.
        debug_assert!(
            events::find(&kind).is_some_and(|known| fields
                .keys()
                .all(|name| known.fields.iter().any(|(field, _)| field == name))),
            "{kind} {fields:?} is not in the table of events"
        );
        let now = SystemTime::now();
        self.write(now, &kind, &fields);
        let since_epoch = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        // In memory, the values of all fields are text.
        let text_fields = fields.into_iter().map(|(name, value)| match value {
            Value::String(text) => (name, text),
            other_type => (name, other_type.to_string()),
        });
        self.newest.push_back(EventRecord {
            unix_us: since_epoch.as_micros() as u64,
            kind,
            fields: text_fields.collect(),
        });
        if self.newest.len() > EVENTS_MAX {
            self.newest.pop_front();
            self.forgotten += 1;
        }
    }

    /// Appends one event to the file as a line of JSON; an error is ignored. A file that is longer than
    /// [`FILE_BYTES_MAX`] is first renamed to `.events.old`, in place of an earlier file of that name, and a new one is
    /// begun. `fields` are those of the event without its kind.
    fn write(&mut self, now: SystemTime, kind: &str, fields: &Map<String, Value>) {
        let is_too_long = |file: &File| {
            file.metadata()
                .is_ok_and(|metadata| metadata.len() > FILE_BYTES_MAX)
        };
        if self.file.as_ref().is_some_and(is_too_long) {
            let old_path = self.path.with_extension("events.old");
            // If the rename fails, the long file grows further.
            if std::fs::rename(&self.path, old_path).is_ok() {
                self.file = open_event_file(&self.path).ok();
            }
        }
        let Some(file) = &mut self.file else {
            return;
        };
        let mut event = Map::new();
        let time = humantime::format_rfc3339_millis(now).to_string();
        event.insert("time".into(), time.into());
        event.insert("host".into(), self.host.as_str().into());
        event.insert("mount_point".into(), self.mount_point.to_string().into());
        event.insert("kind".into(), kind.into());
        event.extend(fields.clone());
        let mut line = Value::Object(event).to_string();
        line.push('\n');
        // A line that cannot be written is lost; the mount must not fail for it.
        let _ = file.write_all(line.as_bytes());
    }
}

/// The fields of an event, except its message.
struct Fields(Map<String, Value>);

impl Fields {
    fn add_field(&mut self, field: &Field, value: impl Into<Value>) {
        if field.name() != "message" {
            self.0.insert(field.name().to_owned(), value.into());
        }
    }
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add_field(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add_field(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add_field(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add_field(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add_field(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add_field(field, format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn an_event_is_a_line_of_json_and_in_the_record() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key.events");
        start(path.clone(), "n1".into(), "/ckpt".into());
        let subscriber = tracing_subscriber::registry().with(layer());
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(
                target: TARGET,
                kind = "arena_full",
                waiting_writers = 3u64,
                held_bytes = 7u64,
                "writers wait"
            );
            tracing::info!(kind = "unmounted", "no event: another target");
        });
        let text = std::fs::read_to_string(path).unwrap();
        let line: Value = serde_json::from_str(text.trim_end()).unwrap();
        assert_eq!(line["host"], "n1");
        assert_eq!(line["mount_point"], "/ckpt");
        assert_eq!(line["kind"], "arena_full");
        assert_eq!(line["waiting_writers"], 3);
        assert!(line["time"].as_str().unwrap().ends_with('Z'), "{line}");
        let NewestEvents { events, forgotten } = newest();
        assert_eq!(events.len(), 1);
        assert_eq!(forgotten, 0);
        assert_eq!(events[0].fields["held_bytes"], "7");
    }
}
