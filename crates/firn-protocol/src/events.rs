//! The table of all kinds of events of a mount, for `firn events` and `firn report`.
//!
//! An event is a `tracing` event with the target [`TARGET`], a field `kind`, and the fields of its kind. So each event is
//! a line of the log. firnd also stores each event as a line of JSON, and in the record of the run.

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
        help: "An arena that an earlier firnd left is used again.",
        fields: &[("epoch", "lifetimes of firnd that the arena has seen")],
    },
    EventKind {
        kind: "recovered",
        help: "Data that an earlier firnd held is there again.",
        fields: &[
            ("recovered_bytes", "bytes of files that were found"),
            ("lost_file_bytes", "bytes whose file is not in the backing"),
        ],
    },
    EventKind {
        kind: "arena_full",
        help: "Writers wait for room in the arena.",
        fields: &[
            ("waiting_writers", "how many wait"),
            ("held_bytes", "bytes that are not in the backing"),
        ],
    },
    EventKind {
        kind: "arena_has_room",
        help: "No writer waits any more.",
        fields: &[("waited_seconds", "time since the first one waited")],
    },
    EventKind {
        kind: "backing_failed",
        help: "A write to the backing failed. The data stays in memory, and the write is tried again.",
        fields: &[
            ("path", "file of the newest error"),
            ("errno", "number of the error"),
            ("text", "what happened"),
        ],
    },
    EventKind {
        kind: "backing_works",
        help: "Writes to the backing succeed again.",
        fields: &[("failed_seconds", "time since the first one failed")],
    },
    EventKind {
        kind: "error_given_up",
        help: "An error was reported to the programs that waited for room.",
        fields: &[("count", "how often since the last event of this kind")],
    },
    EventKind {
        kind: "committed",
        help: "A transaction was decided: its changes will be in the backing, whatever happens.",
        fields: &[
            (
                "scope",
                "directory of the transaction, below the mount point",
            ),
            ("id", "its number"),
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
            ("id", "its number; absent: it had none yet"),
        ],
    },
    EventKind {
        kind: "unmounted",
        help: "The mount has ended.",
        fields: &[("held_bytes", "bytes that stay in the arena")],
    },
];

/// Returns the kind of this name.
pub fn find(kind: &str) -> Option<&'static EventKind> {
    KINDS.iter().find(|event| event.kind == kind)
}
