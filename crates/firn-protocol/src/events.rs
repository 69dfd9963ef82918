//! Kinds of events of a mount: the one table of what `firn events` and `firn report` tell.
//!
//! An event is a `tracing` event with the target [`TARGET`], the field `kind` and the fields of its kind. So it is a line of the
//! log, too. firnd keeps it besides as a line of JSON, and in the record of the run.

/// The target of events.
pub const TARGET: &str = "firn::event";

/// A kind of event.
#[derive(Clone, Copy, Debug)]
pub struct EventKind {
    /// Its name.
    pub kind: &'static str,
    /// What happened.
    pub help: &'static str,
    /// What it tells: names with their units last, and what they are.
    pub fields: &'static [(&'static str, &'static str)],
}

/// All kinds.
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

/// The kind of this name.
pub fn find(kind: &str) -> Option<&'static EventKind> {
    KINDS.iter().find(|one| one.kind == kind)
}
