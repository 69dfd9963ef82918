//! The table of all kinds of events of a mount, for `firn events` and `firn report`.
//!
//! An event is a `tracing` event with the target [`TARGET`], a field `kind`, and the fields of its kind. So each event
//! is a line of the log. firnd, the process that serves the mount, also stores each event as a line of JSON, and in the
//! record of the run.

/// `tracing` target of all events.
pub const TARGET: &str = "firn::event";

/// A kind of event.
#[derive(Clone, Copy, Debug)]
pub struct EventKind {
    /// Name of the kind.
    pub kind: &'static str,
    /// What happened, in a sentence.
    pub help: &'static str,
    /// Fields of the kind: the name, with its unit last, and the meaning.
    pub fields: &'static [(&'static str, &'static str)],
}

/// All kinds of events.
pub static KINDS: &[EventKind] = &[
    EventKind {
        kind: "mounted",
        help: "Programs see the mount.",
        fields: &[
            ("backing", "directory of the files"),
            ("arena_bytes", "size of the arena"),
        ],
    },
    EventKind {
        kind: "taken_over",
        help: "firnd uses an arena that an earlier firnd left.",
        fields: &[("epoch", "number of firnds that the arena has had")],
    },
    EventKind {
        kind: "recovered",
        help: "firnd recovered data that an earlier firnd held.",
        fields: &[
            ("recovered_bytes", "bytes of files that were found"),
            ("lost_file_bytes", "bytes whose file is not in the backing"),
        ],
    },
    EventKind {
        kind: "arena_full",
        help: "Writers wait for room in the arena.",
        fields: &[
            ("waiting_writers", "number of writers that wait"),
            ("held_bytes", "bytes that are not in the backing"),
        ],
    },
    EventKind {
        kind: "arena_has_room",
        help: "No writer waits any more.",
        fields: &[("waited_seconds", "time since the first writer waited")],
    },
    EventKind {
        kind: "backing_failed",
        help: "A write to the backing failed. The data remains in memory, and the write is retried.",
        fields: &[
            ("path", "file of the newest failed write"),
            ("errno", "number of the error"),
            ("text", "what happened"),
        ],
    },
    EventKind {
        kind: "backing_works",
        help: "Writes to the backing succeed again.",
        fields: &[("failed_seconds", "time since the first write failed")],
    },
    EventKind {
        kind: "error_given_up",
        help: "An error was reported to the programs that waited for room.",
        fields: &[("count", "reports since the last event of this kind")],
    },
    EventKind {
        kind: "committed",
        help: "A transaction was decided: its changes will be in the backing, whatever happens.",
        fields: &[
            (
                "scope",
                "directory of the transaction, below the mount point",
            ),
            ("id", "number of the transaction"),
        ],
    },
    EventKind {
        kind: "aborted",
        help: "A transaction was undone.",
        fields: &[
            (
                "scope",
                "directory of the transaction, below the mount point",
            ),
            ("id", "number of the transaction; absent if it had none yet"),
        ],
    },
    EventKind {
        kind: "unmounted",
        help: "The mount has ended.",
        fields: &[("held_bytes", "bytes that remain in the arena")],
    },
];

/// Returns the kind of this name.
pub fn find(kind: &str) -> Option<&'static EventKind> {
    KINDS.iter().find(|event| event.kind == kind)
}
