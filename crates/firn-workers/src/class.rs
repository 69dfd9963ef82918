//! The kinds of work that firnd has threads for.

/// Topics of calls that may hang, so that those of others still find a thread: 500 files (docs/SEMANTICS.md,
/// S-error-11), each with calls by its name, calls by its inode and pages that are dropped.
pub const TOPICS_MAX: usize = 3 * 512;
/// Tasks of one topic that run at a time. More of them at once gain nothing on one file.
pub const TOPIC_TASKS_MAX: usize = 16;
/// Tasks that run at a time beside the first of each topic, over all topics. They are for speed only; without this
/// bound, a few files with many callers each would use all threads up when they hang.
pub const FURTHER_TASKS_MAX: usize = 64;

/// A kind of work, with threads of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Calls of the backing, which may hang, each with its topic: fsync, fallocate, lseek, copy_file_range, and
    /// whatever is requested while the threads of the transport are in calls that do not return.
    Call,
    /// Work that does not call the backing, and so goes on where every call hangs: stalled writes that found room.
    Memory,
    /// One task for each connection of the control socket: 64, and 8 more for requests of the status or the end.
    ControlClient,
    /// One task for each connection of the data socket, and for those that wait for one: enough for a process of each
    /// core of a large host.
    DataClient,
    /// Jobs that firnd does once or now and then; one of each kind at a time.
    Job,
}

impl Class {
    pub(crate) const ALL: [Self; 5] = [
        Self::Call,
        Self::Memory,
        Self::ControlClient,
        Self::DataClient,
        Self::Job,
    ];

    /// Threads at a time.
    pub const fn threads_max(self) -> usize {
        match self {
            Self::Call => TOPICS_MAX + FURTHER_TASKS_MAX,
            Self::Memory => 32,
            // Twice the seats, because the thread of a connection that just left may not have ended.
            Self::ControlClient => 2 * (64 + 8),
            Self::DataClient => 1024 + 16,
            Self::Job => 16,
        }
    }

    /// Name of the threads: at most 15 bytes (prctl(2), PR_SET_NAME).
    pub const fn thread_name(self) -> &'static str {
        match self {
            Self::Call => "firn-call",
            Self::Memory => "firn-work",
            Self::ControlClient => "firn-client",
            Self::DataClient => "firn-data",
            Self::Job => "firn-job",
        }
    }

    /// Size of a thread's stack, where the platform's default is more than is needed.
    pub(crate) const fn stack_bytes(self) -> Option<usize> {
        match self {
            // Its threads answer short questions, and there may be many.
            Self::DataClient => Some(256 << 10),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_has_its_place_and_a_name_that_the_kernel_takes() {
        for (index, class) in Class::ALL.into_iter().enumerate() {
            assert_eq!(class as usize, index);
            assert!(class.thread_name().len() <= 15);
        }
    }
}
